"""Quantized checkpoints in transformers: loaded with their stored bits, or refused."""

from __future__ import annotations

import json
import math
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import narrowfloat as nf

torch = pytest.importorskip("torch", reason="torch is not installed; ./test.sh --with-torch")
pytest.importorskip("transformers", minversion="5.9", reason="transformers is not installed; "
                    "./test.sh --with-torch")
safetensors = pytest.importorskip("safetensors.torch")

import narrowfloat.torch as nft  # noqa: E402
import narrowfloat.transformers as nftr  # noqa: E402
from transformers_models import distance, load, logits, make, quantize_dense  # noqa: E402

nftr.register()
Rules = list[tuple[str, str]]
HAS_GPU = torch.cuda.is_available() and nf.build_info()["cuda_enabled"]
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


def rounding_rows(plain: Any, model: Any) -> Any:
    """The plain model with the rows of its Linear layers as those of a packed one round them."""
    formats = {"fp8_block": "fp8_1x128", "mxfp8": "mxfp8"}
    for name, module in model.named_modules():
        if isinstance(module, nft.Linear) and module.mode in formats:
            plain.get_submodule(name).register_forward_pre_hook(
                lambda _, given, format=formats[module.mode]: nf.quantize(
                    given[0], format).dequantize())  # fmt: skip
    return plain


def bits_per_byte(model: Any) -> float:
    """The model's score on the windows, each on its own."""
    scores = logits(model, WINDOWS)[:, :-1].double().log_softmax(-1)
    taken = scores.gather(2, WINDOWS[:, 1:, None])
    return float(-taken.mean() / math.log(2))


def modes(model: Any) -> tuple[list[str], list[str]]:
    """Those of the layers of experts, and of Linear layers."""
    modules = list(model.modules())
    return ([one.layer.config.mode for one in modules if isinstance(one, nftr.Experts)],
            [one.mode for one in modules if isinstance(one, nft.Linear)])  # fmt: skip


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


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_bits_per_byte(convention: str, folder: Path) -> None:
    """The trained model scores as the plain one, nearly; nothing was dequantized."""
    path = packed(TINY, convention, folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = load(path)
    assert modes(model) == ([MODES[convention]] * 4, [MODES[convention]] * 16)
    weights = [name for name, parameter in model.named_parameters() if parameter.ndim > 1]
    assert len(weights) == 6 and all(re.search("embed|lm_head|gate", name) for name in weights)
    assert 1.3 < bits_per_byte(model) < BITS[convention]
    plain = load(restored(path, folder), experts_implementation="eager")
    state = plain.state_dict()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, state[name]), name
    far = 0.03 if MODES[convention].endswith("bf16") else 0.08
    assert distance(logits(model, WINDOWS), logits(plain, WINDOWS)) < far


@pytest.mark.parametrize("mode", sorted(set(nf.moe_modes()) - {"fp8_tensor", "nvfp4"}))
def test_bits_per_byte_of_modes(mode: str) -> None:
    """Plain weights are quantized while they load; static modes need statistics."""
    model = load(TINY, quantization_config=nftr.NarrowfloatConfig(mode))
    assert modes(model) == ([mode] * 4, [])
    assert 1.3 < bits_per_byte(model) < 1.35


