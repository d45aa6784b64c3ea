"""The reference model reproduces the committed golden vectors, and its building blocks are right.

The golden file came from a scalar program written independently of both the model and the library,
so agreement here is what entitles the model to judge the library. The building blocks that a golden
line can hardly catch (the fused multiply-add, roundings, flush-to-zero at its threshold) are
compared with exact rational arithmetic.
"""

from __future__ import annotations

import sys
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
sys.path.insert(0, str(GOLDEN))

import reference_blocks as blocks  # noqa: E402
import reference_floats as floats  # noqa: E402
import reference_fused as fused  # noqa: E402
import reference_model as model  # noqa: E402

# Row shuffles and the reorder of V scales belong to operations that the library does not have yet.
SKIPPED_OPERATIONS = ("vswz", "shuf")
EXPECTED_SKIPPED = 15
EXPECTED_CASES = 1120


def read_golden() -> tuple[dict[str, tuple[str, np.ndarray]], list[tuple[str, dict[str, str]]]]:
    """Named input blocks (dtype, raw), and all other lines."""
    inputs, cases = {}, []
    for line in (GOLDEN / "quantization_golden.txt").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        operation, *columns = line.split()
        case = dict(column.split("=", 1) for column in columns)
        if operation == "input":
            dtype = {"bf16": "BF16", "e4m3": "F8_E4M3"}[case["dtype"]]
            raw = [int(bits, 16) for bits in case["bits"].split(",")]
            inputs[case["name"]] = (dtype, np.array(raw, floats.RAW_TYPE[dtype]))
        else:
            cases.append((operation, case))
    return inputs, cases


INPUTS, CASES = read_golden()


def number(case: dict[str, str], key: str) -> np.float32:
    """A float32 column."""
    return floats.from_bits(int(case[key], 16))[()]


def block(case: dict[str, str], negated_half: bool = False) -> np.ndarray:
    """Values of the named input; MX operations append its negation."""
    dtype, raw = INPUTS[case["in"]]
    if negated_half:
        sign = raw.dtype.type(1 << (8 * raw.dtype.itemsize - 1))
        raw = np.concatenate([raw, raw ^ sign])
    return floats.decode_float(raw, dtype)


def bits(x) -> str:
    """Eight hex digits of a float32 number."""
    return f"{int(floats.to_bits(x)):08x}"


def fp4_output(scale, codes) -> dict[str, str]:
    """The columns of a block with a byte scale and FP4 codes."""
    return {"sf": f"{int(scale):02x}", "q": model.pack_nibbles(codes).tobytes().hex()}


def compute_conversion(operation: str, case: dict[str, str]) -> dict[str, str]:
    """Lines of single numbers."""
    if operation == "encode_scale":
        g = floats.encode_scale_from_amax(number(case, "amax"), int(case["e4m3max"]))
        return {"g": bits(g)}
    x = number(case, "x")
    if operation == "rcp":
        return {"y": bits(floats.approximate_reciprocal(x))}
    if operation == "exp":
        return {"y": bits(fused.exponential(x))}
    if operation == "silu":
        return {"y": bits(fused.silu(x, floats.ONE, case["mode"]))}
    if operation == "cvt_e2m1":
        return {"code": f"{int(floats.encode_e2m1(x)):x}"}
    encode = {"cvt_e4m3": floats.encode_e4m3, "cvt_e8m0_up": floats.encode_e8m0_up}[operation]
    return {"code": f"{int(encode(x)):02x}"}


def compute_dequantization(operation: str, case: dict[str, str]) -> dict[str, str]:
    """Lines that decode one element."""
    code, sf = int(case["code"], 16), int(case["sf"], 16)
    element = floats.decode_e4m3(code) if operation == "dequant_mxfp8" else floats.decode_e2m1(code)
    if operation != "dequant_nvfp4":
        return {"y": bits(floats.EXACT.mul(element, floats.decode_e8m0(sf)))}
    scale, d = floats.decode_e4m3(sf), number(case, "d")
    return {
        "y": bits(model.dequantize_values(element, scale, d)),
        "y_kv": bits(model.dequantize_values(element, scale, d, "kv")),
    }


