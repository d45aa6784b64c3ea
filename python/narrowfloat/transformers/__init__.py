"""Mixture-of-Experts models of Hugging Face transformers on narrowfloat's layers.

    import narrowfloat.transformers as nftr
    from transformers import AutoModelForCausalLM

    nftr.register()
    model = AutoModelForCausalLM.from_pretrained(
        path, quantization_config=nftr.NarrowfloatConfig(mode="nvfp4_bf16"))

The experts of a plain model are quantized while it loads, a matrix of a layer at a time; the dense
ones are never all resident. docs/engines.md says which models, versions and checkpoints.
"""

from narrowfloat.transformers._calibrate import calibrate
from narrowfloat.transformers._config import NarrowfloatConfig
from narrowfloat.transformers._experts import Experts, experts_forward, quantize_experts
from narrowfloat.transformers._register import register

__all__ = ["Experts", "NarrowfloatConfig", "calibrate", "experts_forward", "quantize_experts",
           "register"]  # fmt: skip
