"""All-reduce fusions: FlashInfer's arguments as those of an AllReduce."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from numbers import Integral, Real
from typing import Any

from narrowfloat._allreduce_call import call, settings_of
from narrowfloat._arrays import is_torch, maker_of
from narrowfloat._streams import is_capturing
from narrowfloat.compat.flashinfer._allreduce_workspace import (
    AllReduceFusionWorkspace,
    workspace_of,
)
from narrowfloat.compat.flashinfer._arguments import accepts
from narrowfloat.compat.flashinfer._arrays import (
    LAYOUTS,
    Array,
    as_type,
    check_writable,
    refuse,
    scale_array,
)
from narrowfloat.compat.flashinfer._comm_enums import AllReduceFusionPattern as Pattern

# Pattern -> narrowfloat's.
_PATTERNS = ("allreduce", "residual_rmsnorm", "fp8", "nvfp4", "norm_fp8", "norm_nvfp4",
             "moe_reduction", "moe_finalize", "fp8_group", "norm_fp8_group", "fp8_token",
             "norm_fp8_token")  # fmt: skip
_DYNAMIC = ("fp8_token", "norm_fp8_token")

# Names in messages of the library -> names of the functions.
_COMMON = {"residual_in": "residual_in", "gamma": "rms_gamma", "eps": "rms_eps",
           "global_scale": "scale_factor", "scale_layout": "layout_code",
           "group": "block_quant_group_size", "algorithm": "use_oneshot",
           "expert_rows": "moe_reduction_active_experts_token_input",
           "expert_scales": "moe_reduction_scale_input",
           "num_experts": "moe_reduction_device_num_experts",
           "token_input": "moe_reduction_token_input",
           "slot_to_row": "expanded_idx_to_permuted_idx", "slot_weights": "expert_scale_factor",
           "shared_expert": "shared_expert_output",
           "routed_scaling": "routed_scaling_factor"}  # fmt: skip
_UNIFIED_NAMES = {**_COMMON, "input": "input", "ar_out": "output", "permuted_rows": "input"}
_TRTLLM_NAMES = {**_COMMON, "input": "allreduce_in", "ar_out": "allreduce_out"}
_REDUCTION_NAMES = {**_COMMON, "ar_out": "moe_allreduce_out"}
_FINALIZE_NAMES = {**_COMMON, "permuted_rows": "allreduce_in", "gamma": "norm_weight",
                   "eps": "eps"}  # fmt: skip


def _is_dense(array: Any) -> bool:
    return bool(array.is_contiguous() if is_torch(array) else array.flags.c_contiguous)


def _viewed(argument: str, array: Any, shape: tuple[int, ...]) -> Any:
    """The memory of an array of as many elements with a shape."""
    if array is None:
        return None
    if not _is_dense(array):
        raise ValueError(f"{argument}: expected a dense array in C order, got a strided view")
    if prod(array.shape) != prod(shape):
        raise ValueError(f"{argument}: expected {prod(shape)} elements, of shape {shape}, got "
                         f"{tuple(array.shape)}")  # fmt: skip
    return array.reshape(shape)


def _leading_bytes(argument: str, array: Any, shape: tuple[int, ...]) -> Any:
    """The first bytes of an output of any type, as uint8 of a shape."""
    if array is None:
        return None
    if not _is_dense(array):
        raise ValueError(f"{argument}: expected a dense array in C order, got a strided view")
    check_writable(argument, array)
    space = as_type(array.reshape(-1), "uint8")
    if space.shape[0] < prod(shape):
        raise ValueError(f"{argument}: expected at least {prod(shape)} bytes, got "
                         f"{space.shape[0]}")  # fmt: skip
    return space[: prod(shape)].reshape(shape)


def _scale(value: Any, like: Any) -> Any:
    """A scale as float32 [1] where `like` lies; ValueError for a number inside a capture."""
    if isinstance(value, Real) and is_torch(like) and like.is_cuda and is_capturing(like.device):
        raise ValueError("scale_factor: expected a tensor on the GPU while a graph is captured, "
                         f"whose replays would all have the number {value}")  # fmt: skip
    return scale_array("scale_factor", value, like)


def _swizzled_bytes(rows: int, blocks: int, layout: str) -> int:
    if layout == "linear":
        return rows * blocks
    multiple = 128 if layout == "swizzled_128x4" else 8
    return -(-rows // multiple) * multiple * (-(-blocks // 4) * 4)


def _layout(code: Any) -> str:
    number = 0 if code is None else int(code)
    if not 0 <= number < len(LAYOUTS):
        raise ValueError(f"layout_code: expected a QuantizationSFLayout, got {code!r}")
    return LAYOUTS[number]


def _quantized(
    quantization: str, shape: tuple[int, int], quant_out: Any, scale_out: Any, layout: str
) -> dict[str, Any]:
    """The quantized outputs as the library takes them."""
    tokens, hidden = shape
    if quantization != "nvfp4":
        return {"quant_out": _leading_bytes("quant_out", quant_out, shape), "scale_out": scale_out}
    size = _swizzled_bytes(tokens, hidden // 16, layout)
    return {"quant_out": _leading_bytes("quant_out", quant_out, (tokens, hidden // 2)),
            "scale_out": _leading_bytes("scale_out", scale_out, (size,))}  # fmt: skip


def _use(
    workspace: AllReduceFusionWorkspace, pattern: str, arrays: tuple[Any, Any, Any],
    options: Mapping[str, Any], names: Mapping[str, str], quantization: str = "none",
) -> None:  # fmt: skip
    settings = settings_of(pattern, options, quantization)
    call(workspace.allreduce._workspace, pattern, settings, arrays, names)


def _launch_options(pdl: bool, at_end: bool, eps: Any, weight_bias: Any) -> dict[str, Any]:
    return {"programmatic_launch": bool(pdl), "trigger": "at_end" if at_end else "after_push",
            "eps": None if eps is None else float(eps),
            "weight_bias": None if weight_bias is None else float(weight_bias)}  # fmt: skip


def _pattern_name(argument: str, code: Any) -> str:
    if int(code) == Pattern.kMoEFinalizeARResidualRMSNormFP8Quant:
        raise NotImplementedError(f"{argument}: {code!r} needs the backend 'mnnvl-cutedsl', which "
                                  "is not offered")  # fmt: skip
    if not 0 <= int(code) < len(_PATTERNS):
        raise ValueError(f"{argument}: expected an AllReduceFusionPattern, got {code!r}")
    return _PATTERNS[int(code)]


def _reduce(
    workspace: AllReduceFusionWorkspace, name: str, shape: tuple[int, int],
    tensors: Mapping[str, Any], outputs: Mapping[str, Any], options: Mapping[str, Any],
    scale_factor: Any, layout_code: Any, group: Any, names: Mapping[str, str],
) -> None:  # fmt: skip
    """A pattern without a Mixture-of-Experts step; all tensors have the library's names."""
    quantization = settings_of(name, {}).quantization
    how = dict(options)
    if quantization == "fp8_group":
        if group is None:
            raise ValueError("block_quant_group_size: expected a number of columns, got None")
        how["group_size"] = int(group)
    layout = _layout(layout_code)
    if quantization == "nvfp4":
        how["scale_layout"] = layout
    rows = {key: _viewed(names.get(key, key), tensors[key], shape)
            for key in ("input", "residual_in")}  # fmt: skip
    written = {key: _viewed(names.get(key, key), outputs[key], shape)
               for key in ("ar_out", "residual_out", "norm_out")}  # fmt: skip
    scale = None if scale_factor is None else _scale(scale_factor, tensors["input"])
    quantized = _quantized(quantization, shape, outputs["quant_out"], outputs["scale_out"], layout)
    _use(workspace, name, ({**rows, "gamma": tensors["gamma"], "global_scale": scale}, {},
                           {**written, **quantized}), how, names)  # fmt: skip


