"""AllReduce: sums over ranks, fused with residual, RMSNorm and quantization."""

from __future__ import annotations

from typing import Any, Literal, Self, Unpack

import numpy as np

from narrowfloat import _core
from narrowfloat._allreduce_call import (
    PACKAGE_NAMES,
    AllReduceOptions,
    call,
    in_words_of,
    settings_of,
)
from narrowfloat._allreduce_outputs import (
    AllReduceResult,
    complete,
    new_quantized,
    quantized_outputs,
    rows_of_pattern,
    scale_to_array,
    store_global_scale,
)
from narrowfloat._arrays import maker_of, shape_of
from narrowfloat._collective import Collective

Agreement = Literal["first_call", "every_call", "never"]
Quantization = Literal["none", "fp8_tensor", "fp8_token", "fp8_group", "fp8_block", "nvfp4",
                       "nvfp4_per_token", "mxfp8", "mxfp4"]  # fmt: skip
_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
MAX_RANKS = 8  # More than these run by NCCL alone.


def dtype_name(dtype: Any) -> str:
    """Name of "bfloat16", a type of NumPy or one of torch."""
    if isinstance(dtype, str):
        return dtype
    text = str(dtype)
    return text.removeprefix("torch.") if text.startswith("torch.") else np.dtype(dtype).name


def make_options(
    ranks: int, *, device: Any = "cpu", dtype: Any = "bfloat16", max_tokens: int | None = None,
    hidden: int | None = None, oneshot_bytes: int | None = None, twoshot_bytes: int | None = None,
    nccl_bytes: int | None = None, use_nccl: bool = True, transport: str = "auto",
    deadline: float = 30.0, agreement: Agreement = "first_call",
) -> _core.AllReduceOptions:  # fmt: skip
    """Options of a workspace, from the keywords of AllReduce."""
    name = dtype_name(dtype)
    options = _core.AllReduceOptions(str(device), name)
    if (max_tokens is None) != (hidden is None):
        raise ValueError("hidden: give both it and max_tokens, or none of them")
    if max_tokens is not None and hidden is not None:
        if twoshot_bytes is not None:
            raise ValueError("twoshot_bytes: max_tokens and hidden say it; leave one of them out")
        if max_tokens < 1 or hidden < 1:
            raise ValueError(
                f"max_tokens, hidden: expected at least 1, got {max_tokens} and {hidden}"
            )
        twoshot_bytes = max_tokens * hidden * _DTYPE_BYTES[name]
        if oneshot_bytes is None and ranks <= MAX_RANKS:
            oneshot_bytes = min(_core.default_allreduce_capacities(ranks)[0], twoshot_bytes)
    options.oneshot_bytes = oneshot_bytes or 0
    options.twoshot_bytes = twoshot_bytes or 0
    options.nccl_bytes = nccl_bytes or 0
    options.use_nccl = use_nccl
    options.set_transport(transport)
    options.set_deadline(deadline)
    options.set_agreement(agreement)
    return options


