#!/usr/bin/env python3
"""Tables from the documents that `narrowfloat-bench allreduce --on virtual --json` writes.

    bench/report_allreduce.py FOLDER            print the tables
    bench/report_allreduce.py FOLDER --page     write them into FOLDER/README.md

A cell has the time of a call in microseconds, then what the pattern costs over the plain
all-reduce, and in parentheses what a kernel that moves the same bytes costs over one that moves the
plain all-reduce's.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

SCHEMA_VERSION = 1
LEGEND = """\
All ranks run on one GPU, in one launch: the tables show the cost of the epilogue, and nothing about
links. Medians of graph replays in short bursts, inputs beyond L2, every output of every rank equal
to the oracle's in the same run.

A cell has the microseconds of a call, what the pattern costs over `allreduce` alone, and in
parentheses what a kernel that only moves the same bytes costs over one that moves those of
`allreduce`.
"""


def load(folder: Path) -> list[dict]:
    documents = []
    for file in sorted(folder.glob("*.json")):
        document = json.loads(file.read_text())
        if document.get("command") != "allreduce" or document.get("on") != "virtual":
            raise SystemExit(f"report_allreduce: {file}: expected a document of "
                             "`narrowfloat-bench allreduce --on virtual --json`")
        if document.get("schema_version") != SCHEMA_VERSION:
            raise SystemExit(f"report_allreduce: {file}: expected schema_version {SCHEMA_VERSION}")
        documents.append(document)
    if not documents:
        raise SystemExit(f"report_allreduce: {folder}: no documents (*.json)")
    return documents


def cell(case: dict | None) -> str:
    if case is None:
        return "-"
    if not case["correct"]:
        return "WRONG"
    if case["minus_plain_us"] is None:
        return f"{case['median_us']:.1f}"
    return (f"{case['median_us']:.1f}: {case['minus_plain_us']:+.1f} "
            f"({case['memory_only_minus_plain_us']:+.1f})")


def tables(document: dict) -> str:
    machine, cases = document["machine"], document["cases"]
    text = (f"## {document['ranks']} ranks\n\n{machine['name']}, driver {machine['driver']}, CUDA "
            f"{machine['cuda_runtime']}, commit {document['commit']}.\n\n")
    for hidden in sorted({case["hidden"] for case in cases}):
        of_size = [case for case in cases if case["hidden"] == hidden]
        columns = sorted({case["tokens"] for case in of_size})
        by_place = {(case["pattern"], case["tokens"]): case for case in of_size}
        heads = [f"hidden {hidden}"]
        heads += [f"T = {tokens}, {by_place['allreduce', tokens]['algorithm']}"
                  for tokens in columns]
        text += "| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|\n"
        for pattern in dict.fromkeys(case["pattern"] for case in of_size):
            row = [cell(by_place.get((pattern, tokens))) for tokens in columns]
            text += f"| `{pattern}` | " + " | ".join(row) + " |\n"
        text += "\n"
    return text


def page(folder: Path) -> str:
    documents = load(folder)
    head = ("# The all-reduce with virtual ranks\n\n"
            f"`bench/report_allreduce.py bench/results/h100/{folder.resolve().name} --page` writes "
            "this page from the\nJSON documents beside it.\n\n")
    return (head + LEGEND + "\n" + "".join(map(tables, documents))).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--page", action="store_true", help="write FOLDER/README.md")
    arguments = parser.parse_args()
    if arguments.page:
        (arguments.folder / "README.md").write_text(page(arguments.folder))
    else:
        print(page(arguments.folder))


if __name__ == "__main__":
    main()
