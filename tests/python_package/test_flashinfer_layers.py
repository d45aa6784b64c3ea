"""Layers that the functions with FlashInfer's names keep."""

from __future__ import annotations

import gc
import os
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_flashinfer_moe import Data, block_major, prepared, sizes
from test_flashinfer_quantizers import LIBRARIES

import narrowfloat as nf
import narrowfloat.compat.flashinfer as fi
from narrowfloat.compat.flashinfer import _layers


@pytest.fixture(params=LIBRARIES, ids=lambda lib: lib.__name__)
def lib(request: pytest.FixtureRequest) -> Any:
    """NumPy, and torch where it is installed."""
    return request.param


def test_layers_are_kept_with_their_weights(lib: Any) -> None:
    """Once prepared, again found; gone with the weights."""
    fi.clear_prepared_cache()
    gc.collect()
    data = Data("bf16")
    w1, w2 = lib.make(block_major(prepared(data.w1, 32, True))), lib.make(
        block_major(prepared(data.w2, 32, False)))  # fmt: skip
    x, logits = lib.make(data.x), lib.make(data.logits)
    for _ in range(3):
        fi.trtllm_bf16_moe(logits, None, x, w1, w2, **sizes())
    assert fi.prepared_cache_size() == 1
    fi.trtllm_bf16_moe(logits, None, x, w1, w2, **sizes(routing_method_type=0))
    assert fi.prepared_cache_size() == 2
    if lib.__name__ != "Numpy":
        before = lib.raw(fi.trtllm_bf16_moe(logits, None, x, w1, w2, **sizes()))
        w2 *= 2
        assert lib.raw(fi.trtllm_bf16_moe(logits, None, x, w1, w2, **sizes())) != before
    del w1
    gc.collect()
    assert fi.prepared_cache_size() == 0


PLAIN = {"use_shuffled_weight": False, "weight_layout": 0}


def view_of(lib: Any, array: Any) -> Any:
    """The same memory as an object made now, through another type."""
    integers = np.int16 if lib.__name__ == "Numpy" else sys.modules["torch"].int16
    return array.view(integers).reshape(-1).view(array.dtype).reshape(array.shape)


def test_views_made_anew_are_known(lib: Any) -> None:
    """A layer belongs to the memory of its weights, and goes with it."""
    fi.clear_prepared_cache()
    gc.collect()
    data = Data("bf16")
    w1, w2 = lib.make(data.w1.copy()), lib.make(data.w2.copy())
    x, logits = lib.make(data.x), lib.make(data.logits)
    for _ in range(3):
        fi.trtllm_bf16_moe(logits, None, x, view_of(lib, w1), view_of(lib, w2), **sizes(), **PLAIN)
        gc.collect()
        assert fi.prepared_cache_size() == 1
    fi.trtllm_bf16_moe(logits, None, x, w1, w2, **sizes(), **PLAIN)
    assert fi.prepared_cache_size() == 1
    del w2
    gc.collect()
    assert fi.prepared_cache_size() == 0


def test_changes_that_are_not_counted(lib: Any) -> None:
    """They show after clear_prepared_cache()."""
    data = Data("bf16")
    w1, w2 = lib.make(data.w1.copy()), lib.make(data.w2.copy())
    x, logits = lib.make(data.x), lib.make(data.logits)
    before = lib.raw(fi.trtllm_bf16_moe(logits, None, x, w1, w2, **sizes(), **PLAIN))
    silent = w2 if lib.__name__ == "Numpy" else w2.data
    silent *= 2
    fi.clear_prepared_cache()
    assert lib.raw(fi.trtllm_bf16_moe(logits, None, x, w1, w2, **sizes(), **PLAIN)) != before


@pytest.mark.parametrize("shuffled", [True, False])
def test_layers_are_freed_with_their_weights(lib: Any, shuffled: bool,
                                             monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """The image that was un-shuffled goes, whichever of the weights went first."""
    made: list[weakref.ref[nf.MoeLayer]] = []
    prepare = nf.MoeLayer.prepare

    def watched(*args: Any, **how: Any) -> nf.MoeLayer:
        layer = prepare(*args, **how)
        made.append(weakref.ref(layer))
        return layer

    monkeypatch.setattr(nf.MoeLayer, "prepare", watched)
    for first in (0, 1):
        data = Data("bf16")
        order = (lambda w, gated: block_major(prepared(w, 32, gated))) if shuffled else (
            lambda w, gated: w.copy())  # fmt: skip
        weights = [lib.make(order(data.w1, True)), lib.make(order(data.w2, False))]
        x, logits = lib.make(data.x), lib.make(data.logits)
        options = sizes() if shuffled else {**sizes(), **PLAIN}
        fi.trtllm_bf16_moe(logits, None, x, *weights, **options)
        assert made[-1]() is not None
        del weights[first]
        gc.collect()
        assert made[-1]() is None
    assert len(made) == 2 and fi.prepared_cache_size() == 0


def resident_bytes() -> int:
    """Memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_no_memory_is_kept(lib: Any) -> None:
    """10,000 calls of a quantizer and of a layer, refused ones, and layers of weights that go."""
    if lib.__name__ == "Cuda":
        pytest.skip("the host's memory tells nothing; test_cuda.py looks at the allocator's")
    data = Data("bf16")
    w1, w2, x = lib.make(data.w1), lib.make(data.w2), lib.make(data.x[:1])
    logits, scale = lib.make(data.logits[:1]), lib.make(np.ones(1, np.float32))

    def calls(count: int) -> None:
        for i in range(count):
            fi.nvfp4_quantize(x, scale)
            fi.trtllm_bf16_moe(logits, None, x, w1, w2, **sizes(), **PLAIN)
            if i % 100 == 0:
                other = lib.make(data.w1.copy())
                fi.trtllm_bf16_moe(logits, None, x, other, w2, **sizes(), **PLAIN)
                with pytest.raises(ValueError, match="n_group"):
                    fi.trtllm_bf16_moe(logits, None, x, w1, w2, **sizes(n_group=2), **PLAIN)

    threads = nf.num_threads()
    nf.set_num_threads(1)
    try:
        calls(1000)
        before = resident_bytes()
        calls(10_000)
    finally:
        nf.set_num_threads(threads)
    assert resident_bytes() - before < 8_000_000  # Each of a hundred layers has 1.5 MB.


class OnGpu:
    """As much of a tensor on a GPU as a number is read through."""

    is_cuda, dtype, device = True, "float32", "cuda:0"

    def __init__(self, value: float) -> None:
        self.value, self.storage = value, Data.__new__(Data)

    def data_ptr(self) -> int:
        return id(self.storage)

    def untyped_storage(self) -> Any:
        return self.storage

    def __float__(self) -> float:
        return self.value


def test_numbers_on_a_gpu_are_read_in_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever wrote them; a capture has the last one that was read; nothing is left of them."""
    capturing: list[bool] = []
    monkeypatch.setattr(_layers, "is_torch", lambda array: isinstance(array, OnGpu))
    monkeypatch.setattr(_layers, "is_capturing", lambda device: bool(capturing))
    scale = OnGpu(1.0)
    for _ in range(10_000):
        scale.value += 1
        assert _layers.host_number("scale", scale) == scale.value
    assert len(_layers._numbers) == 1
    capturing.append(True)
    last, scale.value = scale.value, 3.0
    assert _layers.host_number("scale", scale) == last
    with pytest.raises(RuntimeError, match="scale: not read"):
        _layers.host_number("scale", OnGpu(1.0))
    del scale
    gc.collect()
    assert _layers._numbers == {}
    assert _layers.host_number("scale", np.float32(2)) == 2.0
