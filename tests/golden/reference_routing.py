"""Reference model of the router: from logits, or from a precomputed routing, to ids and weights.

Written from the routing sections of the MoE specification alone. Keys are float32 numbers and ids
are exact; weights are float64 numbers made of the same float32 sigmoids, to be compared within a
tolerance. The sigmoid is 0.5 * tanh(0.5 * z) + 0.5 in float32 with tanh rounded once; an
implementation of tanh may be off by an ulp or two, so `is_robust` tells whether ids could depend on
that, and `Routed.tolerance` how much weights could.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reference_floats import EXACT, NAN, decode_float, encode_float, quiet

# The error of an implementation's tanh, doubled: sigmoids lie on a grid of 2^-25.
SIGMOID_ERROR = 2.0**-23
# At and beyond this magnitude every tanh is exactly 1 in float32.
SATURATED = 20.0


@dataclass(frozen=True)
class Method:
    """One row of the table of methods."""

    key: str  # logit | sigmoid | biased
    weight: str  # softmax_all | softmax_selected | logit | sigmoid
    divide: str = ""  # "" | max | plus: by max(sum, 1e-20) or by sum + 1e-20
    has_scale: bool = False


METHODS = (
    Method("logit", "softmax_all"),
    Method("logit", "softmax_selected"),
    Method("biased", "sigmoid", "plus", True),
    Method("logit", "sigmoid"),
    Method("logit", "softmax_selected"),
    Method("logit", "logit"),
    Method("sigmoid", "sigmoid", "max"),
    Method("biased", "sigmoid", "plus", True),
    Method("sigmoid", "sigmoid"),
    Method("logit", "sigmoid"),
)
DEEPSEEK_V3, LLAMA4, SIGMOID_RENORM, MINIMAX2 = 2, 3, 6, 7


@dataclass(frozen=True)
class Router:
    """A routing configuration; `method` is FlashInfer's RoutingMethodType."""

    experts: int
    top_k: int
    method: int = 1
    shared: int = 0
    n_group: int = 1
    topk_group: int = 1
    scale: float = 1.0
    norm_topk: bool = True
    weights_bf16: bool = False
    grouped_bias_bf16: bool = False
    negative_one_is_empty: bool = False

    @property
    def is_grouped(self) -> bool:
        """Whether DeepSeekV3 selects groups first."""
        return self.method == DEEPSEEK_V3 and self.n_group > 1


@dataclass
class Routed:
    """Slots of all tokens, shared experts last."""

    ids: np.ndarray  # int32 [T, k + S]
    weights: np.ndarray  # float64 [T, k + S]
    tolerance: np.ndarray  # Absolute tolerance of the weights.

    def rounded(self) -> np.ndarray:
        """The weights as float32."""
        return self.weights.astype(np.float32)

    def with_tolerance(self) -> np.ndarray:
        """float32 [2, T, k + S]: weights, and what a router's may differ by.

        Every NaN is the same one: the sign of a computed NaN depends on the processor.
        """
        values = np.stack([self.weights, self.tolerance]).astype(np.float32)
        return np.where(np.isnan(values), NAN, values)


@quiet
def sigmoid(x: np.ndarray) -> np.ndarray:
    """0.5 * tanh(0.5 * x) + 0.5 in float32."""
    half = EXACT.mul(np.float32(0.5), x)
    t = np.tanh(half.astype(np.float64)).astype(np.float32)
    return EXACT.add(EXACT.mul(np.float32(0.5), t), np.float32(0.5))


def ordered_bits(key: np.ndarray) -> np.ndarray:
    """uint32 that sort like the bits of float32 numbers: -NaN, -inf .. -0, +0 .. +inf, NaN."""
    bits = np.ascontiguousarray(key, np.float32).view(np.uint32)
    negative = (bits >> np.uint32(31)) == 1
    return bits ^ np.where(negative, np.uint32(0xFFFFFFFF), np.uint32(0x80000000))


