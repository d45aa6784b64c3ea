"""narrowfloat.compat.flashinfer: no tokens, routers' limits, nothing written before checks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flashinfer_calls import ENTRIES, cutlass_call
from test_flashinfer_moe import LIBRARIES, H, K, T

import narrowfloat as nf
import narrowfloat.compat.flashinfer as fi

GROUPS = {"n_group": 1, "topk_group": 1}
GROUPED = {"n_group": 8, "topk_group": 4}
FUSED, NO_FUSING = "num_fused_shared_experts: ", "does not support fusing shared expert"


@pytest.fixture(params=LIBRARIES, ids=lambda lib: lib.__name__)
def lib(request: pytest.FixtureRequest) -> Any:
    """Where arrays come from."""
    return request.param


@pytest.mark.parametrize("mode", list(ENTRIES))
def test_no_tokens(lib: Any, mode: str) -> None:
    """Empty results, of both kinds."""
    call = ENTRIES[mode]
    assert tuple(call(lib, 0).shape) == (0, H)
    rows, weights, places = call(lib, 0, do_finalize=False)
    assert rows.shape[1] == H and tuple(weights.shape) == (0, K) and tuple(places.shape) == (0,)
    assert tuple(call(lib).shape) == (T, H)


def test_no_tokens_of_cutlass(lib: Any) -> None:
    """With rows that are coded on the way, too."""
    for mode in ("bf16", "nvfp4"):
        assert tuple(cutlass_call(lib, 0, mode).shape) == (0, H)


def test_no_quant_scales(lib: Any) -> None:
    """None is as good as an empty list."""
    assert lib.raw(cutlass_call(lib, quant_scales=None)) == lib.raw(cutlass_call(lib))


def logits_of(lib: Any, experts: int) -> Any:
    """Arguments of three tokens."""
    return lib.make(np.random.default_rng(5).standard_normal((3, experts)).astype(np.float32))


ROUTER_CASES: dict[str, tuple[int, int, int, dict[str, int], str]] = {
    # Experts, method, k, other arguments; how the message begins.
    "k of renormalize": (64, 1, 33, {}, "top_k: renormalize takes up to 32"),
    "k of DeepSeekV3": (64, 2, 9, GROUPS, "top_k: expected 1 to 8"),
    "k of many experts": (512, 2, 23, GROUPS, "top_k: expected 1 to 22"),
    "no kept groups": (64, 2, 4, {"n_group": 4, "topk_group": 0}, "topk_group: "),
    "groups kept": (64, 2, 4, {"n_group": 8, "topk_group": 5}, "topk_group: expected 1 to 4"),
    "all of the kept": (64, 2, 8, {"n_group": 8, "topk_group": 1}, "top_k: expected 1 to 7 of 8"),
    "shard": (64, 1, 4, {"local_expert_offset": 32, "local_num_experts": 33},
              "local_num_experts: expected 1 to 32"),
    "no shard": (64, 1, 4, {"local_num_experts": 0}, "local_num_experts: "),
    "many groups": (64, 2, 4, {"n_group": 16, "topk_group": 4}, "n_group: expected at most 8"),
    "large groups": (128, 2, 4, {"n_group": 2, "topk_group": 1},
                     "n_group: expected up to 32 experts a group, got 64"),
    "experts of groups": (18, 2, 2, {"n_group": 2, "topk_group": 1},
                          "num_experts: expected a multiple of 4"),
    "fewer than no shared experts": (64, 2, 4, {**GROUPED, "num_fused_shared_experts": -1},
                                     "num_fused_shared_experts: must be non-negative"),
    "shared experts without groups": (
        64, 2, 4, {**GROUPS, "num_fused_shared_experts": 1}, f"{FUSED}deepseek_v3 .*{NO_FUSING}"),
    **{f"shared experts of {name}": (64, method, 1, {"num_fused_shared_experts": 1},
                                     f"{FUSED}{name} .*{NO_FUSING}")
       for method, name in enumerate(nf.routing_methods()) if name != "deepseek_v3"},
    "many slots": (256, 2, 8, {**GROUPED, "num_fused_shared_experts": 25},
                   f"{FUSED}expected at most 24 beside top_k 8"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(ROUTER_CASES))
def test_router_limits(lib: Any, name: str) -> None:
    """Limits of trtllm_gen_routing(): ValueError, and upstream's RuntimeError."""
    experts, method, k, options, words = ROUTER_CASES[name]
    for kind in (ValueError, RuntimeError):
        with pytest.raises(kind, match=f"^{words}"):
            fi.trtllm_gen_routing(logits_of(lib, experts), None, method, k, **options)


