"""Expert parallelism on GPUs of torch: two processes on one, and one for each GPU of several.

The latter by each transport.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import narrowfloat as nf

torch = pytest.importorskip("torch", reason="torch is not installed; ./test.sh --with-torch")
if not torch.cuda.is_available() or not nf.build_info()["cuda_enabled"]:
    pytest.skip("no GPU, or a build without CUDA", allow_module_level=True)

import torch.distributed as dist  # noqa: E402
from torch.multiprocessing.spawn import spawn  # noqa: E402

import narrowfloat.torch as nft  # noqa: E402

MODEL = Path(__file__).resolve().parents[2] / "models" / "tiny-moe"
HIDDEN, EXPERTS, TOP_K, MAX_TOKENS = 256, 16, 2, 48
MODES = {"bf16": "mxfp4_bf16", "fp8_group": "nvfp4_fp8_exact", "mxfp8": "mxfp4_mxfp8",
         "nvfp4_per_token": "nvfp4_per_token"}  # fmt: skip


def layer_of(mode: str, device: Any, offset: int = 0, count: int = EXPERTS) -> nf.MoeLayer:
    """Some experts of layer 2."""
    return nf.MoeLayer.from_checkpoint(MODEL, 2, mode=mode, device=device, expert_offset=offset,
                                       local_experts=count)  # fmt: skip


def tokens_of(rank: int, count: int, device: Any) -> tuple[Any, Any, Any]:
    """Rows, ids and weights; one of the ids names no expert."""
    random = torch.Generator().manual_seed(rank + 100 * count)
    hidden = torch.randn(count, HIDDEN, generator=random).bfloat16()
    ids = torch.randint(0, EXPERTS, (count, TOP_K), generator=random)
    ids[:1, 0] = EXPERTS + 3
    weights = torch.rand(count, TOP_K, generator=random)
    return hidden.to(device), ids.to(device), weights.to(device)


def check_layers(rank: int, device: Any) -> None:
    """Every payload: with order topk the bytes of the layer on one rank; in a graph, too."""
    for payload, mode in MODES.items():
        whole = layer_of(mode, device)
        with nft.ExpertParallel(hidden=HIDDEN, experts=EXPERTS, top_k=TOP_K, payload=payload,
                                max_tokens=MAX_TOKENS, order="topk",
                                device=device) as group:  # fmt: skip
            assert group.transport == "peer_memory"
            shard = layer_of(mode, device, *group.shard)
            for count in (MAX_TOKENS, 5 * rank, 0 if rank else 17):
                hidden, ids, weights = tokens_of(rank, count, device)
                out = group.run(shard, hidden, ids, weights)
                torch.cuda.synchronize()
                group.check_error()
                wanted = whole.run(hidden, ids=ids, weights=weights, allow_absent=True)
                assert torch.equal(out, wanted), (payload, count)
            hidden, ids, weights = tokens_of(rank, 9, device)
            out, workspace = torch.empty_like(hidden), group.new_workspace(shard)
            ids = ids.int()
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                group.run(shard, hidden, ids, weights, out=out, workspace=workspace)
            for replay in range(3):
                given = tokens_of(rank + 10 * replay, 9, device)
                for old, new in zip((hidden, ids, weights), given, strict=True):
                    old.copy_(new)
                graph.replay()
                torch.cuda.synchronize()
                group.check_error()
                wanted = whole.run(hidden, ids=ids, weights=weights, allow_absent=True)
                assert torch.equal(out, wanted), (payload, replay)


def check_halves(rank: int, device: Any) -> None:
    """dispatch() returns tensors over the group's memory; combine() takes any tensor."""
    with nft.ExpertParallel(hidden=HIDDEN, experts=EXPERTS, top_k=TOP_K, max_tokens=MAX_TOKENS,
                            device=device) as group:  # fmt: skip
        for count in (7, 1):
            hidden, ids, weights = tokens_of(rank, count, device)
            received = group.dispatch(hidden, ids, weights)
            assert received.hidden.device == device and received.ids.dtype == torch.int32
            counts = received.counts.tolist()
            own = received.hidden[rank * MAX_TOKENS :][: counts[rank]]
            offset, number = group.shard
            here = ((ids >= offset) & (ids < offset + number)).any(dim=1)
            assert torch.equal(own, hidden[here])
            out = torch.empty(count, HIDDEN, dtype=torch.float32, device=device)
            for wrong in (received.hidden[0], received.hidden.float()):
                with pytest.raises(ValueError, match=r"^results: expected torch.bfloat16"):
                    group.combine(received, wrong, out)
            group.combine(received, received.hidden.clone(), out)
            places = [(ids >= first) & (ids < first + n) for first, n in gather(group.shard)]
            copies = sum(place.any(dim=1).int() for place in places)
            assert torch.equal(out, hidden.float() * copies[:, None])
            torch.cuda.synchronize()
            group.check_error()


def check_nccl(rank: int, device: Any) -> None:
    """Without peer memory: the bytes of the layer on one rank, and the same in a graph."""
    whole = layer_of("mxfp4_bf16", device)
    for transport in ("all_to_all", "all_gather"):
        group = nft.ExpertParallel(hidden=HIDDEN, experts=EXPERTS, top_k=TOP_K, device=device,
                                   max_tokens=MAX_TOKENS, order="topk",
                                   transport=transport)  # fmt: skip
        assert group.transport == transport
        shard = layer_of("mxfp4_bf16", device, *group.shard)
        for count in (MAX_TOKENS, 5 * rank):
            hidden, ids, weights = tokens_of(rank, count, device)
            out = group.run(shard, hidden, ids, weights)
            wanted = whole.run(hidden, ids=ids, weights=weights, allow_absent=True)
            assert torch.equal(out, wanted), (transport, count)
        hidden, ids, weights = tokens_of(rank, 9, device)
        out, workspace, ids = torch.empty_like(hidden), group.new_workspace(shard), ids.int()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            group.run(shard, hidden, ids, weights, out=out, workspace=workspace)
        for _ in range(3):
            out.zero_()
            graph.replay()
        torch.cuda.synchronize()
        group.check_error()
        wanted = whole.run(hidden, ids=ids, weights=weights, allow_absent=True)
        assert torch.equal(out, wanted), transport
        del graph  # Before the communicator of its calls.
        group.destroy()


def gather(mine: object) -> list[Any]:
    """The objects of all ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def work(rank: int, ranks: int, folder: Path) -> None:
    """One process."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank,
                            world_size=ranks)  # fmt: skip
    check_layers(rank, device)
    check_halves(rank, device)
    if ranks <= torch.cuda.device_count():  # NCCL takes one rank on each GPU.
        check_nccl(rank, device)
    dist.destroy_process_group()


def test_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes, on as many GPUs if there are; then as many as there are GPUs, up to eight."""
    for name, value in (("NCCL_NVLS_ENABLE", "0"), ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"),
                        ("NVSHMEM_DISABLE_NVLS", "1")):  # fmt: skip
        monkeypatch.setenv(name, value)
    for ranks in sorted({2, min(max(torch.cuda.device_count(), 2), 8)}):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        spawn(work, (ranks, folder), nprocs=ranks)
