"""Tracks prompts on their way through the helper threads, and how long that may take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.worker_messages import Dispatch

from .engine import WorkerFaultError
from .text_threads import Refused, TextThreads, Tokenised


class StuckPreprocessingError(Exception):
    """A template or tokeniser does not return."""


class Tokenising:
    """The requests whose prompts are being rendered and tokenised.

    Args:
        text: the helper threads.
        limit_s: how long one prompt may take, and how long one may wait for a thread to begin.
        clock: monotonic seconds.
    """

    def __init__(self, text: TextThreads, limit_s: float, clock: Callable[[], float]) -> None:
        self._text = text
        self._limit_s = limit_s
        self._clock = clock
        # Without their bodies, which the threads have; as many as there are places.
        self._dispatched: dict[RequestKey, Dispatch] = {}
        self._latest_at = 0.0  # when the latest was prepared, or the first since had to be

    def __len__(self) -> int:
        return len(self._dispatched)

    def __iter__(self) -> Iterator[RequestKey]:
        return iter(self._dispatched)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._dispatched

    def begin(self, request: Dispatch) -> None:
        """Hands a request to the threads."""
        if not self._dispatched:
            self._latest_at = self._clock()
        self._dispatched[request.key] = replace(request, body=b"", resume=None)
        self._text.submit(request.key, request.body, request.resume)

    def forget(self, key: RequestKey) -> None:
        """Forget a request that was cancelled."""
        self._dispatched.pop(key, None)
        self._text.forget(key)

    def take(self) -> Iterator[tuple[Dispatch, Tokenised | Refused]]:
        """Yield what the threads have finished since the last call, if it is still wanted (G5),
        with how it was dispatched."""
        for result in self._text.take():
            self._latest_at = self._clock()
            dispatched = self._dispatched.pop(result.key, None)
            if dispatched is not None:
                yield dispatched, result

    def time_left_s(self, take_finished: Callable[[], None]) -> float | None:
        """Return the seconds that the preparation under way may still take; None if there is none
        to come.

        Args:
            take_finished: handles what was finished during a long step.

        Raises:
            StuckPreprocessingError: its time is up.
            WorkerFaultError: no thread is left to do it.
        """
        busy = self._text.busy()
        if busy is None:
            return self._begin_time_left_s(take_finished) if self._dispatched else None
        key, since = busy
        left_s = since + self._limit_s - self._clock()
        if left_s <= 0:
            raise StuckPreprocessingError(
                f"preparing the prompt of request {key} took more than {self._limit_s:g} s"
            )
        return left_s

    def _begin_time_left_s(self, take_finished: Callable[[], None]) -> float:
        """Return the seconds that the threads may still take to begin with one.

        Raises:
            WorkerFaultError: their time is up.
        """
        if not self._text.is_alive():
            raise WorkerFaultError("a thread that prepares prompts has ended")
        left_s = self._latest_at + self._limit_s - self._clock()
        if left_s > 0:
            return left_s
        take_finished()
        if self._dispatched and self._latest_at + self._limit_s <= self._clock():
            raise WorkerFaultError("a thread that prepares prompts does not begin")
        return self._limit_s
