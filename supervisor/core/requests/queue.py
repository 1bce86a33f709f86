"""Decides which waiting request of a model is dispatched next, and who is notified of moving up.

For now in order of arrival, with requests that had been dispatched before, oldest first, ahead of
new ones. Everything that depends on the order asks here, so a fairer order changes only this file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice

from mlxsup.protocol.ids import RequestKey

NEAR = 8
"""This many at the front are notified of each change of place, and all that had been dispatched."""

FARTHEST_TOLD = 1024
"""Behind those, a place is news at each power of two up to this one."""

_MARKS = tuple(2**n for n in range(4, 11))
assert (_MARKS[0], _MARKS[-1]) == (2 * NEAR, FARTHEST_TOLD)


class Queue:
    """The requests of one model that are waiting to be dispatched."""

    def __init__(self) -> None:
        # Bounded by admission: at most twice `max_queue` over all models. A dict keeps the order
        # and gives removal from the middle in constant time.
        self._again: dict[RequestKey, None] = {}
        self._new: dict[RequestKey, None] = {}
        # Since the news was last taken: who has come and still waits, and how many others left.
        self._come: dict[RequestKey, None] = {}
        self._left = 0

    def __len__(self) -> int:
        return len(self._again) + len(self._new)

    def __iter__(self) -> Iterator[RequestKey]:
        return chain(self._again, self._new)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._again or key in self._new

    def join(self, key: RequestKey) -> None:
        """Adds a new request."""
        self._new[key] = None
        self._come[key] = None

    def rejoin(self, keys: Iterable[RequestKey]) -> None:
        """Puts requests that had been dispatched back, ahead of all new ones, oldest first."""
        self._again = dict.fromkeys(sorted([*keys, *self._again]))

    def leave(self, key: RequestKey) -> None:
        """Removes a request that was dispatched, cancelled or answered."""
        if key in self._again:
            del self._again[key]
        else:
            del self._new[key]
        if key in self._come:
            del self._come[key]
        else:
            self._left += 1

    def first(self) -> RequestKey:
        """The request to dispatch next; the queue must not be empty."""
        return next(iter(self))

    def places(self) -> dict[RequestKey, int]:
        """The place of each request, from 1."""
        return {key: place for place, key in enumerate(self, start=1)}

    def take_news(self) -> dict[RequestKey, int]:
        """The places, from 1, that are news since the last call; some may turn out not to be.

        Those of all newcomers, of the near ones, and of those that moved up to or past a mark. Each
        request that leaves adds at most one per mark, without looking at the others.
        """
        left, come = self._left, self._come
        self.skip_news()
        near = max(NEAR, len(self._again))
        news = {key: place for place, key in enumerate(islice(self, near), start=1)}
        if left:
            front = list(islice(self, FARTHEST_TOLD))
            for mark in _MARKS:
                start = max(mark - left, mark // 2)
                news |= {key: start + n for n, key in enumerate(front[start:mark], start=1)}
        first_new = len(self) - len(come) + 1
        return news | {key: place for place, key in enumerate(come, start=first_new)}

    def skip_news(self) -> None:
        """Discards all news so far."""
        self._left, self._come = 0, {}
