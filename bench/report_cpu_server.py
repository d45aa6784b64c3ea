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
# (operation, type, threads)
DRAM_RUNS = (*((op, "fp32", threads) for op in ("quantize", "dequantize") for threads in (1, 2, 16)),
             ("quantize", "bf16", 16), ("dequantize", "bf16", 16))
# The program of this commit read buffers that the cache held.
OLD_RATES = "27ff2af"

TEXT = """# Intel Xeon (Emerald Rapids), 16 processors of a virtual machine

`bench/report_cpu_server.py` writes this page from the JSON documents beside it.

Model 207, AMX, Linux 6.18, 300 MB of cache that all cores share. What other machines on the host
did is not known: a loop of 16 threads read 2 GB at 98 to 145 GB/s within a minute of one hour, and
copied past the caches at 117 to 171 GB/s, read and written; in another hour at 99 to 103 and 118 to 122.

## Mixture of Experts

{shape}, {experts} experts, 16 threads: milliseconds, the median of runs of 0.1 s or more. Every case
was checked against fp64 within the [bounds](../../../docs/moe.md#123-bounds). Memory is the rate at
which the program read it in the same minute, from buffers beyond the cache; where there is none, the
program of that time read from the cache. At one token, 75 % of 98 GB/s would be 0.72 ms.
`cpu_amx_int8` has the operations of `cpu_avx512` for few rows. In turns with the program before its kernels changed,
0c41a7b's, `mxfp4_bf16` with tiles took 7.1 to 7.5 ms instead of 10.5 to 11.4 at 64 tokens, 27.8 to 32.1 instead of 33.4 to
39.3 at 512 (medians of three runs each in another hour, at dfbf06c); ranges of strips that copy rows once, at e37938d, save 6
and 9 % of the GEMMs.

```
NARROWFLOAT_FORCE=grouped_gemm:cpu_avx512_bf16 narrowfloat-bench moe bench --shape gpt-oss-20b \\
  --mode mxfp4_bf16 --mode nvfp4_bf16 --tokens 1,8,64,512 --threads 16 --min-time 0.12 --fast-sums --json
```

{layers}
### DeepSeek-V3's experts

Hidden 7168, intermediate 2048, top 8, all {deepseek_experts} experts. At 64 tokens an expert has two rows, at 512
sixteen, so that rows in int8 are multiplied by vectors.

{deepseek}
## Quantizers and dequantizers

GB/s of the unquantized side: elements times their bytes over the 10th percentile
of the replays. Every result was compared with `cpu_reference`, byte by byte.

### One core, from its second-level cache

64 x 2048 elements. Swizzled: the rate in percent of that with linear scales, `cpu_avx512`. At e768773 four of these programs
ran at once, on other cores, and disturbed fp32 quantizers; those are of d50a2e3, two at once, and with AVX2, where that was
not quiet either, of bb593b2, whose kernels take more operations.

```
NARROWFLOAT_FORCE=quantize:cpu_avx512 narrowfloat-bench bench quantize --device cpu --dtype fp32 \\
  --threads 1 --rows 64 --cols 2048 --l2 warm --layout linear --layout swizzled_128x4 \\
  --replay-ms 1 --replays 15 --json
```

{cached}
The aims are those of a core at 4 GHz: fp32 to MXFP4 at 30 GB/s, NVFP4 at 22, MXFP8 and FP8 1x128 at 25 with AVX-512,
60 % of these with AVX2. A core of this virtual machine reached 89, 98, 101 and 102 % of them with AVX-512 at d50a2e3; with
AVX2 at bb593b2 77 to 98 %. A [Zen 4](../epyc-zen4/README.md) reaches all.

### From memory: one thread, two, all

4096 x 4096 elements in 15 to 30 sets of buffers, four times the shared cache. All bytes are
those read and written; they stand beside what the program measured before the cases of the same run: reads for
quantizers, copies past the caches for dequantizers. The rates of one and two threads changed within a run, by a
third and more.

```
narrowfloat-bench bench quantize --device cpu --dtype fp32 --threads 16 --rows 4096 --cols 4096 \\
  --layout linear --layout swizzled_128x4 --replay-ms 20 --replays 5 --json
```

{dram}
Aims: to quantize at 85 % of the rate of reads with two threads, which all formats reach; to dequantize at 90 % of
copies past the caches, which two threads and all cores do from all formats. Swizzled scales are to cost 5 % at most, which
they do not reach everywhere: with all cores linear ones became faster when the codes of later segments were fetched.
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
                      percent(swizzled, avx512, one),
                      document(f"l2_{op}_{dtype}_avx512")["commit"]] for one in avx512]
    return table(["", "format", "type", "`cpu_avx2`", "`cpu_avx512`", "swizzled, %", "commit"],
                 rows)


def dram() -> str:
    rows = []
    for op, dtype, threads in DRAM_RUNS:
        name = f"dram_{op}_{dtype}_{threads}"
        found = document(name)
        linear = rates(name, "linear")
        swizzled = rates(name, SWIZZLED)
        limit = found["rates"]["read_gb_per_s" if op == "quantize" else "copy_gb_per_s"]
        for case in found["cases"]:
            if case["layout"] != "linear":
                continue
            moved = (case["read_bytes"] + case["write_bytes"]) / case["plain"]["p10_us"] / 1e3
            one = case["format"]
            rows.append([op, one, dtype, str(threads), f"{linear[one]:.1f}",
                         percent(swizzled, linear, one), f"{moved:.1f}", f"{limit:.1f}",
                         f"{100 * moved / limit:.0f}", found["commit"]])
    return table(["", "format", "type", "threads", "GB/s", "swizzled, %", "all bytes", "memory",
                  "%", "commit"], rows)


def memory(found: dict) -> str:
    """Empty for documents of the program whose buffers the cache held."""
    rate = found["cases"][0]["read_gb_per_second"]
    return f"{rate:.0f}" if found["commit"] != OLD_RATES else ""


def layers(documents: dict[str, dict]) -> str:
    tokens = sorted({case["tokens"] for found in documents.values() for case in found["cases"]})
    rows = []
    for found in documents.values():
        times = {(case["mode"], case["tokens"]): case for case in found["cases"]}
        for mode in dict.fromkeys(mode for mode, _ in times):
            cases = [times.get((mode, one)) for one in tokens]
            implementation = next(case["implementation"] for case in cases if case)
            sums = "" if "int8" in mode else "fast" if found["fast_sums"] else "exact"
            rows.append([mode, f"`{implementation}`", sums,
                         *(f"{case['median_seconds'] * 1e3:.2f}" if case else "" for case in cases),
                         memory(found), found["commit"]])
    rows.sort(key=lambda row: row[0])
    return table(["mode", "implementation", "sums", *(f"T = {one}" for one in tokens), "memory",
                  "commit"], rows)


def page() -> str:
    documents = {name: document(f"moe_{name}")
                 for name in ("avx512_exact", "avx512_int8", "amx_int8", "avx512_bf16_fast",
                              "amx_bf16_fast")}
    documents["avx512_exact"]["cases"] = [case for case in documents["avx512_exact"]["cases"]
                                          if "int8" not in case["mode"]]
    deepseek = {name: document(f"moe_{name}")
                for name in ("deepseek_bf16_fast", "deepseek_int8")}
    first = documents["avx512_exact"]
    return TEXT.format(shape=first["shape"], experts=first["experts"], layers=layers(documents),
                       deepseek=layers(deepseek),
                       deepseek_experts=deepseek["deepseek_int8"]["cases"][0]["local_experts"],
                       cached=cached(), dram=dram())


if __name__ == "__main__":
    (FOLDER / "README.md").write_text(page())
