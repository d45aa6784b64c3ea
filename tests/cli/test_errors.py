"""Errors end with the documented exit code, a message that says where, and no debris."""

import json
import os
import re
import shutil
import signal
import struct
import subprocess
import time

import pytest
from conftest import (BENCH_CLI, BENCH_COMMANDS, CLEAN_ENVIRONMENT, CLI, DONE, INPUT, INTERRUPTED,
                      TINY_MOE, UNSUPPORTED, USAGE, bf16_weight, run, run_ok, write_safetensors)

COMMANDS = ["quantize", "dequantize", "inspect", "check", "diff", "explain", "doctor", "moe tune",
            "moe explain", "moe place"]


@pytest.mark.parametrize("name,program,command",
                         [("narrowfloat", CLI, command) for command in COMMANDS] +
                         [("narrowfloat-bench", BENCH_CLI, command) for command in BENCH_COMMANDS])
def test_help_has_examples_and_exit_codes(name, program, command):
    text = run_ok(*command.split(), "--help", program=program).stdout
    for word in ("Usage:", "Examples:", f"{name} {command}", "Exit codes:", "130 interrupted"):
        assert word in text, word


@pytest.mark.parametrize("program,commands", [(CLI, COMMANDS), (BENCH_CLI, BENCH_COMMANDS)])
def test_top_level_help_lists_the_commands(program, commands):
    text = run_ok("--help", program=program).stdout
    assert all(command.split()[0] in text for command in commands)


def test_help_says_where_the_benchmarks_are():
    line = next(line for line in run_ok("--help").stdout.splitlines()
                if "narrowfloat-bench" in line)
    assert all(command in line for command in BENCH_COMMANDS)


@pytest.mark.parametrize("arguments", [[], ["--help"], ["--shape", "128,128,8,2", "--json"],
                                       ["models/tiny-moe"]])
@pytest.mark.parametrize("command", BENCH_COMMANDS)
def test_commands_of_the_other_program_are_named(command, arguments):
    result = run(*command.split(), *arguments, program=CLI)
    assert result.returncode == USAGE and result.stdout == ""
    assert result.stderr.splitlines() == [
        f"narrowfloat: error: '{command}' is a command of narrowfloat-bench",
        f"Try: narrowfloat-bench {command} --help"]


@pytest.mark.parametrize("command", ["quantize", "inspect", "doctor", "moe tune"])
def test_the_benchmark_program_has_no_other_commands(command):
    result = run(*command.split(), program=BENCH_CLI)
    assert result.returncode == USAGE
    assert command.split()[-1] in result.stderr


