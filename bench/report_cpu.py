#!/usr/bin/env python3
"""The page of what the CPU's quantizers and dequantizers reach from the cache, and its layers:

    bench/report_cpu.py              write bench/results/epyc-zen4/README.md, and print the table of
                                     docs/benchmarks.md

It is made from the documents beside it, which `narrowfloat-bench bench OP --device cpu --l2 warm
--json` wrote, one for each implementation (NARROWFLOAT_FORCE), type and layout, and from those of
`narrowfloat-bench moe bench --json`, one for each implementation with and without `--fast-sums`.
"""

from __future__ import annotations

import json
from pathlib import Path

from report_moe import table

FOLDER = Path(__file__).resolve().parent / "results" / "epyc-zen4"
IMPLEMENTATIONS = ("baseline", "avx2", "avx512")
ELEMENT_BYTES = {"fp32": 4, "bf16": 2}

SUMS = ("exact", "fast")

TEXT = """# AMD EPYC (Zen 4), one core

## Quantizers and dequantizers from the second-level cache

`bench/report_cpu.py` writes this page from the JSON documents beside it.

{machine}.

GB/s of the unquantized side: elements times their bytes over the 10th percentile of the replays,
the faster of two runs or more. The machine had other work. Every result was compared with
`cpu_reference`, byte by byte. The operation is the public one: checks, selection and a parallel loop
of one thread are in the times.

```
NARROWFLOAT_FORCE=quantize:cpu_avx512 narrowfloat-bench bench quantize --device cpu --dtype fp32 \\
  --threads 1 --rows 64 --cols 2048 --l2 warm --layout linear --replay-ms 2 --replays 30 --json
```

{tables}
### From memory

{memory_machine}, 4096 x 4096 elements in buffers of four times the cache: each figure is the best of several rounds. Swizzled:
the rate in percent of that with linear scales. The machine had other work, which took memory's rate: these are
for comparisons within a line.

```
narrowfloat-bench bench quantize --device cpu --dtype fp32 --threads 1 --rows 4096 --cols 4096 \\
  --layout linear --layout swizzled_128x4 --replay-ms 20 --replays 9 --json
```

{memory}
### Fused sources, 4-over-6, maxima

{fused_machine}: the same method; the implementations took turns. The last column is the rate at which a loop of the
same program read memory in the best minute of `cpu_avx512`: how little the other work left. Rates count the rows
that are quantized; SiLU reads twice as many elements, and in `fast` the reciprocals from a table of 2 MiB.

```
NARROWFLOAT_FORCE=quantize:cpu_avx512 narrowfloat-bench bench quantize --device cpu --dtype bf16 \\
  --threads 1 --rows 64 --cols 2048 --l2 warm --layout linear --replay-ms 2 --replays 30 \\
  --source silu_mul --source smooth --source rmsnorm --source add_rmsnorm --json
```

{fused}
## Mixture of Experts

{layers}
{int8}
{deepseek}"""

LAYERS_TEXT = """{machine}, commit {commit}, {shape}: a whole layer with {experts} experts in memory, one thread,
milliseconds of processor time, the least of several runs. The machine had other work, which shares
caches and memory with a run. Every case was checked against fp64 within the
[bounds](../../../docs/moe.md#123-bounds).

```
NARROWFLOAT_FORCE=grouped_gemm:cpu_avx512_bf16 narrowfloat-bench moe bench --shape gpt-oss-20b \\
  --mode mxfp4_bf16 --tokens 1,8,64,512 --threads 1 --min-time 0.2 --fast-sums --json
```

{table}"""


def cases(op: str, dtype: str, layout: str, implementation: str) -> dict[str, float]:
    """GB/s of each format that the layout has."""
    name = f"{op}_{dtype}_{layout.partition('_')[0]}_{implementation}.json"
    document = json.loads((FOLDER / name).read_text())
    assert all(case["correct"] for case in document["cases"])
    return {case["format"]: case["rows"] * case["cols"] * ELEMENT_BYTES[dtype]
            / case["plain"]["p10_us"] / 1e3
            for case in document["cases"] if case["layout"] == layout}


def rates_table(op: str, dtype: str) -> str:
    columns = {f"`cpu_{name}`": cases(op, dtype, "linear", name) for name in IMPLEMENTATIONS}
    columns["`cpu_avx512`, swizzled"] = cases(op, dtype, "swizzled_128x4", "avx512")
    rows = [[name, *(f"{rates[name]:.1f}" if name in rates else "" for rates in columns.values())]
            for name in columns["`cpu_avx512`"]]
    return f"### {op}, {dtype}\n\n{table(['format', *columns], rows)}"


