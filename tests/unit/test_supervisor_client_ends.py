"""Clients whose connections end, with a played socket: what is looked for, and what is left."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import pytest
import zmq

from mlxsup.protocol.client_messages import (
    Alive,
    Cancel,
    Failed,
    Subscribe,
)
from mlxsup.protocol.ids import RequestId
from mlxsup.supervisor.core.events import ClientGone, ConnectionId

from support.played_clients import ME, OTHER, Stage, reply


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Stage:
    return Stage(monkeypatch, tmp_path / "c.sock")


def test_the_end_of_a_connection_is_looked_for_until_the_socket_knows(stage: Stage) -> None:
    stage.ask()
    stage.ask("r", OTHER, 8)
    stage.happens(zmq.EVENT_DISCONNECTED, 7)
    for _ in range(3):
        assert stage.loop.waits_s() == [0.02]
        stage.loop.fire()
    assert stage.sent == [(ME, Alive())] * 3
    stage.gone.add(ME)
    stage.loop.fire()
    assert stage.of_kind(ClientGone) == [ClientGone(now=100.0, connection=ME)]
    assert stage.loop.timers == []
    stage.happens(zmq.EVENT_DISCONNECTED, 8)
    stage.happens(zmq.EVENT_ACCEPTED, 8)  # the descriptor is in use again
    stage.loop.fire()
    assert stage.loop.timers == []


def test_a_connection_with_nothing_open_leaves_no_trace(stage: Stage) -> None:
    for number in range(3):
        stage.ask("r", bytes([0, 1, 1, 1, number]), 7 + number)
        stage.clients.send(ConnectionId(bytes([0, 1, 1, 1, number])), reply())
        stage.happens(zmq.EVENT_DISCONNECTED, 7 + number)
    stage.sent.clear()
    stage.clients.pulse()
    assert stage.sent == []
    assert (stage.loop.timers, stage.of_kind(ClientGone)) == ([], [])


def test_who_cancels_what_it_watches_is_sent_nothing_more(stage: Stage) -> None:
    stage.say(Subscribe(id=RequestId("s")))
    stage.say(Cancel(id=RequestId("s")))
    stage.clients.pulse()
    assert stage.sent == []


def test_what_a_socket_fails_with_otherwise_is_a_bug_and_raised(stage: Stage) -> None:
    stage.ask()
    stage.gone.add(ME)
    stage.error = errno.ENOTSOCK
    with pytest.raises(zmq.ZMQError, match=os.strerror(errno.ENOTSOCK)):
        stage.clients.send(ME, reply())
    assert stage.of_kind(ClientGone) == []


def test_the_end_leaves_what_was_sent_its_time_and_asks_the_loop_for_nothing(
    stage: Stage,
) -> None:
    stage.ask()
    stage.ask("open", OTHER, 8)
    stage.full.add(ME)
    stage.clients.send(ME, reply())
    stage.happens(zmq.EVENT_DISCONNECTED, 8)
    assert len(stage.loop.timers) == 2
    stage.clients.close(1.5)  # its file is gone already, which is no matter
    assert stage.closed == [1500, "forgotten"]
    assert stage.loop.timers == []
    stage.sent.clear()
    stage.clients.pulse()
    assert stage.sent == []


def test_the_end_waits_until_all_is_sent_to_clients_that_read(stage: Stage) -> None:
    async def body() -> None:
        stage.ask()
        stage.full.add(ME)
        stage.clients.send(ME, reply())
        end = asyncio.ensure_future(stage.clients.finish(1e6))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not end.done()
        stage.full.clear()
        stage.loop.fire()
        assert stage.sent_to() == [reply()]
        await asyncio.wait_for(end, 60.0)

    asyncio.run(body())


def test_failed_is_an_end_and_a_refusal_does_not_open_anything(stage: Stage) -> None:
    stage.ask()
    stage.clients.send(ME, Failed(id="r", error={"code": "crash"}))
    stage.take([ME, b"\xc1"])
    stage.sent.clear()
    stage.clients.pulse()
    assert stage.sent == []
