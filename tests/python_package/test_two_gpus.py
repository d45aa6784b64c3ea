"""Tensors on a second GPU while the first is current: results there, the CPU's. Needs two GPUs."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import narrowfloat as nf
import narrowfloat.compat.flashinfer as fi

torch = pytest.importorskip("torch", reason="torch is not installed; ./test.sh --with-torch")
if torch.cuda.device_count() < 2 or not nf.build_info()["cuda_enabled"]:
    pytest.skip("no two GPUs, or a build without CUDA", allow_module_level=True)

from test_flashinfer_captures import CALLS, X, raw, tensors  # noqa: E402
from torch_op_cases import functions, more_cases  # noqa: E402

import narrowfloat.torch as nft  # noqa: E402

SECOND = torch.device("cuda:1")
FORMATS = [info.name for info in nf.formats()]
TINY = Path(__file__).resolve().parents[2] / "models" / "tiny-moe"


@pytest.fixture(autouse=True)
def the_first_is_current() -> Iterator[None]:
    """Before a test and after it; nothing is left on the first GPU."""
    torch.cuda.set_device(0)
    before = torch.cuda.memory_allocated(0)
    yield
    gc.collect()
    assert torch.cuda.current_device() == 0
    assert torch.cuda.memory_allocated(0) == before


def there(value: Any) -> Any:
    """Tensors on the second GPU; anything else as it is."""
    return value.to(SECOND) if isinstance(value, torch.Tensor) else value


def flat(value: Any) -> list[Any]:
    """The tensors of a result."""
    parts = value if isinstance(value, tuple | list) else (value,)
    return [part for part in parts if isinstance(part, torch.Tensor)]


def assert_same(got: Any, wanted: Any) -> None:
    """On the second GPU, with the bytes of the CPU."""
    ours, theirs = flat(got), flat(wanted)
    assert len(ours) == len(theirs) > 0
    assert all(part.device == SECOND for part in ours)
    assert raw(tuple(ours)) == raw(tuple(theirs))


def parts_of(q: nf.QuantizedTensor) -> tuple[Any, ...]:
    """Its tensors."""
    return tuple(flat((q.values, q.scales, q.global_scale)))


@pytest.mark.parametrize("format", FORMATS)
def test_functions(format: str) -> None:
    """New results, and given ones on a stream of the second GPU."""
    x = there(X)
    wanted = nf.quantize(X, format)
    got = nf.quantize(x, format)
    assert_same(parts_of(got), parts_of(wanted))
    assert_same(got.dequantize(torch.bfloat16), wanted.dequantize(torch.bfloat16))
    assert_same(parts_of(nf.rmsnorm_quantize(x, x[0].clone(), format)),
                parts_of(nf.rmsnorm_quantize(X, X[0].clone(), format)))  # fmt: skip
    assert_same(nf.amax(x, per_row=True), nf.amax(X, per_row=True))
    target = nf.QuantizedTensor.empty(X.shape, format, like=x)
    stream = torch.cuda.Stream(SECOND)
    torch.cuda.synchronize(SECOND)
    for handle in (None, stream.cuda_stream):
        target.values.zero_()
        torch.cuda.synchronize(SECOND)
        if handle is None:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(200_000_000)
                nf.quantize(x, out=target)
        else:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(200_000_000)
            with nf.use_stream(handle):
                nf.quantize(x, out=target)
        assert not stream.query()  # The work is queued after the sleep, which has not ended.
        stream.synchronize()
        assert_same(parts_of(target), parts_of(wanted))


@pytest.mark.parametrize("name", list(CALLS))
def test_flashinfer_quantizers(name: str) -> None:
    """Scales as numbers and as tensors of the second GPU."""
    call = CALLS[name]
    got = call(there(X), tensors("cuda:1"))
    wanted = call(X, tensors("cpu"))
    if "grouped" in name:  # Rows beyond a mask have any contents.
        rows = torch.arange(16)[:, None, None] < tensors("cpu")["mask"]
        assert got[0].device == SECOND
        got = (there(got[0].cpu().view(torch.uint8) * rows), got[1])
        wanted = (wanted[0].view(torch.uint8) * rows, wanted[1])
    assert_same(got, wanted)


def layer_on(device: Any, weights: tuple[Any, Any], mode: str) -> nf.MoeLayer:
    """A layer of weights on the CPU, copied to a device."""
    config = nf.MoeConfig(hidden=256, inter=128, experts=8, top_k=2, mode=mode)
    w1, w2 = (w.to(device) for w in weights)
    if mode == "bf16":
        return nf.MoeLayer.prepare(w1, w2, config)
    return nf.MoeLayer.prepare(*(nf.quantize(w, "nvfp4", batched=True) for w in (w1, w2)), config)


def weights() -> tuple[Any, Any]:
    """Eight experts."""
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(8, 256, 256, generator=generator).bfloat16() / 16,
            torch.randn(8, 256, 128, generator=generator).bfloat16() / 11)  # fmt: skip


def close(got: Any, wanted: Any, device: Any = SECOND) -> bool:
    """Within the tolerance of all modes."""
    assert got.device == device
    error = (got.cpu().double() - wanted.double()).norm() / wanted.double().norm()
    return float(error) < 3e-2


@pytest.mark.parametrize("mode", ["bf16", "nvfp4_bf16", "nvfp4_per_token"])
def test_moe_layers(mode: str) -> None:
    """The layer, its module, its operator in a graph, and FlashInfer's function."""
    data = weights()
    host, device = layer_on("cpu", data, mode), layer_on(SECOND, data, mode)
    logits = torch.randn(128, 8, generator=torch.Generator().manual_seed(2))
    wanted = host.run(X, logits)
    x, scores = there(X), there(logits)
    got = device.run(x, scores)
    assert close(got, wanted)
    ids, _ = nf.route(scores, top_k=2)
    assert_same(ids, nf.route(logits, top_k=2)[0])
    maps = nf.permute(ids, local_experts=8)
    assert_same(maps.slot_to_row, nf.permute(ids.cpu(), local_experts=8).slot_to_row)
    module = nft.Moe(device)
    assert torch.equal(module(x, scores), got)
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream(SECOND)
    torch.cuda.synchronize(SECOND)
    with torch.cuda.device(SECOND), torch.cuda.graph(graph, stream=stream):
        captured = module(x, scores)
    captured.zero_()
    graph.replay()
    torch.cuda.synchronize(SECOND)
    assert torch.equal(captured, got)
    if mode == "bf16":
        on_second = [there(w) for w in data]
        y = fi.trtllm_bf16_moe(scores, None, x, *on_second, 8, 2, None, None, 128, 0, 8,
                               routing_method_type=1, use_shuffled_weight=False,
                               weight_layout=0)  # fmt: skip
        assert close(y, wanted)
        fi.clear_prepared_cache()


