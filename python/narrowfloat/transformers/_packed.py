"""Checkpoints whose weights are quantized already: experts go into layers with their stored bits.

Names, dtypes and declarations are read by the library (recognise_checkpoint), as the command line
program reads them. transformers' loader never sees a quantized tensor: the modules that own them
are empty while it works, and are filled afterwards, one at a time. What cannot be read, has no
module, or comes with tensors of unknown meaning is an error before anything is loaded.
"""

from __future__ import annotations

import os
import re
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch

import narrowfloat as nf
from narrowfloat import _core
from narrowfloat._arrays import TorchMaker
from narrowfloat._moe import MoeLayer
from narrowfloat._moe_config import config_from_core
from narrowfloat._moe_weights import MoeParts
from narrowfloat._torch_moe_state import KeptWeights, host_tensor
from narrowfloat.transformers._experts import Experts
from narrowfloat.transformers._gates import Gate, find_gate

_LAYER = re.compile(r"\blayers?\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+\.|gate_up_proj|down_proj)")
# Facts about activations and caches, which weight-only layers do not need.
_HARMLESS = re.compile(r"\.(input_scale|input_global_scale|output_scale|k_scale|v_scale)$")
_TYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "U8": torch.uint8,
          "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn,
          "F8_E8M0": torch.float8_e8m0fnu}  # fmt: skip
_FLOATS = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


class Files:
    """The tensors of a checkpoint's files, by their stored names."""

    def __init__(self, paths: list[str]) -> None:
        readers = [_core.SafetensorsReader.open(os.fspath(path)) for path in paths]
        self._where = {name: (reader, *facts) for reader in readers
                       for name, facts in reader.tensors().items()}  # fmt: skip

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def names(self) -> list[str]:
        """All of them."""
        return list(self._where)

    def read(self, name: str) -> torch.Tensor:
        """One, on the CPU. ValueError for a name or a type that is not there."""
        if name not in self._where:
            raise ValueError(f"{name}: missing in the checkpoint")
        reader, dtype, shape = self._where[name]
        if dtype not in _TYPES:
            raise ValueError(f"{name}: unexpected type {dtype}")
        tensor = torch.empty(shape, dtype=_TYPES[dtype], device="cpu")
        if tensor.numel():
            reader.read(name, tensor.reshape(-1).view(torch.uint8))
        return tensor


@dataclass
class _PackedExperts:
    """A module of experts that the library loads as a layer."""

    layer: int
    gate: Gate
    experts: int
    parts: list[str]


@dataclass
class _PackedLinear:
    """A Linear with a quantized weight."""

    tensor: Any  # LogicalTensor
    features: tuple[int, int]  # out, in
    has_bias: bool


def directory_of(files: list[str]) -> str:
    """The checkpoint's directory. ValueError where its files do not lie in one."""
    folders = {os.path.dirname(os.path.abspath(file)) for file in files}
    if len(folders) != 1:
        raise ValueError(f"checkpoint: expected files of one directory, got {sorted(folders)}")
    return folders.pop()


def quantized_tensors(files: list[str]) -> list[Any]:
    """Those of a checkpoint; none for a plain one, or for other files than safetensors."""
    if not files or not all(file.endswith(".safetensors") for file in files):
        return []
    found = _core.recognise_checkpoint(directory_of(files))
    return [tensor for tensor in found if tensor.convention is not None]


