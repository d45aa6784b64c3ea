"""The table of functions in docs/python.md is what the tests found.

NARROWFLOAT_WRITE_TABLE=1 writes it. Runs after the tests that record results, by its name.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import flashinfer_table as table
import pytest

import narrowfloat.compat.flashinfer as fi

PAGE = Path(__file__).resolve().parents[2] / "docs" / "python.md"
NO_OPERATIONS = {"clear_prepared_cache", "is_gated_activation", "next_positive_power_of_2",
                 "prepared_cache_size", "resolve_nvfp4_4over6"}  # fmt: skip


def functions() -> set[str]:
    """Names of FlashInfer that the module has, without its types."""
    return {name for name in fi.__all__ if name[0].islower()} - NO_OPERATIONS


def everything_runs(session: pytest.Session) -> bool:
    """Whether all tests that record results were asked for."""
    choice = session.config.option
    folder = Path(__file__).parent.glob("test_flashinfer_*.py")
    recording = {path for path in folder if "from flashinfer_table import" in path.read_text()}
    return recording <= {item.path for item in session.items} and not (
        choice.keyword or choice.markexpr or choice.deselect
        or any("::" in argument for argument in session.config.args)
    )  # fmt: skip


def test_each_function_says_how_close_it_is() -> None:
    """Same bits, within a tolerance that stands there, or not offered; each once."""
    text = PAGE.read_text()
    rows = text[text.index(table.BEGIN) : text.index(table.END)].splitlines()[3:]
    listed = []
    for row in rows:
        names, result, _ = (cell.strip() for cell in row.strip("|").split(" | "))
        assert re.fullmatch(rf"{table.BITS}|{table.CLOSE}: \S.+|{table.ABSENT}", result), row
        listed += re.findall(r"`(\w+)`", names)
    assert sorted(listed) == sorted(functions())


def test_the_table_is_what_the_tests_found(request: pytest.FixtureRequest) -> None:
    """Every function has a row, and the page shows the rows."""
    if not everything_runs(request.session):
        pytest.skip("not all tests of the functions run")
    assert set(table.RESULTS) == functions()
    text = PAGE.read_text()
    begin = text.index(table.BEGIN) + len(table.BEGIN)
    end = text.index(table.END)
    if os.environ.get("NARROWFLOAT_WRITE_TABLE") == "1":
        PAGE.write_text(text[:begin] + table.render() + text[end:])
        return
    assert text[begin:end] == table.render()