def _algorithm(use_oneshot: bool | None) -> str:
    return "auto" if use_oneshot is None else "oneshot" if use_oneshot else "twoshot"


@accepts("input")
def allreduce_fusion(
    input: Array,
    workspace: AllReduceFusionWorkspace,
    pattern: int,
    launch_with_pdl: bool = False,
    trigger_completion_at_end: bool = True,
    output: Array | None = None,
    residual_out: Array | None = None,
    norm_out: Array | None = None,
    quant_out: Array | None = None,
    scale_out: Array | None = None,
    residual_in: Array | None = None,
    rms_gamma: Array | None = None,
    rms_eps: float = 1e-6,
    scale_factor: Array | float | None = None,
    layout_code: int | None = None,
    use_oneshot: bool | None = None,
    fp32_acc: bool = False,
    moe_reduction_device_num_experts: Any = None,
    moe_reduction_scale_input: Array | None = None,
    moe_reduction_active_experts_token_input: Array | None = None,
    moe_reduction_token_input: Array | None = None,
    expanded_idx_to_permuted_idx: Array | None = None,
    expert_scale_factor: Array | None = None,
    shared_expert_output: Array | None = None,
    block_quant_group_size: int | None = None,
    weight_bias: float = 0.0,
    *,
    moe_finalize_backend: str = "trtllm",
) -> Any:
    """The sum of all ranks' inputs, and what the pattern makes of it.

    input: float16, bfloat16 or float32 [T, H]; kMoEFinalizeARResidualRMSNorm: permuted rows
        [rows, H]. workspace: create_allreduce_fusion_workspace(). pattern: AllReduceFusionPattern.
    output, residual_in, residual_out, norm_out: [T, H] of the input's type. rms_gamma: [H].
    quant_out: memory for T * H codes of one byte, or half as many bytes for FP4. scale_out: memory
        for the scales of layout_code (FP4); float32 [T, 1] (dynamic FP8); int32 [T, words] with
        adjacent rows, of block_quant_group_size columns a scale (packed FP8).
    scale_factor: float32 [1], or a number: the decode scale of FP8, the encode scale of FP4.
    rms_eps, weight_bias: of the norm. layout_code: QuantizationSFLayout; default: 128x4.
    use_oneshot: default: by size. fp32_acc: sums are rounded once, not after each addition.
    launch_with_pdl, trigger_completion_at_end: programmatic launches on a GPU.
    moe_reduction_active_experts_token_input, moe_reduction_scale_input, moe_reduction_token_input,
        moe_reduction_device_num_experts: trtllm_moe_allreduce_fusion(). shared_expert_output,
        expanded_idx_to_permuted_idx, expert_scale_factor: trtllm_moe_finalize_allreduce_fusion().
    moe_finalize_backend: trtllm.
    Returns norm_out, else quant_out, else the sum. Outputs of rows and codes that a pattern writes
    are made where they are missing, but for dynamic FP8 and the MoE reduction.
    """
    if not isinstance(workspace, AllReduceFusionWorkspace):
        raise TypeError(
            f"workspace: expected an AllReduceFusionWorkspace, got {type(workspace).__name__}"
        )
    _check_finalize_backend("moe_finalize_backend", moe_finalize_backend)
    name = _pattern_name("pattern", pattern)
    moe = {"moe_reduction_device_num_experts": moe_reduction_device_num_experts,
           "moe_reduction_scale_input": moe_reduction_scale_input,
           "moe_reduction_active_experts_token_input": moe_reduction_active_experts_token_input,
           "moe_reduction_token_input": moe_reduction_token_input,
           "expanded_idx_to_permuted_idx": expanded_idx_to_permuted_idx,
           "expert_scale_factor": expert_scale_factor,
           "shared_expert_output": shared_expert_output}  # fmt: skip
    _check_moe_arguments(name, {**moe, "residual_in": residual_in, "rms_gamma": rms_gamma})
    options = _launch_options(launch_with_pdl, trigger_completion_at_end, rms_eps, weight_bias)
    maker = maker_of("input", input)
    if name == "moe_reduction":
        assert residual_in is not None
        shape = tuple(residual_in.shape)
        _moe_reduction(workspace, shape, {**moe, "residual_in": residual_in, "gamma": rms_gamma},
                       {"ar_out": output, "residual_out": residual_out, "norm_out": norm_out},
                       (quant_out, scale_out, scale_factor, layout_code), options,
                       _UNIFIED_NAMES)  # fmt: skip
        given = (norm_out, quant_out, residual_out, output)
        return next(array for array in given if array is not None)
    if name == "moe_finalize":
        assert residual_in is not None
        like = residual_in
        norm_out = maker.empty(like.shape, like.dtype) if norm_out is None else norm_out
        residual_out = maker.empty(like.shape, like.dtype) if residual_out is None else residual_out
        _moe_finalize(workspace, {**moe, "permuted_rows": input, "residual_in": residual_in,
                                  "gamma": rms_gamma},
                      {"ar_out": output, "residual_out": residual_out, "norm_out": norm_out},
                      (quant_out, scale_out, scale_factor, layout_code), options,
                      _UNIFIED_NAMES)  # fmt: skip
        return norm_out
    shape = tuple(input.shape)
    if len(shape) != 2:
        raise ValueError(f"input: expected [token_num, hidden_dim], got shape {shape}")
    quantization = settings_of(name, {}).quantization
    if name not in _DYNAMIC:
        if name == "allreduce":
            output = maker.empty(shape, input.dtype) if output is None else output
        elif residual_out is None:
            residual_out = maker.empty(shape, input.dtype)
        if norm_out is None and (name == "residual_rmsnorm" or name.startswith("norm_")):
            norm_out = maker.empty(shape, input.dtype)
        if quant_out is None and quantization != "none":
            width = shape[1] // 2 if quantization == "nvfp4" else shape[1]
            codes = maker.empty((shape[0], width), "uint8")
            quant_out = codes if quantization == "nvfp4" else as_type(codes, "float8_e4m3fn")
    options |= {"algorithm": _algorithm(use_oneshot),
                "accumulate": "float32" if fp32_acc else "element"}  # fmt: skip
    _reduce(workspace, name, (shape[0], shape[1]),
            {"input": input, "residual_in": residual_in, "gamma": rms_gamma},
            {"ar_out": output, "residual_out": residual_out, "norm_out": norm_out,
             "quant_out": quant_out, "scale_out": scale_out},
            options, scale_factor, layout_code, block_quant_group_size, _UNIFIED_NAMES)  # fmt: skip
    return next(array for array in (norm_out, quant_out, output) if array is not None)


