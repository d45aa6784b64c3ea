#!/usr/bin/env python3
"""Runs clang-tidy over the library's sources, in parallel, skipping what has not changed.

    tools/run_clang_tidy.py --build-dir build/lint [--clang-tidy clang-tidy-14] [--all]

The sources are those of compile_commands.json that BUILD compiles for src/: in a unity build a
source there includes a dozen of ours, whose headers are then read once.  Headers are checked
through the sources that include them; tests and CUDA sources are not.  A source that
passed is recorded in BUILD/clang_tidy_passed/ under a hash of everything that decides the outcome:
its text and that of the project files it reaches, .clang-tidy, the compile command, clang-tidy
itself.  --all ignores those records.  Exit code 1 if there is a finding.
"""

import argparse
import concurrent.futures
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.M)


def project_files(source: Path) -> list[Path]:
    """The source and every project header it includes, directly or not."""
    found, waiting = set(), [source]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found.add(path)
        for name in INCLUDE.findall(path.read_bytes()):
            folders = (ROOT / "include", ROOT / "src", path.parent)
            candidates = (folder / name.decode() for folder in folders)
            waiting += [c.resolve() for c in candidates if c.is_file()][:1]
    return sorted(found)


def fingerprint(source: Path, command: str, tool: str) -> str:
    digest = hashlib.sha256(f"{tool}\n{command}\n".encode())
    for path in [ROOT / ".clang-tidy", *project_files(source)]:
        digest.update(f"\n{path}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def check(clang_tidy: str, build: Path, source: Path) -> tuple[Path, bool, str, float]:
    start = time.monotonic()
    result = subprocess.run(
        [clang_tidy, "--quiet", f"--config-file={ROOT}/.clang-tidy", "-p", str(build), str(source)],
        capture_output=True, text=True, check=False)
    errors = [line for line in result.stderr.splitlines()  # Drop "N warnings generated."
              if not re.match(r"\d+ warnings?( and \d+ errors?)? generated|Suppressed ", line)]
    passed = result.returncode == 0
    output = result.stdout + ("" if passed else "\n".join(errors))  # Warnings are no failure.
    return source, passed, output, time.monotonic() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build-dir", type=Path, required=True)
    parser.add_argument("--clang-tidy", default="clang-tidy")
    parser.add_argument("--all", action="store_true", help="check unchanged sources too")
    arguments = parser.parse_args()

    tool = subprocess.run([arguments.clang_tidy, "--version"], capture_output=True, text=True,
                          check=True).stdout
    records = arguments.build_dir / "clang_tidy_passed"
    records.mkdir(exist_ok=True)
    waiting = {}
    database = json.loads((arguments.build_dir / "compile_commands.json").read_text())
    for entry in database:
        source = (Path(entry["directory"]) / entry["file"]).resolve()
        in_build = source.is_relative_to(arguments.build_dir.resolve() / "src")
        if source.suffix in (".cpp", ".cxx") and (
                in_build or source.is_relative_to(ROOT / "src")):
            record = records / fingerprint(source, entry["command"], tool)
            if arguments.all or not record.exists():
                waiting[source] = record
    # The longest first, so that no processor waits for one of them at the end.
    longest_first = sorted(waiting, reverse=True, key=lambda source: sum(
        path.stat().st_size for path in project_files(source)))
    print(f"clang-tidy: {len(waiting)} sources to check", flush=True)

    failures = 0
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [pool.submit(check, arguments.clang_tidy, arguments.build_dir, source)
                for source in longest_first]
        for job in concurrent.futures.as_completed(jobs):
            source, passed, output, seconds = job.result()
            mark = "ok  " if passed else "FAIL"
            print(f"{mark} {os.path.relpath(source, ROOT)} ({seconds:.1f} s)", flush=True)
            if output:
                print(output, flush=True)
            if passed:
                waiting[source].touch()
            else:
                failures += 1
    print(f"clang-tidy: {failures} sources with findings")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
