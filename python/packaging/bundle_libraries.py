"""Puts the shared libraries that a wheel needs, and a system need not have, beside its programs.

    bundle_libraries.py --patchelf PATCHELF PACKAGE LIBRARY...

PACKAGE is the installed folder `narrowfloat`, LIBRARY what the build linked. Each library that a
binary needs is copied to PACKAGE/lib under a name of its contents, so that it is never taken for,
nor replaced by, another copy in the same process. A library that is neither among them nor one that
every Linux has is an error. Run by CMake's install step.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

# The linked libraries that the manylinux policies let a wheel take from the system.
SYSTEM = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1",
          "libgcc_s.so.1", "libstdc++.so.6", "ld-linux-x86-64.so.2",
          "ld-linux-aarch64.so.1"}  # fmt: skip


class Bundle:
    """The folder of libraries, and the names that they were given."""

    def __init__(self, patchelf: str, package: Path, libraries: list[Path]) -> None:
        self._patchelf, self._folder = patchelf, package / "lib"
        self._known = {self._run("--print-soname", library): library for library in libraries}
        self._names: dict[str, str] = {}

    def _run(self, *arguments: str | Path) -> str:
        return subprocess.run([self._patchelf, *map(str, arguments)], check=True, text=True,
                              stdout=subprocess.PIPE).stdout.strip()  # fmt: skip

    def _add(self, soname: str) -> str:
        """The new name of a library, which is in the folder then."""
        if soname not in self._names:
            source = self._known[soname].resolve()
            digest = hashlib.sha256(source.read_bytes()).hexdigest()[:8]
            stem, dot, rest = soname.partition(".")
            name = f"{stem}-{digest}{dot}{rest}"
            self._names[soname] = name
            self._folder.mkdir(exist_ok=True)
            copy = self._folder / name
            copy.unlink(missing_ok=True)
            shutil.copyfile(source, copy)
            self._run("--set-soname", name, copy)
            self.serve(copy)
        return self._names[soname]

    def serve(self, binary: Path) -> None:
        """Lets a binary find its libraries in the folder, wherever the package is."""
        served = set(self._names.values())
        for soname in self._run("--print-needed", binary).split():
            if soname in SYSTEM or soname in served:
                continue
            if soname not in self._known:
                sys.exit(f"{binary.name} needs {soname}, which neither a system has nor a wheel")
            self._run("--replace-needed", soname, self._add(soname), binary)
        above = "../" * (len(binary.relative_to(self._folder.parent).parts) - 1)
        inside = binary.parent == self._folder
        self._run("--set-rpath", "$ORIGIN" if inside else f"$ORIGIN/{above}lib", binary)


def main() -> None:
    """Serves the extension module and the programs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--patchelf", required=True)
    parser.add_argument("package", type=Path)
    parser.add_argument("libraries", type=Path, nargs="*")
    arguments = parser.parse_args()
    bundle = Bundle(arguments.patchelf, arguments.package, arguments.libraries)
    binaries = [*arguments.package.glob("_core*.so"), *arguments.package.glob("bin/*")]
    if not binaries:
        sys.exit(f"{arguments.package}: no binaries there")
    for binary in binaries:
        bundle.serve(binary)


if __name__ == "__main__":
    main()
