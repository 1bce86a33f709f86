"""The clients' socket, with real sockets: garbage, ids, lost clients."""

from __future__ import annotations

import asyncio
import os
import socket as sockets
from dataclasses import replace

import msgpack
import pytest

from mlxsup.protocol.client_messages import (
    Alive,
    Cancel,
    Failed,
    Load,
    Ping,
    Reply,
    Subscribe,
)
from mlxsup.protocol.client_messages import Event as EventMessage
from mlxsup.protocol.ids import ModelName, RequestId
from mlxsup.protocol.message import Message
from mlxsup.supervisor.core.events import ClientGone, ClientSaid
from mlxsup.supervisor.sockets import clients as clients_module

from support.clients_bench import Bench, Peer, deltas, done, generate, run
from support.eventually_async import eventually_async


def test_what_is_said_becomes_events_and_answers_come_back() -> None:
    async def body(bench: Bench) -> None:
        first, second = bench.peer(), bench.peer()
        first.say(generate("a"))
        (heard,) = await bench.said(1)
        assert (heard.message, heard.now) == (generate("a"), 100.0)
        second.say(Ping(id=RequestId("p")))
        connection = (await bench.said(2))[1].connection
        assert connection != heard.connection
        bench.clients.send(connection, Reply(id=RequestId("p"), value={"ok": 1}))
        bench.clients.send(heard.connection, deltas("a", 0))
        bench.clients.send(heard.connection, done("a", 1))
        assert await second.hear() == Reply(id=RequestId("p"), value={"ok": 1})
        assert await first.hear() == deltas("a", 0)
        assert await first.hear() == done("a", 1)

    run(body)


GARBAGE: list[list[bytes]] = [
    [b""],
    [b"", b""],
    [b"\xc1"],
    [b"\x80"],
    [b"a", b"b", b"c"],
    [os.urandom(3000)],
    [msgpack.packb({"type": "generate", "id": "g", "model": 3}), b""],
    [msgpack.packb({"type": "nonsense", "id": "g"})],
    [msgpack.packb({"type": "ping", "id": "g", "more": float("nan")})],
    [msgpack.packb({"type": "ping", "id": "g" * 70_000})],
    [b"\x81" * 60_000],
    [msgpack.packb({"type": "generate", "id": "g", "model": "m"}), b"x" * (9 * 1024 * 1024)],
    [msgpack.packb({"type": "ping", "id": "g", "v": 99})],
]


def test_a_cancel_never_overtakes_its_request_whatever_their_sizes_D5() -> None:
    """One connection keeps the order, over many turns of receiving."""

    async def body(bench: Bench) -> None:
        peer = bench.peer()
        asked: list[Message] = []
        for number in range(200):
            size = 1_000_000 if number % 20 == 0 else number
            asked.append(replace(generate(f"r{number}"), body=b"x" * size))
            asked.append(Cancel(id=RequestId(f"r{number}")))
        for message in asked:
            peer.say(message)
        heard = [said.message for said in await bench.said(len(asked))]
        assert heard == asked

    run(body)


def test_garbage_is_answered_and_harms_nobody_P17() -> None:
    async def body(bench: Bench) -> None:
        good, bad = bench.peer(), bench.peer()
        good.say(generate("a"))
        (heard,) = await bench.said(1)
        for frames in GARBAGE:
            bad.socket.send_multipart(frames)
            answer = await bad.hear()
            assert isinstance(answer, Failed)
            assert answer.error["code"] in ("invalid_request", "unsupported_version")
        bad.say(Ping(id=RequestId("p")))
        await bench.said(2)
        bench.clients.send(heard.connection, done("a", 0))
        assert await good.hear() == done("a", 0)
        assert len(bench.events) == 2

    run(body)


def test_bytes_that_are_not_zeromq_harm_nobody() -> None:
    async def body(bench: Bench) -> None:
        with sockets.socket(sockets.AF_UNIX) as raw:
            raw.connect(str(bench.path))
            raw.sendall(b"POST / HTTP/1.1\r\nHost: x\r\n\r\n" + os.urandom(5000))
            peer = bench.peer()
            peer.say(Ping(id=RequestId("p")))
            await bench.said(1)

    run(body)


