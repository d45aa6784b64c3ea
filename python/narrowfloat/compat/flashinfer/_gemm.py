"""FlashInfer's GEMMs in block-scaled formats: one product, and products of groups.

`b` is packed at the first call and kept by identity (clear_prepared_cache()). Results differ from
upstream's in the order of sums alone.
"""

from __future__ import annotations

from typing import Any

from narrowfloat._arrays import maker_of
from narrowfloat.compat.flashinfer._arguments import accepts, check_axes
from narrowfloat.compat.flashinfer._arrays import (
    as_bytes,
    as_type,
    cast,
    contiguous,
    copy_into,
    dtype_name,
    layout_of,
    refuse,
    swap_last,
    take,
    to_float32,
    transpose,
)
from narrowfloat.compat.flashinfer._layouts import inverse, shuffle_gather
from narrowfloat.compat.flashinfer._products import (
    checked_output,
    groups_of_masks,
    groups_of_segments,
    linear_scales,
    multiply,
    packed_weights,
    rows_of_padded_segments,
)

_ONE_BYTE = ("uint8", "float4_e2m1fn_x2", "float8_e4m3fn")
_MM_FP4 = ("auto", "b12x", "cake", "cudnn", "cute-dsl", "cutedsl_low_latency", "cutlass", "trtllm")
_BF16_FP4 = ("blackwell-native", "blackwell-tiled", "cudnn", "cute-dsl", "cute-dsl-native")


def check_choice(argument: str, value: Any, known: tuple[Any, ...]) -> None:
    """ValueError for what is not among the choices."""
    if value not in known:
        listed = ", ".join(map(str, known))
        raise ValueError(f"{argument}: expected one of {listed}; got {value!r}")


def check_type(argument: str, array: Any, *types: str) -> None:
    """ValueError for elements of another type."""
    if dtype_name(array) not in types:
        raise ValueError(f"{argument}: must be {' or '.join(types)}, got {dtype_name(array)}")


def _check_k(a: Any, k: int) -> None:
    if a.shape[-1] != k:
        raise ValueError(f"a: K dimension mismatch; expected {k} columns, those of b, got "
                         f"{a.shape[-1]}")  # fmt: skip


def fp8_of_fp4(codes: Any) -> Any:
    """Two E2M1 codes a byte [m, k / 2] as E4M3 codes uint8 [m, k] of the same numbers."""
    data = as_bytes(codes)
    rows, width = data.shape
    wide = maker_of("a", data).empty((rows, width, 2), "uint8")
    wide[..., 0], wide[..., 1] = data, data >> 4
    magnitude, sign = wide & 7, (wide & 8) << 4
    # 0 and 0.5 are denormals of E2M1; all others have an exponent, 6 above E2M1's.
    is_normal = cast(magnitude >> 1 != 0, "uint8")
    bits = magnitude * 48 * (1 - is_normal) + (magnitude * 4 + 48) * is_normal
    return (bits | sign).reshape(rows, 2 * width)


def _unshuffled(array: Any, axis: int, is_shuffled: bool) -> Any:
    """Rows in canonical order of what shuffle_matrix_a(.., 128) moved."""
    if not is_shuffled:
        return array
    return take(contiguous(array), inverse(shuffle_gather("b", array.shape[axis], 32)), axis)


