"""Registers, memory and tensor core instructions of the CUDA kernels, as the tables of a page.

Reads a library or executable with cuobjdump (of the CUDA toolkit, or PyPI's nvidia-cuda-cuobjdump
and nvidia-cuda-nvdisasm) and demangles names with c++filt. A page gets a table with a line for each
operation and the number of all instantiations. Without a page every kernel is listed as well, and
every grouped GEMM, whose shared memory is asked for at the launch and whose warpgroups redistribute
the registers of a CTA (gemm_shapes.cuh).

    python3 tools/kernel_resources.py LIBRARY
    python3 tools/kernel_resources.py LIBRARY --into docs/kernels/resources.md
    python3 tools/kernel_resources.py LIBRARY --check docs/kernels/resources.md

The last form needs the compiler that the page names, and says so if it is another one, or if
cuobjdump is missing. Exits with 1 if the page is not up to date, if a grouped GEMM has a stack,
which is where spilled registers go, or if one multiplies without tensor cores.
"""

import argparse
import collections
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

GEMM = "multiply_groups_kernel"
SOURCES = Path(__file__).resolve().parents[1] / "src"
BEGIN = "<!-- tools/kernel_resources.py: begin -->"
END = "<!-- tools/kernel_resources.py: end -->"


@dataclass
class Kernel:
    """One instantiation of a source. Bytes of shared memory and stack; instructions by name of
    wgmma."""

    name: str
    registers: int
    stack: int
    shared: int
    source: str = ""  # "combine_sm90.cu", where the file is an archive.
    instructions: int = 0
    wgmma: collections.Counter = field(default_factory=collections.Counter)

    @property
    def template(self) -> str:
        """multiply_groups_kernel of narrowfloat::multiply_groups_kernel<...>(...)."""
        name = self.name.removeprefix("void ").replace("(anonymous namespace)::", "")
        return re.split(r"[<(]", name, maxsplit=1)[0].split("::")[-1]


def parse_resources(text: str) -> dict[str, Kernel]:
    """Kernels by name, from the demangled output of cuobjdump --dump-resource-usage."""
    kernels = {}
    pattern = (r"^member .*:(.+)\.o:$|"
               r"^ Function (.+):\n\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)")
    source = ""
    for member, name, *numbers in re.findall(pattern, text, re.MULTILINE):
        if member:
            source = member
        else:
            kernels[name] = Kernel(name, *map(int, numbers), source)
    return kernels


def count_instructions(text: str, kernels: dict[str, Kernel]) -> None:
    """Adds what the demangled output of cuobjdump -sass says of the kernels it has."""
    kernel = None
    for line in text.splitlines():
        if "Function : " in line:
            kernel = kernels.get(line.split("Function : ", 1)[1].strip())
        elif kernel and (found := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)",
                                           line)):
            kernel.instructions += found[1] != "NOP"
            if found[1].startswith(("HGMMA", "QGMMA")):
                kernel.wgmma[found[1]] += 1


def span(values: list[int]) -> str:
    return f"{min(values)}" if min(values) == max(values) else f"{min(values)} to {max(values)}"


def operations(sources: Path) -> dict[str, str]:
    """The operation (below src/ops) or folder (below src) of each source with kernels."""
    found = {}
    for file in sources.rglob("*.cu"):
        parts = file.relative_to(sources).parts
        found[file.name] = parts[1] if parts[0] == "ops" else parts[0]
    return found


def resource_table(head: str, groups: dict[str, list[Kernel]]) -> str:
    lines = [f"| {head} | instantiations | registers | stack, bytes | "
             "static shared memory, bytes |", "|---|---|---|---|---|"]
    for name, those in sorted(groups.items()):
        columns = [span([getattr(kernel, what) for kernel in those])
                   for what in ("registers", "stack", "shared")]
        lines.append(f"| `{name}` | {len(those)} | {' | '.join(columns)} |")
    return "\n".join(lines)


def kernel_table(kernels: list[Kernel]) -> str:
    by_template = collections.defaultdict(list)
    for kernel in kernels:
        by_template[kernel.template].append(kernel)
    return resource_table("kernel", by_template)


def operation_table(kernels: list[Kernel], folders: dict[str, str]) -> str:
    by_operation = collections.defaultdict(list)
    for kernel in kernels:
        by_operation[folders.get(kernel.source, "other")].append(kernel)
    return (f"{resource_table('operation', by_operation)}\n\n"
            f"{len(kernels)} instantiations of "
            f"{len({kernel.template for kernel in kernels})} kernels.")


