"""Expert parallelism from Python: ranks as threads of the test, on a layer of the trained model."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from allreduce_ranks import Gathering, on_all

import narrowfloat as nf

MODEL = Path(__file__).resolve().parents[2] / "models" / "tiny-moe"
HIDDEN, EXPERTS, TOP_K, MAX_TOKENS = 256, 16, 2, 6
SIZES = {"hidden": HIDDEN, "experts": EXPERTS, "top_k": TOP_K, "max_tokens": MAX_TOKENS}
MODES = {"bf16": "mxfp4_bf16", "fp8_group": "nvfp4_fp8_exact", "mxfp8": "mxfp4_mxfp8",
         "nvfp4_per_token": "nvfp4_per_token"}  # fmt: skip


class Tokens:
    """Rows, ids and weights of one rank; one of the ids names no expert."""

    def __init__(self, rank: int, count: int) -> None:
        random = np.random.default_rng(rank)
        self.hidden = random.standard_normal((count, HIDDEN)).astype(ml_dtypes.bfloat16)
        self.ids = random.integers(0, EXPERTS, (count, TOP_K))
        if count:
            self.ids[0, 0] = EXPERTS + 3
        self.weights = random.random((count, TOP_K), dtype=np.float32)


def shard(mode: str, offset: int = 0, count: int = EXPERTS) -> nf.MoeLayer:
    """Some experts of layer 2."""
    return nf.MoeLayer.from_checkpoint(MODEL, 2, mode=mode, expert_offset=offset,
                                       local_experts=count)  # fmt: skip


def on_one_rank(layer: nf.MoeLayer, tokens: Tokens) -> np.ndarray:
    """The layer's own output."""
    return layer.run(tokens.hidden, ids=tokens.ids, weights=tokens.weights, allow_absent=True)


@pytest.mark.parametrize("payload", MODES)
def test_results(payload: str) -> None:
    """Both orders of the sum, to the bit."""
    tokens = [Tokens(0, 6), Tokens(1, 0), Tokens(2, 4)]
    mode, whole = MODES[payload], shard(MODES[payload])
    for order in ("topk", "rank"):
        group = nf.ExpertParallel.local(3, **SIZES, payload=payload, order=order)
        layers = [shard(mode, *rank.shard) for rank in group]
        assert [rank.shard for rank in group] == [(0, 6), (6, 5), (11, 5)]

        def run(number: int, group: Any = group, layers: Any = layers) -> Any:
            own = tokens[number]
            return group[number].run(layers[number], own.hidden, own.ids, own.weights)

        for own, out in zip(tokens, on_all(run, 3), strict=True):
            assert not isinstance(out, Exception), out
            if order == "topk":
                wanted = on_one_rank(whole, own)
            else:
                total = np.zeros(own.hidden.shape, np.float32)
                for layer in layers:
                    total += on_one_rank(layer, own).astype(np.float32)
                wanted = total.astype(ml_dtypes.bfloat16)
            assert out.tobytes() == wanted.tobytes(), (payload, order)


