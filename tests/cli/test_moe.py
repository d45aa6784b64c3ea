"""`narrowfloat-bench moe run` on the small model, `moe bench` on made-up layers, `moe gemm`."""

import csv
import io
import json
import shutil
import time

import numpy as np
import pytest
from conftest import (INPUT, TINY_MOE, USAGE, read_safetensors, run, run_json, run_ok,
                      write_safetensors)

ACTIVATIONS = TINY_MOE / "calibration/activations.safetensors"
MODES = ["bf16", "fp8_tensor", "fp8_block", "mxfp8", "mxfp4_mxfp8", "mxfp4_bf16", "mxfp4_fp8",
         "nvfp4", "nvfp4_per_token", "nvfp4_bf16", "nvfp4_fp8_exact", "nvfp4_fp8_rounded",
         "mxfp4_fp8_token", "nvfp4_fp8_token", "mxfp4_int8", "nvfp4_int8"]
# Largest relative error against fp64 on the same inputs: all rows, worst row (moe spec 12.3, G4).
TOLERANCE = {
    "bf16": (3e-3, 1e-2), "mxfp4_bf16": (3e-3, 1e-2), "nvfp4_bf16": (3e-3, 1e-2),
    "fp8_tensor": (2e-2, 6e-2), "fp8_block": (2e-2, 6e-2), "mxfp4_fp8": (2e-2, 6e-2),
    "nvfp4_fp8_rounded": (2e-2, 6e-2), "mxfp4_fp8_token": (2e-2, 6e-2),
    "nvfp4_fp8_token": (2e-2, 6e-2), "mxfp8": (5e-3, 4e-2), "mxfp4_mxfp8": (5e-3, 4e-2),
    "mxfp4_int8": (3e-3, 1e-2), "nvfp4_int8": (3e-3, 1e-2),
    "nvfp4": (1.5e-2, 8e-2), "nvfp4_per_token": (3e-2, 1.5e-1), "nvfp4_fp8_exact": (5e-3, 2e-2)}
# The cost of quantization on this layer, with room: relative error to unquantized weights.
COST = {"bf16": (1e-3, 5e-3), "fp8_tensor": (0.01, 0.08), "fp8_block": (0.01, 0.08),
        "mxfp8": (0.01, 0.08)}
FP4_COST = (0.05, 0.35)
BENCH = ["moe", "bench", "--min-time", "0"]


@pytest.fixture(scope="module")
def every_mode():
    return run_json("moe", "run", TINY_MOE, "--layer", 1, "--mode", "all", "--tokens", 96,
                    "--min-time", 0)


def test_run_in_every_mode_is_close_to_fp64(every_mode):
    assert [row["mode"] for row in every_mode["modes"]] == MODES
    for row in every_mode["modes"]:
        rel, worst = TOLERANCE[row["mode"]]
        assert row["error_to_fp64"]["rel"] <= rel, row
        assert row["error_to_fp64"]["row"] <= worst, row


def test_run_in_every_mode_costs_what_the_format_costs(every_mode):
    for row in every_mode["modes"]:
        low, high = COST.get(row["mode"], FP4_COST)
        assert low < row["error_to_unquantized"]["rel"] < high, row
        assert row["error_to_unquantized"]["row"] >= row["error_to_unquantized"]["rel"]


def test_load_is_that_of_the_router_logits(every_mode):
    logits = read_safetensors(ACTIVATIONS)["layers.1.router_logits"][:96]
    best = np.argsort(-logits, -1, kind="stable")[:, :2]
    counts = np.bincount(best.ravel(), minlength=16)
    load = every_mode["load"]
    assert load["tokens_per_expert"] == counts.tolist()
    assert (load["min"], load["max"], load["mean"]) == (counts.min(), counts.max(), 12)
    assert load["hit"] == (counts > 0).sum()


def test_work_is_counted_by_the_formulas(every_mode):
    for row in every_mode["modes"]:
        assert row["flops"] == 2 * 96 * 2 * 3 * 256 * 128
        assert row["weight_bytes"] == every_mode["load"]["hit"] * 3 * 256 * 128 * \
            row["bits_per_weight"] / 8
        assert row["gflop_per_second"] == pytest.approx(
            row["flops"] / row["median_seconds"] / 1e9)


