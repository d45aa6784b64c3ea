"""FlashInfer's trtllm_* Mixture-of-Experts functions, on a MoeLayer.

Weights come shuffled as those kernels want them (moe spec 7); they are put back into canonical
order once, when a layer is prepared.
"""

from __future__ import annotations

from typing import Any

import narrowfloat as nf
from narrowfloat.compat.flashinfer._arguments import accepts
from narrowfloat.compat.flashinfer._arrays import Array, contiguous, dtype_name, refuse, swap_last
from narrowfloat.compat.flashinfer.tllm_enums import (
    ActivationType,
    Fp8QuantizationType,
    WeightLayout,
)
from narrowfloat.compat.flashinfer._errors import CheckError
from narrowfloat.compat.flashinfer._layers import (
    TRTLLM_PARAMETERS,
    UNROUTED,
    Run,
    Shape,
    activation_of,
    axes_of,
    check_valid_sizes,
    each,
    is_gated,
    parameters_of,
    plain_bytes,
    prepared,
    step_limit,
)
from narrowfloat.compat.flashinfer._layouts import (
    undo_block_layout,
    unprepare,
    unprepare_scales,
)


def _canonical(
    argument: str, weights: Any, layout: int, block: int, shuffled: bool, interleaved: bool
) -> Any:
    """[experts, rows, cols] in canonical order."""
    if int(layout) not in list(WeightLayout):
        raise ValueError(f"weight_layout: expected a WeightLayout, got {layout!r}")
    if int(layout) == WeightLayout.MajorMn:
        raise NotImplementedError(
            "weight_layout: MajorMn is not offered; MajorK and BlockMajorK are"
        )
    is_blocked = int(layout) == WeightLayout.BlockMajorK
    axes_of(argument, weights, 4 if is_blocked else 3)
    if is_blocked:
        weights = undo_block_layout(weights)
    return contiguous(unprepare(weights, block, interleaved, argument) if shuffled else weights)


def _check_lora(gemm1_lora_delta: Any) -> None:
    refuse("gemm1_lora_delta", gemm1_lora_delta, "add it to the bias of a layer")


def _bf16(run: Run, shape: Shape, gemm1: Any, gemm2: Any, shuffled: bool, layout: int, kind: int,
          parameters: tuple[Any, Any, Any]) -> Any:  # fmt: skip
    if dtype_name(run.hidden) not in ("bfloat16", "uint16"):  # uint16: its bits, without ml_dtypes.
        raise CheckError(f"hidden_states: expected BF16, got {dtype_name(run.hidden)}")

    def build() -> nf.MoeLayer:
        gated = is_gated(kind)
        w1 = _canonical("gemm1_weights", gemm1, layout, 32, shuffled, gated and shuffled)
        w2 = _canonical("gemm2_weights", gemm2, layout, 32, shuffled, False)
        config = shape.config(
            run.logits is not None, hidden=run.hidden.shape[1],
            activation=activation_of(kind, parameters_of(*parameters), TRTLLM_PARAMETERS),
        )  # fmt: skip
        return nf.MoeLayer.prepare(w1, w2, config)

    facts = ("bf16", shape, run.logits is None, run.hidden.shape[1], shuffled, int(layout),
             int(kind))  # fmt: skip
    layer = prepared("gemm1_weights", (gemm1, gemm2, *parameters), facts, build)
    return run.on(layer)


