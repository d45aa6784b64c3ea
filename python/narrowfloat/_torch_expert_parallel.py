"""Expert parallelism over a process group of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import narrowfloat as nf
from narrowfloat._torch_groups import has_cpu, has_gpus, rank_group


def all_to_all_function(process_group: Any) -> Callable[[Any, Any], None]:
    """f(send, receive) of bytes on the CPU, by the group's all-to-all."""

    def all_to_all(send: Any, receive: Any) -> None:
        dist.all_to_all_single(torch.from_numpy(receive), torch.from_numpy(send),
                               group=process_group)  # fmt: skip

    return all_to_all


class ExpertParallel(nf.ExpertParallel):
    """narrowfloat.ExpertParallel over a process group of torch.

    process_group: default: all processes. Options: those of narrowfloat.ExpertParallel. device:
    default: the current GPU where the group has a backend for GPUs, else the CPU. A group that
    takes tensors on the CPU (gloo) gives its all-to-all for transport "all_to_all", which groups of
    CPUs on more than one host use. GPUs use a communicator of NCCL's of their own, with the copy of
    NCCL that torch has loaded.
    """

    __slots__ = ()

    def __init__(
        self, process_group: Any = None, *, device: torch.device | str | None = None, **options: Any
    ) -> None:  # fmt: skip
        """Collective over the process group; see the class."""
        group = rank_group(process_group)
        if device is None:
            device = "cuda" if has_gpus(process_group) else "cpu"
        where = torch.device(device)
        if where.type == "cuda" and where.index is None:
            where = torch.device("cuda", torch.cuda.current_device())
        options["device"] = where
        if where.type == "cpu" and has_cpu(process_group):
            options.setdefault("all_to_all", all_to_all_function(process_group))
        super().__init__(group, **options)
