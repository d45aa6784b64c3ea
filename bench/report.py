#!/usr/bin/env python3
"""Tables and plots from the documents that `narrowfloat-bench bench --json`, `narrowfloat-bench moe
bench --json`, `narrowfloat-bench moe gemm --json` and bench/peers write.

    bench/report.py RESULTS                        print the tables with targets and peers
    bench/report.py RESULTS --all                  print every table
    bench/report.py RESULTS --page                 write every table into RESULTS/README.md
    bench/report.py RESULTS --plots docs/images/benchmarks
                                                   draw the plots (needs matplotlib)

    bench/report.py RESULTS --compact              rewrite the documents with one case a line

RESULTS is a folder of *.json, or files (a folder for --page).  Where a case was measured twice, the
file later in the alphabet counts.  Times are medians in microseconds, as in the documents.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import report_moe
from report_data import (COMMON, FORMATS, IDENTITY, Case, Results, best, compact, files_of, load,
                         median, run_of_peers)

METHOD = Path(__file__).resolve().parents[1] / "docs" / "benchmarks.md"
TARGETS = Path(__file__).parent / "targets" / "h100.json"
MOE_TARGETS = Path(__file__).parent / "targets" / "h100_moe.json"

Rows = list[list[str]]


# ---- Cells ------------------------------------------------------------------------------------


def us(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 100 else f"{value:.1f}"


def pair(first: float | None, second: float | None) -> str:
    return "-" if first is None and second is None else f"{us(first)} / {us(second)}"


def cell(case: Case | None) -> str:
    """ "25.9 (98 %)": microseconds, share of the device's copy rate."""
    if case is None:
        return "-"
    if not case["correct"]:
        return "unsupported" if not case.get("checked_with") else "WRONG"
    return f"{us(best(case))} ({case['percent_of_copy']:.0f} %)"


def table(heads: list[str], rows: Rows) -> str:
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


# ---- Tables with targets -------------------------------------------------------------------------


def verdict(time: float | None, target: float) -> str:
    if time is None:
        return "-"
    if time <= target:
        return "met"
    return f"+{us(time - target)} (+{100 * (time / target - 1):.1f} %)"


def target_row(results: Results, group: dict, row: dict, peers: list[str]) -> list[str]:
    wanted = {**group["select"], **row["select"], "l2": "cold"}
    case = results.one(wanted)
    known = row.get("peers", [None] * len(group["peers"]))
    measured = [us(median(results.one(wanted, peer), "plain")) for peer in peers]
    if case is None:
        memory_only, floor, ours, error = "-", "-", "-", "not measured"
    else:
        memory_only = pair(case["memory_only_us"], case["memory_only_programmatic_us"])
        floor = us(case["floor_us"])
        ours = pair(median(case, "plain"), median(case, "programmatic"))
        error = verdict(best(case), row["target_us"]) if case["correct"] else cell(case)
    return [row["name"], floor, memory_only, *(us(value) for value in known), *measured, ours,
            us(row["target_us"]), error]


def target_tables(results: Results, targets: dict) -> str:
    text = ""
    for group in targets["tables"]:
        peers = results.peers({**group["select"], "l2": "cold"})
        heads = ["case", "bytes / copy", "memory only, plain / PDL",
                 *(f"{peer} (published)" for peer in group["peers"]),
                 *(f"{peer} ({run_of_peers(results.documents)})" for peer in peers),
                 "narrowfloat, plain / PDL", "target", "result"]
        rows = [target_row(results, group, row, peers) for row in group["rows"]]
        text += f"### {group['title']}\n\n{group['about']}\n\n{table(heads, rows)}\n"
    return text


# ---- Rules for all sizes -------------------------------------------------------------------------

LARGE_ELEMENTS = 1 << 24
MIN_PERCENT_OF_COPY = 92
MAX_OVER_FLOOR = 1.10
MAX_US_OVER_MEMORY_ONLY = 0.3


def is_plain_and_exact(case: Case) -> bool:
    return (case["op"] in ("quantize", "dequantize") and case["math"] == "exact"
            and not case["four_over_six"] and case["source"] == "plain")


def is_large(case: Case) -> bool:
    return bool(case["rows"]) and case["rows"] * case["cols"] >= LARGE_ELEMENTS


def over_memory_only(case: Case) -> float:
    programmatic = case["memory_only_programmatic_us"]
    return best(case) - (case["memory_only_us"] if programmatic is None else programmatic)


