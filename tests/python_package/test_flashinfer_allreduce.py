"""narrowfloat.compat.flashinfer.comm against the model of the all-reduce, on threads."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from allreduce_numpy import (
    finalized_rows,
    fp8_group,
    fp8_token,
    norm,
    rank_sum,
    reduced_rows,
)
from allreduce_ranks import Gathering, inputs_of, on_all
from flashinfer_table import BITS, CLOSE, record

import narrowfloat as nf
import narrowfloat.compat.flashinfer as fi
import narrowfloat.compat.flashinfer.comm as comm

BF16 = ml_dtypes.bfloat16
E4M3 = ml_dtypes.float8_e4m3fn
RANKS, T, H = 2, 5, 256
Pattern = comm.AllReduceFusionPattern
INPUTS = [inputs_of(rank, T, H, BF16) for rank in range(RANKS)]
RESIDUAL, GAMMA = inputs_of(7, T, H, BF16), inputs_of(8, 1, H, BF16)[0]
EXACT_SUM = "the sum to the bit, the norm an ulp"


class Backend:
    """A communication backend as upstream's: its allgather() takes any object."""

    def __init__(self, gathering: Gathering, rank: int) -> None:
        self._group = gathering.group(rank)

    def allgather(self, data: bytes) -> tuple[bytes, ...]:
        """The data of all ranks."""
        return tuple(self._group.all_gather(data))


def workspaces(dtype: Any = BF16, **how: Any) -> list[Any]:
    """One for each rank."""
    gathering = Gathering(RANKS)
    how = {"device": "cpu"} | how  # The tensors are NumPy's, also where a GPU is.
    return on_all(lambda rank: comm.create_allreduce_fusion_workspace(
        "trtllm", RANKS, rank, 16, H, dtype, comm_backend=Backend(gathering, rank),
        **how), RANKS)  # fmt: skip


def ipc_workspaces(**how: Any) -> list[Any]:
    """The results of the older function on each rank."""
    gathering = Gathering(RANKS)
    how = {"device": "cpu"} | how
    return on_all(lambda rank: comm.trtllm_create_ipc_workspace_for_all_reduce_fusion(
        rank, RANKS, 16, H, comm_backend=Backend(gathering, rank), **how), RANKS)  # fmt: skip


def summed(accumulate: str = "element", inputs: list[Any] | None = None) -> Any:
    """The residual sum."""
    total = rank_sum(inputs or INPUTS, accumulate).astype(np.float32)
    return (total + RESIDUAL.astype(np.float32)).astype(BF16)


def equal(found: Any, wanted: Any) -> None:
    """The same bytes."""
    pair = [np.asarray(array).view(np.uint8) for array in (found, wanted)]
    np.testing.assert_array_equal(*pair)