@accepts()
def trtllm_bf16_moe(
    routing_logits: Array, routing_bias: Array | None, hidden_states: Array, gemm1_weights: Array,
    gemm2_weights: Array, num_experts: int, top_k: int, n_group: int | None, topk_group: int | None,
    intermediate_size: int, local_expert_offset: int, local_num_experts: int,
    routed_scaling_factor: float | None = None, routing_method_type: int = 0,
    use_shuffled_weight: bool = True, weight_layout: int = 2, do_finalize: bool = True,
    enable_pdl: bool | None = True, tune_max_num_tokens: int = 8192, activation_type: int = 3,
    norm_topk_prob: bool = True, routing_replay_out: Array | None = None,
    gemm1_alpha: Array | None = None, gemm1_beta: Array | None = None,
    gemm1_clamp_limit: Array | None = None, output: Array | None = None,
) -> Any:  # fmt: skip
    """bfloat16 weights and activations: bfloat16 [T, H].

    routing_logits: float32, bfloat16 or float16 [T, E].
    routing_bias: float32 or bfloat16 [E]; None for methods that have none.
    hidden_states: bfloat16 [T, H].
    gemm1_weights: bfloat16 [EL, F1, H], or [EL, H / 64, F1, 64] in BlockMajorK; F1 is 2 * I for
        gated activations, else I.
    gemm2_weights: bfloat16 [EL, H, I], or [EL, I / 64, H, 64].
    num_experts, top_k, intermediate_size: E, k, I; ints.
    n_group, topk_group, routed_scaling_factor, norm_topk_prob: narrowfloat.route(); int, int,
        float, bool.
    local_expert_offset, local_num_experts: first and number EL of the experts here; ints.
    routing_method_type, activation_type: RoutingMethodType, ActivationType.
    use_shuffled_weight: rows are in the order of shuffle_matrix_a(). weight_layout: WeightLayout.
    do_finalize: False gives [rows bfloat16 [>= T * k, H], weights bfloat16 [T, k], rows of
        slots int32 [T * k], -1 for experts elsewhere] instead; k counts shared experts.
    enable_pdl, tune_max_num_tokens: change nothing.
    routing_replay_out: int16 [>= T, k], written to. output: bfloat16 [T, H], written to.
    gemm1_alpha, gemm1_beta, gemm1_clamp_limit: float32 [EL] of the activation; or None.
    """
    shape = Shape(num_experts, top_k, n_group, topk_group, intermediate_size, local_expert_offset,
                  local_num_experts, routed_scaling_factor, routing_method_type,
                  norm_topk_prob)  # fmt: skip
    run = Run("trtllm_bf16_moe", hidden_states, logits=routing_logits,
              bias=shape.bias(routing_bias), do_finalize=do_finalize, output=output,
              replay=routing_replay_out)  # fmt: skip
    return _bf16(run, shape, gemm1_weights, gemm2_weights, use_shuffled_weight, weight_layout,
                 activation_type, (gemm1_alpha, gemm1_beta, gemm1_clamp_limit))  # fmt: skip


@accepts()
def trtllm_bf16_routed_moe(
    topk_ids: Array | tuple[Array, Array], hidden_states: Array, gemm1_weights: Array,
    gemm2_weights: Array, num_experts: int, top_k: int, n_group: int | None, topk_group: int | None,
    intermediate_size: int, local_expert_offset: int, local_num_experts: int,
    routed_scaling_factor: float | None = None, routing_method_type: int = 0,
    use_shuffled_weight: bool = True, weight_layout: int = 2, do_finalize: bool = True,
    enable_pdl: bool | None = True, gemm1_lora_delta: None = None, tune_max_num_tokens: int = 8192,
    activation_type: int = 3, routing_replay_out: Array | None = None,
    gemm1_alpha: Array | None = None, gemm1_beta: Array | None = None,
    gemm1_clamp_limit: Array | None = None, output: Array | None = None,
) -> Any:  # fmt: skip
    """As trtllm_bf16_moe() of a given routing.

    topk_ids: int32 [T, k] of id << 16 | bfloat16 weight; or (int32 ids [T, k], bfloat16 or float32
        weights [T, k]).
    gemm1_lora_delta: None.
    """
    _check_lora(gemm1_lora_delta)
    shape = Shape(num_experts, top_k, n_group, topk_group, intermediate_size, local_expert_offset,
                  local_num_experts, routed_scaling_factor, UNROUTED)  # fmt: skip
    run = Run("trtllm_bf16_routed_moe", hidden_states, topk_ids=topk_ids, do_finalize=do_finalize,
              output=output, replay=routing_replay_out)  # fmt: skip
    return _bf16(run, shape, gemm1_weights, gemm2_weights, use_shuffled_weight, weight_layout,
                 activation_type, (gemm1_alpha, gemm1_beta, gemm1_clamp_limit))  # fmt: skip