@pytest.mark.skipif(not HAS_GPU, reason="no GPU that the package has code for")
@pytest.mark.parametrize("name", [*CONVENTIONS, "mixed"])
def test_on_a_gpu(name: str, folder: Path) -> None:
    """Loaded onto it, or moved there; compiled with CUDA graphs; scores as on the CPU."""
    pytest.importorskip("accelerate", reason="device_map needs accelerate")
    path = mixed("gpu", TINY, folder, "nvfp4-ct", [("*self_attn*", "fp8-block")]) \
        if name == "mixed" else packed(TINY, name, folder)  # fmt: skip
    model = load(path, dtype=torch.bfloat16, device_map="cuda")
    assert all(one.layer.device.type == "cuda" for one in model.modules()
               if isinstance(one, nft.Linear))  # fmt: skip
    assert 1.3 < bits_per_byte(model) < 1.37
    kept = load(path, dtype=torch.bfloat16,
                quantization_config=nftr.NarrowfloatConfig(keep_weights=True)).to("cuda")
    assert torch.equal(logits(kept, WINDOWS), logits(model, WINDOWS))
    compiled = torch.compile(model.forward, mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            got = compiled(WINDOWS.cuda(), use_cache=False).logits.float().cpu()
    assert distance(got, logits(model, WINDOWS)) < 0.03


def test_linear_layers_that_are_dequantized(folder: Path) -> None:
    """With a warning that counts them: rows of no multiple of 16, classes of other arithmetic."""
    source = make("qwen3_moe", folder, head_dim=24, attention_bias=True, num_key_value_heads=1)
    path = packed(source, "nvfp4-ct", folder)
    with pytest.warns(UserWarning, match=r"4 Linear weights \(nvfp4\) were dequantized.*"
                      r"layers\.0\.self_attn\.k_proj, Linear of \[24, 128\]"):
        model = load(path)
    attention = model.model.layers[0].self_attn
    assert isinstance(attention.q_proj, nft.Linear) and attention.q_proj.layer.bias is not None
    plain = load(restored(path, folder), experts_implementation="eager")
    wanted = plain.model.layers[0].self_attn
    assert torch.equal(attention.k_proj.weight, wanted.k_proj.weight)
    assert torch.equal(attention.k_proj.bias, wanted.k_proj.bias)
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(1)).bfloat16().float()
    assert torch.allclose(attention.q_proj(x), wanted.q_proj(x), atol=1e-5)
    assert distance(logits(model), logits(plain)) < 0.02


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "mixtral", "glm4_moe"])
@pytest.mark.parametrize("convention", ["nvfp4-ct", "nvfp4-modelopt", "fp8-block"])
def test_families(name: str, convention: str, folder: Path) -> None:
    """The names, routers and shared experts of other models."""
    path = packed(make(name, folder), convention, folder)
    model = load(path)
    plain = load(restored(path, folder), experts_implementation="eager")
    far = 0.02 if convention.startswith("nvfp4") else 0.1
    assert distance(logits(model), logits(rounding_rows(plain, model))) < far


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


def test_another_mode_of_the_same_weights(folder: Path) -> None:
    """The caller's configuration chooses the rows; weights of another format are refused."""
    path = packed(TINY, "nvfp4-ct", folder)
    model = load(path, quantization_config=nftr.NarrowfloatConfig(mode="nvfp4_fp8_exact"))
    assert modes(model) == (["nvfp4_fp8_exact"] * 4, ["nvfp4_fp8_exact"] * 16)
    assert bits_per_byte(model) < BITS["nvfp4-ct"]
    with pytest.raises(ValueError, match="mode: mxfp4_bf16 .*stored as nvfp4"):
        load(path, quantization_config=nftr.NarrowfloatConfig(mode="mxfp4_bf16"))


def test_saved_packed_models_keep_their_bits(folder: Path, tmp_path: Path) -> None:
    """With keep_weights, in this package's own form."""
    config = nftr.NarrowfloatConfig(keep_weights=True)
    model = load(packed(TINY, "nvfp4-ct", folder), quantization_config=config)
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(load(tmp_path / "saved"), WINDOWS), logits(model, WINDOWS))


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


def mixed(name: str, source: Path, folder: Path, to: str, rules: Rules, **options: Any) -> Path:
    """A checkpoint of several formats."""
    target = folder / f"{source.name}-{name}"
    if not target.exists():
        nf.quantize_checkpoint(source, target, to, rules=rules, **options)
    return target


