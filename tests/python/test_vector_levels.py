"""Levels of vector instructions: what their objects export, and what runs on a CPU without them.

The linker keeps one copy of an inline function. Were it the copy of such an object, all of the
library would run it, also on a CPU without the level's instructions
(src/ops/quantize/x86/block_kernels.h).
"""

import json
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "src").rglob("x86/*.cpp"))
OBJECTS = Path(os.environ["NARROWFLOAT_TEST_BIN"]).parents[1] / "src/CMakeFiles/narrowfloat.dir"

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="needs a build for x86-64")


def symbols(path):
    """(type, name) of what an object defines."""
    listing = subprocess.run(["nm", "-C", "--defined-only", path], capture_output=True, text=True,
                             check=True).stdout
    return [line.split(maxsplit=2)[1:] for line in listing.splitlines()]


def is_shared(kind):
    """Weak, unique, common, or visible to other objects."""
    return kind in "vVwWuC" or kind.isupper()


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_only_its_table_leaves_the_object_of_a_level(source):
    path = OBJECTS / f"{source.relative_to(ROOT / 'src')}.o"
    shared = [name for kind, name in symbols(path) if is_shared(kind)]
    assert len(shared) == 1 and re.match(r"narrowfloat::k\w+Kernels(Avx\d+|Amx)$", shared[0]), shared


def test_other_objects_have_what_these_must_not_have():
    """The check above would see an inline function."""
    others = [path for path in OBJECTS.rglob("*.o") if "x86" not in path.parts]
    assert any(kind in "wW" for path in others for kind, _ in symbols(path))


needs_qemu = pytest.mark.skipif(shutil.which("qemu-x86_64") is None, reason="needs qemu-user")


def run_on(cpu, *command):
    return subprocess.run(["qemu-x86_64", "-cpu", cpu, *command], capture_output=True, text=True,
                          check=True).stdout


@needs_qemu
@pytest.mark.parametrize("cpu, chosen", [("Haswell", "cpu_avx2"), ("Nehalem", "cpu_baseline")])
def test_a_cpu_runs_its_own_level(cpu, chosen):
    for operation in ("quantize", "dequantize"):
        explanation = json.loads(run_on(cpu, os.environ["NARROWFLOAT_CLI"], "explain", operation,
                                        "--format", "nvfp4", "--shape", "16x1024", "--json"))
        assert explanation["chosen"] == chosen
    # The kernels of the level, or what runs without one. Left out are those that convert halves where
    # denormals count as zeros (DAZ): qemu 7.2's VCVTPH2PS flushes denormal halves there, as no
    # processor does.
    tests = "QuantizeViews.*"
    if chosen == "cpu_avx2":
        tests = "*Kernel*/avx2:-*ChoosesBetweenFourAndSix*:*MakesTheRowsOfFused*"
    output = run_on(cpu, f"{os.environ['NARROWFLOAT_TEST_BIN']}/ops_test", f"--gtest_filter={tests}")
    assert re.search(r"PASSED +\] [1-9]", output) and "SKIPPED" not in output


@needs_qemu
def test_rows_in_int8_run_on_a_cpu_without_avx512():
    tests = "*GroupedGemmConformance.EveryImplementationGivesTheOraclesBytes/*int8"
    output = run_on("Haswell", f"{os.environ['NARROWFLOAT_TEST_BIN']}/conformance",
                    f"--gtest_filter={tests}")
    assert re.search(r"PASSED +\] 2 tests", output) and "SKIPPED" not in output
