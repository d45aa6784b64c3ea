"""narrowfloat.compat.flashinfer: mono_moe(), on a GPU at the one shape that it takes.

That of 256 experts has 800 MB of weights. The other tests replace the constants of its sizes.
"""

from __future__ import annotations

import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from flashinfer_table import BITS, CLOSE, percent, record
from test_flashinfer_moe import E4M3, FAR, Data, E, H, I, T, check
from test_flashinfer_quantizers import LIBRARIES

import narrowfloat as nf
import narrowfloat.compat.flashinfer as fi
from narrowfloat.compat.flashinfer import _mono_moe as mono
from narrowfloat.compat.flashinfer.fused_moe import monomoe

BF16 = ml_dtypes.bfloat16


@pytest.fixture(params=LIBRARIES, ids=lambda lib: lib.__name__)
def lib(request: pytest.FixtureRequest) -> Any:
    """Where arrays come from."""
    return request.param


@pytest.fixture(autouse=True)
def small_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the other tests' layers."""
    for name, value in (("EXPERTS", E), ("INTER", I), ("HIDDEN", H)):
        monkeypatch.setattr(mono, name, value)


def swapped(array: np.ndarray) -> np.ndarray:
    """[up; gate] as [gate; up]."""
    return np.concatenate(np.split(array, 2, 1)[::-1], 1)


def call(lib: Any, data: Data, **changes: Any) -> Any:
    """A call that works, but for changes."""
    given = {"activations_in": data.x, "router_logits": data.logits,
             "expert_weights_up": swapped(data.w1), "expert_scales_up": swapped(data.s1),
             "expert_weights_down": data.w2, "expert_scales_down": data.s2,
             "top_k": 2} | changes  # fmt: skip
    return fi.mono_moe(**{name: lib.make(np.ascontiguousarray(value))
                          if isinstance(value, np.ndarray) else value
                          for name, value in given.items()})  # fmt: skip


METHODS = {("softmax", True): 4, ("softmax", False): 0, ("sigmoid", True): 6,
           ("sigmoid", False): 8}  # fmt: skip


@pytest.mark.parametrize(("scoring", "renormalize"), list(METHODS))
def test_routers(lib: Any, scoring: str, renormalize: bool) -> None:
    """Both scores with and without weights that sum to 1, beside the model."""
    data = Data("fp8_block")
    wanted = data.expected(data.routed(method=METHODS[scoring, renormalize], weights_bf16=False))
    got = call(lib, data, scoring_func=scoring, renormalize=renormalize)
    check(lib, got, wanted, "fp8_block")
    record("mono_moe", CLOSE, "its one shape alone, at which the test needs a GPU",
           percent([FAR["fp8_block"]]))


def test_prepared_weights_and_outputs(lib: Any) -> None:
    """Interleaved weights give the same; so do given outputs; a scratchpad changes nothing."""
    data = Data("fp8_block")
    plain = lib.raw(call(lib, data))
    up = fi.interleave_for_tma_wgmma_up(lib.make(swapped(data.w1)))
    out = lib.make(np.zeros((T, H), BF16))
    found = call(lib, data, expert_weights_up=up, interleave_up=False, out=out,
                 scratchpad=lib.make(np.zeros(monomoe.get_scratchpad_size_bytes(), np.uint8)))
    assert found is out and lib.raw(out) == plain
    assert monomoe.has_monomoe()


def test_interleaving(lib: Any) -> None:
    """Eight gate rows, then eight up rows, in the order of FlashInfer's documentation."""
    w = np.random.default_rng(5).integers(0, 120, (2, 256, 16), dtype=np.uint8).view(E4M3)
    wanted = np.zeros_like(w)
    for b in range(2):
        for wg in range(2):
            for warp in range(4):
                at, row = 128 * b + 64 * wg + 16 * warp, 64 * b + 32 * wg + 8 * warp
                wanted[:, at : at + 8] = w[:, row : row + 8]
                wanted[:, at + 8 : at + 16] = w[:, 128 + row : 128 + row + 8]
    got = fi.interleave_for_tma_wgmma_up(lib.make(w))
    assert lib.raw(got) == wanted.tobytes() and str(got.dtype).endswith("float8_e4m3fn")
    with pytest.raises(ValueError, match="w_fp8: N .half of rows. must be a multiple of 64"):
        fi.interleave_for_tma_wgmma_up(lib.make(w[:, :96]))
    record("interleave_for_tma_wgmma_up", BITS)


def test_scratchpad() -> None:
    """Zeros of torch where the caller says."""
    torch = pytest.importorskip("torch", reason="torch is not installed; ./test.sh --with-torch")
    pad = monomoe.alloc_scratchpad(torch.device("cpu"))
    assert pad.dtype == torch.uint8 and pad.shape == (monomoe.get_scratchpad_size_bytes(),)
    assert not pad.any()


