"""Objects of sources for a level of vector instructions leave no inline function to others.

The linker keeps one copy of an inline function. Were it the copy of such an object, all of the
library would run it, also on a CPU without the level's instructions
(src/ops/quantize/x86/block_kernels.h).
"""

import os
import platform
import re
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
    assert len(shared) == 1 and re.match(r"narrowfloat::k\w+KernelsAvx\d+$", shared[0]), shared


def test_other_objects_have_what_these_must_not_have():
    """The check above would see an inline function."""
    others = [path for path in OBJECTS.rglob("*.o") if "x86" not in path.parts]
    assert any(kind in "wW" for path in others for kind, _ in symbols(path))
