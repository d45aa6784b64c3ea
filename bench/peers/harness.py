"""How peers are timed: as `narrowfloat-bench bench` times the library.  Calls are captured into a
CUDA graph, inputs and outputs rotate through more memory than the L2 cache holds (at most 64 sets),
replays are timed by events, and the median counts; a call's time is that of a replay divided by its
calls.  Graph edges are plain: neither Triton nor torch.compile asks for programmatic ones.
"""

import math
import os
import statistics
import tempfile
import time

import torch

CACHE_MULTIPLE = 4
MAX_SETS = 64
MAX_CALLS = 2000
MIN_REPLAYS, MAX_REPLAYS = 5, 1000
BURST_SECONDS, SUSTAINED_SECONDS = 0.03, 0.3
REST_SECONDS = 0.3
# Where the peers that compile kernels at run time keep them.
CACHE_FOLDERS = ("HUMMING_CACHE_DIR", "HUMMING_TMP_DIR", "DG_JIT_CACHE_DIR")


def num_sets(set_bytes: int) -> int:
    cache = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return max(2, min(MAX_SETS, CACHE_MULTIPLE * cache // set_bytes + 1))


def quantile(ordered: list[float], fraction: float) -> float:
    position = fraction * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def capture(call, sets: int, calls: int, stream) -> torch.cuda.CUDAGraph:
    """A graph of calls.  What call(index) returns is kept until the next call on the same set, so
    that outputs that a call allocates rotate too."""
    kept = {}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for index in range(calls):
            kept[index % sets] = call(index)
    return graph


def replay_times(graph, calls: int, replays: int, stream) -> list[float]:
    """Sorted microseconds of a call, one for each replay."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    with torch.cuda.stream(stream):
        graph.replay()
        events[0].record(stream)
        for event in events[1:]:
            graph.replay()
            event.record(stream)
    stream.synchronize()
    return sorted(1e3 * a.elapsed_time(b) / calls for a, b in zip(events, events[1:]))


def summary(times: list[float], calls: int) -> dict:
    return {"median_us": statistics.median(times), "p10_us": quantile(times, 0.1),
            "p90_us": quantile(times, 0.9), "calls": calls, "replays": len(times)}


def warmed_up_stream(call, sets: int) -> torch.cuda.Stream:
    """The stream to capture on, after what the first calls compile and allocate."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for index in range(sets):
            call(index)
    stream.synchronize()
    return stream


def time_calls(call, sets: int, replay_ms: float = 3.0, replays: int = 9) -> dict:
    """call(index) works on set index % sets."""
    stream = warmed_up_stream(call, 1)
    estimate = replay_times(capture(call, sets, sets, stream), sets, 1, stream)[0]
    calls = max(sets, min(MAX_CALLS, math.ceil(1e3 * replay_ms / estimate)))
    return summary(replay_times(capture(call, sets, calls, stream), calls, replays, stream), calls)


def time_burst_and_sustained(call, sets: int) -> dict:
    """Both times of one graph with a call on every set, as `narrowfloat-bench moe bench --min-time`
    takes them: `plain` in a burst after a rest, `sustained` for long enough to lower the clock."""
    stream = warmed_up_stream(call, sets)
    graph = capture(call, sets, sets, stream)
    estimate = replay_times(graph, 1, 1, stream)[0]

    def timed(seconds: float) -> dict:
        wanted = math.ceil(1e6 * seconds / estimate)
        replays = max(MIN_REPLAYS, min(wanted, MAX_REPLAYS))
        return summary(replay_times(graph, sets, replays, stream), sets)

    time.sleep(REST_SECONDS)
    return {"plain": timed(BURST_SECONDS), "sustained": timed(SUSTAINED_SECONDS)}


def use_temporary_caches() -> tempfile.TemporaryDirectory:
    """Has peers compile into a folder that goes with this process, where the environment names no
    other; call it before they are imported."""
    folder = tempfile.TemporaryDirectory(prefix="narrowfloat-peers-")
    for name in CACHE_FOLDERS:
        os.environ.setdefault(name, os.path.join(folder.name, name.lower()))
    for name in CACHE_FOLDERS:
        os.makedirs(os.environ[name], exist_ok=True)
    return folder
