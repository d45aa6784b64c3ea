"""`narrowfloat moe tune` and `moe explain`, and files of token tiles; no test looks at a time."""

import json

import pytest
from conftest import INPUT, TINY_MOE, UNSUPPORTED, USAGE, run, run_json, run_ok

SHAPE = ["--shape", "64,32,8,2"]
TUNE = ["moe", "tune", *SHAPE, "--min-time", "0"]
EXPLAIN = ["moe", "explain", *SHAPE]


def tuning_for(document, **fields):
    """An entry for the layer that `moe tune` measured, as if 32 rows had been the fastest."""
    entry = {"machine": document["machine"], "version": document["version"], "mode": "bf16",
             "activation": "swiglu", "hidden": 64, "inter": 32,
             "slots": 2, "experts": 8, "local_experts": 8,
             "first_tokens": 4, "last_tokens": 7, "token_tile": 32, "rule_tile": 8, "us": 1.5,
             "rule_us": 3.0}
    return {"format": "narrowfloat moe tuning", "format_version": 2, "entries": [entry | fields]}


@pytest.fixture
def tuning_file(tmp_path):
    path = tmp_path / "tuning.json"
    path.write_text(json.dumps(tuning_for(run_json(*TUNE, "--tokens", "1"))))
    return path


def test_candidates_of_every_number_of_tokens_are_measured(tmp_path):
    path = tmp_path / "tuned.json"
    document = run_json(*TUNE, "--tokens", "300,1,9,1", "--out", path, "--mode", "bf16",
                        "--mode", "mxfp4_bf16")
    cases = document["cases"]
    assert [(case["mode"], case["tokens"]) for case in cases] == [
        (mode, tokens) for mode in ("bf16", "mxfp4_bf16") for tokens in (1, 9, 300)]
    for case in cases:
        tiles = [tile["token_tile"] for tile in case["tiles"]]
        assert case["rule_tile"] in tiles and case["best_tile"] in tiles
        assert tiles == sorted(tiles) and case["correct"]
        assert all(tile["us"] > 0 and tile["gain"] > 0 for tile in case["tiles"])
        if case["tuned"]:
            assert case["rule_us"] >= document["min_gain"] * case["best_us"]
        else:
            assert case["best_tile"] == case["rule_tile"]
    assert [case["rule_tile"] for case in cases[:3]] == [8, 8, 128]
    written = json.loads(path.read_text())
    assert len(written["entries"]) == document["entries"] == sum(case["tuned"] for case in cases)
    assert [file.name for file in tmp_path.iterdir()] == ["tuned.json"]
    for entry in written["entries"]:
        # The rule's tile is the power of two at or above a quarter of the tokens.
        assert entry["first_tokens"] <= entry["last_tokens"] <= 4 * entry["rule_tile"]
    # A run takes what was written.
    run_json("moe", "bench", *SHAPE, "--tokens", "9", "--min-time", "0", "--tuning", path)


def test_a_tuning_is_not_overwritten(tmp_path):
    path = tmp_path / "tuned.json"
    path.write_text("mine")
    result = run(*TUNE, "--tokens", "1", "--out", path)
    assert result.returncode == USAGE and "--force" in result.stderr
    assert path.read_text() == "mine"
    run_ok(*TUNE, "--tokens", "1", "--out", path, "--force")
    assert json.loads(path.read_text())["format"] == "narrowfloat moe tuning"


@pytest.mark.parametrize("target,arguments", [
    ("absent/tuned.json", []),
    ("", ["--force"]),
])
def test_a_target_that_cannot_be_made_shows_before_a_run(tmp_path, target, arguments):
    result = run(*TUNE, "--tokens", "1", "--out", tmp_path / target, *arguments)
    assert result.returncode == INPUT and "--out" in result.stderr and result.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_tune_prints_a_table():
    text = run_ok(*TUNE, "--tokens", "2").stdout
    for word in ("64,32,8,2 on cpu", "rule_tile", "best_us", "8: "):
        assert word in text


def test_a_layer_takes_the_tiles_of_a_file(tuning_file):
    arguments = ["moe", "bench", *SHAPE, "--tokens", "3,4,7,8", "--min-time", "0"]
    assert [case["token_tile"] for case in run_json(*arguments)["cases"]] == [8] * 4
    tuned = run_json(*arguments, "--tuning", tuning_file)["cases"]
    assert [case["token_tile"] for case in tuned] == [8, 32, 32, 8]
    assert all(case["correct"] for case in tuned)
    fixed = run_json(*arguments, "--tuning", tuning_file, "--token-tile", "16")["cases"]
    assert [case["token_tile"] for case in fixed] == [16] * 4


def test_explain_says_who_chose_the_tile(tuning_file):
    document = run_json(*EXPLAIN, "--tokens", "4,9", "--tuning", tuning_file)
    assert [(case["tokens"], case["token_tile"]) for case in document["cases"]] == [(4, 32), (9, 8)]
    chosen = [case["stages"][0]["chosen"] for case in document["cases"]]
    assert chosen == ["tuned", "rule"]
    assert "1 for 4 to 7 tokens" in document["cases"][1]["stages"][0]["candidates"][1]["reason"]
    case = run_json(*EXPLAIN, "--token-tile", "64", "--tuning", tuning_file)["cases"][0]
    assert case["stages"][0]["chosen"] == "config" and case["token_tile"] == 64


