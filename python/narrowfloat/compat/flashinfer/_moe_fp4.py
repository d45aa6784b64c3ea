"""trtllm_fp4_block_scale_moe: NVFP4 and MXFP4 weights."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import narrowfloat as nf
from narrowfloat.compat.flashinfer._arguments import accepts
from narrowfloat.compat.flashinfer._arrays import Array, as_bytes, as_type, contiguous, refuse
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
    plain_bytes,
    prepared,
    step_limit,
)
from narrowfloat.compat.flashinfer._layouts import unprepare, unprepare_scales
from narrowfloat.compat.flashinfer._moe import hidden_is
from narrowfloat.compat.flashinfer.tllm_enums import SfLayout


@dataclass
class Fp4Weights:
    """The weights of a layer as the caller gives them: shuffled, scalars folded."""

    gemm1: Any
    scale1: Any
    bias1: Any
    alpha: Any
    beta: Any
    limit: Any
    gemm2: Any
    scale2: Any
    bias2: Any
    folded: Any
    gate: Any
    output2: Any

    def tensors(self) -> tuple[Any, ...]:
        """All of them, for the layer's identity."""
        return tuple(vars(self).values())

    def check(self) -> None:
        """Checks the axes of required arrays, and of biases."""
        for name, array in (("gemm1_weights", self.gemm1), ("gemm2_weights", self.gemm2)):
            axes_of(name, array, 3)
        for name, scales, weights in (("gemm1_weights_scale", self.scale1, self.gemm1),
                                      ("gemm2_weights_scale", self.scale2,
                                       self.gemm2)):  # fmt: skip
            _check_scales(name, scales, weights)
        for name, bias, weights in (("gemm1_bias", self.bias1, self.gemm1),
                                    ("gemm2_bias", self.bias2, self.gemm2)):  # fmt: skip
            if bias is None:
                continue
            if tuple(axes_of(name, bias, 2).shape) != tuple(weights.shape[:2]):
                raise ValueError(
                    f"{name}: expected shape {tuple(weights.shape[:2])}, got {tuple(bias.shape)}"
                )

    def scalars(self, is_nvfp4: bool) -> tuple[Any, Any, Any]:
        """float32 [experts] of the three, which MXFP4 may leave out."""
        folded, gate, output2 = (
            each(name, 1.0 if value is None and not is_nvfp4 else value, self.gemm1.shape[0],
                 self.gemm1)
            for name, value in (("output1_scale_scalar", self.folded),
                                ("output1_scale_gate_scalar", self.gate),
                                ("output2_scale_scalar", self.output2))
        )  # fmt: skip
        return folded, gate, output2

    def parameter(self, name: str, value: Any) -> Any:
        """float32 [experts] of one of the activation's; None stays None."""
        return None if value is None else each(name, value, self.gemm1.shape[0], self.gemm1)


def _check_scales(name: str, scales: Any, weights: Any) -> None:
    """CheckError unless they are whole experts' bytes, in any shape.

    Callers give [EL, rows, blocks], or the packed scales as [EL, bytes], or flat.
    """
    shape = None if scales is None else tuple(scales.shape)
    if not shape or prod(shape) % weights.shape[0] or prod(shape) == 0:
        raise CheckError(
            f"{name}: expected the scales of {weights.shape[0]} experts, got "
            f"{shape if scales is not None else None}"
        )


