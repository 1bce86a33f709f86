"""Reads the body of a request: JSON, of limited length, within a limited time.

Some requests are answered before their body has come: it is too long, of another type, or not
wanted. The rest must not be taken for a request, and its sender must get to see the answer.
A short body is converted on the event loop, a long one by a process.
"""

from __future__ import annotations

import asyncio
from collections.abc import (
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from contextlib import contextmanager
from dataclasses import replace
from http import HTTPStatus
from typing import Any, TypeVar

from starlette.requests import Request

from mlxsup.client import RequestError
from mlxsup.protocol.codec import unpack
from mlxsup.protocol.errors import RemoteError

from . import limits
from .adding import Adding
from .ask import Ask
from .converter import Api, Frame, Sent, ask_of, encode_ask, parse_object, read_ask
from .converters import ConverterLost, Converters, busy
from .daemon import Daemon
from .errors import failure_of
from .failure import Failure
from .fields import check_unread
from .keys import CALLER, Caller, operator_needed
from .pictures import check_taker
from .responses.kept import Item, KeptResponses, Recalled
from .responses.requests import ResponseAsk

LEAST_KEEP_S = 60.0
MOST_KEEP_S = 24 * 3600.0
"""The bounds of `keep_alive` for callers who are no operators: less unloads a model that others
use, as 0 does, and more keeps it as good as for ever."""

T = TypeVar("T")

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

JSON_TYPE = "application/json"

OF_BROWSERS = ("origin", "sec-fetch-site", "referer")
"""Headers that a browser adds to what a page of another site sends. Such a page may send a body of
JSON only after it has asked (CORS), and any other body without asking."""


class Disconnected(Exception):
    """The client has left: its request, or the answer to it, ends here."""


class Heard:
    """What has come of a request.

    Attributes:
        is_over: whether its body is complete, or its sender has left.

    Args:
        receive: of the ASGI connection.
        waits: whether its sender waits for a word (`expect: 100-continue`) before the body.
    """

    def __init__(self, receive: Receive, *, waits: bool) -> None:
        self._receive = receive
        self._waits = waits
        self.is_over = False

    async def __call__(self) -> MutableMapping[str, Any]:
        """Return the next piece; see the ASGI specification."""
        self._waits = False  # the server has said that word now
        message = await self._receive()
        self.is_over = not message.get("more_body", False)
        return message

    async def discard(self) -> None:
        """Read on for a moment and drop what comes: who is still sending does not read the answer
        yet. What comes after that is left to the end of the connection."""
        if self._waits:
            return
        dropped = 0
        try:
            async with asyncio.timeout(limits.DISCARD_LIMIT_S):
                while not self.is_over and dropped <= limits.MAX_DISCARD_BYTES:
                    dropped += len((await self()).get("body", b""))
        except TimeoutError:
            pass


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return what some work returns; cancel it when the client leaves.

    Raises:
        Disconnected: the client has left.
    """

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, has_left = asyncio.create_task(work), asyncio.create_task(gone())
    try:
        await asyncio.wait({working, has_left}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Disconnected
        return working.result()
    finally:
        for task in (working, has_left):
            task.cancel()
        await asyncio.gather(working, has_left, return_exceptions=True)


async def read_json(request: Request) -> dict[str, Any]:
    """Return the object that a short body holds.

    Raises:
        Failure: the body is too long, too slow, of another type, or not an object in JSON.
        Disconnected: its sender has left.
    """
    return parse_object(b"".join(await read_pieces(request, limits.MAX_SMALL_BODY_BYTES)))


async def read_pieces(
    request: Request, most_bytes: int, take: Callable[[int], None] = lambda length: None
) -> list[bytes]:
    """Return a request's body in the pieces that have come: to join those of a long one would hold
    up the event loop.

    Args:
        request: its request.
        most_bytes: how long it may be.
        take: called with the length of each piece that has come; may refuse it.

    Raises:
        Failure: the body is too long, too slow, or of another type.
        Disconnected: its sender has left.
    """
    _check_headers(request, most_bytes)
    try:
        async with asyncio.timeout(limits.BODY_LIMIT_S):
            return await _read(request.receive, most_bytes, take)
    except TimeoutError:
        raise Failure(
            HTTPStatus.REQUEST_TIMEOUT,
            f"the body did not arrive within {limits.BODY_LIMIT_S:g} s",
            code="request_timeout",
        ) from None


class Bodies:
    """Reads bodies.

    Args:
        daemon: knows the models; its meter counts bodies that it would refuse.
        adding: adds models that are named.
        kept: what requests may refer to.
        refuses_unread: true if a field that is not read here is an error.
    """

    def __init__(
        self, daemon: Daemon, adding: Adding, kept: KeptResponses, *, refuses_unread: bool
    ) -> None:
        self._daemon = daemon
        self._adding = adding
        self._kept = kept
        self._refuses_unread = refuses_unread
        self._converters = Converters()
        self._held_bytes = 0

    async def close(self) -> None:
        """End the converters."""
        await self._converters.close()

    async def read(self, request: Request, api: Api) -> tuple[Ask, Sequence[Sent]]:
        """Return what a request asks for, and what the daemon is to be sent for it.

        Raises:
            Failure: the body is wrong, too long or too slow, or there are too many.
            Disconnected: its sender has left.
        """
        caller: Caller = request.scope[CALLER]
        with self._room() as take:
            pieces = await read_pieces(request, limits.MAX_BODY_BYTES, take)
            if sum(map(len, pieces)) > limits.MAX_SMALL_BODY_BYTES:
                work = self._convert(api, pieces, caller, take)
                return await unless_gone(request.receive, work)
            ask = read_ask(api, data := b"".join(pieces))
            if (recalled := self._recall(ask, caller, take)) is not None:
                if sum(map(len, recalled)) > limits.MAX_SMALL_BODY_BYTES:
                    work = self._convert(api, pieces, caller, take, recalled)
                    return await unless_gone(request.receive, work)
                ask = read_ask(api, data, recalled)
        ask = await self._resolved(ask.in_name_of(caller.account), caller)
        with self._counting(ask):
            return ask, encode_ask(ask)

    def _recall(self, ask: Ask, caller: Caller, take: Callable[[int], None]) -> Recalled | None:
        """Return what a response refers to; None: it refers to nothing."""
        if not isinstance(ask, ResponseAsk) or not (ask.previous or ask.references):
            return None
        recalled = self._kept.recall(caller.key, ask.previous, ask.references)
        take(sum(map(len, recalled)))
        return recalled

    async def _convert(
        self,
        api: Api,
        pieces: Sequence[bytes],
        caller: Caller,
        take: Callable[[int], None],
        recalled: Recalled | None = None,
    ) -> tuple[Ask, Sequence[Sent]]:
        """Return the same with a converter."""
        async with self._converters.one() as converter:
            try:
                async with asyncio.timeout(limits.CONVERT_LIMIT_S):
                    asked = {"api": api.value, "account": caller.account}
                    head, _ = _checked(await converter.ask(asked, pieces, *_whole(recalled)))
                    ask = ask_of(api, head)
                    if recalled is None and (recalled := self._recall(ask, caller, take)):
                        head, _ = _checked(await converter.ask(asked, pieces, *_whole(recalled)))
                        ask = ask_of(api, head)
                    ask = await self._resolved(ask, caller)
                    meant = {"target": ask.target, "preset": ask.preset}
                    answer = await converter.ask(meant)
            except TimeoutError:
                raise _too_slow() from None
            except ConverterLost:
                raise _lost(await converter.end()) from None
        with self._counting(ask):
            named, frames = _checked(answer)
        if isinstance(ask, ResponseAsk):
            ask = replace(ask, items=[Item(*item) for item in unpack(frames.pop())])
        pairs = [frames[place : place + 2] for place in range(0, len(frames), 2)]
        return ask, list(zip(named["ids"], pairs, strict=True))

    async def _resolved(self, ask: Ask, caller: Caller) -> Ask:
        """Return the same request, which knows what its model's name means; so does the meter."""
        if self._refuses_unread:
            check_unread(ask.unread)
        _check_keep_alive(ask.parameters, caller)
        meant = await self._daemon.meant(ask.model)
        target = await self._adding.named(meant.model, caller)
        resolved = replace(ask, target=target, preset=meant.preset)
        await self._daemon.learn(target)
        if resolved.picture:
            check_taker(resolved, await self._daemon.status())
        return resolved

    @contextmanager
    def _counting(self, ask: Ask) -> Iterator[None]:
        """Count a request with a wrong parameter, and make a response of its error."""
        try:
            yield
        except RequestError as error:
            self._daemon.meter.failed(ask.target or ask.model, error)
            raise failure_of(error, ask.names) from None

    @contextmanager
    def _room(self) -> Iterator[Callable[[int], None]]:
        """Count the bytes of a body as long as the block lasts; those of a short one are free."""
        length = counted = 0

        def take(more: int) -> None:
            nonlocal length, counted
            length += more
            if length > limits.MAX_SMALL_BODY_BYTES:
                self._held_bytes += length - counted
                counted = length
            if self._held_bytes > limits.MAX_HELD_BYTES:
                raise busy()

        try:
            yield take
        finally:
            self._held_bytes -= counted


def _check_keep_alive(parameters: Mapping[str, Any], caller: Caller) -> None:
    """Refuse what would soon unload a model, or keep it for very long: that is an operator's to
    decide, once there are keys that tell who is one.
    """
    keep_s = parameters.get("keep_alive")
    if keep_s is None or LEAST_KEEP_S <= keep_s <= MOST_KEEP_S:
        return
    if caller.has_key and not caller.is_operator:
        what = "keep_alive (or ttl) below a minute or above a day"
        raise operator_needed(what, param="keep_alive")


def _whole(recalled: Recalled | None) -> list[list[bytes]]:
    """Return what a response refers to as a converter gets it: each list of items in one piece."""
    return [[items] for items in recalled or ()]


def _checked(answer: Frame) -> Frame:
    """Return what a converter has made."""
    values, blobs = answer
    match values:
        case {"failure": failure}:
            raise Failure(**failure)
        case {"refusal": error}:
            raise RequestError.of(RemoteError.from_wire(error))
    return values["ok"], blobs


def _check_headers(request: Request, most_bytes: int) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != JSON_TYPE and any(name in request.headers for name in OF_BROWSERS):
        raise Failure(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            f"a web page must send `content-type: {JSON_TYPE}`, not {kind[:100] or 'none'}",
            code="unsupported_media_type",
        )
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise Failure(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            "the body must be uncompressed; content-encoding is not supported",
            code="unsupported_media_type",
        )
    announced = request.headers.get("content-length", "0")  # digits, or the server refuses it
    if int(announced) > most_bytes:
        raise _too_long(most_bytes)


async def _read(receive: Receive, most_bytes: int, take: Callable[[int], None]) -> list[bytes]:
    pieces, length, is_complete = list[bytes](), 0, False
    while not is_complete:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Disconnected
        piece = message.get("body", b"")
        length += len(piece)
        if length > most_bytes:
            raise _too_long(most_bytes)
        take(len(piece))
        pieces.append(piece)
        is_complete = not message.get("more_body", False)
    return pieces


def _too_long(most_bytes: int) -> Failure:
    is_large = most_bytes >= 2**20
    size = f"{most_bytes // 2**20} MiB" if is_large else f"{most_bytes // 2**10} KiB"
    return Failure(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        f"the body must be at most {size}; send less",
        code="request_too_large",
    )


def _too_slow() -> Failure:
    return Failure(
        HTTPStatus.SERVICE_UNAVAILABLE,
        f"reading this body took more than {limits.CONVERT_LIMIT_S} s; send a shorter one, or try"
        " again when the machine is less busy",
        code="body_too_slow",
        is_retryable=False,
    )


def _lost(code: int) -> Failure:
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return Failure(
        HTTPStatus.SERVICE_UNAVAILABLE,
        f"the process that read this body ended ({how}); send the request again",
        code="converter_lost",
        is_retryable=True,
        retry_after_s=1.0,
    )