# Formats of one checkpoint -> modes of the experts of the layers, and of q, k, v, o of each.
MIXED: dict[str, tuple[str, Rules, list[str], list[str]]] = {
    "fp8-beside-nvfp4": ("nvfp4-ct", [("*self_attn*", "fp8-block")],
                         ["nvfp4_bf16"] * 4, ["fp8_block"] * 16),
    "by-layer": ("nvfp4-ct", [("*layers.[01].*", "mxfp8"), ("*o_proj*", "mxfp4")],
                 ["mxfp8"] * 2 + ["nvfp4_bf16"] * 2,
                 ["mxfp8"] * 8 + (["nvfp4_bf16"] * 3 + ["mxfp4_bf16"]) * 2),
    "modelopt": ("nvfp4-modelopt", [("*self_attn*", "mxfp8")],
                 ["nvfp4_bf16"] * 4, ["mxfp8"] * 16),
    "fp8-whole-rows": ("nvfp4-ct", [("*q_proj*", "fp8-tensor"), ("*self_attn*", "fp8-channel")],
                       ["nvfp4_bf16"] * 4, []),
    "some-plain": ("nvfp4-ct", [("*layers.0.mlp.experts*", "keep"), ("*q_proj*", "keep"),
                                ("*layers.1.mlp*", "mxfp4")],
                   ["mxfp4_bf16"] + ["nvfp4_bf16"] * 2, ["nvfp4_bf16"] * 12),
}  # fmt: skip


@pytest.mark.parametrize("name", list(MIXED))
def test_several_formats(name: str, folder: Path, tmp_path: Path) -> None:
    """Each layer of experts and each Linear in its own; the model scores as the plain one."""
    to, rules, experts, linears = MIXED[name]
    options: dict[str, Any] = {"rules": rules}
    if name == "by-layer":
        recipe = tmp_path / "recipe.json"
        recipe.write_text(json.dumps(
            {"rules": [{"match": glob, "format": format} for glob, format in rules]}))
        options = {"rules": (), "recipe": recipe}
    path = mixed(name, TINY, folder, to, **options)
    declared = json.loads((path / "config.json").read_text())["quantization_config"]
    assert "mixed-precision" in declared.values() or "MIXED_PRECISION" in declared.values()
    model = load(path)
    assert modes(model) == (experts, linears)
    assert 1.3 < bits_per_byte(model) < 1.37
    plain = load(restored(path, folder), experts_implementation="eager")
    wanted = logits(rounding_rows(plain, model), WINDOWS)
    assert distance(logits(model, WINDOWS), wanted) < (0.08 if "mxfp8" in experts else 0.03)


@pytest.mark.parametrize("name", ["deepseek_v3", "mixtral"])
def test_several_formats_of_families(name: str, folder: Path) -> None:
    """Latent attention, shared experts, dense layers: NVFP4 experts, the rest in FP8."""
    path = mixed("mixed", make(name, folder), folder, "nvfp4-ct",
                 [("*.experts.*", "nvfp4"), ("*", "mxfp8")])  # fmt: skip
    model = load(path)
    found, linears = modes(model)
    assert set(found) == {"nvfp4_bf16"} and set(linears) == {"mxfp8"}
    plain = load(restored(path, folder), experts_implementation="eager")
    assert distance(logits(model), logits(rounding_rows(plain, model))) < 0.02


def test_a_mode_of_several_formats(folder: Path, tmp_path: Path) -> None:
    """It is for the weights of its format, and an error where no experts have it; saved models
    keep all bits."""
    path = mixed("by-layer", TINY, folder, "nvfp4-ct", MIXED["by-layer"][1])
    config = nftr.NarrowfloatConfig("nvfp4_fp8_exact", keep_weights=True)
    model = load(path, quantization_config=config)
    rest = ["nvfp4_fp8_exact"] * 3 + ["mxfp4_bf16"]
    assert modes(model) == (["mxfp8"] * 2 + ["nvfp4_fp8_exact"] * 2, ["mxfp8"] * 8 + rest * 2)
    model.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert modes(again) == modes(model)
    assert torch.equal(logits(again, WINDOWS), logits(model, WINDOWS))
    with pytest.raises(ValueError, match=r"mode: fp8_block .*stored as mxfp8, nvfp4"):
        load(path, quantization_config=nftr.NarrowfloatConfig("fp8_block"))


