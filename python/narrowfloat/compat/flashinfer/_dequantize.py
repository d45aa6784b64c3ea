"""FlashInfer's dequantizers, whose results lie on the CPU."""

from __future__ import annotations

from math import prod
from typing import Any

import narrowfloat as nf
from narrowfloat import _core
from narrowfloat.compat.flashinfer._arguments import accepts
from narrowfloat.compat.flashinfer._arrays import (
    as_bytes,
    as_type,
    check_one_byte,
    contiguous,
    layout_name,
    layout_of,
    scale_array,
    to_cpu,
)
from narrowfloat.compat.flashinfer.tllm_enums import SfLayout


def _names(codes: str, scales: str) -> dict[str, str]:
    """A table of beginnings of errors -> arguments of a function."""
    return {"codes": codes, "scales": scales, "cols": f"{codes}: columns",
            "global_scale": "global_scale_tensor"}  # fmt: skip


def _dequantized(
    format: str, codes: Any, scales: Any, layout: str, global_scale: Any = None
) -> Any:
    """float32 on the CPU, [rows, cols]."""
    check_one_byte("codes", codes)
    check_one_byte("scales", scales)
    codes, scales = contiguous(to_cpu(as_type(codes, "uint8"))), as_bytes(to_cpu(scales))
    rows = prod(codes.shape[:-1])
    cols = codes.shape[-1] * (1 if format == "mxfp8" else 2)
    sizes = _core.quantized_layout(format, rows, cols, scale_layout=layout)
    if prod(scales.shape) != sizes.scale_count:
        raise ValueError(
            f"scales: expected {sizes.scale_count} bytes, {rows} x {sizes.scale_blocks} in layout "
            f"{layout}, got shape {tuple(scales.shape)}"
        )
    scale = None
    if sizes.global_scales:
        number = 1.0 if global_scale is None else to_cpu(global_scale)
        scale = scale_array("global_scale", number, codes)
    q = nf.QuantizedTensor(codes, scales.reshape(-1), scale, sizes, (rows, cols))
    return q.dequantize("float32")


@accepts("a_fp4", "a_sf", names=_names("a_fp4", "a_sf"))
def mxfp4_dequantize(a_fp4: Any, a_sf: Any, sfLayout: SfLayout = SfLayout.layout_128x4) -> Any:
    """float32 [M, K] on the CPU.

    a_fp4: uint8 [M, K / 2]. a_sf: uint8, the scales in sfLayout, of any shape.
    """
    return _dequantized("mxfp4", a_fp4, a_sf, layout_name("sfLayout", sfLayout))


@accepts("weight", "scale", names=_names("weight", "scale"))
def mxfp4_dequantize_host(weight: Any, scale: Any, group_size: int = 32) -> Any:
    """float32 [M, K] on the CPU, of linear scales.

    weight: uint8 [M, K / 2]. scale: uint8 [M, K / 32]. group_size: 32.
    """
    if group_size != 32:
        raise ValueError(f"group_size: expected 32, got {group_size}")
    return _dequantized("mxfp4", weight, scale, "linear")


@accepts("e2m1_tensor", "ufp8_scale_tensor", names=_names("e2m1_tensor", "ufp8_scale_tensor"))
def e2m1_and_ufp8sf_scale_to_float(
    e2m1_tensor: Any,
    ufp8_scale_tensor: Any,
    global_scale_tensor: Any = None,
    sf_vec_size: int = 16,
    ufp8_type: int = 1,
    is_sf_swizzled_layout: bool = True,
    is_sf_8x4_layout: bool = False,
) -> Any:
    """float32 [M, K] on the CPU.

    e2m1_tensor: uint8 [M, K / 2]. ufp8_scale_tensor: uint8, of any shape.
    global_scale_tensor: float32 [1], multiplies; None: 1.
    sf_vec_size, ufp8_type: (32, 0) for UE8M0 scales, (16, 1) for E4M3; NotImplementedError for the
        other two pairs.
    is_sf_swizzled_layout, is_sf_8x4_layout: scales in layout 128x4, 8x4 or linear.
    """
    formats = {(32, 0): "mxfp4", (16, 1): "nvfp4"}
    format = formats.get((sf_vec_size, ufp8_type))
    if format is None:
        is_legal = sf_vec_size in (16, 32) and ufp8_type in (0, 1)
        raise (NotImplementedError if is_legal else ValueError)(
            f"sf_vec_size, ufp8_type: expected (32, 0) or (16, 1), got ({sf_vec_size}, {ufp8_type})"
        )
    layout = layout_of(is_sf_swizzled_layout, is_sf_8x4_layout)
    return _dequantized(format, e2m1_tensor, ufp8_scale_tensor, layout, global_scale_tensor)


@accepts("input", "scale_tensor", names=_names("input", "scale_tensor"))
def mxfp8_dequantize_host(
    input: Any,
    scale_tensor: Any,
    is_sf_swizzled_layout: bool = True,
    sf_swizzle_layout: SfLayout | None = None,
) -> Any:
    """float32 [M, K] on the CPU.

    input: float8_e4m3fn or uint8 [M, K]. scale_tensor: uint8, of any shape.
    is_sf_swizzled_layout: layout 128x4, else linear; sf_swizzle_layout: a SfLayout, comes first.
    """
    layout = "swizzled_128x4" if is_sf_swizzled_layout else "linear"
    if sf_swizzle_layout is not None:
        layout = layout_name("sf_swizzle_layout", sf_swizzle_layout)
    return _dequantized("mxfp8", input, scale_tensor, layout)
