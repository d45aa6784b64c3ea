"""Expert parallelism between processes: 8 on the CPU, some that die, and two hosts."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "expert_processes.py"
# A host: a network of its own, a name, and memory that no other has. Ends with its stdin.
HOST = ["unshare", "--net", "--mount", "--uts", "sh", "-ec",
        "mount -t tmpfs tmpfs /dev/shm; hostname $1; echo ready; cat", "sh"]  # fmt: skip


def command(what: str, where: object, rank: int = 0) -> list[str]:
    """The program with its arguments."""
    return [sys.executable, str(PROGRAM), what, str(where), str(rank)]


def test_eight_ranks(tmp_path: Path) -> None:
    """In shared memory and through messages, to the bit; the memory has no name any more."""
    done = subprocess.run(command("results", tmp_path), capture_output=True, text=True,
                          timeout=120, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_eight_ranks_of_gloo(tmp_path: Path) -> None:
    """The same with torch."""
    pytest.importorskip("torch", reason="torch is not installed; ./test.sh --with-torch")
    done = subprocess.run(command("gloo", tmp_path), capture_output=True, text=True, timeout=120,
                          check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_a_killed_rank(tmp_path: Path) -> None:
    """In dispatch and in combine: an error on all others, and no shared memory is left."""
    done = subprocess.run(command("deaths", tmp_path), capture_output=True, text=True,
                          timeout=120, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr


def on_host(host: subprocess.Popen[str], *words: str) -> list[str]:
    """A command in the namespaces of a host."""
    return ["nsenter", "--target", str(host.pid), "--net", "--mount", "--uts", *words]


def test_two_hosts() -> None:
    """Two network namespaces, joined by a cable: ranks meet by TCP, and rows travel so."""
    for program in ("unshare", "nsenter", "ip"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    hosts = [subprocess.Popen([*HOST, f"host{rank}"], stdin=subprocess.PIPE, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE)
             for rank in range(2)]  # fmt: skip
    try:
        for host in hosts:
            assert host.stdout is not None and host.stderr is not None
            if host.stdout.readline() != "ready\n":
                pytest.skip(f"no namespaces: {host.stderr.read().strip()}")
        first, second = hosts
        cable = ["ip", "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns",
                 str(second.pid)]  # fmt: skip
        made = subprocess.run(on_host(first, *cable), capture_output=True, text=True, check=False)
        if made.returncode != 0:
            pytest.skip(f"no virtual network: {made.stderr.strip()}")
        for rank, host in enumerate(hosts):
            for words in (f"address add 10.30.0.{rank + 1}/24 dev cable", "link set cable up",
                          "link set lo up"):  # fmt: skip
                subprocess.run(on_host(host, "ip", *words.split()), check=True)
        ranks = [subprocess.Popen(on_host(host, *command("host", "10.30.0.1", rank)), text=True,
                                  stderr=subprocess.PIPE)
                 for rank, host in enumerate(hosts)]  # fmt: skip
        errors = [rank.communicate(timeout=120)[1] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0], errors
    finally:
        for host in hosts:
            host.communicate("")
