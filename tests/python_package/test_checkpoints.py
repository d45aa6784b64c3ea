"""Checkpoints through the package, and diff() of files and of arrays."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import narrowfloat as nf

X = np.random.default_rng(5).standard_normal((64, 128)).astype(ml_dtypes.bfloat16)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A file with one weight."""
    path = tmp_path / "in.safetensors"
    safetensors.numpy.save_file({"layer.weight": X}, path)
    return path


def test_quantize_diff_dequantize(source: Path, tmp_path: Path) -> None:
    """The figures of the report, of the two files, and of the two arrays are the same."""
    target, back = tmp_path / "q.safetensors", tmp_path / "back.safetensors"
    report = nf.quantize_checkpoint(source, target, "nvfp4", include=["*"])
    (tensor,) = report.tensors
    assert (tensor.name, tensor.action, tensor.shape) == ("layer.weight", "quantize", [64, 128])
    assert report.target_bytes < report.source_bytes and report.files and report.seconds >= 0
    compared = nf.diff(source, str(target))
    assert not compared.equal and compared.tensors[0].status == "different"
    assert compared.total.mse == pytest.approx(tensor.figures.mse)
    nf.dequantize_checkpoint(target, back, "float32")
    restored = safetensors.numpy.load_file(back)["layer.weight"]
    figures = nf.diff(X, restored)
    for name in ("elements", "mse", "relative_error", "sqnr_db", "cosine", "norm_ratio", "max_abs",
                 "max_abs_index", "flushed_percent", "nonfinite"):  # fmt: skip
        assert getattr(figures, name) == pytest.approx(getattr(compared.total, name), rel=1e-9)
    assert nf.diff(source, source).equal
    other = tmp_path / "other.safetensors"
    nf.quantize_checkpoint(source, other, "nvfp4", include=["*"], scale_search="four_over_six")
    (both,) = nf.diff(target, other, original=source).tensors
    assert 0 < both.stored.different_codes < both.stored.codes == X.size
    assert both.a_original.figures.mse > both.b_original.figures.mse
    assert both.a_original.misrounded_codes == both.b_original.misrounded_codes == 0
    with pytest.raises(TypeError, match="original"):
        nf.diff(X, X, original=source)


@pytest.mark.parametrize("argument", ["include", "exclude"])
def test_a_glob_is_no_list_of_its_letters(argument: str, source: Path, tmp_path: Path) -> None:
    """A string is a sequence, too; its "*" would match every tensor."""
    with pytest.raises(TypeError, match=f"{argument}: expected a list of globs, got '\\*.bias'"):
        nf.quantize_checkpoint(source, tmp_path / "x", **{argument: "*.bias"})


def test_convert_there_and_back(source: Path, tmp_path: Path) -> None:
    """Another convention, with what it changed; back to the same bytes; another format."""
    paths = [tmp_path / f"{i}.safetensors" for i in range(4)]
    nf.quantize_checkpoint(source, paths[0], "nvfp4", include=["*"])
    report = nf.convert_checkpoint(paths[0], paths[1], "nvfp4-modelopt")
    (tensor,) = report.tensors
    assert (tensor.action, tensor.format) == ("convert", "nvfp4-modelopt")
    assert tensor.conversion.blocks == X.size // 16
    assert tensor.conversion.exact_blocks == tensor.conversion.blocks
    nf.convert_checkpoint(paths[1], paths[2], "nvfp4")
    (same,) = nf.diff(paths[0], paths[2]).tensors
    assert same.status == "identical"
    for options in ({}, {"exact_only": True}):
        with pytest.raises(ValueError, match="layer.weight"):
            nf.convert_checkpoint(paths[0], paths[3], "mxfp8", **options)
    assert not paths[3].exists()
    (tensor,) = nf.convert_checkpoint(paths[0], paths[3], "mxfp8", keep_formats=True).tensors
    assert (tensor.action, tensor.format) == ("convert", "nvfp4-ct")
    paths[3].unlink()
    (tensor,) = nf.convert_checkpoint(paths[0], paths[3], "mxfp8", lossy=True).tensors
    assert tensor.action == "requantize" and tensor.figures.sqnr_db > 30


