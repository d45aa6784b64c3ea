"""narrowfloat.compat.flashinfer: quantizers and layouts against the independent model, to the bit.

Each test runs on NumPy arrays, on torch tensors where torch is installed, and on CUDA tensors in a
build with CUDA on a machine with a GPU.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from flashinfer_table import BITS, CLOSE, record

import narrowfloat as nf
import narrowfloat.compat.flashinfer as fi

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "golden"))

import reference_model as model  # noqa: E402

try:
    import torch
except ImportError:
    torch = None

BF16 = ml_dtypes.bfloat16
RNG = np.random.default_rng(21)
SCALE = np.float32(300.0)
SILU = "an ulp of SiLU, then the same bits"
LAYOUTS = {fi.SfLayout.layout_128x4: "swizzled_128x4", fi.SfLayout.layout_8x4: "swizzled_8x4",
           fi.SfLayout.layout_linear: "linear"}  # fmt: skip
NAMES = {"bfloat16": "BF16", "float16": "F16", "float8_e4m3fn": "F8_E4M3", "float32": "F32"}
RAW = {1: np.uint8, 2: np.uint16, 4: np.uint32}


class Numpy:
    """Arrays as they are."""

    @staticmethod
    def make(array: np.ndarray) -> Any:
        return array

    @staticmethod
    def raw(value: Any) -> bytes:
        return np.ascontiguousarray(value).tobytes()


class Torch:
    """The same bytes as tensors."""

    @staticmethod
    def make(array: np.ndarray) -> Any:
        if array.dtype.name in ("bfloat16", "float8_e4m3fn"):
            signed = {1: np.int8, 2: np.int16}[array.itemsize]
            return torch.from_numpy(array.view(signed)).view(getattr(torch, array.dtype.name))
        return torch.from_numpy(array)

    @staticmethod
    def raw(value: Any) -> bytes:
        dense = value.contiguous()
        return dense.view(torch.uint8).numpy().tobytes() if dense.dim() else dense.numpy().tobytes()


class Cuda(Torch):
    """Tensors on a GPU."""

    @staticmethod
    def make(array: np.ndarray) -> Any:
        return Torch.make(array).cuda()

    @staticmethod
    def raw(value: Any) -> bytes:
        return Torch.raw(value.cpu())


LIBRARIES: list[type] = [Numpy] if torch is None else [Numpy, Torch]
if torch is not None and torch.cuda.is_available() and nf.build_info()["cuda_enabled"]:
    LIBRARIES.append(Cuda)


@pytest.fixture(params=LIBRARIES, ids=lambda lib: lib.__name__)
def lib(request: pytest.FixtureRequest) -> Any:
    """Where arrays come from."""
    return request.param


def example(shape: tuple[int, ...], dtype: Any = ml_dtypes.bfloat16) -> np.ndarray:
    """Numbers of several magnitudes, a zero row, a large one."""
    x = RNG.standard_normal(shape) * np.exp2(RNG.integers(-4, 4, shape))
    x[..., 0, :] = 0
    return x.astype(dtype)


def wanted(x: np.ndarray, format: str, layout: str, **options: Any) -> model.Quantized:
    """The model's result, fast unless said; x is [rows, cols] or [batch, rows, cols]."""
    options.setdefault("mode", "fast")
    if "encode_scale" in options:
        options["encode_scale"] = np.atleast_1d(options["encode_scale"]).astype(np.float32)
    raw = np.ascontiguousarray(x).view(RAW[x.itemsize])
    raw = raw if raw.ndim == 3 else raw[None]
    return model.quantize(raw, NAMES[x.dtype.name], format, layout, model.Options(**options))


def same(lib: Any, parts: tuple, reference: model.Quantized) -> bool:
    """Codes and scales."""
    return (lib.raw(parts[0]) == reference.values.tobytes()
            and lib.raw(parts[1]) == reference.scales.tobytes())  # fmt: skip


