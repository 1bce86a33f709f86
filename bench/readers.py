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

from mlxsup.cli.benchmark.http_reading import Reader, ask, count_of

PATH = "/v1/chat/completions"
BEGIN_LIMIT_S = 60.0
"""How long a stream may bring nothing before the process gives up."""


def say(**about: Any) -> None:
    """A line for the parent."""
    print(json.dumps(about), flush=True)


def on_line(readers: Sequence[Reader], over: asyncio.Event) -> None:
    """Answers a line, or notes that there are no more."""
    if not sys.stdin.readline():
        over.set()
        return
    raws = [reader.raw for reader in readers]
    say(events=sum(map(count_of, raws)), bytes=sum(map(len, raws)))


async def begun(host: str, port: int, body: dict[str, Any]) -> Reader:
    """A stream that has brought text, or has ended.

    Raises:
        TimeoutError: it does neither.
    """
    has_begun = asyncio.Event()
    reader = await ask((host, port), PATH, body, lambda now: has_begun.set())
    reader.ended.add_done_callback(lambda ended: has_begun.set())
    async with asyncio.timeout(BEGIN_LIMIT_S):
        await has_begun.wait()
    reader.forget_text()
    return reader


async def main(host: str, port: int, streams: int, body: dict[str, Any]) -> None:
    """Reads until all have ended, or standard input has."""
    readers = await asyncio.gather(*(begun(host, port, body) for _ in range(streams)))
    say(streams=streams)
    over = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), on_line, readers, over)
    is_over: asyncio.Future[Any] = asyncio.ensure_future(over.wait())
    have_ended: asyncio.Future[Any] = asyncio.gather(*(reader.ended for reader in readers))
    await asyncio.wait([is_over, have_ended], return_when=asyncio.FIRST_COMPLETED)
    if is_over.done():
        return
    await have_ended
    whole = [reader.read() for reader in readers]
    say(events=sum(len(one.times) for one in whole), tokens=sum(one.tokens for one in whole))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])))