def test_statistics_and_recipes(tmp_path: Path) -> None:
    """GPTQ and a weighted search, from the files of calibrate(); a recipe as a mapping."""
    plain, statistics = tmp_path / "in.safetensors", tmp_path / "statistics.safetensors"
    names = [f"mlp.experts.0.{matrix}_proj.weight" for matrix in ("gate", "up")]
    safetensors.numpy.save_file({name: X[:, :64].copy() for name in names}, plain)
    random = np.random.default_rng(6)
    rows = random.standard_normal((200, 64)) @ random.standard_normal((64, 64))
    hessian = rows.T @ rows / len(rows)
    safetensors.numpy.save_file(
        {"mlp.experts.input.hessian": hessian[None].astype(np.float32),
         "mlp.experts.input.count": np.array([200])},
        statistics, {"format": "narrowfloat.statistics"})  # fmt: skip
    x = X[:, :64].astype(np.float64)
    costs = []
    for i, options in enumerate((
        {}, {"activation_moments": statistics}, {"gptq": statistics},
    )):  # fmt: skip
        target, back = tmp_path / f"{i}.safetensors", tmp_path / f"back{i}.safetensors"
        nf.quantize_checkpoint(plain, target, "nvfp4", scale_search="full", **options)
        nf.dequantize_checkpoint(target, back, "float32")
        error = safetensors.numpy.load_file(back)[names[0]] - x
        costs.append((np.sum(error**2 * np.diag(hessian)), np.sum((error @ hessian) * error)))
    assert costs[1][0] < costs[0][0]
    assert costs[2][1] < 0.7 * costs[0][1]
    recipe = {"rules": [{"match": "*.up_proj.*", "format": "keep"}]}
    report = nf.quantize_checkpoint(plain, tmp_path / "r.safetensors", "nvfp4", recipe=recipe)
    assert [tensor.action for tensor in report.tensors] == ["quantize", "copy"]


def write_gate_and_up(path: Path) -> None:
    """Replaces the weight of a file by two copies, gate and up, with other global scales."""
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    merged: dict[str, Any] = {"__metadata__": header.pop("__metadata__")}
    body = b""
    for name, factor in (("gate", 1.0), ("up", 1.25)):
        for part, info in header.items():
            first, last = (begin + offset for offset in info["data_offsets"])
            content = data[first:last]
            if part.endswith("global_scale"):
                content = (np.frombuffer(content, np.float32) * np.float32(factor)).tobytes()
            info = info | {"data_offsets": [len(body), len(body) + len(content)]}
            merged[part.replace("layer.", f"mlp.{name}_proj.")] = info
            body += content
    text = json.dumps(merged).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def test_check_and_fix(source: Path, tmp_path: Path) -> None:
    """A good file passes; gate and up with two global scales do not, until they are fixed."""
    target, fixed = tmp_path / "q.safetensors", tmp_path / "fixed.safetensors"
    nf.quantize_checkpoint(source, target, "nvfp4", include=["*"])
    checked = nf.check_checkpoint(target, against=source)
    assert checked.passed and checked.findings == [] and "passed" in repr(checked)
    (tensor,) = checked.tensors
    assert tensor.requantization.is_identical and tensor.figures.sqnr_db > 15
    assert sum(tensor.statistics.code_counts) == tensor.statistics.codes == X.size
    assert nf.check_checkpoint(target, scales_only=True).tensors[0].statistics.codes == 0
    with pytest.raises(ValueError, match="nothing to fix"):
        nf.fix_checkpoint(target, fixed)
    write_gate_and_up(target)
    (finding,) = nf.check_checkpoint(target).findings
    assert (finding.id, finding.severity) == ("NF-C007", "warning") and finding.tensor in str(finding)
    report = nf.fix_checkpoint(target, fixed)
    assert report.total.sqnr_db > 20 and nf.check_checkpoint(fixed).passed