def test_routers_take_what_is_at_the_limit(lib: Any) -> None:
    """k of 32, 8 and 22; the last shard."""
    for experts, method, k, options in ((64, 1, 32, {}), (64, 2, 8, GROUPS), (512, 2, 22, GROUPS),
                                        (64, 2, 7, {"n_group": 8, "topk_group": 1}),
                                        (256, 2, 8, GROUPED),
                                        (64, 1, 4, {"local_expert_offset": 32,
                                                    "local_num_experts": 32})):  # fmt: skip
        bias = lib.make(np.zeros(experts, np.float32))
        got = fi.trtllm_gen_routing(logits_of(lib, experts), bias, method, k, **options)
        assert tuple(got.topk_ids.shape) == (3, k)
    bias = lib.make(np.zeros(256, np.float32))
    got = fi.trtllm_gen_routing(logits_of(lib, 256), bias, 2, 8, **GROUPED,
                                num_fused_shared_experts=24)  # fmt: skip
    assert tuple(got.topk_ids.shape) == (3, 32)


FUSED_CASES: dict[str, tuple[int, int, int, int, str]] = {
    # Experts, groups, kept groups, k; how the message begins.
    "k": (64, 4, 2, 9, "topk: expected 1 to 8"),
    "k of many experts": (385, 1, 1, 9, "topk: expected up to 8"),
    "no groups": (64, 0, 1, 4, "n_group: "),
    "more kept than groups": (64, 2, 3, 4, "topk_group: expected 1 to 2"),
    "experts": (385, 1, 1, 4, "scores: expected up to 384"),
    "experts in groups": (288, 12, 2, 4, "scores: expected up to 256"),
    "large groups": (128, 2, 1, 4, "n_group: expected up to 32"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(FUSED_CASES))
def test_fused_topk_limits(lib: Any, name: str) -> None:
    """Limits of fused_topk_deepseek(), which writes nothing then."""
    experts, groups, kept, k, words = FUSED_CASES[name]
    values, ids = lib.make(np.full((3, k), 7, np.float32)), lib.make(np.full((3, k), 7, np.int32))
    with pytest.raises(ValueError, match=f"^{words}"):
        fi.fused_topk_deepseek(logits_of(lib, experts), lib.make(np.zeros(experts, np.float32)),
                               groups, kept, k, 1.0, values, ids)  # fmt: skip
    assert set(lib.raw(ids)) == {0, 7}


def test_fused_topk_writes_nothing_before_all_checks(lib: Any) -> None:
    """Not ids, where the values or the backend are wrong, and no replay."""
    logits, bias = logits_of(lib, 64), lib.make(np.zeros(64, np.float32))
    ids, replay = lib.make(np.full((3, 4), 7, np.int32)), lib.make(np.full((3, 4), 7, np.int16))
    good = lib.make(np.zeros((3, 4), np.float32))
    wide, whole = lib.make(np.zeros((3, 5), np.float32)), lib.make(np.zeros((3, 4), np.int32))
    for values, backend, words in ((wide, "default", "topk_values"),
                                   (whole, "default", "topk_values"), (good, "vulkan", "backend")):
        with pytest.raises(ValueError, match=f"^{words}: "):
            fi.fused_topk_deepseek(logits, bias, 1, 1, 4, 1.0, values, ids,
                                   routing_replay_out=replay, backend=backend)  # fmt: skip
    assert lib.raw(ids) == np.full((3, 4), 7, np.int32).tobytes()
    assert lib.raw(replay) == np.full((3, 4), 7, np.int16).tobytes()


def test_moe_sort_writes_nothing_before_all_checks(lib: Any) -> None:
    """Not the first output, where the second is wrong."""
    ids = lib.make(np.zeros((3, 2), np.int32))
    maps = fi.moe_sort(ids, None, 8, 2)
    first = lib.make(np.full(tuple(maps[0].shape), 7, np.int32))
    for wrong, argument in ((np.zeros(1, np.int32), "out_tile_idx_to_mn_limit"),
                            (np.zeros(tuple(maps[1].shape), np.int64), "out_tile_idx_to_mn_limit")):
        with pytest.raises(ValueError, match=f"^{argument}: "):
            fi.moe_sort(ids, None, 8, 2, out_tile_idx_to_expert_idx=first,
                        **{argument: lib.make(wrong)})  # fmt: skip
    assert set(np.frombuffer(lib.raw(first), np.int32)) == {7}
    if isinstance(first, np.ndarray):
        ends = np.zeros(tuple(maps[1].shape), np.int32)
        ends.flags.writeable = False
        with pytest.raises(ValueError, match="^out_tile_idx_to_mn_limit: .*read-only"):
            fi.moe_sort(ids, None, 8, 2, out_tile_idx_to_expert_idx=first,
                        out_tile_idx_to_mn_limit=ends)  # fmt: skip
        assert set(first) == {7}
    with pytest.raises(ValueError, match="^num_local_experts: "):
        fi.moe_sort(ids, None, 8, 2, num_local_experts=9)
