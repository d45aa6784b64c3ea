"""A wheel's needs of a system, read from its binaries as auditwheel would: no stray libraries.

Most of it skips where the package is no installed wheel, which NARROWFLOAT_EXPECT_WHEEL=1 forbids.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

import narrowfloat as nf

PACKAGE = Path(nf.__file__).parent
# The libraries of the policies manylinux_2_17 to manylinux_2_39 (PEP 600), as far as this package
# may need them.
SYSTEM = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1",
          "libgcc_s.so.1", "libstdc++.so.6", "ld-linux-x86-64.so.2"}  # fmt: skip
# Symbols of glibc 2.34 and of GCC 11's libraries.
NEWEST = {"GLIBC": (2, 34), "GLIBCXX": (3, 4, 29), "CXXABI": (1, 3, 13), "GCC": (7, 0, 0)}
BUNDLED = re.compile(r"lib(narrowfloat|tbb|fmt)-[0-9a-f]{8}\.so\.[\d.]+$")



def why_not() -> str:
    """Why there is no installed wheel to look at; empty if there is one.

    What pip wrote down decides, not the package's contents: those may be what is wrong.
    """
    if shutil.which("readelf") is None:
        return "readelf (binutils) is not installed"
    try:
        distribution = importlib.metadata.distribution("narrowfloat")
    except importlib.metadata.PackageNotFoundError:
        return "the package is not installed"
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    if distribution.read_text("WHEEL") is None or origin.get("dir_info", {}).get("editable"):
        return "the package was not installed from a wheel"
    return ""


REASON = why_not()
of_a_wheel = pytest.mark.skipif(bool(REASON), reason=REASON)
BINARIES = [*PACKAGE.glob("_core*.so"), *PACKAGE.glob("bin/*"), *PACKAGE.glob("lib/*")]


def readelf(option: str, binary: Path) -> str:
    """The output of the program."""
    return subprocess.run(["readelf", "-W", option, binary], check=True, text=True,
                          stdout=subprocess.PIPE).stdout  # fmt: skip


def dynamic(kind: str, binary: Path) -> list[str]:
    """Entries of the dynamic section."""
    return re.findall(rf"\({kind}\).*\[(.*)\]", readelf("-d", binary))


def versions(binary: Path) -> dict[str, tuple[int, ...]]:
    """Newest version of each family of symbols that a binary asks of others."""
    newest: dict[str, tuple[int, ...]] = {}
    for family, digits in re.findall(r"Name: (GLIBC|GLIBCXX|CXXABI|GCC)_([\d.]+)",
                                     readelf("-V", binary)):  # fmt: skip
        version = tuple(map(int, digits.split(".")))
        newest[family] = max(version, newest.get(family, ()))
    return newest


def test_there_is_a_wheel_where_one_is_expected() -> None:
    """./test.sh expects one: there the tests below must not skip."""
    if os.environ.get("NARROWFLOAT_EXPECT_WHEEL") == "1":
        assert not REASON


@of_a_wheel
def test_the_build_says_what_it_makes(tmp_path: Path) -> None:
    """The first lines of a build, which `pip install -v` shows, name the option for GPUs."""
    if shutil.which("cmake") is None:
        pytest.skip("cmake is not installed")
    done = subprocess.run(["cmake", "-S", Path(__file__).resolve().parents[2], "-B", tmp_path,
                           "-DNARROWFLOAT_PYTHON=ON", "-DNARROWFLOAT_TESTS=OFF"],
                          capture_output=True, text=True, check=False)  # fmt: skip
    said = re.search(r"narrowfloat: a Python package for the CPU alone; .*\n", done.stderr)
    assert said and "pip install . -C cmake.define.NARROWFLOAT_CUDA=ON" in said[0]


def test_the_wheel_has_its_binaries() -> None:
    """The module, the programs and three libraries, nothing else."""
    names = sorted(path.name for path in BINARIES)
    bundled = [found[1] for found in map(BUNDLED.match, names) if found]
    assert sorted(bundled) == ["fmt", "narrowfloat", "tbb"]
    assert {"narrowfloat", "narrowfloat-bench"} <= set(names) and len(names) == 6
    # Each links the library, and has no copy of it.
    (library,) = PACKAGE.glob("lib/libnarrowfloat-*")
    for binary in BINARIES:
        if binary.parent != library.parent:
            assert library.name in dynamic("NEEDED", binary)


@of_a_wheel
@pytest.mark.parametrize("binary", BINARIES, ids=lambda path: BUNDLED.sub(r"lib\1", path.name))
def test_libraries_are_the_system_s_or_the_wheel_s(binary: Path) -> None:
    """Found where they lie, without a folder of the machine that built it. No CUDA library."""
    inside = {path.name for path in PACKAGE.glob("lib/*")}
    needed = dynamic("NEEDED", binary)
    assert needed and set(needed) <= SYSTEM | inside
    paths = dynamic("RPATH|RUNPATH", binary)
    assert all(path.startswith("$ORIGIN") for path in paths)
    for name in inside & set(needed):
        (path,) = paths
        folder = Path(path.replace("$ORIGIN", str(binary.parent))).resolve()
        assert folder == (PACKAGE / "lib").resolve() and (folder / name).is_file()
    if binary.parent.name == "lib":
        assert dynamic("SONAME", binary) == [binary.name]


@of_a_wheel
def test_libraries_are_loaded_from_the_wheel() -> None:
    """As the loader sees it."""
    for binary in BINARIES:
        listing = subprocess.run(["ldd", binary], check=True, text=True, stdout=subprocess.PIPE)
        assert "not found" not in listing.stdout
        for name, path in re.findall(r"(\S+) => (\S+)", listing.stdout):
            assert (PACKAGE / "lib" in Path(path).resolve().parents) == (name not in SYSTEM)


@of_a_wheel
def test_symbol_versions(record_property) -> None:
    """At most those of manylinux_2_34, as docs/python.md tells; shown with `--junit-xml`."""
    newest: dict[str, tuple[int, ...]] = {}
    for binary in BINARIES:
        for family, version in versions(binary).items():
            newest[family] = max(version, newest.get(family, ()))
    for family, version in newest.items():
        record_property(family, ".".join(map(str, version)))
    assert {"GLIBC", "GLIBCXX"} <= set(newest)
    assert all(version <= NEWEST[family] for family, version in newest.items()), newest


@of_a_wheel
def test_stable_abi_where_python_has_it() -> None:
    """The tag of the wheel is that of its module."""
    (module,) = PACKAGE.glob("_core*.so")
    tags = re.findall(r"^Tag: (.*)$", importlib.metadata.distribution("narrowfloat").read_text(
        "WHEEL"), re.M)  # fmt: skip
    is_stable = module.name == "_core.abi3.so"
    assert all(("-abi3-" in tag) == is_stable for tag in tags) and tags
    # An extension never links Python itself.
    assert not any("python" in name for name in dynamic("NEEDED", module))


@of_a_wheel
def test_licences_of_what_is_inside() -> None:
    """The notices travel with the binaries."""
    files = importlib.metadata.files("narrowfloat") or []
    (notice,) = (file for file in files if file.name == "THIRD_PARTY_LICENSES.txt")
    text = notice.read_text()
    for name in ("oneTBB", "fmt", "nlohmann-json", "CLI11", "xxHash", "nanobind", "CUDA runtime"):
        assert name in text


SOURCES = Path(__file__).resolve().parents[2] / "python" / "src"
CALLS = re.compile(r"\bPy[A-Z][A-Za-z]*_\w+\(")
CALLERS = [path for path in sorted(SOURCES.glob("*.cpp")) if CALLS.search(path.read_text())]


def test_the_callers_of_python_are_known() -> None:
    """So that the next test does not pass for want of sources."""
    assert {"exchange.cpp", "errors.cpp"} <= {path.name for path in CALLERS}


# The functions of Python 3.12 (in its stable ABI) that nanobind's headers call and headers of 3.11
# hide.
PRELUDE = """#include <Python.h>
extern "C" {
PyObject* PyObject_Vectorcall(PyObject*, PyObject* const*, size_t, PyObject*);
PyObject* PyObject_VectorcallMethod(PyObject*, PyObject* const*, size_t, PyObject*);
}
"""


@pytest.mark.parametrize("source", CALLERS, ids=lambda path: path.stem)
def test_sources_keep_to_the_stable_abi(source: Path, tmp_path: Path) -> None:
    """Sources that call Python's C API compile with what Python 3.11 promises to keep.

    Wheels of 3.12 and later are made for the stable ABI of 3.12, which has all of that. Here,
    because 3.11 builds a wheel without that restriction.
    """
    nanobind = pytest.importorskip("nanobind")
    compiler = shutil.which("c++")
    headers = Path(sysconfig.get_path("include"))
    if compiler is None or not (headers / "Python.h").is_file():
        pytest.skip("no C++ compiler or no headers of Python")
    prelude = tmp_path / "prelude.h"
    prelude.write_text(PRELUDE)
    root = SOURCES.parents[1]
    folders = [root, root / "include", headers, nanobind.include_dir()]
    result = subprocess.run(
        [compiler, "-std=c++20", "-fsyntax-only", "-DPy_LIMITED_API=0x030B0000", "-include",
         prelude, *(f"-I{folder}" for folder in folders), source],
        check=False, text=True, capture_output=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
