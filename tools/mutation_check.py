#!/usr/bin/env python3
"""Shows that the tests notice the classic mistakes of this arithmetic.

    python3 tools/mutation_check.py [--only TEXT]

Copies the sources to a temporary folder, builds the library and the tests there (-O1 and the
project's floating-point options), and requires that the tests pass. Then it makes
the change of each entry of MUTATIONS alone, builds what depends on it, and requires that a test
fails. The tests are those of golden_test, formats_test and ops_test, built and run in this order
until one fails. Takes about 9 minutes on two cores; not part of test.sh.

Exit status: 0 if every mutant was noticed, 1 if one survived, 2 if the check itself did not work:
an old text is not in its file exactly once, a mutant does not compile, the unchanged sources fail.
A text that moved needs a new entry here.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("CMakeLists.txt", "LICENSE", "cmake", "examples", "include", "src", "tests", "tools")
TESTS = ("golden_test", "formats_test", "ops_test")
# Cases beyond 2^31 elements say nothing about arithmetic, and take long at -O1.
GTEST_OPTIONS = ("--gtest_brief=1", "--gtest_filter=-*Large*")
RUN_LIMIT_SECONDS = 900
MATH, NVFP4 = "src/formats/math_policy.h", "src/formats/nvfp4.h"
FOUR_OVER_SIX, OUTPUT = "src/formats/four_over_six.h", "src/ops/quantize/quantize_output.h"


class Mutation(NamedTuple):
    """One change: `old`, which stands in `file` exactly once, becomes `new`."""

    name: str
    file: str
    old: str
    new: str


MUTATIONS = (
    # Flushing of denormals, applied or dropped.
    Mutation("exact product flushes its result", MATH, "return mul_rn(a, b);",
             "const float p = mul_rn(a, b); return is_denormal_or_zero(p) ? 0.0F * p : p;"),
    Mutation("exact mode flushes a block maximum", MATH, "flush(float a) { return a; }",
             "flush(float a) { return is_denormal_or_zero(a) ? 0.0F : a; }"),
    Mutation("fast product keeps denormal operands", MATH,
             "static_cast<double>(flush(a)) * static_cast<double>(flush(b))",
             "static_cast<double>(a) * static_cast<double>(b)"),
    Mutation("fast product keeps denormal results", MATH,
             "return bits_float(magnitude < kTiny ? sign : bits);", "return product;"),
    Mutation("fast product is the flushed IEEE product", MATH,
             "return bits_float(magnitude < kTiny ? sign : bits);", "return flush(product);"),
    Mutation("fast sum does not flush", MATH, "return flush(flush(a) + flush(b));",
             "return a + b;"),
    # Association of the NVFP4 scale product.
    Mutation("exact NVFP4 scale reassociated", NVFP4,
             "mul_rn(amax, mul_rn(pair.encode, kOneSixth))",
             "mul_rn(pair.encode, mul_rn(amax, kOneSixth))"),
    Mutation("fast NVFP4 scale reassociated", NVFP4,
             "Math::mul(pair.encode, Math::mul(amax, kOneSixth))",
             "Math::mul(amax, Math::mul(pair.encode, kOneSixth))"),
    # The measured reciprocal.
    Mutation("reciprocal table replaced by division", "src/formats/rcp_approx.h",
             "(code == 1 ? 1U : 0U) - (code == 2 ? 1U : 0U)", "0U"),
    # Contraction and order in the errors of 4-over-6.
    Mutation("strict 4-over-6 error contracted", FOUR_OVER_SIX,
             "Math::add(Math::mul(scaled, pair.decode), -x)", "fma_rn(scaled, pair.decode, -x)"),
    Mutation("fast 4-over-6 error contracted", FOUR_OVER_SIX,
             "Math::add(scaled, -Math::mul(x, pair.encode))", "fma_rn(-x, pair.encode, scaled)"),
    Mutation("4-over-6 sum of squares contracted", FOUR_OVER_SIX, "sum = Math::add(sum, term);",
             "sum = rules.error == FourOverSixError::kMae ? Math::add(sum, term)"
             " : fma_rn(e, e, sum);"),
    # Padding.
    Mutation("scale padding left unwritten", OUTPUT, "std::memset(scales.data, 0,",
             "std::memset(scales.data, 0, 0 *"),
    Mutation("value padding left unwritten", OUTPUT,
             "if (problem.value_cols == problem.cols) return;", "return;"),
)


class CheckFailed(Exception):
    """The check could not be done."""


def copy_sources(target: Path) -> None:
    target.mkdir()
    for part in PARTS:
        is_folder = (ROOT / part).is_dir()
        (shutil.copytree if is_folder else shutil.copy2)(ROOT / part, target / part)


def configure(sources: Path, build: Path) -> None:
    # -w: a mutant may leave a variable unused, which is not what is tested.
    command = ["cmake", "-S", sources, "-B", build, "-G", "Ninja", "--log-level=WARNING",
               "-DCMAKE_BUILD_TYPE=Mutation", "-DCMAKE_CXX_FLAGS_MUTATION=-O1 -w",
               "-DNARROWFLOAT_BENCH=OFF"]
    if shutil.which("ccache"):
        command.append("-DCMAKE_CXX_COMPILER_LAUNCHER=ccache")
    subprocess.run(command, check=True)


def compile_test(build: Path, test: str) -> None:
    environment = {**os.environ, "CCACHE_BASEDIR": str(build.parent), "CCACHE_NOHASHDIR": "1"}
    done = subprocess.run(["ninja", "-C", build, test], env=environment, capture_output=True,
                          text=True, check=False)
    if done.returncode != 0:
        raise CheckFailed(f"{test} does not compile:\n{done.stdout[-4000:]}{done.stderr}")


def run_test(build: Path, test: str) -> str:
    """The failures as text; empty if all passed."""
    command = [build / "tests/bin" / test, *GTEST_OPTIONS]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace",
                              timeout=RUN_LIMIT_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise CheckFailed(str(error)) from None
    if done.returncode == 0:
        return ""
    failed = sorted(set(re.findall(r"\[  FAILED  \] (\w+[./][\w./]+)", done.stdout)))
    if not failed:
        raise CheckFailed(f"{test}: exit status {done.returncode}:\n{done.stdout[-4000:]}")
    more = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
    return f"{test}: {failed[0]}{more}"


def first_failure(build: Path) -> str:
    for test in TESTS:
        compile_test(build, test)
        failure = run_test(build, test)
        if failure:
            return failure
    return ""


def mutated(sources: Path, mutation: Mutation) -> str:
    """The text of the mutation's file with the change."""
    text = (sources / mutation.file).read_text()
    count = text.count(mutation.old)
    if count != 1:
        raise CheckFailed(f"{mutation.name}: old text is {count} times in {mutation.file}")
    return text.replace(mutation.old, mutation.new)


