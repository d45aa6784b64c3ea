#!/usr/bin/env python3
"""Compares what quantizing a checkpoint to NVFP4 weights costs: llm-compressor's model-free
quantization and `narrowfloat quantize`, both on the CPU, and writes a document:

    python3 -m venv llmcompressor-venv
    llmcompressor-venv/bin/pip install llmcompressor       # several GB: PyTorch comes with it
    llmcompressor-venv/bin/python bench/peers/checkpoint_quantizers.py OUT.json --work DIR \\
        [--program build/cpu/src/cli/narrowfloat] [--layers N] [--runs N] [--commit TEXT] \\
        [--note TEXT]

The checkpoint has the layers of Qwen3-30B-A3B with made-up normal weights in bf16, 1.25 GB a layer.
Both programs write NVFP4 weights in the convention of compressed-tensors and leave embedding,
router and output head alone. They run in turns, each in a process of its own; a figure is the
median of the runs. CPU time is user and system time of the process and its threads. It includes
the time to start Python and to import llm-compressor, which is also given alone. Memory is the
process's largest resident set, so files that it maps count.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import multiprocessing
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

HIDDEN, INTER, EXPERTS, VOCABULARY = 2048, 768, 128, 8192
ATTENTION = {"q_proj": (4096, HIDDEN), "k_proj": (512, HIDDEN), "v_proj": (512, HIDDEN),
             "o_proj": (HIDDEN, 4096)}
EXPERT = {"gate_proj": (INTER, HIDDEN), "up_proj": (INTER, HIDDEN), "down_proj": (HIDDEN, INTER)}
IMPORT = "from llmcompressor import model_free_ptq"
QUANTIZE = IMPORT + """
model_free_ptq(model_stub={source!r}, save_directory={target!r}, scheme="NVFP4A16",
               ignore=["lm_head", "model.embed_tokens", "re:.*mlp.gate$"], device="cpu")"""


def make_checkpoint(folder: Path, layers: int) -> None:
    """Writes the shards, a layer each, their index and config.json."""
    import torch
    from safetensors.torch import save_file
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    weight_map: dict[str, str] = {}

    def write(number: int, tensors: dict[str, torch.Tensor]) -> None:
        name = f"model-{number:05}-of-{layers + 1:05}.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, name))

    def normal(*shape: int) -> torch.Tensor:
        return (0.02 * torch.randn(*shape)).to(torch.bfloat16)

    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        tensors = {f"{prefix}self_attn.{name}.weight": normal(*shape)
                   for name, shape in ATTENTION.items()}
        tensors |= {f"{prefix}mlp.experts.{expert}.{name}.weight": normal(*shape)
                    for expert in range(EXPERTS) for name, shape in EXPERT.items()}
        tensors[f"{prefix}mlp.gate.weight"] = normal(EXPERTS, HIDDEN)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{norm}.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
        write(layer + 1, tensors)
    write(layers + 1, {"model.embed_tokens.weight": normal(VOCABULARY, HIDDEN),
                       "model.norm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16),
                       "lm_head.weight": normal(VOCABULARY, HIDDEN)})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps({
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
        "hidden_size": HIDDEN, "moe_intermediate_size": INTER, "num_experts": EXPERTS,
        "num_experts_per_tok": 8, "norm_topk_prob": True, "num_hidden_layers": layers,
        "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": VOCABULARY,
        "torch_dtype": "bfloat16", "tie_word_embeddings": False}))


def measure(command: list[str]) -> dict[str, float]:
    """Runs a command: seconds of CPU and of the clock, and the largest resident set."""
    begin = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    message = process.stderr.read().decode(errors="replace")
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"checkpoint_quantizers: {command[0]} failed:\n{message[-3000:]}")
    return {"cpu_seconds": usage.ru_utime + usage.ru_stime,
            "wall_seconds": time.monotonic() - begin, "resident_bytes": usage.ru_maxrss * 1024}


def bytes_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def summary(runs: list[dict[str, float]]) -> dict:
    return {"runs": runs, **{key: statistics.median(run[key] for run in runs) for key in runs[0]}}


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--work", type=Path, required=True, help="for checkpoints; removed at last")
    parser.add_argument("--program", default="build/cpu/src/cli/narrowfloat")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--commit", default="", help="what was measured, for the document")
    parser.add_argument("--note", default="", help="for the document: the state of the machine")
    arguments = parser.parse_args()
    if importlib.util.find_spec("llmcompressor") is None:
        raise SystemExit("checkpoint_quantizers: needs a Python with llmcompressor: see --help")
    source, target = arguments.work / "source", arguments.work / "target"
    # A process that forks passes its resident set on, so PyTorch stays out of this one.
    maker = multiprocessing.get_context("spawn").Process(target=make_checkpoint,
                                                         args=(source, arguments.layers))
    maker.start()
    maker.join()
    if maker.exitcode:
        raise SystemExit("checkpoint_quantizers: making the checkpoint failed")
    theirs = QUANTIZE.format(source=str(source), target=str(target))
    commands = {
        "llm-compressor": [sys.executable, "-c", theirs],
        "narrowfloat": [arguments.program, "quantize", str(source), str(target), "--to", "nvfp4"]}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    imports, written = [], {}
    for _ in range(arguments.runs):
        imports.append(measure([sys.executable, "-c", IMPORT]))
        for name, command in commands.items():
            runs[name].append(measure(command))
            written[name] = bytes_of(target)
            shutil.rmtree(target)
    document = {
        "schema_version": 1, "command": "checkpoint quantizers", "commit": arguments.commit,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": {"name": processor(), "threads": os.cpu_count(), "note": arguments.note},
        "versions": {name: version(name)
                     for name in ("llmcompressor", "compressed-tensors", "torch")},
        "format": "nvfp4-pack-quantized, weights only", "source_bytes": bytes_of(source),
        "import": summary(imports),
        "programs": {name: {**summary(those), "target_bytes": written[name]}
                     for name, those in runs.items()}}
    arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    ours, peer = (document["programs"][name]["cpu_seconds"] for name in ("narrowfloat",
                                                                         "llm-compressor"))
    print(f"llm-compressor {peer:.1f} s of CPU, narrowfloat {ours:.1f} s: "
          f"{peer / ours:.1f} times less")
    shutil.rmtree(arguments.work)


if __name__ == "__main__":
    main()
