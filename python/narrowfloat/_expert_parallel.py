"""Expert parallelism: the experts of a Mixture-of-Experts layer lie on several ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, Self

from narrowfloat import _core
from narrowfloat._arrays import Maker, codes_to_core, maker_of, shape_of, to_core
from narrowfloat._collective import Collective
from narrowfloat._moe import MoeLayer, aligned_bytes
from narrowfloat._moe_call import rows_of, to_bfloat16, to_int32
from narrowfloat._routing import optional_to_core
from narrowfloat._streams import allocating_on

Payload = Literal["bf16", "fp8_group", "mxfp8", "nvfp4_per_token"]
# Payload -> bytes of a row of H values, types of values and scales, values that share a scale.
_CODES = {"fp8_group": (1, "float32", 128), "mxfp8": (1, "uint8", 32),
          "nvfp4_per_token": (2, "uint8", 16)}  # fmt: skip
# Names of the C++ library -> Python's.
_NAMES = {"values": "hidden", "scales": "hidden_scales", "row_scale": "row_scale"}
_ROWS = re.compile(rf"\b(?:rows|inputs)\.({'|'.join(_NAMES)})\b")


class ReceivedTokens(NamedTuple):
    """The rows that a rank received: row s * max_tokens + i is the i-th that rank s sent.

    On a GPU these are torch's tensors over the group's memory: other ranks overwrite them after
    combine(), and destroy() frees them.

    hidden: bfloat16 [R, H], or uint8 codes with hidden_scales (and row_scale) of the payload, R
    being max_rows. ids: int32 [R, k], -1 in rows that nobody sent. weights: float32 [R, k]. counts:
    int32 [ranks], the rows of each rank. call: names the dispatch for combine().
    """

    hidden: Any
    hidden_scales: Any
    row_scale: Any
    ids: Any
    weights: Any
    counts: Any
    call: int


class ExpertParallel(Collective):
    """One rank of a group whose ranks hold different experts: sends tokens there and sums results.

    group: a RankGroup; default: that of the launcher's environment. Creation, dispatch(),
        combine(), run() and destroy() are collective: they block until all ranks of the group have
        called them. On a GPU dispatch(), combine() and run() queue kernels that wait, and can be
        captured into CUDA graphs, with all arrays given; check_error() says whether one failed.
    device: "cpu", "cuda:N" or what torch takes as one; where the arrays of the calls lie.
    hidden, experts, top_k: of the layer; experts of all ranks together. Rank r owns
        `shard`: contiguous ranges, the first (experts mod ranks) ranks one expert more.
    max_tokens: the most tokens that a rank gives in one call.
    payload: what travels to the experts: bf16, fp8_group (1x128), mxfp8 or nvfp4_per_token. The
        sender quantizes once.
    order: rank: each rank sums its experts and rounds; then ranks in order. topk: every expert's
        row travels back, summed in the order of slots: the bytes of the layer on one rank.
    result_dtype: bfloat16, float16 (order "rank" alone) or float32, of the rows that travel back.
    places: the expert at each place, from place_experts(); default: expert e at place e. `shard`
        and the ids that dispatch() returns are then of places; those that it takes, of experts.
    transport: auto, peer_memory, all_to_all or all_gather (docs/parallel.md). GPUs use NCCL for the
        last two.
    all_to_all: on the CPU: f(send, receive) for uint8 arrays of equal size: block r of `send` goes to rank r,
        and block r of `receive` comes from there. It must not keep them.
    deadline: seconds that a call waits for another rank in peer memory, or over NCCL; 0: without
        end.

    All ranks give the same arguments and make the same calls in the same order. After an error of a
    collective call no further one is possible: make a new object on all ranks. With `with`,
    destroy() is called at its end unless there is an exception.
    """

    __slots__ = ("__weakref__", "_group", "_open_call", "_order", "_payload", "_result_dtype",
                 "_shape")  # fmt: skip

    _group: _core.ExpertParallel

    def __init__(
        self, group: _core.RankGroup | None = None, *, hidden: int, experts: int, top_k: int,
        max_tokens: int, payload: Payload = "bf16", order: Literal["rank", "topk"] = "rank",
        result_dtype: str = "bfloat16", places: Sequence[int] = (), device: Any = "cpu",
        transport: str = "auto", all_to_all: Callable[[Any, Any], object] | None = None,
        deadline: float = 30.0,
    ) -> None:  # fmt: skip
        """Collective over the group; see the class."""
        if group is None:
            group = _core.RankGroup.from_environment()
        options = _options(hidden, experts, top_k, max_tokens, payload, order, result_dtype, places,
                           device)  # fmt: skip
        options.set_word("transport", transport)
        options.set_deadline(deadline)
        if all_to_all is not None:
            options.set_all_to_all(all_to_all)
        self._keep(_core.ExpertParallel.create(group, options), hidden, top_k, payload, order,
                   result_dtype)  # fmt: skip

    @classmethod
    def local(
        cls, ranks: int, *, hidden: int, experts: int, top_k: int, max_tokens: int,
        payload: Payload = "bf16", order: Literal["rank", "topk"] = "rank",
        result_dtype: str = "bfloat16", places: Sequence[int] = (), deadline: float = 30.0,
    ) -> list[Self]:  # fmt: skip
        """1 to 8 ranks in this process, for tests: call each in a thread of its own."""
        options = _options(hidden, experts, top_k, max_tokens, payload, order, result_dtype, places,
                           "cpu")  # fmt: skip
        options.set_deadline(deadline)
        found = []
        for core in _core.ExpertParallel.create_local(ranks, options):
            rank = cls.__new__(cls)
            rank._keep(core, hidden, top_k, payload, order, result_dtype)
            found.append(rank)
        return found

    def _keep(
        self, core: _core.ExpertParallel, hidden: int, top_k: int, payload: str, order: str,
        result_dtype: str,
    ) -> None:  # fmt: skip
        self._group, self._shape = core, (hidden, top_k)
        self._open_call: int | None = None  # Its combine() has not come yet.
        self._payload, self._order, self._result_dtype = payload, order, result_dtype

    @property
    def rank(self) -> int:
        """This rank's number."""
        return self._group.rank

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self._group.ranks

    @property
    def transport(self) -> str:
        """peer_memory, all_to_all or all_gather."""
        return self._group.transport

    @property
    def shard(self) -> tuple[int, int]:
        """The first expert of this rank, and how many it owns."""
        return self._group.shard

    @property
    def max_rows(self) -> int:
        """ranks * max_tokens: rows that dispatch() returns."""
        return self._group.max_rows

    @property
    def memory_bytes(self) -> int:
        """Bytes of this rank's buffers."""
        return self._group.memory_bytes

    def dispatch(
        self, hidden: Any, ids: Any, weights: Any, *, hidden_scales: Any = None,
        row_scale: Any = None,
    ) -> ReceivedTokens:  # fmt: skip
        """Sends this rank's tokens to the ranks of their experts and returns those sent here.

        hidden: [T, H], T <= max_tokens: bfloat16, float16 or float32, or codes in the payload's
            format with their scales (linear), as MoeLayer.run() takes them.
        ids: [T, k], any integer type; those below 0 or from `experts` on name no expert. weights:
            float32 [T, k]. T may be 0 and differ between ranks.
        """
        if self._is_on_gpu:
            inputs = self._inputs(hidden, hidden_scales, row_scale, ids, weights)
            with _names_of_python():
                on_gpu = ReceivedTokens(**self._group.dispatch_on_gpu(*inputs))
            self._open_call = on_gpu.call
            return on_gpu
        maker = maker_of("hidden", hidden)
        received = self._new_received(maker)
        arrays = {name: None if array is None else codes_to_core(name, array)
                  for name, array in received.items()}  # fmt: skip
        inputs = self._inputs(hidden, hidden_scales, row_scale, ids, weights)
        with _names_of_python():
            call = self._group.dispatch(*inputs, arrays)
        self._open_call = call
        return ReceivedTokens(**received, call=call)

    def combine(self, received: ReceivedTokens, results: Any, out: Any) -> Any:
        """Sends results back, writes the sums for this rank's tokens to `out`, and returns it.

        received: what dispatch() returned. results: result_dtype, from the experts of this rank:
            order "rank": [max_rows, H], the weighted sum over a row's local experts; order "topk":
            [max_rows, k, H], each local slot's unweighted row. Other rows may have any contents.
        out: bfloat16, float16 or float32 [T, N] for the T tokens of the dispatch, N <= H. With more
            axes, [..., N], all but the last are tokens.
        """
        # Other ranks may still read the results of an earlier call where these are copied to.
        if received.call != self._open_call:
            raise ValueError(f"received: call {received.call} was combined already, or is not the "
                             "last of this group; give what the last dispatch() returned")  # fmt: skip
        if self._is_on_gpu:
            area: Any = self._group.results_on_gpu()
            given = (shape_of("results", results), results.dtype)
            if given != (shape_of("results", area), area.dtype):
                raise ValueError(f"results: expected {area.dtype} {list(area.shape)}, got "
                                 f"{results.dtype} {list(results.shape)}")  # fmt: skip
            with allocating_on(area.device):
                area.copy_(results)
            self._group.combine_on_gpu(received.call, to_core("out", rows_of("out", out, True)))
        else:
            self._group.combine(received.call, to_core("results", results),
                                to_core("out", rows_of("out", out, True)))  # fmt: skip
        self._open_call = None
        return out

    def run(
        self, layer: MoeLayer, hidden: Any, ids: Any, weights: Any, *, hidden_scales: Any = None,
        row_scale: Any = None, out: Any = None, workspace: Any = None,
    ) -> Any:  # fmt: skip
        """dispatch(), the layer on the rows of all ranks, combine(): [T, H] of the layer's
        out_dtype.

        layer: of this rank's `shard`: MoeConfig(expert_offset=..., local_experts=...). Its
            out_dtype (order "rank") or slot_dtype (order "topk") is result_dtype.
        Other arguments: dispatch(). out: [T, N], N <= H. workspace: new_workspace(layer).
        """
        shape = shape_of("hidden", hidden)
        maker = maker_of("hidden", hidden)
        if out is None:
            out = maker.empty((*shape[:-1], self._shape[0]), layer.config.out_dtype)
        if workspace is None:
            workspace = aligned_bytes(maker, self._group.required_workspace(layer._prepared))
        inputs = self._inputs(hidden, hidden_scales, row_scale, ids, weights)
        self._open_call = None
        with _names_of_python():
            self._group.run(layer._prepared, *inputs, to_core("out", rows_of("out", out, True)),
                            workspace)  # fmt: skip
        return out

    def new_workspace(self, layer: MoeLayer) -> Any:
        """uint8 for run(workspace=...)."""
        return aligned_bytes(layer._maker, self._group.required_workspace(layer._prepared))

    def check_error(self) -> None:
        """RuntimeError where an earlier call failed; on a GPU once its work has ended."""
        self._group.check_error()

    def give_up(self) -> None:
        """For a rank that has no results: the others get an error instead of waiting for it."""
        self._group.give_up()

    def destroy(self) -> None:
        """Collective: waits for all ranks, then frees. The object cannot be used afterwards."""
        self._group.destroy()

    def __repr__(self) -> str:
        hidden, top_k = self._shape
        return (
            f"{type(self).__name__}(rank {self.rank} of {self.ranks}, {self.transport}, "
            f"H={hidden}, k={top_k}, payload={self._payload}, order={self._order})"
        )

    @property
    def _is_on_gpu(self) -> bool:
        return self._group.is_on_gpu

    def _inputs(
        self, hidden: Any, hidden_scales: Any, row_scale: Any, ids: Any, weights: Any
    ) -> tuple[Any, Any, Any, Any, Any]:
        hidden = rows_of("hidden", hidden)
        if self._payload == "bf16":
            hidden = to_bfloat16("hidden", hidden)
        scales = None if hidden_scales is None else codes_to_core("hidden_scales", hidden_scales)
        return (to_core("hidden", hidden), scales, optional_to_core("row_scale", row_scale),
                to_core("ids", to_int32("ids", rows_of("ids", ids))),
                to_core("weights", rows_of("weights", weights)))  # fmt: skip

    def _new_received(self, maker: Maker) -> dict[str, Any]:
        rows, (hidden, top_k) = self.max_rows, self._shape
        values, scales = maker.empty((rows, hidden), "bfloat16"), None
        if self._payload in _CODES:
            share, dtype, block = _CODES[self._payload]
            values = maker.empty((rows, hidden // share), "uint8")
            scales = maker.empty((rows, -(-hidden // block)), dtype)
        is_per_token = self._payload == "nvfp4_per_token"
        return {"hidden": values, "hidden_scales": scales,
                "row_scale": maker.empty((rows,), "float32") if is_per_token else None,
                "ids": maker.empty((rows, top_k), "int32"),
                "weights": maker.empty((rows, top_k), "float32"),
                "counts": maker.empty((self.ranks,), "int32")}  # fmt: skip


@contextmanager
def _names_of_python() -> Iterator[None]:
    """Errors of the C++ library name the arguments of Python."""
    try:
        yield
    except ValueError as error:
        text = _ROWS.sub(lambda match: _NAMES[match[1]], str(error))
        if text == str(error):
            raise
        raise ValueError(text) from None


def _options(
    hidden: int, experts: int, top_k: int, max_tokens: int, payload: str, order: str,
    result_dtype: str, places: Sequence[int], device: Any,
) -> _core.ExpertParallelOptions:  # fmt: skip
    options = _core.ExpertParallelOptions()
    options.set_device(str(device))
    options.hidden, options.experts, options.top_k = hidden, experts, top_k
    options.max_tokens = max_tokens
    options.set_places(list(places))
    for member, word in (("payload", payload), ("order", order), ("result_dtype", result_dtype)):
        options.set_word(member, word)
    return options


def explain_expert_parallel(
    ranks: int, *, hidden: int, experts: int, top_k: int, max_tokens: int,
    payload: Payload = "bf16", order: Literal["rank", "topk"] = "rank",
    result_dtype: str = "bfloat16", places: Sequence[int] = (), device: Any = "cpu",
    transport: str = "auto", is_one_host: bool = True, has_all_to_all: bool = False,
) -> _core.Explanation:  # fmt: skip
    """Which transport a group of ranks would use, and why not the others."""
    options = _options(hidden, experts, top_k, max_tokens, payload, order, result_dtype, places,
                       device)  # fmt: skip
    options.set_word("transport", transport)
    return _core.explain_expert_parallel(ranks, options, is_one_host, has_all_to_all)
