"""The table of functions in docs/python.md is what the tests found.

NARROWFLOAT_WRITE_TABLE=1 writes it. Runs behind the tests that record results, by its name.
"""

from __future__ import annotations

import os
from pathlib import Path

import flashinfer_table as table
import pytest

import narrowfloat.compat.flashinfer as fi

PAGE = Path(__file__).resolve().parents[2] / "docs" / "python.md"
NO_OPERATIONS = {"clear_prepared_cache", "prepared_cache_size"}


def functions() -> set[str]:
    """Names of FlashInfer that the module has, without its types."""
    return {name for name in fi.__all__ if name[0].islower()} - NO_OPERATIONS


def test_the_table_is_what_the_tests_found() -> None:
    """Every function has a row, and the page shows the rows."""
    missing = functions() - set(table.RESULTS)
    if missing and len(table.RESULTS) < len(functions()):
        pytest.skip("not all tests of the functions ran, or not all passed")
    assert not missing and set(table.RESULTS) == functions()
    text = PAGE.read_text()
    begin = text.index(table.BEGIN) + len(table.BEGIN)
    end = text.index(table.END)
    if os.environ.get("NARROWFLOAT_WRITE_TABLE") == "1":
        PAGE.write_text(text[:begin] + table.render() + text[end:])
        return
    assert text[begin:end] == table.render()
