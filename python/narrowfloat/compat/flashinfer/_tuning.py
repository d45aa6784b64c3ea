"""FlashInfer's autotune(): accepted, since every choice here is made ahead of time."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from narrowfloat.compat.flashinfer._arrays import refuse

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def autotune(
    tune_mode: bool = True,
    cache: Any = None,
    tuning_buckets: Any = None,
    round_up: Any = None,
    skip_ops: Any = None,
) -> Iterator[None]:
    """Does nothing. cache: not offered."""
    if tuning_buckets is not None and len(tuning_buckets) == 0:
        raise ValueError("tuning_buckets: expected at least one")
    refuse("cache", cache, "nothing is tuned at run time")
    yield
