"""Which waiting request of a model is dispatched next.

For now the order of arrival. Everything that needs to know the order asks here, so a fairer order
changes this file alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mlxsup.protocol.ids import RequestKey


class WaitingLine:
    """The requests of one model that wait to be dispatched."""

    def __init__(self) -> None:
        # Bounded by admission: `max_queue` over all models. A dict keeps the order and gives
        # removal from the middle in constant time.
        self._keys: dict[RequestKey, None] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[RequestKey]:
        return iter(self._keys)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._keys

    def join(self, key: RequestKey) -> None:
        """A new request waits."""
        self._keys[key] = None

    def rejoin(self, keys: Iterable[RequestKey]) -> None:
        """Requests that had been dispatched wait again, before all others, in the given order."""
        self._keys = dict.fromkeys([*keys, *self._keys])

    def leave(self, key: RequestKey) -> None:
        """A waiting request was dispatched, cancelled or answered."""
        del self._keys[key]

    def first(self) -> RequestKey:
        """The request that is dispatched next; the line must not be empty."""
        return next(iter(self._keys))