def _check_moe_arguments(name: str, given: Mapping[str, Any]) -> None:
    """ValueError for what a pattern needs and has not, or has and would not read."""
    needed = {
        "moe_reduction": ("moe_reduction_device_num_experts", "moe_reduction_scale_input",
                          "moe_reduction_active_experts_token_input", "moe_reduction_token_input"),
        "moe_finalize": ("expanded_idx_to_permuted_idx",),
    }.get(name, ())  # fmt: skip
    others = {"moe_finalize": ("expert_scale_factor", "shared_expert_output")}.get(name, ())
    norm = ("residual_in", "rms_gamma")
    for argument in (*needed, *(norm if needed else ())):
        if given[argument] is None:
            raise ValueError(f"{argument}: pattern {name} needs it, got None")
    for argument, value in given.items():
        if value is not None and argument not in (*needed, *others, *norm):
            raise ValueError(f"{argument}: pattern {name} does not read it; leave it out")


def _check_finalize_backend(argument: str, backend: str) -> None:
    if backend == "cake":
        refuse(argument, backend, "it is for Blackwell; leave it at 'trtllm'")
    if backend != "trtllm":
        raise ValueError(f"{argument}: expected trtllm, got {backend!r}")


def _moe_reduction(
    workspace: AllReduceFusionWorkspace, shape: tuple[int, ...], given: Mapping[str, Any],
    outputs: Mapping[str, Any], quantized: tuple[Any, Any, Any, Any], options: dict[str, Any],
    names: Mapping[str, str],
) -> None:  # fmt: skip
    """given: arguments with upstream's names, residual_in and gamma. quantized: quant_out,
    scale_out, scale_factor, layout_code."""
    rows = given["moe_reduction_active_experts_token_input"]
    count = given["moe_reduction_device_num_experts"]
    size = prod(shape)
    experts = prod(rows.shape) // size if size else 0
    rows = _viewed("moe_reduction_active_experts_token_input", rows, (experts, *shape))
    scales = _viewed("moe_reduction_scale_input", given["moe_reduction_scale_input"],
                     (experts, shape[0]))  # fmt: skip
    if isinstance(count, Integral):
        number = int(count)
        if not 0 < number <= experts and size:
            raise ValueError(f"moe_reduction_device_num_experts: expected 1 to {experts}, which "
                             f"have rows, got {number}")  # fmt: skip
        rows, scales, count = rows[:number], scales[:number], None
    moe = {"expert_rows": rows, "expert_scales": scales, "num_experts": count,
           "token_input": _viewed("moe_reduction_token_input", given["moe_reduction_token_input"],
                                  shape)}  # fmt: skip
    _run_moe("moe_reduction", workspace, shape, given, moe, outputs, quantized, options, names)


