"""Ranks that torchrun, mpirun and srun start meet: skipped where a launcher is not installed.

None is needed to build or test. To have all: Debian's openmpi-bin, mpich and slurm-wlm, and for
srun slurmctld, slurmd and munged that run. Seen with Open MPI 4.1.4, MPICH 4.0.2 and Slurm 22.05.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
PROGRAM = """
import sys
import numpy as np
import narrowfloat as nf
from allreduce_ranks import inputs_of

group = nf.RankGroup.from_environment()
assert group.local_rank == group.rank, group.local_rank
with nf.AllReduce(dtype="float32", max_tokens=16, hidden=64, deadline=20.0) as own:
    found = own(inputs_of(own.rank, 5, 64, np.float32)).ar_out
    parts = [inputs_of(rank, 5, 64, np.float32).astype(np.float64) for rank in range(own.ranks)]
    assert np.allclose(found, sum(parts), atol=1e-5), np.abs(found - sum(parts)).max()
    with open(f"{sys.argv[1]}/{own.rank}.of.{own.ranks}", "wb") as file:
        file.write(found.tobytes())
"""
# A shell between the launcher and the rank, as scripts of users are.
THROUGH_A_SCRIPT = ["sh", "-c", '"$@"; exit $?', "script"]


def commands() -> dict[str, list[str]]:
    """How each launcher starts n ranks on this host, more than it has cores."""
    open_mpi = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n"]
    return {
        "torchrun": ["-m", "torch.distributed.run", "--standalone", "--no-python",
                     "--nproc-per-node"],
        "mpirun.openmpi": open_mpi,
        "mpirun.mpich": ["-n"],
        "srun": ["--overcommit", "--immediate=20", "-n"],
        "srun pmi2": ["--mpi=pmi2", "--overcommit", "--immediate=20", "-n"],
    }


def launcher(name: str) -> list[str]:
    """The beginning of its command; skips where it cannot be used."""
    program = name.split()[0]
    if program == "torchrun":
        pytest.importorskip("torch", reason="torch is not installed; ./test.sh --with-torch")
        return [sys.executable, *commands()[name]]
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    if program == "srun":
        done = subprocess.run(["sinfo", "--noheader", "-o", "%a %t"], capture_output=True,
                              text=True, timeout=20, check=False)  # fmt: skip
        if not {"up idle", "up comp"} & set(done.stdout.splitlines()):
            pytest.skip(f"no idle node of Slurm: {done.stdout}{done.stderr}")
    return [program, *commands()[name]]


@pytest.mark.parametrize(
    ("name", "ranks"), [(name, n) for name in commands() for n in (2, 4)
                        if (name, n) != ("torchrun", 4)]  # It takes seconds to start.
)  # fmt: skip
def test_ranks_meet(name: str, ranks: int, tmp_path: Path) -> None:
    """Each has the sum, to the same bits, with no variable that a user sets."""
    path = os.pathsep.join([str(FOLDER), os.environ.get("PYTHONPATH", "")])
    between = THROUGH_A_SCRIPT if ranks == 2 else []
    done = subprocess.run(
        [*launcher(name), str(ranks), *between, sys.executable, "-c", PROGRAM, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert sorted(found) == [f"{rank}.of.{ranks}" for rank in range(ranks)]
    assert len(set(found.values())) == 1
