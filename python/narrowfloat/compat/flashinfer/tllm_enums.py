"""The names of FlashInfer's module `tllm_enums`. The numbers are part of its interface."""

from __future__ import annotations

from enum import IntEnum

DEFAULT_SWIGLU_ALPHA = 1.0
DEFAULT_SWIGLU_BETA = 0.0
DEFAULT_SWIGLU_LIMIT = 3.4028234663852886e38  # The largest float32: no limit.
DEFAULT_SITU_BETA = 4.0
DEFAULT_SITU_LINEAR_BETA = 25.0


class SfLayout(IntEnum):
    """Layouts of one-byte block scales."""

    layout_128x4 = 0
    layout_8x4 = 1
    layout_linear = 2


class RoutingMethodType(IntEnum):
    """How logits become experts and weights."""

    Default = 0
    Renormalize = 1
    DeepSeekV3 = 2
    Llama4 = 3
    RenormalizeNaive = 4
    TopK = 5
    SigmoidRenorm = 6
    MiniMax2 = 7
    Sigmoid = 8
    TopKSigmoid = 9
    Unspecified = 10


class RoutingInputMode(IntEnum):
    """The forms in which a routing is given."""

    FromLogits = 0
    PackedPrecomputed = 1
    UnpackedPrecomputed = 2


class ActivationType(IntEnum):
    """Activations between the two matrices of an expert."""

    Gelu = 0
    Relu = 1
    Silu = 2
    Swiglu = 3
    Geglu = 4
    SwigluBias = 5
    Relu2 = 6
    SwigluStep = 7
    GegluTanh = 8
    Identity = 9
    Situ = 10
    InvalidType = 11
    ClampedRelu2 = 12

    @property
    def is_gated(self) -> bool:
        """Whether the first matrix has a gate half beside the up half."""
        return self.name in _GATED


_GATED = frozenset(("Swiglu", "Geglu", "SwigluBias", "SwigluStep", "GegluTanh", "Situ"))


def normalize_activation_type(activation_type: int | ActivationType) -> ActivationType:
    """The member of a number; ValueError for a number that has none."""
    try:
        return ActivationType(activation_type)
    except ValueError:
        raise ValueError(
            f"activation_type: expected an ActivationType, got {activation_type!r}; Unsupported "
            "activation_type"
        ) from None


def is_gated_activation(activation_type: int | ActivationType) -> bool:
    """ActivationType.is_gated of activation_type, a member or its number; else ValueError."""
    return normalize_activation_type(activation_type).is_gated


class GatedActType(IntEnum):
    """The gated activations of FlashInfer's older entry points."""

    SwiGlu = 0
    GeGlu = 1


class WeightLayout(IntEnum):
    """Orders of a weight matrix in memory."""

    MajorK = 0
    MajorMn = 1
    BlockMajorK = 2


class Fp8QuantizationType(IntEnum):
    """Scales of FP8 weights and inputs."""

    NoneFp8 = 0
    DeepSeekFp8 = 1
    MxFp8 = 2
    PerTensorFp8 = 3
    PerChannelFp8 = 4


__all__ = [
    "ActivationType",
    "DEFAULT_SITU_BETA",
    "DEFAULT_SITU_LINEAR_BETA",
    "DEFAULT_SWIGLU_ALPHA",
    "DEFAULT_SWIGLU_BETA",
    "DEFAULT_SWIGLU_LIMIT",
    "Fp8QuantizationType",
    "GatedActType",
    "RoutingInputMode",
    "RoutingMethodType",
    "SfLayout",
    "WeightLayout",
    "is_gated_activation",
    "normalize_activation_type",
]
