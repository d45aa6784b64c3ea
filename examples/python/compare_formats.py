"""Compares number formats on the experts of models/tiny-moe, and plots error over size.

    pip install matplotlib safetensors
    python examples/python/compare_formats.py models/tiny-moe formats.png

The error is that of a layer's output on recorded activations, against the bfloat16 layer.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import ml_dtypes
import numpy as np

import narrowfloat as nf

# Modes with static activation scales need a calibration; the others run as they are.
MODES = ("bf16", "mxfp8", "fp8_block", "mxfp4_bf16", "mxfp4_mxfp8", "nvfp4_bf16",
         "nvfp4_fp8_exact", "nvfp4_fp8_rounded", "nvfp4_per_token")  # fmt: skip


def hidden_states(model: Path, layer: int) -> np.ndarray:
    """Recorded inputs of a layer."""
    from safetensors import safe_open

    path = model / "calibration" / "activations.safetensors"
    with safe_open(path, "numpy") as file:
        name = f"layers.{layer}.hidden_states"
        return file.get_tensor(name).astype(ml_dtypes.bfloat16)


def measure(model: Path, number: int, hidden: np.ndarray) -> dict[str, tuple[float, float]]:
    """Mode -> (bits a weight, relative error of the output)."""
    results: dict[str, tuple[float, float]] = {}
    reference = None
    for mode in MODES:
        layer = nf.MoeLayer.from_checkpoint(model, number, mode=mode, out_dtype="float32")
        logits = hidden.astype(np.float32) @ layer.router_weight.T
        out = layer.run(hidden, logits, bias=layer.router_bias)
        if reference is None:
            reference = out
        config = layer.config
        weights = 3 * config.experts * config.hidden * config.inter
        error = nf.diff(reference, out).relative_error
        results[mode] = (8 * layer.weight_bytes / weights, error)
        print(f"{mode:18} {results[mode][0]:6.2f} bits a weight {error:8.4f} relative error")
    return results


def plot(results: dict[str, tuple[float, float]], path: str) -> None:
    """A point for each mode."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    for mode, (bits, error) in results.items():
        if mode == "bf16":
            continue
        axes.scatter(bits, error, color="tab:blue")
        axes.annotate(mode, (bits, error), xytext=(5, 3), textcoords="offset points", fontsize=8)
    axes.set_xlabel("bits a weight")
    axes.set_ylabel("relative error of the layer's output")
    axes.set_xlim(right=10.5)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print("wrote", path)


def main() -> None:
    """All modes on one layer."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("plot")
    parser.add_argument("--layer", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=256)
    arguments = parser.parse_args()
    hidden = hidden_states(arguments.model, arguments.layer)[: arguments.tokens]
    plot(measure(arguments.model, arguments.layer, hidden), arguments.plot)


if __name__ == "__main__":
    main()
