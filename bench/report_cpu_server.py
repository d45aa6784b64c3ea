#!/usr/bin/env python3
"""The page of what a server's CPU reaches with all of its cores, and with one:

    bench/report_cpu_server.py       write bench/results/xeon-emerald-rapids/README.md

It is made from the documents beside it, which `narrowfloat-bench bench OP --device cpu --json` and
`narrowfloat-bench moe bench --json` wrote.
"""

from __future__ import annotations

import json
from pathlib import Path

from report_moe import table

FOLDER = Path(__file__).resolve().parent / "results" / "xeon-emerald-rapids"
ELEMENT_BYTES = {"fp32": 4, "bf16": 2}
SWIZZLED = "swizzled_128x4"

TEXT = """# Intel Xeon (Emerald Rapids), 16 processors of a virtual machine

`bench/report_cpu_server.py` writes this page from the JSON documents beside it.

Model 207, AMX, Linux 6.18, 300 MB of cache that all cores share. What other machines on the host
did is not known: a loop of 16 threads read 2 GB at 98 to 145 GB/s within a minute, and copied past
the caches at 117 to 171 GB/s, read and written.

## Mixture of Experts

{shape}, {experts} experts, 16 threads, commit {layers_commit}: milliseconds, the median of runs of
0.12 s or more. Every case was checked against fp64 within the
[bounds](../../../docs/moe.md#123-bounds). At one token, 75 % of 98 GB/s would be 0.72 ms.

```
NARROWFLOAT_FORCE=grouped_gemm:cpu_avx512_bf16 narrowfloat-bench moe bench --shape gpt-oss-20b \\
  --mode mxfp4_bf16 --mode nvfp4_bf16 --tokens 1,8,64,512 --threads 16 --min-time 0.12 --fast-sums --json
```

{layers}
## Quantizers and dequantizers

Commit {commit}, GB/s of the unquantized side: elements times their bytes over the 10th percentile
of the replays. Every result was compared with `cpu_reference`, byte by byte.

### One core, from its second-level cache

64 x 2048 elements. The last column is the rate with swizzled scales in percent of that with linear
ones, `cpu_avx512`.

```
NARROWFLOAT_FORCE=quantize:cpu_avx512 narrowfloat-bench bench quantize --device cpu --dtype fp32 \\
  --threads 1 --rows 64 --cols 2048 --l2 warm --layout linear --layout swizzled_128x4 \\
  --replay-ms 1 --replays 15 --json
```

{cached}
The aims are those of a core at 4 GHz: fp32 to MXFP4 at 30 GB/s, NVFP4 at 22, MXFP8 and FP8 1x128 at 25 with AVX-512,
60 % of these with AVX2. A core of this virtual machine reaches 79, 90, 77 and 78 % of them with AVX-512; with AVX2, 58 to
75 % of its own AVX-512 rates.

### 16 cores

8192 x 4096 elements in two sets of buffers, of which the shared cache holds a part. The last column
counts all bytes, read and written; copies past the caches moved 117 to 149 GB/s before and after.

```
narrowfloat-bench bench quantize --device cpu --dtype fp32 --threads 16 --rows 8192 --cols 4096 \\
  --layout linear --layout swizzled_128x4 --replay-ms 20 --replays 5 --json
```

{all_cores}
Aims: 90 % of a copy past the caches to dequantize, which fp32 reaches; with bf16, 84 to 107 GB/s are less than
117. Swizzled scales are to cost 5 % at most, which they do not reach everywhere.
"""


def document(name: str) -> dict:
    loaded = json.loads((FOLDER / f"{name}.json").read_text())
    assert all(case["correct"] for case in loaded["cases"])
    return loaded


def rates(name: str, layout: str) -> dict[str, float]:
    """Returns GB/s of each format that the layout has."""
    dtype = name.split("_")[2]
    return {case["format"]: case["rows"] * case["cols"] * ELEMENT_BYTES[dtype]
            / case["plain"]["p10_us"] / 1e3
            for case in document(name)["cases"] if case["layout"] == layout}


def percent(swizzled: dict[str, float], linear: dict[str, float], one: str) -> str:
    return f"{100 * swizzled[one] / linear[one]:.0f}" if one in swizzled else ""


def cached() -> str:
    rows = []
    for op in ("quantize", "dequantize"):
        for dtype in ELEMENT_BYTES:
            avx2 = rates(f"l2_{op}_{dtype}_avx2", "linear")
            avx512 = rates(f"l2_{op}_{dtype}_avx512", "linear")
            swizzled = rates(f"l2_{op}_{dtype}_avx512", SWIZZLED)
            rows += [[op, one, dtype, f"{avx2[one]:.1f}", f"{avx512[one]:.1f}",
                      percent(swizzled, avx512, one)] for one in avx512]
    return table(["", "format", "type", "`cpu_avx2`", "`cpu_avx512`", "swizzled, %"], rows)


def all_cores() -> str:
    rows = []
    for op in ("quantize", "dequantize"):
        for dtype in ELEMENT_BYTES:
            name = f"dram_{op}_{dtype}"
            linear = rates(name, "linear")
            swizzled = rates(name, SWIZZLED)
            moved = {case["format"]: (case["read_bytes"] + case["write_bytes"])
                     / case["plain"]["p10_us"] / 1e3
                     for case in document(name)["cases"] if case["layout"] == "linear"}
            rows += [[op, one, dtype, f"{linear[one]:.0f}", percent(swizzled, linear, one),
                      f"{moved[one]:.0f}"] for one in linear]
    return table(["", "format", "type", "`cpu_avx512`", "swizzled, %", "all bytes"], rows)


def layers(documents: dict[str, dict]) -> str:
    rows = []
    for name, found in documents.items():
        implementation, _, sums = name.rpartition("_")
        times = {(case["mode"], case["tokens"]): case["median_seconds"] * 1e3
                 for case in found["cases"]}
        tokens = sorted({one for _, one in times})
        rows += [[mode, f"`cpu_{implementation}`", sums,
                  *(f"{times[mode, one]:.2f}" for one in tokens)]
                 for mode in dict.fromkeys(mode for mode, _ in times)]
    rows.sort(key=lambda row: row[0])
    return table(["mode", "implementation", "sums", *(f"T = {one}" for one in tokens)], rows)


def page() -> str:
    documents = {name: document(f"moe_{name}")
                 for name in ("avx512_exact", "avx512_bf16_fast", "amx_bf16_fast")}
    first = documents["avx512_exact"]
    return TEXT.format(shape=first["shape"], experts=first["experts"],
                       layers_commit=first["commit"], layers=layers(documents),
                       commit=document("l2_quantize_fp32_avx512")["commit"], cached=cached(),
                       all_cores=all_cores())


if __name__ == "__main__":
    (FOLDER / "README.md").write_text(page())
