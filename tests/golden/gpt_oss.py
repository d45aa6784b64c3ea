"""A tiny checkpoint with the tensors of gpt-oss, and its layers in float64.

Written from the formulas alone, with NumPy and the standard library: an E2M1 code times
2^(scale - 127); logits with a bias; the best k, then softmax over them; rows gate 0, up 0, gate 1,
...; min(g, 7) * sigmoid(1.702 * min(g, 7)) * (clip(u, -7, 7) + 1); biases on both products.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
ALPHA, LIMIT = 1.702, 7.0
LAYERS = 2


def bf16(values: np.ndarray) -> np.ndarray:
    """Rounded to nearest even, as its 16 bits."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def widened(bits: np.ndarray) -> np.ndarray:
    """The float64 values of bf16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


class GptOss:
    """hidden / 32 and inter / 32 are odd, as 2880 / 32 = 90 is no multiple of 4."""

    def __init__(self, hidden: int = 96, inter: int = 96, experts: int = 6, top_k: int = 2) -> None:
        self.hidden, self.inter, self.experts, self.top_k = hidden, inter, experts, top_k
        random = np.random.default_rng(20)
        self.tensors: dict[str, np.ndarray] = {}
        for layer in range(LAYERS):
            stem = f"model.layers.{layer}.mlp."
            for name, rows, cols in (("gate_up_proj", 2 * inter, hidden),
                                     ("down_proj", hidden, inter)):  # fmt: skip
                shape = (experts, rows, cols // 32)
                full = f"{stem}experts.{name}"
                self.tensors[f"{full}_blocks"] = random.integers(0, 256, (*shape, 16), np.uint8)
                self.tensors[f"{full}_scales"] = random.integers(118, 124, shape, np.uint8)
                self.tensors[f"{full}_bias"] = bf16(random.normal(size=(experts, rows)) / 2)
            self.tensors[f"{stem}router.weight"] = bf16(random.normal(size=(experts, hidden)) / 3)
            self.tensors[f"{stem}router.bias"] = bf16(random.normal(size=experts))
        self.tensors["model.layers.0.self_attn.q_proj.weight"] = bf16(random.normal(size=(64, 96)))

    @property
    def config(self) -> dict:
        """The members of config.json that matter."""
        return {
            "model_type": "gpt_oss",
            "hidden_size": self.hidden,
            "intermediate_size": self.inter,
            "num_local_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "experts_per_token": self.top_k,
            "hidden_act": "silu",
            "swiglu_limit": LIMIT,
            "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
        }

    def write(self, directory: Path) -> Path:
        """One file and config.json."""
        directory.mkdir()
        header: dict = {}
        data = b""
        for name, array in self.tensors.items():
            begin = len(data)
            data += array.tobytes()
            dtype = {np.uint8: "U8", np.uint16: "BF16"}[array.dtype.type]
            header[name] = {"dtype": dtype, "shape": list(array.shape),
                            "data_offsets": [begin, len(data)]}  # fmt: skip
        text = json.dumps(header).encode()
        (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
        (directory / "config.json").write_text(json.dumps(self.config))
        return directory

    def weight(self, layer: int, name: str) -> np.ndarray:
        """Decoded [experts, rows, cols] of "gate_up_proj" or "down_proj"."""
        stem = f"model.layers.{layer}.mlp.experts.{name}"
        blocks, scales = self.tensors[f"{stem}_blocks"], self.tensors[f"{stem}_scales"]
        codes = np.stack([blocks & 15, blocks >> 4], -1).reshape(*blocks.shape[:3], 32)
        values = E2M1[codes] * np.exp2(scales.astype(np.float64) - 127)[..., None]
        return values.reshape(*blocks.shape[:2], -1)

    def bias(self, layer: int, name: str) -> np.ndarray:
        """The bias of the experts' matrix of this name, or of "router"."""
        stem = f"model.layers.{layer}.mlp."
        full = f"{stem}router.bias" if name == "router" else f"{stem}experts.{name}_bias"
        return widened(self.tensors[full])

    def logits(self, layer: int, x: np.ndarray) -> np.ndarray:
        """[tokens, experts]."""
        weight = widened(self.tensors[f"model.layers.{layer}.mlp.router.weight"])
        return x @ weight.T + self.bias(layer, "router")

    def run(self, layer: int, x: np.ndarray) -> np.ndarray:
        """The layer's output for float64 rows [tokens, hidden]."""
        w1, w2 = self.weight(layer, "gate_up_proj"), self.weight(layer, "down_proj")
        b1, b2 = self.bias(layer, "gate_up_proj"), self.bias(layer, "down_proj")
        out = np.zeros_like(x)
        for token, logits in enumerate(self.logits(layer, x)):
            best = np.argsort(-logits, kind="stable")[: self.top_k]
            weights = np.exp(logits[best] - logits[best].max())
            for expert, weight in zip(best, weights / weights.sum(), strict=True):
                rows = w1[expert] @ x[token] + b1[expert]
                gate, up = np.minimum(rows[0::2], LIMIT), np.clip(rows[1::2], -LIMIT, LIMIT)
                inner = gate / (1 + np.exp(-ALPHA * gate)) * (up + 1)
                out[token] += weight * (w2[expert] @ inner + b2[expert])
        return out
