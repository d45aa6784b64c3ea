"""The formula between the two matrices of an experts module, found by asking the module.

Modules have an activation and an order of gate and up rows, some both in a method of their own
(gpt-oss). Every combination that a layer offers is compared with what the module's method returns;
where none agrees the module is refused, so that no model is ever run with another formula.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from narrowfloat._moe_config import Activation

_ROWS, _WIDTH = 64, 24


@dataclass(frozen=True)
class Gate:
    """Activation, and order of the rows of the first matrix."""

    activation: Activation
    order: str  # "gate_up", "interleaved", "up_gate"; not gated: "up_gate", which says nothing.


def _swiglu(gate: Any, up: Any, alpha: float, beta: float, limit: float) -> Any:
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + beta)


def _numbers(module: torch.nn.Module, *names: str) -> list[float]:
    """Parameters of the formula that the module or its configuration has."""
    places = (module, getattr(module, "config", None))
    found = [getattr(place, name, None) for place in places for name in names]
    return [float(value) for value in found if isinstance(value, (int, float))]


def _gated(module: torch.nn.Module) -> Iterator[tuple[Activation, Callable[[Any, Any], Any]]]:
    yield Activation("swiglu"), lambda g, u: functional.silu(g) * u
    yield Activation("geglu_erf"), lambda g, u: functional.gelu(g) * u
    yield Activation("geglu_tanh"), lambda g, u: functional.gelu(g, approximate="tanh") * u
    infinity = float("inf")
    for alpha in (1.0, *_numbers(module, "alpha", "swiglu_alpha")):
        for limit in (infinity, *_numbers(module, "limit", "swiglu_limit")):
            for beta in (0.0, 1.0):
                formula = partial(_swiglu, alpha=alpha, beta=beta, limit=limit)
                yield Activation("swiglu", alpha, beta, limit, limit), formula


_PLAIN: dict[str, Callable[[Any], Any]] = {
    "silu": functional.silu, "relu": functional.relu, "relu2": lambda x: functional.relu(x) ** 2,
    "gelu_erf": functional.gelu, "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "identity": lambda x: x,
}  # fmt: skip


def _halves(rows: torch.Tensor, order: str) -> tuple[torch.Tensor, torch.Tensor]:
    """gate, up."""
    if order == "interleaved":
        return rows[..., ::2], rows[..., 1::2]
    first, second = rows.chunk(2, dim=-1)
    return (first, second) if order == "gate_up" else (second, first)


def find_gate(name: str, module: Any) -> Gate:
    """The formula of a module. NotImplementedError where no layer computes it."""
    rows = torch.randn(_ROWS, 2 * _WIDTH, generator=torch.Generator("cpu").manual_seed(27),
                       device="cpu") * 6  # fmt: skip
    with torch.no_grad():
        if not module.has_gate:
            wanted = module.act_fn(rows)
            for kind, function in _PLAIN.items():
                if torch.allclose(function(rows), wanted, rtol=1e-5, atol=1e-6):
                    return Gate(Activation(kind), "up_gate")
        else:
            wanted = module._apply_gate(rows)
            for activation, formula in _gated(module):
                for order in ("gate_up", "interleaved", "up_gate"):
                    if torch.allclose(formula(*_halves(rows, order)), wanted, rtol=1e-5, atol=1e-6):
                        return Gate(activation, order)
    raise NotImplementedError(
        f"{name}: {type(module).__name__} computes an activation that no layer of narrowfloat has; "
        "put its name into modules_to_not_convert"
    )