def compute_layout(operation: str, case: dict[str, str]) -> dict[str, str]:
    """Lines of offsets."""
    at = {key: int(value) for key, value in case.items()}
    if operation == "grow":
        return {"start": str(model.grouped_scale_row(at["row_offset"], at["group"]))}
    if operation == "mn":
        return {"off": str(model.scale_offset("mn_major", at["m"], at["kb"], at["M"], 0))}
    layouts = {"linear": "linear", "128x4": "swizzled_128x4", "8x4": "swizzled_8x4"}
    return {
        key: str(model.scale_offset(layout, at["r"], at["c"], 0, at["C"]))
        for key, layout in layouts.items()
    }


def compute_four_over_six(case: dict[str, str]) -> dict[str, str]:
    """Lines of nvfp4_4over6, per tensor or (with ramax) per token."""
    x, mode = block(case), case["mode"]
    option = blocks.FourOverSix(case["err"].lower(), case["errmath"], int(case["e4m3max"]))
    d = row_amax = None
    if "ramax" in case:
        row_amax = number(case, "ramax")
        base = floats.EXACT.div(floats.ONE, np.float32(6 * option.e4m3_max))
        g, row_scale = blocks.per_token_scales(row_amax, base, mode)
        assert bits(row_scale) == case["d"]
        d = row_scale if mode == "fast" else None
    else:
        g = number(case, "g")
    scale, codes, four = blocks.nvfp4_four_over_six_blocks(x, g, mode, option, d, row_amax)
    return {"pick": "4" if four else "6", **fp4_output(scale, codes)}


def compute_quantization(operation: str, case: dict[str, str]) -> dict[str, str]:
    """Lines of quantized blocks."""
    mode = case["mode"]
    if operation == "nvfp4_4over6":
        return compute_four_over_six(case)
    if operation == "nvfp4":
        return fp4_output(*blocks.nvfp4_blocks(block(case), number(case, "g"), mode))
    if operation == "nvfp4_per_token":
        row = np.concatenate([INPUTS[name][1] for name in case["in"].split(",")])
        options = model.Options(mode=mode, base_decode_scale=number(case, "d"))
        q = model.quantize(row[None, None], "BF16", operation, "linear", options)
        row_scale = bits(q.global_scale[0])
        return {"pts": row_scale, "sf": q.scales.tobytes().hex(), "q": q.values.tobytes().hex()}
    if operation == "fp8_128":
        eps = number(case, "eps")
        scale, codes = blocks.fp8_blocks(block(case), case["rule"], eps, mode, floats.BF16_MAX)
        return {"s": bits(scale), "q": codes.tobytes().hex()}
    if operation.startswith("kv_"):
        return fp4_output(*blocks.kv_blocks(block(case), number(case, "d"), operation, mode))
    if operation.startswith("fp8in_"):
        x = block(case, negated_half=operation == "fp8in_mxfp4")
        return fp4_output(*blocks.fp8_input_blocks(x, number(case, "g"), operation[6:], mode))
    scale, codes = blocks.mx_blocks(block(case, True), operation, case["rule"], mode)
    if operation == "mxfp8":
        return {"sf": f"{int(scale):02x}", "q": codes.tobytes().hex()}
    return fp4_output(scale, codes)


def compute(operation: str, case: dict[str, str]) -> dict[str, str]:
    """The output columns of a line by the model."""
    if operation in ("encode_scale", "rcp", "exp", "silu") or operation.startswith("cvt_"):
        return compute_conversion(operation, case)
    if operation.startswith("dequant_"):
        return compute_dequantization(operation, case)
    if operation in ("off", "mn", "grow"):
        return compute_layout(operation, case)
    return compute_quantization(operation, case)


