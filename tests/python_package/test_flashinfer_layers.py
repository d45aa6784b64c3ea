"""Layers that the functions with FlashInfer's names keep."""

from __future__ import annotations

import gc
import sys
from typing import Any

import numpy as np
import pytest
from test_flashinfer_moe import Data, block_major, prepared, sizes
from test_flashinfer_quantizers import LIBRARIES

import narrowfloat.compat.flashinfer as fi


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
