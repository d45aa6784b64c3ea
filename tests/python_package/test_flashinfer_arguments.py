"""narrowfloat.compat.flashinfer: errors of quantizers and layouts begin with the caller's argument.

They say what was expected and what came, whatever the library calls the argument.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import narrowfloat.compat.flashinfer as fi

BF16 = ml_dtypes.bfloat16
X, WEIGHT, BATCH = np.ones((4, 64), BF16), np.ones(64, BF16), np.ones((2, 8, 64), BF16)
DOUBLE, NARROW = X.astype(np.float64), np.ones((4, 60), BF16)
MASK, TWO, THREE = np.ones(2, np.int32), np.ones(2, np.float32), np.ones(3, np.float32)
CODES, IMAGE = np.zeros((4, 32), np.uint8), np.zeros(512, np.uint8)
BYTES = np.zeros((128, 4), np.uint8)

# Function, its arguments, one of them wrong -> how the message begins.
CASES: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], str]] = [
    (fi.fp4_quantize, (DOUBLE, 1.0), {}, "input: expected dtype"),
    (fi.fp4_quantize, (NARROW, 1.0), {}, "input: columns: .*16, got 60"),
    (fi.fp4_quantize, (X, THREE), {}, "global_scale: expected 1 or 4 values, got"),
    (fi.fp4_quantize, (X, -1.0), {}, "global_scale: expected a finite value > 0, got -1"),
    (fi.fp4_quantize, (X, -1.0), {"is_global_scale_inversed": True}, "global_scale: .*got -1"),
    (fi.fp4_quantize, (X, THREE), {"is_global_scale_inversed": True}, "global_scale: .*1 or 4"),
    (fi.fp4_quantize, (X, 1.0), {"math": "rough"}, 'math: expected one of .*"rough"'),
    (fi.fp4_quantize, (X, None, 32, True), {"math": "rough"}, 'math: expected one of .*"rough"'),
    (fi.fp4_quantize, (X.T, THREE), {}, "global_scale: expected 1 or"),
    (fi.nvfp4_quantize, (DOUBLE, 1.0), {}, "a: expected dtype"),
    (fi.nvfp4_quantize, (X, THREE), {}, "a_global_sf: expected 1 or 4 values, got"),
    (fi.nvfp4_quantize, (X, None), {}, "a_global_sf: "),
    (fi.nvfp4_quantize, (BATCH, 1.0), {"do_shuffle": True}, "a: expected .*M, K.*2, 8, 64"),
    (fi.nvfp4_quantize, (BATCH, 1.0), {"per_token_activation": True}, "a: expected .*M, K"),
    (fi.nvfp4_quantize, (X, 1.0), {"per_token_activation": True, "do_shuffle": True},
     "a: do_shuffle needs a multiple of 128 rows and of 64 columns, got .4, 64"),
    (fi.nvfp4_quantize, (X, 1.0), {"out_scale": 2.0}, "out_scale: only supported with per_token"),
    (fi.nvfp4_quantize, (X, 1.0), {"per_token_activation": True,
                                   "expanded_idx_to_permuted_idx": TWO},
     "expanded_idx_to_permuted_idx: expected dtype I32"),
    (fi.mxfp4_quantize, (NARROW,), {}, "a: columns: .*32, got 60"),
    (fi.silu_and_mul_nvfp4_quantize, (X[:, :63], 1.0), {}, "input: expected an even number"),
    (fi.silu_and_mul_nvfp4_quantize, (NARROW, 1.0), {}, "input: half of the columns: .*got 30"),
    (fi.silu_and_mul_nvfp4_quantize, (X, -1.0), {}, "global_scale: "),
    (fi.nvfp4_quantize_smooth, (X.astype(np.float16), WEIGHT, 1.0), {}, "x: expected dtype BF16"),
    (fi.nvfp4_quantize_smooth, (X, WEIGHT[:3], 1.0), {}, "pre_quant_scale: expected 64 values"),
    (fi.nvfp4_quantize_smooth, (X, WEIGHT, THREE), {}, "global_scale: expected 1 or 4"),
    (fi.nvfp4_batched_quantize, (X, 1.0), {}, r"a: expected \[B, M, K\], got shape \(4, 64\)"),
    (fi.nvfp4_batched_quantize, (BATCH, THREE), {}, "a_global_sf: expected 1 or 8"),
    (fi.scaled_fp4_grouped_quantize, (BATCH, MASK[:1], TWO), {}, "mask: expected 2 values"),
    (fi.scaled_fp4_grouped_quantize, (BATCH, TWO, TWO), {}, "mask: expected dtype I32, got F32"),
    (fi.scaled_fp4_grouped_quantize, (BATCH, MASK, THREE), {}, "a_global_sf: expected 1 or 2"),
    (fi.scaled_fp4_grouped_quantize, (X, MASK, TWO), {}, "a: expected .*B, M, K"),
    (fi.silu_and_mul_scaled_nvfp4_experts_quantize, (BATCH, MASK[:1], TWO), {}, "mask: expected"),
    (fi.silu_and_mul_scaled_nvfp4_experts_quantize, (X, MASK, TWO), {}, "a: expected .*2 . K"),
    (fi.mxfp8_quantize, (DOUBLE,), {}, "input: expected dtype"),
    (fi.mxfp8_quantize, (X,), {"alignment": 33}, "alignment: .*got 33"),
    (fi.mxfp8_grouped_quantize, (BATCH, MASK[:1]), {}, "mask: expected 2 values"),
    (fi.mxfp8_grouped_quantize, (X, MASK), {}, "a: expected .*B, M, K"),
    (fi.per_token_group_quant_8bit, (DOUBLE, 32), {}, "x: expected dtype"),
    (fi.per_token_group_quant_8bit, (BATCH, 32), {"column_major_scales": True}, "x: expected"),
    (fi.per_token_group_quant_8bit, (X, 48), {}, "group_size: expected a divisor"),
    (fi.per_token_group_quant_8bit, (X, 32), {"dst_dtype": "float16"}, "dst_dtype: expected"),
    (fi.make_nvfp4_global_scale, (MASK, False), {}, "input_tensor: expected dtype"),
    (fi.packbits, (WEIGHT, "up"), {}, "bitorder: expected"),
    (fi.segment_packbits, (WEIGHT, TWO), {}, "indptr: expected dtype"),
    (fi.segment_packbits, (WEIGHT, np.int32([0, 99])), {}, "indptr: expected ascending"),
    (fi.rmsnorm_fp4quant, (X, WEIGHT[:3]), {}, "weight: expected 64 values"),
    (fi.rmsnorm_fp4quant, (X.astype(np.float32), WEIGHT), {}, "input: expected dtype"),
    (fi.rmsnorm_fp4quant, (X, WEIGHT), {"global_scale": THREE}, "global_scale: expected 1 or 4"),
    (fi.rmsnorm_fp4quant, (X, WEIGHT), {"eps": -1.0}, "eps: expected"),
    (fi.rmsnorm_fp4quant, (NARROW, WEIGHT[:60]), {}, "input: columns: "),
    (fi.add_rmsnorm_fp4quant, (X, X[:2].copy(), WEIGHT), {}, "residual: expected 4 rows"),
    (fi.add_rmsnorm_fp4quant, (X, X.copy(), WEIGHT), {"y_out": X[:2].copy()}, "y_out: expected"),
    (fi.mxfp4_dequantize, (CODES, IMAGE[:5]), {}, "a_sf: expected 512 bytes, .*got"),
    (fi.mxfp4_dequantize, (CODES.astype(np.float32), IMAGE), {}, "a_fp4: expected .*float32"),
    (fi.mxfp4_dequantize, (CODES[:, :15], IMAGE), {}, "a_fp4: columns: "),
    (fi.mxfp4_dequantize_host, (CODES, THREE), {}, "scale: expected uint8.*float32"),
    (fi.mxfp8_dequantize_host, (CODES, IMAGE[:5]), {}, "scale_tensor: expected 512 bytes"),
    (fi.e2m1_and_ufp8sf_scale_to_float, (CODES, IMAGE, THREE), {}, "global_scale_tensor: "),
    (fi.block_scale_interleave, (X.astype(np.float32),), {}, "unswizzled_sf: expected uint8 or"),
    (fi.undo_block_scale_interleave, (IMAGE[:5], 4, 4), {}, "swizzled_sf: expected 512 bytes"),
    (fi.undo_block_scale_interleave, (THREE, 4, 4), {}, "swizzled_sf: expected uint8.*float32"),
    (fi.undo_block_scale_interleave, (IMAGE, -4, 4), {}, "rows: expected .*got -4"),
    (fi.shuffle_matrix_a, (X, 128), {}, "input_tensor: expected a multiple of 32 rows, got 4"),
    (fi.shuffle_matrix_a, (X, 0), {}, "epilogue_tile_m: expected a positive number, got 0"),
    (fi.undo_shuffle_matrix_a, (X, 64), {}, "input_tensor: expected a multiple of 16 rows, got 4"),
    (fi.shuffle_matrix_sf_a, (BYTES[:96], 128), {}, "input_tensor: .*128 rows, got 96"),
    (fi.shuffle_matrix_sf_a, (BYTES[None], 128), {}, "input_tensor: expected .*rows, blocks"),
    (fi.shuffle_matrix_sf_a, (BYTES.astype(np.float32), 128), {}, "input_tensor: .*float32"),
    (fi.shuffle_matrix_sf_a, (BYTES, 128, 8), {}, "num_elts_per_sf: expected 16 or 32"),
    (fi.undo_shuffle_matrix_sf_a, (BYTES, 128, 96, 4), {}, "rows: expected a multiple of 128"),
    (fi.undo_shuffle_matrix_sf_a, (BYTES, 128, 256, 4), {}, "input_tensor: expected 1024 bytes"),
    (fi.reorder_rows_for_gated_act_gemm, (X[:3],), {}, "x: expected an even number of rows"),
    (fi.undo_reorder_rows_for_gated_act_gemm, (X[:3],), {}, "x: expected an even number of rows"),
    (fi.convert_to_block_layout, (BATCH, 8), {}, r"input_tensor: expected \[M, K\], got .*2, 8"),
    (fi.convert_to_block_layout, (X, 48), {}, "input_tensor: expected a multiple of 48 columns"),
    (fi.convert_to_block_layout, (X, 0), {}, "blockK: expected a positive number, got 0"),
    (fi.undo_convert_to_block_layout, (X,), {}, "input_tensor: expected .*blockK.*got shape"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "args", "kwargs", "words"), CASES,
                         ids=[f"{case[0].__name__}-{i}" for i, case in enumerate(CASES)])
def test_value_errors(function: Callable[..., Any], args: Any, kwargs: Any, words: str) -> None:
    """Errors of shapes, types and values."""
    with pytest.raises(ValueError, match=f"(?s)^{words}"):
        function(*args, **kwargs)


FIRST = {
    "a": (fi.nvfp4_quantize, fi.mxfp4_quantize, fi.nvfp4_batched_quantize,
          fi.scaled_fp4_grouped_quantize, fi.mxfp8_grouped_quantize,
          fi.silu_and_mul_scaled_nvfp4_experts_quantize),
    "input": (fi.fp4_quantize, fi.mxfp8_quantize, fi.silu_and_mul_nvfp4_quantize,
              fi.rmsnorm_fp4quant, fi.add_rmsnorm_fp4quant, fi.mxfp8_dequantize_host),
    "x": (fi.nvfp4_quantize_smooth, fi.per_token_group_quant_8bit, fi.packbits,
          fi.segment_packbits, fi.reorder_rows_for_gated_act_gemm,
          fi.undo_reorder_rows_for_gated_act_gemm),
    "input_tensor": (fi.shuffle_matrix_a, fi.shuffle_matrix_sf_a, fi.convert_to_block_layout,
                     fi.undo_shuffle_matrix_a, fi.undo_shuffle_matrix_sf_a,
                     fi.undo_convert_to_block_layout, fi.make_nvfp4_global_scale),
    "unswizzled_sf": (fi.block_scale_interleave,),
    "swizzled_sf": (fi.undo_block_scale_interleave,),
    "a_fp4": (fi.mxfp4_dequantize,),
    "weight": (fi.mxfp4_dequantize_host,),
    "e2m1_tensor": (fi.e2m1_and_ufp8sf_scale_to_float,),
}  # fmt: skip
FUNCTIONS = [(name, function) for name, functions in FIRST.items() for function in functions]


@pytest.mark.parametrize(("name", "function"), FUNCTIONS,
                         ids=[function.__name__ for _, function in FUNCTIONS])
def test_no_array(name: str, function: Callable[..., Any]) -> None:
    """A list and None are a TypeError, a scalar array a ValueError."""
    others = [X] * 5  # Never looked at.
    for value in ([1.0, 2.0], None):
        with pytest.raises(TypeError, match=f"^{name}: expected an array.*{type(value).__name__}$"):
            call(function, value, others)
    with pytest.raises(ValueError, match=f"^{name}: expected at least one axis, got a scalar"):
        call(function, np.zeros((), BF16), others)


def call(function: Callable[..., Any], first: Any, others: list[Any]) -> Any:
    """With as many of the others as the function needs."""
    needed = function.__wrapped__.__code__.co_argcount - 1 - len(function.__wrapped__.__defaults__
                                                                 or ())  # fmt: skip
    return function(first, *others[:needed])


@pytest.mark.parametrize("scale", [None, "large", ["large"]])
def test_no_scale(scale: Any) -> None:
    """Objects that no number can be made of."""
    for function in (fi.silu_and_mul_nvfp4_quantize, fi.fp4_quantize):
        if scale is not None or function is not fi.fp4_quantize:
            with pytest.raises(TypeError, match="^global_scale: expected a number or an array"):
                function(X, scale)
    with pytest.raises(TypeError, match="^a_global_sf: expected a number or an array"):
        fi.nvfp4_batched_quantize(BATCH, scale)
    if scale is not None:
        with pytest.raises(TypeError, match="^a_global_sf: expected a number or float32"):
            fi.nvfp4_quantize(X, scale, per_token_activation=True)


def test_python_names_missing_arguments() -> None:
    """As for any function."""
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'a_global_sf'"):
        fi.nvfp4_quantize(X)
    with pytest.raises(TypeError, match="takes from 1 to 4 positional arguments but 5"):
        fi.mxfp4_quantize(X, "cuda", None, 0, "fast")
