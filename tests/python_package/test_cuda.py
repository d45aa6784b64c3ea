"""CUDA tensors of torch: the CPU's bytes, streams, graphs, devices that differ. Needs a GPU.

The functions with FlashInfer's names run on CUDA tensors in their own tests.
"""

from __future__ import annotations

import numpy as np
import pytest

import narrowfloat as nf

torch = pytest.importorskip("torch", reason="torch is not installed; ./test.sh --with-torch")
if not (torch.cuda.is_available() and nf.build_info()["cuda_enabled"]):
    pytest.skip("no GPU, or a build without CUDA", allow_module_level=True)

from test_package import resident_bytes  # noqa: E402
from torch_op_cases import out_cases  # noqa: E402

import narrowfloat.torch as nft  # noqa: E402

X = torch.randn(37, 256, generator=torch.Generator().manual_seed(9)).bfloat16()
FORMATS = [info.name for info in nf.formats()]


def cpu(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """On the CPU."""
    return None if tensor is None else tensor.cpu()


def equal(got: nf.QuantizedTensor, wanted: nf.QuantizedTensor) -> bool:
    """All bytes of two quantized tensors."""
    if not (torch.equal(got.values.cpu(), wanted.values)
            and torch.equal(got.scales.cpu(), wanted.scales)):  # fmt: skip
        return False
    return wanted.global_scale is None or torch.equal(cpu(got.global_scale), wanted.global_scale)


@pytest.mark.parametrize("format", FORMATS)
def test_bytes_are_the_cpu_s(format: str) -> None:
    """There and back, all layouts, both modes, the fused forms, maxima."""
    x, weight = X.cuda(), X[0].cuda()
    for layout in next(info.layouts for info in nf.formats() if info.name == format):
        for math in ("exact", "fast"):
            wanted = nf.quantize(X, format, layout=layout, math=math)
            got = nf.quantize(x, format, layout=layout, math=math)
            assert got.values.is_cuda and equal(got, wanted)
            for dtype in (torch.float32, torch.bfloat16):
                assert torch.equal(got.dequantize(dtype).cpu().view(torch.uint8),
                                   wanted.dequantize(dtype).view(torch.uint8))  # fmt: skip
            if layout == "swizzled_128x4":
                linear = got.relayout("linear").scales.cpu()
                assert torch.equal(linear, wanted.relayout("linear").scales)
    wide = torch.cat([X, X.flip(0)], 1)
    assert equal(nf.silu_mul_quantize(wide.cuda(), format), nf.silu_mul_quantize(wide, format))
    wanted = nf.rmsnorm_quantize(X, X[0], format)
    assert equal(nf.rmsnorm_quantize(x, weight, format), wanted)
    assert torch.equal(nf.amax(x, per_row=True).cpu(), nf.amax(X, per_row=True))


def layers(mode: str) -> tuple[nf.MoeLayer, nf.MoeLayer]:
    """The same layer on the CPU and on the GPU."""
    generator = torch.Generator().manual_seed(1)
    w1 = torch.randn(8, 256, 256, generator=generator).bfloat16() / 16
    w2 = torch.randn(8, 256, 128, generator=generator).bfloat16() / 11
    config = nf.MoeConfig(hidden=256, inter=128, experts=8, top_k=2, mode=mode)
    if mode == "bf16":
        return (nf.MoeLayer.prepare(w1, w2, config),
                nf.MoeLayer.prepare(w1.cuda(), w2.cuda(), config))  # fmt: skip
    q1, q2 = (nf.quantize(w, "nvfp4", batched=True) for w in (w1, w2))
    c1, c2 = (nf.quantize(w.cuda(), "nvfp4", batched=True) for w in (w1, w2))
    return nf.MoeLayer.prepare(q1, q2, config), nf.MoeLayer.prepare(c1, c2, config)


@pytest.mark.parametrize("mode", ["bf16", "nvfp4_bf16", "nvfp4_per_token", "nvfp4_fp8_exact"])
def test_moe_layer(mode: str) -> None:
    """Ids to the bit, outputs within the mode's tolerance; the GPU's implementations."""
    host, device = layers(mode)
    logits = torch.randn(37, 8, generator=torch.Generator().manual_seed(2))
    ids = torch.empty(37, 2, dtype=torch.int32, device="cuda")
    out = device.run(X.cuda(), logits.cuda(), topk_ids=ids).cpu().double()
    wanted = host.run(X, logits).double()
    assert float((out - wanted).norm() / wanted.norm()) < 3e-2
    assert torch.equal(ids.cpu(), nf.route(logits, top_k=2)[0])
    assert not any("cpu" in stage.chosen for stage in device.explain(37))
    maps, expected = (nf.permute(i, local_experts=8) for i in (ids, ids.cpu()))
    assert torch.equal(maps.slot_to_row.cpu(), expected.slot_to_row)


def test_checkpoint_layer_on_the_gpu() -> None:
    """Weights are loaded on the host and copied."""
    from pathlib import Path

    tiny = Path(__file__).resolve().parents[2] / "models" / "tiny-moe"
    layer = nf.MoeLayer.from_checkpoint(tiny, 0, mode="mxfp4_bf16", device="cuda")
    host = nf.MoeLayer.from_checkpoint(tiny, 0, mode="mxfp4_bf16")
    logits = X.float() @ torch.from_numpy(np.array(host.router_weight)).T
    got = layer.run(X.cuda(), logits.cuda()).cpu().double()
    wanted = host.run(X, logits).double()
    assert float((got - wanted).norm() / wanted.norm()) < 1e-2


def test_work_goes_to_the_current_stream() -> None:
    """A call after a long sleep of its stream has not run when the sleep has not ended."""
    x = X.cuda()
    target = nf.QuantizedTensor.empty(x.shape, "mxfp8", like=x)
    wanted = nf.quantize(X, "mxfp8")
    nf.quantize(x, out=target)  # Loads kernels, which may wait for the device.
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    for handle in (None, stream.cuda_stream):
        target.values.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)
            if handle is None:
                nf.quantize(x, out=target)
        if handle is not None:
            with nf.use_stream(handle):
                nf.quantize(x, out=target)
        assert not stream.query()
        assert int(target.values.cpu().int().sum()) == 0  # On the other stream: still untouched.
        stream.synchronize()
        assert equal(target, wanted)


