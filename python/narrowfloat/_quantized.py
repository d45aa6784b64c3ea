"""QuantizedTensor: the buffers of a quantized tensor and their meaning."""

from __future__ import annotations

import os
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from narrowfloat import _core
from narrowfloat._arrays import (
    NUMPY,
    Array,
    TorchMaker,
    codes_to_core,
    extents_of,
    is_torch,
    maker_of,
    to_core,
)

_SCALE_TYPES = {"E4M3": "F8_E4M3", "UE8M0": "F8_E8M0", "F32": "F32"}  # Spelling of safetensors.
_METADATA = "narrowfloat."
_WITH_GLOBAL_SCALE = {info.name for info in _core.formats() if info.has_global_scale}


def scales_shape(sizes: _core.QuantizedLayout, lead: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of a scale array for batches `lead`: a matrix where the layout is one, else flat."""
    if sizes.scale_layout == "linear":
        return (*lead, sizes.scale_rows, sizes.scale_blocks)
    batch = prod(lead)
    return (*lead, sizes.scale_count // batch if batch else 0)


def alignment_of(format: str, cols: int, value_cols: int) -> int:
    """An alignment that pads `cols` to `value_cols`, so that a layout need not keep its own."""
    return value_cols if format == "mxfp8" and value_cols > cols else 32


class QuantizedTensor:
    """A quantized tensor: codes, block scales, global scale, and their meaning.

    The arrays are the caller's: nothing is copied, whoever changes one changes the tensor.

    values: codes, uint8 [..., cols / 2] with the even column in the low nibble (4-bit formats), or
        uint8 [..., value_cols] of float8_e4m3fn.
    scales: block scales, uint8 (float8_e4m3fn or float8_e8m0fnu by `layout.scale_type`) or float32.
        Of layout `linear` [scale_rows, scale_blocks], else flat [n]; with a leading [batch] where
        the tensor has batches. Padding is zero.
    global_scale: float32 [layout.global_scales], decode scales: they multiply on dequantization.
        None for formats without.
    layout: sizes, format and scale layout.
    shape: the logical shape, [..., rows, cols].
    row_offsets: fp8_1x128 with groups of rows: int64 [groups + 1]; else None.
    """

    __slots__ = ("_buffers", "_global_scale", "_layout", "_row_offsets", "_scales", "_shape",
                 "_values")  # fmt: skip

    def __init__(
        self,
        values: Array,
        scales: Array,
        global_scale: Array | None,
        layout: _core.QuantizedLayout,
        shape: Sequence[int] | None = None,
        row_offsets: Array | None = None,
    ) -> None:
        """Wraps arrays of the sizes that `layout` says; any shapes with these sizes will do."""
        if shape is None:
            lead = (layout.batch,) if layout.batch != 1 else ()
            shape = (*lead, layout.rows, layout.cols)
        if shape[-1] != layout.cols or prod(shape[:-1]) != layout.batch * layout.rows:
            raise ValueError(
                f"shape: {tuple(shape)} is not the layout's {layout.batch} x {layout.rows} x "
                f"{layout.cols}"
            )
        self._buffers = _core.QuantizedBuffers(
            layout,
            codes_to_core("values", values),
            codes_to_core("scales", scales),
            None if global_scale is None else to_core("global_scale", global_scale),
        )
        self._values, self._scales, self._global_scale = values, scales, global_scale
        self._layout, self._shape, self._row_offsets = layout, tuple(shape), row_offsets

    @classmethod
    def empty(
        cls,
        shape: Sequence[int],
        format: str,
        *,
        layout: str | None = None,
        batched: bool = False,
        alignment: int = 32,
        groups: int = 0,
        global_scale_axis: str = "tensor",
        like: Any = None,
    ) -> QuantizedTensor:
        """New zeroed arrays for a tensor of a logical shape, for use as `out=`.

        shape: [..., cols]. batched: the axes before the last two are batches with scales of their
        own; else all leading axes together are rows. like: a torch tensor; the new arrays are
        then tensors on its device. Other arguments: quantized_layout().
        """
        shape = extents_of("shape", shape)
        return new_tensor(shape, format, layout=layout, batched=batched, alignment=alignment,
                          groups=groups, global_scale_axis=global_scale_axis, like=like,
                          is_zeroed=True)  # fmt: skip

    @property
    def values(self) -> Array:
        """Codes; see the class."""
        return self._values

    @property
    def scales(self) -> Array:
        """Block scales; see the class."""
        return self._scales

    @property
    def global_scale(self) -> Array | None:
        """Decode scales of the tensor, its rows or its batches; see the class."""
        return self._global_scale

    @property
    def layout(self) -> _core.QuantizedLayout:
        """Sizes of the buffers."""
        return self._layout

    @property
    def row_offsets(self) -> Array | None:
        """The first rows of the groups; see the class."""
        return self._row_offsets

    @property
    def format(self) -> str:
        """Name of the format: "nvfp4"."""
        return self._layout.format

    @property
    def scale_layout(self) -> str:
        """Name of the layout of the scales: "linear"."""
        return self._layout.scale_layout

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape."""
        return self._shape

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, padding included."""
        sizes = self._layout
        return sizes.values_bytes + sizes.scales_bytes + 4 * sizes.global_scales

    @property
    def bits_per_weight(self) -> float:
        """Bits of all buffers over the elements of the logical shape; 0 for a tensor without."""
        elements = prod(self._shape)
        return 8 * self.nbytes / elements if elements else 0.0

    @property
    def device(self) -> Any:
        """Where the values lie: torch's device, or "cpu"."""
        return self._values.device if is_torch(self._values) else "cpu"

    def to(self, device: Any) -> QuantizedTensor:
        """The same tensor on a device, as torch names it; itself where it is there.

        Arrays of NumPy become tensors of torch, but for "cpu", where they stay as they are.
        """
        if not is_torch(self._values) and str(device) == "cpu":
            return self
        import torch

        there = torch.device(device)
        if there.type == "meta":
            raise NotImplementedError("device: a quantized tensor has no form on the meta device")
        parts = [_tensor_on(there, part) for part in self._arrays()]
        if all(new is old for new, old in zip(parts, self._arrays(), strict=True)):
            return self
        values, scales, global_scale, row_offsets = parts
        return QuantizedTensor(values, scales, global_scale, self._layout, self._shape, row_offsets)

    def _arrays(self) -> tuple[Any, Any, Any, Any]:
        return self._values, self._scales, self._global_scale, self._row_offsets

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle, copy, deepcopy and torch.save: the arrays, and what makes the layout."""
        sizes, offsets = self._layout, self._row_offsets
        facts = (sizes.format, sizes.scale_layout, sizes.batch, sizes.value_cols,
                 sizes.global_scale_axis, 0 if offsets is None else len(offsets) - 1)  # fmt: skip
        return _rebuilt, (*self._arrays(), self._shape, facts)

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError(
            "QuantizedTensor: no array of numbers: .dequantize() makes one, .values and .scales "
            "are the codes"
        )

    def __repr__(self) -> str:
        return (
            f"QuantizedTensor({self.format}, shape={self._shape}, scales={self.scale_layout}, "
            f"{self.nbytes:,} bytes, {self.bits_per_weight:.3f} bits per weight, on {self.device})"
        )

    def dequantize(self, dtype: Any = "float32", **options: Any) -> Array:
        """narrowfloat.dequantize(self, dtype, ...)."""
        from narrowfloat._operations import dequantize

        return dequantize(self, dtype, **options)

    def relayout(self, layout: str) -> QuantizedTensor:
        """narrowfloat.relayout(self, layout)."""
        from narrowfloat._operations import relayout

        return relayout(self, layout)

    def save(self, path: str | os.PathLike[str], name: str = "tensor") -> None:
        """Writes a safetensors file with the tensors NAME.values, NAME.scales, NAME.global_scale.

        What they mean stands in the file's metadata, for load(). Checkpoints that other software
        reads are written by the command line program. The file appears complete or not at all.
        """
        sizes = self._layout
        codes = "U8" if sizes.element_bits == 4 else "F8_E4M3"
        parts = [(f"{name}.values", codes, codes_to_core("values", self._values)),
                 (f"{name}.scales", _SCALE_TYPES[sizes.scale_type],
                  codes_to_core("scales", self._scales))]  # fmt: skip
        if self._global_scale is not None:
            parts.append((f"{name}.global_scale", "F32", self._global_scale))
        if self._row_offsets is not None:
            parts.append((f"{name}.row_offsets", "I64", self._row_offsets))
        facts = {
            "format": sizes.format,
            "scale_layout": sizes.scale_layout,
            "shape": ",".join(map(str, self._shape)),
            "batch": str(sizes.batch),
            "value_cols": str(sizes.value_cols),
            "global_scale_axis": sizes.global_scale_axis,
        }
        metadata = {f"{_METADATA}{key}": value for key, value in facts.items()}
        _core.write_safetensors(os.fspath(path), parts, metadata)

    @classmethod
    def load(cls, path: str | os.PathLike[str], name: str = "tensor") -> QuantizedTensor:
        """Reads what save() wrote. ValueError for a file of any other content."""
        file = _core.SafetensorsReader.open(os.fspath(path))
        metadata, tensors = file.metadata(), file.tensors()
        arrays: dict[str, Array] = {}
        for part, dtypes in (("values", {"U8": np.uint8, "F8_E4M3": np.uint8}),
                             ("scales", {"F8_E4M3": np.uint8, "F8_E8M0": np.uint8,
                                         "F32": np.float32}),
                             ("global_scale", {"F32": np.float32}),
                             ("row_offsets", {"I64": np.int64})):  # fmt: skip
            if f"{name}.{part}" not in tensors:
                continue
            dtype, extents = tensors[f"{name}.{part}"]
            if dtype not in dtypes:
                raise ValueError(f"{path}: {name}.{part}: unexpected type {dtype}")
            arrays[part] = np.empty(extents, dtypes[dtype])
            file.read(f"{name}.{part}", arrays[part])
        offsets = arrays.get("row_offsets")
        try:
            shape = tuple(int(extent) for extent in metadata[f"{_METADATA}shape"].split(","))
            facts = (metadata[f"{_METADATA}format"], metadata[f"{_METADATA}scale_layout"],
                     int(metadata[f"{_METADATA}batch"]), int(metadata[f"{_METADATA}value_cols"]),
                     metadata[f"{_METADATA}global_scale_axis"],
                     0 if offsets is None else len(offsets) - 1)  # fmt: skip
            return _rebuilt(arrays["values"], arrays["scales"], arrays.get("global_scale"),
                            offsets, shape, facts)  # fmt: skip
        except KeyError as error:
            raise ValueError(f"{path}: no quantized tensor {name!r}: {error} is missing") from error
        except ValueError as error:
            raise ValueError(f"{path}: {name}: {error}") from error


def _tensor_on(device: Any, array: Any) -> Any:
    """A tensor of torch on a device; None stays None."""
    if array is None:
        return None
    return TorchMaker(device).from_numpy(array) if isinstance(array, np.ndarray) else array.to(
        device)  # fmt: skip


def _rebuilt(
    values: Array, scales: Array, global_scale: Array | None, row_offsets: Array | None,
    shape: tuple[int, ...], facts: tuple[str, str, int, int, str, int],
) -> QuantizedTensor:  # fmt: skip
    """Puts together what QuantizedTensor.__reduce__() took apart."""
    format, scale_layout, batch, value_cols, axis, groups = facts
    sizes = _core.quantized_layout(
        format,
        prod(shape[:-1]) // batch if batch else 0,
        shape[-1],
        scale_layout=scale_layout,
        batch=batch,
        alignment=alignment_of(format, shape[-1], value_cols),
        groups=groups,
        global_scale_axis=axis,
    )
    return QuantizedTensor(values, scales, global_scale, sizes, shape, row_offsets)


def new_tensor(
    shape: Sequence[int],
    format: str,
    *,
    layout: str | None,
    batched: bool,
    alignment: int,
    groups: int,
    global_scale_axis: str,
    like: Any,
    is_zeroed: bool,
) -> QuantizedTensor:
    """As QuantizedTensor.empty(); of any contents for a call that writes all, unless is_zeroed."""
    if batched and len(shape) < 3:
        raise ValueError(f"batched: needs at least three axes, got shape {tuple(shape)}")
    batch = prod(shape[:-2]) if batched else 1
    sizes = _core.quantized_layout(
        format,
        shape[-2] if batched else prod(shape[:-1]),
        shape[-1],
        scale_layout=layout,
        batch=batch,
        alignment=alignment,
        groups=groups,
        global_scale_axis=global_scale_axis,
    )
    packed = sizes.value_cols // 2 if sizes.element_bits == 4 else sizes.value_cols
    maker = NUMPY if like is None else maker_of("like", like)
    make = maker.zeros if is_zeroed else maker.empty
    values = make((*shape[:-1], packed), "uint8")
    scales = make(
        scales_shape(sizes, tuple(shape[:-2]) if batched else ()),
        "float32" if sizes.scale_type == "F32" else "uint8",
    )
    has_global = format in _WITH_GLOBAL_SCALE
    global_scale = make((sizes.global_scales,), "float32") if has_global else None
    return QuantizedTensor(values, scales, global_scale, sizes, shape)
