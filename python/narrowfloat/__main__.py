"""The package holds two programs: `python -m narrowfloat` is `narrowfloat`, the script
`narrowfloat-bench` is the other one."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn


def become(name: str) -> NoReturn:
    """Becomes a program, so that signals, exit codes and output are its own."""
    program = str(Path(__file__).parent / "bin" / name)
    os.execv(program, [program, *sys.argv[1:]])


def main() -> NoReturn:
    """The script `narrowfloat`."""
    become("narrowfloat")


def bench_main() -> NoReturn:
    """The script `narrowfloat-bench`."""
    become("narrowfloat-bench")


if __name__ == "__main__":
    main()
