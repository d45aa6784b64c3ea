"""Compares the symbols of the shared library with those of the last release.

    tools/compare_symbols.py LIBRARY LIST             fails where one of the list is gone
    tools/compare_symbols.py LIBRARY LIST --write     writes the list, with each release

The list, cmake/symbols.txt, begins with the SONAME of the library that it was written from. Under
another SONAME everything may change. Compared are functions and variables of the public headers,
mangled: a changed parameter is a symbol that is gone. Instances of templates and inline functions
are weak symbols, which programs bring themselves. docs/abi.md says what is stable.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path


def output_of(*command: str | Path, given: str = "") -> str:
    return subprocess.run(command, check=True, text=True, input=given,
                          stdout=subprocess.PIPE).stdout  # fmt: skip


def read_library(library: Path) -> tuple[str, set[str]]:
    """The SONAME, and the symbols."""
    soname = re.search(r"Library soname: \[(.*)\]", output_of("readelf", "-d", library))
    if soname is None:
        raise SystemExit(f"{library}: expected a shared library with a SONAME, got none")
    lines = output_of("nm", "-D", "--defined-only", library).splitlines()
    # Implementations of public classes have their visibility; no program can name them.
    symbols = {name for _, kind, name in map(str.split, lines)
               if kind in "TDBR" and not re.search("4Impl|5State", name)}  # fmt: skip
    return soname[1], symbols


def findings(library: Path, listed: Path) -> list[str]:
    """Symbols that are gone, as C++ spells them."""
    soname, symbols = read_library(library)
    released, *names = listed.read_text().split()
    if soname != released:
        print(f"{library}: {soname}, and the list is of {released}: everything may change")
        return []
    gone = sorted(set(names) - symbols)
    print(f"{soname}: {len(names)} symbols listed, {len(symbols - set(names))} new, "
          f"{len(gone)} gone")  # fmt: skip
    return output_of("c++filt", given="\n".join(gone)).splitlines() if gone else []


def main() -> int:
    parser = argparse.ArgumentParser(description="Compares exported symbols with a list.")
    parser.add_argument("library", type=Path)
    parser.add_argument("list", type=Path)
    parser.add_argument("--write", action="store_true", help="write the list")
    options = parser.parse_args()
    if options.write:
        soname, symbols = read_library(options.library)
        options.list.write_text("\n".join([soname, *sorted(symbols)]) + "\n")
        return 0
    gone = findings(options.library, options.list)
    for name in gone:
        print(f"gone: {name}")
    if gone:
        print("Programs that use them would not start. Before the release that has the list write "
              "it again (--write); after it give them back, or raise the minor version.")  # fmt: skip
    return 1 if gone else 0


if __name__ == "__main__":
    sys.exit(main())
