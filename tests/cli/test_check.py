"""`check` passes what is right and names what is not: every fault is planted and found, by its
identifier and its tensor. `--fix` repairs what can be repaired, atomically (test_faults.py)."""

import json
import shutil
import struct

import numpy as np
import pytest
from conftest import (DONE, FINDINGS, INPUT, TINY_MOE, UNSUPPORTED, USAGE, bf16_weight, run,
                      run_json, run_ok, write_safetensors)

LAYER = "model.layers.0."
GATE = LAYER + "mlp.experts.1.gate_proj."
UP = LAYER + "mlp.experts.1.up_proj."
CONFIG = {"num_hidden_layers": 1, "num_experts": 3, "hidden_size": 128}


def load(path):
    """{name: [dtype, shape, bytearray]} and the metadata."""
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + size])
    metadata = header.pop("__metadata__", None)
    return {name: [info["dtype"], info["shape"],
                   bytearray(data[8 + size + info["data_offsets"][0]:
                                  8 + size + info["data_offsets"][1]])]
            for name, info in header.items()}, metadata


def weight(rows, cols, seed):
    """A tensor of normal values; those of bf16_weight would all need the largest scales."""
    values = np.random.default_rng(seed).normal(0, 0.02, rows * cols).astype("<f4")
    return ("BF16", [rows, cols], (values.view("<u4") >> 16).astype("<u2").tobytes())


def plain_model(directory):
    directory.mkdir()
    names = [f"self_attn.{name}_proj" for name in "qkvo"]
    names += [f"mlp.experts.{expert}.{name}_proj" for expert in range(3)
              for name in ("gate", "up", "down")]
    tensors = {"model.embed_tokens.weight": weight(32, 128, 1),
               "lm_head.weight": weight(32, 128, 2),
               LAYER + "input_layernorm.weight": ("BF16", [128], weight(1, 128, 3)[2]),
               LAYER + "mlp.gate.weight": weight(3, 128, 4)}
    for seed, name in enumerate(names, 5):
        tensors[f"{LAYER}{name}.weight"] = weight(128, 128, seed)
    write_safetensors(directory / "model.safetensors", tensors)
    (directory / "config.json").write_text(json.dumps(CONFIG))


@pytest.fixture(scope="module", name="models")
def make_models(tmp_path_factory):
    """A small model, plain and in every convention that is written."""
    root = tmp_path_factory.mktemp("models")
    plain_model(root / "plain")
    for convention in ("nvfp4-ct", "nvfp4-modelopt", "mxfp4-ct", "mxfp8-ct", "fp8-block"):
        run_ok("quantize", root / "plain", root / convention, "--to", convention)
    return root


class Model:
    """A copy whose tensors, metadata and config a fault changes."""

    def __init__(self, directory):
        self.directory = directory
        self.tensors, self.metadata = load(directory / "model.safetensors")
        self.config = json.loads((directory / "config.json").read_text())

    def save(self):
        write_safetensors(self.directory / "model.safetensors",
                          {name: tuple(tensor) for name, tensor in self.tensors.items()},
                          self.metadata)
        (self.directory / "config.json").write_text(json.dumps(self.config))

    @property
    def quantization(self):
        return self.config["quantization_config"]

    def fill(self, name, byte, count=None):
        data = self.tensors[name][2]
        data[:count or len(data)] = bytes([byte]) * (count or len(data))

    def set_float(self, name, value):
        self.tensors[name][2][:4] = struct.pack("<f", value)

    def scale_float(self, name, factor):
        self.set_float(name, struct.unpack("<f", self.tensors[name][2])[0] * factor)

    def rename(self, old, new):
        self.tensors[new] = self.tensors.pop(old)


def flip_codes(model, count=8192):
    data = model.tensors[GATE + "weight_packed"][2]
    data[:count] = bytes(byte ^ 0x11 for byte in data[:count])


def zero_last_rows(model):
    data = model.tensors[GATE + "weight_packed"][2]
    data[-10 * 64:] = bytes(640)


def without_expert(model):
    for name in [name for name in model.tensors if ".experts.2.down" in name]:
        del model.tensors[name]


