"""From the bytes of a body to what the daemon is sent.

The gateway does so with short bodies. `python -m mlxsup.gateway.converter` does so with those that
are too long for an event loop: the gateway starts it and writes to its standard input, frame after
frame: a body, which is answered with what the gateway has to know of it; the same with what it
refers to, if it does; and what the name of its model means, which is answered with the requests of
the daemon. A frame is the length of a map (4 bytes), the map in msgpack, and as many blobs as
`sizes` in it has lengths. Standard input ends when the gateway does, however it ends, and so does
the process.
"""

from __future__ import annotations

import json
import math
import os
import re
import resource
import signal
import struct
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from enum import StrEnum
from http import HTTPStatus
from typing import Any, BinaryIO, NoReturn

from mlxsup.client import RequestError
from mlxsup.client.connection import RequestIds
from mlxsup.client.parameters import encode_generate
from mlxsup.protocol.codec import pack, unpack
from mlxsup.protocol.ids import RequestId
from mlxsup.protocol.launch import lower_limit

from . import limits
from .anthropic.requests import MessageAsk, read_count, read_message
from .ask import TEMPLATE, Ask
from .failure import Failure, bad_field
from .ollama.requests import OllamaAsk, read_generate, read_ollama_chat
from .openai.requests import read_chat, read_completion
from .openai.tokens import read_detokenize, read_template, read_tokenize
from .pictures import find_asked_picture
from .responses.kept import Recalled
from .responses.requests import ResponseAsk, read_response, read_response_count
from .vectors.requests import (
    VectorAsk,
    read_embeddings,
    read_ollama_embed,
    read_ollama_embedding,
    read_rerank,
)

Sent = tuple[RequestId, list[bytes]]
"""A request of the daemon: its id and its frames."""

OPTIONS = (
    "timeout_s",
    "queue_timeout_s",
    "first_token_timeout_s",
    "priority",
    "client",
    "keep_alive",
)
"""The arguments of `generate` that the daemon reads; the others are in the body of the request."""

LENGTH = struct.Struct("!I")

NICENESS = 5
"""Streams come first: the gateway, the daemon and its workers are not slowed down by a body."""

Frame = tuple[dict[str, Any], list[bytes]]

_BASE64 = re.compile(rb"[A-Za-z0-9+/=]{16,}")
"""What may be a piece of a picture: some clients write its signs as escapes, or in lines."""

_ids = RequestIds()


class Api(StrEnum):
    """What a body is sent to."""

    CHAT = "chat"
    COMPLETION = "completion"
    RESPONSE = "response"
    RESPONSE_COUNT = "response_count"
    MESSAGE = "message"
    COUNT = "count"
    OLLAMA_CHAT = "ollama chat"
    GENERATE = "generate"
    TOKENIZE = "tokenize"
    TEMPLATE = "template"
    DETOKENIZE = "detokenize"
    EMBEDDINGS = "embeddings"
    RERANK = "rerank"
    OLLAMA_EMBED = "ollama embed"
    OLLAMA_EMBEDDING = "ollama embedding"


_READERS: Mapping[Api, tuple[type[Ask], Callable[..., Ask]]] = {
    Api.CHAT: (Ask, read_chat),
    Api.COMPLETION: (Ask, read_completion),
    Api.RESPONSE: (ResponseAsk, read_response),
    Api.RESPONSE_COUNT: (ResponseAsk, read_response_count),
    Api.MESSAGE: (MessageAsk, read_message),
    Api.COUNT: (MessageAsk, read_count),
    Api.OLLAMA_CHAT: (OllamaAsk, read_ollama_chat),
    Api.GENERATE: (OllamaAsk, read_generate),
    Api.TOKENIZE: (Ask, read_tokenize),
    Api.TEMPLATE: (Ask, read_template),
    Api.DETOKENIZE: (Ask, read_detokenize),
    Api.EMBEDDINGS: (VectorAsk, read_embeddings),
    Api.RERANK: (VectorAsk, read_rerank),
    Api.OLLAMA_EMBED: (VectorAsk, read_ollama_embed),
    Api.OLLAMA_EMBEDDING: (VectorAsk, read_ollama_embedding),
}