class PackedCheckpoint:
    """A plan for the quantized tensors of a checkpoint, and its execution."""

    def __init__(self, model: Any, files: list[str], tensors: list[Any], mode: str | None) -> None:
        self.directory, self.files, self.mode = directory_of(files), Files(files), mode
        self.experts: dict[str, _PackedExperts] = {}
        self.linears: dict[str, _PackedLinear] = {}
        self._model = model
        self._plan(tensors)
        self._refuse_strangers()

    def _plan(self, tensors: list[Any]) -> None:
        from narrowfloat.transformers._experts import is_experts

        modules = dict(self._model.named_modules())
        by_layer = {int(match[1]): name for name, module in modules.items()
                    if is_experts(module) and (match := _LAYER.search(name))}  # fmt: skip
        for tensor in tensors:
            match = _LAYER.search(tensor.name)
            if _EXPERT.search(tensor.name) and match:
                layer = int(match[1])
                if layer in by_layer:
                    self._add_expert(by_layer[layer], modules[by_layer[layer]], layer, tensor)
                    continue
            elif self._add_linear(modules, tensor):
                continue
            if not self._is_ignored(tensor.name):
                raise NotImplementedError(
                    f"{tensor.name}: a quantized tensor ({tensor.convention}) of no module of "
                    f"{type(self._model).__name__} that narrowfloat can fill; `narrowfloat "
                    "dequantize` makes a checkpoint that transformers loads by itself"
                )

    def _is_ignored(self, name: str) -> bool:
        """Whether transformers leaves a tensor out of this model in any case."""
        patterns = self._model._keys_to_ignore_on_load_unexpected or ()
        return any(re.search(pattern, name) for pattern in patterns)

    def _add_expert(self, name: str, module: Any, layer: int, tensor: Any) -> None:
        if name not in self.experts:
            self.experts[name] = _PackedExperts(layer, find_gate(name, module),
                                                module.num_experts, [])  # fmt: skip
        self.experts[name].parts += tensor.parts

    def _add_linear(self, modules: dict[str, Any], tensor: Any) -> bool:
        name = tensor.name.removesuffix(".weight")
        prefix = f"{self._model.base_model_prefix}."
        for candidate in (name, prefix + name, name.removeprefix(prefix)):
            module = modules.get(candidate)
            if not isinstance(module, torch.nn.Linear):
                continue
            features = (module.out_features, module.in_features)
            if tuple(tensor.shape) != features:
                raise ValueError(f"{tensor.name}: expected {list(features)}, got {tensor.shape}")
            self.linears[candidate] = _PackedLinear(tensor, features, module.bias is not None)
            return True
        return False

    def _refuse_strangers(self) -> None:
        """Tensors beside those that are read, such as the scales of another method."""
        known = {part for one in self.experts.values() for part in one.parts}
        known |= {part for one in self.linears.values() for part in one.tensor.parts}
        owners = {part.rpartition(".")[0] for part in known}
        for name in self.files.names():
            owner = name.rpartition(".")[0]
            if name in known or owner not in owners or _HARMLESS.search(name):
                continue
            if name.endswith((".bias", "_bias")):
                continue
            raise NotImplementedError(
                f"{name}: stands beside a quantized weight and changes what it means in a way "
                "that narrowfloat does not know; the checkpoint is not loaded"
            )

    def empty_modules(self) -> set[str]:
        """Takes the modules away for as long as the loader works; patterns of what it ignores."""
        names = [*self.experts, *self.linears]
        for name in names:
            self._model.set_submodule(name, torch.nn.Module())
        stored = {part.rpartition(".")[0] for one in self.linears.values()
                  for part in one.tensor.parts}  # fmt: skip
        return {rf"(^|\.){re.escape(name)}\." for name in {*names, *stored}}

    def fill(self, keep_weights: bool) -> None:
        """One module at a time."""
        for name in self.experts:
            self._model.set_submodule(name, self._layer(name, keep_weights))
        for name, linear in self.linears.items():
            self._model.set_submodule(name, self._linear(name, linear))
        if self.linears:
            formats = sorted({one.tensor.format for one in self.linears.values()})
            warnings.warn(
                f"{self.directory}: {len(self.linears)} Linear weights ({', '.join(formats)}) were "
                "dequantized; the experts stay packed",
                stacklevel=2,
            )

    def _dtype(self) -> torch.dtype:
        return self._model.dtype

    def _layer(self, name: str, keep_weights: bool) -> Experts:
        plan = self.experts[name]
        options = _core.LoadMoeOptions()
        try:
            loaded = _core.LoadedMoe.load(self.directory, plan.layer, self.mode, options)
        except (ValueError, NotImplementedError) as error:
            raise type(error)(f"{name}: {error}") from error
        config = config_from_core(loaded.config)
        found, wanted = _numbers(config.activation), _numbers(plan.gate.activation)
        if found != wanted or config.experts != plan.experts:
            raise NotImplementedError(
                f"{name}: config.json says {config.experts} experts with {config.activation}, the "
                f"model has {plan.experts} with {plan.gate.activation}"
            )
        if config.weight_on_input:
            raise NotImplementedError(f"{name}: the routing weights of this model multiply the "
                                      "experts' input; not offered here")  # fmt: skip
        out = _FLOATS[self._dtype()]
        config = replace(config, out_dtype=out, method="renormalize", n_group=1, topk_group=1,
                         routed_scale=1.0,
                         slot_dtype="float32" if out == "float32" else "bfloat16")  # fmt: skip
        given = {key: value for key, value in loaded.weights.items() if value is not None}
        layout = given.pop("scale_layout")
        device = device_of(self._model, name)
        arrays = {key: value if isinstance(value, float) else host_tensor(value).to(device)
                  for key, value in given.items()}  # fmt: skip
        parts = MoeParts(arrays, (layout, layout))
        layer = MoeLayer._of_parts(parts, config, TorchMaker(device))
        return Experts(layer, kept=KeptWeights.of(parts, config) if keep_weights else None)

    def _linear(self, name: str, linear: _PackedLinear) -> torch.nn.Linear:
        rows, cols = linear.features
        device, dtype = device_of(self._model, name), self._dtype()
        made = torch.nn.Linear(cols, rows, bias=linear.has_bias, device="meta")
        weight = dequantized(self.files, linear.tensor).to(device, dtype)
        made.weight = torch.nn.Parameter(weight, requires_grad=False)
        if linear.has_bias:
            stored = linear.tensor.name.removesuffix("weight") + "bias"
            bias = self.files.read(stored).to(device, dtype)
            made.bias = torch.nn.Parameter(bias, requires_grad=False)
        return made