@pytest.mark.parametrize("arguments,expected", [
    ([], "no command given"),
    (["frobnicate"], "frobnicate"),
    (["--frobnicate"], "--frobnicate"),
    (["quantize"], "SRC is required"),
    (["quantize", "a"], "DST is required"),
    (["quantize", "a", "b"], "--to is required"),
    (["quantize", "a", "b", "--to", "int3"], "nvfp4-modelopt"),
    (["quantize", "a", "b", "--to", "nvfp4", "c"], "c"),
    (["quantize", "a", "b", "--to", "nvfp4", "--math", "sloppy"], "exact"),
    (["quantize", "a", "b", "--to", "mxfp4", "--mx-scale", "down"], "floor"),
    (["quantize", "a", "b", "--to", "nvfp4", "--scale-search", "best"], "4over6"),
    (["quantize", "a", "b", "--to", "nvfp4", "--nonfinite", "maybe"], "keep"),
    (["quantize", "a", "b", "--to", "nvfp4", "--max-memory", "lots"], "GiB"),
    (["quantize", "a", "b", "--to", "nvfp4", "--max-memory", "-1"], "GiB"),
    (["quantize", "a", "b", "--to", "nvfp4", "--max-shard-size", "99999999T"], "2^63"),
    (["quantize", "a", "b", "--to", "nvfp4", "--threads", "-1"],
     "--threads: got '-1', expected a whole number from 0 to 65536"),
    (["quantize", "a", "b", "--to", "nvfp4", "--threads", "1e3"], "whole number"),
    (["quantize", "a", "b", "--to", "nvfp4", "--threads", "010"],
     "--threads: got '010', expected a whole number without leading zeros"),
    (["quantize", "a", "b", "--to", "nvfp4", "--target-bits", "many"],
     "--target-bits: got 'many', expected a number from 1 to 32"),
    (["quantize", "a", "b", "--to", "nvfp4", "--progress", "loud"], "json"),
    (["quantize", "a", "b", "--to", "nvfp4", "--color", "red"], "never"),
    (["dequantize", "a", "b", "--dtype", "int8"], "fp32"),
    (["explain", "quantize", "--format", "nvfp5", "--shape", "4x96"], "nvfp4_per_token"),
    (["explain", "quantize", "--format", "nvfp4", "--shape", "4by96"], "4096x4096"),
    (["explain", "quantize", "--format", "nvfp4", "--shape", "4x96", "--device", "tpu"], "cuda:N"),
    (["explain", "multiply", "--format", "nvfp4", "--shape", "4x96"], "invert_scales, allreduce"),
    (["bench", "multiply"], "OP: got 'multiply', expected one of quantize, dequantize, amax"),
    (["bench", "--shape", "0x0"], "at least one row and one column"),
    (["bench", "--shape", "16x0"], "at least one row and one column"),
    (["bench", "--min-time", "forever"], "--min-time"),
    (["bench", "--min-time", "nan"], "a number from 0 to 3600"),
    (["bench", "--min-time", "-inf"], "--min-time"),
    (["bench", "--device", "cpu", "--replay-ms", "nan"], "--replay-ms"),
    (["bench", "--shape", "2147483648x2147483648"], "at most 2^40 elements"),
    (["explain", "quantize", "--format", "nvfp4", "--shape", "0x4611686018427387904"],
     "at most 2^40 elements"),
    (["eval"], "DIR is required"),
    (["eval", "a", "--mode", "int3"], "nvfp4_per_token"),
    (["eval", "a", "--bytes", "1"], "at least 2 bytes"),
    (["eval", "a", "--bytes", "some"], "GiB"),
    (["moe"], "the commands are tune, explain"),
    (["moe", "walk"], "walk"),
    (["moe", "run"], "DIR is required"),
    (["moe", "run", "a"], "--layer is required"),
    (["moe", "run", "a", "--layer", "-1"], "--layer"),
    (["moe", "run", "a", "--layer", "0", "--tokens", "0"], "--tokens"),
    (["moe", "run", "a", "--layer", "0", "--mode", "fp4"], "mxfp4_mxfp8"),
    (["moe", "bench"], "--shape is required"),
    (["moe", "bench", "--shape", "gpt-oss-7b"], "qwen3-30b-a3b"),
    (["moe", "bench", "--shape", "128,128,8"], "H,I,E,k"),
    (["moe", "bench", "--shape", "128,128,8,2,"], "H,I,E,k"),
    (["moe", "bench", "--shape", "128,0,8,2"], "H,I,E,k"),
    (["moe", "bench", "--shape", "128,128,8,9"], "k is at most E"),
    (["moe", "bench", "--shape", "128,128,8,2", "--mode", "fp4"], "mxfp4_mxfp8"),
    (["moe", "bench", "--shape", "128,128,8,2", "--tokens", "1,,2"], "such as 1,8,64"),
    (["moe", "bench", "--shape", "128,128,8,2", "--tokens", "0"], "such as 1,8,64"),
    (["moe", "bench", "--shape", "128,128,8,2", "--ep", "2/2"],
     "got '2/2', expected R/N"),
    (["moe", "bench", "--shape", "128,128,8,2", "--ep", "2"], "R/N"),
    (["moe", "bench", "--shape", "128,128,8,2", "--ep", "0/3"], "cannot be shared evenly"),
    (["moe", "bench", "--shape", "144,128,8,2", "--mode", "fp8_block"], "multiples of 128"),
    (["moe", "bench", "--shape", "128,128,8,2", "--max-memory", "1000"], "--max-memory"),
])
def test_wrong_usage(arguments, expected):
    result = run(*arguments)
    assert result.returncode == USAGE
    assert result.stdout == ""
    assert expected in result.stderr
    # One style, that of every other error, and where to look.
    first, *more = result.stderr.splitlines()
    assert first.split(": ")[:2] in (["narrowfloat", "error"], ["narrowfloat-bench", "error"])
    assert all(line.startswith("Try: narrowfloat") for line in more) and len(more) <= 1


