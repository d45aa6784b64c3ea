"""One spelling of the operations that NumPy and torch spell differently, for arrays of either."""

from __future__ import annotations

import sys
from math import prod
from numbers import Real
from typing import Any, Protocol

import numpy as np

from narrowfloat import _core
from narrowfloat._arrays import is_torch, maker_of
from narrowfloat._streams import allocating_on

LAYOUTS = ("swizzled_128x4", "swizzled_8x4", "linear")  # Indexed by SfLayout.
_BACKENDS = frozenset(("auto", "cake", "cuda", "cute-dsl", "cutile", "cutlass", "default",
                       "triton"))  # fmt: skip


class Array(Protocol):
    """An argument or result of the functions: a NumPy array or a torch tensor."""

    @property
    def shape(self) -> Any:
        """Extents."""

    @property
    def dtype(self) -> Any:
        """Element type."""


def refuse(argument: str, value: Any, instead: str) -> None:
    """NotImplementedError that names an argument; nothing for None and False."""
    if value is not None and value is not False:
        raise NotImplementedError(f"{argument}: not offered; {instead}")


def check_backend(backend: str) -> None:
    """Backends are accepted, and change nothing."""
    if backend not in _BACKENDS:
        known = ", ".join(sorted(_BACKENDS))
        raise ValueError(f"backend: expected one of {known}; got {backend!r}")


def layout_name(argument: str, layout: Any) -> str:
    """Our name of a SfLayout."""
    number = int(layout)
    if not 0 <= number < len(LAYOUTS):
        raise ValueError(f"{argument}: expected a SfLayout, got {layout!r}")
    return LAYOUTS[number]


def layout_of(swizzled: bool, is_8x4: bool) -> str:
    """Our name of what two flags ask for."""
    if not swizzled:
        return "linear"
    return "swizzled_8x4" if is_8x4 else "swizzled_128x4"


_names: dict[Any, str] = {}  # Names of element types, which NumPy makes again each time.


def dtype_name(array: Any) -> str:
    """Name of the element type, the same for NumPy and torch."""
    dtype = array.dtype
    if dtype not in _names:
        _names[dtype] = str(dtype).removeprefix("torch.")
    return _names[dtype]


def as_type(array: Any, name: str) -> Any:
    """The same bytes as elements of another type of one byte; uint8 without ml_dtypes."""
    if is_torch(array):
        return array.view(getattr(sys.modules["torch"], name))
    if name == "uint8":
        return array.view(np.uint8)
    try:
        import ml_dtypes
    except ImportError:
        return array
    return array.view(getattr(ml_dtypes, name))


def as_bytes(array: Any) -> Any:
    """The memory of a dense array as uint8; the last axis grows with the element."""
    return as_type(contiguous(array), "uint8")


def cast(array: Any, name: str) -> Any:
    """The numbers in another type."""
    if is_torch(array):
        return array.to(getattr(sys.modules["torch"], name))
    return array.astype(maker_of("array", array).empty((0,), name).dtype)


def to_float32(value: Any, like: Any) -> Any:
    """A scale, given as a number or an array, as float32 [n] where `like` lies.

    One number is written there by a fill: a copy from the host would wait, and end a graph capture.
    """
    if is_torch(value) and is_torch(like) and (
        value.is_cuda or value.numel() != 1 or value.device == like.device
    ):
        with allocating_on(like.device):  # The conversion is a kernel.
            return value.to(device=like.device, dtype=sys.modules["torch"].float32).reshape(-1)
    host = value.detach().float().cpu().numpy() if is_torch(value) else value
    array = np.asarray(host, np.float32).reshape(-1)
    if array.size != 1 or not is_torch(like):
        return maker_of("input", like).from_numpy(array)
    torch = sys.modules["torch"]
    with allocating_on(like.device):
        return torch.full((1,), float(array[0]), dtype=torch.float32, device=like.device)


def scale_array(argument: str, value: Any, like: Any) -> Any:
    """to_float32() of an argument; TypeError that names it for what is no number and no array."""
    try:
        if value is not None:  # NumPy would make a NaN of None.
            return to_float32(value, like)
    except (TypeError, ValueError):
        pass
    raise TypeError(f"{argument}: expected a number or an array of float32, got {value!r}")


def scale_of(argument: str, value: Any, like: Any) -> Any:
    """A scale for an option of the library: a number as it is, else as scale_array()."""
    return float(value) if isinstance(value, Real) else scale_array(argument, value, like)


def contiguous(array: Any) -> Any:
    """Dense in C order; a copy only where needed."""
    return array.contiguous() if is_torch(array) else np.ascontiguousarray(array)


def is_contiguous(array: Any) -> bool:
    """Whether it is dense in C order."""
    return bool(array.is_contiguous() if is_torch(array) else array.flags.c_contiguous)


def transpose(array: Any, *axes: int) -> Any:
    """A view with its axes in another order."""
    return array.permute(*axes) if is_torch(array) else array.transpose(*axes)


def swap_last(array: Any) -> Any:
    """A view with the last two axes exchanged."""
    return array.swapaxes(-1, -2)


