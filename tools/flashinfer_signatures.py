#!/usr/bin/env python3
"""Compares narrowfloat.compat.flashinfer with an installed flashinfer-python.

    python tools/flashinfer_signatures.py [--upstream FOLDER]

Signatures: names of arguments, their order, their kinds and their defaults. Names: what the table
of docs/python.md lists, and what its modules export. FlashInfer's sources are read, not imported:
neither a GPU nor its dependencies are needed. FOLDER is the package `flashinfer`, such as that of
an unpacked wheel; without it the installed one is read. Differences that are meant stand in the
lists below with their reasons; any other one is printed, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import inspect
import re
import sys
from enum import IntEnum
from pathlib import Path
from typing import Any

MODULES = ("activation", "autotuner.autotuner", "comm.allreduce", "comm.trtllm_ar", "comm",
           "cute_dsl.rmsnorm_fp4quant", "cute_dsl.add_rmsnorm_fp4quant", "fused_moe.core",
           "fused_moe.cute_dsl.moe_utils", "fused_moe.fused_routing_dsv3", "fused_moe.hash_topk",
           "fused_moe.monomoe", "fused_moe.prepare", "fused_moe.trtllm_gen_routing",
           "gemm.gemm_base", "gemm.gemm_bf16_fp4", "gemm.gemm_svdquant",
           "gemm.kernels.grouped_gemm_masked_wrapper", "norm", "page",
           "quantization.fp4_quantization", "quantization.fp8_quantization",
           "quantization.nvfp4_quantization_utils", "quantization.packbits", "tllm_enums",
           "utils")  # fmt: skip
# Keywords that are narrowfloat's own; all of them are keyword-only and may be left out.
OWN = {"math", "four_over_six"}
OWN_OF = {
    "create_allreduce_fusion_workspace": {
        "top_k", "rms_eps", "weight_bias", "routed_scaling_factor", "include_shared_expert",
        "add_residual", "write_residual_output", "apply_rms_norm", "output_dtype", "dynamic_fp8",
        "write_norm_output", "config", "device"},
    "trtllm_create_ipc_workspace_for_all_reduce_fusion": {"device"},
    "trtllm_moe_finalize_allreduce_fusion": {"scale_factor"},
}  # fmt: skip
OURS_ALONE = {"clear_prepared_cache", "prepared_cache_size", "undo_block_scale_interleave",
              "undo_convert_to_block_layout", "undo_reorder_rows_for_gated_act_gemm",
              "undo_shuffle_matrix_a", "undo_shuffle_matrix_sf_a"}  # fmt: skip
# Names that upstream assigns, not defines.
ALIASES = {"nvfp4_block_scale_interleave": "block_scale_interleave",
           "group_gemm_mxfp4_nt_groupwise": "group_gemm_mxfp8_mxfp4_nt_groupwise"}
BEGIN, END = "<!-- flashinfer table: begin -->", "<!-- flashinfer table: end -->"


def folder_of_upstream(given: str | None) -> Path:
    """The package's folder; exits where there is none."""
    if given:
        return Path(given)
    spec = importlib.util.find_spec("flashinfer")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("flashinfer: not installed; pip install --no-deps flashinfer-python, or "
                 "--upstream FOLDER")  # fmt: skip
    return Path(spec.submodule_search_locations[0])


def tree_of(folder: Path, module: str) -> ast.Module:
    """The source of a module."""
    path = folder / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text())


def arguments(node: ast.FunctionDef) -> list[tuple[str, str, str]]:
    """(name, kind, default as source) of each."""
    a = node.args
    plain = [*a.posonlyargs, *a.args]
    defaults = [""] * (len(plain) - len(a.defaults)) + [ast.unparse(d) for d in a.defaults]
    found = [(arg.arg, "plain", d) for arg, d in zip(plain, defaults, strict=True)]
    found += [(arg.arg, "keyword", ast.unparse(d) if d else "")
              for arg, d in zip(a.kwonlyargs, a.kw_defaults, strict=True)]  # fmt: skip
    return found


def upstream_functions(folder: Path) -> dict[str, list[tuple[str, str, str]]]:
    """Functions and enumerations at the top level of the modules."""
    found: dict[str, list[tuple[str, str, str]]] = {}
    for module in MODULES:
        for node in tree_of(folder, module).body:
            if isinstance(node, ast.FunctionDef):
                found[node.name] = arguments(node)
    return found


