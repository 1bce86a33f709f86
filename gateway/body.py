"""Reads the body of a request: JSON, of limited length, within a limited time.

Some requests are answered before their body has come: it is too long, of another type, or nobody
wants it. The rest must not be taken for a request, and its sender must get to see the answer.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NoReturn

from . import limits
from .failure import Failure

if TYPE_CHECKING:  # a converter needs no server
    from starlette.requests import Request

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

JSON_TYPE = "application/json"

OF_BROWSERS = ("origin", "sec-fetch-site", "referer")
"""Headers that a browser adds to what a page of another site sends. Such a page may send a body of
JSON only after it has asked (CORS), and any other body without asking."""


class Disconnected(Exception):
    """The client has left before its request was complete: nobody waits for an answer."""


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
        """The next piece; see the ASGI specification."""
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


async def read_json(request: Request) -> dict[str, Any]:
    """Return the object that a short body holds.

    Raises:
        Failure: the body is too long, too slow, of another type, or not an object in JSON.
        Disconnected: its sender has left.
    """
    return parse_object(await read_body(request, limits.MAX_SMALL_BODY_BYTES))


async def read_body(
    request: Request, most_bytes: int, take: Callable[[int], None] = lambda length: None
) -> bytes:
    """Return a request's body.

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


def parse_object(data: bytes) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        Failure: it is something else; the message says what and where.
    """
    try:
        text = data.decode("utf-8")
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except UnicodeDecodeError as error:
        raise _bad(f"the body is not UTF-8 text (byte {error.start})") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise _bad(f"the body is not JSON: {error.msg} ({where})") from None
    except RecursionError:
        raise nested_too_deeply() from None
    except ValueError:
        raise _bad("a number in the body has more digits than any field takes") from None
    if not isinstance(value, dict):
        raise _bad("the body takes an object: {…}")
    if b"\\u" in data:
        _check_characters(value)
    return value


def _check_headers(request: Request, most_bytes: int) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != JSON_TYPE and any(name in request.headers for name in OF_BROWSERS):
        raise Failure(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            f"a page sends `content-type: {JSON_TYPE}`, not {kind[:100] or 'none'}",
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


async def _read(receive: Receive, most_bytes: int, take: Callable[[int], None]) -> bytes:
    pieces, length, is_complete = [], 0, False
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
    return b"".join(pieces)


def _too_long(most_bytes: int) -> Failure:
    is_large = most_bytes >= 2**20
    size = f"{most_bytes // 2**20} MiB" if is_large else f"{most_bytes // 2**10} KiB"
    return Failure(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        f"a body has at most {size}: send less",
        code="request_too_large",
    )


def _bad(message: str) -> Failure:
    return Failure(HTTPStatus.BAD_REQUEST, message, code="invalid_request")


def _refuse_constant(word: str) -> NoReturn:
    raise _bad(f"the body is not valid JSON: {word} is not allowed")


def _finite(digits: str) -> float:
    """Read a number; one beyond all (1e999) could be sent back in no answer."""
    if math.isinf(value := float(digits)):
        raise _bad(f"a number in the body is larger than any field takes: {digits[:20]}")
    return value


def _check_characters(value: dict[str, Any]) -> None:
    """JSON can spell half a character, which no text can hold."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise _bad("a text of the body has half a surrogate pair: no character is that") from None
    except RecursionError:
        raise nested_too_deeply() from None


def nested_too_deeply() -> Failure:
    """Return the refusal of a body whose lists and objects are within too many others."""
    return _bad("the body is nested too deeply")
