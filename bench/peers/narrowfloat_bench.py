"""narrowfloat's own times for the tables of peers, by `narrowfloat-bench` in the same run: on the
same expert ids, after the same rest and for as long as harness.py times peers."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import harness


def document(program: Path, device: str, seconds: float, *arguments) -> dict:
    command = [program, *arguments, "--device", device, "--min-time", str(seconds), "--json"]
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if result.returncode not in (0, 1):  # 1: a result was wrong, which the document says.
        raise SystemExit(f"peers: {program.name} failed: {result.stderr.strip()}")
    return json.loads(result.stdout)


def merged(burst: list[dict], sustained: list[dict], us) -> list[dict]:
    """The cases of two documents, each with both times."""
    both = []
    for short, long in zip(burst, sustained, strict=True):
        both.append({"peer": "narrowfloat", "mode": short["mode"],
                     "plain": {"median_us": us(short)}, "sustained": {"median_us": us(long)},
                     "error": short["error_to_fp64"]["rel"],
                     "correct": short["correct"] is True and long["correct"] is True})
    return both


def layers(program: Path, shape: str, mode: str, tokens: list[int], ids: Path,
           device: str) -> list[dict]:
    burst, sustained = (
        document(program, device, seconds, "moe", "bench", "--shape", shape, "--mode", mode,
                 "--tokens", ",".join(map(str, tokens)), "--routing", ids,
                 "--rest", harness.REST_SECONDS)["cases"]
        for seconds in (harness.BURST_SECONDS, harness.SUSTAINED_SECONDS))
    cases = merged(burst, sustained, lambda case: case["median_seconds"] * 1e6)
    for case, count in zip(cases, tokens, strict=True):
        case["tokens"] = count
    return cases


def gemm(program: Path, n: int, k: int, groups: int, rows: int, device: str) -> dict:
    burst, sustained = (
        document(program, device, seconds, "moe", "gemm", "--shape", f"{n},{k},{groups}",
                 "--rows", rows)["cases"]
        for seconds in (harness.BURST_SECONDS, harness.SUSTAINED_SECONDS))
    return merged(burst, sustained, lambda case: case["median_us"])[0]
