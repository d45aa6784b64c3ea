"""Threads in FlashInfer's functions: kept layers that go, tiles that are measured meanwhile."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from test_flashinfer_autotune import clock, lib, nothing_known  # noqa: F401
from test_flashinfer_moe import Data, E, H, sizes

import narrowfloat.compat.flashinfer as fi
from narrowfloat.compat.flashinfer import _layers, _tuning
from narrowfloat.compat.flashinfer._tuning_file import overlap

PLAIN = {"use_shuffled_weight": False, "weight_layout": 0}
THREADS = 6


class Model:
    """Some layers, and what each gives for some numbers of tokens."""

    def __init__(self, lib: Any) -> None:  # noqa: F811
        self.lib, data = lib, Data("bf16")
        self.weights = [(lib.make(np.roll(data.w1, i, 1)), lib.make(np.roll(data.w2, i, 1)))
                        for i in range(3)]  # fmt: skip
        self.tokens = (3, 8, 21)
        self.inputs = {count: (lib.make(np.resize(data.logits, (count, E))),
                               lib.make(np.resize(data.x, (count, H))))
                       for count in self.tokens}  # fmt: skip
        places = [(i, count) for i in range(3) for count in self.tokens]
        self.wanted = {place: self.call(*place) for place in places}
        assert len(set(self.wanted.values())) == len(places)

    def call(self, layer: int, tokens: int) -> bytes:
        """One of them."""
        logits, x = self.inputs[tokens]
        weights = self.weights[layer]
        return self.lib.raw(fi.trtllm_bf16_moe(logits, None, x, *weights, **sizes(), **PLAIN))

    def calls(self, number: int, rounds: int) -> bool:
        """All of them, in an order that differs by thread."""
        places = list(self.wanted)
        order = [places[(i * (number + 1) + number) % len(places)] for i in range(rounds)]
        return all(self.call(*place) == self.wanted[place] for place in order)


def in_threads(work: Any) -> None:
    """work(number) of all at once; each must be true."""
    begin = threading.Barrier(THREADS)

    def begun(number: int) -> bool:
        begin.wait()
        return work(number)

    with ThreadPoolExecutor(THREADS) as pool:
        assert all(pool.map(begun, range(THREADS)))


def test_layers_that_are_dropped_meanwhile(lib: Any) -> None:  # noqa: F811
    """One thread forgets all layers while the others call them: same results."""
    model = Model(lib)

    def work(number: int) -> bool:
        if number:
            return model.calls(number, 40)
        for _ in range(200):
            fi.clear_prepared_cache()
            assert 0 <= fi.prepared_cache_size() <= 3
        return True

    in_threads(work)
    assert model.calls(0, 9) and fi.prepared_cache_size() == 3
    assert _layers._building == {}
    fi.clear_prepared_cache()
    assert _layers._layers == {} and _layers._finalizers == {}


def test_tiles_that_are_measured_meanwhile(lib: Any, clock: list[int]) -> None:  # noqa: F811
    """Half of the threads tune, the others call: same bytes, one tile for each."""
    if lib.__name__ == "Cuda":
        pytest.skip("the clock is one thread's")
    model = Model(lib)

    def work(number: int) -> bool:
        if number % 2:
            return model.calls(number, 40)
        with fi.autotune(tuning_buckets=[1, 8, 16]):
            return model.calls(number, 20)

    in_threads(work)
    assert clock and _tuning._entries
    for known in _tuning._entries.values():
        for i, entry in enumerate(known):
            assert entry["token_tile"] == 16
            assert not any(overlap(entry, other) for other in known[:i])
    assert model.calls(1, 9)
