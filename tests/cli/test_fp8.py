"""FP8 with scales of rows and of tensors, of compressed-tensors and of ModelOpt."""

import json

import ml_dtypes
import numpy as np
import pytest
from conftest import (FINDINGS, TINY_MOE, UNSUPPORTED, USAGE, modules_of_source, run, run_json,
                      run_ok, stored, write_safetensors)
from test_mixed import ATTENTION, nvfp4_weight, parts_of


def values_of(tensor):
    dtype, shape, data = tensor
    types = {"F32": "<f4", "BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn}
    return np.frombuffer(data, types[dtype]).astype(np.float32).reshape(shape)


def fp8_parts(module, codes, scales, input_scale=None):
    """`scales`: (dtype, shape, bytes)."""
    parts = {module + ".weight": ("F8_E4M3", list(codes.shape), codes.tobytes()),
             module + ".weight_scale": scales}  # fmt: skip
    if input_scale is not None:
        parts[module + ".input_scale"] = ("F32", [], np.float32(input_scale).tobytes())
    return parts


WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
FP8_CONFIGS = {
    "modelopt": {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {
        "experts.0.w1": {"quant_algo": "NVFP4", "group_size": 16},
        "q": {"quant_algo": "FP8"}, "k": {"quant_algo": "FP8"},
        "o": {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        "v": {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}}},
    "presets": {"quant_method": "compressed-tensors", "format": "mixed-precision",
                "config_groups": {"FP8": ["q", "k"], "FP8_DYNAMIC": ["o", "v"]}},
    # Groups of one format, with scales of different extents.
    "groups": {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {
        "group_0": {"targets": ["q", "k"], "weights": {**WEIGHTS, "strategy": "tensor"}},
        "group_1": {"targets": ["o", "v"], "weights": {**WEIGHTS, "strategy": "channel"}}}},
}


@pytest.mark.parametrize("declared", FP8_CONFIGS)
def test_fp8_with_scales_of_rows_and_of_tensors(tmp_path, declared):
    """As NVIDIA's and Red Hat's models of mixed precision have their attention: read to the bit."""
    random = np.random.default_rng(5)
    codes = random.integers(0, 127, (48, 272), np.uint8) | random.integers(0, 2, (48, 272),
                                                                          np.uint8) << 7
    of_rows = random.uniform(0.001, 0.1, 48).astype(np.float32)
    wide = of_rows.view(np.uint32) >> 16
    scales = {"q": ("F32", [], np.float32(0.3).tobytes()),
              "k": ("BF16", [1], np.uint16(0x3E99).tobytes()),
              "o": ("F32", [48], of_rows.tobytes()),
              "v": ("BF16", [48, 1], wide.astype(np.uint16).tobytes())}  # fmt: skip
    factors = {"q": np.float32(0.3), "k": np.uint32(0x3E990000).view(np.float32),
               "o": of_rows[:, None], "v": (wide << 16).view(np.float32)[:, None]}
    source = tmp_path / "model"
    source.mkdir()
    tensors = nvfp4_weight("experts.0.w1") if declared == "modelopt" else {}
    for module, scale in scales.items():
        tensors |= fp8_parts(module, codes, scale, 0.25 if module in "qk" else None)
    write_safetensors(source / "model.safetensors", tensors)
    (source / "config.json").write_text(json.dumps({"quantization_config": FP8_CONFIGS[declared]}))
    expected = {"fp8-tensor": 2, "fp8-channel": 2}
    if declared == "modelopt":
        expected = {"fp8-tensor-modelopt": 2, "fp8-channel-modelopt": 2, "nvfp4-modelopt": 1}
    found = run_json("inspect", source)
    assert {kind["kind"]: kind["tensors"] for kind in found["kinds"]} == expected
    assert {t["name"]: t["format"] for t in found["tensors"]}["q.weight"] == "fp8_tensor"
    found = json.loads(run("check", source, "--json").stdout)["findings"]
    assert {finding["tensor"] for finding in found} <= {"experts.0.w1.weight"}, found
    # Rows at a time do not show.
    for more in ([], ["--max-memory", "20kB"]):
        run_ok("dequantize", source, tmp_path / "plain", "--dtype", "fp32", "--force", *more)
        plain = stored(tmp_path / "plain")
        assert not any("scale" in name for name in plain)
        values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        for module, factor in factors.items():
            assert plain[module + ".weight"][2] == (values * factor).tobytes(), module
    result = run("convert", source, tmp_path / "no", "--to", "nvfp4")
    assert result.returncode == USAGE and "nvfp4 has other values than fp8_tensor" in result.stderr
    result = run_ok("convert", source, tmp_path / "all", "--to", "nvfp4-ct", "--lossy")
    assert "weights have an activation scale, which is left out" in result.stderr
    # Weights without elements keep a scale.
    write_safetensors(tmp_path / "empty.safetensors", {
        "a.weight": ("F8_E4M3", [4, 0], b""), "a.weight_scale": ("F32", [1], bytes(4)),
        **fp8_parts("b", codes, scales["o"])})
    for to, shape in (("fp8-channel", [4, 1]), ("fp8-tensor", [1])):
        out = tmp_path / f"{to}.safetensors"
        run_ok("convert", tmp_path / "empty.safetensors", out, "--to", to, "--lossy", "--force")
        assert stored(out)["a.weight_scale"][1] == shape
    # One scale is that of each row, exactly.
    document = run_json("convert", source, tmp_path / "rows", "--to", "fp8-channel", "--lossy")
    assert document["conversion"]["exact_weights"] == 4
    rows = stored(tmp_path / "rows")
    assert rows["q.weight"] == tensors["q.weight"] and rows["o.weight"] == tensors["o.weight"]
    assert rows["q.weight_scale"] == ("F32", [48, 1], np.float32([0.3] * 48).tobytes())
    assert rows["v.weight_scale"] == ("F32", [48, 1], (wide << 16).tobytes())


def test_rules_write_fp8_with_scales_of_rows_and_of_tensors(alone, tmp_path):
    out = tmp_path / "out"
    rules = ["--rule", f"{ATTENTION}=fp8-channel", "--rule", "*down_proj*=fp8-tensor"]
    run_ok("quantize", TINY_MOE, out, "--to", "nvfp4", *rules)
    new, source = stored(out), stored(TINY_MOE)
    for module in modules_of_source():
        convention = ("fp8-channel" if ".self_attn." in module else
                      "fp8-tensor" if "down_proj" in module else "nvfp4-ct")
        assert parts_of(new, module) == parts_of(alone(convention), module), module
        if convention == "nvfp4-ct":
            continue
        x = values_of(source[module + ".weight"])
        scales = values_of(new[module + ".weight_scale"])
        largest = np.abs(x).max(axis=1, keepdims=True) if convention == "fp8-channel" else \
            np.abs(x).max(keepdims=True).reshape(1)  # fmt: skip
        assert np.allclose(scales, largest / 448, rtol=2**-22, atol=0), module
        y = values_of(new[module + ".weight"]) * scales
        assert np.abs(x - y).max() <= scales.max() * 16.001, module  # Half a step, rounded.
    groups = json.loads((out / "config.json").read_text())["quantization_config"]["config_groups"]
    assert {group["weights"]["strategy"] for group in groups.values()} == {
        "tensor_group", "channel", "tensor"}
    assert all(group["input_activations"] is None for group in groups.values())
    result = run_ok("check", out, "--against", TINY_MOE)
    assert "quantized again: 208 of 208 weights have the same bytes" in result.stdout
    # q, k and v share a scale, and the bytes depend on no memory and threads.
    few = ["--max-memory", "70kB", "--threads", "3"]
    run_ok("quantize", TINY_MOE, tmp_path / "few", "--to", "fp8-tensor", *few)
    assert stored(tmp_path / "few") == alone("fp8-tensor")
    layer = "model.layers.0.self_attn."
    assert len({alone("fp8-tensor")[f"{layer}{name}_proj.weight_scale"][2] for name in "qkv"}) == 1
    run_ok("quantize", TINY_MOE, tmp_path / "few", "--to", "fp8-channel", *few, "--force")
    assert stored(tmp_path / "few") == alone("fp8-channel")
    for base, format, part in (("nvfp4-modelopt", "fp8-channel", "; there it is fp8-channel-mod"),
                               ("fp8-block", "fp8-tensor", "checkpoint with fp8-block\n")):
        result = run("quantize", TINY_MOE, tmp_path / "x", "--to", base, "--rule", f"*={format}")
        assert result.returncode == USAGE and "cannot be in one checkpoint" in result.stderr
        assert part in result.stderr
    result = run("moe", "run", out, "--layer", 0, "--tokens", 1, "--reference", TINY_MOE)
    assert result.returncode == UNSUPPORTED, result.stderr


@pytest.mark.parametrize("extent,algorithm", [("channel", "FP8_PER_CHANNEL_PER_TOKEN"),
                                              ("tensor", "FP8")])  # fmt: skip
def test_fp8_of_modelopt_has_the_bytes_of_compressed_tensors(alone, tmp_path, extent, algorithm):
    plain, to = f"fp8-{extent}", f"fp8-{extent}-modelopt"
    out = tmp_path / "out"
    result = run_ok("quantize", TINY_MOE, out, "--to", to)
    warning = "208 weights of fp8-tensor-modelopt have no activation scale"
    assert (warning in result.stderr) == (extent == "tensor")
    new, old = stored(out), alone(plain)
    assert new.keys() == old.keys()
    for name, (dtype, shape, data) in old.items():
        if name.endswith("weight_scale"):
            shape = shape[:1] if extent == "channel" else []
        assert new[name] == (dtype, shape, data), name
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    file = json.loads((out / "hf_quant_config.json").read_text())["quantization"]
    assert config["quant_method"] == "modelopt"
    assert config["quant_algo"] == file["quant_algo"] == algorithm
    assert config["ignore"] == file["exclude_modules"] and "lm_head" in file["exclude_modules"]
    assert "group_size" not in file
    kinds = {kind["kind"]: kind["tensors"] for kind in run_json("inspect", out)["kinds"]}
    assert kinds == {"BF16": 23, to: 208}
    # A check finds what loaders of FP8 miss.
    result = run("check", out, "--against", TINY_MOE)
    assert "quantized again: 208 of 208 weights have the same bytes" in result.stdout
    assert ("NF-C015" in result.stdout) == (extent == "tensor")
    # Both ways of converting are exact.
    for source, target, wanted in ((out, plain, old), (tmp_path / plain, to, new)):
        document = run_json("convert", source, tmp_path / target, "--to", target, "--exact-only")
        assert document["conversion"]["exact_weights"] == 208
        assert stored(tmp_path / target) == wanted
        for name in ("config.json", "hf_quant_config.json"):
            if target == to:
                assert (tmp_path / to / name).read_text() == (out / name).read_text()
    assert not (tmp_path / plain / "hf_quant_config.json").exists()


def test_fp8_beside_nvfp4_of_modelopt(alone, tmp_path):
    """NVFP4 experts, FP8 attention: as NVIDIA's own models of mixed precision."""
    out = tmp_path / "out"
    run_ok("quantize", TINY_MOE, out, "--to", "nvfp4-modelopt",
           "--rule", "*.q_proj.*=fp8-channel-modelopt",
           "--rule", f"{ATTENTION}=fp8-tensor-modelopt")
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    file = json.loads((out / "hf_quant_config.json").read_text())["quantization"]
    assert config["quant_algo"] == file["quant_algo"] == "MIXED_PRECISION"
    new = stored(out)
    for module in modules_of_source():
        of_module = ({"quant_algo": "W4A16_NVFP4", "group_size": 16} if ".experts." in module else
                     {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"} if "q_proj" in module else
                     {"quant_algo": "FP8"})  # fmt: skip
        assert config["quantized_layers"][module] == of_module, module
        assert file["quantized_layers"][module] == of_module, module
    result = run("check", out)
    assert result.returncode == FINDINGS and "0 errors, 1 warning" in result.stdout
    name = "model.layers.1.self_attn."
    assert new[name + "q_proj.weight"] == alone("fp8-channel")[name + "q_proj.weight"]
    # Without q the scale is that of k and v.
    assert new[name + "k_proj.weight_scale"] == new[name + "v_proj.weight_scale"]
    kinds = {kind["kind"]: kind["tensors"] for kind in run_json("inspect", out)["kinds"]}
    assert kinds == {"BF16": 23, "fp8-channel-modelopt": 4, "fp8-tensor-modelopt": 12,
                     "nvfp4-modelopt": 192}  # fmt: skip
    # The same mix of compressed-tensors decodes to the same values.
    run_ok("quantize", TINY_MOE, tmp_path / "ct", "--to", "nvfp4", "--rule",
           "*.q_proj.*=fp8-channel", "--rule", f"{ATTENTION}=fp8-tensor")
    for path in (out, tmp_path / "ct"):
        run_ok("dequantize", path, path.with_suffix(".plain"), "--dtype", "fp32")
    ct, modelopt = (stored(tmp_path / name) for name in ("ct.plain", "out.plain"))
    assert [n for n in ct if ct[n] != modelopt[n] and ".experts." not in n] == []
