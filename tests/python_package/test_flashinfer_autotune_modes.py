"""autotune() of modes with scales and of shared experts, and its clock on a GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_flashinfer_autotune import clock, entries, lib, nothing_known, ranges  # noqa: F401
from test_flashinfer_moe import (
    BF16,
    E4M3,
    FAR,
    LIBRARIES,
    Data,
    E,
    H,
    I,
    K,
    fp4_arguments,
    prepared,
    prepared_scales,
    sizes,
)

import narrowfloat as nf
import narrowfloat.compat.flashinfer as fi
from narrowfloat.compat.flashinfer import _layers, _measure, _tuning


def fp8_block(lib: Any, tokens: int) -> Any:
    """DeepSeek's entry point, whose scales are columns."""
    data = Data("fp8_block")
    scales = np.ascontiguousarray(np.resize(data.rows.scales, (tokens, H // 128)).T)
    return fi.trtllm_fp8_block_scale_moe(
        lib.make(np.resize(data.logits, (tokens, E))), None,
        lib.make(np.resize(data.rows.codes, (tokens, H)).view(E4M3)), lib.make(scales),
        *map(lib.make, (data.w1, data.s1, data.w2, data.s2)), **sizes())  # fmt: skip


def mxfp8(lib: Any, tokens: int) -> Any:
    """The same one with scales of 32 elements, which count in the same order."""
    data = Data("mxfp8")
    weights = [lib.make(order(w, is_first)) for w, order, is_first in (
        (data.w1, lambda w, first: prepared(w, 32, first), True), (data.s1, prepared_scales, True),
        (data.w2, lambda w, first: prepared(w, 32, first), False),
        (data.s2, prepared_scales, False))]  # fmt: skip
    return fi.trtllm_fp8_block_scale_moe(
        lib.make(np.resize(data.logits, (tokens, E))), None,
        lib.make(np.resize(data.rows.codes, (tokens, H)).view(E4M3)),
        lib.make(np.resize(data.rows.scales, (tokens, H // 32))), *weights, **sizes(),
        fp8_quantization_type=fi.Fp8QuantizationType.MxFp8, use_shuffled_weight=True)  # fmt: skip


def nvfp4_per_token(lib: Any, tokens: int) -> Any:
    """Rows with scales of their own."""
    data = Data("nvfp4_per_token")
    (out,) = fi.trtllm_fp4_block_scale_moe(
        lib.make(np.resize(data.logits, (tokens, E))), None,
        hidden_states=lib.make(np.resize(data.rows.codes, (tokens, H // 2))),
        hidden_states_scale=lib.make(np.resize(data.rows.scales, (tokens, H // 16)).view(E4M3)),
        per_token_scale=lib.make(np.resize(data.rows.row_scale, tokens)),
        **fp4_arguments(lib, data), **sizes())  # fmt: skip
    return out


@pytest.mark.parametrize("function", [fp8_block, mxfp8, nvfp4_per_token],
                         ids=lambda function: function.__name__)  # fmt: skip
def test_modes_with_scales(lib: Any, function: Any, tmp_path: Path,
                           monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Inputs are cut for smaller buckets; tiles of 64 and 128 tokens agree, not to the bit."""

    def always_128(rule: int, layer: Any, with_tile: Any, runs: Any) -> Any:
        for run in runs([with_tile(tile) for tile in (rule, 128)]):
            run()
        return {"token_tile": 128, "rule_tile": rule, "us": 1.0, "rule_us": 2.0}

    plain = np.frombuffer(lib.raw(function(lib, 128)), BF16).astype(np.float64)
    assert nf.default_token_tile(128, slots=K, local_experts=E) == 64
    monkeypatch.setattr(_tuning, "fastest_tile", always_128)
    path = tmp_path / "tiles.json"
    with fi.autotune(cache=path):
        tuned = np.frombuffer(lib.raw(function(lib, 128)), BF16).astype(np.float64)
    assert [last for _, last in ranges(path)] == [1, 2, 4, 8, 16, 32, 64, 128]
    distance = np.linalg.norm(tuned - plain) / np.linalg.norm(plain)
    assert distance < FAR[function.__name__]
    assert lib.__name__ == "Cuda" or distance == 0


def test_shared_experts(lib: Any, clock: list[int], tmp_path: Path) -> None:
    """They count as local experts and as slots."""
    data = Data("bf16")
    config = nf.MoeConfig(hidden=H, inter=I, experts=E - 1, top_k=K, shared_experts=1)
    layer = nf.MoeLayer.prepare(lib.make(data.w1), lib.make(data.w2), config)
    logits = lib.make(np.ascontiguousarray(data.logits[:, 1:]))
    with fi.autotune(cache=tmp_path / "tiles.json"):
        tuned = _layers.with_known_tiles("any", layer, lib.make(data.x), {"logits": logits})
    assert tuned.token_tile(5) == 16 and layer.token_tile(5) == 8
    entry = entries(tmp_path / "tiles.json")[0]
    assert (entry["experts"], entry["local_experts"], entry["slots"]) == (E - 1, E, K + 1)


@pytest.mark.skipif(LIBRARIES[-1].__name__ != "Cuda", reason="needs a GPU")
@pytest.mark.parametrize("is_named", [False, True])
def test_times_are_those_of_the_stream_in_use(is_named: bool) -> None:
    """On a GPU that need not be the current one; a sleep of it is seen whole."""
    cuda = sys.modules["torch"].cuda
    device = sys.modules["torch"].device("cuda", cuda.device_count() - 1)
    stream = cuda.Stream(device) if is_named else cuda.current_stream(device)

    def run() -> None:
        with cuda.stream(stream):
            cuda._sleep(20_000_000)  # Cycles: at least 5 ms at any clock.

    with nf.use_stream(stream.cuda_stream if is_named else None):
        assert _measure._gpu_timer(device)(run) > 5_000
