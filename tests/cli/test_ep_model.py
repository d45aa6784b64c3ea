"""`narrowfloat-bench ep-model`: its inputs are what was measured, and so nearly are its times."""

import json

import pytest
from conftest import ROOT, USAGE, run, run_json, run_ok

INPUTS = json.loads((ROOT / "src/bench_cli/ep_model.json").read_text())
MEASURED = sorted((ROOT / "bench/results").glob("*/experts/*.json"))


def predict(*options):
    return run_json("ep-model", *options)["cases"]


def test_inputs_are_those_of_their_sources():
    for gpu, inputs in INPUTS["gpus"].items():
        for layer in inputs["layers"]:
            document = json.loads((ROOT / layer["source"]).read_text())
            assert gpu in document["machine"].lower()
            assert [document[key] for key in ("shape", "hidden", "experts", "top_k")] == [
                layer[key] for key in ("model", "hidden", "experts", "top_k")]
            measured = {case["tokens"]: case for case in document["cases"]
                        if case["mode"] == layer["mode"]}
            for case in layer["cases"]:
                found = measured[case["tokens"]]
                assert case["experts_hit"] == found["experts_hit"]
                assert case["us"] == pytest.approx(found["median_seconds"] * 1e6, abs=0.051)
        for link in ("host_link", "network", "quantize"):
            assert inputs[link]["source"] and inputs[link]["measured_by"]
            assert inputs[link]["gb_per_s"] > 0 and inputs[link]["latency_us"] > 0


@pytest.mark.parametrize("path", MEASURED, ids=lambda path: "/".join(path.parts[-3:]))
def test_predictions_are_near_measurements(path):
    """Every measurement on several GPUs; docs/parallel.md says how near."""
    document = json.loads(path.read_text())
    gpu = next(gpu for gpu in INPUTS["gpus"] if gpu in document["machine"]["name"].lower())
    compared = 0
    for payload, order in sorted({(case["payload"], case["order"]) for case in document["cases"]}):
        measured = [case for case in document["cases"]
                    if (case["payload"], case["order"]) == (payload, order)]
        found = predict("--gpu", gpu, "--shape", document["shape"], "--mode", document["mode"],
                        "--ranks", document["ranks"], "--payload",
                        {"fp8_1x128": "fp8_group"}.get(payload, payload), "--order", order,
                        "--tokens", ",".join(str(case["tokens"]) for case in measured))
        for case, prediction in zip(measured, found, strict=True):
            exchange = prediction["dispatch_us"] + prediction["combine_us"]
            assert exchange == pytest.approx(case["exchange_us"], rel=0.15), case
            # One draw decides how many experts so few tokens hit on the slowest rank.
            near = 0.25 if case["tokens"] == 1 else 0.2
            assert prediction["total_us"] == pytest.approx(case["layer_us"], rel=near), case
            compared += 1
    assert compared == len(document["cases"])


def test_formulas():
    cases = predict("--gpu", "h200", "--ranks", "2,8,64", "--tokens", "1,1024")
    by_ranks = {(case["ranks"], case["tokens"]): case for case in cases}
    link, network = (INPUTS["gpus"]["h200"][name] for name in ("host_link", "network"))
    row = 7168 * 2 + 8 * 8  # With an id and a weight for each slot.
    for ranks in (2, 8):
        case = by_ranks[ranks, 1024]
        others = (ranks - 1) * (1 - (1 - 1 / ranks) ** 8)
        assert case["ranks_of_token"] == pytest.approx(others)
        wanted = link["latency_us"] + 1024 * others * row / link["gb_per_s"] * 1e-3
        assert case["dispatch_us"] == pytest.approx(wanted)
    # 56 of 63 others are on other hosts.
    away = 1024 * 56 * (1 - (1 - 1 / 64) ** 8) * row / network["gb_per_s"] * 1e-3
    assert by_ranks[64, 1024]["dispatch_us"] == pytest.approx(network["latency_us"] + away)
    for case in cases:
        assert case["local_experts"] == 256 // case["ranks"] >= case["experts_hit"] > 0
        parts = case["dispatch_us"] + case["layer_us"] + case["combine_us"]
        assert case["total_us"] == pytest.approx(parts)
        rate = case["ranks"] * case["tokens"] / case["total_us"] * 1e6
        assert case["tokens_per_second"] == pytest.approx(rate)
    # Order topk returns a row for each slot of another rank, k (R - 1) / R.
    topk = predict("--gpu", "h200", "--ranks", 8, "--tokens", 1024, "--order", "topk")[0]
    returned = 1024 * 7 * 7168 * 2 / link["gb_per_s"] * 1e-3
    assert topk["combine_us"] == pytest.approx(link["latency_us"] + returned)
    # Fewer bytes travel quantized, after a kernel that quantizes; the same results come back.
    coded = predict("--gpu", "h200", "--ranks", 8, "--tokens", 1024, "--mode", "fp8_block",
                    "--payload", "fp8_group")[0]
    quantize = INPUTS["gpus"]["h200"]["quantize"]
    row = 7168 * (1 + 1 / 32) + 8 * 8
    wanted = link["latency_us"] + 1024 * 7 * (1 - (7 / 8) ** 8) * row / link["gb_per_s"] * 1e-3
    wanted += quantize["latency_us"] + 1024 * 7168 * 2 / quantize["gb_per_s"] * 1e-3
    assert coded["dispatch_us"] == pytest.approx(wanted)
    assert coded["combine_us"] == by_ranks[8, 1024]["combine_us"]


def test_output_and_errors():
    table = run_ok("ep-model", "--ranks", "2,64", "--tokens", "16").stdout.splitlines()
    assert table[0].startswith("predicted: deepseek-v3 in nvfp4_bf16 on h100") and len(table) == 5
    rows = run_ok("ep-model", "--ranks", "2,64", "--tokens", "16", "--csv").stdout.splitlines()
    assert [line.split(",")[0] for line in rows] == ["ranks", "2", "64"]
    for options, text in ((("--gpu", "b200"), "--gpu: got 'b200', expected one of h100, h200"),
                          (("--shape", "gpt-4"), "there are deepseek-v3 fp8_block, "),
                          (("--payload", "fp8_group"), "--payload: got 'fp8_group', expected bf16 "
                           "for --mode nvfp4_bf16"),
                          (("--mode", "fp8_block", "--payload", "mxfp8"), "--payload: got 'mxfp8', "
                           "expected bf16 or fp8_group for --mode fp8_block"),
                          (("--order", "slot"), "expected one of rank, topk"),
                          (("--ranks", "1"), "expected numbers from 2 to 64"),
                          (("--ranks", "65"), "numbers from 2 to 64")):
        result = run("ep-model", *options)
        assert result.returncode == USAGE and text in result.stderr, result.stderr
