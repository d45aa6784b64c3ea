"""Statistics of what goes into matrices: for static activation scales, and experts' for GPTQ.

The file has, for each module of experts and each of `input` (of the first matrix) and `inter` (of
the second), arrays with a row for each expert: `MODULE.input.count` int64 [E], tokens that came;
`MODULE.input.amax` float32 [E]; and by choice `.second_moment` float32 [E, K], means of squares, or
`.hessian` float32 [E, K, K], means of products of two columns. Experts without tokens have zeros.
Each `torch.nn.Linear` has `MODULE.linear.count` int64 [1] and `MODULE.linear.amax` float32 [1].
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, Literal

import torch

from narrowfloat import _core
from narrowfloat.transformers._experts import Experts, is_experts

FORMAT = "narrowfloat.statistics"
KINDS = ("amax", "second_moment", "hessian")


class _Sums:
    """Sums over one matrix's input rows, for all experts of a module."""

    def __init__(self, experts: int, kind: str) -> None:
        self.count = torch.zeros(experts, dtype=torch.int64)
        self.amax = torch.zeros(experts)
        self.kind, self.sums = kind, torch.zeros(0)

    def add(self, expert: int, rows: torch.Tensor) -> None:
        """Rows that one expert multiplies."""
        rows = rows.detach().float()
        self.count[expert] += len(rows)
        self.amax[expert] = max(float(self.amax[expert]), float(rows.abs().max()))
        if self.kind == "amax":
            return
        made = rows.square().sum(0) if self.kind == "second_moment" else rows.T @ rows
        if not self.sums.numel():
            self.sums = torch.zeros(len(self.count), *made.shape)
        self.sums[expert] += made.cpu()

    def tensors(self) -> dict[str, torch.Tensor]:
        """As the file has them."""
        found = {"count": self.count, "amax": self.amax}
        if self.kind != "amax":
            count = self.count.clamp(min=1).reshape(-1, *[1] * (self.sums.ndim - 1))
            found[self.kind] = self.sums / count
        return found


class _Watcher:
    """A hook of one experts module: the rows of each expert, and what its gate makes of them."""

    def __init__(self, module: Any, kind: str) -> None:
        self.input, self.inter = (_Sums(module.num_experts, kind) for _ in range(2))

    def __call__(self, module: Any, arguments: tuple[Any, ...]) -> None:
        hidden, ids, *_ = arguments
        hidden = hidden.reshape(-1, hidden.shape[-1])
        ids = ids.reshape(len(hidden), -1)
        first = "gate_up_proj" if module.has_gate else "up_proj"
        for expert in range(module.num_experts):
            rows = hidden[(ids == expert).any(1)]
            if not len(rows):
                continue
            weight = getattr(module, first)[expert]
            made = rows @ (weight if module.is_transposed else weight.T)
            if module.has_bias:
                made = made + getattr(module, f"{first}_bias")[expert]
            self.input.add(expert, rows)
            self.inter.add(expert, module._apply_gate(made) if module.has_gate
                           else module.act_fn(made))  # fmt: skip


class _LinearWatcher:
    """A hook of one Linear: the number and the largest magnitude of its input rows."""

    def __init__(self) -> None:
        self.count, self.amax = torch.zeros(1, dtype=torch.int64), torch.zeros(1)

    def __call__(self, module: Any, arguments: tuple[Any, ...]) -> None:
        if not arguments or not arguments[0].numel():
            return
        rows = arguments[0].detach()
        self.count += rows.numel() // rows.shape[-1]
        self.amax = torch.maximum(self.amax.to(rows.device), rows.abs().max().float())

    def tensors(self) -> dict[str, torch.Tensor]:
        """As the file has them."""
        return {"linear.count": self.count, "linear.amax": self.amax.cpu()}


def calibrate(
    model: Any,
    data: Iterable[str] | Iterable[torch.Tensor],
    *,
    path: str | os.PathLike[str],
    statistics: Literal["amax", "second_moment", "hessian"] = "amax",
    tokenizer: Any = None,
) -> dict[str, torch.Tensor]:
    """Runs a plain model over data and writes a safetensors file of statistics; returns them.

    data: texts, with the tokenizer, or batches of token ids, int64 [B, S].
    The largest magnitudes are always there, also of what goes into each Linear; second moments or
    Hessians of experts by choice, which take 4 K or 4 K^2 bytes of host memory for each expert and
    side. A NarrowfloatConfig with a static
    mode takes the file, and so does quantize_checkpoint(activation_amax=, activation_moments=,
    gptq=).
    """
    if statistics not in KINDS:
        raise ValueError(f"statistics: expected one of {', '.join(KINDS)}; got {statistics!r}")
    named = dict(model.named_modules())
    modules = {name: module for name, module in named.items() if is_experts(module)}
    linears = {name: module for name, module in named.items()
               if isinstance(module, torch.nn.Linear)}  # fmt: skip
    is_quantized = any(isinstance(module, Experts) for module in named.values())
    if is_quantized or not (modules or linears):
        raise ValueError(f"model: {type(model).__name__} has no dense experts or Linear modules; "
                         "calibrate the plain model, before its experts are quantized")  # fmt: skip
    watchers = {name: _Watcher(module, statistics) for name, module in modules.items()}
    of_linears = {name: _LinearWatcher() for name in linears}
    hooks = [named[name].register_forward_pre_hook(one)
             for name, one in [*watchers.items(), *of_linears.items()]]  # fmt: skip
    tokens = 0
    try:
        with torch.no_grad():
            for one in data:
                if isinstance(one, str):
                    if tokenizer is None:
                        raise ValueError("tokenizer: needed for texts")
                    one = tokenizer(one, return_tensors="pt").input_ids
                tokens += one.numel()
                model(one.to(model.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    if not tokens:
        raise ValueError("data: expected at least one text or batch, got none")
    made = {f"{name}.{side}.{key}": tensor for name, watcher in watchers.items()
            for side in ("input", "inter")
            for key, tensor in getattr(watcher, side).tensors().items()}  # fmt: skip
    made |= {f"{name}.{key}": tensor for name, watcher in of_linears.items()
             for key, tensor in watcher.tensors().items()}  # fmt: skip
    parts = [(name, "I64" if tensor.dtype == torch.int64 else "F32", tensor.contiguous())
             for name, tensor in made.items()]  # fmt: skip
    metadata = {"format": FORMAT, "statistics": statistics, "tokens": str(tokens)}
    _core.write_safetensors(os.fspath(path), parts, metadata)
    return made


def read_amax(path: str, module: str) -> tuple[torch.Tensor, torch.Tensor]:
    """amax of input and inter of a module, float32 [E]; ValueError for another file."""
    file = _core.SafetensorsReader.open(path)
    listing = file.tensors()
    found = []
    for side in ("input", "inter"):
        name = f"{module}.{side}.amax"
        if file.metadata().get("format") != FORMAT or name not in listing:
            raise ValueError(f"statistics: {path}: no {name}; calibrate() of the same model makes "
                             "such a file")  # fmt: skip
        tensor = torch.empty(listing[name][1], dtype=torch.float32)
        file.read(name, tensor)
        found.append(tensor)
    return found[0], found[1]
