"""Arguments of a layer's run in the forms that users have them: batches, any integer ids, floats.

Everything here is a view where it can be one; what is converted is said in MoeLayer.run().
"""

from __future__ import annotations

import importlib
import re
import sys
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from narrowfloat._arrays import is_torch, shape_of

if TYPE_CHECKING:
    from collections.abc import Sequence

_INT32 = np.iinfo(np.int32)
_BY_TOKEN = ("logits", "packed", "ids", "weights")
# The C++ names of a run's arguments -> their names in Python.
_NAMES = {"inputs.values": "hidden", "inputs.scales": "hidden_scales",
          "inputs.row_scale": "row_scale"}  # fmt: skip
_MEND = "; allow_absent=True takes such ids for experts that are not here"
_ARGUMENT = re.compile(r"\b(?:inputs\.(?:values|scales|row_scale)|(?:routing|outputs)\.)")


def raise_renamed(error: Exception, minus_one_is_empty: bool) -> NoReturn:
    """Raises an error of the C++ library again, with the names that Python's arguments have."""
    text = _ARGUMENT.sub(lambda match: _NAMES.get(match[0], ""), str(error))
    if not minus_one_is_empty and "expected expert ids" in text:
        text = text.replace(" or -1, got", ", got") + _MEND
    raise type(error)(text) from None


def rows_of(argument: str, array: Any, is_output: bool = False) -> Any:
    """An array whose leading axes are one: [..., n] as [T, n]. Outputs must be views."""
    shape = shape_of(argument, array)
    if len(shape) <= 2:
        return array
    if is_torch(array):
        if not is_output:
            return array.reshape(-1, shape[-1])
        if array.is_contiguous():
            return array.view(-1, shape[-1])
    else:
        made = array.reshape(-1, shape[-1])
        if not is_output or array.size == 0 or np.may_share_memory(made, array):
            return made
    raise ValueError(f"{argument}: expected a C-contiguous array where it has more than two axes, "
                     f"got one of shape {shape} with strides")  # fmt: skip


def to_bfloat16(argument: str, array: Any) -> Any:
    """float16 and float32 rows as bfloat16, rounded to nearest, ties to even; others unchanged."""
    if is_torch(array):
        torch = sys.modules["torch"]
        is_wide = array.dtype in (torch.float16, torch.float32)
        return array.to(torch.bfloat16) if is_wide else array
    if not isinstance(array, np.ndarray) or array.dtype not in (np.float16, np.float32):
        return array
    try:
        import ml_dtypes
    except ImportError:
        bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
        return np.where(np.isnan(array), np.uint32(0x7FC0), rounded).astype(np.uint16)
    return array.astype(ml_dtypes.bfloat16)


def _as_array(array: Any) -> Any:
    """A torch tensor or a NumPy array of what speaks DLPack or the buffer protocol."""
    if is_torch(array) or isinstance(array, np.ndarray):
        return array
    where = getattr(array, "__dlpack_device__", None)
    if where is None or int(where()[0]) == 1:
        return np.asarray(array) if where is None else np.from_dlpack(array)
    return importlib.import_module("torch").from_dlpack(array)


def _is_on_cpu(array: Any) -> bool:
    return isinstance(array, np.ndarray) or array.device.type == "cpu"


def to_layer_ids(argument: str, ids: Any) -> Any:
    """Ids as a layer takes them: dense int64 ones as they are, others as int32."""
    if is_torch(ids):
        is_taken = ids.dtype == sys.modules["torch"].int64 and ids.is_contiguous()
    else:
        is_taken = isinstance(ids, np.ndarray) and ids.dtype == np.int64 and ids.flags.c_contiguous
    return ids if is_taken else to_int32(argument, ids)


def to_int32(argument: str, ids: Any) -> Any:
    """Ids of any integer type as int32; those beyond its range end at its ends.

    int32 ids are returned as they are.
    """
    if is_torch(ids):
        torch = sys.modules["torch"]
        if ids.dtype == torch.int32:
            return ids
        if ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex():
            raise ValueError(f"{argument}: expected integers, got {ids.dtype}")
        return ids.to(torch.int64).clamp(int(_INT32.min), int(_INT32.max)).to(torch.int32)
    if not isinstance(ids, np.ndarray) or ids.dtype == np.int32:
        return ids
    if ids.dtype.kind not in "iu":
        raise ValueError(f"{argument}: expected integers, got {ids.dtype}")
    low = int(_INT32.min) if ids.dtype.kind == "i" and ids.dtype.itemsize > 4 else None
    high = int(_INT32.max) if ids.dtype.itemsize >= 4 else None
    return (ids if low is high is None else np.clip(ids, low, high)).astype(np.int32)


class GivenIds:
    """Ids of a call, alone or in a packed routing, and which of them name no expert."""

    def __init__(self, argument: str, array: Any, experts: int) -> None:
        self.argument, self.array, self.experts = argument, _as_array(array), experts
        self.is_packed = argument == "packed"

    @property
    def _ids(self) -> Any:
        return self.array >> 16 if self.is_packed else self.array

    def _with(self, id: int, mask: Any) -> Any:
        """The array with `id` where the mask is set."""
        where = sys.modules["torch"].where if is_torch(self.array) else np.where
        new = (self.array & 0xFFFF) | (id << 16) if self.is_packed else np.int32(id)
        if is_torch(self.array) and not self.is_packed:
            new = self.array.new_full((), id)
        return where(mask, new, self.array)

    def absent_as_minus_one(self) -> Any:
        """-1 for each id below 0 or beyond the experts."""
        ids = self._ids
        return self._with(-1, (ids < 0) | (ids >= self.experts))

    def refuse_minus_one(self, has_errors: bool) -> Any:
        """As the layer takes them, for which -1 is an empty slot, where it is to be an error."""
        is_empty = self._ids == -1
        if not _is_on_cpu(self.array):
            return self._with(-2, is_empty) if has_errors else self.array
        if bool(is_empty.any()):
            index = int(is_empty.reshape(-1).nonzero()[0][0])
            raise ValueError(
                f"{self.argument}: expected expert ids from 0 to {self.experts - 1}, got -1 at "
                f"index {index} (token {index // self.array.shape[-1]}){_MEND}"
            )
        return self.array


def given_routing(
    arrays: dict[str, Any], experts: int, *, allow_absent: bool, minus_one_is_empty: bool,
    has_errors: bool,
) -> dict[str, Any]:  # fmt: skip
    """logits, bias, packed, ids, weights as a layer takes them that lets -1 pass."""
    found = {name: array for name, array in arrays.items() if array is not None}
    for name in _BY_TOKEN:
        if name in found and hasattr(found[name], "reshape"):
            found[name] = rows_of(name, found[name])
    for name in ("ids", "packed"):
        if name not in found:
            continue
        if name == "ids":
            found[name] = to_layer_ids(name, found[name])
        given = GivenIds(name, found[name], experts)
        # On a GPU ids that name no expert are skipped in any case, and counted in `errors`.
        if allow_absent and (has_errors or _is_on_cpu(given.array)):
            found[name] = given.absent_as_minus_one()
        elif not allow_absent and not minus_one_is_empty:
            found[name] = given.refuse_minus_one(has_errors)
    return found


def by_token(arrays: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Outputs of which those named have a row for each token; None is left out."""
    return {name: rows_of(name, array, is_output=True) if name in names else array
            for name, array in arrays.items() if array is not None}  # fmt: skip