def _scalars(kind: int, folded: Any, gate: Any) -> dict[str, Any]:
    """Factors of the two halves of the first matrix and of the intermediate."""
    if is_gated(kind) and int(kind) != 10:
        return {"up_scale": folded, "gate_scale": gate, "inter_multiplier": 1.0}
    gate_scale = gate if is_gated(kind) else None
    return {"up_scale": gate, "gate_scale": gate_scale, "inter_multiplier": folded}


def _fp8_per_tensor(run: Run, shape: Shape, weights: tuple[Any, ...], kind: int,
                    weight_on_input: bool, clamp: Any) -> Any:  # fmt: skip
    gemm1, gemm2 = weights[0], weights[3]
    if clamp is not None and int(kind) != ActivationType.SwigluStep:
        raise ValueError(
            "gemm1_clamp_limit: FP8 per-tensor gemm1_clamp_limit is supported for "
            f"ActivationType.SwigluStep only; expected None with activation_type {kind}"
        )

    def build() -> nf.MoeLayer:
        w1 = _canonical("gemm1_weights", gemm1, WeightLayout.MajorK, 32, True, is_gated(kind))
        w2 = _canonical("gemm2_weights", gemm2, WeightLayout.MajorK, 32, True, False)
        folded, gate, output2 = (
            each(name, value, gemm1.shape[0], gemm1) for name, value in (
                ("output1_scales_scalar", weights[1]), ("output1_scales_gate_scalar", weights[2]),
                ("output2_scales_scalar", weights[4])
            )
        )
        limits = {"limit_up": step_limit(kind, folded, gate)}
        if clamp is not None:  # In units of the accumulator.
            raw = each("gemm1_clamp_limit", clamp, gemm1.shape[0], gemm1)
            limits = {"limit_gate": raw * gate, "limit_up": raw * folded}
        config = shape.config(
            run.logits is not None, hidden=run.hidden.shape[1], mode="fp8_tensor",
            weight_on_input=weight_on_input,
            activation=activation_of(kind, limits, TRTLLM_PARAMETERS),
        )  # fmt: skip
        return nf.MoeLayer.prepare(w1, w2, config, down_scale=output2,
                                   **_scalars(kind, folded, gate))  # fmt: skip

    facts = ("fp8", shape, run.logits is None, run.hidden.shape[1], int(kind), weight_on_input)
    return run.on(prepared("gemm1_weights", (*weights, clamp), facts, build))


