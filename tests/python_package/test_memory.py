"""Memory after 10,000 calls of layers and of torch's operators, refused calls among them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from test_moe import plain_layer
from test_package import resident_bytes

import narrowfloat as nf

CONFIG = nf.MoeConfig(hidden=128, inter=128, experts=4, top_k=2)


needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None,
                                 reason="no torch; ./test.sh --with-torch")  # fmt: skip


@pytest.fixture(autouse=True)
def one_worker() -> Iterator[None]:
    """Threads of the library have memory of their own."""
    threads = nf.num_threads()
    nf.set_num_threads(1)
    yield
    nf.set_num_threads(threads)


def grown(calls: Callable[[int], None]) -> int:
    """Bytes that 10,000 calls add to what a thousand had."""
    calls(1000)
    before = resident_bytes()
    calls(10_000)
    return resident_bytes() - before


def test_runs_of_a_layer() -> None:
    """With new results and given ones; 50 bytes a call would show."""
    w1, w2, x, logits = plain_layer()
    layer = nf.MoeLayer.prepare(w1, w2, CONFIG)
    x, logits = x[:1].copy(), logits[:1].copy()
    out, space = np.zeros_like(x), layer.new_workspace(1)

    def calls(count: int) -> None:
        for i in range(count):
            layer.run(x, logits) if i % 2 else layer.run(x, logits, out=out, workspace=space)
            if i % 10 == 0:
                with pytest.raises(ValueError, match="logits"):
                    layer.run(x, logits[:, :2])

    references = [sys.getrefcount(array) for array in (x, logits, out, space)]
    assert grown(calls) < 500_000
    assert [sys.getrefcount(array) for array in (x, logits, out, space)] == references


@needs_torch
def test_operators_of_torch() -> None:
    """Quantizers and a layer; modules that go, and their numbers with them."""
    import torch

    import narrowfloat.torch as nft
    from narrowfloat import _torch_packed

    w1, w2, x, logits = (torch.from_numpy(np.asarray(array, np.float32)) for array in
                         plain_layer())  # fmt: skip
    layer = nf.MoeLayer.prepare(w1.bfloat16(), w2.bfloat16(), CONFIG)
    x, logits, module = x[:1].bfloat16(), logits[:1], nft.Moe(layer)
    parts: Any = nft.quantize(x, "nvfp4")
    rows = torch.zeros(1, dtype=torch.int32)

    def calls(count: int) -> None:
        for i in range(count):
            nft.quantize(x, "nvfp4_per_token", row_list=rows)
            nft.quantize(x, "nvfp4", out=parts)
            if i % 4 == 0:
                module(x, logits)
                nft.Moe(layer)(x, logits)
            if i % 10 == 0:
                with pytest.raises(ValueError, match="mxfp8"):
                    nft.quantize(x, "mxfp8", row_list=rows)

    known = set(_torch_packed._layers)
    assert grown(calls) < 500_000
    assert set(_torch_packed._layers) == known


@needs_torch
def test_other_functions() -> None:
    """8-bit groups, KV caches, shuffles, bits, permute, combine: new results and given ones."""
    import torch
    from torch_op_cases import MAKING, functions, more_cases, out_cases

    made = [(functions()[name], arguments) for name, (arguments, _) in more_cases().items()
            if name in functions() and not MAKING.get(name)]  # fmt: skip
    given = [(getattr(torch.ops.narrowfloat, name), (*arguments, *results))
             for name, (arguments, results) in out_cases().items()]  # fmt: skip
    all_calls = made + given
    assert len(made) >= 8 and len(given) >= 8

    def calls(count: int) -> None:
        for i in range(count):
            function, arguments = all_calls[i % len(all_calls)]
            function(*arguments)

    assert grown(calls) < 500_000
