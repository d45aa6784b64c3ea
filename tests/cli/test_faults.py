"""The target after any system call failed, and after a kill before any of them.

The programs run with a preloaded library (tests/tools/faulty_calls.cpp).  Whatever happens, the
target has what it had, or is complete; exit code 0 means complete; the same command then succeeds,
with the bytes of an undisturbed run, and leaves nothing else.
"""

import errno
import json
import os
import shutil
import signal
import struct
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import (BENCH_CLI, CLEAN_ENVIRONMENT, CLI, DONE, INPUT, TINY_MOE, USAGE, bf16_weight,
                      run_ok, write_safetensors)

FAULTY_CALLS = Path(os.environ.get("NARROWFLOAT_TEST_BIN", "build/cpu/tests/bin")).resolve(
) / "libfaulty_calls.so"
NAME = "model.layers.{}.mlp.up_proj.weight"

# The errors that each call fails with.
ERRORS = {
    "open": [errno.EMFILE], "read": [errno.EIO, errno.EINTR],
    "write": [errno.ENOSPC, errno.EINTR, "short"], "fallocate": [errno.EDQUOT, errno.EINTR],
    # A system that cannot copy, and disks that cannot.
    "copy": [errno.EXDEV, errno.EINTR, errno.ENOSPC, errno.EIO], "truncate": [errno.EIO],
    "fsync": [errno.EIO], "rename": [errno.EIO, errno.EINVAL],
    "close": [errno.EIO], "mkdir": [errno.ENOSPC], "unlink": [errno.EIO], "flock": [errno.ENOLCK],
    "chmod": [errno.EPERM],
}


@pytest.fixture(scope="module", name="sources")
def make_sources(tmp_path_factory):
    """A model of two small shards as a folder and as a file, one with a NaN, two old targets."""
    root = tmp_path_factory.mktemp("sources")
    for name, rows in (("model", 16), ("other", 32), ("broken", 16)):
        directory = root / name
        directory.mkdir()
        tensors = {NAME.format(i): bf16_weight(rows, 32, i) for i in range(2)}
        if name == "broken":
            tensors[NAME.format(1)] = ("BF16", [rows, 32], b"\xc0\x7f" * 32 * rows)
        write_safetensors(directory / "model.safetensors", tensors)
        (directory / "config.json").write_text("{}")
        (directory / "vocab.txt").write_text(name)
    run_ok("quantize", root / "other", root / "old", "--to", "mxfp8", "--max-shard-size", 600)
    run_ok("quantize", root / "model", root / "quantized", "--to", "nvfp4")
    write_unequal(root)
    write_experts(root)
    (root / "loads.json").write_text('{"loads": {"0": [3, 1, 2]}}')
    shutil.copy(root / "model/model.safetensors", root / "model.safetensors")
    run_ok("quantize", root / "other/model.safetensors", root / "old.safetensors", "--to", "mxfp8")
    return root


def write_unequal(root):
    """Gate and up of an MLP with two global scales, for check --fix."""
    tensors = {}
    for i, name in enumerate(("gate", "up")):
        module = f"model.layers.0.mlp.{name}_proj."
        tensors |= {module + "weight_packed": ("U8", [16, 16], bytes(range(256))),
                    module + "weight_scale": ("F8_E4M3", [16, 2], b"\x70" * 32),
                    module + "weight_global_scale": ("F32", [1], struct.pack("<f", 400 + i))}
    (root / "unequal").mkdir()
    write_safetensors(root / "unequal/model.safetensors", tensors)
    shutil.copy(root / "quantized/config.json", root / "unequal")


def write_experts(root):
    """An expert's gate and up, and the Hessian of what they multiply."""
    write_safetensors(root / "experts.safetensors",
                      {f"mlp.experts.0.{matrix}_proj.weight": bf16_weight(16, 16, i)
                       for i, matrix in enumerate(("gate", "up"))}
                      | {"norm.weight": ("BF16", [16], bytes(32))})  # fmt: skip
    hessian = b"".join(struct.pack("<f", 3.0 if i % 17 == 0 else 0.5) for i in range(256))
    write_safetensors(root / "statistics.safetensors", {
        "mlp.experts.input.hessian": ("F32", [1, 16, 16], hessian),
        "mlp.experts.input.count": ("I64", [1], struct.pack("<q", 9))},
        {"format": "narrowfloat.statistics"})  # fmt: skip