def _moe_finalize(
    workspace: AllReduceFusionWorkspace, given: Mapping[str, Any], outputs: Mapping[str, Any],
    quantized: tuple[Any, Any, Any, Any], options: dict[str, Any], names: Mapping[str, str],
) -> None:  # fmt: skip
    """As _moe_reduction()."""
    shape = tuple(given["residual_in"].shape)
    moe = {"permuted_rows": given["permuted_rows"],
           "slot_to_row": given["expanded_idx_to_permuted_idx"],
           "slot_weights": given["expert_scale_factor"],
           "shared_expert": _viewed("shared_expert_output", given["shared_expert_output"],
                                    shape)}  # fmt: skip
    _run_moe("moe_finalize", workspace, shape, given, moe, outputs, quantized, options, names)


def _run_moe(
    name: str, workspace: AllReduceFusionWorkspace, shape: tuple[int, ...],
    given: Mapping[str, Any], moe: Mapping[str, Any], outputs: Mapping[str, Any],
    quantized: tuple[Any, Any, Any, Any], options: dict[str, Any], names: Mapping[str, str],
) -> None:  # fmt: skip
    quant_out, scale_out, scale_factor, layout_code = quantized
    written = {key: _viewed(names.get(key, key), value, shape) for key, value in outputs.items()}
    quantization, scale = "none", None
    # Upstream adds element by element, and has no argument for it.
    options = {**options, "accumulate": "element"}
    if quant_out is not None:
        quantization, layout = "nvfp4", _layout(layout_code)
        scale = _scale(scale_factor, given["residual_in"])
        options["scale_layout"] = layout
        written |= _quantized(quantization, (shape[0], shape[-1]), quant_out, scale_out, layout)
    residual = _viewed("residual_in", given["residual_in"], shape)
    _use(workspace, name,
         ({"residual_in": residual, "gamma": given["gamma"], "global_scale": scale}, moe, written),
         options, names, quantization)  # fmt: skip


