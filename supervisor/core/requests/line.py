"""The waiting requests of one class, in order."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain

from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.states import PauseReason

from ..sharing.accounts import Account
from ..sharing.counters import Counters
from .ledger import Request

MayRun = Callable[[Account], bool]
"""Whether an account may have one more request running."""

LIKE_CRASHES = frozenset({PauseReason.TURN, PauseReason.SWAP})
"""Reasons of pauses that do not put a request behind those that a crash has interrupted."""

_Entry = tuple[float, RequestKey, Account]
"""A counter, the account's oldest request, the account."""


def again_order(request: Request) -> tuple[bool, RequestKey]:
    """Sorts requests that had been dispatched; it stays the same while they wait.

    Who has left for the turn of another suspect stands with the interrupted ones, because a crash
    was why; and so does who has left because the model made room: its process ended, too. Who has
    left for want of memory before anything was read stands with the paused ones.
    """
    was_paused = request.is_paused and request.pause_reason not in LIKE_CRASHES
    was_paused = was_paused or (request.acceptance is not None and not request.has_begun)
    return was_paused and not request.is_interrupted, request.key


class Line:
    """One class of a model's queue.

    Requests that had been dispatched come first: those that a crash has interrupted, then those
    that were paused, oldest first. New ones come in the order in which
    they will be dispatched if each costs as much as earlier ones did: always one of the account
    with the smallest counter, its oldest; with equal counters, the one that arrived first.

    Args:
        counters: of the model's accounts.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        # Bounded by admission, as the queue is. By key, because keys count arrivals.
        self._again: dict[RequestKey, Request] = {}
        self._new: dict[RequestKey, Request] = {}
        self._by_account: dict[Account, list[RequestKey]] = {}
        # For each account at least one entry that is not above its present one. Counters only
        # grow: an entry that lags behind is corrected when it reaches the top.
        self._heap: list[_Entry] = []

    def __len__(self) -> int:
        return len(self._again) + len(self._new)

    def __iter__(self) -> Iterator[Request]:
        yield from self._again.values()
        counters, new = self._counters, self._new
        starts = [
            (counters.of(account), keys[0], 0, account)
            for account, keys in self._by_account.items()
        ]
        heapq.heapify(starts)
        while starts:
            _, key, place, account = starts[0]
            yield new[key]
            keys, place = self._by_account[account], place + 1
            if place == len(keys):
                heapq.heappop(starts)
            else:
                heapq.heapreplace(starts, (*self._start(account, place), place, account))

    @property
    def again(self) -> dict[RequestKey, Request]:
        """Those that had been dispatched, in order."""
        return self._again

    def add(self, request: Request, *, is_again: bool) -> None:
        """A request comes, or had been dispatched and comes again."""
        key = request.key
        if is_again:
            last = next(reversed(self._again.values()), None)
            self._again[key] = request
            if last is not None and again_order(request) < again_order(last):
                in_order = sorted(self._again.values(), key=again_order)
                self._again = {one.key: one for one in in_order}
            return
        self._new[key] = request
        keys = self._by_account.setdefault(request.account, [])
        insort(keys, key)
        if keys[0] == key:
            heapq.heappush(self._heap, self._entry(request.account))
            if len(self._heap) > 64 and len(self._heap) > 4 * len(self._by_account):
                self._heap = [self._entry(account) for account in self._by_account]
                heapq.heapify(self._heap)

    def remove(self, request: Request) -> None:
        """A request leaves."""
        key = request.key
        if self._again.pop(key, None) is not None:
            return
        del self._new[key]
        keys = self._by_account[request.account]
        del keys[bisect_left(keys, key)]
        if not keys:
            del self._by_account[request.account]

    def first(self, may_run: MayRun) -> Request | None:
        """The request to dispatch next; None if no account of those that wait may run more."""
        for request in self._again.values():
            if may_run(request.account):
                return request
        heap, passed_over = self._heap, []
        found = None
        while heap and found is None:
            account = heap[0][2]
            if account not in self._by_account:
                heapq.heappop(heap)
            elif (entry := self._entry(account)) != heap[0]:
                heapq.heapreplace(heap, entry)
            elif may_run(account):
                found = self._new[entry[1]]
            else:
                passed_over.append(heapq.heappop(heap))
        for entry in passed_over:
            heapq.heappush(heap, entry)
        return found

    def count_startable(self, may_run_more: Callable[[Account], float], most: int) -> int:
        """How many of those who wait could start at once, if there were that many rows.

        Args:
            may_run_more: how many more requests of an account may run.
            most: the answer is at most this.
        """
        again = Counter(request.account for request in self._again.values())
        only_again = (account for account in again if account not in self._by_account)
        count = 0.0
        for account in chain(self._by_account, only_again):
            own = len(self._by_account.get(account, ())) + again[account]
            count += min(own, may_run_more(account))
            if count >= most:
                return most
        return int(count)

    def place(self, request: Request) -> int:
        """The place of a request in this class, from 1, without looking at all the others."""
        key = request.key
        if key in self._again:
            return 1 + list(self._again).index(key)
        own = self._by_account[request.account]
        start = self._start(request.account, bisect_left(own, key))
        ahead = sum(self._before(account, start) for account in self._by_account)
        return 1 + len(self._again) + ahead

    def _before(self, account: Account, start: tuple[float, RequestKey]) -> int:
        """How many of an account's requests come before one that starts so."""
        places = range(len(self._by_account[account]))
        return bisect_left(places, start, key=lambda place: self._start(account, place))

    def _entry(self, account: Account) -> _Entry:
        return self._counters.of(account), self._by_account[account][0], account

    def _start(self, account: Account, place: int) -> tuple[float, RequestKey]:
        """What the account's counter is expected to be when its request at this place, from 0, is
        dispatched, and that request."""
        counter = self._counters.of(account) + place * self._counters.expected(account)
        return counter, self._by_account[account][place]
