"""Writes checkpoints of random weights with the names and shapes of real models, to measure with.

    python bench/make_checkpoint.py qwen3-moe build/qwen3-moe --size 2GB
    python bench/make_checkpoint.py gpt-oss build/gpt-oss --size 2GB

The layers have the width of Qwen3-30B-A3B (with 64 experts) and of gpt-oss-20b; there are as many
as fit into the size, and the vocabulary is small. The same arguments give the same bytes.
"""

import argparse
import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

SHARD_BYTES = 500_000_000
POOL = 1 << 22
UNITS = {"MB": 10**6, "GB": 10**9}
Tensor = tuple[str, str, list[int]]  # Name, dtype, shape.

CONFIGS = {
    "qwen3-moe": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 64,
        "num_experts_per_tok": 8, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "vocab_size": 32000, "norm_topk_prob": True, "hidden_act": "silu",
        "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6, "max_position_embeddings": 4096, "torch_dtype": "bfloat16"},
    "gpt-oss": {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880,
        "intermediate_size": 2880, "num_local_experts": 32, "num_experts_per_tok": 4,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 32000,
        "hidden_act": "silu", "swiglu_limit": 7.0, "attention_bias": True, "rms_norm_eps": 1e-5,
        "sliding_window": 128, "tie_word_embeddings": False, "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
            "lm_head"]}},
}  # fmt: skip


def attention(config: dict, layer: str, has_bias: bool) -> Iterator[Tensor]:
    """Yields what every layer has."""
    hidden, head = config["hidden_size"], config["head_dim"]
    for name, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads"),
                        ("v", "num_key_value_heads")):  # fmt: skip
        yield f"{layer}.self_attn.{name}_proj.weight", "BF16", [config[heads] * head, hidden]
        if has_bias:
            yield f"{layer}.self_attn.{name}_proj.bias", "BF16", [config[heads] * head]
    width = config["num_attention_heads"] * head
    yield f"{layer}.self_attn.o_proj.weight", "BF16", [hidden, width]
    if has_bias:
        yield f"{layer}.self_attn.o_proj.bias", "BF16", [hidden]
        yield f"{layer}.self_attn.sinks", "BF16", [config["num_attention_heads"]]
    else:
        for name in ("q_norm", "k_norm"):
            yield f"{layer}.self_attn.{name}.weight", "BF16", [head]
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{layer}.{name}.weight", "BF16", [hidden]


def qwen3_layer(config: dict, layer: str) -> Iterator[Tensor]:
    """Yields a matrix for each projection of each expert."""
    hidden, width = config["hidden_size"], config["moe_intermediate_size"]
    yield from attention(config, layer, has_bias=False)
    yield f"{layer}.mlp.gate.weight", "BF16", [config["num_experts"], hidden]
    for expert in range(config["num_experts"]):
        for name, shape in (("gate", [width, hidden]), ("up", [width, hidden]),
                            ("down", [hidden, width])):  # fmt: skip
            yield f"{layer}.mlp.experts.{expert}.{name}_proj.weight", "BF16", shape


def gpt_oss_layer(config: dict, layer: str) -> Iterator[Tensor]:
    """Yields stacked experts in MXFP4."""
    hidden, width = config["hidden_size"], config["intermediate_size"]
    experts = config["num_local_experts"]
    yield from attention(config, layer, has_bias=True)
    yield f"{layer}.mlp.router.weight", "BF16", [experts, hidden]
    yield f"{layer}.mlp.router.bias", "BF16", [experts]
    for name, rows, cols in (("gate_up_proj", 2 * width, hidden), ("down_proj", hidden, width)):
        stem = f"{layer}.mlp.experts.{name}"
        yield f"{stem}_blocks", "U8", [experts, rows, cols // 32, 16]
        yield f"{stem}_scales", "U8", [experts, rows, cols // 32]
        yield f"{stem}_bias", "BF16", [experts, rows]


LAYERS = {"qwen3-moe": qwen3_layer, "gpt-oss": gpt_oss_layer}


def bytes_of(tensor: Tensor) -> int:
    """The size of a tensor's data."""
    return math.prod(tensor[2]) * (2 if tensor[1] == "BF16" else 1)


def all_tensors(kind: str, config: dict, size: int) -> tuple[list[Tensor], int]:
    """Returns the tensors of a model of about this size, and its number of layers."""
    outer = [("model.embed_tokens.weight", "BF16", [config["vocab_size"], config["hidden_size"]]),
             ("model.norm.weight", "BF16", [config["hidden_size"]]),
             ("lm_head.weight", "BF16", [config["vocab_size"], config["hidden_size"]])]  # fmt: skip
    one = sum(map(bytes_of, LAYERS[kind](config, "")))
    count = max(1, round((size - sum(map(bytes_of, outer))) / one))
    layers = [tensor for i in range(count) for tensor in LAYERS[kind](config, f"model.layers.{i}")]
    return [*outer, *layers], count


class Values:
    """Normal weights, and codes and scales of some; drawn from pools, since it is about bytes."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(1)
        normal = self.random.standard_normal(POOL, np.float32)
        self.weights = (np.float32(0.02) * normal).view("<u4") >> 16
        self.pools = {
            "BF16": self.weights.astype("<u2").view("u1"),
            "U8": self.random.integers(0, 256, POOL, np.uint8),
            "scale": self.random.integers(114, 122, POOL, np.uint8),
        }

    def data(self, tensor: Tensor) -> Iterator[bytes]:
        """Yields the data of a tensor in parts."""
        name, dtype, _ = tensor
        if name.endswith("norm.weight"):
            yield np.full(bytes_of(tensor) // 2, 0x3F80, "<u2").tobytes()
            return
        pool = self.pools["scale" if name.endswith("_scales") else dtype]
        left = bytes_of(tensor)
        while left:
            start = 2 * int(self.random.integers(0, len(pool) // 4))
            part = pool[start : start + min(left, len(pool) // 2)]
            left -= len(part)
            yield part.tobytes()


def write_shard(path: Path, tensors: list[Tensor], values: Values) -> None:
    """Writes one safetensors file."""
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for tensor in tensors:
        end = offset + bytes_of(tensor)
        header[tensor[0]] = {"dtype": tensor[1], "shape": tensor[2], "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            for part in values.data(tensor):
                file.write(part)


def main() -> None:
    """Writes the directory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=CONFIGS)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--size", default="2GB", help="about so many bytes, as in 500MB")
    arguments = parser.parse_args()
    size = int(float(arguments.size[:-2]) * UNITS[arguments.size[-2:].upper()])
    config = CONFIGS[arguments.kind]
    tensors, layers = all_tensors(arguments.kind, config, size)
    config = config | {"num_hidden_layers": layers}
    if arguments.kind == "gpt-oss":
        config["layer_types"] = ["sliding_attention", "full_attention"] * ((layers + 1) // 2)
        config["layer_types"] = config["layer_types"][:layers]
    shards: list[list[Tensor]] = [[]]
    for tensor in tensors:
        if sum(map(bytes_of, shards[-1])) + bytes_of(tensor) > SHARD_BYTES and shards[-1]:
            shards.append([])
        shards[-1].append(tensor)
    arguments.directory.mkdir(parents=True)
    values, places = Values(), {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_shard(arguments.directory / name, shard, values)
        places |= {tensor[0]: name for tensor in shard}
    index = {"metadata": {"total_size": sum(map(bytes_of, tensors))}, "weight_map": places}
    (arguments.directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (arguments.directory / "config.json").write_text(json.dumps(config, indent=1))


if __name__ == "__main__":
    main()
