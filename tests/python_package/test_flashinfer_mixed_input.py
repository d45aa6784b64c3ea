"""cutlass_fused_moe(use_w4_group_scaling=True): weights interleaved as the specification says.

Byte by byte and bit by bit; this test shares no code with the package.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flashinfer_table import record_part
from test_flashinfer_moe import E4M3, LIBRARIES, Data, check, cutlass

import narrowfloat.compat.flashinfer as fi

# Source bits and destination bits of a word, in the specification's words.
BITS = {7: 31, 6: 24, 5: 23, 4: 22, 3: 15, 2: 8, 1: 7, 0: 6, 15: 28, 14: 21, 13: 20, 12: 19, 11: 12,
        10: 5, 9: 4, 8: 3, 23: 25, 22: 18, 21: 17, 20: 16, 19: 9, 18: 2, 17: 1, 16: 0, 31: 30,
        30: 27, 29: 26, 28: 29, 27: 14, 26: 11, 25: 10, 24: 13}  # fmt: skip


@pytest.fixture(params=LIBRARIES, ids=lambda lib: lib.__name__)
def lib(request: pytest.FixtureRequest) -> Any:
    """Where arrays come from."""
    return request.param


def interleaved(w: np.ndarray) -> np.ndarray:
    """uint8 [experts, rows, cols / 2] as Hopper's mixed-input kernels want it."""
    out = np.zeros_like(w)
    for top in range(0, w.shape[1], 16):
        for part in range(w.shape[2] // 32):
            for lane in range(16):
                for r in range(8):
                    c = 32 * part + 8 * (lane // 4) + lane % 4
                    b = (w[:, top + r, c], w[:, top + r + 8, c], w[:, top + r, c + 4],
                         w[:, top + r + 8, c + 4])  # fmt: skip
                    word = sum(b[i].astype(np.uint32) << (8 * i) for i in range(4))
                    moved = np.zeros_like(word)
                    for source, target in BITS.items():
                        moved |= ((word >> source) & 1) << target
                    row = top + r + 8 * ((lane // 4) % 2)
                    at = 32 * part + 16 * (lane // 8) + 4 * (lane % 4)
                    out[:, row, at : at + 4] = moved.astype("<u4")[:, None].view(np.uint8)
    return out


def folded(s: np.ndarray) -> np.ndarray:
    """uint8 [experts, rows, blocks] as [experts, rows / 64, cols / 128, 16, 16]."""
    experts, rows, blocks = s.shape
    split = s.reshape(experts, rows // 64, 4, 16, blocks // 4, 4).transpose(0, 1, 4, 3, 2, 5)
    return np.ascontiguousarray(split).reshape(experts, rows // 64, blocks // 4, 16, 16)


def test_the_bits_are_a_permutation() -> None:
    """The table above has no slip that loses a bit."""
    assert sorted(BITS) == sorted(BITS.values()) == list(range(32))


@pytest.mark.parametrize("typed", [np.uint8, np.int32])
def test_mxfp4_with_bf16_rows(lib: Any, typed: Any) -> None:
    """Against the model, with gpt-oss's activation; scales as bytes or as words."""
    limit = np.full(8, 0.7, np.float32)
    data = Data("mxfp4_bf16", alpha=np.full(8, 1.702, np.float32), beta=np.ones(8, np.float32),
                limit_gate=limit, limit_up=limit)  # fmt: skip
    scales = [lib.make(folded(s).view(typed)) for s in (data.s1, data.s2)]
    parameters = {"swiglu_alpha": lib.make(data.each["alpha"]),
                  "swiglu_beta": lib.make(data.each["beta"]),
                  "swiglu_limit": lib.make(limit)}  # fmt: skip
    got = cutlass(lib, data, lib.make(data.x), lib.make(interleaved(data.w1)),
                  lib.make(interleaved(data.w2)), scales, use_w4_group_scaling=True,
                  **parameters)  # fmt: skip
    check(lib, got, data.expected(data.routed()), "mxfp4_bf16")
    record_part("cutlass_fused_moe", "MXFP4 x bf16")


def test_refusals(lib: Any) -> None:
    """Sizes that cannot be interleaved, scales of another size."""
    data = Data("mxfp4_bf16")
    w1, w2 = lib.make(data.w1), lib.make(data.w2)
    scales = [lib.make(folded(s)) for s in (data.s1, data.s2)]
    with pytest.raises(ValueError, match="quant_scales"):
        cutlass(lib, data, lib.make(data.x), w1, w2, scales[::-1], use_w4_group_scaling=True)
    with pytest.raises(ValueError, match="quant_scales"):
        cutlass(lib, data, lib.make(data.x), w1, w2, scales[:1], use_w4_group_scaling=True)
    short = lib.make(data.w1[:, :, :48].copy())
    with pytest.raises(ValueError, match="fc1_expert_weights"):
        cutlass(lib, data, lib.make(data.x), short, w2, scales, use_w4_group_scaling=True)
    ids = lib.make(np.zeros((5, 2), np.int32))
    with pytest.raises(NotImplementedError, match="use_w4_group_scaling"):
        fi.cutlass_fused_moe(lib.make(data.x.astype(E4M3)), ids, None, w1, w2, "bfloat16",
                             scales, use_w4_group_scaling=True)  # fmt: skip
