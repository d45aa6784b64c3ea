"""The reference model of the MoE layer on cases worked out by hand, and its files.

What the model says of these small cases follows from the specification with pencil and paper, so
the model is more than consistent with itself. The committed golden files must be what the generator
makes.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
sys.path.insert(0, str(GOLDEN))

import generate_moe_vectors as generator  # noqa: E402
import moe_routing_cases  # noqa: E402
import reference_moe as moe  # noqa: E402
import reference_routing as routing  # noqa: E402
from reference_floats import decode_float, encode_float  # noqa: E402
from reference_routing import Router  # noqa: E402


def route(x: list[float], router: Router, bias: list[float] | None = None) -> routing.Routed:
    """Routing of one token."""
    row = np.array([x], np.float32)
    return routing.route_logits(row, None if bias is None else np.array(bias, np.float32), router)


# --- Routing --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "x", "ids", "weights"),
    [
        # Softmax of (0, ln 2, ln 3, ln 2) over all is (1, 2, 3, 2) / 8; the tie goes to expert 1.
        (0, [0, math.log(2), math.log(3), math.log(2)], [2, 1], [3 / 8, 2 / 8]),
        # Over the selected alone: 3 / 5 and 2 / 5.
        (1, [0, math.log(2), math.log(3), math.log(2)], [2, 1], [3 / 5, 2 / 5]),
        (4, [0, math.log(2), math.log(3), math.log(2)], [2, 1], [3 / 5, 2 / 5]),
        # The logits themselves; -0 ranks below +0.
        (5, [-1, -0.0, 0.0, -2], [2, 1], [0, -0.0]),
        # 25 and 30 have the sigmoid 1: method 8 takes the lower id, method 9 the larger logit.
        (8, [25, 0, 30, 0], [0, 2], [1, 1]),
        (9, [25, 0, 30, 0], [2, 0], [1, 1]),
        # sigmoid(0) = 1 / 2: 1 / 1.5 and 0.5 / 1.5.
        (6, [0, 40, 0, -40], [1, 0], [2 / 3, 1 / 3]),
        (2, [0, 40, 0, -40], [1, 0], [2 / 3, 1 / 3]),
        (7, [0, 40, 0, -40], [1, 0], [2 / 3, 1 / 3]),
    ],
)
def test_methods(method: int, x: list[float], ids: list[int], weights: list[float]) -> None:
    """One token, four experts, two selected."""
    routed = route(x, Router(4, 2, method))
    assert routed.ids.tolist() == [ids]
    assert np.allclose(routed.weights, weights, rtol=1e-6, atol=0)


def test_llama4_takes_the_sigmoid_of_the_best_logit() -> None:
    """sigmoid(ln 3) = 3 / 4."""
    routed = route([0, math.log(3)], Router(2, 1, 3))
    assert routed.ids.tolist() == [[1]]
    assert routed.weights[0, 0] == pytest.approx(0.75, rel=1e-6)


def test_order_of_special_keys() -> None:
    """NaN above infinity, -NaN below -infinity."""
    x = [math.inf, math.nan, -math.inf, math.copysign(math.nan, -1), 1.0]
    assert route(x, Router(5, 5, 5)).ids.tolist() == [[1, 0, 4, 2, 3]]


def test_the_bias_selects_and_does_not_weigh() -> None:
    """Sigmoids (1, 1, 1, 0), keys (1, 1.5, 0, 0.25): experts 1 and 0, both of weight c / 2."""
    routed = route([40, 40, 40, -40], Router(4, 2, 7, scale=3.0), [0, 0.5, -1, 0.25])
    assert routed.ids.tolist() == [[1, 0]]
    assert routed.weights.tolist() == [[1.5, 1.5]]


def test_groups_are_ranked_by_their_two_best_keys() -> None:
    """Keys (1.5, 1.1), (1.9, -0.8): group 0 wins with 2.6 to 1.1 although expert 2 is the best."""
    router = Router(4, 1, 2, n_group=2, topk_group=1, scale=2.5)
    routed = route([40, 40, 40, -40], router, [0.5, 0.1, 0.9, -0.8])
    assert routed.ids.tolist() == [[0]]
    assert routed.weights.tolist() == [[2.5]]


def test_groups_that_lost_count_less_than_negative_keys() -> None:
    """All sigmoids 0, all keys negative: masking with 0 would select experts 2 and 3."""
    router = Router(6, 3, 2, n_group=3, topk_group=2)
    routed = route([-40] * 6, router, [-1, -2, -30, -40, -3, -4])
    assert routed.ids.tolist() == [[0, 1, 4]]
    assert routed.weights.tolist() == [[0, 0, 0]]


def test_the_grouped_bias_may_be_rounded_to_bf16() -> None:
    """1 + 2^-9 is 1 in bf16: then the tie goes to expert 0."""
    bias = [1.0, 1 + 2.0**-9, 0, 0]
    for is_rounded, first in ((False, 1), (True, 0)):
        router = Router(4, 1, 2, n_group=2, topk_group=1, grouped_bias_bf16=is_rounded)
        assert route([0] * 4, router, bias).ids.tolist() == [[first]]


def test_shared_experts_follow_with_weight_1() -> None:
    """Ids E and E + 1 after the routed one."""
    routed = route([0, 1, 0], Router(3, 1, 1, shared=2))
    assert routed.ids.tolist() == [[1, 3, 4]]
    assert routed.weights.tolist() == [[1, 1, 1]]


def test_all_selected_logits_minus_infinity() -> None:
    """0 / 0, and valid ids."""
    routed = route([-math.inf] * 3, Router(3, 2, 1))
    assert routed.ids.tolist() == [[0, 1]]
    assert np.all(np.isnan(routed.weights))


def test_a_packed_negative_weight_leaves_the_id_alone() -> None:
    """-1.5 is 0xBFC0 in bf16."""
    packed = routing.pack(np.array([[3, -1]]), np.array([[-1.5, 2.0]]))
    assert packed.tolist() == [[0x0003BFC0, -0x10000 + 0x4000]]
    ids, weights = routing.unpack(packed)
    assert ids.tolist() == [[3, -1]] and weights.tolist() == [[-1.5, 2.0]]


def test_precomputed_ids_out_of_range_are_refused() -> None:
    """-1 too, unless it is an empty slot."""
    ids, weights = np.array([[0, -1]]), np.ones((1, 2), np.float32)
    with pytest.raises(ValueError, match="out of range"):
        routing.route_precomputed(ids, weights, Router(2, 2))
    routed = routing.route_precomputed(ids, weights, Router(2, 2, negative_one_is_empty=True))
    assert routed.ids.tolist() == [[0, -1]]


# --- Permutation ----------------------------------------------------------------------------------


def test_permutation_of_two_tokens() -> None:
    """Expert 0 has slot 1, expert 1 slots 0 and 2, expert 2 slot 3; tiles of 2 rows."""
    maps = moe.permute(np.array([[1, 0], [1, 2]]), 0, 3, 2)
    assert maps.slot_to_row == [2, 0, 3, 4]
    assert maps.row_to_slot == [1, -1, 0, 2, 3, -1]
    assert maps.row_to_token == [0, -1, 0, 1, 1, -1]
    assert maps.tile_to_expert == [0, 1, 2]
    assert maps.tile_row_end == [1, 4, 5]
    assert (maps.num_rows, maps.max_tiles) == (6, 3)


def test_permutation_of_a_shard() -> None:
    """Experts 2 and 3 of ids 2, 7, 2, -1, 2, 3: three rows of expert 2 in two tiles."""
    maps = moe.permute(np.array([[2, 7], [2, -1], [2, 3]]), 2, 2, 2)
    assert maps.slot_to_row == [0, -1, 1, -1, 2, 4]
    assert maps.row_to_slot == [0, 2, 4, -1, 5, -1]
    assert maps.tile_to_expert == [0, 0, 1]
    assert maps.tile_row_end == [2, 3, 5]
    # n1 = 2 slots on experts of their own, the other 4 fill 2 tiles.
    assert maps.max_tiles == 4


# --- Activations and formats ----------------------------------------------------------------------


def activated(kind: str, u: float, g: float | None = None, **values: float) -> float:
    """h of one element."""
    defaults = {"alpha": 1.0, "beta": 0.0, "limit_gate": math.inf, "limit_up": math.inf}
    parameters = moe.Parameters(**{k: np.array(v) for k, v in (defaults | values).items()})
    gate = None if g is None else np.array([g])
    return float(moe.activate(kind, np.array([u]), gate, parameters)[0])


def logistic(z: float) -> float:
    """1 / (1 + exp(-z))."""
    return 1 / (1 + math.exp(-z))


def test_activations() -> None:
    """Each formula once, with numbers that tell it from its neighbours."""
    assert activated("identity", -2.0) == -2
    assert activated("relu", -2.0) == 0 and activated("relu", 2.0) == 2
    assert activated("relu2", 3.0) == 9
    assert activated("silu", 2.0) == pytest.approx(2 * logistic(2))
    assert activated("gelu_erf", 1.0) == pytest.approx(0.8413447460685429)  # Phi(1)
    assert activated("gelu_tanh", 1.0) == pytest.approx(0.8411919906082768)
    assert activated("geglu_erf", 3.0, 1.0) == pytest.approx(3 * 0.8413447460685429)
    assert activated("geglu_tanh", 3.0, 1.0) == pytest.approx(3 * 0.8411919906082768)
    assert activated("swiglu", 3.0, 2.0) == pytest.approx(6 * logistic(2))
    assert activated("swiglu", 9.0, 9.0, alpha=1.702, beta=1, limit_gate=7, limit_up=7) == (
        pytest.approx(7 * logistic(1.702 * 7) * 8)
    )
    # The gate has no lower clamp, the linear half has.
    assert activated("swiglu", -9.0, -9.0, limit_gate=1, limit_up=2) == (
        pytest.approx(-9 * logistic(-9) * -2)
    )
    # Clamped after SiLU: 10 * sigma(10) > 7.
    assert activated("swiglu_step", -9.0, 10.0, limit_gate=7, limit_up=7) == -49
    # alpha caps the gate, beta the linear half; the sigmoid reads the gate before the cap.
    assert activated("situ_glu", 3.0, 2.0, alpha=4, beta=25) == (
        pytest.approx(25 * math.tanh(3 / 25) * 4 * math.tanh(0.5) * logistic(2))
    )


def test_nvfp4_weights_round_to_e4m3_as_documented() -> None:
    """1.5 * 1.75 = 2.625; 6 * 1.75 = 10.5 <= 448 / 32, so r = -5 and 84 ties to 80: 2.5."""
    codes = np.zeros((1, 1, 8), np.uint8)
    codes[0, 0, 0] = 0x13  # Low nibble, even column: 1.5; then 0.5.
    scales = np.array([[[0x3E]]], np.uint8)  # 1.75
    exact = moe.decode_weights(moe.MODES["nvfp4_fp8_exact"], codes, scales)
    assert exact[0, 0, :3].tolist() == [2.625, 0.875, 0]
    rounded = moe.decode_weights(moe.MODES["nvfp4_fp8_rounded"], codes, scales)
    assert rounded[0, 0, :3].tolist() == [2.5, 0.875, 0]


def test_rounded_weights_share_an_exponent_in_128_columns() -> None:
    """Scales 256 and 3 * 2^-9 in one group: r = 2, and 0.375 of the least denormal rounds to 0."""
    codes = np.full((1, 1, 128), 0x11, np.uint8)  # 0.5 everywhere.
    scales = np.full((1, 1, 16), 0x03, np.uint8)  # 3 * 2^-9, so weights are 1.5 * 2^-9
    scales[0, 0, 0] = 0x78  # 256: 1536 <= 448 * 2^2
    rounded = moe.decode_weights(moe.MODES["nvfp4_fp8_rounded"], codes, scales)[0, 0]
    assert np.all(rounded[:16] == 128)
    assert not np.any(rounded[16:128])
    assert np.all(rounded[128:] == 1.5 * 2.0**-9)


def test_the_last_1x128_group_is_short() -> None:
    """160 columns: the second group takes its maximum over 32 of them."""
    h = np.full((1, 160), 1.0)
    h[0, 5], h[0, 140] = 448.0, 224.0
    rows = moe.requantize("fp8_group", h, np.ones(1, np.float32))
    assert rows.scales.tolist() == [[1.0, 0.5]]
    assert rows.codes.shape == (1, 160)
    assert np.array_equal(rows.decoded(), h)


def test_zero_rows_have_finite_scales() -> None:
    """Codes 0; scales 0, 1 or 2^-127 by format."""
    zero = np.zeros((1, 128))
    for fmt in ("fp8_group", "mxfp8", "nvfp4", "nvfp4_per_token", "fp8_static", "bf16"):
        rows = moe.requantize(fmt, zero, np.ones(1, np.float32))
        assert not np.any(rows.codes) and np.all(rows.decoded() == 0)
    assert moe.requantize("fp8_group", zero, np.ones(1)).scales.tolist() == [[1.0]]
    assert moe.requantize("nvfp4_per_token", zero, np.ones(1)).row_scale.tolist() == [0.0]


def test_the_combine_is_fused() -> None:
    """(1 + 2^-23)(1 + 2^-7) - (1 + 2^-7) keeps the last bit, 2^-30, of the product."""
    y = np.array([[1 + 2.0**-7]] * 2, np.float32)
    weights = np.array([[-1, 1 + 2.0**-23]], np.float32)
    out = decode_float(moe.combine(y, np.array([0, 1]), weights, "F32"), "F32")
    assert out.tolist() == [[2.0**-23 + 2.0**-30]]
    missing = decode_float(moe.combine(y, np.array([-1, -1]), weights, "F32"), "F32")
    assert missing.tolist() == [[0.0]] and not np.signbit(missing[0, 0])


# --- The layer ------------------------------------------------------------------------------------

PARAMETERS = {
    "up_scale": 1, "gate_scale": 1, "down_scale": 1, "inter_multiplier": 1,
    "alpha": 1, "beta": 0, "limit_gate": math.inf, "limit_up": math.inf,
}  # fmt: skip


def bf16(values: object) -> np.ndarray:
    """Raw bf16."""
    return encode_float(np.array(values, np.float64), "BF16")


def bf16_layer(activation: str, order: str, w1: object, w2: object, **values: object) -> moe.Layer:
    """A layer of mode bf16; keywords in PARAMETERS are per expert, others are fields."""
    experts = len(w1)
    each = {
        name: np.broadcast_to(np.array(values.pop(name, default), np.float32), experts)
        for name, default in PARAMETERS.items()
    }
    return moe.Layer(
        moe.MODES["bf16"], activation, order, bf16(w1), bf16(w2), None, None, each, **values
    )


def run(layer: moe.Layer, x: object, ids: object, weights: object) -> np.ndarray:
    """The output of all experts of the layer as float32."""
    experts = len(layer.w1)
    precomputed = routing.route_precomputed(
        np.array(ids), np.array(weights, np.float32), Router(experts, len(ids[0]))
    )
    result = moe.run(layer, moe.Rows("bf16", bf16(x)), precomputed, 0, experts)
    return decode_float(result.out, layer.out_dtype)


W1 = [[[1, 0], [0, 1]], [[2, 0], [1, 1]], [[0, -1], [1, 0]]]
W2 = [[[1, 1], [0, 2]], [[1, 0], [0, 1]], [[1, -1], [2, 0]]]


def test_two_tokens_and_three_experts() -> None:
    """Token 0 = (1, 2): expert 1 has h = (2, 3), y = (2, 3); expert 0 h = (1, 2), y = (3, 4).

    0.5 * (2, 3) + 2 * (3, 4) = (7, 9.5). Token 1 = (3, -1): expert 2 has h = (1, 3), y = (-2, 2);
    expert 1 h = (6, 2), y = (6, 2). (-2, 2) - (6, 2) = (-8, 0).
    """
    layer = bf16_layer("relu", "up_gate", W1, W2)
    out = run(layer, [[1, 2], [3, -1]], [[1, 0], [2, 1]], [[0.5, 2], [1, -1]])
    assert out.tolist() == [[7, 9.5], [-8, 0]]


def test_biases_and_factors() -> None:
    """Expert 0 on (1, 2): 2 * (1, 2) + (1, -9) = (3, -5), relu (3, 0).

    W2 gives (3, 0), times 3 plus (1, 1): (10, 1), times the weight 2: (20, 2). Without the second
    bias: (18, 0).
    """
    fields = {
        "up_scale": 2, "down_scale": 3, "bias1": np.array([[1, -9]] * 3),
        "bias2": np.array([[1, 1]] * 3),
    }  # fmt: skip
    for add, expected in ((True, [20, 2]), (False, [18, 0])):
        layer = bf16_layer("relu", "up_gate", W1, W2, add_fc2_bias=add, **fields)
        assert run(layer, [[1, 2]], [[0]], [[2]]).tolist() == [expected]


@pytest.mark.parametrize(
    ("order", "rows"),
    [
        ("up_gate", [[1, 0], [0, 1], [1, 1], [-1, 0]]),
        ("gate_up", [[1, 1], [-1, 0], [1, 0], [0, 1]]),
        ("interleaved", [[1, 1], [1, 0], [-1, 0], [0, 1]]),
    ],
)
def test_gate_orders(order: str, rows: list[list[int]]) -> None:
    """x = (1, 2): u = 3 * (1, 2) = (3, 6), g = 5 * (3, -1) = (15, -5).

    With alpha 2^14 the sigmoid is 1 and 0: h = (15 * (3 + 1), 0) = (60, 0).
    """
    factors = {"up_scale": 3, "gate_scale": 5, "alpha": 2.0**14, "beta": 1}
    layer = bf16_layer("swiglu", order, [rows], [[[1, 0], [0, 1]]], **factors)
    assert run(layer, [[1, 2]], [[0]], [[1]]).tolist() == [[60, 0]]


def test_weight_on_input_multiplies_before_the_activation() -> None:
    """Weight -1, relu: expert 2 on (3, -1) has sums (1, 3), so h = 0; combined without weight."""
    layer = bf16_layer("relu", "up_gate", W1, W2, weight_on_input=True)
    assert run(layer, [[3, -1]], [[2]], [[-1]]).tolist() == [[0, 0]]
    # Weight 2: h = (2, 6), y = (-4, 4).
    assert run(layer, [[3, -1]], [[2]], [[2]]).tolist() == [[-4, 4]]


def test_a_shard_has_the_rest_of_a_token() -> None:
    """Experts [1, 3) of the first case: token 0 keeps 0.5 * (2, 3)."""
    layer = bf16_layer("relu", "up_gate", W1[1:], W2[1:])
    routed = routing.route_precomputed(
        np.array([[1, 0], [0, 0]]), np.array([[0.5, 2], [1, 1]], np.float32), Router(3, 2)
    )
    result = moe.run(layer, moe.Rows("bf16", bf16([[1, 2], [3, -1]])), routed, 1, 2)
    assert result.slots.tolist() == [0]
    assert decode_float(result.out, "BF16").tolist() == [[1, 1.5], [0, 0]]


def test_scales_of_every_format_belong_to_their_blocks() -> None:
    """All elements 1, scales that count up: a dequantized row shows its scales."""
    cases = {  # Mode: the codes of 1.0, scale i, its value.
        "fp8_block": (0x38, np.float32, float),
        "mxfp8": (0x38, lambda i: np.uint8(127 + i), lambda i: 2.0**i),
        "mxfp4_bf16": (0x22, lambda i: np.uint8(127 + i), lambda i: 2.0**i),
        "nvfp4": (0x22, lambda i: np.uint8(0x38 + i), lambda i: (1 + i % 8 / 8) * 2.0 ** (i // 8)),
    }
    for name, (one, scale, value) in cases.items():
        fmt = moe.MODES[name].weights
        codes = np.full((1, 128, 128 if fmt in moe.PACKED else 256), one, np.uint8)
        rows, blocks = moe.weight_scale_shape(fmt, 128, 256)
        scales = np.array([scale(i) for i in range(blocks)])
        decoded = moe.decode_weights(moe.MODES[name], codes, np.tile(scales, (1, rows, 1)))
        values = [value(i) for i in range(blocks)]
        assert decoded[0, 7].tolist() == [v for v in values for _ in range(256 // blocks)]


# --- The files ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*moe.MODES, "routing"])
def test_committed_files_are_what_the_generator_makes(name: str) -> None:
    """Byte for byte, and readable by the reference implementation of safetensors."""
    if name == "routing":
        data = moe_routing_cases.routing_file()
    else:
        data = generator.mode_file(moe.MODES[name], list(moe.MODES).index(name))
    assert data == (generator.VECTORS / f"{name}.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert len(json.loads(header["__metadata__"]["cases"])) >= generator.CASES
    assert len(safetensors.deserialize(data)) == len(header) - 1


def plans() -> list[generator.Plan]:
    """All plans of the mode files."""
    modes = enumerate(moe.MODES.values())
    return [generator.make_plan(mode, m, j) for m, mode in modes for j in range(generator.CASES)]


def test_the_cases_cover_all_pairs() -> None:
    """All pairs of mode, routing, activation and gate order; and every option in some mode."""
    facts = []
    for plan in plans():
        source = plan.router.method if plan.routing == "logits" else plan.routing
        facts.append((plan.mode, source, plan.activation, plan.gate_order))
    for a in range(4):
        for b in range(a):
            pairs = {(fact[a], fact[b]) for fact in facts}
            assert len(pairs) == len({p[0] for p in pairs}) * len({p[1] for p in pairs})
    assert len({fact[1] for fact in facts}) == 12
    for option in ("weight_on_input", "fp32_rows", "double_quantize_fc1"):
        assert any(getattr(plan, option) for plan in plans())
    assert {plan.slot_dtype for plan in plans()} == {"BF16", "F32"}
    assert {plan.out_dtype for plan in plans()} == {"BF16", "F16", "F32"}
