"""FlashInfer's autotune(): layers inside it take the token tiles of a file of ours.

Nothing is measured here: `narrowfloat moe tune` writes the file.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from narrowfloat.compat.flashinfer import _layers

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def autotune(
    tune_mode: bool = True,
    cache: str | os.PathLike[str] | None = None,
    tuning_buckets: Any = None,
    round_up: Any = None,
    skip_ops: Any = None,
) -> Iterator[None]:
    """cache: a file of `narrowfloat moe tune`; read when a layer is first called inside.

    Counts in this thread (or asyncio task) alone.
    """
    if tuning_buckets is not None and len(tuning_buckets) == 0:
        raise ValueError("tuning_buckets: expected at least one")
    if cache is None:
        yield
        return
    path = os.fspath(cache)
    changed = os.stat(path).st_mtime_ns if os.path.exists(path) else 0
    token = _layers.tuning_file.set(_layers.TuningFile(path, changed))
    try:
        yield
    finally:
        _layers.tuning_file.reset(token)
