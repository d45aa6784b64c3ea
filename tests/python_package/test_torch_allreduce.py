"""narrowfloat.torch.AllReduce on process groups: NumPy's calls, compiled, captured, errors.

Groups of gloo are processes on the CPU; groups of NCCL need a GPU for each process.
"""

from __future__ import annotations

import copy
import faulthandler
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed; ./test.sh --with-torch")

import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from allreduce_ranks import on_all  # noqa: E402

import narrowfloat as nf  # noqa: E402
import narrowfloat.compat.flashinfer.comm as comm  # noqa: E402
import narrowfloat.torch as nft  # noqa: E402

HIDDEN = 256
SECONDS = 300  # A process may take so long.


def gamma() -> torch.Tensor:
    """The norm's weight, on the default device."""
    return torch.linspace(0.5, 1.5, HIDDEN).bfloat16()


def global_scale() -> torch.Tensor:
    """A scale for fp8 and nvfp4, on the default device."""
    return torch.tensor([300.0])


def tensor_of(seed: int, rows: int = 5) -> torch.Tensor:
    """The same values in all processes, on the default device of each."""
    generator = torch.Generator("cpu").manual_seed(seed)
    values = torch.randn(rows, HIDDEN, generator=generator, device="cpu").bfloat16()
    return values.to(torch.get_default_device())


def sum_of(ranks: int, rows: int = 5) -> torch.Tensor:
    """The sum of tensor_of(rank), in order, rounded once."""
    return sum((tensor_of(rank, rows).float() for rank in range(ranks)), torch.zeros(1)).bfloat16()


def same(one: Any, other: Any) -> bool:
    """All tensors are equal; both lack the same ones."""
    return all(a is b if a is None or b is None else torch.equal(a, b)
               for a, b in zip(one, other, strict=True))  # fmt: skip


def check_plain(own: nft.AllReduce, rank: int, ranks: int) -> None:
    """All patterns run; results given and new are the same; the whole call allocates nothing."""
    x, residual = tensor_of(rank), tensor_of(99)
    assert torch.equal(own(x).ar_out, sum_of(ranks))
    for pattern in nf.allreduce_patterns()[1:]:
        if pattern.startswith("moe"):
            continue
        scale = global_scale() if pattern.removeprefix("norm_") in ("fp8", "nvfp4") else None
        how = {"residual": residual, "gamma": gamma(), "global_scale": scale}
        first = own(x, pattern, **how)
        out = nft.AllReduceTensors(*(None if one is None else torch.full_like(one, 3)
                                     for one in first))  # fmt: skip
        assert same(own(x, pattern, out=out, algorithm="twoshot", **how), first), pattern
    wanted = (sum_of(ranks).float() + residual.float()).bfloat16()
    assert torch.equal(own(x, "mxfp4", residual=residual, gamma=gamma()).residual_out, wanted)


def check_moe(own: nft.AllReduce, rank: int, ranks: int) -> None:
    """The two forms agree where they compute the same."""
    rows, residual = tensor_of(50 + rank, 10), tensor_of(99)
    ones = torch.ones(2, 5)
    slots = torch.arange(10, dtype=torch.int32).view(2, 5).t().contiguous()
    how = {"residual": residual, "gamma": gamma()}
    first = own.moe_reduction(rows.view(2, 5, HIDDEN), ones, tensor_of(70), **how)
    second = own.moe_finalize(rows, slots, shared_expert=tensor_of(70), **how)
    assert same(first, second) and first.values is None
    third = own.moe_finalize(rows, slots, shared_expert=tensor_of(70), quantization="mxfp8",
                             out=nft.AllReduceTensors(ar_out=torch.empty(5, HIDDEN).bfloat16()),
                             **how)  # fmt: skip
    assert third.norm_out is None and third.values.shape == (5, HIDDEN)


