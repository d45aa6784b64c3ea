"""Statements of the documents that a script can check: tables that are written from data."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tools")]
import report_cpu  # noqa: E402  From the paths above.
import report_cpu_server  # noqa: E402
import report_side_by_side  # noqa: E402  From the paths above.
import tidy  # noqa: E402


def test_the_page_of_peers_is_that_of_its_documents():
    page = (report_side_by_side.FOLDER / "README.md").read_text()
    assert page == report_side_by_side.page()


def test_the_page_of_the_cpu_is_that_of_its_documents():
    assert report_cpu.page() == (report_cpu.FOLDER / "README.md").read_text()
    assert f"\n\n{report_cpu.headline()}\n" in (ROOT / "docs/benchmarks.md").read_text()


def test_the_page_of_a_servers_cpu_is_that_of_its_documents():
    assert report_cpu_server.page() == (report_cpu_server.FOLDER / "README.md").read_text()


def test_the_first_screen_shows_the_measured_figures():
    assert f"\n\n{report_side_by_side.headline()}\n\n" in (ROOT / "README.md").read_text()


def test_the_style_page_names_every_layer():
    table = (ROOT / "docs/style.md").read_text().split("### Layers")[1].split("### ")[0]
    named = set(re.findall(r"^\| `([^`]+)`", table, re.MULTILINE))
    layers = {layer.replace("include", "include/narrowfloat").replace("src/ops", "src/ops/<op>")
              for layer in tidy.LAYERS}
    assert layers <= named
