"""Workspaces that callers of cutlass_fused_moe() bring."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from flashinfer_table import CLOSE, record
from test_flashinfer_moe import E, H, I, K, LIBRARIES, T, Data, cutlass

import narrowfloat as nf
import narrowfloat.compat.flashinfer as fi

TYPES = {"x_dtype": "bfloat16", "weight_dtype": "bfloat16"}


@pytest.fixture(params=LIBRARIES, ids=lambda lib: lib.__name__)
def lib(request: pytest.FixtureRequest) -> Any:
    """Where arrays come from."""
    return request.param


def test_the_size_is_enough(lib: Any) -> None:
    """To the byte, whatever is in it, at an address that is a multiple of 128 alone."""
    data = Data("bf16")
    arguments = (lib.make(data.x), lib.make(data.w1), lib.make(data.w2), [])
    wanted = lib.raw(cutlass(lib, data, *arguments))
    size = fi.cutlass_fused_moe_workspace_size(T, H, I, E, K, **TYPES)
    assert isinstance(size, int)
    for kind in (np.uint8, np.int8):
        for shift in (0, 128):
            space = lib.make(np.full(size + 512, 255, np.uint8).view(kind))
            address = space.ctypes.data if lib.__name__ == "Numpy" else space.data_ptr()
            begin = -address % 256 + shift
            got = cutlass(lib, data, *arguments, workspace_buffer=space[begin : begin + size])
            assert lib.raw(got) == wanted
            after = lib.raw(space[begin + size :])
            assert after == b"\xff" * len(after)
    with pytest.raises(ValueError, match="workspace"):
        cutlass(lib, data, *arguments, workspace_buffer=space[: size // 64])
    for wrong in (np.zeros((2, size), np.uint8), np.zeros(size, np.float32), np.zeros(0, np.uint8)):
        with pytest.raises(ValueError, match="workspace_buffer"):
            cutlass(lib, data, *arguments, workspace_buffer=lib.make(wrong))
    record("cutlass_fused_moe_workspace_size", CLOSE,
           "not with tiles of `autotune()`", "an upper bound of our layers' bytes")  # fmt: skip


@pytest.mark.parametrize("mode", ["bf16", "fp8_tensor", "fp8_block", "mxfp8", "mxfp4_mxfp8",
                                  "mxfp4_bf16", "nvfp4"])  # fmt: skip
@pytest.mark.parametrize("kind", ["swiglu", "relu2"])
def test_no_layer_needs_more(lib: Any, mode: str, kind: str) -> None:
    """All modes, decode and prefill; never ten times too much."""
    data = Data(mode, kind)
    config = nf.MoeConfig(hidden=H, inter=I, experts=E, top_k=K, mode=mode,
                          activation=nf.Activation(kind), out_dtype="bfloat16")  # fmt: skip
    factors = {name: data.each[name] for name in ("up_scale", "gate_scale", "down_scale",
                                                  "inter_multiplier")}  # fmt: skip
    if mode not in ("fp8_tensor", "nvfp4"):
        factors = {}
    elif kind == "relu2":
        factors.pop("gate_scale")
    layer = nf.MoeLayer.prepare(lib.make(data.w1), lib.make(data.w2), config,
                                w1_scales=None if data.s1 is None else lib.make(data.s1),
                                w2_scales=None if data.s2 is None else lib.make(data.s2),
                                **{k: lib.make(v) for k, v in factors.items()})  # fmt: skip
    for tokens in (1, 2, 7, 8, 33, 64, 128, 1000, 4096):
        size = fi.cutlass_fused_moe_workspace_size(
            tokens, H, I, E, K, **TYPES, activation_type={"swiglu": 3, "relu2": 6}[kind]
        )
        needed = layer.required_workspace(tokens)
        assert needed + 256 <= size < 10 * needed + 65536, (tokens, needed, size)


SHAPES = {
    "one expert": {"experts": 1, "top_k": 1},
    "more slots than local experts": {"experts": 16, "top_k": 8, "shards": 8},
    "shards": {"experts": 8, "top_k": 2, "shards": 4},
    "wide intermediate": {"hidden": 128, "inter": 2048},
    "narrow intermediate": {"hidden": 2048, "inter": 128},
    "geglu": {"kind": "geglu_tanh"},
    "identity": {"kind": "identity"},
}
NUMBERS = {"swiglu": 3, "geglu_tanh": 8, "identity": 9}


@pytest.mark.parametrize("name", list(SHAPES))
def test_no_shape_needs_more(name: str) -> None:
    """Ends of what layers may be, with given routings."""
    plan = {"hidden": 128, "inter": 256, "experts": 4, "top_k": 2, "shards": 1, "kind": "swiglu",
            **SHAPES[name]}  # fmt: skip
    hidden, inter, experts, shards = (plan[key] for key in ("hidden", "inter", "experts", "shards"))
    local, kind = experts // shards, plan["kind"]
    config = nf.MoeConfig(hidden=hidden, inter=inter, experts=experts, top_k=plan["top_k"],
                          local_experts=local, activation=nf.Activation(kind))  # fmt: skip
    rows = inter if kind == "identity" else 2 * inter
    bf16 = ml_dtypes.bfloat16
    layer = nf.MoeLayer.prepare(np.zeros((local, rows, hidden), bf16),
                                np.zeros((local, hidden, inter), bf16), config)  # fmt: skip
    for tokens in (1, 2, 9, 64, 300, 2048):
        size = fi.cutlass_fused_moe_workspace_size(
            tokens, hidden, inter, experts, plan["top_k"], **TYPES, ep_size=shards,
            activation_type=NUMBERS[kind],
        )  # fmt: skip
        assert layer.required_workspace(tokens) + 256 <= size, tokens


@pytest.mark.parametrize("name", ["min_latency_mode", "use_packed_weights",
                                  "use_wfp4afp8_humming"])  # fmt: skip
def test_what_is_not_offered(name: str) -> None:
    """As cutlass_fused_moe() refuses it."""
    with pytest.raises(NotImplementedError, match=name):
        fi.cutlass_fused_moe_workspace_size(T, H, I, E, K, **TYPES, **{name: True})


def test_wrong_sizes() -> None:
    """Named."""
    with pytest.raises(ValueError, match="top_k"):
        fi.cutlass_fused_moe_workspace_size(T, H, I, E, 0, **TYPES)
    with pytest.raises(ValueError, match="ep_size"):
        fi.cutlass_fused_moe_workspace_size(T, H, I, E, K, **TYPES, ep_size=3)
