"""How peers are timed: as `narrowfloat-bench bench` times the library.  Calls are captured into a
CUDA graph, inputs and outputs rotate through more memory than the L2 cache holds (at most 64 sets),
replays are timed by events, and the median counts; a call's time is that of a replay divided by its
calls.  Graph edges are plain: neither Triton nor torch.compile asks for programmatic ones.
"""

import math
import statistics

import torch

CACHE_MULTIPLE = 4
MAX_SETS = 64
MAX_CALLS = 2000


def num_sets(set_bytes: int) -> int:
    cache = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return max(2, min(MAX_SETS, CACHE_MULTIPLE * cache // set_bytes + 1))


def quantile(ordered: list[float], fraction: float) -> float:
    position = fraction * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def replay_times(call, sets: int, calls: int, replays: int, stream) -> list[float]:
    """Sorted microseconds of a call, one for each replay.  What call(index) returns is kept until
    the next call on the same set, so that outputs that a call allocates rotate too."""
    kept = {}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for index in range(calls):
            kept[index % sets] = call(index)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    with torch.cuda.stream(stream):
        graph.replay()
        events[0].record(stream)
        for event in events[1:]:
            graph.replay()
            event.record(stream)
    stream.synchronize()
    return sorted(1e3 * a.elapsed_time(b) / calls for a, b in zip(events, events[1:]))


def time_calls(call, sets: int, replay_ms: float = 3.0, replays: int = 9) -> dict:
    """call(index) works on set index % sets."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(0)  # Compiles.
    stream.synchronize()
    estimate = replay_times(call, sets, sets, 1, stream)[0]
    calls = max(sets, min(MAX_CALLS, math.ceil(1e3 * replay_ms / estimate)))
    times = replay_times(call, sets, calls, replays, stream)
    return {"median_us": statistics.median(times), "p10_us": quantile(times, 0.1),
            "p90_us": quantile(times, 0.9), "calls": calls, "replays": replays}
