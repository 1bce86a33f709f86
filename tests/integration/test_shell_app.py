"""The whole shell in this process: what the core decides is done, once, to whom it concerns."""

from __future__ import annotations

import json
import os
import stat

from mlxsup.protocol.ids import RequestId
from mlxsup.protocol.messages import Deltas, Done, Ping, Reply, StatusQuery
from support.played_daemon import Stage, generate, play, token


def test_a_request_is_served_and_the_end_leaves_nothing() -> None:
    async def body(stage: Stage) -> None:
        worker = await stage.ready()
        peer = stage.peer()
        await peer.say(generate())
        key = await worker.accept()
        await worker.step(token(key, 1))
        assert [d.text for d in (await peer.hear(Deltas)).deltas] == ["1 "]
        await worker.step(token(key, 2, is_last=True))
        assert [d.text for d in (await peer.hear(Deltas)).deltas] == ["2 "]
        done = await peer.hear(Done)
        assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.seed) == (2, 2, 7)

    assert play(body) == 0
