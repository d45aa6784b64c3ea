"""Static activation scales: --activation-amax, the configs that promise them, and their check."""

import json

import numpy as np
import pytest
from conftest import (INPUT, TINY_MOE, USAGE, modules_of_source, run, run_ok, stored,
                      write_safetensors)
from test_convert import array


def amax_file(path, changes=None):
    """As narrowfloat.transformers.calibrate writes it; expert 5 of layer 0 got no token."""
    tensors = {}
    for layer in range(4):
        for side in ("input", "inter"):
            values = np.linspace(1, 3, 16, dtype=np.float32) + (side == "inter") + layer
            values[5] = values[5] if layer else 0
            name = f"model.layers.{layer}.mlp.experts.{side}"
            tensors[f"{name}.amax"] = ("F32", [16], values.tobytes())
            tensors[f"{name}.count"] = ("I64", [16], bytes(128))
    write_safetensors(path, tensors | (changes or {}), {"format": "narrowfloat.statistics"})
    return tensors


@pytest.mark.parametrize("to,name", [("nvfp4-ct", "input_global_scale"),
                                     ("nvfp4-modelopt", "input_scale")])  # fmt: skip
def test_activation_scales_of_calibrated_experts(alone, tmp_path, to, name):
    statistics = amax_file(tmp_path / "amax.safetensors")
    out = tmp_path / "out"
    result = run_ok("quantize", TINY_MOE, out, "--to", to, "--activation-amax",
                    tmp_path / "amax.safetensors")  # fmt: skip
    assert "16 of 208 weights have no activation scale (--activation-amax)" in result.stderr
    new, plain = stored(out), alone(to)
    assert {n: t for n, t in new.items() if not n.endswith(name)} == plain
    for module in modules_of_source():
        if ".self_attn." in module:
            assert f"{module}.{name}" not in new
            continue
        layer, expert = int(module.split(".")[2]), int(module.split(".")[5])
        side = "inter" if "down_proj" in module else "input"
        values = array(statistics, f"model.layers.{layer}.mlp.experts.{side}.amax")
        amax = values[expert] or values.max()
        wanted = np.float32(2688) / amax if to == "nvfp4-ct" else amax / np.float32(2688)
        assert new[f"{module}.{name}"] == \
            ("F32", [1] if to == "nvfp4-ct" else [], wanted.tobytes()), module
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    kinds = [bool(group.get("input_activations")) for group in config["config_groups"].values()]
    assert sorted(kinds) == [False, True]
    if to == "nvfp4-ct":
        assert config["format"] == "nvfp4-pack-quantized"
    else:
        algorithms = {module: layer["quant_algo"]
                      for module, layer in config["quantized_layers"].items()}
        assert {algorithms[m] for m in algorithms if "self_attn" in m} == {"W4A16_NVFP4"}
        assert {algorithms[m] for m in algorithms if "experts" in m} == {"NVFP4"}
    run_ok("inspect", out)


def test_activation_scales_of_all_weights(alone, tmp_path):
    amax = tmp_path / "amax.json"
    amax.write_text(json.dumps({module: 1.5 for module in modules_of_source()}))
    run_ok("quantize", TINY_MOE, tmp_path / "out", "--to", "nvfp4-modelopt", "--activation-amax",
           amax)  # fmt: skip
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert config["quant_algo"] == "NVFP4" and "quantized_layers" not in config
    assert config["config_groups"]["group_0"]["input_activations"]["num_bits"] == 4
    new = stored(tmp_path / "out")
    scale = (np.float32(1.5) / np.float32(2688)).tobytes()
    assert new[modules_of_source()[0] + ".input_scale"] == ("F32", [], scale)


@pytest.mark.parametrize("to", ["fp8-tensor", "fp8-tensor-modelopt"])
def test_activation_scales_of_fp8(alone, tmp_path, to):
    """W8A8: amax / 448 beside each weight, and a config that says so."""
    amax = {module: 1 + number / 7 for number, module in enumerate(modules_of_source())}
    (tmp_path / "amax.json").write_text(json.dumps(amax))
    out = tmp_path / "out"
    result = run_ok("quantize", TINY_MOE, out, "--to", to, "--activation-amax",
                    tmp_path / "amax.json")  # fmt: skip
    assert "have no activation scale" not in result.stderr
    new = stored(out)
    plain = {name: tensor for name, tensor in new.items() if not name.endswith(".input_scale")}
    assert plain == alone(to)
    for module, value in amax.items():
        dtype, shape, data = new[module + ".input_scale"]
        assert (dtype, shape) == ("F32", [1] if to == "fp8-tensor" else [])
        assert np.isclose(np.frombuffer(data, "<f4")[0], value / 448, rtol=2**-22, atol=0)
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    group = config["config_groups"]["group_0"]
    assert group["input_activations"] == group["weights"] and not group["weights"]["dynamic"]
    assert run("check", out, "--against", TINY_MOE).returncode == 0
    other = "fp8-tensor" if to == "fp8-tensor-modelopt" else "fp8-tensor-modelopt"
    run_ok("convert", out, tmp_path / "other", "--to", other, "--exact-only")
    run_ok("convert", tmp_path / "other", tmp_path / "back", "--to", to, "--exact-only")
    assert stored(tmp_path / "back") == new
    assert (tmp_path / "back/config.json").read_text() == (out / "config.json").read_text()
    # Another format has scales in another unit.
    result = run_ok("convert", out, tmp_path / "x", "--to", "nvfp4", "--lossy")
    assert "208 of 208 weights have an activation scale, which is left out" in result.stderr


