"""The common part of the synchronous and the asynchronous stream.

A stream that nothing references any longer is cancelled, and so is one whose wait an interrupt or
a cancelled task ends: the traceback would keep it alive, and its request would run for no reader.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlxsup.protocol.ids import RequestId

from .errors import SubscriptionClosed, internal
from .results import Delta, Notice, Result
from .session import Item

OnNotice = Callable[[Notice], object]

ENDS_OF_READING = (KeyboardInterrupt, SystemExit, GeneratorExit)
"""What ends a program or a generator while it waits for a piece. The traceback then holds the
stream, in an interactive Python until the next error, so the request would run on unread."""


class StreamBase:
    """An answer under way.

    Args:
        request_id: its name in logs, in `status` and in errors.
        cancel: asks for its end; called from any thread.
        on_notice: called with what the request is waiting for, by the thread that iterates.
    """

    def __init__(
        self,
        request_id: RequestId,
        cancel: Callable[[RequestId], None],
        on_notice: OnNotice | None,
    ) -> None:
        self._request_id = request_id
        self._cancel = cancel
        self._on_notice = on_notice
        self._end: Result | Exception | None = None

    def __del__(self) -> None:
        # Nothing can read it any longer, and a request that continues holds a row.
        if getattr(self, "_end", self) is None:
            self._cancel(self._request_id)

    @property
    def request_id(self) -> str:
        """Return the request's name in logs, in `status` and in errors."""
        return self._request_id

    @property
    def result(self) -> Result:
        """Return the whole answer, once the stream has been read to its end.

        Raises:
            RuntimeError: it has not been read to its end.
            RequestError, ConnectionLost: the stream ended with this error.
        """
        if self._end is None:
            raise RuntimeError("the result is available once the stream has been read to its end")
        if isinstance(self._end, Exception):
            raise self._end
        return self._end

    def cancel(self) -> None:
        """End the request; the stream then ends normally, as `cancelled`.

        Never blocks (D4), may be called from any thread and more than once, and does nothing once
        the stream has ended.
        """
        if self._end is None:
            self._cancel(self._request_id)

    def _tell(self, notice: Notice) -> None:
        """Pass on a notice."""
        if self._on_notice is not None:
            self._on_notice(notice)

    def _take(self, item: Item) -> Delta | None:
        """Return the next piece, or None at the normal end.

        Raises:
            RequestError, ConnectionLost: the stream ended with this error.
        """
        if isinstance(item, Delta):
            return item
        if isinstance(item, dict | Notice):
            item = internal("a stream was given a reply")
        self._end = item
        if isinstance(item, Exception):
            raise item
        return None


class SubscriptionBase:
    """State changes from the call on, as maps; `close` ends it.

    Args:
        request_id: its name.
        cancel: asks for its end; called from any thread.
    """

    def __init__(self, request_id: RequestId, cancel: Callable[[RequestId], None]) -> None:
        self._request_id = request_id
        self._cancel = cancel
        self._is_closed = False

    def close(self) -> None:
        """End the subscription, and with it the iteration; may be called from any thread."""
        self._is_closed = True
        self._cancel(self._request_id)

    def _take(self, item: Item) -> dict[str, Any] | None:
        """Return the next change, or None if the subscription was closed meanwhile.

        Raises:
            RequestError, ConnectionLost: the subscription ended with this error.
        """
        if isinstance(item, SubscriptionClosed):
            return None
        if isinstance(item, Exception):
            self._is_closed = True
        return value_of(item)


def is_end(item: Item) -> bool:
    """True if nothing follows the item in its inbox."""
    return not isinstance(item, Delta | Notice | dict)


def value_of(item: Item) -> dict[str, Any]:
    """Return the map that a command or a subscription got.

    Raises:
        RequestError, ConnectionLost: it got this error instead.
    """
    if isinstance(item, Exception):
        raise item
    if not isinstance(item, dict):
        raise internal("a command was given a piece of a stream")
    return item