@accepts("a", "b", "a_descale", "b_descale")
def mm_fp4(
    a: Any, b: Any, a_descale: Any, b_descale: Any, alpha: Any = None,
    out_dtype: Any = "bfloat16", out: Any = None, block_size: int = 16,
    use_8x4_sf_layout: bool = False, backend: str = "auto", use_nvfp4: bool = True,
    enable_pdl: bool = True,
) -> Any:  # fmt: skip
    """[m, n]: NVFP4 times NVFP4, or MXFP4 times MXFP4.

    a: uint8 or float4_e2m1fn_x2 [m, k / 2]. b: the same, [k / 2, n], the transposed view of dense
    rows; with backend "trtllm" in the order of shuffle_matrix_a(.., 128), as its scales.
    a_descale, b_descale: uint8 or float8_e4m3fn in layout 128x4, of a by use_8x4_sf_layout in 8x4;
    of b also as a transposed view. alpha: float32 [1], or of NVFP4 [m], multiplies.
    out_dtype: bfloat16 or float16. out: [m, n], written to. block_size: 16 of NVFP4, 32 of MXFP4.
    use_nvfp4: bool. enable_pdl and other backends change nothing.
    """
    check_choice("backend", backend, _MM_FP4)
    check_axes("a", a, "m", "k / 2")
    check_axes("b", b, "k / 2", "n")
    for name, array in (("a", a), ("b", b), ("a_descale", a_descale), ("b_descale", b_descale)):
        check_type(name, array, *_ONE_BYTE)
    if block_size != (16 if use_nvfp4 else 32):
        raise ValueError(f"block_size: {'nvfp4' if use_nvfp4 else 'mxfp4'} only supports block_size"
                         f" = {16 if use_nvfp4 else 32}, got {block_size}")  # fmt: skip
    _check_k(a, b.shape[0])
    (m, width), n = a.shape, b.shape[1]
    blocks = 2 * width // block_size
    dtype = checked_output(out, (m, n), out_dtype, a)
    factor, each = _alpha(alpha, m, a)
    if each is not None and not use_nvfp4:
        raise ValueError("alpha: one value for each row is for NVFP4; expected one value")
    is_shuffled = backend == "trtllm"

    def parts() -> tuple[Any, Any]:
        scales = linear_scales("b_descale", b_descale, n, blocks, "swizzled_128x4")
        codes = as_bytes(swap_last(b))
        return (_unshuffled(codes, 0, is_shuffled)[None],
                _unshuffled(scales, 0, is_shuffled)[None])  # fmt: skip

    mode = "mxfp4_mxfp8" if not use_nvfp4 else "nvfp4" if each is None else "nvfp4_per_token"
    weights = packed_weights(mode, (b, b_descale), is_shuffled, parts)
    scales = linear_scales("a_descale", a_descale, m, blocks, layout_of(True, use_8x4_sf_layout))
    rows = as_bytes(a) if use_nvfp4 else fp8_of_fp4(a)
    return multiply(weights, rows, scales, dtype, out, row_scale=each, scale=factor)


def _alpha(alpha: Any, rows: int, like: Any) -> tuple[Any, Any]:
    """A factor of all rows, and one of each row or None."""
    if alpha is None:
        return 1.0, None
    check_type("alpha", alpha, "float32")
    values = to_float32(alpha, like)
    if values.shape[0] == 1:
        return values, None
    if values.shape[0] != rows:
        raise ValueError(f"alpha: must be a scalar, or one scale per row of a, {rows}; got "
                         f"{values.shape[0]}")  # fmt: skip
    return 1.0, values