def best_first(key: np.ndarray) -> np.ndarray:
    """Indexes of one row's keys, largest first; the lower index wins a tie."""
    return np.argsort(~ordered_bits(key), kind="stable")


def used_bias(bias: np.ndarray | None, router: Router) -> np.ndarray:
    """float32 bias as the keys see it."""
    if bias is None:
        return np.zeros(router.experts, np.float32)
    if router.is_grouped and router.grouped_bias_bf16:
        return decode_float(encode_float(bias, "BF16"), "BF16")
    return bias


def keys(x: np.ndarray, bias: np.ndarray | None, router: Router) -> np.ndarray:
    """Selection keys of all experts, float32."""
    kind = METHODS[router.method].key
    if kind == "logit":
        return x
    s = sigmoid(x)
    return EXACT.add(s, used_bias(bias, router)) if kind == "biased" else s


def group_scores(key: np.ndarray, n_group: int) -> np.ndarray:
    """Largest plus second largest key of every group of one row."""
    members = key.reshape(n_group, -1)
    best = np.stack([row[best_first(row)[:2]] for row in members])
    return EXACT.add(best[:, 0], best[:, 1])


def select(key: np.ndarray, router: Router) -> np.ndarray:
    """Ids of one row, best first."""
    order = best_first(key)
    if router.is_grouped:
        kept = best_first(group_scores(key, router.n_group))[: router.topk_group]
        order = order[np.isin(order // (router.experts // router.n_group), kept)]
    return order[: router.top_k].astype(np.int32)


@quiet
def softmax(x: np.ndarray) -> np.ndarray:
    """Softmax of one row in float64."""
    e = np.exp(x.astype(np.float64) - x.astype(np.float64).max())
    return e / e.sum()


@quiet
def row_weights(x: np.ndarray, ids: np.ndarray, router: Router) -> tuple[np.ndarray, np.ndarray]:
    """(weights of the selected experts of one row, what an inexact sigmoid may change)."""
    method = METHODS[router.method]
    exact = np.zeros(len(ids))
    if method.weight == "softmax_all":
        return softmax(x)[ids], exact
    if method.weight == "softmax_selected":
        return softmax(x[ids]), exact
    if method.weight == "logit":
        return x[ids].astype(np.float64), exact
    w = sigmoid(x)[ids].astype(np.float64)
    error = np.where(np.abs(x[ids]) < SATURATED, SIGMOID_ERROR, 0.0)
    if method.divide == "" or not router.norm_topk:
        return w, error
    total = w.sum()
    divisor = max(total, 1e-20) if method.divide == "max" else total + 1e-20
    factor = float(np.float32(router.scale)) / divisor
    return w * factor, (error + w / divisor * error.sum()) * factor


@quiet
def ulp(x: np.ndarray) -> np.ndarray:
    """Distance of neighbouring float32 numbers at x, as float64; 0 where x is not finite."""
    exponent = np.maximum(np.frexp(np.where(np.isfinite(x), x, 1.0))[1] - 1, -126)
    return np.where(np.isfinite(x), np.ldexp(1.0, exponent - 23), 0.0)


@quiet
def finish(ids: np.ndarray, weights: np.ndarray, error: np.ndarray, router: Router) -> Routed:
    """Adds tolerances and the shared experts; rounds to bf16 where asked for."""
    tolerance = error + 4 * ulp(weights)
    if router.weights_bf16:
        low, high = (encode_float(weights + d, "BF16") for d in (-tolerance, tolerance))
        finite = np.isfinite(weights)
        if np.any((low != high) & finite):
            raise ValueError("a weight is too close to a rounding boundary of bf16")
        weights = decode_float(encode_float(weights, "BF16"), "BF16").astype(np.float64)
        tolerance = np.zeros_like(tolerance)
    tokens = len(ids)
    shared = np.arange(router.experts, router.experts + router.shared, dtype=np.int32)
    return Routed(
        np.hstack([ids, np.tile(shared, (tokens, 1))]).astype(np.int32),
        np.hstack([weights, np.ones((tokens, router.shared))]),
        np.hstack([tolerance, np.zeros((tokens, router.shared))]),
    )


def route_logits(x: np.ndarray, bias: np.ndarray | None, router: Router) -> Routed:
    """From float32 values of the logits [T, E] and of the bias."""
    key = keys(x, bias, router)
    ids = np.zeros((len(x), router.top_k), np.int32)
    weights, error = np.zeros(ids.shape), np.zeros(ids.shape)
    for t in range(len(x)):
        ids[t] = select(key[t], router)
        weights[t], error[t] = row_weights(x[t], ids[t], router)
    return finish(ids, weights, error, router)


def route_precomputed(ids: np.ndarray, weights: np.ndarray, router: Router) -> Routed:
    """From ids and float32 weights that count as they are; the method has no effect."""
    bad = (ids < 0) | (ids >= router.experts)
    if router.negative_one_is_empty:
        bad &= ids != -1
    if np.any(bad):
        raise ValueError("an id is out of range")
    tokens = len(ids)
    shared = np.arange(router.experts, router.experts + router.shared, dtype=np.int32)
    all_ids = np.hstack([ids, np.tile(shared, (tokens, 1))]).astype(np.int32)
    all_weights = np.hstack([weights, np.ones((tokens, router.shared))]).astype(np.float64)
    return Routed(all_ids, all_weights, np.zeros(all_weights.shape))


def pack(ids: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """int32 (id << 16) | bits of the bf16 weight."""
    low = encode_float(weights, "BF16").astype(np.int64)
    return ((ids.astype(np.int64) << 16) | low).astype(np.int32)


def unpack(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(ids, float32 weights) of packed words."""
    low = (packed.astype(np.int64) & 0xFFFF).astype(np.uint16)
    return packed >> 16, decode_float(low, "BF16")


# --- Whether the ids are beyond doubt -------------------------------------------------------------


def are_ordered(low: np.ndarray, high: np.ndarray, same: np.ndarray) -> bool:
    """Whether every two intervals are disjoint, or single equal numbers, or the same by origin."""
    apart = (low[:, None] > high[None, :]) | (high[:, None] < low[None, :])
    single = low == high
    equal = single[:, None] & single[None, :] & (low[:, None] == low[None, :])
    return bool(np.all(apart | equal | same))


@quiet
def row_is_robust(x: np.ndarray, bias: np.ndarray, router: Router) -> bool:
    """is_robust for one row."""
    s = sigmoid(x).astype(np.float64)
    error = np.where(np.abs(x) < SATURATED, SIGMOID_ERROR, 0.0)
    low, high = (EXACT.add((s + d).astype(np.float32), bias) for d in (-error, error))
    origin = list(zip(x.tolist(), bias.tolist(), strict=True))
    same = np.array([[a == b for b in origin] for a in origin])
    if not are_ordered(low, high, same):
        return False
    if not router.is_grouped:
        return True
    ends = [group_scores(key, router.n_group) for key in (low, high)]
    key = EXACT.add(s.astype(np.float32), bias).reshape(router.n_group, -1)
    size = key.shape[1]
    tops = [[origin[j * size + i] for i in best_first(key[j])[:2]] for j in range(len(key))]
    return are_ordered(*ends, np.array([[a == b for b in tops] for a in tops]))


def is_robust(x: np.ndarray, bias: np.ndarray | None, router: Router) -> bool:
    """Whether the ids would be the same with any sigmoid that is right within SIGMOID_ERROR."""
    if METHODS[router.method].key == "logit":
        return True
    b = used_bias(bias, router) if METHODS[router.method].key == "biased" else None
    b = np.zeros(router.experts, np.float32) if b is None else b
    return all(row_is_robust(row, b, router) for row in x)
