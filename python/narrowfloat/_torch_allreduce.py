"""Operator of torch: all-reduce over the ranks of a process group.

A workspace is a number to the operator, since schemas know nothing but tensors and numbers.
"""

from __future__ import annotations

import secrets
import weakref
from typing import Any, NamedTuple, NoReturn, Unpack

import torch

import narrowfloat as nf
from narrowfloat import _core
from narrowfloat._allreduce import Agreement, Quantization
from narrowfloat._allreduce_call import PACKAGE_NAMES, AllReduceOptions, call, settings_of
from narrowfloat._allreduce_outputs import QUANTIZED_FORMATS, rows_of_pattern
from narrowfloat._shapes import FORMATS, product, scale_count
from narrowfloat._streams import allocating_on
from narrowfloat._torch_groups import has_gpus, rank_group
from narrowfloat._torch_library import library, register

_INPUTS = ("input", "residual", "gamma", "global_scale")
_MOE = ("expert_rows", "expert_scales", "num_experts", "token_input", "permuted_rows",
        "slot_to_row", "slot_weights", "shared_expert")  # fmt: skip
_OUTPUTS = ("ar_out", "residual_out", "norm_out", "values", "scales", "row_scales")
# Options of the operator that are words or numbers, in its order.
_OPTIONS = {"quantization": "none", "scale_layout": "swizzled_128x4", "group_size": None,
            "accumulate": "float32", "exactness": "exact", "algorithm": "auto",
            "trigger": "at_end", "eps": 1e-6, "weight_bias": 0.0, "routed_scaling": 1.0,
            "programmatic_launch": False}  # fmt: skip
# Some of the operator's outputs have other names in the library.
_LIBRARY_NAMES = {"residual": "residual_in", "values": "quant_out", "scales": "scale_out",
                  "row_scales": "row_scale_out"}  # fmt: skip
_NAMES = PACKAGE_NAMES | {"ar_out": "ar_out", "residual_out": "residual_out",
                          "norm_out": "norm_out", "quant_out": "values", "scale_out": "scales",
                          "row_scale_out": "row_scales"}  # fmt: skip

# Pattern -> quantization.
_QUANTIZATIONS = {pattern: settings_of(pattern, {}).quantization
                 for pattern in nf.allreduce_patterns()}  # fmt: skip

# Quantization -> bits of a code, columns of a block; plain numbers, which compiled code can read.
_CODES = {name: (FORMATS[format].element_bits, FORMATS[format].block_shape[1])
          for name, format in QUANTIZED_FORMATS.items()}  # fmt: skip

# `order` belongs to the workspace. No call writes to it, but since the schema says so, compiled
# code keeps the calls on a workspace, and their order, which must be the same on all ranks.
library.define(
    "allreduce_out(SymInt workspace, Tensor(z!) order, str pattern, str quantization,"
    " str scale_layout, int? group_size, str accumulate, str exactness, str algorithm,"
    " str trigger, float eps, float weight_bias, float routed_scaling, bool programmatic_launch, *"
    + "".join(f", Tensor? {name}=None" for name in (*_INPUTS, *_MOE))
    + "".join(f", Tensor({chr(97 + i)}!)? {name}=None" for i, name in enumerate(_OUTPUTS))
    + ") -> ()"
)


class _Handle:
    """A workspace with a number, by which operators find it; lives as long as it is kept.

    The number is random, so that a program that was exported elsewhere finds no workspace instead
    of another one.
    """

    __slots__ = ("__weakref__", "core", "number")

    def __init__(self, core: _core.AllReduceWorkspace) -> None:
        self.core, self.number = core, secrets.randbits(62)
        _handles[self.number] = self


_handles: weakref.WeakValueDictionary[int, _Handle] = weakref.WeakValueDictionary()


def _pick(names: tuple[str, ...], tensors: dict[str, Any]) -> dict[str, Any]:
    return {_LIBRARY_NAMES.get(name, name): tensors.get(name) for name in names}


def _allreduce_out(
    number: int, order: torch.Tensor, pattern: str, *words: Any, **given: Any
) -> None:  # fmt: skip
    handle = _handles.get(number)
    if handle is None:
        raise ValueError(f"workspace: number {number} is of no workspace that still exists")
    options = dict(zip(_OPTIONS, words, strict=True))
    quantization = options.pop("quantization")
    arrays = (_pick(_INPUTS, given), _pick(_MOE, given), _pick(_OUTPUTS, given))
    call(handle.core, pattern, settings_of(pattern, options, quantization), arrays, _NAMES)


register("allreduce_out", _allreduce_out, lambda *args, **how: None)