class Case:
    """A command that writes, and what is at its target before."""

    def __init__(self, command, target="out", old=None, is_mounted=False, program=CLI,
                 model="model"):
        self.command, self.target, self.old = command, target, old
        self.is_mounted, self.program, self.model = is_mounted, program, model

    def prepare(self, sources, folder):
        folder.mkdir()
        target = folder / self.target
        if self.old == "empty":
            target.mkdir()
        elif self.old is not None:
            old = sources / self.old
            (shutil.copytree if old.is_dir() else shutil.copy)(old, target)

    def run(self, sources, folder, source=None, env=None):
        """Runs the command, or the same with another source."""
        words = [word.format(sources=sources, target=folder / self.target, model=source or self.model)
                 for word in self.command]
        command = [str(self.program), *words]
        environment = CLEAN_ENVIRONMENT | (env or {})
        if env:
            environment["LD_PRELOAD"] = str(FAULTY_CALLS)
        if self.is_mounted:
            # A bind mount on itself is a mount point that keeps its content. The library is for the
            # program alone.
            script = 'mount --bind "$1" "$1"; shift; exec env "$@"'
            preload = [f"{name}={value}" for name, value in (env or {}).items()]
            if env:
                preload.append(f"LD_PRELOAD={FAULTY_CALLS}")
            command = ["unshare", "-m", "sh", "-ec", script, "sh", str(folder / self.target),
                       *preload, *command]
            environment = CLEAN_ENVIRONMENT
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False,
                              timeout=120, stdin=subprocess.DEVNULL)

    def content(self, folder):
        """{name: bytes} of the target without what a run keeps there; None if there is none."""
        target = folder / self.target
        if target.is_dir():
            return {path.name: path.read_bytes() for path in target.iterdir()
                    if not path.name.startswith(".narrowfloat")}
        return target.read_bytes() if target.exists() else None


QUANTIZE = ["quantize", "{sources}/{model}", "{target}", "--to", "nvfp4", "--threads", "1",
            "--max-shard-size", "400"]
QUANTIZE_FILE = ["quantize", "{sources}/{model}.safetensors", "{target}", "--to", "nvfp4",
                 "--threads", "1"]
CASES = {
    "new folder": Case(QUANTIZE),
    "empty folder": Case(QUANTIZE, old="empty"),
    "old folder": Case([*QUANTIZE, "--force"], old="old"),
    "empty mount point": Case(QUANTIZE, old="empty", is_mounted=True),
    "old mount point": Case([*QUANTIZE, "--force"], old="old", is_mounted=True),
    "new file": Case(QUANTIZE_FILE, "out.safetensors"),
    "old file": Case([*QUANTIZE_FILE, "--force"], "out.safetensors", "old.safetensors"),
    "convert": Case(["convert", "{sources}/quantized", "{target}", "--to", "nvfp4-modelopt",
                     "--threads", "1", "--max-shard-size", "400"]),
    "dequantize": Case(["dequantize", "{sources}/quantized", "{target}", "--dtype", "bf16",
                        "--threads", "1", "--max-shard-size", "1100"]),
    "gptq": Case([*QUANTIZE_FILE, "--gptq", "{sources}/statistics.safetensors"],
                 "out.safetensors", model="experts"),
    "fix": Case(["check", "{sources}/unequal", "--fix", "{target}", "--threads", "1"]),
}
MEASURING_CASES = {
    "moe tune": Case(["moe", "tune", "--shape", "64,32,4,1", "--mode", "bf16", "--tokens", "1",
                      "--min-time", "0", "--threads", "1", "--out", "{target}"], "out.json"),
    "moe place": Case(["moe", "place", "--loads", "{sources}/loads.json", "--ranks", "2", "--out",
                       "{target}"], "out.json"),
    "moe run": Case(["moe", "run", str(TINY_MOE), "--layer", "0", "--tokens", "1", "--min-time",
                     "0", "--mode", "bf16", "--threads", "1", "--routing-out", "{target}"],
                    "out.safetensors", program=BENCH_CLI),
    "report": Case(["report", "{sources}/quantized", "--html", "{target}", "--threads", "1"],
                   "out.html"),
}


