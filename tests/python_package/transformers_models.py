"""Small random models of transformers whose experts decide their logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

import narrowfloat as nf

_COMMON = {"vocab_size": 96, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
           "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": None,
           "pad_token_id": None}  # fmt: skip
_MLA = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
        "v_head_dim": 16}  # fmt: skip
_GROUPS = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2,
           "n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
           "intermediate_size": 128, "moe_intermediate_size": 128}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True,
                               "moe_intermediate_size": 128, "intermediate_size": 128,
                               "num_key_value_heads": 2, "head_dim": 32}),
    "gpt_oss": ("GptOss", {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 32,
                           "intermediate_size": 128, "num_key_value_heads": 2,
                           "sliding_window": 16}),
    "deepseek_v3": ("DeepseekV3", {**_GROUPS, **_MLA, "num_key_value_heads": 4}),
    "mixtral": ("Mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2,
                            "intermediate_size": 128, "num_key_value_heads": 2}),
    "glm4_moe": ("Glm4Moe", {**_GROUPS, "num_key_value_heads": 2, "head_dim": 32,
                             "use_qk_norm": True}),
    # One of the many others whose experts class has the decorator's default flags.
    "olmoe": ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 128,
                        "num_key_value_heads": 4}),
}  # fmt: skip
IDS = torch.randint(0, 96, (2, 20), generator=torch.Generator().manual_seed(5))


def make(name: str, folder: Path, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Path:
    """A random model of a family, saved as transformers saves it, unless it is there."""
    path = folder / f"{name}-{str(dtype)[6:]}{''.join(f'-{key}' for key in changes)}"
    if path.exists():
        return path
    family, options = MODELS[name]
    torch.manual_seed(27)
    config = getattr(transformers, f"{family}Config")(**{**_COMMON, **options, **changes})
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if ".experts." in parameter_name:
                parameter.normal_(0, 0.12)  # So that what they add is as large as its input.
            elif parameter.ndim > 1:
                parameter.normal_(0, 0.06)
    model.to(dtype).save_pretrained(path)
    return path


def load(path: Path, **options: Any) -> Any:
    """A model without gradients; fp32 unless told otherwise."""
    given = {"dtype": torch.float32, **options}
    return transformers.AutoModelForCausalLM.from_pretrained(path, **given).eval()


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    """The logits of all positions, fp32, on the CPU."""
    return model(ids.to(model.device)).logits.float().cpu()


def distance(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Median over the positions of the relative distance of their logits.

    Not the norm of all: where two experts' scores are near, rounding chooses the other one, and
    the logits of that position are others.
    """
    apart = (got.double() - wanted.double()).norm(dim=-1) / wanted.double().norm(dim=-1)
    return float(apart.median())


@torch.no_grad()
def quantize_dense(model: Any, format: str) -> Any:
    """Rounds a model's dense experts to what a format can hold, each expert on its own."""
    for module in model.modules():
        if not hasattr(module, "is_transposed"):
            continue
        for parameter in (module.gate_up_proj, module.down_proj):
            for expert in parameter:
                rows = expert.T.contiguous() if module.is_transposed else expert.contiguous()
                restored = nf.quantize(rows, format).dequantize()
                expert.copy_(restored.T if module.is_transposed else restored)
    return model
