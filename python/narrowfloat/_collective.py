"""The base of objects whose memory several ranks share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import NoReturn, Self


class Collective(ABC):
    """An object of one rank that is destroyed on all ranks together.

    With `with`, destroy() is called at its end unless there is an exception: after one the other
    ranks may never call it.
    """

    __slots__ = ()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__}: memory that the ranks share cannot be copied or pickled; "
            "create one in each process"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        if kind is None:
            self.destroy()

    @abstractmethod
    def destroy(self) -> None:
        """Collective: waits for all ranks, then frees."""
