"""Process groups of torch as groups of ranks."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import narrowfloat as nf


def _devices_of(process_group: Any) -> dict[str, str]:
    """Kind of device -> backend: {"cpu": "gloo", "cuda": "nccl"}."""
    pairs = (entry.split(":", 1) for entry in dist.get_backend_config(process_group).split(","))
    return {pair[0]: pair[-1] for pair in pairs}


def has_gpus(process_group: Any) -> bool:
    """Whether the group was made for tensors on GPUs; gloo takes them, too, but is not."""
    return _devices_of(process_group).get("cuda", "gloo") != "gloo"


def has_cpu(process_group: Any) -> bool:
    """Whether the group takes tensors on the CPU."""
    # NCCL is listed for the CPU, too, where it is the only backend.
    return _devices_of(process_group).get("cpu", "nccl") != "nccl"


def gather_function(process_group: Any) -> Callable[[bytes], list[bytes]]:
    """Gathers bytes of all ranks: on the CPU where the group can, else through a GPU."""
    on_cpu = has_cpu(process_group)
    device = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
    size = dist.get_world_size(process_group)

    def all_gather(mine: bytes) -> list[bytes]:
        source = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)
        parts = [torch.empty_like(source) for _ in range(size)]
        dist.all_gather(parts, source, group=process_group)
        return [part.cpu().numpy().tobytes() for part in parts]

    return all_gather


def rank_group(process_group: Any = None) -> nf.RankGroup:
    """The ranks of a process group, in its order; default: all processes. Collective."""
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError("process_group: torch.distributed is not initialized; call "
                         "torch.distributed.init_process_group() first")  # fmt: skip
    rank = dist.get_rank(process_group)
    if rank < 0:
        raise ValueError("process_group: this process is no member of it")
    gather = gather_function(process_group)
    host = hashlib.sha256(socket.gethostname().encode()).digest()
    local_rank = gather(host)[:rank].count(host)
    return nf.RankGroup.from_function(
        gather, rank, dist.get_world_size(process_group), local_rank=local_rank
    )