def value_of(source: str, enumerations: dict[str, dict[str, int]]) -> str:
    """A default in one spelling: members of enumerations by number, types of torch by name."""
    match = re.fullmatch(r"(\w+)\.(\w+)(\.value)?", source)
    if match and match[1] in enumerations:
        return str(enumerations[match[1]][match[2]])
    if match and match[1] == "torch":
        return repr(match[2])
    return "UNSET" if source == "_UNSET" else repr(ast.literal_eval(source)) if source else ""


def our_value(parameter: inspect.Parameter) -> str:
    """The same of a parameter here."""
    default = parameter.default
    if default is parameter.empty:
        return ""
    if type(default).__name__ == "_Unset":
        return "UNSET"
    return str(int(default)) if isinstance(default, IntEnum) else repr(default)


def upstream_enumerations(folder: Path) -> dict[str, dict[str, int]]:
    """Members of the enumerations, by class."""
    found: dict[str, dict[str, int]] = {}
    for module in ("tllm_enums", "quantization.nvfp4_quantization_utils"):
        for node in tree_of(folder, module).body:
            if not (isinstance(node, ast.ClassDef) and "IntEnum" in map(ast.unparse, node.bases)):
                continue
            members = {}
            for line in node.body:
                if isinstance(line, ast.Assign):
                    value = ast.literal_eval(line.value)
                    if isinstance(value, tuple) and len(value) == 1:
                        value = value[0]
                    members[ast.unparse(line.targets[0])] = value
            found[node.name] = members
    return found


def compare_signatures(folder: Path, ours: Any) -> list[str]:
    """Differences of functions."""
    upstream, enumerations = upstream_functions(folder), upstream_enumerations(folder)
    differences = []
    for name in ours.__all__:
        function = getattr(ours, name)
        if inspect.isclass(function):
            if issubclass(function, IntEnum) and name in enumerations:
                members = {member.name: int(member) for member in function}
                if members != enumerations[name]:
                    differences.append(f"{name}: {members}, upstream {enumerations[name]}")
            continue
        if name in OURS_ALONE:
            continue
        known = upstream.get(ALIASES.get(name, name))
        if known is None:
            differences.append(f"{name}: upstream has no such function")
            continue
        own = OWN | OWN_OF.get(name, set())
        here = [(p.name, "keyword" if p.kind == p.KEYWORD_ONLY else "plain", our_value(p))
                for p in inspect.signature(function).parameters.values()
                if p.kind != p.VAR_KEYWORD
                and not (p.kind == p.KEYWORD_ONLY and p.name in own)]  # fmt: skip
        there = [(word, kind, value_of(default, enumerations)) for word, kind, default in known]
        if here != there:
            differences.append(f"{name}:\n  here     {here}\n  upstream {there}")
    return differences


def exported(folder: Path, module: str) -> set[str]:
    """Names that a module of upstream defines or imports, at any depth of its `if` and `try`."""
    names: set[str] = set()
    for node in ast.walk(tree_of(folder, module)):
        if isinstance(node, ast.ImportFrom | ast.Import):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def compare_modules(folder: Path, ours: Any) -> list[str]:
    """Names of our modules that the same module of upstream does not have."""
    differences = []
    pattern = Path(ours.__file__).parent
    for file in sorted(pattern.rglob("*.py")):
        module = ".".join(file.relative_to(pattern).with_suffix("").parts)
        module = module.removesuffix(".__init__")
        if any(part.startswith("_") for part in module.split(".")):
            continue
        names = set(importlib.import_module(f"{ours.__name__}.{module}").__all__)
        missing = names - exported(folder, module) - OURS_ALONE
        if missing:
            differences.append(f"{module}: upstream has not {', '.join(sorted(missing))}")
    return differences


def compare_table(page: Path, ours: Any) -> list[str]:
    """Functions of the table in docs/python.md and public ones, where they differ."""
    text = page.read_text()
    table = text[text.index(BEGIN) : text.index(END)]
    listed = set()
    for row in table.splitlines():
        if row.startswith("| `"):
            listed |= set(re.findall(r"`(\w+)`", row.split("|")[1]))
    unlisted = {name for name in listed if not hasattr(ours, name)}
    return [f"docs/python.md: {name} is not there" for name in sorted(unlisted)]


def main() -> int:
    """Prints what differs; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--upstream", metavar="FOLDER")
    folder = folder_of_upstream(parser.parse_args().upstream)
    ours = importlib.import_module("narrowfloat.compat.flashinfer")
    page = Path(__file__).resolve().parents[1] / "docs" / "python.md"
    differences = [*compare_signatures(folder, ours), *compare_modules(folder, ours),
                   *compare_table(page, ours)]  # fmt: skip
    print("\n".join(differences or [f"{len(ours.__all__)} names: no difference"]))
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