def test_logits_are_computed_where_the_file_has_none(tmp_path):
    tensors = read_safetensors(ACTIVATIONS)
    path = tmp_path / "rows.safetensors"
    rows = tensors["layers.2.hidden_states"][:40]
    write_safetensors(path, {"hidden_states": ("F32", list(rows.shape), rows.tobytes())})
    arguments = ["moe", "run", TINY_MOE, "--layer", 2, "--min-time", 0, "--tokens", 40]
    document = run_json(*arguments, "--activations", path)
    stored = run_json(*arguments)
    assert not document["stored_logits"] and stored["stored_logits"]
    assert document["load"] == stored["load"]
    assert document["modes"][0]["mode"] == "bf16"
    # The router's weights differ in the last bits, and with them the results.
    assert document["modes"][0]["error_to_unquantized"]["rel"] == pytest.approx(
        stored["modes"][0]["error_to_unquantized"]["rel"], rel=1e-2)


def test_a_recorded_routing_can_be_measured(tmp_path, every_mode):
    path = tmp_path / "routing.safetensors"
    run_json("moe", "run", TINY_MOE, "--layer", 1, "--tokens", 96, "--min-time", 0,
             "--routing-out", path)
    assert b"layers.1.topk_ids" in path.read_bytes()[:200]
    arguments = [*BENCH, "--shape", "256,128,16,2", "--tokens", "96", "--routing", path]
    case = run_json(*arguments)["cases"][0]
    assert case["correct"] and case["experts_hit"] == every_mode["load"]["hit"]
    assert case["largest_load"] == every_mode["load"]["max"]
    # Another number of experts a token is no scaled routing, but an error.
    refused = run(*BENCH, "--shape", "256,128,16,4", "--tokens", "96", "--routing", path)
    assert refused.returncode == INPUT and "[tokens, 4]" in refused.stderr


def test_a_quantized_model_needs_its_reference(quantized):
    arguments = ["moe", "run", quantized, "--layer", 0, "--activations", ACTIVATIONS, "--tokens",
                 50, "--min-time", 0]
    alone = run_json(*arguments)
    assert alone["stored_format"] == "nvfp4"
    assert [row["mode"] for row in alone["modes"]] == ["nvfp4_bf16"]
    assert alone["modes"][0]["error_to_unquantized"] is None
    assert "--reference" in run_ok(*arguments).stdout
    both = run_json(*arguments, "--reference", TINY_MOE, "--mode", "all")
    assert [row["mode"] for row in both["modes"]] == [mode for mode in MODES if "nvfp4" in mode]
    # Quantized on the fly or stored: the same weights.
    fresh = run_json("moe", "run", TINY_MOE, "--layer", 0, "--tokens", 50, "--min-time", 0,
                     "--mode", "nvfp4_bf16")
    stored = next(row for row in both["modes"] if row["mode"] == "nvfp4_bf16")
    assert stored["error_to_unquantized"]["rel"] == pytest.approx(
        fresh["modes"][0]["error_to_unquantized"]["rel"], rel=0.05)


def test_run_prints_a_table_for_people():
    text = run_ok("moe", "run", TINY_MOE, "--layer", 3, "--tokens", 20, "--min-time", 0, "--mode",
                  "nvfp4", "--mode", "mxfp8").stdout
    for word in ("16 experts, top 2", "20 tokens", "static scales", "tokens per expert",
                 "experts by tokens", "nvfp4", "mxfp8", "gflop_per_s"):
        assert word in text, word


def test_run_csv_is_the_table():
    text = run_ok("moe", "run", TINY_MOE, "--layer", 3, "--tokens", 20, "--min-time", 0, "--csv",
                  "--mode", "mxfp8").stdout
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [row["mode"] for row in rows] == ["mxfp8"]
    assert float(rows[0]["median_ms"]) > 0


@pytest.mark.parametrize("arguments,code,expected", [
    (["--layer", 9], USAGE, "9"),
    (["--layer", 0, "--activations", "none.safetensors"], INPUT, "none.safetensors"),
])
def test_run_names_what_is_wrong(arguments, code, expected):
    result = run("moe", "run", TINY_MOE, *arguments)
    assert result.returncode == code
    assert expected in result.stderr


