"""Every golden vector through the package: each output byte, into new arrays and into `out=`.

The vectors come from a model that shares nothing with the library (tests/golden/README.md).
"""

from __future__ import annotations

import golden_lines
import numpy as np
import pytest
from golden_lines import Line, lines

import narrowfloat as nf

UNTOUCHED = 0xCC  # Value bytes that an operation must not write.
QUANTIZERS = ("quantize_fp8", "quantize_mxfp4", "quantize_mxfp8", "quantize_nvfp4",
              "quantize_nvfp4_per_token", "silu_mul_quantize", "smooth_quantize",
              "rmsnorm_quantize", "add_rmsnorm_quantize")  # fmt: skip


def options_of(line: Line) -> nf.QuantizeOptions:
    """The keywords of a case; one usable encode scale is given as a number."""
    options: nf.QuantizeOptions = {"math": line["mode"]}
    if line.columns.get("g", "auto") != "auto":
        scales = golden_lines.numbers(line["g"])
        usable = len(scales) == 1 and np.isfinite(scales[0]) and scales[0] > 0
        options["encode_scale"] = float(scales[0]) if usable else scales
    if "fos" in line:
        error, error_math, largest = line["fos"].split(",")
        options["four_over_six"] = nf.FourOverSix(error, error_math, int(largest))
    for column, keyword in (("base", "base_decode_scale"), ("eps", "fp8_eps"),
                            ("fp8_d", "fp8_decode_scale")):  # fmt: skip
        if column in line:
            options[keyword] = line.number(column)
    for column, keyword in (("rounding", "mx_scale"), ("rule", "fp8_rule")):
        if column in line:
            options[keyword] = line[column]
    for column, keyword, dtype in (("list", "row_list", np.int32),
                                   ("valid", "valid_rows", np.int32),
                                   ("offsets", "row_offsets", np.int64)):  # fmt: skip
        if column in line:
            options[keyword] = line.integers(column, dtype)
    return options


def call(line: Line, **arguments) -> tuple[nf.QuantizedTensor, dict[str, bytes]]:
    """Runs the operation of a line; also gives what it wrote beside the tensor."""
    shape = (line.integer("batch"), line.integer("rows"), line.integer("cols"))
    cols = shape[2]
    keywords = {**options_of(line), **arguments, "batched": True}
    x = line.tensor("x", (*shape[:2], 2 * cols if line.op == "silu_mul_quantize" else cols))
    before = x.tobytes()
    others: dict[str, np.ndarray] = {}
    if line.op.endswith("rmsnorm_quantize"):
        keywords["eps"] = line.number("norm_eps")
        weight = line.tensor("weight", (cols,))
        if "y" in line:
            keywords["norm_output"] = others["y"] = np.zeros(shape, line.dtype)
        if "extra_s" in line:
            keywords["extra_layout"] = line["extra_layout"]
            others["extra_s"] = np.full(len(line.bytes("extra_s")), 0xA5, np.uint8)
            keywords["extra_scales"] = others["extra_s"]
    if line.op == "quantize":
        q = nf.quantize(x, line["format"], layout=line["layout"], **keywords)
    elif line.op == "silu_mul_quantize":
        q = nf.silu_mul_quantize(x, line["format"], layout=line["layout"], **keywords)
    elif line.op == "smooth_quantize":
        smooth = line.tensor("smooth", (cols,))
        q = nf.smooth_quantize(x, smooth, line["format"], layout=line["layout"], **keywords)
    elif line.op == "rmsnorm_quantize":
        q = nf.rmsnorm_quantize(x, weight, line["format"], layout=line["layout"], **keywords)
    else:
        others["h"] = line.tensor("residual", shape)
        q = nf.add_rmsnorm_quantize(
            x, others["h"], weight, line["format"], layout=line["layout"], **keywords
        )
    assert x.tobytes() == before, "the input was written"
    return q, {key: array.tobytes() for key, array in others.items()}


def check(line: Line, q: nf.QuantizedTensor, others: dict[str, bytes]) -> None:
    """All bytes of a result."""
    assert q.values.tobytes() == line.bytes("v"), "values"
    assert q.scales.tobytes() == line.bytes("s"), "scales"
    if q.global_scale is not None:
        stored = golden_lines.numbers(line.columns.get("gs", ""))
        assert q.global_scale.tobytes() == stored.tobytes(), "global scale"
    for key, came in others.items():
        if key in line:
            assert came == line.bytes(key), key


@pytest.mark.parametrize("name", QUANTIZERS)
def test_quantizers(name: str) -> None:
    """Into new arrays (where no value byte may stay as it was), then into the same as `out`."""
    count = 0
    for count, line in enumerate(lines(name), 1):
        alignment = {"alignment": line.integer("alignment")} if "alignment" in line else {}
        q, others = call(line, **alignment)
        if "list" not in line and "valid" not in line:
            check(line, q, others)
        q.values.fill(UNTOUCHED)
        q.scales.fill(77)
        if q.global_scale is not None:
            q.global_scale.fill(77)
        same, others = call(line, out=q)
        assert same is q
        check(line, q, others)
    assert count >= 24


def global_axis(line: Line, count: int) -> str:
    """The axis of the stored scales of a line."""
    if line["format"] != "nvfp4" or count == 1:
        return "tensor"
    return "row" if count == line.integer("rows") else "batch"


def test_dequantize() -> None:
    """All formats and output types."""
    count = 0
    for count, line in enumerate(lines("dequantize"), 1):
        batch, rows, cols = (line.integer(key) for key in ("batch", "rows", "cols"))
        scale = golden_lines.numbers(line["gs"]) if "gs" in line else None
        layout = nf.quantized_layout(
            line["format"], rows, cols, scale_layout=line["layout"], batch=batch,
            alignment=int(line.columns.get("alignment", 32)),
            global_scale_axis=global_axis(line, 0 if scale is None else len(scale)),
        )  # fmt: skip
        values = np.frombuffer(line.bytes("v"), np.uint8)  # Read-only memory will do.
        dtype = np.float32 if layout.scale_type == "F32" else np.uint8
        scales = np.frombuffer(line.bytes("s"), dtype)
        q = nf.QuantizedTensor(values, scales, scale, layout, (batch, rows, cols))
        divides = line.columns.get("divides") == "1"
        y = nf.dequantize(q, line.dtype, global_scale_divides=divides)
        assert y.dtype == line.dtype and y.shape == (batch, rows, cols)
        assert y.tobytes() == line.bytes("y")
    assert count == 108


def test_amax() -> None:
    """Both maxima."""
    count = 0
    for count, line in enumerate(lines("amax"), 1):
        x = line.tensor("x", (line.integer("rows"), line.integer("cols")))
        y = nf.amax(x, per_row=line.op == "row_amax")
        assert y.tobytes() == golden_lines.numbers(line["y"]).tobytes()
    assert count == 54
