"""Random checkpoints of each convention that plug-ins of inference engines read, and their results.

For the tests of those plug-ins: tensors of experts by the names of a checkpoint, and the sums that
dequantized weights give in fp64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

import narrowfloat as nf

torch = pytest.importorskip("torch", reason="torch is not installed; ./test.sh --with-engines")

EXPERTS, HIDDEN, INTER, TOP_K, TOKENS = 6, 256, 128, 3, 9


def compressed(format: str, bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    """A declaration of compressed-tensors for all Linear weights."""
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True,
               "dynamic": False, **more}  # fmt: skip
    return {"quant_method": "compressed-tensors", "format": format, "ignore": [],
            "config_groups": {"group_0": {
                "targets": ["Linear"], "weights": weights, "input_activations": None,
                "format": format}}}  # fmt: skip


FP8_ROWS = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128,
            "symmetric": True, "dynamic": True}  # fmt: skip
FP8_CT = compressed("float-quantized", 8, "float", "block", block_structure=[128, 128])
FP8_CT["config_groups"]["group_0"]["input_activations"] = FP8_ROWS


@dataclass(frozen=True)
class Case:
    """A convention: its declaration, and the names that its tensors have in an expert."""

    declared: dict[str, Any]
    format: str
    values: str
    scales: str
    global_scale: str | None = None
    divides: bool = False
    tolerance: float = 0.01


CASES = {
    "nvfp4-modelopt": Case({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": []},
                           "nvfp4", "weight", "weight_scale", "weight_scale_2"),
    "nvfp4-ct": Case(compressed("nvfp4-pack-quantized", 4, "float", "tensor_group", group_size=16),
                     "nvfp4", "weight_packed", "weight_scale", "weight_global_scale", divides=True),
    "mxfp4": Case({"quant_method": "mxfp4"}, "mxfp4", "weight", "weight_scale"),
    "mxfp4-ct": Case(compressed("mxfp4-pack-quantized", 4, "float", "group", group_size=32,
                                 scale_dtype="torch.uint8"),
                     "mxfp4", "weight_packed", "weight_scale"),
    "fp8-block": Case({"quant_method": "fp8", "activation_scheme": "dynamic",
                       "weight_block_size": [128, 128]},
                      "fp8_128x128", "weight", "weight_scale_inv", tolerance=0.06),
    "fp8-block-ct": Case(FP8_CT, "fp8_128x128", "weight", "weight_scale", tolerance=0.06),
}  # fmt: skip


def quantized(case: Case, weight: torch.Tensor, factor: float) -> tuple[dict[str, Any], Any]:
    """Tensors of one matrix by their names in a checkpoint, and the matrix that they stand for."""
    if case.global_scale is None:
        whole = nf.quantize(weight, case.format, layout="linear")
    else:
        scale = 448 * 6 / (float(weight.abs().max()) * factor)
        whole = nf.quantize(weight, case.format, layout="linear", encode_scale=scale)
    scales = whole.scales
    if case.format == "nvfp4":
        scales = scales.view(torch.float8_e4m3fn)
    values = whole.values
    if case.format.startswith("fp8"):
        values = values.view(torch.float8_e4m3fn)
    tensors = {case.values: values, case.scales: scales}
    if case.global_scale is not None:
        scale = whole.global_scale
        tensors[case.global_scale] = 1 / scale if case.divides else scale
    return tensors, nf.dequantize(whole).double()


def matrices_of_experts(case: Case) -> Iterator[tuple[dict[tuple[str, str], Any], dict[str, Any]]]:
    """For each expert its tensors by shard (w1, w3, w2) and name, and its matrices.

    Gate and up of an expert differ in size by 8, and so in their global scales.
    """
    generator = torch.Generator().manual_seed(7)
    sizes = {"w1": (INTER, HIDDEN, 8.0), "w3": (INTER, HIDDEN, 1.0), "w2": (HIDDEN, INTER, 1.0)}
    for expert in range(EXPERTS):
        tensors, matrices = {}, {}
        for shard, (rows, cols, size) in sizes.items():
            weight = torch.randn(rows, cols, generator=generator) * size * cols**-0.5
            named, matrices[shard] = quantized(case, weight.bfloat16(), 1.0 + expert)
            tensors.update({(shard, name): tensor for name, tensor in named.items()})
        yield tensors, matrices


def reference(
    matrices: Any, x: Any, ids: Any, weights: Any, here: Any = range(EXPERTS),
    limit: float | None = None,
) -> Any:  # fmt: skip
    """The sum over the slots of experts that are here, fp64.

    limit: of SwiGLU, before the activation.
    """
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, slot in ((t, s) for t in range(ids.shape[0]) for s in range(ids.shape[1])):
        expert = int(ids[token, slot])
        if expert not in here:
            continue
        one, row = matrices[expert], x[token].double()
        gate, up = one["w1"] @ row, one["w3"] @ row
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        out[token] += weights[token, slot].double() * (
            one["w2"] @ (torch.nn.functional.silu(gate) * up)
        )
    return out


def gpt_oss() -> tuple[dict[tuple[str, str], Any], Callable[[Any, Any, Any], Any]]:
    """Tensors of all experts of a layer as gpt-oss has them, by stem and name; and what they give.

    Rows of w13 are gate and up in turns, limits are 7, alpha is 1.702.
    """
    generator = torch.Generator().manual_seed(5)
    found, dense, biases = {}, [], []
    for stem, rows, cols in (("w13", 2 * INTER, HIDDEN), ("w2", HIDDEN, INTER)):
        weight = torch.randn(EXPERTS * rows, cols, generator=generator).bfloat16() * cols**-0.5
        whole = nf.quantize(weight, "mxfp4", layout="linear")
        bias = torch.randn(EXPERTS, rows, generator=generator).bfloat16()
        found[stem, "weight"] = whole.values.reshape(EXPERTS, rows, -1)
        found[stem, "weight_scale"] = whole.scales.reshape(EXPERTS, rows, -1)
        found[stem, "bias"] = bias
        dense.append(nf.dequantize(whole).double().reshape(EXPERTS, rows, -1))
        biases.append(bias.double())

    def run(x: Any, ids: Any, weights: Any) -> Any:
        out = torch.zeros(x.shape, dtype=torch.float64)
        for token in range(x.shape[0]):
            for expert, weight in zip(ids[token].tolist(), weights[token].double(), strict=True):
                both = dense[0][expert] @ x[token].double() + biases[0][expert]
                gate, up = both[::2].clamp(max=7.0), both[1::2].clamp(-7.0, 7.0)
                inner = gate * torch.sigmoid(1.702 * gate) * (up + 1)
                out[token] += weight * (dense[1][expert] @ inner + biases[1][expert])
        return out

    return found, run


def routing() -> tuple[Any, Any, Any]:
    """Rows, ids and weights."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16()
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K]
                       for _ in range(TOKENS)])  # fmt: skip
    return x, ids.int(), torch.rand(TOKENS, TOP_K, generator=generator)


def distance(result: torch.Tensor, wanted: torch.Tensor) -> float:
    """The distance as a part of the norm."""
    return float((result.double() - wanted).norm() / wanted.norm())