def test_run_without_activations_says_how_to_name_them(tmp_path):
    for name in ("model.safetensors", "config.json"):
        shutil.copy(TINY_MOE / name, tmp_path)
    result = run("moe", "run", tmp_path, "--layer", 0)
    assert result.returncode == USAGE
    assert "--activations" in result.stderr


def test_run_refuses_rows_of_another_width(tmp_path):
    path = tmp_path / "rows.safetensors"
    write_safetensors(path, {"layers.0.hidden_states": ("F32", [2, 8], bytes(64))})
    result = run("moe", "run", TINY_MOE, "--layer", 0, "--activations", path)
    assert result.returncode == INPUT
    assert "[tokens, 256]" in result.stderr


def test_bench_in_every_mode_is_correct():
    document = run_json(*BENCH, "--shape", "256,128,8,2", "--tokens", "1,33", "--mode", "all")
    assert [(case["mode"], case["tokens"]) for case in document["cases"]] == [
        (mode, tokens) for mode in MODES for tokens in (1, 33)]
    for case in document["cases"]:
        assert case["correct"] and case["checked_tokens"] == case["tokens"]
        assert case["local_slots"] == case["tokens"] * 2
        assert case["flops"] == 2 * case["local_slots"] * 3 * 256 * 128
        rel, worst = TOLERANCE[case["mode"]]
        assert case["error_to_fp64"]["row"] <= worst
        assert case["error_to_fp64"]["rel"] <= (worst if case["tokens"] == 1 else rel)
    assert document["notes"] == []


def test_bench_rests_before_each_case():
    arguments = [*BENCH, "--shape", "64,64,4,2", "--mode", "mxfp4_bf16", "--tokens", "1,2",
                 "--rest"]
    begin = time.monotonic()
    assert run_json(*arguments, "0.4")["rest_seconds"] == 0.4
    assert time.monotonic() - begin >= 0.8
    for wrong in ("nan", "-1"):
        result = run(*arguments, wrong)
        assert result.returncode == USAGE and "--rest" in result.stderr


def test_bench_leaves_out_modes_that_cannot_have_the_shape():
    document = run_json(*BENCH, "--shape", "96,32,4,2", "--tokens", "3", "--mode", "all")
    modes = [case["mode"] for case in document["cases"]]
    assert "fp8_block" not in modes and len(modes) == len(MODES) - 1
    assert any("fp8_block" in note and "128" in note for note in document["notes"])


def test_bench_knows_the_published_shapes():
    document = run_json(*BENCH, "--shape", "gpt-oss-20b", "--tokens", "1", "--max-memory", "250M")
    assert (document["hidden"], document["inter"], document["experts"], document["top_k"]) == (
        2880, 2880, 32, 4)
    assert document["activation"] == "swiglu" and document["gate_order"] == "interleaved"
    assert document["bias"]
    case = document["cases"][0]
    assert case["mode"] == "mxfp4_bf16" and case["correct"]
    assert 4 <= case["experts"] < 32
    assert f"{case['experts']} of 32 experts" in document["notes"][0]


def test_ranks_share_the_slots():
    arguments = [*BENCH, "--shape", "128,128,16,4", "--tokens", "50", "--mode", "nvfp4_bf16"]
    alone = run_json(*arguments)["cases"][0]
    assert alone["local_slots"] == 200 and alone["experts_hit"] == 16
    parts = [run_json(*arguments, "--ep", f"{rank}/4")["cases"][0] for rank in range(4)]
    assert [part["expert_offset"] for part in parts] == [0, 4, 8, 12]
    assert all(part["local_experts"] == 4 and part["correct"] for part in parts)
    assert sum(part["local_slots"] for part in parts) == 200
    assert sum(part["flops"] for part in parts) == alone["flops"]


