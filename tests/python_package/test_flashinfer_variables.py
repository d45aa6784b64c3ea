"""narrowfloat.compat.flashinfer: environment variables of FlashInfer, and who reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from test_flashinfer_quantizers import LIBRARIES, example

import narrowfloat as nf
import narrowfloat.compat.flashinfer as fi


@pytest.fixture(params=LIBRARIES, ids=lambda lib: lib.__name__)
def lib(request: pytest.FixtureRequest) -> Any:
    """Where arrays come from."""
    return request.param


def test_environment(lib: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer's variables: mode and 4-over-6; the argument counts for more."""
    x = lib.make(example((64, 256), np.float16))
    scale = np.float32(333.3)

    def codes(**arguments: Any) -> bytes:
        return lib.raw(fi.nvfp4_quantize(x, scale, per_token_activation=True, **arguments)[2])

    exact, fast = codes(math="exact"), codes(math="fast")
    assert exact != fast and codes() == fast
    monkeypatch.setenv("TRTLLM_DISABLE_FP4_QUANT_FAST_MATH", "0")
    assert codes() == fast and codes(math="exact") == exact
    monkeypatch.setenv("FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH", "1")
    assert codes() == exact and codes(math="fast") == fast
    y = lib.make(example((64, 256)))
    plain = lib.raw(fi.nvfp4_quantize(y, scale)[0])
    monkeypatch.setenv("FLASHINFER_NVFP4_4OVER6", "1")
    monkeypatch.setenv("FLASHINFER_NVFP4_4OVER6_ERR_MODE", "MSE")
    found = lib.raw(fi.nvfp4_quantize(y, scale)[0])
    option = nf.FourOverSix(error="mse")
    q = nf.quantize(y, "nvfp4", encode_scale=float(scale), four_over_six=option, math="exact")
    assert found != plain and found == lib.raw(q.values)
    monkeypatch.setenv("FLASHINFER_NVFP4_4OVER6_ERR_MODE", "MAX")
    with pytest.raises(ValueError, match="^FLASHINFER_NVFP4_4OVER6_ERR_MODE: expected MAE or MSE"):
        fi.nvfp4_quantize(y, scale)


def by_batch(codes: Any) -> Any:
    """[B, M, K'] of a view (M, K', B)."""
    return codes.permute(2, 0, 1) if hasattr(codes, "permute") else codes.transpose(2, 0, 1)


TINY = np.float32(2.0**-127)  # A denormal, half of the least normal number.