def _is_nvfp4_rows(run: Run, width: int) -> bool:
    """Rows of two codes a byte, of which 16 have a scale; width: bytes of a row of weights."""
    tokens, columns = run.hidden.shape
    if not hidden_is(run.hidden, "uint8") or columns != width:
        return False
    scales = prod(run.hidden_scale.shape)
    if scales not in (tokens * columns // 8, tokens * columns // 16):
        raise ValueError(
            f"hidden_states_scale: expected {tokens * columns // 8} scales of 16 codes, got "
            f"{tuple(run.hidden_scale.shape)}"
        )
    return scales == tokens * columns // 8


def _mode(run: Run, weights: Fp4Weights, is_per_token: bool) -> str:
    """Format detection of the entry point."""
    elements = 2 * prod(weights.gemm1.shape)
    is_nvfp4 = elements // prod(weights.scale1.shape) <= 16
    if is_per_token and not is_nvfp4:
        raise ValueError("per_token_scale: NVFP4 rows have it, MXFP4 weights take no such rows")
    if run.hidden_scale is None:
        if is_nvfp4 or not hidden_is(run.hidden, "bfloat16"):
            raise NotImplementedError(
                "hidden_states_scale: without it MXFP4 weights and bfloat16 rows are offered"
            )
        return "mxfp4_bf16"
    if _is_nvfp4_rows(run, weights.gemm1.shape[2]) != is_nvfp4:
        raise NotImplementedError(
            "hidden_states: NVFP4 rows with NVFP4 weights, and MXFP8 or bfloat16 rows with MXFP4 "
            "weights are offered"
        )
    if not is_nvfp4:
        return "mxfp4_mxfp8"
    return "nvfp4_per_token" if is_per_token else "nvfp4"


def _check_scale_layout(layout: SfLayout | None) -> None:
    """NotImplementedError, as upstream, for scales of rows that are not linear."""
    if layout is not None and int(layout) != SfLayout.layout_linear:
        raise NotImplementedError(
            f"hidden_states_scale_layout: expected layout_linear, got {SfLayout(layout).name}"
        )


def _real(values: Any, factor: Any, rows: slice | None = None) -> Any:
    """values * factor of each expert, of some columns where `rows` says so; None stays None."""
    if values is None:
        return None
    if len(values.shape) == 1:
        return values * factor
    if rows is None:
        return values * factor[:, None]
    return values[:, rows] * factor[:, None]


def _each_expert(scales: Any, weights: Any) -> Any:
    """Scales of any shape as bytes [experts, bytes]."""
    return as_bytes(scales).reshape(weights.shape[0], -1)


def _build(run: Run, shape: Shape, weights: Fp4Weights, mode: str, kind: int) -> nf.MoeLayer:
    gated = is_gated(kind)
    f1 = weights.gemm1.shape[1]
    w1 = contiguous(unprepare(as_type(weights.gemm1, "uint8"), 32, gated, "gemm1_weights"))
    w2 = contiguous(unprepare(as_type(weights.gemm2, "uint8"), 32, False, "gemm2_weights"))
    folded, gate, output2 = weights.scalars(mode.startswith("nvfp4"))
    one_half = gated and int(kind) != 10  # One half stays linear: the fold is in up's factor.
    up = folded if one_half else gate
    factors = {"up_scale": up, "gate_scale": gate if gated else None, "down_scale": output2}
    if not one_half:
        if mode == "nvfp4":
            factors["inter_multiplier"] = folded
        else:  # Scales of the intermediate are dynamic: the factor comes out again.
            factors["down_scale"] = output2 * folded
    bias1, bias2 = weights.bias1, weights.bias2
    if bias1 is not None:
        bias1 = unprepare(bias1, 32, gated)
        half = f1 // 2 if gated else f1
        scaled = contiguous(bias1 * gate[:, None])
        scaled[:, :half] = _real(bias1, up, slice(0, half))
        bias1 = scaled
    if bias2 is not None:
        bias2 = _real(unprepare(bias2, 32, False), output2)
    beta = weights.parameter("gemm1_beta", weights.beta)
    limit = weights.parameter("gemm1_clamp_limit", weights.limit)
    parameters = {
        "alpha": weights.parameter("gemm1_alpha", weights.alpha),
        "beta": _real(beta, up) if one_half else beta,
        "limit_gate": _real(limit, gate),
        "limit_up": step_limit(kind, up, gate) if limit is None else _real(limit, up),
    }
    config = shape.config(
        run.logits is not None,
        hidden=w2.shape[1],
        mode=mode,
        activation=activation_of(kind, parameters, TRTLLM_PARAMETERS),
    )  # fmt: skip
    return nf.MoeLayer.prepare(
        w1,
        w2,
        config,
        w1_scales=unprepare_scales(_each_expert(weights.scale1, w1), f1, 32, gated),
        w2_scales=unprepare_scales(_each_expert(weights.scale2, w2), w2.shape[1], 32, False),
        bias1=bias1,
        bias2=bias2,
        **factors,
    )


def _fp4(run: Run, shape: Shape, weights: Fp4Weights, kind: int, is_list: bool = True) -> list[Any]:
    if run.row_scale is not None and (weights.bias1 is not None or weights.bias2 is not None):
        raise NotImplementedError("per_token_scale: not offered together with a bias")
    weights.check()
    mode = _mode(run, weights, run.row_scale is not None)
    run.hidden_scale = plain_bytes(run.hidden_scale)
    facts = ("fp4", shape, run.logits is None, mode, int(kind))
    layer = prepared("gemm1_weights", weights.tensors(), facts,
                     lambda: _build(run, shape, weights, mode, kind))  # fmt: skip
    result = run.on(layer)
    return result if isinstance(result, list) or not is_list else [result]


@accepts()
def trtllm_fp4_block_scale_moe(
    routing_logits: Array, routing_bias: Array | None, hidden_states: Array,
    hidden_states_scale: Array | None, gemm1_weights: Array, gemm1_weights_scale: Array,
    gemm1_bias: Array | None, gemm1_alpha: Array | None, gemm1_beta: Array | None,
    gemm1_clamp_limit: Array | None, gemm2_weights: Array, gemm2_weights_scale: Array,
    gemm2_bias: Array | None, output1_scale_scalar: Array | None,
    output1_scale_gate_scalar: Array | None, output2_scale_scalar: Array | None, num_experts: int,
    top_k: int, n_group: int | None, topk_group: int | None, intermediate_size: int,
    local_expert_offset: int, local_num_experts: int, routed_scaling_factor: float | None,
    routing_method_type: int = 0, do_finalize: bool = True, enable_pdl: bool | None = None,
    activation_type: int = 3, per_token_scale: Array | None = None, output: Array | None = None,
    tune_max_num_tokens: int = 8192, norm_topk_prob: bool = True,
    routing_replay_out: Array | None = None, num_fused_shared_experts: int | None = None,
    valid_hidden_size: int | None = None, valid_intermediate_size: int | None = None,
    hidden_states_scale_layout: SfLayout | None = None,
) -> list[Any]:  # fmt: skip
    """NVFP4 rows and weights, or MXFP4 weights with MXFP8 or bfloat16 rows: [bfloat16 [T, H]].

    routing_logits: float32, bfloat16 or float16 [T, E].
    routing_bias: float32 or bfloat16 [E]; None for methods that have none.
    hidden_states: NVFP4: uint8 [T, H / 2]; MXFP8: float8_e4m3fn [T, H]; or bfloat16 [T, H].
    hidden_states_scale: float8_e4m3fn [T, H / 16]; MXFP8: UE8M0 bytes [T, H / 32]; bfloat16: None.
    gemm1_weights: uint8 [EL, F1, H / 2], shuffled; F1 as for trtllm_bf16_moe().
    gemm1_weights_scale: bytes [EL, F1, H / 16], MXFP4 [EL, F1, H / 32]; shuffled, 128x4. So are
        [EL, bytes], and other shapes of the same memory.
    gemm1_bias: float32 [EL, F1] or None.
    gemm1_alpha, gemm1_beta, gemm1_clamp_limit: float32 [EL] of the activation; or None.
    gemm2_weights: uint8 [EL, H, I / 2].
    gemm2_weights_scale: bytes [EL, H, I / 16], MXFP4 [EL, H, I / 32]; as that of gemm1.
    gemm2_bias: float32 [EL, H] or None.
    output1_scale_scalar, output1_scale_gate_scalar, output2_scale_scalar: float32 [EL];
        MXFP4: or None.
    num_experts, top_k, intermediate_size: E, k, I; ints.
    n_group, topk_group, routed_scaling_factor, norm_topk_prob: narrowfloat.route(); int, int,
        float, bool.
    local_expert_offset, local_num_experts: first and number EL of the experts here; ints.
    routing_method_type, activation_type: RoutingMethodType, ActivationType.
    per_token_scale: NVFP4: float32 [T], a decode scale for each row.
    num_fused_shared_experts: int, after the E experts.
    do_finalize: False gives [rows bfloat16 [>= T * k, H], weights bfloat16 [T, k], rows of
        slots int32 [T * k], -1 for experts elsewhere] instead; k counts shared experts.
    enable_pdl, tune_max_num_tokens: change nothing.
    routing_replay_out: int16 [>= T, k], written to. output: bfloat16 [T, H], written to.
    valid_hidden_size, valid_intermediate_size: int; H and I, or None: no padding is offered.
    hidden_states_scale_layout: SfLayout.layout_linear or None.
    """
    check_valid_sizes(hidden_states, valid_hidden_size, intermediate_size, valid_intermediate_size)
    _check_scale_layout(hidden_states_scale_layout)
    shape = Shape(num_experts, top_k, n_group, topk_group, intermediate_size, local_expert_offset,
                  local_num_experts, routed_scaling_factor, routing_method_type, norm_topk_prob,
                  num_fused_shared_experts or 0)  # fmt: skip
    run = Run("trtllm_fp4_block_scale_moe", hidden_states, hidden_states_scale, per_token_scale,
              routing_logits, shape.bias(routing_bias), None, do_finalize, output,
              routing_replay_out)  # fmt: skip
    weights = Fp4Weights(gemm1_weights, gemm1_weights_scale, gemm1_bias, gemm1_alpha, gemm1_beta,
                         gemm1_clamp_limit, gemm2_weights, gemm2_weights_scale, gemm2_bias,
                         output1_scale_scalar, output1_scale_gate_scalar,
                         output2_scale_scalar)  # fmt: skip
    return _fp4(run, shape, weights, activation_type)


@accepts()
def trtllm_fp4_block_scale_routed_moe(
    topk_ids: Array | tuple[Array, Array], routing_bias: Array | None, hidden_states: Array,
    hidden_states_scale: Array | None, gemm1_weights: Array, gemm1_weights_scale: Array,
    gemm1_bias: Array | None, gemm1_alpha: Array | None, gemm1_beta: Array | None,
    gemm1_clamp_limit: Array | None, gemm2_weights: Array, gemm2_weights_scale: Array,
    gemm2_bias: Array | None, output1_scale_scalar: Array | None,
    output1_scale_gate_scalar: Array | None, output2_scale_scalar: Array | None, num_experts: int,
    top_k: int, n_group: int | None, topk_group: int | None, intermediate_size: int,
    local_expert_offset: int, local_num_experts: int, routed_scaling_factor: float | None,
    routing_method_type: int = 0, do_finalize: bool = True, enable_pdl: bool | None = None,
    activation_type: int = 3, per_token_scale: Array | None = None, output: Array | None = None,
    tune_max_num_tokens: int = 8192, gemm1_lora_delta: None = None,
    valid_hidden_size: int | None = None, valid_intermediate_size: int | None = None,
    num_fused_shared_experts: int | None = None,
    hidden_states_scale_layout: SfLayout | None = None,
) -> list[Any]:  # fmt: skip
    """As trtllm_fp4_block_scale_moe() of a given routing.

    topk_ids: int32 [T, k] of id << 16 | bfloat16 weight; or (int32 ids [T, k], bfloat16 or float32
        weights [T, k]).
    routing_bias: not read. gemm1_lora_delta: None. num_fused_shared_experts: 0 or None.
    """
    refuse("num_fused_shared_experts", num_fused_shared_experts or None,
           "name the shared experts in topk_ids")  # fmt: skip
    check_valid_sizes(hidden_states, valid_hidden_size, intermediate_size, valid_intermediate_size)
    _check_scale_layout(hidden_states_scale_layout)
    refuse("gemm1_lora_delta", gemm1_lora_delta, "add it to the bias of a layer")
    shape = Shape(num_experts, top_k, n_group, topk_group, intermediate_size, local_expert_offset,
                  local_num_experts, routed_scaling_factor, UNROUTED)  # fmt: skip
    run = Run("trtllm_fp4_block_scale_routed_moe", hidden_states, hidden_states_scale,
              per_token_scale, topk_ids=topk_ids, do_finalize=do_finalize,
              output=output)  # fmt: skip
    weights = Fp4Weights(gemm1_weights, gemm1_weights_scale, gemm1_bias, gemm1_alpha, gemm1_beta,
                         gemm1_clamp_limit, gemm2_weights, gemm2_weights_scale, gemm2_bias,
                         output1_scale_scalar, output1_scale_gate_scalar,
                         output2_scale_scalar)  # fmt: skip
    return _fp4(run, shape, weights, activation_type)