def parse_object(data: bytes) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        Failure: it is something else; the message says what and where.
    """
    try:
        text = data.decode("utf-8-sig")  # files that PowerShell writes begin with its mark
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except UnicodeDecodeError as error:
        raise _bad(f"the body is not UTF-8 text (byte {error.start})") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise _bad(f"the body is not JSON: {error.msg} ({where})") from None
    except RecursionError:
        raise _nested_too_deeply() from None
    except ValueError:
        raise _bad("a number in the body has too many digits") from None
    if not isinstance(value, dict):
        raise _bad("the body must be an object: {…}")
    if b"\\u" in data:
        _check_characters(value)
    return value


def read_ask(api: Api, data: bytes, recalled: Recalled | None = None) -> Ask:
    """Read a body.

    Raises:
        Failure: it is not what this API takes; the message says what and where.
    """
    _, read = _READERS[api]
    try:
        _check_text(data)
        ask = read(parse_object(data), *([] if recalled is None else [recalled]))
        ask = replace(ask, picture=find_asked_picture(ask.inputs))
    except RecursionError:
        raise _nested_too_deeply() from None
    extra = ask.parameters.get(TEMPLATE)
    if isinstance(extra, dict):
        _check_template(extra)
    return ask


def encode_ask(ask: Ask) -> list[Sent]:
    """Return the requests of the daemon that one request over HTTP stands for.

    Raises:
        Failure: they would be too long together.
        RequestError: a parameter is wrong.
    """
    sent: list[Sent] = []
    for choice in ask.choices():
        options = {name: choice.pop(name, None) for name in OPTIONS}
        request_id, name = _ids.next(), ask.target or ask.model
        frames = encode_generate(
            request_id, name, choice, resume=True, notices=ask.is_streamed, **options
        )
        sent.append((request_id, frames))
        if sum(len(frame) for _, frames in sent for frame in frames) > limits.MAX_ASKED_BYTES:
            size = limits.MAX_ASKED_BYTES // 2**20
            message = f"n times this body exceeds {size} MiB; use a smaller n"
            raise bad_field("n", message)
    return sent


def head_of(ask: Ask) -> dict[str, Any]:
    """Return what the gateway has to know of a request while others do the rest, for `ask_of`."""
    head = ask.head()
    return {field.name: getattr(head, field.name) for field in fields(head)}


def ask_of(api: Api, head: dict[str, Any]) -> Ask:
    """Return what `head_of` was given, as far as it was kept."""
    kind, _ = _READERS[api]
    return kind(**head)


def _check_text(data: bytes) -> None:
    """Raise if a body has more text than any may, besides pictures."""
    if len(data) <= limits.MAX_TEXT_BYTES:
        return
    text_bytes = len(data) - sum(one.end() - one.start() for one in _BASE64.finditer(data))
    if text_bytes > limits.MAX_TEXT_BYTES:
        size = limits.MAX_TEXT_BYTES // 2**20
        raise Failure(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"the body must have at most {size} MiB besides pictures in base64; send less",
            code="request_too_large",
        )


def _check_template(extra: dict[str, Any]) -> None:
    """Raise if the arguments of a chat template are too long."""
    try:
        is_short = len(pack(extra)) <= limits.MAX_TEMPLATE_BYTES
    except (ValueError, OverflowError):
        return  # `encode_generate` says what is wrong
    if not is_short:
        size = limits.MAX_TEMPLATE_BYTES // 1024
        raise bad_field(
            TEMPLATE, f"{TEMPLATE} must be at most {size} KiB; put long text into a message"
        )


def _bad(message: str) -> Failure:
    return Failure(HTTPStatus.BAD_REQUEST, message, code="invalid_request")


def _refuse_constant(word: str) -> NoReturn:
    raise _bad(f"the body is not valid JSON: {word} is not allowed")


def _finite(digits: str) -> float:
    """Read a number; one beyond all (1e999) could be sent back in no answer."""
    if math.isinf(value := float(digits)):
        raise _bad(f"a number in the body is too large: {digits[:20]}")
    return value


def _check_characters(value: dict[str, Any]) -> None:
    """Raise if a text has half a character, which JSON can spell and no text can hold."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise _bad("the body contains half a surrogate pair, which is not a character") from None
    except RecursionError:
        raise _nested_too_deeply() from None


