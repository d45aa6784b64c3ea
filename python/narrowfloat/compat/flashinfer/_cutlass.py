"""cutlass_fused_moe: weights in canonical rows [up; gate], given routings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import narrowfloat as nf
from narrowfloat._arrays import maker_of
from narrowfloat._shapes import round_up
from narrowfloat.compat.flashinfer._arguments import accepts
from narrowfloat.compat.flashinfer._arrays import (
    Array,
    as_bytes,
    cast,
    contiguous,
    dtype_name,
    move_scales,
    refuse,
)
from narrowfloat.compat.flashinfer.tllm_enums import ActivationType
from narrowfloat.compat.flashinfer._errors import CheckError
from narrowfloat.compat.flashinfer._layers import (
    CUTLASS_PARAMETERS,
    activation_of,
    axes_of,
    each,
    is_gated,
    naming_arguments,
    parameters_of,
    prepared,
    with_known_tiles,
)
from narrowfloat.compat.flashinfer._mixed_input import undo_interleave, undo_scale_interleave
from narrowfloat.compat.flashinfer._workspace import check_moe_backend, given_workspace


@dataclass
class _Plan:
    """How the arguments are read: a mode, canonical weights, factors."""

    mode: str
    w1: Any
    w2: Any
    scales: tuple[Any, Any] = (None, None)
    layout: str = "linear"
    factors: dict[str, Any] | None = None


def _count(quant_scales: Sequence[Any], wanted: int, mode: str) -> None:
    if len(quant_scales) != wanted:
        raise ValueError(f"quant_scales: {mode} has {wanted}, got {len(quant_scales)}")


def _scale(value: Any, fc1: Any) -> Any:
    return each("quant_scales", value, fc1.shape[0], fc1)


def _scale_bytes(scales: Any, experts: int) -> Any:
    """Packed int32 scales as bytes in layout 128x4."""
    return as_bytes(scales).reshape(experts, -1)


def _packed(weights: Any) -> Any:
    """Two codes a byte of weights that are typed int64."""
    return as_bytes(weights)


def _fp8_tensor(fc1: Any, fc2: Any, quant_scales: Sequence[Any]) -> _Plan:
    _count(quant_scales, 4, "FP8 per tensor")
    first, inter, second = (_scale(value, fc1) for value in quant_scales[:3])
    factors = {"up_scale": first, "gate_scale": first, "inter_multiplier": inter,
               "down_scale": second}  # fmt: skip
    return _Plan("fp8_tensor", fc1, fc2, factors=factors)


def _nvfp4(input: Any, fc1: Any, fc2: Any, quant_scales: Sequence[Any]) -> _Plan:
    _count(quant_scales, 6, "NVFP4")
    experts = fc1.shape[0]
    act1, scale1, global1, act2, scale2, global2 = quant_scales
    first, second = _scale(global1, fc1), _scale(global2, fc1)
    factors = {"up_scale": first, "gate_scale": first, "down_scale": second,
               "inter_multiplier": _scale(act2, fc1)}  # fmt: skip
    if dtype_name(input) == "bfloat16":
        multiplier = _scale(act1, fc1)
        size = act1.shape if hasattr(act1, "shape") else ()
        # With one value for all experts a token is quantized once.
        is_one = len(size) == 0 or tuple(size) == (1,)
        factors["input_multiplier"] = float(multiplier[0]) if is_one else multiplier
    scales = _scale_bytes(scale1, experts), _scale_bytes(scale2, experts)
    return _Plan("nvfp4", _packed(fc1), _packed(fc2), scales, "swizzled_128x4", factors)


def _mx(fc1: Any, fc2: Any, quant_scales: Sequence[Any], is_fp4: bool) -> _Plan:
    _count(quant_scales, 4, "MX formats")
    experts = fc1.shape[0]
    first, second = (_scale(quant_scales[i], fc1) for i in (1, 3))
    factors = {"up_scale": first, "gate_scale": first, "down_scale": second}
    scales = _scale_bytes(quant_scales[0], experts), _scale_bytes(quant_scales[2], experts)
    weights = (_packed(fc1), _packed(fc2)) if is_fp4 else (fc1, fc2)
    return _Plan("mxfp4_mxfp8" if is_fp4 else "mxfp8", *weights, scales, "swizzled_128x4", factors)


def _w4a16(fc1: Any, fc2: Any, quant_scales: Sequence[Any]) -> _Plan:
    """MXFP4 as it is interleaved for Hopper's mixed-input kernels."""
    _count(quant_scales, 2, "MXFP4 with bfloat16 rows")
    first, second = (undo_interleave(w) for w in (fc1, fc2))
    scales = [undo_scale_interleave(s, w.shape[1], 2 * w.shape[2])
              for s, w in zip(quant_scales, (first, second), strict=True)]  # fmt: skip
    return _Plan("mxfp4_bf16", first, second, (scales[0], scales[1]))


