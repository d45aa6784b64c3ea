"""tools/setup.sh makes an environment again where a list that it was made from has changed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Stand-ins: a python3 whose environments have a pip that notes its arguments.
PYTHON = f"""#!/bin/sh
if [ "$1 $2" != "-m venv" ]; then exec {sys.executable} "$@"; fi
echo "venv $4" >> log
rm -rf "$4" && mkdir -p "$4/bin" && printf '#!/bin/sh\\necho "pip $*" >> log\\n' > "$4/bin/pip"
chmod +x "$4/bin/pip"
"""
PIP = "pip install --quiet --disable-pip-version-check "
TESTS = ["venv .venv", PIP + "-r tools/requirements-test.txt"]
VLLM = ["venv .venv-engines", PIP + "-r tools/requirements-engines.txt"]
SGLANG = [PIP + "--no-deps -r tools/requirements-sglang.txt"]


def test_a_changed_version_is_installed(tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for source in (ROOT / "tools/setup.sh", *ROOT.glob("tools/requirements-*.txt")):
        shutil.copy(source, tools)
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "python3").write_text(PYTHON)
    (programs / "python3").chmod(0o755)

    def run() -> list[str]:
        """Lists what setup.sh --engines makes and installs."""
        log = tmp_path / "log"
        log.write_text("")
        subprocess.run(["bash", tools / "setup.sh", "--engines"], check=True, capture_output=True,
                       env=os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"})  # fmt: skip
        return log.read_text().splitlines()

    assert run() == TESTS + VLLM + SGLANG
    assert run() == []
    for name, wanted in (("sglang", SGLANG), ("engines", VLLM + SGLANG), ("test", TESTS)):
        with (tools / f"requirements-{name}.txt").open("a") as requirements:
            requirements.write("# changed\n")
        assert run() == wanted, name
        assert run() == [], name