def test_new_tensors_belong_to_the_stream_of_use_stream() -> None:
    """A layer's workspace is not handed to torch's stream while the layer still waits."""
    _, layer = layers("bf16")
    module, top_k = nft.Moe(layer), layer.config.top_k
    x, logits = X.cuda(), torch.randn(37, 8, device="cuda")
    ids = torch.zeros(37, top_k, dtype=torch.int32, device="cuda")
    replay = torch.zeros(37, top_k, dtype=torch.int16, device="cuda")
    wanted = layer.run(x, logits)
    quantized = nft.quantize(x, "mxfp8")
    routed = nft.route(logits, top_k)
    stream = torch.cuda.Stream()

    def fill() -> list[torch.Tensor]:
        size = layer.required_workspace(37)
        return [torch.full((size,), 255, dtype=torch.uint8, device="cuda") for _ in range(3)]

    with nf.use_stream(stream.cuda_stream):  # Fills the allocator's pools, which may wait.
        layer.run(x, logits)
        nft.quantize(x, "mxfp8")
        module(x, logits, topk_ids=ids)
        nft.route(logits, top_k, replay=replay)
    fill()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
    with nf.use_stream(stream.cuda_stream):
        got = layer.run(x, logits)
        parts = nft.quantize(x, "mxfp8")
        also = module(x, logits, topk_ids=ids)
        slots = nft.route(logits, top_k, replay=replay)
        assert torch.cuda.current_stream() != stream
    others = fill()
    torch.cuda.current_stream().synchronize()
    assert not stream.query()  # Overwritten, if at all, before the layer ran.
    stream.synchronize()
    assert torch.equal(got, wanted) and torch.equal(also, wanted)
    assert all(torch.equal(part, other) for part, other in zip(parts, quantized, strict=True))
    assert all(torch.equal(part, other) for part, other in zip(slots, routed, strict=True))
    assert all(bool((other == 255).all()) for other in others)


