"""Several formats in one checkpoint: rules and recipes, what configs say about them, and the static
activation scales of some weights.  Weights have the bytes that they have where all are in their
format."""

import json
import re
import shutil

import numpy as np
import pytest
from conftest import (INPUT, ROOT, TINY_MOE, UNSUPPORTED, USAGE, modules_of_source, run,
                      run_json, run_ok, stored, write_safetensors)
from test_activation_scales import amax_file
from test_convert import array

ATTENTION, DOWN = "*.self_attn.*", "*.layers.{}.*down_proj*"
RULES = ["--rule", f"{ATTENTION}=mxfp8", "--rule", DOWN.format(0) + "=keep",
         "--rule", DOWN.format(1) + "=fp8-block", "--rule", DOWN.format(2) + "=mxfp4"]  # fmt: skip


def format_of(module):
    if ".self_attn." in module:
        return "mxfp8-ct"
    if "down_proj" not in module:
        return "nvfp4-ct"
    return [None, "fp8-block", "mxfp4-ct", "nvfp4-ct"][int(module.split(".")[2])]


def parts_of(tensors, module):
    return {name: tensor for name, tensor in tensors.items() if name.startswith(module + ".")}


def test_rules_choose_the_format_of_each_weight(alone, tmp_path):
    out = tmp_path / "out"
    document = run_json("quantize", TINY_MOE, out, "--to", "nvfp4", *RULES)
    formats = {t["name"].removesuffix(".weight"): t["format"] for t in document["tensors"]}
    new = stored(out)
    for module in modules_of_source():
        convention = format_of(module)
        assert formats[module] == convention
        wanted = parts_of(alone(convention) if convention else stored(TINY_MOE), module)
        if convention == "fp8-block":  # The name that compressed-tensors has for it.
            wanted = {name.removesuffix("_inv"): tensor for name, tensor in wanted.items()}
        assert parts_of(new, module) == wanted, module

    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision"
    written = {"nvfp4-pack-quantized": "nvfp4-ct", "mxfp4-pack-quantized": "mxfp4-ct",
               "mxfp8-quantized": "mxfp8-ct", "float-quantized": "fp8-block"}  # fmt: skip
    groups = config["config_groups"].values()
    assert sorted(group["format"] for group in groups) == sorted(written)
    for module in [*modules_of_source(), "lm_head", "model.layers.0.mlp.gate"]:
        found = [written[group["format"]] for group in groups for target in group["targets"]
                 if (re.match(target[3:], module) if target.startswith("re:")
                     else target == module)]  # fmt: skip
        convention = format_of(module) if module.endswith("_proj") else None
        assert found == ([convention] if convention else []), module
        assert (module in config["ignore"]) == (convention is None)
    assert len(json.dumps(config)) < 40_000  # Experts that are alike are one pattern.

    # Readers see each weight in its format, with or without the config.
    for path in (out, out / "model.safetensors"):
        kinds = {kind["kind"]: kind["tensors"] for kind in run_json("inspect", path)["kinds"]}
        assert kinds == {"BF16": 23 + 16, "nvfp4-ct": 208 - 16 - 48, "mxfp8-ct": 16,
                         "fp8-block": 16, "mxfp4-ct": 16}  # fmt: skip
    run_ok("dequantize", out, tmp_path / "plain", "--dtype", "bf16")
    assert stored(tmp_path / "plain").keys() == stored(TINY_MOE).keys()
    document = run_json("convert", out, tmp_path / "converted", "--to", "mxfp8", "--lossy")
    assert document["conversion"]["exact_weights"] == 16 + 16
    assert "nvfp4-ct" in run_ok("quantize", TINY_MOE, tmp_path / "x", "--to", "nvfp4", *RULES,
                                "--dry-run").stdout  # fmt: skip


