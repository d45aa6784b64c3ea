"""Text from a Mixture-of-Experts model of Hugging Face transformers, on narrowfloat's layers.

    python chat_with_moe.py models/tiny-moe --prompt "In the beginning"
    python chat_with_moe.py models/tiny-moe --mode nvfp4_bf16 --tokens 200
    python chat_with_moe.py path/to/an/nvfp4/checkpoint --device cuda

A directory with plain weights is quantized while it loads; a quantized one runs with its own bits.
Without --prompt it reads lines from the terminal, one answer each. Needs torch and transformers
(and accelerate for a GPU).
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import narrowfloat.torch as nft
import narrowfloat.transformers as nftr


def load(path: str, mode: str | None, device: str) -> tuple[Any, Any]:
    """The tokenizer and the model with its experts in layers."""
    nftr.register()
    options: dict[str, Any] = {} if device == "cpu" else {"device_map": device}
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype="auto", quantization_config=nftr.NarrowfloatConfig(mode=mode), **options
    )
    return tokenizer, model.eval()


def prompt_ids(tokenizer: Any, text: str) -> torch.Tensor:
    """Ids of a question, in the form that the model was trained on if it has one."""
    if tokenizer.chat_template is None:
        return tokenizer(text, return_tensors="pt").input_ids
    conversation = [{"role": "user", "content": text}]
    encoded = tokenizer.apply_chat_template(
        conversation, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    return encoded["input_ids"]


def answer(tokenizer: Any, model: Any, text: str, tokens: int, samples: bool) -> None:
    """Prints the continuation, then how fast it came."""
    ids = prompt_ids(tokenizer, text).to(model.device)
    room = getattr(model.config, "max_position_embeddings", ids.shape[1] + tokens) - ids.shape[1]
    begin = time.perf_counter()
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max(1, min(tokens, room)),
        do_sample=samples, pad_token_id=tokenizer.pad_token_id or 0,
    )  # fmt: skip
    seconds = time.perf_counter() - begin
    made = out[0, ids.shape[1] :]
    print(tokenizer.decode(made, skip_special_tokens=True))
    print(f"[{len(made)} tokens, {len(made) / seconds:.1f} tokens per second]", file=sys.stderr)


def memory(model: Any) -> str:
    """Bytes of experts and Linear layers, and the most that the process had."""
    layers = [one.layer for one in model.modules() if isinstance(one, nftr.Experts)]
    experts = sum(layer.weight_bytes for layer in layers)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    modes = ", ".join(dict.fromkeys(layer.config.mode for layer in layers))
    text = f"{len(layers)} layers of experts ({modes}): {experts / 1e6:.1f} MB; " \
        if layers else "no experts in layers; "  # fmt: skip
    linears = [one.layer.bytes for one in model.modules() if isinstance(one, nft.Linear)]
    if linears:
        text += f"{len(linears)} packed Linear layers: {sum(linears) / 1e6:.1f} MB; "
    text += f"peak of the process {peak / 1e9:.2f} GB"
    if model.device.type == "cuda":
        text += f", of the GPU {torch.cuda.max_memory_allocated() / 1e9:.2f} GB"
    return text


def questions(given: str | None) -> Iterator[str]:
    """The one of the command line, or lines of the terminal."""
    if given is not None:
        yield given
        return
    print("> ", end="", file=sys.stderr, flush=True)
    for line in sys.stdin:
        if line.strip():
            yield line.rstrip("\n")
        print("> ", end="", file=sys.stderr, flush=True)


def main() -> None:
    """Loads, answers, reports."""
    parser = argparse.ArgumentParser(description="Text from a Mixture-of-Experts model.")
    parser.add_argument("model", help="checkpoint directory, plain or quantized")
    parser.add_argument("--prompt", help="one question; default: lines of the terminal")
    parser.add_argument("--mode", help="of the layers, such as nvfp4_bf16; default: by the weights")
    parser.add_argument("--tokens", type=int, default=100, help="most tokens of an answer")
    parser.add_argument("--sample", action="store_true", help="sample instead of the best token")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda")
    arguments = parser.parse_args()
    begin = time.perf_counter()
    tokenizer, model = load(arguments.model, arguments.mode, arguments.device)
    print(f"[loaded in {time.perf_counter() - begin:.1f} s; {memory(model)}]", file=sys.stderr)
    for text in questions(arguments.prompt):
        answer(tokenizer, model, text, arguments.tokens, arguments.sample)
    print(f"[{memory(model)}]", file=sys.stderr)


if __name__ == "__main__":
    main()