def test_rates_under_ep_are_sums_over_all_runs():
    # Many runs have no slot here: a median that is one of theirs goes with no mean of bytes.
    document = run_json("moe", "bench", "--min-time", "0.02", "--shape", "1024,1024,32,2",
                        "--tokens", "1", "--ep", "0/4")
    case = document["cases"][0]
    assert case["runs"] > 0 and case["total_seconds"] >= 0.02
    assert 0 < case["local_slots"] < 2
    for amount, rate in (("weight_bytes", "weight_gb_per_second"), ("flops", "gflop_per_second")):
        assert case[rate] == pytest.approx(
            case[amount] * case["runs"] / case["total_seconds"] / 1e9)
    assert case["weight_gb_per_second"] < 50 * case["read_gb_per_second"]


def test_only_tokens_with_local_slots_are_checked(ids_file):
    arguments = [*BENCH, "--shape", "64,32,8,2", "--mode", "mxfp8", "--routing", ids_file]
    # Experts 2 and 3 are rank 1's: all four tokens; 0 and 1 rank 0's: all but the third.
    for rank, checked in ((0, 3), (1, 4)):
        case = run_json(*arguments, "--tokens", "4", "--ep", f"{rank}/4")["cases"][0]
        assert (case["checked_tokens"], case["correct"]) == (checked, True)
    # One token a run, the last of which may be the third.
    case = run_json(*arguments, "--tokens", "1", "--ep", "0/4")["cases"][0]
    assert (case["checked_tokens"], case["correct"]) == (1, True)
    assert case["error_to_fp64"] is not None


def test_a_rank_without_slots_is_not_checked(ids_file):
    arguments = [*BENCH, "--shape", "64,32,8,2", "--mode", "mxfp8", "--routing", ids_file,
                 "--tokens", "4", "--ep", "3/4"]
    case = run_json(*arguments)["cases"][0]
    assert (case["local_slots"], case["checked_tokens"]) == (0, 0)
    assert case["correct"] is None and case["error_to_fp64"] is None
    row = next(csv.DictReader(io.StringIO(run_ok(*arguments, "--csv").stdout)))
    assert (row["result"], row["rel_fp64"]) == ("not checked", "-")


@pytest.mark.parametrize("named,expected", [
    (["nvfp4", "bf16", "bf16"], ["bf16", "nvfp4"]),
    (["all", "mxfp8"], MODES),
    (["mxfp8", "all"], MODES),
])
def test_modes_are_a_union_in_the_order_of_the_table(named, expected):
    modes = [word for mode in named for word in ("--mode", mode)]
    bench = run_json(*BENCH, "--shape", "128,128,4,2", "--tokens", "1", *modes)
    assert [case["mode"] for case in bench["cases"]] == expected
    layer = run_json("moe", "run", TINY_MOE, "--layer", 0, "--tokens", 2, "--min-time", 0, *modes)
    assert [row["mode"] for row in layer["modes"]] == expected


def test_zipf_loads_the_first_experts_most():
    loads = {}
    for routing in ("uniform", "zipf"):
        case = run_json(*BENCH, "--shape", "32,32,32,2", "--tokens", "400", "--mode", "bf16",
                        "--routing", routing)["cases"][0]
        loads[routing] = case["largest_load"]
    assert loads["uniform"] < 60 < 100 < loads["zipf"]


@pytest.fixture
def ids_file(tmp_path):
    path = tmp_path / "ids.safetensors"
    ids = np.array([[3, 1], [3, 0], [2, 3], [3, 1]], np.int32)
    write_safetensors(path, {"topk_ids": ("I32", [4, 2], ids.tobytes())})
    return path


def test_routing_of_a_file_is_followed(ids_file):
    document = run_json(*BENCH, "--shape", "64,32,8,2", "--tokens", "1,4", "--mode", "mxfp8",
                        "--routing", ids_file)
    assert [(case["experts_hit"], case["largest_load"]) for case in document["cases"]] == [
        (2, 1), (4, 4)]
    assert all(case["correct"] for case in document["cases"])


@pytest.mark.parametrize("shape,tokens,code,expected", [
    ("64,32,8,2", "5", USAGE, "routes 4 tokens"),
    ("64,32,8,3", "4", INPUT, "[tokens, 3]"),
    ("64,32,2,2", "4", USAGE, "routes to 4 experts, only 2 are in the layer"),
])
def test_routing_of_a_file_must_fit(ids_file, shape, tokens, code, expected):
    result = run(*BENCH, "--shape", shape, "--tokens", tokens, "--routing", ids_file)
    assert result.returncode == code, result.stderr
    assert expected in result.stderr


