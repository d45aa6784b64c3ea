"""The quantizer of transformers: experts are quantized as they come from the checkpoint."""

from __future__ import annotations

import re
from typing import Any

import torch
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.base import HfQuantizer

from narrowfloat._torch_moe_state import KeptWeights
from narrowfloat._torch_packed import CONFIG, config_fields
from narrowfloat.torch import Linear
from narrowfloat.transformers._config import NarrowfloatConfig
from narrowfloat.transformers._experts import Experts, ExpertsPlan, is_experts
from narrowfloat.transformers._packed import (
    Files,
    PackedCheckpoint,
    device_of,
    recognised,
)
from narrowfloat.transformers._versions import require_version


class _QuantizeExperts(ConversionOps):
    """Takes a dense parameter out of the loader's hands."""

    def __init__(self, quantizer: NarrowfloatHfQuantizer) -> None:
        self.quantizer = quantizer

    def convert(
        self, input_dict: dict[str, Any], *_: Any, model: Any = None, missing_keys: Any = None,
        **__: Any,
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        """Returns nothing: what comes goes into a layer."""
        for name in list(input_dict):
            value = input_dict.pop(name)
            tensor = value[0] if isinstance(value, list) else value
            self.quantizer.take(model, name, tensor)
            if missing_keys is not None:
                missing_keys.discard(name)
        return {}


class _Saved:
    """The states of layers in the files of save_pretrained().

    transformers renames tensors when it saves some models, such as Mixtral's; a state says which
    module it is of.
    """

    def __init__(self, files: Files) -> None:
        self.files, self.places = files, {}
        for name in files.names():
            if not name.endswith(f".{CONFIG}"):
                continue
            place = name.removesuffix(f".{CONFIG}")
            try:
                self.places[config_fields(files.read(name))[1] or place] = place
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise ValueError(f"{name}: no configuration of a layer: {error}") from error

    def state(self, module: str, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
        """The tensors of one that are there."""
        place = self.places.get(module, module)
        return {name: self.files.read(f"{place}.{name}")
                for name in names if f"{place}.{name}" in self.files}  # fmt: skip


def _require_one_rank(model: Any) -> None:
    """The loader's shards of experts are none of a layer's."""
    mesh = getattr(model, "_device_mesh", None)
    if mesh is not None and mesh.size() > 1:
        raise ValueError(
            "quantization_config: expected one rank, got tp_plan or distributed_config with "
            f"{mesh.size()}; leave NarrowfloatConfig out and load the model with "
            "experts_implementation='narrowfloat', or call "
            "narrowfloat.transformers.quantize_experts(model, config) after loading"
        )


class NarrowfloatHfQuantizer(HfQuantizer):
    """Loads plain models, quantized checkpoints, and what save_pretrained() wrote of both."""

    requires_calibration = False
    quantization_config: NarrowfloatConfig
    pre_quantized: bool

    def __init__(self, quantization_config: NarrowfloatConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._plans: dict[str, ExpertsPlan] = {}
        self._packed: PackedCheckpoint | None = None
        self._saved: tuple[_Saved, dict[str, Any]] | None = None
        self._ignored: Any = None

    def validate_environment(self, *_: Any, **__: Any) -> None:
        """The version of transformers."""
        require_version()

    def _experts(self, model: Any) -> dict[str, Any]:
        """The modules to convert by their names. ValueError for a model without experts."""
        found = {name: module for name, module in model.named_modules() if is_experts(module)}
        if not found:
            raise ValueError(
                f"quantization_config: {type(model).__name__} has no experts that transformers "
                "lets others compute (use_experts_implementation); leave NarrowfloatConfig out"
            )
        return {name: module for name, module in found.items()
                if self.quantization_config.converts(name)}  # fmt: skip

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, **_: Any
    ) -> None:
        config, files = self.quantization_config, list(checkpoint_files or [])
        self._ignored = model._keys_to_ignore_on_load_unexpected
        if self.pre_quantized and config.checkpoint is None:
            self._plan_saved(model, files)
            self.pre_quantized = False  # For the loader, which meets no quantized tensor.
            return
        tensors = recognised(files)
        if tensors:
            self._packed = PackedCheckpoint(model, files, tensors, config.mode)
            self._ignore(model, self._packed.empty_modules())
            self.pre_quantized = False  # As above.
        elif self.pre_quantized:
            raise ValueError("quantization_config: config.json declares quantized weights, and the "
                             "checkpoint's safetensors files have none")  # fmt: skip
        else:
            config.mode = config.mode or "nvfp4_bf16"
            self._plans = {name: ExpertsPlan.of(name, module, config.top_k)
                           for name, module in self._experts(model).items()}  # fmt: skip

    def _plan_saved(self, model: Any, files: list[str]) -> None:
        """The loader neither misses nor meets the tensors of layers: they are read afterwards."""
        if not files or not all(file.endswith(".safetensors") for file in files):
            raise ValueError("a model that was saved with quantized experts is loaded from its "
                             "safetensors files, got none")  # fmt: skip
        saved = _Saved(Files(files))
        names: dict[str, Any] = dict.fromkeys(self._experts(model), Experts)
        # Linear layers that were saved packed; the others of the model are plain.
        names |= {name: Linear for name, module in model.named_modules()
                  if isinstance(module, torch.nn.Linear) and name in saved.places}
        self._saved = saved, names
        for name in names:
            model.set_submodule(name, torch.nn.Module())
        self._ignore(model, {rf"(^|\.){re.escape(name)}\." for name in names})

    def _ignore(self, model: Any, patterns: set[str]) -> None:
        model._keys_to_ignore_on_load_unexpected = set(self._ignored or ()) | patterns

    def param_needs_quantization(self, model: Any, param_name: str, **_: Any) -> bool:
        """Whether it is one of the experts'."""
        _require_one_rank(model)
        module, _dot, parameter = param_name.rpartition(".")
        plan = self._plans.get(module)
        return plan is not None and parameter in plan.parameters

    def get_quantize_ops(self) -> ConversionOps:
        """The operation that takes them."""
        return _QuantizeExperts(self)

    def take(self, model: Any, name: str, tensor: torch.Tensor) -> None:
        """A dense parameter; the module is replaced where it was the last one."""
        module, _, parameter = name.rpartition(".")
        plan, config = self._plans[module], self.quantization_config
        mode = config.mode or "nvfp4_bf16"
        plan.add(parameter, tensor, mode, config.math)
        if plan.is_complete:
            experts = plan.build(mode, config.keep_weights, config.statistics, config.fast_sums)
            model.set_submodule(module, experts)
            plan.parts.clear()

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        model._keys_to_ignore_on_load_unexpected = self._ignored
        _require_one_rank(model)
        if self._packed is not None:
            self._packed.fill(self.quantization_config.keep_weights,
                              self.quantization_config.fast_sums)
        if self._saved is not None:
            self._read_saved(model, *self._saved)
        left = [name for name in self._plans if not isinstance(model.get_submodule(name), Experts)]
        if left:
            raise ValueError(f"{left[0]}: the checkpoint lacks weights of its experts, and of "
                             f"{len(left) - 1} more modules")  # fmt: skip
        self._packed = self._saved = None
        return model

    def _read_saved(self, model: Any, saved: _Saved, modules: dict[str, Any]) -> None:
        """A layer at a time: tensors of one, then its packed form."""
        keeps, fast = self.quantization_config.keep_weights, self.quantization_config.fast_sums
        for module, kind in modules.items():
            try:
                state = saved.state(module, kind.STATE_NAMES)
                device = device_of(model, module)
                if kind is Experts:
                    kept = KeptWeights.of_state(state).with_config(fast_sums=fast)
                    made = Experts(kept.prepare(device), kept=kept if keeps else None)
                else:
                    made = kind.of_state(state, device, keep=keeps)
            except ValueError as error:
                raise ValueError(f"{module}: {error}") from error
            model.set_submodule(module, made)

    def is_serializable(self, **_: Any) -> bool:
        """ValueError with the mend where save_pretrained() cannot have the experts."""
        if not self.quantization_config.keep_weights:
            raise ValueError(
                "save_pretrained(): the experts exist in packed form alone; load the model with "
                "NarrowfloatConfig(keep_weights=True), which keeps them as they are stored, too"
            )
        return True

    @property
    def is_trainable(self) -> bool:
        """No gradient goes through the experts."""
        return False

    @property
    def is_compileable(self) -> bool:
        """Layers are operators of torch."""
        return True
