"""What a wheel needs of a system, read from its binaries as auditwheel would: no stray libraries.

Most of it skips where the package is no installed wheel.
"""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import narrowfloat as nf

PACKAGE = Path(nf.__file__).parent
# Of the policies manylinux_2_17 to manylinux_2_39 (PEP 600), as far as this package may need them.
SYSTEM = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1",
          "libgcc_s.so.1", "libstdc++.so.6", "ld-linux-x86-64.so.2"}  # fmt: skip
BUNDLED = re.compile(r"lib(tbb|fmt)-[0-9a-f]{8}\.so\.\d+$")

# Functions of Python's C API that python/src calls: all in the stable ABI of Python 3.12, which the
# wheels of 3.12 and later are compiled for (https://docs.python.org/3/c-api/stable.html).
STABLE = {"PyCapsule_GetPointer", "PyDict_GetItemString", "PyErr_CheckSignals", "PyErr_Clear",
          "PyErr_Occurred", "PyErr_SetString", "PyImport_GetModuleDict", "PyObject_GetAttrString",
          "PyUnicode_AsUTF8AndSize"}  # fmt: skip

if shutil.which("readelf") is None:
    REASON = "readelf (binutils) is not installed"
elif not (PACKAGE / "lib").is_dir():
    REASON = "the package was not installed from a wheel"
else:
    REASON = ""
of_a_wheel = pytest.mark.skipif(bool(REASON), reason=REASON)
BINARIES = [*PACKAGE.glob("_core*.so"), *PACKAGE.glob("bin/*"), *PACKAGE.glob("lib/*")]


def readelf(option: str, binary: Path) -> str:
    """What the program prints."""
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


@of_a_wheel
def test_the_wheel_has_its_binaries() -> None:
    """The module, the program and two libraries, nothing else."""
    names = sorted(path.name for path in BINARIES)
    assert len([name for name in names if BUNDLED.match(name)]) == 2
    assert "narrowfloat" in names and len(names) == 4


@of_a_wheel
@pytest.mark.parametrize("binary", BINARIES, ids=lambda path: path.name.split("-")[0])
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
    """What a system must have; shown with `--junit-xml`, and told by docs/python.md."""
    newest: dict[str, tuple[int, ...]] = {}
    for binary in BINARIES:
        for family, version in versions(binary).items():
            newest[family] = max(version, newest.get(family, ()))
    for family, version in newest.items():
        record_property(family, ".".join(map(str, version)))
    assert {"GLIBC", "GLIBCXX"} <= set(newest)
    assert newest["GLIBC"] <= (2, 36) and newest["GLIBCXX"] <= (3, 4, 30), newest  # Debian 12


@of_a_wheel
def test_stable_abi_where_python_has_it() -> None:
    """The tag of the wheel is that of its module."""
    (module,) = PACKAGE.glob("_core*.so")
    tags = re.findall(r"^Tag: (.*)$", importlib.metadata.distribution("narrowfloat").read_text(
        "WHEEL"), re.M)  # fmt: skip
    is_stable = module.name == "_core.abi3.so"
    assert all(("-abi3-" in tag) == is_stable for tag in tags) and tags
    # An extension never links Python itself; of the stable one all symbols are in the stable ABI.
    assert not any("python" in name for name in dynamic("NEEDED", module))


@of_a_wheel
def test_licences_of_what_is_inside() -> None:
    """The notices travel with the binaries."""
    files = importlib.metadata.files("narrowfloat") or []
    (notice,) = (file for file in files if file.name == "THIRD_PARTY_LICENSES.txt")
    text = notice.read_text()
    for name in ("oneTBB", "fmt", "nlohmann-json", "CLI11", "xxHash", "nanobind", "CUDA runtime"):
        assert name in text


def test_sources_keep_to_the_stable_abi() -> None:
    """Here, because an older Python compiles what a newer one refuses."""
    called: set[str] = set()
    for source in (Path(__file__).resolve().parents[2] / "python" / "src").glob("*.*"):
        called |= set(re.findall(r"\b(Py[A-Z][A-Za-z]*_\w+)\(", source.read_text()))
    assert called and called <= STABLE, called - STABLE