@accepts()
def trtllm_fp8_per_tensor_scale_moe(
    routing_logits: Array, routing_bias: Array | None, hidden_states: Array, gemm1_weights: Array,
    output1_scales_scalar: Array, output1_scales_gate_scalar: Array, gemm2_weights: Array,
    output2_scales_scalar: Array, num_experts: int, top_k: int, n_group: int | None,
    topk_group: int | None, intermediate_size: int, local_expert_offset: int,
    local_num_experts: int, routed_scaling_factor: float | None, use_routing_scales_on_input: bool,
    routing_method_type: int = 0, do_finalize: bool = True, enable_pdl: bool | None = None,
    tune_max_num_tokens: int = 8192, activation_type: int = 3, norm_topk_prob: bool = True,
    routing_replay_out: Array | None = None, output: Array | None = None,
    gemm1_clamp_limit: Array | None = None,
) -> Any:  # fmt: skip
    """float8_e4m3fn weights and activations, a scale for each expert: bfloat16 [T, H].

    routing_logits: float32, bfloat16 or float16 [T, E].
    routing_bias: float32 or bfloat16 [E]; None for methods that have none.
    hidden_states: float8_e4m3fn [T, H].
    gemm1_weights: float8_e4m3fn [EL, F1, H], shuffled; F1 as for trtllm_bf16_moe().
    output1_scales_scalar: float32 [EL], of up rows, times the intermediate's multiplier.
    output1_scales_gate_scalar: float32 [EL], decode scale of gate rows.
    gemm2_weights: float8_e4m3fn [EL, H, I], shuffled.
    output2_scales_scalar: float32 [EL], decode scale of the result.
    gemm1_clamp_limit: float32 [EL]; limits of SwigluStep, each divided by the decode scale of its
        gate rows; default: a limit of 7. (0.7.2.post1.)
    num_experts, top_k, intermediate_size: E, k, I; ints.
    n_group, topk_group, routed_scaling_factor, norm_topk_prob: narrowfloat.route(); int, int,
        float, bool.
    local_expert_offset, local_num_experts: first and number EL of the experts here; ints.
    routing_method_type, activation_type: RoutingMethodType, ActivationType.
    use_routing_scales_on_input: weights multiply the input; k must be 1.
    do_finalize: False gives [rows bfloat16 [>= T * k, H], weights bfloat16 [T, k], rows of
        slots int32 [T * k], -1 for experts elsewhere] instead; k counts shared experts.
    enable_pdl, tune_max_num_tokens: change nothing.
    routing_replay_out: int16 [>= T, k], written to. output: bfloat16 [T, H], written to.
    """
    shape = Shape(num_experts, top_k, n_group, topk_group, intermediate_size, local_expert_offset,
                  local_num_experts, routed_scaling_factor, routing_method_type,
                  norm_topk_prob)  # fmt: skip
    run = Run("trtllm_fp8_per_tensor_scale_moe", hidden_states, logits=routing_logits,
              bias=shape.bias(routing_bias), do_finalize=do_finalize, output=output,
              replay=routing_replay_out)  # fmt: skip
    weights = (gemm1_weights, output1_scales_scalar, output1_scales_gate_scalar, gemm2_weights,
               output2_scales_scalar)  # fmt: skip
    return _fp8_per_tensor(run, shape, weights, activation_type, use_routing_scales_on_input,
                           gemm1_clamp_limit)  # fmt: skip


@accepts()
def trtllm_fp8_per_tensor_scale_routed_moe(
    topk_ids: Array | tuple[Array, Array], routing_bias: Array | None, hidden_states: Array,
    gemm1_weights: Array, output1_scales_scalar: Array, output1_scales_gate_scalar: Array,
    gemm2_weights: Array, output2_scales_scalar: Array, num_experts: int, top_k: int,
    n_group: int | None, topk_group: int | None, intermediate_size: int, local_expert_offset: int,
    local_num_experts: int, routed_scaling_factor: float | None, use_routing_scales_on_input: bool,
    routing_method_type: int = 0, do_finalize: bool = True, enable_pdl: bool | None = None,
    tune_max_num_tokens: int = 8192, activation_type: int = 3,
    routing_replay_out: Array | None = None, output: Array | None = None,
    gemm1_clamp_limit: Array | None = None,
) -> Any:  # fmt: skip
    """As trtllm_fp8_per_tensor_scale_moe() of a given routing.

    topk_ids: int32 [T, k] of id << 16 | bfloat16 weight; or (int32 ids [T, k], bfloat16 or float32
        weights [T, k]).
    routing_bias: not read.
    """
    shape = Shape(num_experts, top_k, n_group, topk_group, intermediate_size, local_expert_offset,
                  local_num_experts, routed_scaling_factor, UNROUTED)  # fmt: skip
    run = Run("trtllm_fp8_per_tensor_scale_routed_moe", hidden_states, topk_ids=topk_ids,
              do_finalize=do_finalize, output=output, replay=routing_replay_out)  # fmt: skip
    weights = (gemm1_weights, output1_scales_scalar, output1_scales_gate_scalar, gemm2_weights,
               output2_scales_scalar)  # fmt: skip
    return _fp8_per_tensor(run, shape, weights, activation_type, use_routing_scales_on_input,
                           gemm1_clamp_limit)  # fmt: skip


