"""Checkpoints as files: quantize, dequantize, convert, compare. And two arrays, compared."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

import numpy as np

from narrowfloat import _core
from narrowfloat._arrays import is_torch
from narrowfloat._quantized import QuantizedTensor

Path = str | os.PathLike[str]


def _globs(argument: str, globs: Sequence[str]) -> Sequence[str]:
    """The globs. A string alone is refused: its letters would be globs, "*" among them."""
    if isinstance(globs, str):
        raise TypeError(f"{argument}: expected a list of globs, got {globs!r}; write [{globs!r}]")
    return globs


def quantize_checkpoint(
    source: Path,
    target: Path,
    to: str = "nvfp4",
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    rules: Sequence[tuple[str, str]] = (),
    recipe: Path | Mapping[str, Any] | None = None,
    target_bits: float = 0,
    activation_amax: Path | Mapping[str, float] | None = None,
    gptq: Path | None = None,
    activation_moments: Path | None = None,
    math: Literal["exact", "fast"] = "exact",
    mx_scale: Literal["up", "floor", "even"] = "up",
    scale_search: Literal["amax", "four_over_six", "full"] = "amax",
    keep_nonfinite: bool = False,
    max_memory_bytes: int = 0,
    max_shard_bytes: int = 5_000_000_000,
    dry_run: bool = False,
    force: bool = False,
    resume: bool = False,
    measure: bool = True,
) -> _core.CheckpointReport:
    """Quantizes the weights of a safetensors file or of a model directory, tensor by tensor.

    to: a convention of docs/cli.md: nvfp4, nvfp4-modelopt, mxfp4, mxfp8, fp8-block, fp8-channel,
        fp8-tensor, fp8-channel-modelopt, fp8-tensor-modelopt.
    include, exclude: globs over tensor names; includes add to the default choice, excludes win.
    rules: pairs of a glob and a format, or "keep": the first that matches a weight counts.
    recipe: a JSON or YAML file of includes, excludes and rules (docs/cli.md), after the others; or
    what json.load() or yaml.safe_load() made of one.
    target_bits: better formats than `to`, or none, for the weights that gain most by a bit, as long
    as weights have this many on average; 0: no search.
    activation_amax: the file of narrowfloat.transformers.calibrate(), a .json file, or module names
    with the largest magnitudes of their inputs: weights of NVFP4, and of FP8 with one scale, get
    static activation scales.
    gptq: a file of calibrate(statistics="hessian"): columns of the experts' weights make up for the
    rounding errors of others. activation_moments: such a file, or one with statistics=
    "second_moment": the errors that scale_search="full" compares count by what they multiply.
    force: replace what is at the target. dry_run: plan and validate only. measure: fill `figures`.
    max_shard_bytes: a directory is written as files of up to so many bytes.
    resume: continue an interrupted run with the same source, target and options after the files
    that it finished, if their hashes are right; without such a run, start.
    The target appears complete or not at all. Ctrl-C stops between tensors.
    """
    options = _core.QuantizeCheckpointOptions()
    options.target_bits = target_bits
    read = None
    if isinstance(recipe, Mapping):
        read = _core.parse_recipe(json.dumps(dict(recipe)))
    elif recipe is not None:
        read = _core.read_recipe(os.fspath(recipe))
    options.include = [*_globs("include", include), *(read.include if read else ())]
    options.exclude = [*_globs("exclude", exclude), *(read.exclude if read else ())]
    parsed = [_core.parse_rule(f"{glob}={chosen}") for glob, chosen in rules]
    options.rules = [*parsed, *(read.rules if read else ())]
    if isinstance(activation_amax, Mapping):
        options.activation_amax = {name: float(amax) for name, amax in activation_amax.items()}
    elif activation_amax is not None:
        options.activation_amax = _core.read_activation_amax(os.fspath(activation_amax))
        options.kept_files = [os.fspath(activation_amax)]
    if gptq is not None:
        options.gptq = os.fspath(gptq)
    if activation_moments is not None:
        options.activation_moments = os.fspath(activation_moments)
    options.keep_nonfinite, options.max_memory_bytes = keep_nonfinite, max_memory_bytes
    options.max_shard_bytes = max_shard_bytes
    options.dry_run, options.force, options.measure = dry_run, force, measure
    options.resume = resume
    words = {"to": to, "math": math, "mx_scale": mx_scale, "scale_search": scale_search}
    return _core.quantize_checkpoint(os.fspath(source), os.fspath(target), options, words)


def dequantize_checkpoint(
    source: Path,
    target: Path,
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16",
    *,
    max_memory_bytes: int = 0,
    max_shard_bytes: int = 5_000_000_000,
    force: bool = False,
    resume: bool = False,
) -> _core.CheckpointReport:
    """Writes a quantized checkpoint with plain weights. Arguments: quantize_checkpoint()."""
    options = _core.DequantizeCheckpointOptions()
    options.max_memory_bytes, options.max_shard_bytes = max_memory_bytes, max_shard_bytes
    options.force, options.resume = force, resume
    return _core.dequantize_checkpoint(os.fspath(source), os.fspath(target), dtype, options)


def convert_checkpoint(
    source: Path,
    target: Path,
    to: str = "nvfp4",
    *,
    exact_only: bool = False,
    lossy: bool = False,
    keep_formats: bool = False,
    math: Literal["exact", "fast"] = "exact",
    mx_scale: Literal["up", "floor", "even"] = "up",
    scale_search: Literal["amax", "four_over_six", "full"] = "amax",
    max_memory_bytes: int = 0,
    dry_run: bool = False,
    force: bool = False,
    resume: bool = False,
) -> _core.CheckpointReport:
    """Converts the quantized weights of a checkpoint to another convention, exactly if possible.

    to: as for quantize_checkpoint(), or mxfp4-gpt-oss. exact_only: an error, before anything is
    written, if a weight would change at all. lossy: weights whose values the target cannot hold are
    quantized again, with math, mx_scale and scale_search; otherwise they are an error.
    keep_formats: in a checkpoint of several formats each weight keeps its own. resume:
    continue an interrupted run. `conversion` of the report's tensors says what became of each.
    """
    options = _core.ConvertCheckpointOptions()
    options.exact_only, options.lossy, options.resume = exact_only, lossy, resume
    options.keep_formats = keep_formats
    options.max_memory_bytes, options.dry_run, options.force = max_memory_bytes, dry_run, force
    words = {"to": to, "math": math, "mx_scale": mx_scale, "scale_search": scale_search}
    return _core.convert_checkpoint(os.fspath(source), os.fspath(target), options, words)


def check_checkpoint(
    path: Path,
    *,
    against: Path | None = None,
    scales_only: bool = False,
) -> _core.CheckpointCheck:
    """Finds what is wrong with a checkpoint: config against tensors, scales, codes, missing tensors.

    against: the unquantized checkpoint it was made from: also the error, and whether quantizing it
    again gives the same bytes. scales_only: read no codes. `passed` is true where there is neither
    an error nor a warning; docs/checkpoints.md has the rules.
    """
    source = "" if against is None else os.fspath(against)
    return _core.check_checkpoint(os.fspath(path), source, scales_only)


def fix_checkpoint(source: Path, target: Path, *, force: bool = False) -> _core.CheckpointReport:
    """Writes a copy in which weights that loaders merge share one global scale.

    `figures` of the report's tensors measure the change. ValueError where no global scale
    differs. force: replace what is at the target.
    """
    return _core.fix_checkpoint(os.fspath(source), os.fspath(target), force)


def _numbers(value: Any) -> np.ndarray[Any, Any]:
    if isinstance(value, QuantizedTensor):
        value = value.dequantize("float32")
    if is_torch(value):
        value = value.detach().double().cpu().numpy()
    return np.asarray(value).astype(np.float64)


def _ratio(numerator: float, denominator: float, if_both_zero: float, if_zero: float) -> float:
    if denominator:
        return numerator / denominator
    return if_both_zero if numerator == 0 else if_zero


def _diff_arrays(a: Any, b: Any) -> _core.ErrorFigures:
    x, y = _numbers(a), _numbers(b)
    if x.shape != y.shape:
        raise ValueError(f"b: expected the shape {x.shape} of a, got {y.shape}")
    figures = _core.ErrorFigures()
    finite = np.isfinite(x) & np.isfinite(y)
    figures.elements, figures.nonfinite = x.size, int(x.size - finite.sum())
    figures.sqnr_db = float("inf")
    count = x.size - figures.nonfinite
    if count == 0:
        return figures
    error = np.where(finite, x - np.where(finite, y, 0), 0)
    xs, ys = x[finite], y[finite]
    x_squares, y_squares = float(np.sum(xs * xs)), float(np.sum(ys * ys))
    error_squares = float(np.sum(error * error))
    figures.mse = error_squares / count
    figures.relative_error = _ratio(error_squares, x_squares, 0.0, float("inf")) ** 0.5
    if figures.relative_error:
        figures.sqnr_db = float(-20 * np.log10(figures.relative_error))
    norms = (x_squares * y_squares) ** 0.5
    both_zero = x_squares == 0 and y_squares == 0
    figures.cosine = float(np.sum(xs * ys)) / norms if norms else float(both_zero)
    figures.norm_ratio = _ratio(y_squares, x_squares, 1.0, float("inf")) ** 0.5
    figures.max_abs = float(np.abs(error).max())
    figures.max_abs_index = int(np.abs(error).argmax())
    figures.flushed_percent = 100.0 * float(np.sum((xs != 0) & (ys == 0))) / count
    return figures


@overload
def diff(a: Path, b: Path, *, original: Path | None = None) -> _core.CheckpointDiff: ...


@overload
def diff(a: Any, b: Any) -> _core.ErrorFigures: ...


def diff(
    a: Any, b: Any, *, original: Path | None = None
) -> _core.CheckpointDiff | _core.ErrorFigures:
    """How b differs from the reference a.

    Two paths: checkpoints, tensor by tensor; quantized tensors are dequantized. Two arrays, or
    QuantizedTensors, of one shape: the figures of docs/howto/read_the_error_report.md
    (without clipped_percent). original: the checkpoint that both paths were quantized from, to
    compare each side with.
    """
    are_paths = [isinstance(value, (str, os.PathLike)) for value in (a, b)]
    if all(are_paths):
        source = "" if original is None else os.fspath(original)
        return _core.diff_checkpoints(os.fspath(a), os.fspath(b), source)
    if original is not None:
        raise TypeError("original: expected two paths beside it")
    if any(are_paths):
        raise TypeError("b: expected two paths or two arrays")
    return _diff_arrays(a, b)
