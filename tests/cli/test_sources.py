"""Sources that lie, change or are shared: every one is an error with the path, or a warning."""

import json
import os
import resource
import struct
import subprocess

import pytest
from conftest import (CLEAN_ENVIRONMENT, CLI, DONE, INPUT, UNSUPPORTED, USAGE, bf16_weight, run,
                      run_json, run_ok, write_safetensors)

WEIGHT = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture
def model(tmp_path):
    """A directory with one linear layer and a config."""
    directory = tmp_path / "model"
    directory.mkdir()
    write_safetensors(directory / "model.safetensors", {WEIGHT: bf16_weight(64, 128)})
    (directory / "config.json").write_text("{}")
    return directory


def mount(script, *paths):
    """Runs a shell script that may mount, where that ends with the process.  Without the right to
    mount (containers) the test is skipped."""
    allowed = subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False)
    if allowed.returncode != 0:
        pytest.skip("this process may not mount")
    return subprocess.run(["unshare", "-m", "sh", "-ec", script, "sh", CLI, *map(str, paths)],
                          capture_output=True, text=True, check=False, env=CLEAN_ENVIRONMENT)


@pytest.mark.parametrize("arguments,relation", [
    ("$2 $3", "is the source"), ("$2 $3/out", "is inside the source"),
    ("$3 $2", "is the source"),
])
def test_a_bind_mount_of_the_source_is_no_target(tmp_path, model, arguments, relation):
    second = tmp_path / "second"
    second.mkdir()
    before = (model / "model.safetensors").read_bytes()
    result = mount(f'mount --bind "$2" "$3"; exec "$1" quantize {arguments} --to nvfp4 --force',
                   model, second)
    assert result.returncode == USAGE
    assert relation in result.stderr
    assert (model / "model.safetensors").read_bytes() == before


def test_a_bind_mount_of_a_shard_in_the_target(tmp_path, model):
    target = tmp_path / "old"
    target.mkdir()
    (target / "model.safetensors").touch()
    result = mount('mount --bind "$2/model.safetensors" "$3/model.safetensors"; '
                   'exec "$1" quantize "$2" "$3" --to nvfp4 --force', model, target)
    assert result.returncode == USAGE
    assert "holds a file of the source" in result.stderr


def test_an_index_of_nothing(model):
    index = model / "model.safetensors.index.json"
    index.write_text('{"weight_map":{}}')
    for command in ("inspect", "quantize", "dequantize", "diff"):
        more = {"quantize": [model.parent / "out", "--to", "nvfp4"],
                "dequantize": [model.parent / "out", "--dtype", "bf16"],
                "diff": [model]}.get(command, [])
        result = run(command, model, *more)
        assert result.returncode == INPUT
        assert f"{index}: 'weight_map' is empty" in result.stderr


