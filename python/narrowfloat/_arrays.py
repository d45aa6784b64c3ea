"""Arrays on their way into the extension and new arrays for results.

Types that DLPack lacks become integers of their size. ml_dtypes and torch are never imported for an
input: an array of theirs brings its library along.
"""

from __future__ import annotations

import sys
from operator import index
from typing import Any

import numpy as np

from narrowfloat._streams import allocating_on

# The arrays of arguments and results: of NumPy, torch, or any library that speaks DLPack or
# the buffer protocol. No type that checkers know covers all of these with their methods.
Array = Any

# Types of ml_dtypes -> the types that stand for their bits in the extension.
_STAND_INS = {"bfloat16": np.uint16, "float8_e4m3fn": np.uint8}
# Types of codes and scales; only where bytes are expected.
_BYTE_TYPES = {"float8_e4m3fn", "float8_e8m0fnu", "uint8"}
_NATIVE_KINDS = "biuf"

# dtype -> type to view it as, or None where it goes as it is. Remembered, since looking up the name
# of a dtype takes microseconds.
_views: dict[np.dtype[Any], Any] = {}


def _view_of(argument: str, dtype: np.dtype[Any]) -> Any:
    if not dtype.isnative:
        raise ValueError(f"{argument}: expected native byte order, got {dtype.str}")
    stand_in = _STAND_INS.get(dtype.name)
    if stand_in is None and not (dtype.isbuiltin == 1 and dtype.kind in _NATIVE_KINDS):
        raise ValueError(
            f"{argument}: expected float32, float16, bfloat16 (or uint16), float8_e4m3fn (or "
            f"uint8), got an array of {dtype.name}"
        )
    _views[dtype] = stand_in
    return stand_in


def to_core(argument: str, array: Any) -> Any:
    """The array as the extension takes it: itself, or a view of the same memory."""
    if not isinstance(array, np.ndarray):
        return array  # The extension asks for DLPack or the buffer protocol.
    try:
        view = _views[array.dtype]
    except KeyError:
        view = _view_of(argument, array.dtype)
    return array if view is None else array.view(view)


def codes_to_core(argument: str, array: Any) -> Any:
    """As to_core(), for values and scales: float8_e8m0fnu is a byte, too."""
    if isinstance(array, np.ndarray) and array.dtype.itemsize == 1:
        if array.dtype.name not in _BYTE_TYPES:
            raise ValueError(f"{argument}: expected uint8, got {array.dtype.name}")
        return array.view(np.uint8)
    return to_core(argument, array)


def shape_of(argument: str, array: Any) -> tuple[int, ...]:
    """Extents of an array with at least one axis."""
    try:
        shape = tuple(array.shape)
    except (AttributeError, TypeError):
        raise TypeError(f"{argument}: expected an array, got {type(array).__name__}") from None
    if not shape:
        raise ValueError(f"{argument}: expected at least one axis, got a scalar")
    return shape


def extents_of(argument: str, shape: Any) -> tuple[int, ...]:
    """A shape that was given as numbers, of at least one axis."""
    try:
        extents = tuple(map(index, shape))
    except TypeError:
        raise TypeError(f"{argument}: expected whole numbers such as (256, 512), got "
                        f"{shape!r}") from None  # fmt: skip
    if not extents:
        raise ValueError(f"{argument}: expected at least one axis")
    return extents


def float_dtype(dtype: Any) -> np.dtype[Any]:
    """The NumPy type of "float32", "float16", "bfloat16" or of what NumPy makes a type of.

    Without ml_dtypes, "bfloat16" is uint16: the bits.
    """
    if dtype != "bfloat16":
        return np.dtype(dtype)
    try:
        import ml_dtypes
    except ImportError:
        return np.dtype(np.uint16)
    return np.dtype(ml_dtypes.bfloat16)


class NumpyMaker:
    """Makes arrays of NumPy."""

    def zeros(self, shape: Any, dtype: Any) -> Any:
        """A new array; dtype as float_dtype() takes it."""
        return np.zeros(shape, float_dtype(dtype))

    def empty(self, shape: Any, dtype: Any) -> Any:
        """As zeros(), of any contents."""
        return np.empty(shape, float_dtype(dtype))

    def full(self, shape: Any, value: float, dtype: Any) -> Any:
        """As zeros(), of one number."""
        return np.full(shape, value, float_dtype(dtype))

    def from_numpy(self, array: Any) -> Any:
        """The same numbers where new arrays are made."""
        return array


class TorchMaker:
    """Makes tensors of torch on one device."""

    def __init__(self, device: Any) -> None:
        self.device = device

    def _type(self, dtype: Any) -> Any:
        torch = sys.modules["torch"]
        if isinstance(dtype, torch.dtype):
            return dtype
        name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
        return getattr(torch, name)

    def zeros(self, shape: Any, dtype: Any) -> Any:
        """A new tensor; dtype is torch's, or a name, or NumPy's."""
        with allocating_on(self.device):
            return sys.modules["torch"].zeros(shape, dtype=self._type(dtype), device=self.device)

    def empty(self, shape: Any, dtype: Any) -> Any:
        """As zeros(), of any contents."""
        with allocating_on(self.device):
            return sys.modules["torch"].empty(shape, dtype=self._type(dtype), device=self.device)

    def full(self, shape: Any, value: float, dtype: Any) -> Any:
        """As zeros(), of one number, which no copy from the host brings."""
        torch = sys.modules["torch"]
        with allocating_on(self.device):
            return torch.full(shape, value, dtype=self._type(dtype), device=self.device)

    def from_numpy(self, array: Any) -> Any:
        """The same numbers where new tensors are made."""
        torch = sys.modules["torch"]
        # A copy, as torch has no read-only tensors.
        return torch.from_numpy(np.array(array)).to(self.device)


Maker = NumpyMaker | TorchMaker

NUMPY = NumpyMaker()


def is_torch(array: Any) -> bool:
    """Whether it is a tensor of torch, which is then imported."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def maker_of(argument: str, array: Any) -> Maker:
    """Makes arrays of the kind of `array`: torch's on its device, else NumPy's.

    NotImplementedError for an array of another library on a device: its results must be given;
    and for a meta tensor.
    """
    if isinstance(array, np.ndarray):
        return NUMPY
    if isinstance(array, Maker):
        return array
    if is_torch(array):
        if array.device.type == "meta":
            raise NotImplementedError(f"{argument}: expected a tensor with values, got one on the "
                                      "meta device; make it on the CPU or on a GPU")  # fmt: skip
        return TorchMaker(array.device)
    where = getattr(array, "__dlpack_device__", None)
    if where is not None:
        kind, index = where()
        if kind == 2 or kind == 13:  # kDLCUDA, kDLCUDAManaged
            raise NotImplementedError(
                f"{argument}: an array on cuda:{int(index)}, where narrowfloat makes tensors of "
                "torch alone; give out"
            )
    return NUMPY
