"""Runs one Mixture-of-Experts layer of a checkpoint in FP4, and looks at what each stage uses.

    python examples/python/moe_layer.py models/tiny-moe
"""

from __future__ import annotations

import argparse

import numpy as np
from numpy.typing import NDArray

import narrowfloat as nf


def as_bfloat16(numbers: NDArray[np.float32]) -> NDArray[np.uint16]:
    """float32 cut to bfloat16, as bits; with ml_dtypes: numbers.astype(ml_dtypes.bfloat16)."""
    return (numbers.view(np.uint32) >> 16).astype(np.uint16)


def main() -> None:
    """Prepare once, run many times."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--layer", type=int, default=0)
    parser.add_argument("--mode", default="nvfp4_bf16", choices=nf.moe_modes())
    arguments = parser.parse_args()

    def load(mode: str) -> nf.MoeLayer:
        return nf.MoeLayer.from_checkpoint(arguments.model, arguments.layer, mode=mode,
                                           out_dtype="float32")  # fmt: skip

    layer = load(arguments.mode)
    print(layer, f"{layer.weight_bytes:,} bytes")

    tokens = 16
    numbers = np.random.default_rng(0).standard_normal((tokens, layer.config.hidden), np.float32)
    hidden = as_bfloat16(numbers)
    logits = numbers @ layer.router_weight.T  # The router is the model's.
    if layer.router_logit_bias is not None:
        logits += layer.router_logit_bias

    # Nothing is allocated in a run with all arrays given.
    workspace = layer.new_workspace(tokens)
    out = np.empty_like(numbers)
    ids = np.empty((tokens, layer.config.top_k), np.int32)
    layer.run(hidden, logits, bias=layer.router_bias, out=out, topk_ids=ids, workspace=workspace)
    print("experts of the first token:", ids[0], "output:", out[0, :4])

    plain = load("bf16")
    error = nf.diff(plain.run(hidden, logits, bias=plain.router_bias), out)
    print(f"against bfloat16 experts: {error.relative_error:.3f} relative error")
    for stage in layer.explain(tokens):
        print(f"  {stage.op}: {stage.chosen}")


if __name__ == "__main__":
    main()
