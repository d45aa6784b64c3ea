"""Lines of tests/golden/vectors/*.txt as arrays; tests/golden/README.md describes the format."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np

FOLDER = Path(__file__).resolve().parents[1] / "golden" / "vectors"
DTYPES = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32,
          "F8_E4M3": ml_dtypes.float8_e4m3fn}  # fmt: skip


def payload(text: str) -> bytes:
    """Bytes of pairs of hex digits, where z<count>. stands for zeros."""
    return bytes.fromhex(re.sub(r"z(\d+)\.", lambda match: "00" * int(match[1]), text))


def numbers(text: str) -> np.ndarray:
    """A list of floats, each the hex digits of its bits."""
    return np.array([int(bits, 16) for bits in text.split(",") if bits], np.uint32).view(np.float32)


class Line:
    """The columns of one case."""

    def __init__(self, columns: dict[str, str], tensors: dict[str, bytes]) -> None:
        self.columns, self._tensors = columns, tensors
        self.op, self.dtype = columns["op"], DTYPES[columns["dtype"]]

    def __contains__(self, key: str) -> bool:
        return key in self.columns

    def __getitem__(self, key: str) -> str:
        return self.columns[key]

    def integer(self, key: str) -> int:
        """A decimal column."""
        return int(self.columns[key])

    def number(self, key: str) -> float:
        """A float column."""
        return float(numbers(self.columns[key])[0])

    def integers(self, key: str, dtype: type) -> np.ndarray:
        """A list of decimals."""
        return np.array([int(item) for item in self.columns[key].split(",") if item], dtype)

    def bytes(self, key: str) -> bytes:
        """A payload, or the tensor that the column names."""
        text = self.columns[key]
        return self._tensors[text[1:]] if text.startswith("@") else payload(text)

    def tensor(self, key: str, shape: tuple[int, ...]) -> np.ndarray:
        """A payload as a writable array of the line's type."""
        return np.frombuffer(bytearray(self.bytes(key)), self.dtype).reshape(shape)


def lines(name: str) -> Iterator[Line]:
    """All cases of a file."""
    tensors: dict[str, bytes] = {}
    for text in (FOLDER / f"{name}.txt").read_text().splitlines():
        if text.startswith("#") or not text:
            continue
        words = text.split(" ")
        columns = dict(word.split("=", 1) for word in words if "=" in word)
        if words[0] == "tensor":
            tensors[columns["name"]] = payload(columns["x"])
        else:
            yield Line(columns, tensors)
