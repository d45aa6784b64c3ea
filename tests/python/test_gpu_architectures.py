"""cmake/gpu_architectures.cmake: what nvcc compiles for lists of CMAKE_CUDA_ARCHITECTURES."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PTX_80 = " --generate-code=arch=compute_80,code="
CASES = {
    "90a-real": ("90a-real", ""),
    "80-virtual": ("OFF", PTX_80 + "[compute_80]"),
    "86": ("OFF", " --generate-code=arch=compute_86,code=[compute_86]" + PTX_80 + "[sm_86]"),
    "90-real": ("OFF", PTX_80 + "[sm_90]"),
    "100a-real;90a;120-real": ("100a-real;90a", PTX_80 + "[sm_120]"),
    "80-real;86-real;89-real;90a-real;100-real;120-real;80-virtual": (
        "90a-real", PTX_80 + "[sm_80,sm_86,sm_89,sm_100,sm_120,compute_80]"),
}  # fmt: skip
REFUSED = {"75": "got 75", "sm_90a": "got sm_90a", "86a-real": "got 86a-real",
           "90a-real;80-real;90-real": "either 90a or 90", "100;100a": "either 100a or 100"}  # fmt: skip


def run(tmp_path: Path, text: str) -> subprocess.CompletedProcess[str]:
    """Runs lines of CMake after the file's."""
    script = tmp_path / "script.cmake"
    script.write_text(f'include("{ROOT}/cmake/gpu_architectures.cmake")\n{text}')
    return subprocess.run(["cmake", "-P", script], text=True, capture_output=True, check=False)


def test_portable_machine_code_is_made_from_one_ptx(tmp_path: Path) -> None:
    done = run(tmp_path, "".join(
        f'narrowfloat_check_architectures("{given}")\n'
        f'narrowfloat_split_architectures("{given}" own flags)\n'
        'message(STATUS "${own}|${flags}")\n' for given in CASES))  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"-- {own}|{flags}" for own, flags in CASES.values()]


def test_what_is_no_list_is_refused(tmp_path: Path) -> None:
    for given, part in REFUSED.items():
        done = run(tmp_path, f'narrowfloat_check_architectures("{given}")\n')
        assert done.returncode != 0 and part in re.sub(r"\s+", " ", done.stderr), given
