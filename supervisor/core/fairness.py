"""Which waiting request of a model is dispatched next.

For now the order of arrival, and what had been dispatched before, oldest first, before what is new.
Everything that needs to know the order asks here, so a fairer order changes this file alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from mlxsup.protocol.ids import RequestKey


class WaitingLine:
    """The requests of one model that wait to be dispatched."""

    def __init__(self) -> None:
        # Bounded by admission: at most twice `max_queue` over all models. A dict keeps the order
        # and gives removal from the middle in constant time.
        self._again: dict[RequestKey, None] = {}
        self._new: dict[RequestKey, None] = {}

    def __len__(self) -> int:
        return len(self._again) + len(self._new)

    def __iter__(self) -> Iterator[RequestKey]:
        return chain(self._again, self._new)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._again or key in self._new

    def join(self, key: RequestKey) -> None:
        """A new request waits."""
        self._new[key] = None

    def rejoin(self, keys: Iterable[RequestKey]) -> None:
        """Requests that had been dispatched wait again, before all new ones, oldest first."""
        self._again = dict.fromkeys(sorted([*keys, *self._again]))

    def leave(self, key: RequestKey) -> None:
        """A waiting request was dispatched, cancelled or answered."""
        if key in self._again:
            del self._again[key]
        else:
            del self._new[key]

    def first(self) -> RequestKey:
        """The request that is dispatched next; the line must not be empty."""
        return next(iter(self))