@accepts("allreduce_in")
def trtllm_allreduce_fusion(
    allreduce_in: Array,
    world_size: int,
    world_rank: int,
    token_num: int,
    hidden_dim: int,
    workspace_ptrs: Array,
    launch_with_pdl: bool,
    trigger_completion_at_end: bool,
    fp32_acc: bool,
    pattern_code: int,
    use_oneshot: bool | None,
    allreduce_out: Array | None,
    residual_in: Array | None,
    residual_out: Array | None,
    norm_out: Array | None,
    quant_out: Array | None,
    scale_out: Array | None,
    rms_gamma: Array | None,
    rms_eps: float | None,
    scale_factor: Array | float | None,
    layout_code: int | None,
    metadata: dict[str, Any] | None = None,
    block_quant_group_size: int | None = None,
    weight_bias: float | None = None,
) -> None:
    """As allreduce_fusion(), of tensors of any shapes with token_num * hidden_dim elements.

    allreduce_in, allreduce_out: its input and output. pattern_code: its pattern. All outputs that
    the pattern writes must be given. world_size, world_rank: those of the workspace.
    workspace_ptrs: the workspace_tensor of trtllm_create_ipc_workspace_for_all_reduce_fusion() or
    of an AllReduceFusionWorkspace. metadata: not read; the workspace has its own.
    """
    workspace = workspace_of("workspace_ptrs", workspace_ptrs, world_size, world_rank)
    name = _pattern_name("pattern_code", pattern_code)
    if name.startswith("moe"):
        raise ValueError(f"pattern_code: {pattern_code!r} has a function of its own")
    if rms_eps is None and name != "allreduce":
        raise ValueError("rms_eps: expected a number, got None")
    options = _launch_options(launch_with_pdl, trigger_completion_at_end, rms_eps, weight_bias)
    options |= {"algorithm": _algorithm(use_oneshot),
                "accumulate": "float32" if fp32_acc else "element"}  # fmt: skip
    _reduce(workspace, name, (token_num, hidden_dim),
            {"input": allreduce_in, "residual_in": residual_in, "gamma": rms_gamma},
            {"ar_out": allreduce_out, "residual_out": residual_out, "norm_out": norm_out,
             "quant_out": quant_out, "scale_out": scale_out},
            options, scale_factor, layout_code, block_quant_group_size, _TRTLLM_NAMES)  # fmt: skip


@accepts("residual_in", "moe_reduction_active_experts_token_input", "moe_reduction_scale_input",
         "moe_reduction_token_input")  # fmt: skip
