"""Quantized checkpoints in transformers: loaded with their stored bits, or refused."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import narrowfloat as nf

torch = pytest.importorskip("torch", reason="torch is not installed; ./test.sh --with-torch")
pytest.importorskip("transformers", minversion="5.9", reason="transformers is not installed; "
                    "./test.sh --with-torch")
safetensors = pytest.importorskip("safetensors.torch")

import narrowfloat.transformers as nftr  # noqa: E402
from transformers_models import distance, load, logits, make, quantize_dense  # noqa: E402

nftr.register()
TINY = Path(__file__).resolve().parents[2] / "models" / "tiny-moe"
CONVENTIONS = ("nvfp4-ct", "nvfp4-modelopt", "mxfp4-ct", "mxfp8-ct", "fp8-block")
MODES = {"nvfp4-ct": "nvfp4_bf16", "nvfp4-modelopt": "nvfp4_bf16", "mxfp4-ct": "mxfp4_bf16",
         "mxfp8-ct": "mxfp8", "fp8-block": "fp8_block"}  # fmt: skip
# Bits per byte on the first 2048 bytes of the held-out text; plain weights have 1.337 to 1.339.
BITS = {"nvfp4-ct": 1.36, "nvfp4-modelopt": 1.36, "mxfp4-ct": 1.37, "mxfp8-ct": 1.35,
        "fp8-block": 1.35}  # fmt: skip
HELDOUT = (TINY / "calibration" / "heldout.txt").read_bytes()[:2048]
WINDOWS = torch.tensor(list(HELDOUT)).reshape(4, 512)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints."""
    return tmp_path_factory.mktemp("packed")


def packed(source: Path, convention: str, folder: Path) -> Path:
    """A checkpoint of a model in a convention, unless it is there."""
    target = folder / f"{source.name}-{convention}"
    if not target.exists():
        nf.quantize_checkpoint(source, target, convention)
    return target


def restored(path: Path, folder: Path) -> Path:
    """The same numbers as a plain checkpoint, which transformers loads by itself."""
    target = folder / f"{path.name}-plain"
    if not target.exists():
        nf.dequantize_checkpoint(path, target, dtype="float32")
    return target


def bits_per_byte(model: Any) -> float:
    """The model's score on the windows, each on its own."""
    scores = logits(model, WINDOWS)[:, :-1].double().log_softmax(-1)
    taken = scores.gather(2, WINDOWS[:, 1:, None])
    return float(-taken.mean() / math.log(2))


