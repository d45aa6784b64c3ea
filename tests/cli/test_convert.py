"""narrowfloat convert: codes and scales against NumPy, written from the formats alone, and against
the bytes of `quantize` where weights are quantized again."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import (DONE, FINDINGS, INPUT, TINY_MOE, UNSUPPORTED, USAGE, run, run_json, run_ok,
                      stored, write_safetensors)

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "golden"))
from gpt_oss import E2M1, GptOss

NAME = "layers.0.self_attn.o_proj."


def array(tensors, name):
    dtype, shape, data = tensors[name]
    types = {"F32": "<f4", "BF16": "<u2", "I8": np.uint8}
    return np.frombuffer(data, types.get(dtype, np.uint8)).reshape(shape)


def e4m3(codes):
    codes = codes.astype(np.int64)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    values = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0**(exponent - 10))
    return np.where(codes & 0x80, -values, values)


def e8m0(codes):
    return np.exp2(codes.astype(np.float64) - 127)


def fp4(packed):
    return E2M1[np.stack([packed & 15, packed >> 4], -1)].reshape(*packed.shape[:-1], -1)


def values_of(tensors, module):
    """The weight in float64, whatever convention with scales for parts of a row it has."""
    scales = tensors[module + "weight_scale"]
    codes = array(tensors, module + ("weight_packed" if module + "weight_packed" in tensors
                                     else "weight"))  # fmt: skip
    if scales[0] == "F8_E4M3":
        scale = e4m3(array(tensors, module + "weight_scale"))
        if module + "weight_scale_2" in tensors:
            scale = scale * np.float64(array(tensors, module + "weight_scale_2"))
        else:
            scale = scale / np.float64(array(tensors, module + "weight_global_scale")[0])
        return fp4(codes) * np.repeat(scale, 16, -1)
    scale = np.repeat(e8m0(array(tensors, module + "weight_scale")), 32, -1)
    return (fp4(codes) if codes.shape != scale.shape else e4m3(codes)) * scale


def modules_of(tensors):
    return sorted(name.removesuffix("weight_scale") for name in tensors
                  if name.endswith(".weight_scale"))


def mxfp4_file(path, scales, codes=None, name=NAME):
    """An mxfp4-ct file with one weight, a block a row; the codes of every row are 0.5 to 6."""
    codes = np.tile(np.arange(1, 33, dtype=np.uint8) % 7 + 1, (len(scales), 1)) if codes is None \
        else np.asarray(codes, np.uint8)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    write_safetensors(path, {
        name + "weight_packed": ("U8", list(packed.shape), packed.tobytes()),
        name + "weight_scale": ("U8", [len(scales), 1], bytes(scales)),
    }, {"narrowfloat.convention": "mxfp4-ct"})
    return path


@pytest.fixture(scope="module", name="mxfp4")
def quantized_mxfp4(tmp_path_factory):
    target = tmp_path_factory.mktemp("mxfp4") / "model"
    run_ok("quantize", TINY_MOE, target, "--to", "mxfp4")
    return target


def test_nvfp4_of_both_libraries(quantized, tmp_path):
    """Codes and block scales stay; global scales are inverted, and found again on the way back."""
    there, back, own = tmp_path / "there", tmp_path / "back", tmp_path / "own"
    document = run_json("convert", quantized, there, "--to", "nvfp4-modelopt")
    old, new = stored(quantized), stored(there)
    originals = json.loads((there / "narrowfloat-scales.json").read_text())["scales"]
    modules = modules_of(old)
    assert len(modules) == 208
    changed = 0
    for module in modules:
        assert new[module + "weight"][1:] == old[module + "weight_packed"][1:]
        assert new[module + "weight_scale"] == old[module + "weight_scale"]
        scale = array(old, module + "weight_global_scale")[0]
        reciprocal = np.float32(1) / scale
        assert new[module + "weight_scale_2"] == ("F32", [], reciprocal.tobytes())
        entry = originals.get(module + "weight_scale_2")
        assert (entry is not None) == (np.float32(1) / reciprocal != scale), module
        if entry:
            changed += 1
            assert entry == {"original": module + "weight_global_scale",
                             "bits": f"0x{scale.view(np.uint32):08x}"}  # fmt: skip
    assert len(originals) == changed > 0
    totals = document["conversion"]
    assert (totals["weights"], totals["exact_weights"]) == (208, 208 - changed)
    assert totals["blocks"] == totals["exact_blocks"] == 7077888 // 16
    assert 0 < totals["global_scale_change"] <= 2**-23
    # The configs are those that quantize writes, and the tensors that are not quantized stay.
    run_ok("quantize", TINY_MOE, own, "--to", "nvfp4-modelopt")
    for name in ("config.json", "hf_quant_config.json"):
        assert (there / name).read_text() == (own / name).read_text()
    assert new.keys() == stored(own).keys()
    assert new["lm_head.weight"] == old["lm_head.weight"]

    run_ok("convert", there, back, "--to", "nvfp4-ct")
    assert stored(back) == old
    assert {path.name for path in back.iterdir()} == {path.name for path in quantized.iterdir()}
    assert (back / "config.json").read_text() == (quantized / "config.json").read_text()
    # Without the file the scales are inverted once more; one about other scales is not used.
    (there / "narrowfloat-scales.json").unlink()
    run_ok("convert", there, back, "--to", "nvfp4-ct", "--force")
    differ = [name for name, tensor in stored(back).items() if tensor != old[name]]
    assert len(differ) == changed and all("global_scale" in name for name in differ)
    module = modules[0]
    (there / "narrowfloat-scales.json").write_text(json.dumps(
        {"format": "narrowfloat scales", "scales": {module + "weight_scale_2": {
            "original": module + "weight_global_scale", "bits": "0x3f800000"}}}))
    again = tmp_path / "again"
    run_ok("convert", there, again, "--to", "nvfp4-ct")
    assert stored(again) == stored(back)


def test_exact_only(quantized, mxfp4, tmp_path):
    result = run("convert", quantized, tmp_path / "out", "--to", "nvfp4-modelopt", "--exact-only")
    assert result.returncode == FINDINGS and "nothing was written" in result.stderr
    assert "the reciprocal of its global scale is no F32 number" in result.stdout
    assert not (tmp_path / "out").exists()
    plan = run_json("convert", mxfp4, tmp_path / "out", "--to", "nvfp4", "--exact-only",
                    "--dry-run")  # fmt: skip
    assert plan["dry_run"] and plan["conversion"]["exact_weights"] == 208
    document = run_json("convert", mxfp4, tmp_path / "out", "--to", "nvfp4", "--exact-only")
    assert document["conversion"]["exact_blocks"] == document["conversion"]["blocks"]
    assert document["files"] == plan["files"] and document["file_sizes"] == plan["file_sizes"]
    result = run("convert", quantized, tmp_path / "no", "--to", "mxfp4", "--exact-only", "--json")
    assert result.returncode == FINDINGS and json.loads(result.stdout)["dry_run"]
    result = run("convert", mxfp4, tmp_path / "no", "--to", "nvfp4", "--exact-only", "--lossy")
    assert result.returncode == USAGE


@pytest.mark.parametrize("to", ["nvfp4-ct", "nvfp4-modelopt", "mxfp8-ct"])
def test_mxfp4_keeps_its_values(mxfp4, tmp_path, to):
    run_ok("convert", mxfp4, tmp_path / "out", "--to", to)
    old, new = stored(mxfp4), stored(tmp_path / "out")
    for module in modules_of(old):
        assert np.array_equal(values_of(old, module), values_of(new, module)), module
        if to == "mxfp8-ct":
            continue
        codes = "weight_packed" if to == "nvfp4-ct" else "weight"
        assert new[module + codes] == old[module + "weight_packed"]
    # One global scale for weights that consumers merge: 2^(top - 8) of the largest exponent.
    if to == "nvfp4-modelopt":
        experts = "model.layers.0.mlp.experts.3."
        parts = [experts + "gate_proj.", experts + "up_proj."]
        top = max(int(array(old, part + "weight_scale").max()) for part in parts) - 127
        for part in parts:
            assert array(new, part + "weight_scale_2") == 2.0**(top - 8)
            scales = array(old, part + "weight_scale").astype(np.int64) - 127
            wanted = np.repeat(np.exp2(scales - top + 8.0), 2, -1)
            assert np.array_equal(e4m3(array(new, part + "weight_scale")), wanted)
    if to.startswith("nvfp4"):
        run_ok("convert", tmp_path / "out", tmp_path / "back", "--to", "mxfp4", "--exact-only")
        assert stored(tmp_path / "back") == old
        assert not (tmp_path / "back/narrowfloat-scales.json").exists()


def test_the_edge_of_the_window(tmp_path):
    """17 between the largest exponent and the smallest is exact, 18 is not, unless codes move."""
    def convert(scales, codes=None, *more):
        source = mxfp4_file(tmp_path / "in.safetensors", scales, codes)
        target = tmp_path / "out.safetensors"
        result = run("convert", source, target, "--to", "nvfp4-modelopt", "--force", *more)
        return result, stored(source), stored(target) if result.returncode == DONE else None

    result, old, new = convert([120, 103])
    assert result.returncode == DONE, result.stderr
    assert (values_of(old, NAME) == values_of(new, NAME)).all()
    assert array(new, NAME + "weight_scale").tolist() == [[0x78, 0x78], [1, 1]]  # 2^8, 2^-9
    assert array(new, NAME + "weight_scale_2") == 2.0**(120 - 127 - 8)

    result, _, _ = convert([120, 102])
    assert result.returncode == USAGE
    assert "1 of 1 weights" in result.stderr and "--lossy" in result.stderr

    # Only the block outside is rounded, to nearest even: 0.5 becomes 0, 1.5 becomes 1.
    result, old, new = convert([120, 102], None, "--lossy", "-v")
    assert result.returncode == DONE and "values of 2 of 4 blocks" in result.stdout
    before, after = values_of(old, NAME), values_of(new, NAME)
    assert (before[0] == after[0]).all() and (before[1] != after[1]).any()
    assert (array(new, NAME + "weight")[0] == array(old, NAME + "weight_packed")[0]).all()
    table = np.array([0, 0, 0.5, 1, 1, 1.5, 2, 3])  # Half of each code; ties to even codes.
    codes = np.arange(1, 33) % 7 + 1
    assert (after[1] == table[codes] * 2.0**(103 - 127)).all()

    # Codes that halve keep their values, at either end.
    even = np.tile(np.array([2, 4, 5, 6, 7, 0, 10, 12], np.uint8), (1, 4))
    any_codes = np.arange(32)[None] % 16
    for scales, codes in (([120, 102], np.vstack([any_codes, even])),
                          ([120, 103 - 3], np.vstack([any_codes, np.full((1, 32), 6)])),
                          ([120, 102], np.vstack([np.full((1, 32), 9), any_codes]))):
        result, old, new = convert(scales, codes)
        assert result.returncode == DONE, result.stderr
        assert (values_of(old, NAME) == values_of(new, NAME)).all()
    # Blocks of zeros do not count, whatever their scale; the smallest and largest scales are exact.
    zeros = np.zeros((1, 32), np.uint8)
    for scales, codes in (([120, 0, 254], np.vstack([any_codes, zeros, zeros + 8])),
                          ([0, 17], None), ([254, 237], None), ([0], zeros)):
        result, old, new = convert(scales, codes)
        assert result.returncode == DONE, result.stderr
        assert (values_of(old, NAME) == values_of(new, NAME)).all()
        assert 2.0**-126 <= array(new, NAME + "weight_scale_2") <= 2.0**126
    result, _, _ = convert([120, 255])
    assert result.returncode == INPUT and "block [1, 0] is NaN" in result.stderr


def test_weights_that_share_a_global_scale_share_the_window(tmp_path):
    source = tmp_path / "in.safetensors"
    tensors = {}
    for name, scale in (("gate", 120), ("up", 102), ("down", 50)):
        mxfp4_file(source, [scale, scale], None, f"layers.0.mlp.{name}_proj.")
        tensors |= stored(source)
    write_safetensors(source, tensors, {"narrowfloat.convention": "mxfp4-ct"})
    target = tmp_path / "out.safetensors"
    document = run_json("convert", source, target, "--to", "nvfp4", "--lossy")
    exact = {t["name"].split(".")[3]: t["conversion"]["exact"] for t in document["tensors"]}
    assert exact == {"gate_proj": True, "up_proj": False, "down_proj": True}
    new = stored(target)
    assert (new["layers.0.mlp.gate_proj.weight_global_scale"]
            == new["layers.0.mlp.up_proj.weight_global_scale"])


@pytest.fixture(scope="module", name="odd")
def odd_model(tmp_path_factory):
    """Ragged tiles of 128, a zero block, and weights that share a global scale, as fp8-block."""
    root = tmp_path_factory.mktemp("odd")
    (root / "plain").mkdir()
    random = np.random.default_rng(3)
    tensors = {}
    for name, shape in (("self_attn.q_proj", (130, 160)), ("self_attn.k_proj", (64, 160)),
                        ("self_attn.o_proj", (300, 288)), ("mlp.down_proj", (3, 32))):
        weight = (random.standard_normal(shape) * 0.02).astype("<f4")
        weight[0, :32] = 0
        tensors[f"layers.0.{name}.weight"] = ("F32", list(shape), weight.tobytes())
    tensors["lm_head.weight"] = ("F32", [4, 32], bytes(512))
    write_safetensors(root / "plain/model.safetensors", tensors)
    (root / "plain/config.json").write_text('{"model_type": "llama"}')
    return root


@pytest.mark.parametrize("source,to", [
    ("fp8-block", "nvfp4-ct"), ("fp8-block", "nvfp4-modelopt"), ("fp8-block", "mxfp4-ct"),
    ("fp8-block", "mxfp8-ct"), ("nvfp4-ct", "fp8-block"), ("nvfp4-modelopt", "mxfp8-ct"),
    ("nvfp4-ct", "mxfp4-ct"), ("mxfp8-ct", "nvfp4-ct"), ("mxfp4-ct", "fp8-block"),
])
def test_quantizing_again_gives_the_bytes_of_quantize(odd, tmp_path, source, to):
    quantized, plain, wanted = odd / source, odd / f"{source}-plain", tmp_path / "wanted"
    if not quantized.exists():
        run_ok("quantize", odd / "plain", quantized, "--to", source)
        run_ok("dequantize", quantized, plain, "--dtype", "fp32")
    run_ok("quantize", plain, wanted, "--to", to)
    out = tmp_path / "out"
    assert run("convert", quantized, out, "--to", to).returncode == USAGE
    assert not out.exists()
    plan = run_ok("convert", quantized, out, "--to", to, "--dry-run")
    assert "4 of 4 weights cannot keep their values" in plan.stderr
    document = run_json("convert", quantized, out, "--to", to, "--lossy")
    assert stored(out) == stored(wanted)
    assert (out / "config.json").read_text() == (wanted / "config.json").read_text()
    # The figures are those of diff, which decodes both.
    compared = {t["name"]: t for t in
                json.loads(run("diff", quantized, out, "--json").stdout)["tensors"]}
    for tensor in document["tensors"]:
        if tensor["action"] == "requantize":
            for key in ("mse", "cosine", "flushed_percent"):
                assert math.isclose(tensor["figures"][key],
                                    compared[tensor["name"]]["figures"][key], abs_tol=1e-12)
            assert tensor["conversion"]["exact_blocks"] < tensor["conversion"]["blocks"]
    # Neither memory nor threads show.
    small = tmp_path / "small"
    budget = document["peak_buffer_bytes"] * 3 // 4
    some = run_json("convert", quantized, small, "--to", to, "--lossy", "--threads", 1,
                    "--max-memory", budget)  # fmt: skip
    assert some["peak_buffer_bytes"] <= budget
    assert stored(small) == stored(out)


@pytest.mark.parametrize("to", ["mxfp4-ct", "nvfp4-modelopt"])
def test_gpt_oss_to_experts_and_back(tmp_path, to):
    """Rows of gate and up are separated, with their scales and biases."""
    model = GptOss()
    source = model.write(tmp_path / "model")
    out, back = tmp_path / "out", tmp_path / "back"
    run_ok("convert", source, out, "--to", to, "--exact-only")
    new = stored(out)
    for layer in range(2):
        block = f"model.layers.{layer}.mlp."
        both, down = model.weight(layer, "gate_up_proj"), model.weight(layer, "down_proj")
        biases = stored(source)[f"{block}experts.gate_up_proj_bias"]
        bias = np.frombuffer(biases[2], "<u2").reshape(biases[1])
        for expert in range(model.experts):
            module = f"{block}experts.{expert}."
            assert (values_of(new, module + "gate_proj.") == both[expert, 0::2]).all()
            assert (values_of(new, module + "up_proj.") == both[expert, 1::2]).all()
            assert (values_of(new, module + "down_proj.") == down[expert]).all()
            assert new[module + "gate_proj.bias"] == ("BF16", [96], bias[expert, 0::2].tobytes())
            assert new[module + "up_proj.bias"] == ("BF16", [96], bias[expert, 1::2].tobytes())
    assert not any("_blocks" in name or "_bias" in name for name in new)
    assert new["model.layers.0.mlp.router.bias"] == \
        stored(source)["model.layers.0.mlp.router.bias"]
    run_ok("convert", out, back, "--to", "mxfp4-gpt-oss", "--exact-only")
    assert stored(back) == stored(source)
    declared = json.loads((back / "config.json").read_text())["quantization_config"]
    assert declared["quant_method"] == "mxfp4"
    assert "model.layers.0.self_attn.q_proj" in declared["modules_to_not_convert"]
    # Other formats are quantized again, an expert at a time.
    for middle in ("mxfp8", "fp8-block"):
        other = tmp_path / middle
        run_ok("convert", source, other, "--to", middle, "--lossy")
        document = run_json("convert", other, back, "--to", "mxfp4-gpt-oss", "--lossy", "--force",
                            "--max-memory", "400K")  # fmt: skip
        if middle == "mxfp8":
            assert document["conversion"]["exact_blocks"] == document["conversion"]["blocks"]
        run_ok("diff", source, back)  # FP8 has bits enough to find the codes again.


def test_experts_that_cannot_be_stacked(tmp_path):
    source = GptOss().write(tmp_path / "model")
    out = tmp_path / "out"
    run_ok("convert", source, out, "--to", "mxfp4-ct")
    tensors = stored(out)

    def refusal(changes, kind):
        changed = {n: t for n, t in (tensors | changes).items() if t is not None}
        write_safetensors(out / "model.safetensors", changed)
        result = run("convert", out, tmp_path / "back", "--to", "mxfp4-gpt-oss")
        assert result.returncode == kind and not (tmp_path / "back").exists()
        return result.stderr

    expert = "model.layers.1.mlp.experts.3."
    assert f"'{expert}up_proj.weight' is missing" in refusal(
        {expert + "up_proj.weight_packed": None, expert + "up_proj.weight_scale": None}, INPUT)
    assert "11 of the 12 matrices" in refusal({expert + "up_proj.bias": None}, INPUT)
    assert "must be [96, 96], got [64, 96]" in refusal(
        {expert + "down_proj.weight_packed": ("U8", [64, 48], bytes(64 * 48)),
         expert + "down_proj.weight_scale": ("U8", [64, 3], bytes(64 * 3))}, INPUT)
    attention = "model.layers.0.self_attn.k_proj."
    assert f"tensor '{attention}weight' cannot be converted" in refusal(
        {attention + "weight_packed": ("U8", [64, 16], bytes(1024)),
         attention + "weight_scale": ("U8", [64, 1], bytes(64))}, UNSUPPORTED)


def test_deepseek_v4_to_mxfp8(tmp_path):
    """Experts of codes I8, and dense FP8 whose block scales are powers of two."""
    random = np.random.default_rng(4)
    experts, dense = "layers.0.ffn.experts.0.w1.", "layers.0.attn.wq_a."
    codes = random.integers(0, 256, (64, 32), np.uint8)
    scales = random.integers(104, 121, (64, 2), np.uint8)
    fp8 = random.integers(0, 127, (130, 160), np.uint8)
    blocks = np.array([[119, 122], [125, 0]], np.uint8)
    source = tmp_path / "model"
    source.mkdir()
    write_safetensors(source / "model.safetensors", {
        experts + "weight": ("I8", [64, 32], codes.tobytes()),
        experts + "scale": ("F8_E8M0", [64, 2], scales.tobytes()),
        dense + "weight": ("F8_E4M3", [130, 160], fp8.tobytes()),
        dense + "scale": ("F8_E8M0", [2, 2], blocks.tobytes()),
    })
    config = {"model_type": "deepseek_v4", "expert_dtype": "fp4", "quantization_config": {
        "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}}
    (source / "config.json").write_text(json.dumps(config))
    run_ok("convert", source, tmp_path / "out", "--to", "mxfp8", "--exact-only")
    new = stored(tmp_path / "out")
    assert (values_of(new, experts) == fp4(codes) * np.repeat(e8m0(scales), 32, -1)).all()
    wanted = np.repeat(np.repeat(e8m0(blocks), 128, 0), 128, 1)[:130, :160]
    assert (values_of(new, dense) == e4m3(fp8) * wanted).all()
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written["quantization_config"]["format"] == "mxfp8-quantized"
    assert "expert_dtype" not in written
    result = run("convert", source, tmp_path / "no", "--to", "mxfp4-deepseek")
    assert result.returncode == USAGE and "read only" in result.stderr
    result = run("convert", source, tmp_path / "no", "--to", "nvfp4")
    assert result.returncode == USAGE and "1 of 2 weights" in result.stderr


def test_activation_scales(quantized, tmp_path):
    """They are inverted with the global scales, if every weight has one."""
    tensors = stored(quantized)
    modules = modules_of(tensors)
    source = tmp_path / "model"
    source.mkdir()
    (source / "config.json").write_text((quantized / "config.json").read_text())
    scale = np.float32(3.7).tobytes()
    full = tensors | {module + "input_global_scale": ("F32", [1], scale) for module in modules}
    write_safetensors(source / "model.safetensors", full)
    run_ok("convert", source, tmp_path / "out", "--to", "nvfp4-modelopt")
    new = stored(tmp_path / "out")
    wanted = ("F32", [], (np.float32(1) / np.float32(3.7)).tobytes())
    assert all(new[module + "input_scale"] == wanted for module in modules)
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert config["quant_algo"] == "NVFP4"
    assert config["config_groups"]["group_0"]["input_activations"]["num_bits"] == 4
    run_ok("convert", tmp_path / "out", tmp_path / "back", "--to", "nvfp4-ct")
    assert stored(tmp_path / "back") == full
    config = json.loads((tmp_path / "back/config.json").read_text())["quantization_config"]
    assert config["config_groups"]["group_0"]["input_activations"]["dynamic"] == "local"
    del full[modules[0] + "input_global_scale"]
    write_safetensors(source / "model.safetensors", full)
    result = run_ok("convert", source, tmp_path / "some", "--to", "nvfp4-modelopt")
    assert "207 of 208 weights have an activation scale, which is left out" in result.stderr
    assert not any("input_scale" in name for name in stored(tmp_path / "some"))


def test_what_cannot_be_converted(tmp_path, small_file):
    out = tmp_path / "out.safetensors"
    result = run("convert", small_file, out, "--to", "nvfp4")
    assert result.returncode == USAGE and "no tensor is quantized" in result.stderr
    source = mxfp4_file(tmp_path / "in.safetensors", [120])
    result = run("convert", source, out, "--to", "nvfp4", "--scale-search", "4over6",
                 "--mx-scale", "even")  # fmt: skip
    assert result.returncode == USAGE and "--mx-scale" in result.stderr
    # K fits blocks of 16, not of 32.
    tensors = {NAME + "weight_packed": ("U8", [2, 24], bytes(48)),
               NAME + "weight_scale": ("F8_E4M3", [2, 3], b"\x38" * 6),
               NAME + "weight_global_scale": ("F32", [1], np.float32(1).tobytes())}  # fmt: skip
    write_safetensors(source, tensors, {"narrowfloat.convention": "nvfp4-ct"})
    result = run("convert", source, out, "--to", "mxfp4", "--lossy")
    assert result.returncode == UNSUPPORTED and "K = 48 is not a multiple of 32" in result.stderr
    tensors[NAME + "weight_global_scale"] = ("F32", [1], np.float32(1e-40).tobytes())
    write_safetensors(source, tensors, {"narrowfloat.convention": "nvfp4-ct"})
    result = run("convert", source, out, "--to", "nvfp4-modelopt")
    assert result.returncode == UNSUPPORTED and "beyond the range of F32" in result.stderr
    # A damaged list of scales.
    directory = tmp_path / "model"
    directory.mkdir()
    tensors[NAME + "weight_global_scale"] = ("F32", [1], np.float32(3).tobytes())
    write_safetensors(directory / "model.safetensors", tensors,
                      {"narrowfloat.convention": "nvfp4-ct"})
    for text in ("{", "{}", '{"format": "narrowfloat scales", "scales": {"a": {"bits": "1"}}}'):
        (directory / "narrowfloat-scales.json").write_text(text)
        result = run("convert", directory, tmp_path / "out", "--to", "nvfp4-modelopt")
        assert result.returncode == INPUT and "narrowfloat-scales.json" in result.stderr
    assert not out.exists() and not (tmp_path / "out").exists()


def test_a_single_file_keeps_the_scales_in_its_metadata(tmp_path):
    source = tmp_path / "in.safetensors"
    scale = next(x for x in np.linspace(1.5, 1.9, 50, dtype=np.float32) if 1 / (1 / x) != x)
    assert np.float32(1) / (np.float32(1) / scale) != scale
    tensors = {NAME + "weight_packed": ("U8", [2, 8], bytes(range(16))),
               NAME + "weight_scale": ("F8_E4M3", [2, 1], b"\x38\x39"),
               NAME + "weight_global_scale": ("F32", [1], scale.tobytes())}  # fmt: skip
    write_safetensors(source, tensors, {"narrowfloat.convention": "nvfp4-ct", "mine": "kept"})
    run_ok("convert", source, tmp_path / "a.safetensors", "--to", "nvfp4-modelopt")
    run_ok("convert", tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--to", "nvfp4-ct")
    assert stored(tmp_path / "b.safetensors") == tensors
    metadata = run_json("inspect", tmp_path / "a.safetensors")["shards"][0]["metadata"]
    assert metadata["mine"] == "kept" and "narrowfloat.scales" in metadata
    metadata = run_json("inspect", tmp_path / "b.safetensors")["shards"][0]["metadata"]
    assert "narrowfloat.scales" not in metadata
