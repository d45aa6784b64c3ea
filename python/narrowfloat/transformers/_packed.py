"""Checkpoints whose weights are quantized already: they go into layers with their stored bits.

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
from narrowfloat._linear import STATIC_MODES, LinearWeights
from narrowfloat._moe import MoeLayer
from narrowfloat._moe_config import config_from_core
from narrowfloat._moe_weights import WEIGHT_FORMATS, MoeParts
from narrowfloat._torch_moe_state import KeptWeights, host_tensor
from narrowfloat.torch import Linear
from narrowfloat.transformers._experts import Experts, is_experts
from narrowfloat.transformers._gates import Gate, find_gate

_LAYER = re.compile(r"\blayers?\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+\.|gate_up_proj|down_proj)")
# Facts about activations and caches, which weight-only layers do not need.
_HARMLESS = re.compile(r"\.(input_scale|input_global_scale|output_scale|k_scale|v_scale)$")
_TYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "U8": torch.uint8,
          "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn,
          "F8_E8M0": torch.float8_e8m0fnu}  # fmt: skip
# Formats of Linear weights -> the mode that loses least in the rows, and the columns that it takes.
_MODES = {"nvfp4": "nvfp4_bf16", "mxfp4": "mxfp4_bf16", "mxfp8": "mxfp8",
          "fp8_128x128": "fp8_block"}  # fmt: skip
_WHOLE = ("fp8_channel", "fp8_tensor")  # Linear weights that are dequantized.
_COLUMNS = {"nvfp4": 16, "mxfp4": 32, "mxfp8": 32, "fp8_128x128": 128}
_ROWS = 16
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
    tensors: list[Any]  # LogicalTensors

    @property
    def format(self) -> str:
        """That of all its weights."""
        return self.tensors[0].format


@dataclass
class _PackedLinear:
    """A Linear with a quantized weight."""

    tensor: Any  # LogicalTensor
    module: torch.nn.Linear  # The model's own, whose weights are on the meta device.

    @property
    def is_served(self) -> bool:
        """Whether a narrowfloat.torch.Linear computes what the module does."""
        rows, cols = self.tensor.shape
        multiple = _COLUMNS.get(self.tensor.format)
        return (type(self.module) is torch.nn.Linear and multiple is not None
                and rows % _ROWS == 0 and cols % multiple == 0)  # fmt: skip


def directory_of(files: list[str]) -> str:
    """The checkpoint's directory. ValueError where its files do not lie in one."""
    folders = {os.path.dirname(os.path.abspath(file)) for file in files}
    if len(folders) != 1:
        raise ValueError(f"checkpoint: expected files of one directory, got {sorted(folders)}")
    return folders.pop()


def recognised(files: list[str]) -> list[Any]:
    """The tensors of a checkpoint as a model sees them, quantized ones with their convention.

    None for one without quantized tensors, and for other files than safetensors.
    """
    if not files or not all(file.endswith(".safetensors") for file in files):
        return []
    found = _core.recognise_checkpoint(directory_of(files))
    return found if any(tensor.convention is not None for tensor in found) else []


