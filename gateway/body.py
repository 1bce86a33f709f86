"""Reads the body of a request: JSON, of limited length, within a limited time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any, NoReturn

from starlette.requests import Request

from . import limits
from .failure import Failure, closing

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

JSON_TYPE = "application/json"


class Disconnected(Exception):
    """The client has left before its request was complete: nobody waits for an answer."""


async def read_json(request: Request) -> dict[str, Any]:
    """The object that a request's body holds.

    Raises:
        Failure: the body is too long, too slow, of another type, or not an object in JSON.
        Disconnected: its sender has left.
    """
    _check_headers(request)
    try:
        async with asyncio.timeout(limits.BODY_LIMIT_S):
            data = await _read(request.receive)
    except TimeoutError:
        raise closing(
            HTTPStatus.REQUEST_TIMEOUT,
            f"the body did not arrive within {limits.BODY_LIMIT_S:g} s",
            code="request_timeout",
        ) from None
    if data is None:
        await _discard(request.receive)
        raise _too_long()
    return parse_object(data)


def parse_object(data: bytes) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        Failure: it is something else; the message says what and where.
    """
    try:
        value = json.loads(data.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise _bad(f"the body is not UTF-8 text (byte {error.start})") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise _bad(f"the body is not JSON: {error.msg} ({where})") from None
    except RecursionError:
        raise _bad("the body is nested too deeply") from None
    except ValueError as error:  # a constant, or more digits than Python reads
        raise _bad(f"the body is not JSON: {str(error)[:100]}") from None
    if not isinstance(value, dict):
        raise _bad("the body takes an object: {…}")
    if b"\\u" in data:
        _check_characters(value)
    return value


def _check_headers(request: Request) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != JSON_TYPE:
        raise closing(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            f"the body takes `content-type: {JSON_TYPE}`, not {kind[:100] or 'none'}",
            code="unsupported_media_type",
        )
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise closing(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            "the body takes no content-encoding: send it uncompressed",
            code="unsupported_media_type",
        )


async def _read(receive: Receive) -> bytes | None:
    """The whole body; None if it is too long."""
    pieces, length, is_complete = [], 0, False
    while not is_complete:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Disconnected
        piece = message.get("body", b"")
        length += len(piece)
        if length > limits.MAX_BODY_BYTES:
            return None
        pieces.append(piece)
        is_complete = not message.get("more_body", False)
    return b"".join(pieces)


async def _discard(receive: Receive) -> None:
    """Reads on for a moment: who is still sending does not read the answer yet."""
    try:
        async with asyncio.timeout(limits.DISCARD_LIMIT_S):
            while (await receive()).get("more_body", False):
                pass
    except TimeoutError:
        pass


def _too_long() -> Failure:
    size = limits.MAX_BODY_BYTES // 2**20
    return closing(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        f"a body has at most {size} MiB",
        code="request_too_large",
    )


def _bad(message: str) -> Failure:
    return Failure(HTTPStatus.BAD_REQUEST, message, code="invalid_request")


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number of JSON")


def _check_characters(value: dict[str, Any]) -> None:
    """JSON can spell half a character, which no text can hold."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise _bad("a text of the body has half a surrogate pair: no character is that") from None
    except RecursionError:
        raise _bad("the body is nested too deeply") from None
