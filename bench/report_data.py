"""Documents of `narrowfloat-bench bench --device ... --json` and of bench/peers as one set."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

SCHEMA_VERSION = 1
COMMANDS = ("bench", "bench peers")
MOE_COMMANDS = ("moe bench", "moe bench peers", "moe gemm", "moe gemm peers")
# The members that identify a case; all others are measured.
IDENTITY = ("op", "format", "layout", "math", "dtype", "source", "encode_scale", "four_over_six",
            "rows", "cols", "tokens", "top_k", "experts", "tile", "input", "maps")

FORMATS = ("nvfp4", "nvfp4_per_token", "mxfp4", "mxfp8", "fp8_1x128", "fp8_128x128", "fp8_tensor")
# Fields that a section does not vary; a section's own filter comes on top.
COMMON = {"math": "exact", "dtype": "BF16", "source": "plain", "four_over_six": False,
          "encode_scale": ("given", None), "l2": "cold"}

Case = dict


def median(case: Case | None, edges: str) -> float | None:
    if case is None or not case["correct"] or not case.get(edges):
        return None
    return case[edges]["median_us"]


def best(case: Case | None) -> float | None:
    """Programmatic edges where they were measured."""
    programmatic = median(case, "programmatic")
    return median(case, "plain") if programmatic is None else programmatic


def run_of_peers(documents: Iterable[dict]) -> str:
    """Whose numbers the peers' are: "this run" only where all documents are of one commit."""
    def commits(of_peers: bool) -> set[str]:
        return {d.get("commit", "") for d in documents
                if d["command"].endswith("peers") == of_peers}
    same = commits(True) <= commits(False) and len(commits(False)) == 1
    return "this run" if same else f"commit {', '.join(sorted(commits(True)))}"


class Results:
    """The cases of all documents; a case knows its document's machine and rates."""

    def __init__(self, documents: Iterable[dict]):
        self.documents = list(documents)
        cases: dict[tuple, Case] = {}
        for document in self.documents:
            for case in document["cases"]:
                full = {**{key: None for key in IDENTITY}, **case,
                        "peer": case.get("peer"), "l2": document["l2"],
                        "rates": document.get("rates", {})}
                cases[tuple(full[key] for key in (*IDENTITY, "peer", "l2"))] = full
        self.cases = list(cases.values())

    @property
    def machine(self) -> dict:
        return next(d["machine"] for d in self.documents if d["command"] == "bench")

    @property
    def rates(self) -> dict:
        return next(d["rates"] for d in self.documents if d["command"] == "bench")

    @property
    def commits(self) -> list[str]:
        return sorted({d.get("commit", "") for d in self.documents} - {""})

    def select(self, wanted: dict, peer: str | None = None) -> list[Case]:
        """The cases whose fields have the wanted values (a tuple or list: one of them)."""
        def fits(case: Case) -> bool:
            return case["peer"] == peer and all(
                case[key] in value if isinstance(value, (tuple, list)) else case[key] == value
                for key, value in wanted.items())
        return [case for case in self.cases if fits(case)]

    def one(self, wanted: dict, peer: str | None = None) -> Case | None:
        found = self.select(wanted, peer)
        return found[-1] if found else None

    def peers(self, wanted: dict) -> list[str]:
        names = {case["peer"] for case in self.cases} - {None}
        return sorted(name for name in names if self.select(wanted, name))


def files_of(paths: list[Path]) -> list[Path]:
    return [file for path in paths
            for file in (sorted(path.glob("*.json")) if path.is_dir() else [path])]


def compact(file: Path) -> None:
    """For files that are committed: short numbers, a case a line."""
    document = json.loads(file.read_text())
    is_moe = document["command"] in MOE_COMMANDS  # Its times are seconds.
    document = json.loads(file.read_text(), parse_float=lambda text: float(
        f"{float(text):.6g}") if is_moe else round(float(text), 4))
    if "cases" not in document:
        file.write_text(json.dumps(document) + "\n")
        return
    cases = [json.dumps(case) for case in document.pop("cases")]
    head = json.dumps(document, indent=1).removesuffix("\n}")
    file.write_text(head + ',\n "cases": [\n' + ",\n".join(cases) + "\n]}\n")


def load(paths: list[Path]) -> tuple[Results | None, list[dict]]:
    """The sweeps (None where there are none), and the documents of Mixture-of-Experts layers."""
    documents, moe_documents = [], []
    for file in files_of(paths):
        try:
            document = json.loads(file.read_text())
        except json.JSONDecodeError as error:
            raise SystemExit(f"report: {file}: not JSON: {error}") from error
        if document.get("command") not in (*COMMANDS, *MOE_COMMANDS):
            raise SystemExit(f"report: {file}: expected a document of one of "
                             f"{(*COMMANDS, *MOE_COMMANDS)}")
        if document.get("schema_version") != SCHEMA_VERSION:
            raise SystemExit(f"report: {file}: expected schema_version {SCHEMA_VERSION}")
        if document["command"] in MOE_COMMANDS:
            moe_documents.append(document)
        elif "machine" in document:  # `bench` without --device has none.
            documents.append(document)
    has_sweep = any(document["command"] == "bench" for document in documents)
    if not has_sweep and not any(document.get("gpu") for document in moe_documents):
        raise SystemExit(f"report: no document of `narrowfloat-bench bench --device ... --json` in "
                         f"{', '.join(map(str, paths))}")
    return (Results(documents) if has_sweep else None), moe_documents
