"""FlashInfer's quantizers, with additional keywords.

math: "exact" or "fast". four_over_six (of NVFP4): True, a narrowfloat.FourOverSix, or False.
Without them FlashInfer's environment variables count, for NVFP4 from 16-bit inputs as upstream.
"""

from __future__ import annotations

from math import prod
from typing import Any

import narrowfloat as nf
from narrowfloat import _core
from narrowfloat._arrays import is_torch
from narrowfloat._shapes import round_up
from narrowfloat.compat.flashinfer._arrays import (
    as_bytes,
    as_type,
    check_backend,
    contiguous,
    dtype_name,
    four_over_six_option,
    is_column_major,
    layout_name,
    math_mode,
    scale_of,
    swap_last,
    to_cpu,
    to_float32,
    transpose,
)
from narrowfloat.compat.flashinfer._enums import SfLayout
from narrowfloat.compat.flashinfer._layers import host_number
from narrowfloat.compat.flashinfer._layouts import e4m3

_TILE_ROWS = {"swizzled_128x4": 128, "swizzled_8x4": 8, "linear": 1}


def _layout_of(swizzled: bool, is_8x4: bool) -> str:
    if not swizzled:
        return "linear"
    return "swizzled_8x4" if is_8x4 else "swizzled_128x4"


def _matrix(scales: Any, layout: str, rows: int, blocks: int) -> Any:
    """A scale image in FlashInfer's two axes."""
    tile = _TILE_ROWS[layout]
    return scales.reshape(round_up(rows, tile), blocks if tile == 1 else round_up(blocks, 4))


def _is_coded(input: Any) -> bool:
    """FP8, for which FlashInfer's variables do not count."""
    return dtype_name(input) in ("float8_e4m3fn", "uint8")


def _nvfp4_mode(math: str | None, input: Any) -> str:
    return (math or "exact") if _is_coded(input) else math_mode(math)


def _nvfp4_options(
    math: str | None, scale: Any, input: Any, choice: Any = None
) -> dict[str, Any]:
    """choice: the argument four_over_six."""
    is_open = choice is None and _is_coded(input)
    return {
        "math": _nvfp4_mode(math, input),
        "encode_scale": scale_of(scale, input),
        "four_over_six": None if is_open else four_over_six_option(choice),
    }


def _encode_scale(global_scale: Any, is_inversed: bool, math: str, input: Any) -> Any:
    """What multiplies: a number, or float32 [n] where the input lies."""
    scale = scale_of(global_scale, input)
    if not is_inversed:
        return scale
    if isinstance(scale, float):
        return _core.encode_scale_from_decode(scale, math)
    if math == "exact":
        return 1.0 / scale  # IEEE division, on any device.
    values = [_core.encode_scale_from_decode(float(value), math) for value in to_cpu(scale)]
    return to_float32(values, input)


