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


def report(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), str(folder)], capture_output=True,
                          text=True, check=False)


def test_the_committed_page_is_that_of_its_documents():
    assert report(RESULTS).stdout.strip() == (RESULTS / "README.md").read_text().strip()


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