def test_recipes_are_rules_with_settings(alone, tmp_path):
    recipe = tmp_path / "recipe.json"
    rules = [rule.rsplit("=", 1) for rule in RULES[1::2]]
    recipe.write_text(json.dumps({"rules": [{"match": glob, "format": text}
                                            for glob, text in rules]}))  # fmt: skip
    run_ok("quantize", TINY_MOE, tmp_path / "a", "--to", "nvfp4", *RULES)
    run_ok("quantize", TINY_MOE, tmp_path / "b", "--to", "nvfp4", "--recipe", recipe)
    assert (tmp_path / "a/model.safetensors").read_bytes() == \
        (tmp_path / "b/model.safetensors").read_bytes()

    recipe.write_text(json.dumps({
        "exclude": [DOWN.format(3)],
        "rules": [{"match": ATTENTION, "format": "mxfp4", "mx_scale": "even"},
                  {"match": "*.experts.*", "format": "nvfp4", "scale_search": "4over6"}]}))
    # The command line's rules come first, and its options are about what has a use for them.
    run_ok("quantize", TINY_MOE, tmp_path / "c", "--to", "nvfp4", "--recipe", recipe,
           "--rule", "*.layers.0.self_attn.*=mxfp4", "--mx-scale", "floor")  # fmt: skip
    new = stored(tmp_path / "c")
    for module in modules_of_source():
        if ".self_attn." in module:
            rule = "floor" if ".layers.0." in module else "even"
            wanted = alone("mxfp4-ct", "--mx-scale", rule)
        elif ".layers.3." in module and "down_proj" in module:
            wanted = stored(TINY_MOE)
        else:
            wanted = alone("nvfp4-ct", "--scale-search", "4over6")
        assert parts_of(new, module) == parts_of(wanted, module), module


def test_recipes_in_yaml_say_the_same(tmp_path):
    """The bytes of the JSON recipe of docs/cli.md, from the YAML there."""
    page = (ROOT / "docs/cli.md").read_text()
    targets = []
    for suffix, begin in (("json", '{"exclude"'), ("yaml", "exclude: [")):
        recipe = tmp_path / f"recipe.{suffix}"
        recipe.write_text(begin + page.split(f"```\n{begin}", 1)[1].split("```", 1)[0])
        targets.append(tmp_path / suffix)
        run_ok("quantize", TINY_MOE, targets[-1], "--to", "nvfp4", "--recipe", recipe)
    assert stored(targets[0]) == stored(targets[1])
    recipe = tmp_path / "recipe.yaml"
    for text, code, part in (("rules:\n  - match: *.q_proj.*\n", UNSUPPORTED, "globs in quotes"),
                             ("rules: &a\n", UNSUPPORTED, "recipe.yaml: line 1"),
                             ("exclude: x\n", INPUT, "'exclude' must be a list of globs"),
                             ("- a\n", INPUT, "recipe.yaml"), ("", INPUT, "nothing but comments"),
                             ("{exclude: [],\n}", INPUT, "line 1: '{exclude: [],' has no end of its"),
                             ("exclude: []\nexclude: []\n", INPUT, "exclude")):  # fmt: skip
        recipe.write_text(text)
        result = run("quantize", TINY_MOE, tmp_path / "x", "--to", "nvfp4", "--recipe", recipe)
        assert result.returncode == code and part in result.stderr, result.stderr
    plans = []
    for text in (' {"exclude":["*.0.*"],\n "rules":[]}', '{exclude: ["*.0.*"], rules: []}  # YAML\n'):
        recipe.write_text(text)
        plans.append(run_ok("quantize", TINY_MOE, tmp_path / "x", "--to", "nvfp4", "--recipe", recipe,
                            "--dry-run").stdout)  # fmt: skip
    assert plans[0] == plans[1]


@pytest.mark.parametrize("text,part", [
    ("{", "recipe.json"), ('{"rule": []}', "unknown member 'rule'"),
    ('{"rules": {}}', "'rules' must be a list"), ('{"rules": [1]}', "a rule must be an object"),
    ('{"rules": [{"match": "*"}]}', "needs 'match' and 'format'"),
    ('{"rules": [{"match": "*", "format": 4}]}', "'format' of a rule must be a string"),
    ('{"rules": [{"match": "*", "format": "nvfp4", "scale": "x"}]}', "a rule has 'scale': 'x'"),
    ('{"rules": [{"match": "*", "format": "nvfp4", "math": "x"}]}', "exact"),
    ('{"include": "*"}', "'include' must be a list of globs"),
    ('{"rules": [{"match": "none", "format": "keep"}]}', "--rule: 'none' matches no tensor"),
    ('{"rules": [{"match": "*", "format": "int4"}]}', "got 'int4'"),
    ('{"rules": [{"match": "*", "format": "nvfp4-modelopt"}]}', "cannot be in one checkpoint"),
    ('{"rules": [{"match": "*", "format": "nvfp4", "mx_scale": "even"}]}', "--mx-scale"),
])  # fmt: skip
def test_recipes_are_read_strictly(tmp_path, small_file, text, part):
    recipe = tmp_path / "recipe.json"
    recipe.write_text(text)
    result = run("quantize", small_file, tmp_path / "x.safetensors", "--to", "nvfp4", "--recipe",
                 recipe)  # fmt: skip
    assert result.returncode in (USAGE, INPUT) and part in result.stderr
    assert not (tmp_path / "x.safetensors").exists()


