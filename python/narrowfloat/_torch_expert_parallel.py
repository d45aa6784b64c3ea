"""Expert parallelism over a process group of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import narrowfloat as nf
from narrowfloat._torch_groups import has_cpu, rank_group


def all_to_all_function(process_group: Any) -> Callable[[Any, Any], None]:
    """f(send, receive) of bytes on the CPU, by the group's all-to-all."""

    def all_to_all(send: Any, receive: Any) -> None:
        dist.all_to_all_single(torch.from_numpy(receive), torch.from_numpy(send),
                               group=process_group)  # fmt: skip

    return all_to_all


class ExpertParallel(nf.ExpertParallel):
    """narrowfloat.ExpertParallel over a process group of torch; tensors lie on the CPU.

    process_group: default: all processes. Options: those of narrowfloat.ExpertParallel. A group
    that takes tensors on the CPU (gloo) gives its all-to-all for transport "all_to_all", which
    groups of more than one host use.
    """

    __slots__ = ()

    def __init__(self, process_group: Any = None, **options: Any) -> None:
        """Collective over the process group; see the class."""
        group = rank_group(process_group)
        if has_cpu(process_group):
            options.setdefault("all_to_all", all_to_all_function(process_group))
        super().__init__(group, **options)