def test_another_user_is_not_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the daemon takes itself for somebody else, so that the test's own user is a stranger."""
    uid = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: uid)

    async def body(bench: Bench) -> None:
        with sockets.socket(sockets.AF_UNIX) as stranger:
            stranger.connect(str(bench.path))
            stranger.settimeout(20)
            assert await asyncio.to_thread(stranger.recv, 1) == b"", "ended without a greeting"
        assert bench.clients.admitted == 0
        assert bench.events == []

    run(body)


def test_a_client_that_ends_with_something_open_is_gone_and_nobody_else_is_asked_D12() -> None:
    async def body(bench: Bench) -> None:
        peer, other = bench.peer(), bench.peer()
        peer.say(generate("a"))
        await bench.said(1)
        other.say(generate("b"))
        await bench.said(2)
        connection = bench.of_kind(ClientSaid)[0].connection
        for number in range(200):
            passer_by = bench.peer()
            passer_by.say(Ping(id=RequestId("p")))
            await bench.said(3 + number)
            bench.peers.pop().close()
        peer.close()
        await eventually_async(lambda: len(bench.of_kind(ClientGone)) == 201)
        assert connection in [e.connection for e in bench.of_kind(ClientGone)]
        bench.clients.send(connection, done("a", 0))  # crosses its end: dropped
        bench.clients.send(bench.of_kind(ClientSaid)[1].connection, done("b", 0))
        assert await other.hear(is_alive_shown=True) == done("b", 0)

    run(body)


def test_what_a_client_says_in_its_last_moment_is_heard() -> None:
    async def body(bench: Bench) -> None:
        for number in range(100):
            peer = bench.peer()
            peer.say(Ping(id=RequestId(str(number))))
            peer.socket.close(linger=5000)
            await asyncio.to_thread(peer.context.term)
        heard = await bench.said(100)
        assert {e.message.id for e in heard if isinstance(e.message, Ping)} == {
            str(number) for number in range(100)
        }
        await bench.gone(100)

    run(body)


def test_a_client_that_ends_with_nothing_open_is_not_remembered() -> None:
    async def body(bench: Bench) -> None:
        for number in range(20):
            peer = bench.peer()
            peer.say(Ping(id=RequestId("p")))
            (*_, heard) = await bench.said(number + 1)
            bench.clients.send(heard.connection, Reply(id=RequestId("p"), value={}))
            await peer.hear()
            peer.close()
        await eventually_async(lambda: bench.connections == {})
        assert bench.of_kind(ClientGone) == []

    run(body)


def test_signs_of_life_go_to_those_who_have_something_open() -> None:
    async def body(bench: Bench) -> None:
        waiting, watching, idle = bench.peer(), bench.peer(), bench.peer()
        waiting.say(Load(id=RequestId("l"), model=ModelName("m")))
        watching.say(Subscribe(id=RequestId("s")))
        idle.say(Ping(id=RequestId("p")))
        for heard in await bench.said(3):
            if isinstance(heard.message, Ping):
                bench.clients.send(heard.connection, Reply(id=RequestId("p"), value={}))
        bench.clients.pulse()
        assert isinstance(await waiting.hear(is_alive_shown=True), Alive)
        assert isinstance(await watching.hear(is_alive_shown=True), Alive)
        assert isinstance(await idle.hear(is_alive_shown=True), Reply)
        assert idle.socket.poll(0) == 0

    run(body)


def test_a_pulse_that_was_asked_for_before_the_end_does_nothing_after_it() -> None:
    async def body(bench: Bench) -> None:
        bench.peer().say(generate("a"))
        await bench.said(1)
        bench.close_all()
        bench.clients.pulse()

    run(body)


