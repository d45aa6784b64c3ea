"""narrowfloat.compat.flashinfer: experts by a table of token ids."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flashinfer_table import CLOSE, record
from test_flashinfer_quantizers import LIBRARIES

import narrowfloat.compat.flashinfer as fi

E, K = 8, 2


@pytest.fixture(params=LIBRARIES, ids=lambda lib: lib.__name__)
def lib(request: pytest.FixtureRequest) -> Any:
    """Where arrays come from."""
    return request.param


def test_hash_topk(lib: Any) -> None:
    """Experts by a table, weights from logits; a shared expert after them."""
    rng = np.random.default_rng(35)
    logits = rng.standard_normal((6, E)).astype(np.float32) * 5
    table = np.stack([rng.permutation(E)[:K] for _ in range(20)]).astype(np.int32)
    tokens = rng.integers(0, 20, 6)
    root = np.sqrt(np.log1p(np.exp(np.take_along_axis(logits, table[tokens], 1).astype(float))))
    for shared in (0, 1):
        weights, ids = fi.hash_topk(lib.make(logits), lib.make(tokens), lib.make(table), shared,
                                    2.5)  # fmt: skip
        wanted = np.full((6, K + shared), E, np.int32)
        wanted[:, :K] = table[tokens]
        assert lib.raw(ids) == wanted.tobytes()
        found = np.frombuffer(lib.raw(weights), np.float32).reshape(6, K + shared)
        assert np.allclose(found[:, :K], root / root.sum(-1, keepdims=True), rtol=1e-5)
        assert np.allclose(found[:, K:], 0.4)
    deep = fi.hash_topk(lib.make(logits - 300), lib.make(tokens), lib.make(table))[0]
    powers = np.exp(np.take_along_axis(logits.astype(float), table[tokens], 1) / 2)
    found = np.frombuffer(lib.raw(deep), np.float32).reshape(6, K)
    assert np.allclose(found, powers / powers.sum(-1, keepdims=True), rtol=1e-4)
    record("hash_topk", CLOSE, within="ids to the bit, weights 1e-4")


@pytest.mark.parametrize("name", ["input_ids", "tid2eid"])
def test_hash_topk_ids_that_lead_nowhere(lib: Any, name: str) -> None:
    """Refused on the CPU; on a GPU, whose ids nobody looks at, slots without an expert."""
    logits = np.zeros((2, E), np.float32)
    for wrong in (-1, 20 if name == "input_ids" else E, 2**31 - 1):
        tokens, table = np.array([3, 7]), np.tile(np.arange(K, dtype=np.int32), (20, 1))
        if name == "input_ids":
            tokens[1] = wrong
        else:
            table[7, 1] = wrong
        call = (lib.make(logits), lib.make(tokens), lib.make(table))
        if lib.__name__ != "Cuda":
            with pytest.raises(ValueError, match=name):
                fi.hash_topk(*call)
            continue
        weights, ids = fi.hash_topk(*call)
        expected = np.tile(np.arange(K, dtype=np.int32), (2, 1))
        expected[1, slice(None) if name == "input_ids" else slice(1, 2)] = -1
        assert lib.raw(ids) == expected.tobytes()
        valid = expected >= 0
        shares = valid / np.maximum(1, valid.sum(-1, keepdims=True))
        found = np.frombuffer(lib.raw(weights), np.float32).reshape(2, K)
        assert np.allclose(found, shares, rtol=1e-6)


def test_hash_topk_errors(lib: Any) -> None:
    """The message names the argument."""
    logits, tokens = np.zeros((2, E), np.float32), np.zeros(2, np.int64)
    table = np.zeros((4, K), np.int32)
    for word, arguments in (
        ("num_fused_shared_experts", (logits, tokens, table, 2)),
        ("routed_scaling_factor", (logits, tokens, table, 1, 0.0)),
        ("routed_scaling_factor", (logits, tokens, table, 1, float("nan"))),
        ("router_logits", (logits.astype(np.float16), tokens, table)),
        ("router_logits", (logits[0], tokens, table)),
        ("input_ids", (logits, tokens.astype(np.float32), table)),
        ("input_ids", (logits, tokens[:1], table)),
        ("tid2eid", (logits, tokens, table.astype(np.float32))),
        ("tid2eid", (logits, tokens, np.zeros((4, 33), np.int32))),
        ("tid2eid", (logits, tokens, np.zeros((4, 32), np.int32), 1)),
        ("tid2eid", (logits, tokens, table[:0])),
    ):
        made = [lib.make(value) if isinstance(value, np.ndarray) else value for value in arguments]
        with pytest.raises(ValueError, match=word):
            fi.hash_topk(*made)