def test_every_golden_line() -> None:
    """Every line but the skipped ones is computed, and equal."""
    checked, skipped, wrong = Counter(), Counter(), []
    for operation, case in CASES:
        if operation in SKIPPED_OPERATIONS:
            skipped[operation] += 1
            continue
        checked[operation] += 1
        for key, value in compute(operation, case).items():
            if case[key] != value:
                wrong.append(f"{operation} {case}: {key} is {value}")
    print(f"checked {sum(checked.values())} {dict(checked)}; skipped {dict(skipped)}")
    assert not wrong, "\n".join(wrong)
    assert sum(checked.values()) == EXPECTED_CASES
    assert sum(skipped.values()) == EXPECTED_SKIPPED


def random_floats(seed: int, count: int) -> np.ndarray:
    """float32 numbers of random bits, without NaN and infinity."""
    raw = np.random.default_rng(seed).integers(0, 1 << 32, count, dtype=np.uint32)
    x = floats.from_bits(raw)
    return x[np.isfinite(x)]


def round_fraction(exact: Fraction) -> np.float32:
    """float32 nearest to a rational number, ties to even, by comparison of neighbours."""
    guess = np.float32(np.clip(float(exact), -3.4e38, 3.4e38))
    lower, upper = (np.nextafter(guess, np.float32(limit)) for limit in (-np.inf, np.inf))
    finite = [x for x in (lower, guess, upper) if np.isfinite(x)]

    def distance(x: np.float32) -> tuple[Fraction, int]:
        return abs(Fraction(float(x)) - exact), int(x.view(np.uint32)) & 1

    return min(finite, key=distance)


