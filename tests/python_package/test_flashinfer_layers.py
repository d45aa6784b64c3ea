"""Layers that the functions with FlashInfer's names keep."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_flashinfer_moe import Data, E, block_major, prepared, sizes
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


def test_new_views_are_known(lib: Any) -> None:
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
    """The un-shuffled copy is freed, whichever of the weights is freed first."""
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


def test_threads_prepare_a_layer_once(lib: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that come while one of them prepares it wait for that; an error ends the waiting."""
    data = Data("bf16")
    w1, w2 = lib.make(data.w1.copy()), lib.make(data.w2.copy())
    x, logits = lib.make(data.x), lib.make(data.logits)
    prepare, made, results = nf.MoeLayer.prepare, [], []
    begin = threading.Barrier(4)

    def slow(*args: Any, **how: Any) -> nf.MoeLayer:
        made.append(0)
        time.sleep(0.2)
        if len(made) == 1:
            raise ValueError("the first one fails")
        return prepare(*args, **how)

    def call() -> None:
        begin.wait()
        try:
            out = fi.trtllm_bf16_moe(logits, None, x, w1, w2, **sizes(), **PLAIN)
        except ValueError as error:
            results.append(str(error))
        else:
            results.append(lib.raw(out))

    monkeypatch.setattr(nf.MoeLayer, "prepare", slow)
    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 2 and results.count("the first one fails") == 1
    assert len(set(results)) == 2 and _layers._building == {}


def test_new_parameters_leave_nothing_at_the_weights(lib: Any) -> None:
    """A layer goes with the first of its arrays, and so does what waits for the others."""
    data = Data("bf16")
    w1, w2 = lib.make(data.w1.copy()), lib.make(data.w2.copy())
    x, logits = lib.make(data.x), lib.make(data.logits)
    fi.clear_prepared_cache()
    gc.collect()
    before = len(weakref.finalize._registry)
    for i in range(20):
        alpha = lib.make(np.full(E, 1 + i / 16, np.float32))
        fi.trtllm_bf16_moe(logits, None, x, w1, w2, **sizes(), **PLAIN, gemm1_alpha=alpha)
    assert fi.prepared_cache_size() <= 2
    del alpha
    gc.collect()
    assert fi.prepared_cache_size() == 0 and len(weakref.finalize._registry) <= before
    fi.trtllm_bf16_moe(logits, None, x, w1, w2, **sizes(), **PLAIN)
    fi.clear_prepared_cache()
    assert len(weakref.finalize._registry) <= before


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
    """As much of a tensor on a GPU as says which one it is."""

    is_cuda, dtype, device, shape = True, "float32", "cuda:0", ()

    def is_inference(self) -> bool:
        return True

    def stride(self) -> tuple[int, ...]:
        return ()

    def data_ptr(self) -> int:
        return id(self)


def test_a_capture_needs_prepared_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the function's weights."""
    monkeypatch.setattr(_layers, "is_torch", lambda array: isinstance(array, OnGpu))
    monkeypatch.setattr(_layers, "is_capturing", lambda device: True)
    with pytest.raises(RuntimeError, match="fc1_expert_weights: not prepared"):
        _layers.prepared("fc1_expert_weights", (OnGpu(),), (), Data)
