"""A Mixture-of-Experts layer written with torch from the specification alone.

Routing, rounding points, and the order of rows that FlashInfer's kernels want. Shares nothing with
the library or with the NumPy model of tests/golden. Sections are of the MoE specification.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch_formulas as formulas
from torch_formulas import Coded

Tensor = torch.Tensor


@dataclass
class Router:
    """Results of all experts (4.2)."""

    method: int = 1
    top_k: int = 3
    bias: Tensor | None = None
    n_group: int = 1
    topk_group: int = 1
    scale: float = 1.0
    norm: bool = True


def best(keys: Tensor, k: int) -> Tensor:
    """Places of the k largest, equal ones by place (4.1)."""
    return torch.sort(keys, dim=-1, descending=True, stable=True).indices[..., :k]


def grouped(keys: Tensor, router: Router) -> Tensor:
    """Keys of the kept groups, -Inf elsewhere (4.3)."""
    groups = keys.reshape(keys.shape[0], router.n_group, -1)
    kept = best(torch.sort(groups, descending=True).values[..., :2].sum(-1), router.topk_group)
    masked = torch.full_like(groups, -torch.inf)
    for row in range(keys.shape[0]):
        masked[row, kept[row]] = groups[row, kept[row]]
    return masked.reshape(keys.shape)


def route(logits: Tensor, router: Router) -> tuple[Tensor, Tensor]:
    """Ids and float32 weights, which hold bfloat16 values."""
    x, method = logits.float(), router.method
    s = 0.5 * torch.tanh(0.5 * x) + 0.5
    key = x if method in (0, 1, 3, 4, 5, 9) else s
    if method in (2, 7) and router.bias is not None:
        is_grouped = method == 2 and router.n_group > 1
        key = s + (router.bias.bfloat16().float() if is_grouped else router.bias)
    if method == 2 and router.n_group > 1:
        key = grouped(key, router)
    ids = best(key, router.top_k)
    picked, sigmoids = x.gather(1, ids), s.gather(1, ids)
    total = sigmoids.sum(-1, keepdim=True)
    weights = {
        0: lambda: torch.softmax(x, -1).gather(1, ids),
        1: lambda: torch.softmax(picked, -1),
        4: lambda: torch.softmax(picked, -1),
        5: lambda: picked,
        6: lambda: sigmoids / total.clamp(min=1e-20) if router.norm else sigmoids,
        2: lambda: sigmoids * router.scale / (total + 1e-20),
        7: lambda: sigmoids * router.scale / (total + 1e-20),
    }.get(method, lambda: sigmoids)()
    return ids, weights.bfloat16().float()


def pack(ids: Tensor, weights: Tensor) -> Tensor:
    """A routing in int32 (4.5)."""
    bits = weights.bfloat16().view(torch.int16).int() & 0xFFFF
    return (ids.int() << 16) | bits


def gelu(kind: str, x: Tensor) -> Tensor:
    """erf, or its tanh approximation (6.2)."""
    if kind == "erf":
        return 0.5 * x * (1 + torch.erf(x / 2**0.5))
    return 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3)))


def swiglu(u: Tensor, g: Tensor, alpha: float = 1.0, beta: float = 0.0,
           limit: float = torch.inf) -> Tensor:  # fmt: skip
    """Clamped, the gate from above alone."""
    u, g = u.clamp(-limit, limit), g.clamp(max=limit)
    return g * torch.sigmoid(alpha * g) * (u + beta)


ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "swiglu": swiglu,
    "oai": partial(swiglu, alpha=1.702, beta=1.0, limit=0.9),
    "swiglu_step": lambda u, g: torch.minimum(
        g * torch.sigmoid(g), torch.tensor(7.0)) * u.clamp(-7, 7),
    "geglu_erf": lambda u, g: gelu("erf", g) * u,
    "geglu_tanh": lambda u, g: gelu("tanh", g) * u,
    "situ": lambda u, g: torch.tanh(u) * torch.tanh(g) * torch.sigmoid(g),
    "relu2": lambda u: u.clamp(min=0) ** 2,
    "silu": lambda u: u * torch.sigmoid(u),
    "identity": lambda u: u,
}  # fmt: skip


def bf16(x: Tensor) -> Tensor:
    """float64 rounded to bfloat16."""
    return x.float().bfloat16().double()


def as_bf16(x: Tensor) -> Coded:
    """No code."""
    rounded = x.float().bfloat16()
    return Coded(rounded, None, formulas.number(1), rounded.double())


# Weights, rows and intermediate of a mode (6.4); the last with the static multiplier.
FORMATS: dict[str, tuple[Callable, Callable, Callable]] = {
    "bf16": (as_bf16, as_bf16, lambda h, m: as_bf16(h)),
    "fp8_tensor": (formulas.fp8_tensor, formulas.fp8_tensor, formulas.fp8_tensor),
    "fp8_block": (formulas.fp8_128x128, formulas.fp8_1x128, lambda h, m: formulas.fp8_1x128(h)),
    "mxfp8": (formulas.mxfp8, formulas.mxfp8, lambda h, m: formulas.mxfp8(h)),
    "mxfp4_mxfp8": (formulas.mxfp4, formulas.mxfp8, lambda h, m: formulas.mxfp8(h)),
    "mxfp4_bf16": (formulas.mxfp4, as_bf16, lambda h, m: as_bf16(h)),
    "nvfp4": (formulas.nvfp4, formulas.nvfp4, formulas.nvfp4),
    "nvfp4_per_token": (formulas.nvfp4, formulas.nvfp4_per_token,
                        lambda h, m: formulas.nvfp4_per_token(h.bfloat16())),
}  # fmt: skip


@dataclass
class Layer:
    """Weights of all experts in a mode's format, rows [up; gate]."""

    mode: str
    activation: str
    w1: list[Coded]
    w2: list[Coded]
    multiplier: Tensor  # The intermediate's multiplier, where it is static.
    bias1: Tensor | None = None
    bias2: Tensor | None = None
    inter: int = field(init=False)

    def __post_init__(self) -> None:
        self.inter = self.w2[0].decoded.shape[1]

    @property
    def is_gated(self) -> bool:
        """Whether w1 has two halves."""
        return self.w1[0].decoded.shape[0] != self.inter

    def expert(self, e: int, rows: Tensor, weight: Tensor | None) -> Tensor:
        """bfloat16 values of the slots of one expert, as float64 (6.1, steps 1 to 7)."""
        a = rows @ self.w1[e].decoded.T * self.w1[e].factor.double()
        if weight is not None:
            a = a * weight[:, None].double()
        if self.bias1 is not None:
            a = a + self.bias1[e].double()
        halves = (a[:, : self.inter], a[:, self.inter :]) if self.is_gated else (a,)
        h = ACTIVATIONS[self.activation](*(half.float() for half in halves))
        coded = FORMATS[self.mode][2](h, self.multiplier)
        factor = coded.factor.double().reshape(-1, 1)  # One factor per row, or one for all.
        y = coded.decoded @ self.w2[e].decoded.T * self.w2[e].factor.double() * factor
        return bf16(y if self.bias2 is None else y + self.bias2[e].double())

    def run(self, x: Coded, ids: Tensor, weights: Tensor, local: range | None = None,
            weight_on_input: bool = False) -> Tensor:  # fmt: skip
        """float64 [T, H] of the experts in `local`, combined (6.6)."""
        rows = x.decoded * x.factor.double().reshape(-1, 1)
        out = torch.zeros(ids.shape[0], self.w2[0].decoded.shape[0], dtype=torch.float64)
        for e in range(len(self.w1)) if local is None else local:
            tokens, slots = (ids == e).nonzero(as_tuple=True)
            if len(tokens):
                w = weights[tokens, slots]
                y = self.expert(e, rows[tokens], w if weight_on_input else None)
                out.index_add_(0, tokens, y if weight_on_input else y * w[:, None].double())
        return bf16(out)


