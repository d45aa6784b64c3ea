"""Every command does its work on the real model and on small files, for people and as JSON."""

import csv
import io
import json

import pytest
from conftest import (BENCH_CLI, CLI, DONE, FINDINGS, TINY_MOE, UNSUPPORTED, USAGE, bf16_weight,
                      run, run_json, run_ok, write_safetensors)

BITS_PER_WEIGHT = {"nvfp4": 4.5, "nvfp4-ct": 4.5, "nvfp4-modelopt": 4.5, "mxfp4": 4.25,
                   "mxfp4-ct": 4.25, "mxfp8": 8.25, "mxfp8-ct": 8.25, "fp8-block": 8.002,
                   "fp8-channel": 8.162, "fp8-tensor": 8.001,
                   "fp8-channel-modelopt": 8.162, "fp8-tensor-modelopt": 8.001}
FORMATS = ["nvfp4", "nvfp4_per_token", "mxfp4", "mxfp8", "fp8_1x128", "fp8_128x128", "fp8_tensor"]
FIGURES = ["elements", "mse", "relative_error", "sqnr_db", "cosine", "norm_ratio", "max_abs",
           "max_abs_index", "clipped_percent", "flushed_percent", "nonfinite"]


@pytest.mark.parametrize("convention", BITS_PER_WEIGHT)
def test_quantize_writes_what_inspect_recognises(tmp_path, convention):
    document = run_json("quantize", TINY_MOE, tmp_path / "out", "--to", convention)
    expected_bits = pytest.approx(BITS_PER_WEIGHT[convention], abs=0.01)
    assert document["converted"]["bits_per_weight"] == expected_bits
    assert document["target_bytes"] < 0.6 * document["source_bytes"]
    assert document["figures"]["sqnr_db"] > 15
    assert document["figures"]["cosine"] > 0.98
    assert document["figures"]["norm_ratio"] == pytest.approx(1, abs=0.05)
    full_name = document["format"]
    inspected = run_json("inspect", tmp_path / "out")
    counts = {kind["kind"]: kind["tensors"] for kind in inspected["kinds"]}
    assert counts == {full_name: document["converted"]["tensors"],
                      "BF16": document["copied"]["tensors"]}


def test_quantize_summary_for_people(tmp_path):
    text = run_ok("quantize", TINY_MOE, tmp_path / "out", "--to", "nvfp4").stdout
    for word in ("nvfp4-ct", "quantized", "copied", "bits per weight", "times smaller", "SQNR",
                 "dB", "cosine", "norm ratio", "GB/s"):
        assert word in text, word


def test_quantize_json_keys(tmp_path):
    document = run_json("quantize", TINY_MOE, tmp_path / "out", "--to", "mxfp4")
    assert list(document) == [
        "schema_version", "command", "source", "target", "format", "dry_run", "cancelled",
        "source_bytes", "target_bytes", "converted", "copied", "peak_buffer_bytes", "seconds",
        "quantize_seconds", "quantizer_gb_per_second", "figures", "files", "file_sizes",
        "notes", "warnings", "tensors"]
    assert list(document["converted"]) == ["tensors", "elements", "source_bytes", "target_bytes",
                                           "bits_per_weight"]
    assert list(document["figures"]) == FIGURES
    assert list(document["tensors"][0]) == ["name", "action", "reason", "format", "shape",
                                            "source_bytes", "target_bytes", "figures"]


def test_quantize_leaves_the_default_tensors_alone(tmp_path):
    document = run_json("quantize", TINY_MOE, tmp_path / "out", "--to", "nvfp4", "--dry-run")
    copied = {tensor["name"]: tensor["reason"] for tensor in document["tensors"]
              if tensor["action"] == "copy"}
    for part in ("embed_tokens", "lm_head", "norm", "mlp.gate.weight"):
        assert any(part in name for name in copied), part
    assert all(copied.values())
    assert not any("experts" in name for name in copied)


def test_dry_run_writes_nothing_and_shows_both_sets(tmp_path, small_file):
    target = tmp_path / "out.safetensors"
    text = run_ok("quantize", small_file, target, "--to", "mxfp8", "--dry-run").stdout
    assert list(tmp_path.iterdir()) == [small_file]
    assert "up_proj" in text and "embed_tokens" in text
    assert "plan:" in text and "would write" in text and "memory" in text
    assert "would write out.safetensors (" in text and " kB)" in text


