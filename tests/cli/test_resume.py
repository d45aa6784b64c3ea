"""--resume: a killed run continues after the shards that it finished, and the bytes are those of a
run that nobody disturbed.  What is continued is the same work, or nothing."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import (CLEAN_ENVIRONMENT, CLI, DONE, INPUT, INTERRUPTED, USAGE, bf16_weight, run_ok,
                      write_safetensors)

FAULTY_CALLS = Path(os.environ.get("NARROWFLOAT_TEST_BIN", "build/cpu/tests/bin")).resolve(
) / "libfaulty_calls.so"
MANIFEST = "narrowfloat-manifest.json"
SHARDS = 6


@pytest.fixture(scope="module", name="sources")
def make_sources(tmp_path_factory):
    """A model that becomes six shards, plain and quantized; gate and up share a global scale."""
    root = tmp_path_factory.mktemp("sources")
    (root / "model").mkdir()
    write_safetensors(root / "model/model.safetensors",
                      {f"layers.{i // 2}.mlp.{'up' if i % 2 else 'gate'}_proj.weight":
                       bf16_weight(16, 32, 5 * i) for i in range(SHARDS)})
    (root / "model/config.json").write_text("{}")
    (root / "model/vocab.txt").write_text("a b")
    run_ok("quantize", root / "model", root / "quantized", "--to", "nvfp4")
    return root


def quantize(sources, target, *more):
    size = [] if "--max-shard-size" in more else ["--max-shard-size", "300"]
    return [CLI, "quantize", sources / "model", target, "--to", "nvfp4", "--threads", "1", *size,
            *more]


def dequantize(sources, target, *more):
    return [CLI, "dequantize", sources / "quantized", target, "--dtype", "bf16", "--threads", "1",
            "--max-shard-size", "1030", *more]


def convert(sources, target, *more):
    return [CLI, "convert", sources / "quantized", target, "--to", "mxfp8", "--lossy", "--threads",
            "1", "--max-shard-size", "530", *more]


def execute(command, fault=None, counts=None):
    env = dict(CLEAN_ENVIRONMENT)
    if fault or counts:
        env["LD_PRELOAD"] = str(FAULTY_CALLS)
    if fault:
        env["NARROWFLOAT_FAULT"] = fault
    if counts:
        env["NARROWFLOAT_FAULT_COUNTS"] = str(counts)
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False,
                          timeout=120, stdin=subprocess.DEVNULL)


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def kill_after(sources, target, shards):
    """Kills a run once so many shards are recorded; returns its staging directory."""
    # The record of a shard is renamed after the shard.
    result = execute(quantize(sources, target), fault=f"rename:{2 * shards + 1}:kill")
    assert result.returncode == -signal.SIGKILL
    staging = target.with_name(target.name + ".narrowfloat.partial")
    assert len(json.loads((staging / MANIFEST).read_text())["files"]) == shards
    return staging


@pytest.mark.parametrize("command", [quantize, dequantize, convert])
def test_bytes_after_a_kill_at_any_time(tmp_path, sources, command):
    expected_folder = tmp_path / "expected"
    counts = tmp_path / "counts"
    assert execute(command(sources, expected_folder), counts=counts).returncode == DONE
    expected = content(expected_folder)
    assert len([name for name in expected if name.startswith("model-")]) == SHARDS
    calls = dict(line.split() for line in counts.read_text().splitlines())

    def check(number):
        folder = tmp_path / str(number)
        folder.mkdir()
        target = folder / "out"
        killed = execute(command(sources, target), fault=f"any:{number}:kill")
        assert killed.returncode == -signal.SIGKILL
        if not target.exists():
            resumed = execute(command(sources, target, "--resume"))
            assert resumed.returncode == DONE, (number, resumed)
            assert [path.name for path in folder.iterdir()] == ["out"], number
        assert content(target) == expected, number
        shutil.rmtree(folder)

    total = int(calls["any"])
    times = sorted(random.Random(7).sample(range(1, total + 1), min(100, total)))
    with ThreadPoolExecutor(2) as pool:
        for _ in pool.map(check, times):
            pass


def test_bytes_after_kills_at_200_random_times(tmp_path, sources):
    """Every run is one with --resume, and killed unless it is done by then."""
    assert execute(quantize(sources, tmp_path / "expected")).returncode == DONE
    expected = content(tmp_path / "expected")
    start = time.monotonic()
    assert execute(quantize(sources, tmp_path / "timed")).returncode == DONE
    seconds = time.monotonic() - start

    def kill_and_resume(seed):
        times, kills, results = random.Random(seed), 0, 0
        while kills < 100:
            target = tmp_path / f"{seed}-{results}"
            code = None
            while code != DONE and not target.exists():
                with subprocess.Popen(quantize(sources, target, "--resume"), env=CLEAN_ENVIRONMENT,
                                      stdout=subprocess.DEVNULL,
                                      stderr=subprocess.DEVNULL) as process:
                    time.sleep(times.uniform(0, seconds))
                    process.kill()
                code = process.returncode
                assert code in (DONE, -signal.SIGKILL)
                kills += code != DONE
            assert content(target) == expected, (seed, results)
            shutil.rmtree(target)
            results += 1
        return results

    with ThreadPoolExecutor(2) as pool:
        assert min(pool.map(kill_and_resume, range(2))) > 5


def test_weights_that_share_a_scale_are_read_once(tmp_path, sources):
    """Where memory has room for gate and up; the bytes are the same."""
    planned = json.loads(execute(quantize(sources, tmp_path / "x", "--dry-run", "--json")).stdout)
    too_few = str(planned["peak_buffer_bytes"] - 1)  # Enough for each weight.
    reads, results = [], []
    for more in ([], ["--max-memory", too_few]):
        target, counts = tmp_path / f"{len(reads)}", tmp_path / "counts"
        result = execute(quantize(sources, target, "--max-shard-size", "5GB", *more), counts=counts)
        assert result.returncode == DONE, result.stderr
        reads.append(int(dict(line.split() for line in counts.read_text().splitlines())["read"]))
        results.append(content(target))
    assert results[0] == results[1]
    assert reads[1] - reads[0] == SHARDS // 2


def test_finished_shards_are_not_written_again(tmp_path, sources):
    target = tmp_path / "out"
    staging = kill_after(sources, target, 4)
    before = {name: (staging / f"{name}.staged").stat().st_ino
              for name in json.loads((staging / MANIFEST).read_text())["files"]}
    result = execute(quantize(sources, target, "--resume"))
    assert result.returncode == DONE, result.stderr
    assert re.search("4 of 6 shards are of the run before", result.stderr)
    assert {name: (target / name).stat().st_ino for name in before} == before
    assert not (target / MANIFEST).exists()


@pytest.mark.parametrize("damage", [b"", b"\0", None])
def test_shards_are_trusted_by_their_hash_alone(tmp_path, sources, damage):
    """Emptied, changed in one byte, or removed: the shard is written again."""
    expected_folder, target = tmp_path / "expected", tmp_path / "out"
    assert execute(quantize(sources, expected_folder)).returncode == DONE
    staging = kill_after(sources, target, 3)
    shard = staging / "model-00002-of-00006.safetensors.staged"
    if damage is None:
        shard.unlink()
    else:
        shard.write_bytes(shard.read_bytes()[:-1] + damage if damage else b"")
    result = execute(quantize(sources, target, "--resume"))
    assert result.returncode == DONE, result.stderr
    assert "2 of 6 shards" in result.stderr
    assert content(target) == content(expected_folder)


@pytest.mark.parametrize("more", [["--scale-search", "4over6"], ["--math", "fast"],
                                  ["--exclude", "layers.2.*"], ["--max-shard-size", "600"]])
def test_other_options_are_refused(tmp_path, sources, more):
    target = tmp_path / "out"
    staging = kill_after(sources, target, 2)
    before = content(staging)
    result = execute(quantize(sources, target, "--resume", *more))
    assert result.returncode == USAGE
    assert "--resume: " in result.stderr and "with other options" in result.stderr
    assert content(staging) == before
    assert execute(quantize(sources, target, "--resume")).returncode == DONE


def test_another_source_is_refused(tmp_path, sources):
    copy = tmp_path / "copy"
    shutil.copytree(sources, copy)
    target = tmp_path / "out"
    kill_after(copy, target, 2)
    file = copy / "model/model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    result = execute(quantize(copy, target, "--resume"))
    assert result.returncode == USAGE and "another source" in result.stderr
    # Without the option the run starts again.
    assert execute(quantize(copy, target)).returncode == DONE
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["copy", "out"]


def test_a_damaged_manifest_is_an_error(tmp_path, sources):
    target = tmp_path / "out"
    staging = kill_after(sources, target, 2)
    for text in ("", "{}", '{"version": 1}', "[" * 1000):
        (staging / MANIFEST).write_text(text)
        result = execute(quantize(sources, target, "--resume"))
        assert result.returncode == INPUT and MANIFEST in result.stderr
    assert execute(quantize(sources, target)).returncode == DONE


def test_a_full_disk_keeps_what_is_finished(tmp_path, sources):
    target = tmp_path / "out"
    result = execute(quantize(sources, target), fault="fallocate:5:28")
    assert result.returncode == INPUT and not target.exists()
    result = execute(quantize(sources, target, "--resume"))
    assert result.returncode == DONE and "2 of 6 shards" in result.stderr


def test_an_interrupted_run_says_how_to_go_on(tmp_path):
    source, target = tmp_path / "model", tmp_path / "out"
    source.mkdir()
    write_safetensors(source / "model.safetensors",
                      {f"layers.{i}.mlp.up_proj.weight": bf16_weight(512, 2048, i)
                       for i in range(48)})
    command = [CLI, "quantize", source, target, "--to", "nvfp4", "--threads", "1",
               "--max-shard-size", "2M"]
    with subprocess.Popen([*command, "--progress", "json"], stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True, env=CLEAN_ENVIRONMENT) as process:
        for _ in range(8):
            process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        errors = process.communicate(timeout=120)[1]
    assert process.returncode == INTERRUPTED
    assert "finished shards wait beside it for --resume" in errors and not target.exists()
    assert execute([*command, "--resume"]).returncode == DONE
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]
