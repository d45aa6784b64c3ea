"""quantize --gptq against GPTQ as the paper has it, by the inverse of the Hessian; and
--activation-moments against a search by brute force."""

import itertools
import json
import os
import shutil
import signal
import struct

import numpy as np
import pytest
from conftest import (
    CLI,
    DONE,
    INPUT,
    TINY_MOE,
    USAGE,
    read_safetensors,
    run,
    run_json,
    run_ok,
    write_safetensors,
)
from test_resume import content, execute
from test_scale_search import E2M1, FORMATS, errors

EXPERTS, ROWS, COLS = 3, 40, 96
NAME = "model.layers.0.mlp.experts"
MATRICES = {"gate_proj": "input", "up_proj": "input", "down_proj": "inter"}


def bf16(values):
    return (np.float32(values).view("<u4") >> 16).astype("<u2")


def widened(words):
    return (words.astype("<u4") << 16).view("<f4").astype(np.float64)


@pytest.fixture(scope="module", name="case")
def made_case(tmp_path_factory):
    """A file of experts, statistics of correlated rows; expert 2 got no token."""
    root = tmp_path_factory.mktemp("gptq")
    random = np.random.default_rng(5)
    weights, tensors, statistics, hessians = {}, {}, {}, {}
    for expert in range(EXPERTS):
        for matrix in MATRICES:
            words = bf16(random.normal(0, 0.02, (ROWS, COLS)))
            weights[expert, matrix] = widened(words)
            tensors[f"{NAME}.{expert}.{matrix}.weight"] = ("BF16", [ROWS, COLS], words.tobytes())
    tensors["model.layers.0.self_attn.q_proj.weight"] = ("BF16", [ROWS, COLS], words.tobytes())
    for side in ("input", "inter"):
        mixing = random.normal(0, 1, (COLS, COLS)) / 8 + np.diag(random.uniform(0.2, 3, COLS))
        rows = random.normal(0, 1, (EXPERTS, 60, COLS)) @ mixing  # Fewer than columns.
        rows[..., 7] = 0
        found = np.float32(np.swapaxes(rows, 1, 2) @ rows / 60)
        found[2] = 0
        hessians[side] = found.astype(np.float64)
        statistics |= {
            f"{NAME}.{side}.count": ("I64", [EXPERTS], np.int64([60, 60, 0]).tobytes()),
            f"{NAME}.{side}.amax": ("F32", [EXPERTS], np.float32([5, 5, 0]).tobytes()),
            f"{NAME}.{side}.hessian": ("F32", list(found.shape), found.tobytes())}
    write_safetensors(root / "in.safetensors", tensors)
    write_safetensors(root / "stats.safetensors", statistics, {"format": "narrowfloat.statistics"})
    return root, weights, statistics, hessians


def decoded(root, path):
    target = root / f"{path.stem}-fp32.safetensors"
    run_ok("dequantize", path, target, "--dtype", "fp32")
    return {name: array.astype(np.float64) for name, array in read_safetensors(target).items()}


PARTS = ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale")


def read_parts(path):
    """The bytes of each tensor."""
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + size])
    begin = 8 + size
    return {name: data[begin + entry["data_offsets"][0]:begin + entry["data_offsets"][1]]
            for name, entry in header.items() if name != "__metadata__"}


