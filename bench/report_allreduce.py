#!/usr/bin/env python3
"""Tables from the documents that `narrowfloat-bench allreduce --json` writes on GPUs.

    bench/report_allreduce.py FOLDER            print the tables
    bench/report_allreduce.py FOLDER --page     write them into FOLDER/README.md

FOLDER has documents of virtual ranks (`--on virtual`) or of several GPUs (`--on gpus`), not both.
The page explains what a cell of its tables has.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

SCHEMA_VERSION = 1
METHOD = """\
Medians of graph replays in short bursts, inputs beyond L2, every output of every rank equal to the
oracle's in the same run.
"""
VIRTUAL = f"""\
All ranks run on one GPU, in one launch: the tables show the cost of the epilogue, and nothing about
links.

{METHOD}
A cell has the microseconds of a call, what the pattern costs over `allreduce` alone, and in
parentheses what a kernel that only moves the same bytes costs over one that moves those of
`allreduce`.
"""
GPUS = f"""\
Each rank is a process with a GPU of its own; the slowest rank counts.

{METHOD}
A cell has the microseconds of a call, and after the stroke those of NCCL's all-reduce with the
stand-alone epilogue, which is narrowfloat's engine `nccl` with its watchdog.
"""


def load(folder: Path) -> list[dict]:
    documents = []
    for file in sorted(folder.glob("*.json")):
        document = json.loads(file.read_text())
        if document.get("command") != "allreduce" or document.get("on") not in ("virtual", "gpus"):
            raise SystemExit(f"report_allreduce: {file}: expected a document of `narrowfloat-bench "
                             "allreduce --json` with --on virtual or --on gpus")
        if document.get("schema_version") != SCHEMA_VERSION:
            raise SystemExit(f"report_allreduce: {file}: expected schema_version {SCHEMA_VERSION}")
        documents.append(document)
    if not documents:
        raise SystemExit(f"report_allreduce: {folder}: no documents (*.json)")
    places = {document["on"] for document in documents}
    if len(places) > 1:
        raise SystemExit(f"report_allreduce: {folder}: has documents of virtual ranks and of "
                         "several GPUs; give each a folder")
    return documents


def microseconds(case: dict | None) -> str:
    if case is None:
        return "-"
    return f"{case['median_us']:.1f}" if case["correct"] else "WRONG"


def virtual_cell(case: dict | None, _: dict | None) -> str:
    if case is None or not case["correct"] or case["minus_plain_us"] is None:
        return microseconds(case)
    return (f"{microseconds(case)}: {case['minus_plain_us']:+.1f} "
            f"({case['memory_only_minus_plain_us']:+.1f})")


def gpus_cell(case: dict | None, by_nccl: dict | None) -> str:
    return f"{microseconds(case)} / {microseconds(by_nccl)}"


def tables(document: dict, cell: Callable[[dict | None, dict | None], str]) -> str:
    machine, cases = document["machine"], document["cases"]
    nccl = f"NCCL {document['nccl']}, " if document["on"] == "gpus" else ""
    text = (f"## {document['ranks']} ranks\n\n{machine['name']}, driver {machine['driver']}, CUDA "
            f"{machine['cuda_runtime']}, {nccl}commit {document['commit']}.\n\n")
    for hidden in sorted({case["hidden"] for case in cases}):
        of_size = [case for case in cases if case["hidden"] == hidden]
        columns = sorted({case["tokens"] for case in of_size})
        own = {(case["pattern"], case["tokens"]): case
               for case in of_size if case["asked_for"] != "nccl"}
        by_nccl = {(case["pattern"], case["tokens"]): case
                   for case in of_size if case["asked_for"] == "nccl"}
        heads = [f"hidden {hidden}"]
        heads += [f"T = {tokens}, {own['allreduce', tokens]['algorithm']}" for tokens in columns]
        text += "| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|\n"
        for pattern in dict.fromkeys(case["pattern"] for case in of_size):
            row = [cell(own.get((pattern, tokens)), by_nccl.get((pattern, tokens)))
                   for tokens in columns]
            text += f"| `{pattern}` | " + " | ".join(row) + " |\n"
        text += "\n"
    return text


def page(folder: Path) -> str:
    documents = load(folder)
    is_virtual = documents[0]["on"] == "virtual"
    title = "virtual ranks" if is_virtual else "several GPUs"
    path = "/".join(folder.resolve().parts[-2:])
    head = (f"# The all-reduce with {title}\n\n"
            f"`bench/report_allreduce.py bench/results/{path} --page` writes this page from the\n"
            "JSON documents beside it.\n\n")
    cell = virtual_cell if is_virtual else gpus_cell
    text = head + (VIRTUAL if is_virtual else GPUS) + "\n"
    return (text + "".join(tables(document, cell) for document in documents)).rstrip() + "\n"


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