def test_rules_that_cannot_be(tmp_path, small_file):
    out = tmp_path / "out.safetensors"
    for to, rule, part in (("nvfp4", "*", "expected GLOB=FORMAT"), ("nvfp4", "=mxfp8", "GLOB"),
                           ("nvfp4-modelopt", "*=mxfp4", "cannot be in one checkpoint"),
                           ("fp8-block", "*=mxfp8", "cannot be in one checkpoint"),
                           ("nvfp4", "*=keep", "no tensor is left to quantize")):
        result = run("quantize", small_file, out, "--to", to, "--rule", rule)
        assert result.returncode == USAGE and part in result.stderr, (to, rule, result.stderr)
    result = run_ok("quantize", TINY_MOE, tmp_path / "model", "--to", "nvfp4", "--rule",
                    "*.0.self_attn.q_proj.*=mxfp8")  # fmt: skip
    assert result.stderr.count("stored differently, but loaders merge them") == 1
    # One format for all is not mixed.
    run_ok("quantize", TINY_MOE, tmp_path / "one", "--to", "nvfp4", "--rule", "*=fp8-block")
    config = json.loads((tmp_path / "one/config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "fp8"


def test_mixed_precision_of_modelopt(alone, tmp_path):
    out = tmp_path / "out"
    run_ok("quantize", TINY_MOE, out, "--to", "nvfp4-modelopt", "--rule", f"{ATTENTION}=mxfp8")
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    file = json.loads((out / "hf_quant_config.json").read_text())["quantization"]
    assert config["quant_algo"] == file["quant_algo"] == "MIXED_PRECISION"
    assert config["quantized_layers"] == file["quantized_layers"]
    new = stored(out)
    for module in modules_of_source():
        is_mxfp8 = ".self_attn." in module
        assert file["quantized_layers"][module] == {
            "quant_algo": "MXFP8" if is_mxfp8 else "W4A16_NVFP4",
            "group_size": 32 if is_mxfp8 else 16}  # fmt: skip
        wanted = alone("mxfp8-ct" if is_mxfp8 else "nvfp4-modelopt")
        assert parts_of(new, module) == parts_of(wanted, module)
    kinds = {kind["kind"]: kind["tensors"] for kind in run_json("inspect", out)["kinds"]}
    assert kinds == {"BF16": 23, "mxfp8-ct": 16, "nvfp4-modelopt": 192}


def test_conversions_keep_the_mix_or_say_how(tmp_path):
    """compressed-tensors' mixed-precision to ModelOpt's MIXED_PRECISION and back, with scales of
    activations where there are some."""
    amax_file(tmp_path / "amax.safetensors")
    rules = {"*.q_proj.*": "mxfp8", "*.o_proj.*": "fp8-channel", "*.k_proj.*": "fp8-tensor"}
    made = {}
    for to, suffix in (("nvfp4-ct", ""), ("nvfp4-modelopt", "-modelopt")):
        made[to] = tmp_path / to
        more = [word for glob, format in rules.items() for word in (
            "--rule", f"{glob}={format}{suffix if format.startswith('fp8') else ''}")]  # fmt: skip
        run_ok("quantize", TINY_MOE, made[to], "--to", to, "--activation-amax",
               tmp_path / "amax.safetensors", *more)
    for source, to in (("nvfp4-ct", "nvfp4-modelopt"), ("nvfp4-modelopt", "nvfp4-ct")):
        out = tmp_path / "out"
        result = run("convert", made[source], out, "--to", to)
        assert result.returncode == USAGE and "--lossy quantizes them again, --keep-formats" in \
            result.stderr  # fmt: skip
        document = run_json("convert", made[source], out, "--to", to, "--keep-formats", "--force")
        assert len(document["warnings"]) == (to == "nvfp4-modelopt")
        assert all("4 weights of fp8-tensor-modelopt have" in one for one in document["warnings"])
        assert document["conversion"]["blocks"] == document["conversion"]["exact_blocks"]
        for name in ("config.json", "hf_quant_config.json"):
            wanted = made[to] / name
            assert (out / name).exists() == wanted.exists()
            assert not wanted.exists() or (out / name).read_text() == wanted.read_text()
        new, own = stored(out), stored(made[to])
        assert new.keys() == own.keys()
        scales = ("weight_global_scale", "weight_scale_2", "input_global_scale", "input_scale")
        for name, (dtype, shape, data) in own.items():
            assert new[name][:2] == (dtype, shape), name
            if name.endswith(scales):  # Reciprocals, rounded.
                assert np.isclose(*(np.frombuffer(x, "<f4")[0] for x in (new[name][2], data)),
                                  rtol=2**-21, atol=0), name
            else:
                assert new[name] == own[name], name
        run_ok("convert", out, tmp_path / "back", "--to", source, "--keep-formats", "--force")
        assert stored(tmp_path / "back") == stored(made[source])
        shutil.rmtree(out)
    result = run("convert", made["nvfp4-ct"], out, "--to", "fp8-block", "--keep-formats")
    assert result.returncode == UNSUPPORTED and "stores beside fp8-block" in result.stderr
    result = run("convert", made["nvfp4-ct"], out, "--to", "nvfp4-ct", "--keep-formats", "--lossy")
    assert result.returncode == USAGE and not out.exists()


def test_deepseek_v4_as_mixed_precision(tmp_path):
    """Its experts in MXFP4 and dense layers in FP8 blocks have names of compressed-tensors."""
    random = np.random.default_rng(3)
    expert, dense = "layers.0.ffn.experts.0.w1", "layers.0.attn.wo"
    tensors = {expert + ".weight": ("I8", [32, 64], random.bytes(2048)),
               expert + ".scale": ("F8_E8M0", [32, 4], bytes(random.integers(90, 130, 128,
                                                                             np.uint8))),
               dense + ".weight": ("F8_E4M3", [128, 128], bytes(random.integers(0, 127, 16384,
                                                                                np.uint8))),
               dense + ".scale": ("F8_E8M0", [1, 1], b"\x7b")}  # fmt: skip
    source, out = tmp_path / "model", tmp_path / "out"
    source.mkdir()
    write_safetensors(source / "model.safetensors", tensors)
    (source / "config.json").write_text(json.dumps({"expert_dtype": "fp4", "quantization_config": {
        "quant_method": "fp8", "weight_block_size": [128, 128]}}))
    run_ok("convert", source, out, "--to", "nvfp4", "--keep-formats", "--exact-only")
    new = stored(out)
    assert new == {
        expert + ".weight_packed": ("U8", *tensors[expert + ".weight"][1:]),
        expert + ".weight_scale": ("U8", *tensors[expert + ".scale"][1:]),
        dense + ".weight": tensors[dense + ".weight"],
        dense + ".weight_scale": ("F32", [1, 1], np.float32(2**-4).tobytes())}  # fmt: skip
    config = json.loads((out / "config.json").read_text())
    assert "expert_dtype" not in config
    assert config["quantization_config"]["format"] == "mixed-precision"
    result = run("convert", source, tmp_path / "x", "--to", "nvfp4-modelopt", "--keep-formats")
    assert result.returncode == UNSUPPORTED and "keeps it in" in result.stderr


def nvfp4_weight(module):
    return {module + ".weight": ("U8", [2, 16], bytes(32)),
            module + ".weight_scale": ("F8_E4M3", [2, 2], b"\x38" * 4),
            module + ".weight_scale_2": ("F32", [], np.float32(1).tobytes())}  # fmt: skip


@pytest.mark.parametrize("config,expected", [
    # A list of targets under the name of a preset; a group without a format; one of activations.
    ({"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": {
        "MXFP8": ["Linear"], "FP8_BLOCK": ["re:.*b"]}}, {"mxfp8-ct": 1, "fp8-block": 1}),
    ({"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": {
        "group_0": {"targets": ["a"], "weights": {"num_bits": 8, "type": "float",
                                                  "strategy": "group", "group_size": 32}},
        "group_1": {"targets": ["b"], "format": "float-quantized", "weights": {
            "num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}},
        "group_2": {"targets": ["k"], "weights": None}}}, {"mxfp8-ct": 1, "fp8-block": 1}),
    # Groups whose format differs from that of the whole.
    ({"quant_method": "compressed-tensors", "format": "mxfp8-quantized", "config_groups": {
        "group_0": {"targets": ["a"], "format": "mxfp8-quantized", "weights": {"num_bits": 8}},
        "group_1": {"targets": ["b"], "format": "float-quantized", "weights": {
            "num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}}}},
     {"mxfp8-ct": 1, "fp8-block": 1}),
    # Formats that cannot be read.
    ({"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": {
        "MXFP8": ["a"], "group_1": {"targets": ["b"], "format": "int-quantized"}}},
     "int-quantized"),
    ({"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": {
        "group_7": {"targets": ["b"], "weights": {"num_bits": 3, "type": "int"}}}}, "group_7"),
    ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {
        "a": {"quant_algo": "MXFP8", "group_size": 32}, "b": {"quant_algo": "FP8_PB_WO"}}},
     "quant_algo FP8_PB_WO"),
    # Scales of blocks where those of rows, or one, are declared.
    ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {
        "a": {"quant_algo": "MXFP8", "group_size": 32}, "b": {"quant_algo": "FP8"}}},
     "but with its companions it is fp8-block"),
    ({"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": {
        "MXFP8": ["a"], "FP8_DYNAMIC": ["b"]}}, "but with its companions it is fp8-block"),
    # A weight of a format that no group has, and a format that no weight has.
    ({"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": {
        "MXFP8": ["a"], "NVFP4": ["b"]}}, "but with its companions it is fp8-block"),
    ({"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": {
        "MXFP8": ["a"], "FP8_BLOCK": ["b"], "MXFP4": ["c"]}}, "no tensor is stored so"),
    ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {}},
     "lists no weights"),
])  # fmt: skip
def test_declarations_of_several_formats(tmp_path, config, expected):
    source = tmp_path / "model"
    source.mkdir()
    write_safetensors(source / "model.safetensors", {
        "a.weight": ("F8_E4M3", [2, 32], bytes(64)),
        "a.weight_scale": ("U8", [2, 1], bytes(2)),
        "b.weight": ("F8_E4M3", [2, 32], bytes(64)),
        "b.weight_scale": ("F32", [1, 1], np.float32(1).tobytes())})
    (source / "config.json").write_text(json.dumps({"quantization_config": config}))
    if isinstance(expected, dict):
        kinds = {kind["kind"]: kind["tensors"] for kind in run_json("inspect", source)["kinds"]}
        assert kinds == expected
        return
    result = run("dequantize", source, tmp_path / "out", "--dtype", "bf16")
    assert result.returncode in (INPUT, UNSUPPORTED) and expected in result.stderr


def test_experts_beside_another_method(tmp_path):
    """As ModelOpt writes DeepSeek-V4 and MiniMax-M3."""
    source = tmp_path / "model"
    source.mkdir()
    write_safetensors(source / "model.safetensors", nvfp4_weight("experts.0.w1") | {
        "dense.weight": ("F8_E4M3", [2, 32], bytes(64)),
        "dense.weight_scale_inv": ("F32", [1, 1], np.float32(1).tobytes())})
    method = {"quant_method": "fp8", "weight_block_size": [128, 128], "moe_quant_algo": "NVFP4"}
    (source / "config.json").write_text(json.dumps({"quantization_config": method}))
    kinds = {kind["kind"]: kind["tensors"] for kind in run_json("inspect", source)["kinds"]}
    assert kinds == {"fp8-block": 1, "nvfp4-modelopt": 1}
    (source / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "MXFP8"}}')
    result = run("inspect", source)
    assert result.returncode == INPUT and "fp8-block and nvfp4-modelopt" in result.stderr


def test_target_bits_buy_the_largest_gains(alone, tmp_path):
    """Units are what loaders merge; a step is taken if its average fits, the best ones first."""
    out, target = tmp_path / "out", 5.0
    document = run_json("quantize", TINY_MOE, out, "--to", "nvfp4", "--target-bits", target)
    source = {name.removesuffix(".weight"): np.prod(tensor[1])
              for name, tensor in stored(TINY_MOE).items() if name.endswith("_proj.weight")}
    merged = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up",
              "up_proj": "gate_up"}  # fmt: skip
    units = {}
    for module in source:
        stem, _, last = module.rpartition(".")
        units.setdefault(f"{stem}.{merged.get(last, last)}", []).append(module)

    def noise(convention):
        """Squared error over squared values of each unit, in float64."""
        plain = tmp_path / convention
        run_ok("quantize", TINY_MOE, tmp_path / "q", "--to", convention, "--force")
        run_ok("dequantize", tmp_path / "q", plain, "--dtype", "fp32")
        new, old, found = stored(plain), stored(TINY_MOE), {}
        for unit, modules in units.items():
            error = squares = 0
            for module in modules:
                x = (array(old, module + ".weight").astype(np.uint32) << 16).view(np.float32)
                x = x.astype(np.float64)
                error += np.sum((array(new, module + ".weight") - x) ** 2)
                squares += np.sum(x**2)
            found[unit] = error / squares
        return found

    low, high = noise("nvfp4-ct"), noise("mxfp8-ct")
    sizes = {unit: sum(source[module] for module in modules) for unit, modules in units.items()}
    bits = {unit: 4.5 + 32 * len(modules) / sizes[unit] for unit, modules in units.items()}
    total, elements = sum(bits[u] * sizes[u] for u in units), sum(sizes.values())
    first, wanted = total / elements, set()
    for unit in sorted(units, key=lambda u: -(low[u] - high[u]) / (8.25 - bits[u])):
        more = (8.25 - bits[unit]) * sizes[unit]
        if total + more <= target * elements:
            total += more
            wanted.add(unit)
    assert len(wanted) > 10
    formats = {t["name"].removesuffix(".weight"): t for t in document["tensors"]}
    for unit, modules in units.items():
        for module in modules:
            tensor = formats[module]
            assert tensor["format"] == ("mxfp8-ct" if unit in wanted else "nvfp4-ct"), unit
            assert ("--target-bits: noise" in tensor["reason"]) == (unit in wanted)
    (note,) = document["notes"]
    assert f"from {first:.4f} bits for each weight to {total / elements:.4f} of 5" in note
    new = stored(out)
    for module in (modules[0] for modules in units.values()):
        convention = formats[module]["format"]
        assert parts_of(new, module) == parts_of(alone(convention), module)
    again = tmp_path / "again"
    run_ok("quantize", TINY_MOE, again, "--to", "nvfp4", "--target-bits", target, "--threads", 1,
           "--max-memory", "100K")  # fmt: skip
    assert (again / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()

    # Enough bits keep some weights as they are.
    plan = run_json("quantize", TINY_MOE, tmp_path / "x", "--to", "nvfp4-modelopt", "--dry-run",
                    "--target-bits", 9)  # fmt: skip
    kept = [t for t in plan["tensors"] if t["action"] == "copy" and "noise 0" in t["reason"]]
    assert kept and {t["format"] for t in plan["tensors"]} == {None, "mxfp8-ct"}
    for arguments, part in ((["4"], "are too few; nvfp4-ct takes 4.50"), (["nan"], "--target-bits"),
                            (["-1"], "--target-bits"), (["99"], "from 1 to 32"),
                            (["32"], "no tensor is left to quantize"),
                            (["5", "--rule", "*=mxfp8"], "excludes --rule")):  # fmt: skip
        result = run("quantize", TINY_MOE, tmp_path / "x", "--to", "nvfp4", "--target-bits",
                     *arguments)  # fmt: skip
        assert result.returncode == USAGE and part in result.stderr, result.stderr