@accepts("a", "b", "a_descale", "b_descale")
def mm_mxfp8(
    a: Any, b: Any, a_descale: Any, b_descale: Any, out: Any = None, out_dtype: Any = "bfloat16",
    use_8x4_sf_layout: bool = False, backend: str = "auto",
) -> Any:  # fmt: skip
    """[m, n]: MXFP8 times MXFP8.

    a: float8_e4m3fn [m, k]. b: float8_e4m3fn [k, n], the transposed view of dense rows; with
    backend "trtllm" in the order of shuffle_matrix_a(.., 128), as its scales.
    a_descale, b_descale: uint8, flat, in layout 128x4, of a by use_8x4_sf_layout in 8x4.
    out_dtype: bfloat16 or float16. out: [m, n], written to. Other backends change nothing.
    n and k are at least 128.
    """
    check_choice("backend", backend, _MM_FP4)
    check_axes("a", a, "m", "k")
    check_axes("b", b, "k", "n")
    for name, array, kind in (("a", a, "float8_e4m3fn"), ("b", b, "float8_e4m3fn"),
                              ("a_descale", a_descale, "uint8"),
                              ("b_descale", b_descale, "uint8")):  # fmt: skip
        check_type(name, array, kind)
    for name, array in (("a_descale", a_descale), ("b_descale", b_descale)):
        if len(array.shape) != 1:
            raise ValueError(f"{name}: 2D linear scales are not supported; expected flat scales in "
                             f"layout 128x4, got shape {tuple(array.shape)}")  # fmt: skip
    _check_k(a, b.shape[0])
    (m, k), n = a.shape, b.shape[1]
    if n < 128 or k < 128:
        raise ValueError(f"b: MXFP8 requires n >= 128 and k >= 128, got n={n}, k={k}")
    dtype = checked_output(out, (m, n), out_dtype if out is None else None, a)
    is_shuffled = backend == "trtllm"

    def parts() -> tuple[Any, Any]:
        scales = linear_scales("b_descale", b_descale, n, k // 32, "swizzled_128x4")
        return (_unshuffled(swap_last(b), 0, is_shuffled)[None],
                _unshuffled(scales, 0, is_shuffled)[None])  # fmt: skip

    weights = packed_weights("mxfp8", (b, b_descale), is_shuffled, parts)
    scales = linear_scales("a_descale", a_descale, m, k // 32, layout_of(True, use_8x4_sf_layout))
    return multiply(weights, contiguous(a), scales, dtype, out)


def prepare_bf16_fp4_weights(
    b: Any, b_descale: Any, alpha: Any = None, *, backend: str, block_size: int = 16
) -> tuple[Any, Any, Any]:
    """(b, b_descale, alpha) as they are: mm_bf16_fp4() packs them itself, for every backend.

    b: uint8 [n, k / 2]. b_descale: in layout 128x4. alpha: float32 [1] or None. block_size: 16.
    """
    check_choice("backend", backend, _BF16_FP4)
    if block_size != 16:
        raise ValueError(f"block_size: must be 16 for FP4, got {block_size}")
    return b, b_descale, alpha


@accepts("a", "b", "b_descale")
def mm_bf16_fp4(
    a: Any, b: Any, b_descale: Any, alpha: Any = None, *, backend: str, out_dtype: Any = None,
    out: Any = None, block_size: int = 16, enable_pdl: bool = True,
) -> Any:  # fmt: skip
    """[m, n]: bfloat16 times NVFP4, (a @ b.T) * alpha.

    a: bfloat16 [m, k]. b, b_descale, alpha: results of prepare_bf16_fp4_weights(): uint8
    [n, k / 2], scales in layout 128x4, float32 [1] or None. out_dtype: bfloat16 (default) or
    float16. out: [m, n], written to. block_size: 16. backend, enable_pdl: change nothing.
    """
    check_choice("backend", backend, _BF16_FP4)
    check_axes("a", a, "m", "k")
    check_axes("b", b, "n", "k / 2")
    if dtype_name(a) != "bfloat16":
        raise TypeError(f"a: must be bfloat16, got {dtype_name(a)}")
    if block_size != 16:
        raise ValueError(f"block_size: must be 16 for FP4, got {block_size}")
    check_type("b", b, "uint8", "float4_e2m1fn_x2")
    n, k = b.shape[0], 2 * b.shape[1]
    _check_k(a, k)
    dtype = checked_output(out, (a.shape[0], n), out_dtype, a)
    factor, each = _alpha(alpha, -1, a)
    weights = packed_weights(
        "nvfp4_bf16", (b, b_descale), None,
        lambda: (as_bytes(b)[None],
                 linear_scales("b_descale", b_descale, n, k // 16, "swizzled_128x4")[None]),
    )  # fmt: skip
    return multiply(weights, contiguous(a), None, dtype, out, row_scale=each, scale=factor)


def _check_granularity(granularity: tuple[int, int, int]) -> None:
    if tuple(granularity) != (1, 128, 128):
        raise NotImplementedError(
            f"scale_granularity_mnk: (1, 128, 128) is offered, got {tuple(granularity)}"
        )


def _check_fp8(a: Any, b: Any, a_scale: Any, b_scale: Any) -> None:
    for name, array in (("a", a), ("b", b)):
        if dtype_name(array) == "float8_e5m2":
            raise NotImplementedError(f"{name}: float8_e5m2 is not offered; float8_e4m3fn is")
        check_type(name, array, "float8_e4m3fn")
    for name, array in (("a_scale", a_scale), ("b_scale", b_scale)):
        check_type(name, array, "float32")
    if a.shape[-1] != b.shape[-1]:
        raise ValueError(f"a: Shape mismatch. a.shape[-1] = {a.shape[-1]}, b.shape[-1] = "
                         f"{b.shape[-1]}")  # fmt: skip


def _oriented(argument: str, scales: Any, shape: tuple[int, ...], is_major_mn: bool) -> Any:
    """Scales whose last two axes may be exchanged, as [.., rows, blocks]."""
    wanted = (*shape[:-2], shape[-1], shape[-2]) if is_major_mn else shape
    if tuple(scales.shape) != wanted:
        raise ValueError(f"{argument}: expected shape {wanted}, got {tuple(scales.shape)}")
    return swap_last(scales) if is_major_mn else scales


def _fp8_weights(b: Any, b_scale: Any, is_major_mn: bool) -> Any:
    """Packed weights [groups, n, k] with a scale for each 128 x 128 elements."""
    groups, n, k = b.shape
    shape = (groups, -(-n // 128), -(-k // 128))
    scales = _oriented("b_scale", b_scale, shape, is_major_mn)
    return packed_weights("fp8_block", (b, b_scale), is_major_mn, lambda: (b, scales))


@accepts("a", "b", "a_scale", "b_scale")
def gemm_fp8_nt_groupwise(
    a: Any, b: Any, a_scale: Any, b_scale: Any, scale_major_mode: str | None = None,
    mma_sm: int = 1, scale_granularity_mnk: tuple[int, int, int] = (1, 128, 128), out: Any = None,
    out_dtype: Any = None, backend: str = "cutlass",
) -> Any:  # fmt: skip
    """[m, n]: a @ b.T of FP8 with float32 scales for 1 x 128 elements of a and 128 x 128 of b.

    a: float8_e4m3fn [m, k]. b: float8_e4m3fn [n, k].
    a_scale, b_scale: float32; in scale_major_mode "K" [m, k / 128] and [n / 128, k / 128], in "MN"
    both transposed; in None, backend "trtllm"'s, a's as they are and b's transposed.
    out: [m, n], written to. out_dtype: bfloat16 (default) or float16. scale_granularity_mnk: the
    default. mma_sm, backend: change nothing else.
    """
    check_choice("backend", backend, ("cutlass", "trtllm", "cutile"))
    check_choice("scale_major_mode", scale_major_mode, ("MN", "K", None))
    check_choice("mma_sm", mma_sm, (1, 2))
    check_axes("a", a, "m", "k")
    check_axes("b", b, "n", "k")
    _check_granularity(scale_granularity_mnk)
    _check_fp8(a, b, a_scale, b_scale)
    (m, k), n = a.shape, b.shape[0]
    dtype = checked_output(out, (m, n), None if out is not None else out_dtype, a)
    if scale_major_mode is None and backend == "cutlass":
        raise ValueError("scale_major_mode: expected MN or K with backend cutlass, got None")
    is_trtllm = scale_major_mode is None and backend == "trtllm"
    major = scale_major_mode == "MN"
    scales = _oriented("a_scale", a_scale, (m, -(-k // 128)), major)
    check_axes("b_scale", b_scale, "n / 128", "k / 128")
    weights = _fp8_weights(b[None], b_scale[None], major or is_trtllm)
    return multiply(weights, contiguous(a), scales, dtype, out)


@accepts("a", "b", "a_scale", "b_scale", "m_indptr")
def group_gemm_fp8_nt_groupwise(
    a: Any, b: Any, a_scale: Any, b_scale: Any, m_indptr: Any,
    scale_granularity_mnk: tuple[int, int, int] = (1, 128, 128), scale_major_mode: str = "MN",
    mma_sm: int = 1, out: Any = None, out_dtype: Any = None, backend: str = "trtllm",
    segment_alignment: int = 1,
) -> Any:  # fmt: skip
    """[rows, n]: gemm_fp8_nt_groupwise() of segments of rows, with weights of each.

    a: float8_e4m3fn [rows, k]. b: float8_e4m3fn [groups, n, k]. m_indptr: int32 [groups + 1].
    a_scale, b_scale: float32; in scale_major_mode "K" [rows, k / 128] and [groups, n / 128,
    k / 128], in "MN" with their last two axes exchanged.
    out: [rows, n], written to. out_dtype: bfloat16 (default) or float16. scale_granularity_mnk: the
    default. mma_sm, backend, segment_alignment: change nothing.
    """
    check_choice("backend", backend, ("trtllm", "cutile"))
    check_choice("scale_major_mode", scale_major_mode, ("MN", "K"))
    check_choice("mma_sm", mma_sm, (1, 2))
    if segment_alignment < 1:
        raise ValueError(f"segment_alignment: must be >= 1, got {segment_alignment}")
    check_axes("a", a, "rows", "k")
    check_axes("b", b, "groups", "n", "k")
    _check_granularity(scale_granularity_mnk)
    _check_fp8(a, b, a_scale, b_scale)
    (rows, k), (count, n) = a.shape, b.shape[:2]
    groups = _segments(m_indptr, rows, count)
    dtype = checked_output(out, (rows, n), out_dtype, a)
    major = scale_major_mode == "MN"
    scales = _oriented("a_scale", a_scale, (rows, -(-k // 128)), major)
    weights = _fp8_weights(b, b_scale, major)
    return multiply(weights, contiguous(a), scales, dtype, out, groups=groups)


def _segments(m_indptr: Any, rows: int, groups: int) -> Any:
    check_type("m_indptr", m_indptr, "int32")
    if tuple(m_indptr.shape) != (groups + 1,):
        raise ValueError(f"b: b.shape[0] must equal num_groups, {m_indptr.shape[0] - 1} of "
                         f"m_indptr; got {groups}")  # fmt: skip
    return groups_of_segments(m_indptr, rows, groups)


def _segment_scales(argument: str, scales: Any, m_indptr: Any, groups: Any, blocks: int) -> Any:
    """Linear scales [rows, blocks] of packed ones in which each segment begins a tile of rows."""
    held = as_bytes(scales).reshape(-1).shape[0] // (-(-blocks // 4) * 4)
    linear = linear_scales(argument, scales, held, blocks, "swizzled_128x4")
    return linear[rows_of_padded_segments(m_indptr, groups, held)]


def _check_tiles(mma_sm: int, tile_m: int, tile_n: int, tile_k: int) -> None:
    """ValueError for tiles that upstream has not; they change nothing."""
    check_choice("mma_sm", mma_sm, (1, 2))
    check_choice("tile_m", tile_m, (128,))
    check_choice("tile_n", tile_n, (32, 64, 128, 192, 256))
    check_choice("tile_k", tile_k, (128, 256))


def _check_group_shape(a: Any, n: int, k: int, width: int) -> None:
    if a.shape[1] != width:
        raise ValueError(f"a: a.shape[1] must equal {width}, from k of b, got {a.shape[1]}")
    if n % 8 or k % 128:
        raise ValueError(f"b: n must be a multiple of 8 and k of 128, got n={n}, k={k}")


@accepts("a", "b", "a_scale", "b_scale", "m_indptr")
def group_gemm_mxfp8_mxfp4_nt_groupwise(
    a: Any, b: Any, a_scale: Any, b_scale: Any, m_indptr: Any, mma_sm: int = 1, tile_m: int = 128,
    tile_n: int = 128, tile_k: int = 128, swap_ab: bool = True, out: Any = None,
    out_dtype: Any = None,
) -> Any:  # fmt: skip
    """[rows, n]: MXFP8 segments of rows times the MXFP4 weights of each.

    a: float8_e4m3fn [rows, k]. b: uint8 [groups, n, k / 2]. m_indptr: int32 [groups + 1].
    a_scale: uint8 [padded rows, k / 32] in layout 128x4, in which each segment begins at a multiple
    of 128 rows: segment i at (m_indptr[i] + 127 * i) / 128 * 128, rounded down. b_scale: uint8
    [groups, padded n, k / 32] in layout 128x4.
    out: [rows, n], written to. out_dtype: bfloat16 (default) or float16.
    mma_sm, tile_m, tile_n, tile_k, swap_ab: change nothing.
    """
    _check_tiles(mma_sm, tile_m, tile_n, tile_k)
    if dtype_name(a) == "float8_e5m2":
        raise NotImplementedError("a: float8_e5m2 is not offered; float8_e4m3fn is")
    check_type("a", a, "float8_e4m3fn")
    return _group_fp4("mxfp4_mxfp8", a, b, a_scale, b_scale, m_indptr, 32, 1.0, out, out_dtype)


group_gemm_mxfp4_nt_groupwise = group_gemm_mxfp8_mxfp4_nt_groupwise


@accepts("a", "b", "a_scale", "b_scale", "m_indptr")
def group_gemm_nvfp4_nt_groupwise(
    a: Any, b: Any, a_scale: Any, b_scale: Any, m_indptr: Any, alpha: Any = None,
    tile_m: int = 128, tile_n: int = 128, tile_k: int = 128, swap_ab: bool = True, out: Any = None,
    out_dtype: Any = None,
) -> Any:  # fmt: skip
    """[rows, n]: NVFP4 segments of rows times the NVFP4 weights of each.

    a: uint8 [rows, k / 2]. b: uint8 [groups, n, k / 2]. m_indptr: int32 [groups + 1].
    a_scale, b_scale: as group_gemm_mxfp8_mxfp4_nt_groupwise() has them, of 16 elements.
    alpha: float32 [groups], multiplies; None: 1. out: [rows, n], written to.
    out_dtype: bfloat16 (default) or float16. tile_m, tile_n, tile_k, swap_ab: change nothing.
    """
    _check_tiles(1, tile_m, tile_n, tile_k)
    check_type("a", a, "uint8")
    factor: Any = 1.0
    if alpha is not None and tuple(alpha.shape) != (0,):
        check_type("alpha", alpha, "float32")
        if tuple(alpha.shape) != (b.shape[0],):
            raise ValueError(f"alpha: must be empty or have shape {(b.shape[0],)}, got "
                             f"{tuple(alpha.shape)}")  # fmt: skip
        factor = alpha
    return _group_fp4("nvfp4", a, b, a_scale, b_scale, m_indptr, 16, factor, out, out_dtype)


def _group_fp4(mode: str, a: Any, b: Any, a_scale: Any, b_scale: Any, m_indptr: Any, block: int,
               factor: Any, out: Any, out_dtype: Any) -> Any:  # fmt: skip
    check_axes("a", a, "rows", "k")
    check_axes("b", b, "groups", "n", "k / 2")
    for name, array in (("b", b), ("a_scale", a_scale), ("b_scale", b_scale)):
        check_type(name, array, "uint8")
    (count, n, width), rows = b.shape, a.shape[0]
    k = 2 * width
    _check_group_shape(a, n, k, k if block == 32 else width)
    groups = _segments(m_indptr, rows, count)
    dtype = checked_output(out, (rows, n), out_dtype, a)
    scales = _segment_scales("a_scale", a_scale, m_indptr, groups, k // block)
    weights = packed_weights(
        mode, (b, b_scale), None,
        lambda: (b, linear_scales("b_scale", b_scale, n, k // block, "swizzled_128x4",
                                  count).reshape(count, n, -1)),
    )  # fmt: skip
    return multiply(weights, contiguous(a), scales, dtype, out, groups=groups, scale=factor)


@accepts("a", "b", "a_scale", "b_scale", "m_indices")
def group_deepgemm_fp8_nt_groupwise(
    a: Any, b: Any, a_scale: Any, b_scale: Any, m_indices: Any,
    scale_granularity_mnk: tuple[int, int, int] = (1, 128, 128), out: Any = None,
    out_dtype: Any = None,
) -> Any:  # fmt: skip
    """[m, n]: row i of a times b[m_indices[i]], in FP8.

    a: float8_e4m3fn [m, k]. b: float8_e4m3fn [groups, n, k]. m_indices: int32 [m]; -1 for rows that
    keep what `out` holds. a_scale, b_scale: float32 [m, k / 128] and [groups, n / 128, k / 128].
    out: [m, n], written to. out_dtype: bfloat16 (default) or float16. scale_granularity_mnk: the
    default.
    """
    check_axes("a", a, "m", "k")
    check_axes("b", b, "groups", "n", "k")
    check_type("m_indices", m_indices, "int32")
    if tuple(m_indices.shape) != (a.shape[0],):
        raise ValueError(f"m_indices: expected shape {(a.shape[0],)}, got "
                         f"{tuple(m_indices.shape)}")  # fmt: skip
    _check_granularity(scale_granularity_mnk)
    _check_fp8(a, b, a_scale, b_scale)
    dtype = checked_output(out, (a.shape[0], b.shape[1]), None if out is not None else out_dtype, a)
    scales = _oriented("a_scale", a_scale, (a.shape[0], -(-a.shape[1] // 128)), False)
    weights = _fp8_weights(b, b_scale, False)
    return multiply(weights, contiguous(a), scales, dtype, out,
                    groups=contiguous(m_indices).reshape(-1, 1))  # fmt: skip


@accepts("a", "b", "a_scale", "b_scale", "masked_m")
def batch_deepgemm_fp8_nt_groupwise(
    a: Any, b: Any, a_scale: Any, b_scale: Any, masked_m: Any, expected_m: int,
    scale_granularity_mnk: tuple[int, int, int] = (1, 128, 128), out: Any = None,
    out_dtype: Any = None, backend: str = "deepgemm",
) -> Any:  # fmt: skip
    """[groups, m, n]: the first masked_m[i] rows of a[i] times b[i], in FP8.

    a: float8_e4m3fn [groups, m, k]. b: float8_e4m3fn [groups, n, k]. masked_m: int32 [groups].
    a_scale, b_scale: float32 [groups, m, k / 128] and [groups, n / 128, k / 128].
    out: [groups, m, n], written to: other rows keep what it holds; zeros in a new one.
    out_dtype: bfloat16 (default) or float16. scale_granularity_mnk: the default. expected_m,
    backend: change nothing.
    """
    check_choice("backend", backend, ("deepgemm", "cake"))
    check_axes("a", a, "groups", "m", "k")
    check_axes("b", b, "groups", "n", "k")
    check_type("masked_m", masked_m, "int32")
    _check_granularity(scale_granularity_mnk)
    _check_fp8(a, b, a_scale, b_scale)
    (count, m, k), n = a.shape, b.shape[1]
    if b.shape[0] != count or tuple(masked_m.shape) != (count,):
        raise ValueError(f"masked_m: expected the {count} groups of a, got {tuple(masked_m.shape)} "
                         f"and {b.shape[0]} of b")  # fmt: skip
    dtype = checked_output(out, (count, m, n), None if out is not None else out_dtype, a)
    scales = _oriented("a_scale", a_scale, (count, m, -(-k // 128)), False)
    result = multiply(
        _fp8_weights(b, b_scale, False), contiguous(a).reshape(count * m, k),
        contiguous(scales).reshape(count * m, -1), dtype,
        None if out is None else contiguous(out).reshape(count * m, n),
        groups=groups_of_masks(masked_m, m),
    ).reshape(count, m, n)  # fmt: skip
    return result if out is None else copy_into("out", out, result)


_MASKED = {("float4_e2m1fn", "float8_e4m3fn", 16): "nvfp4",
           ("float4_e2m1fn", "float8_e8m0fnu", 32): "mxfp4_mxfp8",
           ("float8_e4m3fn", "float8_e8m0fnu", 32): "mxfp8"}  # fmt: skip


@accepts("out", "masked_m")
def grouped_gemm_nt_masked(
    lhs: tuple[Any, Any], rhs: tuple[Any, Any], out: Any, masked_m: Any, *, ab_dtype: str,
    sf_dtype: str, c_dtype: str, sf_vec_size: int, topk_weights: Any = None,
    idx_src_info: Any = None, rank_src_info: Any = None, out_ptrs: Any = None, num_ranks: int = 0,
    dst_signals: Any = None, sm_count: int | None = None, barrier_flag_local: Any = None,
    barrier_flag_multicast: Any = None, is_combine_fusion: bool = False, is_swap_ab: bool = False,
    **kwargs: Any,
) -> Any:  # fmt: skip
    """The first masked_m[i] rows of each group times its weights, written to `out`.

    lhs, rhs: (codes, scales) as the grouped quantizers give them: codes [m, k, l] and [n, k, l], or
    [.., k / 2, l] of two codes a byte, views of dense [l, .., k]; scales [32, 4, rm, 4, rk, l],
    views of packed ones in layout 128x4. out: [m, n, l], a view of [l, m, n].
    masked_m: int32 [l]; other rows keep what `out` holds.
    ab_dtype, sf_dtype, sf_vec_size: float4_e2m1fn, float8_e4m3fn and 16; or float4_e2m1fn or
    float8_e4m3fn with float8_e8m0fnu and 32. c_dtype: bfloat16, float16 or float32, that of out.
    kwargs: alpha float32 [l] and alpha_dtype; others change nothing, as do sm_count, is_swap_ab.
    topk_weights, idx_src_info, rank_src_info, out_ptrs, num_ranks, dst_signals,
    barrier_flag_local, barrier_flag_multicast, is_combine_fusion: not offered.
    """
    for name, value in (("topk_weights", topk_weights), ("idx_src_info", idx_src_info),
                        ("rank_src_info", rank_src_info), ("out_ptrs", out_ptrs),
                        ("num_ranks", num_ranks or None), ("dst_signals", dst_signals),
                        ("barrier_flag_local", barrier_flag_local),
                        ("barrier_flag_multicast", barrier_flag_multicast),
                        ("is_combine_fusion", is_combine_fusion)):  # fmt: skip
        refuse(name, value, "the fused combine needs peers; combine afterwards")
    mode = _MASKED.get((ab_dtype, sf_dtype, sf_vec_size))
    if mode is None:
        raise NotImplementedError(
            f"ab_dtype: {ab_dtype} with {sf_dtype} scales of {sf_vec_size} is not offered; "
            f"{', '.join(map(str, _MASKED))} are"
        )
    (a, a_scale), (b, b_scale) = lhs, rhs
    for name, array in (("lhs", a), ("rhs", b), ("out", out)):
        check_axes(name, array, "m or n", "k or n", "l")
    check_type("masked_m", masked_m, "int32")
    check_choice("c_dtype", c_dtype, ("bfloat16", "float16", "float32"))
    count, m, width = a.shape[2], a.shape[0], a.shape[1]
    n, is_fp4 = b.shape[0], ab_dtype == "float4_e2m1fn"
    k = 2 * width if is_fp4 else width
    blocks = k // sf_vec_size
    dtype = checked_output(out, (m, n, count), c_dtype, a, ("bfloat16", "float16", "float32"))
    rows = contiguous(transpose(a, 2, 0, 1)).reshape(count * m, width)
    if mode == "mxfp4_mxfp8":
        rows = fp8_of_fp4(rows)
    scales = linear_scales("lhs", _packed(a_scale), m, blocks, "swizzled_128x4", count)
    weights = packed_weights(
        mode, (b, b_scale), "masked",
        lambda: (transpose(b, 2, 0, 1),
                 linear_scales("rhs", _packed(b_scale), n, blocks, "swizzled_128x4",
                               count).reshape(count, n, blocks)),
    )  # fmt: skip
    inside = transpose(out, 2, 0, 1)
    result = multiply(weights, rows, scales, dtype, contiguous(inside).reshape(count * m, n),
                      groups=groups_of_masks(masked_m, m),
                      scale=1.0 if kwargs.get("alpha") is None else contiguous(
                          kwargs["alpha"]).reshape(-1))  # fmt: skip
    copy_into("out", inside, result.reshape(count, m, n))
    return out


def _packed(scales: Any) -> Any:
    """Packed scales in memory order of their view [32, 4, rm, 4, rk, l]."""
    if len(scales.shape) != 6:
        return scales
    return contiguous(transpose(as_type(scales, "uint8"), 5, 2, 4, 0, 1, 3)).reshape(-1)
