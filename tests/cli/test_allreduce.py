"""`narrowfloat-bench allreduce` on CPU ranks, as threads and as processes; no test looks at a time.
"""

import csv
import io
import subprocess

import pytest
from conftest import (BENCH_CLI, CLEAN_ENVIRONMENT, CLI, ROOT, UNSUPPORTED, USAGE, run, run_json,
                      run_ok)

PATTERNS = ["allreduce", "residual_rmsnorm", "fp8", "nvfp4", "norm_fp8", "norm_nvfp4",
            "moe_reduction", "moe_finalize", "fp8_group", "norm_fp8_group", "fp8_token",
            "norm_fp8_token", "fp8_block", "norm_fp8_block", "mxfp8", "norm_mxfp8", "mxfp4",
            "norm_mxfp4", "nvfp4_per_token", "norm_nvfp4_per_token"]
WITH_LAYOUTS = [name for name in PATTERNS if "nvfp4" in name or "mxfp" in name]
CASE_KEYS = ["pattern", "quantization", "tokens", "hidden", "element", "layout", "group",
             "accumulate", "asked_for", "algorithm", "median_us", "p10_us", "p90_us", "calls",
             "replays", "rank_median_us", "buffer_sets", "message_bytes", "moved_bytes",
             "message_gb_per_s", "gb_per_s", "minus_plain_us", "memory_only_us",
             "memory_only_minus_plain_us", "over_memory_only_percent", "exact", "correct",
             "message"]
QUICK = ["--min-time", "0"]


def allreduce(*arguments):
    return run_json("allreduce", *arguments, *QUICK)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("place", [[], ["--on", "cpu", "--processes"]])
def test_every_pattern_is_correct_on_all_ranks(ranks, place):
    document = allreduce("--ranks", ranks, "--shape", "2x128", "--pattern", "all", *place)
    assert list(document) == ["schema_version", "command", "version", "commit", "on", "ranks",
                              "one_gpu", "transport", "machine", "nccl", "programmatic",
                              "deadline_ms", "environment", "cases"]
    assert document["ranks"] == ranks and document["nccl"] is None
    assert document["on"] == ("processes" if place else "threads")
    assert document["transport"] == ("shared_memory" if place else "threads")
    assert [case["pattern"] for case in document["cases"]] == PATTERNS
    for case in document["cases"]:
        assert list(case) == CASE_KEYS
        assert case["correct"] and case["exact"] and case["message"] == ""
        assert case["median_us"] == max(case["rank_median_us"]) > 0
        assert len(case["rank_median_us"]) == ranks
        assert (case["layout"] is None) == (case["pattern"] not in WITH_LAYOUTS)
        assert (case["minus_plain_us"] is None) == (case["pattern"] == "allreduce")
        assert case["memory_only_us"] is None


@pytest.mark.parametrize("options", [
    ["--element", "f16", "--algorithm", "oneshot"],
    ["--element", "f32", "--algorithm", "twoshot"],
    ["--algorithm", "reference"],
    ["--algorithm", "twoshot", "--accumulate", "element"],
    ["--moe-quantization", "nvfp4", "--group", "32"],
])
def test_options(options):
    cases = allreduce("--ranks", "2", "--shape", "5x288", "--pattern", "all", *options)["cases"]
    given = dict(zip(options[::2], options[1::2]))
    for case in cases:
        assert case["correct"] and case["exact"]
        assert case["element"] == given.get("--element", "bf16")
        assert case["algorithm"] == given.get("--algorithm", "oneshot")
        assert case["accumulate"] == given.get("--accumulate", "fp32")
    moe = [case["quantization"] for case in cases if case["pattern"].startswith("moe")]
    assert set(moe) <= {given.get("--moe-quantization", "none")}


def test_rows_for_all_shapes_and_layouts():
    text = run_ok("allreduce", "--ranks", "2", "--shape", "1x64,9x128", "--pattern", "mxfp8,fp8",
                  "--layout", "all", "--csv", *QUICK).stdout
    rows = [(row["shape"], row["pattern"], row["layout"])
            for row in csv.DictReader(io.StringIO(text))]
    layouts = ["swizzled_128x4", "swizzled_8x4", "linear"]
    assert rows == [(shape, pattern, layout) for shape in ("1x64", "9x128")
                    for pattern, all_of_them in (("allreduce", ["-"]), ("mxfp8", layouts),
                                                 ("fp8", ["-"]))
                    for layout in all_of_them]


