#!/usr/bin/env python3
"""Train a tiny byte-level Mixture-of-Experts language model and export it.

The model (4 layers, hidden 256, 16 SwiGLU experts of width 128, top-2 softmax router, grouped-query
attention with per-head q/k norms) has the architecture and the tensor names of Hugging Face's
Qwen3-MoE.  Its tokens are raw bytes: vocabulary 256, no tokenizer, no special tokens.

Reproduce models/tiny-moe (Debian bookworm for the text; one CUDA GPU, torch and safetensors):

    apt-get install bible-kjv bible-kjv-text
    bible -f gen1:1-rev22:21 </dev/null | cut -d' ' -f2- > kjv.txt
    python3 tools/train_tiny_moe.py --text kjv.txt --out models/tiny-moe

The text is split by position: the last 10 % (from the next line start on) is held out and never
looked at before the final evaluation.  `--dev-fraction 0.05` cuts a development part off the END OF
THE TRAINING PART and scores on that instead, for choosing hyper-parameters; it writes no files.

Files written under --out:
    config.json, model.safetensors          the bf16 model
    calibration/heldout.txt                 the held-out text, byte for byte
    calibration/activations.safetensors     MoE inputs, router logits and outputs of every layer
    calibration/metrics.json                held-out bits per byte, expert usage, training set-up

Held-out bits per byte: heldout.txt is cut into consecutive, non-overlapping windows of --context
bytes (the last one may be shorter).  Each window is run on its own from position 0; byte i of a
window (i >= 1) is predicted from bytes 0..i-1, byte 0 is not scored.  The score is the sum of
-log2 p over all scored bytes, divided by the number of scored bytes.
"""

import argparse
import hashlib
import json
import math
import os
import time
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # reproducible cuBLAS

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 256,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "attention_bias": False,
    "max_position_embeddings": 512,  # replaced by --context
    "rope_theta": 10000.0,
    "use_sliding_window": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "intermediate_size": 128,  # dense layers only; this model has none
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "router_aux_loss_coef": 0.01,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "bos_token_id": None,
    "eos_token_id": None,
    "torch_dtype": "bfloat16",
}


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, in fp32, rounded once to the input's type."""

    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        x32 = x.float()
        x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return (x32 * self.weight.float()).to(x.dtype)