def _fp8_block(run: Run, shape: Shape, weights: tuple[Any, ...], shuffled: bool, layout: int,
               quantization: int, kind: int, parameters: tuple[Any, Any, Any],
               biases: tuple[Any, Any] = (None, None)) -> Any:  # fmt: skip
    gemm1, scale1, gemm2, scale2 = weights
    kinds = (Fp8QuantizationType.DeepSeekFp8, Fp8QuantizationType.MxFp8)
    if int(quantization) not in kinds:
        raise ValueError(
            "fp8_quantization_type: expected Fp8QuantizationType.DeepSeekFp8 or "
            f"Fp8QuantizationType.MxFp8, got {quantization}"
        )
    given = [name for name, value in zip(("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit"),
                                         parameters, strict=True) if value is not None]  # fmt: skip
    if given and int(kind) != ActivationType.Swiglu:
        raise ValueError(
            f"{given[0]}: only supported for ActivationType.Swiglu in FP8 block scale MoE, got "
            f"{ActivationType(int(kind)).name}; expected None"
        )
    is_mx = int(quantization) == Fp8QuantizationType.MxFp8
    if is_mx and not shuffled:
        raise ValueError(
            "use_shuffled_weight: MxFp8 takes weights in the order of shuffle_matrix_a() alone; "
            "expected True"
        )
    if shape.num_experts % 4 or shape.num_experts <= shape.top_k:
        raise ValueError(
            f"num_experts: expected a multiple of 4 above top_k {shape.top_k}, got "
            f"{shape.num_experts}"
        )
    hidden, inter = run.hidden.shape[1], shape.intermediate_size
    scale = axes_of("hidden_states_scale", run.hidden_scale, 2)
    run.hidden_scale = plain_bytes(scale) if is_mx else swap_last(scale)

    def build() -> nf.MoeLayer:
        config = shape.config(
            run.logits is not None, hidden=hidden, mode="mxfp8" if is_mx else "fp8_block",
            activation=activation_of(kind, parameters_of(*parameters), TRTLLM_PARAMETERS),
        )  # fmt: skip
        gated = is_mx and is_gated(kind)
        block = 32 if is_mx else 16
        w1 = _canonical("gemm1_weights", gemm1, layout, block, shuffled, gated)
        w2 = _canonical("gemm2_weights", gemm2, layout, block, shuffled, False)
        if w2.shape[1:] != (hidden, inter):
            raise ValueError(f"gemm2_weights: expected {(hidden, inter)} an expert, got {w2.shape}")
        s1, s2 = scale1, scale2
        if is_mx:
            s1 = unprepare_scales(scale1, w1.shape[1], 32, gated)
            s2 = unprepare_scales(scale2, w2.shape[1], 32, False)
        bias1, bias2 = (
            bias if bias is None or not shuffled else contiguous(unprepare(bias, block, half, name))
            for name, bias, half in zip(("gemm1_bias", "gemm2_bias"), biases, (gated, False),
                                        strict=True)
        )  # fmt: skip
        return nf.MoeLayer.prepare(w1, w2, config, w1_scales=s1, w2_scales=s2, bias1=bias1,
                                   bias2=bias2)  # fmt: skip

    facts = ("fp8 block", shape, run.logits is None, hidden, shuffled, int(layout), is_mx,
             int(kind))  # fmt: skip
    layer = prepared("gemm1_weights", (*weights, *parameters, *biases), facts, build)
    return run.on(layer)


