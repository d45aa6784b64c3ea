"""A Mixture-of-Experts layer whose experts lie on several ranks.

    torchrun --nproc-per-node 4 examples/python/expert_parallel.py
    python examples/python/expert_parallel.py --ranks 2 --payload nvfp4_per_token

Each rank loads its own experts of a layer of models/tiny-moe and has tokens of its own. A call
sends the tokens to the ranks of their experts and the results back. They are compared with the
layer on one rank (order topk), and with the sum of the ranks' parts (order rank), to the bit.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

import narrowfloat as nf
import narrowfloat.torch as nft

MODEL = Path(__file__).resolve().parents[2] / "models" / "tiny-moe"
MAX_TOKENS = 48
# Payload -> a mode that reads rows in it.
MODES = {"bf16": "nvfp4_bf16", "fp8_group": "nvfp4_fp8_exact", "mxfp8": "mxfp4_mxfp8",
         "nvfp4_per_token": "nvfp4_per_token"}  # fmt: skip


def tokens_of(rank: int, hidden: int) -> torch.Tensor:
    """As many tokens as no other rank has; none on the second one."""
    count = 0 if rank == 1 else MAX_TOKENS - 7 * rank % MAX_TOKENS
    random = torch.Generator().manual_seed(rank)
    return torch.randn(count, hidden, generator=random).bfloat16()


def load(mode: str, first: int = 0, count: int | None = None) -> nf.MoeLayer:
    """Experts of one layer; default: all."""
    return nf.MoeLayer.from_checkpoint(MODEL, 1, mode=mode, device=torch.device("cpu"),
                                       expert_offset=first, local_experts=count)  # fmt: skip


def route(layer: nf.MoeLayer, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts and weights of the tokens."""
    logits = hidden.float() @ layer.router_weight.T
    ids, weights = nf.route(logits, top_k=layer.config.top_k, method=layer.config.method)
    return ids, weights


def sum_of_parts(
    shards: list[nf.MoeLayer], hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Each shard's part in bfloat16; their sum in fp32, ranks ascending, rounded once."""
    total = torch.zeros(hidden.shape)
    for shard in shards:
        total += shard.run(hidden, ids=ids, weights=weights).float()
    return total.bfloat16()


def run_rank(rank: int, ranks: int, meeting: str, payload: str, transport: str) -> None:
    """One process; they find each other by the URL `meeting`."""
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    mode = MODES[payload]
    whole = load(mode)
    config = whole.config
    hidden = tokens_of(rank, config.hidden)
    ids, weights = route(whole, hidden)
    lines = []
    for order in ("topk", "rank"):
        group = nft.ExpertParallel(
            hidden=config.hidden, experts=config.experts, top_k=config.top_k,
            max_tokens=MAX_TOKENS, payload=payload, order=order, transport=transport,
        )  # fmt: skip
        out = group.run(load(mode, *group.shard), hidden, ids, weights)
        if order == "topk":
            wanted = whole.run(hidden, ids=ids, weights=weights)
        else:
            shards = [load(mode, *shard) for shard in gather(group.shard, ranks)]
            wanted = sum_of_parts(shards, hidden, ids, weights)
        equal = all(gather(torch.equal(out, wanted), ranks))
        lines.append(f"order {order}: {ranks} ranks, {group.transport}, payload {payload}: "
                     f"{'equal to the bit' if equal else 'DIFFERENT'}")  # fmt: skip
        group.destroy()
    if rank == 0:
        print("\n".join(lines))
    dist.destroy_process_group()
    if any("DIFFERENT" in line for line in lines):
        raise SystemExit(1)


def gather(mine: object, ranks: int) -> list[Any]:
    """The objects of all ranks."""
    found: list[Any] = [None] * ranks
    dist.all_gather_object(found, mine)
    return found


def main() -> None:
    """Starts the ranks; under torchrun, is one of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--payload", choices=MODES, default="bf16")
    parser.add_argument("--transport", default="auto",
                        choices=("auto", "peer_memory", "all_to_all", "all_gather"))  # fmt: skip
    given = parser.parse_args()
    if "WORLD_SIZE" in os.environ:
        run_rank(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "env://", given.payload,
                 given.transport)  # fmt: skip
        return
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{folder}/meeting"
        spawn(run_rank, (given.ranks, meeting, given.payload, given.transport),
              nprocs=given.ranks)  # fmt: skip


if __name__ == "__main__":
    main()