@pytest.mark.parametrize("arguments,expected", [
    (["quantise"], "there is no command 'quantise'; did you mean 'quantize'?"),
    (["INSPECT", "a"], "did you mean 'inspect'?"),
    (["moe", "explian"], "there is no command 'explian'; did you mean 'explain'?"),
    (["quantize", "a", "b", "--to", "nvfp4", "--treads", "2"], "did you mean '--threads'?"),
    (["check", "a", "--agianst=b"], "did you mean '--against'?"),
    (["frobnicate"], "there is no command 'frobnicate'; the commands are quantize, "),
    (["inspect", "a", "--frobnicate"], "--frobnicate\n"),
])
def test_mistyped_words_have_suggestions(arguments, expected):
    result = run(*arguments, program=CLI)
    assert result.returncode == USAGE and expected in result.stderr
    assert ("did you mean" in result.stderr) == ("did you mean" in expected)


def test_names_in_any_case(tmp_path, small_file):
    plain = run_ok("explain", "quantize", "--format", "nvfp4", "--shape", "16x64").stdout
    for options in (["--format", "NVFP4"], ["--format", "NvFp4", "--math", "EXACT"]):
        assert run_ok("explain", "quantize", *options, "--shape", "16x64").stdout == plain
    for name in ("NVFP4", "Nvfp4-CT", "MXFP8"):
        run_ok("quantize", small_file, tmp_path / "out.safetensors", "--to", name, "--dry-run",
               "--color", "NEVER")


def test_modes_in_a_list():
    shape = ["moe", "explain", "--shape", "128,128,8,2"]
    repeated = run_ok(*shape, "--mode", "bf16", "--mode", "nvfp4_bf16").stdout
    assert run_ok(*shape, "--mode", "bf16,NVFP4_BF16").stdout == repeated
    assert run(*shape, "--mode", "bf16,,fp8_block").returncode == USAGE


@pytest.mark.parametrize("arguments,expected", [
    ([], "no command given; the commands are bench, allreduce, experts, ep-model, eval"),
    (["frobnicate"], "frobnicate"),
    (["moe"], "the commands are run, bench, gemm"),
    (["moe", "walk"], "walk"),
])
def test_wrong_usage_of_the_benchmark_program(arguments, expected):
    result = run(*arguments, program=BENCH_CLI)
    assert result.returncode == USAGE and result.stdout == ""
    assert expected in result.stderr
    assert "Try: narrowfloat-bench" in result.stderr


@pytest.mark.parametrize("arguments,option", [
    (["quantize", "a", "b", "--to", "nvfp4", "--mx-scale", "up"], "--mx-scale"),
    (["quantize", "a", "b", "--to", "fp8-block", "--mx-scale", "up"], "--mx-scale"),
    (["quantize", "a", "b", "--to", "mxfp4", "--scale-search", "4over6"], "--scale-search"),
    (["quantize", "a", "b", "--to", "nvfp4", "--quiet", "--verbose"], "--quiet"),
    (["inspect", "a", "--json", "--csv"], "--json"),
    (["diff", "a", "b", "--csv", "--json"], "--json"),
])
def test_conflicting_options(arguments, option):
    result = run(*arguments)
    assert result.returncode == USAGE
    assert option in result.stderr
    assert "Try: narrowfloat" in result.stderr


def test_no_overwriting_without_force(tmp_path, small_file):
    target = tmp_path / "out.safetensors"
    target.write_bytes(b"precious")
    result = run("quantize", small_file, target, "--to", "nvfp4")
    assert result.returncode == USAGE
    assert "out.safetensors" in result.stderr and "--force" in result.stderr
    assert target.read_bytes() == b"precious"
    run_ok("quantize", small_file, target, "--to", "nvfp4", "--force")
    assert run("inspect", target).returncode == DONE


def test_no_overwriting_of_a_directory_without_force(tmp_path):
    target = tmp_path / "out"
    target.mkdir()
    (target / "precious").write_text("data")
    result = run("quantize", TINY_MOE, target, "--to", "nvfp4")
    assert result.returncode == USAGE
    assert [path.name for path in target.iterdir()] == ["precious"]