def test_dry_run_has_the_size_of_every_file(tmp_path):
    plan = run_json("quantize", TINY_MOE, tmp_path / "out", "--to", "nvfp4-modelopt", "--dry-run",
                    "--max-shard-size", "2M")
    run_ok("quantize", TINY_MOE, tmp_path / "out", "--to", "nvfp4-modelopt", "--max-shard-size",
           "2M")
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "out").iterdir()}
    assert {file["name"]: file["size_bytes"] for file in plan["file_sizes"]} == sizes
    assert [file["name"] for file in plan["file_sizes"]] == plan["files"]


def test_dry_run_promises_what_the_run_keeps(tmp_path, small_file):
    target = tmp_path / "out.safetensors"
    plan = run_json("quantize", small_file, target, "--to", "nvfp4", "--dry-run")
    done = run_json("quantize", small_file, target, "--to", "nvfp4")
    for key in ("source_bytes", "target_bytes", "converted", "copied", "files"):
        assert plan[key] == done[key], key


def test_include_and_exclude(tmp_path, small_file):
    document = run_json("quantize", small_file, tmp_path / "out.safetensors", "--to", "nvfp4",
                        "--include", "*embed*", "--exclude", "*down_proj*", "--exclude", "*up_*")
    quantized = [tensor["name"] for tensor in document["tensors"] if tensor["action"] == "quantize"]
    assert quantized == ["model.embed_tokens.weight"]


@pytest.mark.parametrize("options", [["--math", "fast"], ["--scale-search", "4over6"],
                                     ["--threads", "1"], ["--max-memory", "64MiB"]])
def test_quantize_options_that_nvfp4_takes(tmp_path, small_file, options):
    run_ok("quantize", small_file, tmp_path / "out.safetensors", "--to", "nvfp4", *options)


@pytest.mark.parametrize("rule", ["up", "floor", "even"])
def test_quantize_mx_scale(tmp_path, small_file, rule):
    target = tmp_path / "out.safetensors"
    run_ok("quantize", small_file, target, "--to", "mxfp4", "--mx-scale", rule)


def test_threads_do_not_change_the_file(tmp_path, small_file):
    targets = [tmp_path / f"{threads}.safetensors" for threads in (1, 2)]
    for threads, target in enumerate(targets, 1):
        run_ok("quantize", small_file, target, "--to", "nvfp4", "--threads", threads)
    assert targets[0].read_bytes() == targets[1].read_bytes()


def test_max_shard_size_splits_the_target(tmp_path):
    run_ok("quantize", TINY_MOE, tmp_path / "out", "--to", "nvfp4", "--max-shard-size", "1.5M")
    shards = sorted((tmp_path / "out").glob("model-*-of-*.safetensors"))
    assert len(shards) >= 3
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert {shard.name for shard in shards} == set(index["weight_map"].values())
    assert len(run_json("inspect", tmp_path / "out")["shards"]) == len(shards)


@pytest.mark.parametrize("dtype,name", [("bf16", "BF16"), ("fp16", "F16"), ("fp32", "F32")])
def test_dequantize(tmp_path, quantized, dtype, name):
    document = run_json("dequantize", quantized, tmp_path / "plain", "--dtype", dtype)
    assert document["format"] == name
    kinds = {kind["kind"] for kind in run_json("inspect", tmp_path / "plain")["kinds"]}
    assert kinds == {name, "BF16"}


def test_dequantized_fp32_has_the_quantized_values(tmp_path, quantized):
    run_ok("dequantize", quantized, tmp_path / "plain", "--dtype", "fp32")
    assert run_json("diff", quantized, tmp_path / "plain")["equal"]


def test_inspect_for_people():
    text = run_ok("inspect", TINY_MOE).stdout
    assert "model.layers.0.mlp.experts.0.gate_proj.weight" in text
    assert "128x256" in text and "bits per weight" in text
    assert "declared: no quantization" in text


