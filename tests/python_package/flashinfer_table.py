"""The findings of the tests of narrowfloat.compat.flashinfer, as the table of docs/python.md."""

from __future__ import annotations

from collections.abc import Collection

BITS, CLOSE, ABSENT = "same bits", "within tolerance", "not offered"

RESULTS: dict[str, tuple[str, str]] = {}
PARTS: dict[str, list[str]] = {}

BEGIN, END = "<!-- flashinfer table: begin -->\n", "<!-- flashinfer table: end -->"


def record(name: str, result: str, note: str = "", within: str = "") -> None:
    """Called by a test after its last assertion. within: the tolerance of CLOSE, as it tests it."""
    assert bool(within) == (result == CLOSE), f"{name}: within is for {CLOSE!r}, which needs it"
    RESULTS[name] = (f"{result}: {within}" if within else result, note)


def percent(tolerances: Collection[float]) -> str:
    """Distances from the model, relative to its Frobenius norm."""
    low, high = (f"{100 * bound(tolerances):g}" for bound in (min, max))
    return f"{low} %" if low == high else f"{low} to {high} %"


def record_part(name: str, part: str) -> None:
    """As record(), of a function that several tests share: its note begins with their parts."""
    parts = PARTS.setdefault(name, [])
    if part not in parts:
        parts.append(part)


def note_of(name: str, note: str) -> str:
    """With the parts before it, in alphabetical order."""
    listed = ", ".join(sorted(PARTS.get(name, []), key=str.casefold))
    return "; ".join(text for text in (listed, note) if text)


def render() -> str:
    """A row for all functions of the same result and note, by its first function."""
    rows: dict[tuple[str, str], list[str]] = {}
    for name, (result, note) in sorted(RESULTS.items()):
        rows.setdefault((result, note_of(name, note)), []).append(name)
    return "\n".join(["| Functions | Result | Note |", "|---|---|---|"] + [
        f"| {', '.join(f'`{name}`' for name in names)} | {result} | {note} |"
        for (result, note), names in rows.items()]) + "\n"
