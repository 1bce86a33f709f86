"""Follows a daemon: looks at it again and again, hears what changes, and finds it again."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ..connection import explain_connection_lost, explain_request_error
from ..state_changes import state_changes
from .facts import Changed, Looked, Lost, News, look

if TYPE_CHECKING:
    from mlxsup.client import Client

RETRY_S = 1.0
"""How long after a failure the daemon is looked for again."""

LEAVE_LIMIT_S = 0.5
"""How long the end waits for a thread that waits for a silent daemon; the process ends anyway."""

MAX_CHANGES = 200
"""How many changes wait for a reader that is held up, and only the latest look."""


class Mailbox:
    """News that nobody has taken yet; what has been outdated is dropped.

    Args:
        wake: called after each look and each loss; changes wait for the next of them.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._news: deque[News] = deque(maxlen=MAX_CHANGES)

    def put(self, news: News) -> None:
        """Adds news."""
        with self._lock:
            if isinstance(news, Looked):
                others = [one for one in self._news if not isinstance(one, Looked)]
                self._news.clear()
                self._news.extend(others)
            self._news.append(news)
        if not isinstance(news, Changed):
            self._wake()

    def take(self) -> list[News]:
        """All news, the oldest first."""
        with self._lock:
            taken = list(self._news)
            self._news.clear()
        return taken


class Follower:
    """Puts what a daemon answers into a mailbox, on its own thread, until it is left.

    Args:
        endpoint: of the daemon.
        interval_s: from one look to the next.
        mailbox: takes the news.
    """

    def __init__(self, endpoint: str, interval_s: float, mailbox: Mailbox) -> None:
        self._endpoint = endpoint
        self._interval_s = interval_s
        self._mailbox = mailbox
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mlxsup-follower", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._has_ended.set()
        self._thread.join(LEAVE_LIMIT_S)

    def _run(self) -> None:
        from mlxsup.client import Client, ConnectionLost, RequestError

        while not self._has_ended.is_set():
            try:
                with Client(self._endpoint) as client:
                    self._follow(client)
            except ConnectionLost as error:
                self._mailbox.put(Lost(at=time.time(), error=explain_connection_lost(error)))
            except RequestError as error:
                self._mailbox.put(Lost(at=time.time(), error=explain_request_error(error)))
            self._has_ended.wait(RETRY_S)

    def _follow(self, client: Client) -> None:
        changes = state_changes(client)
        hearing = threading.Thread(
            target=self._hear, args=(changes,), name="mlxsup-changes", daemon=True
        )
        hearing.start()
        while hearing.is_alive() and not self._has_ended.is_set():
            self._mailbox.put(look(client))
            self._has_ended.wait(self._interval_s)

    def _hear(self, changes: Iterator[dict[str, Any]]) -> None:
        """Ends with the client."""
        from mlxsup.client import ConnectionLost, RequestError

        try:
            for change in changes:
                self._mailbox.put(Changed(change=change))
        except (ConnectionLost, RequestError):
            # The thread that looks meets the same error and reports it, or else connects again.
            return
