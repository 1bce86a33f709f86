"""Comments of a stream that waits, next to what else is sent in it."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

from mlxsup.client import Notice, NoticeKind
from mlxsup.gateway import limits
from mlxsup.gateway.openai.chunks import ChatShape
from mlxsup.gateway.progress import Progress
from mlxsup.gateway.sse import WRITE, EventStream

QUEUED = Notice(kind=NoticeKind.QUEUED, detail={"position": 3, "reason": "rows"})


def test_an_answer_that_ends_while_its_first_comment_waits_for_the_reader_has_a_head() -> None:
    sent: list[MutableMapping[str, Any]] = []

    async def run() -> None:
        reads = asyncio.Event()

        async def send(message: MutableMapping[str, Any]) -> None:
            await reads.wait()
            sent.append(message)

        now = 0.0
        progress = Progress(lambda: now)
        out = EventStream({"extensions": {WRITE: None}}, send, {})
        progress.attach(out, ChatShape("chatcmpl-r1", 1, "m"))
        now = limits.HOLD_S
        progress(QUEUED)
        await asyncio.sleep(0)
        assert out.is_started
        progress.close()
        progress(QUEUED)
        last = asyncio.create_task(out.write(b"data: the error"))
        await asyncio.sleep(0)
        reads.set()
        await last

    asyncio.run(run())
    assert [message["type"] for message in sent] == [
        "http.response.start", "http.response.body", "http.response.body",
    ]  # fmt: skip
    assert [message.get("body") for message in sent[1:]] == [
        b": queued, place 3\n\n", b"data: the error",
    ]  # fmt: skip