# (what holds, for which cases, whether it does)
RULES = [
    (f"quantize and dequantize, `exact`, not 4-over-6, M x K from 2^24 on: at least "
     f"{MIN_PERCENT_OF_COPY} % of copy",
     lambda c: is_plain_and_exact(c) and is_large(c),
     lambda c: c["percent_of_copy"] >= MIN_PERCENT_OF_COPY),
    ("fused, `exact`, not 4-over-6, M x K from 2^24 on: at most 10 % over bytes / copy",
     lambda c: (c["op"] == "quantize" and c["source"] != "plain" and is_large(c)
                and c["math"] == "exact" and not c["four_over_six"]),
     lambda c: best(c) <= MAX_OVER_FLOOR * c["floor_us"]),
    (f"quantize, `exact`, linear scales, given scale, M x K below 2^24: at most "
     f"{MAX_US_OVER_MEMORY_ONLY} us over memory only (per token has targets of its own)",
     lambda c: (is_plain_and_exact(c) and c["op"] == "quantize" and not is_large(c)
                and c["format"] != "nvfp4_per_token"
                and c["layout"] in ("linear", "mn_major") and c["encode_scale"] != "amax"),
     lambda c: over_memory_only(c) <= MAX_US_OVER_MEMORY_ONLY),
]


def name_of(case: Case) -> str:
    words = (case["op"], case["format"], case["layout"], case["dtype"], case["source"],
             case["encode_scale"], f"{case['rows']}x{case['cols']}")
    return " ".join(str(word) for word in words if word not in (None, "plain"))


def rules_table(results: Results) -> str:
    """How many cases follow a rule, and those that do not."""
    text = "### Rules for all sizes\n\n"
    for rule, applies, holds in RULES:
        cases = [c for c in results.cases
                 if not c["peer"] and c["correct"] and c["l2"] == "cold" and applies(c)]
        misses = sorted((c for c in cases if not holds(c)), key=order)
        if cases:
            text += f"- {rule}: {len(cases) - len(misses)} of {len(cases)} cases\n"
        for case in misses:
            text += (f"  - {name_of(case)}: {us(best(case))} us, {case['percent_of_copy']:.1f} %, "
                     f"bytes / copy {us(case['floor_us'])}, memory only "
                     f"{pair(case['memory_only_us'], case['memory_only_programmatic_us'])}\n")
    return text + "\n"


# ---- Sweeps --------------------------------------------------------------------------------------


def pivot(cases: list[Case], row_of: Callable[[Case], tuple], column_of: Callable[[Case], int],
          corner: str, unit: str) -> str:
    columns = sorted({column_of(case) for case in cases})
    lines: dict[tuple, dict[int, Case]] = {}
    for case in cases:
        lines.setdefault(row_of(case), {})[column_of(case)] = case
    rows = [[" ".join(str(part) for part in line), *(cell(found.get(c)) for c in columns)]
            for line, found in lines.items()]
    return table([corner, *(f"{unit}{column}" for column in columns)], rows)


def order(case: Case) -> tuple:
    format_rank = FORMATS.index(case["format"]) if case["format"] in FORMATS else -1
    return (str(case["op"]), str(case["source"]), format_rank, str(case["layout"]),
            case["cols"] or 0)


def by_format(case: Case) -> tuple:
    return (case["format"], case["layout"])


SECTIONS = [
    ("Quantize, K = 7168", {"op": "quantize", "cols": 7168}, by_format),
    ("Quantize, fp16 input, K = 7168", {"op": "quantize", "cols": 7168, "dtype": "F16"}, by_format),
    ("Quantize, `fast` mode, K = 7168", {"op": "quantize", "cols": 7168, "math": "fast"},
     by_format),
    ("Quantize, scale computed from the maximum, K = 7168",
     {"op": "quantize", "cols": 7168, "encode_scale": "amax"}, by_format),
    ("Quantize, 4-over-6, K = 7168", {"op": "quantize", "cols": 7168, "four_over_six": True},
     by_format),
    ("Quantize, other K", {"op": "quantize", "cols": (1536, 2048, 2880, 4096, 16384)},
     lambda case: (case["format"], case["layout"], f"K={case['cols']}")),
    ("Fused with quantization, K = 7168",
     {"op": "quantize", "cols": 7168, "source": ("silu_mul", "smooth", "rmsnorm", "add_rmsnorm")},
     lambda case: (case["source"], case["format"], case["layout"])),
    ("Dequantize, K = 7168", {"op": "dequantize", "cols": 7168}, by_format),
    ("Dequantize to fp16, K = 7168", {"op": "dequantize", "cols": 7168, "dtype": "F16"}, by_format),
    ("Dequantize, other K", {"op": "dequantize", "cols": (1536, 2048, 2880, 4096, 16384)},
     lambda case: (case["format"], case["layout"], f"K={case['cols']}")),
    ("Maxima", {"op": ("amax", "row_amax")}, lambda case: (case["op"], f"K={case['cols']}")),
    ("Relayout of scales, K = 7168", {"op": "relayout", "cols": 7168}, by_format),
    ("8-bit groups, KV caches, shuffled rows, packed bits",
     {"op": ("group_quantize", "kv_quantize", "kv_dequantize", "kv_append", "shuffle",
             "pack_bits")}, lambda case: (case["op"], f"K={case['cols']}")),
]