@accepts()
def trtllm_fp8_block_scale_moe(
    routing_logits: Array, routing_bias: Array | None, hidden_states: Array,
    hidden_states_scale: Array, gemm1_weights: Array, gemm1_weights_scale: Array,
    gemm2_weights: Array, gemm2_weights_scale: Array, num_experts: int, top_k: int,
    n_group: int | None, topk_group: int | None, intermediate_size: int, local_expert_offset: int,
    local_num_experts: int, routed_scaling_factor: float | None, routing_method_type: int = 0,
    use_shuffled_weight: bool = False, weight_layout: int = 0, do_finalize: bool = True,
    enable_pdl: bool | None = None, tune_max_num_tokens: int = 8192,
    fp8_quantization_type: int = Fp8QuantizationType.DeepSeekFp8,
    num_fused_shared_experts: int | None = None, activation_type: int = 3,
    norm_topk_prob: bool = True, routing_replay_out: Array | None = None,
    gemm1_alpha: Array | None = None, gemm1_beta: Array | None = None,
    gemm1_clamp_limit: Array | None = None, output: Array | None = None,
    valid_hidden_size: int | None = None, valid_intermediate_size: int | None = None, *,
    gemm1_bias: Array | None = None, gemm2_bias: Array | None = None,
) -> Any:  # fmt: skip
    """DeepSeek's block-scaled FP8, or MXFP8: bfloat16 [T, H].

    routing_logits: float32, bfloat16 or float16 [T, E].
    routing_bias: float32 or bfloat16 [E]; None for methods that have none.
    hidden_states: float8_e4m3fn [T, H].
    hidden_states_scale: float32 [H / 128, T]; MxFp8: uint8 [T, H / 32] of UE8M0.
    gemm1_weights: float8_e4m3fn [EL, F1, H], or DeepSeek's in BlockMajorK [EL, H / 128, F1, 128];
        F1 as for trtllm_bf16_moe(); MxFp8: shuffled.
    gemm1_weights_scale: float32 [EL, F1 / 128, H / 128]; MxFp8: uint8 [EL, F1, H / 32], shuffled,
        128x4.
    gemm2_weights: float8_e4m3fn [EL, H, I], or [EL, I / 128, H, 128].
    gemm2_weights_scale: float32 [EL, H / 128, I / 128]; MxFp8: uint8 [EL, H, I / 32].
    num_experts, top_k, intermediate_size: E, k, I; ints.
    n_group, topk_group, routed_scaling_factor, norm_topk_prob: narrowfloat.route(); int, int,
        float, bool.
    local_expert_offset, local_num_experts: first and number EL of the experts here; ints.
    routing_method_type, activation_type: RoutingMethodType, ActivationType.
    use_shuffled_weight: rows are in the order of shuffle_matrix_a(). weight_layout: WeightLayout.
    fp8_quantization_type: DeepSeekFp8 or MxFp8. num_fused_shared_experts: int, after the E experts.
    do_finalize: False gives [rows bfloat16 [>= T * k, H], weights bfloat16 [T, k], rows of
        slots int32 [T * k], -1 for experts elsewhere] instead; k counts shared experts.
    enable_pdl, tune_max_num_tokens: change nothing.
    routing_replay_out: int16 [>= T, k], written to. output: bfloat16 [T, H], written to.
    gemm1_alpha, gemm1_beta, gemm1_clamp_limit: float32 [EL] of the activation; or None.
    valid_hidden_size, valid_intermediate_size: int; H and I, or None: no padding is offered.
    gemm1_bias, gemm2_bias: float32 [EL, F1] and [EL, H] in the order of the weights' rows, or None.
    """
    check_valid_sizes(hidden_states, valid_hidden_size, intermediate_size, valid_intermediate_size)
    shape = Shape(num_experts, top_k, n_group, topk_group, intermediate_size, local_expert_offset,
                  local_num_experts, routed_scaling_factor, routing_method_type, norm_topk_prob,
                  num_fused_shared_experts or 0)  # fmt: skip
    run = Run("trtllm_fp8_block_scale_moe", hidden_states, hidden_states_scale,
              logits=routing_logits, bias=shape.bias(routing_bias), do_finalize=do_finalize,
              output=output, replay=routing_replay_out)  # fmt: skip
    weights = (gemm1_weights, gemm1_weights_scale, gemm2_weights, gemm2_weights_scale)
    return _fp8_block(run, shape, weights, use_shuffled_weight, weight_layout,
                      fp8_quantization_type, activation_type,
                      (gemm1_alpha, gemm1_beta, gemm1_clamp_limit),
                      (gemm1_bias, gemm2_bias))  # fmt: skip


