"""Workspaces of all-reduce fusions: an AllReduce with FlashInfer's names around it."""

from __future__ import annotations

import itertools
import sys
import weakref
from typing import Any

import numpy as np

import narrowfloat as nf
from narrowfloat._allreduce import dtype_name
from narrowfloat.compat.flashinfer._arrays import refuse

_numbers = itertools.count(1)
# Workspaces by the number that stands in their `workspace_tensor`.
_workspaces: weakref.WeakValueDictionary[int, AllReduceFusionWorkspace] = (
    weakref.WeakValueDictionary()
)
# Those of trtllm_create_ipc_workspace_for_all_reduce_fusion(), which nothing else keeps.
_kept: dict[int, AllReduceFusionWorkspace] = {}
_NO_MULTICAST = "NVLink multicast, which this backend needs, is never used; take 'trtllm'"


class AllReduceFusionWorkspace:
    """One rank's memory for all-reduce fusions, with the capacity that it was created for.

    workspace_tensor: int64 [1] on the CPU, which stands for the workspace where functions take
        `workspace_ptrs`. metadata: what it was created for.
    """

    def __init__(self, allreduce: nf.AllReduce, metadata: dict[str, Any]) -> None:
        self.allreduce = allreduce
        self.rank, self.world_size = allreduce.rank, allreduce.ranks
        self.metadata = metadata
        self._number = next(_numbers)
        _workspaces[self._number] = self
        numbers = np.array([self._number], np.int64)
        torch = sys.modules.get("torch")
        self.workspace_tensor = numbers if torch is None else torch.from_numpy(numbers)

    @property
    def backend(self) -> str:
        """FlashInfer's name of a backend that needs no multicast."""
        return "trtllm"

    def is_buffer_size_sufficient(
        self, tp_size: int, num_tokens: int, hidden_dim: int, dtype: Any, use_oneshot: Any = None
    ) -> bool:
        """Whether calls of these sizes run; use_oneshot: with that algorithm."""
        name = dtype_name(dtype)
        if tp_size != self.world_size or (name == "float32") != self.metadata["use_fp32_lamport"]:
            return False
        if use_oneshot is None or tp_size == 1:
            return self.allreduce.fits(num_tokens, hidden_dim, name)
        size = num_tokens * hidden_dim * (4 if name == "float32" else 2)
        own = self.allreduce
        return size <= (own.oneshot_bytes if use_oneshot else own.twoshot_bytes)

    def checkpoint_prepare(self) -> None:
        """Not offered."""
        refuse("checkpoint_prepare", True, "destroy the workspace, and create one afterwards")

    def checkpoint_restore(self, comm_backend: Any) -> None:
        """Not offered."""
        refuse("checkpoint_restore", True, "create a workspace")

    def destroy(self) -> None:
        """Frees the memory after all ranks have called this; again does nothing."""
        if _workspaces.pop(self._number, None) is not None:
            self.allreduce.destroy()


def workspace_of(argument: str, value: Any, size: int, rank: int) -> AllReduceFusionWorkspace:
    """The workspace of a `workspace_tensor`, which must be of this rank of so many."""
    number = int(value.reshape(-1)[0]) if hasattr(value, "reshape") else 0
    workspace = value if isinstance(value, AllReduceFusionWorkspace) else _workspaces.get(number)
    if workspace is None:
        raise ValueError(f"{argument}: expected the workspace_tensor of a workspace that was not "
                         "destroyed")  # fmt: skip
    if (size, rank) != (workspace.world_size, workspace.rank):
        raise ValueError(
            f"world_size, world_rank: expected the workspace's {workspace.world_size} and "
            f"{workspace.rank}, got {size} and {rank}"
        )
    return workspace


def _rank_group(size: int, rank: int, comm_backend: Any, group: Any) -> nf.RankGroup:
    if size == 1:
        return nf.RankGroup.from_function(lambda mine: [mine], rank, size)
    if comm_backend is not None:
        gather = comm_backend.allgather
        return nf.RankGroup.from_function(lambda mine: list(gather(mine)), rank, size)
    if sys.modules.get("torch") is None:
        raise ValueError("comm_backend: expected an object with allgather(), or a process group "
                         "of torch as `group`")  # fmt: skip
    from narrowfloat._torch_groups import rank_group

    found = rank_group(group)
    if (found.size, found.rank) != (size, rank):
        raise ValueError(f"world_size, rank: expected those of the process group, {found.size} and "
                         f"{found.rank}, got {size} and {rank}")  # fmt: skip
    return found


def _default_device() -> str:
    torch = sys.modules.get("torch")
    if torch is None or not nf.build_info()["cuda_enabled"] or not torch.cuda.is_available():
        return "cpu"
    return f"cuda:{torch.cuda.current_device()}"


def new_workspace(
    size: int, rank: int, tokens: int, hidden: int, dtype: str, force_oneshot: bool,
    comm_backend: Any, group: Any, device: Any,
) -> AllReduceFusionWorkspace:  # fmt: skip
    """Collective over the ranks."""
    message = tokens * hidden * (4 if dtype == "float32" else 2)
    allreduce = nf.AllReduce(
        _rank_group(size, rank, comm_backend, group), dtype=dtype,
        device=_default_device() if device is None else device, max_tokens=tokens, hidden=hidden,
        oneshot_bytes=message if force_oneshot else None,
    )  # fmt: skip
    metadata = {"tp_rank": rank, "tp_size": size, "max_token_num": tokens, "hidden_dim": hidden,
                "use_fp32_lamport": dtype == "float32"}  # fmt: skip
    return AllReduceFusionWorkspace(allreduce, metadata)