def test_empty_shards_are_refused_by_their_option(tmp_path, small_file):
    result = run("quantize", small_file, tmp_path / "out.safetensors", "--to", "nvfp4",
                 "--max-shard-size", "0")
    assert result.returncode == USAGE
    assert "--max-shard-size: must be at least 1" in result.stderr


def test_nothing_left_to_quantize_names_the_options(tmp_path, small_file):
    result = run("quantize", small_file, tmp_path / "out.safetensors", "--to", "nvfp4",
                 "--exclude", "*")
    assert result.returncode == USAGE
    assert "--include and --exclude" in result.stderr


def test_values_beyond_fp16_stop_dequantizing(tmp_path):
    source, target = tmp_path / "big.safetensors", tmp_path / "out.safetensors"
    write_safetensors(source, {"a.weight": ("F8_E4M3", [1, 32], b"\x7e" * 32),
                               "a.weight_scale": ("U8", [1, 1], b"\x88")})
    result = run("dequantize", source, target, "--dtype", "fp16")
    assert result.returncode == USAGE
    assert "--dtype: tensor 'a.weight' has 32 value(s)" in result.stderr
    assert "[0, 0]" in result.stderr and "bf16 or fp32" in result.stderr
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize("foreign", [".git/HEAD", "notes.md"])
def test_force_deletes_nothing_but_checkpoints(tmp_path, foreign):
    target = tmp_path / "out"
    run_ok("quantize", TINY_MOE, target, "--to", "nvfp4")
    (target / foreign).parent.mkdir(exist_ok=True)
    (target / foreign).write_text("precious")
    result = run("quantize", TINY_MOE, target, "--to", "mxfp8", "--force")
    assert result.returncode == USAGE
    assert foreign.split("/", maxsplit=1)[0] in result.stderr
    assert (target / foreign).read_text() == "precious"


def test_source_is_never_the_target(small_file):
    before = small_file.read_bytes()
    assert run("quantize", small_file, small_file, "--to", "nvfp4", "--force").returncode == USAGE
    assert small_file.read_bytes() == before


def test_missing_source(tmp_path):
    for command in (["inspect"], ["moe", "run", "--layer", 0]):
        result = run(*command, tmp_path / "nowhere")
        assert result.returncode == INPUT
        assert "nowhere: cannot open: No such file" in result.stderr


@pytest.mark.parametrize("content", [
    b"", b"short", struct.pack("<Q", 2**63) + b"{}", struct.pack("<Q", 2) + b"[]",
    struct.pack("<Q", 5) + b'{"a":',
], ids=["empty", "no header", "huge header", "not an object", "cut off"])
@pytest.mark.parametrize("command", ["inspect", "quantize", "diff"])
def test_corrupt_file(tmp_path, content, command):
    source = tmp_path / "broken.safetensors"
    source.write_bytes(content)
    target = tmp_path / "out.safetensors"
    arguments = {"inspect": [source], "quantize": [source, target, "--to", "nvfp4"],
                 "diff": [source, source]}[command]
    result = run(command, *arguments)
    assert result.returncode == INPUT
    assert "broken.safetensors" in result.stderr
    assert result.stdout == ""
    assert list(tmp_path.iterdir()) == [source]


def test_truncated_data(tmp_path, small_file):
    small_file.write_bytes(small_file.read_bytes()[:-1])
    result = run("inspect", small_file)
    assert result.returncode == INPUT
    assert "small.safetensors" in result.stderr


def test_nan_in_a_weight_stops_unless_kept(tmp_path):
    source, target = tmp_path / "nan.safetensors", tmp_path / "out.safetensors"
    dtype, shape, data = bf16_weight(64, 128)
    name = "model.layers.0.mlp.up_proj.weight"
    write_safetensors(source, {name: (dtype, shape, b"\xc0\x7f" + data[2:])})
    result = run("quantize", source, target, "--to", "mxfp8")
    assert result.returncode in (USAGE, INPUT)
    assert name in result.stderr and "--nonfinite keep" in result.stderr
    assert list(tmp_path.iterdir()) == [source]
    kept = run_ok("quantize", source, target, "--to", "mxfp8", "--nonfinite", "keep")
    assert f"warning: tensor '{name}': 1 of 8192 elements" in kept.stderr


