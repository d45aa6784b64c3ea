"""The CUDA stream that calls of this thread queue their work to."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from narrowfloat import _core


class _Chosen(threading.local):
    handle: int | None = None


_chosen = _Chosen()


def allocating_on(device: Any) -> AbstractContextManager[Any]:
    """Within it, torch's allocator serves the stream of use_stream().

    Memory that work of one stream left must not go to work of another one that does not wait.
    """
    handle = _chosen.handle
    if handle is None or device.type != "cuda":
        return nullcontext()
    cuda = sys.modules["torch"].cuda
    return cuda.stream(cuda.ExternalStream(handle, device=device))


def is_capturing(device: Any) -> bool:
    """Whether the stream that calls on a GPU of torch queue their work to is being captured."""
    cuda = sys.modules["torch"].cuda
    with cuda.device(device), allocating_on(device):
        return cuda.is_current_stream_capturing()


@contextmanager
def use_stream(handle: int | None = None, *, programmatic_launch: bool = False) -> Iterator[None]:
    """Within it, this thread's calls on CUDA arrays queue their work to a given stream.

    handle: a cudaStream_t as an integer, of the device of the arrays: torch's
        `stream.cuda_stream`, CuPy's `stream.ptr`. None: the current stream of the library that made
        the arrays (if it says), else of torch where it is imported, else the default stream; this
        is also what counts outside. New tensors of torch are memory of that stream, also if
        torch's own current stream is another one: wait for it (or record_stream()) before others
        read or free them. Operations of torch itself keep to torch's stream.
    programmatic_launch: kernels may start while the work queued before them still ends, and wait on
        the device for it; results are the same, short calls in a row get faster.
    """
    before = _core.set_stream(handle, programmatic_launch)
    _chosen.handle = handle
    try:
        yield
    finally:
        _core.set_stream(*before)
        _chosen.handle = before[0]
