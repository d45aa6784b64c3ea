"""Safetensors files of the MoE golden vectors: written byte by byte, the same on every machine."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np

Tensors = dict[str, tuple[str, np.ndarray]]  # Name -> (dtype of the format, array).


def non_default(value: object) -> dict[str, object]:
    """Fields of a dataclass instance, nested ones too, that are not at their defaults."""
    result = {}
    for f in dataclasses.fields(value):
        one = getattr(value, f.name)
        is_required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        default = f.default_factory() if callable(f.default_factory) else f.default
        if is_required or one != default:
            result[f.name] = non_default(one) if dataclasses.is_dataclass(one) else one
    return result


def compact(value: object) -> str:
    """JSON without spaces."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def safetensors_bytes(tensors: Tensors, metadata: dict[str, str]) -> bytes:
    """A file with the tensors in the order given; the data starts at a multiple of 8."""
    header: dict[str, object] = {"__metadata__": metadata}
    payloads, offset = [], 0
    for name, (dtype, array) in tensors.items():
        array = np.ascontiguousarray(array)
        payload = array.astype(array.dtype.newbyteorder("<")).tobytes()
        span = [offset, offset + len(payload)]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": span}
        payloads.append(payload)
        offset += len(payload)
    text = compact(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(payloads)


def write(path: Path, data: bytes) -> None:
    """Writes a file and says how large it is."""
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    print(f"{path.name}: {len(data)} bytes")