def shape_of(gemm: Kernel) -> tuple[str, str, int, str]:
    """Weights, promotion every 128 columns, tokens of a tile, and cluster split along n."""
    found = re.search(r"GemmShapeOf<(?:narrowfloat::)?(.+), (\w+), (\d+), (\w+)>", gemm.name)
    if not found:
        sys.exit("kernel_resources: expected GemmShapeOf<weights, groups, tokens, n cluster> in "
                 f"{gemm.name}")
    weights = re.sub(r"narrowfloat::|\(.*?\)", "", found[1]).strip()
    groups, n_cluster = ("yes" if value == "true" else "no" for value in (found[2], found[4]))
    return weights, groups, int(found[3]), n_cluster


def gemm_table(gemms: list[Kernel]) -> str:
    lines = ["| weights | groups | tile | n cluster | registers at the launch | instructions | "
             "wgmma |", "|---|---|---|---|---|---|---|"]
    for gemm in sorted(gemms, key=shape_of):
        weights, groups, tokens, n_cluster = shape_of(gemm)
        wgmma = ", ".join(f"{count} {name.split('.F32')[0]}"
                          for name, count in sorted(gemm.wgmma.items()))
        lines.append(f"| `{weights}` | {groups} | {tokens} | {n_cluster} | {gemm.registers} | "
                     f"{gemm.instructions} | {wgmma or 'none'} |")
    return "\n".join(lines)


def demangled(command: list[str]) -> str:
    """Output of a command, whose warnings about what is not a kernel are left out."""
    try:
        output = subprocess.run(command, check=True, capture_output=True).stdout
        filtered = subprocess.run(["c++filt"], input=output, check=True, capture_output=True)
        return filtered.stdout.decode()
    except FileNotFoundError as error:
        sys.exit(f"kernel_resources: {error.filename} is not there: install the CUDA toolkit, or "
                 "name cuobjdump with --cuobjdump")
    except subprocess.CalledProcessError as error:
        sys.exit(f"kernel_resources: {' '.join(command)}: {error.stderr.decode().strip()}")


def faults(gemms: list[Kernel]) -> list[str]:
    found = [] if gemms else [f"no {GEMM} in the file: was it built with NARROWFLOAT_CUDA=ON?"]
    for gemm in gemms:
        if gemm.stack:
            found.append(f"{gemm.name}: a stack of {gemm.stack} bytes, expected none")
        if not gemm.wgmma:
            found.append(f"{gemm.name}: no HGMMA or QGMMA instruction")
    return found


def write_tables(page: Path, tables: str) -> None:
    text = page.read_text()
    if BEGIN not in text or END not in text:
        sys.exit(f"kernel_resources: {page}: expected the lines {BEGIN} and {END}")
    head, tail = text.split(BEGIN)[0], text.split(END)[1]
    page.write_text(f"{head}{BEGIN}\n\n{tables}\n\n{END}{tail}")


def why_unchecked(page: str, cuobjdump: str) -> str:
    """Why nothing can be said of a page; empty if something can."""
    if shutil.which(cuobjdump) is None:
        return f"{cuobjdump} is not there"
    made_by = re.search(r"nvcc (\d+\.\d+)", page)
    if not made_by or shutil.which("nvcc") is None:
        return "no compiler to compare with"
    version = subprocess.run(["nvcc", "--version"], check=True, capture_output=True, text=True)
    if f"release {made_by[1]}," in version.stdout:
        return ""
    return f"the page is of nvcc {made_by[1]}, not of the one on PATH"


def is_current(page: str, tables: str) -> bool:
    """Whether a page has these tables between its marks."""
    return f"{BEGIN}\n\n{tables}\n\n{END}" in page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", help="library, object or executable with kernels")
    parser.add_argument("--cuobjdump", default="cuobjdump", help="the program, if not on PATH")
    parser.add_argument("--into", type=Path, metavar="PAGE", help="write the tables into this page")
    parser.add_argument("--check", type=Path, metavar="PAGE", help="expect the tables on this page")
    arguments = parser.parse_args()
    page = arguments.check.read_text() if arguments.check else ""
    if arguments.check and (reason := why_unchecked(page, arguments.cuobjdump)):
        print(f"kernel_resources: skipped: {reason}")
        return
    kernels = parse_resources(
        demangled([arguments.cuobjdump, "--dump-resource-usage", arguments.file]))
    count_instructions(demangled([arguments.cuobjdump, "-sass", arguments.file]), kernels)
    gemms = [kernel for kernel in kernels.values() if kernel.template == GEMM]
    tables = operation_table(list(kernels.values()), operations(SOURCES))
    if arguments.check:
        if not is_current(page, tables):
            sys.exit(f"kernel_resources: {arguments.check} is not up to date: write it with --into")
    elif arguments.into:
        write_tables(arguments.into, tables)
    else:
        print(f"{tables}\n\n{kernel_table(list(kernels.values()))}\n\n{gemm_table(gemms)}")
    if found := faults(gemms):
        sys.exit("\n".join(found))


if __name__ == "__main__":
    main()
