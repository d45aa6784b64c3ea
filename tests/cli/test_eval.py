"""`narrowfloat-bench eval` against a transformer in NumPy, after models/tiny-moe/README.md."""

import csv
import io
import json
import shutil

import numpy as np
import pytest
from conftest import INPUT, TINY_MOE, UNSUPPORTED, read_safetensors, run, run_json, run_ok

TEXT = TINY_MOE / "calibration/heldout.txt"
WINDOW = 512
MODES = ["bf16", "fp8_tensor", "fp8_block", "mxfp8", "mxfp4_mxfp8", "mxfp4_bf16", "mxfp4_fp8",
         "nvfp4", "nvfp4_per_token", "nvfp4_bf16", "nvfp4_fp8_exact", "nvfp4_fp8_rounded",
         "mxfp4_fp8_token", "nvfp4_fp8_token", "mxfp4_int8", "nvfp4_int8"]
BITS = {"fp8_tensor": 8, "mxfp8": 8.25, "mxfp4_bf16": 4.25, "nvfp4": 4.5, "bf16": 16, "fp32": 16}


def rms_norm(x, weight):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight


def rotate(heads):
    """RoPE with theta 10000, half split; heads is [positions, heads, 64]."""
    angle = np.arange(len(heads))[:, None] * 10000.0 ** (-np.arange(32) / 32)
    cos, sin = (f(angle).astype(np.float32)[:, None, :] for f in (np.cos, np.sin))
    first, second = heads[..., :32], heads[..., 32:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def attention(x, w):
    length = len(x)
    q = rotate(rms_norm((x @ w["q_proj.weight"].T).reshape(length, 4, 64), w["q_norm.weight"]))
    k = rotate(rms_norm((x @ w["k_proj.weight"].T).reshape(length, 2, 64), w["k_norm.weight"]))
    v = (x @ w["v_proj.weight"].T).reshape(length, 2, 64)
    hidden = np.triu(np.full((length, length), -np.inf, np.float32), 1)
    heads = [softmax(q[:, h] @ k[:, h // 2].T / 8 + hidden) @ v[:, h // 2] for h in range(4)]
    return np.concatenate(heads, -1) @ w["o_proj.weight"].T


def moe(x, w):
    p = softmax(x @ w["gate.weight"].T)
    out = np.zeros_like(x)
    best = np.argsort(-p, -1, kind="stable")[:, :2]
    for t, row in enumerate(x):
        for e in best[t]:
            gate = w[f"experts.{e}.gate_proj.weight"] @ row
            h = gate / (1 + np.exp(-gate)) * (w[f"experts.{e}.up_proj.weight"] @ row)
            out[t] += p[t, e] / p[t, best[t]].sum() * (w[f"experts.{e}.down_proj.weight"] @ h)
    return out


def window_bits(text, weights):
    """Sum of -log2 p over all bytes but the first."""
    def part(prefix):
        return {name.removeprefix(prefix): values for name, values in weights.items()
                if name.startswith(prefix)}
    x = weights["model.embed_tokens.weight"][text]
    for layer in range(4):
        w = part(f"model.layers.{layer}.")
        x = x + attention(rms_norm(x, w["input_layernorm.weight"]),
                          part(f"model.layers.{layer}.self_attn."))
        x = x + moe(rms_norm(x, w["post_attention_layernorm.weight"]),
                    part(f"model.layers.{layer}.mlp."))
    logits = rms_norm(x, weights["model.norm.weight"]) @ weights["lm_head.weight"].T
    p = softmax(logits.astype(np.float64))
    return -np.log2(p[np.arange(len(text) - 1), text[1:]]).sum()


def expected_bits_per_byte(num_bytes):
    weights = read_safetensors(TINY_MOE / "model.safetensors")
    text = np.frombuffer(TEXT.read_bytes()[:num_bytes], np.uint8)
    windows = [text[i:i + WINDOW] for i in range(0, num_bytes, WINDOW)]
    return sum(window_bits(w, weights) for w in windows) / sum(len(w) - 1 for w in windows)


@pytest.fixture(scope="module")
def small():
    """Every mode on four windows, the last one short."""
    return run_json("eval", TINY_MOE, "--bytes", 1700)


def test_fp32_is_what_numpy_computes(small):
    fp32 = small["modes"][0]
    assert fp32["mode"] == "fp32"
    assert fp32["bits_per_byte"] == pytest.approx(expected_bits_per_byte(1700), abs=2e-6)


def test_every_mode_has_a_row(small):
    assert [row["mode"] for row in small["modes"]] == ["fp32", *MODES]
    for row in small["modes"]:
        assert row["bits_per_weight"] == BITS.get(row["mode"], row["bits_per_weight"])


def test_what_was_scored_is_said(small):
    assert small["text_bytes"] == 413_761
    assert small["used_bytes"] == 1700
    assert small["scored_bytes"] == 1700 - 4
    assert small["window"] == WINDOW
    assert small["calibration"].endswith("calibration/activations.safetensors")


def test_differences_are_to_bf16_and_as_large_as_the_formats_are_coarse(small):
    rows = {row["mode"]: row for row in small["modes"]}
    reference = rows["bf16"]["bits_per_byte"]
    for row in rows.values():
        assert row["difference_to_bf16"] == row["bits_per_byte"] - reference
    # Few bytes: a coarse format may be better by chance.
    assert 0 < abs(rows["fp32"]["difference_to_bf16"]) < 1e-3
    for mode in ("fp8_tensor", "fp8_block", "mxfp8"):
        assert 0 < abs(rows[mode]["difference_to_bf16"]) < 0.01, mode
    for mode in ("mxfp4_bf16", "nvfp4_bf16", "nvfp4", "mxfp4_mxfp8"):
        assert 1e-4 < abs(rows[mode]["difference_to_bf16"]) < 0.05, mode


def test_fast_sums_score_as_exact_ones(small):
    document = run_json("eval", TINY_MOE, "--bytes", 1700, "--fast-sums", "--mode",
                        "fp32,mxfp8,nvfp4_bf16")
    assert document["fast_sums"] and not small["fast_sums"]
    exact = {row["mode"]: row["bits_per_byte"] for row in small["modes"]}
    fast = {row["mode"]: row["bits_per_byte"] for row in document["modes"]}
    assert fast.pop("fp32") == exact["fp32"]
    for mode, bits in fast.items():
        assert bits == pytest.approx(exact[mode], abs=2e-3), mode


def test_windows_are_independent_of_their_batch(tmp_path):
    """17 windows are more than go through the experts together."""
    last = tmp_path / "last.txt"
    last.write_bytes(TEXT.read_bytes()[16 * WINDOW:17 * WINDOW])
    bits = []
    for arguments in (["--bytes", 17 * WINDOW], ["--bytes", 16 * WINDOW], ["--text", last]):
        document = run_json("eval", TINY_MOE, *arguments, "--mode", "bf16")
        bits.append(document["modes"][0]["bits_per_byte"] * document["scored_bytes"])
    assert bits[0] == pytest.approx(bits[1] + bits[2], rel=1e-12)


def test_named_modes_come_with_bf16():
    document = run_json("eval", TINY_MOE, "--bytes", 64, "--mode", "mxfp8", "--mode", "fp32")
    assert [row["mode"] for row in document["modes"]] == ["fp32", "bf16", "mxfp8"]
    assert document["calibration"] is None


def test_threads_change_nothing():
    documents = [run_json("eval", TINY_MOE, "--bytes", 1100, "--mode", "nvfp4", "--threads", n)
                 for n in (1, 3)]
    scores = [[row["bits_per_byte"] for row in d["modes"]] for d in documents]
    assert scores[0] == scores[1]


def test_table_and_csv_have_the_same_rows():
    arguments = ["eval", TINY_MOE, "--bytes", "64", "--mode", "nvfp4"]
    text = run_ok(*arguments).stdout
    assert "the first 64 of 413761 bytes (--bytes all for the rest), 63 scored" in text
    assert "static scales" in text
    rows = list(csv.DictReader(io.StringIO(run_ok(*arguments, "--csv").stdout)))
    assert [row["mode"] for row in rows] == ["bf16", "nvfp4"]
    assert f"{float(rows[1]['difference_to_bf16']):+.5f}" in text


def copy_of_model(tmp_path, changes, activations=False):
    target = tmp_path / "model"
    target.mkdir()
    shutil.copy(TINY_MOE / "model.safetensors", target)
    config = json.loads((TINY_MOE / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps(config))
    if activations:
        shutil.copytree(TINY_MOE / "calibration", target / "calibration")
    return target


def test_without_activations_the_text_calibrates(tmp_path):
    model = copy_of_model(tmp_path, {})
    document = run_json("eval", model, "--text", TEXT, "--bytes", 600, "--mode", "nvfp4")
    assert document["calibration"] == "the first 512 bytes of the text"
    assert 1e-4 < abs(document["modes"][1]["difference_to_bf16"]) < 0.05


def test_a_mode_equals_the_model_with_its_weights_rounded(tmp_path, small):
    """MXFP4 weights are bf16 numbers, so bf16 experts on them are the mode mxfp4_bf16."""
    run_ok("quantize", TINY_MOE, tmp_path / "mxfp4", "--to", "mxfp4", "--exclude", "*self_attn*")
    run_ok("dequantize", tmp_path / "mxfp4", tmp_path / "plain", "--dtype", "bf16")
    plain = run_json("eval", tmp_path / "plain", "--text", TEXT, "--bytes", 1700, "--mode", "bf16")
    mode = next(row for row in small["modes"] if row["mode"] == "mxfp4_bf16")
    assert plain["modes"][0]["bits_per_byte"] == mode["bits_per_byte"]


@pytest.mark.parametrize("changes,expected", [
    ({"model_type": "mixtral"}, "model_type is 'mixtral'"),
    ({"vocab_size": 151936}, "vocab_size is 151936"),
    ({"attention_bias": True}, "attention_bias"),
    ({"rope_scaling": {"type": "linear"}}, "rope_scaling"),
    ({"decoder_sparse_step": 2}, "decoder_sparse_step"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, 'rope_type is "yarn"'),
    ({"rope_parameters": {"rope_theta": 1e4, "factor": 2}}, "rope_parameters.factor"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
])
def test_other_architectures_are_refused(tmp_path, changes, expected):
    result = run("eval", copy_of_model(tmp_path, changes, activations=True))
    assert result.returncode == UNSUPPORTED
    assert expected in result.stderr and "models/tiny-moe" in result.stderr


@pytest.mark.parametrize("changes,expected", [
    ({"head_dim": 32}, "q_norm.weight"),
    ({"num_key_value_heads": 3}, "num_key_value_heads"),
    ({"hidden_size": "wide"}, "hidden_size"),
    ({"num_hidden_layers": 5}, "model.layers.4."),
])
def test_a_config_that_does_not_fit_is_malformed(tmp_path, changes, expected):
    result = run("eval", copy_of_model(tmp_path, changes, activations=True))
    assert result.returncode == INPUT
    assert expected in result.stderr


def test_theta_may_be_among_the_rope_parameters(tmp_path):
    parameters = {"rope_type": "default", "rope_theta": 10000.0}
    model = copy_of_model(tmp_path, {"rope_theta": None, "rope_parameters": parameters})
    arguments = ("--text", TEXT, "--bytes", 600, "--mode", "bf16")
    newer, older = (run_json("eval", m, *arguments)["modes"] for m in (model, TINY_MOE))
    assert newer[0]["bits_per_byte"] == older[0]["bits_per_byte"]


def test_windows_are_bounded_whatever_a_model_could_take(tmp_path):
    model = copy_of_model(tmp_path, {"max_position_embeddings": 1 << 20})
    document = run_json("eval", model, "--text", TEXT, "--bytes", 600, "--mode", "bf16")
    assert document["window"] == 4096
    assert document["scored_bytes"] == 599


def test_a_quantized_model_is_refused(quantized):
    result = run("eval", quantized, "--text", TEXT)
    assert result.returncode == UNSUPPORTED
    assert "quantization_config" in result.stderr


def test_a_missing_text_is_named(tmp_path):
    result = run("eval", copy_of_model(tmp_path, {}))
    assert result.returncode == INPUT
    assert "heldout.txt" in result.stderr and "--text" in result.stderr


@pytest.mark.parametrize("text", ["/dev/zero", "."])
def test_a_text_must_be_a_regular_file(text):
    result = run("eval", TINY_MOE, "--text", text)
    assert result.returncode == INPUT
    assert text in result.stderr and "--text" in result.stderr
