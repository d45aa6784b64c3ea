"""narrowfloat.compat.flashinfer: activations, FP8 norms, and the steps between experts' GEMMs.

Against formulas in float64; rows that no token has keep what the outputs hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from flashinfer_table import BITS, CLOSE, record
from test_flashinfer_quantizers import LIBRARIES

import narrowfloat.compat.flashinfer as fi

RNG = np.random.default_rng(82)
BF16, E4M3, E5M2 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
erf = np.vectorize(math.erf)
GATED: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "silu_and_mul": lambda x: x / (1 + np.exp(-x)),
    "gelu_and_mul": lambda x: x * (1 + erf(x / math.sqrt(2))) / 2,
    "gelu_tanh_and_mul": lambda x: x * (1 + np.tanh(
        math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
}  # fmt: skip
BITS_OF = {"bfloat16": 8, "float16": 11, "float32": 20, "float8_e4m3fn": 4, "float8_e5m2": 3}


@pytest.fixture(params=LIBRARIES, ids=lambda lib: lib.__name__)
def lib(request: pytest.FixtureRequest) -> Any:
    """Where arrays come from."""
    return request.param


def made(lib: Any, array: np.ndarray) -> Any:
    """float8_e5m2 as well, which the libraries of the quantizers' tests do not make."""
    if array.dtype != E5M2 or lib.__name__ == "Numpy":
        return lib.make(array)
    import torch

    return lib.make(array.view(np.uint8)).view(torch.float8_e5m2)


def near(lib: Any, got: Any, wanted: np.ndarray, dtype: Any, ulps: float = 1.0) -> None:
    """Every element within so many units in the last place, and nearly all rounded correctly."""
    assert tuple(got.shape) == wanted.shape
    assert str(got.dtype).endswith(np.dtype(dtype).name)
    found = np.frombuffer(lib.raw(got), dtype).reshape(wanted.shape).astype(np.float64)
    bits = BITS_OF[np.dtype(dtype).name]
    assert (np.abs(found - wanted) <= ulps * 2.0**-bits * np.abs(wanted) + 2.0**-9).all()
    exact = wanted.astype(np.float32).astype(dtype).astype(np.float64)
    assert (found == exact).mean() > 0.85 or dtype == np.float32


@pytest.mark.parametrize("name", list(GATED))
@pytest.mark.parametrize("dtype", [BF16, np.float16, np.float32])
def test_gated_activations(lib: Any, name: str, dtype: Any) -> None:
    """The first half is the gate; outputs of any axes."""
    function = getattr(fi, name)
    x = (RNG.standard_normal((3, 5, 48)) * 4).astype(dtype)
    wide = x.astype(np.float64)
    wanted = GATED[name](wide[..., :24]) * wide[..., 24:]
    near(lib, function(lib.make(x)), wanted, dtype)
    out = lib.make(np.zeros((3, 5, 24), dtype))
    assert function(lib.make(x), out) is out
    near(lib, out, wanted, dtype)
    with pytest.raises(ValueError, match="input: The last dimension must be even"):
        function(lib.make(x[..., :47]))
    for kind in (AssertionError, ValueError):
        with pytest.raises(kind, match="out: expected shape"):
            function(lib.make(x), lib.make(np.zeros((3, 5, 23), dtype)))
    record(name, CLOSE, "computed in float32", "an ulp")


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("source", [BF16, np.float16])
def test_fp8_norms(lib: Any, dtype: Any, source: Any) -> None:
    """Saturated; scales as numbers and arrays; the sum is stored."""
    x, residual = (RNG.standard_normal((6, 128)).astype(source) for _ in range(2))
    weight = RNG.uniform(0.5, 2, 128).astype(source)
    scale, largest = np.float32(0.004), float(ml_dtypes.finfo(dtype).max)

    def wanted(rows: np.ndarray) -> np.ndarray:
        factor = 1 / np.sqrt((rows**2).mean(-1, keepdims=True) + 1e-6)
        y = rows * factor * weight.astype(np.float64) / scale
        return np.clip(y, -largest, largest)

    plain = x.astype(np.float64)
    for given in (float(scale), lib.make(np.float32([scale])), np.float32([scale])):
        out = made(lib, np.zeros((6, 128), dtype))
        assert fi.rmsnorm_quant(out, lib.make(x), lib.make(weight), given) is None
        near(lib, out, wanted(plain), dtype)
    if dtype == E4M3:
        assert (np.abs(wanted(plain)) == largest).any()
    sums = lib.make(residual.copy())
    fi.fused_add_rmsnorm_quant(out, lib.make(x), sums, lib.make(weight), float(scale))
    total = plain + residual.astype(np.float64)
    near(lib, out, wanted(total), dtype)
    assert lib.raw(sums) == (x.astype(np.float32) + residual.astype(np.float32)).astype(
        source).tobytes()  # fmt: skip
    for name in ("rmsnorm_quant", "fused_add_rmsnorm_quant"):
        record(name, CLOSE, "computed in float32", "an ulp of FP8")


