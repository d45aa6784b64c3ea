#!/usr/bin/env python3
"""Checks of the repository that compilers and clang-tidy do not make (docs/style.md).

    python3 tools/tidy.py [ROOT]     check the tree that git knows (or every file without git)
    python3 tools/tidy.py --self-test    prove with small examples that every rule can fail

Findings are lines `file:line: rule: message`.  Limits on sizes are warnings: they end in
`(warning)` and do not count.  Exit code 1 if there is another finding.

How it works: every file is a SourceFile (tidy_source.py); rules are functions over one file
(FILE_RULES) or over all (TREE_RULES) that yield Findings.  What may include what is data: LAYERS
and THIRD_PARTY; so are the words that are not used (tidy_words.py).  tidy_examples.py has the
examples of the self-test.
"""

from __future__ import annotations

import argparse
import posixpath
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tidy_source import Finding, SourceFile, Tree, load
from tidy_words import BANNED_WORDS, UNCHECKED_PATHS, WORD_PATHS

# Folder -> layers (folders) its files may include, itself not named.  The longest prefix counts;
# folders without an entry may include everything.  "ops" means: any op, "tests": test helpers.
CORE = {"include", "base", "formats", "tensor"}
LAYERS = {
    "include": set(),
    "src/base": {"include"},
    "src/formats": {"include", "base"},
    "src/tensor": {"include", "base", "formats"},
    "src/comm": CORE,
    "src/runtime": CORE,
    "src/checkpoint": CORE,
    "src/device": CORE | {"comm"},
    "src/moe_shared": CORE | {"runtime", "device"},
    "src/ops": CORE | {"comm", "runtime", "device", "moe_shared"},
    "src/layers": CORE | {"comm", "runtime", "device", "moe_shared", "checkpoint", "ops"},
    "src/c_api": CORE,
    "src/cli_common": {"include"},
    "src/cli": {"include", "cli_common"},
    "src/bench_cli": {"include", "cli_common"},
    "python": {"include"},
    "examples": {"include"},
}
LIBRARIES = {  # Third-party library -> how its headers begin.
    "fmt": ("fmt/",),
    "TBB": ("tbb/", "oneapi/"),
    "nlohmann-json": ("nlohmann/",),
    "xxHash": ("xxhash",),
    "CLI11": ("CLI/",),
    "test": ("gtest/", "gmock/", "rapidcheck"),
    "nanobind": ("nanobind/",),
}
THIRD_PARTY = {  # Folder -> libraries its files may include; others may include all.
    "include": set(),
    "src/base": {"fmt"},
    "src/formats": {"fmt"},
    "src/tensor": {"fmt"},
    "src/comm": {"fmt"},
    "src/runtime": {"fmt", "TBB"},
    "src/checkpoint": {"fmt", "nlohmann-json", "xxHash"},
    "src/device": set(),
    "src/moe_shared": {"fmt", "TBB"},
    "src/ops": {"fmt", "TBB"},
    "src/layers": {"fmt", "TBB", "nlohmann-json", "xxHash"},
    "src/c_api": set(),
    "src/cli_common": {"fmt", "nlohmann-json", "CLI11"},
    "src/cli": {"fmt", "nlohmann-json", "CLI11"},
    "src/bench_cli": {"fmt", "nlohmann-json", "CLI11"},
    "python": {"nanobind"},
    "examples": set(),
}
# Stands for nvcc and the CUDA runtime, and looks like them.
EMULATOR = "tests/emulator/"
CUDA_HEADER = re.compile(r"cuda|cub/|cute/|cutlass/|thrust/|nccl|mma\.h|nvtx|cooperative_groups")
FRAMEWORK_HEADER = re.compile(r"torch/|ATen/|c10/|numpy/|pybind11/")

FILE_LINES_MAX, LINE_LENGTH_MAX, MACROS_MAX, TEMPLATE_PARAMETERS_MAX = 600, 100, 12, 4

