"""Reads streamed answers over HTTP, and looks at them only when they are complete.

A reader that decodes each event as it comes would compete for the processor with the server that it
measures. So this one keeps bytes and times; whose server it is makes no difference.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from .burst import AnswerError

Address = tuple[str, int]

EVENT = re.compile(rb"data: ([^\r\n]*)\n\n")
DONE = b"[DONE]"
MOST_SHOWN = 500
"""Bytes of an answer that cannot be read, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """A streamed answer that came to its end.

    Attributes:
        times: when each event with text was there, by `time.perf_counter`.
        prompt_tokens, tokens: how many there were, as the server says.
        cached_tokens: of the prompt's, the ones that needed no prefill; 0 if it does not say.
    """

    times: Sequence[float]
    prompt_tokens: int
    tokens: int
    cached_tokens: int = 0


def request_of(address: Address, path: str, body: Mapping[str, Any], key: str = "") -> bytes:
    """A request whose answer is a stream that says how many tokens it had, and ends with it.

    Args:
        address: host and port.
        path: of the URL.
        body: without what makes it a stream.
        key: sent with it; empty for none.
    """
    about = {**body, "stream": True, "stream_options": {"include_usage": True}}
    content = json.dumps(about).encode()
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    authorization = f"Authorization: Bearer {key}\r\n" if key else ""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}:{address[1]}\r\nConnection: close\r\n"
        f"{authorization}"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


class Reader(asyncio.Protocol):
    """One connection: sends a request, and keeps what comes and when.

    Attributes:
        ended: once the connection has; raises what it ended with.

    Args:
        request: its bytes.
        on_text: called with the time of whatever brings text, which costs a look at all of it.
    """

    def __init__(self, request: bytes, on_text: Callable[[float], None] | None = None) -> None:
        self._request = request
        self._on_text = on_text
        self._transport: asyncio.Transport | None = None
        self._pieces: list[tuple[float, bytes]] = []
        self._unseen = b""  # what may be the beginning of an event
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        now = time.perf_counter()
        self._pieces.append((now, data))
        if self._on_text is not None and self._brings_text(data):
            self._on_text(now)

    def connection_lost(self, error: Exception | None) -> None:
        """See asyncio."""
        if self.ended.done():
            return  # nobody waits for it any longer
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)

    def abort(self) -> None:
        """Ends the connection, and with it the request, unless it has ended."""
        if self._transport is not None:
            self._transport.abort()

    def forget_text(self) -> None:
        """From now on nobody gets text."""
        self._on_text = None

    @property
    def raw(self) -> bytes:
        """All that has come."""
        return b"".join(piece for _, piece in self._pieces)

    def read(self) -> Read:
        """The answer; to be called when it has ended.

        Raises:
            AnswerError: it is no answer, or not whole; says what the server has said.
        """
        raw = self.raw
        if not re.match(rb"HTTP/1\.[01] 200 ", raw):
            raise AnswerError(f"refused: {_error_in(raw)}")
        # A response in chunks has lengths between its events; an event is never cut by one, or
        # its JSON could not be read.
        found = list(EVENT.finditer(raw))
        if not found or found[-1][1] != DONE:
            raise AnswerError(f"a stream was left unfinished: {_error_in(raw)}")
        ends = list(accumulate(len(piece) for _, piece in self._pieces))
        times: list[float] = []
        usage: dict[str, Any] = {}
        for one in found[:-1]:
            event = json.loads(one[1])
            usage = event.get("usage") or usage
            if text_of(event):
                times.append(self._pieces[bisect_left(ends, one.end())][0])
        return Read(
            times=times,
            prompt_tokens=usage["prompt_tokens"],
            tokens=usage["completion_tokens"],
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        )

    def _brings_text(self, data: bytes) -> bool:
        self._unseen += data
        found = list(EVENT.finditer(self._unseen))
        if found:
            self._unseen = self._unseen[found[-1].end() :]
        return any(one[1] != DONE and text_of(json.loads(one[1])) for one in found)


def count_of(raw: bytes) -> int:
    """How many whole events these bytes hold, those without text included."""
    return len(EVENT.findall(raw))


def text_of(event: Mapping[str, Any]) -> str:
    """The text of an event, of a chat or of a completion."""
    for choice in event.get("choices", ()):
        return str(choice.get("text") or choice.get("delta", {}).get("content") or "")
    return ""


async def ask(
    address: Address,
    path: str,
    body: Mapping[str, Any],
    on_text: Callable[[float], None] | None = None,
    key: str = "",
) -> Reader:
    """Sends a request on its own connection; its answer is on the way.

    Raises:
        OSError: nobody listens there.
    """
    request = request_of(address, path, body, key)
    loop = asyncio.get_running_loop()
    _, reader = await loop.create_connection(lambda: Reader(request, on_text), *address)
    return reader


def _error_in(raw: bytes) -> str:
    """The sentence of an error in OpenAI's form, or else the end of what has come."""
    for found in reversed(re.findall(rb'\{"error".*\}', raw)):
        try:
            return str(json.loads(found)["error"]["message"])
        except (ValueError, TypeError, KeyError):
            continue
    return repr(raw[-MOST_SHOWN:])
