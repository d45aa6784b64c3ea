"""FlashInfer's quantizers, with additional keywords.

math: "fast", FlashInfer's bits, or "exact", IEEE arithmetic. four_over_six (of NVFP4): True, a
narrowfloat.FourOverSix, or False. Without them FlashInfer's environment variables count, for NVFP4
from 16-bit inputs as upstream.
"""

from __future__ import annotations

from math import isfinite, prod
from numbers import Real
from typing import Any

import narrowfloat as nf
from narrowfloat import _core
from narrowfloat._arrays import is_torch, maker_of
from narrowfloat._options import MathMode
from narrowfloat._shapes import round_up
from narrowfloat.compat.flashinfer._arguments import accepts, check_axes
from narrowfloat.compat.flashinfer._arrays import (
    as_type,
    check_backend,
    contiguous,
    dtype_name,
    is_column_major,
    is_on_gpu,
    layout_name,
    layout_of,
    scale_array,
    scale_of,
    swap_last,
    to_float32,
    transpose,
)
from narrowfloat.compat.flashinfer._errors import AssertedError
from narrowfloat.compat.flashinfer._layouts import e4m3
from narrowfloat.compat.flashinfer._modes import (
    as_read,
    four_over_six_option,
    is_coded,
    math_mode,
    names_of,
    names_of_gated,
    nvfp4_mode,
    nvfp4_options,
    refuse_four_over_six,
)
from narrowfloat.compat.flashinfer._recipe import UNSET, NVFP44Over6Config
from narrowfloat.compat.flashinfer.tllm_enums import SfLayout

_MASK = {"valid_rows": "mask"}
_TILE_ROWS = {"swizzled_128x4": 128, "swizzled_8x4": 8, "linear": 1}


def _matrix(scales: Any, layout: str, rows: int, blocks: int) -> Any:
    """Scales in FlashInfer's two axes."""
    tile = _TILE_ROWS[layout]
    return scales.reshape(round_up(rows, tile), blocks if tile == 1 else round_up(blocks, 4))


def _encode_scale(global_scale: Any, is_inversed: bool, math: str, input: Any) -> Any:
    """The factor: a number, or float32 [n] on the input's device."""
    scale = scale_of("global_scale", global_scale, input)
    if not is_inversed:
        return scale
    if isinstance(scale, float):
        return _core.encode_scale_from_decode(scale, math)
    encode = maker_of("global_scale", scale).empty(scale.shape, "float32")
    _core.encode_scales_from_decode(scale, encode, math)
    return encode


