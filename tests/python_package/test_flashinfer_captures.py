"""narrowfloat.compat.flashinfer: quantizers neither wait for a GPU nor copy from the host.

On the CPU: numbers do not become arrays of the host. On a GPU: each call is captured into a CUDA
graph, which a wait or a copy of plain memory ends, and replayed with other contents.
"""

from __future__ import annotations

from typing import Any

import pytest

import narrowfloat as nf
import narrowfloat.compat.flashinfer as fi
from narrowfloat._arrays import TorchMaker

torch = pytest.importorskip("torch", reason="torch is not installed; ./test.sh --with-torch")

X = torch.randn(128, 256, generator=torch.Generator().manual_seed(5)).bfloat16()
WEIGHT = X[1].clone()
S, BASE = 300.0, 1 / 2688
MASK = torch.tensor([16, 3, 0, 7, 1, 2, 15, 8], dtype=torch.int32)
EACH = torch.linspace(50, 400, 8)
LIMIT = torch.tensor([S])
DECODE = torch.tensor([0.25])
ROWS = torch.linspace(0.001, 0.9, 128)


def kv_cache(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Codes and scales of a whole cache whose encode scales the host has."""
    pages = x.reshape(4, 8, 16, 64)
    codes, scales, *_ = fi.nvfp4_quantize_paged_kv_cache(pages, pages, "HND", 300.0, 200.0)
    return *codes, *scales


def appended(x: torch.Tensor, t: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """A cache of 2 pages of 16 tokens and 4 heads, with 8 tokens in it."""
    key, value = x.reshape(2, 8, 4, 512)[..., :64].contiguous().unbind(0)
    codes = [x.new_zeros(2, 16, 4, 32, dtype=torch.uint8) for _ in range(2)]
    scales = [x.new_zeros(2, 16, 4, 4, dtype=torch.uint8).view(torch.float8_e4m3fn)
              for _ in range(2)]  # fmt: skip
    nf.kv_append_slots(key, value, t["slots"], *codes, *scales, k_scale=t["decode"],
                       v_scale=t["limit"])  # fmt: skip
    return *codes, *scales


# Input, mask and scales in, outputs out; quantizers with numbers, with tensors, with defaults.
CALLS: dict[str, Any] = {
    "number": lambda x, t: fi.fp4_quantize(x, S),
    "tensor": lambda x, t: fi.fp4_quantize(x, t["limit"]),
    "inversed": lambda x, t: fi.fp4_quantize(x, t["limit"], is_global_scale_inversed=True),
    "inversed fast": lambda x, t: fi.fp4_quantize(x, t["limit"], is_global_scale_inversed=True,
                                                  math="fast"),
    "inversed fast rows": lambda x, t: fi.fp4_quantize(x, t["rows"], is_global_scale_inversed=True,
                                                       math="fast"),
    "inversed number": lambda x, t: fi.fp4_quantize(x, S, is_global_scale_inversed=True,
                                                    math="fast"),
    "mxfp4": lambda x, t: fi.fp4_quantize(x, None, 32, True),
    "nvfp4_quantize": lambda x, t: fi.nvfp4_quantize(x, S),
    "shuffled": lambda x, t: fi.nvfp4_quantize(x, t["limit"], do_shuffle=True),
    "per token": lambda x, t: fi.nvfp4_quantize(x, BASE, per_token_activation=True),
    "per token tensor": lambda x, t: fi.nvfp4_quantize(x, t["decode"], per_token_activation=True),
    "mxfp4_quantize": lambda x, t: fi.mxfp4_quantize(x),
    "mxfp8_quantize": lambda x, t: fi.mxfp8_quantize(x),
    "silu": lambda x, t: fi.silu_and_mul_nvfp4_quantize(x, S),
    "silu tensor": lambda x, t: fi.silu_and_mul_nvfp4_quantize(x, t["limit"]),
    "smooth tensor": lambda x, t: fi.nvfp4_quantize_smooth(x, t["weight"], t["limit"]),
    "batched tensor": lambda x, t: fi.nvfp4_batched_quantize(x.reshape(8, 16, 256), t["limit"]),
    "norm tensor": lambda x, t: fi.rmsnorm_fp4quant(x, t["weight"], global_scale=t["limit"]),
    "mxfp4 of fp8": lambda x, t: fi.fp4_quantize(x.to(torch.float8_e4m3fn), t["limit"], 32, True),
    "listed rows": lambda x, t: fi.nvfp4_quantize(
        x, t["decode"], per_token_activation=True, expanded_idx_to_permuted_idx=t["mask"]),
    "appended": appended,
    "smooth": lambda x, t: fi.nvfp4_quantize_smooth(x, t["weight"], S),
    "batched": lambda x, t: fi.nvfp4_batched_quantize(x.reshape(8, 16, 256), S),
    "grouped": lambda x, t: fi.scaled_fp4_grouped_quantize(x.reshape(8, 16, 256), t["mask"],
                                                           t["each"]),
    "silu grouped": lambda x, t: fi.silu_and_mul_scaled_nvfp4_experts_quantize(
        x.reshape(8, 16, 256), t["mask"], t["each"]),
    "mxfp8 grouped": lambda x, t: fi.mxfp8_grouped_quantize(x.reshape(8, 16, 256), t["mask"]),
    "8-bit groups": lambda x, t: fi.per_token_group_quant_8bit(x, 128),
    "norm": lambda x, t: fi.rmsnorm_fp4quant(x, t["weight"]),
    "add and norm": lambda x, t: fi.add_rmsnorm_fp4quant(x, x.clone(), t["weight"], global_scale=S,
                                                         output_both_sf_layouts=True),
    "kv": lambda x, t: fi.nvfp4_kv_quantize(x, t["decode"]),
    "kv cache": lambda x, t: kv_cache(x),
    "kv number": lambda x, t: fi.nvfp4_kv_quantize(x, 0.25),
    "global scale": lambda x, t: (fi.make_nvfp4_global_scale(x, False),),
    "global scale per token": lambda x, t: (fi.make_nvfp4_global_scale(x, True),),
    "given global scale": lambda x, t: (fi.make_nvfp4_global_scale(x, False, S),),
    "pack bits": lambda x, t: (fi.packbits(x),),
    "interleave": lambda x, t: (fi.block_scale_interleave(x.view(torch.uint8)),),
}  # fmt: skip
ON_A_GPU = torch.cuda.is_available() and nf.build_info()["cuda_enabled"]


def tensors(device: str) -> dict[str, torch.Tensor]:
    """The other inputs."""
    given = {"mask": MASK, "each": EACH, "limit": LIMIT, "decode": DECODE, "weight": WEIGHT,
             "rows": ROWS, "slots": torch.arange(1, 17, 2)}  # fmt: skip
    return {name: value.to(device) for name, value in given.items()}


@pytest.mark.parametrize("name", list(CALLS))
def test_numbers_stay_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No array of the host is made, which a GPU would have to be handed."""

    def refuse(self: TorchMaker, array: Any) -> Any:
        raise AssertionError(f"{array} was about to be copied to {self.device}")

    monkeypatch.setattr(TorchMaker, "from_numpy", refuse)
    monkeypatch.setattr(torch, "from_numpy", refuse)
    CALLS[name](X, tensors("cpu"))


def raw(parts: tuple[torch.Tensor, ...]) -> list[bytes]:
    """All bytes."""
    return [part.cpu().contiguous().view(torch.uint8).numpy().tobytes() for part in parts]


@pytest.mark.skipif(not ON_A_GPU, reason="no GPU, or a build without CUDA")
@pytest.mark.parametrize("name", list(CALLS))
def test_captures(name: str) -> None:
    """The CPU's bytes, of the contents at the time of the replay."""
    call, x, given = CALLS[name], X.cuda(), tensors("cuda")
    for _ in range(2):
        call(x, given)  # Loads kernels.
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        parts = call(x, given)
    x.copy_(X.flip(0))
    for part in parts:
        part.view(torch.uint8).zero_()  # Rows beyond a mask have any contents.
    host = {what: tensor * 0.5 if tensor.is_floating_point() else tensor
            for what, tensor in tensors("cpu").items()}  # fmt: skip
    for what, tensor in given.items():
        tensor.copy_(host[what])  # The kernels read the contents of this moment.
    graph.replay()
    torch.cuda.synchronize()
    wanted = call(X.flip(0), host)
    if "grouped" in name:
        rows = torch.arange(16)[:, None, None] < MASK
        parts = (parts[0].cpu().view(torch.uint8) * rows, parts[1])
        wanted = (wanted[0].view(torch.uint8) * rows, wanted[1])
    assert raw(parts) == raw(wanted)