def test_too_small_a_memory_budget_names_the_minimum(tmp_path, small_file):
    result = run("quantize", small_file, tmp_path / "out.safetensors", "--to", "nvfp4",
                 "--max-memory", "16")
    assert result.returncode == USAGE
    assert "--max-memory: 16 bytes are too few; at least" in result.stderr
    assert list(tmp_path.iterdir()) == [small_file]


@pytest.fixture
def gptq_model(tmp_path):
    """A quantization method that this program does not read."""
    directory = tmp_path / "gptq"
    directory.mkdir()
    write_safetensors(directory / "model.safetensors",
                      {"layer.qweight": ("I32", [2, 2], bytes(16))})
    config = {"quantization_config": {"quant_method": "gptq"}}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_unreadable_quantization_is_unsupported_but_listed(gptq_model):
    result = run("inspect", gptq_model)
    assert result.returncode == UNSUPPORTED
    assert "gptq" in result.stderr and "layer.qweight" in result.stdout


def test_dequantize_refuses_an_unreadable_quantization(tmp_path, gptq_model):
    result = run("dequantize", gptq_model, tmp_path / "out", "--dtype", "bf16")
    assert result.returncode == UNSUPPORTED
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", ["--include", "--exclude"])
def test_glob_that_matches_nothing(tmp_path, small_file, option):
    result = run("quantize", small_file, tmp_path / "out.safetensors", "--to", "nvfp4", option,
                 "*.upproj.*")
    assert result.returncode == USAGE
    assert f"{option}: '*.upproj.*' matches no tensor" in result.stderr


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="needs /proc")
def test_target_that_nobody_can_write(small_file):
    result = run("quantize", small_file, "/proc/out.safetensors", "--to", "nvfp4")
    assert result.returncode == INPUT
    assert "/proc" in result.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_target(tmp_path, small_file):
    directory = tmp_path / "locked"
    directory.mkdir(mode=0o555)
    result = run("quantize", small_file, directory / "out.safetensors", "--to", "nvfp4")
    assert result.returncode == INPUT
    assert "out.safetensors" in result.stderr


def test_target_in_a_directory_that_does_not_exist(tmp_path, small_file):
    result = run("quantize", small_file, tmp_path / "no/such/out.safetensors", "--to", "nvfp4")
    assert result.returncode in (USAGE, INPUT)
    assert "no/such" in result.stderr


@pytest.fixture
def slow_file(tmp_path):
    """Long enough to be interrupted: many tensors, a second or more on one thread."""
    path = tmp_path / "slow.safetensors"
    write_safetensors(path, {f"model.layers.{i}.mlp.up_proj.weight": bf16_weight(512, 2048, i)
                             for i in range(96)})
    return path


def heed_signals():
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def start(command):
    """Starts a program that signals interrupt: background jobs and nohup ignore some."""
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env=CLEAN_ENVIRONMENT, preexec_fn=heed_signals)


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupted(tmp_path, slow_file, signal_number):
    target = tmp_path / "out.safetensors"
    command = [CLI, "quantize", slow_file, target, "--to", "nvfp4", "--threads", "1",
               "--progress", "json"]
    with start(command) as process:
        assert json.loads(process.stderr.readline())["event"] == "progress"
        process.send_signal(signal_number)
        output, errors = process.communicate(timeout=120)
    assert process.returncode == INTERRUPTED
    assert output == "" and "interrupted" in errors
    assert list(tmp_path.iterdir()) == [slow_file]


@pytest.mark.parametrize("target_exists", [False, True])
def test_killed(tmp_path, slow_file, target_exists):
    """The files of a killed run load nowhere, and the next run removes them."""
    source, target = tmp_path / "model", tmp_path / "out"
    source.mkdir()
    slow_file.rename(source / "model.safetensors")
    if target_exists:
        target.mkdir()
    arguments = ["quantize", source, target, "--to", "nvfp4", "--threads", "1",
                 "--max-shard-size", "2M"]
    with subprocess.Popen([CLI, *arguments, "--progress", "json"], stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True, env=CLEAN_ENVIRONMENT) as process:
        for _ in range(12):  # Some shards of 3 tensors are complete by then.
            process.stderr.readline()
        process.kill()
        process.communicate(timeout=120)
    leftovers = [path for path in tmp_path.rglob("*") if path.is_dir() and path != source]
    assert any(list(path.iterdir()) for path in leftovers)
    for path in leftovers:
        assert run("inspect", path).returncode == INPUT, path
    run_ok(*arguments)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]
    assert not any(".partial" in path.name for path in target.iterdir())
    assert run("inspect", target).returncode == DONE