def test_experts_of_one_layer_need_one_format(folder: Path) -> None:
    """Refused with the names of two weights: no layer computes such experts."""
    rules = {"one-fp8": [("*experts.3.down_proj*", "mxfp8")],
             "one-plain": [("*experts.3.*", "keep")]}  # fmt: skip
    for name, match in (("one-fp8", r"is nvfp4, .*is mxfp8; all experts of a layer need one"),
                        ("one-plain", r"is not quantized, others are; all experts")):  # fmt: skip
        path = mixed(name, TINY, folder, "nvfp4-ct", rules[name])
        with pytest.raises(NotImplementedError, match=rf"layers\.0\.mlp\.experts: .*{match}"):
            load(path)


def test_formats_that_are_not_read_are_refused(folder: Path, tmp_path: Path) -> None:
    """Integers beside NVFP4, algorithms of ModelOpt."""
    path = Path(shutil.copytree(packed(TINY, "nvfp4-ct", folder), tmp_path / "ct"))

    def mix(config: dict[str, Any]) -> None:
        declared = config["quantization_config"]
        (group,) = declared["config_groups"].values()
        weights = {**group["weights"], "num_bits": 8, "strategy": "channel", "type": "int"}
        other = {**group, "format": "int-quantized", "targets": ["re:.*self_attn.*"],
                 "weights": weights}
        declared["config_groups"] = {
            "a": {**group, "format": "nvfp4-pack-quantized"}, "b": other}  # fmt: skip
        declared["format"] = "mixed-precision"

    edit_config(path, mix)
    with pytest.raises(NotImplementedError, match="not read int-quantized by channel"):
        load(path)
    path = Path(shutil.copytree(packed(TINY, "nvfp4-modelopt", folder), tmp_path / "modelopt"))
    layers = {"model.layers.0.self_attn.q_proj": {"quant_algo": "FP8_PB_WO"}}
    for file in ("config.json", "hf_quant_config.json"):
        config = json.loads((path / file).read_text())
        declared = config.get("quantization_config") or config["quantization"]
        declared.update(quant_algo="MIXED_PRECISION", quantized_layers=layers)
        (path / file).write_text(json.dumps(config))
    with pytest.raises(NotImplementedError, match="modelopt, quant_algo FP8_PB_WO' cannot be read"):
        load(path)


def test_other_methods_stay_those_of_transformers() -> None:
    """They get the configuration that they have without register()."""
    pytest.importorskip("compressed_tensors")
    from transformers.quantizers.auto import AutoQuantizationConfig

    for declared in ({"quant_method": "fp8", "weight_block_size": [64, 64]},
                     {"quant_method": "compressed-tensors", "format": "pack-quantized",
                      "config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 4}}}}):
        theirs = AutoQuantizationConfig.from_dict(declared)
        assert type(theirs).__name__ in ("FineGrainedFP8Config", "CompressedTensorsConfig")


def test_a_declaration_in_modelopts_own_file(folder: Path, tmp_path: Path) -> None:
    """Older exports leave config.json alone; a NarrowfloatConfig loads them, too."""
    path = Path(shutil.copytree(packed(TINY, "nvfp4-modelopt", folder), tmp_path / "old"))
    assert (path / "hf_quant_config.json").exists()
    edit_config(path, lambda config: config.pop("quantization_config", None))
    model = load(path, quantization_config=nftr.NarrowfloatConfig())
    assert bits_per_byte(model) < BITS["nvfp4-modelopt"]
