"""FlashInfer's packing of bits."""

from __future__ import annotations

from typing import Any

import narrowfloat as nf
from narrowfloat.compat.flashinfer._arguments import accepts
from narrowfloat.compat.flashinfer._arrays import address_of, contiguous, dtype_name, is_on_gpu


def _aligned(array: Any) -> Any:
    """Dense and, on a GPU, at an address that kernels read 16 bytes from; a copy where needed."""
    array = contiguous(array)
    return array.clone() if is_on_gpu(array) and address_of(array) % 16 else array


def _bools(x: Any) -> Any:
    """As pack_bits() takes them."""
    return _aligned(x if dtype_name(x) in ("bool", "uint8") else x != 0)


def _check_bitorder(bitorder: str) -> None:
    if bitorder not in ("big", "little"):
        raise ValueError(f"bitorder: expected big or little, got {bitorder!r}")


@accepts("x", names={"input": "x"})
def packbits(x: Any, bitorder: str = "big") -> Any:
    """uint8 [n / 8]: eight elements of x a byte; the last one is filled with zeros.

    x: bool, uint8 or any numbers [n]; an element counts as 1 unless it is 0.
    bitorder: "big", the first element in bit 7, or "little".
    """
    _check_bitorder(bitorder)
    return nf.pack_bits(_bools(x), bitorder)


@accepts("x", "indptr", names={"input": "x", "offsets": "indptr"})
def segment_packbits(x: Any, indptr: Any, bitorder: str = "big") -> tuple[Any, Any]:
    """Each segment of x on its own: (bytes uint8, new offsets of indptr's type).

    x: bool, uint8 or any numbers [n]. indptr: int32 or int64 [segments + 1], ascending.
    bitorder: as packbits() has it. Waits for a GPU, which knows how many bytes there are.
    """
    _check_bitorder(bitorder)
    return nf.segment_pack_bits(_bools(x), _aligned(indptr), bitorder)
