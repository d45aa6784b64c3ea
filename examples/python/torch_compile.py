"""A model whose experts run in FP4 inside torch.compile: one graph, on the CPU or on a Hopper GPU.

    python examples/python/torch_compile.py models/tiny-moe
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch

import narrowfloat as nf
import narrowfloat.torch as nft


def tensor(array: Any) -> torch.Tensor | None:
    """A router's array: NumPy's, which is not to be written to, on the CPU, torch's on a GPU."""
    return torch.from_numpy(array.copy()) if isinstance(array, np.ndarray) else array


class Block(torch.nn.Module):
    """A norm, a router and the experts of a checkpoint's layer."""

    router: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, model: str, layer: int, mode: str, device: str) -> None:
        super().__init__()
        experts = nf.MoeLayer.from_checkpoint(model, layer, mode=mode, device=device)
        self.norm = torch.nn.RMSNorm(experts.config.hidden).to(device)
        self.register_buffer("router", tensor(experts.router_weight))
        self.register_buffer("bias", tensor(experts.router_logit_bias))
        self.experts = nft.Moe(experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: float32 [T, H]."""
        hidden = self.norm(x)
        logits = torch.nn.functional.linear(hidden, self.router, self.bias)
        return x + self.experts(hidden.bfloat16(), logits).float()


def main() -> None:
    """Compiled and eager results, and a quantized cache that a compiled step makes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--mode", default="nvfp4_bf16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    arguments = parser.parse_args()

    block = Block(arguments.model, 0, arguments.mode, arguments.device)
    compiled = torch.compile(block, fullgraph=True, backend=arguments.backend)
    hidden = block.experts.layer.config.hidden
    x = torch.randn(16, hidden, device=arguments.device)
    with torch.no_grad():
        difference = (compiled(x) - block(x)).abs().max()
    print(f"largest difference of compiled and eager: {float(difference):.2e}")

    @torch.compile(fullgraph=True, backend=arguments.backend)
    def squeeze(x: torch.Tensor) -> torch.Tensor:
        parts = nft.quantize(x.bfloat16(), "mxfp8")
        return nft.dequantize(*parts, "mxfp8", x.shape)

    error = nf.diff(x, squeeze(x))
    print(f"through MXFP8: {error.sqnr_db:.1f} dB")


if __name__ == "__main__":
    main()