BANNED = [  # Pattern in code (comments and strings removed), in which paths, what to do instead.
    (r"\bstd::v?format\b(?!_)|<format>", r".*", "std::format: use fmt"),
    (r"\bstd::(un)?expected\b|<expected>", r".*", "std::expected: throw Error"),
    (r"\bstd::source_location\b|<source_location>", r".*", "std::source_location: not in clang 14"),
    (r"\busing\s+namespace\b", r".*\.(h|cuh)$", "using namespace in a header"),
    (r"(?<!\w)f?(printf|puts|putchar)\s*\(|\bstd::(cout|cerr|clog)\b",
     r"src/(?!cli/|cli_common/|bench_cli/|base/)",
     "console output in the library: throw, return or call back"),
    (r"\bprintf\s*\(|\bstd::cout\b", r"src/base/", "console output in the library"),
    (r"\btrigger_dependent_launch_before_wait\s*\(",
     r"src/(?!device/ptx/|ops/combine/|moe_shared/quantize_activations_sm90)",
     "MoeRun declares to KernelChain which kernels trigger before their wait"),
]
TODO = re.compile(r"(//|#|/?\*).*\b(T[O]DO(?!\(#\d+\))|F[I]XME|X[X]X)\b")
# NVLink multicast objects are created and used by these instructions, functions and constants of
# the driver, and options of NCCL (docs/allreduce.md). NCCL_NVLS_ENABLE=0 keeps them off.
MULTICAST = re.compile(
    r"\bmultimem\b|cu(?:da)?Multicast|CU_(?:DEVICE_ATTRIBUTE_)?MULTICAST|nccl\w*Multimem"
    r"|\bp?ncclMemAlloc\b|\bnvlsCTAs\b|NCCL_NVLS_(?!ENABLE)")
FRAGMENT = re.compile(
    r"(?:Of|By|Beh" r"ind|What|For (?:people|CSV|the CPU)|With so many|In the order of)\b")
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:work|farm)/|/tmp[/]w")


def rules_of(table: dict[str, set[str]], path: str) -> set[str] | None:
    """The entry of the folder of `path`; a unit test has that of the source it mirrors."""
    path = re.sub(r"^tests/unit/", "src/", path)
    found = [folder for folder in table if path.startswith(folder + "/")]
    return table[max(found, key=len)] if found else None


def layer_of(path: str) -> str:
    """Layer of a file or of the path in an #include: "include", "base", "ops/quantize", "tests"."""
    parts = re.sub(r"^(src|tests/unit)/", "", path).split("/")
    if parts[0] in ("narrowfloat", "include"):
        return "include"
    return "/".join(parts[:2]) if parts[0] == "ops" else parts[0]


def check_layering(file: SourceFile) -> Iterator[Finding]:
    allowed, libraries = rules_of(LAYERS, file.path), rules_of(THIRD_PARTY, file.path)
    is_test = file.path.startswith("tests/")
    layers = {folder.removeprefix("src/") for folder in LAYERS}
    for line, quote, target in file.includes if file.is_cpp else []:
        layer = layer_of(target)
        if (quote == '"' or layer == "include") and allowed is not None:
            known = layer.split("/")[0] in layers
            fits = layer == layer_of(file.path) or layer in allowed or (
                layer.startswith("ops/") and "ops" in allowed) or (is_test and not known)
            if not fits:
                reason = f"may not include {layer}" if known else "name it from src/ or include/"
                yield Finding(file.path, line, "layering", f'"{target}": {reason}')
        library = next((n for n, starts in LIBRARIES.items() if target.startswith(starts)), None)
        if quote == "<" and library and libraries is not None and not is_test:
            if library not in libraries:
                yield Finding(file.path, line, "layering", f"<{target}>: no {library} here")


def check_foreign_headers(file: SourceFile) -> Iterator[Finding]:
    cuda_allowed = file.path.endswith((".cu", ".cuh")) or "runtime/cuda/" in file.path or (
        file.path.startswith(EMULATOR))
    for line, quote, target in file.includes if file.is_cpp else []:
        if target.endswith((".cpp", ".cu")):
            yield Finding(file.path, line, "source-included", f'"{target}" is no header')
        if quote == "<" and CUDA_HEADER.match(target) and not cuda_allowed:
            yield Finding(file.path, line, "cuda-header",
                          f"<{target}>: only in *.cu, *.cuh and src/runtime/cuda")
        if FRAMEWORK_HEADER.match(target):
            yield Finding(file.path, line, "framework-header", f"<{target}>: not in C++")


def check_macros(file: SourceFile) -> Iterator[Finding]:
    if not file.is_cpp or file.path.startswith(("src/base/", EMULATOR)):
        return
    for line, _ in file.code_matches(r"\b__CUDA_ARCH__\b"):
        yield Finding(file.path, line, "cuda-arch", "__CUDA_ARCH__ only in src/base")
    for line, match in file.code_matches(r"^[ \t]*#[ \t]*define[ \t]+(\w+)\("):
        yield Finding(file.path, line, "macro", f"{match[1]}(): only src/base defines such macros")


