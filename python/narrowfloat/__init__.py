"""Block-scaled 4-bit and 8-bit floating point: NVFP4, MXFP4, MXFP8 and FP8, to the bit.

    import numpy as np
    import narrowfloat as nf

    weights = np.random.default_rng(0).standard_normal((256, 512), dtype=np.float32)
    quantized = nf.quantize(weights, "nvfp4")
    restored = quantized.dequantize()

Arrays are NumPy's, or of any library that speaks DLPack, in the memory of the CPU. Inputs are
never copied and never written. bfloat16 and float8 arrays are those of ml_dtypes; without it
uint16 stands for the bits of bfloat16 and uint8 for those of float8_e4m3fn.

Errors: ValueError for arguments and files that can never work, NotImplementedError for valid
requests that this build cannot do, OSError where the system refused, RuntimeError for bugs, and
TypeError for what is no array at all.
"""

from narrowfloat._core import (
    FormatInfo,
    QuantizedLayout,
    build_info,
    decode_scale_from_encode,
    encode_scale_from_amax,
    encode_scale_from_decode,
    formats,
    layouts,
    num_threads,
    quantized_layout,
    set_num_threads,
    version,
)
from narrowfloat._norms import add_rmsnorm_quantize, rmsnorm_quantize
from narrowfloat._operations import (
    amax,
    dequantize,
    quantize,
    relayout,
    silu_mul_quantize,
    smooth_quantize,
)
from narrowfloat._options import FourOverSix, QuantizeOptions
from narrowfloat._quantized import QuantizedTensor

__version__ = version()

__all__ = [
    "FormatInfo",
    "FourOverSix",
    "QuantizeOptions",
    "QuantizedLayout",
    "QuantizedTensor",
    "add_rmsnorm_quantize",
    "amax",
    "build_info",
    "decode_scale_from_encode",
    "dequantize",
    "encode_scale_from_amax",
    "encode_scale_from_decode",
    "formats",
    "layouts",
    "num_threads",
    "quantize",
    "quantized_layout",
    "relayout",
    "rmsnorm_quantize",
    "set_num_threads",
    "silu_mul_quantize",
    "smooth_quantize",
    "version",
]
