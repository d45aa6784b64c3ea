"""Which checkpoints the plug-ins of inference engines take, by what a checkpoint declares.

An engine's own class then reads the declaration; what is decided here is whether its experts are
in a format that EngineExperts runs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

NAME = "narrowfloat"


def format_of_group(weights: Mapping[str, Any]) -> str | None:
    """"nvfp4", "mxfp4" or "fp8_block" for weights that compressed-tensors declares so, else None.

    weights: `config_groups.*.weights`, as a document has it or as fields of its QuantizationArgs.
    """
    if weights.get("type") != "float" or not weights.get("symmetric", True):
        return None
    form = (weights.get("num_bits"), weights.get("strategy"), weights.get("group_size"))
    if form == (4, "tensor_group", 16):
        return "nvfp4"
    if form == (4, "group", 32):
        return "mxfp4"
    blocks = weights.get("block_structure")
    if form[:2] == (8, "block") and blocks is not None and list(blocks) == [128, 128]:
        return "fp8_block"
    return None


def refused_group(where: str, groups: Sequence[Mapping[str, Any]]) -> NotImplementedError:
    """The error for weights of which format_of_group() knows none."""
    found = ", ".join(
        f"{given.get('type')} of {given.get('num_bits')} bits by {given.get('strategy')}"
        for given in groups
    )
    return NotImplementedError(
        f"{where}: expected NVFP4, MXFP4, or FP8 in blocks of 128 x 128, got {found or 'none'}; "
        f"leave --quantization {NAME} away for this checkpoint"
    )


def _check_groups(declared: Mapping[str, Any]) -> None:
    """NotImplementedError where compressed-tensors declares no format that experts run in.

    Which group is that of experts is known from a model alone.
    """
    groups = [group["weights"] for group in (declared.get("config_groups") or {}).values()
              if isinstance(group, dict) and group.get("weights")]  # fmt: skip
    if all(format_of_group(weights) is None for weights in groups):
        raise refused_group("config_groups", groups)


def _algorithm(declared: Mapping[str, Any]) -> str:
    """ModelOpt's name of the format, of either form of its declaration."""
    return str((declared.get("quantization") or declared).get("quant_algo") or "").upper()


def method_of(declared: Mapping[str, Any], read: Sequence[str]) -> str:
    """Which of `read`, names of an engine's methods, reads a declaration. Else NotImplementedError.

    "modelopt_fp4" stands for NVFP4 of ModelOpt, which declares it by other names.
    """
    method = str(declared.get("quant_method") or "")
    if _algorithm(declared) in ("NVFP4", "W4A16_NVFP4"):
        return "modelopt_fp4"
    blocks = declared.get("weight_block_size")
    if method == "fp8" and blocks != [128, 128] and declared.get("store_dtype") != "mxfp4":
        raise NotImplementedError(f"weight_block_size: expected [128, 128], got {blocks}; "
                                  f"{NAME} does not run this form of FP8")  # fmt: skip
    if method == "compressed-tensors":
        _check_groups(declared)
    others = [name for name in read if name != "modelopt_fp4"]
    if method in others:
        return method
    found = _algorithm(declared) or method or "none"
    raise NotImplementedError(f"quantization_config: expected NVFP4 of ModelOpt, or one of "
                              f"{', '.join(others)}, got {found}; leave --quantization {NAME} "
                              "away for this checkpoint")  # fmt: skip


def claims(
    declared: Mapping[str, Any], asked: str | None, variable: str, read: Sequence[str]
) -> str | None:
    """The name for checkpoints that a plug-in takes, None for those that it leaves to the engine.

    asked: the value of --quantization. Asked for by name a plug-in takes all, and says what it does
    not read when it reads the declaration. variable: of the environment, 1 takes what can be read.
    """
    if asked == NAME:
        return NAME
    value = os.environ.get(variable, "0")
    if value not in ("0", "1"):
        raise ValueError(f"{variable}: expected 0 or 1, got {value!r}")
    if asked is not None or value == "0":
        return None
    try:
        method_of(declared, read)
    except NotImplementedError:
        return None
    return NAME
