"""Ranks of an all-reduce as threads of a test, or as processes that it starts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import narrowfloat as nf


def on_all(work: Callable[[int], Any], ranks: int) -> list[Any]:
    """work(rank) in a thread for each rank; results in order, or the exceptions."""

    def run(rank: int) -> Any:
        try:
            return work(rank)
        except Exception as error:
            return error

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))


class Gathering:
    """all_gather() over threads of this process."""

    def __init__(self, ranks: int) -> None:
        self._parts: list[bytes] = [b""] * ranks
        self._barrier = threading.Barrier(ranks, timeout=20)

    def group(self, rank: int) -> nf.RankGroup:
        """The group as one of the ranks has it."""

        def gather(mine: bytes) -> list[bytes]:
            self._parts[rank] = mine
            self._barrier.wait()
            parts = list(self._parts)
            self._barrier.wait()
            return parts

        return nf.RankGroup.from_function(gather, rank, len(self._parts))


def inputs_of(rank: int, tokens: int, hidden: int, dtype: Any) -> np.ndarray:
    """The partial sums of a rank, the same in all processes."""
    random = np.random.default_rng(1000 + rank)
    return random.standard_normal((tokens, hidden), dtype=np.float32).astype(dtype)


def process_rank(rank: int, size: int, folder: Path) -> None:
    """A rank in a process of its own: leaves results and error texts in the folder."""
    group = nf.RankGroup.from_files(str(folder), rank, size, job_id="test")
    found: dict[str, Any] = {}
    with nf.AllReduce(group, dtype="float32", max_tokens=16, hidden=64, deadline=20.0) as own:
        x = inputs_of(rank, 5, 64, np.float32)
        shared = inputs_of(99, 5, 64, np.float32)
        how = {"residual": shared, "gamma": shared[0]}
        result = own(x, "norm_fp8_token", **how)
        found |= {"norm": result.norm_out, "codes": result.quantized.values}
        found["sum"] = own(x, algorithm="twoshot").ar_out
        found["transport"] = own.transport
    try:
        with nf.AllReduce(group, agreement="every_call", max_tokens=16, hidden=64) as own:
            own(inputs_of(rank, 5 + rank, 64, np.float16))
    except ValueError as error:
        found["disagreement"] = str(error)
    np.savez(folder / f"rank{rank}.npz", **found)
