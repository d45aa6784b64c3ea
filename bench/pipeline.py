"""Measures a whole `narrowfloat quantize`, `cp` of the same checkpoint, and the quantizer alone.

    python bench/make_checkpoint.py qwen3-moe build/qwen3-moe --size 2GB
    python bench/pipeline.py build/qwen3-moe --to nvfp4 --bin build/cpu/src --json result.json

The three run one after another in each round, so that they see the same machine, and the best of
the rounds counts. `cp` ends when its copy is on disk, as quantize does. With --cold the source is
dropped from the page cache before each run. The quantizer's own time is what quantize reports of
it, from memory, with all of its threads.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def drop_from_cache(folder: Path) -> None:
    """Makes the next reader read from the disk."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def copy_seconds(source: Path, target: Path) -> float:
    """The time of cp until the copy is on disk."""
    start = time.perf_counter()
    subprocess.run(["cp", "-r", source, target], check=True)
    subprocess.run(["sync", *target.iterdir()], check=True)
    return time.perf_counter() - start


def quantize_report(program: Path, source: Path, target: Path, options: list[str]) -> dict:
    """The report of quantize, with its whole time and its largest resident set."""
    command = ["/usr/bin/env", program, "quantize", source, target, *options, "--json"]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        report = json.load(process.stdout)
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"quantize ended with status {status}")
    seconds = time.perf_counter() - start
    return report | {"wall_seconds": seconds, "max_rss_bytes": 1024 * usage.ru_maxrss}


def main() -> None:
    """Prints one line a round and a summary."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("--to", default="nvfp4")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--max-memory", default="0")
    parser.add_argument("--bin", type=Path, default=ROOT / "build/cpu/src")
    parser.add_argument("--json", type=Path, help="also write the summary there")
    arguments = parser.parse_args()
    program = arguments.bin / "cli/narrowfloat"
    target = arguments.source.with_name(arguments.source.name + "-out")
    source_bytes = sum(path.stat().st_size for path in arguments.source.iterdir())
    options = ["--to", arguments.to, "--max-memory", arguments.max_memory]
    rounds = []
    for _ in range(arguments.rounds):
        found = {}
        for what in ("copy", "quantize"):
            shutil.rmtree(target, ignore_errors=True)
            if arguments.cold:
                drop_from_cache(arguments.source)
            if what == "copy":
                found["copy_seconds"] = copy_seconds(arguments.source, target)
                continue
            report = quantize_report(program, arguments.source, target, options)
            found |= {name: report[name] for name in ("wall_seconds", "max_rss_bytes")}
            found["kernel_seconds"] = report["quantize_seconds"]
            found["buffer_bytes"] = report["peak_buffer_bytes"]
        rounds.append(found)
        print(" ".join(f"{name}={value:.3f}" for name, value in found.items()), flush=True)
    shutil.rmtree(target, ignore_errors=True)
    best = {name: min(one[name] for one in rounds) for name in rounds[0]}
    limit = max(best["copy_seconds"], best["kernel_seconds"])
    summary = {
        "source": arguments.source.name, "source_bytes": source_bytes, "to": arguments.to,
        "cold": arguments.cold, "rounds": arguments.rounds, "cpus": os.cpu_count(),
        "machine": platform.machine(), "date": time.strftime("%Y-%m-%d"), **best,
        "share_of_slower": limit / best["wall_seconds"],
    }  # fmt: skip
    print(json.dumps(summary, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(summary, indent=1) + "\n")


if __name__ == "__main__":
    main()
