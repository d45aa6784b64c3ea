"""Cases of tests/golden/vectors/moe as layers and inputs; tests/golden/README.md describes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import narrowfloat as nf
from narrowfloat import _core

FOLDER = Path(__file__).resolve().parents[1] / "golden" / "vectors" / "moe"
DTYPES = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32, "I32": np.int32,
          "U8": np.uint8, "F8_E4M3": ml_dtypes.float8_e4m3fn,
          "F8_E8M0": ml_dtypes.float8_e8m0fnu}  # fmt: skip
NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
METHODS = tuple(nf.routing_methods())
BLOCK = {"fp8_block": 128, "mxfp8": 32, "mxfp4": 32, "nvfp4": 16}
ROUTER = {"shared": "shared_experts", "n_group": "n_group", "topk_group": "topk_group",
          "scale": "routed_scale", "norm_topk": "norm_topk", "weights_bf16": "weights_bf16",
          "grouped_bias_bf16": "grouped_bias_bf16",
          "negative_one_is_empty": "negative_one_is_empty"}  # fmt: skip


class File:
    """The tensors and cases of one file."""

    def __init__(self, name: str) -> None:
        self._reader = _core.SafetensorsReader.open(str(FOLDER / f"{name}.safetensors"))
        self._listing = self._reader.tensors()
        self.cases = json.loads(self._reader.metadata()["cases"])

    def get(self, name: str) -> np.ndarray | None:
        """A tensor, or None where the file has none of that name."""
        if name not in self._listing:
            return None
        dtype, shape = self._listing[name]
        raw = np.empty(int(np.prod(shape)) * np.dtype(DTYPES[dtype]).itemsize, np.uint8)
        if raw.size:
            self._reader.read(name, raw)
        return raw.view(DTYPES[dtype]).reshape(shape)


def router_options(router: dict[str, Any]) -> dict[str, Any]:
    """Keywords of route(), and fields of MoeConfig, for a router of the model."""
    options = {"method": METHODS[router.get("method", 1)], "experts": router["experts"],
               "top_k": router["top_k"]}  # fmt: skip
    options.update({ours: router[key] for key, ours in ROUTER.items() if key in router})
    return options


def weight_format(mode: str) -> str:
    """Format of a mode's weights: the first word of its name."""
    return next((fmt for fmt in ("fp8_tensor", "fp8_block", "mxfp8", "mxfp4", "nvfp4")
                 if mode.startswith(fmt)), "bf16")  # fmt: skip


class Case:
    """One layer with its inputs and what must come out."""

    def __init__(self, file: File, number: int) -> None:
        self.file, self.number, self.plan = file, number, file.cases[number]
        self.expect = self.plan["expect"]
        self.experts = self.plan["local_experts"] + self.plan["router"].get("shared", 0)

    def get(self, name: str) -> np.ndarray | None:
        """A tensor of the case."""
        return self.file.get(f"{self.number}.{name}")

    def either(self, name: str) -> Any:
        """A number, or one value for each expert, or None."""
        return self.plan.get("scalars", {}).get(name, self.get(name))

    def config(self, **changes: Any) -> nf.MoeConfig:
        """The configuration."""
        plan = self.plan
        kind = plan["activation"]
        parameters = {name: self.either(name) for name in ("alpha", "beta", "limit_gate",
                                                           "limit_up")}  # fmt: skip
        values = {
            "hidden": plan["hidden"],
            "inter": plan["inter"],
            "mode": plan["mode"],
            "gate_order": plan["gate_order"],
            "activation": nf.Activation("swiglu" if kind == "swiglu_oai" else kind, **parameters),
            "expert_offset": plan["expert_offset"],
            "local_experts": plan["local_experts"],
            "token_tile": plan["token_tile"],
            "out_dtype": NAMES[plan.get("out_dtype", "BF16")],
            "slot_dtype": NAMES[plan.get("slot_dtype", "BF16")],
            **router_options(plan["router"]),
        }
        for name in ("weight_on_input", "add_fc2_bias", "fp32_rows", "double_quantize_fc1"):
            if name in plan:
                values[name] = plan[name]
        return nf.MoeConfig(**{**values, **changes})

    def weights(self) -> dict[str, Any]:
        """Arguments of prepare()."""
        plan, fmt = self.plan, weight_format(self.plan["mode"])
        inter = plan["inter"]
        arguments: dict[str, Any] = {}
        for name, rows, cols in (("w1", 2 * inter if self.is_gated() else inter, plan["hidden"]),
                                 ("w2", plan["hidden"], inter)):  # fmt: skip
            width = cols // 2 if fmt in ("mxfp4", "nvfp4") else cols
            arguments[name] = np.resize(self.file.get(name), (self.experts, rows, width))
            if fmt in BLOCK:
                pool = self.file.get(f"{name}_scales")
                grid = (-(-rows // 128), -(-cols // 128)) if fmt == "fp8_block" else (
                    rows, cols // BLOCK[fmt])  # fmt: skip
                arguments[f"{name}_scales"] = np.resize(pool, (self.experts, *grid))
        for name in ("up_scale", "gate_scale", "down_scale", "inter_multiplier",
                     "input_multiplier"):  # fmt: skip
            arguments[name] = self.either(name)
        if plan.get("bias_dtype"):
            for name, rows in (("bias1", arguments["w1"].shape[1]), ("bias2", plan["hidden"])):
                pool = self.file.get(f"{name}_{plan['bias_dtype']}")
                arguments[name] = np.resize(pool, (self.experts, rows))
        return arguments

    def is_gated(self) -> bool:
        """Whether w1 has two halves."""
        return self.plan["activation"] not in ("identity", "relu", "relu2", "silu", "gelu_erf",
                                               "gelu_tanh")  # fmt: skip

    def inputs(self) -> dict[str, Any]:
        """Arguments of run()."""
        names = {"hidden": "x", "hidden_scales": "x_scales", "row_scale": "x_row_scale",
                 "logits": "logits", "bias": "bias", "packed": "packed", "ids": "ids",
                 "weights": "weights"}  # fmt: skip
        arguments = {ours: self.get(theirs) for ours, theirs in names.items()}
        scales = arguments["hidden_scales"]
        if scales is not None and self.plan.get("x_scales") == "columns":
            arguments["hidden_scales"] = np.ascontiguousarray(scales.T).T
        return arguments


def swizzled(case: Case, weights: dict) -> dict:
    """The same weights with their scales in the layout that the case asks for."""
    if case.plan.get("w_scales", "linear") == "linear":
        return weights
    result = {**weights, "scale_layout": "swizzled_128x4"}
    for name in ("w1", "w2"):
        codes, scales = weights[name], weights[f"{name}_scales"]
        experts, rows, blocks = scales.shape
        layout = nf.quantized_layout("mxfp8", rows, 32 * blocks, batch=experts,
                                     scale_layout="linear")  # fmt: skip
        dummy = np.zeros((experts, rows, 32 * blocks), np.uint8)
        q = nf.QuantizedTensor(dummy, scales, None, layout)
        result[f"{name}_scales"] = q.relayout("swizzled_128x4").scales
        assert codes.shape[1] == rows
    return result