def _quantized(input: Any, format: str, layout: str, options: dict[str, Any]) -> tuple[Any, Any]:
    block = 16 if format.startswith("nvfp4") else 32
    q = nf.quantize(input, format, layout=layout, **options)
    rows, cols = prod(input.shape[:-1]), input.shape[-1]
    return q.values, _matrix(q.scales, layout, rows, cols // block)


def fp4_quantize(
    input: Any,
    global_scale: Any = None,
    sf_vec_size: int = 16,
    sf_use_ue8m0: bool = False,
    is_sf_swizzled_layout: bool = True,
    is_sf_8x4_layout: bool = False,
    is_global_scale_inversed: bool = False,
    enable_pdl: bool | None = None,
    backend: str = "cuda",
    *,
    math: str | None = None,
    four_over_six: Any = None,
) -> tuple[Any, Any]:
    """(codes [..., K / 2], scales [rows, blocks] padded): NVFP4, or MXFP4 with (32, True)."""
    check_backend(backend)
    if is_column_major(input):
        parts = fp4_quantize(
            swap_last(input), global_scale, sf_vec_size, sf_use_ue8m0, is_sf_swizzled_layout,
            is_sf_8x4_layout, is_global_scale_inversed, enable_pdl, backend, math=math,
            four_over_six=four_over_six,
        )  # fmt: skip
        return swap_last(parts[0]), swap_last(parts[1])
    layout = _layout_of(is_sf_swizzled_layout, is_sf_8x4_layout)
    if (sf_vec_size, sf_use_ue8m0) == (16, False):
        if global_scale is None:
            raise ValueError("global_scale: sf_vec_size=16 needs it")
        mode = _nvfp4_mode(math, input)
        scale = _encode_scale(global_scale, is_global_scale_inversed, mode, input)
        options = _nvfp4_options(mode, scale, input, four_over_six)
        return _quantized(input, "nvfp4", layout, options)
    if (sf_vec_size, sf_use_ue8m0) != (32, True):
        raise ValueError(
            f"sf_use_ue8m0: with sf_vec_size {sf_vec_size} expected "
            f"{sf_vec_size == 32}, got {sf_use_ue8m0}; legal are (16, False) and (32, True)"
        )
    if four_over_six:
        raise ValueError("four_over_six: an option of NVFP4, not of MXFP4")
    mode = math or "exact"
    options: dict[str, Any] = {"math": mode}
    if _is_coded(input) and global_scale is not None:
        scale = _encode_scale(global_scale, is_global_scale_inversed, mode, input)
        options["encode_scale"] = scale
    return _quantized(input, "mxfp4", layout, options)


def _per_token(a: Any, a_global_sf: Any, layout: str, math: str | None, rows: Any,
               choice: Any) -> Any:
    q = nf.quantize(
        a,
        "nvfp4_per_token",
        layout=layout,
        math=math_mode(math),
        base_decode_scale=None if a_global_sf is None
        else host_number("a_global_sf", a_global_sf),
        four_over_six=four_over_six_option(choice),
        row_list=rows,
    )
    return q.values, _matrix(q.scales, layout, a.shape[0], a.shape[1] // 16), q.global_scale


def nvfp4_quantize(
    a: Any,
    a_global_sf: Any,
    sfLayout: SfLayout = SfLayout.layout_128x4,
    do_shuffle: bool = False,
    sf_vec_size: int = 16,
    enable_pdl: bool | None = None,
    backend: str = "cuda",
    per_token_activation: bool = False,
    expanded_idx_to_permuted_idx: Any = None,
    *,
    math: str | None = None,
    four_over_six: Any = None,
) -> Any:
    """(codes, scales), with per_token_activation also the rows' decode scales."""
    check_backend(backend)
    if sf_vec_size != 16:
        raise ValueError(f"sf_vec_size: expected 16, got {sf_vec_size}")
    layout = layout_name("sfLayout", sfLayout)
    if per_token_activation:
        if do_shuffle:
            raise NotImplementedError("do_shuffle: not offered with per_token_activation")
        return _per_token(a, a_global_sf, layout, math, expanded_idx_to_permuted_idx,
                          four_over_six)
    if expanded_idx_to_permuted_idx is not None:
        raise ValueError("expanded_idx_to_permuted_idx: needs per_token_activation")
    if not do_shuffle:
        return fp4_quantize(
            a, a_global_sf, 16, False, layout != "linear", layout == "swizzled_8x4", math=math,
            four_over_six=four_over_six,
        )
    rows, blocks = a.shape[0], a.shape[1] // 16
    if layout != "swizzled_128x4" or rows % 128 or blocks % 4:
        raise ValueError(
            "do_shuffle: needs layout_128x4, a multiple of 128 rows and of 64 columns; got "
            f"{layout} and {tuple(a.shape)}"
        )
    codes, scales = fp4_quantize(a, a_global_sf, 16, False, False, math=math,
                                 four_over_six=four_over_six)
    return nf.shuffle_rows(codes, 128), nf.shuffle_scales(scales, 128)


def mxfp4_quantize(
    a: Any,
    backend: str = "cuda",
    enable_pdl: bool | None = None,
    sfLayout: SfLayout = SfLayout.layout_128x4,
    *,
    math: str | None = None,
) -> tuple[Any, Any]:
    """(codes [M, K / 2], scales)."""
    layout = layout_name("sfLayout", sfLayout)
    return fp4_quantize(
        a, None, 32, True, layout != "linear", layout == "swizzled_8x4", backend=backend, math=math
    )


def silu_and_mul_nvfp4_quantize(
    input: Any,
    global_scale: Any,
    sf_vec_size: int = 16,
    is_sf_swizzled_layout: bool = True,
    is_sf_8x4_layout: bool = False,
    enable_pdl: bool | None = None,
    *,
    math: str | None = None,
    four_over_six: Any = None,
) -> tuple[Any, Any]:
    """fp4_quantize() of silu(first half) * second half."""
    if sf_vec_size != 16:
        raise ValueError(f"sf_vec_size: expected 16, got {sf_vec_size}")
    layout = _layout_of(is_sf_swizzled_layout, is_sf_8x4_layout)
    options = _nvfp4_options(math, global_scale, input, four_over_six)
    q = nf.silu_mul_quantize(input, "nvfp4", layout=layout, **options)
    rows, cols = prod(input.shape[:-1]), input.shape[-1] // 2
    return q.values, _matrix(q.scales, layout, rows, cols // 16)


def nvfp4_quantize_smooth(
    x: Any,
    pre_quant_scale: Any,
    global_scale: Any,
    enable_pdl: bool | None = None,
    backend: str = "cutlass",
    *,
    math: str | None = None,
    four_over_six: Any = None,
) -> tuple[Any, Any]:
    """(codes, flat 128x4 scales) of x * pre_quant_scale."""
    check_backend(backend)
    options = _nvfp4_options(math, global_scale, x, four_over_six)
    q = nf.smooth_quantize(x, pre_quant_scale, "nvfp4", layout="swizzled_128x4", **options)
    return q.values, q.scales


def nvfp4_batched_quantize(
    a: Any, a_global_sf: Any, sf_vec_size: int = 16, *, math: str | None = None,
    four_over_six: Any = None,
) -> tuple[Any, Any]:
    """(codes [B, M, K / 2], scales [B, image])."""
    if sf_vec_size != 16:
        raise ValueError(f"sf_vec_size: expected 16, got {sf_vec_size}")
    options = _nvfp4_options(math, a_global_sf, a, four_over_six)
    q = nf.quantize(a, "nvfp4", layout="swizzled_128x4", batched=True, **options)
    return q.values, q.scales


def _grouped_views(q: nf.QuantizedTensor, blocks: int) -> tuple[Any, Any]:
    """Logical views: codes (M, K', B), scales (32, 4, rm, 4, rk, B)."""
    batch, rows = q.shape[0], q.shape[1]
    image = q.scales.reshape(batch, round_up(rows, 128) // 128, round_up(blocks, 4) // 4, 32, 4, 4)
    return transpose(q.values, 1, 2, 0), transpose(image, 3, 4, 1, 5, 2, 0)


def scaled_fp4_grouped_quantize(
    a: Any, mask: Any, a_global_sf: Any, *, math: str | None = None, four_over_six: Any = None
) -> tuple[Any, Any]:
    """NVFP4 of the first mask[b] rows of each expert; views as FlashInfer's grouped GEMM wants."""
    options = _nvfp4_options(math, a_global_sf, a, four_over_six)
    q = nf.quantize(a, "nvfp4", layout="swizzled_128x4", batched=True, valid_rows=mask, **options)
    codes, scales = _grouped_views(q, a.shape[2] // 16)
    return codes, e4m3_view(scales)


def silu_and_mul_scaled_nvfp4_experts_quantize(
    a: Any, mask: Any, a_global_sf: Any, *, math: str | None = None, four_over_six: Any = None
) -> tuple[Any, Any]:
    """scaled_fp4_grouped_quantize() of silu(first half) * second half."""
    options = _nvfp4_options(math, a_global_sf, a, four_over_six)
    q = nf.silu_mul_quantize(
        a, "nvfp4", layout="swizzled_128x4", batched=True, valid_rows=mask, **options
    )
    codes, scales = _grouped_views(q, a.shape[2] // 32)
    return codes, e4m3_view(scales)


def e4m3_view(view: Any) -> Any:
    """float8_e4m3fn elements of a view with any strides."""
    return as_type(view, "float8_e4m3fn")


def mxfp8_quantize(
    input: Any,
    is_sf_swizzled_layout: bool = True,
    alignment: int = 32,
    enable_pdl: bool | None = None,
    backend: str = "cuda",
    sf_swizzle_layout: SfLayout | None = None,
    *,
    math: str | None = None,
) -> tuple[Any, Any]:
    """(float8_e4m3fn [..., padded K], flat scales). float32 input: codes are uint8."""
    check_backend(backend)
    layout = "swizzled_128x4" if is_sf_swizzled_layout else "linear"
    if sf_swizzle_layout is not None:
        layout = layout_name("sf_swizzle_layout", sf_swizzle_layout)
    q = nf.quantize(input, "mxfp8", layout=layout, alignment=alignment, math=math or "exact")
    is_plain = dtype_name(input) == "float32"
    return q.values if is_plain else e4m3(q.values), q.scales.reshape(-1)


def mxfp8_grouped_quantize(a: Any, mask: Any, *, math: str | None = None) -> tuple[Any, Any]:
    """MXFP8 of the first mask[b] rows of each expert; columns padded to 128."""
    q = nf.quantize(
        a, "mxfp8", layout="swizzled_128x4", batched=True, alignment=128, valid_rows=mask,
        math=math or "exact",
    )  # fmt: skip
    codes, scales = _grouped_views(q, round_up(a.shape[2], 128) // 32)
    return e4m3_view(codes), scales


def _dequantized(
    format: str, codes: Any, scales: Any, layout: str, global_scale: Any = None
) -> Any:
    """float32 on the CPU, [rows, cols]."""
    codes, scales = contiguous(to_cpu(as_type(codes, "uint8"))), as_bytes(to_cpu(scales))
    rows = prod(codes.shape[:-1])
    cols = codes.shape[-1] * (1 if format == "mxfp8" else 2)
    sizes = _core.quantized_layout(format, rows, cols, scale_layout=layout)
    scale = None
    if sizes.global_scales:
        scale = to_float32(1.0 if global_scale is None else to_cpu(global_scale), codes)
    q = nf.QuantizedTensor(codes, scales.reshape(-1), scale, sizes, (rows, cols))
    return q.dequantize("float32")


def mxfp4_dequantize(a_fp4: Any, a_sf: Any, sfLayout: SfLayout = SfLayout.layout_128x4) -> Any:
    """float32 on the CPU."""
    return _dequantized("mxfp4", a_fp4, a_sf, layout_name("sfLayout", sfLayout))


def mxfp4_dequantize_host(weight: Any, scale: Any, group_size: int = 32) -> Any:
    """float32 on the CPU, of linear scales."""
    if group_size != 32:
        raise ValueError(f"group_size: expected 32, got {group_size}")
    return _dequantized("mxfp4", weight, scale, "linear")


def e2m1_and_ufp8sf_scale_to_float(
    e2m1_tensor: Any,
    ufp8_scale_tensor: Any,
    global_scale_tensor: Any = None,
    sf_vec_size: int = 16,
    ufp8_type: int = 1,
    is_sf_swizzled_layout: bool = True,
    is_sf_8x4_layout: bool = False,
) -> Any:
    """float32 on the CPU. ufp8_type: 0 UE8M0 (sf_vec_size 32), 1 E4M3 (16)."""
    formats = {(32, 0): "mxfp4", (16, 1): "nvfp4"}
    format = formats.get((sf_vec_size, ufp8_type))
    if format is None:
        raise ValueError(
            f"ufp8_type: expected (sf_vec_size, ufp8_type) of (32, 0) or (16, 1), got "
            f"({sf_vec_size}, {ufp8_type})"
        )
    layout = _layout_of(is_sf_swizzled_layout, is_sf_8x4_layout)
    return _dequantized(format, e2m1_tensor, ufp8_scale_tensor, layout, global_scale_tensor)


def mxfp8_dequantize_host(
    input: Any,
    scale_tensor: Any,
    is_sf_swizzled_layout: bool = True,
    sf_swizzle_layout: SfLayout | None = None,
) -> Any:
    """float32 on the CPU."""
    layout = "swizzled_128x4" if is_sf_swizzled_layout else "linear"
    if sf_swizzle_layout is not None:
        layout = layout_name("sf_swizzle_layout", sf_swizzle_layout)
    return _dequantized("mxfp8", input, scale_tensor, layout)


def per_token_group_quant_8bit(
    x: Any,
    group_size: int,
    eps: float = 1e-10,
    dst_dtype: Any = None,
    column_major_scales: bool = False,
    scale_tma_aligned: bool = False,
    scale_ue8m0: bool = False,
    backend: str = "cutile",
) -> tuple[Any, Any]:
    """(float8_e4m3fn, float8_e5m2 or int8 [..., K], float32 scales).

    Scales are [..., K / group_size]; with column_major_scales [K / group_size, M], the last axis
    padded to a multiple of 4 with scale_tma_aligned.
    """
    check_backend(backend)
    for name, value in (("scale_tma_aligned", scale_tma_aligned), ("scale_ue8m0", scale_ue8m0)):
        if value and not column_major_scales:
            raise ValueError(f"{name}: expected column_major_scales with it")
    dtype = "float8_e4m3fn" if dst_dtype is None else _dtype_word(dst_dtype)
    order = "column_major_aligned" if scale_tma_aligned else "column_major"
    codes, scales = nf.quantize_group_8bit(
        x,
        group_size,
        dtype,
        eps=float(eps),
        scale_order=order if column_major_scales else "row_major",
        power_of_two_scales=scale_ue8m0,
    )
    return codes if dtype == "int8" else as_type(codes, dtype), scales


def _dtype_word(dtype: Any) -> str:
    """Name of a type of torch, NumPy or ml_dtypes."""
    name = getattr(dtype, "__name__", None) or getattr(dtype, "name", None) or str(dtype)
    return str(name).removeprefix("torch.")


def make_nvfp4_global_scale(
    input: Any, per_token_activation: bool, global_scale: Any = None, cfg: Any = None, *,
    four_over_six: Any = None,
) -> Any:  # fmt: skip
    """float32 [1]: what nvfp4_quantize() takes for a tensor."""
    if cfg is not None:
        raise NotImplementedError("cfg: not offered; four_over_six is")
    option = four_over_six_option(four_over_six)
    largest = 6.0 * (option.e4m3_max if option else 448)
    if per_token_activation:
        return to_float32(1.0 / largest, input)
    if global_scale is not None:
        return to_float32(global_scale, input)
    largest_of_floats = 3.4028234663852886e38  # What upstream gives for a tensor of zeros.
    found = nf.amax(contiguous(input))
    top = to_float32(largest, input)
    if is_torch(found):
        return (top / found).clamp(max=largest_of_floats)
    if found[0] == 0:
        return to_float32(largest_of_floats, input)
    return (top / found).astype("float32")


def _bools(x: Any) -> Any:
    """As pack_bits() takes them."""
    return contiguous(x if dtype_name(x) in ("bool", "uint8") else x != 0)


def _check_bitorder(bitorder: str) -> None:
    if bitorder not in ("big", "little"):
        raise ValueError(f"bitorder: expected big or little, got {bitorder!r}")


def packbits(x: Any, bitorder: str = "big") -> Any:
    """uint8 [n / 8]: eight bools a byte; the last one is filled with zeros."""
    _check_bitorder(bitorder)
    return nf.pack_bits(_bools(x), bitorder)


def segment_packbits(x: Any, indptr: Any, bitorder: str = "big") -> tuple[Any, Any]:
    """Each segment of bools on its own: (bytes, new offsets)."""
    _check_bitorder(bitorder)
    return nf.segment_pack_bits(_bools(x), contiguous(indptr), bitorder)
