"""The library of operators that narrowfloat.torch fills."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

library = torch.library.Library("narrowfloat", "DEF")


def register(name: str, real: Callable[..., object], fake: Callable[..., object]) -> None:
    """Registers an operator's function on the CPU and on a GPU, and its shape function."""
    for key in ("CPU", "CUDA"):
        library.impl(name, real, key)
    torch.library.register_fake(f"narrowfloat::{name}", fake, lib=library)
