#!/usr/bin/env python3
"""Tokens per second of whole models in transformers, by what computes their experts.

    python bench/engines/transformers_bench.py --out results.json            # on a GPU
    python bench/engines/transformers_bench.py --device cpu --models gpt-oss-20b --layers 2
    python bench/engines/transformers_bench.py --small --device cpu          # does it run?

Random models with the layer shapes of Qwen3-30B-A3B, gpt-oss-120b and gpt-oss-20b, as many layers
as --layers says, bfloat16 attention. `prefill` is one sequence of T tokens, `decode` T sequences of a token
each; both without a cache, so that experts and projections decide. Each is timed as it is and as
CUDA graphs: the same kernels, captured once, or with --graphs compile those of torch.compile with
mode="reduce-overhead", which compiles for every number of tokens. Implementations: transformers'
eager, batched_mm (up to 64 tokens, it copies weights for every token) and grouped_mm; its MXFP4
quantizer for gpt-oss, where its kernels load; narrowfloat's modes. What fails is a line with the
reason. Prints a table in Markdown; --out also writes JSON with versions and every number.

On a CPU other programs may disturb a run. So with one thread, the default there, a time is
processor time, and the least of the runs; with more it is the median by the clock, as on a GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

import narrowfloat as nf
import narrowfloat.transformers as nftr

TOKENS = (1, 16, 64, 512, 2048)
_COMMON = {"vocab_size": 1024, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
SHAPES: dict[str, tuple[str, dict[str, Any], int]] = {
    "qwen3-30b-a3b": ("Qwen3Moe", {
        "hidden_size": 2048, "moe_intermediate_size": 768, "intermediate_size": 6144,
        "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}, 8),
    "gpt-oss-120b": ("GptOss", {
        "hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 128,
        "num_experts_per_tok": 4, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 64}, 4),
    "gpt-oss-20b": ("GptOss", {
        "hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 32,
        "num_experts_per_tok": 4, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 64}, 4),
}  # fmt: skip
_SMALL = {"hidden_size": 128, "moe_intermediate_size": 128, "intermediate_size": 128,
          "num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
          "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}  # fmt: skip
THEIRS = ("eager", "batched_mm", "grouped_mm")
OURS = {"qwen3-30b-a3b": ("bf16", "nvfp4_bf16", "fp8_block"),
        "gpt-oss-120b": ("bf16", "mxfp4_bf16", "mxfp4_fp8"),
        "gpt-oss-20b": ("bf16", "mxfp4_bf16", "mxfp4_bf16 fast_sums", "nvfp4_bf16",
                        "nvfp4_bf16 fast_sums", "mxfp4_int8", "nvfp4_int8")}  # fmt: skip
GPU_MODELS = ("qwen3-30b-a3b", "gpt-oss-120b")
MOST_BATCHED = 64


def random_model(shape: str, layers: int, small: bool, device: str) -> Any:
    """A model of random weights, the same for the same arguments."""
    family, options, _ = SHAPES[shape]
    if small:
        options = {name: _SMALL.get(name, value) for name, value in options.items()}
    config = getattr(transformers, f"{family}Config")(
        **_COMMON, **options, num_hidden_layers=layers
    )
    torch.manual_seed(27)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = getattr(transformers, f"{family}ForCausalLM")(config)
    finally:
        torch.set_default_dtype(before)
    return model.eval()


def in_mxfp4_of_transformers(shape: str, layers: int, small: bool, device: str) -> Any:
    """The model with transformers' own MXFP4 experts; raises where it cannot be had."""
    with tempfile.TemporaryDirectory() as folder:
        random_model(shape, layers, small, "cpu").save_pretrained(folder)
        config = transformers.Mxfp4Config()
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=config, dtype=torch.bfloat16, device_map=device
        )
    if getattr(config, "dequantize", False):
        raise RuntimeError("it fell back to dequantized weights")
    return model.eval()


def build(shape: str, name: str, layers: int, small: bool, device: str) -> Any:
    """The model with one implementation of its experts."""
    if name == "transformers mxfp4":
        return in_mxfp4_of_transformers(shape, layers, small, device)
    model = random_model(shape, layers, small, device)
    if name in THEIRS:
        model.set_experts_implementation(name)
        return model
    mode, _, fast = name.removeprefix("narrowfloat ").partition(" ")
    config = nftr.NarrowfloatConfig(mode, fast_sums=fast == "fast_sums")
    return nftr.quantize_experts(model, config)


def cpu_milliseconds(call: Callable[[], Any], seconds: float, threads: int) -> float:
    """The least processor time of runs with one thread, else the median by the clock."""
    clock = time.process_time if threads == 1 else time.perf_counter
    call()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        begin = clock()
        call()
        times.append(1e3 * (clock() - begin))
    return min(times) if threads == 1 else statistics.median(times)


def milliseconds(call: Callable[[], Any], seconds: float) -> float:
    """The median of runs on the GPU that take about `seconds` together."""
    for _ in range(3):
        call()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        call()
        last.record()
        torch.cuda.synchronize()
        times.append(first.elapsed_time(last))
    return statistics.median(times)


def masks(model: Any, ids: torch.Tensor) -> dict[str, Any] | None:
    """Those of gpt-oss, which makes them with numbers of the host; a capture refuses such copies."""
    if "sliding_attention" not in (getattr(model.config, "layer_types", None) or ()):
        return None
    given = model.config, model.get_input_embeddings()(ids), None, None
    return {"full_attention": create_causal_mask(*given),
            "sliding_attention": create_sliding_window_causal_mask(*given)}  # fmt: skip