@pytest.mark.parametrize("kind", ["ids", "logits"])
def test_routing_of_a_file_needs_all_its_experts(tmp_path, kind):
    path = tmp_path / "routing.safetensors"
    if kind == "ids":
        ids = np.array([[31, 0]], np.int32)
        write_safetensors(path, {"topk_ids": ("I32", [1, 2], ids.tobytes())})
    else:
        write_safetensors(path, {"router_logits": ("F32", [1, 32], bytes(128))})
    arguments = [*BENCH, "--shape", "256,256,32,2", "--tokens", "1", "--routing", path]
    result = run(*arguments, "--max-memory", "8M")
    assert result.returncode == USAGE
    assert "routes to 32 experts, only" in result.stderr and "--max-memory" in result.stderr
    assert run_json(*arguments)["cases"][0]["correct"]


def test_of_a_long_file_only_the_needed_rows_are_read(tmp_path):
    path = tmp_path / "ids.safetensors"
    ids = np.full((5000, 2), (1, 2), np.int32)
    ids[300:] = 99
    write_safetensors(path, {"topk_ids": ("I32", [5000, 2], ids.tobytes())})
    arguments = [*BENCH, "--shape", "64,32,4,2", "--routing", path]
    case = run_json(*arguments, "--tokens", "300")["cases"][0]
    assert case["correct"] and case["largest_load"] == 300
    # Input and output in bf16, and the ids.
    assert case["bytes"] - case["weight_bytes"] == 300 * (64 * 4 + 2 * 4)
    assert run(*arguments, "--tokens", "301").returncode == USAGE


def test_bench_table_and_csv_have_the_same_columns():
    arguments = [*BENCH, "--shape", "64,32,4,2", "--tokens", "2", "--mode", "mxfp4_bf16"]
    text = run_ok(*arguments).stdout
    header = run_ok(*arguments, "--csv").stdout.splitlines()[0].split(",")
    assert all(column in text for column in header)
    assert "correct" in text and "memory is read at" in text
    assert json.loads(run_ok(*arguments, "--json").stdout)["cases"]


GEMM = ["moe", "gemm", "--min-time", "0"]


@pytest.mark.parametrize("mode", MODES)
def test_grouped_gemm_in_every_mode(mode):
    document = run_json(*GEMM, "--shape", "128,256,6", "--rows", "1,7,100", "--mode", mode)
    assert [case["rows"] for case in document["cases"]] == [1, 7, 100]
    for case in document["cases"]:
        assert case["correct"] and case["checked_rows"] == min(case["rows"], 8)
        # A result is rounded to bf16 once.
        assert 0 < case["error_to_fp64"]["row"] < 4e-3
        assert case["flops"] == 2 * case["rows"] * 128 * 256
        groups = min(case["rows"], 6)
        assert case["weight_bytes"] >= groups * 128 * 256 / 2
        assert case["weight_gb_per_second"] == pytest.approx(
            case["weight_bytes"] / case["median_us"] / 1e3)


def test_grouped_gemm_tables_and_tiles():
    arguments = [*GEMM, "--shape", "128,128,4", "--rows", "40"]
    assert run_json(*arguments)["cases"][0]["token_tile"] == 16
    case = run_json(*arguments, "--token-tile", "4", "--mode", "bf16", "--commit", "abc")
    assert case["cases"][0]["token_tile"] == 4 and case["commit"] == "abc"
    rows = list(csv.DictReader(io.StringIO(run_ok(*arguments, "--csv").stdout)))
    assert (rows[0]["groups"], rows[0]["result"]) == ("4", "correct")
    assert "correct" in run_ok(*arguments).stdout