def create_allreduce_fusion_workspace(
    backend: str = "auto",
    world_size: int | None = None,
    rank: int | None = None,
    max_token_num: int | None = None,
    hidden_dim: int | None = None,
    dtype: Any = None,
    gpus_per_node: int | None = None,
    comm_backend: Any = None,
    force_oneshot_support: bool = False,
    group: Any = None,
    *,
    top_k: int | None = None,
    rms_eps: float | None = None,
    weight_bias: float | None = None,
    routed_scaling_factor: float | None = None,
    include_shared_expert: bool | None = None,
    add_residual: bool | None = None,
    write_residual_output: bool | None = None,
    apply_rms_norm: bool | None = None,
    output_dtype: Any = None,
    dynamic_fp8: bool | None = None,
    write_norm_output: bool | None = None,
    config: Any = None,
    device: Any = None,
) -> AllReduceFusionWorkspace:
    """Memory for tensors of max_token_num x hidden_dim elements of dtype. Collective.

    backend: auto or trtllm. world_size, rank: of the group, which is a process group of torch
        (default: all processes); or comm_backend, whose allgather() then connects the ranks.
    force_oneshot_support: the one-shot takes the largest tensor, too. gpus_per_node: not read.
    top_k, rms_eps, weight_bias, routed_scaling_factor, include_shared_expert, add_residual,
        write_residual_output, apply_rms_norm, output_dtype, dynamic_fp8, write_norm_output, config:
        refused; they are of the backend mnnvl-cutedsl.
    device: default: the current GPU, or the CPU where there is none.
    """
    given = {"world_size": world_size, "rank": rank, "max_token_num": max_token_num,
             "hidden_dim": hidden_dim, "dtype": dtype}  # fmt: skip
    if backend in ("mnnvl", "mnnvl-cutedsl"):
        raise NotImplementedError(f"backend: {backend!r} is not offered; {_NO_MULTICAST}")
    if backend not in ("auto", "trtllm"):
        raise ValueError(f"backend: expected auto or trtllm, got {backend!r}")
    compiled = {"top_k": top_k, "rms_eps": rms_eps, "weight_bias": weight_bias,
                "routed_scaling_factor": routed_scaling_factor,
                "include_shared_expert": include_shared_expert, "add_residual": add_residual,
                "write_residual_output": write_residual_output, "apply_rms_norm": apply_rms_norm,
                "output_dtype": output_dtype, "dynamic_fp8": dynamic_fp8,
                "write_norm_output": write_norm_output, "config": config}  # fmt: skip
    for name, value in compiled.items():
        if value is not None:
            raise ValueError(f"{name}: only backend 'mnnvl-cutedsl' has it, which is not offered")
    for name, value in given.items():
        if value is None:
            raise ValueError(f"{name}: expected a value, got None")
    assert world_size is not None and rank is not None
    assert max_token_num is not None and hidden_dim is not None
    return new_workspace(world_size, rank, max_token_num, hidden_dim, dtype_name(dtype),
                         force_oneshot_support, comm_backend, group, device)  # fmt: skip


def trtllm_create_ipc_workspace_for_all_reduce_fusion(
    tp_rank: int,
    tp_size: int,
    max_token_num: int,
    hidden_dim: int,
    use_fp32_lamport: bool = False,
    group: Any = None,
    create_metadata: bool = False,
    comm_backend: Any = None,
    use_symm_dev_mem: bool = False,
    *,
    device: Any = None,
) -> tuple[Any, ...]:
    """(ipc_handles, workspace_tensor), and as upstream with metadata. Collective over the ranks.

    ipc_handles goes to trtllm_destroy_ipc_workspace_for_all_reduce_fusion(), workspace_tensor,
    int64 [1], to the functions with `workspace_ptrs`. max_token_num, hidden_dim, group,
    comm_backend, device: create_allreduce_fusion_workspace(), with tp_size and tp_rank as its
    world_size and rank. use_fp32_lamport: for float32. create_metadata: with a dictionary of these
    numbers, and with use_symm_dev_mem an empty list before it.
    """
    if use_symm_dev_mem and not create_metadata:
        raise ValueError("use_symm_dev_mem: expected create_metadata=True with it")
    workspace = new_workspace(tp_size, tp_rank, max_token_num, hidden_dim,
                              "float32" if use_fp32_lamport else "bfloat16", False, comm_backend,
                              group, device)  # fmt: skip
    _kept[workspace._number] = workspace
    handles = [[workspace._number]]
    if not create_metadata:
        return handles, workspace.workspace_tensor
    if use_symm_dev_mem:
        return handles, workspace.workspace_tensor, [], workspace.metadata
    return handles, workspace.workspace_tensor, workspace.metadata


def trtllm_destroy_ipc_workspace_for_all_reduce_fusion(
    workspace: list[list[int]], group: Any = None
) -> None:
    """Frees a workspace, by its ipc_handles, after all ranks have called this. group: not read."""
    found = _kept.pop(workspace[0][0], None)
    if found is not None:
        found.destroy()
