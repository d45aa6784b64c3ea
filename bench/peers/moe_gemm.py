#!/usr/bin/env python3
"""Times DeepGEMM's grouped GEMM of FP8 (rows with 1x128 scales by weights with 128x128 scales), and
writes a document beside those of `narrowfloat-bench moe gemm`:

    bench/peers/moe_gemm.py OUT.json [--bench PROGRAM] [--shape N,K,GROUPS]... [--rows M]
                            [--device cuda:N] [--commit TEXT]

With --bench, the path of narrowfloat-bench, narrowfloat's own GEMM is timed in the same run. Some
rows of every result are compared with fp32 sums of the same codes. DeepGEMM is left out where it is
not installed: pip install sgl-deep-gemm, of a version that was built for the installed torch (0.1.5
for torch 2.11). It compiles kernels at run time with nvcc, into a temporary folder unless
DG_JIT_CACHE_DIR names another.
"""

from __future__ import annotations

import argparse
import json
from importlib.metadata import version
from pathlib import Path

try:
    import torch
except ImportError as error:
    raise SystemExit(f"peers: left out: {error}") from error

import harness
import narrowfloat_bench

FP8 = torch.float8_e4m3fn
SHAPES = ((4096, 7168, 8), (7168, 2048, 8), (4096, 7168, 32), (7168, 2048, 32))
ROWS = 16384
CHECKED_ROWS = 64
MAX_ERROR = 4e-3  # The result is rounded to bf16 once; sums are in fp32.


class Problem:
    """Rows of all groups, spread evenly, and the groups' weights, in FP8 with scales."""

    def __init__(self, n: int, k: int, groups: int, rows: int, device: str):
        if rows % (128 * groups):
            raise SystemExit(f"peers: --rows: expected a multiple of {128 * groups}, since each of "
                             f"{groups} groups has whole tiles of 128 rows, got {rows}")
        generator = torch.Generator(device=device).manual_seed(n + k)

        def codes(*shape):
            values = torch.empty(shape, device=device, dtype=FP8)
            for part in values if len(shape) == 3 else [values]:
                random = torch.randn(part.shape, generator=generator, device=device) * 100
                part.copy_(random.clamp(-448, 448))  # Beyond it FP8 has NaN only.
            return values

        def scales(*shape):
            return (1 + torch.rand(shape, generator=generator, device=device)) / 150

        self.n, self.k, self.groups, self.rows = n, k, groups, rows
        self.a, self.a_scales = codes(rows, k), scales(rows, k // 128)
        self.b, self.b_scales = codes(groups, n, k), scales(groups, n // 128, k // 128)
        group = torch.arange(groups, device=device, dtype=torch.int32)
        self.group_of_row = group.repeat_interleave(rows // groups)
        self.out = torch.empty((rows, n), device=device, dtype=torch.bfloat16)

    def error(self) -> float:
        """The relative error of some rows of every group."""
        wrong = total = 0.0
        for group in range(self.groups):
            first = group * (self.rows // self.groups)
            picked = slice(first, first + max(1, CHECKED_ROWS // self.groups))
            a = self.a[picked].float() * self.a_scales[picked].repeat_interleave(128, 1)
            factor = self.b_scales[group].repeat_interleave(128, 0).repeat_interleave(128, 1)
            wanted = a @ (self.b[group].float() * factor).T
            wrong += (self.out[picked].float() - wanted).norm().item() ** 2
            total += wanted.norm().item() ** 2
        return (wrong / total) ** 0.5


def measure(problem: Problem, deep_gemm) -> dict:
    # The layout that the kernel reads, so that no other kernel is timed with it.
    a_scales = deep_gemm.get_mn_major_tma_aligned_tensor(problem.a_scales)

    def call(index: int):
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
            (problem.a, a_scales), (problem.b, problem.b_scales), problem.out,
            problem.group_of_row, disable_ue8m0_cast=True)

    call(0)
    error = problem.error()
    # Rows, weights and results are many times as large as the L2 cache: one set is enough.
    return {"peer": "deep_gemm", "mode": "fp8_block",
            **harness.time_burst_and_sustained(call, 1), "error": error,
            "correct": error <= MAX_ERROR}


def leave_out(error: Exception) -> int:
    print(f"peers: deep_gemm left out: {str(error)[:300]}; pip install sgl-deep-gemm of a version "
          f"for torch {torch.__version__}", flush=True)
    return 0


def parse_shape(text: str) -> tuple[int, int, int]:
    parts = tuple(int(part) for part in text.split(","))
    if len(parts) != 3 or parts[0] % 128 or parts[1] % 128:
        raise argparse.ArgumentTypeError(
            f"expected N,K,GROUPS with N and K multiples of 128, got {text!r}")
    return parts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--bench", type=Path, help="the path of narrowfloat-bench")
    parser.add_argument("--shape", type=parse_shape, action="append")
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--commit", default="")
    arguments = parser.parse_args()
    caches = harness.use_temporary_caches()
    torch.cuda.set_device(arguments.device)
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        import deep_gemm
    except (ImportError, OSError, RuntimeError) as error:
        return leave_out(error)
    document = {"schema_version": 1, "command": "moe gemm peers", "commit": arguments.commit,
                "machine": {"device": arguments.device,
                            "name": torch.cuda.get_device_properties(arguments.device).name},
                "torch": torch.__version__, "deep_gemm": version("sgl-deep-gemm"), "gemms": []}
    for n, k, groups in arguments.shape or SHAPES:
        size = {"n": n, "k": k, "groups": groups, "rows": arguments.rows}
        try:
            found = [measure(Problem(*size.values(), arguments.device), deep_gemm)]
        except RuntimeError as error:  # So a version for another torch shows.
            return leave_out(error)
        torch.cuda.empty_cache()
        if arguments.bench:
            found.append(narrowfloat_bench.gemm(arguments.bench, *size.values(), arguments.device))
        for case in found:
            times = " / ".join(f"{case[key]['median_us']:.1f}" for key in ("plain", "sustained"))
            print(f"{case['peer']:12s} {n}, {k}, {groups}: {times} us, error {case['error']:.1e}"
                  f"{'' if case['correct'] else '  WRONG'}", flush=True)
            document["gemms"].append({**size, **case})
    caches.cleanup()
    arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0 if all(case["correct"] for case in document["gemms"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
