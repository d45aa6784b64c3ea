"""`narrowfloat-bench bench --device`: the sweeps.  They run on the CPU as on a GPU, with the same
checks; no test looks at a time."""

import csv
import io

import pytest
from conftest import UNSUPPORTED, USAGE, run, run_json, run_ok

QUICK = ["--device", "cpu", "--replays", "1", "--replay-ms", "0"]
FORMATS = ["nvfp4", "nvfp4_per_token", "mxfp4", "mxfp8", "fp8_1x128", "fp8_128x128", "fp8_tensor"]
CASE_KEYS = ["op", "format", "layout", "math", "dtype", "source", "encode_scale", "four_over_six",
             "rows", "cols"]
ACTIVATION_KEYS = ["tokens", "top_k", "experts", "tile", "input", "maps"]
RESULT_KEYS = ["implementation", "read_bytes", "write_bytes", "buffer_sets", "plain",
               "programmatic", "memory_only_us", "memory_only_programmatic_us", "floor_us",
               "gb_per_s", "percent_of_copy", "checked_with", "correct", "message", "note"]


def sweep(*arguments):
    return run_json("bench", *arguments, *QUICK)


def test_document():
    document = sweep("--shape", "5x256", "--commit", "v1-2-gabc")
    assert list(document) == ["schema_version", "command", "version", "commit", "machine", "cpu",
                              "threads", "l2", "rates", "environment", "cases"]
    assert document["commit"] == "v1-2-gabc" and document["l2"] == "cold"
    assert document["machine"]["device"] == "cpu"
    assert document["rates"]["copy_gb_per_s"] > 0
    assert [(case["op"], case["format"]) for case in document["cases"]] == [
        (op, name) for op in ("quantize", "dequantize") for name in FORMATS]
    for case in document["cases"]:
        assert list(case) == CASE_KEYS + RESULT_KEYS
        assert case["correct"] and case["message"] == ""
        assert case["checked_with"] == "cpu_reference"
        assert list(case["plain"]) == ["median_us", "p10_us", "p90_us", "calls", "replays"]
        assert case["programmatic"] is None


@pytest.mark.parametrize("arguments", [
    ["quantize", "--layout", "all", "--dtype", "fp16"],
    ["quantize", "--math", "fast", "--dtype", "fp32"],
    ["quantize", "--encode-scale", "amax"],
    ["quantize", "--four-over-six", "--layout", "linear"],
    ["quantize", "--source", "silu_mul", "--source", "rmsnorm", "--source", "add_rmsnorm"],
    ["quantize", "--source", "smooth", "--l2", "warm"],
    ["dequantize", "--layout", "all"],
    ["amax"],
    ["relayout", "--layout", "all"],
    ["group_quantize"],
    ["group_quantize", "--dtype", "fp32"],
    ["kv_cache", "--dtype", "fp16"],
    ["kv_cache", "--math", "fast"],
    ["pack_bits"],
])
def test_results_are_right(arguments):
    document = sweep(*arguments, "--rows", "1,33", "--cols", "384")
    assert document["cases"]
    assert all(case["correct"] for case in document["cases"])


@pytest.mark.parametrize("options", [[], ["--input", "bf16"], ["--maps", "slots"]])
def test_activation(options):
    document = sweep("activation", "--tokens", "1,5", "--experts", "12", "--top-k", "3", "--inter",
                     "256", "--tile", "4", *options)
    assert [case["tokens"] for case in document["cases"]] == [1, 5]
    for case in document["cases"]:
        assert list(case) == CASE_KEYS + ACTIVATION_KEYS + RESULT_KEYS
        assert case["correct"]


def test_operations_without_a_format():
    cases = sweep("kv_cache", "--rows", "32", "--cols", "256")["cases"]
    cases += sweep("shuffle", "--rows", "32,33", "--cols", "256")["cases"]
    assert [(case["op"], case["rows"]) for case in cases] == [
        ("kv_quantize", 32), ("kv_dequantize", 32), ("kv_append", 32), ("shuffle", 32)]
    for case in cases:
        assert case["correct"] and case["format"] is None
        assert case["implementation"] == "cpu_baseline"
    codes = 32 * 256 * 9 // 16  # Half a byte of code and a sixteenth of a scale.
    plain = 32 * 256 * 2
    assert [(case["read_bytes"], case["write_bytes"]) for case in cases] == [
        (plain, codes), (codes, plain), (2 * plain + 32 * 8, 2 * codes), (plain, plain)]


