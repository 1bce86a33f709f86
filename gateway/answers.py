"""Has the daemon answer a request, whole or in pieces, and ends it when the reader leaves.

Each piece is written in the turn of the event loop that brings it, without waking a task: at 200
pieces per second the cost is how much different code each one touches.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from mlxsup.client import (
    ConnectionLost,
    Delta,
    FinishReason,
    Notice,
    NoticeKind,
    RequestError,
    Result,
)
from mlxsup.client.async_streams import AsyncStream
from mlxsup.protocol.client_messages import CHANGED as BEGINNING

from . import limits
from .ask import Ask
from .body import Disconnected, Receive, unless_gone
from .converter import Sent
from .daemon import Daemon
from .errors import cancelled, error_response, failure_of, interrupted
from .failure import Failure
from .headers import CHANGED, IGNORED, REQUEST_ID, header_text
from .metrics import Meter
from .one_call import UpToOneCall
from .shape import Shape, WholeShape
from .sse import EventStream, Send

MakeShape = Callable[[Any, str, int], WholeShape]
"""Makes the shape of an answer from what was asked for, the name of the request, and the time in
seconds since the epoch."""


Stream = AsyncStream | UpToOneCall

UNCOUNTED = Meter()
"""Of the answers for which nothing is computed; no page shows it."""

Take = Callable[[int, Stream], Coroutine[Any, Any, None]]
"""Reads the answer of a request of the daemon, which has this number."""


class Endable(Protocol):
    """What runs until it is ended: a request of the daemon, or a task that follows its changes."""

    def cancel(self) -> object:
        """End it."""


class OpenAnswers:
    """The answers under way, so that they can be ended before the gateway is.

    Attributes:
        daemon: that gives them; its meter counts those that have ended.
        streams: one for each request of the daemon that is open, and each that follows changes.
        is_ending: whether all have been ended, because the gateway is about to.
    """

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.is_ending = False
        self.streams: set[Endable] = set()

    def add(self, streams: Sequence[Endable]) -> None:
        """List some more."""
        self.streams.update(streams)

    def remove(self, streams: Sequence[Endable]) -> None:
        """Strike out those that have ended."""
        self.streams.difference_update(streams)

    def cancel(self) -> None:
        """End all."""
        self.is_ending = True
        for stream in list(self.streams):
            stream.cancel()


class Answer:
    """The requests of the daemon that one HTTP request stands for.

    Args:
        open_answers: where they are listed while they run.
        ask: what was asked for.
        sent: the requests.
        progress: is given their notices.
    """

    def __init__(
        self,
        open_answers: OpenAnswers,
        ask: Ask,
        sent: Sequence[Sent],
        *,
        progress: Progress | None = None,
    ) -> None:
        self._client = client = open_answers.daemon.client
        self._model = ask.target or ask.model
        self._names = ask.names
        self._open_answers = open_answers
        self._meter = open_answers.daemon.meter if ask.is_counted else UNCOUNTED
        streams = [client.send_encoded(name, frames, progress) for name, frames in sent]
        self.streams: Sequence[Stream] = (
            [UpToOneCall(one) for one in streams] if ask.has_one_call else streams
        )
        open_answers.add(self.streams)

    @property
    def request_id(self) -> str:
        """Return the name of the first of them in logs, in `status` and in errors."""
        return self.streams[0].request_id

    def cancel(self) -> None:
        """End all."""
        for stream in self.streams:
            stream.cancel()

    async def read(
        self,
        take: Take,
        receive: Receive,
        on_accepted: Callable[[], None] | None = None,
    ) -> list[Result]:
        """Read all to their ends, unless the reader leaves before.

        Args:
            take: reads one, which has this number.
            receive: of the ASGI connection.
            on_accepted: called once the daemon has taken all of them; they may still wait.

        Raises:
            Failure: one of them has failed.
            Disconnected: the reader has left.
        """
        try:
            results = await unless_gone(receive, self._read(take, on_accepted))
        except (RequestError, ConnectionLost) as error:
            self._meter.failed(self._model, error)
            raise self._named(failure_of(error, self._names)) from None
        except Disconnected:
            self._meter.left(self._model)
            raise
        finally:
            self._open_answers.remove(self.streams)
        self._meter.answered(self._model, results)
        if any(result.finish_reason is FinishReason.CANCELLED for result in results):
            raise self._named(interrupted() if self._open_answers.is_ending else cancelled())
        return results

    async def _read(self, take: Take, on_accepted: Callable[[], None] | None) -> list[Result]:
        tasks = [
            asyncio.create_task(take(index, stream)) for index, stream in enumerate(self.streams)
        ]
        try:
            if on_accepted is not None and await self._are_accepted(tasks):
                on_accepted()
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in tasks:
                if task.done():
                    task.result()
            return [stream.result for stream in self.streams]
        finally:
            self.cancel()  # those that have not ended
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _are_accepted(self, tasks: Sequence[asyncio.Task[None]]) -> bool:
        """True if the daemon has taken every request, and not refused one of them.

        One that is alone is not waited for: whatever comes of it first tells.
        """
        if len(tasks) > 1:
            # The daemon answers in order: a refusal was here, and read, before this answer is.
            await self._client.ping()
        return not any(task.done() and task.exception() for task in tasks)

    def _named(self, failure: Failure) -> Failure:
        """Return the failure, whose response has the name of the request."""
        failure.headers[REQUEST_ID] = self.request_id
        return failure


async def answer(
    request: Request,
    open_answers: OpenAnswers,
    ask: Ask,
    sent: Sequence[Sent],
    shape: MakeShape,
) -> Response:
    """Return the response to a request whose body was read.

    Args:
        request: its request.
        open_answers: where it is listed while it runs.
        ask: what was asked for.
        sent: the requests of the daemon.
        shape: of the response; a `Shape` if the response may be streamed.

    Raises:
        Failure: the daemon has refused; not if the response is streamed.
        Disconnected: the reader has left.
    """
    progress = Progress(time.monotonic) if ask.is_streamed else None
    asked = Answer(open_answers, ask, sent, progress=progress)
    shaped = shape(ask, asked.request_id, int(time.time()))
    if progress is not None:
        assert isinstance(shaped, Shape)
        return _Streamed(asked, shaped, progress, ignored(ask))
    results, headers = await read_whole(request, ask, asked, shaped)
    return Response(shaped.body(results), headers=headers, media_type="application/json")


async def read_whole(
    request: Request, ask: Ask, whole: Answer, shape: WholeShape
) -> tuple[list[Result], dict[str, str]]:
    """Return the results of an answer that is sent as a whole, and the headers of its response."""

    async def take(index: int, stream: Stream) -> None:
        async for delta in stream:
            shape.take(index, delta)
            if shape.IS_LONG:
                await asyncio.sleep(0)

    results = await whole.read(take, request.receive)
    warnings = [warning for result in results for warning in result.warnings]
    return results, {REQUEST_ID: whole.request_id, **ignored(ask), **changed(warnings)}


def ignored(ask: Ask) -> dict[str, str]:
    """Return the header that names what is not read of a request; none if all of it is."""
    return {IGNORED: header_text(", ".join(ask.unread))} if ask.unread else {}


class _Streamed(Response):
    """An answer in pieces. If it fails before its first piece, it is an ordinary error; so it is
    if any of several requests is refused, whatever has come of the others."""

    def __init__(
        self, answer: Answer, shape: Shape, progress: Progress, more: Mapping[str, str]
    ) -> None:
        super().__init__()
        self._head = {"content-type": shape.STREAM_TYPE, REQUEST_ID: answer.request_id, **more}
        self._answer = answer
        self._shape = shape
        self._progress = progress
        self._is_accepted = asyncio.Event()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Send the response; see Starlette's `Response`."""
        out = EventStream(scope, send, self._head)

        async def take(index: int, stream: Stream) -> None:
            await self._take(index, stream, out)

        def begin() -> None:
            self._is_accepted.set()
            self._progress.attach(out, self._shape)

        try:
            results = await self._answer.read(take, receive, begin)
        except Disconnected:
            return
        except Failure as failure:
            self._progress.close()
            if out.is_started:
                # And no end: the server cuts the connection, so that nothing looks complete.
                await out.write(self._shape.broken(failure))
                return
            await error_response(scope, failure)(scope, receive, send)
            return
        finally:
            self._progress.close()
        await out.write(self._shape.end(results))
        await out.end()

    async def _take(self, index: int, stream: Stream, out: EventStream) -> None:
        shape, first = self._shape, self._shape.first(index)
        async for delta in stream:
            if (piece := shape.piece(index, delta)) is not None:
                # With the head of the response, for which there may be a wait.
                await self._is_accepted.wait()
                await out.write(first + piece)
                self._progress.begun()
                first = b""
                break

        def pass_on(delta: Delta) -> None:
            if (piece := shape.piece(index, delta)) is not None:
                out.pass_on(piece)

        await stream.forward(pass_on)
        if stream.result.finish_reason is FinishReason.CANCELLED:
            return
        await self._is_accepted.wait()
        await out.write(first + shape.last(index, stream.result))


