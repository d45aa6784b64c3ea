"""Compares what the shared library exports with what the installed headers declare.

    check_shared_library.py LIBRARY --soname NAME --headers FOLDER

Finds functions that a header declares and the library does not export (they lack NARROWFLOAT_API),
and exported symbols that no header names, those of the C API included. Weak symbols from elsewhere are left alone: compilers
export instances of the standard library's templates. Exit code 1 if there is a finding.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

# `name(arguments) const;`, arguments with at most one level of parentheses.
DECLARATION = re.compile(r"(?<!::)\b(\w+)\((?:[^()]|\([^()]*\))*\)(?: const)?(?: noexcept)?;")
NAMESPACE = re.compile(r"_Z(?:T[ISV])?N[KVRO]*11narrowfloat")
NAME = re.compile(r"(\d+)(.*)")


def names_of(symbol: str) -> list[str]:
    """Names inside namespace narrowfloat, outermost first; empty for a symbol from elsewhere."""
    start, names = NAMESPACE.match(symbol), []
    rest = symbol[start.end():] if start else ""
    while match := NAME.match(rest):
        length = int(match[1])
        names.append(match[2][:length])
        rest = match[2][length:]
    return names


def output_of(*command: str | Path) -> str:
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout


def findings(library: Path, soname: str, headers: Path) -> list[str]:
    text = "".join(path.read_text() for path in sorted(headers.glob("*.h")))
    text = re.sub(r"//.*", "", text)
    identifiers = set(re.findall(r"\w+", text))
    # Friends are internal functions, which the library does not export.
    declared = Counter(DECLARATION.findall(re.sub(r"\bfriend\b[^;]*;", "", text)))

    # Constructors and destructors have two symbols each.
    lines = output_of("nm", "-D", "--defined-only", library).splitlines()
    symbols = {re.sub(r"([CD])2E", r"\g<1>1E", line.split()[2]): line.split()[1] for line in lines}
    exported = Counter((names_of(symbol) or [symbol])[-1] for symbol in symbols)

    found = [f"{name}: {count} declared, {exported[name]} exported"
             for name, count in declared.items() if exported[name] < count]
    for symbol, kind in symbols.items():
        names = names_of(symbol)
        is_c = symbol.startswith("nf_") and symbol in declared
        if (names and names[0] not in identifiers) or (
            not names and kind not in "WVu" and not is_c
        ):
            found.append(f"{symbol}: exported, but in no header")
    if "_ZTIN11narrowfloat5ErrorE" not in symbols:
        found.append("the type of narrowfloat::Error is not exported")
    if f"Library soname: [{soname}]" not in output_of("readelf", "-d", library):
        found.append(f"the SONAME is not {soname}")
    print(f"{sum(declared.values())} functions declared, {len(symbols)} symbols exported")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Checks what a shared library exports.")
    parser.add_argument("library", type=Path)
    parser.add_argument("--soname", required=True)
    parser.add_argument("--headers", type=Path, required=True)
    found = findings(**vars(parser.parse_args()))
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