def check(scratch: Path, mutations: list[Mutation]) -> int:
    """Number of mutants that survived."""
    sources, build = scratch / "sources", scratch / "build"
    copy_sources(sources)
    for mutation in mutations:
        mutated(sources, mutation)  # All texts are there, before minutes are spent.
    configure(sources, build)
    start = time.monotonic()
    failure = first_failure(build)
    if failure:
        raise CheckFailed(f"the unchanged sources fail: {failure}")
    print(f"{time.monotonic() - start:5.0f} s  unchanged sources pass", flush=True)
    survivors = 0
    for mutation in mutations:
        start = time.monotonic()
        path = sources / mutation.file
        original = path.read_text()
        path.write_text(mutated(sources, mutation))
        try:
            failure = first_failure(build)
        finally:
            path.write_text(original)
        survivors += not failure
        print(f"{time.monotonic() - start:5.0f} s  {mutation.name}: {failure or 'SURVIVED'}",
              flush=True)
    print(f"{len(mutations)} mutants, {survivors} survived")
    return survivors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="mutations whose name has this text")
    arguments = parser.parse_args()
    mutations = [mutation for mutation in MUTATIONS if arguments.only in mutation.name]
    if not mutations:
        parser.error(f"no mutation's name has: {arguments.only}")
    with tempfile.TemporaryDirectory(prefix="narrowfloat-mutation-") as scratch:
        try:
            return 1 if check(Path(scratch), mutations) else 0
        except (CheckFailed, subprocess.CalledProcessError) as error:
            print(f"mutation_check: {error}", file=sys.stderr)
            return 2


if __name__ == "__main__":
    sys.exit(main())
