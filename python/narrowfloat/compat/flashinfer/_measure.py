"""Times of token tiles, for autotune().

Tiles alternate within a round, so that a change of the machine's speed affects all of them, as in
`narrowfloat moe tune`. On a GPU each run is timed by events, after a write that fills the cache,
all on the stream that calls use. A tile that fails is left out.
"""

from __future__ import annotations

import sys
import time
from statistics import median
from typing import TYPE_CHECKING, Any

from narrowfloat._streams import allocating_on, is_capturing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import narrowfloat as nf

_TILES = (8, 16, 32, 64, 128)
_ROUNDS = 5
_REPEATS = 10
_MIN_GAIN = 1.03  # Less may be chance; files with less are refused.
_CACHE_BYTES = 128 << 20  # More than twice the L2 cache of an H100.

# Errors of a call that cannot run or has no memory.
FAILURES = (RuntimeError, ValueError, MemoryError)


def _time_on_cpu(run: Callable[[], Any]) -> float:
    """Microseconds of one run, of as many as fit into a few milliseconds."""
    times: list[float] = []
    end = time.perf_counter() + 5e-3
    while len(times) < _REPEATS:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
        if start > end:
            break
    return 1e6 * median(times)


def _gpu_timer(device: Any) -> Callable[[Callable[[], Any]], float]:
    """As _time_on_cpu(), of what the run queues to the stream that this thread's calls use."""
    torch = sys.modules["torch"]
    with torch.cuda.device(device), allocating_on(device):
        filler = torch.empty(_CACHE_BYTES, dtype=torch.uint8, device=device)

    def timed(run: Callable[[], Any]) -> float:
        pairs = []
        with torch.cuda.device(device), allocating_on(device):
            for _ in range(_REPEATS):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                filler.zero_()
                begin.record()
                run()
                end.record()
                pairs.append((begin, end))
            torch.cuda.current_stream().synchronize()
        return 1e3 * median(begin.elapsed_time(end) for begin, end in pairs)

    return timed


def _is_on_gpu(layer: nf.MoeLayer) -> bool:
    return layer._torch_device is not None and layer._torch_device.type == "cuda"


def check_not_capturing(layer: nf.MoeLayer) -> None:
    """Raises RuntimeError while a graph is captured."""
    if _is_on_gpu(layer) and is_capturing(layer._torch_device):
        raise RuntimeError("autotune: nothing can be measured while a graph is captured; call once "
                           "before it")  # fmt: skip


def _working(calls: dict[int, Callable[[], Any]]) -> dict[int, Callable[[], Any]]:
    """Those calls that run, warmed up."""
    working = {}
    for tile, call in calls.items():
        try:
            for _ in range(3):
                call()
        except FAILURES:
            continue
        working[tile] = call
    return working


def fastest_tile(
    rule: int,
    layer: nf.MoeLayer,
    with_tile: Callable[[int], nf.MoeLayer],
    runs: Callable[[Sequence[nf.MoeLayer]], Sequence[Callable[[], Any]]],
) -> dict[str, Any] | None:
    """token_tile, rule_tile and their times in microseconds; None where the rule's is the fastest.

    Raises one of FAILURES if not even the rule's runs, or memory for measuring is missing.
    """
    timed = _gpu_timer(layer._torch_device) if _is_on_gpu(layer) else _time_on_cpu
    tiles = [tile for tile in _TILES if rule // 4 <= tile <= 4 * rule]
    calls = dict(zip(tiles, runs([with_tile(tile) for tile in tiles]), strict=True))
    calls = _working(calls)
    if rule not in calls:
        raise RuntimeError(f"autotune: the rule's tile {rule} does not run")
    times: dict[int, list[float]] = {tile: [] for tile in calls}
    for _ in range(_ROUNDS):
        for tile, call in calls.items():
            times[tile].append(timed(call))
    rule_us = median(times[rule])
    best, best_gain = rule, _MIN_GAIN
    for tile in calls:
        ratios = [mine / other for mine, other in zip(times[rule], times[tile], strict=True)]
        gain = min(median(ratios), rule_us / median(times[tile]))  # Both figures must agree.
        if tile != rule and gain > best_gain:
            best, best_gain = tile, gain
    if best == rule:
        return None
    return {"token_tile": best, "rule_tile": rule, "us": median(times[best]), "rule_us": rule_us}