def _nested_too_deeply() -> Failure:
    """Return the refusal of a body whose lists and objects are within too many others."""
    return _bad("the body is nested too deeply")


# ---------------------------------------------------------------- the process


def frame_head(values: dict[str, Any], sizes: Sequence[int]) -> bytes:
    """Return the beginning of a frame, which blobs of these sizes follow."""
    head = pack({**values, "sizes": sizes})
    return LENGTH.pack(len(head)) + head


def frame_of(values: dict[str, Any], blobs: Sequence[bytes] = ()) -> Iterable[bytes]:
    """Return the pieces of a frame."""
    return [frame_head(values, [len(blob) for blob in blobs]), *blobs]


def main() -> int:
    """Convert until standard input ends; return the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the daemon, which ends the gateway
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a gateway that is gone is no error
    os.nice(NICENESS)
    if sys.platform == "linux":  # macOS does not keep to it
        lower_limit(resource.RLIMIT_AS, limits.CONVERTER_MEMORY_BYTES)
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as out:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever prints is no part of a frame
        serve(sys.stdin.buffer, out)
    return 0


def serve(source: BinaryIO, out: BinaryIO) -> None:
    """Answer frame after frame."""
    ask: Ask | None = None
    while (frame := _read(source)) is not None:
        # The gateway ends a converter that takes longer; this is for one that has no gateway left.
        signal.alarm(limits.CONVERT_LIMIT_S)
        values, blobs = frame
        try:
            if "api" in values:
                data, *referred = blobs
                recalled = Recalled(*referred) if referred else None
                ask = read_ask(Api(values["api"]), data, recalled).in_name_of(values["account"])
                answer, blobs = head_of(ask), []
            else:
                assert ask is not None, "the body comes first"
                answer, blobs = _requests(replace(ask, **values))
                ask = None
            reply = frame_of({"ok": answer}, blobs)
        except Failure as failure:
            reply = frame_of({"failure": failure.to_plain()})
        except RequestError as error:
            reply = frame_of({"refusal": error.to_wire()})
        except MemoryError:
            ask = None
            reply = frame_of({"failure": _too_complex().to_plain()})
        out.writelines(reply)
        out.flush()
        signal.alarm(0)
        del frame, blobs, reply  # or a body is kept until the next comes


def _requests(ask: Ask) -> tuple[dict[str, Any], list[bytes]]:
    """Return the ids and the frames of a body's requests of the daemon: two of each.

    Of a response, one more blob has the items that are kept.
    """
    sent = encode_ask(ask)
    blobs = [frame for _, frames in sent for frame in frames]
    if isinstance(ask, ResponseAsk):
        blobs.append(pack(list(ask.items)))
    return {"ids": [name for name, _ in sent]}, blobs


def _read(source: BinaryIO) -> Frame | None:
    """Return the next frame; None: there is no gateway any longer."""
    length = source.read(LENGTH.size)
    if len(length) < LENGTH.size:
        return None
    values: dict[str, Any] = unpack(source.read(*LENGTH.unpack(length)))
    blobs = []
    for size in values.pop("sizes"):
        blobs.append(source.read(size))
        if len(blobs[-1]) < size:
            return None
    return values, blobs


def _too_complex() -> Failure:
    size = limits.CONVERTER_MEMORY_BYTES // 2**20
    return Failure(
        413,
        f"the values in this body take more than {size} MiB of memory; send fewer values",
        code="request_too_large",
    )


if __name__ == "__main__":
    sys.exit(main())
