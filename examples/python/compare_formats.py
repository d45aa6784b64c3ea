"""Compares number formats on the experts of models/tiny-moe, and plots error over size.

    python examples/python/compare_formats.py models/tiny-moe formats.svg

The error is that of a layer's output on recorded activations, against the bfloat16 layer.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import narrowfloat as nf

# Modes with static activation scales need a calibration; the others run as they are.
MODES = ("bf16", "mxfp8", "fp8_block", "mxfp4_bf16", "mxfp4_mxfp8", "nvfp4_bf16",
         "nvfp4_fp8_exact", "nvfp4_fp8_rounded", "nvfp4_per_token", "mxfp4_fp8_token",
         "nvfp4_fp8_token", "mxfp4_int8", "nvfp4_int8")  # fmt: skip

Measured = dict[str, tuple[float, float]]  # Mode -> (bits a weight, relative error of the output).


def hidden_states(model: Path, layer: int) -> NDArray[np.uint16]:
    """Recorded inputs of a layer: bfloat16, as bits. The library safetensors would do, too."""
    content = (model / "calibration" / "activations.safetensors").read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    entry = json.loads(content[8:begin])[f"layers.{layer}.hidden_states"]
    first, last = entry["data_offsets"]
    assert entry["dtype"] == "BF16"
    return np.frombuffer(content[begin + first : begin + last], np.uint16).reshape(entry["shape"])


def measure(model: Path, number: int, hidden: NDArray[np.uint16]) -> Measured:
    """Runs every mode on the same rows."""
    results: Measured = {}
    reference = None
    for mode in MODES:
        layer = nf.MoeLayer.from_checkpoint(model, number, mode=mode, out_dtype="float32")
        numbers = (hidden.astype(np.uint32) << 16).view(np.float32)
        logits = numbers @ layer.router_weight.T
        if layer.router_logit_bias is not None:
            logits += layer.router_logit_bias
        out = layer.run(hidden, logits, bias=layer.router_bias)
        if reference is None:
            reference = out
        config = layer.config
        weights = 3 * config.experts * config.hidden * config.inter
        error = nf.diff(reference, out).relative_error
        results[mode] = (8 * layer.weight_bytes / weights, error)
        print(f"{mode:18} {results[mode][0]:6.2f} bits a weight {error:8.4f} relative error")
    return results


def plot(results: Measured, path: Path) -> None:
    """A point for each mode, as SVG: bits from 0 to 10, and errors from 0 to the largest."""
    shown = {mode: point for mode, point in results.items() if mode != "bf16"}
    top = 1.1 * max(error for _, error in shown.values())
    lines = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 700 450" font-size="12">',
             '<rect width="700" height="450" fill="white"/>',
             '<path d="M60 20V400H640" fill="none" stroke="black"/>',
             '<text x="300" y="440">bits a weight</text>',
             '<text x="65" y="15">relative error of the output</text>']  # fmt: skip
    for tick in range(0, 11, 2):
        lines.append(f'<text x="{55 + 55 * tick}" y="418">{tick}</text>')
    for part in (0.25, 0.5, 0.75, 1):
        lines.append(f'<text x="15" y="{404 - 380 * part:.0f}">{part * top:.3f}</text>')
    for mode, (bits, error) in shown.items():
        x, y = 60 + 55 * bits, 400 - 380 * error / top
        lines.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="steelblue"/>')
        place = f'x="{x - 7:.1f}" text-anchor="end"' if "mxfp4" in mode else f'x="{x + 7:.1f}"'
        lines.append(f'<text {place} y="{y + 3:.1f}" font-size="10">{mode}</text>')
    path.write_text("\n".join([*lines, "</svg>"]) + "\n")
    print("wrote", path)


def main() -> None:
    """All modes on one layer."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("plot", type=Path)
    parser.add_argument("--layer", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=256)
    arguments = parser.parse_args()
    hidden = hidden_states(arguments.model, arguments.layer)[: arguments.tokens]
    plot(measure(arguments.model, arguments.layer, hidden), arguments.plot)


if __name__ == "__main__":
    main()