def rope(x, theta):
    """Rotary embedding of x [..., T, D] in fp32; dimension j is paired with j + D/2."""
    t, half = x.shape[-2], x.shape[-1] // 2
    inv_freq = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = torch.arange(t, device=x.device, dtype=torch.float32)[:, None] * inv_freq
    cos, sin = angle.cos(), angle.sin()
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        h, d = cfg["hidden_size"], cfg["head_dim"]
        self.heads, self.kv_heads = cfg["num_attention_heads"], cfg["num_key_value_heads"]
        self.dim, self.theta = d, cfg["rope_theta"]
        self.q_proj = nn.Linear(h, self.heads * d, bias=False)
        self.k_proj = nn.Linear(h, self.kv_heads * d, bias=False)
        self.v_proj = nn.Linear(h, self.kv_heads * d, bias=False)
        self.o_proj = nn.Linear(self.heads * d, h, bias=False)
        self.q_norm = RMSNorm(d, cfg["rms_norm_eps"])
        self.k_norm = RMSNorm(d, cfg["rms_norm_eps"])

    def forward(self, x):
        b, t, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(b, t, self.heads, self.dim)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(b, t, self.kv_heads, self.dim)).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.kv_heads, self.dim).transpose(1, 2)
        q, k = rope(q, self.theta), rope(k, self.theta)
        # Query head i reads key/value head i // (heads / kv_heads).
        groups = (b, self.kv_heads, self.heads // self.kv_heads, t, self.dim)
        k = k[:, :, None].expand(groups).reshape(b, self.heads, t, self.dim)
        v = v[:, :, None].expand(groups).reshape(b, self.heads, t, self.dim)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # scale 1 / sqrt(dim)
        return self.o_proj(y.transpose(1, 2).reshape(b, t, -1))


class SparseMoE(nn.Module):
    """Softmax over all experts, top-k, renormalised; experts are bias-free SwiGLU blocks."""

    def __init__(self, cfg):
        super().__init__()
        h, i, e = cfg["hidden_size"], cfg["moe_intermediate_size"], cfg["num_experts"]
        self.experts, self.top_k = e, cfg["num_experts_per_tok"]
        self.gate = nn.Parameter(torch.empty(e, h))
        self.gate_proj = nn.Parameter(torch.empty(e, i, h))
        self.up_proj = nn.Parameter(torch.empty(e, i, h))
        self.down_proj = nn.Parameter(torch.empty(e, h, i))
        self.record = {}  # input, router logits, chosen experts and output of the last inference

    def forward(self, x):
        shape, x = x.shape, x.reshape(-1, x.shape[-1])
        with torch.autocast(x.device.type, enabled=False):  # the router always works in fp32
            logits = F.linear(x.float(), self.gate.float())
            probs = logits.softmax(-1)
        if self.training:
            y, aux = self.all_experts(x, probs)
        else:
            y, aux = self.chosen_experts(x, logits, probs), None
        return y.view(shape), aux

    def all_experts(self, x, probs):
        """Training: every expert sees every token and the routing weights, zero for experts that
        were not chosen, mask the result.  Wasteful, but three large deterministic matrix products
        are quick at this size.  Also returns the load-balancing loss, 1 for uniform routing."""
        chosen = probs >= probs.topk(self.top_k).values[:, -1:]
        weight = probs * chosen
        weight = weight / weight.sum(-1, keepdim=True)
        hidden = F.silu(F.linear(x, self.gate_proj.flatten(0, 1)))
        hidden = hidden * F.linear(x, self.up_proj.flatten(0, 1))
        hidden = hidden.view(-1, self.experts, hidden.shape[-1] // self.experts)
        hidden = (hidden * weight[..., None].to(hidden.dtype)).flatten(1)
        y = hidden @ self.down_proj.transpose(1, 2).flatten(0, 1)
        share = chosen.float().mean(0) / self.top_k
        return y, self.experts * (share * probs.mean(0)).sum()

    def chosen_experts(self, x, logits, probs):
        """Inference: only the chosen experts run; their outputs (in x's type) are weighted and
        summed in fp32, in the order of expert numbers, and rounded once."""
        weight, index = probs.topk(self.top_k)
        weight = weight / weight.sum(-1, keepdim=True)
        total = torch.zeros(x.shape, device=x.device)
        for e in range(self.experts):
            token, slot = (index == e).nonzero(as_tuple=True)
            xe = x[token]
            hidden = F.silu(F.linear(xe, self.gate_proj[e])) * F.linear(xe, self.up_proj[e])
            out = F.linear(hidden, self.down_proj[e])
            total[token] += weight[token, slot, None] * out.float()
        y = total.to(x.dtype)
        self.record = {"hidden_states": x, "router_logits": logits, "index": index, "output": y}
        return y


class Layer(nn.Module):
    def __init__(self, cfg, dropout):
        super().__init__()
        self.input_layernorm = RMSNorm(cfg["hidden_size"], cfg["rms_norm_eps"])
        self.self_attn = Attention(cfg)
        self.post_attention_layernorm = RMSNorm(cfg["hidden_size"], cfg["rms_norm_eps"])
        self.mlp = SparseMoE(cfg)
        self.dropout = dropout

    def forward(self, x):
        x = x + F.dropout(self.self_attn(self.input_layernorm(x)), self.dropout, self.training)
        y, aux = self.mlp(self.post_attention_layernorm(x))
        return x + F.dropout(y, self.dropout, self.training), aux


class TinyMoE(nn.Module):
    def __init__(self, cfg, dropout=0.0):
        super().__init__()
        self.embed_tokens = nn.Embedding(cfg["vocab_size"], cfg["hidden_size"])
        self.layers = nn.ModuleList(Layer(cfg, dropout) for _ in range(cfg["num_hidden_layers"]))
        self.norm = RMSNorm(cfg["hidden_size"], cfg["rms_norm_eps"])
        self.lm_head = nn.Linear(cfg["hidden_size"], cfg["vocab_size"], bias=False)
        for name, p in self.named_parameters():
            if p.dim() > 1:  # matrices; those that write to the residual stream start smaller
                deep = name.endswith(("o_proj.weight", "down_proj"))
                scale = 1 / math.sqrt(2 * len(self.layers)) if deep else 1
                nn.init.normal_(p, std=cfg["initializer_range"] * scale)

    def forward(self, tokens):
        """Logits [B, T, vocab] in fp32 and, in training, the mean load-balancing loss."""
        x, auxes = self.embed_tokens(tokens), []
        for layer in self.layers:
            x, aux = layer(x)
            auxes.append(aux)
        logits = self.lm_head(self.norm(x)).float()
        return logits, torch.stack(auxes).mean() if self.training else None


def exported_views(model):
    """(name, view) of every tensor under its Hugging Face Qwen3-MoE name."""
    for name, p in model.named_parameters():
        p, prefix = p.detach(), "" if name.startswith("lm_head") else "model."
        if name.endswith("mlp.gate"):
            yield f"{prefix}{name}.weight", p
        elif p.dim() == 3:  # stacked experts
            mlp, proj = name.rsplit(".", 1)
            for e in range(p.shape[0]):
                yield f"{prefix}{mlp}.experts.{e}.{proj}.weight", p[e]
        else:
            yield prefix + name, p


def load_model(path, cfg, dtype, device):
    """The model saved at `path`, in evaluation mode, computing in `dtype`."""
    model = TinyMoE(cfg)
    with safe_open(path, framework="pt") as f:
        for name, view in exported_views(model):
            view.copy_(f.get_tensor(name))
    return model.to(device=device, dtype=dtype).eval()


@torch.no_grad()
def evaluate(model, text, context, batch=32):
    """Bits per byte of `text` (see the top of this file), scored bytes, and how often each expert
    of each layer was chosen (over all bytes, unscored ones too)."""
    nll, scored = 0.0, 0
    usage = [torch.zeros(m.mlp.experts, dtype=torch.long) for m in model.layers]
    full = text[: len(text) // context * context].view(-1, context)
    pieces = list(full.split(batch)) + [text[full.numel():][None]] * (full.numel() < len(text))
    for tokens in pieces:
        with sdpa_kernel(SDPBackend.MATH):  # the plain formula, in full fp32
            logits = model(tokens)[0][:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        nll += loss.double().sum().item()
        scored += loss.numel()
        for count, layer in zip(usage, model.layers):
            index = layer.mlp.record["index"].flatten().cpu()
            count += torch.bincount(index, minlength=len(count))
    return nll / math.log(2) / scored, scored, [u.tolist() for u in usage]


@torch.no_grad()
def record_activations(model, text, context, count):
    """MoE inputs, router logits and outputs for the first `count` bytes, windows as above."""
    with sdpa_kernel(SDPBackend.MATH):
        model(text[:count].view(-1, context))
    out = {}
    for i, layer in enumerate(model.layers):
        for key in ("hidden_states", "router_logits", "output"):
            out[f"layers.{i}.{key}"] = layer.mlp.record[key].cpu()
    return out


def train(args, cfg, text, device):
    """Train on random windows of `text`; returns the model with fp32 weights."""
    model = TinyMoE(cfg, args.dropout).to(device).train()
    norms = [p for p in model.parameters() if p.dim() == 1]  # the rest are matrices
    optimizer = torch.optim.AdamW(
        [{"params": [p for p in model.parameters() if p.dim() > 1]},
         {"params": norms, "weight_decay": 0.0}],
        weight_decay=args.weight_decay,
        lr=args.lr, betas=(0.9, 0.95), fused=device.type == "cuda")

    def loss_of(x, y):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            logits, aux = model(x)
        return F.cross_entropy(logits.flatten(0, 1), y.flatten()), aux

    step_loss = torch.compile(loss_of) if args.compile else loss_of
    generator = torch.Generator().manual_seed(args.seed)  # window starts, drawn on the CPU
    arange = torch.arange(args.context + 1, device=device)
    warmup, start = max(1, args.steps // 50), time.time()
    for step in range(args.steps):
        done = (step - warmup) / max(1, args.steps - warmup)
        factor = (step + 1) / warmup if step < warmup else 0.5 * (1 + math.cos(math.pi * done))
        for group in optimizer.param_groups:
            group["lr"] = args.lr * factor
        begin = torch.randint(len(text) - args.context, (args.batch, 1), generator=generator)
        window = text[begin.to(device) + arange]
        loss, aux = step_loss(window[:, :-1], window[:, 1:])
        (loss + cfg["router_aux_loss_coef"] * aux).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % args.log_every == 0 or step == args.steps - 1:
            print(f"step {step:5d}  train {loss.item() / math.log(2):.4f} bits/byte  "
                  f"balance {aux.item():.4f}  {time.time() - start:.1f} s", flush=True)
    return model


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--text", type=Path, required=True, help="the training text")
    parser.add_argument("--out", type=Path, help="model directory to write")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=64, help="windows per step")
    parser.add_argument("--context", type=int, default=512, help="bytes per window")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--weight-decay", type=float, default=1.0)
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=1611)
    parser.add_argument("--dev-fraction", type=float, default=0.0,
                        help="score on this share of the training part instead; write nothing")
    parser.add_argument("--activation-tokens", type=int, default=1024)
    parser.add_argument("--log-every", type=int, default=250)
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    args = parser.parse_args()
    if not args.dev_fraction and not args.out:
        parser.error("--out is needed (except with --dev-fraction)")
    if args.activation_tokens % args.context:
        parser.error("--activation-tokens must be a multiple of --context")

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)
    torch.use_deterministic_algorithms(True)
    cfg = dict(CONFIG, max_position_embeddings=args.context)

    # Split by position: the held-out part starts at the first line start at or after 90 %.
    raw = args.text.read_bytes()
    cut = raw.index(b"\n", len(raw) * 9 // 10 - 1) + 1
    train_raw, heldout_raw = raw[:cut], raw[cut:]
    if args.dev_fraction:
        cut = train_raw.index(b"\n", int(len(train_raw) * (1 - args.dev_fraction))) + 1
        train_raw, heldout_raw = train_raw[:cut], train_raw[cut:]
    train_text, heldout = (torch.tensor(list(part), device=device)
                           for part in (train_raw, heldout_raw))
    print(f"text {len(raw)} bytes, sha256 {hashlib.sha256(raw).hexdigest()}; "
          f"train {len(train_text)}, held out {len(heldout)}", flush=True)

    start = time.time()
    model = train(args, cfg, train_text, device)
    seconds = time.time() - start
    if args.dev_fraction:
        bits = evaluate(model.eval(), heldout, args.context)[0]
        print(f"development part: {bits:.4f} bits per byte (fp32), {seconds:.0f} s")
        return

    calibration = args.out / "calibration"
    calibration.mkdir(parents=True, exist_ok=True)
    weights = args.out / "model.safetensors"
    tensors = {name: view.to("cpu", torch.bfloat16) for name, view in exported_views(model)}
    save_file(tensors, weights, metadata={"format": "pt"})
    (args.out / "config.json").write_text(json.dumps(cfg, indent=2) + "\n")
    (calibration / "heldout.txt").write_bytes(heldout_raw)

    # Everything below works from the file just written, not from the fp32 training weights.
    model = load_model(weights, cfg, torch.bfloat16, device)
    bits_bf16, scored, _ = evaluate(model, heldout, args.context)
    activations = record_activations(model, heldout, args.context, args.activation_tokens)
    source = (f"heldout.txt bytes 0 to {args.activation_tokens - 1} in windows of {args.context}; "
              f"model.safetensors sha256 {hashlib.sha256(weights.read_bytes()).hexdigest()}")
    save_file(activations, calibration / "activations.safetensors", metadata={"source": source})
    model = load_model(weights, cfg, torch.float32, device)
    bits_fp32, _, usage = evaluate(model, heldout, args.context)
    metrics = {
        "heldout_bits_per_byte_fp32": bits_fp32,
        "heldout_bits_per_byte_bf16": bits_bf16,
        "window_bytes": args.context,
        "heldout_bytes": len(heldout), "scored_bytes": scored,
        "train_bytes": len(train_text),
        "text_sha256": hashlib.sha256(raw).hexdigest(),
        "seed": args.seed, "steps": args.steps, "batch": args.batch, "lr": args.lr,
        "weight_decay": args.weight_decay, "dropout": args.dropout,
        "train_seconds": round(seconds, 1), "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if device.type == "cuda" else "none",
        "expert_usage_fp32": usage,
    }
    for path in (weights, calibration / "activations.safetensors"):
        path.chmod(0o644)  # save_file creates private files
    (calibration / "metrics.json").write_text(json.dumps(metrics) + "\n")
    print(f"held out: {bits_fp32:.4f} bits per byte (fp32), {bits_bf16:.4f} (bf16), "
          f"{scored} bytes scored; trained {seconds:.0f} s")


if __name__ == "__main__":
    main()