def test_denormals_where_the_variable_asks_for_exact(
    lib: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels that nvcc compiles with -use_fast_math flush even then; "cute-dsl" does not.

    Three blocks: ones; a normal maximum beside denormals; denormals alone. The scales of the last
    two are 0, so that their multiplier is FLT_MAX, 2^128 (1 - 2^-24), or 0 for a block of zeros.
    """
    x = np.ones((4, 64), ml_dtypes.bfloat16)
    x[:, 16:32], x[:, 32:] = np.tile([TINY, -TINY], 8), np.tile([-TINY, TINY], 16)
    x[:, 16] = 8 * TINY
    batch, mask = x.reshape(2, 2, 64), np.array([2, 2], np.int32)
    scale, each = np.float32(1), lib.make(np.ones(2, np.float32))
    calls: dict[str, Callable[..., Any]] = {
        "tensor": lambda **how: fi.fp4_quantize(lib.make(x), scale, **how),
        "plain": lambda **how: fi.nvfp4_quantize(lib.make(x), scale, **how),
        "token": lambda **how: fi.nvfp4_quantize(lib.make(x), np.float32(1 / 2688),
                                                 per_token_activation=True, **how),
        "batch": lambda **how: fi.nvfp4_batched_quantize(lib.make(batch), scale, **how),
        "group": lambda **how: [by_batch(fi.scaled_fp4_grouped_quantize(
            lib.make(batch), lib.make(mask), each, **how)[0])],
    }  # fmt: skip

    def rows(name: str, **how: Any) -> set[bytes]:
        codes = np.frombuffer(lib.raw(calls[name](**how)[0]), np.uint8)
        return {row[8:24].tobytes() for row in codes.reshape(4, 32)}

    kept = bytes([0xC7] + [0xC4] * 7 + [0x4C] * 8)  # 16 becomes 6, 2 stays 2.
    flushed = bytes([0x87] + [0x80] * 7 + [0x08] * 8)
    assert all(rows(name, math="exact") == {kept} for name in calls)
    monkeypatch.setenv("FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH", "1")
    assert all(rows(name) == {flushed} for name in calls)
    assert all(rows(name, math="exact") == {kept} for name in calls)
    assert all(rows(name, backend="cute-dsl") == {kept} for name in ("tensor", "plain", "token"))
    monkeypatch.delenv("FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH")
    monkeypatch.setenv("TRTLLM_DISABLE_FP4_QUANT_FAST_MATH", "1")  # For compiled kernels alone.
    assert rows("plain") == {flushed}
    exact, fast = (calls["plain"](math=math) for math in ("exact", "fast"))
    assert lib.raw(exact[0]) != lib.raw(fast[0])
    assert lib.raw(calls["plain"](backend="cute-dsl")[0]) == lib.raw(fast[0])


def test_variables_of_functions_with_one_kernel(
    lib: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SiLU of experts flushes what it reads; smoothing reads no variable but for "cute-dsl".

    KV rows read none. A whole KV cache is quantized as rows are.
    """
    x = np.full((2, 2, 64), 2.0**-50, ml_dtypes.bfloat16)
    x[..., ::3] = TINY
    x[..., :16] = 1
    clean = np.where(x == TINY, np.float32(0), x).astype(x.dtype)
    mask, each = lib.make(np.array([2, 2], np.int32)), lib.make(np.ones(2, np.float32))
    factors = lib.make(np.ones(64, ml_dtypes.bfloat16))

    def codes(call: Callable[..., Any], array: np.ndarray, **how: Any) -> bytes:
        return lib.raw(call(lib.make(array), **how)[0])

    def experts(a: Any, **how: Any) -> Any:
        return fi.silu_and_mul_scaled_nvfp4_experts_quantize(a, mask, each, **how)

    def silu(a: Any, **how: Any) -> Any:
        return fi.silu_and_mul_nvfp4_quantize(a, np.float32(1), **how)

    def smooth(a: Any, **how: Any) -> Any:
        return fi.nvfp4_quantize_smooth(a.reshape(4, 64), factors, np.float32(1), **how)

    def rows(a: Any, **how: Any) -> Any:
        return fi.nvfp4_kv_quantize(a.reshape(4, 64), np.float32(1), **how)

    def pages(a: Any, **how: Any) -> Any:
        cache = a.reshape(1, 1, 4, 64)
        return fi.nvfp4_quantize_paged_kv_cache(cache, cache, k_global_sf=1.0, v_global_sf=1.0,
                                                **how)[0]  # fmt: skip

    wanted = {
        (call, math): codes(call, x, math=math)
        for call in (experts, silu, smooth, rows, pages) for math in ("exact", "fast")
    }  # fmt: skip
    flushed = {call: codes(call, clean, math="exact") for call in (experts, pages)}
    assert all(flushed[call] != wanted[call, "exact"] for call in flushed)
    monkeypatch.setenv("FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH", "1")
    assert codes(experts, x) == flushed[experts] and codes(pages, x) == flushed[pages]
    assert codes(silu, x) == wanted[silu, "exact"] != wanted[silu, "fast"]
    assert codes(smooth, x) == wanted[smooth, "fast"] != wanted[smooth, "exact"]
    assert codes(smooth, x, backend="cute-dsl") == wanted[smooth, "exact"]
    assert codes(rows, x) == wanted[rows, "fast"] != wanted[rows, "exact"]


def test_variables_are_for_nvfp4_of_16_bits(lib: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """MX formats and FP8 inputs have the mode of the argument alone."""
    x = lib.make(example((64, 256), np.float16))
    coded = lib.make(example((64, 256)).astype(ml_dtypes.float8_e4m3fn))
    mask = lib.make(np.array([64], np.int32))
    calls = [
        lambda **how: fi.mxfp4_quantize(x, **how),
        lambda **how: fi.mxfp8_quantize(x, **how),
        lambda **how: fi.mxfp8_grouped_quantize(x.reshape(1, 64, 256), mask, **how),
        lambda **how: fi.fp4_quantize(coded, np.float32(333.3), **how),
    ]
    modes: list[str] = []
    quantize = nf.quantize

    def watched(*arguments: Any, **how: Any) -> Any:
        modes.append(how["math"])
        return quantize(*arguments, **how)

    monkeypatch.setattr(nf, "quantize", watched)
    monkeypatch.setenv("FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH", "1")
    monkeypatch.setenv("FLASHINFER_NVFP4_4OVER6", "1")
    for call in calls:
        call()
        call(math="exact")
    assert modes == ["fast", "exact"] * len(calls)
    calls[-1](backend="cute-dsl")  # The one kernel that reads the variable for FP8.
    calls[-1](backend="cute-dsl", math="fast")
    assert modes[-2:] == ["exact", "fast"]


@pytest.mark.parametrize("given", [True, False])
def test_four_over_six_of_whole_caches(
    lib: Any, given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variable counts there, since upstream calls fp4_quantize() for it."""
    k, v = (example((2, 3, 8, 64)) for _ in range(2))
    encodes = {"k_global_sf": np.float32([20]), "v_global_sf": np.float32([30])} if given else {}
    names = {name: lib.make(value) for name, value in encodes.items()}
    plain = fi.nvfp4_quantize_paged_kv_cache(lib.make(k), lib.make(v), **names)
    monkeypatch.setenv("FLASHINFER_NVFP4_4OVER6", "1")
    found = fi.nvfp4_quantize_paged_kv_cache(lib.make(k), lib.make(v), **names)
    assert found[2:] == plain[2:]
    for half, array in enumerate((k, v)):
        largest = np.abs(array.astype(np.float32)).max()
        encode = list(encodes.values())[half][0] if given else np.float32(448) / largest
        q = nf.quantize(array, "nvfp4", layout="linear", encode_scale=float(encode), math="fast",
                        four_over_six=nf.FourOverSix())  # fmt: skip
        scales = q.scales.reshape(2, 3, 8, 4)
        if half == 1:
            scales = nf.kv_reorder_v_scales(scales)
        assert lib.raw(found[0][half]) == q.values.tobytes() != lib.raw(plain[0][half])
        assert lib.raw(found[1][half].view(found[0][0].dtype)) == scales.tobytes()