def smaller_expert(model):
    for part in ("weight_packed", "weight_scale"):
        dtype, shape, data = model.tensors[GATE + part]
        model.tensors[GATE + part] = [dtype, [64, shape[1]], data[:len(data) // 2]]


def plain_expert(model):
    for part in ("weight_packed", "weight_scale", "weight_global_scale"):
        del model.tensors[GATE + part]
    model.tensors[GATE + "weight"] = list(bf16_weight(128, 128))


def padded_scales(model):
    model.tensors[GATE + "weight_scale"] = ["F8_E4M3", [128, 12], bytearray(b"\x38" * 128 * 12)]
    dtype, _, data = model.tensors[GATE + "weight_packed"]
    model.tensors[GATE + "weight_packed"] = [dtype, [100, 72], (data * 2)[:7200]]


def static_scales(model):
    model.quantization["config_groups"]["group_0"]["input_activations"] = {"dynamic": "local"}


def some_input_scales(model, value=0.5):
    model.tensors[GATE + "input_global_scale"] = ["F32", [1], bytearray(struct.pack("<f", value))]


# Fault: convention, what is done, the identifier, the severity, the tensor, a part of the message.
FAULTS = {
    "unlisted tensors": ("nvfp4-ct", "index", "NF-C001", "warning", None, "not listed"),
    "wrong total": ("nvfp4-ct", "total", "NF-C001", "warning", None, "total_size"),
    "no declaration": ("nvfp4-ct", lambda m: (m.config.pop("quantization_config"),
                                              m.metadata.clear()),
                       "NF-C002", "error", None, "has no 'quantization_config'"),
    "no config": ("nvfp4-ct", "config", "NF-C002", "error", None, "no config.json"),
    "other declaration": ("nvfp4-ct", lambda m: (
        m.metadata.clear(), m.quantization.update(format="mxfp8-quantized"),
        m.quantization["config_groups"]["group_0"].update(weights=None)),
                          "NF-C002", "error", None, "mxfp8"),
    "scale missing": ("nvfp4-ct", lambda m: m.tensors.pop(GATE + "weight_scale"),
                      "NF-C002", "error", None, "gate_proj"),
    "two scales missing": ("nvfp4-ct", lambda m: (m.tensors.pop(GATE + "weight_scale"),
                                                  m.tensors.pop(UP + "weight_scale")),
                           "NF-C003", "error", UP + "weight", "misses its companion"),
    "padded scales": ("nvfp4-ct", lambda m: (padded_scales(m),
                                             m.tensors.pop(LAYER + "mlp.experts.0.up_proj."
                                                           "weight_scale")),
                      "NF-C003", "error", GATE + "weight", "padded for a GPU layout"),
    "codes missing": ("nvfp4-ct", lambda m: (m.tensors.pop(GATE + "weight_packed"),
                                             m.tensors.pop(UP + "weight_packed")),
                      "NF-C004", "error", UP + "weight_scale", "no codes"),
    "layer missing": ("nvfp4-ct", lambda m: m.config.update(num_hidden_layers=3),
                      "NF-C003", "error", None, "missing are 1, 2"),
    "many layers missing": ("nvfp4-ct", lambda m: (
        m.config.update(num_hidden_layers=2**62), m.tensors.update({
            "model.layers.999999999.x": ["BF16", [2], bytearray(4)]})),
                            "NF-C003", "error", None, f"({2**62 - 2} in all)"),
    "excluded but quantized": ("nvfp4-ct", lambda m: m.quantization["ignore"].append(GATE[:-1]),
                               "NF-C004", "error", GATE + "weight", "excludes its module"),
    "too many experts": ("nvfp4-ct", lambda m: m.config.update(num_experts=2),
                         "NF-C004", "error", None, "has 3 experts"),
    "not quantized": ("nvfp4-ct", plain_expert, "NF-C005", "error", GATE + "weight",
                      "does not exclude"),
    "expert missing": ("nvfp4-ct", without_expert, "NF-C006", "error", None,
                       "missing for experts 2 of 3"),
    "expert of another shape": ("nvfp4-ct", smaller_expert, "NF-C006", "error", GATE + "weight",
                                "[64, 128]"),
    "expert of another format": ("nvfp4-ct", lambda m: (plain_expert(m),
                                                        m.quantization["ignore"].append(GATE[:-1])),
                                 "NF-C006", "error", GATE + "weight", "in one format"),
    "gate and up of other shapes": ("nvfp4-ct", smaller_expert, "NF-C007", "error", UP + "weight",
                                    "merge with it"),
    "gate and up of other scales": ("nvfp4-ct", lambda m: m.scale_float(
        GATE + "weight_global_scale", 1.25), "NF-C007", "warning", UP + "weight", "1.2500 times"),
    "q and k of other scales": ("nvfp4-modelopt", lambda m: m.scale_float(
        LAYER + "self_attn.q_proj.weight_scale_2", 0.5), "NF-C007", "warning",
                                LAYER + "self_attn.q_proj.weight", "--fix"),
    "global scale zero": ("nvfp4-ct", lambda m: m.set_float(GATE + "weight_global_scale", 0),
                          "NF-C008", "error", GATE + "weight", "got 0"),
    "global scale NaN": ("nvfp4-modelopt", lambda m: m.set_float(GATE + "weight_scale_2", np.nan),
                         "NF-C008", "error", GATE + "weight", "got nan"),
    "reciprocal global scale": ("nvfp4-ct", lambda m: m.set_float(GATE + "weight_global_scale",
                                                                  3.7e-4),
                                "NF-C008", "warning", GATE + "weight", "reciprocal"),
    "NaN scale": ("nvfp4-ct", lambda m: m.fill(GATE + "weight_scale", 0x7F, 3),
                  "NF-C009", "error", GATE + "weight", "3 are NaN"),
    "NaN scale, MX": ("mxfp4-ct", lambda m: m.fill(GATE + "weight_scale", 0xFF, 2),
                      "NF-C009", "error", GATE + "weight", "2 are NaN"),
    "negative scale": ("nvfp4-modelopt", lambda m: m.fill(GATE + "weight_scale", 0xB8, 1),
                       "NF-C009", "error", GATE + "weight", "1 negative"),
    "infinite scale": ("fp8-block", lambda m: m.set_float(GATE + "weight_scale_inv", np.inf),
                       "NF-C009", "error", GATE + "weight", "infinite"),
    "zero scale": ("nvfp4-ct", lambda m: m.fill(GATE + "weight_scale", 0, 1),
                   "NF-C010", "error", GATE + "weight", "vanish"),
    "zero scale and codes": ("nvfp4-ct", lambda m: (m.fill(GATE + "weight_scale", 0, 1),
                                                    m.fill(GATE + "weight_packed", 0, 8)),
                             "NF-C009", "warning", GATE + "weight", "divide by it"),
    "denormal scales": ("nvfp4-ct", lambda m: m.fill(GATE + "weight_scale", 0x03, 50),
                        "NF-C011", "warning", GATE + "weight", "denormal"),
    "many denormal scales": ("mxfp8-ct", lambda m: m.fill(GATE + "weight_scale", 0),
                             "NF-C011", "error", GATE + "weight", "100.0 %"),
    "saturated scales": ("nvfp4-ct", lambda m: m.fill(GATE + "weight_scale", 0x7E),
                         "NF-C011", "error", GATE + "weight", "too small"),
    "codes at the maximum": ("nvfp4-ct", lambda m: m.fill(GATE + "weight_packed", 0x77),
                             "NF-C012", "warning", GATE + "weight", "largest"),
    "codes that use no range": ("mxfp4-ct", lambda m: m.fill(GATE + "weight_packed", 0x91),
                                "NF-C012", "warning", GATE + "weight", "too large"),
    "codes all zero": ("mxfp8-ct", lambda m: m.fill(GATE + "weight", 0),
                       "NF-C012", "warning", GATE + "weight", "all codes are zero"),
    "codes NaN": ("fp8-block", lambda m: m.fill(GATE + "weight", 0xFF, 5),
                  "NF-C012", "error", GATE + "weight", "5 of"),
    "padding": ("nvfp4-ct", zero_last_rows, "NF-C013", "note", GATE + "weight", "last 10 of 128"),
    "no powers of two": ("fp8-block", lambda m: m.quantization.update(scale_fmt="ue8m0"),
                         "NF-C014", "error", GATE + "weight", "powers of two"),
    "activation scales promised": ("nvfp4-ct", static_scales, "NF-C015", "error",
                                   LAYER + "mlp.experts.0.down_proj.weight", "promises"),
    "activation scale of one": ("nvfp4-ct", some_input_scales, "NF-C015", "error",
                                LAYER + "mlp.experts.0.down_proj.weight", "1 other weights"),
    "activation scale zero": ("nvfp4-ct", lambda m: some_input_scales(m, 0), "NF-C015", "error",
                              GATE + "weight", "got 0"),
    "NaN in a norm": ("nvfp4-ct", lambda m: m.fill(LAYER + "input_layernorm.weight", 0xFF, 4),
                      "NF-C016", "error", LAYER + "input_layernorm.weight", "2 of 128"),
    "not of the source": ("nvfp4-ct", lambda m: m.tensors.update(
        extra=["BF16", [2], bytearray(4)]), "NF-C020", "error", "extra", "not in the source"),
    "missing of the source": ("nvfp4-ct", lambda m: m.tensors.pop("lm_head.weight"),
                              "NF-C020", "error", "lm_head.weight", "missing here"),
    "of another shape": ("nvfp4-ct", lambda m: m.tensors.update(
        {"lm_head.weight": list(bf16_weight(16, 128))}), "NF-C020", "error", "lm_head.weight",
                         "[16, 128]"),
    "other bytes": ("nvfp4-ct", lambda m: m.fill("lm_head.weight", 0x3F, 2),
                    "NF-C020", "error", "lm_head.weight", "not those of the source"),
    "of another source": ("nvfp4-ct", lambda m: m.metadata.update(
        {"narrowfloat.source": "xxh64:0"}), "NF-C020", "warning", None, "another source"),
    "other codes": ("nvfp4-ct", flip_codes, "NF-C021", "error", GATE + "weight", "16384 of 16384"),
    "other codes of an unknown writer": ("nvfp4-ct", lambda m: (m.metadata.clear(), flip_codes(m, 3)),
                                         "NF-C021", "note", GATE + "weight", "default settings"),
    "inverted gate": ("nvfp4-ct", lambda m: m.scale_float(GATE + "weight_global_scale", 0.8),
                      "NF-C022", "error", GATE + "weight", "norm ratio 1.2"),
    "swapped nibbles": ("mxfp4-ct", lambda m: m.tensors.update({GATE + "weight_packed": [
        "U8", [128, 64], bytearray((b >> 4) | (b & 15) << 4
                                   for b in m.tensors[GATE + "weight_packed"][2])]}),
                        "NF-C022", "error", GATE + "weight", "cosine"),
}
AGAINST = ("NF-C020", "NF-C021", "NF-C022")


def plant(directory, fault):
    """Changes a checkpoint."""
    if fault == "config":
        (directory / "config.json").unlink()
        return
    if callable(fault):
        model = Model(directory)
        fault(model)
        model.save()
        return
    tensors, _ = load(directory / "model.safetensors")
    (directory / "model.safetensors").rename(directory / "model-00001-of-00001.safetensors")
    names = list(tensors)[:None if fault == "total" else -1]
    (directory / "model.safetensors.index.json").write_text(json.dumps({
        "metadata": {"total_size": 7} if fault == "total" else {},
        "weight_map": {name: "model-00001-of-00001.safetensors" for name in names}}))


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_found(tmp_path, models, name):
    convention, fault, rule, severity, tensor, message = FAULTS[name]
    shutil.copytree(models / convention, tmp_path / "model")
    plant(tmp_path / "model", fault)
    against = ["--against", models / "plain"] if rule in AGAINST else []
    expected = DONE if severity == "note" else FINDINGS
    document = run_json("check", tmp_path / "model", *against, expected=expected)
    found = [finding for finding in document["findings"] if finding["id"] == rule]
    assert any(finding["severity"] == severity and finding["tensor"] == tensor
               and message in finding["message"] for finding in found), document["findings"]
    # The same files without the fault have no such finding.
    assert document["passed"] == (expected == DONE)


@pytest.mark.parametrize("convention",
                         ["nvfp4-ct", "nvfp4-modelopt", "mxfp4-ct", "mxfp8-ct", "fp8-block"])
def test_what_we_write_passes(tmp_path, models, convention):
    document = run_json("check", models / convention, "--against", models / "plain")
    assert document["passed"] and document["findings"] == []
    run_ok("quantize", TINY_MOE, tmp_path / "out", "--to", convention)
    document = run_json("check", tmp_path / "out", "--against", TINY_MOE)
    assert document["passed"] and document["findings"] == []
    quantized = [tensor for tensor in document["tensors"] if tensor["statistics"]]
    assert len(quantized) == 208 and document["figures"]["sqnr_db"] > 15
    for tensor in quantized:
        assert tensor["requantization"]["identical"]
        statistics = tensor["statistics"]
        elements = tensor["shape"][0] * tensor["shape"][1]
        assert statistics["codes"] == sum(statistics["code_counts"]) == elements
        scales = sum(entry["count"] for entry in statistics["scale_exponents"])
        assert scales + statistics["zero_scales"] == statistics["blocks"]


def test_what_convert_writes_passes(tmp_path):
    """Every convention that quantize does not write; diff and report read them, too."""
    run_ok("quantize", TINY_MOE, tmp_path / "in", "--to", "mxfp4", "--exclude", "*self_attn*")
    for convention, tensors in (("mxfp4-gpt-oss", 47), ("nvfp4-modelopt", 231), ("nvfp4-ct", 231)):
        out = tmp_path / convention
        run_ok("convert", tmp_path / "in", out, "--to", convention)
        document = run_json("check", out)
        assert document["findings"] == [] and len(document["tensors"]) == tensors
        run_ok("report", out, "--html", tmp_path / f"{convention}.html")
        if tensors == 231:
            run_ok("diff", tmp_path / "in", out)
            document = run_json("check", out, "--against", TINY_MOE)
            assert document["passed"] and document["figures"]["sqnr_db"] > 18
            assert {finding["id"] for finding in document["findings"]} == {"NF-C020", "NF-C021"}


@pytest.mark.parametrize("options", [["--math", "fast"], ["--scale-search", "4over6"],
                                     ["--exclude", "*.q_proj.*"]])
def test_requantization_uses_the_recorded_settings(tmp_path, models, options):
    run_ok("quantize", models / "plain", tmp_path / "out", "--to", "nvfp4", *options)
    run_ok("check", tmp_path / "out", "--against", models / "plain")


def test_statistics_are_those_of_the_bytes(models):
    document = run_json("check", models / "nvfp4-ct")
    tensors, _ = load(models / "nvfp4-ct/model.safetensors")
    (statistics,) = [tensor["statistics"] for tensor in document["tensors"]
                     if tensor["name"] == GATE + "weight"]
    codes = np.frombuffer(tensors[GATE + "weight_packed"][2], np.uint8).reshape(128, 64)
    codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(128, 8, 16)
    scales = np.frombuffer(tensors[GATE + "weight_scale"][2], np.uint8)
    assert statistics["code_counts"] == np.bincount(codes.reshape(-1), minlength=16).tolist()
    assert statistics["codes_at_maximum"] == int(((codes & 7) == 7).sum())
    assert statistics["zero_blocks"] == int(((codes & 7).max(-1) == 0).sum())
    assert statistics["low_blocks"] == int(((codes & 7).max(-1) < 4).sum())
    assert statistics["saturated_scales"] == int((scales == 0x7E).sum())
    normal = np.bincount(scales >> 3, minlength=16)
    assert {entry["exponent"]: entry["count"] for entry in statistics["scale_exponents"]} == {
        exponent - 7: count for exponent, count in enumerate(normal.tolist()) if count}


def test_for_people(tmp_path, models):
    passed = run_ok("check", models / "nvfp4-ct", "--against", models / "plain").stdout
    assert "passed: 0 errors, 0 warnings, 0 notes in 17 tensors (13 quantized)" in passed
    assert "13 of 13 weights have the same bytes" in passed and "SQNR" in passed
    shutil.copytree(models / "nvfp4-ct", tmp_path / "model")
    plant(tmp_path / "model", lambda m: [m.fill(name, 0x7F, 1) for name in m.tensors
                                         if name.endswith("weight_scale")])
    failed = run("check", tmp_path / "model")
    assert failed.returncode == FINDINGS and failed.stderr == ""
    assert failed.stdout.startswith(f"error   NF-C009 {LAYER}mlp.experts.0.down_proj.weight: ")
    assert "... and 5 more of NF-C009 (-v shows all)" in failed.stdout
    assert run("check", tmp_path / "model", "-v").stdout.count("NF-C009") == 13
    assert run("check", tmp_path / "model", "-q").stdout == ""


def test_scales_only_reads_no_codes(tmp_path, models):
    shutil.copytree(models / "nvfp4-ct", tmp_path / "model")
    plant(tmp_path / "model", lambda m: (m.fill(GATE + "weight_packed", 0x77),
                                         m.fill(UP + "weight_scale", 0xFF, 1)))
    full = run_json("check", tmp_path / "model", expected=FINDINGS)
    fast = run_json("check", tmp_path / "model", "--scales-only", expected=FINDINGS)
    assert [finding["id"] for finding in fast["findings"]] == ["NF-C009"]
    assert {finding["id"] for finding in full["findings"]} == {"NF-C009", "NF-C012"}
    assert fast["read_bytes"] == 13 * 1024 < full["read_bytes"]


def test_exit_codes(tmp_path, models):
    assert run("check", tmp_path / "nothing").returncode == INPUT
    assert run("check", models / "nvfp4-ct", "--force").returncode == USAGE
    conflict = run("check", models / "nvfp4-ct", "--scales-only", "--against", models / "plain")
    assert conflict.returncode == USAGE
    shutil.copytree(models / "nvfp4-ct", tmp_path / "model")
    plant(tmp_path / "model", lambda m: m.quantization.update(quant_method="gptq"))
    assert run("check", tmp_path / "model").returncode == UNSUPPORTED
    assert run_ok("check", TINY_MOE).stdout.endswith("(0 quantized); read 14.46 MB\n")


def decoded(directory, name, is_divisor):
    """fp64 values of an NVFP4 weight."""
    tensors, _ = load(directory / "model.safetensors")
    packed, last = ("weight_packed", "weight_global_scale") if is_divisor else ("weight",
                                                                              "weight_scale_2")
    codes = np.frombuffer(tensors[name + packed][2], np.uint8)
    codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(-1, 16)
    grid = np.array([0, .5, 1, 1.5, 2, 3, 4, 6])
    values = grid[codes & 7] * np.where(codes & 8, -1, 1)
    scale = np.frombuffer(tensors[name + "weight_scale"][2], np.uint8)
    exponent, mantissa = scale >> 3, scale & 7
    scale = np.where(exponent == 0, mantissa / 512, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    stored = float(np.frombuffer(tensors[name + last][2], np.float32)[0])
    return values * scale[:, None] / stored if is_divisor else values * scale[:, None] * stored


@pytest.mark.parametrize("convention,part,factor", [
    ("nvfp4-ct", "weight_global_scale", 0.8), ("nvfp4-modelopt", "weight_scale_2", 4),
    ("nvfp4-modelopt", "weight_scale_2", 1e-4)])
def test_fix_gives_merged_weights_one_global_scale(tmp_path, models, convention, part, factor):
    """A factor of the divisor is one of the decode scale's inverse; powers of two are exact."""
    is_divisor = convention == "nvfp4-ct"
    broken, fixed = tmp_path / "broken", tmp_path / "fixed"
    shutil.copytree(models / convention, broken)
    plant(broken, lambda m: m.scale_float(GATE + part, factor))
    document = run_json("check", broken, "--fix", fixed, expected=DONE if factor > 1e-3 else 1)
    assert not document["passed"] and document["fix"]["target"] == str(fixed)
    (changed,) = document["fix"]["tensors"]
    smaller = UP if (factor < 1) == is_divisor else GATE
    assert changed["name"] == smaller + "weight"
    before, after = (decoded(path, smaller, is_divisor) for path in (broken, fixed))
    error = 20 * np.log10(np.linalg.norm(before) / max(np.linalg.norm(before - after), 1e-300))
    if factor == 4:
        assert changed["figures"]["sqnr_db"] == "inf" and (before == after).all()
    else:
        assert changed["figures"]["sqnr_db"] == pytest.approx(error, abs=1e-3)
        assert error > (25 if factor > 1e-3 else 5)
    old, new = (load(path / "model.safetensors")[0] for path in (broken, fixed))
    assert new[GATE + part] == new[UP + part]
    touched = {smaller + name for name in ("weight", "weight_packed", "weight_scale", part)}
    assert all(old[name] == new[name] for name in old if name not in touched)
    for name in ("config.json", "hf_quant_config.json"):
        if (broken / name).exists():
            assert (broken / name).read_bytes() == (fixed / name).read_bytes()
    # A target is not overwritten, and nothing is left to fix.
    assert run("check", broken, "--fix", fixed).returncode == USAGE
    assert "nothing to fix" in run("check", fixed, "--fix", tmp_path / "again").stderr
