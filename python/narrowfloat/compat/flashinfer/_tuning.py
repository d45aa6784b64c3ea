"""FlashInfer's autotune(): token tiles are measured inside of it, kept, and used everywhere.

A call inside measures the tiles for its number of tokens, with its own inputs, once for each bucket
of such numbers. What is faster than the rule's tile serves all later calls of this process, and
goes into the file. On a GPU some modes round otherwise with other tiles (docs/moe.md 1.5).
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
from bisect import bisect_left, bisect_right
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import narrowfloat as nf
from narrowfloat import _core
from narrowfloat.compat.flashinfer._measure import fastest_tile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Key = tuple[Any, ...]
    Entry = dict[str, Any]

KEY = ("machine", "version", "mode", "hidden", "inter", "slots", "experts", "local_experts")
_LARGEST = 2**31 - 1  # Number of tokens in a file.


def default_buckets() -> list[int]:
    """Powers of two to 256, steps of 256 to 2048, of 512 to 4096, powers of two beyond."""
    return [2**i for i in range(9)] + list(range(512, 2049, 256)) + list(
        range(2560, 4097, 512)) + [2**i for i in range(13, 31)]  # fmt: skip


@dataclass
class Session:
    """One autotune() of a thread."""

    buckets: Sequence[int]
    rounds_up: bool
    skipped: frozenset[str]
    measured: list[Entry] = field(default_factory=list)

    def range_of(self, tokens: int) -> tuple[int, int]:
        """The numbers of tokens of a bucket, first and last."""
        at = self.buckets
        if self.rounds_up:
            place = min(bisect_left(at, tokens), len(at) - 1)
            is_last = place == len(at) - 1
            return at[place - 1] + 1 if place else 1, _LARGEST if is_last else at[place]
        place = max(bisect_right(at, tokens) - 1, 0)
        return at[place] if place else 1, at[place + 1] - 1 if place + 1 < len(at) else _LARGEST


_session: ContextVar[Session | None] = ContextVar("autotune", default=None)
_lock = threading.RLock()
_entries: dict[Key, tuple[Entry, ...]] = {}
_measured: set[tuple[Key, int]] = set()  # Last number of tokens of a range without a faster tile.
_tuned: WeakKeyDictionary[nf.MoeLayer, tuple[tuple[Entry, ...], nf.MoeLayer]] = WeakKeyDictionary()
_keys: WeakKeyDictionary[nf.MoeLayer, Key] = WeakKeyDictionary()


def clear_tuning() -> None:
    """Forgets all tiles."""
    with _lock:
        _entries.clear()
        _measured.clear()
        _tuned.clear()


def _key_of(layer: nf.MoeLayer) -> Key:
    key = _keys.get(layer)
    if key is None:
        found = layer._tuning_key()
        key = _keys[layer] = tuple(found[name] for name in KEY)
    return key


def _key(entry: Entry) -> Key:
    return tuple(entry[name] for name in KEY)


def _add(entries: Sequence[Entry], to: dict[Key, tuple[Entry, ...]]) -> None:
    """Puts entries in, in place of those about the same numbers of tokens."""
    for entry in entries:
        others = tuple(
            other for other in to.get(_key(entry), ())
            if other["last_tokens"] < entry["first_tokens"]
            or entry["last_tokens"] < other["first_tokens"]
        )  # fmt: skip
        to[_key(entry)] = (*others, entry)


def _text(entries: Sequence[Entry]) -> str:
    return json.dumps({"format": "narrowfloat moe tuning", "format_version": 1,
                       "entries": list(entries)})  # fmt: skip


def _read(path: str) -> list[Entry]:
    return json.loads(_core.load_tuning(path))["entries"]


def _save(path: str, measured: Sequence[Entry]) -> None:
    """Replaces the file at once by what it has now and what was measured."""
    merged: dict[Key, tuple[Entry, ...]] = {}
    if os.path.exists(path):
        _add(_read(path), merged)
    _add(measured, merged)
    text = _core.normalized_tuning(_text([entry for group in merged.values() for entry in group]))
    folder = os.path.dirname(os.path.abspath(path))
    handle, name = tempfile.mkstemp(prefix=os.path.basename(path) + ".", suffix=".partial",
                                    dir=folder)  # fmt: skip
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _covers(entry: Entry, tokens: int) -> bool:
    return entry["first_tokens"] <= tokens <= entry["last_tokens"]


def _range_for(session: Session, key: Key, tokens: int) -> tuple[int, int]:
    """Of a bucket, the numbers of tokens with the same rule that no entry is about."""
    facts = dict(zip(KEY, key, strict=True))

    def rule(count: int) -> int:
        return nf.default_token_tile(count, slots=facts["slots"],
                                     local_experts=facts["local_experts"])  # fmt: skip

    first, last = session.range_of(tokens)
    last = max(tokens, min(last, _LARGEST // facts["slots"]))
    for entry in _entries.get(key, ()):
        if entry["last_tokens"] < tokens:
            first = max(first, entry["last_tokens"] + 1)
        if entry["first_tokens"] > tokens:
            last = min(last, entry["first_tokens"] - 1)
    tile = rule(tokens)
    first += bisect_left(range(first, tokens), tile, key=rule)
    last = tokens + bisect_right(range(tokens + 1, last + 1), tile, key=rule)
    return first, last


def _measure(session: Session, key: Key, layer: nf.MoeLayer, tokens: int,
             runs: Callable[[nf.MoeLayer], Callable[[], Any]]) -> None:  # fmt: skip
    with _lock:
        if tokens < 1 or layer.config.token_tile is not None:
            return
        if any(_covers(entry, tokens) for entry in _entries.get(key, ())):
            return
        first, last = _range_for(session, key, tokens)
        if (key, last) in _measured:
            return
        _measured.add((key, last))
        facts = dict(zip(KEY, key, strict=True))

        def with_tile(tile: int) -> nf.MoeLayer:
            return layer._with_tuning_text(_text([{
                **facts, "first_tokens": tokens, "last_tokens": tokens, "token_tile": tile,
                "rule_tile": tile, "us": 1.0, "rule_us": 2.0,
            }]))  # fmt: skip

        found = fastest_tile(layer.token_tile(tokens), layer, with_tile, runs)
        if found is not None:
            entry = {**facts, "first_tokens": first, "last_tokens": last, **found}
            _add([entry], _entries)
            session.measured.append(entry)


def layer_for(op: str, layer: nf.MoeLayer, tokens: int,
              runs: Callable[[nf.MoeLayer], Callable[[], Any]]) -> nf.MoeLayer:  # fmt: skip
    """The layer with the tiles that are known for it; inside autotune() they are measured first.

    runs: makes what runs the call's inputs through a layer.
    """
    session = _session.get()
    if session is None and not _entries:
        return layer
    key = _key_of(layer)
    if session is not None and op not in session.skipped:
        _measure(session, key, layer, tokens, runs)
    entries = _entries.get(key)
    if not entries:
        return layer
    known = _tuned.get(layer)
    if known is None or known[0] is not entries:
        known = _tuned[layer] = (entries, layer._with_tuning_text(_text(entries)))
    return known[1]


@contextmanager
def autotune(
    tune_mode: bool = True,
    cache: str | os.PathLike[str] | None = None,
    tuning_buckets: Sequence[int] | None = None,
    round_up: bool | None = None,
    skip_ops: Sequence[str] | None = None,
) -> Iterator[None]:
    """Measures in calls of this thread (or asyncio task) inside, unless tune_mode is false.

    cache: a file as of `narrowfloat moe tune`. Its entries are known from here on; what is measured
        is added to it at the end, and a missing one is made. Without it: for this process alone.
    tuning_buckets: numbers of tokens; one up to the next larger of them shares its tile, with
        round_up=False from the next smaller one.
    skip_ops: names of functions that do not measure.
    """
    if tuning_buckets is not None and len(tuning_buckets) == 0:
        raise ValueError("tuning_buckets: expected at least one")
    buckets = default_buckets() if tuning_buckets is None else sorted(map(int, tuning_buckets))
    if buckets[0] < 1:
        raise ValueError(f"tuning_buckets: expected numbers from 1 on, got {buckets[0]}")
    path = None if cache is None else os.fspath(cache)
    if path is not None and (not tune_mode or os.path.exists(path)):
        with _lock:
            _add(_read(path), _entries)
    names = frozenset(name.rpartition("::")[2] for name in skip_ops or ())
    session = Session(buckets, round_up is not False, names)
    token = _session.set(session if tune_mode else None)
    try:
        yield
    finally:
        _session.reset(token)
        if path is not None and session.measured:
            _save(path, session.measured)
