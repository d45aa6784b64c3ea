"""bench/report_allreduce.py: the page of the all-reduce says what its documents say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "bench" / "report_allreduce.py"
RESULTS = ROOT / "bench" / "results" / "h100" / "allreduce"
SEVERAL_GPUS = ROOT / "bench" / "results" / "h100-x2" / "allreduce"
TWO_H200 = ROOT / "bench" / "results" / "h200-x2" / "allreduce"


def report(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), str(folder)], capture_output=True,
                          text=True, check=False)


@pytest.mark.parametrize("folder", [RESULTS, SEVERAL_GPUS, TWO_H200])
def test_the_committed_page_is_that_of_its_documents(folder):
    assert report(folder).stdout.strip() == (folder / "README.md").read_text().strip()


def test_a_cell_of_several_gpus_has_both_times(tmp_path):
    document = json.loads((SEVERAL_GPUS / "gpus_2_7168.json").read_text())
    for case in document["cases"]:
        case["median_us"] = 70.25 if case["asked_for"] == "nccl" else 41.5
        case["correct"] = case["tokens"] != 16 or case["asked_for"] == "nccl"
    (tmp_path / "gpus_2_7168.json").write_text(json.dumps(document))
    lines = report(tmp_path).stdout.splitlines()
    row = next(line for line in lines if line.startswith("| `nvfp4`"))
    assert row.split(" | ")[1:3] == ["41.5 / 70.2", "WRONG / 70.2"]


def test_virtual_ranks_and_gpus_are_not_mixed(tmp_path):
    for file in (RESULTS / "virtual_2.json", SEVERAL_GPUS / "gpus_2_7168.json"):
        (tmp_path / file.name).write_text(file.read_text())
    result = report(tmp_path)
    assert result.returncode == 1 and "give each a folder" in result.stderr


def test_a_wrong_result_is_no_time(tmp_path):
    document = json.loads((RESULTS / "virtual_2.json").read_text())
    document["cases"][1]["correct"] = False
    (tmp_path / "virtual_2.json").write_text(json.dumps(document))
    assert report(tmp_path).stdout.count("WRONG") == 1


@pytest.mark.parametrize("change, expected", [({"command": "bench"}, "--on virtual"),
                                              ({"schema_version": 7}, "schema_version 1")])
def test_other_documents_are_refused(tmp_path, change, expected):
    document = json.loads((RESULTS / "virtual_2.json").read_text())
    (tmp_path / "other.json").write_text(json.dumps(document | change))
    result = report(tmp_path)
    assert result.returncode == 1 and expected in result.stderr
