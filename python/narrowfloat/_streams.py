"""The CUDA stream that calls of this thread queue their work to."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from narrowfloat import _core

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def use_stream(handle: int | None = None, *, programmatic_launch: bool = False) -> Iterator[None]:
    """Within it, this thread's calls on CUDA arrays queue their work to a given stream.

    handle: a cudaStream_t as an integer, of the device of the arrays: torch's
        `stream.cuda_stream`, CuPy's `stream.ptr`. None: the current stream of the library that made
        the arrays (if it says), else of torch where it is imported, else the default stream; this
        is also what counts outside.
    programmatic_launch: kernels may start while the work queued before them still ends, and wait on
        the device for it; results are the same, short calls in a row get faster.
    """
    before = _core.set_stream(handle, programmatic_launch)
    try:
        yield
    finally:
        _core.set_stream(*before)
