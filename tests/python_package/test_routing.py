"""route() and permute() with all ten methods, against the golden cases of an independent model."""

from __future__ import annotations

import numpy as np
import pytest
from moe_cases import File, router_options

import narrowfloat as nf

CASES = File("routing")


def test_golden_routing() -> None:
    """Ids and maps exactly, weights within the model's tolerance; all methods occur."""
    methods, permuted = set(), 0
    for number, case in enumerate(CASES.cases):
        options = router_options(case["router"])
        methods.add(options["method"])
        arrays = {name: CASES.get(f"{number}.{name}")
                  for name in ("logits", "bias", "packed", "ids", "weights")}  # fmt: skip
        ids, weights = nf.route(**arrays, **options)
        expect = case["expect"]
        assert ids.reshape(-1).tolist() == expect["topk_ids"], case
        wanted, tolerance = CASES.get(f"{number}.expert_weights")
        same = (np.isnan(wanted) & np.isnan(weights)) | (wanted == weights)
        with np.errstate(invalid="ignore"):
            assert (same | (np.abs(weights - wanted) <= tolerance)).all(), case
        if "local_experts" not in case:
            continue
        permuted += 1
        maps = nf.permute(ids, local_experts=case["local_experts"], token_tile=case["token_tile"],
                          expert_offset=case["expert_offset"])  # fmt: skip
        rows, tiles = int(maps.num_rows[0]), int(maps.num_tiles[0])
        assert rows == expect["num_rows"] == tiles * maps.token_tile
        for name, used in (("slot_to_row", None), ("row_to_token", rows), ("row_to_slot", rows),
                           ("tile_to_expert", tiles), ("tile_row_end", tiles)):  # fmt: skip
            assert getattr(maps, name)[:used].tolist() == expect[name], (name, case)
        assert len(maps.tile_to_expert) == expect["max_tiles"]
        assert (maps.row_to_token[rows:] == -1).all() and (maps.tile_row_end[tiles:] == 0).all()
    assert methods == set(nf.routing_methods()) and permuted > 30


def test_outputs_and_replay() -> None:
    """Into given arrays, and the routed ids once more as int16."""
    logits = np.random.default_rng(1).standard_normal((5, 8)).astype(np.float32)
    out = np.empty((5, 3), np.int32), np.empty((5, 3), np.float32)
    replay = np.full((7, 3), 99, np.int16)
    assert nf.route(logits, top_k=3, out=out, replay=replay) is out
    assert (replay[:5] == out[0]).all() and (replay[5:] == 99).all()
    fresh = nf.route(logits, top_k=3)
    assert fresh[0].tobytes() == out[0].tobytes() and fresh[1].tobytes() == out[1].tobytes()


def test_given_maps() -> None:
    """Written again, with their own tile."""
    ids = np.array([[0, 3], [2, 0], [1, 3]], np.int32)
    maps = nf.permute(ids, local_experts=4, token_tile=16)
    given = nf.Permutation(16, *(np.full_like(getattr(maps, name), 7) for name in
                                 ("slot_to_row", "row_to_token", "row_to_slot", "num_rows",
                                  "tile_to_expert", "tile_row_end", "num_tiles")))  # fmt: skip
    assert nf.permute(ids, local_experts=4, out=given) is given
    for name in ("slot_to_row", "row_to_token", "row_to_slot", "num_rows", "tile_to_expert"):
        assert (getattr(given, name) == getattr(maps, name)).all(), name
    with pytest.raises(ValueError, match="token_tile: 8"):
        nf.permute(ids, local_experts=4, token_tile=8, out=given)
    with pytest.raises(ValueError, match="row_to_token"):
        nf.permute(ids, local_experts=64, out=given)


def test_default_tile() -> None:
    """permute() without a tile takes the library's."""
    ids = np.zeros((40, 2), np.int32)
    assert nf.permute(ids, local_experts=4).token_tile == nf.default_token_tile(40, 2, 4)
