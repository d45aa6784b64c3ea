"""narrowfloat.torch: operators against the package's functions, opcheck, torch.compile."""

from __future__ import annotations

import copy
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

import narrowfloat as nf

torch = pytest.importorskip("torch", reason="torch is not installed; ./test.sh --with-torch")

from torch_op_cases import functions, more_cases, moved, on_each_device, out_cases  # noqa: E402

import narrowfloat.torch as nft  # noqa: E402

OPS = torch.ops.narrowfloat
X = torch.randn(6, 128, generator=torch.Generator().manual_seed(3)).bfloat16()
FORMATS = [info.name for info in nf.formats()]


def test_shape_functions_are_the_library_s() -> None:
    """Every format, layout and batching, on odd sizes."""
    for info in nf.formats():
        cases = itertools.product(info.layouts, ((5, 96), (130, 160), (3, 7, 32)), (False, True))
        for layout, shape, batched in cases:
            if batched and len(shape) < 3:
                continue
            q = nf.QuantizedTensor.empty(shape, info.name, layout=layout, batched=batched)
            sizes = nft.buffer_shapes(info.name, shape, layout, batched, 32, "tensor")
            values, scales, factors = sizes
            assert tuple(values) == q.values.shape
            assert tuple(scales) == q.scales.shape, (info.name, layout, shape)
            wanted = (0,) if q.global_scale is None else tuple(q.global_scale.shape)
            assert tuple(factors) == wanted


@pytest.mark.parametrize("format", FORMATS)
def test_results_are_the_package_s(format: str) -> None:
    """New results and given ones, there and back."""
    wanted = nf.quantize(X, format, math="fast")
    parts = nft.quantize(X, format, math="fast")
    assert torch.equal(parts[0], wanted.values) and torch.equal(parts[1], wanted.scales)
    assert parts[2].numel() == 0 or torch.equal(parts[2], wanted.global_scale)
    given = tuple(torch.full_like(part, 7) for part in parts)
    assert nft.quantize(X, format, math="fast", out=given) is given
    assert all(torch.equal(a, b) for a, b in zip(parts, given, strict=True))
    y = nft.dequantize(*parts, format, X.shape, dtype=torch.bfloat16)
    assert torch.equal(y, wanted.dequantize(torch.bfloat16))
    out = torch.empty(6, 128)
    assert nft.dequantize(*parts, format, X.shape, out=out) is out
    assert torch.equal(out, wanted.dequantize())


def test_fused_forms_and_scales() -> None:
    """SiLU, norms, an encode scale for each row, other layouts, maxima, routing."""
    gate_up = torch.cat([X, X], 1)
    wanted = nf.silu_mul_quantize(gate_up, "mxfp8")
    assert torch.equal(nft.silu_mul_quantize(gate_up, "mxfp8")[0], wanted.values)
    weight = X[0].clone()
    parts = nft.rmsnorm_quantize(X, weight, "nvfp4", eps=1e-5)
    assert torch.equal(parts[0], nf.rmsnorm_quantize(X, weight, "nvfp4", eps=1e-5).values)
    one, two = X.clone(), X.clone()
    parts = nft.add_rmsnorm_quantize(X, one, weight, "mxfp4")
    assert torch.equal(parts[0], nf.add_rmsnorm_quantize(X, two, weight, "mxfp4").values)
    assert torch.equal(one, two)
    scale = torch.arange(1.0, 7.0) * 100
    parts = nft.quantize(X, "nvfp4", "linear", encode_scale=scale)
    wanted = nf.quantize(X, "nvfp4", layout="linear", encode_scale=scale)
    assert parts[2].shape == (6,) and torch.equal(parts[1], wanted.scales)
    assert torch.equal(nft.dequantize(*parts, "nvfp4", X.shape, "linear"), wanted.dequantize())
    moved = nft.relayout(parts[1], "nvfp4", X.shape, "linear", "swizzled_8x4")
    assert torch.equal(moved, wanted.relayout("swizzled_8x4").scales)
    assert torch.equal(nft.amax(X, per_row=True), nf.amax(X, per_row=True))
    logits = torch.randn(6, 8)
    ids, weights = nft.route(logits, 2, "sigmoid")
    assert torch.equal(ids, nf.route(logits, top_k=2, method="sigmoid")[0])
    assert weights.dtype == torch.float32


