"""Checkpoints of gpt-oss through the package, against the layer in float64 by its formulas."""

from __future__ import annotations

import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import narrowfloat as nf

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "golden"))
from gpt_oss import GptOss

MODEL = GptOss()
X = np.random.default_rng(8).standard_normal((21, MODEL.hidden)).astype(ml_dtypes.bfloat16)
WIDE = X.astype(np.float64)


def relative(got: np.ndarray, wanted: np.ndarray) -> float:
    """Frobenius distance."""
    return float(np.linalg.norm(got.astype(np.float64) - wanted) / np.linalg.norm(wanted))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as a directory."""
    return MODEL.write(tmp_path_factory.mktemp("gpt-oss") / "model")


@pytest.mark.parametrize("layer", [0, 1])
def test_a_loaded_layer_computes_the_formulas(directory: Path, layer: int) -> None:
    """With the router's bias among the logits."""
    assert nf.moe_layers(str(directory)) == [0, 1]
    loaded = nf.MoeLayer.from_checkpoint(directory, layer, out_dtype="float32")
    config = loaded.config
    assert (config.mode, config.gate_order) == ("mxfp4_bf16", "interleaved")
    assert loaded.router_bias is None
    logits = X.astype(np.float32) @ loaded.router_weight.T + loaded.router_logit_bias
    assert relative(logits, MODEL.logits(layer, WIDE)) < 1e-6
    out = loaded.run(X, logits)
    wanted = MODEL.run(layer, WIDE)
    assert relative(out, wanted) < 4e-3
    # The bias matters: without it other experts are chosen.
    assert relative(loaded.run(X, logits - loaded.router_logit_bias), wanted) > 0.1


@pytest.mark.parametrize("mode", ["mxfp4_fp8", "mxfp4_mxfp8"])
def test_modes_with_narrow_rows(directory: Path, mode: str) -> None:
    """K is no multiple of 128."""
    loaded = nf.MoeLayer.from_checkpoint(directory, 0, mode=mode, out_dtype="float32")
    logits = X.astype(np.float32) @ loaded.router_weight.T + loaded.router_logit_bias
    assert relative(loaded.run(X, logits), MODEL.run(0, WIDE)) < 0.08
    with pytest.raises(ValueError, match="stored as mxfp4"):
        nf.MoeLayer.from_checkpoint(directory, 0, mode="nvfp4_bf16")


def test_a_loaded_layer_is_one_of_its_arrays(directory: Path) -> None:
    """To the bit."""
    parts = {}
    for number, name in ((1, "gate_up_proj"), (2, "down_proj")):
        stem = f"model.layers.1.mlp.experts.{name}"
        blocks = MODEL.tensors[f"{stem}_blocks"]
        parts[f"w{number}"] = blocks.reshape(*blocks.shape[:2], -1)
        parts[f"w{number}_scales"] = MODEL.tensors[f"{stem}_scales"]
        parts[f"bias{number}"] = MODEL.bias(1, name).astype(np.float32)
    loaded = nf.MoeLayer.from_checkpoint(directory, 1)
    own = nf.MoeLayer.prepare(config=loaded.config, **parts)
    logits = MODEL.logits(1, WIDE).astype(np.float32)
    assert own.run(X, logits).tobytes() == loaded.run(X, logits).tobytes()


@pytest.mark.filterwarnings("error")
def test_shards_add_up(directory: Path) -> None:
    """Expert parallelism: each part reads its experts. Factors of one expert are an array, too."""
    logits = MODEL.logits(0, WIDE).astype(np.float32)
    outs = [
        nf.MoeLayer.from_checkpoint(directory, 0, out_dtype="float32", expert_offset=first,
                                    local_experts=count).run(X, logits)
        for first, count in ((0, 1), (1, 5))
    ]  # fmt: skip
    assert relative(outs[0] + outs[1], MODEL.run(0, WIDE)) < 4e-3


def test_dequantized_it_is_the_plain_model(directory: Path, tmp_path: Path) -> None:
    """The names and shapes of Hugging Face's module, whose weights are [E, K, N]."""
    nf.dequantize_checkpoint(directory, tmp_path / "plain")
    plain = safetensors.numpy.load_file(tmp_path / "plain" / "model.safetensors")
    for layer in (0, 1):
        for name in ("gate_up_proj", "down_proj"):
            got = plain[f"model.layers.{layer}.mlp.experts.{name}"]
            wanted = MODEL.weight(layer, name).transpose(0, 2, 1)
            assert got.dtype == ml_dtypes.bfloat16 and got.shape == wanted.shape
            assert (got.astype(np.float64) == wanted).all()
    assert nf.diff(directory, tmp_path / "plain").equal
    layer = nf.MoeLayer.from_checkpoint(tmp_path / "plain", 1, out_dtype="float32")
    assert (layer.config.mode, layer.config.gate_order) == ("bf16", "interleaved")
    logits = MODEL.logits(1, WIDE).astype(np.float32)
    assert relative(layer.run(X, logits), MODEL.run(1, WIDE)) < 4e-3
    # From there it can be quantized: the plain experts to any mode, other layers by the command.
    again = nf.MoeLayer.from_checkpoint(tmp_path / "plain", 1, mode="nvfp4_bf16",
                                        out_dtype="float32")  # fmt: skip
    assert 1e-3 < relative(again.run(X, logits), MODEL.run(1, WIDE)) < 0.25


def test_quantizing_it_is_refused(directory: Path, tmp_path: Path) -> None:
    """It has codes already."""
    with pytest.raises(ValueError, match="quantized already .mxfp4-gpt-oss.; dequantize"):
        nf.quantize_checkpoint(directory, tmp_path / "out", "nvfp4")
    with pytest.raises(ValueError, match="written by conversions only"):
        nf.quantize_checkpoint(directory, tmp_path / "out", "mxfp4-gpt-oss")
    assert not (tmp_path / "out").exists()
