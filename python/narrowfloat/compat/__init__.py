"""The library under the names of other software."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys

__all__ = ["install_as_flashinfer"]


def install_as_flashinfer() -> None:
    """Lets `import flashinfer` and imports of its modules find narrowfloat.compat.flashinfer.

    For this process, before anything imports flashinfer; again it changes nothing. ImportError
    where a real FlashInfer is installed or imported: it would be hidden in parts.
    """
    ours = importlib.import_module("narrowfloat.compat.flashinfer")
    there = sys.modules.get("flashinfer")
    if there is ours:
        return
    if there is not None or importlib.util.find_spec("flashinfer") is not None:
        raise ImportError(
            "flashinfer: a real FlashInfer is installed; uninstall flashinfer-python, or import "
            "narrowfloat.compat.flashinfer under its own name"
        )
    prefix = f"{ours.__name__}."
    for info in pkgutil.walk_packages(ours.__path__, prefix):
        if "._" not in info.name:
            importlib.import_module(info.name)
    aliases = {f"flashinfer.{name.removeprefix(prefix)}": module
               for name, module in sys.modules.items()
               if name.startswith(prefix) and "._" not in name}  # fmt: skip
    sys.modules.update({"flashinfer": ours, **aliases})
