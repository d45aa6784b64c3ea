#!/usr/bin/env python3
"""Compares narrowfloat.compat.flashinfer with an installed flashinfer-python.

    python tools/flashinfer_signatures.py [--upstream FOLDER]

Signatures: names of arguments, their order, their kinds and their defaults. Names: what the table
of docs/python.md lists, and what its modules export. FlashInfer's sources are read, not imported:
neither a GPU nor its dependencies are needed. FOLDER is the package `flashinfer`, such as that of
an unpacked wheel; without it the installed one is read. Differences that are meant are those of a
table in docs/python.md, each with its reason. Any other one is printed, and so is a row of that
table that nothing differs by, but for arguments that only some releases have; the exit status is
then 1.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import inspect
import re
import sys
from dataclasses import dataclass, field
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
# Names that upstream assigns, not defines.
ALIASES = {"nvfp4_block_scale_interleave": "block_scale_interleave",
           "group_gemm_mxfp4_nt_groupwise": "group_gemm_mxfp8_mxfp4_nt_groupwise"}
PAGE = Path(__file__).resolve().parents[1] / "docs" / "python.md"
RELEASE = re.compile(r" of [0-9.]+(post[0-9]+)?$")  # Ends the difference in such a row.
TABLE, DIFFERENCES = "flashinfer table", "flashinfer differences"  # In comments of the page.


def rows_of(page: Path, table: str) -> list[list[str]]:
    """The cells of a table of the page, whose functions are its first column."""
    text = page.read_text()
    begin, end = (text.index(f"<!-- {table}: {word} -->") for word in ("begin", "end"))
    return [[cell.strip() for cell in line.strip("|").split("|")]
            for line in text[begin:end].splitlines() if line.startswith("| `")]  # fmt: skip


def words_of(cell: str) -> set[str]:
    """Names between back quotes."""
    return set(re.findall(r"`(\w+)`", cell))


@dataclass
class Accepted:
    """The differences that the page lists."""

    keywords: dict[str, set[str]] = field(default_factory=dict)  # Functions have them.
    # Those, as (function, keyword), that a release of upstream has.
    released: set[tuple[str, str]] = field(default_factory=set)
    alone: set[str] = field(default_factory=set)  # Functions that upstream does not have.
    wrong: list[str] = field(default_factory=list)  # Errors in rows.

    @classmethod
    def of_page(cls, page: Path = PAGE) -> Accepted:
        """Reads the table."""
        found = cls()
        for functions, difference, reason in rows_of(page, DIFFERENCES):
            names = words_of(functions)
            if not reason:
                found.wrong.append(f"{page.name}: no reason for {functions}: {difference}")
            if difference == "not upstream's":
                found.alone |= names
            elif difference.startswith("keyword") and words_of(difference):
                for name in names:
                    found.keywords.setdefault(name, set()).update(words_of(difference))
                if RELEASE.search(difference):
                    found.released |= {(name, word) for name in names
                                       for word in words_of(difference)}  # fmt: skip
            else:
                found.wrong.append(f"{page.name}: expected \"not upstream's\" or \"keyword `x`\", "
                                   f"got {difference!r}")  # fmt: skip
        return found


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
    return found + [(arg.arg, "any", "") for arg in (a.vararg, a.kwarg) if arg]


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


KINDS = {inspect.Parameter.KEYWORD_ONLY: "keyword", inspect.Parameter.VAR_KEYWORD: "any",
         inspect.Parameter.VAR_POSITIONAL: "any"}  # fmt: skip


def our_arguments(function: Any) -> list[tuple[str, str, str]]:
    """As arguments() gives those of upstream."""
    return [(p.name, KINDS.get(p.kind, "plain"), our_value(p))
            for p in inspect.signature(function).parameters.values()]  # fmt: skip


def compare_signatures(folder: Path, ours: Any, accepted: Accepted) -> list[str]:
    """Differences of functions, but for accepted ones; what is accepted and does not differ."""
    upstream, enumerations = upstream_functions(folder), upstream_enumerations(folder)
    listed = {(name, word) for name, words in accepted.keywords.items() for word in words}
    differing = set()
    differences = [f"{name}: upstream has it, or nobody does" for name in
                   sorted(accepted.alone & set(upstream) | accepted.alone - set(dir(ours)))]
    for name in ours.__all__:
        function = getattr(ours, name)
        if inspect.isclass(function):
            if issubclass(function, IntEnum) and name in enumerations:
                members = {member.name: int(member) for member in function}
                if members != enumerations[name]:
                    differences.append(f"{name}: {members}, upstream {enumerations[name]}")
            continue
        if name in accepted.alone:
            continue
        known = upstream.get(ALIASES.get(name, name))
        if known is None:
            differences.append(f"{name}: upstream has no such function")
            continue
        here = our_arguments(function)
        there = [(word, kind, value_of(default, enumerations)) for word, kind, default in known]
        # They take no place of upstream's: keyword-only, or after all others with a default.
        words = [word for word, *_ in known]
        plain = [word for word, kind, _ in here if kind == "plain"]
        last = max([plain.index(word) for word in words if word in plain], default=-1)
        extra = {(name, word) for word, kind, default in here if word not in words
                 and (kind == "keyword" or default and plain.index(word) > last)}  # fmt: skip
        differing |= extra & listed
        if [part for part in here if (name, part[0]) not in extra & listed] != there:
            differences.append(f"{name}:\n  here     {here}\n  upstream {there}")
    return differences + [f"{name}: the keyword {word} is no difference"
                          for name, word in sorted(listed - differing - accepted.released)]


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


def compare_modules(folder: Path, ours: Any, accepted: Accepted) -> list[str]:
    """Names of our modules that the same module of upstream does not have."""
    differences = []
    pattern = Path(ours.__file__).parent
    for file in sorted(pattern.rglob("*.py")):
        module = ".".join(file.relative_to(pattern).with_suffix("").parts)
        module = module.removesuffix(".__init__")
        if any(part.startswith("_") for part in module.split(".")):
            continue
        names = set(importlib.import_module(f"{ours.__name__}.{module}").__all__)
        missing = names - exported(folder, module) - accepted.alone
        if missing:
            differences.append(f"{module}: upstream has not {', '.join(sorted(missing))}")
    return differences


def compare_table(ours: Any, page: Path = PAGE) -> list[str]:
    """Functions of the table in docs/python.md that are not public ones."""
    listed = set().union(*(words_of(functions) for functions, *_ in rows_of(page, TABLE)))
    return [f"docs/python.md: {name} is not there" for name in sorted(listed - set(dir(ours)))]


def main() -> int:
    """Prints what differs; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--upstream", metavar="FOLDER")
    folder = folder_of_upstream(parser.parse_args().upstream)
    ours = importlib.import_module("narrowfloat.compat.flashinfer")
    accepted = Accepted.of_page()
    differences = [*accepted.wrong, *compare_signatures(folder, ours, accepted),
                   *compare_modules(folder, ours, accepted), *compare_table(ours)]  # fmt: skip
    print("\n".join(differences or [f"{len(ours.__all__)} names: no difference"]))
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