def _linear(plan: _Plan) -> _Plan:
    """Scales of images with padding as linear ones; an image has all rows of a matrix."""
    experts, rows = plan.w1.shape[:2]
    hidden, width = plan.w2.shape[1], _columns(plan)
    block = 16 if plan.mode == "nvfp4" else 32
    parts = []
    for image, count, cols in zip(plan.scales, (rows, hidden), (hidden, width), strict=True):
        wanted = round_up(count, 128) * round_up(cols // block, 4)
        if image.shape[1] != wanted:
            raise CheckError(
                f"quant_scales: expected {wanted} bytes an expert, the 128x4 image of {count} x "
                f"{cols // block} scales, got {image.shape[1]}"
            )
        linear = move_scales(image, count, cols // block, experts, plan.layout, "linear")
        parts.append(linear.reshape(experts, count, -1))
    return replace(plan, scales=(parts[0], parts[1]), layout="linear")


def _mxfp4_fp8(fc1: Any, fc2: Any, quant_scales: Sequence[Any]) -> _Plan:
    """MXFP4 with FP8 rows of one scale, which count as MXFP8 rows with scales of 1.

    The intermediate is quantized with scales of its own, so its static one comes out again.
    """
    experts = fc1.shape[0]
    scale1, global1, act2, scale2, global2 = quant_scales
    first, down = _scale(global1, fc1), _scale(global2, fc1) * _scale(act2, fc1)
    factors = {"up_scale": first, "gate_scale": first, "down_scale": down}
    scales = _scale_bytes(scale1, experts), _scale_bytes(scale2, experts)
    return _Plan("mxfp4_mxfp8", _packed(fc1), _packed(fc2), scales, "swizzled_128x4", factors)


def _ones(input: Any, hidden: int) -> Any:
    """UE8M0 scales of 1 for each 32 columns of rows."""
    made = maker_of("input", input).empty((input.shape[0], hidden // 32), "uint8")
    made[...] = 127
    return made


def _refuse_mxfp8(mxfp8_act: bool, beside: str) -> None:
    if mxfp8_act:
        raise ValueError(f"use_mxfp8_act_scaling: expected False with {beside}, got True")


def _plan(input: Any, fc1: Any, fc2: Any, quant_scales: Sequence[Any], deepseek: bool,
          mxfp8_act: bool, w4: bool) -> _Plan:  # fmt: skip
    rows, weights = dtype_name(input), dtype_name(fc1)
    is_fp8 = weights == "float8_e4m3fn"
    if w4 and (rows, weights) == ("bfloat16", "uint8"):
        return _w4a16(fc1, fc2, quant_scales)
    if w4:
        raise NotImplementedError(
            f"use_w4_group_scaling: {weights} weights with {rows} rows are not offered; uint8 "
            "(MXFP4) weights with bfloat16 rows are"
        )
    if deepseek:
        _count(quant_scales, 2, "DeepSeek FP8")
        _refuse_mxfp8(mxfp8_act, "use_deepseek_fp8_block_scale")
        return _Plan("fp8_block", fc1, fc2, tuple(quant_scales))
    if weights == "float16" and rows == "bfloat16":
        fc1, fc2, weights = cast(fc1, "bfloat16"), cast(fc2, "bfloat16"), "bfloat16"
    if weights == "bfloat16" and rows == "bfloat16":
        _count(quant_scales, 0, "bfloat16")
        _refuse_mxfp8(mxfp8_act, "bfloat16 weights")
        return _Plan("bf16", fc1, fc2)
    if mxfp8_act and weights in ("int64", "float8_e4m3fn"):
        return _mx(fc1, fc2, quant_scales, not is_fp8)
    if is_fp8 and rows == "float8_e4m3fn":
        return _fp8_tensor(fc1, fc2, quant_scales)
    if _is_mxfp4_fp8(input, fc1, quant_scales):
        return _mxfp4_fp8(fc1, fc2, quant_scales)
    if weights == "int64" and rows in ("bfloat16", "uint8", "int64"):
        return _nvfp4(input, fc1, fc2, quant_scales)
    raise NotImplementedError(
        f"fc1_expert_weights: {weights} with {rows} rows is not offered; bfloat16, float8_e4m3fn "
        "and int64 (packed FP4) weights with matching rows are, and uint8 (MXFP4) with "
        "use_w4_group_scaling"
    )


def _is_mxfp4_fp8(input: Any, fc1: Any, quant_scales: Sequence[Any]) -> bool:
    """Whether FP4 weights come with FP8 rows of one scale."""
    return (dtype_name(fc1) == "int64" and dtype_name(input) == "float8_e4m3fn"
            and len(quant_scales) == 5)  # fmt: skip


def _input_scales(input: Any, input_sf: Any, hidden: int, mode: str, swizzled: bool) -> Any:
    """Linear uint8 [T, blocks] of the scales of quantized rows."""
    if input_sf is None:
        return None
    tokens, blocks = input.shape[0], hidden // (16 if mode == "nvfp4" else 32)
    if not swizzled:
        return as_bytes(input_sf).reshape(tokens, blocks)
    return move_scales(input_sf, tokens, blocks, 1, "swizzled_128x4", "linear").reshape(
        tokens, blocks
    )


def _check_ranks(tp_size: int, tp_rank: int, ep_size: int, ep_rank: int) -> None:
    for name, rank, size in (("tp_rank", tp_rank, tp_size), ("ep_rank", ep_rank, ep_size)):
        if not 0 <= rank < size:
            raise ValueError(f"{name}: expected 0 to {size - 1}, below {name[:2]}_size, got {rank}")


def _parameters(kind: int, of_swiglu: tuple[Any, Any, Any], situ_beta: Any,
                situ_linear_beta: Any) -> tuple[tuple[Any, Any, Any], dict[str, str]]:  # fmt: skip
    """Alpha, beta and limit of the activation, and what the caller calls them."""
    of_situ = {"situ_beta": situ_beta, "situ_linear_beta": situ_linear_beta}
    if kind == ActivationType.Situ:
        for name, value in zip(("swiglu_alpha", "swiglu_beta", "swiglu_limit"), of_swiglu,
                               strict=True):  # fmt: skip
            if value is not None:
                raise ValueError(f"{name}: Situ does not read it; expected None")
        parameters = (4.0 if situ_beta is None else situ_beta,
                      25.0 if situ_linear_beta is None else situ_linear_beta, None)  # fmt: skip
        return parameters, {"alpha": "situ_beta", "beta": "situ_linear_beta"}
    for name, value in of_situ.items():
        if value is not None:
            raise ValueError(f"{name}: only Situ reads it; expected None")
    return of_swiglu, CUTLASS_PARAMETERS


@accepts()
def cutlass_fused_moe(
    input: Array, token_selected_experts: Array, token_final_scales: Array | None,
    fc1_expert_weights: Array, fc2_expert_weights: Array, output_dtype: Any,
    quant_scales: Sequence[Array] | None, fc1_expert_biases: Array | None = None,
    fc2_expert_biases: Array | None = None, input_sf: Array | None = None,
    swiglu_alpha: Array | None = None, swiglu_beta: Array | None = None,
    swiglu_limit: Array | None = None, tp_size: int = 1, tp_rank: int = 0, ep_size: int = 1,
    ep_rank: int = 0, cluster_size: int = 1, cluster_rank: int = 0, output: Array | None = None,
    enable_alltoall: bool = False, use_deepseek_fp8_block_scale: bool = False,
    use_w4_group_scaling: bool = False, use_mxfp8_act_scaling: bool = False,
    min_latency_mode: bool = False, use_packed_weights: bool = False,
    use_wfp4afp8_humming: bool = False, tune_max_num_tokens: int = 8192,
    enable_pdl: bool | None = None, activation_type: int = ActivationType.Swiglu,
    swizzled_input_sf: bool = True, use_fused_finalize: bool = True, profile_ids: Any = None,
    workspace_buffer: Array | None = None, *, clamped_relu2_limit: Array | None = None,
    situ_beta: float | Array | None = None, situ_linear_beta: float | Array | None = None,
    backend: str = "cutlass",
) -> list[Any]:  # fmt: skip
    """A layer of given routings, with weights in canonical rows [up; gate]: [output [T, H]].

    input: bfloat16 or float8_e4m3fn [T, H]; float16 and float32, rounded to bfloat16, in which such
        layers compute, as are weights of float16; or two FP4 codes a byte, uint8 [T, H / 2].
    token_selected_experts: int32 [T, k], of all experts.
    token_final_scales: float32 [T, k]; None: 1.
    fc1_expert_weights: bfloat16 or float8_e4m3fn [EL, F1, H]; int64 [EL, F1, H / 16] of FP4 codes;
        uint8 [EL, F1, H / 2], interleaved for Hopper (use_w4_group_scaling). EL: of this rank;
        F1 is 2 * I for gated activations, else I.
    fc2_expert_weights: the same, [EL, H, I].
    output_dtype: bfloat16, float16 or float32: a torch.dtype, or its name.
    quant_scales: bfloat16: [] or None.
        FP8: [fc1_dequant float32 [EL], fc2_quant float32 [1] or [EL],
        fc2_dequant float32 [EL], not read].
        DeepSeek: [float32 [EL, F1 / 128, H / 128], float32 [EL, H / 128, I / 128]].
        NVFP4: [fc1_act float32 [1] or [EL], int32 scales, fc1_global float32 [EL], 3 of fc2].
        MXFP4 with FP8 rows of one scale: [int32 scales, fc1_global float32 [EL], fc2_act float32
        [1] or [EL], int32 scales, fc2_global float32 [EL]]; computed as MXFP8.
        MX: [int32 scales, fc1_global float32 [EL], 2 of fc2].
        MXFP4 with bfloat16 rows: [interleaved uint8 scales of both].
    fc1_expert_biases, fc2_expert_biases: float32 or bfloat16 [EL, F1] and [EL, H], or None.
    input_sf: scales of quantized rows, bytes [T, H / 16] or [T, H / 32]. swizzled_input_sf: 128x4.
    swiglu_alpha, swiglu_beta, swiglu_limit: float32 [EL] or None.
    situ_beta, situ_linear_beta: float; default 4 and 25.
    tp_rank: int; fc2_expert_biases count on 0. ep_size, ep_rank: int; whose experts these are.
    output: [T, H] of output_dtype, written to.
    use_deepseek_fp8_block_scale, use_w4_group_scaling, use_mxfp8_act_scaling: bool; see above.
    cluster_size, cluster_rank, min_latency_mode, use_packed_weights, use_wfp4afp8_humming: not
        offered.
    activation_type: ActivationType. clamped_relu2_limit: not offered. backend: "cutlass" or "cake";
        changes nothing.
    workspace_buffer: uint8, cutlass_fused_moe_workspace_size().
    tp_size, enable_alltoall, tune_max_num_tokens, enable_pdl, use_fused_finalize, profile_ids:
        change nothing.
    """
    check_moe_backend(backend)
    refuse("min_latency_mode", min_latency_mode,
           "min latency mode is not implemented upstream either; leave it False")  # fmt: skip
    refuse("clamped_relu2_limit", clamped_relu2_limit, "ActivationType.Relu2 is, without a limit")
    refuse("cluster_size", cluster_size != 1, "leave it 1; ep_size is, for shards of experts")
    refuse("cluster_rank", cluster_rank != 0, "leave it 0; ep_rank is, for shards of experts")
    refuse("use_packed_weights", use_packed_weights, "use_w4_group_scaling is, for MXFP4")
    refuse("use_wfp4afp8_humming", use_wfp4afp8_humming, "use_w4_group_scaling is, for MXFP4")
    _check_ranks(tp_size, tp_rank, ep_size, ep_rank)
    for name, array, axes in (("input", input, 2), ("fc1_expert_weights", fc1_expert_weights, 3),
                              ("fc2_expert_weights", fc2_expert_weights, 3),
                              ("token_selected_experts", token_selected_experts,
                               2)):  # fmt: skip
        axes_of(name, array, axes)
    quant_scales = () if quant_scales is None else tuple(quant_scales)
    if dtype_name(input) in ("float16", "float32"):  # Layers compute in bfloat16.
        input = cast(input, "bfloat16")
    experts, kind = fc1_expert_weights.shape[0], int(activation_type)
    hidden = fc2_expert_weights.shape[1]
    out_type = str(output_dtype).removeprefix("torch.")
    top_k = token_selected_experts.shape[1]
    parameters, names = _parameters(kind, (swiglu_alpha, swiglu_beta, swiglu_limit),
                                    situ_beta, situ_linear_beta)  # fmt: skip

    def build() -> nf.MoeLayer:
        plan = _plan(input, fc1_expert_weights, fc2_expert_weights, quant_scales,
                     use_deepseek_fp8_block_scale, use_mxfp8_act_scaling,
                     use_w4_group_scaling)  # fmt: skip
        if plan.layout != "linear":
            plan = _linear(plan)
        config = nf.MoeConfig(
            hidden=hidden, inter=_columns(plan), experts=ep_size * experts, top_k=top_k,
            mode=plan.mode, expert_offset=ep_rank * experts, local_experts=experts,
            add_fc2_bias=tp_rank == 0, out_dtype=out_type, negative_one_is_empty=True,
            activation=activation_of(kind, parameters_of(*parameters), names, geglu="geglu_erf"),
        )  # fmt: skip
        factors = dict(plan.factors or {})
        if not is_gated(kind):
            factors.pop("gate_scale", None)
        return nf.MoeLayer.prepare(
            contiguous(plan.w1), contiguous(plan.w2), config, w1_scales=plan.scales[0],
            w2_scales=plan.scales[1], scale_layout=plan.layout, bias1=fc1_expert_biases,
            bias2=fc2_expert_biases, **factors,
        )  # fmt: skip

    tensors = (fc1_expert_weights, fc2_expert_weights, *quant_scales, fc1_expert_biases,
               fc2_expert_biases, *parameters)  # fmt: skip
    facts = ("cutlass", out_type, top_k, tp_rank == 0, ep_size, ep_rank, kind, dtype_name(input),
             use_deepseek_fp8_block_scale, use_mxfp8_act_scaling, use_w4_group_scaling)  # fmt: skip
    layer = prepared("fc1_expert_weights", tensors, facts, build)
    rows = input
    if layer.config.mode == "nvfp4" and dtype_name(input) != "bfloat16":
        rows = as_bytes(input)
    space = given_workspace(workspace_buffer)
    with naming_arguments(of_cutlass=True):
        scales = _input_scales(input, input_sf, hidden, layer.config.mode, swizzled_input_sf)
        if not use_mxfp8_act_scaling and _is_mxfp4_fp8(input, fc1_expert_weights, quant_scales):
            scales = _ones(input, hidden)
        arguments = {"ids": token_selected_experts, "weights": token_final_scales,
                     "hidden_scales": scales}  # fmt: skip
        tuned = with_known_tiles("cutlass_fused_moe", layer, rows, arguments)
        if space is None or space.shape[0] >= tuned.required_workspace(rows.shape[0]):
            layer = tuned
        return [layer.run(rows, out=output, workspace=space, **arguments)]


def _columns(plan: _Plan) -> int:
    """I: columns of the second matrix."""
    is_packed = plan.mode in ("nvfp4", "mxfp4_mxfp8", "mxfp4_bf16")
    return plan.w2.shape[2] * (2 if is_packed else 1)