def test_a_source_that_is_rewritten_in_place(tmp_path):
    """With the same size: nothing but the times tells the two contents apart."""
    source, target = tmp_path / "slow.safetensors", tmp_path / "out.safetensors"
    write_safetensors(source, {f"model.layers.{i}.mlp.up_proj.weight": bf16_weight(512, 2048, i)
                               for i in range(24)})
    command = [CLI, "quantize", source, target, "--to", "nvfp4", "--threads", "1", "--progress",
               "json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          env=CLEAN_ENVIRONMENT) as process:
        process.stderr.readline()
        with open(source, "r+b") as file:
            file.seek(-2048, os.SEEK_END)
            file.write(bytes(2048))
        errors = process.communicate(timeout=120)[1]
    assert process.returncode == INPUT
    assert f"{source}: was written to" in errors
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize("quantization,expected", [
    ({"format": "mxfp8-quantized", "weights": {"num_bits": "8"}}, "num_bits' is \"8\""),
    ({"format": "float-quantized", "weights": {"num_bits": "8", "type": "float",
                                               "strategy": "block",
                                               "block_structure": [128, 128]}}, "cannot be read"),
    ({"format": "nvfp4-pack-quantized", "weights": {"num_bits": 1}}, "num_bits' is 1"),
    ({"format": "nvfp4-pack-quantized", "weights": {"group_size": 0}}, "group_size' is 0"),
    ({"format": "mxfp4-pack-quantized", "weights": {"group_size": -1}}, "group_size' is -1"),
    ({"format": "mxfp4-pack-quantized", "weights": {"group_size": 10**18}}, "group_size' is 1000"),
])
def test_declarations_that_contradict_themselves(model, quantization, expected):
    config = {"quant_method": "compressed-tensors", "format": quantization["format"],
              "config_groups": {"group_0": {"weights": quantization["weights"]}}}
    (model / "config.json").write_text(json.dumps({"quantization_config": config}))
    result = run("dequantize", model, model.parent / "out", "--dtype", "bf16")
    assert result.returncode in (INPUT, UNSUPPORTED)
    assert str(model) in result.stderr and expected in result.stderr


@pytest.mark.parametrize("shape", [[0, 2**62], [2**62, 0], [2**63 - 1, 2**63 - 1, 0]])
def test_empty_tensors_of_impossible_shape(tmp_path, shape):
    source = tmp_path / "empty.safetensors"
    write_safetensors(source, {WEIGHT: ("BF16", shape, b"")})
    for arguments in (["inspect", source],
                      ["quantize", source, tmp_path / "out.safetensors", "--to", "nvfp4"]):
        result = run(*arguments)
        assert result.returncode == INPUT
        assert "overflows 63 bits" in result.stderr


@pytest.mark.parametrize("dtype,shape", [("BF16", [0, 2**56]), ("BF16", [2**56, 0]),
                                         ("U8", [0, 2**59])])
def test_empty_tensors_of_the_largest_shape(tmp_path, dtype, shape):
    source, target = tmp_path / "empty.safetensors", tmp_path / "out.safetensors"
    write_safetensors(source, {"empty.weight": (dtype, shape, b""), WEIGHT: bf16_weight(64, 128)})
    run_ok("inspect", source)
    run_ok("quantize", source, target, "--to", "nvfp4")
    run_ok("dequantize", target, tmp_path / "back.safetensors", "--dtype", "fp32")
    assert run("diff", source, target).returncode == 1


def test_more_shards_than_descriptors(tmp_path):
    """1,100 shards, and 256 open files allowed."""
    model, target = tmp_path / "model", tmp_path / "out"
    model.mkdir()
    for i in range(1, 1101):
        write_safetensors(model / f"model-{i:05}-of-01100.safetensors",
                          {f"layers.{i}.up_proj.weight": bf16_weight(1, 16, i)})
    limit = (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    result = run("quantize", model, target, "--to", "nvfp4",
                 preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limit))
    assert result.returncode == DONE, result.stderr
    assert len(run_json("inspect", target)["tensors"]) == 1100


def test_a_file_size_limit_is_an_error(tmp_path, model):
    result = run("quantize", model, tmp_path / "out", "--to", "nvfp4",
                 preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024)))
    assert result.returncode == INPUT
    assert "File too large" in result.stderr
    assert list(tmp_path.iterdir()) == [model]


def test_partial_files_of_other_programs_stay(tmp_path, small_file):
    target = tmp_path / "b.safetensors"
    download = tmp_path / "b.safetensors.partial"
    download.write_bytes(b"of a browser")
    run_ok("quantize", small_file, target, "--to", "nvfp4")
    assert download.read_bytes() == b"of a browser"


def test_links_that_leave_the_model_are_named(tmp_path, model):
    (tmp_path / "secret").write_text("key")
    (model / "tokenizer.json").symlink_to(tmp_path / "secret")
    (model / "vocab.txt").write_text("a b")
    (model / "merges.txt").symlink_to("vocab.txt")
    target = tmp_path / "out"
    errors = run_ok("quantize", model, target, "--to", "nvfp4").stderr
    assert f"tokenizer.json -> {tmp_path / 'secret'}" in errors and "merges" not in errors
    assert (target / "tokenizer.json").read_text() == "key"
    assert not (target / "tokenizer.json").is_symlink()