def fused_cases() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Operands of x * y + z: unrelated ones, cancelling ones, ones next to ties, tiny ones."""
    rng = np.random.default_rng(7)
    count = 3000
    x, y = (rng.standard_normal(count).astype(np.float32) for _ in range(2))
    x = np.ldexp(x, rng.integers(-70, 60, count)).astype(np.float32)
    shift = rng.integers(-60, 60, count)
    product = x.astype(np.float64) * y
    near = np.ldexp(product, shift).astype(np.float32)
    cancelling = np.where(rng.integers(0, 2, count), -product, product).astype(np.float32)
    tie = np.ldexp(np.round(rng.standard_normal(count) * 64), np.frexp(product)[1] + 25)
    z = np.choose(rng.integers(0, 3, count), [near, cancelling, tie.astype(np.float32)])
    return x, y, z.astype(np.float32)


def test_fused_multiply_add_is_correctly_rounded() -> None:
    """Against rational arithmetic; results beyond FLT_MAX are left out."""
    x, y, z = fused_cases()
    got = floats.fused_multiply_add(x, y, z)
    for i in range(len(x)):
        exact = Fraction(float(x[i])) * Fraction(float(y[i])) + Fraction(float(z[i]))
        if abs(exact) < Fraction(2) ** 127:
            assert got[i] == round_fraction(exact), (x[i], y[i], z[i])


@pytest.mark.parametrize(
    ("x", "y", "z", "expected"),
    [
        (0x3F800001, 0x3F800001, 0xBF800002, 0x28800000),  # (1 + u)^2 - (1 + 2u) = u^2
        (0x3F800001, 0x3F800001, 0x4C000000, 0x4C000000),  # 2^25 + 1 and a bit: below a half ulp
        (0x3F800001, 0x40800000, 0x4C800000, 0x4C800001),  # just above a tie
        (0x3F800000, 0x40800000, 0x4C800000, 0x4C800000),  # a tie, to even
        (0x3F7FFFFF, 0x40800000, 0x4C800001, 0x4C800001),  # just below a tie
        (0x3F800800, 0x3F800800, 0x00000000, 0x3F801000),  # the product is a tie
        (0x3F800800, 0x3F800800, 0x0D800000, 0x3F801001),  # and float64 cannot hold the sum
        (0x3F800800, 0x3F800800, 0x8D800000, 0x3F801000),
        (0x00000001, 0x3F000000, 0x00000001, 0x00000002),  # 1.5 denormal ulp, to even
        (0x00000001, 0x00000001, 0x00000001, 0x00000001),  # far below a half ulp
        (0x7F800000, 0x00000000, 0x3F800000, 0x7FFFFFFF),  # inf * 0
        (0x7F7FFFFF, 0x40000000, 0xFF800000, 0xFF800000),
    ],
)
def test_fused_multiply_add_special_points(x: int, y: int, z: int, expected: int) -> None:
    """Ties, cancellation and specials, by hand."""
    result = floats.fused_multiply_add(*(floats.from_bits(v) for v in (x, y, z)))
    assert int(floats.to_bits(result)) == expected


def test_bf16_rounding_against_rational_neighbours() -> None:
    """encode_float picks the nearest BF16 number, ties to the even one."""
    every = floats.decode_float(np.arange(0x7F80, dtype=np.uint16), "BF16").astype(np.float64)
    positive = np.abs(random_floats(3, 20000)).astype(np.float64)
    exact_ties = (every[:-1] + every[1:])[::7] / 2
    x = np.concatenate([positive, exact_ties])
    x = x[x < every[-1]]
    above = np.searchsorted(every, x, side="left")
    below = np.maximum(above - 1, 0)
    down, up = x - every[below], every[above] - x
    nearest = np.where(down < up, below, np.where(up < down, above, below + below % 2))
    assert np.array_equal(floats.encode_float(x, "BF16"), nearest)


def test_fp16_rounding_is_that_of_numpy() -> None:
    """A second implementation of the same rounding."""
    x = random_floats(4, 200000)
    scaled = np.concatenate([x, np.ldexp(x, -np.frexp(x)[1] - 10), np.float32([65519, 65520])])
    with np.errstate(all="ignore"):
        expected = scaled.astype(np.float16).view(np.uint16)
    assert np.array_equal(floats.encode_float(scaled, "F16"), expected)


def test_nan_is_canonical() -> None:
    """No payload and no sign of a NaN survives any conversion."""
    nans = floats.from_bits([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001, 0x7FFFFFFF])
    assert set(floats.encode_e4m3(nans)) == {0x7F}
    assert set(floats.encode_e2m1(nans)) == {0x7}
    assert set(floats.encode_e8m0_up(nans)) == {0xFF}
    assert set(floats.encode_float(nans, "BF16")) == {0x7FFF}
    assert set(floats.encode_float(nans, "F16")) == {0x7FFF}
    assert set(floats.encode_float(nans, "F32")) == {0x7FFFFFFF}


def test_ftz_product_threshold() -> None:
    """Tininess is judged after rounding to 24 bits with unbounded exponent."""
    half = np.float32(0.5)
    last_below = np.nextafter(np.float32(2.0**-125), np.float32(0))
    assert floats.multiply_ftz(last_below, half) == 0
    assert floats.EXACT.mul(last_below, half) != 0
    # Two factors whose exact product is 2^-126 * (1 - 2^-46).
    x, y = np.float32(1 + 2.0**-23), np.float32((1 - 2.0**-23) * 2.0**-126 * 2)
    assert floats.multiply_ftz(x * half, y) == np.float32(2.0**-126)
    assert np.signbit(floats.multiply_ftz(-last_below, half))


def test_reciprocal_exponent_rule() -> None:
    """Every exponent of a few mantissas stays within an ulp of the division."""
    exponents = np.arange(1, 255, dtype=np.uint32) << np.uint32(23)
    for mantissa in (0, 1, 0x123456, 0x400000, 0x7FFFFF):
        x = floats.from_bits(exponents | np.uint32(mantissa))
        got, exact = floats.approximate_reciprocal(x), floats.flush(floats.EXACT.div(floats.ONE, x))
        difference = floats.to_bits(got).astype(np.int64) - floats.to_bits(exact).astype(np.int64)
        assert np.all((np.abs(difference) <= 1) | ((got == 0) & (exact == floats.FLT_MIN)))


def test_scale_converters() -> None:
    """The two directions are inverse to each other as the documentation says."""
    for denominator in (2688, 1536):
        base = floats.decode_scale_from_encode(np.float32(denominator))
        assert floats.encode_scale_from_decode(base) == denominator
    d = np.float32(123)
    assert floats.encode_scale_from_decode(d, "fast") == floats.approximate_reciprocal(d)


def test_integers_whose_reciprocal_is_not_the_quotient() -> None:
    """64 of the integers from 1 to 512: a missing table would be noticed by small tests."""
    x = np.arange(1, 513, dtype=np.float32)
    quotient = floats.EXACT.div(floats.ONE, x)
    assert np.count_nonzero(floats.approximate_reciprocal(x) != quotient) == 64


@pytest.mark.parametrize("layout", ["linear", "swizzled_128x4", "swizzled_8x4", "mn_major"])
def test_layouts_are_injective(layout: str) -> None:
    """Every scale has a place of its own inside the layout; the rest is zero."""
    for rows, columns in [(1, 1), (7, 3), (8, 4), (9, 5), (128, 4), (129, 33), (300, 20), (0, 4)]:
        matrix = np.arange(1, rows * columns + 1).reshape(rows, columns)
        packed = model.pack_scales(matrix, layout)
        assert len(packed) == model.scale_image_size(layout, rows, columns)
        assert np.count_nonzero(packed) == rows * columns
        assert np.array_equal(model.unpack_scales(packed, layout, rows, columns), matrix)


@pytest.mark.parametrize(("fmt", "low", "high"), [("mxfp4", 2, 6), ("mxfp8", 8, 448)])
def test_rounding_up_is_the_least_scale_that_fits(fmt: str, low: int, high: int) -> None:
    """And 127 BF16 maxima are what the two modes disagree about."""
    a = floats.decode_float(np.arange(1, 0x7F80, dtype=np.uint16), "BF16")
    exact = blocks.mx_scale(a, fmt, "up", "exact")
    fits = a.astype(np.float64) <= high * floats.E8M0_VALUES[exact]
    less = np.maximum(exact.astype(int) - 1, 0)
    assert np.all(fits) and np.all((a > high * floats.E8M0_VALUES[less]) | (exact == 0))
    assert np.count_nonzero(exact != blocks.mx_scale(a, fmt, "up", "fast")) == 127
    floor = blocks.mx_scale(a, fmt, "floor", "exact")
    fields = (floats.to_bits(a) >> np.uint32(23)).astype(int)
    assert np.array_equal(floor, np.maximum(fields - low, 0))


def test_fp8_counts_of_the_documentation() -> None:
    """How many BF16 maxima the modes and rules disagree about."""
    a = floats.decode_float(np.arange(1, 0x7F80, dtype=np.uint16), "BF16")
    exact, _ = blocks.fp8_blocks(a[:, None], "reciprocal", 0, "exact", floats.BF16_MAX)
    fast, _ = blocks.fp8_blocks(a[:, None], "reciprocal", 0, "fast", floats.BF16_MAX)
    assert np.count_nonzero(floats.to_bits(exact) != floats.to_bits(fast)) == 9774
    with np.errstate(over="ignore"):
        twice = floats.EXACT.div(floats.ONE, floats.EXACT.div(np.float32(448), a))
    quotient = floats.EXACT.div(a, np.float32(448))
    assert np.count_nonzero(twice != quotient) == 10825
    assert np.count_nonzero(exact == floats.from_bits(0x00202020)) == 127 + 865


def test_sum_of_squares_is_the_documented_tree() -> None:
    """Against a recursive evaluation in rational arithmetic."""
    rng = np.random.default_rng(11)
    h = rng.standard_normal(8 * 11).astype(np.float32)
    leaves = []
    for i in range(0, len(h), 8):
        total = np.float32(0)
        for value in h[i : i + 8]:
            total = round_fraction(Fraction(float(value)) ** 2 + Fraction(float(total)))
        leaves.append(total)
    while len(leaves) > 1:
        leaves += [np.float32(0)] * (len(leaves) % 2)
        leaves = [leaves[i] + leaves[i + 1] for i in range(0, len(leaves), 2)]
    assert fused.sum_of_squares(h[None])[0] == leaves[0]