class AllReduce(Collective):
    """One rank of a group that sums tensors over all ranks: its memory, and calls on it.

    group: a RankGroup; default: that of the launcher's environment. Creation, reset() and destroy()
        are collective: they block until all ranks of the group have called them.
    device: "cpu", "cuda:N" or what torch takes as one; where the tensors of the calls lie.
    dtype: of the tensors; bfloat16 and float16 share a workspace, float32 has one of its own.
    max_tokens, hidden: the largest tensor of a call. Or oneshot_bytes and twoshot_bytes, the
        largest that each of these algorithms takes. Default: docs/allreduce.md.
    nccl_bytes: the largest for NCCL; default: twoshot_bytes. use_nccl: whether GPUs load it.
    transport: auto, shared_memory, cuda_ipc, cuda_vmm, or none, which leaves NCCL alone.
    deadline: seconds that a call waits for another rank; 0: without end.
    agreement: which calls compare their shapes and options over the group before they run:
        first_call, every_call or never. A CUDA graph needs a call before its capture, or never.

    Calls on one workspace must not overlap, and all ranks make the same calls in the same order.
    With `with`, destroy() is called at its end unless there is an exception.
    """

    __slots__ = ("__weakref__", "_workspace")

    _workspace: _core.AllReduceWorkspace

    def __init__(
        self,
        group: _core.RankGroup | None = None,
        *,
        device: Any = "cpu",
        dtype: Any = "bfloat16",
        max_tokens: int | None = None,
        hidden: int | None = None,
        oneshot_bytes: int | None = None,
        twoshot_bytes: int | None = None,
        nccl_bytes: int | None = None,
        use_nccl: bool = True,
        transport: str = "auto",
        deadline: float = 30.0,
        agreement: Agreement = "first_call",
    ) -> None:
        """Collective over the group; see the class."""
        if group is None:
            group = _core.RankGroup.from_environment()
        options = make_options(
            group.size, device=device, dtype=dtype, max_tokens=max_tokens, hidden=hidden,
            oneshot_bytes=oneshot_bytes, twoshot_bytes=twoshot_bytes, nccl_bytes=nccl_bytes,
            use_nccl=use_nccl, transport=transport, deadline=deadline, agreement=agreement,
        )  # fmt: skip
        self._workspace = _core.AllReduceWorkspace.create(group, options)

    @classmethod
    def local(cls, ranks: int, **options: Any) -> list[Self]:
        """All ranks of a group in this process, for tests: call each in a thread of its own.

        options: those of the class. On the CPU they share memory; on a GPU all are on that one, and
        each thread needs a stream of its own (use_stream()).
        """
        found = []
        for core in _core.AllReduceWorkspace.create_local(ranks, make_options(ranks, **options)):
            rank = cls.__new__(cls)
            rank._workspace = core
            found.append(rank)
        return found

    def __call__(
        self,
        input: Any,
        pattern: str = "allreduce",
        *,
        residual: Any = None,
        gamma: Any = None,
        global_scale: Any = None,
        out: AllReduceResult | None = None,
        **options: Unpack[AllReduceOptions],
    ) -> AllReduceResult:
        """The sum of all ranks' inputs, and what the pattern makes of it.

        input: float16, bfloat16 or float32 [..., H]: this rank's partial sums.
        pattern: one of allreduce_patterns(); those but "allreduce" add residual, of the input's
            type and shape, and scale the norm by gamma [H]. Patterns named for a format quantize
            the norm; with "norm_" before it they also return the norm.
        global_scale: patterns with fp8 alone: the decode scale. With nvfp4 alone: the encode scale,
            usually 448 * 6 / amax. float32 [1] where the input lies, or a number.
        out: arrays to write, such as an earlier result; what is missing is new. residual_out may be
            the residual, and outputs of the input's shape may be the input.
        """
        settings = settings_of(pattern, options)
        arrays = {"residual_in": residual, "gamma": gamma}
        return self._run(pattern, settings, ("input", input), shape_of("input", input),
                         ({"input": input, **arrays}, {}), global_scale,
                         rows_of_pattern(pattern), out, options)  # fmt: skip

    def moe_reduction(
        self,
        expert_rows: Any,
        expert_scales: Any,
        token_input: Any,
        *,
        residual: Any,
        gamma: Any,
        num_experts: Any = None,
        quantization: Quantization = "none",
        global_scale: Any = None,
        outputs: tuple[str, ...] = ("residual_out", "norm_out"),
        out: AllReduceResult | None = None,
        **options: Unpack[AllReduceOptions],
    ) -> AllReduceResult:
        """As __call__() of token_input + the scaled sum of the active experts' rows.

        expert_rows: float16 or bfloat16 [X, T, H]. expert_scales: float32 [X, T]. token_input: of
            the rows' type, [T, H], such as the shared expert. num_experts: int32 [1], how many of
            the X count; default: all.
        quantization: of the norm. outputs: which of ar_out, residual_out and norm_out are new
            results; with out, its arrays are written instead.
        """
        settings = settings_of("moe_reduction", options, quantization)
        moe = {"token_input": token_input, "expert_rows": expert_rows,
               "expert_scales": expert_scales, "num_experts": num_experts}  # fmt: skip
        return self._run("moe_reduction", settings, ("token_input", token_input),
                         shape_of("token_input", token_input),
                         ({"residual_in": residual, "gamma": gamma}, moe), global_scale,
                         outputs if out is None else (), out, options)  # fmt: skip

    def moe_finalize(
        self,
        permuted_rows: Any,
        slot_to_row: Any,
        *,
        residual: Any,
        gamma: Any,
        slot_weights: Any = None,
        shared_expert: Any = None,
        routed_scaling: float = 1.0,
        quantization: Quantization = "none",
        global_scale: Any = None,
        outputs: tuple[str, ...] = ("residual_out", "norm_out"),
        out: AllReduceResult | None = None,
        **options: Unpack[AllReduceOptions],
    ) -> AllReduceResult:
        """As __call__() of the weighted sum of each token's rows, as combine() makes it.

        permuted_rows: float16 or bfloat16 [rows, H]. slot_to_row: int32 [T, k]; -1: not on this
            rank. slot_weights: float32 or of the rows' type, [T, k]; default: 1.
        shared_expert: of the rows' type, [T, H], added after the factor routed_scaling.
        quantization, outputs: moe_reduction().
        """
        settings = settings_of(
            "moe_finalize", {**options, "routed_scaling": routed_scaling}, quantization
        )
        moe = {"permuted_rows": permuted_rows, "slot_to_row": slot_to_row,
               "slot_weights": slot_weights, "shared_expert": shared_expert}  # fmt: skip
        shape = (shape_of("slot_to_row", slot_to_row)[0],
                 shape_of("permuted_rows", permuted_rows)[-1])  # fmt: skip
        return self._run("moe_finalize", settings, ("permuted_rows", permuted_rows), shape,
                         ({"residual_in": residual, "gamma": gamma}, moe), global_scale,
                         outputs if out is None else (), out, options)  # fmt: skip

    def _run(
        self, pattern: str, settings: _core.AllReduceSettings, like: tuple[str, Any],
        shape: tuple[int, ...], inputs: tuple[dict[str, Any], dict[str, Any]], global_scale: Any,
        wanted: tuple[str, ...], out: AllReduceResult | None, options: AllReduceOptions,
    ) -> AllReduceResult:  # fmt: skip
        quantized = None if out is None else out.quantized
        missing = any(out is None or getattr(out, name) is None for name in wanted)
        quantizes = settings.quantization != "none"
        makes = missing or (quantizes and quantized is None)
        maker = maker_of(*like) if makes or not hasattr(global_scale, "shape") else None
        if quantizes and quantized is None:
            assert maker is not None
            try:
                quantized = new_quantized(maker, shape, settings.quantization,
                                          options.get("scale_layout"),
                                          settings.group_size)  # fmt: skip
            except ValueError as error:
                names = {"cols": f"{like[0]}.shape[-1]"}
                raise ValueError(in_words_of(str(error), names, pattern)) from error
        rows = complete(out, wanted, like, maker, shape)
        if global_scale is not None and maker is not None:
            global_scale = scale_to_array(global_scale, maker)
        first, moe_inputs = inputs
        first = {**first, "global_scale": global_scale}
        algorithm = call(self._workspace, pattern, settings,
                         (first, moe_inputs, {**rows, **quantized_outputs(quantized)}))  # fmt: skip
        store_global_scale(quantized, global_scale)
        return AllReduceResult(**rows, quantized=quantized, algorithm=algorithm)

    @property
    def rank(self) -> int:
        """This rank's number."""
        return self._workspace.rank

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return self._workspace.ranks

    @property
    def device(self) -> str:
        """Where the tensors of the calls lie: "cpu" or "cuda:N"."""
        return self._workspace.device

    @property
    def transport(self) -> str:
        """How ranks reach each other's memory; "none": by NCCL alone."""
        return self._workspace.transport

    @property
    def oneshot_bytes(self) -> int:
        """The largest tensor that the one-shot takes."""
        return self._workspace.oneshot_bytes

    @property
    def twoshot_bytes(self) -> int:
        """The largest tensor that the two-shot takes."""
        return self._workspace.twoshot_bytes

    @property
    def nccl_bytes(self) -> int:
        """The largest tensor that NCCL takes; 0 without it."""
        return self._workspace.nccl_bytes

    def fits(self, tokens: int, hidden: int, dtype: Any = "bfloat16") -> bool:
        """Whether calls of this shape run, by any algorithm."""
        return self._workspace.fits(tokens, hidden, dtype_name(dtype))

    def check_error(self) -> None:
        """RuntimeError if a call has failed: a peer was late or dead, or an index out of range.

        On a GPU, synchronize with the stream first. Until reset(), calls raise the same error.
        """
        self._workspace.check_error()

    def reset(self) -> None:
        """Collective: clears all memory and the error."""
        self._workspace.reset()

    def destroy(self) -> None:
        """Collective: waits for all ranks, then frees. The object cannot be used afterwards."""
        self._workspace.destroy()

    def explain(
        self, tokens: int, hidden: int, pattern: str = "allreduce", *, dtype: Any = "bfloat16",
        **options: Unpack[AllReduceOptions],
    ) -> _core.Explanation:  # fmt: skip
        """Which algorithm such a call uses, and why the others do not. Nothing is computed."""
        return _explain(
            tokens, hidden, pattern, dtype, options, (self.ranks, self.device),
            (self.transport != "none", self.nccl_bytes > 0),
            (self.oneshot_bytes, self.twoshot_bytes),
        )  # fmt: skip

    def __repr__(self) -> str:
        return (f"AllReduce(rank {self.rank} of {self.ranks}, {self.device}, "
                f"{self.transport})")  # fmt: skip


def explain_allreduce(
    tokens: int, hidden: int, pattern: str = "allreduce", *, ranks: int, device: str = "cpu",
    dtype: Any = "bfloat16", **options: Unpack[AllReduceOptions],
) -> _core.Explanation:  # fmt: skip
    """As AllReduce.explain(), of a workspace with default options that need not exist."""
    return _explain(tokens, hidden, pattern, dtype, options, (ranks, device), (True, True), (0, 0))


def _explain(
    tokens: int, hidden: int, pattern: str, dtype: Any, options: AllReduceOptions,
    where: tuple[int, str], engines: tuple[bool, bool], capacities: tuple[int, int],
) -> _core.Explanation:  # fmt: skip
    settings = settings_of(pattern, options)
    try:
        return _core.explain_allreduce(settings, (tokens, hidden), dtype_name(dtype), *where,
                                       engines, capacities)  # fmt: skip
    except ValueError as error:
        names = {"problem.hidden": "hidden", "problem.tokens": "tokens",
                 "problem.element": "dtype"}  # fmt: skip
        raise ValueError(in_words_of(str(error), PACKAGE_NAMES | names, pattern)) from error
