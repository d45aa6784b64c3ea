#!/usr/bin/env python3
"""The page of what the CPU's quantizers and dequantizers reach from the cache:

    bench/report_cpu.py              write bench/results/epyc-zen4/README.md, and print the table of
                                     docs/benchmarks.md

It is made from the documents beside it, which `narrowfloat-bench bench OP --device cpu --l2 warm
--json` wrote, one for each implementation (NARROWFLOAT_FORCE), type and layout.
"""

from __future__ import annotations

import json
from pathlib import Path

from report_moe import table

FOLDER = Path(__file__).resolve().parent / "results" / "epyc-zen4"
IMPLEMENTATIONS = ("baseline", "avx2", "avx512")
ELEMENT_BYTES = {"fp32": 4, "bf16": 2}

TEXT = """# AMD EPYC (Zen 4), one core from the second-level cache

`bench/report_cpu.py` writes this page from the JSON documents beside it.

{machine}.

GB/s of the unquantized side: elements times their bytes over the 10th percentile of the replays.
The machine had other work, so nothing that leaves the caches was measured. Every result was
compared with `cpu_reference`, byte by byte. The operation is the public one: checks, selection and
a parallel loop of one thread are in the times.

```
NARROWFLOAT_FORCE=quantize:cpu_avx512 narrowfloat-bench bench quantize --device cpu --dtype fp32 \\
  --threads 1 --rows 64 --cols 2048 --l2 warm --layout linear --replay-ms 2 --replays 30 --json
```

{tables}"""


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
    return f"## {op}, {dtype}\n\n{table(['format', *columns], rows)}"


def headline() -> str:
    columns = {f"{op}, `cpu_{name}`": cases(op, "fp32", "linear", name)
               for op in ("quantize", "dequantize") for name in IMPLEMENTATIONS}
    rows = [[name, *(f"{rates[name]:.1f}" for rates in columns.values())]
            for name in ("nvfp4", "mxfp4", "mxfp8", "fp8_1x128")]
    return table(["", *columns], rows)


def page() -> str:
    document = json.loads((FOLDER / "quantize_fp32_linear_avx512.json").read_text())
    machine = f"{document['cpu']}, commit {document['commit']}, 64 x 2048 elements, linear scales"
    tables = [rates_table(op, dtype)
              for op in ("quantize", "dequantize") for dtype in ELEMENT_BYTES]
    return TEXT.format(machine=machine, tables="\n".join(tables))


if __name__ == "__main__":
    (FOLDER / "README.md").write_text(page())
    print(headline())
