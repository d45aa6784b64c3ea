"""quantize --scale-search full: no scale of the format has a smaller squared error, by brute force."""

import json
import struct

import numpy as np
import pytest
from conftest import TINY_MOE, USAGE, read_safetensors, run, run_json, run_ok, write_safetensors

E2M1 = np.array([0, .5, 1, 1.5, 2, 3, 4, 6])
BYTES = np.arange(256)
E4M3 = np.where(BYTES & 127 < 8, (BYTES & 7) / 512,
                (8 + (BYTES & 7)) * 2.0 ** ((BYTES >> 3 & 15) - 10.0))
# Format: the values of codes, the block, the scales that it has.
FORMATS = {
    "nvfp4-ct": (E2M1, 16, np.arange(1, 127), E4M3),
    "mxfp4-ct": (E2M1, 32, np.arange(100, 140), 2.0 ** (BYTES - 127.0)),
    "mxfp8-ct": (np.unique(E4M3[:127]), 32, np.arange(100, 140), 2.0 ** (BYTES - 127.0)),
}


def source_file(path):
    """Normal values; blocks with an outlier, with small values, with few, with none."""
    values = np.random.default_rng(11).normal(0, 0.02, (64, 128))
    values[::3, ::32] *= 8
    values[1::7] *= 1e-3
    values[5, :64] = 0
    values[6, 1:64] = 0
    values = (values.astype("<f4").view("<u4") >> 16).astype("<u2")
    write_safetensors(path, {"up_proj.weight": ("BF16", [64, 128], values.tobytes())})
    return (values.astype("<u4") << 16).view("<f4").astype(np.float64)


def errors(values, stored, block):
    return ((values - stored).reshape(-1, block) ** 2).sum(-1)


@pytest.mark.parametrize("convention", FORMATS)
@pytest.mark.parametrize("math", ["exact", "fast"])
def test_no_scale_is_better(tmp_path, convention, math):
    grid, block, scales, scale_values = FORMATS[convention]
    source, target = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    values = source_file(source)
    run_ok("quantize", source, target, "--to", convention, "--scale-search", "full", "--math", math,
           "--include", "*")
    run_ok("dequantize", target, tmp_path / "plain.safetensors", "--dtype", "fp32")
    stored = read_safetensors(tmp_path / "plain.safetensors")["up_proj.weight"].astype(np.float64)
    data = target.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + size])
    factor = 1.0
    if convention.startswith("nvfp4"):
        at = header["up_proj.weight_global_scale"]["data_offsets"][0] + 8 + size
        factor = 1 / float(np.frombuffer(data[at:at + 4], "<f4")[0])
    best = np.full(values.size // block, np.inf)
    for scale in scales:
        levels = grid * scale_values[scale] * factor
        middles = (levels[1:] + levels[:-1]) / 2
        nearest = np.sign(values) * levels[np.searchsorted(middles, np.abs(values))]
        best = np.minimum(best, errors(values, nearest, block))
    found = errors(values, stored, block)
    assert (found <= best * (1 + 1e-5) + 1e-18).all()
    assert (found[best == 0] == 0).all()


def test_gain_and_settings(tmp_path):
    """More SQNR than either other choice, and a checkpoint that check can make again."""
    sqnr = {}
    for convention, searches in (("nvfp4", ["amax", "4over6", "full"]), ("mxfp4", ["amax", "full"]),
                                 ("mxfp8", ["amax", "full"])):
        for search in searches:
            target = tmp_path / f"{convention}-{search}"
            document = run_json("quantize", TINY_MOE, target, "--to", convention, "--scale-search",
                                search)
            sqnr[convention, search] = document["figures"]["sqnr_db"]
    assert sqnr["nvfp4", "full"] > sqnr["nvfp4", "4over6"] + 0.3 > sqnr["nvfp4", "amax"] + 0.8
    assert sqnr["mxfp4", "full"] > sqnr["mxfp4", "amax"] + 0.3
    assert sqnr["mxfp8", "full"] >= sqnr["mxfp8", "amax"]
    document = run_json("check", tmp_path / "nvfp4-full", "--against", TINY_MOE)
    assert document["passed"]
    assert document["metadata"]["narrowfloat.settings"].endswith("scale_search=full")
    result = run("quantize", TINY_MOE, tmp_path / "x", "--to", "fp8-block", "--scale-search", "full")
    assert result.returncode == USAGE and "--scale-search" in result.stderr


def test_threads_and_memory_do_not_change_the_file(tmp_path):
    source_file(tmp_path / "in.safetensors")
    files = []
    for name, options in (("a", ["--threads", "1"]), ("b", ["--max-memory", "40k"])):
        target = tmp_path / f"{name}.safetensors"
        run_ok("quantize", tmp_path / "in.safetensors", target, "--to", "nvfp4", "--scale-search",
               "full", *options)
        files.append(target.read_bytes())
    assert files[0] == files[1]
