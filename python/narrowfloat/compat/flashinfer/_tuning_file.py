"""The file of autotune(cache=...): that of `narrowfloat moe tune`, replaced at once.

Who replaces it holds a lock on the new file, and reads the old one under it: processes and threads
that end together all find their entries in the result.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from narrowfloat import _core

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    Key = tuple[Any, ...]
    Entry = dict[str, Any]

KEY = ("machine", "version", "mode", "activation", "hidden", "inter", "slots", "experts",
       "local_experts")  # fmt: skip


def key_of(entry: Entry) -> Key:
    """The subject of an entry, without the numbers of tokens."""
    return tuple(entry[name] for name in KEY)


def overlap(one: Entry, other: Entry) -> bool:
    """Whether both are about some of the same numbers of tokens."""
    return (one["first_tokens"] <= other["last_tokens"]
            and other["first_tokens"] <= one["last_tokens"])  # fmt: skip


def text_of(entries: Sequence[Entry]) -> str:
    """A file's contents."""
    return json.dumps({"format": "narrowfloat moe tuning", "format_version": 2,
                       "entries": list(entries)})  # fmt: skip


def read(path: str) -> list[Entry]:
    """Entries of a file."""
    return json.loads(_core.load_tuning(path))["entries"]


def _merged(weaker: Sequence[Entry], stronger: Sequence[Entry]) -> list[Entry]:
    """Both, without those of the first that are about the same as one of the second."""
    kept = [
        entry for entry in weaker
        if not any(key_of(entry) == key_of(other) and overlap(entry, other) for other in stronger)
    ]  # fmt: skip
    return [*kept, *stronger]


def _is_still(handle: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


@contextmanager
def _locked(path: str) -> Iterator[int]:
    """A descriptor of the file `path`, made if needed, that nobody else has at the same time."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            if not _is_still(handle, path):
                continue  # The holder before has moved the file away.
            try:
                yield handle
            finally:
                if _is_still(handle, path):
                    os.unlink(path)
            return
        finally:
            os.close(handle)


def save(path: str, known: Sequence[Entry], measured: Sequence[Entry]) -> None:
    """Adds entries to the file: in place of what it has where they were measured now."""
    path = os.path.realpath(path)
    partial = path + ".partial"
    with _locked(partial) as handle:
        exists = os.path.exists(path)
        old = read(path) if exists else []
        entries = old
        for entry in known:
            entries = _merged([entry], entries)
        for entry in measured:
            entries = _merged(entries, [entry])
        if all(entry in old for entry in entries):
            return
        os.truncate(handle, 0)
        with os.fdopen(os.dup(handle), "w") as file:
            file.write(_core.normalized_tuning(text_of(entries)))
        if exists:
            os.fchmod(handle, stat.S_IMODE(os.stat(path).st_mode))
        os.replace(partial, path)