@pytest.mark.parametrize("num_signals", [1, 2])
def test_interrupts_in_a_large_tensor_leave_no_target(tmp_path, num_signals):
    source, target = tmp_path / "large.safetensors", tmp_path / "out.safetensors"
    write_safetensors(source, {"model.layers.0.mlp.a_proj.weight": bf16_weight(64, 128),
                               "model.layers.0.mlp.b_proj.weight": bf16_weight(8192, 8192)})
    command = [CLI, "quantize", source, target, "--to", "nvfp4", "--threads", "1", "--progress",
               "json"]
    with start(command) as process:
        process.stderr.readline()  # The small tensor is done, the large one has begun.
        for _ in range(num_signals):
            process.send_signal(signal.SIGINT)
            time.sleep(0.01)  # Equal signals that are pending together are one.
        process.communicate(timeout=120)
    assert process.returncode == INTERRUPTED
    assert not target.exists()


@pytest.mark.parametrize("program", [CLI, BENCH_CLI])
@pytest.mark.parametrize("command", [[], ["quantize"], ["eval"], ["moe"]])
def test_help_fits_the_terminal(program, command):
    if command in (["quantize"], ["eval"]) and (command == ["eval"]) != (program == BENCH_CLI):
        return
    for columns in ("60", "100"):
        lines = run_ok(*command, "--help", program=program,
                       env={"COLUMNS": columns}).stdout.splitlines()
        # Examples stay in one line, and names of options are not cut.
        examples = next((i for i, line in enumerate(lines)
                         if line in ("Examples:", "Start here:")), len(lines))
        assert [line for line in lines[:examples] if len(line) > int(columns)] == []


def test_version_has_a_short_option():
    assert run_ok("-V").stdout == run_ok("--version").stdout


def completed(shell_words, cursor_word):
    """The words that bash offers for a command line."""
    script = run_ok("completion", "bash").stdout
    words = " ".join(f"'{word}'" for word in [*shell_words, cursor_word])
    result = subprocess.run(
        ["bash", "-c", f'{script}\nCOMP_WORDS=({words}); COMP_CWORD={len(shell_words)}\n'
                       '_narrowfloat; printf "%s\\n" "${COMPREPLY[@]}"'],
        capture_output=True, text=True, check=True)
    return result.stdout.split()


def test_completion():
    assert completed(["narrowfloat"], "ins") == ["inspect"]
    assert completed(["narrowfloat", "moe"], "") == ["tune", "explain", "place"]
    assert completed(["narrowfloat", "moe", "tune"], "--token") == ["--tokens", "--token-tile"][:1]
    assert "nvfp4-modelopt" in completed(["narrowfloat", "quantize", "a", "b", "--to"], "")
    assert completed(["narrowfloat", "quantize", "--scale-search"], "4") == ["4over6"]
    assert "--exclude" in completed(["narrowfloat", "quantize", "a"], "--")
    assert completed(["narrowfloat", "inspect"], "") == []  # Bash offers files then.
    for shell in ("zsh", "fish"):
        script = run_ok("completion", shell).stdout
        assert "quantize" in script and "4over6" in script
        if shutil.which(shell):
            subprocess.run([shell, "-n"], input=script, text=True, check=True)
    assert run("completion", "csh").returncode == USAGE


@pytest.mark.parametrize("program,commands", [(CLI, COMMANDS), (BENCH_CLI, BENCH_COMMANDS)])
def test_manual_page(program, commands):
    page = run_ok("man", program=program).stdout
    assert page.startswith(f'.TH {program.name.upper()} 1 ')
    for command in commands:
        assert f".SS {command}\n".replace("-", "\\-") in page
    if shutil.which("groff"):
        result = subprocess.run(["groff", "-man", "-Tutf8", "-ww"], input=page, text=True,
                                capture_output=True, check=True)
        assert result.stderr == "" and "--threads" in re.sub(".\b", "", result.stdout)