@pytest.mark.parametrize(
    "routing_id", [b"m%d", b"alic%d"], ids=["short", "as long as libzmq's own"]
)
def test_a_routing_id_of_a_client_s_own_is_refused_and_takes_no_place_D12(
    routing_id: bytes,
) -> None:
    async def body(bench: Bench) -> None:
        good = bench.peer()
        good.say(generate("a"))
        await bench.said(1)
        for number in range(5):
            named = Peer(bench.clients.endpoint, routing_id=routing_id % number)
            named.say(generate(f"n{number}"))
            answer = await named.hear()
            assert isinstance(answer, Failed)
            assert (answer.id, answer.error["code"]) == (f"n{number}", "invalid_request")
            assert "routing id" in answer.error["message"]
            named.close()
            await eventually_async(lambda: bench.clients.admitted == 1)
        assert len(bench.events) == 1

    run(body)


@pytest.mark.parametrize(
    "greeting",
    [
        b"\x01\x00",  # ZMTP 1.0: no greeting; a length and a flag, the first of the identity
        b"\xff\0\0\0\0\0\0\0\x01\x7f\x01",  # ZMTP 2
        b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x01PLAIN",
    ],
)
def test_a_peer_of_an_old_zmtp_or_with_a_password_is_ended(greeting: bytes) -> None:
    async def body(bench: Bench) -> None:
        bench.peer().say(Ping(id=RequestId("known")))
        await bench.said(1)
        header = msgpack.packb({"type": "ping", "id": "p"})
        with sockets.socket(sockets.AF_UNIX) as raw:
            raw.connect(str(bench.path))
            raw.sendall(greeting + bytes([1 + len(header), 0]) + header + bytes(64))
            raw.setblocking(False)

            def has_ended() -> bool:
                try:
                    while raw.recv(4096):
                        pass
                except BlockingIOError:
                    return False
                return True

            await eventually_async(has_ended)
        assert len(bench.events) == 1

    run(body)


def test_a_second_use_of_an_open_id_is_refused_by_name_and_harms_not_the_first_P1() -> None:
    async def body(bench: Bench) -> None:
        peer = bench.peer()
        peer.say(generate("a"))
        (heard,) = await bench.said(1)
        for message in (
            generate("a"),
            Ping(id=RequestId("a")),
            Subscribe(id=RequestId("a")),
            Load(id=RequestId("a"), model=ModelName("m")),
        ):
            peer.say(message)
            refused = await peer.hear()
            assert isinstance(refused, Failed)
            assert refused.error["code"] == "duplicate_id"
            assert refused.error["detail"] == {"id": "a", "refused": "second use"}
        assert len(bench.events) == 1
        bench.clients.send(heard.connection, deltas("a", 0))
        assert await peer.hear() == deltas("a", 0)
        peer.close()
        await bench.gone(1)  # so it was still open

    run(body)


def test_a_connection_has_so_many_requests_open_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(clients_module, "MAX_OPEN_PER_CONNECTION", 3)

    async def body(bench: Bench) -> None:
        peer = bench.peer()
        for id in ("a", "b", "c", "d"):
            peer.say(generate(id))
        refused = await peer.hear()
        assert isinstance(refused, Failed)
        assert (refused.id, refused.error["code"]) == ("d", "overloaded")
        (first, *_) = await bench.said(3)
        bench.clients.send(first.connection, done("a", 0))
        assert await peer.hear() == done("a", 0)
        peer.say(generate("d"))
        await bench.said(4)

    run(body)


def test_a_connection_has_one_subscription_and_ids_that_collide_leave_none_behind() -> None:
    async def body(bench: Bench) -> None:
        peer = bench.peer()
        peer.say(Subscribe(id=RequestId("s")))
        (heard,) = await bench.said(1)
        peer.say(generate("s"))
        assert isinstance(await peer.hear(), Failed)
        peer.say(Subscribe(id=RequestId("t")))
        await bench.said(2)
        superseded = Failed(id="s", error={"code": "superseded"})
        bench.clients.send(heard.connection, superseded)
        assert await peer.hear() == superseded
        bench.clients.send(heard.connection, EventMessage(id=RequestId("t"), value={}))
        assert await peer.hear() == EventMessage(id=RequestId("t"), value={})
        peer.close()
        await bench.gone(1)

    run(body)