def test_check_judges_activations_by_the_group_of_a_module(tmp_path):
    """Experts with activation scales beside an attention of weights alone are no finding."""
    amax_file(tmp_path / "amax.safetensors")
    for to in ("nvfp4-ct", "nvfp4-modelopt"):
        out = tmp_path / to
        run_ok("quantize", TINY_MOE, out, "--to", to, "--rule", "*.o_proj.*=mxfp8",
               "--activation-amax", tmp_path / "amax.safetensors")
        result = run("check", out)
        assert result.returncode == 0 and "NF-C015" not in result.stdout, result.stdout
        # A promise that is not kept is one.
        config = json.loads((out / "config.json").read_text())
        declaration = config["quantization_config"]
        if to == "nvfp4-ct":
            for group in declaration["config_groups"].values():
                if group["format"] == "nvfp4-pack-quantized":
                    group["input_activations"] = {"dynamic": "local", "num_bits": 4}
        else:
            for layer in declaration["quantized_layers"].values():
                layer["quant_algo"] = layer["quant_algo"].removeprefix("W4A16_")
        (out / "config.json").write_text(json.dumps(config))
        (out / "hf_quant_config.json").unlink(missing_ok=True)
        result = run("check", out)
        assert result.returncode == 1 and "12 in all have none" in result.stdout, result.stdout


def test_activation_scales_of_calibrated_linear_modules(alone, tmp_path):
    """With attention calibrated, too, all of the model is W4A4, or W8A8 for a format."""
    attention = [module for module in modules_of_source() if ".self_attn." in module]
    linear = {f"{module}.linear.amax": ("F32", [1], np.float32(2.5).tobytes())
              for module in attention}
    amax_file(tmp_path / "amax.safetensors", linear)
    out = tmp_path / "out"
    result = run_ok("quantize", TINY_MOE, out, "--to", "nvfp4-modelopt", "--rule",
                    "*.self_attn.*=fp8-tensor-modelopt", "--activation-amax",
                    tmp_path / "amax.safetensors")  # fmt: skip
    assert "have no activation scale" not in result.stderr
    new = stored(out)
    for module in attention:
        scale = np.frombuffer(new[module + ".input_scale"][2], "<f4")[0]
        assert np.isclose(scale, 2.5 / 448, rtol=2**-22, atol=0)
    layers = json.loads((out / "config.json").read_text())["quantization_config"][
        "quantized_layers"]
    assert {layer["quant_algo"] for layer in layers.values()} == {"FP8", "NVFP4"}
    assert run("check", out).returncode == 0
    # A module that nothing came into has no scale.
    linear[attention[0] + ".linear.amax"] = ("F32", [1], bytes(4))
    amax_file(tmp_path / "amax.safetensors", linear)
    result = run_ok("quantize", TINY_MOE, out, "--to", "nvfp4-ct", "--force", "--activation-amax",
                    tmp_path / "amax.safetensors")  # fmt: skip
    assert "1 of 208 weights have no activation scale" in result.stderr


def test_files_of_activations_that_are_wrong(tmp_path, small_file):
    out, amax = tmp_path / "out.safetensors", tmp_path / "amax.json"
    module = "model.layers.0.mlp.up_proj"
    for text in ("[]", '{"a": 0}', '{"a": -1}', '{"a": "1"}', '{"a": 1e39}', '{"a": null}'):
        amax.write_text(text)
        result = run("quantize", small_file, out, "--to", "nvfp4", "--activation-amax", amax)
        assert result.returncode == INPUT and "amax.json" in result.stderr
    for to, text in (("nvfp4", '{"other": 1}'), ("mxfp8", f'{{"{module}": 1}}')):
        amax.write_text(text)
        result = run("quantize", small_file, out, "--to", to, "--activation-amax", amax)
        assert result.returncode == USAGE and "--activation-amax: names none" in result.stderr
    amax_file(tmp_path / "amax.safetensors",
              {"x.input.amax": ("F32", [2], np.float32([1, np.nan]).tobytes())})  # fmt: skip
    for path in (tmp_path / "amax.safetensors", small_file):
        result = run("quantize", TINY_MOE, out, "--to", "nvfp4", "--activation-amax", path)
        assert result.returncode == INPUT
    assert not out.exists()