def test_scales_are_converted_on_the_stream_of_use_stream() -> None:
    """A double that is written there arrives as a float."""
    import narrowfloat.compat.flashinfer as fi

    x, scale = X.cuda(), torch.tensor([1.0], dtype=torch.float64, device="cuda")
    wanted = fi.fp4_quantize(X, 300.0)
    stream = torch.cuda.Stream()
    with nf.use_stream(stream.cuda_stream):  # Loads kernels, and fills the allocator's pools.
        fi.fp4_quantize(x, scale)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        scale.fill_(300.0)
    with nf.use_stream(stream.cuda_stream):
        parts = fi.fp4_quantize(x, scale)
    stream.synchronize()
    assert all(torch.equal(part.cpu(), one) for part, one in zip(parts, wanted, strict=True))


class OtherLibrary:
    """A CUDA array that only speaks DLPack, of a library that torch knows nothing of."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.shape = tensor, tuple(tensor.shape)

    def __dlpack__(self, **arguments):
        return self.tensor.__dlpack__(**arguments)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


def test_cuda_arrays_of_other_libraries() -> None:
    """Their memory is read and written, on the stream that use_stream() names."""
    x = X.cuda()
    sizes = nf.quantize(X, "nvfp4")
    made = nf.QuantizedTensor.empty(x.shape, "nvfp4", like=x)
    parts = [OtherLibrary(part) for part in (made.values, made.scales, made.global_scale)]
    target = torch.empty(x.shape, device="cuda")
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with nf.use_stream(stream.cuda_stream):
        q = nf.QuantizedTensor(*parts, sizes.layout)
        nf.quantize(OtherLibrary(x), out=q)
        nf.dequantize(q, out=OtherLibrary(target))
    stream.synchronize()
    assert equal(made, sizes)
    assert torch.equal(target.cpu(), sizes.dequantize())


def test_graphs() -> None:
    """Capture of given and of new outputs, replayed with other contents; a whole layer."""
    x = X.cuda()
    _, layer = layers("nvfp4_bf16")
    module = nft.Moe(layer)
    logits = torch.randn(37, 8, device="cuda")
    target = nf.QuantizedTensor.empty(x.shape, "nvfp4", like=x)
    scale = torch.tensor([300.0], device="cuda")
    for _ in range(2):  # Loads kernels.
        nf.quantize(x, out=target, encode_scale=scale)
        nft.quantize(x, "mxfp8")
        module(x, logits)
    given, space = torch.zeros_like(module(x, logits)), layer.new_workspace(37)
    ids = torch.zeros(37, layer.config.top_k, dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        module(x, logits, out=given, workspace=space, topk_ids=ids)
        nf.quantize(x, out=target, encode_scale=scale)
        parts = nft.quantize(x, "mxfp8")
        y = module(x, logits)
    x.copy_(X.flip(0))
    logits.normal_()
    graph.replay()
    torch.cuda.synchronize()
    assert equal(target, nf.quantize(X.flip(0), "nvfp4", encode_scale=300.0))
    assert torch.equal(parts[0].cpu(), nf.quantize(X.flip(0), "mxfp8").values)
    assert torch.equal(y, layer.run(x, logits)) and torch.equal(given, y)
    assert torch.equal(ids, nft.route(logits, layer.config.top_k)[0])


def test_flashinfer_functions_in_graphs() -> None:
    """Scales are read when the graph runs; a layer is prepared before."""
    import narrowfloat.compat.flashinfer as fi

    x, base = X.cuda(), torch.tensor([1 / 2688], device="cuda")

    def run() -> tuple:
        return fi.nvfp4_quantize(x, base, per_token_activation=True)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        parts = run()
    x.copy_(X.flip(0))
    for factor in (1, 2, 4):
        base.copy_(torch.tensor([factor / 2688]))
        graph.replay()
        wanted = nf.quantize(X.flip(0), "nvfp4_per_token", base_decode_scale=factor / 2688,
                             math="fast")  # fmt: skip
        assert torch.equal(parts[0].cpu(), wanted.values)
        assert torch.equal(parts[2].cpu(), wanted.global_scale)
        assert torch.equal(run()[2].cpu(), wanted.global_scale)
    weights = torch.randn(8, 256, 256, device="cuda").bfloat16(), torch.randn(
        8, 256, 128, device="cuda").bfloat16()  # fmt: skip
    logits = torch.randn(37, 8, device="cuda")

    def layer() -> torch.Tensor:
        return fi.trtllm_bf16_moe(logits, None, x, *weights, 8, 2, None, None, 128, 0, 8,
                                  routing_method_type=1, use_shuffled_weight=False,
                                  weight_layout=0)  # fmt: skip

    fi.clear_prepared_cache()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="not prepared"), torch.cuda.graph(graph):
        layer()
    eager = layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer()
    graph.replay()
    assert torch.equal(captured, eager)


def test_compiled() -> None:
    """torch.compile around operators, with kernels of its own before and after."""

    def step(x: torch.Tensor) -> torch.Tensor:
        parts = nft.quantize(x * 2, "nvfp4")
        return nft.dequantize(*parts, "nvfp4", x.shape) + 1

    compiled = torch.compile(step, fullgraph=True)
    assert torch.equal(compiled(X.cuda()), step(X.cuda()))


@pytest.mark.parametrize("name", list(out_cases()))
def test_operators_with_given_results(name: str) -> None:
    """8-bit groups, KV caches, shuffles, bits, permute, combine: the CPU's bytes."""
    given, made = out_cases()[name]
    inputs = [one.cuda() if isinstance(one, torch.Tensor) else one for one in given]
    out = [torch.full_like(one, 7, device="cuda") for one in made]
    getattr(torch.ops.narrowfloat, name)(*inputs, *out)
    if name == "segment_pack_bits_out":  # The last segment ends before the array does.
        end = int(out[1][-1])
        out[0], made = out[0][:end], (made[0][:end], made[1])
    for one, two in zip(out, made, strict=True):
        assert torch.equal(one.cpu().view(torch.uint8), two.view(torch.uint8))


