"""More connections than are let in, and storms of them."""

from __future__ import annotations

import os
import select
import socket as sockets
from functools import partial
from pathlib import Path

import pytest
import zmq

from mlxsup.protocol.client_messages import (
    Failed,
    Ping,
)
from mlxsup.protocol.ids import RequestId
from mlxsup.supervisor.core.events import ClientGone
from mlxsup.supervisor.sockets import clients as clients_module
from mlxsup.supervisor.sockets import limits as limits_module

from support.clients_bench import Bench, deltas, generate, run
from support.eventually_async import eventually_async


def is_connected(one: sockets.socket, path: Path) -> bool:
    """Whether another try to connect has found room."""
    return one.connect_ex(str(path)) == 0


class Raw:
    """Bare connections of this process; those that were turned away have ended."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.held: list[sockets.socket] = []

    async def knock(self, count: int) -> None:
        for _ in range(count):
            one = sockets.socket(sockets.AF_UNIX)
            one.setblocking(False)
            self.held.append(one)
            await eventually_async(partial(is_connected, one, self.path))

    def ended(self) -> int:
        """How many have been ended."""
        readable, _, _ = select.select(self.held, [], [], 0)
        return sum(is_ended(one) for one in readable)

    def close(self) -> None:
        for one in self.held:
            one.close()


def is_ended(one: sockets.socket) -> bool:
    try:
        while one.recv(4096):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def test_a_storm_ends_what_is_over_the_limit_and_no_stream_P24(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits_module, "MAX_OF_ONE_PROCESS", 20)
    monkeypatch.setattr(clients_module, "MAX_REFUSED", 5)

    async def body(bench: Bench) -> None:
        early = bench.peer()
        early.say(generate("a"))
        (heard,) = await bench.said(1)
        raw = Raw(bench.path)
        try:
            await raw.knock(60)
            await eventually_async(lambda: raw.ended() >= 60 - 19 - 5)
            assert bench.clients.admitted == 20
            bench.clients.send(heard.connection, deltas("a", 0))
            assert await early.hear() == deltas("a", 0)
        finally:
            raw.close()
        await eventually_async(lambda: bench.clients.admitted == 1)
        late = bench.peer()
        late.say(Ping(id=RequestId("p")))
        await bench.said(2)
        assert bench.of_kind(ClientGone) == []

    run(body)


def test_who_is_over_the_limit_is_told_so_and_then_ended_P24(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits_module, "MAX_OF_ONE_PROCESS", 3)

    async def body(bench: Bench) -> None:
        peers = [bench.peer() for _ in range(3)]
        for number, peer in enumerate(peers):
            peer.say(generate("a"))
            await bench.said(number + 1)
        beyond = bench.peer()
        for id in ("x", "y"):
            beyond.say(generate(id))
            answer = await beyond.hear()
            assert isinstance(answer, Failed)
            assert (answer.id, answer.error["code"]) == (id, "overloaded")
            assert f"process {os.getpid()} has 3 connections" in answer.error["message"]
        assert len(bench.events) == 3
        monitor = beyond.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        bench.moment += clients_module.REFUSAL_S
        bench.clients.pulse()
        await eventually_async(lambda: monitor.poll(0))
        beyond.socket.disable_monitor()
        monitor.close(0)
        peers.pop().close()
        bench.peers.remove(beyond)
        beyond.close()
        await bench.gone(1)
        bench.peer().say(generate("b"))
        await bench.said(4)

    run(body)
