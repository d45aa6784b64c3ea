"""The library gives the model's bytes on random tensors, options and implementations.

The committed vectors are a fixed sample; this test draws others, larger ones among them, and also
pins the plain implementation, so that neither it nor a fast one can hide an error of the other.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "golden"))

import generate_vectors as vectors  # noqa: E402
import reference_blocks as blocks  # noqa: E402
import reference_floats as floats  # noqa: E402
import reference_model as model  # noqa: E402
from quantize_raw import quantize_raw  # noqa: E402

CASES_PER_FORMAT = 30
IMPLEMENTATIONS = (None, "cpu_reference")


def random_shape(rng: np.random.Generator, fmt: str) -> tuple[int, int, int]:
    """Mostly small; rows around the tile sizes of the layouts; every legal width."""
    rows = int(rng.choice([1, 2, 3, 7, 8, 9, 31, 33, 64, 127, 128, 129, 200]))
    unit = model.block_shape(fmt, 1, 16)[1] if fmt in model.BLOCK_OF_BYTE_SCALE else 16
    cols = unit * int(rng.choice([1, 2, 3, 4, 5, 8, 9, 17, 33]))
    batch = int(rng.choice([1, 1, 1, 2, 3])) if fmt in model.BLOCK_OF_BYTE_SCALE else 1
    return batch, rows, cols


def random_encode_scale(rng: np.random.Generator, batch: int, rows: int, grouped: bool):
    """None, one value, or one per row or group."""
    choice = rng.integers(0, 4)
    if choice == 0 or (choice == 1 and grouped):
        return vectors.row_scales(rng, batch if grouped else rows)
    if choice == 1:
        return np.float32(rng.choice(np.array(vectors.ENCODE_SCALES)))
    return None


def random_options(rng: np.random.Generator, fmt: str, dtype: str, shape) -> model.Options:
    """Options that are legal for the format and the input type."""
    batch, rows, cols = shape
    chosen = {"mode": str(rng.choice(vectors.MODES))}
    if fmt in ("mxfp4", "mxfp8") and dtype != "F8_E4M3":
        chosen["rounding"] = str(rng.choice(["up", "up", "floor", "even"]))
    if fmt == "mxfp8":
        chosen["alignment"] = int(rng.choice([32, 64, 128]))
    if fmt.startswith("fp8"):
        chosen["rule"] = str(rng.choice(list(blocks.DEFAULT_EPS)))
        if rng.random() < 0.3 and (chosen["mode"] == "exact" or chosen["rule"] != "reciprocal"):
            chosen["eps"] = 0.5
        elif fmt == "fp8_tensor" and rng.random() < 0.3:
            chosen = {"fp8_decode_scale": vectors.row_scales(rng, 1)[0]}
        return model.Options(**chosen)
    if fmt.startswith("nvfp4") and dtype != "F8_E4M3" and rng.random() < 0.4:
        chosen["four_over_six"] = vectors.FOUR_OVER_SIX[rng.integers(0, 8)]
    if fmt == "nvfp4_per_token" and rng.random() < 0.3:
        chosen["base_decode_scale"] = vectors.row_scales(rng, 1)[0]
    if batch > 1 and rng.random() < 0.5:
        chosen["valid_rows"] = [int(v) for v in rng.integers(-1, rows + 2, batch)]
    if fmt == "nvfp4_per_token" and batch == 1 and rng.random() < 0.3:
        chosen["row_list"] = [int(v) for v in rng.integers(-2, rows + 2, 1 + rows // 2)]
    if fmt == "nvfp4" or dtype == "F8_E4M3":
        grouped = "valid_rows" in chosen
        if batch != rows:  # Otherwise a list of scales has two readings.
            chosen["encode_scale"] = random_encode_scale(rng, batch, rows, grouped)
    return model.Options(**chosen)


def arguments_of(options: model.Options, fmt: str, layout: str, dtype: str) -> dict[str, str]:
    """Options of the test program."""
    arguments = {"format": fmt, "layout": layout, "dtype": dtype, "math": options.mode}
    names = {
        "g": "encode-scale-bits",
        "fos": "fos",
        "rounding": "rounding",
        "alignment": "alignment",
        "rule": "rule",
        "eps": "eps-bits",
        "fp8_d": "fp8-decode-scale-bits",
        "base": "base-decode-scale-bits",
        "list": "row-list",
        "valid": "valid-rows",
    }
    for key, value in vectors.option_columns(options, fmt, dtype).items():
        if value != "auto":
            arguments[names[key]] = value
    return arguments


def describe_difference(got: bytes, expected: bytes) -> str:
    """Where two byte strings differ first, and how often."""
    if len(got) != len(expected):
        return f"{len(got)} bytes, expected {len(expected)}"
    different = np.frombuffer(got, np.uint8) != np.frombuffer(expected, np.uint8)
    first = int(np.argmax(different))
    count = int(np.count_nonzero(different))
    return f"{count} bytes differ, first at {first}: {got[first]:02x}, not {expected[first]:02x}"


@pytest.mark.parametrize("number", range(CASES_PER_FORMAT))
@pytest.mark.parametrize("fmt", list(model.LAYOUTS))
def test_random_tensors(fmt: str, number: int, tmp_path: Path) -> None:
    """Values, scales and global scales are equal for every implementation."""
    rng = np.random.default_rng([list(model.LAYOUTS).index(fmt), number])
    dtypes = [*vectors.FLOAT_DTYPES, *(["F8_E4M3"] if fmt in ("nvfp4", "mxfp4") else [])]
    dtype = str(rng.choice(dtypes))
    shape = random_shape(rng, fmt)
    layout = str(rng.choice(model.LAYOUTS[fmt]))
    options = random_options(rng, fmt, dtype, shape)
    if dtype == "F8_E4M3":
        raw = vectors.random_bits(rng, dtype, shape)
    else:
        raw = vectors.make_input(rng, str(rng.choice(vectors.KINDS)), dtype, shape)
    q = model.quantize(raw, dtype, fmt, layout, options)
    scales = floats.to_bits(q.scales) if q.scales.dtype == np.float32 else q.scales
    expected = {
        "values": q.values.tobytes(),
        "scales": scales.tobytes(),
        "global": floats.to_bits(q.global_scale).tobytes(),
    }
    arguments = arguments_of(options, fmt, layout, dtype)
    for implementation in IMPLEMENTATIONS:
        pinned = {"impl": implementation} if implementation else {}
        got = quantize_raw(tmp_path, raw.tobytes(), shape, arguments | pinned)
        for (name, wanted), came in zip(expected.items(), got):
            assert came == wanted, (
                f"{name}: {describe_difference(came, wanted)}; {shape} {arguments | pinned}"
            )
