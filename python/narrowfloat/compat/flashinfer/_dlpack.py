"""Arrays of other libraries, taken over through DLPack without a copy.

Memory of the CPU becomes an array of NumPy, memory of a GPU a tensor of torch. NumPy knows fewer
types than DLPack: bfloat16 and the 8-bit floats pass as integers of their size, as the description
that the producer hands out is ours to read and change until NumPy takes it.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np

from narrowfloat._arrays import is_torch
from narrowfloat._streams import allocating_on

# Values of DLPack's header.
_CPU, _CUDA, _CUDA_HOST = 1, 2, 3
_UNSIGNED = 1
_NARROW = {4: "bfloat16", 10: "float8_e4m3fn", 12: "float8_e5m2", 14: "float8_e8m0fnu"}

# The offset of the code of the element type in a capsule's structure: after a pointer and three
# 32-bit numbers of a DLTensor, which begins the old form and follows 32 bytes of the new one.
_CODE_AT = {b"dltensor": 20, b"dltensor_versioned": 52}

_capsule_is = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
# Types of arguments that imported() leaves as they are, most of all.
PLAIN = frozenset((np.ndarray, type(None), bool, int, float, str))


class _Renamed:
    """An array whose element type NumPy may not know, under a type of that size that it does."""

    def __init__(self, array: Any) -> None:
        self._array = array
        self.held = ""  # The element type, once NumPy has asked for it.

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        capsule = self._array.__dlpack__(**options)
        for name, at in _CODE_AT.items():
            if _capsule_is(capsule, name):
                code = ctypes.c_uint8.from_address(_capsule_pointer(capsule, name) + at)
                self.held = _NARROW.get(code.value, "")
                if self.held:
                    code.value = _UNSIGNED
        return capsule


def _as_numpy(array: Any) -> Any:
    renamed = _Renamed(array)
    taken = np.from_dlpack(renamed)
    if not renamed.held:
        return taken
    try:
        import ml_dtypes
    except ImportError:
        if renamed.held == "float8_e5m2":  # Its bytes would be taken for those of float8_e4m3fn.
            raise TypeError("float8_e5m2 needs ml_dtypes") from None
        return taken  # uint16 and uint8 stand for these types where ml_dtypes is not installed.
    return taken.view(getattr(ml_dtypes, renamed.held))


def _as_torch(array: Any, index: int) -> Any:
    torch = sys.modules["torch"]
    with allocating_on(torch.device("cuda", index)):  # The stream that waits for the producer.
        return torch.from_dlpack(array)


def imported(argument: str, value: Any) -> Any:
    """An array of another library than NumPy and torch as one of these; all else as it is.

    The memory is the same, and in a tuple or list each array counts. TypeError, which names the
    argument, for memory of other devices and for types that are not known here.
    """
    if is_torch(value) or isinstance(value, np.ndarray) or type(value) in PLAIN:
        return value
    if isinstance(value, tuple | list):
        parts = [imported(argument, part) for part in value]
        if all(new is old for new, old in zip(parts, value, strict=True)):
            return value
        return tuple(parts) if isinstance(value, tuple) else parts
    if not (hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__")):
        return value
    kind, index = (int(number) for number in value.__dlpack_device__())
    source = type(value).__name__
    if kind not in (_CPU, _CUDA, _CUDA_HOST):
        raise TypeError(
            f"{argument}: expected memory of the CPU or of a GPU with CUDA, got {source} on "
            f"DLPack's device type {kind}; copy it"
        )
    is_on_gpu = kind == _CUDA
    if is_on_gpu and sys.modules.get("torch") is None:
        raise TypeError(f"{argument}: {source} lies on cuda:{index}, where results are tensors of "
                        "torch; import torch first")  # fmt: skip
    try:
        return _as_torch(value, index) if is_on_gpu else _as_numpy(value)
    except (AttributeError, BufferError, RuntimeError, TypeError, ValueError) as error:
        raise TypeError(
            f"{argument}: expected integers, bool, float32, float16, bfloat16 or 8-bit floats "
            f"through DLPack, got {source}: {error}"
        ) from error
