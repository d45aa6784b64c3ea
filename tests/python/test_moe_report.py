"""bench/report.py on documents of Mixture-of-Experts layers: what tables say, not how fast
anything is."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REPORT = ROOT / "bench/report.py"
TARGETS = json.loads((ROOT / "bench/targets/h100_moe.json").read_text())
H100 = "NVIDIA H100 80GB HBM3"
EXPERT_BYTES = 3 * 7168 * 2048 * (1 + 4 / 128 / 128)
STAGES = ("route", "permute", "quantize_input", "first_gemm", "activation", "second_gemm",
          "combine")


def case(tokens, us, hit, **fields):
    weights = hit * EXPERT_BYTES
    return {"mode": "fp8_block", "tokens": tokens, "token_tile": 8, "local_experts": 256,
            "experts_hit": hit, "largest_load": 3, "median_seconds": us * 1e-6, "launches": 5,
            "weight_bytes": weights, "floor_seconds": weights / 3.02e12,
            "percent_of_floor": 90.0, "weight_gb_per_second": 2700.0,
            "gflop_per_second": 5000.0, "correct": True,
            "stages": [{"stage": name, "median_seconds": 1e-6, "launches": 1,
                        "weight_gb_per_second": 2900.0, "gflop_per_second": 6000.0}
                       for name in STAGES]} | fields


def layers(cases, name=H100, **fields):
    return {"schema_version": 1, "command": "moe bench", "commit": "abc123",
            "gpu": {"name": name, "driver": "580.1", "cuda_runtime": "13.0"},
            "rates": {"copy_gb_per_s": 3020.0}, "shape": "deepseek-v3", "routing": "uniform",
            "rank": 0, "ranks": 1, "cases": cases} | fields


def gemms(cases):
    return layers(cases, command="moe gemm", shape=None)


def gemm(rows, us, **fields):
    return {"mode": "fp8_block", "n": 4096, "k": 7168, "groups": 32, "rows": rows,
            "token_tile": 8, "median_us": us, "correct": True} | fields


def peers(us, **fields):
    peer = {"peer": "triton", "mode": "fp8_block", "tokens": 1, "weight_bytes": 1,
            "plain": {"median_us": us}, "error": 0.01, "correct": True, "note": "(16, 128)"}
    return {"schema_version": 1, "command": "moe bench peers", "commit": "abc123",
            "layers": [{"shape": "deepseek-v3", "cases": [peer | fields]}]}


def report(folder, documents, *options):
    for name, content in documents.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    result = subprocess.run([sys.executable, REPORT, folder, *map(str, options)], text=True,
                            capture_output=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def line_of(text, title, start):
    """Cells of the first line with such a beginning below a title."""
    lines = text[text.index(title):].splitlines()
    line = next(line for line in lines if line.startswith(f"| {start} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


TITLE = "DeepSeek-V3, FP8 block-scaled"


def test_targets_are_met_or_missed(tmp_path):
    text = report(tmp_path, {"a": layers([case(1, 125, 8), case(256, 4000, 256)])})
    assert "### Whole MoE layers" in text and "commit abc123" in text and "2 cases, 2 right" in text
    assert line_of(text, TITLE, 1)[-3:] == ["125.0", "5", "met"]
    missed = line_of(text, TITLE, 256)
    assert missed[-5:] == ["3830", "3830", "4000", "5", "+170.0 (+4.4 %)"]
    assert line_of(text, TITLE, 1024)[-1] == "not measured"


def test_a_target_goes_with_the_experts_that_were_hit(tmp_path):
    text = report(tmp_path, {"a": layers([case(4, 450, 29.7)])})
    cells = line_of(text, TITLE, 4)
    floor = 29.7 * EXPERT_BYTES / 3e6
    assert cells[1] == "29.7" and cells[-5] == "472.0"
    assert float(cells[-4]) == pytest.approx(472 * floor / 459, abs=0.1)


def test_wrong_results_are_no_times(tmp_path):
    text = report(tmp_path, {"a": layers([case(1, 125, 8, correct=False)])})
    assert line_of(text, TITLE, 1)[-1] == "WRONG" and line_of(text, TITLE, 1)[-3] == "-"
    assert "1 cases, 0 right" in text and "WRONG: deepseek-v3 uniform fp8_block 1" in text


def test_no_targets_for_another_device(tmp_path):
    name = "NVIDIA H200"
    text = report(tmp_path, {"a": layers([case(1, 125, 8)], name=name),
                             "g": layers([gemm(114, 210.0), gemm(16384, 800.0)], name=name,
                                         command="moe gemm", shape=None)})
    assert "No targets" in text and TITLE not in text
    assert line_of(text, "#### Layers", "deepseek-v3")[3:8] == ["1", "8", "3", "116.7", "125.0"]
    gemms = [line_of(text, "#### Grouped GEMMs", "fp8_block")]
    assert gemms == [["fp8_block", "4096, 7168, 32", "114", "210.0", "4.48 TB/s", "8", "-"]]


def test_peers_of_the_same_run_stand_beside(tmp_path):
    text = report(tmp_path, {"a": layers([case(1, 125, 8)]), "p": peers(250.0)})
    assert "triton (this run)" in text and "250.0" in line_of(text, TITLE, 1)
    beside = line_of(text, "Peers' layers", "deepseek-v3")
    assert beside[3:7] == ["triton", "250.0", "125.0", "2.00"]
    older = peers(250.0) | {"commit": "def456"}
    text = report(tmp_path, {"a": layers([case(1, 125, 8)]), "p": older})
    assert "triton (commit def456)" in text and "this run" not in text
    text = report(tmp_path, {"p": peers(250.0, correct=False, error=0.5)})
    assert "WRONG: error 5.0e-01" in text


def test_stages_and_other_routings_have_tables(tmp_path):
    documents = {"a": layers([case(1, 125, 8)]),
                 "z": layers([case(1, 130, 7.5)], routing="zipf"),
                 "r": layers([case(1, 90, 8)], routing="a/file.safetensors", shape="256,128,16,2")}
    text = report(tmp_path, documents, "--all")
    stages = line_of(text, "#### Stages", "deepseek-v3")
    assert stages[3:10] == ["1.00"] * 7 and stages[-1] == "2900 / 6"
    assert line_of(text, "#### Other shapes", "deepseek-v3")[2:4] == ["zipf", "1"]
    assert line_of(text, "#### Other shapes", "256,128,16,2")[2] == "recorded"


def test_grouped_gemms_beside_their_peer(tmp_path):
    short = [gemm(114, 320.0), gemm(16384, 900.0), gemm(6251, 1, correct=False)]
    documents = {"g": gemms(short),
                 "g_long": gemms([gemm(114, 340.0), gemm(6251, 1, correct=False)]) |
                 {"min_seconds": 0.5}}
    text = report(tmp_path, documents)
    title = TARGETS["gemm"]["title"]
    few = [cell.strip() for cell in next(line for line in text[text.index(title):].splitlines()
                                         if "| 114 |" in line).strip("|").split("|")]
    assert few == ["4096, 7168, 32", "114", "330.0", "2.85 TB/s", "320.0", "2.94 TB/s", "8", "met",
                   "340.0"]
    assert "| 852.0 | 1129 TFLOP/s | 900.0 | 1069 TFLOP/s | 8 | +48.00 (+5.6 %) | - |" in text
    assert "| 6251 |" in text and "| WRONG | - |" in text


def test_compact_documents_say_the_same(tmp_path):
    documents = {"a": layers([case(1, 125.123456789, 8)]), "p": peers(250.0)}
    before = report(tmp_path, documents, "--all")
    report(tmp_path, documents, "--compact")
    assert "0.000125123" in (tmp_path / "a.json").read_text()
    after = subprocess.run([sys.executable, REPORT, tmp_path, "--all"], text=True,
                           capture_output=True, check=True).stdout
    assert after == before


def test_layers_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    plots = tmp_path / "plots"
    report(tmp_path, {"a": layers([case(1, 125, 8)])}, "--plots", plots)
    assert [file.name for file in plots.iterdir()] == ["moe_deepseek_v3_fp8_block.svg"]


def beside(us, sustained, **fields):
    return {"peer": "narrowfloat", "mode": "fp8_block", "plain": {"median_us": us},
            "sustained": {"median_us": sustained}, "error": 0.01, "correct": True} | fields


def test_narrowfloat_of_the_peers_own_run_counts_in_their_table(tmp_path):
    document = peers(250.0, peer="humming", sustained={"median_us": 300.0})
    document["layers"][0]["narrowfloat"] = [beside(200.0, 400.0, tokens=1)]
    text = report(tmp_path, {"a": layers([case(1, 125, 8)]), "p": document})
    cells = line_of(text, "Peers' layers", "deepseek-v3")
    assert cells[3:10] == ["humming", "250.0", "200.0", "1.25", "300.0", "400.0", "0.75"]
    document["layers"][0]["narrowfloat"][0]["correct"] = False
    text = report(tmp_path, {"a": layers([case(1, 125, 8)]), "p": document})
    assert line_of(text, "Peers' layers", "deepseek-v3")[5:10] == ["-", "-", "300.0", "-", "-"]


def test_grouped_gemms_of_peers_stand_beside_ours(tmp_path):
    size = {"n": 4096, "k": 7168, "groups": 8, "rows": 16384}
    document = {"schema_version": 1, "command": "moe gemm peers", "commit": "abc123",
                "gemms": [size | beside(690.0, 800.0, peer="deep_gemm"),
                          size | beside(750.0, 820.0)]}
    text = report(tmp_path, {"a": layers([case(1, 125, 8)]), "g": document})
    assert line_of(text, "Peers' grouped GEMMs", "fp8_block")[1:] == [
        "4096, 7168, 8", "16384", "deep_gemm", "690.0", "750.0", "0.92", "800.0", "820.0", "0.98"]