def _quantized(input: Any, format: str, layout: str, options: dict[str, Any]) -> tuple[Any, Any]:
    block = 16 if format.startswith("nvfp4") else 32
    q = nf.quantize(input, format, layout=layout, **options)
    rows, cols = prod(input.shape[:-1]), input.shape[-1]
    return q.values, _matrix(q.scales, layout, rows, cols // block)


@accepts("input", names=names_of("input", "global_scale"))
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
    nvfp4_4over6: Any = UNSET,
    *,
    math: MathMode | None = None,
    four_over_six: Any = None,
) -> tuple[Any, Any]:
    """(codes, scales): NVFP4, or MXFP4 with (sf_vec_size, sf_use_ue8m0) of (32, True).

    input: float32, float16, bfloat16 or float8_e4m3fn [..., K]; K a multiple of sf_vec_size. A
        column-major matrix is quantized along its columns, and so are the results.
    global_scale: float, or float32 [1] or [M]; multiplies before quantization. NVFP4 needs it,
        MXFP4 takes it with float8 input.
    is_global_scale_inversed: global_scale is the reciprocal.
    is_sf_swizzled_layout, is_sf_8x4_layout: scales in layout 128x4, 8x4 or linear.
    enable_pdl, backend: change nothing, but for denormals where FlashInfer's variable asks for
        exact arithmetic: zeros, except with "cute-dsl". math: "fast" (default) or "exact".
    nvfp4_4over6: of NVFP4; a NVFP44Over6Config, or None for off; left out, FlashInfer's environment
        variables count. four_over_six: in its place; True, a narrowfloat.FourOverSix, or False.
    Gives uint8 [..., K / 2] and uint8 [M, K / sf_vec_size]; swizzled: M rounded up to 128 or 8,
    blocks to 4. ValueError for other pairs of sf_vec_size and sf_use_ue8m0.
    """
    check_backend(backend)
    if is_column_major(input):
        parts = fp4_quantize(
            swap_last(input), global_scale, sf_vec_size, sf_use_ue8m0, is_sf_swizzled_layout,
            is_sf_8x4_layout, is_global_scale_inversed, enable_pdl, backend, nvfp4_4over6,
            math=math, four_over_six=four_over_six,
        )  # fmt: skip
        return swap_last(parts[0]), swap_last(parts[1])
    layout = layout_of(is_sf_swizzled_layout, is_sf_8x4_layout)
    if (sf_vec_size, sf_use_ue8m0) == (16, False):
        if global_scale is None:
            raise ValueError("global_scale: sf_vec_size=16 needs it")
        mode = nvfp4_mode(math, input, backend)
        scale = _encode_scale(global_scale, is_global_scale_inversed, mode, input)
        options = nvfp4_options(mode, scale, input, four_over_six, nvfp4_4over6)
        return _quantized(as_read(input, math, backend), "nvfp4", layout, options)
    if (sf_vec_size, sf_use_ue8m0) != (32, True):
        raise ValueError(
            f"sf_use_ue8m0: with sf_vec_size {sf_vec_size} expected "
            f"{sf_vec_size == 32}, got {sf_use_ue8m0}; legal are (16, False) and (32, True)"
        )
    refuse_four_over_six(four_over_six, nvfp4_4over6)
    mode = math or "fast"
    mx_options: dict[str, Any] = {"math": mode}
    if is_coded(input) and global_scale is not None:
        scale = _encode_scale(global_scale, is_global_scale_inversed, mode, input)
        mx_options["encode_scale"] = scale
    return _quantized(input, "mxfp4", layout, mx_options)


def _base_scale(scale: Any, input: Any) -> Any:
    """A number where the host has it; else float32 [1], which the kernel reads."""
    if not (isinstance(scale, Real) or hasattr(scale, "shape")):
        raise TypeError(f"a_global_sf: expected a number or float32 [1], got {scale!r}")
    shape = () if isinstance(scale, Real) else tuple(scale.shape)
    if prod(shape) != 1:
        raise ValueError(f"a_global_sf: per token expected one number, got shape {shape}")
    if is_on_gpu(scale) and is_on_gpu(input):
        return to_float32(scale, input)
    number = float(scale if isinstance(scale, Real) else scale.item())
    if not (isfinite(number) and number > 0):
        raise ValueError(f"a_global_sf: expected a finite value > 0, got {number}")
    return number