def is_column_major(array: Any) -> bool:
    """A matrix whose columns are dense."""
    if len(array.shape) < 2:
        return False
    if is_torch(array):
        return array.stride(-2) == 1 and array.stride(-1) != 1
    size = array.dtype.itemsize
    return array.strides[-2] == size and array.strides[-1] != size


def take(array: Any, rows: np.ndarray[Any, Any], axis: int) -> Any:
    """A gather of rows; elements of one byte of any type."""
    if is_torch(array):
        index = sys.modules["torch"].from_numpy(rows).to(array.device)
        if array.dtype.itemsize == 1:
            return as_type(as_type(array, "uint8").index_select(axis, index), dtype_name(array))
        return array.index_select(axis, index)
    return np.take(array, rows, axis)


def picked(array: Any, places: Any) -> Any:
    """array[i, places[i, j]]."""
    if is_torch(array):
        return array.gather(1, places.long())
    return np.take_along_axis(array, places.astype(np.int64), 1)


def where(condition: Any, array: Any, other: Any) -> Any:
    """array where the condition holds, else the number `other`."""
    if is_torch(array):
        return array.masked_fill(~condition, other)
    return np.where(condition, array, array.dtype.type(other))


def without_denormals(array: Any) -> Any:
    """bfloat16 or float32 elements with zeros of the same sign for denormals; float16 as it is.

    All float16 numbers are normal in float32, in which the quantizers compute.
    """
    name = dtype_name(array)
    if name not in ("bfloat16", "uint16", "float32"):
        return array
    exponent, sign = (0x7F800000, -(2**31)) if name == "float32" else (0x7F80, -(2**15))
    word = "int32" if name == "float32" else "int16"
    if is_torch(array):
        torch = sys.modules["torch"]
        bits = array.view(getattr(torch, word))
        return torch.where(bits & exponent == 0, bits & sign, bits).view(array.dtype)
    bits = array.view(word)
    return np.where(bits & exponent == 0, bits & sign, bits).view(array.dtype)


def softplus(array: Any) -> Any:
    """log(1 + exp(x))."""
    if is_torch(array):
        return array.clamp(min=0) + (-array.abs()).exp().log1p()
    return np.logaddexp(array, array.dtype.type(0))


def is_on_gpu(array: Any) -> bool:
    """Whether its values cannot be looked at without waiting."""
    return is_torch(array) and array.is_cuda


def address_of(array: Any) -> int:
    """The address of the first element."""
    return int(array.data_ptr() if is_torch(array) else array.ctypes.data)


def to_cpu(array: Any) -> Any:
    """The array on the CPU."""
    return array.cpu() if is_torch(array) else array


def device_name(array: Any) -> str:
    """The device of its memory: cpu, cuda:0."""
    return str(array.device) if is_torch(array) else "cpu"


def output_bytes(
    argument: str, array: Any, shape: tuple[int, ...], like: Any, any_shape: bool = False
) -> Any:
    """The memory of a given output of one-byte elements, as uint8 of `shape`; ValueError, that
    names the argument, for memory of another size or device, or that a call could not fill.

    any_shape: as many elements will do.
    """
    check_one_byte(argument, array)
    if not is_contiguous(array):  # A copy would be filled and lost.
        raise ValueError(f"{argument}: expected a dense array in C order, got a strided view")
    given = tuple(array.shape)
    if given != shape and not (any_shape and prod(given) == prod(shape)):
        raise ValueError(f"{argument}: expected shape {shape}, got {given}")
    if device_name(array) != device_name(like):
        raise ValueError(
            f"{argument}: expected memory on {device_name(like)}, got {device_name(array)}"
        )
    check_writable(argument, array)
    return as_bytes(array).reshape(shape)


def check_writable(argument: str, array: Any) -> None:
    """ValueError for an array of NumPy that is read-only."""
    if not (is_torch(array) or array.flags.writeable):
        raise ValueError(f"{argument}: expected memory that can be written, got a read-only array")


def check_one_byte(argument: str, array: Any) -> None:
    """ValueError unless codes or scales are of one byte each: uint8, or a type of that size."""
    if array.dtype.itemsize != 1:
        raise ValueError(
            f"{argument}: expected uint8 or another type of one byte, got {dtype_name(array)}"
        )


def copy_into(argument: str, target: Any, source: Any) -> Any:
    """Fills a given array, whose type and shape may differ in kind."""
    if tuple(target.shape) != tuple(source.shape):
        raise ValueError(
            f"{argument}: expected shape {tuple(source.shape)}, got {tuple(target.shape)}"
        )
    if is_torch(target):
        target.copy_(source)
    else:
        target[...] = source.astype(target.dtype)
    return target


def move_scales(
    scales: Any, rows: int, blocks: int, batch: int, source: str, target: str
) -> Any:
    """One-byte scales [..] of `batch` matrices in another layout: uint8, flat."""
    sizes = [
        _core.quantized_layout("mxfp4", rows, 32 * blocks, scale_layout=layout, batch=batch)
        for layout in (source, target)
    ]
    flat = as_bytes(scales).reshape(-1)
    out = maker_of("scales", flat).empty((sizes[1].scale_count,), "uint8")
    _core.relayout_scales(sizes[0], flat, sizes[1], out)
    return out