def block_scales(path, module, convention):
    """The decode scale of each block, from the bytes of the file."""
    parts = read_parts(path)

    def stored(name, dtype):
        return np.frombuffer(parts[f"{module}.{name}"], dtype)

    _, block, _, values = FORMATS[convention]
    scales = values[stored("weight_scale", "u1")].reshape(ROWS, COLS // block)
    if convention == "nvfp4-ct":
        scales = scales / float(stored("weight_global_scale", "<f4")[0])
    return np.repeat(scales, block, axis=1)


def gptq(weights, hessian, scales, grid):
    """Algorithm 1 of Frantar et al. (2022), columns by falling diagonal, one by one."""
    order = np.argsort(-np.diag(hessian), kind="stable")
    damped = hessian + 0.01 * np.mean(np.diag(hessian)) * np.eye(COLS)
    inverse = np.linalg.inv(damped[np.ix_(order, order)])
    upper = np.linalg.cholesky(inverse).T
    left, rounded = weights[:, order].copy(), np.zeros_like(weights)
    middles = (grid[1:] + grid[:-1]) / 2
    for step, col in enumerate(order):
        scaled = np.abs(left[:, step].astype(np.float32) / scales[:, col])
        codes = np.searchsorted(middles, scaled)
        is_tie = scaled == np.append(middles, np.inf)[codes]
        codes += is_tie & (codes % 2 == 1)
        rounded[:, col] = np.sign(left[:, step]) * grid[codes] * scales[:, col]
        change = (left[:, step] - rounded[:, col]) / upper[step, step]
        left[:, step + 1:] -= np.outer(change, upper[step, step + 1:])
    return rounded


def weighted_error(weights, values, hessian):
    return np.einsum("ij,jk,ik->", weights - values, hessian, weights - values)


@pytest.mark.parametrize("search", ["amax", "full"])
@pytest.mark.parametrize("convention", ["nvfp4-ct", "mxfp4-ct", "mxfp8-ct"])
def test_is_the_algorithm_of_the_paper(case, tmp_path, convention, search):
    root, weights, _, hessians = case
    options = ["--to", convention, "--scale-search", search]
    run_ok("quantize", root / "in.safetensors", tmp_path / "plain.safetensors", *options)
    document = run_json("quantize", root / "in.safetensors", tmp_path / "gptq.safetensors",
                        *options, "--gptq", root / "stats.safetensors")
    assert document["warnings"] == [
        "4 of 10 weights have no Hessian (--gptq) and are quantized without"]
    reasons = {tensor["name"]: tensor["reason"] for tensor in document["tensors"]}
    plain = decoded(tmp_path, tmp_path / "plain.safetensors")
    ours = decoded(tmp_path, tmp_path / "gptq.safetensors")
    for (expert, matrix), values in weights.items():
        name, hessian = f"{NAME}.{expert}.{matrix}", hessians[MATRICES[matrix]][expert]
        found = ours[f"{name}.weight"]
        assert reasons[f"{name}.weight"] == ("no Hessian" if expert == 2 else "")
        if expert == 2:
            assert (found == plain[f"{name}.weight"]).all()
            continue
        scales = block_scales(tmp_path / "gptq.safetensors", name, convention)
        assert (scales == block_scales(tmp_path / "plain.safetensors", name, convention)).all()
        wanted = gptq(values, hessian, scales, FORMATS[convention][0])
        assert np.allclose(found, wanted, rtol=1e-5, atol=0), name
        gain = weighted_error(values, found, hessian) / \
            weighted_error(values, plain[f"{name}.weight"], hessian)
        assert gain < (0.6 if convention != "mxfp8-ct" else 0.7), name
    attention = "model.layers.0.self_attn.q_proj.weight"
    assert (ours[attention] == plain[attention]).all()


def test_bytes_depend_on_the_statistics_alone(case, tmp_path):
    root, _, statistics, _ = case
    files = []
    options = ["--to", "nvfp4", "--scale-search", "full"]
    given = ["--gptq", root / "stats.safetensors", "--activation-moments",
             root / "stats.safetensors"]  # fmt: skip
    for name, more in (("a", ["--threads", "1"]), ("b", ["--max-memory", "110k"])):
        target = tmp_path / f"{name}.safetensors"
        run_ok("quantize", root / "in.safetensors", target, *options, *given, *more)
        files.append(target.read_bytes())
    assert files[0] == files[1]
    result = run("quantize", root / "in.safetensors", tmp_path / "c", *options, *given,
                 "--max-memory", "40k")
    assert result.returncode == USAGE and "at least" in result.stderr
    # Other statistics show in the file's settings.
    count = f"{NAME}.input.count"
    changed = statistics | {count: ("I64", [EXPERTS], np.int64([60, 61, 0]).tobytes())}
    write_safetensors(tmp_path / "s.safetensors", changed, {"format": "narrowfloat.statistics"})
    run_ok("quantize", root / "in.safetensors", tmp_path / "c.safetensors", *options, "--gptq",
           tmp_path / "s.safetensors")
    settings = [run_json("check", path)["metadata"]["narrowfloat.settings"].split()
                for path in (tmp_path / "a.safetensors", tmp_path / "c.safetensors")]
    words = [dict(word.split("=") for word in line) for line in settings]
    assert words[0]["gptq"] != words[1]["gptq"]
    assert words[0]["activation_moments"] == words[0]["gptq"]
    assert "activation_moments" not in words[1]


def test_a_killed_run_continues_with_the_same_statistics_only(case, tmp_path):
    root, _, statistics, _ = case
    (tmp_path / "model").mkdir()
    shutil.copy(root / "in.safetensors", tmp_path / "model/model.safetensors")
    stats = tmp_path / "stats.safetensors"
    shutil.copy(root / "stats.safetensors", stats)

    def command(target, *more):
        return [CLI, "quantize", tmp_path / "model", tmp_path / target, "--to", "nvfp4", "--gptq",
                stats, "--max-shard-size", "4000", "--threads", "1", *more]

    times = stats.stat()
    assert execute(command("whole")).returncode == DONE
    assert execute(command("out"), fault="rename:9:kill").returncode == -signal.SIGKILL
    hessian = f"{NAME}.inter.hessian"
    halves = np.frombuffer(statistics[hessian][2], "<f4") / 2
    changed = statistics | {hessian: ("F32", [EXPERTS, COLS, COLS], halves.tobytes())}
    write_safetensors(stats, changed, {"format": "narrowfloat.statistics"})
    result = execute(command("out", "--resume"))
    assert result.returncode == USAGE and "from another source" in result.stderr
    shutil.copy(root / "stats.safetensors", stats)
    os.utime(stats, ns=(times.st_atime_ns, times.st_mtime_ns))
    result = execute(command("out", "--resume"))
    assert result.returncode == DONE and "4 of 10 shards" in result.stderr
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    run_ok("report", tmp_path / "out", "--model-card")
    assert "weights with calibration data" in (tmp_path / "out/README.md").read_text()


@pytest.mark.parametrize("convention", ["nvfp4-ct", "mxfp4-ct"])
def test_no_scale_has_a_smaller_weighted_error(case, tmp_path, convention):
    root, weights, _, hessians = case
    target = tmp_path / "out.safetensors"
    run_ok("quantize", root / "in.safetensors", target, "--to", convention, "--scale-search",
           "full", "--activation-moments", root / "stats.safetensors")
    ours = decoded(tmp_path, target)
    grid, block, scales, scale_values = FORMATS[convention]
    for (expert, matrix), values in weights.items():
        moments = np.diag(hessians[MATRICES[matrix]][expert])
        factors = np.sqrt(moments if expert != 2 else np.ones(COLS))
        factor = scale_values[scales]
        if convention == "nvfp4-ct":
            amax = max(np.abs(weights[expert, one]).max() for one in MATRICES
                       if MATRICES[one] == MATRICES[matrix])
            factor = factor / float(np.float32(256 * 6) / np.float32(amax))
        best = np.full(values.size // block, np.inf)
        for scale in factor:
            levels = grid * scale
            middles = (levels[1:] + levels[:-1]) / 2
            nearest = np.sign(values) * levels[np.searchsorted(middles, np.abs(values))]
            best = np.minimum(best, errors(values * factors, nearest * factors, block))
        found = errors(values * factors, ours[f"{NAME}.{expert}.{matrix}.weight"] * factors, block)
        assert (found <= best * (1 + 1e-4) + 1e-18).all(), (expert, matrix)


def test_an_element_that_becomes_infinite_leaves_its_row_alone(case, tmp_path):
    """The codes of the largest BF16 number times their scale are beyond the range of FP32."""
    root, weights, *_ = case
    values = weights[0, "up_proj"].copy()
    values[2, 40] = np.float32(3.39e38)
    name = f"{NAME}.0.up_proj.weight"
    write_safetensors(tmp_path / "in.safetensors",
                      {name: ("BF16", [ROWS, COLS], bf16(values).tobytes())})
    document = run_json("quantize", tmp_path / "in.safetensors", tmp_path / "out.safetensors",
                        "--to", "mxfp8-ct", "--gptq", root / "stats.safetensors")
    (warning,) = document["warnings"]
    assert f"1 of {ROWS * COLS} elements become infinite" in warning
    found = decoded(tmp_path, tmp_path / "out.safetensors")[name]
    assert np.argwhere(~np.isfinite(found)).tolist() == [[2, 40]]


def test_statistics_of_zeros_change_nothing(case, tmp_path):
    """Tokens came, but an activation made zeros of them."""
    root, _, statistics, _ = case
    zeros = {f"{NAME}.{side}.hessian": ("F32", [EXPERTS, COLS, COLS], bytes(4 * EXPERTS * COLS**2))
             for side in ("input", "inter")}
    stats = tmp_path / "stats.safetensors"
    write_safetensors(stats, statistics | zeros, {"format": "narrowfloat.statistics"})
    files = []
    for name, more in (("plain", []), ("gptq", ["--gptq", stats])):
        target = tmp_path / f"{name}.safetensors"
        run_ok("quantize", root / "in.safetensors", target, "--to", "nvfp4", *more)
        files.append({name: array.tolist() for name, array in decoded(tmp_path, target).items()})
    assert files[0] == files[1]


@pytest.mark.parametrize("block", ["model.layers.0.block_sparse_moe.experts",
                                   "layers.0.ffn.experts"])
def test_experts_have_other_names_in_files_of_mixtral_and_deepseek(case, tmp_path, block):
    """Statistics have the names of the model."""
    root, weights, *_ = case
    names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    tensors = {f"{block}.{expert}.{names[matrix]}.weight":
               ("BF16", [ROWS, COLS], bf16(values).tobytes())
               for (expert, matrix), values in weights.items()}
    write_safetensors(tmp_path / "mixtral.safetensors", tensors)
    stats = root / "stats.safetensors"
    for source, target in ((root / "in.safetensors", "a"), (tmp_path / "mixtral.safetensors", "b")):
        run_ok("quantize", source, tmp_path / f"{target}.safetensors", "--to", "nvfp4",
               "--scale-search", "full", "--gptq", stats, "--activation-moments", stats,
               "--activation-amax", stats)
    ours, theirs = (read_parts(tmp_path / f"{target}.safetensors") for target in "ab")
    for (expert, matrix), part in itertools.product(weights, PARTS):
        own = ours[f"{NAME}.{expert}.{matrix}.{part}"]
        assert theirs[f"{block}.{expert}.{names[matrix]}.{part}"] == own, (expert, matrix, part)


@pytest.mark.parametrize("option", ["--gptq", "--activation-moments"])
def test_check_knows_what_statistics_do(case, tmp_path, option):
    """Experts of GPTQ have larger errors; without the statistics they are not quantized again.
    Other weights are judged as in other files."""
    root, *_ = case
    source, out = root / "in.safetensors", tmp_path / "out.safetensors"
    run_ok("quantize", source, out, "--to", "nvfp4", "--scale-search", "full", option,
           root / "stats.safetensors")
    document = run_json("check", out, "--against", source)
    (finding,) = document["findings"]
    assert finding["severity"] == "note" and "statistics of calibration" in finding["message"]
    again = {tensor["name"]: tensor["requantization"]["identical"]
             for tensor in document["tensors"] if tensor.get("requantization")}
    assert again == {"model.layers.0.self_attn.q_proj.weight": True}
    run_ok("convert", out, tmp_path / "modelopt.safetensors", "--to", "nvfp4-modelopt")
    again = run_json("check", tmp_path / "modelopt.safetensors", "--against", source)
    assert again["passed"]
    assert finding["message"] in [found["message"] for found in again["findings"]]
    worst = min(tensor["figures"]["sqnr_db"] for tensor in document["tensors"])
    assert (worst < 17) == (option == "--gptq")  # The limit of other files.


def test_statistics_are_never_replaced(case, tmp_path):
    root, *_ = case
    stats = tmp_path / "stats.safetensors"
    shutil.copy(root / "stats.safetensors", stats)
    before = stats.read_bytes()
    for option in ("--gptq", "--activation-amax"):
        result = run("quantize", root / "in.safetensors", stats, "--to", "nvfp4", "--force", option,
                     stats)
        assert result.returncode == USAGE and "is the file" in result.stderr
        assert stats.read_bytes() == before


def test_statistics_that_are_wrong(case, tmp_path):
    root, _, statistics, _ = case
    out, stats = tmp_path / "out.safetensors", tmp_path / "stats.safetensors"
    hessian = f"{NAME}.input.hessian"
    values = np.frombuffer(statistics[hessian][2], "<f4").reshape(EXPERTS, COLS, COLS)

    def changed(change):
        found = values.copy()
        change(found[1])
        return {hessian: ("F32", [EXPERTS, COLS, COLS], found.tobytes())}

    def attempt(changes, *options, metadata=None):
        written = {name: one for name, one in (statistics | changes).items() if one}
        write_safetensors(stats, written, metadata or {"format": "narrowfloat.statistics"})
        result = run("quantize", root / "in.safetensors", out, *(options or ("--to", "nvfp4")),
                     "--gptq", stats)
        assert list(tmp_path.iterdir()) == [stats]
        return result.returncode, result.stderr

    code, message = attempt(changed(lambda h: h.__setitem__((3, 3), -1)))
    assert code == INPUT and "negative or not finite, of expert 1" in message
    code, message = attempt(changed(lambda h: h.__setitem__((3, slice(None)), np.nan)))
    assert code == INPUT and "negative or not finite, of expert 1" in message

    def indefinite(h):
        h[3, 5] = h[5, 3] = 1000

    code, message = attempt(changed(indefinite))
    assert code == INPUT and "expert 1, is not positive definite at column" in message
    assert hessian in message
    small = ("F32", [EXPERTS, 32, 32], values[:, :32, :32].tobytes())
    code, message = attempt({hessian: small})
    assert code == INPUT and f"needs F32 [experts, {COLS}, {COLS}]" in message
    few = ("F32", [1, COLS, COLS], values[:1].tobytes())
    code, message = attempt({hessian: few})
    assert code == INPUT and "more than 1 experts" in message
    code, message = attempt({f"{NAME}.input.count": None})
    assert code == INPUT and "input.count" in message
    code, message = attempt({}, metadata={"format": "pt"})
    assert code == INPUT and "--gptq: " in message and "calibrate" in message
    none = {f"{NAME}.{side}.hessian": None for side in ("input", "inter")}
    code, message = attempt(none)
    assert code == USAGE and "--gptq: the file has no Hessian for any of the 10" in message
    code, message = attempt({}, "--to", "fp8-block")
    assert code == USAGE and "--gptq: is for nvfp4, mxfp4 and mxfp8" in message
    code, message = attempt({}, "--to", "nvfp4", "--activation-moments", stats)
    assert code == USAGE and "--scale-search full" in message
