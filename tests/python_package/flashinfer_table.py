"""What the tests of narrowfloat.compat.flashinfer found, as the table of docs/python.md."""

from __future__ import annotations

BITS, CLOSE, ABSENT = "same bits", "within tolerance", "not offered"

RESULTS: dict[str, tuple[str, str]] = {}
PARTS: dict[str, list[str]] = {}

# Functions of FlashInfer that the package does not have at all.
MISSING: dict[str, str] = {}
BEGIN, END = "<!-- flashinfer table: begin -->\n", "<!-- flashinfer table: end -->"


def record(name: str, result: str, note: str = "") -> None:
    """Called by a test behind its last assertion."""
    RESULTS[name] = (result, note)


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
    """The rows, by function."""
    lines = ["| Function | Result | Note |", "|---|---|---|"]
    for name, (result, note) in sorted(RESULTS.items()):
        lines.append(f"| `{name}` | {result} | {note_of(name, note)} |")
    for name, note in MISSING.items():
        names = ", ".join(f"`{one}`" for one in name.split(", "))
        lines.append(f"| {names} | {ABSENT} | {note} |")
    return "\n".join(lines) + "\n"