def test_overflow_to_infinity_is_a_warning(tmp_path):
    """The largest BF16 rounds up to 2^128 in this format."""
    source, target = tmp_path / "big.safetensors", tmp_path / "out.safetensors"
    write_safetensors(source, {WEIGHT: ("BF16", [32, 32], b"\x7f\x7f" * 1024)})
    result = run_ok("quantize", source, target, "--to", "mxfp4")
    assert f"warning: tensor '{WEIGHT}': 1024 of 1024 elements become infinite" in result.stderr
    assert "SQNR       nan" in result.stdout


def test_configs_of_many_members_take_linear_time(model):
    """Each took from 10 s to a minute when every member or exclusion was looked for in a list."""
    target = model.parent / "out"
    (model / "config.json").write_text(json.dumps({f"member{i}": {} for i in range(100_000)}))
    start = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    run_ok("quantize", model, target, "--to", "nvfp4")
    run_ok("dequantize", target, model.parent / "back", "--dtype", "bf16")
    assert (model.parent / "back/config.json").read_text() == (model / "config.json").read_text()
    tensors = {f"model.layers.{i}.experts.mlp{i % 9}.up_proj.weight": ("BF16", [0, 16], b"")
               for i in range(20_000)}
    tensors[WEIGHT] = bf16_weight(64, 128)
    write_safetensors(model / "model.safetensors", tensors)
    excluded = [f"model.layers.{i}.absent" for i in range(20_000)] + ["model.layers.0"]
    (model / "config.json").write_text(json.dumps({"modules_to_not_convert": excluded}))
    result = run("quantize", model, target, "--to", "nvfp4", "--dry-run", "--force")
    assert result.returncode == USAGE and "no tensor is left" in result.stderr
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - start < 20


def test_half_a_million_tensors_take_linear_time_and_memory(tmp_path):
    """Twice as many are within 10 s and 2 GB. A plan of a target needs more, and has a limit."""
    entries = ",".join(f'"layers.{i}.mlp.up_proj.weight":{{"dtype":"U8","shape":[0],'
                       '"data_offsets":[0,0]}' for i in range(500_001))
    source = tmp_path / "many.safetensors"
    header = ("{" + entries + "}").encode()
    source.write_bytes(struct.pack("<Q", len(header)) + header)

    def measured(*arguments):
        with subprocess.Popen([CLI, *arguments], stdout=subprocess.DEVNULL,
                              stderr=subprocess.PIPE, text=True, env=CLEAN_ENVIRONMENT) as process:
            errors = process.stderr.read()
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        assert usage.ru_utime < 10 and usage.ru_maxrss < 1_000_000, usage
        return process.returncode, errors

    assert measured("inspect", source) == (DONE, "")
    assert measured("inspect", source, "--json") == (DONE, "")
    for arguments in (["quantize", source, tmp_path / "out.safetensors", "--to", "nvfp4"],
                      ["check", source, "--fix", tmp_path / "out.safetensors"]):
        code, errors = measured(*arguments)
        assert code == UNSUPPORTED
        assert f"{source}: has 500001 tensors; the limit for a source is 500000" in errors


def test_a_row_of_100_megabytes_stays_within_its_memory(tmp_path):
    """Its elements are not widened all at once. The file has a hole for data."""
    cols = 50_000_000
    source = tmp_path / "row.safetensors"
    header = json.dumps({WEIGHT: {"dtype": "BF16", "shape": [1, cols],
                                  "data_offsets": [0, 2 * cols]}}).encode()
    source.write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(source, 8 + len(header) + 2 * cols)
    with subprocess.Popen([CLI, "quantize", source, tmp_path / "out.safetensors", "--to", "nvfp4",
                           "--max-memory", "1G", "--json"], stdout=subprocess.PIPE,
                          env=CLEAN_ENVIRONMENT) as process:
        report = json.load(process.stdout)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == DONE
    planned = report["peak_buffer_bytes"]
    assert planned < 400_000_000
    assert usage.ru_maxrss * 1024 < planned + 100_000_000


def test_too_many_patterns_of_exclusions(model):
    (model / "config.json").write_text(json.dumps({"ignore": [f"*.{i}" for i in range(1001)]}))
    result = run("quantize", model, model.parent / "out", "--to", "nvfp4")
    assert result.returncode == INPUT
    assert "by 1001 patterns with wildcards; the limit is 1000" in result.stderr
