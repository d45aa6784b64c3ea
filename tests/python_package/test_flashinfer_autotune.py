"""autotune() of the functions with FlashInfer's names: tiles are measured, kept, saved and read."""

from __future__ import annotations

import gc
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flashinfer_table import CLOSE, record
from test_flashinfer_moe import BF16, LIBRARIES, Data, E, H, I, K, cutlass, sizes

import narrowfloat as nf
import narrowfloat.compat.flashinfer as fi
from narrowfloat.compat.flashinfer import _measure, _tuning, _tuning_file

PLAIN = {"use_shuffled_weight": False, "weight_layout": 0}


@pytest.fixture(params=LIBRARIES, ids=lambda lib: lib.__name__)
def lib(request: pytest.FixtureRequest) -> Any:
    """Where arrays come from."""
    return request.param


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    """Before and after each test."""
    fi.clear_prepared_cache()
    _tuning.clear_tuning()
    gc.collect()
    yield
    fi.clear_prepared_cache()
    _tuning.clear_tuning()


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
    """Arguments of trtllm_bf16_moe()."""
    return Calls(lib, monkeypatch)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Times as if a tile of 16 were twice as fast as all others; a list with an item for each."""
    measured: list[int] = []
    factory = _tuning.fastest_tile

    def fastest(rule: int, layer: Any, with_tile: Any, runs: Any) -> Any:
        tiles: list[int] = []
        calls: dict[Any, int] = {}

        def labelled(tile: int) -> Any:
            tiles.append(tile)
            return with_tile(tile)

        def made(layers: Any) -> Any:
            made = runs(layers)
            calls.update(zip(made, tiles, strict=True))
            return made

        def timed(run: Any) -> float:
            measured.append(calls[run])
            return 50.0 if calls[run] == 16 else 100.0

        monkeypatch.setattr(_measure, "_time_on_cpu", timed)
        monkeypatch.setattr(_measure, "_gpu_timer", lambda device: timed)
        return factory(rule, layer, labelled, made)

    monkeypatch.setattr(_tuning, "fastest_tile", fastest)
    return measured


def entries(path: Path) -> list[dict[str, Any]]:
    """The entries of a file."""
    return json.loads(path.read_text())["entries"]


def ranges(path: Path) -> list[tuple[int, int]]:
    """Numbers of tokens that the entries of a file are about, ascending."""
    return sorted((entry["first_tokens"], entry["last_tokens"]) for entry in entries(path))


def test_measures_once_and_saves(calls: Calls, clock: list[int], tmp_path: Path) -> None:
    """Same bits; the tile serves calls after the context, too, and other processes' files."""
    path = tmp_path / "tiles.json"
    plain = calls()
    assert calls.tiles == [8]
    with fi.autotune(cache=path):
        assert calls() == plain
        first = len(clock)
        assert set(clock) == {8, 16, 32} and not path.exists()
        assert calls() == plain and len(clock) == first
    assert calls() == plain and calls.tiles[-1] == 16
    assert ranges(path) == [(1, 1), (2, 2), (3, 4), (5, 8)]  # Smaller buckets, too.
    for entry in entries(path):
        assert (entry["token_tile"], entry["rule_tile"], entry["us"]) == (16, 8, 50.0)
    fi.clear_prepared_cache()
    calls()
    assert calls.tiles[-1] == 16  # Weights say nothing about tiles.
    _tuning.clear_tuning()
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
        path.write_text(json.dumps({"format": "narrowfloat moe tuning", "format_version": 2,
                                    "entries": [*entries(path), other]}))  # fmt: skip
    found = entries(path)
    assert other in found and len(found) == 6
    assert ranges(path)[-2:] == [(5, 8), (9, 16)]
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
    (first, second) = ranges(path)
    assert first == (1, 6) and second[0] == 7
    last = second[1]

    def rule(tokens: int) -> int:
        return nf.default_token_tile(tokens, slots=K, local_experts=E)

    assert last >= 7 and rule(last) == rule(7) < rule(last + 1)  # 20 and more share a bucket.
    _tuning.clear_tuning()
    path = tmp_path / "down.json"
    with fi.autotune(cache=path, tuning_buckets=[4, 6, 8], round_up=False):
        calls(7)
    assert ranges(path) == [(1, 5), (6, 7)]


