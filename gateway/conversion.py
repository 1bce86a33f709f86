"""From the bytes of a body to what the daemon is sent: the gateway and its converters share it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from enum import StrEnum
from typing import Any

from mlxsup.client.connection import RequestIds
from mlxsup.client.parameters import encode_generate
from mlxsup.protocol.codec import pack
from mlxsup.protocol.ids import RequestId

from . import limits
from .anthropic.requests import MessageAsk, read_count, read_message
from .ask import TEMPLATE, Ask
from .body import nested_too_deeply, parse_object
from .failure import bad_field
from .ollama.requests import OllamaAsk, read_generate, read_ollama_chat
from .openai.requests import read_chat, read_completion
from .responses.kept import Recalled
from .responses.requests import ResponseAsk, read_response, read_response_count

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


_READERS: Mapping[Api, tuple[type[Ask], Callable[..., Ask]]] = {
    Api.CHAT: (Ask, read_chat),
    Api.COMPLETION: (Ask, read_completion),
    Api.RESPONSE: (ResponseAsk, read_response),
    Api.RESPONSE_COUNT: (ResponseAsk, read_response_count),
    Api.MESSAGE: (MessageAsk, read_message),
    Api.COUNT: (MessageAsk, read_count),
    Api.OLLAMA_CHAT: (OllamaAsk, read_ollama_chat),
    Api.GENERATE: (OllamaAsk, read_generate),
}


def read_ask(api: Api, data: bytes, recalled: Recalled | None = None) -> Ask:
    """Read a body.

    Args:
        api: that it was sent to.
        data: the body.
        recalled: what a response refers to, once that is known.

    Raises:
        Failure: it is not what this API takes; the message says what and where.
    """
    _, read = _READERS[api]
    try:
        ask = read(parse_object(data), *([] if recalled is None else [recalled]))
    except RecursionError:
        raise nested_too_deeply() from None
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


def _check_template(extra: dict[str, Any]) -> None:
    """Raise if the arguments of a chat template are too long."""
    try:
        is_short = len(pack(extra)) <= limits.MAX_TEMPLATE_BYTES
    except (ValueError, OverflowError):
        return  # `encode_generate` says what is wrong
    if not is_short:
        size = limits.MAX_TEMPLATE_BYTES // 1024
        raise bad_field(TEMPLATE, f"{TEMPLATE} takes at most {size} KiB: put texts into a message")