def test_fp4_quantize(lib: Any) -> None:
    """Both formats, all layouts, both modes, scales for a tensor and for each row, FP8 input."""
    for rows, cols in ((3, 96), (130, 160)):
        for dtype in (ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e4m3fn):
            x = example((rows, cols), dtype)
            for math in ("exact", "fast"):
                for swizzled, is_8x4, layout in ((True, False, "swizzled_128x4"),
                                                 (True, True, "swizzled_8x4"),
                                                 (False, False, "linear")):  # fmt: skip
                    got = fi.fp4_quantize(lib.make(x), lib.make(SCALE.reshape(1)), 16, False,
                                          swizzled, is_8x4, math=math)  # fmt: skip
                    assert same(lib, got, wanted(x, "nvfp4", layout, encode_scale=SCALE, mode=math))
                    tall = -(-rows // 128) * 128 if layout == "swizzled_128x4" else rows
                    if layout != "swizzled_8x4":
                        wide = -(-cols // 64) * 4 if swizzled else cols // 16
                        assert tuple(got[1].shape) == (tall, wide)
                    got = fi.fp4_quantize(lib.make(x), None, 32, True, swizzled, is_8x4, math=math)
                    assert same(lib, got, wanted(x, "mxfp4", layout, mode=math))
    x, each = example((5, 64)), np.linspace(1, 500, 5, dtype=np.float32)
    got = fi.fp4_quantize(lib.make(x), lib.make(each))
    assert same(lib, got, wanted(x, "nvfp4", "swizzled_128x4", encode_scale=each))
    decode = np.float32(0.0031)
    got = fi.fp4_quantize(lib.make(x), lib.make(decode.reshape(1)), is_global_scale_inversed=True)
    encode = nf._core.encode_scale_from_decode(float(decode), "fast")
    assert same(lib, got, wanted(x, "nvfp4", "swizzled_128x4", encode_scale=encode))
    record("fp4_quantize", BITS)


def test_column_major_input(lib: Any) -> None:
    """Quantized along its dense axis, and handed back as a view."""
    x = example((32, 48))
    got = fi.fp4_quantize(lib.make(x).T, lib.make(SCALE.reshape(1)))
    reference = fi.fp4_quantize(lib.make(x), lib.make(SCALE.reshape(1)))
    assert tuple(got[0].shape) == (24, 32)
    assert lib.raw(got[0].T) == lib.raw(reference[0])


def test_nvfp4_quantize(lib: Any) -> None:
    """Plain, per token, with a list of rows, shuffled."""
    x = example((128, 128))
    scale = lib.make(SCALE.reshape(1))
    for layout, name in LAYOUTS.items():
        got = fi.nvfp4_quantize(lib.make(x), scale, layout)
        assert same(lib, got, wanted(x, "nvfp4", name, encode_scale=SCALE))
        got = fi.nvfp4_quantize(lib.make(x), np.float32(1 / 2688), layout,
                                per_token_activation=True, math="fast")  # fmt: skip
        reference = wanted(x, "nvfp4_per_token", name, mode="fast")
        assert same(lib, got, reference) and lib.raw(got[2]) == reference.global_scale.tobytes()
    linear = wanted(x, "nvfp4", "linear", encode_scale=SCALE)
    got = fi.nvfp4_quantize(lib.make(x), scale, do_shuffle=True)
    order = np.array([32 * (p // 32) + 4 * (p % 8) + p % 32 // 8 for p in range(128)])
    assert lib.raw(got[0]) == linear.values[0][order].tobytes()
    packed = model.pack_scales(linear.scales.reshape(128, 8)[order], "swizzled_128x4")
    assert lib.raw(got[1]) == packed.tobytes()
    rows = np.array([3, -1, 7], np.int32)
    got = fi.nvfp4_quantize(lib.make(x), np.float32(1 / 2688), per_token_activation=True,
                            expanded_idx_to_permuted_idx=lib.make(rows))  # fmt: skip
    full = wanted(x, "nvfp4_per_token", "swizzled_128x4")
    assert lib.raw(got[0][3]) == full.values[0][3].tobytes()
    got = fi.nvfp4_quantize(lib.make(x), np.float32(1 / 2688), do_shuffle=True, out_scale=0.5,
                            per_token_activation=True)  # fmt: skip
    plain = wanted(x, "nvfp4_per_token", "linear")
    assert lib.raw(got[0]) == plain.values[0][order].tobytes()
    packed = model.pack_scales(plain.scales.reshape(128, 8)[order], "swizzled_128x4")
    assert tuple(got[1].shape) == (128, 8) and lib.raw(got[1]) == packed.tobytes()
    assert lib.raw(got[2]) == (plain.global_scale[order] * np.float32(0.5)).tobytes()
    record("nvfp4_quantize", BITS)


@pytest.mark.parametrize("scale", [0.0, -1.0, np.nan, np.full(1, np.inf, np.float32)])
def test_base_scales_that_are_none(lib: Any, scale: Any) -> None:
    """Where the host has the value; on a GPU the formulas apply to any (spec 1.6)."""
    x = lib.make(example((4, 64)))
    if isinstance(scale, np.ndarray) and lib.__name__ != "Cuda":
        scale = lib.make(scale.copy())
    elif isinstance(scale, np.ndarray):
        scale = Torch.make(scale.copy())  # A scale of the CPU for rows on a GPU.
    with pytest.raises(ValueError, match="a_global_sf: expected a finite value > 0"):
        fi.nvfp4_quantize(x, scale, per_token_activation=True)
    with pytest.raises(ValueError, match=r"a_global_sf: .* shape \(4,\)"):
        fi.nvfp4_quantize(x, lib.make(np.ones(4, np.float32)), per_token_activation=True)


def test_mx_formats(lib: Any) -> None:
    """MXFP4 and MXFP8 in every layout; MXFP8's alignment; back to float32."""
    x = example((9, 160))
    for layout, name in LAYOUTS.items():
        codes, scales = fi.mxfp4_quantize(lib.make(x), sfLayout=layout)
        reference = wanted(x, "mxfp4", name)
        assert same(lib, (codes, scales), reference)
        back = model.dequantize(reference, "F32").tobytes()
        assert lib.raw(fi.mxfp4_dequantize(codes, scales, layout)) == back
        flags = {"is_sf_swizzled_layout": name != "linear",
                 "is_sf_8x4_layout": name == "swizzled_8x4"}  # fmt: skip
        floats = fi.e2m1_and_ufp8sf_scale_to_float(codes, scales, None, 32, 0, **flags)
        assert lib.raw(floats) == back
        for alignment in (32, 128):
            got = fi.mxfp8_quantize(lib.make(x), alignment=alignment, sf_swizzle_layout=layout)
            reference = wanted(x, "mxfp8", name, alignment=alignment)
            assert same(lib, got, reference) and len(got[1].shape) == 1
            assert str(got[0].dtype).endswith("float8_e4m3fn")
        got = fi.mxfp8_quantize(lib.make(x), sf_swizzle_layout=layout)
        back = model.dequantize(wanted(x, "mxfp8", name), "F32").tobytes()
        assert lib.raw(fi.mxfp8_dequantize_host(*got, sf_swizzle_layout=layout)) == back
    codes, scales = fi.mxfp4_quantize(lib.make(x), sfLayout=fi.SfLayout.layout_linear)
    back = model.dequantize(wanted(x, "mxfp4", "linear"), "F32").tobytes()
    assert lib.raw(fi.mxfp4_dequantize_host(codes, scales)) == back
    plain = fi.mxfp8_quantize(lib.make(example((4, 64), np.float32)))[0]
    assert str(plain.dtype).endswith("uint8")
    for name in ("mxfp4_quantize", "mxfp4_dequantize", "mxfp4_dequantize_host", "mxfp8_quantize",
                 "mxfp8_dequantize_host"):  # fmt: skip
        record(name, BITS)


def test_upstream_s_bits_are_the_default(lib: Any) -> None:
    """Where its kernels flush, divide or give NaN otherwise than IEEE arithmetic would."""
    tiny = np.float32(2.0**-127).astype(BF16)  # A denormal.
    x = np.zeros((2, 64), BF16)
    x[0, :32], x[0, 32:], x[1] = tiny, 1, 1
    x[1, 3] = tiny
    codes, scales = (lib.raw(part) for part in fi.mxfp8_quantize(lib.make(x), False))
    assert scales[0] == 0 and codes[:32] == bytes(32)  # A block of denormals.
    assert codes[64 + 3] == 0 and codes[64] != 0  # One beside normal elements.
    kept = lib.raw(fi.mxfp8_quantize(lib.make(x), False, math="exact")[0])
    assert kept[:32] == bytes([kept[0]]) * 32 and kept[0] != 0
    ones = lib.make(np.array([[0, 1] * 32], np.float16))
    scale = lib.make(np.array([2.0**127], np.float32))
    fast = lib.raw(fi.nvfp4_quantize(ones, scale, fi.SfLayout.layout_linear)[0])
    exact = lib.raw(fi.nvfp4_quantize(ones, scale, fi.SfLayout.layout_linear, math="exact")[0])
    assert fast != exact and exact[0] & 15 == 0  # A zero is one in exact arithmetic alone.
    rows = lib.make(example((256, 64), np.float16))
    base = np.float32(1 / 2688)
    found = [lib.raw(fi.nvfp4_quantize(rows, base, per_token_activation=True, **how)[2])
             for how in ({}, {"math": "fast"}, {"math": "exact"})]  # fmt: skip
    assert found[0] == found[1]
    fast_rows, exact_rows = (np.frombuffer(part, np.int32) for part in found[1:])
    moved = np.abs(fast_rows - exact_rows)
    assert moved.max() <= 2 and 0 < (moved > 0).mean() < 0.5


def test_e2m1_to_float(lib: Any) -> None:
    """NVFP4 with its decode scale."""
    x = example((6, 64))
    codes, scales = fi.nvfp4_quantize(lib.make(x), lib.make(SCALE.reshape(1)))
    decode = np.float32([nf.decode_scale_from_encode(float(SCALE))])
    got = fi.e2m1_and_ufp8sf_scale_to_float(codes, scales, lib.make(decode))
    back = model.dequantize(wanted(x, "nvfp4", "swizzled_128x4", encode_scale=SCALE), "F32")
    assert lib.raw(got) == back.tobytes()
    with pytest.raises(NotImplementedError, match="sf_vec_size, ufp8_type.*16, 0"):
        fi.e2m1_and_ufp8sf_scale_to_float(codes, scales, None, 16, 0)
    with pytest.raises(ValueError, match="sf_vec_size, ufp8_type.*48, 1"):
        fi.e2m1_and_ufp8sf_scale_to_float(codes, scales, None, 48, 1)
    record("e2m1_and_ufp8sf_scale_to_float", BITS, "E4M3 scales with 16, UE8M0 with 32 elements")


def test_silu_and_smooth(lib: Any) -> None:
    """The 16-bit tensor that an unfused operation stores, then quantized."""
    x = example((7, 128))
    up = nf.silu_mul_quantize(x, "nvfp4", encode_scale=float(SCALE), math="fast")
    scale = lib.make(SCALE.reshape(1))
    got = fi.silu_and_mul_nvfp4_quantize(lib.make(x), scale)
    assert lib.raw(got[0]) == up.values.tobytes() and lib.raw(got[1]) == up.scales.tobytes()
    factors = example((2, 128))[1]
    y = (x.astype(np.float32) * factors.astype(np.float32)).astype(ml_dtypes.bfloat16)
    got = fi.nvfp4_quantize_smooth(lib.make(x), lib.make(factors), scale)
    assert same(lib, got, wanted(y, "nvfp4", "swizzled_128x4", encode_scale=SCALE))
    assert len(got[1].shape) == 1
    record("silu_and_mul_nvfp4_quantize", CLOSE, within=SILU)
    record("nvfp4_quantize_smooth", BITS)


def test_batched_and_grouped(lib: Any) -> None:
    """Scales for each expert; rows beyond the mask have zero scales."""
    x = example((3, 40, 96))
    got = fi.nvfp4_batched_quantize(lib.make(x), lib.make(SCALE.reshape(1)))
    assert same(lib, got, wanted(x, "nvfp4", "swizzled_128x4", encode_scale=SCALE))
    record("nvfp4_batched_quantize", BITS)
    mask, each = np.array([40, 7, 0], np.int32), np.float32([100, 200, 300])
    rows = np.arange(40) < mask[:, None]
    reference = wanted(x, "nvfp4", "swizzled_128x4", encode_scale=each, valid_rows=mask.tolist())
    codes, scales = fi.scaled_fp4_grouped_quantize(lib.make(x), lib.make(mask), lib.make(each))
    assert tuple(codes.shape) == (40, 48, 3) and tuple(scales.shape) == (32, 4, 1, 4, 2, 3)
    physical = np.frombuffer(lib.raw(permute(codes, 2, 0, 1)), np.uint8).reshape(3, 40, 48)
    assert (physical[rows] == reference.values[rows]).all()
    flat = permute(view_bytes(scales), 5, 2, 4, 0, 1, 3)
    assert lib.raw(flat) == reference.scales.tobytes()
    record("scaled_fp4_grouped_quantize", BITS)
    codes, scales = fi.mxfp8_grouped_quantize(lib.make(x), lib.make(mask))
    reference = wanted(x, "mxfp8", "swizzled_128x4", valid_rows=mask.tolist(), alignment=128)
    assert tuple(codes.shape) == (40, 128, 3)
    physical = np.frombuffer(lib.raw(permute(codes, 2, 0, 1)), np.uint8).reshape(3, 40, 128)
    assert (physical[rows] == reference.values[rows]).all()
    assert lib.raw(permute(scales, 5, 2, 4, 0, 1, 3)) == reference.scales.tobytes()
    record("mxfp8_grouped_quantize", BITS)
    up = nf.silu_mul_quantize(x, "nvfp4", batched=True, valid_rows=mask, encode_scale=each,
                              math="fast")  # fmt: skip
    codes, scales = fi.silu_and_mul_scaled_nvfp4_experts_quantize(
        lib.make(x), lib.make(mask), lib.make(each)
    )
    assert lib.raw(permute(codes, 2, 0, 1)) == up.values.tobytes()
    assert lib.raw(permute(view_bytes(scales), 5, 2, 4, 0, 1, 3)) == up.scales.tobytes()
    record("silu_and_mul_scaled_nvfp4_experts_quantize", CLOSE, within=SILU)


def permute(value: Any, *axes: int) -> Any:
    """Axes in another order."""
    return value.transpose(*axes) if isinstance(value, np.ndarray) else value.permute(*axes)


def view_bytes(value: Any) -> Any:
    """uint8 elements."""
    return value.view(np.uint8 if isinstance(value, np.ndarray) else torch.uint8)


def test_group_quantization(lib: Any) -> None:
    """Three types, both orders of scales, by the formulas of the specification."""
    x = example((5, 256))
    x[3] = 0
    groups = x.astype(np.float32).reshape(5, 4, 64)
    largest = np.maximum(np.abs(groups).max(-1), np.float32(1e-10))
    for name, top in (("float8_e4m3fn", 448), ("float8_e5m2", 57344), ("int8", 127)):
        s = (largest / np.float32(top)).astype(np.float32)
        rows = groups * (np.float32(1) / s)[..., None]
        columns = groups / s[..., None]

        def code(v: np.ndarray, name: str = name) -> bytes:
            if name == "int8":
                return np.floor(v + np.float32(0.5)).astype(np.int8).tobytes()
            return v.astype(getattr(ml_dtypes, name)).tobytes()

        codes, scales = fi.per_token_group_quant_8bit(lib.make(x), 64, dst_dtype=name)
        assert str(codes.dtype).endswith(name)
        assert (lib.raw(codes), lib.raw(scales)) == (code(rows), s.tobytes())
        codes, scales = fi.per_token_group_quant_8bit(
            lib.make(x), 64, 1e-10, name, column_major_scales=True, scale_tma_aligned=True
        )
        assert (lib.raw(codes), lib.raw(scales)) == (code(columns), s.tobytes())
        assert strides(scales) == (1, 8) and tuple(scales.shape) == (5, 4)
    codes, scales = fi.per_token_group_quant_8bit(
        lib.make(x), 64, column_major_scales=True, scale_ue8m0=True
    )
    powers = np.exp2(np.ceil(np.log2(np.maximum(largest / np.float32(448), 1e-10))))
    assert lib.raw(scales) == powers.astype(np.float32).tobytes()
    assert strides(scales) == (1, 5) and tuple(scales.shape) == (5, 4)
    for name in ("scale_ue8m0", "scale_tma_aligned"):
        with pytest.raises(AssertionError, match=name):
            fi.per_token_group_quant_8bit(lib.make(x), 64, **{name: True})
    with pytest.raises(ValueError, match="dtype"):
        fi.per_token_group_quant_8bit(lib.make(x), 64, dst_dtype="float16")
    record("per_token_group_quant_8bit", BITS)


def strides(array: Any) -> tuple[int, ...]:
    """In elements."""
    if isinstance(array, np.ndarray):
        return tuple(step // array.itemsize for step in array.strides)
    return tuple(array.stride())


def test_layouts(lib: Any) -> None:
    """Interleaving and shuffles by the formulas of the specification, element by element."""
    sf = RNG.integers(0, 255, (2, 130, 7)).astype(np.uint8)
    got = fi.block_scale_interleave(lib.make(sf))
    packed = [model.pack_scales(part, "swizzled_128x4") for part in sf]
    assert lib.raw(got) == b"".join(part.tobytes() for part in packed)
    assert lib.raw(fi.nvfp4_block_scale_interleave(lib.make(sf[0]))) == packed[0].tobytes()
    size = sum(part.size for part in packed)
    out = lib.make(np.zeros(size, np.uint8))
    assert fi.block_scale_interleave(lib.make(sf), out=out) is out
    assert lib.raw(out) == lib.raw(got)
    for wrong in (np.zeros((2, size // 2), np.uint8), np.zeros(size + 1, np.uint8),
                  np.zeros(size, np.float32)):  # fmt: skip
        with pytest.raises(ValueError, match="out: must be a contiguous flat tensor of shape"):
            fi.block_scale_interleave(lib.make(sf), out=lib.make(wrong))
    for wide in (sf.astype(BF16), sf[0].astype(BF16)):
        got = fi.block_scale_interleave(lib.make(wide))
        assert str(got.dtype).endswith("bfloat16") and len(got.shape) == 1
        halves = [fi.block_scale_interleave(np.ascontiguousarray(part)) for part in
                  np.moveaxis(wide.view(np.uint8).reshape(*wide.shape, 2), -1, 0)]  # fmt: skip
        assert lib.raw(got) == np.stack(halves, -1).tobytes()
    shuffled = fi.shuffle_matrix_sf_a(lib.make(sf[0, :128].astype(BF16)), 128)
    assert str(shuffled.dtype).endswith("bfloat16")
    order = np.array([32 * (p // 32) + 4 * (p % 8) + p % 32 // 8 for p in range(128)])
    again = fi.block_scale_interleave(lib.make(sf[0, :128][order].astype(BF16)))
    assert lib.raw(shuffled) == lib.raw(again)
    t = RNG.integers(0, 255, (128, 12)).astype(np.uint8)
    for tile, block, step in ((128, 32, 4), (64, 16, 2)):
        moved = np.zeros_like(t)
        for row in range(128):
            j = row % block
            moved[row - j + 8 * (j % step) + j // step] = t[row]
        assert lib.raw(fi.shuffle_matrix_a(lib.make(t), tile)) == moved.tobytes()
        packed = model.pack_scales(moved, "swizzled_128x4")
        assert lib.raw(fi.shuffle_matrix_sf_a(lib.make(t), tile)) == packed.tobytes()
    paired = np.zeros_like(t)
    paired[0::2], paired[1::2] = t[:64], t[64:]
    assert lib.raw(fi.reorder_rows_for_gated_act_gemm(lib.make(t))) == paired.tobytes()
    blocks = np.stack([t[:, 4 * k : 4 * k + 4] for k in range(3)])
    assert lib.raw(fi.convert_to_block_layout(lib.make(t), 4)) == blocks.tobytes()
    for name in ("block_scale_interleave", "nvfp4_block_scale_interleave", "shuffle_matrix_a",
                 "shuffle_matrix_sf_a", "reorder_rows_for_gated_act_gemm",
                 "convert_to_block_layout"):  # fmt: skip
        record(name, BITS)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, ml_dtypes.bfloat16])
def test_rows_and_blocks_undone(lib: Any, dtype: Any) -> None:
    """The ways back give what was there, of any type."""
    t = example((64, 12), np.float32).astype(dtype)
    for tile in (128, 64):
        there = fi.shuffle_matrix_a(input_tensor=lib.make(t), epilogue_tile_m=tile)
        assert lib.raw(fi.undo_shuffle_matrix_a(there, tile)) == t.tobytes() != lib.raw(there)
    there = fi.reorder_rows_for_gated_act_gemm(x=lib.make(t))
    assert lib.raw(fi.undo_reorder_rows_for_gated_act_gemm(there)) == t.tobytes() != lib.raw(there)
    there = fi.convert_to_block_layout(input_tensor=lib.make(t), blockK=4)
    back = fi.undo_convert_to_block_layout(there)
    assert lib.raw(back) == t.tobytes() != lib.raw(there) and tuple(back.shape) == (64, 12)
    for name in ("shuffle_matrix_a", "reorder_rows_for_gated_act_gemm", "convert_to_block_layout"):
        record(f"undo_{name}", BITS, "not FlashInfer's")


def test_swizzled_scales_undone(lib: Any) -> None:
    """Scales come back without padding, of one matrix or a batch of them."""
    sf = RNG.integers(0, 255, (2, 128, 7)).astype(np.uint8)
    for tile in (128, 64):
        packed = fi.shuffle_matrix_sf_a(lib.make(sf[0]), tile)
        back = fi.undo_shuffle_matrix_sf_a(packed, tile, 128, 7)
        assert lib.raw(back) == sf[0].tobytes() and tuple(back.shape) == (128, 7)
    back = fi.undo_block_scale_interleave(fi.block_scale_interleave(lib.make(sf)), 128, 7, 2)
    assert lib.raw(back) == sf.tobytes() and tuple(back.shape) == (2, 128, 7)
    part = lib.make(np.ascontiguousarray(sf[1, :40]))
    back = fi.undo_block_scale_interleave(fi.block_scale_interleave(part), 40, 7)
    assert lib.raw(back) == sf[1, :40].tobytes() and tuple(back.shape) == (40, 7)
    for name in ("shuffle_matrix_sf_a", "block_scale_interleave"):
        record(f"undo_{name}", BITS, "not FlashInfer's")


def test_packbits(lib: Any) -> None:
    """Against NumPy's own."""
    bits = RNG.integers(0, 2, 37).astype(bool)
    ends = np.array([0, 5, 5, 21, 37], np.int32)
    for order in ("big", "little"):
        packed = np.packbits(bits, bitorder=order).tobytes()
        assert lib.raw(fi.packbits(lib.make(bits), order)) == packed
        data, offsets = fi.segment_packbits(lib.make(bits), lib.make(ends), order)
        pairs = zip(ends[:-1], ends[1:], strict=True)
        parts = [np.packbits(bits[a:b], bitorder=order) for a, b in pairs]
        assert lib.raw(data) == np.concatenate(parts).tobytes()
        assert lib.raw(offsets) == np.int32([0, 1, 1, 3, 5]).tobytes()
    with pytest.raises(ValueError, match="bitorder"):
        fi.packbits(lib.make(bits), "middle")
    for start in range(1, 9):  # Kernels read 16 bytes from any of their multiples.
        part = lib.make(np.concatenate([bits[:start], bits]))[start:]
        assert lib.raw(fi.packbits(part)) == lib.raw(fi.packbits(lib.make(bits)))
    record("packbits", BITS)
    record("segment_packbits", BITS,
           "waits for the GPU, as upstream: offsets say how long the result is")


def test_global_scale(lib: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scale of a tensor, of zeros, per token, with 4-over-6."""
    x = example((4, 64))
    top = np.abs(x.astype(np.float32)).max()
    found = fi.make_nvfp4_global_scale(lib.make(x), False)
    assert lib.raw(found) == np.float32(2688 / top).tobytes()
    zeros = fi.make_nvfp4_global_scale(lib.make(np.zeros((4, 64), np.float32)), False)
    assert float(zeros[0]) == np.finfo(np.float32).max
    assert float(fi.make_nvfp4_global_scale(lib.make(x), True)[0]) == np.float32(1 / 2688)
    assert float(fi.make_nvfp4_global_scale(lib.make(x), False, 5.0)[0]) == 5
    recipe = fi.NVFP44Over6Config(256)
    for how in ({"nvfp4_4over6_config": recipe}, {"four_over_six": nf.FourOverSix(e4m3_max=256)}):
        got = fi.make_nvfp4_global_scale(lib.make(x), False, **how)
        assert lib.raw(got) == np.float32(1536 / top).tobytes()
    monkeypatch.setenv("FLASHINFER_NVFP4_4OVER6", "1")  # Upstream's does not read it either.
    monkeypatch.setenv("FLASHINFER_NVFP4_4OVER6_E4M3_USE_256", "1")
    got = fi.make_nvfp4_global_scale(lib.make(x), False)
    assert lib.raw(got) == np.float32(2688 / top).tobytes()
    record("make_nvfp4_global_scale", BITS)


def test_four_over_six(lib: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keyword of every NVFP4 quantizer: what the variables say, and more than they."""
    x, scale = lib.make(example((64, 256))), lib.make(SCALE.reshape(1))
    factors, batch = lib.make(example((2, 256))[1]), lib.make(example((3, 16, 256)))
    mask, each = lib.make(np.array([16, 16, 16], np.int32)), lib.make(np.full(3, SCALE))
    calls = [
        lambda **how: fi.fp4_quantize(x, scale, **how),
        lambda **how: fi.nvfp4_quantize(x, scale, **how),
        lambda **how: fi.nvfp4_quantize(x, np.float32(1 / 1536), per_token_activation=True, **how),
        lambda **how: fi.silu_and_mul_nvfp4_quantize(x, scale, **how),
        lambda **how: fi.nvfp4_quantize_smooth(x, factors, scale, backend="cute-dsl", **how),
        lambda **how: fi.nvfp4_batched_quantize(batch, scale, **how),
        lambda **how: fi.scaled_fp4_grouped_quantize(batch, mask, each, **how),
        lambda **how: fi.silu_and_mul_scaled_nvfp4_experts_quantize(batch, mask, each, **how),
    ]
    option = nf.FourOverSix(error="mse", error_math="fast", e4m3_max=256)
    plain, chosen = ([lib.raw(call(**how)[0]) for call in calls]
                     for how in ({}, {"four_over_six": option}))  # fmt: skip
    default = [lib.raw(call(four_over_six=True)[0]) for call in calls]
    assert all(a != b for a, b in zip(plain, chosen, strict=True))
    for name, value in (("", "1"), ("_ERR_MODE", "MSE"), ("_ERR_USE_FAST_MATH", "1"),
                        ("_E4M3_USE_256", "1")):  # fmt: skip
        monkeypatch.setenv(f"FLASHINFER_NVFP4_4OVER6{name}", value)
    assert [lib.raw(call()[0]) for call in calls] == chosen
    assert [lib.raw(call(four_over_six=False)[0]) for call in calls] == plain
    assert [lib.raw(call(four_over_six=True)[0]) for call in calls] == default
    with pytest.raises(ValueError, match="four_over_six"):
        fi.fp4_quantize(x, None, 32, True, four_over_six=True)


X = example((4, 64))
REFUSED = {
    "global_scale": lambda: fi.fp4_quantize(X),
    "sf_use_ue8m0": lambda: fi.fp4_quantize(X, SCALE, 16, True),
    "backend": lambda: fi.fp4_quantize(X, SCALE, backend="vulkan"),
    "sf_vec_size": lambda: fi.nvfp4_quantize(X, SCALE, sf_vec_size=32),
    "sfLayout": lambda: fi.nvfp4_quantize(X, SCALE, 3),
    "do_shuffle": lambda: fi.nvfp4_quantize(X, SCALE, do_shuffle=True),
    "expanded_idx": lambda: fi.nvfp4_quantize(X, SCALE, expanded_idx_to_permuted_idx=X),
    "unswizzled_sf": lambda: fi.block_scale_interleave(X.astype(np.float32)),
    "multiple of 32": lambda: fi.shuffle_matrix_a(X, 128),
    "input_tensor": lambda: fi.shuffle_matrix_sf_a(X.astype(np.uint8), 128),
    "even number": lambda: fi.reorder_rows_for_gated_act_gemm(X[:3]),
    "columns": lambda: fi.convert_to_block_layout(X, 48),
    "group_size": lambda: fi.mxfp4_dequantize_host(X, X, 16),
}


@pytest.mark.parametrize("word", list(REFUSED))
def test_value_errors(word: str) -> None:
    """The message names the argument."""
    with pytest.raises(ValueError, match=word):
        REFUSED[word]()