def _per_token(a: Any, a_global_sf: Any, layout: str, math: MathMode | None, backend: str,
               rows: Any, choice: Any, recipe: Any) -> tuple[Any, ...]:  # fmt: skip
    check_axes("a", a, "M", "K")
    q = nf.quantize(
        as_read(a, math, backend),
        "nvfp4_per_token",
        layout=layout,
        math=math_mode(math, backend),
        base_decode_scale=None if a_global_sf is None else _base_scale(a_global_sf, a),
        four_over_six=four_over_six_option(choice, recipe),
        row_list=rows,
    )
    return q.values, _matrix(q.scales, layout, a.shape[0], a.shape[1] // 16), q.global_scale


@accepts("a", names=names_of("a", "a_global_sf") | {"row_list": "expanded_idx_to_permuted_idx"})
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
    out_scale: Any = None,
    nvfp4_4over6: Any = UNSET,
    *,
    math: MathMode | None = None,
    four_over_six: Any = None,
) -> Any:
    """(codes, scales) of fp4_quantize(), with per_token_activation also the rows' decode scales.

    a: float32, float16, bfloat16 or float8_e4m3fn [..., K]; per token and do_shuffle: [M, K].
    a_global_sf: float, or float32 [1] or [M], multiplies before quantization; per token: float or
        float32 [1], the decode scale of a row with the maximum 1, 1 / (448 * 6).
    sfLayout: SfLayout of the scales, uint8 in two axes. sf_vec_size: 16.
    do_shuffle: rows of all results in the order of shuffle_matrix_a(.., 128); needs layout_128x4
        and a multiple of 128 rows and of 64 columns.
    per_token_activation: a third result, float32 [M], multiplies the rows when they are decoded.
    expanded_idx_to_permuted_idx: int32 [n], rows to work on, per token only.
    out_scale: float, or float32 [1]; multiplies the third result, per token only.
    enable_pdl, backend, nvfp4_4over6, math, four_over_six: as fp4_quantize() has them.
    """
    check_backend(backend)
    if sf_vec_size != 16:
        raise ValueError(f"sf_vec_size: expected 16, got {sf_vec_size}")
    layout = layout_name("sfLayout", sfLayout)
    if do_shuffle and layout != "swizzled_128x4":
        raise AssertedError(f"do_shuffle: needs layout_128x4, got {layout}")
    wanted = "linear" if do_shuffle else layout
    if per_token_activation:
        parts = _per_token(a, a_global_sf, wanted, math, backend, expanded_idx_to_permuted_idx,
                           four_over_six, nvfp4_4over6)  # fmt: skip
        if out_scale is not None:
            parts = (*parts[:2], parts[2] * scale_array("out_scale", out_scale, a))
        return _shuffled(a, parts) if do_shuffle else parts
    if out_scale is not None:
        raise ValueError("out_scale: only supported with per_token_activation=True")
    if expanded_idx_to_permuted_idx is not None:
        raise ValueError(
            "expanded_idx_to_permuted_idx: only supported with per_token_activation=True"
        )
    if do_shuffle:
        check_axes("a", a, "M", "K")
    pair = fp4_quantize(
        a, a_global_sf, 16, False, wanted != "linear", wanted == "swizzled_8x4",
        backend=backend, nvfp4_4over6=nvfp4_4over6, math=math, four_over_six=four_over_six,
    )  # fmt: skip
    return _shuffled(a, pair) if do_shuffle else pair


def _shuffled(a: Any, parts: tuple[Any, ...]) -> tuple[Any, ...]:
    """Codes, linear scales and rows' scales in the order of shuffle_matrix_a(.., 128)."""
    if a.shape[0] % 128 or a.shape[1] % 64:
        raise AssertedError(
            "a: do_shuffle needs a multiple of 128 rows and of 64 columns, got "
            f"{tuple(a.shape)}"
        )
    codes, scales, *rows = parts
    moved = nf.shuffle_scales(scales, 128).reshape(tuple(scales.shape))
    return (nf.shuffle_rows(codes, 128), moved,
            *(nf.shuffle_rows(part.reshape(-1, 1), 128).reshape(-1) for part in rows))  # fmt: skip


@accepts("a", names=names_of("a"))
def mxfp4_quantize(
    a: Any,
    backend: str = "cuda",
    enable_pdl: bool | None = None,
    sfLayout: SfLayout = SfLayout.layout_128x4,
    *,
    math: MathMode | None = None,
) -> tuple[Any, Any]:
    """MXFP4 of a: (codes uint8 [M, K / 2], scales uint8 [M, K / 32], padded as sfLayout asks).

    a: float32, float16, bfloat16 or float8_e4m3fn [M, K], K a multiple of 32. sfLayout: SfLayout.
    backend, enable_pdl: change nothing. math: "fast" (default) or "exact".
    """
    layout = layout_name("sfLayout", sfLayout)
    return fp4_quantize(
        a, None, 32, True, layout != "linear", layout == "swizzled_8x4", backend=backend, math=math
    )