def check_asm(file: SourceFile) -> Iterator[Finding]:
    if file.is_cpp and not file.path.startswith("src/device/ptx/"):
        for line, _ in file.code_matches(r"\b(__)?asm(__)?\b\s*(volatile|__volatile__)?\s*\("):
            yield Finding(file.path, line, "asm", "inline assembly only in src/device/ptx")


def check_multicast(file: SourceFile) -> Iterator[Finding]:
    """Strings count, too: PTX and names of functions are strings."""
    for match in MULTICAST.finditer(file.without_comments if file.is_cpp else ""):
        yield Finding(file.path, file.line_of(match.start()), "multicast",
                      f"{match[0]}: NVLink multicast can put the GPUs of a host out of service")


def check_banned(file: SourceFile) -> Iterator[Finding]:
    for pattern, where, message in BANNED if file.is_cpp else []:
        if re.match(where, file.path):
            for line, _ in file.code_matches(pattern):
                yield Finding(file.path, line, "banned", message)


def check_size(file: SourceFile) -> Iterator[Finding]:
    if not (file.is_cpp or file.is_cmake or file.is_script):
        return
    if len(file.lines) > FILE_LINES_MAX:
        message = f"{len(file.lines)} lines, aim for {FILE_LINES_MAX} at most"
        yield Finding(file.path, 1, "file-size", message, warning=True)
    for number, line in enumerate(file.lines, 1):
        if len(line) > LINE_LENGTH_MAX:
            yield Finding(file.path, number, "line-length", f"{len(line)} columns", warning=True)


def check_template_parameters(file: SourceFile) -> Iterator[Finding]:
    for line, match in file.code_matches(r"\btemplate\s*<") if file.is_cpp else []:
        depth, count = 1, 1
        for char in file.code[match.end():]:
            depth += {"<": 1, "(": 1, "{": 1, ">": -1, ")": -1, "}": -1}.get(char, 0)
            count += char == "," and depth == 1
            if depth == 0:
                break
        if count > TEMPLATE_PARAMETERS_MAX:
            yield Finding(file.path, line, "template-parameters", f"{count} parameters",
                          warning=True)


def check_text(file: SourceFile) -> Iterator[Finding]:
    if file.path.startswith(("models/", "tests/golden/")) and file.path.endswith(".txt"):
        return
    if file.path.startswith("tests/fuzz/corpus/"):  # Inputs of any bytes.
        return
    if "\r" in file.text:
        yield Finding(file.path, 1, "line-ending", "carriage return")
    if file.text and not file.text.endswith("\n"):
        yield Finding(file.path, len(file.lines), "final-newline", "missing")
    for number, line in enumerate(file.lines, 1):
        if line != line.rstrip():
            yield Finding(file.path, number, "trailing-whitespace", "remove it")
        if "\t" in line:
            yield Finding(file.path, number, "tab", "use spaces")
        if MACHINE_PATH.search(line):
            yield Finding(file.path, number, "machine-path", "a path of one machine")
        if not file.path.endswith(".md") and TODO.search(line):
            yield Finding(file.path, number, "todo", "needs an issue: TO" "DO(#123): ...")


def check_opening(file: SourceFile) -> Iterator[Finding]:
    if not (file.is_cpp or file.is_script or file.path.endswith((".cmake", ".cmake.in"))):
        return
    body = re.sub(r"\A#!.*\n", "", file.text).lstrip()
    if body and not body.startswith(("//", "/*") if file.is_cpp else ("#", '"""', 'r"""')):
        yield Finding(file.path, 1, "opening-comment", "say what the file is and its idea")
    if file.is_header and not re.search(r"^#pragma once$", file.code, re.M):
        yield Finding(file.path, 1, "pragma-once", "missing")


def check_words(file: SourceFile) -> Iterator[Finding]:
    if not WORD_PATHS.match(file.path) or UNCHECKED_PATHS.match(file.path):
        return
    text = f"{file.path}\n{file.text}"
    for pattern, instead in BANNED_WORDS:
        for match in pattern.finditer(text):
            line = max(1, text.count("\n", 0, match.start()))
            word = " ".join(match[0].split())
            yield Finding(file.path, line, "banned-word", f"{word!r}: say {instead}")


