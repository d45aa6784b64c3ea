"""autotune() of the functions with FlashInfer's names: tiles are measured, kept, saved and read."""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flashinfer_table import CLOSE, record
from test_flashinfer_moe import E, H, I, K, LIBRARIES, Data, cutlass, sizes

import narrowfloat as nf
import narrowfloat.compat.flashinfer as fi
from narrowfloat.compat.flashinfer import _measure, _tuning

PLAIN = {"use_shuffled_weight": False, "weight_layout": 0}


@pytest.fixture(params=LIBRARIES, ids=lambda lib: lib.__name__)
def lib(request: pytest.FixtureRequest) -> Any:
    """Where arrays come from."""
    return request.param


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    """Before and behind each test."""
    fi.clear_prepared_cache()
    gc.collect()
    yield
    fi.clear_prepared_cache()


class Calls:
    """A layer's arguments, and the tiles of the runs that calls made last."""

    def __init__(self, lib: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lib, self.data, self.tiles = lib, Data("bf16"), []
        self.arguments = (lib.make(self.data.w1), lib.make(self.data.w2))
        run = nf.MoeLayer.run

        def spied(layer: nf.MoeLayer, hidden: Any, *args: Any, **how: Any) -> Any:
            self.tiles.append(layer.token_tile(hidden.shape[0]))
            return run(layer, hidden, *args, **how)

        monkeypatch.setattr(nf.MoeLayer, "run", spied)

    def __call__(self, tokens: int = 5) -> bytes:
        x = self.lib.make(np.resize(self.data.x, (tokens, H)))
        logits = self.lib.make(np.resize(self.data.logits, (tokens, E)))
        out = fi.trtllm_bf16_moe(logits, None, x, *self.arguments, **sizes(), **PLAIN)
        return self.lib.raw(out)


@pytest.fixture
def calls(lib: Any, monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Of trtllm_bf16_moe()."""
    return Calls(lib, monkeypatch)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Times as if a tile of 16 were twice as fast as all others; a list with an item for each."""
    measured: list[int] = []
    factory = _tuning.fastest_tile

    def fastest(rule: int, layer: Any, with_tile: Any, runs: Any) -> Any:
        tiles: dict[Any, int] = {}

        def labelled(tile: int) -> Any:
            tuned = with_tile(tile)
            tiles[tuned] = tile
            return tuned

        def made(tuned: Any) -> Any:
            call = runs(tuned)
            call.tile = tiles[tuned]
            return call

        def timed(run: Any) -> float:
            measured.append(run.tile)
            return 50.0 if run.tile == 16 else 100.0

        monkeypatch.setattr(_measure, "_time_on_cpu", timed)
        monkeypatch.setattr(_measure, "_gpu_timer", lambda device: timed)
        return factory(rule, layer, labelled, made)

    monkeypatch.setattr(_tuning, "fastest_tile", fastest)
    return measured


def entries(path: Path) -> list[dict[str, Any]]:
    """Of a file."""
    return json.loads(path.read_text())["entries"]


def test_measures_once_and_saves(calls: Calls, clock: list[int], tmp_path: Path) -> None:
    """Same bits; the tile serves calls behind the context, too, and other processes' files."""
    path = tmp_path / "tiles.json"
    plain = calls()
    assert calls.tiles == [8]
    with fi.autotune(cache=path):
        assert calls() == plain
        first = len(clock)
        assert set(clock) == {8, 16, 32} and not path.exists()
        assert calls() == plain and len(clock) == first
    assert calls() == plain and calls.tiles[-1] == 16
    (entry,) = entries(path)
    assert (entry["first_tokens"], entry["last_tokens"]) == (5, 8)
    assert (entry["token_tile"], entry["rule_tile"], entry["us"]) == (16, 8, 50.0)
    fi.clear_prepared_cache()
    calls()
    assert calls.tiles[-1] == 8
    with fi.autotune(False, cache=path):
        calls()
    assert calls.tiles[-1] == 16 and len(clock) == first
    assert fi.prepared_cache_size() == 1


def test_files_are_merged(calls: Calls, clock: list[int], tmp_path: Path) -> None:
    """Entries about other machines and numbers of tokens stay, whoever wrote them meanwhile."""
    path = tmp_path / "tiles.json"
    with fi.autotune(cache=path):
        calls(3)
    other = {**entries(path)[0], "machine": "another"}
    with fi.autotune(cache=path):
        calls(9)
        path.write_text(json.dumps({"format": "narrowfloat moe tuning", "format_version": 1,
                                    "entries": [*entries(path), other]}))  # fmt: skip
    found = entries(path)
    assert other in found and len(found) == 3
    assert sorted(e["last_tokens"] for e in found) == [4, 4, 16]
    assert [p.name for p in tmp_path.iterdir()] == ["tiles.json"]
    before = path.read_text()
    count = len(clock)
    with fi.autotune(cache=path):
        calls(3)
        calls(12)
    assert path.read_text() == before and len(clock) == count


def test_buckets(calls: Calls, clock: list[int], tmp_path: Path) -> None:
    """Those of the caller, up and down; the range ends where the rule changes."""
    path = tmp_path / "up.json"
    with fi.autotune(cache=path, tuning_buckets=[20, 6]):
        calls(4)
        calls(7)
    ranges = sorted((e["first_tokens"], e["last_tokens"]) for e in entries(path))
    assert ranges[0] == (1, 6) and ranges[1][0] == 7
    last = ranges[1][1]

    def rule(tokens: int) -> int:
        return nf.default_token_tile(tokens, slots=K, local_experts=E)

    assert last >= 7 and rule(last) == rule(7) < rule(last + 1)  # 20 and more share a bucket.
    fi.clear_prepared_cache()
    path = tmp_path / "down.json"
    with fi.autotune(cache=path, tuning_buckets=[4, 6, 8], round_up=False):
        calls(7)
    assert [(e["first_tokens"], e["last_tokens"]) for e in entries(path)] == [(6, 7)]


def test_default_buckets() -> None:
    """As the specification lists them (moe spec 10.1)."""
    found = _tuning.default_buckets()
    assert found == sorted(set(found))
    for bucket in (1, 2, 256, 512, 768, 2048, 2560, 4096, 8192, 16384):
        assert bucket in found
    assert 384 not in found and 2304 not in found and 5120 not in found


def test_what_does_not_measure(calls: Calls, clock: list[int], tmp_path: Path) -> None:
    """tune_mode=False, skip_ops, other threads; they take what is known."""
    with fi.autotune(False):
        calls()
    with fi.autotune(skip_ops=["flashinfer::trtllm_bf16_moe"]):
        calls()
    with fi.autotune():
        thread = threading.Thread(target=calls)
        thread.start()
        thread.join()
        assert clock == [] and calls.tiles == [8, 8, 8]
        calls()
    thread = threading.Thread(target=calls)
    thread.start()
    thread.join()
    assert calls.tiles[-1] == 16 and clock


def test_the_slower_tiles_are_not_saved(calls: Calls, tmp_path: Path,
                                        monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """No file, and no second measurement."""
    asked: list[int] = []
    monkeypatch.setattr(_tuning, "fastest_tile", lambda *args: asked.append(0))
    for _ in range(2):
        with fi.autotune(cache=tmp_path / "tiles.json"):
            calls()
    assert len(asked) == 1 and not (tmp_path / "tiles.json").exists() and set(calls.tiles) == {8}


def test_real_times(calls: Calls, lib: Any, tmp_path: Path) -> None:
    """Whatever this machine finds: same bits, a file that can be read, cutlass_fused_moe() too."""
    path = tmp_path / "tiles.json"
    plain = calls(), calls(40)
    with fi.autotune(cache=path):
        assert (calls(), calls(40)) == plain
        data = calls.data
        arguments = (lib, data, lib.make(data.x), *calls.arguments, [])
        assert lib.raw(cutlass(*arguments)) == plain[0]
    with fi.autotune(cache=path):
        assert (calls(), calls(40)) == plain
    # A workspace that was measured out for the rule's tiles still does.
    size = fi.cutlass_fused_moe_workspace_size(5, H, I, E, K, x_dtype="bfloat16",
                                               weight_dtype="bfloat16")  # fmt: skip
    space = lib.make(np.zeros(size + 256, np.uint8))
    assert lib.raw(cutlass(*arguments, workspace_buffer=space)) == plain[0]
    record("autotune", CLOSE, "chooses token tiles (moe.md 1.5); files are ours, not upstream's")


def test_errors(calls: Calls, tmp_path: Path) -> None:
    """Damaged files, missing ones that nothing is measured for, no buckets."""
    torn = tmp_path / "torn.json"
    torn.write_text("{")
    with pytest.raises(ValueError, match="JSON|json|tuning"), fi.autotune(cache=torn):
        calls()
    with pytest.raises(OSError, match="absent"), fi.autotune(False, cache=tmp_path / "absent"):
        calls()
    for wrong in ([], [0, 8]):
        with pytest.raises(ValueError, match="tuning_buckets"), fi.autotune(tuning_buckets=wrong):
            calls()
    assert calls.tiles == []


def test_tiles_go_with_the_layers(calls: Calls, clock: list[int]) -> None:
    """Nothing that autotune() keeps holds weights."""
    with fi.autotune():
        calls()
    assert len(_tuning._tuned) == 1
    calls.arguments = calls.data = None
    gc.collect()
    assert fi.prepared_cache_size() == 0 and len(_tuning._tuned) == 0 and len(_tuning._keys) == 0
