"""Experts of vLLM's models on narrowfloat's layers.

vLLM finds register() by the entry point `vllm.general_plugins` where both packages are installed.
`--quantization narrowfloat`, or NARROWFLOAT_VLLM=1 in the environment, chooses it for a checkpoint
in NVFP4 (ModelOpt, compressed-tensors), MXFP4 or FP8 with blocks of 128 x 128. docs/vllm.md says
what is served and what was tested.
"""

from narrowfloat.vllm._register import register

__all__ = ["register"]