def test_existing_targets_are_kept(source: Path) -> None:
    """Unless force says otherwise."""
    target = source.parent / "target.safetensors"
    nf.quantize_checkpoint(source, target, "mxfp4", include=["*"])
    with pytest.raises(ValueError, match="force"):
        nf.quantize_checkpoint(source, target, "mxfp4", include=["*"])
    nf.quantize_checkpoint(source, target, "mxfp4", include=["*"], force=True)
    with pytest.raises(ValueError, match="int2"):
        nf.quantize_checkpoint(source, source.parent / "x", "int2")
    planned = nf.quantize_checkpoint(source, source.parent / "x.safetensors", "mxfp8",
                                     include=["*"], dry_run=True)  # fmt: skip
    assert planned.tensors and not (source.parent / "x.safetensors").exists()


def test_an_interrupted_run_is_resumed(tmp_path: Path) -> None:
    """The same call with resume continues after Ctrl-C; other options are refused."""
    source, target = tmp_path / "model", tmp_path / "out"
    source.mkdir()
    weights = {f"layers.{i}.mlp.up_proj.weight": np.tile(X, (8, 16)) for i in range(40)}
    safetensors.numpy.save_file(weights, source / "model.safetensors")
    (source / "config.json").write_text("{}")
    expected = tmp_path / "expected"
    nf.quantize_checkpoint(source, expected, "nvfp4", max_shard_bytes=1_000_000)

    manifest = tmp_path / "out.narrowfloat.partial" / "narrowfloat-manifest.json"

    def interrupt(_signal: int, _frame: object) -> None:
        if manifest.exists() and len(json.loads(manifest.read_text())["files"]) >= 2:
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        with pytest.raises(KeyboardInterrupt):
            nf.quantize_checkpoint(source, target, "nvfp4", max_shard_bytes=1_000_000)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert manifest.exists() and not target.exists()
    with pytest.raises(ValueError, match="with other options"):
        nf.quantize_checkpoint(source, target, "mxfp4", max_shard_bytes=1_000_000, resume=True)
    report = nf.quantize_checkpoint(source, target, "nvfp4", max_shard_bytes=1_000_000, resume=True)
    assert any("are of the run before" in warning for warning in report.warnings)
    files = {path.name: path.read_bytes() for path in target.iterdir()}
    assert files == {path.name: path.read_bytes() for path in expected.iterdir()}
    assert not manifest.exists()
    # Without an interrupted run resume starts one.
    nf.dequantize_checkpoint(target, tmp_path / "plain", resume=True, max_shard_bytes=4_000_000)
    assert len(list((tmp_path / "plain").glob("*.safetensors"))) > 1


def test_diff_of_arrays() -> None:
    """Special cases of the figures."""
    ones = np.ones(4, np.float32)
    assert nf.diff(ones, ones).sqnr_db == float("inf")
    assert nf.diff(np.zeros(4), np.zeros(4)).cosine == 1.0
    assert nf.diff(np.zeros(4), ones).relative_error == float("inf")
    odd = np.array([1, np.nan, np.inf, 2], np.float32)
    figures = nf.diff(odd, np.array([1, 1, 1, 0], np.float32))
    assert (figures.nonfinite, figures.max_abs, figures.max_abs_index) == (2, 2.0, 3)
    assert figures.flushed_percent == 50.0
    assert nf.diff(np.full(2, np.nan), np.ones(2)).mse == 0
    q = nf.quantize(X, "mxfp8")
    assert nf.diff(X, q).mse == nf.diff(X, q.dequantize()).mse > 0
    with pytest.raises(ValueError, match="shape"):
        nf.diff(ones, np.ones(3))
    with pytest.raises(TypeError, match="paths"):
        nf.diff("here", ones)