def test_inspect_json_keys(quantized):
    document = run_json("inspect", quantized)
    assert list(document) == ["schema_version", "command", "path", "shards", "total", "kinds",
                              "declared", "warnings", "unsupported", "tensors"]
    tensor = next(tensor for tensor in document["tensors"] if tensor["quantized"])
    assert list(tensor) == ["name", "kind", "quantized", "shape", "size_bytes", "bits_per_weight",
                            "parts", "stored", "format"]
    assert document["declared"] == "compressed-tensors, nvfp4-pack-quantized"
    assert [part["dtype"] for part in tensor["stored"]] == ["U8", "F8_E4M3", "F32"]
    assert [part["name"] for part in tensor["stored"]] == tensor["parts"]
    rows, cols = tensor["shape"]
    assert [part["shape"] for part in tensor["stored"]] == [[rows, cols // 2], [rows, cols // 16],
                                                            [1]]
    assert tensor["kind"] == "nvfp4-ct" and tensor["format"] == "nvfp4"
    assert len(tensor["parts"]) == 3


def test_inspect_tensor_globs():
    names = [tensor["name"] for tensor in
             run_json("inspect", TINY_MOE, "--tensor", "*.experts.0.*", "--tensor", "model.norm.*")
             ["tensors"]]
    assert "model.norm.weight" in names
    assert all(".experts.0." in name or name == "model.norm.weight" for name in names)


def test_inspect_glob_that_matches_nothing():
    result = run("inspect", TINY_MOE, "--tensor", "*.expert.0.*")
    assert result.returncode == USAGE
    assert "*.expert.0.*" in result.stderr


def test_inspect_csv():
    rows = list(csv.DictReader(io.StringIO(run_ok("inspect", TINY_MOE, "--csv").stdout)))
    assert len(rows) == 231
    norm = next(row for row in rows if row["tensor"] == "model.norm.weight")
    assert norm == {"kind": "BF16", "shape": "256", "size_bytes": "512",
                    "bits_per_weight": "16.000", "tensor": "model.norm.weight"}


def test_diff_of_equal_checkpoints():
    result = run_ok("diff", TINY_MOE, TINY_MOE)
    assert "same values" in result.stdout


def test_diff_is_worst_first(quantized):
    document = run_json("diff", TINY_MOE, quantized, expected=FINDINGS)
    assert list(document) == ["schema_version", "command", "a", "b", "equal", "total", "warnings",
                              "tensors"]
    assert list(document["tensors"][0]) == ["name", "status", "detail", "figures", "stored",
                                            "a_original", "b_original"]
    assert list(document["tensors"][0]["figures"]) == FIGURES
    assert not document["equal"]
    errors = [tensor["figures"]["relative_error"] for tensor in document["tensors"]]
    assert errors == sorted(errors, reverse=True)
    assert document["tensors"][-1]["status"] == "identical"
    assert document["tensors"][-1]["figures"]["sqnr_db"] == "inf"


def test_diff_table_begins_with_the_name_and_is_short(quantized):
    result = run("diff", TINY_MOE, quantized)
    assert result.returncode == FINDINGS
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["tensor", "SQNR", "dB", "cosine", "norm", "ratio", "max", "abs",
                                "flushed", "%"]
    assert lines[1].startswith("model.layers.0.mlp.experts.15.gate_proj.weight ")
    assert len(lines) < 30
    assert all(len(line) <= 100 for line in lines)
    assert "different: BF16 and nvfp4-ct (208 tensors)" in lines
    assert len(run("diff", TINY_MOE, quantized, "-v").stdout.splitlines()) > 231


def test_diff_keeps_the_end_of_long_names(tmp_path):
    name = f"model.{'very' * 30}.layers.3.up_proj.weight"
    for file, start in (("a", 0), ("b", 1)):
        write_safetensors(tmp_path / f"{file}.safetensors", {name: bf16_weight(2, 4, start)})
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    line = run("diff", *paths).stdout.splitlines()[1]
    assert len(line) <= 100 and line.startswith("model.very") and ".layers.3.up_proj.weight" in line
    assert name in run("diff", *paths, "-v").stdout


def test_diff_of_two_quantizations(tmp_path, quantized):
    """Shares of codes and scales against the files' bytes, and who is nearer to the original."""
    other, changed = tmp_path / "other", tmp_path / "changed"
    run_ok("quantize", TINY_MOE, other, "--to", "nvfp4-modelopt", "--scale-search", "4over6")
    document = run_json("diff", quantized, other, "--original", TINY_MOE, expected=FINDINGS)
    for tensor in document["tensors"]:
        assert (tensor["stored"] is not None) == (tensor["status"] == "different")
        if not tensor["stored"]:
            continue
        assert tensor["stored"]["scales"] == tensor["stored"]["codes"] // 16
        assert 0 < tensor["stored"]["different_scales"] <= tensor["stored"]["scales"]
        ratio = tensor["stored"]["b_global_scale"] / tensor["stored"]["a_global_scale"]
        assert ratio == pytest.approx(448 / 256, rel=1e-6)
        # Both round to the nearest code; the search makes the error smaller.
        assert tensor["a_original"]["misrounded_codes"] == 0
        assert tensor["b_original"]["misrounded_codes"] == 0
        assert (tensor["a_original"]["figures"]["sqnr_db"]
                < tensor["b_original"]["figures"]["sqnr_db"])
    result = run("diff", quantized, other, "--original", TINY_MOE)
    assert "nearer to the original: A in 0, B in 208 of 208 tensors" in result.stdout
    assert "global scale of B by A: 1.75 to 1.75\n" in result.stdout
    assert all(len(line) <= 100 for line in result.stdout.splitlines())
    # Codes of one tensor, moved away from the nearest ones.
    run_ok("quantize", TINY_MOE, changed, "--to", "nvfp4")
    path = changed / "model.safetensors"
    data = bytearray(path.read_bytes())
    header = json.loads(data[8:8 + int.from_bytes(data[:8], "little")])
    name = "model.layers.0.mlp.experts.0.down_proj.weight"
    begin = header[name + "_packed"]["data_offsets"][0] + 8 + int.from_bytes(data[:8], "little")
    for i in range(100):
        data[begin + i] ^= 0x22
    path.write_bytes(data)
    document = run_json("diff", quantized, changed, "--original", TINY_MOE, expected=FINDINGS)
    (tensor,) = [tensor for tensor in document["tensors"] if tensor["status"] == "different"]
    assert tensor["name"] == name
    assert tensor["stored"]["different_codes"] == 200
    assert tensor["stored"]["different_scales"] == 0
    assert tensor["a_original"]["misrounded_codes"] == 0
    assert tensor["b_original"]["misrounded_codes"] == 200
    text = run("diff", quantized, changed, "--original", TINY_MOE).stdout
    assert "A rounds correctly more often" in text
    plain = run("diff", quantized, changed).stdout
    assert "codes %" in plain and "global B/A" in plain and "0.61" in plain


def test_diff_csv(quantized):
    result = run("diff", TINY_MOE, quantized, "--csv")
    assert result.returncode == FINDINGS
    rows = list(csv.DictReader(io.StringIO(result.stdout)))
    assert len(rows) == 231
    assert list(rows[0]) == ["tensor", "status"] + FIGURES + [
        "different_codes", "different_scales", "a_global_scale", "b_global_scale", "a_sqnr_db",
        "a_misrounded_codes", "b_sqnr_db", "b_misrounded_codes"]


def test_diff_names_tensors_that_are_missing_or_of_another_shape(tmp_path):
    a, b = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    write_safetensors(a, {"x": bf16_weight(2, 4), "only_a": bf16_weight(1, 4)})
    write_safetensors(b, {"x": bf16_weight(4, 2), "only_b": bf16_weight(1, 4)})
    document = run_json("diff", a, b, expected=FINDINGS)
    assert {tensor["name"]: tensor["status"] for tensor in document["tensors"]} == {
        "x": "shape differs", "only_a": "only in A", "only_b": "only in B"}
    lines = run("diff", a, b).stdout.splitlines()
    assert lines[0].endswith("status") and lines[1].split()[0] == "only_a"
    assert lines[1].endswith("only in A")


def test_diff_with_a_plain_side_knows_no_clipping(tmp_path):
    a, b = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    write_safetensors(a, {"x": bf16_weight(2, 4)})
    write_safetensors(b, {"x": bf16_weight(2, 4, 1)})
    document = run_json("diff", a, b, expected=FINDINGS)
    assert document["tensors"][0]["figures"]["clipped_percent"] is None
    row = next(csv.DictReader(io.StringIO(run("diff", a, b, "--csv").stdout)))
    assert row["clipped_percent"] == ""


def test_diff_says_how_many_elements_were_left_out(tmp_path):
    a, b = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    dtype, shape, data = bf16_weight(2, 4)
    write_safetensors(a, {"x": (dtype, shape, data)})
    write_safetensors(b, {"x": (dtype, shape, b"\xc0\x7f" + data[2:])})
    result = run("diff", a, b)
    assert result.returncode == FINDINGS
    assert "left out: 1 elements that are NaN or infinite" in result.stdout
    assert "left out" not in run("diff", a, a).stdout


def test_sqnr_of_zero_has_no_sign(tmp_path):
    a, b = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    write_safetensors(a, {"x": bf16_weight(2, 4)})
    write_safetensors(b, {"x": ("BF16", [2, 4], bytes(16))})
    assert "-0.00" not in run("diff", a, b).stdout


@pytest.mark.parametrize("op", ["quantize", "dequantize", "relayout", "amax"])
def test_explain(op):
    document = run_json("explain", op, "--format", "nvfp4", "--shape", "4x96")
    assert list(document) == ["schema_version", "command", "op", "problem", "chosen", "candidates"]
    names = [candidate["name"] for candidate in document["candidates"]]
    assert document["chosen"] in names and names[-1] == "cpu_reference"
    for candidate in document["candidates"]:
        assert list(candidate) == ["name", "supported", "reason"]
        assert bool(candidate["reason"]) == (candidate["name"] != document["chosen"])


def test_explain_obeys_the_forced_implementation():
    forced = {"NARROWFLOAT_FORCE": "quantize:cpu_reference"}
    text = run_ok("explain", "quantize", "--format", "mxfp8", "--shape", "2x32", env=forced).stdout
    assert any(line.split() == ["cpu_reference", "runs"] for line in text.splitlines())
    assert "NARROWFLOAT_FORCE" in text


def test_bytes_of_a_target_depend_on_no_implementation_and_no_threads(tmp_path):
    candidates = run_json("explain", "quantize", "--format", "nvfp4", "--shape", "96x256")["candidates"]
    names = [c["name"] for c in candidates if c["supported"]]
    assert "cpu_baseline" in names and "cpu_reference" in names
    source, targets = tmp_path / "in.safetensors", []
    write_safetensors(source, {"model.layers.0.mlp.up_proj.weight": bf16_weight(96, 256)})
    for i, (name, threads) in enumerate([(name, 1) for name in names] + [(names[0], 3)]):
        targets.append(tmp_path / f"{i}.safetensors")
        run_ok("quantize", source, targets[-1], "--to", "nvfp4", "--threads", threads,
               env={"NARROWFLOAT_FORCE": f"quantize:{name}"})
    assert len({target.read_bytes() for target in targets}) == 1


def test_explain_says_when_nothing_fits():
    result = run("explain", "quantize", "--format", "nvfp4", "--shape", "4x96", "--device",
                 "cuda:99")
    assert result.returncode == UNSUPPORTED
    assert "no implementation fits" in result.stdout


def test_explain_allreduce():
    document = run_json("explain", "allreduce", "--ranks", "4", "--shape", "16x7168", "--pattern",
                        "norm_fp8_group", "--group", "128")
    assert document["op"] == "allreduce" and document["chosen"] == "cpu_oneshot"
    assert "norm_fp8_group of BF16 16x7168" in document["problem"]
    assert [candidate["name"] for candidate in document["candidates"]][-3:] == [
        "cpu_oneshot", "cpu_twoshot", "cpu_reference"]


def test_explain_allreduce_says_why_an_algorithm_does_not_run():
    text = run_ok("explain", "allreduce", "--ranks", "8", "--shape", "640x7168").stdout
    assert "message of 8.8 MiB exceeds oneshot_bytes of 128.0 KiB" in text
    result = run("explain", "allreduce", "--shape", "4x256", "--algorithm", "nccl_exact")
    assert result.returncode == UNSUPPORTED
    assert "the call asks for nccl_exact" in result.stdout


@pytest.mark.parametrize("arguments,expected", [
    (["quantize", "--shape", "4x96"], "--format is required"),
    (["quantize", "--format", "nvfp4", "--shape", "4x96", "--ranks", "2"], "explain allreduce"),
    (["allreduce", "--shape", "4x96", "--pattern", "mxfp5"], "did you mean mxfp8"),
    (["allreduce", "--shape", "4x96", "--pattern", "fp8_group"], "problem.group"),
    (["allreduce", "--shape", "4x88", "--pattern", "nvfp4"], "multiple of 16"),
])
def test_explain_refuses_wrong_options(arguments, expected):
    result = run("explain", *arguments)
    assert result.returncode == USAGE
    assert expected in result.stderr


def test_explain_refuses_an_impossible_shape():
    result = run("explain", "quantize", "--format", "nvfp4", "--shape", "4x95")
    assert result.returncode == USAGE
    assert "95" in result.stderr


def test_doctor():
    text = run_ok("doctor", env={"NARROWFLOAT_FORCE": "quantize:cpu_reference"}).stdout
    for word in ("narrowfloat", "build", "CPU", "GPUs", "NARROWFLOAT_FORCE=quantize:cpu_reference",
                 "cpu_reference", "dequantize", "NCCL"):
        assert word in text


def test_doctor_works_where_the_environment_is_wrong():
    text = run_ok("doctor", env={"NARROWFLOAT_FORCE": "quantize:turbo"}).stdout
    assert "nothing" in text and 'no implementation "turbo"' in text


def test_doctor_json():
    document = run_json("doctor")
    assert list(document) == ["schema_version", "command", "version", "build", "cpu", "gpus",
                              "nccl", "gpu_links", "environment", "implementations"]
    assert list(document["nccl"]) == ["found", "version", "path", "reason"]
    assert bool(document["nccl"]["version"]) == document["nccl"]["found"]
    num_gpus = len(document["gpus"])
    assert [(link["from"], link["to"]) for link in document["gpu_links"]] == [
        (a, b) for a in range(num_gpus) for b in range(num_gpus) if a != b]
    for link in document["gpu_links"]:
        assert list(link) == ["from", "to", "peer_access", "native_atomics", "performance_rank"]
    combinations = [(entry["op"], entry["format"]) for entry in document["implementations"]
                    if entry["device"] == "cpu"]
    with_formats = ("quantize", "dequantize", "relayout", "amax")
    without = ("shuffle", "pack_bits", "group_quantize", "kv_quantize", "kv_dequantize",
               "kv_reorder", "invert_scales")
    expected = [(op, name) for op in with_formats for name in FORMATS]
    assert combinations == expected + [(op, None) for op in without]
    assert all(entry["chosen"] for entry in document["implementations"]
               if entry["device"] == "cpu")


def test_bench_json():
    document = run_json("bench", "--shape", "128x256", "--min-time", "0")
    assert list(document) == ["schema_version", "command", "version", "cpu", "threads", "shape",
                              "dtype", "math", "min_seconds", "environment", "cases"]
    assert [(case["op"], case["format"]) for case in document["cases"]] == [
        (op, name) for op in ("quantize", "dequantize") for name in FORMATS]
    for case in document["cases"]:
        assert list(case) == ["op", "format", "implementation", "size_bytes", "runs",
                              "median_seconds", "gb_per_second", "memcpy_gb_per_second", "correct"]
        assert case["correct"]
        assert case["median_seconds"] > 0 and case["memcpy_gb_per_second"] > 0


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("math", ["exact", "fast"])
def test_bench_csv(dtype, math):
    text = run_ok("bench", "quantize", "--format", "nvfp4", "--format", "mxfp4", "--shape",
                  "64x128", "--min-time", "0", "--dtype", dtype, "--math", math, "--csv").stdout
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [(row["op"], row["format"], row["result"]) for row in rows] == [
        ("quantize", "nvfp4", "correct"), ("quantize", "mxfp4", "correct")]


@pytest.mark.parametrize("name,program", [("narrowfloat", CLI), ("narrowfloat-bench", BENCH_CLI)])
def test_version(name, program):
    lines = run_ok("--version", program=program).stdout.splitlines()
    assert lines[0].startswith(f"{name} ")
    assert lines[1].startswith("build: ")
    assert lines[2].startswith("backends: cpu")


def test_quiet_prints_nothing(tmp_path, small_file, quantized):
    for arguments in (["quantize", small_file, tmp_path / "out.safetensors", "--to", "nvfp4"],
                      ["inspect", quantized], ["diff", quantized, quantized]):
        result = run_ok(*arguments, "--quiet")
        assert result.stdout == "" and result.stderr == ""


def test_paths_do_not_depend_on_the_working_directory(tmp_path, small_file):
    run_ok("quantize", small_file.name, "out.safetensors", "--to", "mxfp4", cwd=tmp_path)
    assert run("diff", small_file.name, "out.safetensors", cwd=tmp_path).returncode == FINDINGS
    assert run("inspect", "out.safetensors", cwd=tmp_path).returncode == DONE
