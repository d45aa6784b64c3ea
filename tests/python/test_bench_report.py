"""bench/report.py on small documents: what tables say, not how fast anything is."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REPORT = ROOT / "bench/report.py"
TARGETS = ROOT / "bench/targets/h100.json"
H100 = "NVIDIA H100 80GB HBM3"

sys.path.insert(0, str(ROOT / "bench"))
import report as bench_report  # noqa: E402  From the path above.


def case(rows, us, programmatic_us=None, **fields):
    time = {"median_us": us, "p10_us": us, "p90_us": us, "calls": 10, "replays": 3}
    programmatic = None if programmatic_us is None else time | {"median_us": programmatic_us}
    return {"op": "quantize", "format": "nvfp4", "layout": "linear", "math": "exact",
            "dtype": "BF16", "source": "plain", "encode_scale": "given", "four_over_six": False,
            "rows": rows, "cols": 7168, "plain": time, "programmatic": programmatic,
            "memory_only_us": 1.2, "memory_only_programmatic_us": 0.7, "floor_us": 0.01,
            "gb_per_s": 100.0, "percent_of_copy": 12.4, "checked_with": "cpu_reference",
            "correct": True, "message": "", "note": ""} | fields


def document(cases, name=H100, **fields):
    return {"schema_version": 1, "command": "bench", "commit": "abc123", "l2": "cold",
            "machine": {"device": "cuda:0", "name": name, "driver": "580.1",
                        "cuda_runtime": "13.0"},
            "rates": {"copy_gb_per_s": 3020.0, "read_2_write_1_gb_per_s": 3050.0,
                      "read_gb_per_s": 3180.0}, "cases": cases} | fields


def report(folder, documents, *options):
    for name, content in documents.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return subprocess.run([sys.executable, REPORT, folder, *map(str, options)], text=True,
                          capture_output=True, check=False)


def line_of(text, start):
    return next(line for line in text.splitlines() if line.startswith(f"| {start} |"))


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_targets_are_met_or_missed(tmp_path):
    text = report(tmp_path, {"a": document([case(1, 1.5, 0.79), case(16, 1.6, 1.14)])}).stdout
    met = cells(line_of(text, "NVFP4 linear M=1"))
    assert met[1:3] == ["0.01", "1.20 / 0.70"]
    assert met[-3:] == ["1.50 / 0.79", "0.80", "met"]
    assert cells(line_of(text, "NVFP4 linear M=16"))[-1] == "+0.19 (+20.0 %)"
    assert cells(line_of(text, "NVFP4 linear M=128"))[-1] == "not measured"


def test_no_targets_for_another_device(tmp_path):
    text = report(tmp_path, {"a": document([case(1, 1.5)], name="NVIDIA H200")}).stdout
    assert "No targets" in text and "NVFP4 linear" not in text


def test_wrong_results_are_no_times(tmp_path):
    wrong = case(1, 1.5, 0.1, correct=False, message="values: byte 7 is 0x01, not 0x02")
    text = report(tmp_path, {"a": document([wrong])}).stdout
    assert cells(line_of(text, "NVFP4 linear M=1"))[-1] == "WRONG"
    assert "byte 7" in text and "1 cases, 0 with the right bytes" in text


def test_the_later_document_counts(tmp_path):
    documents = {"a": document([case(1, 9.0, 8.0)]), "b": document([case(1, 1.5, 0.79)])}
    assert "1.50 / 0.79" in report(tmp_path, documents).stdout


def test_peers_of_the_same_run_stand_beside(tmp_path):
    peer = case(1, 3.0, peer="triton", note="same bytes")
    peer["memory_only_us"] = None
    documents = {"ours": document([case(1, 1.5, 0.79)]),
                 "peers": document([peer], command="bench peers")}
    text = report(tmp_path, documents).stdout
    assert "triton (this run)" in text
    assert cells(line_of(text, "nvfp4"))[1:] == ["1x7168", "triton", "3.00", "1.50 / 0.79", "2.00",
                                                 "same bytes"]


def test_the_page_has_every_table(tmp_path):
    cases = [case(1, 1.5), case(1, 2.5, dtype="F16"), case(1, 3.5, op="dequantize",
                                                           encode_scale=None)]
    result = report(tmp_path, {"a": document(cases)}, "--page")
    assert result.returncode == 0, result.stderr
    text = (tmp_path / "README.md").read_text()
    assert text.startswith(f"# Results on {H100}\n") and "docs/benchmarks.md)" in text
    for title in ("Quantize, K = 7168", "Quantize, fp16 input", "Dequantize, K = 7168"):
        assert f"\n## {title}" in text
    assert "| nvfp4 linear | 1.50 (12 %) |" in text


@pytest.mark.parametrize("gpu", ["h100", "h200"])
def test_committed_pages_are_those_of_their_documents(gpu):
    folder = ROOT / "bench/results" / gpu
    assert (folder / "README.md").read_text() == bench_report.page_of(folder)


def test_the_document_of_the_method_quotes_the_page():
    page = (ROOT / "bench/results/h100/README.md").read_text()
    quoted = (ROOT / "docs/benchmarks.md").read_text().split("### Quantizers")[1].split("### ")[0]
    rows = [cells(line) for line in quoted.splitlines() if line.startswith("| ")]
    rows = [row for row in rows if row[0] != "case"]
    assert len(rows) > 10
    for name, *figures in rows:
        for figure in figures:
            assert f" {figure} " in line_of(page, name), name


@pytest.mark.parametrize("kernel", ["quantize", "dequantize", "activation"])
def test_pages_of_kernels_quote_a_line_of_the_page(kernel):
    page = (ROOT / "bench/results/h100/README.md").read_text()
    measured = [{part for cell in cells(line) for part in (cell, cell.split(" (")[0])}
                for line in page.splitlines() if line.startswith("| ")]
    text = (ROOT / f"docs/kernels/{kernel}.md").read_text()
    quoted = text.split("## Results")[1].split("\n## ")[0]
    rows = [cells(line) for line in quoted.splitlines() if line.startswith("| ")]
    rows = [row for row in rows if row[0] not in ("", "tokens", "memory only")]
    assert rows
    for name, *figures in rows:
        assert any(line.issuperset(figures) for line in measured), name


def test_rules_name_the_cases_that_break_them(tmp_path):
    slow = case(16384, 120.0, 110.0, percent_of_copy=89.1, floor_us=99.7)
    cases = [slow, case(4096, 27.0, 26.0, percent_of_copy=97.0), case(1, 1.5, 0.8),
             case(16, 1.9, 1.3)]
    text = report(tmp_path, {"a": document(cases)}).stdout
    assert "at least 92 % of copy: 1 of 2 cases" in text
    assert "quantize nvfp4 linear BF16 given 16384x7168: 110.0 us, 89.1 %" in text
    assert "(per token has targets of its own): 1 of 2 cases" in text
    assert "given 16x7168" in text and "given 1x7168" not in text


def test_the_script_says_how_to_use_it(tmp_path):
    script = ROOT / "bench/run_gpu_benchmarks.sh"
    usage = subprocess.run([script], text=True, capture_output=True, check=False)
    assert usage.returncode == 2 and "OUT_DIR [--quick]" in usage.stderr
    absent = subprocess.run([script, tmp_path / "out", "--build", tmp_path], text=True,
                            capture_output=True, check=False)
    assert absent.returncode == 2 and "cmake --preset sm90" in absent.stderr


def test_compact_documents_say_the_same(tmp_path):
    documents = {"a": document([case(1, 1.51234567, 0.79), case(16, 1.6)])}
    before = report(tmp_path, documents).stdout
    assert report(tmp_path, documents, "--compact").returncode == 0
    text = (tmp_path / "a.json").read_text()
    assert len(text.splitlines()) < 30 and "1.5123," in text
    assert json.loads(text).keys() == documents["a"].keys()
    after = subprocess.run([sys.executable, REPORT, tmp_path], text=True, capture_output=True,
                           check=True).stdout
    assert after == before


@pytest.mark.parametrize("documents,expected", [
    ({}, "no document"),
    ({"a": {"command": "doctor"}}, "bench peers"),
    ({"a": document([], schema_version=2)}, "schema_version 1"),
])
def test_wrong_input(tmp_path, documents, expected):
    result = report(tmp_path, documents)
    assert result.returncode != 0
    assert expected in result.stderr


def test_targets_name_cases_once():
    targets = json.loads(TARGETS.read_text())
    assert targets["device"] == H100
    for group in targets["tables"]:
        selections = [json.dumps(row["select"], sort_keys=True) for row in group["rows"]]
        assert len(set(selections)) == len(selections)
        for row in group["rows"]:
            assert row["target_us"] > 0
            assert len(row.get("peers", group["peers"])) == len(group["peers"])