@pytest.mark.parametrize("fields,expected", [
    ({"machine": "another"}, "1 for machine 'another'"),
    ({"version": "0.0.0"}, "1 for version 0.0.0"),
    ({"mode": "mxfp8"}, "1 for mode mxfp8"),
    ({"activation": "relu2"}, "1 for activation relu2"),
    ({"hidden": 128}, "1 for hidden size 128, intermediate 32"),
    ({"local_experts": 4}, "1 for 4 of 8 experts, 2 a token"),
])
def test_entries_for_something_else_are_left_alone(tmp_path, fields, expected):
    path = tmp_path / "tuning.json"
    path.write_text(json.dumps(tuning_for(run_json(*TUNE, "--tokens", "1"), **fields)))
    case = run_json(*EXPLAIN, "--tokens", "4", "--tuning", path)["cases"][0]
    assert case["token_tile"] == 8
    assert expected in case["stages"][0]["candidates"][1]["reason"]


@pytest.mark.parametrize("change,expected", [
    (lambda d: d.pop("format"), "format"),
    (lambda d: d.update(format_version=3), "format_version"),
    (lambda d: d.update(format_version=1), "for which activation"),
    (lambda d: d["entries"][0].update(activation="swish"), "swish"),
    (lambda d: d["entries"][0].pop("machine"), "machine is missing"),
    (lambda d: d["entries"][0].update(token_tile=24), "powers of two"),
    (lambda d: d["entries"][0].update(us=2.99), "3 %"),
    (lambda d: d["entries"].append(d["entries"][0]), "same numbers of tokens"),
    (lambda d: d["entries"][0].update(extra=1), "unknown members"),
])
@pytest.mark.parametrize("command", [["bench", "--min-time", "0"], ["explain"]])
def test_malformed_files_are_refused(tmp_path, command, change, expected):
    document = tuning_for({"machine": "a", "version": "b"})
    change(document)
    path = tmp_path / "tuning.json"
    path.write_text(json.dumps(document))
    result = run("moe", *command, *SHAPE, "--tokens", "4", "--tuning", path)
    assert result.returncode == INPUT and result.stdout == ""
    assert expected in result.stderr


def test_a_missing_file_is_named():
    result = run(*EXPLAIN, "--tuning", "none.json")
    assert result.returncode == INPUT and "none.json" in result.stderr


def test_explain_lists_every_stage_and_why():
    case = run_json(*EXPLAIN, "--mode", "mxfp8")["cases"][0]
    ops = [stage["op"] for stage in case["stages"]]
    assert ops == ["token_tile", "route", "permute", "quantize_activations", "grouped_gemm",
                   "activation", "grouped_gemm", "combine"]
    for stage in case["stages"]:
        names = [candidate["name"] for candidate in stage["candidates"]]
        assert stage["chosen"] in names
        assert all(candidate["reason"] for candidate in stage["candidates"]
                   if candidate["name"] != stage["chosen"])
    text = run_ok(*EXPLAIN, "--mode", "mxfp8", "--tokens", "1,64").stdout
    assert "64 tokens on cpu" in text and "runs on CUDA devices only" in text or "cpu_" in text


def test_explain_prints_the_plan_with_its_buffers():
    case = run_json(*EXPLAIN, "--mode", "mxfp8")["cases"][0]
    plan = case["plan"]
    assert [(stage["op"], stage["implementation"]) for stage in plan["stages"]] == [
        (stage["op"], stage["chosen"]) for stage in case["stages"][1:]]
    buffers = {buffer["name"]: buffer for buffer in plan["buffers"]}
    for buffer in buffers.values():
        assert 0 <= buffer["offset"] and buffer["bytes"] >= 0
        assert buffer["offset"] + buffer["bytes"] <= plan["workspace_bytes"]
    written = set()
    for stage in plan["stages"]:
        read = {name for name in stage["reads"] if buffers[name]["bytes"] > 0}
        assert read <= written | {"first_gemm_scratch", "second_gemm_scratch"}, stage
        written |= set(stage["writes"])
    text = run_ok(*EXPLAIN, "--mode", "mxfp8").stdout
    assert f"workspace: {plan['workspace_bytes']} bytes" in text
    assert all((name in text) == (buffer["bytes"] > 0) for name, buffer in buffers.items())


@pytest.mark.parametrize("arguments,code,expected", [
    (["tune"], USAGE, "--shape"),
    (["tune", *SHAPE, "--tokens", "0"], USAGE, "--tokens"),
    (["tune", *SHAPE, "--routing", TINY_MOE / "calibration/activations.safetensors"], INPUT, "8"),
    (["tune", "--shape", "gpt-oss-20b", "--max-memory", "250M", "--tokens", "1"], USAGE,
     "a tuning is for all of them"),
    (["explain", *SHAPE, "--mode", "int3"], USAGE, "fp8_block"),
    (["explain", *SHAPE, "--token-tile", "3"], USAGE, "power of two"),
])
def test_wrong_usage(arguments, code, expected):
    result = run("moe", *arguments)
    assert result.returncode == code, result.stderr
    assert expected in result.stderr and result.stdout == ""


def test_without_a_gpu_tuning_one_is_refused():
    if run_json("doctor")["gpus"]:
        pytest.skip("this machine has a GPU")
    assert run(*TUNE, "--device", "cuda").returncode == UNSUPPORTED