def check_fragments(file: SourceFile) -> Iterator[Finding]:
    """A comment or docstring that opens with one of these words has no subject and verb."""
    if not (file.is_cpp or file.is_script or file.is_cmake) or UNCHECKED_PATHS.match(file.path):
        return
    mark = "//" if file.is_cpp else "#"
    was_comment = False
    for number, line in enumerate(file.lines, 1):
        before, found, comment = line.partition(f"{mark} ")
        is_comment = bool(found) and (not before or before[-1].isspace())
        opens = is_comment and not (was_comment and not before.strip())
        docstring = re.match(r'\s*r?"""(\w.*)', line) if file.path.endswith(".py") else None
        text = docstring[1] if docstring else comment if opens else ""
        if FRAGMENT.match(text.lstrip()):
            yield Finding(file.path, number, "fragment", f"{text.strip()[:40]!r} is no sentence")
        was_comment = is_comment


def check_links(tree: Tree) -> Iterator[Finding]:
    for file in tree.files:
        if not file.path.endswith(".md"):
            continue
        prose = re.sub(r"^```.*?^```", lambda m: "\n" * m[0].count("\n"), file.text,
                       flags=re.M | re.S)
        for match in re.finditer(r"\]\(<?([^)\s>#]+)[^)]*\)", prose):
            target = posixpath.normpath(posixpath.join(posixpath.dirname(file.path), match[1]))
            if not re.match(r"[a-z]+:", match[1]) and target not in tree.paths:
                line = prose.count("\n", 0, match.start()) + 1
                yield Finding(file.path, line, "dead-link", match[1])


# "(spec 6.2)" cites docs/numerics.md, "(moe spec 6.2, 6.4)" docs/moe.md.
CITATION = re.compile(r"\bspec\s+(\d+(?:\.\d+)?(?:,\s+\d+(?:\.\d+)?)*)")
CITED = {"moe": "docs/moe.md", "": "docs/numerics.md", "quantization": "docs/numerics.md"}


def check_citations(tree: Tree) -> Iterator[Finding]:
    """Sections that comments cite exist; citations may go on in the next line of a comment."""
    sections = {file.path: set(re.findall(r"^#+ (\d+(?:\.\d+)?)\.? ", file.text, re.M))
                for file in tree.files if file.path in CITED.values()}
    for file in tree.under("include/", "src/", "python/", "bench/", "tests/", "tools/"):
        text = re.sub(r"\n[ \t]*(?://|#)", lambda m: "\n" + " " * (len(m[0]) - 1), file.text)
        for match in CITATION.finditer(text):
            before = text[max(0, match.start() - 200):match.start()].split()
            word = re.sub(r"\W", "", before[-1]).lower() if before else ""
            page = CITED.get(word, CITED[""])
            missing = set(re.findall(r"\d+(?:\.\d+)?", match[1])) - sections.get(page, set())
            if missing:
                yield Finding(file.path, text.count("\n", 0, match.start(1)) + 1, "citation",
                              f"{page} has no section {', '.join(sorted(missing))}")


def check_macro_count(tree: Tree) -> Iterator[Finding]:
    macros = {m[1] for f in tree.under("src/base/") for _, m in
              f.code_matches(r"^[ \t]*#[ \t]*define[ \t]+(\w+)\(")}
    if len(macros) > MACROS_MAX:
        yield Finding("src/base", 1, "macro-count", ", ".join(sorted(macros)), warning=True)


FILE_RULES: list[Callable[[SourceFile], Iterator[Finding]]] = [
    check_layering, check_foreign_headers, check_macros, check_asm, check_multicast, check_banned,
    check_size, check_template_parameters, check_text, check_opening, check_words,
    check_fragments]
TREE_RULES: list[Callable[[Tree], Iterator[Finding]]] = [
    check_links, check_citations, check_macro_count]


def run(tree: Tree) -> list[Finding]:
    findings = [finding for file in tree.files for rule in FILE_RULES for finding in rule(file)]
    return findings + [finding for rule in TREE_RULES for finding in rule(tree)]


def main() -> int:
    parser = argparse.ArgumentParser(description="Repository checks; see the top of this file.")
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument("--self-test", action="store_true", help="prove that every rule can fail")
    arguments = parser.parse_args()
    if arguments.self_test:
        import tidy_examples
        return tidy_examples.self_test()
    tree = load(arguments.root)
    findings = run(tree)
    print("\n".join(map(str, findings)))
    errors = sum(not finding.warning for finding in findings)
    print(f"tidy: {len(tree.files)} files, {errors} findings, {len(findings) - errors} warnings")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