def trtllm_moe_allreduce_fusion(
    world_size: int,
    world_rank: int,
    token_num: int,
    hidden_dim: int,
    workspace_ptrs: Array,
    launch_with_pdl: bool,
    residual_in: Array,
    rms_gamma: Array,
    rms_eps: float,
    scale_factor: Any,
    moe_reduction_device_num_experts: Any,
    moe_reduction_scale_input: Array,
    moe_reduction_active_experts_token_input: Array,
    moe_reduction_token_input: Array,
    layout_code: int | None,
    moe_allreduce_out: Array | None,
    residual_out: Array | None,
    norm_out: Array | None,
    quant_out: Array | None,
    scale_out: Array | None,
    weight_bias: float | None = None,
    *,
    backend: str = "trtllm",
) -> None:
    """The experts' rows, scaled and summed over experts and ranks, then the norm.

    moe_reduction_active_experts_token_input: float16 or bfloat16 [X, T, H], T: token_num, H:
        hidden_dim. moe_reduction_scale_input: float32 [X, T]. moe_reduction_token_input: [T, H],
        added once. moe_reduction_device_num_experts: how many of the X count, a number or int32 [1]
        where the rows lie.
    residual_in, moe_allreduce_out, residual_out, norm_out: [T, H] of the rows' type; rms_gamma [H].
    quant_out, scale_out, scale_factor, layout_code: FP4, as allreduce_fusion() has it.
    rms_eps, weight_bias, launch_with_pdl: allreduce_fusion(). backend: trtllm.
    world_size, world_rank, workspace_ptrs: trtllm_allreduce_fusion().
    """
    _check_finalize_backend("backend", backend)
    workspace = workspace_of("workspace_ptrs", workspace_ptrs, world_size, world_rank)
    given = {"residual_in": residual_in, "gamma": rms_gamma,
             "moe_reduction_device_num_experts": moe_reduction_device_num_experts,
             "moe_reduction_scale_input": moe_reduction_scale_input,
             "moe_reduction_active_experts_token_input": moe_reduction_active_experts_token_input,
             "moe_reduction_token_input": moe_reduction_token_input}  # fmt: skip
    outputs = {"ar_out": moe_allreduce_out, "residual_out": residual_out, "norm_out": norm_out}
    _moe_reduction(workspace, (token_num, hidden_dim), given, outputs,
                   (quant_out, scale_out, scale_factor, layout_code),
                   _launch_options(launch_with_pdl, True, rms_eps, weight_bias),
                   _REDUCTION_NAMES)  # fmt: skip


@accepts("allreduce_in", "residual_in", "expanded_idx_to_permuted_idx")
def trtllm_moe_finalize_allreduce_fusion(
    allreduce_in: Array,
    residual_in: Array,
    norm_weight: Array,
    expanded_idx_to_permuted_idx: Array,
    norm_out: Array | None,
    residual_out: Array | None,
    quant_out: Array | None,
    scale_out: Array | None,
    workspace_ptrs: Array,
    launch_with_pdl: bool,
    world_rank: int,
    world_size: int,
    eps: float,
    shared_expert_output: Array | None,
    expert_scale_factor: Array | None,
    routed_scaling_factor: float | None,
    weight_bias: float | None = None,
    *,
    backend: str = "trtllm",
    scale_factor: Any = None,
) -> None:
    """The weighted sum of each token's rows, summed over ranks, then the norm.

    allreduce_in: float16 or bfloat16 [rows, H]. expanded_idx_to_permuted_idx: int32 [T, k], -1 for
        a slot of another rank. expert_scale_factor: float32 or of the rows' type, [T, k].
        shared_expert_output: [T, H], added after routed_scaling_factor.
    residual_in, residual_out, norm_out: [T, H] of the rows' type. norm_weight: [H].
    quant_out, scale_out: FP4, as allreduce_fusion() has it, with scales in 128x4. scale_factor: the
        encode scale, which quant_out needs.
    eps, weight_bias: of the norm. launch_with_pdl: allreduce_fusion(). backend: trtllm.
    workspace_ptrs, world_rank, world_size: trtllm_allreduce_fusion().
    """
    _check_finalize_backend("backend", backend)
    workspace = workspace_of("workspace_ptrs", workspace_ptrs, world_size, world_rank)
    given = {"residual_in": residual_in, "gamma": norm_weight, "permuted_rows": allreduce_in,
             "expanded_idx_to_permuted_idx": expanded_idx_to_permuted_idx,
             "expert_scale_factor": expert_scale_factor,
             "shared_expert_output": shared_expert_output}  # fmt: skip
    options = _launch_options(launch_with_pdl, True, eps, weight_bias)
    if routed_scaling_factor is not None:
        options["routed_scaling"] = float(routed_scaling_factor)
    _moe_finalize(workspace, given, {"residual_out": residual_out, "norm_out": norm_out},
                  (quant_out, scale_out, scale_factor, None), options, _FINALIZE_NAMES)  # fmt: skip


def compute_fp4_swizzled_layout_sf_size(total_row: int, total_column: int) -> int:
    """Bytes of the swizzled 128x4 layout of scales [total_row, total_column]."""
    return _swizzled_bytes(total_row, total_column, "swizzled_128x4")
