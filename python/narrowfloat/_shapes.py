"""Shapes of quantized tensors, in arithmetic that torch's symbolic extents go through."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from narrowfloat import _core

if TYPE_CHECKING:
    from collections.abc import Sequence

FORMATS = {info.name: info for info in _core.formats()}


def round_up(value: Any, multiple: int) -> Any:
    return (value + multiple - 1) // multiple * multiple


def scale_count(layout: str, rows: Any, blocks: Any) -> Any:
    """Scales of one matrix, padding included (docs/scale_layouts.md)."""
    if layout == "swizzled_128x4":
        return round_up(rows, 128) * round_up(blocks, 4)
    if layout == "swizzled_8x4":
        return round_up(rows, 8) * round_up(blocks, 4)
    if layout == "mn_major":
        return round_up(rows, 4) * blocks
    return rows * blocks


def product(extents: Sequence[Any]) -> Any:
    result: Any = 1
    for extent in extents:
        result = result * extent
    return result


def buffer_shapes(
    format: str, shape: Sequence[Any], layout: str, batched: bool, alignment: int, axis: str
) -> tuple[list[Any], list[Any], list[Any]]:
    """Shapes of values, scales and global_scale of a quantized tensor of a logical shape.

    axis: what global scales of nvfp4 range over: tensor, row or batch.
    """
    info = FORMATS[format]
    layout = layout or info.default_layout
    lead, cols = list(shape[:-1]), shape[-1]
    outer = lead[:-1] if batched else []
    rows = lead[-1] if batched else product(lead)
    value_cols = round_up(cols, alignment) if format == "mxfp8" else cols
    values = [*lead, value_cols // 2 if info.element_bits == 4 else value_cols]
    block_rows, block_cols = info.block_shape
    if block_cols == 0:
        scale_rows, blocks = 1, 1
    else:
        scale_rows = (rows + block_rows - 1) // block_rows
        blocks = (value_cols + block_cols - 1) // block_cols
    scales = [*outer, scale_rows, blocks]
    if layout != "linear":
        scales = [*outer, scale_count(layout, scale_rows, blocks)]
    if not info.has_global_scale:
        return values, scales, [0]
    if info.has_row_scale:
        return values, scales, [product(lead)]
    return values, scales, [{"row": rows, "batch": product(outer)}.get(axis, 1)]


def grouped_scales(format: str, shape: Sequence[Any], groups: Any) -> list[Any]:
    """Shape of the scales of fp8_1x128 with groups of rows, each padded to 32 (spec 8.6)."""
    blocks = round_up(shape[-1], FORMATS[format].block_shape[1] or 1) // 128
    return [(product(shape[:-1]) + 31 * groups) // 32 * 32 * blocks]