def test_default_buckets() -> None:
    """Powers of two, then multiples: each bucket once, in ascending order."""
    found = _tuning.default_buckets()
    assert found == sorted(set(found))
    for bucket in (1, 2, 256, 512, 768, 2048, 2560, 4096, 8192, 16384):
        assert bucket in found
    assert 384 not in found and 2304 not in found and 5120 not in found


def test_routed_functions_have_names(calls: Calls, clock: list[int]) -> None:
    """skip_ops tells them from those that route."""
    ids = calls.lib.make(np.resize(np.arange(K, dtype=np.int32), (5, K)))
    weights = calls.lib.make(np.ones((5, K), BF16))
    x = calls.lib.make(calls.data.x)
    options = sizes()
    options.pop("routing_method_type", None)

    def routed() -> None:
        fi.trtllm_bf16_routed_moe((ids, weights), x, *calls.arguments, **options, **PLAIN)

    with fi.autotune(skip_ops=["trtllm_bf16_routed_moe"]):
        routed()
        assert clock == []
    with fi.autotune(skip_ops=["trtllm_bf16_moe"]):
        routed()
        assert clock


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
    assert len(asked) == 4 and not (tmp_path / "tiles.json").exists() and set(calls.tiles) == {8}
    with fi.autotune(tuning_buckets=[2, 9], round_up=False):  # All of 2 to 8 is known but 5 to 8.
        calls(3)
        assert len(asked) == 4
    (settled,) = _tuning._settled.values()
    settled[:] = [one for one in settled if one["last_tokens"] == 8]
    with fi.autotune(tuning_buckets=[2, 9], round_up=False):
        calls(3)  # A range with the same end.
    assert len(asked) == 5 and settled[-1]["last_tokens"] == 4


def test_ranges_end_where_something_is_known(calls: Calls, clock: list[int],
                                             tmp_path: Path) -> None:  # fmt: skip
    """Entries split buckets, and so do numbers of tokens where the rule's tile was best."""
    path = tmp_path / "tiles.json"
    with fi.autotune(cache=path, tuning_buckets=[3, 4], round_up=False):
        calls(4)
    assert ranges(path)[0] == (1, 3)
    group = [entry for entry in entries(path) if entry["last_tokens"] == 3]
    _tuning.clear_tuning()
    _tuning._add(group)
    with fi.autotune(cache=tmp_path / "other.json", tuning_buckets=[6, 20]):
        calls(5)
    assert ranges(tmp_path / "other.json") == [(1, 3), (4, 6)]
    _tuning.clear_tuning()
    session = _tuning.Session([6, 20], True, frozenset())
    key = _tuning_file.key_of(group[0])
    _tuning._settled[key] = [{**group[0], "first_tokens": 2, "last_tokens": 3}]
    assert _tuning._range_for(session, key, 4) == (4, 6)
    assert _tuning._range_for(session, key, 1) == (1, 1)


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
    record("autotune", CLOSE,
           "chooses token tiles ([moe.md 1.5](moe.md)); files are ours, not upstream's",
           "that of the layers")


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


