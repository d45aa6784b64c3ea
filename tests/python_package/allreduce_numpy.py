"""The all-reduce in NumPy, from its specification: sums, norm and FP8 codes, to the bit.

Block formats are those of the package's quantizers, applied to the norm; other tests compare these.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

import narrowfloat as nf

E4M3 = ml_dtypes.float8_e4m3fn
F32 = np.float32


def fma(x: Any, y: Any, z: Any) -> Any:
    """x * y + z of float32, rounded once: products are exact in extended precision."""
    return (x.astype(np.longdouble) * y.astype(np.longdouble) + z).astype(F32)


def rank_sum(inputs: list[Any], accumulate: str) -> Any:
    """Over ranks in order; -0 counts as +0."""
    element = inputs[0].dtype
    values = [array.astype(F32) + F32(0) for array in inputs]
    total = values[0]
    for value in values[1:]:
        total = total + value
        if accumulate == "element":
            total = total.astype(element).astype(F32)
    return total.astype(element)


def sum_of_squares(x: Any) -> Any:
    """The fixed tree over leaves of 8 elements."""
    leaves = x.reshape(x.shape[0], -1, 8)
    nodes = np.zeros(leaves.shape[:2], F32)
    for j in range(8):
        nodes = fma(leaves[:, :, j], leaves[:, :, j], nodes)
    while nodes.shape[1] > 1:
        if nodes.shape[1] % 2:
            nodes = np.pad(nodes, ((0, 0), (0, 1)))
        nodes = nodes[:, 0::2] + nodes[:, 1::2]
    return nodes


def norm(x: Any, gamma: Any, eps: float, weight_bias: float) -> Any:
    """RMSNorm of rounded sums x."""
    values = x.astype(F32)
    mean = sum_of_squares(values) / F32(x.shape[1]) + F32(eps)
    inverse = (1.0 / np.sqrt(mean.astype(np.float64))).astype(F32)
    weights = F32(weight_bias) + gamma.astype(F32)
    return (values * inverse * weights).astype(x.dtype)


def e4m3(x: Any) -> Any:
    """Codes, saturated."""
    return np.clip(x, -448, 448).astype(E4M3).view(np.uint8)


def fp8_token(n: Any) -> tuple[Any, Any]:
    """Codes and decode scales of tokens."""
    amax = np.abs(n).max(-1, keepdims=True)
    scale = np.maximum(amax / F32(448), F32(2.0**-9) / F32(448))
    return e4m3(n / scale), scale


def fp8_group(n: Any, columns: int) -> tuple[Any, Any]:
    """Codes, and the biased exponents of groups as bytes [rows, groups]."""
    groups = n.reshape(n.shape[0], -1, columns)
    scale = np.maximum(np.abs(groups).max(-1, keepdims=True) / F32(448), F32(1e-10))
    bits = scale.view(np.uint32)
    exponents = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
    power = (exponents << 23).view(F32)
    return e4m3(groups / power).reshape(n.shape), exponents.astype(np.uint8)[:, :, 0]


FORMATS = {"fp8_block": ("fp8_1x128", "linear"), "nvfp4": ("nvfp4", None), "mxfp8": ("mxfp8", None),
           "nvfp4_per_token": ("nvfp4_per_token", None), "mxfp4": ("mxfp4", None)}  # fmt: skip


def check_quantized(
    found: Any, norm_out: Any, kind: str, scale: float, group: int, layout: str | None
) -> None:
    """Codes and scales are those of the norm, and padding is zero."""
    if kind in FORMATS:
        format, fixed = FORMATS[kind]
        how = {"encode_scale": scale} if kind == "nvfp4" else {}
        wanted = nf.quantize(norm_out, format, layout=fixed or layout, **how)
        np.testing.assert_array_equal(found.values, wanted.values)
        np.testing.assert_array_equal(found.scales, wanted.scales)
        if wanted.global_scale is not None:
            np.testing.assert_array_equal(found.global_scale, wanted.global_scale)
        return
    n = norm_out.astype(F32)
    if kind == "fp8_tensor":
        np.testing.assert_array_equal(found.values, e4m3(n * (F32(1) / F32(scale))))
        assert found.scales.reshape(-1).tolist() == [F32(scale)]
    elif kind == "fp8_token":
        for one, other in zip(found, fp8_token(n), strict=True):
            np.testing.assert_array_equal(one, other)
    else:
        codes, exponents = fp8_group(n, group)
        np.testing.assert_array_equal(found.values, codes)
        groups = exponents.shape[1]
        padded = np.pad(exponents, ((0, 0), (0, -groups % 4)))
        words = np.ascontiguousarray(found.scales).view(np.uint8)
        np.testing.assert_array_equal(words, padded)


def reduced_rows(rows: Any, scales: Any, token_input: Any, accumulate: str) -> Any:
    """The MoE reduction of one rank."""
    element, total = rows.dtype, np.zeros(rows.shape[1:], F32)
    for row, scale in zip(rows.astype(F32), scales[:, :, None], strict=True):
        if accumulate == "element":
            product = (row * scale).astype(element).astype(F32)
            total = (total + product).astype(element).astype(F32)
        else:
            total = fma(row, np.broadcast_to(scale, row.shape), total)
    return (total + token_input.astype(F32)).astype(element)


def finalized_rows(
    rows: Any, slots: Any, weights: Any, shared: Any, routed_scaling: float, accumulate: str
) -> Any:
    """The MoE finalize of one rank."""
    element = rows.dtype

    def rounded(x: Any) -> Any:
        return x.astype(element).astype(F32) if accumulate == "element" else x

    result = np.zeros((slots.shape[0], rows.shape[1]), element)
    for token, picked in enumerate(slots):
        total = np.zeros(rows.shape[1], F32)
        for slot, row in enumerate(picked):
            if row < 0:
                continue
            weight, values = F32(weights[token, slot]), rows[row].astype(F32)
            total = (rounded(total + rounded(values * weight)) if accumulate == "element"
                     else fma(values, np.full_like(values, weight), total))  # fmt: skip
        if routed_scaling != 1:
            total = rounded(total * F32(routed_scaling))
        result[token] = (total + shared[token].astype(F32)).astype(element)
    return result