# ---------------------------------------------------------------- progress


def progress_text(notice: Notice) -> str:
    """Return what a comment says of a notice; empty if it is no progress."""
    detail = notice.detail
    match notice.kind:
        case NoticeKind.QUEUED:
            return f"queued, place {detail.get('position')}"
        case NoticeKind.LOADING:
            return f"loading, {float(detail.get('fraction') or 0.0):.0%}"
        case NoticeKind.PREFILLING:
            return f"reading the prompt, {detail.get('done')} of {detail.get('total')} tokens"
        case NoticeKind.PAUSED:
            return f"paused, {detail.get('reason')}"
        case NoticeKind.RESUMED if detail.get("after") == "pause":
            return "continues"
    return ""


def changed(warnings: Iterable[str]) -> dict[str, str]:
    """Return the header that says what was changed in the messages; none if nothing was."""
    said = [one.removeprefix(BEGINNING) for one in warnings if one.startswith(BEGINNING)]
    return {CHANGED: header_text("; ".join(dict.fromkeys(said)))} if said else {}


class Progress:
    """Turns the notices of a streamed answer into comments, and what was changed into a header.

    Nothing is sent at first, so that a refusal can still be a status. After that a comment follows
    each change, and repeats the last one while nothing changes, because proxies and clients cut
    what is silent for a minute. A pause gets one when it begins and one when it ends.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._changes: list[str] = []  # known before the first piece
        self._clock = clock
        self._next_at = clock() + limits.HOLD_S
        self._out: EventStream | None = None
        self._shape: Shape | None = None
        self._waits_for = ""  # as the reader is told; empty if pieces come
        self._repeating: asyncio.TimerHandle | None = None
        # At most one: the next is a second later, and none is begun while it waits for a reader.
        self._comment: asyncio.Task[None] | None = None

    def attach(self, out: EventStream, shape: Shape) -> None:
        """Send comments there from now on, in the form of this API."""
        self._out, self._shape = out, shape
        out.add_headers(changed(self._changes))
        self._repeat_in(self._next_at - self._clock())

    def begun(self) -> None:
        """Repeat no comment from now on: pieces come."""
        self._waits_for = ""

    def close(self) -> None:
        """Begin no further comment, as the answer has ended. One that waits for its turn is sent,
        because the head of the response may go with it."""
        self._out = None
        if self._repeating is not None:
            self._repeating.cancel()

    def __call__(self, notice: Notice) -> None:
        """Tell the reader what a request waits for, or that it was changed."""
        if notice.kind is NoticeKind.CHANGED:
            self._changes += notice.detail["warnings"]
            if self._out is not None:
                self._out.add_headers(changed(self._changes))
        text, is_over = progress_text(notice), notice.kind is NoticeKind.RESUMED
        if text or is_over:
            self._waits_for = "" if is_over else text
        # Nothing else may come for as long as a pause lasts.
        is_due = is_over or notice.kind is NoticeKind.PAUSED or self._clock() >= self._next_at
        if text and is_due:
            self._tell(text)

    def _repeat(self) -> None:
        if self._waits_for and self._clock() >= self._next_at:
            self._tell(self._waits_for)
        self._repeat_in(limits.REPEAT_COMMENT_S)

    def _repeat_in(self, delay_s: float) -> None:
        self._repeating = asyncio.get_running_loop().call_later(delay_s, self._repeat)

    def _tell(self, text: str) -> None:
        is_busy = self._comment is not None and not self._comment.done()
        if self._out is None or self._shape is None or is_busy:
            return
        self._next_at = self._clock() + limits.COMMENT_INTERVAL_S
        self._comment = asyncio.create_task(self._out.write(self._shape.waits(text)))
