"""Ranks of expert parallelism in processes, as test_expert_processes.py starts them."""

from __future__ import annotations

import importlib
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import narrowfloat as nf

MODEL = Path(__file__).resolve().parents[2] / "models" / "tiny-moe"
HIDDEN, EXPERTS, TOP_K, MAX_TOKENS = 256, 16, 2, 6
SIZES: dict[str, Any] = {"hidden": HIDDEN, "experts": EXPERTS, "top_k": TOP_K,
                         "max_tokens": MAX_TOKENS, "order": "topk"}  # fmt: skip


def layer_of(offset: int = 0, count: int = EXPERTS) -> nf.MoeLayer:
    """Some experts of layer 2."""
    return nf.MoeLayer.from_checkpoint(MODEL, 2, mode="mxfp4_bf16", expert_offset=offset,
                                       local_experts=count)  # fmt: skip


def tokens_of(rank: int) -> tuple[Any, Any, Any]:
    """Rows, ids and weights, of other numbers of tokens on each rank; one rank has none."""
    random, count = np.random.default_rng(rank), (rank + 1) % 4
    hidden = random.standard_normal((count, HIDDEN)).astype(ml_dtypes.bfloat16)
    ids = random.integers(0, EXPERTS, (count, TOP_K))
    return hidden, ids, random.random((count, TOP_K), dtype=np.float32)


def run(group: nf.ExpertParallel) -> None:
    """Some calls: the bytes of the layer on one rank."""
    own = layer_of(*group.shard)
    hidden, ids, weights = tokens_of(group.rank)
    wanted = layer_of().run(hidden, ids=ids, weights=weights)
    for _ in range(3):
        assert group.run(own, hidden, ids, weights).tobytes() == wanted.tobytes()


def shared_memory() -> list[tuple[str, bool]]:
    """Names of the objects that this process maps, and whether these are gone."""
    maps = Path("/proc/self/maps").read_text()
    found = re.findall(r"(/dev/shm/narrowfloat-\w+)( \(deleted\))?", maps)
    return [(name, bool(deleted)) for name, deleted in found]


def check_results(group: nf.RankGroup) -> None:
    """Through shared memory, and through messages of the bootstrap."""
    for transport in ("peer_memory", "all_gather"):
        with nf.ExpertParallel(group, **SIZES, transport=transport) as own:
            if transport == "peer_memory":
                mapped = shared_memory()
                assert len(mapped) >= own.ranks and all(deleted for _, deleted in mapped), mapped
            run(own)


def check_a_death(group: nf.RankGroup, point: str) -> None:
    """Rank 1 is killed in a later call; the others raise in time, and no name is left of the memory
    that they share."""
    own = nf.ExpertParallel(group, **SIZES, transport="peer_memory", deadline=0.5)
    run(own)
    before = time.monotonic()
    hidden, ids, weights = tokens_of(group.rank)
    try:
        if group.rank == 1 and point == "dispatch":
            os.kill(os.getpid(), signal.SIGKILL)
        received = own.dispatch(hidden, ids, weights)
        if group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        results = np.zeros((own.max_rows, TOP_K, HIDDEN), ml_dtypes.bfloat16)
        own.combine(received, results, np.empty_like(hidden))
    except RuntimeError as error:
        assert "expert parallelism: call 4 failed on rank" in str(error), error
    else:
        raise AssertionError(f"{point}: no error")
    assert time.monotonic() - before < 20
    mapped = shared_memory()
    assert len(mapped) >= own.ranks
    assert not [name for name, deleted in mapped if not deleted or Path(name).exists()], mapped


def check_gloo(rank: int, ranks: int, folder: Path) -> None:
    """The same over a process group of torch, and through its all-to-all."""
    import torch.distributed as dist

    import narrowfloat.torch as nft

    dist.init_process_group("gloo", init_method=f"file://{folder}/gloo", rank=rank,
                            world_size=ranks)  # fmt: skip
    for transport in ("peer_memory", "all_to_all"):
        with nft.ExpertParallel(**SIZES, transport=transport) as own:
            run(own)
    dist.destroy_process_group()


def check_hosts(group: nf.RankGroup) -> None:
    """Two hosts that share no memory: `auto` takes messages."""
    with nf.ExpertParallel(group, **SIZES) as own:
        assert own.transport == "all_gather", own
        run(own)


def fork(ranks: int, body: Callable[[int], None]) -> list[int]:
    """Runs body(rank) in a child for each rank; how they ended, as waitpid() says it."""
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            code = 0
            try:
                body(rank)
            except BaseException:
                traceback.print_exc()
                code = 1
            os._exit(code)
        children.append(child)
    return [os.waitpid(child, 0)[1] for child in children]


def main(what: str, where: str, rank: int) -> None:
    """results, gloo, deaths: all ranks, which meet in a folder. host: one rank, at an address."""
    if what == "host":
        return check_hosts(nf.RankGroup.from_tcp(where, 29555, rank, 2, job_id="hosts"))

    def group(name: str, rank: int, ranks: int) -> nf.RankGroup:
        folder = Path(where) / name
        folder.mkdir(exist_ok=True)
        return nf.RankGroup.from_files(str(folder), rank, ranks, job_id=name, deadline=30.0)

    if what == "results":
        assert fork(8, lambda rank: check_results(group("eight", rank, 8))) == [0] * 8
        return None
    if what == "gloo":
        importlib.import_module("narrowfloat.torch")  # Once, before there are children.
        assert fork(8, lambda rank: check_gloo(rank, 8, Path(where))) == [0] * 8
        return None
    for point in ("dispatch", "combine"):
        ended = fork(3, lambda rank, at=point: check_a_death(group(at, rank, 3), at))
        assert ended == [0, signal.SIGKILL, 0], (point, ended)
    return None


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