def test_places(tmp_path: Path) -> None:
    """Experts where their loads put them, with copies: the bytes of the layer on one rank."""
    tokens = [Tokens(0, 6), Tokens(1, 0), Tokens(2, 4)]
    loads = [1000 // (expert + 1) for expert in range(EXPERTS)]
    places = nf.place_experts(loads, 3, redundant=5)
    assert len(places) == 21 and set(places) == set(range(EXPERTS)) and places.count(0) == 3
    group = nf.ExpertParallel.local(3, **SIZES, order="topk", places=places)
    mode = MODES["bf16"]
    layers = [nf.MoeLayer.from_checkpoint(MODEL, 2, mode=mode, expert_offset=rank.shard[0],
                                          local_experts=rank.shard[1], places=places)
              for rank in group]  # fmt: skip
    assert [rank.shard for rank in group] == [(0, 7), (7, 7), (14, 7)]

    def run(number: int) -> Any:
        own = tokens[number]
        return group[number].run(layers[number], own.hidden, own.ids, own.weights)

    for own, out in zip(tokens, on_all(run, 3), strict=True):
        assert not isinstance(out, Exception), out
        assert out.tobytes() == on_one_rank(shard(mode), own).tobytes()
    with pytest.raises(ValueError, match="rank 0 has expert 0 twice"):
        nf.ExpertParallel.local(2, **SIZES, places=[0, 0, *range(1, EXPERTS)])
    with pytest.raises(ValueError, match="redundant: expected 0 to 32"):
        nf.place_experts(loads, 3, redundant=33)
    with pytest.raises(ValueError, match="option places: expected experts from 0 to 15, got 16"):
        nf.MoeLayer.from_checkpoint(MODEL, 2, places=[*range(EXPERTS), EXPERTS])
    file = tmp_path / "places.json"
    placement = {"format": "narrowfloat expert placement", "format_version": 1,
                 "experts": EXPERTS, "ranks": 3, "places": {"2": places}}  # fmt: skip
    file.write_text(json.dumps(placement))
    assert nf.load_places(str(file)) == {"2": places}


def test_tensor_ranks(tmp_path: Path) -> None:
    """Parts of the experts' intermediate: their sum is the layer, and no other part is read."""
    tokens = Tokens(0, 6)

    def bytes_read() -> int:
        counters = Path("/proc/self/io")
        return int(counters.read_text().split()[1]) if counters.exists() else 0

    def load(path: Path, **part: int) -> tuple[nf.MoeLayer, int]:
        before = bytes_read()
        layer = nf.MoeLayer.from_checkpoint(path, 2, out_dtype="float32", slot_dtype="float32",
                                            **part)  # fmt: skip
        return layer, bytes_read() - before

    for convention, ranks in (("nvfp4-modelopt", 8), ("mxfp8", 4)):
        path = tmp_path / convention
        nf.quantize_checkpoint(MODEL, str(path), convention)
        whole, all_bytes = load(path)
        parts = [load(path, tensor_rank=rank, tensor_ranks=ranks) for rank in range(ranks)]
        assert [layer.config.inter for layer, _ in parts] == [128 // ranks] * ranks
        assert [layer.config.add_fc2_bias for layer, _ in parts] == [True] + [False] * (ranks - 1)
        wanted = on_one_rank(whole, tokens)
        total = sum(on_one_rank(layer, tokens) for layer, _ in parts)
        assert np.linalg.norm(total - wanted) < 1e-5 * np.linalg.norm(wanted)
        # All ranks read names and the router (some kB), and each expert's columns once.
        if all_bytes > 0:
            weights = 16 * 3 * 128 * 256 * (8.25 if convention == "mxfp8" else 4.5) / 8
            rest = all_bytes - weights
            assert rest > 0
            assert sum(read for _, read in parts) < weights + ranks * (rest + 4096)
    assert nf.tensor_shard(2880, "mxfp4_bf16", 2, 9) == (640, 320)
    with pytest.raises(ValueError, match=r"tensor_ranks: .* expected one of 1, 2, 4 ranks, got 3"):
        load(path, tensor_rank=0, tensor_ranks=3)


@pytest.mark.parametrize("payload", ["bf16", "nvfp4_per_token"])
def test_rows_of_payloads(payload: str) -> None:
    """A layer computes with what dispatch() returns; quantized rows travel as they are."""
    layer, tokens = shard(MODES[payload]), Tokens(0, 4)
    rank = nf.ExpertParallel.local(1, **SIZES, payload=payload)[0]
    wanted = on_one_rank(layer, tokens)
    given = {"hidden": tokens.hidden}
    for _ in range(2):
        received = rank.dispatch(ids=tokens.ids, weights=tokens.weights, **given)
        assert received.counts.tolist() == [4]
        rows = {"hidden": received.hidden, "hidden_scales": received.hidden_scales,
                "row_scale": received.row_scale}  # fmt: skip
        results = layer.run(ids=received.ids, weights=received.weights, allow_absent=True, **rows)
        out = np.empty((2, 2, HIDDEN), ml_dtypes.bfloat16)
        assert rank.combine(received, results, out) is out
        assert out.tobytes() == wanted.tobytes()
        given = {name: array[:4] for name, array in rows.items() if array is not None}


def test_steps() -> None:
    """dispatch() and combine() alone: what travels, and sums of what the caller computes."""
    group = nf.ExpertParallel.local(2, **SIZES, payload="fp8_group", result_dtype="float32")
    tokens = [Tokens(0, 3), Tokens(1, 6)]

    def run(number: int) -> Any:
        own, rank = tokens[number], group[number]
        received = rank.dispatch(own.hidden, own.ids, own.weights)
        # Each row's result is its number of local experts.
        first, count = rank.shard
        local = ((received.ids >= first) & (received.ids < first + count)).sum(axis=1)
        results = np.broadcast_to(local[:, None], (rank.max_rows, HIDDEN)).astype(np.float32)
        out = np.empty((len(own.ids), HIDDEN), np.float32)
        assert rank.combine(received, results, out) is out
        with pytest.raises(ValueError, match="combined already"):
            rank.combine(received, results, out)
        # A stale call is refused before its results go where other ranks read.
        again = rank.dispatch(own.hidden, own.ids, own.weights)
        with pytest.raises(ValueError, match="combined already"):
            rank.combine(received, np.full_like(results, 9), out)
        rank.combine(again, results, out)
        return received, out

    for number, (received, out) in enumerate(on_all(run, 2)):
        own = tokens[number]
        valid = (own.ids < EXPERTS).sum(axis=1)
        assert (out == valid[:, None]).all()
        assert received.hidden.shape == (12, HIDDEN) and received.hidden.dtype == np.uint8
        assert received.hidden_scales.shape == (12, 2)
        for source in range(2):
            count = received.counts[source]
            block = slice(source * MAX_TOKENS, source * MAX_TOKENS + count)
            rows = np.isin(tokens[source].ids // 8, number) & (tokens[source].ids < EXPERTS)
            sent = tokens[source].hidden[rows.any(axis=1)]
            wanted = nf.quantize(sent, "fp8_1x128", layout="linear")
            assert count == len(sent)
            assert (received.hidden[block] == wanted.values.view(np.uint8)).all()
            assert (received.hidden_scales[block] == wanted.scales.reshape(-1, 2)[:count]).all()
            unsent = slice(source * MAX_TOKENS + count, (source + 1) * MAX_TOKENS)
            assert (received.ids[unsent] == -1).all()


def test_transports() -> None:
    """A function of Python, and the group's own all_gather."""
    tokens, whole = [Tokens(0, 5), Tokens(1, 2)], shard("nvfp4_per_token")
    for transport in ("all_to_all", "all_gather"):
        gathering, exchange = Gathering(2), Gathering(2)

        def run(number: int, transport: str = transport, gathering: Any = gathering,
                exchange: Any = exchange) -> Any:  # fmt: skip
            others = exchange.group(number)

            def all_to_all(send: np.ndarray, receive: np.ndarray) -> None:
                block = len(send) // 2
                sent = others.all_gather(send.tobytes())
                own = slice(number * block, (number + 1) * block)
                receive[:] = np.frombuffer(b"".join(part[own] for part in sent), np.uint8)

            options = {"all_to_all": all_to_all} if transport == "all_to_all" else {}
            options |= {"payload": "nvfp4_per_token", "order": "topk", "transport": transport}
            with nf.ExpertParallel(gathering.group(number), **SIZES, **options) as rank:
                assert rank.transport == transport and transport in repr(rank)
                own = tokens[number]
                return rank.run(shard("nvfp4_per_token", *rank.shard), own.hidden, own.ids,
                                own.weights)  # fmt: skip

        for own, out in zip(tokens, on_all(run, 2), strict=True):
            assert not isinstance(out, Exception), out
            assert out.tobytes() == on_one_rank(whole, own).tobytes()


def test_errors() -> None:
    """Each names the argument of Python."""
    with pytest.raises(ValueError, match="order: expected one of rank, topk"):
        nf.ExpertParallel.local(2, **SIZES, order="slot")
    with pytest.raises(ValueError, match="payload: expected one of bf16, fp8_group"):
        nf.ExpertParallel.local(2, **SIZES, payload="fp4")
    with pytest.raises(ValueError, match="ranks: expected 1 to 8, got 9"):
        nf.ExpertParallel.local(9, **SIZES)
    rank = nf.ExpertParallel.local(1, **SIZES)[0]
    tokens = Tokens(0, 3)
    with pytest.raises(ValueError, match=r"^hidden: expected shape \[3, 256\]"):
        rank.dispatch(tokens.hidden[:, :128].copy(), tokens.ids, tokens.weights)
    with pytest.raises(ValueError, match=r"^hidden: expected at most max_tokens = 6 tokens, got 7"):
        rank.run(shard("bf16"), Tokens(0, 7).hidden, tokens.ids, tokens.weights)
    with pytest.raises(ValueError, match="weights: expected"):
        rank.dispatch(tokens.hidden, tokens.ids, tokens.weights[:2])
    with pytest.raises(ValueError, match=r"layer: expected local_experts 16, got 4"):
        rank.run(shard("bf16", 0, 4), tokens.hidden, tokens.ids, tokens.weights)
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.copy(rank)
    rank.give_up()
    with pytest.raises(RuntimeError, match="expert parallelism: .* gave up"):
        rank.dispatch(tokens.hidden, tokens.ids, tokens.weights)


def test_explain() -> None:
    """Why a transport runs or not."""
    found = nf.explain_expert_parallel(16, **SIZES, has_all_to_all=True)
    assert found.chosen == "all_to_all"
    assert found.candidates[0].reason == "at most 8 ranks, got 16"
