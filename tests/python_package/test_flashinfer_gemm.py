"""narrowfloat.compat.flashinfer: GEMMs in block-scaled formats against products in float64.

Operands are quantized by the library and decoded by it; the products of the decoded numbers are
what a GEMM must give, but for the order of its sums and one rounding of the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from flashinfer_table import CLOSE, percent, record
from test_flashinfer_quantizers import LIBRARIES

import narrowfloat as nf
import narrowfloat.compat.flashinfer as fi

RNG = np.random.default_rng(81)
BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
M, N, K, G = 37, 256, 384, 3
SEGMENTS = np.array([0, 12, 12, 36], np.int32)  # The second of three groups has no rows.
GROUP_OF_ROW = np.repeat([0, 2], [12, 24])


FAR = 3e-3  # This part of the Frobenius norm.
WITHIN, BLOCKS = percent([FAR]), "scales of 1x128 and 128x128 alone"


@pytest.fixture(params=LIBRARIES, ids=lambda lib: lib.__name__)
def lib(request: pytest.FixtureRequest) -> Any:
    """Where arrays come from."""
    return request.param


def numbers(*shape: int) -> np.ndarray:
    """Normal ones of several magnitudes."""
    return (RNG.standard_normal(shape) * np.exp2(RNG.integers(-3, 3, shape))).astype(BF16)


def close(lib: Any, got: Any, wanted: np.ndarray, dtype: Any = BF16) -> None:
    """Frobenius distance: one rounding to 8 bits, and the order of sums."""
    assert tuple(got.shape) == wanted.shape
    assert str(got.dtype).endswith(np.dtype(dtype).name)
    found = np.frombuffer(lib.raw(got), dtype).reshape(wanted.shape).astype(np.float64)
    assert np.linalg.norm(found - wanted) <= FAR * np.linalg.norm(wanted) > 0


class Operand:
    """A matrix, or one for each group, quantized: codes, packed and linear scales, numbers."""

    def __init__(self, format: str, *shape: int, layout: str = "swizzled_128x4") -> None:
        batched = len(shape) == 3
        where = "linear" if format.startswith("fp8") else layout
        q = nf.quantize(numbers(*shape), format, layout=where, batched=batched)
        self.codes, self.scales = q.values, q.scales
        self.linear = q.relayout("linear").scales if where != "linear" else q.scales
        self.factor = np.float32(1 if q.global_scale is None else q.global_scale[0])
        self.plain = q.dequantize().astype(np.float64)  # Contains the factor.


def test_nvfp4(lib: Any) -> None:
    """Both layouts of a's scales, shuffled weights, factors of all rows and of each, outputs."""
    b = Operand("nvfp4", N, K)
    codes, packed = lib.make(b.codes), lib.make(b.scales.reshape(N, -1))
    for layout, is_8x4 in (("swizzled_128x4", False), ("swizzled_8x4", True)):
        a = Operand("nvfp4", M, K, layout=layout)
        alpha = lib.make(np.float32([a.factor * b.factor]))
        scales = lib.make(a.scales.reshape(-1, K // 16))
        wanted = a.plain @ b.plain.T
        for b_scales in (packed.T, packed, packed.reshape(-1)):
            got = fi.mm_fp4(lib.make(a.codes), codes.T, scales, b_scales, alpha,
                            use_8x4_sf_layout=is_8x4)  # fmt: skip
            close(lib, got, wanted)
    shuffled = fi.shuffle_matrix_a(codes, 128)
    moved = fi.shuffle_matrix_sf_a(lib.make(b.linear.reshape(N, -1)), 128)
    same = fi.mm_fp4(lib.make(a.codes), shuffled.T, scales, moved.reshape(N, -1).T, alpha,
                     use_8x4_sf_layout=True, backend="trtllm")  # fmt: skip
    assert lib.raw(same) == lib.raw(got)
    out = lib.make(np.zeros((M, N), np.float16))
    again = fi.mm_fp4(lib.make(a.codes), codes.T, scales, packed.T, alpha, "float16", out,
                      use_8x4_sf_layout=True)  # fmt: skip
    assert again is out
    close(lib, out, wanted, np.float16)
    each = RNG.uniform(0.5, 2, M).astype(np.float32)
    got = fi.mm_fp4(lib.make(a.codes), codes.T, scales, packed.T, lib.make(each),
                    use_8x4_sf_layout=True)  # fmt: skip
    close(lib, got, wanted * (each[:, None] / (a.factor * b.factor)))
    record("mm_fp4", CLOSE, "MXFP4 rows are computed as MXFP8, exactly", WITHIN)


def test_mxfp4(lib: Any) -> None:
    """Both operands with scales of 32; every code of E2M1 occurs."""
    a, b = Operand("mxfp4", M, K), Operand("mxfp4", N, K)
    assert len(np.unique(np.concatenate([a.codes & 15, a.codes >> 4]))) == 16
    scales = lib.make(a.scales.reshape(-1, K // 32)), lib.make(b.scales.reshape(N, -1)).T
    got = fi.mm_fp4(lib.make(a.codes), lib.make(b.codes).T, *scales, block_size=32,
                    use_nvfp4=False)  # fmt: skip
    close(lib, got, a.plain @ b.plain.T)


def test_mxfp8(lib: Any) -> None:
    """Flat scales, shuffled weights."""
    a, b = Operand("mxfp8", M, K), Operand("mxfp8", N, K)
    rows, codes = lib.make(a.codes.view(E4M3)), lib.make(b.codes.view(E4M3))
    flat = lib.make(a.scales.reshape(-1)), lib.make(b.scales.reshape(-1))
    got = fi.mm_mxfp8(rows, codes.T, *flat)
    close(lib, got, a.plain @ b.plain.T)
    moved = fi.shuffle_matrix_sf_a(lib.make(b.linear.reshape(N, -1)), 128)
    same = fi.mm_mxfp8(rows, fi.shuffle_matrix_a(codes, 128).T, flat[0], moved, backend="trtllm")
    assert lib.raw(same) == lib.raw(got)
    record("mm_mxfp8", CLOSE, within=WITHIN)


def test_bf16_times_nvfp4(lib: Any) -> None:
    """Rows as they are; preparation is the identity."""
    a, b = numbers(M, K), Operand("nvfp4", N, K)
    prepared = fi.prepare_bf16_fp4_weights(
        lib.make(b.codes), lib.make(b.scales), lib.make(np.float32([b.factor])), backend="cudnn"
    )
    got = fi.mm_bf16_fp4(lib.make(a), *prepared, backend="cudnn")
    close(lib, got, a.astype(np.float64) @ b.plain.T)
    plain = fi.mm_bf16_fp4(lib.make(a), *prepared[:2], backend="cute-dsl", out_dtype="float16")
    close(lib, plain, a.astype(np.float64) @ b.plain.T / b.factor, np.float16)
    record("mm_bf16_fp4", CLOSE, within=WITHIN)
    record("prepare_bf16_fp4_weights", CLOSE, "gives its arguments back; packing is the GEMM's",
           "that of the GEMM")


def test_fp8_blocks(lib: Any) -> None:
    """Scales in each of the three orders."""
    a, b = Operand("fp8_1x128", M, K), Operand("fp8_128x128", N, K)
    wanted = a.plain @ b.plain.T
    rows, codes = lib.make(a.codes.view(E4M3)), lib.make(b.codes.view(E4M3))
    first = lib.make(a.scales.reshape(M, -1))
    second = lib.make(b.scales.reshape(N // 128, -1))
    got = fi.gemm_fp8_nt_groupwise(rows, codes, first, second, "K")
    close(lib, got, wanted)
    for mode, scales, backend in (("MN", (first.T, second.T), "cutlass"),
                                  (None, (first, second.T), "trtllm")):  # fmt: skip
        other = fi.gemm_fp8_nt_groupwise(rows, codes, *scales, mode, backend=backend)
        assert lib.raw(other) == lib.raw(got)
    record("gemm_fp8_nt_groupwise", CLOSE, BLOCKS, WITHIN)


def by_group(a: np.ndarray, b: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Each row times the weights of its group."""
    return np.stack([row @ b[g].T for row, g in zip(a, groups, strict=True)])


def test_groups_of_fp8(lib: Any) -> None:
    """Segments of rows in both orders, a group for each row, rows under a mask."""
    a, b = Operand("fp8_1x128", 36, K), Operand("fp8_128x128", G, N, K)
    rows, codes = lib.make(a.codes.view(E4M3)), lib.make(b.codes.view(E4M3))
    first = lib.make(a.scales.reshape(36, -1))
    second = lib.make(b.scales.reshape(G, N // 128, -1))
    wanted = by_group(a.plain, b.plain, GROUP_OF_ROW)
    got = fi.group_gemm_fp8_nt_groupwise(rows, codes, first, second, lib.make(SEGMENTS),
                                         scale_major_mode="K")  # fmt: skip
    close(lib, got, wanted)
    other = fi.group_gemm_fp8_nt_groupwise(rows, codes, first.T, second.swapaxes(-1, -2),
                                           lib.make(SEGMENTS))  # fmt: skip
    assert lib.raw(other) == lib.raw(got)
    record("group_gemm_fp8_nt_groupwise", CLOSE, BLOCKS, WITHIN)
    each = RNG.integers(0, G, 36).astype(np.int32)
    got = fi.group_deepgemm_fp8_nt_groupwise(rows, codes, first, second, lib.make(each))
    close(lib, got, by_group(a.plain, b.plain, each))
    record("group_deepgemm_fp8_nt_groupwise", CLOSE, BLOCKS, WITHIN)
    mask = np.array([12, 0, 7], np.int32)
    out = lib.make(np.full((G, 12, N), 5, BF16))
    found = fi.batch_deepgemm_fp8_nt_groupwise(
        rows.reshape(G, 12, K), codes, first.reshape(G, 12, -1), second, lib.make(mask), 8, out=out
    )
    wanted = np.full((G, 12, N), 5.0)
    for g in range(G):
        part = a.plain.reshape(G, 12, K)[g, : mask[g]]
        wanted[g, : mask[g]] = part @ b.plain[g].T
    assert found is out
    close(lib, out, wanted)
    kept = np.frombuffer(lib.raw(out), BF16).reshape(G, 12, N)
    assert (kept[1] == 5).all() and (kept[2, 7:] == 5).all()
    record("batch_deepgemm_fp8_nt_groupwise", CLOSE, BLOCKS, WITHIN)


def in_padded_segments(lib: Any, linear: np.ndarray) -> Any:
    """Linear scales of rows as packed ones in which each segment begins a tile of 128 rows."""
    begins = (SEGMENTS + 127 * np.arange(G + 1)) // 128 * 128
    held = np.zeros((begins[-1] + 128, linear.shape[1]), np.uint8)
    for g in range(G):
        rows = slice(SEGMENTS[g], SEGMENTS[g + 1])
        held[begins[g] : begins[g] + rows.stop - rows.start] = linear[rows]
    return fi.block_scale_interleave(lib.make(held)).reshape(held.shape[0], -1)


def test_groups_of_fp4(lib: Any) -> None:
    """MXFP8 rows with MXFP4 weights, NVFP4 with NVFP4; factors of groups; codes typed uint8."""
    a, b = Operand("mxfp8", 36, K), Operand("mxfp4", G, N, K)
    scales = in_padded_segments(lib, a.linear.reshape(36, -1))
    packed = lib.make(b.scales.reshape(G, N, -1))
    got = fi.group_gemm_mxfp8_mxfp4_nt_groupwise(
        lib.make(a.codes.view(E4M3)), lib.make(b.codes), scales, packed, lib.make(SEGMENTS)
    )
    close(lib, got, by_group(a.plain, b.plain, GROUP_OF_ROW))
    record("group_gemm_mxfp8_mxfp4_nt_groupwise", CLOSE, within=WITHIN)
    record("group_gemm_mxfp4_nt_groupwise", CLOSE, within=WITHIN)
    a, b = Operand("nvfp4", 36, K), Operand("nvfp4", G, N, K)
    scales = in_padded_segments(lib, a.linear.reshape(36, -1))
    packed = lib.make(b.scales.reshape(G, N, -1))
    alpha = (a.factor * b.factor * np.float32([1, 2, 3])).astype(np.float32)
    out = lib.make(np.zeros((36, N), np.float16))
    got = fi.group_gemm_nvfp4_nt_groupwise(
        lib.make(a.codes), lib.make(b.codes), scales, packed, lib.make(SEGMENTS), lib.make(alpha),
        out=out,
    )  # fmt: skip
    wanted = by_group(a.plain, b.plain, GROUP_OF_ROW) * (GROUP_OF_ROW + 1)[:, None]
    assert got is out
    close(lib, got, wanted, np.float16)
    record("group_gemm_nvfp4_nt_groupwise", CLOSE, within=WITHIN)


MASKED = {"nvfp4": ("float4_e2m1fn", "float8_e4m3fn", 16),
          "mxfp4": ("float4_e2m1fn", "float8_e8m0fnu", 32),
          "mxfp8": ("float8_e4m3fn", "float8_e8m0fnu", 32)}  # fmt: skip


def moved(array: Any, *axes: int) -> Any:
    """A view with its axes in another order."""
    return array.transpose(*axes) if isinstance(array, np.ndarray) else array.permute(*axes)


@pytest.mark.parametrize("format", list(MASKED))
def test_masked_groups(lib: Any, format: str) -> None:
    """Operands and output as the views that the grouped quantizers give."""
    ab, sf, block = MASKED[format]
    operands = [Operand(format, G, rows, K) for rows in (40, N)]
    a, b = operands
    views = []
    for part, rows in zip(operands, (128, N), strict=True):
        codes = part.codes.view(E4M3) if format == "mxfp8" else part.codes
        tiles = part.scales.reshape(G, rows // 128, K // block // 4, 32, 4, 4)
        views.append((moved(lib.make(codes), 1, 2, 0), moved(lib.make(tiles), 3, 4, 1, 5, 2, 0)))
    mask = np.array([40, 0, 9], np.int32)
    alpha = (a.factor * b.factor * np.float32([1, 2, 3])).astype(np.float32)
    held = lib.make(np.full((G, 40, N), 5, BF16))
    out = moved(held, 1, 2, 0)
    found = fi.grouped_gemm_nt_masked(
        *views, out, lib.make(mask), ab_dtype=ab, sf_dtype=sf, c_dtype="bfloat16",
        sf_vec_size=block, alpha=lib.make(alpha), alpha_dtype="float32",
    )  # fmt: skip
    assert found is out
    wanted = np.full((G, 40, N), 5.0)
    for g in range(G):
        wanted[g, : mask[g]] = a.plain[g, : mask[g]] @ b.plain[g].T * (g + 1)
    close(lib, held, wanted)
    record("grouped_gemm_nt_masked", CLOSE, "not the fused combine", WITHIN)


def fp8_call(**changes: Any) -> Any:
    """group_gemm_fp8_nt_groupwise() of a call that works, but for changes."""
    given = {"a": np.zeros((4, 256), E4M3), "b": np.zeros((2, 128, 256), E4M3),
             "a_scale": np.ones((2, 4), np.float32), "b_scale": np.ones((2, 2, 1), np.float32),
             "m_indptr": np.array([0, 0, 4], np.int32)}  # fmt: skip
    return fi.group_gemm_fp8_nt_groupwise(**given | changes)


def fp4_call(**changes: Any) -> Any:
    """mm_fp4() of a call that works, but for changes."""
    given = {"a": np.zeros((4, 64), np.uint8), "b": np.zeros((128, 64), np.uint8).T,
             "a_descale": np.zeros((128, 8), np.uint8), "b_descale": np.zeros((128, 8), np.uint8),
             "alpha": np.ones(1, np.float32)}  # fmt: skip
    return fi.mm_fp4(**given | changes)


REFUSALS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: fp8_call(a=np.zeros((4, 128), E4M3)), ValueError, "a: Shape mismatch"),
    (lambda: fp8_call(a=np.zeros((4, 256), np.uint8)), ValueError, "a: must be float8_e4m3fn"),
    (lambda: fp8_call(a=np.zeros((4, 256), ml_dtypes.float8_e5m2)), NotImplementedError, "e5m2"),
    (lambda: fp8_call(m_indptr=np.array([0, 4], np.int32)), ValueError, "num_groups"),
    (lambda: fp8_call(m_indptr=np.array([0, 0, 4])), ValueError, "m_indptr: must be int32"),
    (lambda: fp8_call(scale_major_mode="N"), ValueError, "scale_major_mode: expected one of MN, K"),
    (lambda: fp8_call(scale_granularity_mnk=(1, 1, 128)), NotImplementedError, "granularity"),
    (lambda: fp8_call(a_scale=np.ones((4, 2), np.float32)), ValueError, "a_scale: expected shape"),
    (lambda: fp8_call(b_scale=np.ones((2, 1, 2), np.float32)), ValueError, "b_scale: expected"),
    (lambda: fp8_call(out=np.zeros((4, 64), BF16)), ValueError, "out: Shape mismatch"),
    (lambda: fp8_call(out_dtype="float32"), ValueError, "out_dtype: expected bfloat16 or float16"),
    (lambda: fp4_call(a=np.zeros((4, 32), np.uint8)), ValueError, "a: K dimension mismatch"),
    (lambda: fp4_call(a=np.zeros((4, 64), np.int32)), ValueError, "a: must be uint8"),
    (lambda: fp4_call(alpha=np.ones(3, np.float32)), ValueError, "alpha: must be a scalar, or one"),
    (lambda: fp4_call(alpha=np.ones(1)), ValueError, "alpha: must be float32"),
    (lambda: fp4_call(block_size=32), ValueError, "nvfp4 only supports block_size = 16"),
    (lambda: fp4_call(backend="rocm"), ValueError, "backend: expected one of auto"),
    (lambda: fp4_call(a_descale=np.zeros((4, 8), np.uint8)), RuntimeError, "a_descale: expected"),
    (lambda: fp4_call(b_descale=np.zeros((64, 8), np.uint8)), RuntimeError, "b_descale: expected"),
    (lambda: fi.mm_mxfp8(np.zeros((4, 128), E4M3), np.zeros((128, 128), E4M3),
                         np.zeros((128, 4), np.uint8), np.zeros(512, np.uint8)), ValueError,
     "a_descale: 2D linear scales are not supported"),
    (lambda: fi.mm_bf16_fp4(np.zeros((4, 128), np.float16), np.zeros((128, 64), np.uint8),
                            np.zeros(1024, np.uint8), backend="cudnn"), TypeError, "bfloat16"),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(REFUSALS)))
def test_refusals(case: int) -> None:
    """They name the argument, what was expected and what came."""
    call, kind, words = REFUSALS[case]
    with pytest.raises(kind, match=words):
        call()


def test_calls_without_faults() -> None:
    """So that each refusal above is of its fault; no rows are no error."""
    fp8_call()
    fp4_call()
    nothing = fp4_call(a=np.zeros((0, 64), np.uint8), a_descale=np.zeros(0, np.uint8))
    assert nothing.shape == (0, 128)


def test_weights_are_kept(lib: Any) -> None:
    """Packed once, found again by views of them, freed with them."""
    fi.clear_prepared_cache()
    a, b = numbers(M, K), Operand("nvfp4", N, K)
    codes, scales = lib.make(b.codes), lib.make(b.scales)
    for _ in range(3):
        fi.mm_bf16_fp4(lib.make(a), codes[:], scales[:], backend="cudnn")
    assert fi.prepared_cache_size() == 1
    fi.clear_prepared_cache()
    assert fi.prepared_cache_size() == 0


def test_captures(lib: Any) -> None:
    """A graph captured after one call gives its bytes, also of new rows."""
    if lib.__name__ != "Cuda":
        pytest.skip("needs a GPU")
    import torch

    a, b = Operand("nvfp4", M, K), Operand("nvfp4", N, K)
    rows, codes = lib.make(a.codes), lib.make(b.codes)
    scales, packed = lib.make(a.scales.reshape(-1, K // 16)), lib.make(b.scales.reshape(N, -1))
    alpha = lib.make(np.float32([1]))
    first, groups = Operand("fp8_1x128", 36, K), Operand("fp8_128x128", G, N, K)
    given = [lib.make(part) for part in (
        first.codes.view(E4M3), groups.codes.view(E4M3), first.scales.reshape(36, -1),
        groups.scales.reshape(G, N // 128, -1), SEGMENTS)]  # fmt: skip

    def run() -> tuple[Any, Any]:
        return (fi.mm_fp4(rows, codes.T, scales, packed.T, alpha),
                fi.group_gemm_fp8_nt_groupwise(*given, scale_major_mode="K"))

    for _ in range(2):
        run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = run()
    for _ in range(2):
        graph.replay()
        wanted = run()
        torch.cuda.synchronize()
        assert [lib.raw(part) for part in made] == [lib.raw(part) for part in wanted]
        rows.copy_(rows.flip(0))
        given[0].view(torch.uint8).copy_(given[0].view(torch.uint8).flip(0))