def need_mounts(case):
    allowed = subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False)
    if case.is_mounted and allowed.returncode != 0:
        pytest.skip("this process may not mount")


def undisturbed(case, sources, folder):
    """The content of the target before and after, and how often each call is made."""
    case.prepare(sources, folder)
    old = case.content(folder)
    counts = folder / "counts"
    result = case.run(sources, folder, env={"NARROWFLOAT_FAULT_COUNTS": str(counts)})
    assert result.returncode == DONE, result.stderr
    lines = counts.read_text().splitlines()
    return old, case.content(folder), {line.split()[0]: int(line.split()[1]) for line in lines}


def in_parallel(check, items):
    with ThreadPoolExecutor(2) as pool:
        for _ in pool.map(check, items):
            pass


def check_rerun(case, sources, folder, new, is_forced):
    """The same command succeeds, or refuses what is complete, and nothing else is left."""
    was_new = case.content(folder) == new
    result = case.run(sources, folder)
    if was_new and not is_forced and result.returncode == USAGE:
        assert "force" in result.stderr
    else:
        assert result.returncode == DONE, result.stderr
        assert [path.name for path in folder.iterdir()] == [case.target]
        if (folder / case.target).is_dir():
            assert {path.name for path in (folder / case.target).iterdir()} == set(new)
    assert case.content(folder) == new


@pytest.mark.parametrize("name", CASES)
def test_every_call_that_fails(tmp_path, sources, name):
    case = CASES[name]
    need_mounts(case)
    old, new, counts = undisturbed(case, sources, tmp_path / "first")
    assert counts["write"] > 3 and counts["fsync"] > 1 and counts["rename"] > 0

    def check(fault):
        folder = tmp_path / fault.replace(":", "-")
        case.prepare(sources, folder)
        result = case.run(sources, folder, env={"NARROWFLOAT_FAULT": fault})
        assert result.returncode in (DONE, INPUT), (fault, result)
        content = case.content(folder)
        assert content == new if result.returncode == DONE else content in (old, new), fault
        if result.returncode == INPUT:
            assert "error: " in result.stderr, fault
            check_rerun(case, sources, folder, new, "--force" in case.command)
        shutil.rmtree(folder)

    in_parallel(check, [f"{call}:{number}:{error}" for call, errors in ERRORS.items()
                        for number in range(1, counts[call] + 1) for error in errors])


@pytest.mark.parametrize("name", MEASURING_CASES)
def test_calls_that_fail_while_a_measurement_is_written(tmp_path, sources, name):
    case = MEASURING_CASES[name]
    _, _, counts = undisturbed(case, sources, tmp_path / "first")
    for call in ("fallocate", "fsync", "rename", "flock"):
        for number in range(1, counts[call] + 1):
            folder = tmp_path / f"{call}{number}"
            folder.mkdir()
            fault = f"{call}:{number}:{ERRORS[call][0]}"
            result = case.run(sources, folder, env={"NARROWFLOAT_FAULT": fault})
            # A file system may have no locks.
            assert result.returncode == (DONE if call == "flock" else INPUT), result
            assert [path.name for path in folder.iterdir()] in ([], [case.target])


@pytest.mark.parametrize("name", CASES)
def test_a_kill_before_every_call(tmp_path, sources, name):
    case = CASES[name]
    need_mounts(case)
    old, new, counts = undisturbed(case, sources, tmp_path / "first")

    def check(number):
        folder = tmp_path / str(number)
        case.prepare(sources, folder)
        fault = {"NARROWFLOAT_FAULT": f"any:{number}:kill"}
        result = case.run(sources, folder, env=fault)
        assert result.returncode == -signal.SIGKILL, (number, result)
        content = case.content(folder)
        if content not in (old, new):
            # Files that are moved one by one: what is there does not load, and is put back.
            assert case.is_mounted, number
            inspected = subprocess.run([CLI, "inspect", folder / case.target], check=False,
                                       capture_output=True, env=CLEAN_ENVIRONMENT)
            assert inspected.returncode == INPUT, number
        if not case.target.endswith(".safetensors") and old:
            # A run that fails removes neither the old checkpoint nor the new one.
            failed = case.run(sources, folder, source="broken")
            assert failed.returncode == INPUT, (number, failed)
            assert case.content(folder) in (old, new), number
        check_rerun(case, sources, folder, new, "--force" in case.command)
        shutil.rmtree(folder)

    in_parallel(check, range(1, counts["any"] + 1))


