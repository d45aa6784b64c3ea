"""The table of conventions in docs/checkpoints.md, and integers as a source."""

import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import (DONE, INPUT, TINY_MOE, UNSUPPORTED, USAGE, run, run_json, run_ok,
                      stored, write_safetensors)
from test_convert import array

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "golden"))
from gpt_oss import GptOss


def marked(text, heading):
    """{convention: row} of the table below a heading of a document."""
    rows = {}
    for line in text.split(f"\n{heading}\n", 1)[1].split("\n## ", 1)[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        for name in re.findall("`([^`]+)`", cells[0]) if line.startswith("| `") else ():
            rows[name] = cells[1:]
    return rows


def test_the_table_of_conventions(quantized, tmp_path):
    """Makes the table of docs/checkpoints.md: NARROWFLOAT_WRITE_DOCS=1 writes it."""
    root = Path(__file__).resolve().parents[2]
    page = root / "docs/checkpoints.md"

    def listed(command):
        words = " ".join(run_ok(command, "--help").stdout.split())
        return set(re.search("What to write: ([^;]+);", words)[1].split(", "))

    sources = {"nvfp4-ct": quantized, "mxfp4-gpt-oss": GptOss().write(tmp_path / "gpt-oss")}
    for name in listed("quantize") - set(sources):
        sources[name] = tmp_path / name
        run_ok("quantize", TINY_MOE, sources[name], "--to", name)
    sources["mxfp4-deepseek"] = tmp_path / "deepseek"
    sources["mxfp4-deepseek"].mkdir()
    weights = {f"layers.0.ffn.experts.0.{name}.": ("I8", [32, 16]) for name in ("w1", "w2", "w3")}
    write_safetensors(sources["mxfp4-deepseek"] / "model.safetensors", {
        "dense.weight": ("F8_E4M3", [1, 1], b"\0"), "dense.scale": ("F8_E8M0", [1, 1], b"\x7f"),
        **{name + "weight": (*weight, bytes(512)) for name, weight in weights.items()},
        **{name + "scale": ("F8_E8M0", [32, 1], bytes(32)) for name in weights}})
    (sources["mxfp4-deepseek"] / "config.json").write_text(json.dumps({
        "model_type": "deepseek_v4", "expert_dtype": "fp4",
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}))

    sources["int4-ct"] = tmp_path / "int4"
    int4_model(sources["int4-ct"])
    rows = np.zeros((1, 96), np.uint16)
    write_safetensors(tmp_path / "rows.safetensors", {"hidden_states": ("BF16", [1, 96],
                                                                        rows.tobytes())})
    engines = marked((root / "docs/engines.md").read_text(), "## Quantized checkpoints")
    library = re.search(r"\nCOMPRESSED_TENSORS = (\[.*\])",
                        (root / "tests/python/test_compressed_tensors.py").read_text())
    rows = []
    for convention in re.findall(r"^\| `([a-z0-9-]+)`", page.read_text().split("\n### ")[0], re.M):
        source = sources.pop(convention, None)
        if source is None:
            continue  # In the second table of names.
        kinds = {kind["kind"] for kind in run_json("inspect", source)["kinds"]}
        more = ["--activations", tmp_path / "rows.safetensors"] if convention == "mxfp4-gpt-oss" \
            else ["--reference", TINY_MOE]  # fmt: skip
        layer = run("moe", "run", source, "--layer", 0, "--tokens", 1, "--min-time", 0, *more)
        assert layer.returncode in (DONE, USAGE, INPUT, UNSUPPORTED), layer.stderr
        works = [convention in kinds, convention in listed("quantize"),
                 convention in listed("convert"), layer.returncode == DONE, convention in engines,
                 convention in json.loads(library[1].replace("'", '"'))]  # fmt: skip
        cells = ["yes" if one else "-" for one in works]
        rows.append(f"| `{convention}` | {' | '.join(cells)} |\n")
    assert not sources, "missing in the first table of the page"
    before, heading, after = page.read_text().partition("\n### What works with which\n")
    table = re.search(r"(\| Convention \|.*\n\|[-|]+\n)((?:\| .*\n)+)", after)
    if os.environ.get("NARROWFLOAT_WRITE_DOCS") == "1":
        after = after[:table.start(2)] + "".join(rows) + after[table.end(2):]
        page.write_text(before + heading + after)
    else:
        assert table[2].splitlines(keepends=True) == rows


def int4_model(directory, changes=None, weights=None):
    """Symmetric integers in groups of 32, as compressed-tensors packs them: code 0 is -8."""
    random = np.random.default_rng(8)
    codes = random.integers(-8, 8, (160, 128))
    words = np.zeros((160, 16), np.uint32)
    for i in range(8):
        words |= (codes[:, i::8] + 8).astype(np.uint32) << np.uint32(4 * i)
    scales = (random.random((160, 4)) + 0.5).astype(np.float32).view(np.uint32) >> 16
    module = "model.layers.0.mlp.experts.0.up_proj."
    tensors = {module + "weight_packed": ("I32", [160, 16], words.tobytes()),
               module + "weight_scale": ("BF16", [160, 4], scales.astype(np.uint16).tobytes()),
               module + "weight_shape": ("I64", [2], np.int64([160, 128]).tobytes())}  # fmt: skip
    directory.mkdir()
    write_safetensors(directory / "model.safetensors", tensors | (changes or {}))
    group = {"targets": ["Linear"], "weights": {
        "num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
        | (weights or {})}  # fmt: skip
    (directory / "config.json").write_text(json.dumps({"quantization_config": {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": {"group_0": group}}}))
    values = codes * np.repeat((scales << 16).astype(np.uint32).view(np.float32), 32, -1)
    return module, values.astype(np.float32)


def test_integers_as_a_source(tmp_path):
    source = tmp_path / "model"
    module, values = int4_model(source)
    run_ok("dequantize", source, tmp_path / "plain", "--dtype", "fp32")
    plain = stored(tmp_path / "plain")
    assert list(plain) == [module + "weight"]
    assert (array(plain, module + "weight") == values).all()
    (tensor,) = run_json("inspect", source)["tensors"]
    assert (tensor["kind"], tensor["format"], tensor["shape"]) == ("int4-ct", "int4", [160, 128])
    assert len(tensor["parts"]) == 3
    # It has the block size of MXFP4, and other values.
    for to in ("mxfp4", "nvfp4", "mxfp8", "fp8-block"):
        result = run("convert", source, tmp_path / to, "--to", to)
        assert result.returncode == USAGE and "other values than int4-ct" in result.stderr
        run_ok("convert", source, tmp_path / to, "--to", to, "--lossy", "--max-memory", "200K")
        run_ok("quantize", tmp_path / "plain", tmp_path / "wanted", "--to", to, "--force")
        assert stored(tmp_path / to) == stored(tmp_path / "wanted")
    result = run("diff", source, tmp_path / "plain")
    assert result.returncode == DONE and "same values" in result.stdout
    result = run("quantize", source, tmp_path / "x", "--to", "nvfp4")
    assert result.returncode == USAGE and "quantized already (int4-ct)" in result.stderr
    result = run("convert", source, tmp_path / "x", "--to", "int4-ct")
    assert result.returncode == USAGE and "read only" in result.stderr


@pytest.mark.parametrize("weights,changes,part", [
    ({"symmetric": False}, {}, "pack-quantized"), ({"group_size": 128}, {}, "pack-quantized"),
    ({"num_bits": 8}, {}, "pack-quantized"), ({"actorder": "group"}, {}, "pack-quantized"),
    ({}, {"weight_zero_point": ("I32", [1, 1], bytes(4))}, "which is not read"),
    ({}, {"weight_scale": ("F32", [160, 1], bytes(640))}, "needs a companion BF16 [160, 4]"),
])  # fmt: skip
def test_other_integers_are_refused(tmp_path, weights, changes, part):
    module = "model.layers.0.mlp.experts.0.up_proj."
    int4_model(tmp_path / "model", {module + name: value for name, value in changes.items()},
               weights)  # fmt: skip
    result = run("dequantize", tmp_path / "model", tmp_path / "out", "--dtype", "bf16")
    assert result.returncode in (INPUT, UNSUPPORTED) and part in result.stderr