def edit_config(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes a checkpoint's config.json."""
    config = json.loads((path / "config.json").read_text())
    change(config)
    (path / "config.json").write_text(json.dumps(config))


def edit_tensors(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes the tensors of a checkpoint of one file."""
    (file,) = path.glob("*.safetensors")
    tensors = safetensors.load_file(file)
    change(tensors)
    safetensors.save_file(tensors, file, {"format": "pt"})


@pytest.mark.filterwarnings("ignore:.*were dequantized")
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_bits_per_byte(convention: str, folder: Path) -> None:
    """The trained model scores as the plain one, nearly; Linear weights are the stored bits."""
    path = packed(TINY, convention, folder)
    model = load(path)
    layers = [one.layer for one in model.modules() if isinstance(one, nftr.Experts)]
    assert [layer.config.mode for layer in layers] == [MODES[convention]] * 4
    assert not [name for name, _ in model.named_parameters() if ".experts." in name]
    assert 1.3 < bits_per_byte(model) < BITS[convention]
    plain = load(restored(path, folder), experts_implementation="eager")
    state = plain.state_dict()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, state[name]), name
    far = 0.03 if MODES[convention].endswith("bf16") else 0.08
    assert distance(logits(model, WINDOWS), logits(plain, WINDOWS)) < far


def test_linear_layers_are_dequantized_with_a_warning(folder: Path) -> None:
    """It says how many there are."""
    with pytest.warns(UserWarning, match=r"16 Linear weights \(nvfp4\) were dequantized"):
        load(packed(TINY, "nvfp4-ct", folder))


@pytest.mark.filterwarnings("ignore:.*were dequantized")
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "mixtral", "glm4_moe"])
@pytest.mark.parametrize("convention", ["nvfp4-ct", "nvfp4-modelopt", "fp8-block"])
def test_families(name: str, convention: str, folder: Path) -> None:
    """The names, routers and shared experts of other models."""
    path = packed(make(name, folder), convention, folder)
    wanted = logits(load(restored(path, folder), experts_implementation="eager"))
    far = 0.02 if convention.startswith("nvfp4") else 0.1
    assert distance(logits(load(path)), wanted) < far


def gpt_oss_in_mxfp4(source: Path, target: Path) -> Path:
    """The published form: experts together, as blocks of 16 bytes and their scales."""
    shutil.copytree(source, target)

    def quantize(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
            rows = tensors.pop(name).transpose(1, 2).contiguous()
            made = nf.quantize(rows, "mxfp4", layout="linear", batched=True)
            experts, outer, inner = rows.shape
            blocks = made.values.reshape(experts, outer, inner // 32, 16)
            tensors[f"{name}_blocks"] = blocks
            tensors[f"{name}_scales"] = made.scales.reshape(experts, outer, inner // 32)

    edit_tensors(target, quantize)
    edit_config(target, lambda config: config.update(quantization_config={
        "quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}))
    return target


def test_gpt_oss_in_mxfp4(folder: Path) -> None:
    """Beside eager experts with the same numbers the distance is that of bf16."""
    plain = make("gpt_oss", folder)
    path = gpt_oss_in_mxfp4(plain, folder / "gpt_oss-mxfp4")
    model = load(path)
    layers = [one.layer for one in model.modules() if isinstance(one, nftr.Experts)]
    assert [layer.config.mode for layer in layers] == ["mxfp4_bf16"] * 2
    wanted = logits(quantize_dense(load(plain, experts_implementation="eager"), "mxfp4"))
    assert distance(logits(model), wanted) < 0.006
    tokens = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=32, do_sample=False)
    assert tokens.shape == (1, 35)


@pytest.mark.filterwarnings("ignore:.*were dequantized")
def test_another_mode_of_the_same_weights(folder: Path) -> None:
    """The caller's configuration chooses the rows; weights of another format are refused."""
    path = packed(TINY, "nvfp4-ct", folder)
    model = load(path, quantization_config=nftr.NarrowfloatConfig(mode="nvfp4_fp8_exact"))
    modes = {one.layer.config.mode for one in model.modules() if isinstance(one, nftr.Experts)}
    assert modes == {"nvfp4_fp8_exact"}
    assert bits_per_byte(model) < BITS["nvfp4-ct"]
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.experts: .*stored as nvfp4"):
        load(path, quantization_config=nftr.NarrowfloatConfig(mode="mxfp4_bf16"))


@pytest.mark.filterwarnings("ignore:.*were dequantized")
def test_saved_packed_models_keep_their_bits(folder: Path, tmp_path: Path) -> None:
    """With keep_weights, in this package's own form."""
    config = nftr.NarrowfloatConfig(keep_weights=True)
    model = load(packed(TINY, "nvfp4-ct", folder), quantization_config=config)
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(load(tmp_path / "saved"), WINDOWS), logits(model, WINDOWS))


@pytest.mark.filterwarnings("ignore:.*were dequantized")
def test_what_cannot_be_right_is_refused(folder: Path, tmp_path: Path) -> None:
    """Missing scales, scales of another method, contradictions, other activations."""
    source = packed(TINY, "nvfp4-ct", folder)
    expert = "model.layers.1.mlp.experts.3.gate_proj"

    def fresh(number: int) -> Path:
        return Path(shutil.copytree(source, tmp_path / str(number)))

    path = fresh(0)
    edit_tensors(path, lambda tensors: tensors.pop(f"{expert}.weight_global_scale"))
    with pytest.raises(ValueError, match="weight_global_scale"):
        load(path)
    path = fresh(1)
    edit_tensors(path, lambda tensors: tensors.update(
        {"model.layers.0.self_attn.q_proj.pre_quant_scale": torch.ones(256)}))  # fmt: skip
    with pytest.raises((ValueError, NotImplementedError), match="pre_quant_scale"):
        load(path)
    path = fresh(2)
    edit_tensors(path, lambda tensors: tensors.update(
        {f"{expert}.weight_scale": tensors[f"{expert}.weight_scale"][:, :4].contiguous()}))
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts\.3\.gate_proj"):
        load(path)
    path = fresh(3)
    edit_config(path, lambda config: config.update(hidden_act="relu"))
    with pytest.raises(NotImplementedError, match="activation|hidden_act"):
        load(path)
    path = fresh(4)
    edit_config(path, lambda config: config.update(num_experts=15))
    # Newer versions of transformers refuse the router's shape first.
    with pytest.raises((ValueError, NotImplementedError, RuntimeError), match="experts|mismatched"):
        load(path)


def test_several_formats_are_refused(folder: Path, tmp_path: Path) -> None:
    """compressed-tensors' mixed precision, and ModelOpt's; other methods stay transformers'."""
    path = Path(shutil.copytree(packed(TINY, "nvfp4-ct", folder), tmp_path / "ct"))

    def mix(config: dict[str, Any]) -> None:
        declared = config["quantization_config"]
        (group,) = declared["config_groups"].values()
        other = {**group, "format": "float-quantized", "targets": ["re:.*self_attn.*"]}
        declared["config_groups"] = {
            "a": {**group, "format": "nvfp4-pack-quantized"}, "b": other}  # fmt: skip
        declared["format"] = "mixed-precision"

    edit_config(path, mix)
    with pytest.raises(NotImplementedError, match="several formats .float-quantized, nvfp4"):
        load(path)
    path = Path(shutil.copytree(packed(TINY, "nvfp4-modelopt", folder), tmp_path / "modelopt"))
    edit_config(path, lambda config: config["quantization_config"].update(
        quant_algo="MIXED_PRECISION"))  # fmt: skip
    with pytest.raises((ValueError, NotImplementedError), match="MIXED_PRECISION"):
        load(path)
    from transformers.quantizers.auto import AutoQuantizationConfig

    declared = {"quant_method": "fp8", "weight_block_size": [64, 64]}
    theirs = AutoQuantizationConfig.from_dict(declared)
    assert type(theirs).__name__ == "FineGrainedFP8Config"


@pytest.mark.filterwarnings("ignore:.*were dequantized")
def test_a_declaration_in_modelopts_own_file(folder: Path, tmp_path: Path) -> None:
    """Older exports leave config.json alone; a NarrowfloatConfig loads them, too."""
    path = Path(shutil.copytree(packed(TINY, "nvfp4-modelopt", folder), tmp_path / "old"))
    assert (path / "hf_quant_config.json").exists()
    edit_config(path, lambda config: config.pop("quantization_config", None))
    model = load(path, quantization_config=nftr.NarrowfloatConfig())
    assert bits_per_byte(model) < BITS["nvfp4-modelopt"]