def group_rounded(x: Any) -> Any:
    """float64 values of E4M3 with a scale for each 128 columns."""
    groups = x.double().reshape(*x.shape[:-1], -1, 128)
    scale = groups.abs().amax(-1, keepdim=True) / 448
    codes = (groups / scale.clamp(min=1e-30)).to(sys.modules["torch"].float8_e4m3fn)
    return (codes.double() * scale).reshape(x.shape)


def decoded(codes: Any, scales: Any) -> Any:
    """float64 of one expert's matrix with scales of 128x128."""
    return codes.double() * scales.double().repeat_interleave(128, 0).repeat_interleave(128, 1)


def layer_of(x: Any, logits: Any, up: Any, s1: Any, down: Any, s2: Any, k: int) -> Any:
    """The layer in float64, softmax over the best k, of the experts that a token takes."""
    best, ids = logits.double().topk(k, -1)
    weights, rows = best.softmax(-1), group_rounded(x)
    out = x.double() * 0
    for t in range(x.shape[0]):
        for slot, e in enumerate(ids[t].tolist()):
            gate, linear = (decoded(up[e], s1[e]) @ rows[t]).chunk(2)
            inner = group_rounded(gate * gate.sigmoid() * linear)
            out[t] += weights[t, slot] * (decoded(down[e], s2[e]) @ inner)
    return out


@pytest.mark.parametrize("size", ["small", "real"])
def test_against_torch(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """1 and 8 tokens, both orders of the up weights, 16-bit logits; the real shape on a GPU."""
    torch = pytest.importorskip("torch", reason="torch is not installed; ./test.sh --with-torch")
    device, k = "cpu", 2
    if size == "real":
        if not (torch.cuda.is_available() and nf.build_info()["cuda_enabled"]):
            pytest.skip("the real shape has 800 MB of weights: needs a GPU, and a package for it")
        monkeypatch.undo()
        device, k = "cuda", 8
    experts, inter, hidden = mono.EXPERTS, mono.INTER, mono.HIDDEN
    rng = torch.Generator(device).manual_seed(31)

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, generator=rng, device=device, dtype=torch.bfloat16)

    def scales(*shape: int) -> Any:
        return torch.rand(*shape, generator=rng, device=device) / 32 + 1 / 64

    up = (normal(experts, 2 * inter, hidden) * 2).to(torch.float8_e4m3fn)
    down = (normal(experts, hidden, inter) * 2).to(torch.float8_e4m3fn)
    s1 = scales(experts, 2 * inter // 128, hidden // 128)
    s2 = scales(experts, hidden // 128, inter // 128)
    mixed = fi.interleave_for_tma_wgmma_up(up)
    for tokens in (1, 8):
        x = normal(tokens, hidden)
        # No two of a token are equal, so that there is one choice of experts.
        order = [torch.randperm(experts, generator=rng, device=device) for _ in range(tokens)]
        logits = (torch.stack(order) / 32).bfloat16()
        wanted = layer_of(x, logits, up, s1, down, s2, k)
        got = fi.mono_moe(x, logits, up, s1, down, s2, k)
        distance = (got.double() - wanted).norm() / wanted.norm()
        assert distance < FAR["fp8_block"], distance
        again = fi.mono_moe(x, logits, mixed, s1, down, s2, k, interleave_up=False)
        assert torch.equal(again, got)


def test_refusals(lib: Any) -> None:
    """Other shapes, too many tokens, other options."""
    data = Data("fp8_block")
    for changes, words in (
        ({"top_k": 9}, "top_k: must be in .1, 8., got 9"),
        ({"scoring_func": "relu"}, "scoring_func: must be 'sigmoid' or 'softmax', got 'relu'"),
        ({"activations_in": np.zeros((9, H), BF16), "router_logits": np.zeros((9, E), np.float32)},
         "activations_in: this kernel caps tokens at 8; got M=9"),
        ({"activations_in": data.x[:, :128]}, "activations_in: must be .5, 256."),
        ({"router_logits": data.logits[:, :4]}, "router_logits: must be .5, 8."),
        ({"expert_weights_down": data.w2[:4]}, "expert_weights_down: monomoe: unsupported shape"),
        ({"expert_scales_up": data.s1[:, :1]}, "expert_scales_up: must be"),
        ({"expert_weights_up": swapped(data.w1).view(np.uint8)}, "expert_weights_up: must be floa"),
    ):
        with pytest.raises(ValueError, match=words):
            call(lib, data, **changes)
