"""A server whose rows are all taken, and how a client's own retries get through to it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from .case import REQUEST_LIMIT_S
from support.eventually import eventually

ROWS = 2
WAITING = 1
"""How many requests a server of ours runs and lets wait in these cases."""

Open = Callable[[], Any]
"""Opens a stream that does not end by itself; raises what the package raises if it is refused."""


class Crowd:
    """Streams that take all there is.

    Attributes:
        refused: how many of them were refused.
    """

    def __init__(self) -> None:
        self.refused = 0
        self._started = 0
        self._is_over = threading.Event()
        self._streams: list[Any] = []

    def start(self, open_stream: Open) -> None:
        """Opens one, and returns when it has its first piece."""
        stream = open_stream()
        self._streams.append(stream)
        next(iter(stream))

    def occupy(self, open_stream: Open, refusal: type[Exception]) -> None:
        """Opens one, keeps it until the crowd leaves, and counts what becomes of it."""
        try:
            stream = open_stream()
            next(iter(stream))
        except refusal:
            self.refused += 1
            return
        self._started += 1
        self._is_over.wait(REQUEST_LIMIT_S)
        stream.close()

    def is_settled(self, more: int) -> bool:
        """Whether it is known if there is room for all that `occupy` was called for."""
        return self.refused > 0 or self._started == more

    def leave(self) -> None:
        """Ends them all."""
        self._is_over.set()
        while self._streams:
            self._streams.pop().close()


@contextmanager
def crowd(open_stream: Open, refusal: type[Exception]) -> Iterator[Crowd]:
    """More streams than a server of ours takes; one without a limit has them all."""
    taken = Crowd()
    more = WAITING + 1
    with ThreadPoolExecutor(more) as threads:
        try:
            for _ in range(ROWS):
                taken.start(open_stream)
            for _ in range(more):
                threads.submit(taken.occupy, open_stream, refusal)
            eventually(lambda: taken.is_settled(more), what="a server that is full")
            yield taken
        finally:
            taken.leave()


class Counted:
    """Hooks for a package's HTTP client: how many requests it has sent, and what came back.

    Attributes:
        statuses: of the responses, in their order.

    Args:
        on_error: called after each response that is an error.
    """

    def __init__(self, on_error: Callable[[], None] = lambda: None) -> None:
        self.statuses: list[int] = []
        self._on_error = on_error

    @property
    def hooks(self) -> dict[str, Any]:
        """What `event_hooks` takes."""
        return {"response": [self._seen]}

    def _seen(self, response: Any) -> None:
        self.statuses.append(response.status_code)
        if response.is_error:
            self._on_error()
