"""A Mixture-of-Experts layer whose experts lie on several ranks.

    torchrun --nproc-per-node 4 examples/python/expert_parallel.py
    python examples/python/expert_parallel.py --ranks 2 --payload nvfp4_per_token
    python examples/python/expert_parallel.py --ranks 4 --tensor-ranks 2

Each rank loads its own experts of a layer of models/tiny-moe and has tokens of its own. A call
sends the tokens to the ranks of their experts and the results back. They are compared with the
layer on one rank (order topk), and with the sum of the ranks' parts (order rank), to the bit.
With --tensor-ranks the ranks are a mesh: groups of ranks share their tokens, and each expert, of
which a rank loads its part of the intermediate; an all-reduce adds the parts.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
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


def load(
    mode: str, shard: tuple[int, int | None] = (0, None), tensor_rank: int = 0,
    tensor_ranks: int = 1,
) -> nf.MoeLayer:  # fmt: skip
    """Experts of one layer, or a tensor rank's part of them; default: all."""
    return nf.MoeLayer.from_checkpoint(
        MODEL, 1, mode=mode, device=torch.device("cpu"), expert_offset=shard[0],
        local_experts=shard[1], tensor_rank=tensor_rank, tensor_ranks=tensor_ranks,
    )  # fmt: skip


def route(layer: nf.MoeLayer, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts and weights of the tokens."""
    logits = hidden.float() @ layer.router_weight.T
    ids, weights = nf.route(logits, top_k=layer.config.top_k, method=layer.config.method)
    return ids, weights


def sum_of_parts(parts: list[torch.Tensor]) -> torch.Tensor:
    """bfloat16 parts: their sum in fp32, ranks ascending, rounded once."""
    total = torch.zeros(parts[0].shape)
    for part in parts:
        total += part.float()
    return total.bfloat16()


def run_rank(rank: int, ranks: int, meeting: str, given: argparse.Namespace) -> None:
    """One process; they find each other by the URL `meeting`."""
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    tensor_ranks = given.tensor_ranks
    mesh = init_device_mesh("cpu", (ranks // tensor_ranks, tensor_ranks),
                            mesh_dim_names=("expert", "tensor"))  # fmt: skip
    mode = MODES[given.payload]
    whole = load(mode)
    config = whole.config
    hidden = tokens_of(mesh.get_local_rank("expert"), config.hidden)
    ids, weights = route(whole, hidden)
    allreduce = nft.AllReduce(mesh.get_group("tensor"), max_tokens=MAX_TOKENS,
                              hidden=config.hidden)  # fmt: skip
    lines = []
    for order in ("topk", "rank"):
        group = nft.ExpertParallel(
            mesh.get_group("expert"), hidden=config.hidden, experts=config.experts,
            top_k=config.top_k, max_tokens=MAX_TOKENS, payload=given.payload, order=order,
            transport=given.transport,
        )  # fmt: skip
        layer = load(mode, group.shard, mesh.get_local_rank("tensor"), tensor_ranks)
        out = group.run(layer, hidden, ids, weights)
        if tensor_ranks > 1 and len(hidden) > 0:
            out = allreduce(out).ar_out
        shards = [(0, None)] if order == "topk" else sorted(set(gather(group.shard, ranks)))
        parts = [
            sum_of_parts([load(mode, shard, tensor_rank, tensor_ranks)
                          .run(hidden, ids=ids, weights=weights) for shard in shards])
            for tensor_rank in range(tensor_ranks)
        ]  # fmt: skip
        equal = all(gather(torch.equal(out, sum_of_parts(parts)), ranks))
        lines.append(f"order {order}: {ranks} ranks, {group.transport}, payload {given.payload}: "
                     f"{'equal to the bit' if equal else 'DIFFERENT'}")  # fmt: skip
        group.destroy()
    if rank == 0:
        error = (out.float() - (one := whole.run(hidden, ids=ids, weights=weights).float())).norm()
        print("\n".join(lines))
        print(f"relative distance to the whole layer: {float(error / one.norm()):.5f}")
    allreduce.workspace.destroy()
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
    parser.add_argument("--tensor-ranks", type=int, default=1)
    given = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", given.ranks))
    if given.tensor_ranks < 1 or ranks % given.tensor_ranks != 0:
        parser.error(f"--tensor-ranks: expected a divisor of {ranks} ranks, "
                     f"got {given.tensor_ranks}")  # fmt: skip
    if "WORLD_SIZE" in os.environ:
        run_rank(int(os.environ["RANK"]), ranks, "env://", given)
        return
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{folder}/meeting"
        spawn(run_rank, (ranks, meeting, given), nprocs=ranks)


if __name__ == "__main__":
    main()