def small_layer(device: str = "cpu") -> nf.MoeLayer:
    """Four experts."""
    config = nf.MoeConfig(hidden=128, inter=64, experts=4, top_k=2)
    return nf.MoeLayer.prepare(torch.randn(4, 128, 128).bfloat16().to(device),
                               torch.randn(4, 128, 64).bfloat16().to(device), config)  # fmt: skip


def opcheck_cases(device: str = "cpu") -> dict[str, tuple]:
    """Arguments for each operator; a layer that some have lives as long as the last ones do."""
    parts = nft.quantize(X, "nvfp4")
    shape = ("nvfp4", [6, 128], "swizzled_128x4", False, 32)
    names = ("values", "scales", "global_scale")
    fresh = dict(zip(names, (part.clone() for part in parts), strict=True))
    wide, weight = torch.cat([X, X], 1), X[0].clone()
    module = nft.Moe(small_layer(device))
    ranks = nft.AllReduce(workspace=nf.AllReduce.local(1, dtype="float32", device=device)[0])
    linear = nft.Linear.prepare(torch.randn(32, 128), "mxfp8", device=device)
    opcheck_cases.keep = module, ranks, linear
    plain = ("none", "linear", None, "float32", "exact", "auto", "at_end", 1e-6, 0.0, 1.0, False)
    logits = torch.randn(6, 4)
    cases = {
        "quantize": ((X, "nvfp4"), {"encode_scale": torch.tensor([300.0])}),
        "quantize_out": ((X, "nvfp4"), fresh),
        "silu_mul_quantize": ((wide, "mxfp8", "linear"), {}),
        "silu_mul_quantize_out": ((wide, "nvfp4"), fresh),
        "rmsnorm_quantize": ((X, weight, 1e-6, "fp8_1x128"), {}),
        "rmsnorm_quantize_out": ((X, weight, 1e-6, "nvfp4"), fresh),
        "add_rmsnorm_quantize": ((X, X.clone(), weight, 1e-6, "nvfp4_per_token"), {}),
        "add_rmsnorm_quantize_out": ((X, X.clone(), weight, 1e-6, "nvfp4"), fresh),
        "dequantize": ((*parts, *shape, torch.float16), {}),
        "dequantize_out": ((*parts, *shape, torch.empty(6, 128)), {}),
        "relayout": ((parts[1], *shape, "linear"), {}),
        "relayout_out": ((parts[1], *shape, "linear", torch.empty(6, 8, dtype=torch.uint8)), {}),
        "amax": ((X, True), {}),
        "amax_out": ((X, True, torch.empty(6)), {}),
        "smooth_quantize": ((X, weight, "nvfp4"), {}),
        "smooth_quantize_out": ((X, weight, "nvfp4"), fresh),
        "route_out": ((logits, None, 2, "renormalize", 1, 1, 1.0,
                       torch.empty(6, 2, dtype=torch.int32), torch.empty(6, 2)), {}),
        "allreduce_out": ((ranks._handle.number, ranks.order.clone(), "mxfp4", *plain),
                          {"input": X.float(), "residual": X.float(), "gamma": X[0].float(),
                           "residual_out": torch.empty(6, 128),
                           "values": torch.empty(6, 64, dtype=torch.uint8),
                           "scales": torch.empty(6, 4, dtype=torch.uint8)}),
        **more_cases(),
        **{name: ((*given, *map(torch.empty_like, made)), {})
           for name, (given, made) in out_cases().items()},
        "route": ((logits, None, 2, "renormalize", 1, 1, 1.0), {}),
        "moe": ((X, logits, None, module._handle.number, 128, torch.bfloat16), {}),
        "linear": ((X, linear._handle.number, 32), {}),
        "moe_out": ((X, logits, None, module._handle.number, torch.empty_like(X),
                     torch.empty(256 + module.layer.required_workspace(6), dtype=torch.uint8)),
                    {}),
    }  # fmt: skip
    return moved(cases, device)


