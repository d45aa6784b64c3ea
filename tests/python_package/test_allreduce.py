"""narrowfloat.AllReduce: every pattern against a model, on ranks that are threads and processes."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from allreduce_numpy import (
    check_quantized,
    finalized_rows,
    norm,
    rank_sum,
    reduced_rows,
)
from allreduce_ranks import Gathering, inputs_of, on_all, process_rank

import narrowfloat as nf

BF16 = ml_dtypes.bfloat16
SCALES = {"fp8": 0.03, "nvfp4": 300.0}
PATTERNS = [name for name in nf.allreduce_patterns() if not name.startswith("moe")]
ROWS = ("ar_out", "residual_out", "norm_out")


def bits(array: Any) -> Any:
    """For comparisons that tell -0 from 0."""
    return array.view(np.uint16 if array.dtype.itemsize == 2 else np.uint32)


def kind_of(pattern: str) -> str:
    """The quantization of a pattern."""
    plain = pattern.removeprefix("norm_")
    return {"fp8": "fp8_tensor", "residual_rmsnorm": "none", "allreduce": "none"}.get(plain, plain)


def scale_of(pattern: str) -> float | None:
    """The scale that a pattern needs."""
    return SCALES.get(pattern.removeprefix("norm_"))


def check_equal_ranks(results: list[Any]) -> None:
    """All ranks have the same bytes."""
    first = results[0]
    for other in results[1:]:
        assert isinstance(other, nf.AllReduceResult), other
        for name in ROWS:
            if getattr(first, name) is not None:
                np.testing.assert_array_equal(bits(getattr(first, name)),
                                              bits(getattr(other, name)))  # fmt: skip
        if first.quantized is not None:
            np.testing.assert_array_equal(first.quantized.values, other.quantized.values)
            np.testing.assert_array_equal(first.quantized.scales, other.quantized.scales)


def run_all(workspaces: list[nf.AllReduce], inputs: list[Any], pattern: str, **how: Any) -> Any:
    """The result of rank 0, which all ranks have."""
    results = on_all(lambda rank: workspaces[rank](inputs[rank], pattern, **how), len(workspaces))
    for result in results:
        if isinstance(result, Exception):
            raise result
    check_equal_ranks(results)
    return results[0]


@pytest.mark.parametrize("dtype", [BF16, np.float16, np.float32])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns(pattern: str, dtype: Any) -> None:
    """Three ranks, both accumulations, all algorithms, a width with partial blocks of 256."""
    tokens, hidden = 5, 384
    workspaces = nf.AllReduce.local(3, dtype=dtype, max_tokens=tokens, hidden=hidden)
    inputs = [inputs_of(rank, tokens, hidden, dtype) for rank in range(3)]
    inputs[0][0, :3] = inputs[1][0, :3] = inputs[2][0, :3] = -0.0
    residual, gamma = inputs_of(7, tokens, hidden, dtype), inputs_of(8, 1, hidden, dtype)[0]
    how = {} if pattern == "allreduce" else {"residual": residual, "gamma": gamma}
    for algorithm, accumulate, bias in (("oneshot", "float32", 0.0), ("twoshot", "element", 1.0),
                                        ("reference", "element", 0.0)):  # fmt: skip
        got = run_all(workspaces, inputs, pattern, **how, global_scale=scale_of(pattern), eps=1e-5,
                      algorithm=algorithm, accumulate=accumulate, weight_bias=bias)  # fmt: skip
        assert got.algorithm == algorithm
        total = rank_sum(inputs, accumulate)
        if pattern == "allreduce":
            np.testing.assert_array_equal(bits(got.ar_out), bits(total))
            assert got[1:4] == (None, None, None)
            continue
        summed = (total.astype(np.float32) + residual.astype(np.float32)).astype(dtype)
        normed = norm(summed, gamma, 1e-5, bias)
        np.testing.assert_array_equal(bits(got.residual_out), bits(summed))
        stores = pattern.startswith(("norm_", "residual"))
        assert got.ar_out is None and (got.norm_out is not None) == stores
        if stores:
            np.testing.assert_array_equal(bits(got.norm_out), bits(normed))
        if kind_of(pattern) != "none":
            check_quantized(got.quantized, normed, kind_of(pattern), scale_of(pattern) or 0, 128,
                            None)  # fmt: skip


@pytest.mark.parametrize("layout", ["swizzled_128x4", "swizzled_8x4", "linear"])
@pytest.mark.parametrize("pattern", ["nvfp4", "mxfp4", "mxfp8", "nvfp4_per_token"])
def test_layouts(pattern: str, layout: str) -> None:
    """All are written, with padding of zeros; 130 rows need two tiles."""
    workspaces = nf.AllReduce.local(2, max_tokens=130, hidden=96)
    inputs = [inputs_of(rank, 130, 96, BF16) for rank in range(2)]
    gamma = np.ones(96, BF16)
    got = run_all(workspaces, inputs, pattern, residual=inputs[0], gamma=gamma,
                  scale_layout=layout, global_scale=scale_of(pattern))  # fmt: skip
    summed = (rank_sum(inputs, "float32").astype(np.float32) + inputs[0].astype(np.float32))
    normed = norm(summed.astype(BF16), gamma, 1e-6, 0.0)
    check_quantized(got.quantized, normed, kind_of(pattern), scale_of(pattern) or 0, 0, layout)
    assert got.quantized.scale_layout == layout


@pytest.mark.parametrize("size", [16, 32, 64, 128, 256])
def test_groups(size: int) -> None:
    """Each size works, with rows that are no multiple of 4."""
    workspaces = nf.AllReduce.local(2, max_tokens=6, hidden=768)
    inputs = [inputs_of(rank, 6, 768, BF16) for rank in range(2)]
    got = run_all(workspaces, inputs, "norm_fp8_group", residual=inputs[1], gamma=inputs[0][0],
                  group_size=size)  # fmt: skip
    check_quantized(got.quantized, got.norm_out, "fp8_group", 0, size, None)
    assert got.quantized.scales.strides == (4, 32)


@pytest.mark.parametrize("accumulate", ["float32", "element"])
@pytest.mark.parametrize("dtype", [BF16, np.float16])
def test_moe_reduction(dtype: Any, accumulate: str) -> None:
    """The sum over experts goes into the sum over ranks."""
    tokens, hidden, experts = 4, 160, 3
    workspaces = nf.AllReduce.local(2, dtype=dtype, max_tokens=tokens, hidden=hidden)
    rows = [inputs_of(10 + rank, experts * tokens, hidden, dtype).reshape(experts, tokens, hidden)
            for rank in range(2)]  # fmt: skip
    scales = [np.abs(inputs_of(20 + rank, experts, tokens, np.float32)) for rank in range(2)]
    shared = [inputs_of(30 + rank, tokens, hidden, dtype) for rank in range(2)]
    residual, gamma = inputs_of(7, tokens, hidden, dtype), inputs_of(8, 1, hidden, dtype)[0]
    for active in (experts, 2):
        results = on_all(lambda rank, active=active: workspaces[rank].moe_reduction(
            rows[rank], scales[rank], shared[rank], residual=residual, gamma=gamma,
            num_experts=None if active == experts else np.array([active], np.int32),
            outputs=("ar_out", "residual_out", "norm_out"), quantization="nvfp4",
            global_scale=np.array([300.0], np.float32), accumulate=accumulate), 2)  # fmt: skip
        check_equal_ranks(results)
        total = rank_sum([reduced_rows(rows[rank][:active], scales[rank][:active], shared[rank],
                                       accumulate) for rank in range(2)], accumulate)  # fmt: skip
        np.testing.assert_array_equal(bits(results[0].ar_out), bits(total))
        summed = (total.astype(np.float32) + residual.astype(np.float32)).astype(dtype)
        normed = norm(summed, gamma, 1e-6, 0.0)
        np.testing.assert_array_equal(bits(results[0].norm_out), bits(normed))
        check_quantized(results[0].quantized, normed, "nvfp4", 300.0, 0, None)


@pytest.mark.parametrize("accumulate", ["float32", "element"])
@pytest.mark.parametrize("scaling", [1.0, 2.5])
def test_moe_finalize(scaling: float, accumulate: str) -> None:
    """Slots of -1 are on other ranks."""
    tokens, hidden = 4, 160
    workspaces = nf.AllReduce.local(2, max_tokens=tokens, hidden=hidden)
    rows = [inputs_of(10 + rank, 9, hidden, BF16) for rank in range(2)]
    slots = np.array([[0, 8, -1], [2, -1, 3], [4, 1, 5], [-1, -1, -1]], np.int32)
    weights = np.abs(inputs_of(40, tokens, 3, np.float32))
    shared = [inputs_of(30 + rank, tokens, hidden, BF16) for rank in range(2)]
    residual, gamma = inputs_of(7, tokens, hidden, BF16), inputs_of(8, 1, hidden, BF16)[0]
    results = on_all(lambda rank: workspaces[rank].moe_finalize(
        rows[rank], slots, residual=residual, gamma=gamma, slot_weights=weights,
        shared_expert=shared[rank], routed_scaling=scaling, outputs=("ar_out", "norm_out"),
        accumulate=accumulate), 2)  # fmt: skip
    check_equal_ranks(results)
    total = rank_sum([finalized_rows(rows[rank], slots, weights, shared[rank], scaling, accumulate)
                      for rank in range(2)], accumulate)  # fmt: skip
    np.testing.assert_array_equal(bits(results[0].ar_out), bits(total))
    assert results[0].residual_out is None and results[0].quantized is None


def test_given_outputs() -> None:
    """They are written in place, also where they are inputs; leading axes are rows."""
    workspaces = nf.AllReduce.local(2, max_tokens=6, hidden=64)
    inputs = [inputs_of(rank, 6, 64, BF16).reshape(2, 3, 64) for rank in range(2)]
    gamma = np.ones(64, BF16)
    how = {"gamma": gamma, "global_scale": np.array([300.0], np.float32)}
    residual = inputs_of(5, 6, 64, BF16).reshape(2, 3, 64)
    wanted = run_all(workspaces, inputs, "norm_nvfp4", residual=residual, **how)
    assert wanted.norm_out.shape == (2, 3, 64) == wanted.quantized.shape

    def in_place(rank: int) -> nf.AllReduceResult:
        own, target = residual.copy(), nf.QuantizedTensor.empty((2, 3, 64), "nvfp4")
        out = nf.AllReduceResult(residual_out=own, norm_out=inputs[rank], quantized=target)
        got = workspaces[rank](inputs[rank], "norm_nvfp4", residual=own, out=out, **how)
        assert got.residual_out is own and got.norm_out is inputs[rank]
        assert got.quantized is target
        return got

    got = on_all(in_place, 2)
    check_equal_ranks([wanted, *got])
    np.testing.assert_array_equal(got[0].quantized.dequantize(), wanted.quantized.dequantize())
    again = on_all(lambda rank: workspaces[rank](inputs[rank], "norm_nvfp4", residual=residual,
                                                 out=got[rank], **how), 2)  # fmt: skip
    assert again[0].quantized is got[0].quantized


def test_no_tokens() -> None:
    """Nothing happens, and the next call works."""
    workspaces = nf.AllReduce.local(2, max_tokens=2, hidden=64)
    empty, gamma = np.zeros((0, 64), BF16), np.ones(64, BF16)
    got = run_all(workspaces, [empty, empty], "norm_mxfp8", residual=empty, gamma=gamma)
    assert got.norm_out.shape == (0, 64) == got.quantized.shape
    inputs = [inputs_of(rank, 2, 64, BF16) for rank in range(2)]
    got = run_all(workspaces, inputs, "allreduce")
    np.testing.assert_array_equal(got.ar_out, rank_sum(inputs, "float32"))


def test_one_rank() -> None:
    """It runs the epilogue alone."""
    group = nf.RankGroup.from_function(lambda mine: [mine], 0, 1)
    x = inputs_of(0, 3, 64, np.float16)
    with nf.AllReduce(group, dtype="float16") as own:
        got = own(x, "residual_rmsnorm", residual=x, gamma=x[0])
        summed = (x.astype(np.float32) * 2).astype(np.float16)
        np.testing.assert_array_equal(got.norm_out, norm(summed, x[0], 1e-6, 0.0))
        assert (own.rank, own.ranks, own.device) == (0, 1, "cpu")
    with pytest.raises(ValueError, match="destroyed"):
        own(x)


def test_threads_over_a_function() -> None:
    """A group that gathers through Python: no thread holds the interpreter while it waits."""
    gathering = Gathering(2)
    inputs = [inputs_of(rank, 3, 64, np.float32) for rank in range(2)]

    def work(rank: int) -> Any:
        group = gathering.group(rank)
        assert group.all_gather(bytes([rank])) == [b"\0", b"\1"]
        with nf.AllReduce(group, dtype="float32", max_tokens=3, hidden=64) as own:
            assert own.transport == "shared_memory"
            first = own(inputs[rank])
            own.reset()
            second = own(inputs[rank], algorithm="twoshot")
            np.testing.assert_array_equal(first.ar_out, second.ar_out)
        return first

    results = on_all(work, 2)
    check_equal_ranks(results)
    np.testing.assert_array_equal(results[0].ar_out, rank_sum(inputs, "float32"))


def test_functions_that_do_not_gather() -> None:
    """Their exceptions arrive, and what they return is checked."""
    def fail(mine: bytes) -> list[bytes]:
        raise KeyError("no network")

    with pytest.raises(KeyError, match="no network"):
        nf.RankGroup.from_function(fail, 0, 2).barrier()
    for wrong in ([], [b""], [b"1" * 8], [b"1" * 8] * 3, [[1] * 8] * 2, [b"1" * 8, b"1" * 7]):
        group = nf.RankGroup.from_function(lambda mine, wrong=wrong: wrong, 0, 2)
        with pytest.raises(ValueError, match="all_gather: expected the function to return"):
            group.barrier()
    with pytest.raises(ValueError, match="rank: expected 0 to 1"):
        nf.RankGroup.from_function(fail, 2, 2)


def test_processes(tmp_path: Path) -> None:
    """Three processes with files agree with the model, and on what they disagree about."""
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=process_rank, args=(rank, 3, tmp_path)) for rank in range(3)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
        assert process.exitcode == 0
    found = [np.load(tmp_path / f"rank{rank}.npz") for rank in range(3)]
    inputs = [inputs_of(rank, 5, 64, np.float32) for rank in range(3)]
    shared = inputs_of(99, 5, 64, np.float32)
    total = rank_sum(inputs, "float32")
    normed = norm(total + shared, shared[0], 1e-6, 0.0)
    for one in found:
        assert str(one["transport"]) == "shared_memory"
        np.testing.assert_array_equal(one["sum"], total)
        np.testing.assert_array_equal(one["norm"], normed)
        np.testing.assert_array_equal(one["codes"], found[0]["codes"])
        assert "5x64" in str(one["disagreement"]) and "7x64" in str(one["disagreement"])


def test_a_rank_that_does_not_come() -> None:
    """The others get an error within the deadline, and work again after reset()."""
    workspaces = nf.AllReduce.local(2, dtype="float32", max_tokens=2, hidden=64, deadline=0.2)
    x = inputs_of(0, 2, 64, np.float32)
    with pytest.raises(RuntimeError, match="rank 1 sent no data within 200 ms"):
        workspaces[0](x, algorithm="oneshot")
    with pytest.raises(RuntimeError, match="earlier call"):
        workspaces[0].check_error()
    with pytest.raises(RuntimeError, match="reset"):
        workspaces[0](x)
    for own in workspaces:
        own.reset()
    got = run_all(workspaces, [x, x], "allreduce")
    np.testing.assert_array_equal(got.ar_out, 2 * x)


def test_calls_do_not_overlap() -> None:
    """A second thread in a workspace is refused, not mixed in."""
    own = nf.AllReduce.local(2, dtype="float32", max_tokens=2, hidden=64, deadline=1.0)[0]
    x = inputs_of(0, 2, 64, np.float32)
    first, second = on_all(lambda _: own(x), 2)
    kinds = {type(first), type(second)}
    assert kinds == {RuntimeError, ValueError}
    assert "another thread" in str(first if isinstance(first, ValueError) else second)


X = np.ones((2, 64), BF16)
GAMMA = np.ones(64, BF16)
NORM = {"residual": X, "gamma": GAMMA}
WRONG: dict[str, tuple[tuple, dict[str, Any], type, str]] = {
    "no residual": ((X, "fp8_token"), {}, ValueError, "residual: pattern fp8_token needs it"),
    "no gamma": ((X, "fp8_token"), {"residual": X}, ValueError, "gamma: pattern"),
    "no scale": ((X, "nvfp4"), NORM, ValueError, "global_scale: pattern nvfp4 needs it"),
    "scale": ((X, "mxfp8"), {**NORM, "global_scale": 1.0}, ValueError, "global_scale: expected no"),
    "residual": ((X,), {"residual": X}, ValueError, "residual: expected no tensor"),
    "shape": ((X, "mxfp8"), {"residual": X[:1], "gamma": GAMMA}, ValueError, "residual: "),
    "type": ((X.astype(np.float64),), {}, ValueError, r"input.dtype: expected F16"),
    "element": ((X.astype(np.float32),), {}, ValueError, "input.dtype: this workspace"),
    "columns": ((X[:, :24].copy(), "nvfp4"), NORM, ValueError, r"input.shape\[-1\]: nvfp4 needs"),
    "8 columns": ((X[:, :12].copy(),), {}, ValueError, r"input.shape\[-1\]: expected a positive"),
    "strided": ((X[:, ::2],), {}, ValueError, "input: "),
    "group": ((X, "fp8_group"), {**NORM, "group_size": 24}, ValueError, "group_size: expected"),
    "bias": ((X, "mxfp8"), {**NORM, "weight_bias": 0.5}, ValueError, "weight_bias: expected 0"),
    "layout": ((X, "nvfp4"), {**NORM, "global_scale": 1.0, "scale_layout": "mn_major"}, ValueError,
               "layout"),
    "pattern": ((X, "fp4"), {}, ValueError, "pattern: expected one of allreduce"),
    "no word": ((X, 3), {}, TypeError, "pattern: expected a word"),
    "algorithm": ((X,), {"algorithm": "ring"}, ValueError, "algorithm: expected one of auto"),
    "accumulate": ((X,), {"accumulate": "bf16"}, ValueError, "accumulate: expected one of"),
    "eps": ((X,), {"eps": "small"}, TypeError, "eps: not usable"),
    "unknown": ((X,), {"epsilon": 1e-5}, TypeError, "unknown option 'epsilon'"),
    "no array": (([[1.0]],), {}, TypeError, "input: expected an array"),
    "nccl": ((X,), {"algorithm": "nccl_exact"}, NotImplementedError, "nccl"),
    "out": ((X,), {"out": nf.AllReduceResult(ar_out=X[:1])}, ValueError, "out.ar_out: expected"),
    "unwanted": ((X,), {"out": nf.AllReduceResult(norm_out=X)}, ValueError, "out.norm_out: "),
}


@pytest.mark.parametrize("case", list(WRONG))
def test_errors(case: str) -> None:
    """They name the caller's argument, and leave the protocol as it was."""
    arguments, how, kind, text = WRONG[case]
    workspaces = nf.AllReduce.local(2, max_tokens=2, hidden=64)
    with pytest.raises(kind, match=text):
        workspaces[0](*arguments, **how)
    got = run_all(workspaces, [X, X], "allreduce")
    np.testing.assert_array_equal(got.ar_out, X + X)