@accepts()
def trtllm_fp8_block_scale_routed_moe(
    topk_ids: Array | tuple[Array, Array], routing_bias: Array | None, hidden_states: Array,
    hidden_states_scale: Array, gemm1_weights: Array, gemm1_weights_scale: Array,
    gemm2_weights: Array, gemm2_weights_scale: Array, num_experts: int, top_k: int,
    n_group: int | None, topk_group: int | None, intermediate_size: int, local_expert_offset: int,
    local_num_experts: int, routed_scaling_factor: float | None, routing_method_type: int = 0,
    use_shuffled_weight: bool = False, weight_layout: int = 0, do_finalize: bool = True,
    enable_pdl: bool | None = None, gemm1_lora_delta: None = None, output: Array | None = None,
    tune_max_num_tokens: int = 8192, fp8_quantization_type: int = Fp8QuantizationType.DeepSeekFp8,
    activation_type: int = 3, gemm1_alpha: Array | None = None, gemm1_beta: Array | None = None,
    gemm1_clamp_limit: Array | None = None, valid_hidden_size: int | None = None,
    valid_intermediate_size: int | None = None,
) -> Any:  # fmt: skip
    """As trtllm_fp8_block_scale_moe() of a given routing.

    topk_ids: int32 [T, k] of id << 16 | bfloat16 weight; or (int32 ids [T, k], bfloat16 or float32
        weights [T, k]).
    routing_bias: not read. gemm1_lora_delta: None.
    """
    _check_lora(gemm1_lora_delta)
    check_valid_sizes(hidden_states, valid_hidden_size, intermediate_size, valid_intermediate_size)
    shape = Shape(num_experts, top_k, n_group, topk_group, intermediate_size, local_expert_offset,
                  local_num_experts, routed_scaling_factor, UNROUTED)  # fmt: skip
    run = Run("trtllm_fp8_block_scale_routed_moe", hidden_states, hidden_states_scale,
              topk_ids=topk_ids, do_finalize=do_finalize, output=output)  # fmt: skip
    weights = (gemm1_weights, gemm1_weights_scale, gemm2_weights, gemm2_weights_scale)
    return _fp8_block(run, shape, weights, use_shuffled_weight, weight_layout,
                      fp8_quantization_type, activation_type,
                      (gemm1_alpha, gemm1_beta, gemm1_clamp_limit))  # fmt: skip


def _refuse_int4() -> Any:
    raise NotImplementedError(
        "gemm1_weights: int4 is not offered; MXFP4 is, in trtllm_fp4_block_scale_moe()"
    )


def trtllm_mxint4_block_scale_moe(
    routing_logits: Any, routing_bias: Any, hidden_states: Any, gemm1_weights: Any,
    gemm1_weights_scale: Any, gemm1_alpha: Any, gemm1_beta: Any, gemm1_clamp_limit: Any,
    gemm2_weights: Any, gemm2_weights_scale: Any, num_experts: int, top_k: int,
    n_group: int | None, topk_group: int | None, intermediate_size: int, local_expert_offset: int,
    local_num_experts: int, routed_scaling_factor: float | None, routing_method_type: int = 0,
    do_finalize: bool = True, enable_pdl: bool | None = None, output: Any = None,
    tune_max_num_tokens: int = 8192, norm_topk_prob: bool = True, routing_replay_out: Any = None,
    valid_hidden_size: int | None = None, valid_intermediate_size: int | None = None,
) -> Any:  # fmt: skip
    """Not offered, whatever the arguments."""
    return _refuse_int4()


def trtllm_mxint4_block_scale_routed_moe(
    topk_ids: Any, hidden_states: Any, gemm1_weights: Any, gemm1_weights_scale: Any,
    gemm1_alpha: Any, gemm1_beta: Any, gemm1_clamp_limit: Any, gemm2_weights: Any,
    gemm2_weights_scale: Any, num_experts: int, top_k: int, n_group: int | None,
    topk_group: int | None, intermediate_size: int, local_expert_offset: int,
    local_num_experts: int, routed_scaling_factor: float | None, routing_method_type: int = 0,
    do_finalize: bool = True, enable_pdl: bool | None = None, gemm1_lora_delta: Any = None,
    output: Any = None, tune_max_num_tokens: int = 8192, valid_hidden_size: int | None = None,
    valid_intermediate_size: int | None = None,
) -> Any:  # fmt: skip
    """Not offered, whatever the arguments."""
    return _refuse_int4()


def hidden_is(array: Any, *names: str) -> bool:
    """Whether the element type is one of these; uint8 stands for the bits of others in NumPy."""
    return dtype_name(array) in names