def test_failures(calls: Calls, clock: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile that fails is left out; without memory the call goes on, and is measured later."""
    run, fast, failing = nf.MoeLayer.run, _tuning.fastest_tile, [16]

    def refusing(layer: nf.MoeLayer, hidden: Any, *args: Any, **how: Any) -> Any:
        if layer.token_tile(hidden.shape[0]) in failing:
            raise RuntimeError("refused")
        return run(layer, hidden, *args, **how)

    def without_memory(*args: Any) -> Any:
        raise MemoryError

    plain = calls()
    monkeypatch.setattr(nf.MoeLayer, "run", refusing)
    with fi.autotune():
        assert calls() == plain
    assert set(clock) == {8, 32} and calls.tiles[-1] == 8
    _tuning.clear_tuning()
    clock.clear()
    monkeypatch.setattr(_tuning, "fastest_tile", without_memory)
    with fi.autotune():
        assert calls() == plain
    monkeypatch.setattr(_tuning, "fastest_tile", fast)
    failing[:] = []
    with fi.autotune():
        assert calls() == plain and clock
    failing[:] = [8, 16, 32]
    with pytest.raises(RuntimeError, match="refused"), fi.autotune():
        calls(9)


def test_a_capture_is_refused_each_time(calls: Calls, clock: list[int],
                                        monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """And does not count as measured."""
    plain = calls()
    with monkeypatch.context() as capturing:
        capturing.setattr(_measure, "_is_on_gpu", lambda layer: True)
        capturing.setattr(_measure, "is_capturing", lambda device: True)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="captured"), fi.autotune():
                calls()
    with fi.autotune():
        assert calls() == plain and clock
        count = len(clock)
        calls(2)  # Known by now: may be captured.
        assert len(clock) == count


def test_one_workspace_for_all_tiles(calls: Calls, clock: list[int],
                                     monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Measuring a number of tokens needs the memory of its largest tile once."""
    made: list[int] = []
    new = nf.MoeLayer.new_workspace

    def counted(layer: nf.MoeLayer, tokens: int) -> Any:
        made.append(tokens)
        return new(layer, tokens)

    calls()
    monkeypatch.setattr(nf.MoeLayer, "new_workspace", counted)
    with fi.autotune(tuning_buckets=[8]):
        calls()
    assert made == [5, 5]  # One run for the tiles, one for the call.


def test_what_was_known_is_saved(calls: Calls, clock: list[int], tmp_path: Path) -> None:
    """The file gets all entries of layers that were called, from wherever they are known."""
    with fi.autotune():
        calls()
    count, path = len(clock), tmp_path / "tiles.json"
    with fi.autotune(cache=path):
        pass
    assert not path.exists()
    with fi.autotune(cache=path):
        calls()
    assert ranges(path)[-1] == (5, 8) and len(clock) == count
    stored = [{**entry, "us": 25.0} for entry in entries(path)]
    with fi.autotune(cache=path):
        calls()
        path.write_text(_tuning.text_of(stored))
    assert entries(path) == stored  # Entries of others are newer.


def test_contexts_inside_of_contexts(calls: Calls, clock: list[int], tmp_path: Path) -> None:
    """Each file gets what was measured within; tune_mode=False inside measures nothing."""
    path, inner = tmp_path / "tiles.json", tmp_path / "inner.json"
    with fi.autotune(cache=path):
        with fi.autotune(False):
            calls(1)
        assert clock == []
        with fi.autotune(cache=inner):
            calls(2)
        with fi.autotune():
            calls(9)
    assert ranges(inner) == [(1, 1), (2, 2)]
    assert ranges(path) == [(1, 1), (2, 2), (3, 4), (5, 8), (9, 16)]


def test_threads(calls: Calls, clock: list[int], tmp_path: Path) -> None:
    """Each with a context of its own: same bits, one measurement, one file; nothing piles up."""
    path, results = tmp_path / "tiles.json", []
    plain = calls()

    def call() -> None:
        for _ in range(50):
            with fi.autotune(cache=path):
                results.append(calls())

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 200 and set(results) == {plain}
    assert len(clock) == 4 * 5 * 3  # Buckets, rounds, tiles.
    assert ranges(path) == [(1, 1), (2, 2), (3, 4), (5, 8)]
    maps = (_tuning._entries, _tuning._settled)
    assert [sum(map(len, one.values())) for one in maps] == [4, 0]


def test_activations_have_tiles_of_their_own(calls: Calls, clock: list[int],
                                             tmp_path: Path) -> None:  # fmt: skip
    """The tile that one of them measured serves no other, nor does a file's entry about it."""
    data = Data("bf16", "relu2")
    weights = calls.lib.make(data.w1), calls.lib.make(data.w2)
    x, logits = calls.lib.make(data.x), calls.lib.make(data.logits)

    def other() -> None:
        fi.trtllm_bf16_moe(logits, None, x, *weights, **sizes(), **PLAIN,
                           activation_type=fi.ActivationType.Relu2)  # fmt: skip

    with fi.autotune():
        calls()
    count = len(clock)
    other()
    assert calls.tiles[-1] == 8
    path = tmp_path / "tiles.json"
    with fi.autotune(cache=path):
        other()
    assert len(clock) == 2 * count and calls.tiles[-1] == 16
    assert {entry["activation"] for entry in entries(path)} == {"relu2"}
    _tuning.clear_tuning()
    with fi.autotune(False, cache=path):
        calls()
        assert calls.tiles[-1] == 8
        other()
        assert calls.tiles[-1] == 16
    with fi.autotune(cache=path):
        calls()
    assert len(clock) == 3 * count and calls.tiles[-1] == 16
    assert {entry["activation"] for entry in entries(path)} == {"relu2", "swiglu"}


def test_files_without_activations(calls: Calls, tmp_path: Path) -> None:
    """Those of the first form are refused, and stay as they are."""
    path = tmp_path / "tiles.json"
    path.write_text('{"format": "narrowfloat moe tuning", "format_version": 1, "entries": []}')
    before = path.read_text()
    with pytest.raises(ValueError, match="activation"), fi.autotune(cache=path):
        calls()
    assert path.read_text() == before and calls.tiles == []


def test_files_that_many_write(tmp_path: Path) -> None:
    """Nobody's entries are lost; the file's mode stays, a new one's is the umask's."""
    path = tmp_path / "tiles.json"
    layer = nf.MoeConfig(hidden=H, inter=I, experts=E, top_k=K)
    entry = {"machine": "m", "version": "1", "mode": layer.mode,
             "activation": "silu", "hidden": H, "inter": I,
             "slots": K, "experts": E, "local_experts": E, "token_tile": 16, "rule_tile": 8,
             "us": 1.0, "rule_us": 2.0}  # fmt: skip

    def write(place: int) -> None:
        for count in range(place, 200, 10):
            mine = {**entry, "first_tokens": count + 1, "last_tokens": count + 1}
            _tuning_file.save(str(path), [], [mine])

    before = os.umask(0o027)
    try:
        threads = [threading.Thread(target=write, args=(place,)) for place in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        os.umask(before)
    assert ranges(path) == [(count, count) for count in range(1, 201)]
    assert path.stat().st_mode & 0o777 == 0o640
    path.chmod(0o664)
    link = tmp_path / "link.json"
    link.symlink_to(path)
    _tuning_file.save(str(link), [], [{**entry, "first_tokens": 300, "last_tokens": 300}])
    assert link.is_symlink() and len(entries(path)) == 201
    assert path.stat().st_mode & 0o777 == 0o664
    path.write_text("{")
    with pytest.raises(ValueError, match="JSON|json|tuning"):
        _tuning_file.save(str(path), [], [{**entry, "first_tokens": 1, "last_tokens": 1}])
    assert path.read_text() == "{"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.json", "tiles.json"]


def test_an_error_inside_comes_out(calls: Calls, clock: list[int], tmp_path: Path) -> None:
    """Whatever happens to the file, which gets what was measured before."""
    path = tmp_path / "tiles.json"
    for contents in (None, "{"):
        with pytest.raises(KeyError, match="mine"), fi.autotune(cache=path):  # noqa: PT012
            calls()
            if contents:
                path.write_text(contents)
            raise KeyError("mine")
    assert path.read_text() == "{"
    path.unlink()
    with pytest.raises(KeyError), fi.autotune(cache=path):
        calls()
        raise KeyError
    assert ranges(path)[-1] == (5, 8)


def test_tiles_go_with_the_layers(calls: Calls, clock: list[int]) -> None:
    """Nothing that autotune() keeps holds weights."""
    with fi.autotune():
        calls()
    assert len(_tuning._tuned) == 1
    calls.arguments = calls.data = None
    gc.collect()
    assert fi.prepared_cache_size() == 0 and len(_tuning._tuned) == 0 and len(_tuning._keys) == 0
