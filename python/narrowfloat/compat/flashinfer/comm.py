"""FlashInfer's all-reduce fusions: the names of its module `flashinfer.comm`.

    import narrowfloat.compat.flashinfer.comm as comm

Names, argument order and defaults are FlashInfer 0.7.2's. On the CPU the ranks are processes that
share memory, on GPUs those of one host. docs/python.md says what differs.
"""

from narrowfloat.compat.flashinfer._allreduce import (
    allreduce_fusion,
    compute_fp4_swizzled_layout_sf_size,
    trtllm_allreduce_fusion,
    trtllm_moe_allreduce_fusion,
    trtllm_moe_finalize_allreduce_fusion,
)
from narrowfloat.compat.flashinfer._allreduce_workspace import (
    AllReduceFusionWorkspace,
    create_allreduce_fusion_workspace,
    trtllm_create_ipc_workspace_for_all_reduce_fusion,
    trtllm_destroy_ipc_workspace_for_all_reduce_fusion,
)
from narrowfloat.compat.flashinfer._comm_enums import AllReduceFusionPattern, QuantizationSFLayout

__all__ = [
    "AllReduceFusionPattern",
    "AllReduceFusionWorkspace",
    "QuantizationSFLayout",
    "allreduce_fusion",
    "compute_fp4_swizzled_layout_sf_size",
    "create_allreduce_fusion_workspace",
    "trtllm_allreduce_fusion",
    "trtllm_create_ipc_workspace_for_all_reduce_fusion",
    "trtllm_destroy_ipc_workspace_for_all_reduce_fusion",
    "trtllm_moe_allreduce_fusion",
    "trtllm_moe_finalize_allreduce_fusion",
]