@on_each_device
@pytest.mark.parametrize("name", list(opcheck_cases()))
def test_opcheck(name: str, device: str) -> None:
    """Schemas, shape functions, tracing with symbolic extents."""
    arguments, keywords = opcheck_cases(device)[name]
    torch.library.opcheck(getattr(OPS, name).default, arguments, keywords)


@pytest.mark.parametrize("name", list(more_cases()))
def test_operators_are_the_functions(name: str) -> None:
    """Results, and tensors that are filled, to the bit."""
    (ours, _), (theirs, _) = more_cases()[name], more_cases()[name]
    got = getattr(OPS, name)(*ours)
    wanted = functions()[name](*theirs)
    for one, two in zip((got, *ours), (wanted, *theirs), strict=True):
        parts = (one, two) if isinstance(one, tuple | list) else ((one,), (two,))
        for a, b in zip(*parts, strict=True):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("name", list(out_cases()))
def test_given_results_are_the_new_ones(name: str) -> None:
    """Whatever they held before."""
    given, made = out_cases()[name]
    out = [torch.full_like(one, 7) for one in made]
    assert getattr(OPS, name)(*given, *out) is None
    if name == "segment_pack_bits_out":  # The last segment ends before the array does.
        end = int(out[1][-1])
        out[0], made = out[0][:end], (made[0][:end], made[1])
    assert all(torch.equal(one, two) for one, two in zip(out, made, strict=True))


def test_given_outputs() -> None:
    """The errors of a relayout, of maxima, of a routing."""
    parts, logits = nft.quantize(X, "nvfp4"), torch.randn(6, 4)
    out = torch.zeros(6, 8, dtype=torch.uint8)
    where = (parts[1], "nvfp4", X.shape, "swizzled_128x4", "linear")
    assert nft.relayout(*where, out=out) is out and torch.equal(out, nft.relayout(*where))
    tops = torch.zeros(6)
    assert nft.amax(X, per_row=True, out=tops) is tops
    assert torch.equal(tops, nft.amax(X, per_row=True))
    given = torch.zeros(6, 2, dtype=torch.int32), torch.zeros(6, 2)
    assert nft.route(logits, 2, out=given) is given
    assert all(torch.equal(a, b) for a, b in zip(given, nft.route(logits, 2), strict=True))
    smooth = nft.smooth_quantize(X, X[1].clone(), "nvfp4")
    assert torch.equal(smooth[0], nf.smooth_quantize(X, X[1].clone(), "nvfp4").values)


