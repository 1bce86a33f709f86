"""Reads streams of OpenAI's API with the time of each event, for benchmarks over HTTP."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

PATH = "/v1/completions"
EVENT, DONE = b"data: ", b"[DONE]"
MOST_LINE_BYTES = 2**20
MOST_SHOWN = 500
"""Bytes of an answer that cannot be read, for people."""

Address = tuple[str, int]


class AnswerError(Exception):
    """An answer is not whole, or not as long as it was asked for."""


class Read(NamedTuple):
    """A streamed answer that came to its end, with the counts of tokens that the server gives.

    Attributes:
        times: when each event with text was there, by `time.perf_counter`.
        cached_tokens: of the prompt's, the ones that needed no prefill; 0 if it does not say.
    """

    times: Sequence[float]
    prompt_tokens: int
    tokens: int
    cached_tokens: int


def checked(read: Read, tokens: int) -> Read:
    """Return the answer.

    Raises:
        AnswerError: it has another length, or more events than tokens, or none with text.
    """
    if read.tokens != tokens:
        raise AnswerError(f"the answer has {read.tokens} tokens instead of {tokens}")
    if not 1 <= len(read.times) <= tokens:
        raise AnswerError(f"the stream had {len(read.times)} events with text for {tokens} tokens")
    return read


async def read_stream(
    address: Address,
    path: str,
    body: Mapping[str, Any],
    on_event: Callable[[float, bytes], None] | None = None,
) -> Read:
    """Send a request, and return its streamed answer once it has ended.

    Lines are kept with their times, and decoded at the end: a reader that decodes each event as it
    comes, as HTTP libraries do, would compete for the processor with the server that it measures.

    Args:
        address: host and port.
        path: of the URL.
        body: without what makes the answer a stream that says how many tokens it had.
        on_event: called with the time and the data of each event.

    Raises:
        AnswerError: it was refused, or is not whole; says what the server has said.
        OSError: the connection has failed.
    """
    about = {**body, "stream": True, "stream_options": {"include_usage": True}}
    content = json.dumps(about).encode()
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}:{address[1]}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    lines: list[bytes] = []
    events: list[tuple[float, bytes]] = []
    reader, writer = await asyncio.open_connection(*address, limit=MOST_LINE_BYTES)
    try:
        writer.write(head.encode() + content)
        async for line in reader:
            # What stands between events is the end of an event, or the length of a chunk.
            if line.startswith(EVENT):
                events.append((time.perf_counter(), line.removeprefix(EVENT)))
                if on_event is not None:
                    on_event(*events[-1])
            else:
                lines.append(line)
    finally:
        writer.close()
    if not lines or lines[0].split()[1:2] != [b"200"]:
        raise AnswerError(f"refused: {_error_in(b''.join(lines))}")
    if not events or events[-1][1].strip() != DONE:
        said = _error_in(b"".join(data for _, data in events))
        raise AnswerError(f"a stream ended too early: {said}")
    decoded = [(at, json.loads(data)) for at, data in events[:-1]]
    usage = next((one["usage"] for _, one in reversed(decoded) if one.get("usage")), None)
    if usage is None:
        raise AnswerError("the server does not say how many tokens there were")
    return Read(
        times=[at for at, event in decoded if text_of(event)],
        prompt_tokens=usage["prompt_tokens"],
        tokens=usage["completion_tokens"],
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
    )


def text_of(event: Mapping[str, Any]) -> str:
    """Return the text of an event, of a chat, reasoning included, or of a completion."""
    for choice in event.get("choices", ()):
        delta = choice.get("delta", {})
        texts = (choice.get("text"), delta.get("content"), delta.get("reasoning_content"))
        return str(next(filter(None, texts), ""))
    return ""


def _error_in(raw: bytes) -> str:
    """Return the sentence of an error in OpenAI's form, or else the end of what has come."""
    for found in reversed(re.findall(rb'\{"error".*\}', raw)):
        try:
            return str(json.loads(found)["error"]["message"])
        except (ValueError, TypeError, KeyError):
            continue
    return repr(raw[-MOST_SHOWN:])