@accepts("input", names=names_of_gated("input", "global_scale"))
def silu_and_mul_nvfp4_quantize(
    input: Any,
    global_scale: Any,
    sf_vec_size: int = 16,
    is_sf_swizzled_layout: bool = True,
    is_sf_8x4_layout: bool = False,
    enable_pdl: bool | None = None,
    nvfp4_4over6: Any = UNSET,
    *,
    math: MathMode | None = None,
    four_over_six: Any = None,
) -> tuple[Any, Any]:
    """fp4_quantize() of silu(first half) * second half.

    input: float16 or bfloat16 [..., 2 * K]. global_scale: float, or float32 [1] or [M].
    sf_vec_size: 16. is_sf_swizzled_layout, is_sf_8x4_layout, enable_pdl, nvfp4_4over6, math,
    four_over_six: as fp4_quantize() has them.
    Gives uint8 [..., K / 2] and uint8 [M, K / 16], padded.
    """
    if sf_vec_size != 16:
        raise ValueError(f"sf_vec_size: expected 16, got {sf_vec_size}")
    layout = layout_of(is_sf_swizzled_layout, is_sf_8x4_layout)
    options = nvfp4_options(math, global_scale, input, four_over_six, nvfp4_4over6,
                            backend="cute-dsl")  # fmt: skip
    q = nf.silu_mul_quantize(input, "nvfp4", layout=layout, **options)
    rows, cols = prod(input.shape[:-1]), input.shape[-1] // 2
    return q.values, _matrix(q.scales, layout, rows, cols // 16)


@accepts("x", "pre_quant_scale",
         names=names_of("x", "global_scale") | {"smooth": "pre_quant_scale"})  # fmt: skip
def nvfp4_quantize_smooth(
    x: Any,
    pre_quant_scale: Any,
    global_scale: Any,
    enable_pdl: bool | None = None,
    backend: str = "auto",
    *,
    math: MathMode | None = None,
    four_over_six: Any = None,
) -> tuple[Any, Any]:
    """NVFP4 of x * pre_quant_scale: (codes uint8 [M, K / 2], scales uint8, flat, layout 128x4).

    x: bfloat16 [M, K]. pre_quant_scale: bfloat16 [K]. global_scale: float, or float32 [1] or [M].
    enable_pdl, math, four_over_six: as fp4_quantize() has them. backend: FlashInfer's environment
        variables count for "cute-dsl" alone.
    """
    check_backend(backend)
    if backend != "cute-dsl":
        math, four_over_six = math or "fast", four_over_six or False
    options = nvfp4_options(math, global_scale, x, four_over_six, backend=backend)
    q = nf.smooth_quantize(x, pre_quant_scale, "nvfp4", layout="swizzled_128x4", **options)
    return q.values, q.scales


@accepts("a", names=names_of("a", "a_global_sf"))
def nvfp4_batched_quantize(
    a: Any, a_global_sf: Any, sf_vec_size: int = 16, nvfp4_4over6: Any = UNSET, *,
    math: MathMode | None = None, four_over_six: Any = None,
) -> tuple[Any, Any]:
    """NVFP4 with scales of its own for each batch.

    a: float32, float16 or bfloat16 [B, M, K]. a_global_sf: float, or float32 [1] or [M].
    sf_vec_size: 16. nvfp4_4over6, math, four_over_six: as fp4_quantize() has them.
    Gives uint8 [B, M, K / 2] and uint8 [B, bytes of the scales of a batch], layout 128x4.
    """
    if sf_vec_size != 16:
        raise ValueError(f"sf_vec_size: expected 16, got {sf_vec_size}")
    check_axes("a", a, "B", "M", "K")
    options = nvfp4_options(math, a_global_sf, a, four_over_six, nvfp4_4over6)
    q = nf.quantize(as_read(a, math), "nvfp4", layout="swizzled_128x4", batched=True, **options)
    return q.values, q.scales


def _grouped_views(q: nf.QuantizedTensor, blocks: int) -> tuple[Any, Any]:
    """Logical views: codes (M, K', B), scales (32, 4, rm, 4, rk, B)."""
    batch, rows = q.shape[0], q.shape[1]
    tiles = q.scales.reshape(batch, round_up(rows, 128) // 128, round_up(blocks, 4) // 4, 32, 4, 4)
    return transpose(q.values, 1, 2, 0), transpose(tiles, 3, 4, 1, 5, 2, 0)


@accepts("a", "mask", names=names_of("a", "a_global_sf") | _MASK)
def scaled_fp4_grouped_quantize(
    a: Any, mask: Any, a_global_sf: Any, nvfp4_4over6: Any = UNSET, *,
    math: MathMode | None = None, four_over_six: Any = None,
) -> tuple[Any, Any]:
    """NVFP4 of the first mask[b] rows of each expert; views as FlashInfer's grouped GEMM wants.

    a: float16 or bfloat16 [B, M, K]. mask: int32 [B]. a_global_sf: float32 [B], multiplies.
    nvfp4_4over6, math, four_over_six: as fp4_quantize() has them.
    Gives uint8 (M, K / 2, B) and float8_e4m3fn (32, 4, M / 128, 4, K / 64, B), rounded up; codes of
    other rows have any contents, their scales are 0.
    """
    check_axes("a", a, "B", "M", "K")
    options = nvfp4_options(math, a_global_sf, a, four_over_six, nvfp4_4over6)
    q = nf.quantize(as_read(a, math), "nvfp4", layout="swizzled_128x4", batched=True,
                    valid_rows=mask, **options)  # fmt: skip
    codes, scales = _grouped_views(q, a.shape[2] // 16)
    return codes, e4m3_view(scales)


@accepts("a", "mask", names=names_of_gated("a", "a_global_sf") | _MASK)
def silu_and_mul_scaled_nvfp4_experts_quantize(
    a: Any, mask: Any, a_global_sf: Any, nvfp4_4over6: Any = UNSET, *,
    math: MathMode | None = None, four_over_six: Any = None,
) -> tuple[Any, Any]:
    """scaled_fp4_grouped_quantize() of silu(first half) * second half.

    a: float16 or bfloat16 [B, M, 2 * K]. mask: int32 [B]. a_global_sf: float32 [B], multiplies.
    nvfp4_4over6, math, four_over_six: as fp4_quantize() has them.
    """
    check_axes("a", a, "B", "M", "2 * K")
    options = nvfp4_options(math, a_global_sf, a, four_over_six, nvfp4_4over6)
    q = nf.silu_mul_quantize(
        as_read(a, math), "nvfp4", layout="swizzled_128x4", batched=True, valid_rows=mask, **options
    )
    codes, scales = _grouped_views(q, a.shape[2] // 32)
    return codes, e4m3_view(scales)


def e4m3_view(view: Any) -> Any:
    """float8_e4m3fn elements of a view with any strides."""
    return as_type(view, "float8_e4m3fn")


@accepts("input", names=names_of("input"))
def mxfp8_quantize(
    input: Any,
    is_sf_swizzled_layout: bool = True,
    alignment: int = 32,
    enable_pdl: bool | None = None,
    backend: str = "cuda",
    sf_swizzle_layout: SfLayout | None = None,
    *,
    math: MathMode | None = None,
) -> tuple[Any, Any]:
    """MXFP8: (codes float8_e4m3fn [..., K rounded up to alignment], flat scales uint8).

    input: float32, whose codes come as uint8, float16 or bfloat16 [..., K]. alignment: a multiple
    of 32. is_sf_swizzled_layout: layout 128x4, else linear; sf_swizzle_layout: a SfLayout, comes
    first. enable_pdl, backend: change nothing. math: "fast" (default) or "exact".
    """
    check_backend(backend)
    layout = "swizzled_128x4" if is_sf_swizzled_layout else "linear"
    if sf_swizzle_layout is not None:
        layout = layout_name("sf_swizzle_layout", sf_swizzle_layout)
    q = nf.quantize(input, "mxfp8", layout=layout, alignment=alignment, math=math or "fast")
    is_plain = dtype_name(input) == "float32"
    return q.values if is_plain else e4m3(q.values), q.scales.reshape(-1)


@accepts("a", "mask", names=names_of("a") | _MASK)
def mxfp8_grouped_quantize(
    a: Any, mask: Any, backend: str = "cutile", *, math: MathMode | None = None
) -> tuple[Any, Any]:
    """MXFP8 of the first mask[b] rows of each expert; columns padded to 128.

    a: float16 or bfloat16 [B, M, K]. mask: int32 [B]. backend: changes nothing.
    math: "fast" (default) or "exact".
    Gives float8_e4m3fn (M, K, B) and uint8 (32, 4, M / 128, 4, K / 128, B), rounded up.
    """
    check_backend(backend)
    check_axes("a", a, "B", "M", "K")
    q = nf.quantize(
        a, "mxfp8", layout="swizzled_128x4", batched=True, alignment=128, valid_rows=mask,
        math=math or "fast",
    )  # fmt: skip
    codes, scales = _grouped_views(q, round_up(a.shape[2], 128) // 32)
    return e4m3_view(codes), scales


@accepts("x", names={"input": "x", "dtype": "dst_dtype"})
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
    """(codes [..., K], scales float32), a scale for each group of columns.

    x: float32, float16 or bfloat16 [..., K]. group_size: divides K. eps: least maximum of a group.
    dst_dtype: float8_e4m3fn (default), float8_e5m2 or int8; a type of torch or ml_dtypes.
    column_major_scales: scales [M, K / group_size] with strides (1, M), of [M, K] alone; else
        [..., K / group_size], dense.
    scale_tma_aligned: with it, strides (1, M rounded up to a multiple of 4).
    scale_ue8m0: with it, scales are powers of two. backend: changes nothing.
    """
    check_backend(backend)
    for name, value in (("scale_tma_aligned", scale_tma_aligned), ("scale_ue8m0", scale_ue8m0)):
        if value and not column_major_scales:
            raise AssertedError(f"{name}: requires column_major_scales=True")
    if column_major_scales:
        check_axes("x", x, "M", "K")
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
    if column_major_scales:
        scales = swap_last(scales)[: x.shape[0]]
    return codes if dtype == "int8" else as_type(codes, dtype), scales


def _dtype_word(dtype: Any) -> str:
    """Name of a type of torch, NumPy or ml_dtypes."""
    name = getattr(dtype, "__name__", None) or getattr(dtype, "name", None) or str(dtype)
    return str(name).removeprefix("torch.")


@accepts("input_tensor", names=names_of("input_tensor"))
def make_nvfp4_global_scale(
    input_tensor: Any, per_token_activation: bool, global_scale: Any = None,
    nvfp4_4over6_config: NVFP44Over6Config | None = None, *, four_over_six: Any = None,
) -> Any:  # fmt: skip
    """float32 [1]: the global scale that nvfp4_quantize() takes for a tensor.

    input_tensor: float32, float16 or bfloat16 of any shape: 448 * 6 / its largest magnitude.
    per_token_activation: 1 / (448 * 6) instead. global_scale: float, or float32 [1], given back.
    nvfp4_4over6_config: a NVFP44Over6Config; its largest block scale comes in place of 448.
        Environment variables do not count. four_over_six: in its place; True, a
        narrowfloat.FourOverSix, or False.
    """
    is_ours = four_over_six is not None and nvfp4_4over6_config is None
    option = four_over_six_option(four_over_six, UNSET if is_ours else nvfp4_4over6_config)
    largest = 6.0 * (option.e4m3_max if option else 448)
    if per_token_activation:
        return to_float32(1.0 / largest, input_tensor)
    if global_scale is not None:
        return scale_array("global_scale", global_scale, input_tensor)
    largest_of_floats = 3.4028234663852886e38  # Upstream's result for a tensor of zeros.
    found = nf.amax(contiguous(input_tensor))
    top = to_float32(largest, input_tensor)
    if is_torch(found):
        return (top / found).clamp(max=largest_of_floats)
    if found[0] == 0:
        return to_float32(largest_of_floats, input_tensor)
    return (top / found).astype("float32")