def test_checkpoint_layer() -> None:
    """Weights go from the files to the GPU that is named."""
    layer = nf.MoeLayer.from_checkpoint(TINY, 0, mode="mxfp4_bf16", device="cuda:1")
    host = nf.MoeLayer.from_checkpoint(TINY, 0, mode="mxfp4_bf16")
    logits = X.float() @ torch.from_numpy(np.array(host.router_weight)).T
    assert close(layer.run(there(X), there(logits)), host.run(X, logits))


def defined(name: str, result: Any) -> Any:
    """The part of a result that its counts cover: the rest has any contents."""
    if name == "segment_pack_bits":
        return result[0][: int(result[1][-1])], result[1]
    if name != "permute":
        return result
    places, tokens, slots, rows, experts, ends, tiles = result
    return (places, tokens[: int(rows)], slots[: int(rows)], rows, experts[: int(tiles)],
            ends[: int(tiles)], tiles)  # fmt: skip


@pytest.mark.parametrize("name", list(more_cases()))
def test_operators(name: str) -> None:
    """8-bit groups, KV caches, shuffles, bits, permute, combine: results and what is filled."""
    (theirs, _) = more_cases()[name]
    ours = tuple(map(there, more_cases()[name][0]))
    got = defined(name, getattr(torch.ops.narrowfloat, name)(*ours))
    wanted = defined(name, functions()[name](*theirs))
    assert_same((*flat(got), *flat(ours)), (*flat(wanted), *flat(theirs)))


def test_compiled() -> None:
    """torch.compile around operators."""

    def step(x: torch.Tensor) -> torch.Tensor:
        parts = nft.quantize(x * 2, "nvfp4")
        return nft.dequantize(*parts, "nvfp4", x.shape) + 1

    compiled = torch.compile(step, fullgraph=True)
    assert_same(compiled(there(X)), step(X))


def test_two_gpus_are_two_devices() -> None:
    """Tensors of both in one call: the message names what lies where."""
    x, q = there(X), nf.quantize(there(X), "nvfp4")
    with pytest.raises(ValueError, match="cuda:[01]"):
        nf.quantize(X.to("cuda:0"), out=q)
    with pytest.raises(ValueError, match="cuda:[01]"):
        nf.rmsnorm_quantize(x, X[0].to("cuda:0"), "nvfp4")
    layer = layer_on(SECOND, weights(), "bf16")
    with pytest.raises(ValueError, match="cuda:[01]"):
        layer.run(X.to("cuda:0"), torch.zeros(128, 8, device="cuda:0"))


def test_threads() -> None:
    """One for each GPU at the same time, with layers of the same weights."""
    data = weights()
    logits = torch.randn(128, 8, generator=torch.Generator().manual_seed(2))
    wanted = layer_on("cpu", data, "nvfp4_bf16").run(X, logits)
    failures: list[str] = []

    def work(index: int) -> None:
        device = torch.device("cuda", index)
        layer = layer_on(device, data, "nvfp4_bf16")
        x, scores, first = X.to(device), logits.to(device), None
        codes = nf.quantize(X, "mxfp8").values
        for _ in range(50):
            y = layer.run(x, scores)
            first = y if first is None else first
            q = nf.quantize(x, "mxfp8")
            if not torch.equal(y, first) or not torch.equal(q.values.cpu(), codes):
                failures.append(f"cuda:{index}: other bits")
        if not close(y, wanted, device):
            failures.append(f"cuda:{index}: wrong")

    threads = [threading.Thread(target=work, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
