"""QuantizedTensors and reports as objects of Python: copies, pickles, what they print."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import narrowfloat as nf

ROOT = Path(__file__).resolve().parents[2]
X = np.random.default_rng(3).standard_normal((4, 24, 200), dtype=np.float32)


def tensors() -> dict[str, nf.QuantizedTensor]:
    """Tensors of every format, layout, and kind of scale."""
    wide = np.resize(X, (4, 24, 256))
    found = {f"{info.name}": nf.quantize(wide, info.name) for info in nf.formats()}
    found["batched"] = nf.quantize(wide, "nvfp4", layout="linear", batched=True)
    found["padded"] = nf.quantize(X[..., :160], "mxfp8", alignment=128)
    found["rows"] = nf.quantize(wide, "nvfp4", encode_scale=np.full(96, 2.0, np.float32))
    offsets = np.array([0, 10, 96], np.int64)
    found["groups"] = nf.quantize(wide, "fp8_1x128", row_offsets=offsets)
    return found


def buffers(tensor: nf.QuantizedTensor) -> list[Any]:
    """The arrays."""
    return [tensor.values, tensor.scales, tensor.global_scale, tensor.row_offsets]


@pytest.mark.parametrize("name", list(tensors()))
def test_copies_and_pickles(name: str) -> None:
    """Equal bytes and meaning; copy() shares arrays, deepcopy() and pickle do not."""
    tensor = tensors()[name]
    wanted = tensor.dequantize()
    for again, shares in (
        (copy.copy(tensor), True),
        (copy.deepcopy(tensor), False),
        (pickle.loads(pickle.dumps(tensor)), False),
    ):
        assert (again.format, again.shape, again.scale_layout, again.nbytes) == (
            tensor.format, tensor.shape, tensor.scale_layout, tensor.nbytes)  # fmt: skip
        for old, new in zip(buffers(tensor), buffers(again), strict=True):
            assert (old is None) == (new is None)
            if old is not None:
                assert old.dtype == new.dtype and old.tobytes() == new.tobytes()
                assert (old is new) == shares
        assert again.dequantize().tobytes() == wanted.tobytes()


def test_bits_per_weight() -> None:
    """All buffers count."""
    plain = nf.quantize(np.ones((128, 256), np.float32), "mxfp4")
    assert plain.bits_per_weight == 4.25
    nvfp4 = nf.quantize(np.ones((128, 256), np.float32), "nvfp4")
    assert nvfp4.bits_per_weight == 4.5 + 32 / (128 * 256)
    assert nf.quantize(np.ones((0, 256), np.float32), "mxfp4").bits_per_weight == 0
    assert "4.250 bits per weight" in repr(plain) and "17,408 bytes" in repr(plain)


def test_it_is_no_array_of_numbers() -> None:
    """NumPy would else make an array of one object of it."""
    tensor = nf.quantize(np.ones((2, 32), np.float32), "mxfp4")
    for call in (np.asarray, lambda one: np.ones((2, 32)) * np.asarray(one)):
        with pytest.raises(TypeError, match=r"QuantizedTensor.*dequantize\(\)"):
            call(tensor)
    assert tensor.device == "cpu" and tensor.to("cpu") is tensor


def test_reports_print_their_figures(tmp_path: Path) -> None:
    """The loss of a checkpoint and of a tensor."""
    figures = nf.diff(X, np.float32(1.25) * X)
    assert "SQNR 12.04 dB" in repr(figures) and "norm ratio 1.25" in repr(figures)
    report = nf.quantize_checkpoint(ROOT / "models" / "tiny-moe", tmp_path / "out", "nvfp4")
    assert repr(report).startswith("CheckpointReport(231 tensors, 14,482,")
    assert "SQNR 20.4" in repr(report)
    quantized = next(one for one in report.tensors if one.action == "quantize")
    assert quantized.name in repr(quantized) and "quantize" in repr(quantized)
    found = nf.diff(ROOT / "models" / "tiny-moe", tmp_path / "out")
    assert "CheckpointDiff(different, 231 tensors, ErrorFigures(" in repr(found)
    changed = next(one for one in found.tensors if one.status == "different")
    assert repr(changed) == f"TensorDiff({changed.name!r}, different)"
