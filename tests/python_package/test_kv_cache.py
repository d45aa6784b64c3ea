"""KV caches against plain NumPy: the formulas of tests/golden's model and index arithmetic."""

from __future__ import annotations

import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import narrowfloat as nf

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "golden"))
import reference_blocks

BF16 = ml_dtypes.bfloat16
DECODE_SCALES = (1.0, 0.0037, 3.0, 2.0**-40)
CODE_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], "f4")


def sample(shape: tuple[int, ...], seed: int, dtype=BF16) -> np.ndarray:
    """Numbers of many magnitudes, with specials."""
    random = np.random.default_rng(seed)
    x = random.standard_normal(shape) * 2.0 ** random.integers(-12, 12, shape[:-1] + (1,))
    x.reshape(-1)[random.integers(0, x.size, 1 + x.size // 50)] = 0
    for special in (np.nan, np.inf, -np.inf, -0.0):
        x.reshape(-1)[random.integers(0, x.size, 2)] = special
    return x.astype(dtype)


def model(x: np.ndarray, decode_scale: float, operation: str, math: str):
    """Packed codes and scales of rows."""
    blocks = x.astype(np.float32).reshape(-1, 16)
    scale, codes = reference_blocks.kv_blocks(blocks, np.float32(decode_scale), operation, math)
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)
    return (packed.reshape(*x.shape[:-1], x.shape[-1] // 2),
            np.asarray(scale, np.uint8).reshape(*x.shape[:-1], x.shape[-1] // 16))  # fmt: skip


@pytest.mark.parametrize("math", ["exact", "fast"])
@pytest.mark.parametrize("dtype", [BF16, np.float16])
@pytest.mark.parametrize("decode_scale", DECODE_SCALES)
def test_rows_have_the_bytes_of_the_model(math, dtype, decode_scale):
    x = sample((64, 96), 1, dtype)
    values, scales = nf.kv_quantize(x, decode_scale, math=math)
    expected = model(x, decode_scale, "kv_quantize", math)
    np.testing.assert_array_equal(scales, expected[1])
    np.testing.assert_array_equal(values, expected[0])
    array = np.array([decode_scale], np.float32)
    again = nf.kv_quantize(x, array, math=math, out=(np.empty_like(values), np.empty_like(scales)))
    np.testing.assert_array_equal(again[0], values)


def test_decoding_multiplies_codes_by_their_scale_first():
    random = np.random.default_rng(2)
    values = random.integers(0, 256, (50, 40), np.uint8)
    scales = random.integers(0, 256, (50, 5), np.uint8)
    d = np.float32(0.37)
    numbers = CODE_VALUES[np.stack([values & 15, values >> 4], -1).reshape(50, 80)]
    with np.errstate(invalid="ignore"):
        block = np.repeat(scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32), 16, axis=1)
        expected = (numbers * block) * d
    for dtype in (np.float32, np.float16, BF16):
        actual = nf.kv_dequantize(values, scales, d, dtype)
        assert actual.dtype == dtype
        wanted = expected.astype(dtype).astype(np.float32)
        np.testing.assert_array_equal(actual.astype(np.float32), wanted)
    assert nf.kv_dequantize(values, scales).dtype == BF16


def paged(order: str, pages: int, tokens: int, heads: int, width: int) -> tuple[int, ...]:
    return (pages, tokens, heads, width) if order == "NHD" else (pages, heads, tokens, width)


def token(cache: np.ndarray, order: str, page: int, entry: int) -> np.ndarray:
    """[heads, width] of one token."""
    return cache[page, entry] if order == "NHD" else cache[page, :, entry]


@pytest.mark.parametrize("math", ["exact", "fast"])
@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_appended_rows_are_where_the_tables_say(math, order):
    pages, tokens, heads, dim = 5, 4, 3, 64
    # K and V are halves of one stacked array.
    stacked = np.full((pages, 2, *paged(order, pages, tokens, heads, dim // 2)[1:]), 0xAB, np.uint8)
    k, v = stacked[:, 0], stacked[:, 1]
    scales = [np.full(paged(order, pages, tokens, heads, dim // 16), 0xAB, np.uint8)
              for _ in range(2)]  # fmt: skip
    expected = [array.copy() for array in (k, v, *scales)]
    key, value = (sample((6, heads, dim), seed) for seed in (3, 4))
    indptr, indices = np.array([0, 2, 3], np.int32), np.array([4, 1, 0], np.int32)
    batches = np.array([0, 0, 1, 1, 7, 0], np.int32)
    positions = np.array([0, 5, 3, 4, 0, -1], np.int32)
    nf.kv_append_paged(key, value, batches, positions, k, v, *scales, indices, indptr,
                       k_scale=0.5, v_scale=0.25, layout=order, math=math)  # fmt: skip
    for row, page, entry in ((0, 4, 0), (1, 1, 1), (2, 0, 3)):
        for side, (numbers, d) in enumerate(((key, 0.5), (value, 0.25))):
            codes, factors = model(numbers[row], d, "kv_append", math)
            token(expected[side], order, page, entry)[:] = codes
            token(expected[2 + side], order, page, entry)[:] = factors
    for wanted, array in zip(expected, (k, v, *scales), strict=True):
        np.testing.assert_array_equal(array, wanted)
    # The same rows by slots, beside rows that go nowhere.
    before = [array.copy() for array in (k, v, *scales)]
    for array in (k, v, *scales):
        array[:] = 0xAB
    slots = np.array([16, 5, 3, -1, 20], np.int64)
    nf.kv_append_slots(key, value, slots, k, v, *scales, k_scale=0.5, v_scale=0.25, layout=order,
                       math=math)  # fmt: skip
    for wanted, array in zip(before, (k, v, *scales), strict=True):
        np.testing.assert_array_equal(array, wanted)


@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_gathered_tokens_are_those_of_the_pages(order):
    random = np.random.default_rng(5)
    pages, tokens, heads, dim = 4, 2, 3, 32
    k, v = (random.integers(0, 256, paged(order, pages, tokens, heads, dim // 2), np.uint8)
            for _ in range(2))  # fmt: skip
    ks, vs = (random.integers(0, 0x7F, paged(order, pages, tokens, heads, dim // 16), np.uint8)
              for _ in range(2))  # fmt: skip
    table, lengths = np.array([[3, 0], [1, -5]], np.int32), np.array([3, 4], np.int32)
    outputs = [np.full((2, 5, heads, dim), 7, np.float16) for _ in range(2)]
    nf.kv_dequantize_paged(k, v, ks, vs, table, lengths, *outputs, k_scale=0.5,
                           v_scale=np.array([2], np.float32), layout=order)  # fmt: skip
    for out, values, scales, d in ((outputs[0], k, ks, 0.5), (outputs[1], v, vs, 2.0)):
        expected = np.full_like(out, 7)
        for sequence, position, page in ((0, 0, 3), (0, 1, 3), (0, 2, 0), (1, 0, 1), (1, 1, 1)):
            entry = position % tokens
            expected[sequence, position] = nf.kv_dequantize(
                np.ascontiguousarray(token(values, order, page, entry)),
                np.ascontiguousarray(token(scales, order, page, entry)), d, np.float16)  # fmt: skip
        np.testing.assert_array_equal(out, expected)


def reordered(scales: np.ndarray, order: str) -> np.ndarray:
    moved = np.empty_like(scales)
    tokens, count = scales.shape[1 if order == "NHD" else 2], scales.shape[3]
    for t in range(tokens):
        for s in range(count):
            to, position = t // 4 * 4 + s // (count // 4), s % (count // 4) * 4 + t % 4
            for page in range(scales.shape[0]):
                token(moved, order, page, to)[:, position] = token(scales, order, page, t)[:, s]
    return moved


@pytest.mark.parametrize("math", ["exact", "fast"])
@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_whole_caches_have_reordered_scales_of_v(math, order):
    random = np.random.default_rng(6)
    shape = paged(order, 3, 8, 2, 128)
    key, value = (random.standard_normal(shape).astype(BF16) for _ in range(2))
    (k, v), (ks, vs), k_decode, v_decode = nf.kv_quantize_paged_cache(key, value, order, math=math)
    for numbers, codes, scales, decode, is_v in ((key, k, ks, k_decode, False),
                                                 (value, v, vs, v_decode, True)):  # fmt: skip
        largest = np.abs(numbers.astype(np.float32)).max()
        encode = np.float32(448) / largest
        assert decode[0] == np.float32(1) / encode
        q = nf.quantize(numbers, "nvfp4", layout="linear", encode_scale=float(encode), math=math)
        plain = np.asarray(q.scales).view(np.uint8).reshape(*shape[:3], 8)
        np.testing.assert_array_equal(codes, np.asarray(q.values).reshape(codes.shape))
        np.testing.assert_array_equal(scales, reordered(plain, order) if is_v else plain)
        np.testing.assert_array_equal(nf.kv_reorder_v_scales(plain, order), reordered(plain, order))
        moved = nf.kv_reorder_v_scales(plain, order)
        np.testing.assert_array_equal(nf.kv_restore_v_scales(moved, order), plain)


def test_errors_name_the_argument():
    x = np.zeros((4, 32), np.float16)
    with pytest.raises(ValueError, match="decode_scale: expected a finite number above 0"):
        nf.kv_quantize(x, 0.0)
    with pytest.raises(ValueError, match="input: expected dtype BF16 or F16, got F32"):
        nf.kv_quantize(x.astype(np.float32))
    with pytest.raises(ValueError, match=r"layout: expected one of NHD, HND; got \"NDH\""):
        nf.kv_reorder_v_scales(np.zeros((1, 4, 1, 4), np.uint8), "NDH")
    with pytest.raises(ValueError, match="output: expected a page size that is a multiple of 4"):
        nf.kv_quantize_paged_cache(*[np.zeros((1, 1, 6, 64), np.float16)] * 2)