def test_errors_of_creation(monkeypatch: pytest.MonkeyPatch) -> None:
    """They name the keywords, and say what an environment without a launcher needs."""
    for how, text in (({"hidden": 64}, "hidden: give both"), ({"transport": "rdma"}, "transport: "),
                      ({"deadline": -1.0}, "deadline: "), ({"agreement": "often"}, "agreement: "),
                      ({"dtype": "int8"}, "dtype: "), ({"device": "tpu"}, "device: "),
                      ({"oneshot_bytes": -1}, "oneshot_bytes"),
                      ({"max_tokens": 0, "hidden": 64}, "max_tokens"),
                      ({"max_tokens": 1, "hidden": 64, "twoshot_bytes": 1}, "twoshot_bytes: "),
                      ):  # fmt: skip
        with pytest.raises(ValueError, match=text):
            nf.AllReduce.local(2, **how)
    with pytest.raises(ValueError, match="ranks: expected 1 to 8"):
        nf.AllReduce.local(9)
    for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="torchrun"):
        nf.AllReduce()


def test_workspaces_are_not_copied() -> None:
    """A copy would be of memory that other ranks write to."""
    (own,) = nf.AllReduce.local(1)
    for act in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="create one in each process"):
            act(own)


def test_properties_and_explanations() -> None:
    """They say what runs, and why, and what the machine has."""
    own = nf.AllReduce.local(2, max_tokens=1024, hidden=8192)[0]
    assert (own.twoshot_bytes, own.oneshot_bytes) == (16 << 20, 2 << 20)
    assert own.fits(1024, 8192) and own.nccl_bytes == 0
    chosen = {tokens: own.explain(tokens, 8192, "nvfp4").chosen for tokens in (16, 1024)}
    assert chosen == {16: "cpu_oneshot", 1024: "cpu_twoshot"}
    with pytest.raises(ValueError, match="hidden: expected a positive multiple of 16"):
        own.explain(16, 24, "nvfp4")
    alone = nf.explain_allreduce(64, 4096, "mxfp8", ranks=4)
    assert alone.op == "allreduce" and alone.chosen.startswith("cpu_")
    assert repr(own) == "AllReduce(rank 0 of 2, cpu, threads)"
    info = nf.nccl_info()
    assert info.found or info.reason
    assert isinstance(nf.gpu_links(), list)