class PackedCheckpoint:
    """A plan for the quantized tensors of a checkpoint, and its execution."""

    def __init__(self, model: Any, files: list[str], tensors: list[Any], mode: str | None) -> None:
        self.directory, self.files, self.mode = directory_of(files), Files(files), mode
        self.experts: dict[str, _PackedExperts] = {}
        self.linears: dict[str, _PackedLinear] = {}
        self._model = model
        self._plan([one for one in tensors if one.convention is not None])
        self._refuse_mixed_experts([one.name for one in tensors if one.convention is None])
        self._refuse_mode()
        self._refuse_strangers()

    def _plan(self, tensors: list[Any]) -> None:
        modules = dict(self._model.named_modules())
        by_layer = self._layers()
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

    def _layers(self) -> dict[int, str]:
        """Numbers of layers -> their modules of experts."""
        return {int(match[1]): name for name, module in self._model.named_modules()
                if is_experts(module) and (match := _LAYER.search(name))}  # fmt: skip

    def _is_ignored(self, name: str) -> bool:
        """Whether transformers leaves a tensor out of this model in any case."""
        patterns = self._model._keys_to_ignore_on_load_unexpected or ()
        return any(re.search(pattern, name) for pattern in patterns)

    def _add_expert(self, name: str, module: Any, layer: int, tensor: Any) -> None:
        if name not in self.experts:
            self.experts[name] = _PackedExperts(layer, find_gate(name, module),
                                                module.num_experts, [])  # fmt: skip
        self.experts[name].tensors.append(tensor)

    def _add_linear(self, modules: dict[str, Any], tensor: Any) -> bool:
        name = tensor.name.removesuffix(".weight")
        prefix = f"{self._model.base_model_prefix}."
        for candidate in (name, prefix + name, name.removeprefix(prefix)):
            module = modules.get(candidate)
            if not isinstance(module, torch.nn.Linear):
                continue
            features = [module.out_features, module.in_features]
            if list(tensor.shape) != features:
                raise ValueError(f"{tensor.name}: expected {features}, got {tensor.shape}")
            if tensor.format not in _MODES and tensor.format not in _WHOLE:
                raise NotImplementedError(
                    f"{tensor.name}: a Linear weight in {tensor.convention} is not read; "
                    "`narrowfloat dequantize` makes a checkpoint that transformers loads by itself"
                )
            if module.bias is None and f"{name}.bias" in self.files:
                raise ValueError(f"{name}.bias: the model's Linear has no bias")
            self.linears[candidate] = _PackedLinear(tensor, module)
            return True
        return False

    def _refuse_mixed_experts(self, plain: list[str]) -> None:
        """A MoeLayer has one format for all weights of its experts."""
        mend = ("all experts of a layer need one format; `narrowfloat dequantize` makes a "
                "checkpoint that transformers loads by itself")  # fmt: skip
        for name, one in self.experts.items():
            other = [tensor for tensor in one.tensors if tensor.format != one.format]
            if other:
                raise NotImplementedError(
                    f"{name}: {one.tensors[0].name} is {one.format}, {other[0].name} is "
                    f"{other[0].format}; {mend}"
                )
        quantized = {one.layer: name for name, one in self.experts.items()}
        for name in plain:
            match = _LAYER.search(name)
            if match and _EXPERT.search(name) and not name.endswith(("bias", "_scale")):
                module = quantized.get(int(match[1]))
                if module is not None:
                    raise NotImplementedError(f"{module}: {name} is not quantized, others are; "
                                              f"{mend}")  # fmt: skip

    def _refuse_mode(self) -> None:
        """A mode that no weights of the experts are for."""
        if self.mode in STATIC_MODES:
            raise ValueError(f"mode: {self.mode} has static activation scales, which are for plain "
                             "weights; take one whose scales are dynamic")  # fmt: skip
        if self.experts and self.mode is not None and not self._is_for(*self._formats):
            raise ValueError(
                f"mode: {self.mode} computes with {WEIGHT_FORMATS[self.mode] or 'bfloat16'} "
                f"weights, the experts are stored as {', '.join(sorted(self._formats))}"
            )

    @property
    def _formats(self) -> set[str]:
        """Those of the experts of all layers."""
        return {one.format for one in self.experts.values()}

    def _is_for(self, *formats: str) -> bool:
        """Whether the caller's mode computes with weights in one of these."""
        return self.mode is not None and WEIGHT_FORMATS[self.mode] in formats

    def _refuse_strangers(self) -> None:
        """Tensors beside those that are read, such as the scales of another method."""
        known = {part for one in self.experts.values() for tensor in one.tensors
                 for part in tensor.parts}  # fmt: skip
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

    def fill(self, keep_weights: bool, fast_sums: bool) -> None:
        """One module at a time."""
        for name in self.experts:
            self._model.set_submodule(name, self._layer(name, keep_weights, fast_sums))
        for name, linear in self.linears.items():
            filled = self._linear(name, linear, keep_weights) if linear.is_served else \
                self._dequantized(name, linear)  # fmt: skip
            self._model.set_submodule(name, filled)
        left = {name: one for name, one in self.linears.items() if not one.is_served}
        if left:
            formats = sorted({one.tensor.format for one in left.values()})
            name, one = next(iter(left.items()))
            warnings.warn(
                f"{self.directory}: {len(left)} Linear weights ({', '.join(formats)}) were "
                "dequantized, since narrowfloat.torch.Linear serves modules of torch.nn.Linear "
                f"itself with rows in multiples of {_ROWS} and columns in multiples of 16 "
                "(nvfp4), 32 (mxfp4, mxfp8) or 128 (fp8_128x128), but no fp8_channel or "
                "fp8_tensor: the first is "
                f"{name}, {type(one.module).__name__} of {list(one.tensor.shape)}",
                stacklevel=2,
            )

    def _dtype(self) -> torch.dtype:
        return self._model.dtype

    def _layer(self, name: str, keep_weights: bool, fast_sums: bool) -> Experts:
        plan = self.experts[name]
        options = _core.LoadMoeOptions()
        mode = self.mode if self._is_for(plan.format) else None
        try:
            loaded = _core.LoadedMoe.load(self.directory, plan.layer, mode, options)
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
                         routed_scale=1.0, fast_sums=fast_sums,
                         slot_dtype="float32" if out == "float32" else "bfloat16")  # fmt: skip
        given = {key: value for key, value in loaded.weights.items() if value is not None}
        layout = given.pop("scale_layout")
        device = device_of(self._model, name)
        arrays = {key: value if isinstance(value, float) else host_tensor(value).to(device)
                  for key, value in given.items()}  # fmt: skip
        parts = MoeParts(arrays, (layout, layout))
        layer = MoeLayer._of_parts(parts, config, TorchMaker(device))
        return Experts(layer, kept=KeptWeights.of(parts, config) if keep_weights else None)

    def _bias(self, linear: _PackedLinear) -> torch.Tensor | None:
        if linear.module.bias is None:
            return None
        return self.files.read(linear.tensor.name.removesuffix("weight") + "bias")

    def _linear(self, name: str, linear: _PackedLinear, keep_weights: bool) -> Linear:
        """With the stored bits."""
        whole, divides = stored(self.files, linear.tensor)
        mode = self.mode if self.mode and self._is_for(whole.format) else _MODES[whole.format]
        bias = self._bias(linear)
        weights = LinearWeights.of(whole, mode, bias=None if bias is None else bias.float())
        if divides:
            decoded = nf.decode_scale_from_encode(weights.factor)
            weights = replace(weights, factor=decoded)
        return Linear.of_weights(weights, device_of(self._model, name), keep=keep_weights)

    def _dequantized(self, name: str, linear: _PackedLinear) -> torch.nn.Linear:
        """The model's own module with the numbers of the weight."""
        device, dtype, module = device_of(self._model, name), self._dtype(), linear.module
        whole, divides = stored(self.files, linear.tensor)
        weight = nf.dequantize(whole, global_scale_divides=divides).to(device, dtype)
        module.weight = torch.nn.Parameter(weight, requires_grad=False)
        bias = self._bias(linear)
        if bias is not None:
            module.bias = torch.nn.Parameter(bias.to(device, dtype), requires_grad=False)
        return module


