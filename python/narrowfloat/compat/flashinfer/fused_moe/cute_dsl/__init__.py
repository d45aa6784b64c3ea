"""FlashInfer's package `fused_moe.cute_dsl`, of which narrowfloat has the module `moe_utils`."""

from narrowfloat.compat.flashinfer.fused_moe.cute_dsl import moe_utils as moe_utils

__all__: list[str] = []
