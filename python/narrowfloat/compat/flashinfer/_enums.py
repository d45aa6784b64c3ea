"""FlashInfer's enumerations. The numbers are part of its interface."""

from __future__ import annotations

from enum import IntEnum


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


class AllReduceFusionPattern(IntEnum):
    """The steps after a sum over ranks."""

    kAllReduce = 0
    kARResidualRMSNorm = 1
    kARResidualRMSNormFP8Quant = 2
    kARResidualRMSNormFP4Quant = 3
    kARResidualRMSNormOutFP8Quant = 4
    kARResidualRMSNormOutFP4Quant = 5
    kMoEReductionARResidualRMSNorm = 6
    kMoEFinalizeARResidualRMSNorm = 7
    kARResidualRMSNormPerTokenGroupFP8PackedQuant = 8
    kARResidualRMSNormOutPerTokenGroupFP8PackedQuant = 9
    kARResidualRMSNormDynamicFP8Quant = 10
    kARResidualRMSNormOutDynamicFP8Quant = 11
    kMoEFinalizeARResidualRMSNormFP8Quant = 12


class QuantizationSFLayout(IntEnum):
    """Layouts of the block scales that an all-reduce writes."""

    SWIZZLED_128x4 = 0
    SWIZZLED_8x4 = 1
    LINEAR = 2
