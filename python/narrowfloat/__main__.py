"""`python -m narrowfloat` is the command line program `narrowfloat`, which the package holds."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn


def main() -> NoReturn:
    """Becomes the program, so that signals, exit codes and output are its own."""
    program = str(Path(__file__).parent / "bin" / "narrowfloat")
    os.execv(program, [program, *sys.argv[1:]])


if __name__ == "__main__":
    main()
