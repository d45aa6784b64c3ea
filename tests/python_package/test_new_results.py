"""New results have all bytes of given ones that began as zeros, whatever their memory held.

conftest.py and torch fill the memory of new results with other bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from conftest import POISON

import narrowfloat as nf
from narrowfloat._arrays import NUMPY

LEGAL = [(info.name, layout) for info in nf.formats() for layout in info.layouts]
X = np.random.default_rng(3).standard_normal((4, 9, 288), dtype=np.float32)
INPUTS = {"plain": X[0], "batched": X, "one row": X[0, :1], "few columns": X[0, :, :32],
          "no rows": X[0, :0], "no columns": X[0, :, :0]}  # fmt: skip
ROWS = np.array([8, 3, 99, -1], np.int32)
COUNTS = np.array([9, 0, 4, 77], np.int32)
OFFSETS = np.array([0, 2, 2, 9], np.int64)


def cases(format: str, layout: str) -> Iterator[tuple[np.ndarray, dict[str, Any]]]:
    """Inputs and keywords: all shapes, all options that leave something out."""
    for name, x in INPUTS.items():
        yield x, {"batched": name == "batched"}
    if format == "mxfp8":
        yield X[0, :, :32], {"alignment": 96}
    if format == "nvfp4_per_token":
        yield X[0], {"row_list": ROWS}
    if not format.startswith("fp8"):
        yield X, {"batched": True, "valid_rows": COUNTS}
    if format == "fp8_1x128" and layout == "mn_major":
        yield X[0], {"row_offsets": OFFSETS}


def raw(parts: tuple[Any, ...]) -> list[bytes]:
    """All bytes; nothing for a global scale that a format does not have."""
    return [np.asarray(part).tobytes() for part in parts if part is not None and part.shape != (0,)]


def of(q: nf.QuantizedTensor) -> list[bytes]:
    """All bytes of a quantized tensor."""
    return raw((q.values, q.scales, q.global_scale))


def zeroed(x: np.ndarray, format: str, layout: str, how: dict[str, Any]) -> nf.QuantizedTensor:
    """The result in memory that was zero."""
    sizes = {name: how[name] for name in ("batched", "alignment") if name in how}
    if "row_offsets" in how:
        sizes["groups"] = len(OFFSETS) - 1
    if "valid_rows" in how and format == "nvfp4":
        sizes["global_scale_axis"] = "batch"
    out = nf.QuantizedTensor.empty(x.shape, format, layout=layout, **sizes)
    options = {name: how[name] for name in how if name not in ("batched", "alignment")}
    return nf.quantize(x, out=out, batched=how.get("batched", False), **options)


def test_new_memory_is_filled() -> None:
    """Else the others prove nothing."""
    assert (NUMPY.empty((3, 2), "uint8") == POISON).all()


@pytest.mark.parametrize(("format", "layout"), LEGAL)
def test_quantized_tensors(format: str, layout: str) -> None:
    """Values, scales with their padding, global scales."""
    for x, how in cases(format, layout):
        assert of(nf.quantize(x, format, layout=layout, **how)) == of(
            zeroed(x, format, layout, how)), (x.shape, how)  # fmt: skip


@pytest.mark.parametrize(("format", "layout"), LEGAL)
def test_operators_of_torch(format: str, layout: str) -> None:
    """torch fills new tensors itself where asked to."""
    torch = pytest.importorskip("torch", reason="torch is not installed; ./test.sh --with-torch")
    import narrowfloat.torch as nft

    torch.use_deterministic_algorithms(True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory
        assert torch.empty(3, dtype=torch.uint8).tolist() == [255] * 3
        for x, how in cases(format, layout):
            tensors = {name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
                       for name, value in how.items()}  # fmt: skip
            parts = nft.quantize(torch.from_numpy(x), format, layout=layout, **tensors)
            assert raw(parts) == of(zeroed(x, format, layout, how)), (x.shape, how)
    finally:
        torch.use_deterministic_algorithms(False)