def test_bytes_of_the_formulas():
    def moved(*arguments):
        return allreduce("--ranks", "4", "--shape", "2x512", *arguments)["cases"][-1]["moved_bytes"]
    message = 2 * 512 * 2
    assert moved("--algorithm", "oneshot") == {
        "read": message, "write": message, "exchange_read": 4 * message,
        "exchange_write": 7 * message}
    assert moved("--algorithm", "twoshot", "--pattern", "fp8_token") == {
        "read": 2 * message + 512 * 2, "write": message + 2 * 512 + 2 * 4,
        "exchange_read": 2 * message, "exchange_write": 7 * message // 2}


def test_patterns_that_a_shape_cannot_have():
    arguments = ["--ranks", "2", "--shape", "2x288", *QUICK]
    result = run("allreduce", "--pattern", "all", "--csv", *arguments)
    assert result.returncode == 0
    assert "fp8_group" in result.stderr and "fp8_group" not in result.stdout
    assert run("allreduce", "--pattern", "fp8_group", *arguments).returncode == USAGE


@pytest.mark.parametrize("place", [[], ["--processes"]])
def test_soak(place):
    soak = run_json("allreduce", "--ranks", "3", "--shape", "6x256", "--pattern", "all", "--soak",
                    "400", *place)["soak"]
    assert soak["correct"] and soak["message"] == "" and soak["calls"] == 400
    assert soak["problems"] == 4 * len(PATTERNS)
    assert set(soak["algorithms"]) == {"oneshot", "twoshot"}
    assert sum(soak["algorithms"].values()) == 400


def test_a_killed_rank_is_reported_by_all_others():
    soak = run_json("allreduce", "--ranks", "3", "--shape", "4x256", "--pattern", "fp8,nvfp4",
                    "--soak", "200", "--kill-rank", "1", "--processes", "--deadline",
                    "300")["soak"]
    assert soak["correct"] and soak["calls"] == 100
    assert [end["signal"] for end in soak["ends"]] == [0, 9, 0]
    assert soak["ends"][0]["message"] and soak["ends"][2]["message"]


@pytest.mark.parametrize("arguments,expected", [
    (["--pattern", "norm_nvfp"], "did you mean norm_nvfp4"),
    (["--pattern", "fp8,"], "allreduce, residual_rmsnorm"),
    (["--ranks", "0"], "1 to 8"),
    (["--ranks", "9"], "1 to 8"),
    (["--shape", "4x88", "--pattern", "nvfp4"], "--shape 4x88 --pattern nvfp4: "),
    (["--shape", "4x88", "--pattern", "nvfp4"], "multiple of 16"),
    (["--shape", "4x90", "--pattern", "all"], "no row is left"),
    (["--shape", "4"], "4096x4096"),
    (["--shape", "0x64"], "at least one row"),
    (["--element", "f64"], "bf16, f16, f32"),
    (["--layout", "diagonal"], "swizzled_128x4"),
    (["--algorithm", "one-shot"], "did you mean oneshot"),
    (["--pattern", "fp8_group", "--group", "48"], "16, 32, 64, 128 or 256"),
    (["--on", "tpu"], "virtual"),
    (["--on", "gpus", "--processes"], "--processes needs --on cpu"),
    (["--one-gpu"], "--on gpus"),
    (["--transport", "cuda_ipc"], "--on gpus"),
    (["--kill-rank", "1"], "--soak"),
    (["--soak", "9", "--kill-rank", "1"], "--processes"),
    (["--soak", "9", "--kill-rank", "2", "--processes"], "0 to 1"),
    (["--deadline", "0"], "milliseconds"),
    (["--device", "cpu"], "cuda:N"),
])
def test_wrong_usage(arguments, expected):
    defaults = {"--ranks": "2", "--shape": "4x64"}
    given = [word for option, value in defaults.items() if option not in arguments
             for word in (option, value)]
    result = run("allreduce", *given, *arguments)
    assert result.returncode == USAGE
    assert result.stdout == ""
    assert expected in result.stderr


@pytest.mark.parametrize("variable,value", [("NCCL_NVLS_ENABLE", "1"),
                                            ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "0"),
                                            ("NVSHMEM_DISABLE_NVLS", "")])
def test_nvlink_multicast_must_be_off(variable, value):
    result = run("allreduce", "--ranks", "2", "--shape", "4x64", env={variable: value})
    assert result.returncode == USAGE
    assert variable in result.stderr


def test_an_algorithm_that_nothing_can_run_is_reported():
    result = run("allreduce", "--ranks", "2", "--shape", "4x64", "--algorithm", "nccl_exact")
    assert result.returncode == UNSUPPORTED
    assert "unsupported" in result.stdout and "the call asks for nccl_exact" in result.stderr


@pytest.mark.parametrize("place", ["virtual", "gpus"])
def test_without_a_gpu_the_message_says_what_to_do(place):
    if run_json("doctor")["gpus"]:
        pytest.skip("this machine has a GPU")
    result = run("allreduce", "--ranks", "2", "--shape", "4x64", "--on", place)
    assert result.returncode == UNSUPPORTED
    assert result.stdout == ""
    assert any(word in result.stderr for word in ("cmake --preset sm90", "GPU"))


def test_the_check_of_several_gpus_runs_on_cpu_ranks(tmp_path):
    """tools/multi_gpu_check.sh, with the programs that the tests use."""
    build = tmp_path / "build"
    for folder, program in (("cli", CLI), ("bench_cli", BENCH_CLI)):
        (build / "src" / folder).mkdir(parents=True)
        (build / "src" / folder / program.name).symlink_to(program)
    script = ROOT / "tools/multi_gpu_check.sh"
    result = subprocess.run([script, "--cpu", "--soak", "100", build, tmp_path / "out"], text=True,
                            capture_output=True, check=False, timeout=300, env=CLEAN_ENVIRONMENT)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "all checks passed" in result.stdout and "FAILED" not in result.stdout
    assert len(list((tmp_path / "out").glob("*.json"))) > 10
