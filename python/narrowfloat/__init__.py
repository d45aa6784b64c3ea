"""Block-scaled 4-bit and 8-bit floating point: NVFP4, MXFP4, MXFP8 and FP8, to the bit.

    import numpy as np
    import narrowfloat as nf

    weights = np.random.default_rng(0).standard_normal((256, 512), dtype=np.float32)
    quantized = nf.quantize(weights, "nvfp4")
    restored = quantized.dequantize()

Arrays are NumPy's, torch's, or of any library that speaks DLPack, on the CPU or (in a build with
CUDA) on a GPU. Inputs are never copied and never written. bfloat16 and float8 arrays of NumPy are
those of ml_dtypes; without it uint16 stands for the bits of bfloat16 and uint8 for those of
float8_e4m3fn.

Errors: ValueError for arguments and files that can never work, NotImplementedError for valid
requests that this build cannot do, OSError where the system refused, RuntimeError for bugs, and
TypeError for what is no array at all.
"""

from narrowfloat._allreduce import AllReduce, explain_allreduce
from narrowfloat._allreduce_call import AllReduceOptions
from narrowfloat._allreduce_outputs import AllReduceResult, Fp8Rows
from narrowfloat._checkpoints import (
    check_checkpoint,
    convert_checkpoint,
    dequantize_checkpoint,
    diff,
    fix_checkpoint,
    quantize_checkpoint,
)
from narrowfloat._core import (
    CheckpointCheck,
    CheckpointDiff,
    CheckpointReport,
    ErrorFigures,
    Explanation,
    Finding,
    FormatInfo,
    GpuLink,
    NcclInfo,
    QuantizedLayout,
    RankGroup,
    activations,
    allreduce_patterns,
    build_info,
    decode_scale_from_encode,
    default_token_tile,
    encode_scale_from_amax,
    encode_scale_from_decode,
    formats,
    gpu_links,
    layouts,
    load_places,
    moe_layers,
    moe_modes,
    nccl_info,
    num_threads,
    operations,
    place_experts,
    quantized_layout,
    routing_methods,
    set_num_threads,
    tensor_shard,
    version,
)
from narrowfloat._expert_parallel import (
    ExpertParallel,
    ReceivedTokens,
    explain_expert_parallel,
)
from narrowfloat._explain import explain
from narrowfloat._kv_cache import (
    kv_append_paged,
    kv_append_slots,
    kv_dequantize,
    kv_dequantize_paged,
    kv_quantize,
    kv_quantize_paged_cache,
    kv_reorder_v_scales,
    kv_restore_v_scales,
)
from narrowfloat._moe import MoeLayer
from narrowfloat._moe_config import Activation, MoeConfig
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
from narrowfloat._reorder import (
    pack_bits,
    quantize_group_8bit,
    segment_pack_bits,
    shuffle_rows,
    shuffle_scales,
    unshuffle_rows,
    unshuffle_scales,
)
from narrowfloat._routing import Permutation, combine, permute, route
from narrowfloat._streams import use_stream

__version__ = version()

__all__ = [
    "Activation",
    "AllReduce",
    "AllReduceOptions",
    "AllReduceResult",
    "CheckpointCheck",
    "CheckpointDiff",
    "CheckpointReport",
    "ErrorFigures",
    "ExpertParallel",
    "Explanation",
    "Finding",
    "FormatInfo",
    "FourOverSix",
    "Fp8Rows",
    "GpuLink",
    "MoeConfig",
    "MoeLayer",
    "NcclInfo",
    "Permutation",
    "QuantizeOptions",
    "QuantizedLayout",
    "QuantizedTensor",
    "RankGroup",
    "ReceivedTokens",
    "activations",
    "add_rmsnorm_quantize",
    "allreduce_patterns",
    "amax",
    "build_info",
    "check_checkpoint",
    "combine",
    "convert_checkpoint",
    "decode_scale_from_encode",
    "default_token_tile",
    "dequantize",
    "dequantize_checkpoint",
    "diff",
    "encode_scale_from_amax",
    "encode_scale_from_decode",
    "explain",
    "explain_allreduce",
    "explain_expert_parallel",
    "fix_checkpoint",
    "formats",
    "gpu_links",
    "kv_append_paged",
    "kv_append_slots",
    "kv_dequantize",
    "kv_dequantize_paged",
    "kv_quantize",
    "kv_quantize_paged_cache",
    "kv_reorder_v_scales",
    "kv_restore_v_scales",
    "layouts",
    "load_places",
    "moe_layers",
    "moe_modes",
    "nccl_info",
    "num_threads",
    "operations",
    "pack_bits",
    "place_experts",
    "permute",
    "quantize",
    "quantize_checkpoint",
    "quantize_group_8bit",
    "quantized_layout",
    "relayout",
    "rmsnorm_quantize",
    "route",
    "routing_methods",
    "segment_pack_bits",
    "set_num_threads",
    "shuffle_rows",
    "shuffle_scales",
    "silu_mul_quantize",
    "smooth_quantize",
    "tensor_shard",
    "unshuffle_rows",
    "unshuffle_scales",
    "use_stream",
    "version",
]
