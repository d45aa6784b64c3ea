"""Statements of the documents that a script can check: tables that are written from data."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tools")]
import report_side_by_side  # noqa: E402  From the paths above.
import tidy  # noqa: E402


def test_the_page_of_peers_is_that_of_its_documents():
    page = (report_side_by_side.FOLDER / "README.md").read_text()
    assert page == report_side_by_side.page()


def test_the_first_screen_shows_the_measured_figures():
    assert f"\n\n{report_side_by_side.headline()}\n\n" in (ROOT / "README.md").read_text()


def test_the_style_page_names_every_layer():
    table = (ROOT / "docs/style.md").read_text().split("### Layers")[1].split("### ")[0]
    named = set(re.findall(r"^\| `([^`]+)`", table, re.MULTILINE))
    layers = {layer.replace("include", "include/narrowfloat").replace("src/ops", "src/ops/<op>")
              for layer in tidy.LAYERS}
    assert layers <= named


def test_pages_keep_their_lengths():
    limits = {"README.md": 200, "docs/benchmarks.md": 250} | {
        str(page.relative_to(ROOT)): 200 for page in (ROOT / "docs/kernels").glob("*.md")}
    lengths = {page: len((ROOT / page).read_text().splitlines()) for page in limits}
    assert {page: length for page, length in lengths.items() if length > limits[page]} == {}


def test_documents_have_few_words():
    """Of letters or digits: rules and bars of tables are none."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    words = [word for page in pages for word in page.read_text().split() if re.search(r"\w", word)]
    assert len(words) < 40_000
