"""Commands on a checkpoint of gpt-oss: stacked experts, biases, a router with a bias."""

import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import (FINDINGS, INPUT, USAGE, read_safetensors, run, run_json, run_ok,
                      write_safetensors)

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "golden"))
from gpt_oss import GptOss, bf16, widened

MODEL = GptOss()


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return MODEL.write(tmp_path_factory.mktemp("gpt-oss") / "model")


@pytest.fixture(scope="module")
def plain(directory):
    target = directory.parent / "plain"
    run_ok("dequantize", directory, target, "--dtype", "bf16")
    return target


def test_inspect_shows_the_experts_as_one_weight(directory):
    document = run_json("inspect", directory)
    assert document["declared"] == "mxfp4"
    kinds = {kind["kind"]: kind for kind in document["kinds"]}
    assert kinds["mxfp4-gpt-oss"]["tensors"] == 4
    assert kinds["mxfp4-gpt-oss"]["bits_per_weight"] == 4.25
    assert kinds["mxfp4-gpt-oss"]["elements"] == 2 * 6 * 3 * 96 * 96
    experts = next(tensor for tensor in document["tensors"]
                   if tensor["name"] == "model.layers.0.mlp.experts.gate_up_proj")
    assert experts["shape"] == [6, 96, 192] and experts["format"] == "mxfp4"
    assert [part["shape"] for part in experts["stored"]] == [[6, 192, 3, 16], [6, 192, 3]]
    assert "gpt-oss stores them" in run_ok("inspect", directory).stdout


def test_dequantize_writes_the_plain_model(plain):
    tensors = read_safetensors(plain / "model.safetensors")
    for name in ("gate_up_proj", "down_proj"):
        wanted = MODEL.weight(1, name).transpose(0, 2, 1)
        assert (tensors[f"model.layers.1.mlp.experts.{name}"] == wanted).all()
    assert "quantization_config" not in (plain / "config.json").read_text()


def test_check_of_stacked_experts(directory, plain):
    document = run_json("check", directory, "--against", plain)
    assert document["findings"] == [] and document["figures"]["sqnr_db"] == "inf"
    experts = [tensor["statistics"] for tensor in document["tensors"] if tensor["statistics"]]
    assert [statistics["blocks"] for statistics in experts] == [6 * 96 * 3, 6 * 192 * 3] * 2
    other = GptOss()
    other.tensors["model.layers.0.mlp.experts.down_proj_scales"][3, 5, 1] = 255
    other.write(plain.parent / "broken")
    (finding,) = run_json("check", plain.parent / "broken", expected=FINDINGS)["findings"]
    assert (finding["id"], finding["tensor"]) == ("NF-C009", "model.layers.0.mlp.experts.down_proj")


def test_diff_finds_the_same_values(directory, plain):
    run_ok("diff", directory, plain)
    changed = plain.parent / "changed"
    other = GptOss()
    other.tensors["model.layers.0.mlp.experts.down_proj_scales"][3, 5, 1] ^= 1
    other.write(changed)
    document = run_json("diff", plain, changed, expected=FINDINGS)
    different = [t["name"] for t in document["tensors"] if t["status"] == "different"]
    assert different == ["model.layers.0.mlp.experts.down_proj"]


def test_quantize_refuses_it(directory, tmp_path):
    result = run("quantize", directory, tmp_path / "out", "--to", "nvfp4")
    assert result.returncode == USAGE and "dequantize the checkpoint first" in result.stderr
    result = run("quantize", directory, tmp_path / "out", "--to", "mxfp4-gpt-oss")
    assert result.returncode == USAGE and "written by conversions only" in result.stderr
    assert not (tmp_path / "out").exists()
    assert "mxfp4-gpt-oss" not in run_ok("quantize", "--help").stdout


def test_moe_run_computes_the_layer(directory, plain, tmp_path):
    rows = bf16(np.random.default_rng(3).normal(size=(40, MODEL.hidden)))
    activations = tmp_path / "rows.safetensors"
    write_safetensors(activations, {"hidden_states": ("BF16", list(rows.shape), rows.tobytes())})
    arguments = ["moe", "run", directory, "--layer", 1, "--activations", activations,
                 "--min-time", 0]  # fmt: skip
    alone = run_json(*arguments)
    assert (alone["stored_format"], alone["modes"][0]["mode"]) == ("mxfp4", "mxfp4_bf16")
    # The bias of the router is in the logits that the command computes.
    best = np.argsort(-MODEL.logits(1, widened(rows)), -1, kind="stable")[:, :2]
    assert alone["load"]["tokens_per_expert"] == np.bincount(best.ravel(), minlength=6).tolist()
    both = run_json(*arguments, "--reference", plain, "--mode", "all")
    assert [row["mode"] for row in both["modes"]] == ["mxfp4_mxfp8", "mxfp4_bf16", "mxfp4_fp8",
                                                      "mxfp4_fp8_token", "mxfp4_int8"]
    bounds = {"mxfp4_bf16": 4e-3, "mxfp4_fp8": 0.08, "mxfp4_mxfp8": 0.08,
              "mxfp4_fp8_token": 0.08, "mxfp4_int8": 0.02}
    for row in both["modes"]:
        assert row["error_to_unquantized"]["rel"] < bounds[row["mode"]], row
        assert row["error_to_fp64"]["rel"] < 2e-2, row


def test_a_missing_half_is_named(tmp_path):
    model = GptOss()
    del model.tensors["model.layers.1.mlp.experts.down_proj_scales"]
    result = run("inspect", model.write(tmp_path / "model"))
    assert result.returncode == INPUT
    assert "misses its companion 'model.layers.1.mlp.experts.down_proj_scales'" in result.stderr