def check_compiled(own: nft.AllReduce, rank: int) -> None:
    """One graph, also for another number of tokens; calls keep their order."""
    weight, scale = gamma(), global_scale()

    def step(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
        own(x, algorithm="twoshot")  # Not used, but no rank may leave it out alone.
        a = own(x, "norm_nvfp4", residual=residual, gamma=weight, global_scale=scale)
        b = own(a.norm_out * 2, "fp8_group", residual=a.residual_out, gamma=weight)
        c = own(x + 1)
        return a.norm_out, a.values, a.scales, b.residual_out, b.values, b.scales, c.ar_out

    compiled = torch.compile(step, fullgraph=True)
    for rows in (5, 9, 12):
        given = (tensor_of(rank, rows), tensor_of(99, rows))
        assert same(compiled(*given), step(*given))


def check_compat(own: nft.AllReduce, rank: int, ranks: int) -> None:
    """FlashInfer's functions on a process group give what the direct calls give."""
    x, residual = tensor_of(rank), tensor_of(99)
    workspace = comm.create_allreduce_fusion_workspace("auto", ranks, rank, 16, HIDDEN,
                                                       torch.bfloat16,
                                                       device=x.device)  # fmt: skip
    how = {"residual": residual, "gamma": gamma(), "global_scale": global_scale(),
           "accumulate": "element"}  # fmt: skip
    wanted = own(x, "norm_nvfp4", scale_layout="linear", **how)
    scales = torch.empty(5 * 16, dtype=torch.float8_e4m3fn)
    codes = torch.empty(5, HIDDEN // 8, dtype=torch.float32)
    kept = residual.clone()
    got = comm.allreduce_fusion(x, workspace, comm.AllReduceFusionPattern(5), quant_out=codes,
                                scale_out=scales, residual_in=kept, residual_out=kept,
                                rms_gamma=gamma(), scale_factor=300.0, layout_code=2)  # fmt: skip
    assert torch.equal(got, wanted.norm_out) and torch.equal(kept, wanted.residual_out)
    assert torch.equal(codes.view(torch.uint8), wanted.values)
    assert torch.equal(scales.view(torch.uint8), wanted.scales.view(-1))
    workspace.destroy()
    with pytest.raises(ValueError, match="world_size, rank: expected those of the process group"):
        comm.create_allreduce_fusion_workspace("auto", ranks + 1, rank, 16, HIDDEN, torch.bfloat16)


def check_captured(own: nft.AllReduce, rank: int) -> None:
    """Replays of a CUDA graph give what the calls give, with other values and between calls."""
    x, residual, weight, scale = tensor_of(rank), tensor_of(99), gamma(), global_scale()

    def step() -> tuple[torch.Tensor, ...]:
        a = own(x, "norm_nvfp4", residual=residual, gamma=weight, global_scale=scale)
        b = own(a.norm_out, "fp8_token", residual=a.residual_out, gamma=weight,
                algorithm="twoshot")  # fmt: skip
        return a.norm_out, a.values, a.scales, b.residual_out, b.values, b.scales

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in range(0, 200, 20):
        x.copy_(tensor_of(seed + rank))
        graph.replay()
        replayed = [part.clone() for part in captured]
        assert same(step(), replayed)
        own(tensor_of(rank, 1 + seed % 16))  # Replays may follow calls of other sizes.


def check_part(rank: int, ranks: int) -> None:
    """A group of some processes has a workspace of its own."""
    members = [ranks - 1, 1]  # torch sorts them.
    part = dist.new_group(members)
    if rank not in members:
        with pytest.raises(ValueError, match="process_group: this process is no member"):
            nft.AllReduce(part)
        return
    pair = nft.AllReduce(part, max_tokens=16, hidden=HIDDEN)
    total = (tensor_of(1).float() + tensor_of(ranks - 1).float()).bfloat16()
    assert torch.equal(pair(tensor_of(rank)).ar_out, total)
    pair.workspace.destroy()


def work(rank: int, ranks: int, folder: Path, backend: str) -> None:
    """The checks of one process."""
    faulthandler.dump_traceback_later(SECONDS, exit=True)  # A hang ends with its place.
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
        torch.set_default_device(torch.device("cuda", rank))
    dist.init_process_group(backend, init_method=f"file://{folder}/meet", rank=rank,
                            world_size=ranks)  # fmt: skip
    own = nft.AllReduce(max_tokens=16, hidden=HIDDEN)
    transports = ("cuda_vmm", "cuda_ipc") if backend == "nccl" else ("shared_memory",)
    assert own.workspace.rank == rank and own.workspace.transport in transports
    check_plain(own, rank, ranks)
    check_moe(own, rank, ranks)
    if ranks == 2:
        check_compiled(own, rank)
    else:
        check_part(rank, ranks)
    check_compat(own, rank, ranks)
    if backend == "nccl":
        check_captured(own, rank)
    with pytest.raises(ValueError, match="residual: pattern mxfp8 needs it"):
        own(tensor_of(rank), "mxfp8")
    own.workspace.destroy()
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_processes(backend: str, ranks: int, tmp_path: Path, monkeypatch: Any) -> None:
    """Each process checks its results; mp.spawn() raises where one fails."""
    if backend == "nccl" and (torch.cuda.device_count() < ranks
                              or not nf.build_info()["cuda_enabled"]):  # fmt: skip
        pytest.skip(f"needs {ranks} GPUs and a build with CUDA")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")  # No multicast objects on a shared host.
    mp.spawn(work, (ranks, tmp_path, backend), nprocs=ranks)


def test_given_workspace() -> None:
    """Ranks that are threads; NumPy's results are the same bytes."""
    ranks = nf.AllReduce.local(2, max_tokens=8, hidden=HIDDEN)
    modules = [nft.AllReduce(workspace=own) for own in ranks]
    residual = tensor_of(9)
    tensors = on_all(lambda rank: modules[rank](
        tensor_of(rank), "norm_mxfp4", residual=residual, gamma=gamma()), 2)  # fmt: skip

    def as_numpy(tensor: torch.Tensor) -> np.ndarray:
        return tensor.view(torch.uint16).numpy()

    arrays = on_all(lambda rank: ranks[rank](
        as_numpy(tensor_of(rank)), "norm_mxfp4", residual=as_numpy(residual),
        gamma=as_numpy(gamma())), 2)  # fmt: skip
    for tensor, array in zip(tensors, arrays, strict=True):
        np.testing.assert_array_equal(as_numpy(tensor.norm_out), array.norm_out.view(np.uint16))
        np.testing.assert_array_equal(tensor.values.numpy(), array.quantized.values)
        np.testing.assert_array_equal(tensor.scales.numpy(), array.quantized.scales)
    direct = on_all(lambda rank: ranks[rank](
        tensor_of(rank), "fp8", residual=residual, gamma=gamma(), global_scale=0.5), 2)  # fmt: skip
    assert direct[0].quantized.scales.item() == 0.5
    assert torch.equal(direct[0].quantized.values, direct[1].quantized.values)


def test_errors() -> None:
    """They name what is missing: a process group, an option, a workspace."""
    with pytest.raises(ValueError, match="process_group: torch.distributed is not initialized"):
        nft.AllReduce()
    own = nft.AllReduce(workspace=nf.AllReduce.local(1)[0])
    x = tensor_of(0)
    with pytest.raises(TypeError, match="unknown option 'epsilon'"):
        own(x, epsilon=1e-5)
    with pytest.raises(ValueError, match="residual: pattern fp8_token needs it"):
        own(x, "fp8_token")
    with pytest.raises(ValueError, match=r"input.dtype: expected F16"):
        own(x.double())
    for act in (copy.deepcopy, copy.copy):
        with pytest.raises(TypeError, match="create one in each process"):
            act(own)
    words = ("none", "linear", None, "float32", "exact", "auto", "at_end", 1e-6, 0.0, 1.0, False)
    with pytest.raises(ValueError, match="workspace: number 5 is of no workspace"):
        torch.ops.narrowfloat.allreduce_out(5, own.order, "allreduce", *words, input=x,
                                            ar_out=x.clone())  # fmt: skip
