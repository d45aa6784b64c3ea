"""The versions of transformers that the hooks of this package exist in."""

from __future__ import annotations

import transformers

OLDEST = (5, 9)


def require_version() -> None:
    """ImportError for a version without the hooks."""
    found = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if found < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ImportError(
            f"narrowfloat.transformers: needs transformers {oldest} or later, got "
            f"{transformers.__version__}; pip install 'transformers>={oldest}'"
        )
