"""Quantizes a model directory, looks at the result, and at one of its weights.

    python examples/python/quantize_checkpoint.py models/tiny-moe build/tiny-moe-nvfp4
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

import narrowfloat as nf


def main() -> None:
    """Two steps: the whole model, then what the format does to one matrix."""
    parser = argparse.ArgumentParser()
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("--to", default="nvfp4")
    arguments = parser.parse_args()

    Path(arguments.target).parent.mkdir(parents=True, exist_ok=True)
    report = nf.quantize_checkpoint(arguments.source, arguments.target, arguments.to, force=True)
    done = [tensor for tensor in report.tensors if tensor.action == "quantize"]
    print(f"{len(done)} of {len(report.tensors)} tensors became {arguments.to}")
    print(f"{report.source_bytes:,} bytes -> {report.target_bytes:,}")
    errors = {tensor.name: tensor.figures.sqnr_db for tensor in done if tensor.figures}
    worst = min(errors, key=lambda name: errors[name])
    print(f"worst: {worst}, {errors[worst]:.1f} dB")

    compared = nf.diff(arguments.source, arguments.target)
    print(f"all of it: {compared.total.sqnr_db:.1f} dB, cosine {compared.total.cosine:.5f}")

    # The same on an array: codes, scales, and how far the numbers moved.
    weight = np.random.default_rng(0).standard_normal((256, 512), dtype=np.float32)
    for format in ("nvfp4", "mxfp4", "mxfp8"):
        quantized = nf.quantize(weight, format)
        bits = 8 * quantized.nbytes / weight.size
        print(f"{format}: {bits:.2f} bits, {nf.diff(weight, quantized).sqnr_db:.1f} dB")


if __name__ == "__main__":
    main()
