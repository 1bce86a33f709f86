"""Reads several streamed chats at once.

Run as a child process: `readers HOST PORT STREAMS BODY`, the body as JSON. It prints a line once
each stream has brought text, one with counts for each line of standard input, and, once all have
ended, one with the counts of whole answers.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from typing import Any

from .openai_stream import read_stream, text_of

PATH = "/v1/chat/completions"
BEGIN_LIMIT_S = 60.0
"""How long a stream may bring nothing before the process gives up."""


class Stream:
    """A stream, and what has come of it."""

    def __init__(self, host: str, port: int, body: dict[str, Any]) -> None:
        self.events = self.bytes = 0
        self.has_begun = asyncio.Event()
        asked = read_stream((host, port), PATH, body, on_event=self._take)
        self.reading = asyncio.create_task(asked)
        self.reading.add_done_callback(lambda _: self.has_begun.set())

    def _take(self, _: float, data: bytes) -> None:
        self.events += 1
        self.bytes += len(data)
        if not self.has_begun.is_set() and text_of(json.loads(data)):
            self.has_begun.set()


def say(**about: Any) -> None:
    """Print a line for the parent."""
    print(json.dumps(about), flush=True)


def on_line(streams: Sequence[Stream], over: asyncio.Event) -> None:
    """Answers a line, or notes that there are no more."""
    if not sys.stdin.readline():
        over.set()
        return
    say(events=sum(one.events for one in streams), bytes=sum(one.bytes for one in streams))


async def main(host: str, port: int, streams: int, body: dict[str, Any]) -> None:
    """Reads until all have ended, or standard input has."""
    started = [Stream(host, port, body) for _ in range(streams)]
    async with asyncio.timeout(BEGIN_LIMIT_S):
        await asyncio.gather(*(one.has_begun.wait() for one in started))
    say(streams=streams)
    over = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), on_line, started, over)
    is_over: asyncio.Future[Any] = asyncio.ensure_future(over.wait())
    have_ended: asyncio.Future[Any] = asyncio.gather(*(one.reading for one in started))
    await asyncio.wait([is_over, have_ended], return_when=asyncio.FIRST_COMPLETED)
    if is_over.done():
        return
    whole = await have_ended
    say(events=sum(len(one.times) for one in whole), tokens=sum(one.tokens for one in whole))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])))