def outputs(pattern: int, layout: int) -> dict[str, Any]:
    """Given outputs of poison; 16-bit elements for FP4, as callers of upstream have them."""
    rows = {"residual_out": np.full((T, H), 3, BF16)}
    if pattern in (1, 4, 5, 9, 11):
        rows["norm_out"] = np.full((T, H), 3, BF16)
    if pattern in (3, 5):
        size = comm.compute_fp4_swizzled_layout_sf_size(T, H // 16) if layout == 0 else \
            {1: 8, 2: T}[layout] * (H // 16)  # fmt: skip
        rows |= {"quant_out": np.full((T, H // 4), 3, np.float16).reshape(-1)[: T * H // 4],
                 "scale_out": np.full(size, 7, np.uint8)}  # fmt: skip
    elif pattern not in (0, 1):
        rows["quant_out"] = np.full((T, H), 3, E4M3)
    if pattern in (10, 11):
        rows["scale_out"] = np.full((T, 1), 3, np.float32)
    if pattern in (8, 9):
        rows["scale_out"] = np.full((1, 8), 3, np.int32).T[:T]
    return {} if pattern == 0 else rows


def check(pattern: int, layout: int, rows: dict[str, Any], accumulate: str) -> None:
    """All outputs of a call without an expert's step."""
    total = summed(accumulate)
    normed = norm(total, GAMMA, 1e-6, 0.0)
    equal(rows["residual_out"], total)
    if "norm_out" in rows:
        equal(rows["norm_out"], normed)
    values = normed.astype(np.float32)
    if pattern in (3, 5):
        name = ("swizzled_128x4", "swizzled_8x4", "linear")[layout]
        wanted = nf.quantize(normed, "nvfp4", encode_scale=300.0, layout=name)
        equal(rows["quant_out"].view(np.uint8).reshape(T, -1), wanted.values)
        equal(rows["scale_out"].reshape(-1), wanted.scales.reshape(-1))
    elif pattern in (2, 4):
        equal(rows["quant_out"], np.clip(values * (np.float32(1) / np.float32(0.03)), -448,
                                         448).astype(E4M3))  # fmt: skip
    elif pattern in (10, 11):
        codes, scales = fp8_token(values)
        equal(rows["quant_out"], codes)
        equal(rows["scale_out"], scales)
    elif pattern in (8, 9):
        codes, exponents = fp8_group(values, 64)
        equal(rows["quant_out"], codes)
        equal(np.ascontiguousarray(rows["scale_out"]).view(np.uint8), exponents)


def scale_of(pattern: int) -> Any:
    """A number for FP8, an array for FP4."""
    fp4 = np.array([300.0], np.float32)
    return {2: 0.03, 4: 0.03, 3: fp4, 5: fp4}.get(pattern)


def test_allreduce_fusion() -> None:
    """All patterns and layouts with given outputs, both accumulations, both protocols."""
    own = workspaces(force_oneshot_support=True)
    for pattern in (1, 2, 3, 4, 5, 8, 9, 10, 11):
        for layout in (0, 1, 2) if pattern in (3, 5) else (0,):
            for fp32_acc, oneshot in ((False, True), (True, False), (False, None)):
                def use(rank: int, pattern: int = pattern, layout: int = layout,
                        fp32_acc: bool = fp32_acc, oneshot: Any = oneshot) -> Any:  # fmt: skip
                    rows = outputs(pattern, layout)
                    got = comm.allreduce_fusion(
                        INPUTS[rank], own[rank], pattern, residual_in=RESIDUAL, rms_gamma=GAMMA,
                        scale_factor=scale_of(pattern), layout_code=layout, fp32_acc=fp32_acc,
                        use_oneshot=oneshot, block_quant_group_size=64, **rows)  # fmt: skip
                    assert got is rows.get("norm_out", rows.get("quant_out"))
                    return rows

                for rows in on_all(use, RANKS):
                    assert isinstance(rows, dict), rows
                    check(pattern, layout, rows, "float32" if fp32_acc else "element")
    got = on_all(lambda rank: comm.allreduce_fusion(INPUTS[rank], own[rank], 0), RANKS)
    equal(got[0], rank_sum(INPUTS, "element"))
    norms = on_all(lambda rank: comm.allreduce_fusion(
        INPUTS[rank], own[rank], 1, residual_in=RESIDUAL, rms_gamma=GAMMA,
        weight_bias=1.0), RANKS)  # fmt: skip
    equal(norms[1], norm(summed(), GAMMA, 1e-6, 1.0))
    codes = on_all(lambda rank: comm.allreduce_fusion(
        INPUTS[rank], own[rank], 2, residual_in=RESIDUAL, rms_gamma=GAMMA,
        scale_factor=0.03), RANKS)  # fmt: skip
    assert codes[0].dtype == E4M3 and codes[0].shape == (T, H)
    record("allreduce_fusion", CLOSE, "FP4 and all its layouts are really written", EXACT_SUM)


def test_workspaces() -> None:
    """Capacities, names and life."""
    own = workspaces()
    one = own[0]
    assert isinstance(one, comm.AllReduceFusionWorkspace)
    assert (one.backend, one.rank, one.world_size) == ("trtllm", 0, RANKS)
    assert one.is_buffer_size_sufficient(RANKS, 16, H, BF16)
    assert one.is_buffer_size_sufficient(RANKS, 8, 2 * H, np.float16, use_oneshot=True)
    assert not one.is_buffer_size_sufficient(RANKS, 17, H, BF16)
    assert not one.is_buffer_size_sufficient(RANKS, 1, H, np.float32)
    assert not one.is_buffer_size_sufficient(4, 1, H, BF16)
    for name in ("checkpoint_prepare", "checkpoint_restore"):
        with pytest.raises(NotImplementedError, match=name):
            getattr(one, name)(*(() if name.endswith("prepare") else (None,)))
    assert on_all(lambda rank: own[rank].destroy(), RANKS) == [None, None]
    one.destroy()
    with pytest.raises(ValueError, match="destroyed"):
        comm.allreduce_fusion(INPUTS[0], one, 0)
    create = comm.create_allreduce_fusion_workspace
    for how, kind, text in (
        ({"backend": "mnnvl"}, NotImplementedError, "backend: .*multicast"),
        ({"backend": "nvls"}, ValueError, "backend: expected auto"),
        ({"rms_eps": 1e-6}, ValueError, "rms_eps: only backend"),
        ({"dtype": None}, ValueError, "dtype: expected a value"),
        ({"world_size": None}, ValueError, "world_size: expected a value"),
        ({"max_token_num": 0}, ValueError, "max_tokens, hidden"),
    ):  # fmt: skip
        given = {"world_size": 1, "rank": 0, "max_token_num": 4, "hidden_dim": H, "dtype": BF16}
        with pytest.raises(kind, match=text):
            create(**{**given, **how})
    record("create_allreduce_fusion_workspace", BITS,
           "not `mnnvl`, `mnnvl-cutedsl`; one-shot of large tensors with `force_oneshot_support`")


def test_trtllm_allreduce_fusion() -> None:
    """It finds the workspace by workspace_ptrs, and takes flat tensors."""
    for how, count in (({}, 2), ({"create_metadata": True}, 3),
                       ({"create_metadata": True, "use_symm_dev_mem": True}, 4)):  # fmt: skip
        found = ipc_workspaces(**how)
        assert {len(one) for one in found} == {count}

        def use(rank: int, found: list[Any] = found) -> Any:
            rows = outputs(5, 0)
            flat = {name: rows[name].reshape(-1) for name in ("residual_out", "norm_out")}
            comm.trtllm_allreduce_fusion(
                INPUTS[rank].reshape(-1), RANKS, rank, T, H, found[rank][1], True, True, False, 5,
                None, None, RESIDUAL.reshape(-1), flat["residual_out"], flat["norm_out"],
                rows["quant_out"], rows["scale_out"], GAMMA, 1e-6, 300.0, 0)  # fmt: skip
            return rows

        for rows in on_all(use, RANKS):
            assert isinstance(rows, dict), rows
            check(5, 0, rows, "element")
        destroy = comm.trtllm_destroy_ipc_workspace_for_all_reduce_fusion
        assert on_all(lambda rank, found=found: destroy(found[rank][0]), RANKS) == [None, None]
        with pytest.raises(ValueError, match="workspace_ptrs: expected the workspace_tensor"):
            use(0)
    with pytest.raises(ValueError, match="use_symm_dev_mem"):
        comm.trtllm_create_ipc_workspace_for_all_reduce_fusion(0, 1, 1, H, use_symm_dev_mem=True)
    record("trtllm_allreduce_fusion", CLOSE, within=EXACT_SUM)
    note = "handles stand for memory; frees after all ranks came"
    record("trtllm_create_ipc_workspace_for_all_reduce_fusion", BITS, note)
    record("trtllm_destroy_ipc_workspace_for_all_reduce_fusion", BITS, note)


def test_moe_reduction() -> None:
    """Both functions; a number of experts as one and as an array."""
    experts, active = 3, 2
    rows = [inputs_of(10 + rank, experts * T, H, BF16) for rank in range(RANKS)]
    scales = [np.abs(inputs_of(20 + rank, experts, T, np.float32)) for rank in range(RANKS)]
    shared = [inputs_of(30 + rank, T, H, BF16) for rank in range(RANKS)]
    parts = [reduced_rows(rows[rank].reshape(experts, T, H)[:active], scales[rank][:active],
                          shared[rank], "element") for rank in range(RANKS)]  # fmt: skip
    total = summed("element", parts)
    normed = norm(total, GAMMA, 1e-6, 0.0)
    found, own = ipc_workspaces(), workspaces()

    def use(rank: int) -> Any:
        made = [outputs(5, 1) for _ in range(2)]
        count = np.array([active], np.int32)
        sums = np.full((T, H), 3, BF16)
        comm.trtllm_moe_allreduce_fusion(
            RANKS, rank, T, H, found[rank][1], False, RESIDUAL, GAMMA, 1e-6, 300.0, active,
            scales[rank], rows[rank], shared[rank], 1, sums, made[0]["residual_out"],
            made[0]["norm_out"], made[0]["quant_out"], made[0]["scale_out"])  # fmt: skip
        got = comm.allreduce_fusion(
            INPUTS[rank], own[rank], Pattern.kMoEReductionARResidualRMSNorm,
            residual_in=RESIDUAL, rms_gamma=GAMMA, scale_factor=np.array([300.0], np.float32),
            layout_code=1, moe_reduction_device_num_experts=count,
            moe_reduction_scale_input=scales[rank],
            moe_reduction_active_experts_token_input=rows[rank],
            moe_reduction_token_input=shared[rank], **made[1])  # fmt: skip
        assert got is made[1]["norm_out"]
        equal(sums, rank_sum(parts, "element"))
        return made

    wanted = nf.quantize(normed, "nvfp4", encode_scale=300.0, layout="swizzled_8x4")
    for made in on_all(use, RANKS):
        assert isinstance(made, list), made
        for one in made:
            equal(one["residual_out"], total)
            equal(one["norm_out"], normed)
            equal(one["quant_out"].view(np.uint8).reshape(T, -1), wanted.values)
            equal(one["scale_out"], wanted.scales)
    record("trtllm_moe_allreduce_fusion", CLOSE, within=EXACT_SUM)


def test_moe_finalize() -> None:
    """Both functions, with a shared expert and a routed factor."""
    rows = [inputs_of(10 + rank, 9, H, BF16) for rank in range(RANKS)]
    slots = np.array([[0, 8], [2, -1], [4, 1], [-1, -1], [3, 3]], np.int32)
    weights = np.abs(inputs_of(40, T, 2, np.float32))
    shared = inputs_of(30, T, H, BF16)
    found, own = ipc_workspaces(), workspaces()

    def use(rank: int) -> Any:
        one = outputs(5, 0)
        comm.trtllm_moe_finalize_allreduce_fusion(
            rows[rank], RESIDUAL, GAMMA, slots, one["norm_out"], one["residual_out"],
            one["quant_out"], one["scale_out"], found[rank][1], False, rank, RANKS, 1e-6, shared,
            weights, 2.5, scale_factor=300.0)  # fmt: skip
        got = comm.allreduce_fusion(
            rows[rank], own[rank], Pattern.kMoEFinalizeARResidualRMSNorm, residual_in=RESIDUAL,
            rms_gamma=GAMMA, expanded_idx_to_permuted_idx=slots, expert_scale_factor=weights,
            shared_expert_output=shared)  # fmt: skip
        return one, got

    def normed(scaling: float) -> Any:
        parts = [finalized_rows(one, slots, weights, shared, scaling, "element") for one in rows]
        return norm(summed("element", parts), GAMMA, 1e-6, 0.0)

    for one, got in on_all(use, RANKS):
        equal(one["norm_out"], normed(2.5))
        equal(got, normed(1.0))
        wanted = nf.quantize(normed(2.5), "nvfp4", encode_scale=300.0)
        equal(one["quant_out"].view(np.uint8).reshape(T, -1), wanted.values)
        equal(one["scale_out"], wanted.scales)
    record("trtllm_moe_finalize_allreduce_fusion", CLOSE,
           "`quant_out` needs our `scale_factor`", EXACT_SUM)  # fmt: skip


def test_sizes() -> None:
    """They are those of the layout of 128 rows and 4 columns."""
    assert comm.compute_fp4_swizzled_layout_sf_size(1, 1) == 512
    assert comm.compute_fp4_swizzled_layout_sf_size(130, 6) == 256 * 8
    record("compute_fp4_swizzled_layout_sf_size", BITS)


NORM = {"residual_in": RESIDUAL, "rms_gamma": GAMMA}
WRONG: dict[str, tuple[int, dict[str, Any], type, str]] = {
    "residual": (1, {"rms_gamma": GAMMA}, ValueError, "residual_in: pattern"),
    "gamma": (1, {"residual_in": RESIDUAL}, ValueError, "rms_gamma: pattern"),
    "output": (1, {**NORM, "output": RESIDUAL.copy()}, ValueError, "output: expected no tensor"),
    "scale": (2, NORM, ValueError, "scale_factor: pattern"),
    "scales": (3, {**NORM, "scale_factor": 1.0}, ValueError, "scale_out: pattern"),
    "few": (3, {**NORM, "scale_factor": 1.0, "scale_out": np.zeros(9, np.uint8)}, ValueError,
            "scale_out: expected at least 2048 bytes"),
    "layout": (3, {**NORM, "layout_code": 3}, ValueError, "layout_code: "),
    "group": (8, NORM, ValueError, "block_quant_group_size: expected a number"),
    "dynamic": (10, NORM, ValueError, "residual_out: pattern"),
    "pattern": (13, {}, ValueError, "pattern: expected an AllReduceFusionPattern"),
    "cutedsl": (12, {}, NotImplementedError, "pattern: .*mnnvl-cutedsl"),
    "cake": (0, {"moe_finalize_backend": "cake"}, NotImplementedError, "moe_finalize_backend"),
    "moe": (0, {"expert_scale_factor": GAMMA}, ValueError, "expert_scale_factor: pattern"),
    "slots": (7, NORM, ValueError, "expanded_idx_to_permuted_idx: pattern"),
    "experts": (6, NORM, ValueError, "moe_reduction_device_num_experts: pattern"),
    "bias": (1, {**NORM, "weight_bias": 2.0}, ValueError, "weight_bias: expected 0"),
}


@pytest.mark.parametrize("case", list(WRONG))
def test_errors(case: str) -> None:
    """They name upstream's arguments."""
    pattern, how, kind, text = WRONG[case]
    own = comm.create_allreduce_fusion_workspace("auto", 1, 0, 16, H, BF16, device="cpu")
    with pytest.raises(kind, match=text):
        comm.allreduce_fusion(INPUTS[0], own, pattern, **how)
    equal(comm.allreduce_fusion(INPUTS[0], own, 0), INPUTS[0])


def test_names() -> None:
    """The package has those of its module, too; numbers are upstream's."""
    assert set(comm.__all__) <= set(fi.__all__)
    assert [int(one) for one in Pattern] == list(range(13))
    assert [int(one) for one in comm.QuantizationSFLayout] == [0, 1, 2]