FUSED_FILES = ("fused_bf16", "four_over_six_fp32", "four_over_six_bf16", "silu_fast_bf16",
               "four_over_six_fast_fp32", "four_over_six_fast_bf16", "amax_fp32", "amax_bf16")


def fused_documents(name: str) -> dict[str, dict]:
    """Returns the document of each implementation."""
    found = {one: json.loads((FOLDER / f"{name}_{one}.json").read_text())
             for one in IMPLEMENTATIONS}
    for document in found.values():
        assert all(case["correct"] for case in document["cases"])
    return found


def fused_label(case: dict) -> tuple[str, str, str]:
    """Names what a case measures, its format and its type."""
    what = "4-over-6" if case["four_over_six"] else case["source"]
    if case["math"] == "fast":
        what += ", `fast`"
    if case["op"] == "quantize":
        return what, case["format"], case["dtype"]
    return case["op"], "", case["dtype"]


def fused_table() -> str:
    rows = []
    for name in FUSED_FILES:
        documents = fused_documents(name)
        rates = {one: {fused_label(case): case["rows"] * case["cols"]
                       * ELEMENT_BYTES[name.rpartition("_")[2]] / case["plain"]["p10_us"] / 1e3
                       for case in document["cases"]} for one, document in documents.items()}
        memory = documents[IMPLEMENTATIONS[-1]]["rates"]["read_gb_per_s"]
        rows += [[*label, *(f"{rates[one][label]:.2f}" for one in IMPLEMENTATIONS), f"{memory:.1f}"]
                 for label in rates[IMPLEMENTATIONS[-1]]]
    return table(["", "format", "type", *(f"`cpu_{one}`" for one in IMPLEMENTATIONS),
                  "memory's reads"], rows)


def memory_document(op: str, dtype: str) -> dict:
    document = json.loads((FOLDER / f"dram_{op}_{dtype}.json").read_text())
    assert document["threads"] == 1 and all(case["correct"] for case in document["cases"])
    return document


def memory_table() -> str:
    rows = []
    for op in ("quantize", "dequantize"):
        for dtype, element_bytes in ELEMENT_BYTES.items():
            found = memory_document(op, dtype)["cases"]
            rates = {(case["format"], case["layout"]): case["rows"] * case["cols"] * element_bytes
                     / case["plain"]["p10_us"] / 1e3 for case in found}
            for one in dict.fromkeys(case["format"] for case in found):
                linear, swizzled = rates[one, "linear"], rates.get((one, "swizzled_128x4"))
                rows.append([op, one, dtype, f"{linear:.1f}",
                             f"{100 * swizzled / linear:.0f}" if swizzled else ""])
    return table(["", "format", "type", "GB/s", "swizzled, %"], rows)


def headline() -> str:
    columns = {f"{op}, `cpu_{name}`": cases(op, "fp32", "linear", name)
               for op in ("quantize", "dequantize") for name in IMPLEMENTATIONS}
    rows = [[name, *(f"{rates[name]:.1f}" for rates in columns.values())]
            for name in ("nvfp4", "mxfp4", "mxfp8", "fp8_1x128")]
    return table(["", *columns], rows)


def layer_documents() -> list[tuple[str, str, dict]]:
    """(implementation, sums, document) of each that is there."""
    found = []
    for implementation in ("avx2", "avx512", "avx512_bf16"):
        for sums in SUMS:
            path = FOLDER / f"moe_{implementation}_{sums}.json"
            if path.exists():
                document = json.loads(path.read_text())
                assert document["fast_sums"] == (sums == "fast") and document["threads"] == 1
                assert all(case["correct"] for case in document["cases"])
                found.append((implementation, sums, document))
    return found


def layers() -> str:
    documents = layer_documents()
    tokens = sorted({case["tokens"] for _, _, document in documents for case in document["cases"]})
    rows = []
    for implementation, sums, document in documents:
        times = {(case["mode"], case["tokens"]): case["processor_seconds"] * 1e3
                 for case in document["cases"]}
        for mode in dict.fromkeys(mode for mode, _ in times):
            rows.append([mode, f"`cpu_{implementation}`", sums,
                         *(f"{times[mode, one]:.1f}" if (mode, one) in times else ""
                           for one in tokens)])
    rows.sort(key=lambda row: row[0])
    document = documents[0][2]
    return LAYERS_TEXT.format(
        shape=document["shape"], machine=document["cpu"], commit=document["commit"],
        experts=document["cases"][0]["local_experts"],
        table=table(["mode", "implementation", "sums", *(f"T = {one}" for one in tokens)], rows))