def test_bytes_are_those_of_the_specification():
    """Padded scales count, and so does a second read for a computed scale (numerics 13)."""
    def read_and_written(*arguments):
        case = sweep("quantize", "--format", "nvfp4", "--shape", "1x4096", *arguments)["cases"][0]
        return case["read_bytes"], case["write_bytes"]
    assert read_and_written("--layout", "linear") == (8192, 2048 + 256 + 4)
    assert read_and_written("--layout", "swizzled_128x4") == (8192, 2048 + 128 * 256 + 4)
    assert read_and_written("--layout", "linear", "--encode-scale", "amax")[0] == 2 * 8192


def test_only_cases_that_formats_have():
    def names(*arguments):
        return {(case["format"], case["layout"]) for case in
                sweep("quantize", "--shape", "4x256", *arguments)["cases"]}
    assert names("--encode-scale", "amax") == {("nvfp4", "swizzled_128x4"),
                                               ("fp8_tensor", "linear")}
    assert names("--layout", "mn_major") == {("fp8_1x128", "mn_major")}
    assert {name for name, _ in names("--four-over-six")} == {"nvfp4", "nvfp4_per_token"}


def test_csv_has_a_row_for_each_shape():
    text = run_ok("bench", "quantize", "--format", "mxfp4", "--rows", "1,2", "--cols", "64,96",
                  "--csv", *QUICK).stdout
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [row["shape"] for row in rows] == ["1x64", "2x64", "1x96", "2x96"]
    assert {row["result"] for row in rows} == {"correct"}


def test_comparison_has_formats_side_by_side():
    text = run_ok("bench", "quantize", "--shape", "4x256", "--mode", "comparison", "--csv",
                  *QUICK).stdout
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [list(row) for row in rows] == [["case", *FORMATS]]
    assert rows[0]["case"] == "4x256  quantize"
    assert all("us (" in rows[0][name] for name in FORMATS)


@pytest.mark.parametrize("arguments,expected", [
    (["--rows", "4"], "--device"),
    (["--layout", "linear"], "--device"),
    (["amax"], "--device"),
    (["activation"], "--device"),
    (["--device", "cpu", "--min-time", "1"], "--min-time"),
    (["--device", "tpu"], "cuda:N"),
    (["--device", "cpu", "--shape", "4x4", "--rows", "4"], "--rows"),
    (["--device", "cpu", "--rows", "0"], "1,128,4096"),
    (["--device", "cpu", "--layout", "diagonal"], "swizzled_128x4"),
    (["--device", "cpu", "--source", "gelu"], "add_rmsnorm"),
    (["--device", "cpu", "--encode-scale", "one"], "amax"),
    (["--device", "cpu", "--mode", "fast"], "comparison"),
    (["--device", "cpu", "--pdl", "maybe"], "both"),
    (["--device", "cpu", "--replays", "0"], "--replays"),
    (["activation", "--device", "cpu", "--tokens", "1,0"], "1,32,1024"),
    (["quantize", "--device", "cpu", "--format", "mxfp4", "--four-over-six"], "no case is left"),
    (["quantize", "--device", "cpu", "--format", "mxfp4", "--layout", "mn_major"],
     "no case is left"),
])
def test_wrong_usage(arguments, expected):
    result = run("bench", *arguments)
    assert result.returncode == USAGE
    assert result.stdout == ""
    assert expected in result.stderr


def test_failing_cases_are_reported_and_do_not_end_the_sweep():
    arguments = ["bench", "quantize", "--format", "nvfp4", "--rows", "4", "--cols", "20,32",
                 "--json", *QUICK]
    result = run(*arguments)
    assert result.returncode == USAGE
    assert "4x20" in result.stderr and "16" in result.stderr
    assert '"correct": true' in result.stdout and '"correct": false' in result.stdout


def test_without_a_gpu_the_message_says_what_to_do():
    if run_json("doctor")["gpus"]:
        pytest.skip("this machine has a GPU")
    result = run("bench", "quantize", "--device", "cuda")
    assert result.returncode == UNSUPPORTED
    assert result.stdout == ""
    assert "cmake --preset sm90" in result.stderr or "nvidia-smi" in result.stderr
