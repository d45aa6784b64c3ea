"""Half of a transformer layer on several ranks: two sharded matrices, one fused all-reduce.

    python examples/python/tensor_parallel_layer.py                 # processes on the CPU, gloo
    python examples/python/tensor_parallel_layer.py --cuda          # one GPU for each rank, NCCL
    torchrun --nproc-per-node 2 examples/python/tensor_parallel_layer.py

The first matrix is split by columns and the second one by rows, so that each rank holds a partial
sum of the layer's output. One call adds the ranks' sums and the residual, normalises, and quantizes
the norm for the next matrix. The result is compared with the same layer on one rank.
"""

from __future__ import annotations

import argparse
import os
import tempfile

# No rank may create objects of NVLink multicast; this is read when torch starts NCCL.
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

import narrowfloat as nf
import narrowfloat.torch as nft

TOKENS, HIDDEN, INTER = 16, 512, 2048
ENCODE_SCALE = 300.0  # NVFP4 wants 448 * 6 / the largest magnitude of the norm.


def make_layer(device: torch.device) -> dict[str, torch.Tensor]:
    """Inputs and whole weights, the same on all ranks."""
    random = torch.Generator().manual_seed(0)

    def floats(*shape: int) -> torch.Tensor:
        scaled = torch.randn(*shape, generator=random) * shape[-1] ** -0.5
        return scaled.bfloat16().to(device)

    return {"x": floats(TOKENS, HIDDEN) * 20, "residual": floats(TOKENS, HIDDEN) * 20,
            "up": floats(INTER, HIDDEN), "down": floats(HIDDEN, INTER),
            "gamma": torch.ones(HIDDEN).bfloat16().to(device)}  # fmt: skip


def partial_output(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """A rank's part of the layer's output; the whole output, with whole matrices."""
    inner = torch.nn.functional.silu(torch.nn.functional.linear(x, up))
    return torch.nn.functional.linear(inner, down)


def unsharded_norm(layer: dict[str, torch.Tensor]) -> torch.Tensor:
    """The layer on one rank, in torch alone."""
    whole = partial_output(layer["x"].float(), layer["up"].float(), layer["down"].float())
    total = whole + layer["residual"].float()
    return torch.nn.functional.rms_norm(total, (HIDDEN,), layer["gamma"].float(), 1e-6)


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The Frobenius norm of the difference over that of `wanted`."""
    return float((found.float() - wanted).norm() / wanted.norm())


def run_rank(rank: int, ranks: int, meeting: str, cuda: bool) -> None:
    """One process; they find each other by the URL `meeting`."""
    if cuda:
        torch.cuda.set_device(rank)
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo", init_method=meeting,
                            rank=rank, world_size=ranks)  # fmt: skip
    layer = make_layer(device)
    up, down = layer["up"].chunk(ranks)[rank], layer["down"].chunk(ranks, dim=1)[rank]
    allreduce = nft.AllReduce(max_tokens=TOKENS, hidden=HIDDEN)
    part = partial_output(layer["x"], up, down.contiguous())
    how = {"residual": layer["residual"], "gamma": layer["gamma"]}

    scale = torch.tensor([ENCODE_SCALE], device=device)
    fp4 = allreduce(part, "norm_nvfp4", global_scale=scale, **how)
    fp8 = allreduce(part, "norm_fp8_block", algorithm="twoshot", **how)
    assert fp4.norm_out is not None and fp8.norm_out is not None
    assert fp4.values is not None and fp4.scales is not None
    assert fp8.values is not None and fp8.scales is not None

    # The fused call wrote the codes that the quantizer makes of the norm.
    alone = nf.quantize(fp4.norm_out, "nvfp4", encode_scale=ENCODE_SCALE)
    same_codes = torch.equal(alone.values, fp4.values)
    same_scales = torch.equal(alone.scales.view(-1), fp4.scales.view(-1))
    same_norms = torch.equal(fp4.norm_out, fp8.norm_out)
    others = [torch.empty_like(fp4.values) for _ in range(ranks)]
    dist.all_gather(others, fp4.values)
    same_ranks = all(torch.equal(fp4.values, other) for other in others)

    if rank == 0:
        wanted = unsharded_norm(layer)
        restored4 = nf.dequantize(alone)
        blocks = fp8.scales.repeat_interleave(128, dim=1)
        restored8 = fp8.values.view(torch.float8_e4m3fn).float() * blocks
        print(f"{ranks} ranks, {allreduce.workspace.transport}, {TOKENS} tokens of {HIDDEN}")
        print(f"all ranks have the same codes: {same_ranks}")
        print(f"fused codes and scales equal quantize(norm): {same_codes and same_scales}")
        print(f"one-shot and two-shot have the same norm: {same_norms}")
        print("relative error to the layer on one rank:")
        print(f"  bfloat16 norm {relative_error(fp4.norm_out, wanted):.5f}")
        print(f"  FP8 blocks    {relative_error(restored8, wanted):.5f}")
        print(f"  NVFP4         {relative_error(restored4, wanted):.5f}")
    allreduce.workspace.destroy()
    dist.destroy_process_group()


def main() -> None:
    """Starts the ranks; under torchrun, is one of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--cuda", action="store_true", help="a GPU for each rank")
    arguments = parser.parse_args()
    if "WORLD_SIZE" in os.environ:
        run_rank(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "env://", arguments.cuda)
        return
    if arguments.cuda and torch.cuda.device_count() < arguments.ranks:
        parser.error(f"--cuda: {arguments.ranks} ranks need as many GPUs, "
                     f"here are {torch.cuda.device_count()}")  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{folder}/meeting"
        spawn(run_rank, (arguments.ranks, meeting, arguments.cuda), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
