"""Times of token tiles, for autotune().

Tiles take turns within a round, so that a change of the machine's speed meets all of them, as in
`narrowfloat moe tune`. On a GPU each run is timed by events, behind a write that fills the cache.
"""

from __future__ import annotations

import sys
import time
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import narrowfloat as nf

_TILES = (8, 16, 32, 64, 128)
_ROUNDS = 5
_REPEATS = 10
_MIN_GAIN = 1.03  # Less may be chance; files with less are refused.
_CACHE_BYTES = 128 << 20  # More than twice the L2 cache of an H100.


def _time_on_cpu(run: Callable[[], Any]) -> float:
    """Microseconds of one run, of as many as fit into a few milliseconds."""
    times = []
    end = time.perf_counter() + 5e-3
    while len(times) < _REPEATS:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
        if start > end:
            break
    return 1e6 * median(times)


def _gpu_timer(device: Any) -> Callable[[Callable[[], Any]], float]:
    torch = sys.modules["torch"]
    filler = torch.empty(_CACHE_BYTES, dtype=torch.uint8, device=device)

    def timed(run: Callable[[], Any]) -> float:
        pairs = []
        for _ in range(_REPEATS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            filler.zero_()
            begin.record()
            run()
            end.record()
            pairs.append((begin, end))
        torch.cuda.current_stream(device).synchronize()
        return 1e3 * median(begin.elapsed_time(end) for begin, end in pairs)

    return timed


def fastest_tile(
    rule: int,
    layer: nf.MoeLayer,
    with_tile: Callable[[int], nf.MoeLayer],
    runs: Callable[[nf.MoeLayer], Callable[[], Any]],
) -> dict[str, Any] | None:
    """token_tile, rule_tile and their times in microseconds; None where the rule's is the fastest.

    Raises RuntimeError while a graph is captured.
    """
    device = layer.torch_device
    timed = _time_on_cpu
    if device is not None and device.type == "cuda":
        if sys.modules["torch"].cuda.is_current_stream_capturing():
            raise RuntimeError("autotune: nothing can be measured while a graph is captured; call "
                               "once before it")  # fmt: skip
        timed = _gpu_timer(device)
    tiles = [tile for tile in _TILES if rule // 4 <= tile <= 4 * rule]
    calls = {tile: runs(with_tile(tile)) for tile in tiles}
    for call in calls.values():
        for _ in range(3):
            call()
    times: dict[int, list[float]] = {tile: [] for tile in tiles}
    for _ in range(_ROUNDS):
        for tile in tiles:
            times[tile].append(timed(calls[tile]))
    if rule not in times:
        return None
    rule_us = median(times[rule])
    best, best_gain = rule, _MIN_GAIN
    for tile in tiles:
        ratios = [mine / other for mine, other in zip(times[rule], times[tile], strict=True)]
        gain = min(median(ratios), rule_us / median(times[tile]))  # By both figures.
        if tile != rule and gain > best_gain:
            best, best_gain = tile, gain
    if best == rule:
        return None
    return {"token_tile": best, "rule_tile": rule, "us": median(times[best]), "rule_us": rule_us}