INT8_TEXT = """### Rows in int8

{machine}, commit {commit}, the same layer: modes and implementations ran in turn, and each figure is that
of its run: of one thread processor time, of two threads the 10th percentile, milliseconds. GB/s: the
weights of the experts that were hit, at T = 1; beside it the rate at which the program read memory in the
same minute. The machine had no other work.

{tables}"""
INT8_RUNS = (("bf16", "avx512", "exact"), ("bf16", "avx512_bf16", "fast"), ("int8", "avx2", "exact"),
             ("int8", "avx512", "exact"))  # fmt: skip


def int8_row(mode: str, implementation: str, sums: str, threads: int) -> tuple[list[str], dict]:
    """Returns a line of the table, and the document."""
    name = f"turns_{mode}_{implementation}_{sums}_{threads}.json"
    document = json.loads((FOLDER / name).read_text())
    assert document["threads"] == threads and document["fast_sums"] == (sums == "fast")
    assert all(case["correct"] and case["implementation"] == f"cpu_{implementation}"
               for case in document["cases"])
    seconds = {case["tokens"]: case["processor_seconds" if threads == 1 else "p10_seconds"]
               for case in document["cases"]}
    first = document["cases"][0]
    return [f"`{mode}`", f"`cpu_{implementation}`", "" if "int8" in mode else sums,
            *(f"{seconds[tokens] * 1e3:.{2 if seconds[tokens] < 0.01 else 1}f}"
              for tokens in sorted(seconds)),
            f"{first['weight_bytes'] / seconds[1] / 1e9:.1f}",
            f"{first['read_gb_per_second']:.1f}"], document


DEEPSEEK_TEXT = """### DeepSeek-V3's experts

{machine}, commit {commit}: hidden 7168, intermediate 2048, top 8, {experts} of the 256 experts, routed without
groups, one thread, milliseconds of processor time, the least of several runs. The machine had other work.
GB/s: the weights of the experts that were hit, at T = 1; the program read memory at {memory} GB/s.

{table}"""


def deepseek() -> str:
    rows = []
    rates = []
    for name in ("avx512_bf16_fast", "avx512_int8"):
        document = json.loads((FOLDER / f"moe_deepseek_{name}.json").read_text())
        assert document["threads"] == 1 and all(case["correct"] for case in document["cases"])
        cases = {(case["mode"], case["tokens"]): case for case in document["cases"]}
        tokens = sorted({one for _, one in cases})
        rates.append(f"{document['cases'][0]['read_gb_per_second']:.0f}")
        for mode in dict.fromkeys(mode for mode, _ in cases):
            first = cases[mode, 1]
            rows.append([f"`{mode}`", f"`{first['implementation']}`",
                         "fast" if document["fast_sums"] else "",
                         *(f"{cases[mode, one]['processor_seconds'] * 1e3:.1f}" for one in tokens),
                         f"{first['weight_bytes'] / first['processor_seconds'] / 1e9:.1f}"])
    return DEEPSEEK_TEXT.format(
        machine=document["cpu"], commit=document["commit"], memory=" and ".join(rates),
        experts=first["local_experts"],
        table=table(["mode", "implementation", "sums", *(f"T = {one}" for one in tokens), "GB/s"],
                    rows))


def int8_layers() -> str:
    tables = []
    for threads in (1, 2):
        found = [int8_row(f"{weights}_{rows}", implementation, sums, threads)
                 for weights in ("mxfp4", "nvfp4") for rows, implementation, sums in INT8_RUNS]
        document = found[0][1]
        tokens = [f"T = {case['tokens']}" for case in document["cases"]]
        heads = ["mode", "implementation", "sums", *tokens, "GB/s", "memory"]
        tables.append(f"{threads} thread{'s' if threads > 1 else ''}:\n\n"
                      + table(heads, [row for row, _ in found]))
    return INT8_TEXT.format(machine=document["cpu"], commit=document["commit"],
                            tables="\n".join(tables))


def page() -> str:
    document = json.loads((FOLDER / "quantize_fp32_linear_avx512.json").read_text())
    machine = f"{document['cpu']}, commit {document['commit']}, 64 x 2048 elements, linear scales"
    tables = [rates_table(op, dtype)
              for op in ("quantize", "dequantize") for dtype in ELEMENT_BYTES]
    fused = fused_documents(FUSED_FILES[0])[IMPLEMENTATIONS[-1]]
    memory = memory_document("quantize", "fp32")
    return TEXT.format(machine=machine, tables="\n".join(tables), layers=layers(),
                       int8=int8_layers(), deepseek=deepseek(),
                       memory=memory_table(),
                       memory_machine=f"{memory['cpu']}, commit {memory['commit']}",
                       fused_machine=f"{fused['cpu']}, commit {fused['commit']}",
                       fused=fused_table())


if __name__ == "__main__":
    (FOLDER / "README.md").write_text(page())
    print(headline())