def test_devices_must_agree() -> None:
    """The message names the argument or the device."""
    x = X.cuda()
    q = nf.quantize(x, "nvfp4")
    with pytest.raises(ValueError, match="cuda:0"):
        nf.quantize(X, out=q)
    with pytest.raises(ValueError, match="scales: .*cpu"):
        nf.QuantizedTensor(q.values, q.scales.cpu(), q.global_scale, q.layout)
    with pytest.raises(ValueError, match="cpu"):
        nf.dequantize(q, out=torch.empty(37, 256))
    with pytest.raises(ValueError, match="16"):
        nf.quantize(x.reshape(-1)[1 : 1 + 36 * 256].reshape(36, 256), "nvfp4")


def test_no_memory_is_kept() -> None:
    """10,000 calls, refused ones too: neither of the allocator's nor of the host's."""
    import narrowfloat.compat.flashinfer as fi

    x, scale = X[:4].cuda(), torch.tensor([300.0], device="cuda")
    weights = [torch.randn(8, 256, cols, device="cuda").bfloat16() for cols in (256, 128)]
    logits = torch.randn(4, 8, device="cuda")
    _, layer = layers("nvfp4_bf16")
    others = [(getattr(torch.ops.narrowfloat, name),
               [one.cuda() if isinstance(one, torch.Tensor) else one for one in (*given, *made)])
              for name, (given, made) in out_cases().items()]  # fmt: skip

    def calls(count: int) -> None:
        for i in range(count):
            nf.quantize(x, "nvfp4").dequantize()
            fi.nvfp4_quantize(x, scale)
            fi.nvfp4_quantize(x, scale, per_token_activation=True)
            if i % 4 == 0:
                layer.run(x, logits)
                fi.trtllm_bf16_moe(logits, None, x, *weights, 8, 2, None, None, 128, 0, 8,
                                   routing_method_type=1, use_shuffled_weight=False,
                                   weight_layout=0)  # fmt: skip
            if i % 10 == 0:
                operator, given = others[i // 10 % len(others)]
                operator(*given)
                with pytest.raises(ValueError):
                    nf.quantize(x, "nvfp5")
        torch.cuda.synchronize()

    calls(1000)
    before = torch.cuda.memory_allocated(), resident_bytes()
    calls(10_000)
    assert torch.cuda.memory_allocated() == before[0]
    assert resident_bytes() - before[1] < 2_000_000