@pytest.mark.parametrize("arguments,expected", [
    (["--shape", "128,128"], "N,K,G"),
    (["--shape", "128,128,5000", "--rows", "4"], "N,K,G"),
    (["--shape", "128,128,4"], "--rows"),
    (["--rows", "4"], "--shape"),
    (["--shape", "128,128,4", "--rows", "4", "--mode", "int3"], "fp8_block"),
    (["--shape", "128,100,4", "--rows", "4", "--mode", "fp8_block"], "128"),
])
def test_grouped_gemm_names_what_is_wrong(arguments, expected):
    result = run("moe", "gemm", *arguments)
    assert result.returncode == USAGE
    assert expected in result.stderr


STAGES = ["route", "permute", "quantize_input", "first_gemm", "activation", "second_gemm",
          "combine"]


def test_stages_are_timed_where_asked_for():
    arguments = [*BENCH, "--shape", "64,32,4,2", "--tokens", "3", "--mode", "mxfp8"]
    assert run_json(*arguments)["cases"][0]["stages"] == []
    stages = run_json(*arguments, "--stages")["cases"][0]["stages"]
    assert [stage["stage"] for stage in stages] == STAGES
    assert all(stage["median_seconds"] >= 0 for stage in stages)
    assert max(stages, key=lambda stage: stage["median_seconds"])["median_seconds"] > 0
    gemms = {stage["stage"] for stage in stages if stage["gflop_per_second"] > 0}
    assert gemms <= {"first_gemm", "second_gemm"}
    text = run_ok(*arguments, "--stages").stdout
    assert "percent_of_layer" in text and "second_gemm" in text
    assert "percent_of_layer" not in run_ok(*arguments).stdout


def test_the_floor_is_bytes_at_the_rate_of_memory():
    case = run_json(*BENCH, "--shape", "64,32,4,2", "--tokens", "3")["cases"][0]
    assert case["floor_seconds"] == pytest.approx(case["bytes"] / case["read_gb_per_second"] / 1e9)
    mean = case["total_seconds"] / case["runs"]
    assert case["percent_of_floor"] == pytest.approx(100 * case["floor_seconds"] / mean)
    assert case["p10_seconds"] <= case["median_seconds"] <= case["p90_seconds"]
    assert case["launches"] is None


def test_the_commit_and_the_tile_are_in_the_document():
    arguments = [*BENCH, "--shape", "64,32,4,2", "--tokens", "3"]
    assert run_json(*arguments)["commit"] == ""
    assert run_json(*arguments)["cases"][0]["token_tile"] == 8
    document = run_json(*arguments, "--commit", "v1-2-gabc", "--token-tile", "32")
    assert document["commit"] == "v1-2-gabc"
    assert document["cases"][0]["token_tile"] == 32 and document["cases"][0]["correct"]
    assert "power of two" in run(*arguments, "--token-tile", "24").stderr


@pytest.mark.parametrize("shape,experts", [("kimi-k2", 384), ("llama-4-scout", 16)])
def test_bench_routes_as_other_models_do(shape, experts):
    document = run_json(*BENCH, "--shape", shape, "--tokens", "1", "--mode", "nvfp4_bf16",
                        "--max-memory", "600M")
    case = document["cases"][0]
    assert case["correct"] and document["experts"] == experts


def test_fast_sums_are_within_the_tolerances_of_every_mode():
    document = run_json(*BENCH, "--shape", "384,256,8,2", "--mode", "all", "--tokens", "1,40",
                        "--fast-sums")
    assert document["fast_sums"]
    assert len(document["cases"]) == 2 * len(MODES)
    assert all(case["correct"] for case in document["cases"])


def test_the_device_is_named():
    arguments = [*BENCH, "--shape", "64,32,4,2", "--tokens", "2", "--mode", "mxfp4_bf16"]
    document = json.loads(run_ok(*arguments, "--device", "cpu", "--json").stdout)
    assert document["device"] == "cpu" and document["machine"] == document["cpu"]
    assert "threads" in run_ok(*arguments).stdout


@pytest.mark.parametrize("command", [
    ["moe", "run", str(TINY_MOE), "--layer", "1"],
    ["moe", "bench", "--shape", "64,32,4,2"],
])
def test_a_device_that_does_not_exist_is_refused(command):
    assert "cuda:N" in run(*command, "--device", "tpu").stderr
    result = run(*command, "--device", "cuda:77")
    assert result.returncode not in (0, 1)
    assert result.stdout == ""
