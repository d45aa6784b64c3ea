"""Where output goes: streams, terminals, colour, progress, broken pipes, hostile names."""

import json
import os
import subprocess

import pytest
from conftest import (CLEAN_ENVIRONMENT, CLI, DONE, FINDINGS, INPUT, TINY_MOE, bf16_weight, run,
                      run_ok, run_on_terminal, write_safetensors)

ESCAPE = "\x1b"
CALIBRATION_WARNING = (f"narrowfloat: warning: {TINY_MOE}: subdirectories are not copied: "
                       "calibration\n")


def test_no_colour_and_no_progress_without_a_terminal(tmp_path):
    result = run_ok("quantize", TINY_MOE, tmp_path / "out", "--to", "nvfp4", env={"TERM": "xterm"})
    assert ESCAPE not in result.stdout
    assert result.stderr == CALIBRATION_WARNING


def test_warnings_are_in_the_document_too(tmp_path, small_file):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/onnx").mkdir()
    small_file.rename(tmp_path / "model/model.safetensors")
    result = run_ok("quantize", tmp_path / "model", tmp_path / "out", "--to", "nvfp4", "--include",
                    "*embed*", "--json")
    warnings = json.loads(result.stdout)["warnings"]
    assert [f"narrowfloat: warning: {text}" for text in warnings] == result.stderr.splitlines()
    assert len(warnings) == 3
    assert "config.json" in warnings[0] and "onnx" in warnings[1] and "--include" in warnings[2]


def test_colour_and_progress_on_a_terminal(tmp_path):
    code, output = run_on_terminal("quantize", TINY_MOE, tmp_path / "out", "--to", "nvfp4")
    assert code == DONE
    assert "\x1b[1m" in output
    assert "\r\x1b[K" in output and "quantize   0%" in output and " of 14." in output


@pytest.mark.parametrize("env", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_colour_can_be_turned_off_on_a_terminal(env):
    code, output = run_on_terminal("inspect", TINY_MOE, env=env)
    assert code == DONE
    assert ESCAPE not in output


def test_empty_no_color_does_not_count():
    assert ESCAPE in run_on_terminal("inspect", TINY_MOE, env={"NO_COLOR": ""})[1]


def test_color_option_wins():
    assert ESCAPE not in run_on_terminal("inspect", TINY_MOE, "--color", "never")[1]
    assert ESCAPE in run_ok("inspect", TINY_MOE, "--color", "always", env={"NO_COLOR": "1"}).stdout


@pytest.mark.parametrize("option", [["--quiet"], ["--progress", "none"]])
def test_progress_can_be_turned_off_on_a_terminal(tmp_path, option):
    code, output = run_on_terminal("quantize", TINY_MOE, tmp_path / "out", "--to", "nvfp4", *option)
    assert code == DONE
    assert "\r\x1b[K" not in output


def test_progress_events(tmp_path):
    result = run_ok("quantize", TINY_MOE, tmp_path / "out", "--to", "nvfp4", "--progress", "json",
                    "--json")
    events = [json.loads(line) for line in result.stderr.splitlines()]
    warning = events.pop()
    assert list(warning) == ["event", "message"] and "calibration" in warning["message"]
    assert all(list(event) == ["event", "tensor", "done_bytes", "total_bytes", "seconds"]
               for event in events)
    done = [event["done_bytes"] for event in events]
    assert done == sorted(done) and done[-1] <= events[0]["total_bytes"]
    assert json.loads(result.stdout)["command"] == "quantize"


def test_verbose_has_a_few_progress_lines(tmp_path):
    result = run_ok("quantize", TINY_MOE, tmp_path / "out", "--to", "nvfp4", "-v")
    assert 5 <= len(result.stderr.splitlines()) <= 12
    assert "experts.0.down_proj" in result.stdout


def test_broken_pipe_is_quiet():
    process = subprocess.Popen([CLI, "inspect", TINY_MOE, "--json"], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, env=CLEAN_ENVIRONMENT)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(60) == DONE


def test_broken_pipe_keeps_the_exit_code(quantized):
    command = f"'{CLI}' diff '{TINY_MOE}' '{quantized}' -v | head -n 1; echo ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True,
                            env=CLEAN_ENVIRONMENT)
    assert result.stderr == ""
    assert result.stdout.splitlines()[-1] == str(FINDINGS)


def run_with_closed_stdout(*arguments):
    """Not subprocess.DEVNULL: the descriptor does not exist."""
    return subprocess.run(["bash", "-c", '"$@" >&-', "bash", CLI, *map(str, arguments)],
                          stderr=subprocess.PIPE, text=True, check=False, env=CLEAN_ENVIRONMENT)


def test_closed_stdout_is_an_error():
    result = run_with_closed_stdout("inspect", TINY_MOE)
    assert result.returncode == INPUT
    assert "standard output" in result.stderr


def test_closed_stdout_does_not_end_up_in_the_file(tmp_path, small_file):
    first, second = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    run_ok("quantize", small_file, first, "--to", "nvfp4")
    run_with_closed_stdout("quantize", small_file, second, "--to", "nvfp4")
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_full_disk_on_stdout_is_an_error():
    with open("/dev/full", "wb") as full:
        result = run("inspect", TINY_MOE, capture_output=False, stdout=full, stderr=subprocess.PIPE)
    assert result.returncode == INPUT
    assert "standard output" in result.stderr


def test_hostile_names_are_escaped(tmp_path):
    name = "evil\x1b[2J\nforged line\u202e\u009b"
    source = tmp_path / "evil.safetensors"
    write_safetensors(source, {name: bf16_weight(2, 4),
                               "model.layers.0.mlp.up_proj.weight": bf16_weight(64, 128)})
    target = tmp_path / "out.safetensors"
    for arguments in (["inspect", source], ["inspect", source, "--csv"],
                      ["inspect", source, "--json"], ["diff", source, source, "-v"],
                      ["quantize", source, target, "--to", "nvfp4", "-v"]):
        result = run_ok(*arguments)
        for text in (result.stdout, result.stderr):
            assert not set(text) & set("\x1b\u202e\u009b"), arguments
            assert not any(line.startswith("forged") for line in text.splitlines())
    assert "evil\\x1b[2J\\nforged line\\u{202e}\\u{9b}" in run_ok("inspect", source).stdout
    tensors = json.loads(run_ok("inspect", source, "--json").stdout)["tensors"]
    assert name in [tensor["name"] for tensor in tensors]


def test_hostile_arguments_are_escaped():
    hostile = "\x1b[2J"
    for arguments in ([hostile], ["inspect", hostile], ["quantize", "a", "b", "--to", hostile]):
        result = run(*arguments)
        assert result.returncode != DONE
        assert ESCAPE not in result.stderr