def _numbers(activation: nf.Activation) -> tuple[Any, ...]:
    """Kind and parameters, with those that are not given at the values that they then have."""
    infinity = float("inf")
    values = (activation.alpha, activation.beta, activation.limit_gate, activation.limit_up)
    defaults = (1.0, 0.0, infinity, infinity)
    return (activation.kind, *(
        default if value is None else round(float(value), 6)
        for value, default in zip(values, defaults, strict=True)))  # fmt: skip


def dequantized(files: Files, tensor: Any) -> torch.Tensor:
    """The numbers of a quantized weight of two axes, float32, as its convention defines them."""
    values, scales, *rest = (files.read(name) for name in tensor.parts)
    format = tensor.format
    sizes = nf.quantized_layout(format, *tensor.shape, scale_layout="linear")
    global_scale = rest[0].reshape(1).float() if rest else None
    scales = scales.float() if format.startswith("fp8") else scales.view(torch.uint8)
    if format == "nvfp4" and global_scale is None:
        raise ValueError(f"{tensor.name}: no global scale")
    whole = nf.QuantizedTensor(values.view(torch.uint8), scales.contiguous(), global_scale, sizes,
                               tuple(tensor.shape))  # fmt: skip
    divides = tensor.convention == "nvfp4-ct"
    return nf.dequantize(whole, global_scale_divides=divides)


def device_of(model: Any, module: str) -> torch.device:
    """Where the parameters beside a module lie: the device map put its block there."""
    parent = module
    while parent:
        parent = parent.rpartition(".")[0]
        for parameter in model.get_submodule(parent).parameters():
            if parameter.device.type != "meta":
                return parameter.device
    return torch.device("cpu")


