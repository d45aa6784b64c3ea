"""Experts of SGLang's models on narrowfloat's layers.

SGLang finds register() by the entry point `sglang.srt.plugins` where both packages are installed.
`--quantization narrowfloat`, or NARROWFLOAT_SGLANG=1 in the environment, chooses it for a
checkpoint in NVFP4 (ModelOpt, compressed-tensors), MXFP4 or FP8 with blocks of 128 x 128.
docs/sglang.md says what is served and what was tested.
"""

from narrowfloat.sglang._register import register

__all__ = ["register"]