class AllReduceTensors(NamedTuple):
    """The results of a call; None stands for what its pattern does not have.

    ar_out: the sum over ranks. residual_out: it plus the residual. norm_out: the norm of that.
    values: uint8 [..., H] of float8_e4m3fn, or [..., H / 2] with two 4-bit codes. scales: uint8 in
    the scale layout (nvfp4, mxfp4, mxfp8), float32 [T, blocks] (fp8_block), float32 [..., 1]
    (fp8_token), int32 [T, words] (fp8_group: narrowfloat.Fp8Rows). row_scales: float32 [T].
    """

    ar_out: torch.Tensor | None = None
    residual_out: torch.Tensor | None = None
    norm_out: torch.Tensor | None = None
    values: torch.Tensor | None = None
    scales: torch.Tensor | None = None
    row_scales: torch.Tensor | None = None


def _new_quantized(
    like: torch.Tensor, shape: list[Any], quantization: str, scale_layout: str, group_size: int
) -> dict[str, torch.Tensor]:
    """New values, scales and row scales for a norm of a shape."""

    def new(extents: Any, dtype: torch.dtype) -> torch.Tensor:
        return like.new_empty(extents, dtype=dtype)

    rows = product(shape[:-1])
    if quantization == "fp8_tensor":
        return {"values": new(shape, torch.uint8)}
    if quantization == "fp8_token":
        return {"values": new(shape, torch.uint8), "scales": new([*shape[:-1], 1], torch.float32)}
    if quantization == "fp8_group":
        columns, step = (shape[-1] // group_size + 3) // 4, (rows + 3) // 4 * 4
        words = new([columns, step], torch.int32)
        return {"values": new(shape, torch.uint8), "scales": words.t()[:rows]}
    bits, columns = _CODES[quantization]
    blocks = (shape[-1] + columns - 1) // columns
    values = new([*shape[:-1], shape[-1] * bits // 8], torch.uint8)
    if quantization == "fp8_block":
        return {"values": values, "scales": new([rows, blocks], torch.float32)}
    extents = [rows, blocks] if scale_layout == "linear" else [scale_count(scale_layout, rows,
                                                                           blocks)]  # fmt: skip
    parts = {"values": values, "scales": new(extents, torch.uint8)}
    if quantization == "nvfp4_per_token":
        parts["row_scales"] = new([rows], torch.float32)
    return parts


def _new_outputs(
    like: torch.Tensor, shape: list[Any], rows: tuple[str, ...], how: tuple[str, str, int],
    given: AllReduceTensors,
) -> AllReduceTensors:  # fmt: skip
    """The given outputs, and new ones for what is missing. how: as _new_quantized() takes it."""
    made = {name: like.new_empty(shape) for name in rows if getattr(given, name) is None}
    if how[0] != "none" and (given.values is None or given.scales is None):
        parts = _new_quantized(like, shape, *how)
        made |= {name: part for name, part in parts.items() if getattr(given, name) is None}
    return given._replace(**made) if made else given


class AllReduce(torch.nn.Module):
    """One rank of a process group that sums tensors over all ranks; a narrowfloat.AllReduce.

    process_group: of torch.distributed; default: all processes. It carries messages of the host at
        creation, reset(), destroy() and the calls of `agreement`, with its own time limit; with
        NCCL as its only backend, through tensors on the GPU.
    device: default: the current GPU where the group has a backend for GPUs, else the CPU.
    workspace: a narrowfloat.AllReduce to use instead of a process group and all other arguments.
    Other arguments: narrowfloat.AllReduce.

    Calls trace under torch.compile and can be captured into CUDA graphs, after a call with the same
    agreement outside of them; with all outputs given they allocate nothing.
    """

    order: torch.Tensor

    def __init__(
        self, process_group: Any = None, *, workspace: nf.AllReduce | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16, max_tokens: int | None = None,
        hidden: int | None = None, oneshot_bytes: int | None = None,
        twoshot_bytes: int | None = None, nccl_bytes: int | None = None, use_nccl: bool = True,
        transport: str = "auto", deadline: float = 30.0, agreement: Agreement = "first_call",
    ) -> None:  # fmt: skip
        """Collective over the process group; see the class."""
        super().__init__()
        if workspace is None:
            group = rank_group(process_group)
            if device is None:
                device = "cuda" if has_gpus(process_group) else "cpu"
            where = torch.device(device)
            if where.type == "cuda" and where.index is None:
                where = torch.device("cuda", torch.cuda.current_device())
            workspace = nf.AllReduce(
                group, device=where, dtype=dtype, max_tokens=max_tokens, hidden=hidden,
                oneshot_bytes=oneshot_bytes, twoshot_bytes=twoshot_bytes, nccl_bytes=nccl_bytes,
                use_nccl=use_nccl, transport=transport, deadline=deadline, agreement=agreement,
            )  # fmt: skip
        self._rank = workspace
        self._handle = _Handle(self._rank._workspace)
        order = torch.zeros(1, dtype=torch.int32, device=workspace.device)
        self.register_buffer("order", order, persistent=False)

    def __reduce__(self) -> NoReturn:
        self._rank.__reduce__()

    def __deepcopy__(self, _: object) -> NoReturn:
        self._rank.__reduce__()

    @property
    def workspace(self) -> nf.AllReduce:
        """The rank's memory, with fits(), explain(), check_error(), reset() and destroy()."""
        return self._rank

    def forward(
        self, input: torch.Tensor, pattern: str = "allreduce", *,
        residual: torch.Tensor | None = None, gamma: torch.Tensor | None = None,
        global_scale: torch.Tensor | None = None, out: AllReduceTensors | None = None,
        **options: Unpack[AllReduceOptions],
    ) -> AllReduceTensors:  # fmt: skip
        """As narrowfloat.AllReduce.__call__(), of tensors; global_scale is one, too.

        out: tensors to write; what is missing is new.
        """
        tensors = {"input": input, "residual": residual, "gamma": gamma,
                   "global_scale": global_scale}  # fmt: skip
        rows = rows_of_pattern(pattern)
        return self._run(pattern, input, list(input.shape), tensors, rows, out, options)

    def moe_reduction(
        self, expert_rows: torch.Tensor, expert_scales: torch.Tensor, token_input: torch.Tensor, *,
        residual: torch.Tensor, gamma: torch.Tensor, num_experts: torch.Tensor | None = None,
        quantization: Quantization = "none", global_scale: torch.Tensor | None = None,
        outputs: tuple[str, ...] = ("residual_out", "norm_out"),
        out: AllReduceTensors | None = None, **options: Unpack[AllReduceOptions],
    ) -> AllReduceTensors:  # fmt: skip
        """As narrowfloat.AllReduce.moe_reduction(), of tensors."""
        tensors = {"expert_rows": expert_rows, "expert_scales": expert_scales,
                   "token_input": token_input, "num_experts": num_experts, "residual": residual,
                   "gamma": gamma, "global_scale": global_scale}  # fmt: skip
        return self._run("moe_reduction", token_input, list(token_input.shape), tensors,
                         outputs if out is None else (), out,
                         {**options, "quantization": quantization})  # fmt: skip

    def moe_finalize(
        self, permuted_rows: torch.Tensor, slot_to_row: torch.Tensor, *, residual: torch.Tensor,
        gamma: torch.Tensor, slot_weights: torch.Tensor | None = None,
        shared_expert: torch.Tensor | None = None, routed_scaling: float = 1.0,
        quantization: Quantization = "none", global_scale: torch.Tensor | None = None,
        outputs: tuple[str, ...] = ("residual_out", "norm_out"),
        out: AllReduceTensors | None = None, **options: Unpack[AllReduceOptions],
    ) -> AllReduceTensors:  # fmt: skip
        """As narrowfloat.AllReduce.moe_finalize(), of tensors."""
        tensors = {"permuted_rows": permuted_rows, "slot_to_row": slot_to_row,
                   "slot_weights": slot_weights, "shared_expert": shared_expert,
                   "residual": residual, "gamma": gamma, "global_scale": global_scale}  # fmt: skip
        shape = [slot_to_row.shape[0], permuted_rows.shape[-1]]
        return self._run("moe_finalize", permuted_rows, shape, tensors,
                         outputs if out is None else (), out,
                         {**options, "quantization": quantization,
                          "routed_scaling": routed_scaling})  # fmt: skip

    def _run(
        self, pattern: str, like: torch.Tensor, shape: list[Any],
        tensors: dict[str, torch.Tensor | None], rows: tuple[str, ...],
        out: AllReduceTensors | None, options: Any,
    ) -> AllReduceTensors:  # fmt: skip
        unknown = options.keys() - _OPTIONS.keys()
        if unknown:
            raise TypeError(f"unknown option {min(unknown)!r}; there are {', '.join(_OPTIONS)}")
        given = {name: value for name, value in options.items() if value is not None}
        words = _OPTIONS | given
        quantization = words["quantization"]
        if quantization == "none":
            quantization = _QUANTIZATIONS.get(pattern, "none")
        how = (quantization, words["scale_layout"], words["group_size"] or 128)
        found = out or AllReduceTensors()
        if torch.compiler.is_compiling():
            found = _new_outputs(like, shape, rows, how, found)
        else:
            with allocating_on(like.device):
                found = _new_outputs(like, shape, rows, how, found)
        torch.ops.narrowfloat.allreduce_out(self._handle.number, self.order, pattern,
                                            *words.values(), **tensors,
                                            **found._asdict())  # fmt: skip
        return found
