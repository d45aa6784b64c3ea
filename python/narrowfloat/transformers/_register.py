"""Makes transformers know this package."""

from __future__ import annotations

from typing import Any

from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.quantizers import auto

from narrowfloat.transformers._config import METHOD, NarrowfloatConfig
from narrowfloat.transformers._experts import experts_forward
from narrowfloat.transformers._quantizer import NarrowfloatHfQuantizer
from narrowfloat.transformers._versions import require_version


# Declared methods of checkpoints that the library reads, where it reads the declaration.
_DECLARED = ("compressed-tensors", "fp8", "mxfp4", "modelopt")
# Formats of compressed-tensors that the library reads; FP8 with scales of 128 x 128 blocks, and
# beside them with scales of rows or tensors: of a whole model of these transformers keeps more.
_READ = {"nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"}
_PRESETS = {"NVFP4": "nvfp4-pack-quantized", "NVFP4A16": "nvfp4-pack-quantized",
            "MXFP4": "mxfp4-pack-quantized", "MXFP4A16": "mxfp4-pack-quantized",
            "MXFP8": "mxfp8-quantized", "MXFP8A16": "mxfp8-quantized"}  # fmt: skip


_BESIDE = ("float-quantized by channel", "float-quantized by tensor", "FP8", "FP8_DYNAMIC")


def _formats(declared: dict[str, Any]) -> dict[str, bool]:
    """Formats of the groups that compressed-tensors declares, and whether the library reads them.

    A group without a format has that of the whole; one that is a list of targets has a preset's
    name.
    """
    found = {}
    for name, group in (declared.get("config_groups") or {}).items():
        if not isinstance(group, dict):
            format = _PRESETS.get(name.upper(), name)
            found[format] = format in _READ or name.upper() == "FP8_BLOCK"
            continue
        format = str(group.get("format") or declared.get("format"))
        strategy = (group.get("weights") or {}).get("strategy")
        is_block = format == "float-quantized" and strategy == "block"
        label = format if is_block or format in _READ else f"{format} by {strategy}"
        found[label] = is_block or format in _READ
    return found


def _is_ours(declared: dict[str, Any]) -> bool:
    """Whether a declaration is of conventions that PackedCheckpoint reads.

    NotImplementedError for formats of ours among others, which transformers loads wrong in part.
    """
    method = declared.get("quant_method")
    if method == "compressed-tensors":
        formats = _formats(declared)
        if any(formats.values()):
            formats |= dict.fromkeys(formats.keys() & set(_BESIDE), True)
        others = sorted(name for name, is_read in formats.items() if not is_read)
        if others and len(others) < len(formats):
            raise NotImplementedError(
                f"quantization_config: weights of several formats, of which narrowfloat does not "
                f"read {', '.join(others)}; `narrowfloat.transformers.register(packed=False)` "
                "leaves them to transformers, some versions of which drop the global scales of "
                "NVFP4 experts"
            )
        return bool(formats) and not others
    if method == "fp8":
        return declared.get("weight_block_size") == [128, 128]
    return method in ("mxfp4", "modelopt")


class _Declaration:
    """In place of a configuration class of transformers: ours for what we read, else theirs."""

    def __init__(self, theirs: Any) -> None:
        self.theirs = theirs

    def from_dict(self, declared: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """The configuration of a checkpoint's declaration."""
        if _is_ours(declared):
            return NarrowfloatConfig(checkpoint=dict(declared))
        if self.theirs is None:
            raise NotImplementedError(
                f"quantization_config: {declared.get('quant_method')} in this form is not read by "
                "narrowfloat, nor by transformers"
            )
        return self.theirs.from_dict(declared, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.theirs(*args, **kwargs)


def register(*, packed: bool = True) -> None:
    """Adds the experts function and the quantizer "narrowfloat" to transformers; idempotent.

    Then `experts_implementation="narrowfloat"` runs bfloat16 experts through layers of mode bf16,
    and a NarrowfloatConfig quantizes experts while a model loads.
    packed: checkpoints that are quantized in a convention of this library are loaded by it, without
        an argument, in place of transformers' own code for them.
    """
    require_version()
    ALL_EXPERTS_FUNCTIONS.register(METHOD, experts_forward)
    if METHOD not in auto.AUTO_QUANTIZER_MAPPING:
        auto.register_quantization_config(METHOD)(NarrowfloatConfig)
        auto.register_quantizer(METHOD)(NarrowfloatHfQuantizer)
        auto.LOADING_ATTRIBUTES_CONFIG_TYPES = (
            *auto.LOADING_ATTRIBUTES_CONFIG_TYPES, NarrowfloatConfig)  # fmt: skip
    classes = auto.AUTO_QUANTIZATION_CONFIG_MAPPING
    for method in _DECLARED if packed else ():
        if not isinstance(classes.get(method), _Declaration):
            classes[method] = _Declaration(classes.get(method))
