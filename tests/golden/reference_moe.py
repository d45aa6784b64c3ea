"""Reference model of the MoE layer: permutation, grouped GEMMs, activations and combine.

Written from the MoE specification alone; quantizers are those of the reference model. Everything
is float64 and rounded only where the specification has a rounding point: the requantized
intermediate, one slot's result, and the combine, which is float32 with fused multiply-adds.
Dot products are sums in ascending order, so that results do not depend on a BLAS.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

import reference_blocks as blocks
import reference_model as model
from reference_floats import (
    EXACT,
    decode_e2m1,
    decode_e4m3,
    decode_e8m0,
    decode_float,
    encode_e4m3,
    encode_float,
    fused_multiply_add,
    quiet,
)
from reference_routing import Routed

# --- Modes ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mode:
    """Formats of weights, input rows and intermediate rows, and what H and I are multiples of."""

    name: str
    weights: str
    input: str
    intermediate: str
    multiple: int


MODES = {
    mode.name: mode
    for mode in (
        Mode("bf16", "bf16", "bf16", "bf16", 16),
        Mode("fp8_tensor", "fp8_tensor", "fp8_static", "fp8_static", 16),
        Mode("fp8_block", "fp8_block", "fp8_group", "fp8_group", 128),
        Mode("mxfp8", "mxfp8", "mxfp8", "mxfp8", 32),
        Mode("mxfp4_mxfp8", "mxfp4", "mxfp8", "mxfp8", 32),
        Mode("mxfp4_bf16", "mxfp4", "bf16", "bf16", 32),
        Mode("mxfp4_fp8", "mxfp4", "fp8_group", "fp8_group", 32),
        Mode("nvfp4", "nvfp4", "nvfp4", "nvfp4", 16),
        Mode("nvfp4_per_token", "nvfp4", "nvfp4_per_token", "nvfp4_per_token", 16),
        Mode("nvfp4_bf16", "nvfp4", "bf16", "bf16", 16),
        Mode("nvfp4_fp8_exact", "nvfp4", "fp8_group", "fp8_group", 16),
        Mode("nvfp4_fp8_rounded", "nvfp4", "fp8_group", "fp8_group", 16),
        Mode("mxfp4_fp8_token", "mxfp4", "fp8_token", "fp8_token", 32),
        Mode("nvfp4_fp8_token", "nvfp4", "fp8_token", "fp8_token", 16),
        Mode("mxfp4_int8", "mxfp4", "bf16", "bf16", 32),
        Mode("nvfp4_int8", "nvfp4", "bf16", "bf16", 32),
    )
}
ROUNDED = ("nvfp4_fp8_rounded", "nvfp4_fp8_token")
INT8 = ("mxfp4_int8", "nvfp4_int8")  # Their GEMMs round rows to int8.
# Elements of a row that share a scale.
BLOCK = {"fp8_group": 128, "mxfp8": 32, "mxfp4": 32, "nvfp4": 16, "nvfp4_per_token": 16}
# Formats with two elements a byte.
PACKED = ("mxfp4", "nvfp4", "nvfp4_per_token")


# --- Weights --------------------------------------------------------------------------------------


def decode_elements(fmt: str, codes: np.ndarray) -> np.ndarray:
    """float64 values of stored elements without their scales."""
    if fmt in ("bf16", "fp32"):
        return decode_float(codes, "BF16" if fmt == "bf16" else "F32").astype(np.float64)
    if fmt in PACKED:
        return decode_e2m1(model.unpack_nibbles(codes)).astype(np.float64)
    return decode_e4m3(codes).astype(np.float64)


def decode_scales(fmt: str, scales: np.ndarray) -> np.ndarray:
    """float64 values of stored block scales."""
    if fmt in ("mxfp8", "mxfp4"):
        return decode_e8m0(scales).astype(np.float64)
    if fmt in ("nvfp4", "nvfp4_per_token"):
        return decode_e4m3(scales).astype(np.float64)
    return scales.astype(np.float64)


def weight_scale_shape(fmt: str, rows: int, cols: int) -> tuple[int, int]:
    """Rows and columns of the scales of one expert's matrix; (0, 0) without scales."""
    if fmt == "fp8_block":
        return rows // 128, cols // 128
    return (rows, cols // BLOCK[fmt]) if fmt in BLOCK else (0, 0)


def round_to_e4m3(w: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Decoded NVFP4 weights [.., cols] rounded to 2^r * E4M3, r for each 128 columns.

    r is the least integer with 6 * (largest scale of the group) <= 448 * 2^r; 0 for zero groups.
    """
    result = np.empty_like(w)
    for start in range(0, w.shape[-1], 128):
        group = slice(start, min(start + 128, w.shape[-1]))
        largest = scales[..., group.start // 16 : -(-group.stop // 16)].max(axis=-1)
        r = np.zeros(largest.shape, np.int64)
        for index, value in np.ndenumerate(largest):
            if value != 0:
                r[index] = next(n for n in range(-40, 40) if 6 * value <= 448 * 2.0**n)
        power = np.ldexp(1.0, r)[..., None]
        # The quotient is exact: a power of two.
        result[..., group] = decode_e4m3(encode_e4m3(w[..., group] / power)) * power
    return result


def decode_weights(mode: Mode, codes: np.ndarray, scales: np.ndarray | None) -> np.ndarray:
    """float64 [experts, rows, cols], block scales included."""
    w = decode_elements(mode.weights, codes)
    if scales is None:
        return w
    decoded = decode_scales(mode.weights, scales)
    if mode.weights == "fp8_block":
        return w * decoded.repeat(128, axis=1).repeat(128, axis=2)
    w = w * decoded.repeat(BLOCK[mode.weights], axis=2)
    return round_to_e4m3(w, decoded) if mode.name in ROUNDED else w


# --- Rows of activations --------------------------------------------------------------------------


@dataclass
class Rows:
    """Stored rows in a format; row_scale is the decode factor of per-token formats."""

    fmt: str
    codes: np.ndarray
    scales: np.ndarray | None = None
    row_scale: np.ndarray | None = None

    def decoded(self) -> np.ndarray:
        """float64 [rows, cols] without row_scale."""
        x = decode_elements(self.fmt, self.codes)
        if self.scales is None:
            return x
        spread = decode_scales(self.fmt, self.scales).repeat(BLOCK[self.fmt], axis=1)
        return x * spread[:, : x.shape[1]]

    def factor(self) -> np.ndarray:
        """float64 [rows, 1] row factors, 1 where the format has none."""
        if self.row_scale is None:
            return np.ones((len(self.codes), 1))
        return self.row_scale.astype(np.float64)[:, None]


def quantize_rows(fmt: str, x: np.ndarray, multiplier: np.ndarray, dtype: str = "F32") -> Rows:
    """Quantizes float32 rows; `multiplier` is one static quant multiplier a row.

    `dtype` is the type that the rows came in.
    """
    rows, cols = x.shape
    if fmt == "fp8_static":
        return Rows(fmt, encode_e4m3(EXACT.mul(x, multiplier[:, None])))
    if fmt == "fp8_token":
        largest = model.LARGEST[dtype]
        row_scale, codes = blocks.fp8_blocks(x, "reciprocal", 0.0, "exact", largest)
        return Rows(fmt, codes, None, row_scale)
    if fmt == "fp8_group":
        padded = np.zeros((rows, model.round_up(cols, 128)), np.float32)
        padded[:, :cols] = x
        tiles = padded.reshape(rows, padded.shape[1] // 128, 128)
        scales, codes = blocks.fp8_blocks(tiles, "reciprocal", 0.0, "exact", model.LARGEST[dtype])
        return Rows(fmt, codes.reshape(padded.shape)[:, :cols], scales)
    if fmt == "mxfp8":
        scales, codes = blocks.mx_blocks(x.reshape(rows, cols // 32, 32), "mxfp8", "up", "exact")
        return Rows(fmt, codes.reshape(rows, cols), scales)
    if fmt == "nvfp4":
        g = np.repeat(multiplier[:, None], cols // 16, axis=1)
        scales, codes = blocks.nvfp4_blocks(x.reshape(rows, cols // 16, 16), g, "exact")
        return Rows(fmt, model.pack_nibbles(codes.reshape(rows, cols)), scales)
    scales, codes, row_scale = model.quantize_nvfp4_per_token(x[None], model.Options())
    packed = model.pack_nibbles(codes.reshape(rows, cols))
    return Rows(fmt, packed, scales[0], row_scale[0])


def requantize(fmt: str, h: np.ndarray, multiplier: np.ndarray) -> Rows:
    """The intermediate: float64 rows, rounded to float32 (bf16 where the format says) first."""
    if fmt == "bf16":
        return Rows(fmt, encode_float(h, "BF16"))
    if fmt == "fp32":
        return Rows(fmt, encode_float(h, "F32"))
    if fmt in ("nvfp4_per_token", "fp8_token"):
        h = decode_float(encode_float(h, "BF16"), "BF16")
        return quantize_rows(fmt, h.astype(np.float32), multiplier, "BF16")
    return quantize_rows(fmt, h.astype(np.float32), multiplier)


def round_to_int8(x: np.ndarray) -> np.ndarray:
    """float64 rows [rows, cols], values of float32, rounded to int8 with a scale per 32 columns."""
    tiles = x.astype(np.float32).reshape(len(x), x.shape[1] // 32, 32)
    largest = np.maximum(np.abs(tiles).max(axis=2, keepdims=True), np.float32(2.0**-100))
    multiplier = np.float32(127) / largest
    scale = np.float32(1) / multiplier
    codes = np.rint(tiles * multiplier)
    return (codes.astype(np.float64) * scale.astype(np.float64)).reshape(x.shape)


def as_multiplied(mode: Mode, rows: Rows) -> np.ndarray:
    """float64 rows without row_scale, as the mode's GEMMs read them."""
    x = rows.decoded()
    return round_to_int8(x) if mode.name in INT8 else x


# --- Permutation ----------------------------------------------------------------------------------


@dataclass
class Maps:
    """Where slots went, without entries beyond the rows and tiles in use."""

    slot_to_row: list[int]
    row_to_token: list[int]
    row_to_slot: list[int]
    tile_to_expert: list[int]
    tile_row_end: list[int]
    max_tiles: int
    num_rows: int = field(default=0)


def permute(ids: np.ndarray, offset: int, local: int, tile: int) -> Maps:
    """Sorts the slots of ids [T, slots] by local expert, segments padded to multiples of a tile."""
    slots = ids.reshape(-1).tolist()
    once = min(local, len(slots))
    maps = Maps([-1] * len(slots), [], [], [], [], once + (len(slots) - once) // tile)
    for e in range(local):
        mine = [i for i, expert in enumerate(slots) if expert == offset + e]
        base = len(maps.row_to_slot)
        padding = -len(mine) % tile
        for rank, i in enumerate(mine):
            maps.slot_to_row[i] = base + rank
        maps.row_to_slot += mine + [-1] * padding
        maps.row_to_token += [i // ids.shape[1] for i in mine] + [-1] * padding
        for start in range(0, len(mine), tile):
            maps.tile_to_expert.append(e)
            maps.tile_row_end.append(base + min(start + tile, len(mine)))
    maps.num_rows = len(maps.row_to_slot)
    return maps


# --- Activations ----------------------------------------------------------------------------------

NOT_GATED = ("identity", "relu", "relu2", "silu", "gelu_erf", "gelu_tanh")
GATED = ("swiglu", "swiglu_step", "geglu_erf", "geglu_tanh", "situ_glu")


@quiet
def sigma(z: np.ndarray) -> np.ndarray:
    """The activation's sigmoid."""
    return 1 / (1 + np.exp(-z))


def gelu_erf(x: np.ndarray) -> np.ndarray:
    """0.5 x (1 + erf(x / sqrt 2)), without the cancellation of the sum."""
    return 0.5 * x * np.vectorize(math.erfc, otypes=[np.float64])(-x / math.sqrt(2))


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    """0.5 x (1 + tanh(z)), without the cancellation: (1 + tanh(z)) / 2 = sigma(2 z)."""
    return x * sigma(2 * 0.7978845608 * (x + 0.044715 * x**3))


@dataclass(frozen=True)
class Parameters:
    """Activation parameters: float64, broadcast against u and g."""

    alpha: np.ndarray
    beta: np.ndarray
    limit_gate: np.ndarray
    limit_up: np.ndarray


def activate_plain(kind: str, u: np.ndarray) -> np.ndarray:
    """Activations without a gate."""
    return {
        "identity": lambda: u,
        "relu": lambda: np.maximum(u, 0),
        "relu2": lambda: np.maximum(u, 0) ** 2,
        "silu": lambda: u * sigma(u),
        "gelu_erf": lambda: gelu_erf(u),
        "gelu_tanh": lambda: gelu_tanh(u),
    }[kind]()


def activate(kind: str, u: np.ndarray, g: np.ndarray | None, p: Parameters) -> np.ndarray:
    """h of the up half and the gate half."""
    if g is None:
        return activate_plain(kind, u)
    if kind == "geglu_erf":
        return gelu_erf(g) * u
    if kind == "geglu_tanh":
        return gelu_tanh(g) * u
    clamped = np.clip(u, -p.limit_up, p.limit_up)
    if kind == "swiglu_step":
        return np.minimum(g * sigma(g), p.limit_gate) * clamped
    g = np.minimum(g, p.limit_gate)
    if kind == "situ_glu":
        return p.beta * np.tanh(clamped / p.beta) * p.alpha * np.tanh(g / p.alpha) * sigma(g)
    return g * sigma(p.alpha * g) * (clamped + p.beta)


def half_rows(order: str, inter: int) -> tuple[np.ndarray, np.ndarray]:
    """(rows of w1 that are up, rows that are gate)."""
    i = np.arange(inter)
    return {
        "up_gate": (i, inter + i),
        "gate_up": (inter + i, i),
        "interleaved": (2 * i + 1, 2 * i),
    }[order]


# --- The layer ------------------------------------------------------------------------------------


@dataclass
class Layer:
    """Configuration and weights. Arrays `each` hold float32, one value a local expert."""

    mode: Mode
    activation: str
    gate_order: str
    w1: np.ndarray  # Codes; w2 likewise.
    w2: np.ndarray
    w1_scales: np.ndarray | None
    w2_scales: np.ndarray | None
    each: dict[str, np.ndarray]  # up_scale, gate_scale, ..., alpha, ..., limit_up
    bias1: np.ndarray | None = None  # float32 values; bias2 likewise.
    bias2: np.ndarray | None = None
    weight_on_input: bool = False
    add_fc2_bias: bool = True
    slot_dtype: str = "BF16"
    out_dtype: str = "BF16"
    fp32_rows: bool = False
    double_quantize_fc1: bool = False

    def per_row(self, name: str, experts: np.ndarray) -> np.ndarray:
        """float64 [rows, 1] values of the experts of rows."""
        return self.each[name].astype(np.float64)[experts][:, None]

    @property
    def intermediate(self) -> str:
        """Format of the intermediate."""
        return "fp32" if self.fp32_rows else self.mode.intermediate


@dataclass
class Result:
    """Everything a run makes; rows are the local slots in the order of slot indexes."""

    slots: np.ndarray  # Slot index of a row.
    fc1: np.ndarray  # float64 [rows, F1], after scales and bias.
    h: np.ndarray  # float64 [rows, I], before requantization.
    inter: Rows
    y: np.ndarray  # Raw slot_dtype [rows, H].
    out: np.ndarray  # Raw out_dtype [T, H].


def dot_rows(x: np.ndarray, w: np.ndarray, experts: np.ndarray) -> np.ndarray:
    """sum over j of x[row, j] * w[expert of row, n, j], in ascending order of j."""
    total = np.zeros((len(x), w.shape[1]))
    for j in range(w.shape[2]):
        total += x[:, j, None] * w[experts, :, j]
    return total


def first_gemm(layer: Layer, x: np.ndarray, factor: np.ndarray, experts: np.ndarray) -> np.ndarray:
    """u and g of rows x; `factor` multiplies a row's sums before the bias."""
    w1 = decode_weights(layer.mode, layer.w1, layer.w1_scales)
    sums = dot_rows(x, w1, experts) * factor
    scale = np.broadcast_to(layer.per_row("up_scale", experts), sums.shape).copy()
    if layer.activation in GATED:
        gate = half_rows(layer.gate_order, w1.shape[1] // 2)[1]
        scale[:, gate] = layer.per_row("gate_scale", experts)
    result = scale * sums
    if layer.bias1 is not None:
        result = result + layer.bias1.astype(np.float64)[experts]
    if layer.double_quantize_fc1:
        result = quantize_rows("fp8_group", result.astype(np.float32), np.ones(0)).decoded()
    return result


def activation_of(layer: Layer, fc1: np.ndarray, experts: np.ndarray) -> np.ndarray:
    """h of the first GEMM's rows."""
    names = ("alpha", "beta", "limit_gate", "limit_up")
    parameters = Parameters(*(layer.per_row(name, experts) for name in names))
    if layer.activation in NOT_GATED:
        return activate(layer.activation, fc1, None, parameters)
    up, gate = half_rows(layer.gate_order, fc1.shape[1] // 2)
    return activate(layer.activation, fc1[:, up], fc1[:, gate], parameters)


def second_gemm(layer: Layer, inter: Rows, experts: np.ndarray) -> np.ndarray:
    """y in float64."""
    w2 = decode_weights(layer.mode, layer.w2, layer.w2_scales)
    y = dot_rows(as_multiplied(layer.mode, inter), w2, experts) * inter.factor()
    y = layer.per_row("down_scale", experts) * y
    if layer.bias2 is not None and layer.add_fc2_bias:
        y = y + layer.bias2.astype(np.float64)[experts]
    return y


def combine(y: np.ndarray, row_of_slot: np.ndarray, weights: np.ndarray, dtype: str) -> np.ndarray:
    """Weighted sum of a token's slots in slot order; y is float32, -1 means no row."""
    tokens, slots = weights.shape
    total = np.zeros((tokens, y.shape[1]), np.float32)
    for t in range(tokens):
        for s in range(slots):
            row = row_of_slot[t * slots + s]
            if row >= 0:
                total[t] = fused_multiply_add(weights[t, s], y[row], total[t])
    return encode_float(total, dtype)


def run(layer: Layer, x: Rows, routed: Routed, offset: int, local: int) -> Result:
    """The layer on tokens `x`; experts [offset, offset + local) are here."""
    ids = routed.ids.reshape(-1)
    slots = np.flatnonzero((ids >= offset) & (ids < offset + local))
    experts, tokens = ids[slots] - offset, slots // routed.ids.shape[1]
    weights = routed.rounded()
    factor = x.factor()[tokens]
    if layer.weight_on_input:
        factor = factor * weights.astype(np.float64).reshape(-1)[slots][:, None]
        weights = np.ones_like(weights)
    fc1 = first_gemm(layer, as_multiplied(layer.mode, x)[tokens], factor, experts)
    h = activation_of(layer, fc1, experts)
    inter = requantize(layer.intermediate, h, layer.each["inter_multiplier"][experts])
    y = encode_float(second_gemm(layer, inter, experts), layer.slot_dtype)
    row_of_slot = np.full(len(ids), -1)
    row_of_slot[slots] = np.arange(len(slots))
    out = combine(decode_float(y, layer.slot_dtype), row_of_slot, weights, layer.out_dtype)
    return Result(slots, fc1, h, inter, y, out)
