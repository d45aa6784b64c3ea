"""The fused Mixture-of-Experts layer: prepared once, run many times."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np

from narrowfloat import _core
from narrowfloat._arrays import (
    NUMPY,
    Maker,
    TorchMaker,
    codes_to_core,
    is_torch,
    maker_of,
    shape_of,
    to_core,
)
from narrowfloat._moe_call import by_token, given_routing, raise_renamed, rows_of, to_bfloat16
from narrowfloat._moe_config import MoeConfig, config_from_core, config_to_core, factor_to_core
from narrowfloat._moe_weights import FACTORS, MoeParts, plain_parts
from narrowfloat._quantized import QuantizedTensor
from narrowfloat._routing import optional_to_core
from narrowfloat._streams import allocating_on

_ALIGNMENT = 256  # Bytes, of a workspace.
# Modes that take bfloat16 rows as they are.
_BF16_ROWS = ("bf16", "mxfp4_bf16", "nvfp4_bf16", "mxfp4_int8", "nvfp4_int8")


class MoeLayer:
    """A prepared layer: immutable, may run in several threads at once.

    Made by prepare() or from_checkpoint(). Computes where its weights lie: on the CPU, or on the
    device of the torch tensors that prepare() was given.
    """

    __slots__ = ("__weakref__", "_config", "_core_config", "_maker", "_prepared", "_router_bias",
                 "_router_logit_bias", "_router_weight")  # fmt: skip

    _prepared: _core.MoeLayer
    _core_config: _core.MoeConfig
    _config: MoeConfig
    _maker: Maker
    _router_weight: Any
    _router_logit_bias: Any
    _router_bias: Any

    def __init__(self) -> None:
        raise TypeError("MoeLayer: use MoeLayer.prepare() or MoeLayer.from_checkpoint()")

    @classmethod
    def prepare(
        cls,
        w1: Any,
        w2: Any,
        config: MoeConfig,
        *,
        w1_scales: Any = None,
        w2_scales: Any = None,
        scale_layout: str = "linear",
        up_scale: Any = None,
        gate_scale: Any = None,
        down_scale: Any = None,
        inter_multiplier: Any = None,
        input_multiplier: Any = None,
        bias1: Any = None,
        bias2: Any = None,
    ) -> MoeLayer:
        """Packs the weights in the form that the implementation computes from.

        w1: [experts, F1, H], w2: [experts, H, I], shared experts last; F1 is 2 * I for gated
            activations, else I. Each a QuantizedTensor (with batched=True), or codes of the mode's
            type (bfloat16; float8_e4m3fn; uint8 with two 4-bit codes) with w1_scales, w2_scales in
            `scale_layout`: linear, or swizzled_128x4 for one-byte scales.
        up_scale, gate_scale, down_scale: factors of the two halves of w1, and of w2; a number or
            float32 [experts]. Default: the global scales of QuantizedTensors over the multipliers,
            or 1.
        input_multiplier, inter_multiplier: modes with static activation scales; largest value of
            the format over the largest input and intermediate (docs/moe.md).
        bias1, bias2: float32 or bfloat16 [experts, F1] and [experts, H].
        """
        maker = maker_of("w1", w1.values if isinstance(w1, QuantizedTensor) else w1)
        is_gated = config_to_core(config, maker).is_gated
        parts = plain_parts(
            w1, w2, maker, mode=config.mode, is_gated=is_gated, w1_scales=w1_scales,
            w2_scales=w2_scales, scale_layout=scale_layout, bias1=bias1, bias2=bias2,
            up_scale=up_scale, gate_scale=gate_scale, down_scale=down_scale,
            inter_multiplier=inter_multiplier, input_multiplier=input_multiplier,
        )  # fmt: skip
        return cls._of_parts(parts, config, maker)

    @classmethod
    def _of_parts(cls, parts: MoeParts, config: MoeConfig, maker: Maker) -> MoeLayer:
        """The layer of canonical weights that lie where `maker` makes arrays."""
        core_config = config_to_core(config, maker)
        core_config.negative_one_is_empty = True  # run() refuses what the configuration does not.
        weights, arrays = _core.MoeWeights(config.mode), parts.arrays
        for name, layout in zip(("w1", "w2"), parts.layouts, strict=True):
            if name not in arrays:
                raise TypeError(f"{name}: expected an array or a QuantizedTensor, got None")
            scales = arrays.get(f"{name}_scales")
            weights.set_weight(name, arrays[name], _scales(f"{name}_scales", scales), layout)
        for name in FACTORS:
            if name in arrays:
                weights.set_factor(name, factor_to_core(name, arrays[name], maker))
        for name in ("bias1", "bias2"):
            if name in arrays:
                weights.set_bias(name, to_core(name, arrays[name]))
        return cls._wrap(_core.MoeLayer.prepare(weights, core_config), config, core_config, maker)

    @classmethod
    def _wrap(
        cls, core: _core.MoeLayer, config: MoeConfig, core_config: _core.MoeConfig, maker: Maker
    ) -> MoeLayer:
        layer = cls.__new__(cls)
        layer._prepared, layer._config, layer._core_config = core, config, core_config
        layer._maker = maker
        layer._router_weight = layer._router_logit_bias = layer._router_bias = None
        return layer

    @classmethod
    def from_checkpoint(
        cls,
        path: str | os.PathLike[str],
        layer: int,
        *,
        mode: str | None = None,
        device: Any = "cpu",
        input_amax: float | None = None,
        inter_amax: float | None = None,
        expert_offset: int = 0,
        local_experts: int | None = None,
        places: Sequence[int] = (),
        tensor_rank: int = 0,
        tensor_ranks: int = 1,
        **changes: Any,
    ) -> MoeLayer:
        """One layer of a model directory, with the names that Hugging Face models use.

        mode: plain weights are quantized to its format, quantized ones must have it; default: by
            the stored weights. device: "cpu", or what torch takes as one ("cuda").
        input_amax, inter_amax: largest magnitude of the layer's input and of the intermediate;
            modes fp8_tensor and nvfp4 need them.
        expert_offset, local_experts: the shard of a rank. places: those of ExpertParallel, which
            the shard is then of.
        tensor_rank, tensor_ranks: tensor parallelism: this rank's part of each expert's
            intermediate, tensor_shard(I, mode, tensor_rank, tensor_ranks). The caller adds the
            ranks' outputs; rank 0 has the bias of the second matrix. Nothing of other ranks is
            read; weights that are quantized here have the global scale of their part.
        changes: fields of MoeConfig, such as out_dtype="float32".
        The router is the caller's: hidden @ router_weight.T are the logits, plus router_logit_bias
        where it is not None (gpt-oss); router_bias goes to run(). Shared experts stay with the
        caller, too.
        """
        options = _core.LoadMoeOptions()
        options.input_amax, options.inter_amax = input_amax, inter_amax
        options.expert_offset, options.local_experts = expert_offset, local_experts
        options.places = list(places)
        options.tensor_rank, options.tensor_ranks = tensor_rank, tensor_ranks
        loaded = _core.LoadedMoe.load(os.fspath(path), layer, mode, options)
        maker = _maker_on(device)
        parts = {
            name: maker.from_numpy(value) if isinstance(value, np.ndarray) else value
            for name, value in loaded.weights.items()
        }
        config = replace(config_from_core(loaded.config), **changes)
        prepared = cls.prepare(parts.pop("w1"), parts.pop("w2"), config, **parts)
        prepared._router_weight = maker.from_numpy(loaded.router_weight)
        if loaded.router_logit_bias is not None:
            prepared._router_logit_bias = maker.from_numpy(loaded.router_logit_bias)
        if loaded.router_bias is not None:
            prepared._router_bias = maker.from_numpy(loaded.router_bias)
        return prepared

    def with_tuning(self, path: str | os.PathLike[str]) -> MoeLayer:
        """The same layer and weights with the token tiles of a file of `narrowfloat moe tune`.

        Entries count that are about this layer on this machine; config.token_tile comes first.
        """
        return self._with_core(self._prepared.with_tuning(os.fspath(path)))

    def _with_tuning_text(self, json: str) -> MoeLayer:
        """Like with_tuning(), of the text of such a file."""
        return self._with_core(self._prepared.with_tuning_text(json))

    def _with_core(self, core: _core.MoeLayer) -> MoeLayer:
        tuned = MoeLayer._wrap(core, self._config, self._core_config, self._maker)
        tuned._router_weight, tuned._router_bias = self._router_weight, self._router_bias
        tuned._router_logit_bias = self._router_logit_bias
        return tuned

    def _tuning_key(self) -> dict[str, Any]:
        """The key of such a file's entries for this layer on this machine."""
        return _core.moe_tuning_key(self._core_config, self._device_name)

    @property
    def _torch_device(self) -> Any:
        """The layer's device as torch names it; None without torch."""
        return self._maker.device if isinstance(self._maker, TorchMaker) else None

    @property
    def _device_name(self) -> str:
        return "cpu" if self._torch_device is None else str(self._torch_device)

    def _converting(self) -> AbstractContextManager[Any]:
        """Within it, conversions by torch are queued where the layer's work is."""
        device = self._torch_device
        return nullcontext() if device is None else allocating_on(device)

    @property
    def config(self) -> MoeConfig:
        """The configuration that the layer was prepared with."""
        return self._config

    @property
    def router_weight(self) -> Any:
        """float32 [E, H] of a layer from a checkpoint; else None."""
        return self._router_weight

    @property
    def router_logit_bias(self) -> Any:
        """float32 [E] of a layer from a checkpoint whose router has a bias, which is added to the
        logits (gpt-oss); else None."""
        return self._router_logit_bias

    @property
    def router_bias(self) -> Any:
        """float32 [E], the correction bias that run() takes, of a layer from a checkpoint that has
        one; else None."""
        return self._router_bias

    @property
    def weight_bytes(self) -> int:
        """Bytes of the packed weights of both matrices."""
        return self._prepared.weight_bytes

    def required_workspace(self, tokens: int) -> int:
        """Bytes for up to `tokens` tokens; never decreases."""
        return self._prepared.required_workspace(tokens)

    def token_tile(self, tokens: int) -> int:
        """Rows that an expert's tokens are padded to."""
        return self._prepared.token_tile(tokens)

    def max_rows(self, tokens: int) -> int:
        """Rows of slot_out."""
        return self._prepared.max_rows(tokens)

    def explain(self, tokens: int, device: str | None = None) -> list[_core.Explanation]:
        """Which implementation each stage of a run uses, and why the others do not.

        device: default: the layer's.
        """
        return _core.explain_moe(self._core_config, tokens, device or self._device_name)

    def __repr__(self) -> str:
        config = self._config
        return (
            f"MoeLayer({config.mode}, H={config.hidden}, I={config.inter}, E={config.experts}, "
            f"k={config.top_k})"
        )

    def new_workspace(self, tokens: int) -> Any:
        """uint8 [required_workspace(tokens)] for run(workspace=...), for up to `tokens` tokens."""
        return aligned_bytes(self._maker, self.required_workspace(tokens))

    def run(
        self,
        hidden: Any,
        logits: Any = None,
        *,
        bias: Any = None,
        packed: Any = None,
        ids: Any = None,
        weights: Any = None,
        hidden_scales: Any = None,
        row_scale: Any = None,
        out: Any = None,
        slot_out: Any = None,
        expert_weights: Any = None,
        slot_to_row: Any = None,
        topk_ids: Any = None,
        routing_replay: Any = None,
        errors: Any = None,
        workspace: Any = None,
        allow_absent: bool = False,
    ) -> Any:
        """The layer's output for T tokens, [T, H] of out_dtype; None where only slot_out is given.

        hidden: bfloat16, float16 or float32 [T, H], which the layer quantizes for its mode (modes
            that multiply bfloat16 rows: other types are rounded to bfloat16 first); or rows
            quantized for it, with hidden_scales. nvfp4_per_token also has row_scale (decode,
            float32 [T]); mxfp4_fp8_token and nvfp4_fp8_token have row_scale and no hidden_scales.
            With more axes, [..., H], all but the last are tokens, here and in other arrays, and
            the result has them, too.
        logits and bias, or packed, or ids and weights: route(). ids may be of any integer type.
        allow_absent: given ids below 0 or from E on are experts that are not here: their slots add
            nothing. Without it they are errors (on a GPU: skipped, and counted in `errors`).
        out: [T, N], N <= H: the last columns are dropped.
        slot_out: slot_dtype [max_rows(T), H], every slot's result at its row. expert_weights:
            float32 [T, k + S]. slot_to_row: int32 [T * (k + S)]. topk_ids: int32 [T, k + S].
            routing_replay: int16 [>= T, k]. Written to if given.
        errors: route(). workspace: new_workspace(T); default: a new one.
        """
        shape = shape_of("hidden", hidden)
        if len(shape) > 2:
            hidden = rows_of("hidden", hidden)
            if hidden_scales is not None:
                hidden_scales = rows_of("hidden_scales", hidden_scales)
            if row_scale is not None:
                row_scale = row_scale.reshape(-1)
        with self._converting():
            if self._config.mode in _BF16_ROWS and not self._config.fp32_rows:
                hidden = to_bfloat16("hidden", hidden)
            given = given_routing(
                {"logits": logits, "bias": bias, "packed": packed, "ids": ids, "weights": weights},
                self._config.experts, allow_absent=allow_absent, has_errors=errors is not None,
                minus_one_is_empty=self._config.negative_one_is_empty,
            )  # fmt: skip
        tokens = shape_of("hidden", hidden)[0]
        if out is None and slot_out is None:
            make = maker_of("hidden", hidden)
            out = make.empty((*shape[:-1], self._config.hidden), self._config.out_dtype)
        if workspace is None:
            workspace = self.new_workspace(tokens)
        outputs = {"out": out, "slot_out": slot_out, "expert_weights": expert_weights,
                   "slot_to_row": slot_to_row, "topk_ids": topk_ids,
                   "routing_replay": routing_replay}  # fmt: skip
        results = by_token(outputs, ("out", "expert_weights", "topk_ids"))
        try:
            self._prepared.run(
                to_core("hidden", hidden),
                _scales("hidden_scales", hidden_scales),
                optional_to_core("row_scale", row_scale),
                {name: to_core(name, array) for name, array in given.items()},
                {name: to_core(name, array) for name, array in results.items()},
                errors,
                workspace,
            )
        except (ValueError, NotImplementedError) as error:
            raise_renamed(error, self._config.negative_one_is_empty)
        return out


def _scales(argument: str, array: Any) -> Any:
    return None if array is None else codes_to_core(argument, array)


def _maker_on(device: Any) -> Maker:
    if isinstance(device, str) and device == "cpu":
        return NUMPY
    import torch

    return TorchMaker(torch.device(device))


def aligned_bytes(maker: Maker, size: int) -> Any:
    """uint8 [size] that begins where a workspace may."""
    if isinstance(maker, TorchMaker) and maker.device.type != "cpu":
        return maker.empty((max(size, 1),), "uint8")  # torch's blocks begin at multiples of 512.
    space = maker.empty((size + _ALIGNMENT,), "uint8")
    address = space.data_ptr() if is_torch(space) else space.ctypes.data
    start = -address % _ALIGNMENT
    return space[start : start + size]