def sweep_tables(results: Results) -> str:
    text = ""
    for title, wanted, row_of in SECTIONS:
        cases = sorted(results.select({**COMMON, **wanted}), key=order)
        if cases:
            text += f"### {title}\n\n{pivot(cases, row_of, lambda c: c['rows'], '', 'M=')}\n"
    cases = sorted(results.select({"op": "activation", "l2": "cold"}), key=lambda c: c["tokens"])
    if cases:
        by_input = pivot(cases, lambda c: (c["input"], "maps:", c["maps"]), lambda c: c["tokens"],
                         "input", "T=")
        text += f"### Block-FP8 activation\n\n{by_input}\n"
    return text


def peer_table(results: Results) -> str:
    rows = []
    for case in sorted((c for c in results.cases if c["peer"]), key=order):
        ours = results.one({key: case[key] for key in (*IDENTITY, "l2") if key != "maps"})
        theirs, mine = median(case, "plain"), median(ours, "plain")
        size = f"T={case['tokens']}" if case["tokens"] else f"{case['rows']}x{case['cols']}"
        rows.append([str(case["format"] or case["op"]), size, case["peer"], us(theirs),
                     pair(mine, median(ours, "programmatic")),
                     f"{theirs / mine:.2f}" if theirs and mine else "-",
                     case["note"] if case["correct"] else f"WRONG: {case['message']}"])
    heads = ["case", "size", "peer", "peer, plain us", "narrowfloat, plain / PDL us",
             "peer / narrowfloat, both plain", "peer's result"]
    title = f"### Peers ({run_of_peers(results.documents)})"
    return f"{title}\n\n{table(heads, rows)}\n" if rows else ""


def machine_text(results: Results) -> str:
    machine, rates = results.machine, results.rates
    commits = ", ".join(results.commits)
    return (f"{machine['name']}, driver {machine['driver']}, CUDA {machine['cuda_runtime']}"
            f"{f', commit {commits}' if commits else ''}. Device copy {rates['copy_gb_per_s']:.0f} "
            f"GB/s, two reads for a write {rates['read_2_write_1_gb_per_s']:.0f} GB/s, read only "
            f"{rates['read_gb_per_s']:.0f} GB/s, in the same run.\n\n")


def summary(results: Results) -> str:
    cases = [case for case in results.cases if not case["peer"]]
    wrong = [case for case in cases if not case["correct"]]
    text = f"{len(cases)} cases, {len(cases) - len(wrong)} with the right bytes.\n\n"
    for case in wrong[:20]:
        name = " ".join(str(case[key]) for key in IDENTITY if case[key] not in (None, False))
        text += f"- {name}: {case['message']}\n"
    return text + ("\n" if wrong else "")


def report(results: Results, targets: dict, everything: bool) -> str:
    text = machine_text(results) + summary(results)
    if results.machine["name"] == targets["device"]:
        text += target_tables(results, targets)
    else:
        text += f"No targets: they are for {targets['device']}.\n\n"
    text += rules_table(results)
    if everything:
        text += sweep_tables(results)
    return text + peer_table(results)


def all_tables(results: Results | None, moe: report_moe.MoeResults, targets: Path = TARGETS,
               everything: bool = True) -> str:
    text = report(results, json.loads(targets.read_text()), everything) if results else ""
    return text + report_moe.report(moe, json.loads(MOE_TARGETS.read_text()), everything)


def page_of(folder: Path) -> str:
    """README.md of a folder: every table, with titles one level higher."""
    results, moe_documents = load([folder])
    moe = report_moe.MoeResults(moe_documents)
    machine = results.machine if results else moe.machine
    method = Path(os.path.relpath(METHOD, folder)).as_posix()
    head = (f"# Results on {machine['name']}\n\n"
            f"`bench/report.py bench/results/{folder.resolve().name} --page` writes this page from "
            f"the\nJSON documents beside it. [benchmarks.md]({method}) has the method.\n\n")
    return head + re.sub(r"^#(#+ )", r"\1", all_tables(results, moe), flags=re.M).rstrip() + "\n"


def draw_plots(results: Results | None, moe: report_moe.MoeResults, folder: Path) -> None:
    import report_plots  # Imports matplotlib.
    folder.mkdir(parents=True, exist_ok=True)
    if results:
        report_plots.draw(results, folder)
    report_plots.draw_layers(moe, json.loads(MOE_TARGETS.read_text()), folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--targets", type=Path, default=TARGETS)
    parser.add_argument("--all", action="store_true", help="every table, not those with targets")
    parser.add_argument("--compact", action="store_true", help="rewrite the documents")
    parser.add_argument("--page", action="store_true", help="write RESULTS/README.md")
    parser.add_argument("--plots", type=Path, help="draw SVG files into this folder")
    arguments = parser.parse_args()
    results, moe_documents = load(arguments.results)
    moe = report_moe.MoeResults(moe_documents)
    if arguments.compact:
        for file in files_of(arguments.results):
            compact(file)
    if arguments.plots:
        draw_plots(results, moe, arguments.plots)
    if arguments.page:
        for folder in arguments.results:
            (folder / "README.md").write_text(page_of(folder))
    if not (arguments.compact or arguments.plots or arguments.page):
        print(all_tables(results, moe, arguments.targets, arguments.all))


if __name__ == "__main__":
    main()