def test_writers_that_race_for_one_folder(tmp_path, sources):
    """Two to four at once, 300 times, each with other weights or another format: one of them wins,
    says so, and its files alone are there."""
    formats = ["nvfp4", "mxfp8", "mxfp4", "fp8-block"]
    commands = [[CLI, "quantize", sources / ("model" if name != "mxfp8" else "other"), "--to", name,
                 "--threads", "1", "--max-shard-size", "400"] for name in formats]
    expected = []
    for i, command in enumerate(commands):
        target = tmp_path / f"alone{i}"
        subprocess.run([*command, target], check=True, capture_output=True, env=CLEAN_ENVIRONMENT)
        expected.append({path.name: path.read_bytes() for path in target.iterdir()})

    def race(number):
        folder = tmp_path / f"race{number}"
        folder.mkdir()
        writers = [subprocess.Popen([*command, folder / "out"], env=CLEAN_ENVIRONMENT,
                                    stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
                   for command in commands[:2 + number % 3]]
        errors = [writer.communicate(timeout=120)[1] for writer in writers]
        winners = [i for i, writer in enumerate(writers) if writer.returncode == DONE]
        assert len(winners) == 1, errors
        assert [path.name for path in folder.iterdir()] == ["out"], errors
        assert {path.name: path.read_bytes()
                for path in (folder / "out").iterdir()} == expected[winners[0]]
        shutil.rmtree(folder)

    in_parallel(race, range(300))


@pytest.mark.parametrize("options,expected", [("size=12k", "space"), ("ro", "Read-only")])
def test_a_file_system_that_takes_no_checkpoint(tmp_path, sources, options, expected):
    need_mounts(Case([], is_mounted=True))
    for target in ("disk", "disk/out"):
        script = ('mount -t tmpfs -o "$1" tmpfs "$2"; status=0; "$3" quantize "$4" "$5" --to nvfp4 '
                  '|| status=$?; ls -A "$2"; exit $status')
        (tmp_path / "disk").mkdir(exist_ok=True)
        result = subprocess.run(
            ["unshare", "-m", "sh", "-ec", script, "sh", options, tmp_path / "disk", CLI,
             sources / "model", tmp_path / target], capture_output=True, text=True, check=False,
            env=CLEAN_ENVIRONMENT)
        assert result.returncode == INPUT, result
        # A finished shard may wait for --resume.
        assert all("narrowfloat" in name for name in result.stdout.split()), result
        assert expected in result.stderr or "are free" in result.stderr


@pytest.mark.parametrize("program,command", [
    (CLI, ["moe", "tune", "--shape", "64,32,4,1", "--mode", "bf16", "--out"]),
    (BENCH_CLI, ["moe", "run", "{model}", "--layer", "0", "--mode", "bf16", "--routing-out"]),
])
def test_results_of_measurements_overwrite_nothing(tmp_path, program, command):
    model = tmp_path / "model"
    shutil.copytree(TINY_MOE, model)
    mine = tmp_path / "mine.safetensors"
    mine.write_text("mine")
    words = [word.format(model=model) for word in command]
    more = ["--min-time", "0"]

    def refused(path, *arguments):
        result = subprocess.run([program, *words, path, *more, *arguments], capture_output=True,
                                text=True, check=False, env=CLEAN_ENVIRONMENT)
        assert result.returncode == USAGE and command[-1] in result.stderr, result
        return result.stderr

    assert "--force" in refused(mine)
    assert mine.read_text() == "mine"
    if "run" in command:
        # The weights and the activations of the model, also under another name.
        link = tmp_path / "link.safetensors"
        link.hardlink_to(model / "model.safetensors")
        for path in (model / "model.safetensors", link,
                     model / "calibration/activations.safetensors"):
            before = path.read_bytes()
            assert "is read as" in refused(path, "--force")
            assert path.read_bytes() == before
    result = subprocess.run([program, *words, mine, *more, "--tokens", "1", "--force"],
                            capture_output=True, text=True, check=False, env=CLEAN_ENVIRONMENT)
    assert result.returncode == DONE, result.stderr
    assert mine.read_bytes() != b"mine"