def make(mode: str, activation: str, experts: int, hidden: int, inter: int) -> Layer:
    """Random weights."""
    generator = torch.Generator().manual_seed(len(mode) + 31 * len(activation))
    gated = activation not in ("relu2", "silu", "identity")
    code = FORMATS[mode][0]

    def weights(rows: int, cols: int) -> list[Coded]:
        return [code((torch.randn(rows, cols, generator=generator) / cols**0.5).bfloat16())
                for _ in range(experts)]  # fmt: skip

    multiplier = {"fp8_tensor": 40.0, "nvfp4": 150.0}.get(mode, 1.0)
    return Layer(mode, activation, weights(inter * (2 if gated else 1), hidden),
                 weights(hidden, inter), formulas.number(multiplier))  # fmt: skip


def row_order(rows: int, gated: bool, block: int = 32) -> Tensor:
    """The canonical row that each prepared row holds (7.3)."""
    p = torch.arange(rows)
    r = block * (p // block) + (block // 8) * (p % 8) + (p % block) // 8
    return torch.where(r % 2 == 0, r // 2, rows // 2 + r // 2) if gated else r


def block_major(w: Tensor) -> Tensor:
    """[experts, M, K] as [experts, K / B, M, B], B of 128 bytes (7.4)."""
    width = 128 // w.element_size()
    return w.reshape(*w.shape[:2], -1, width).permute(0, 2, 1, 3).contiguous()
