"""FlashInfer's autotune(): token tiles are measured inside of it, kept, and used everywhere.

A call inside measures the tiles for its number of tokens and for the smaller buckets of such
numbers, with its own inputs, each bucket once. What is faster than the rule's tile serves all later
calls of this process, and goes into the file. On a GPU some modes round otherwise with other tiles
(docs/moe.md 1.5).
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import narrowfloat as nf
from narrowfloat.compat.flashinfer._measure import FAILURES, check_not_capturing, fastest_tile
from narrowfloat.compat.flashinfer._tuning_file import KEY, key_of, overlap, read, save, text_of

Key = tuple[Any, ...]
Entry = dict[str, Any]
# A function that runs the first n rows of a call through each of some layers.
Runs = Callable[[int, Sequence[nf.MoeLayer]], Sequence[Callable[[], Any]]]

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
    used: dict[Key, None] = field(default_factory=dict)  # Keys, in the order of their calls.
    tried: set[tuple[Key, int]] = field(default_factory=set)  # With a number of tokens.

    def range_of(self, tokens: int) -> tuple[int, int]:
        """The numbers of tokens of a bucket, first and last."""
        at = self.buckets
        if self.rounds_up:
            place = min(bisect_left(at, tokens), len(at) - 1)
            is_last = place == len(at) - 1
            return at[place - 1] + 1 if place else 1, _LARGEST if is_last else at[place]
        place = max(bisect_right(at, tokens) - 1, 0)
        return at[place] if place else 1, at[place + 1] - 1 if place + 1 < len(at) else _LARGEST

    def up_to(self, tokens: int) -> list[int]:
        """A number of tokens of each bucket that begins at `tokens` or before, this one first."""
        first, _ = self.range_of(tokens)
        return [tokens, *(bucket for bucket in self.buckets if bucket < first)]


_session: ContextVar[Session | None] = ContextVar("autotune", default=None)
_lock = threading.RLock()
_entries: dict[Key, tuple[Entry, ...]] = {}
# Ranges in which the rule's tile was the fastest.
_settled: dict[Key, list[Entry]] = {}
_tuned: WeakKeyDictionary[nf.MoeLayer, tuple[tuple[Entry, ...], nf.MoeLayer]] = WeakKeyDictionary()
_keys: WeakKeyDictionary[nf.MoeLayer, Key] = WeakKeyDictionary()


def clear_tuning() -> None:
    """Forgets all tiles."""
    with _lock:
        _entries.clear()
        _settled.clear()
        _tuned.clear()


def _key_of(layer: nf.MoeLayer) -> Key:
    key = _keys.get(layer)
    if key is None:
        found = layer._tuning_key()
        key = _keys[layer] = tuple(found[name] for name in KEY)
    return key


def _add(entries: Sequence[Entry]) -> None:
    """Puts entries in, in place of those about the same numbers of tokens."""
    for entry in entries:
        key = key_of(entry)
        others = (other for other in _entries.get(key, ()) if not overlap(other, entry))
        _entries[key] = (*others, entry)


def _covers(entry: Entry, tokens: int) -> bool:
    return entry["first_tokens"] <= tokens <= entry["last_tokens"]


def _range_for(session: Session, key: Key, tokens: int) -> tuple[int, int]:
    """The numbers of tokens of a bucket that have the same rule and no entry yet."""
    facts = dict(zip(KEY, key, strict=True))

    def rule(count: int) -> int:
        return nf.default_token_tile(count, slots=facts["slots"],
                                     local_experts=facts["local_experts"])  # fmt: skip

    first, last = session.range_of(tokens)
    last = max(tokens, min(last, _LARGEST // facts["slots"]))
    for entry in (*_entries.get(key, ()), *_settled.get(key, ())):
        if entry["last_tokens"] < tokens:
            first = max(first, entry["last_tokens"] + 1)
        if entry["first_tokens"] > tokens:
            last = min(last, entry["first_tokens"] - 1)
    tile = rule(tokens)
    first += bisect_left(range(first, tokens), tile, key=rule)
    last = tokens + bisect_right(range(tokens + 1, last + 1), tile, key=rule)
    return first, last


def _measure(session: Session, key: Key, layer: nf.MoeLayer, tokens: int, runs: Runs) -> None:
    """Looks for the tile of a number of tokens, unless something is known about it."""
    if (key, tokens) in session.tried:
        return
    if any(_covers(entry, tokens) for entry in (*_entries.get(key, ()), *_settled.get(key, ()))):
        return
    check_not_capturing(layer)
    session.tried.add((key, tokens))
    facts = dict(zip(KEY, key, strict=True))

    def with_tile(tile: int) -> nf.MoeLayer:
        return layer._with_tuning_text(text_of([{
            **facts, "first_tokens": tokens, "last_tokens": tokens, "token_tile": tile,
            "rule_tile": tile, "us": 1.0, "rule_us": 2.0,
        }]))  # fmt: skip

    try:
        found = fastest_tile(layer.token_tile(tokens), layer, with_tile,
                             lambda layers: runs(tokens, layers))  # fmt: skip
    except FAILURES:
        return  # The call itself goes on with the rule's tile, and says what is wrong with it.
    first, last = _range_for(session, key, tokens)
    entry = {**facts, "first_tokens": first, "last_tokens": last, **(found or {})}
    if found is None:
        _settled.setdefault(key, []).append(entry)
    else:
        _add([entry])
        session.measured.append(entry)


def layer_for(op: str, layer: nf.MoeLayer, tokens: int, runs: Runs) -> nf.MoeLayer:
    """The layer with the tiles that are known for it; inside autotune() they are measured first.

    runs: makes what runs the first rows of the call's inputs through layers.
    """
    session = _session.get()
    if session is None and not _entries:
        return layer
    key = _key_of(layer)
    if session is not None and layer.config.token_tile is None:
        with _lock:
            session.used[key] = None
            if op not in session.skipped and tokens > 0:
                for count in session.up_to(tokens):
                    _measure(session, key, layer, count, runs)
    entries = _entries.get(key, ())
    if not entries:
        return layer
    known = _tuned.get(layer)
    if known is None or known[0] != entries:
        known = _tuned[layer] = (entries, layer._with_tuning_text(text_of(entries)))
    return known[1]


def _save(path: str, session: Session) -> None:
    """Saves the measurements, and all other entries about the layers that were called."""
    with _lock:
        known = [entry for key in session.used for entry in _entries.get(key, ())]
    if known:
        save(path, known, session.measured)


@contextmanager
def autotune(
    tune_mode: bool = True,
    cache: str | os.PathLike[str] | None = None,
    tuning_buckets: Sequence[int] | None = None,
    round_up: bool | None = None,
    skip_ops: str | Collection[str] | None = None,
    cuda_graph_profile_replays: int | None = None,
) -> Iterator[None]:
    """Measures in calls of this thread (or asyncio task) inside, unless tune_mode is false.

    A call with many tokens measures for its number and for all smaller buckets.

    cache: a file as of `narrowfloat moe tune`. Its entries are known from here on. At the end it
        gets what was measured, and what else is known about the layers that were called; a missing
        one is made. Without it: for this process alone.
    tuning_buckets: numbers of tokens; one up to the next larger of them shares its tile, with
        round_up=False from the next smaller one.
    skip_ops: names of functions that do not measure; one, or several.
    cuda_graph_profile_replays: at least 1; changes nothing.
    """
    if tuning_buckets is not None and len(tuning_buckets) == 0:
        raise ValueError("tuning_buckets: expected at least one")
    buckets = default_buckets() if tuning_buckets is None else sorted(map(int, tuning_buckets))
    if buckets[0] < 1:
        raise ValueError(f"tuning_buckets: expected numbers from 1 on, got {buckets[0]}")
    path = None if cache is None else os.fspath(cache)
    if path is not None and (not tune_mode or os.path.exists(path)):
        with _lock:
            _add(read(path))
    if cuda_graph_profile_replays is not None and cuda_graph_profile_replays < 1:
        raise ValueError(
            f"cuda_graph_profile_replays: expected at least 1, got {cuda_graph_profile_replays}"
        )
    skip_ops = [skip_ops] if isinstance(skip_ops, str) else skip_ops
    names = frozenset(name.rpartition("::")[2] for name in skip_ops or ())
    session = Session(buckets, round_up is not False, names)
    token = _session.set(session if tune_mode else None)
    try:
        yield
    except BaseException:
        if path is not None and tune_mode:
            with suppress(OSError, ValueError):  # The first error is the one to report.
                _save(path, session)
        raise
    else:
        if path is not None and tune_mode:
            _save(path, session)
    finally:
        _session.reset(token)
        outer = _session.get()
        if outer is not None and tune_mode:  # Its file gets this, too.
            outer.used.update(session.used)
            outer.measured.extend(session.measured)