def forward(model: Any, ids: torch.Tensor) -> Callable[[], Any]:
    """One forward pass of whole sequences."""
    mask = masks(model, ids)

    def call() -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return model(ids, attention_mask=mask, use_cache=False).logits

    return call


def captured(call: Callable[[], Any]) -> Callable[[], Any]:
    """The kernels of a call as a CUDA graph."""
    beside = torch.cuda.Stream()
    with torch.cuda.stream(beside):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def as_graphs(model: Any, ids: torch.Tensor, how: str) -> Callable[[], Any]:
    """The forward pass as CUDA graphs: --graphs."""
    if how == "capture":
        return captured(forward(model, ids))
    torch._dynamo.reset()
    return forward(torch.compile(model, mode="reduce-overhead", dynamic=False), ids)


def measure(
    model: Any, tokens: int, arguments: argparse.Namespace
) -> dict[str, float | str]:
    """Milliseconds of prefill and decode, as they are and as CUDA graphs."""
    device, seconds, graphs = arguments.device, arguments.seconds, arguments.graphs
    found: dict[str, float | str] = {}
    for phase, extents in (("prefill", (1, tokens)), ("decode", (tokens, 1))):
        # From the host's generator: a capture that failed leaves the GPU's in disorder.
        ids = torch.randint(0, 1024, extents).to(device)
        if device == "cpu":
            found[phase] = cpu_milliseconds(forward(model, ids), seconds, arguments.threads)
            continue
        found[phase] = milliseconds(forward(model, ids), seconds)
        try:
            found[f"{phase} graph"] = milliseconds(as_graphs(model, ids, graphs), seconds)
        except Exception as error:
            found[f"{phase} graph"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return found


def run(shape: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Every implementation of one model's experts, one model at a time in memory."""
    layers = arguments.layers or (1 if arguments.small else SHAPES[shape][2])
    names = [*THEIRS, *(f"narrowfloat {mode}" for mode in OURS[shape])]
    if shape.startswith("gpt-oss"):
        names.append("transformers mxfp4")
    rows: list[dict[str, Any]] = []
    for name in arguments.implementations or names:
        try:
            model = build(shape, name, layers, arguments.small, arguments.device)
        except Exception as error:
            rows.append({"model": shape, "implementation": name,
                         "failed": f"{type(error).__name__}: {str(error).splitlines()[0]}"})
            continue
        for tokens in arguments.tokens:
            row = {"model": shape, "layers": layers, "implementation": name, "tokens": tokens}
            if name == "batched_mm" and tokens > MOST_BATCHED:
                continue
            with torch.no_grad():
                row["ms"] = measure(model, tokens, arguments)
            rows.append(row)
            print(json.dumps(row), flush=True)
        del model
        gc.collect()
        if arguments.device != "cpu":
            torch.cuda.empty_cache()
    return rows


def table(rows: list[dict[str, Any]], shape: str, phase: str) -> str:
    """Tokens per second; graphs first, without graphs in brackets."""
    mine = [row for row in rows if row["model"] == shape and "ms" in row]
    counts = sorted({row["tokens"] for row in mine})
    lines = [f"| {shape}, {phase} | " + " | ".join(map(str, counts)) + " |",
             "|---|" + "---|" * len(counts)]  # fmt: skip
    for name in dict.fromkeys(row["implementation"] for row in mine):
        cells = []
        for count in counts:
            found = [row["ms"] for row in mine
                     if (row["implementation"], row["tokens"]) == (name, count)]  # fmt: skip
            cells.append(cell(found[0], phase, count) if found else "-")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cell(ms: dict[str, float | str], phase: str, tokens: int) -> str:
    """One number of a table."""
    plain, graph = ms[phase], ms.get(f"{phase} graph")
    text = f"{1e3 * tokens / float(plain):,.0f}"
    return f"{1e3 * tokens / graph:,.0f} ({text})" if isinstance(graph, float) else f"({text})"


def device_name(device: str) -> str:
    """The name of the GPU, or of the processor, which only Linux tells."""
    if device != "cpu":
        return torch.cuda.get_device_name()
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next(line.partition(": ")[2] for line in lines if line.startswith("model name"))


def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(GPU_MODELS))
    parser.add_argument("--implementations", nargs="+", help="such as grouped_mm")
    parser.add_argument("--layers", type=int, help="default: 8, 4 and 4")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    parser.add_argument("--graphs", choices=("capture", "compile"), default="capture",
                        help="how CUDA graphs are made")  # fmt: skip
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--threads", type=int, default=1, help="on a CPU; default 1")
    parser.add_argument("--small", action="store_true", help="tiny shapes, to see that it runs")
    parser.add_argument("--out", help="JSON file")
    arguments = parser.parse_args()
    nftr.register()
    if arguments.device == "cpu":
        torch.set_num_threads(arguments.threads)
        nf.set_num_threads(arguments.threads)
    rows = [row for shape in arguments.models for row in run(shape, arguments)]
    for shape in arguments.models:
        for phase in ("decode", "prefill"):
            print(f"\n{table(rows, shape, phase)}")
    for row in rows:
        if "failed" in row:
            print(f"{row['model']}, {row['implementation']}: {row['failed']}")
    if arguments.out:
        facts = {"device": device_name(arguments.device), "torch": torch.__version__,
                 "transformers": transformers.__version__, "narrowfloat": nf.version()}
        if arguments.device == "cpu":
            facts["threads"] = str(arguments.threads)
        else:
            facts["graphs"] = arguments.graphs
        with open(arguments.out, "w", encoding="utf-8") as file:
            json.dump({"facts": facts, "rows": rows}, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