def test_fp8_norms_refuse() -> None:
    """Types, shapes and scales."""
    x, weight, out = np.ones((4, 64), BF16), np.ones(64, BF16), np.zeros((4, 64), E4M3)
    for call, words in (
        (lambda: fi.rmsnorm_quant(np.zeros((4, 64), np.uint8), x, weight, 1.0), "out: expected fl"),
        (lambda: fi.rmsnorm_quant(out[:2], x, weight, 1.0), "out: expected shape"),
        (lambda: fi.rmsnorm_quant(out, x, weight[:3], 1.0), "weight: expected shape"),
        (lambda: fi.rmsnorm_quant(out, x.astype(np.float32), weight, 1.0), "input: expected float"),
        (lambda: fi.rmsnorm_quant(out, x, weight, np.ones(2, np.float32)), "scale: must be a scal"),
        (lambda: fi.fused_add_rmsnorm_quant(out, x, x[:2].copy(), weight, 1.0), "residual: expec"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


T, TOP_K, EXPERTS, TILE, WIDTH = 9, 2, 4, 8, 64


class Sorted:
    """Maps of moe_sort(), in which experts 0 to 2 of 4 are here."""

    def __init__(self, lib: Any) -> None:
        self.ids = np.stack([RNG.permutation(EXPERTS)[:TOP_K] for _ in range(T)]).astype(np.int32)
        maps = fi.moe_sort(lib.make(self.ids), None, EXPERTS, TOP_K, 0, 3, TILE)
        (self.experts, self.limits, self.to_row, self.to_slot, self.padded, self.tiles) = maps
        self.rows = self.to_slot.shape[0]
        raw = [np.frombuffer(lib.raw(part), np.int32) for part in maps]
        self.row_of_slot, self.slot_of_row = raw[2], raw[3]
        self.valid = np.isin(np.arange(self.rows), self.row_of_slot[self.row_of_slot >= 0])


@pytest.mark.parametrize("dtype", [BF16, np.float16, E4M3, np.uint8])
def test_permute(lib: Any, dtype: Any) -> None:
    """Rows by expert; others keep what they hold; packed scales of FP4 have zeros for them."""
    maps = Sorted(lib)
    x = RNG.integers(0, 256, (T, WIDTH * np.dtype(dtype).itemsize), dtype=np.uint8).view(dtype)
    held = np.full(maps.rows * WIDTH * np.dtype(dtype).itemsize, 0x3B, np.uint8).view(dtype)
    held = held.reshape(maps.rows, WIDTH)
    out = lib.make(held.copy())
    scales = RNG.integers(1, 120, (T, 8), dtype=np.uint8)
    packed = lib.make(np.full(-(-maps.rows // 128) * 128 * 8, 7, np.uint8))
    more = {"input_sf": lib.make(scales), "permuted_sf": packed} if dtype == np.uint8 else {}
    fi.moe_permute(lib.make(x), out, maps.limits, maps.to_slot, maps.tiles, maps.rows, TOP_K, TILE,
                   **more)  # fmt: skip
    wanted, linear = held.copy(), np.zeros((maps.rows, 8), np.uint8)
    for row in np.flatnonzero(maps.valid):
        wanted[row] = x[maps.slot_of_row[row] // TOP_K]
        linear[row] = scales[maps.slot_of_row[row] // TOP_K]
    assert lib.raw(out) == wanted.tobytes() and not maps.valid.all()
    if dtype == np.uint8:
        assert lib.raw(packed) == lib.raw(fi.block_scale_interleave(lib.make(linear)))
        with pytest.raises(ValueError, match="input_sf, permuted_sf"):
            fi.moe_permute(lib.make(x), out, maps.limits, maps.to_slot, maps.tiles, maps.rows,
                           TOP_K, TILE)  # fmt: skip
    record("moe_permute", BITS, "vector operations")


@pytest.mark.parametrize("dtype", [BF16, np.float16])
@pytest.mark.parametrize("weights", [np.float32, BF16, np.float16])
def test_unpermute(lib: Any, dtype: Any, weights: Any) -> None:
    """Weighted sums of the slots that have a row, in either order of rows."""
    maps = Sorted(lib)
    factors = RNG.uniform(0.1, 1, (T, TOP_K)).astype(weights)
    for expanded in (False, True):
        rows = RNG.standard_normal((maps.rows if not expanded else T * TOP_K, WIDTH)).astype(dtype)
        out = lib.make(np.zeros((T, WIDTH), dtype))
        fi.moe_unpermute(lib.make(rows), out, maps.to_row, lib.make(factors), T, TOP_K,
                         input_is_expanded=expanded)  # fmt: skip
        wanted = np.zeros((T, WIDTH))
        for slot, row in enumerate(maps.row_of_slot):
            if row >= 0:
                part = rows[slot if expanded else row].astype(np.float64)
                wanted[slot // TOP_K] += part * float(factors.reshape(-1)[slot])
        near(lib, out, wanted, dtype, 2)
    record("moe_unpermute", CLOSE, "summed in float32, in the order of the slots", "2 ulps")


ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "Gelu": GATED["gelu_and_mul"], "Relu": lambda x: np.maximum(x, 0),
    "Silu": GATED["silu_and_mul"], "Swiglu": GATED["silu_and_mul"],
    "Geglu": GATED["gelu_and_mul"], "Identity": lambda x: x,
}  # fmt: skip


@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_activation_of_experts(lib: Any, name: str) -> None:
    """Rows before the end of their tile; the second half is the gate."""
    maps = Sorted(lib)
    kind = fi.MoeActivationType[name]
    gated = name in ("Swiglu", "Geglu")
    x = RNG.standard_normal((maps.rows, WIDTH * (2 if gated else 1))).astype(BF16)
    held = np.full((maps.rows, WIDTH), 3, BF16)
    out = lib.make(held.copy())
    fi.moe_activation(lib.make(x), out, maps.limits, maps.tiles, kind, maps.rows, TILE)
    wide = x.astype(np.float64)
    made_of = ACTIVATIONS[name](wide[:, WIDTH:]) * wide[:, :WIDTH] if gated else (
        ACTIVATIONS[name](wide))  # fmt: skip
    near(lib, out, np.where(maps.valid[:, None], made_of, held.astype(np.float64)), BF16)
    with pytest.raises(RuntimeError, match="input: expected"):
        fi.moe_activation(lib.make(x[:, :40]), out, maps.limits, maps.tiles, kind, maps.rows, TILE)
    record("moe_activation", CLOSE, "computed in float32", "an ulp")