def test_every_operator_is_checked() -> None:
    """The cases are complete."""
    defined = {name.split("::")[1].split(".")[0] for name in nft._library._op_defs}
    assert defined - {"no_gradient"} == set(opcheck_cases())  # That one always raises.


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic: bool) -> None:
    """One graph, no breaks; several sizes."""

    def there_and_back(x: torch.Tensor) -> torch.Tensor:
        parts = nft.quantize(x * 2, "mxfp8")
        return nft.dequantize(*parts, "mxfp8", x.shape) + 1

    compiled = torch.compile(there_and_back, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows in (6, 9):
        x = torch.randn(rows, 128).bfloat16()
        assert torch.equal(compiled(x), there_and_back(x))


def test_compiled_module() -> None:
    """A MoE layer inside a compiled model; numbers of layers that are gone are refused."""
    layer = small_layer()
    module = nft.Moe(layer)
    logits = torch.randn(6, 4)
    compiled = torch.compile(lambda x: module(x, logits) * 2, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(X), layer.run(X, logits) * 2)
    given = torch.compile(module, fullgraph=True, backend="aot_eager")
    for _ in range(3):  # Copies of a workspace lie where they happen to.
        out, space = torch.empty_like(X), layer.new_workspace(6)
        assert torch.equal(given(X, logits, out=out, workspace=space), layer.run(X, logits))
    out = torch.empty_like(X)
    assert module(X, logits, out=out, workspace=layer.new_workspace(6)) is out
    assert torch.equal(out, layer.run(X, logits))
    assert torch.equal(module(X, logits, workspace=layer.new_workspace(6)), out)
    assert torch.equal(module(X, logits, out=torch.zeros_like(X)), out)
    with pytest.raises(ValueError, match="layer"):
        OPS.moe(X, logits, None, 1 << 40, 128, torch.bfloat16)
    for wrong in ((64, torch.bfloat16), (128, torch.float32)):
        with pytest.raises(ValueError, match="expected the layer's, 128 and torch.bfloat16"):
            OPS.moe(X, logits, None, module._handle.number, *wrong)
    assert torch.equal(copy.deepcopy(module)(X, logits), out)


@on_each_device
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_inductor(device: str, mode: str) -> None:
    """Layers and quantizers in code that torch generates, with and without results of its own."""
    layer = small_layer(device)
    module = nft.Moe(layer)
    x, logits = X.to(device), torch.randn(6, 4, device=device)
    weight = X[0].to(device)

    def block(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ids = torch.zeros(6, 2, dtype=torch.int32, device=device)
        both = module(x, logits, topk_ids=ids) + module(x * 2, logits)
        replay = torch.zeros(6, 2, dtype=torch.int16, device=device)
        _, weights = nft.route(logits, 2, replay=replay)
        parts = nft.quantize(both, "mxfp8")
        normed = torch.zeros_like(x)
        codes = nft.rmsnorm_quantize(x, weight, "nvfp4", norm_output=normed)[0]
        residual = x * 3
        more = nft.add_rmsnorm_quantize(x, residual, weight, "nvfp4")[0]
        return (nft.dequantize(*parts, "mxfp8", x.shape), ids, replay, weights, normed, codes,
                residual, more)  # fmt: skip

    with torch._inductor.config.patch(force_disable_caches=True):
        compiled = torch.compile(block, fullgraph=True, backend="inductor", mode=mode)
        for _ in range(3):  # The second call of reduce-overhead captures a graph.
            for ours, wanted in zip(compiled(x), block(x), strict=True):
                assert torch.equal(ours, wanted) and wanted.any()


PROGRAM = """
import sys
import torch
import narrowfloat as nf
import narrowfloat.torch as nft

# From a second layer on its number is no constant of the code: both processes find this in the
# cache, unless the result's type tells it apart.
torch._dynamo.config.allow_unspec_int_on_nn_module = True
folder, out_dtype = sys.argv[1:]
torch.manual_seed(len(out_dtype))
x, logits = torch.randn(6, 128).bfloat16(), torch.randn(6, 4)
config = nf.MoeConfig(hidden=128, inter=64, experts=4, top_k=2, out_dtype=out_dtype)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        w1, w2 = torch.randn(4, 128, 128).bfloat16(), torch.randn(4, 128, 64).bfloat16()
        self.experts = nft.Moe(nf.MoeLayer.prepare(w1, w2, config))

    def forward(self, x):
        return self.experts(x * 2, logits) + 1


for _ in range(2):
    block = Block()
    wanted = block(x)
    block.compile(fullgraph=True, backend="inductor")
    assert torch.equal(block(x), wanted)
if out_dtype == "bfloat16":
    torch.export.save(torch.export.export(Block(), (x,)), folder + "/layer.pt2")
else:
    torch.export.load(folder + "/layer.pt2").module()(x)
"""


def test_programs_of_another_process(tmp_path: Path) -> None:
    """Cached code does not know a layer's result; an exported program finds no other layer."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    ran = [subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path), out_dtype], text=True,
                          env=environment, capture_output=True, check=False)
           for out_dtype in ("bfloat16", "float32")]  # fmt: skip
    assert ran[0].returncode == 0, ran[0].stderr
    assert "is of no layer that still exists" in ran[1].stderr, ran[1].stderr


def test_errors() -> None:
    """The package's exceptions come through the dispatcher."""
    with pytest.raises(ValueError, match="format"):
        nft.quantize(X, "nvfp5")
    with pytest.raises(ValueError, match="input"):
        nft.quantize(X.double(), "nvfp4")
    with pytest.raises(NotImplementedError):
        nft.quantize(torch.empty(4, 64, device="meta").to_sparse(), "nvfp4")
