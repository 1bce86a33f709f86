"""Comments that tell a waiting reader that its request makes progress, and only then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from mlxsup.client import Notice, NoticeKind
from mlxsup.protocol.client_messages import CHANGED as BEGINNING

from . import limits
from .apis import CHANGED
from .shape import Shape
from .sse import EventStream


def progress_text(notice: Notice) -> str:
    """What a comment says of a notice; empty if it is no progress."""
    detail = notice.detail
    match notice.kind:
        case NoticeKind.QUEUED:
            return f"queued, place {detail.get('position')}"
        case NoticeKind.LOADING:
            return f"loading, {float(detail.get('fraction') or 0.0):.0%}"
        case NoticeKind.PREFILLING:
            return f"reading the prompt, {detail.get('done')} of {detail.get('total')} tokens"
    return ""


def changed(warnings: Iterable[str]) -> dict[str, str]:
    """Return the header that says what was changed in the messages; none if nothing was."""
    said = [one.removeprefix(BEGINNING) for one in warnings if one.startswith(BEGINNING)]
    return {CHANGED: "; ".join(dict.fromkeys(said))} if said else {}


class Progress:
    """Turns the notices of a streamed answer into comments, and what was changed into a header.

    Nothing is sent at first, so that a refusal can still be a status. A request that stands still
    gets no comment: its reader's own time limit is right about it.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._changes: list[str] = []  # known before the first piece
        self._clock = clock
        self._next_at = clock() + limits.HOLD_S
        self._out: EventStream | None = None
        self._shape: Shape | None = None
        # At most one: the next is a second later, and none is begun while it waits for a reader.
        self._comment: asyncio.Task[None] | None = None

    def attach(self, out: EventStream, shape: Shape) -> None:
        """Comments go there, in the form of this API."""
        self._out, self._shape = out, shape
        out.add_headers(changed(self._changes))

    def close(self) -> None:
        """The answer has ended: no further comment is begun. One that waits for its turn is sent,
        because the head of the response may go with it."""
        self._out = None

    def __call__(self, notice: Notice) -> None:
        """A request has something new to wait for, or was changed."""
        if notice.kind is NoticeKind.CHANGED:
            self._changes += notice.detail["warnings"]
            if self._out is not None:
                self._out.add_headers(changed(self._changes))
        text, now = progress_text(notice), self._clock()
        is_busy = self._comment is not None and not self._comment.done()
        if not text or self._out is None or self._shape is None or is_busy or now < self._next_at:
            return
        self._next_at = now + limits.COMMENT_INTERVAL_S
        self._comment = asyncio.create_task(self._out.write(self._shape.waits(text)))