def _numbers(activation: nf.Activation) -> tuple[Any, ...]:
    """Kind and parameters, with those that are not given at the values that they then have."""
    infinity = float("inf")
    values = (activation.alpha, activation.beta, activation.limit_gate, activation.limit_up)
    defaults = (1.0, 0.0, infinity, infinity)
    return (activation.kind, *(
        default if value is None else round(float(value), 6)
        for value, default in zip(values, defaults, strict=True)))  # fmt: skip


def stored(files: Files, tensor: Any) -> tuple[nf.QuantizedTensor, bool]:
    """A quantized weight of two axes as it is stored, and whether its global scale divides."""
    values, scales, *rest = (files.read(name) for name in tensor.parts)
    format = tensor.format
    if format in _WHOLE:  # Every 128 columns have the scale of their row; the rest is not used.
        rows, cols = tensor.shape
        format, rest = "fp8_1x128", []
        scales = scales.reshape(-1, 1).expand(rows, -(-cols // 128))
    sizes = nf.quantized_layout(format, *tensor.shape, scale_layout="linear")
    global_scale = rest[0].reshape(1).float() if rest else None
    scales = scales.float() if format.startswith("fp8") else scales.view(torch.uint8)
    if format == "nvfp4" and global_scale is None:
        raise ValueError(f"{tensor.name}: no global scale")
    whole = nf.QuantizedTensor(values.view(torch.uint8), scales.contiguous(), global_scale, sizes,
                               tuple(tensor.shape))  # fmt: skip
    return whole, tensor.convention == "nvfp4-ct"


def device_of(model: Any, module: str) -> torch.device:
    """Where the parameters beside a module lie: the device map put its block there."""
    parent = module
    while parent:
        parent = parent.rpartition(".")[0]
        for parameter in model.get_submodule(parent).parameters():
            if parameter.device.type != "meta":
                return parameter.device
    return torch.device("cpu")
