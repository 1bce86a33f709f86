"""What a client is owed, when it is tried again and given up, with a played socket."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import zmq

from mlxsup.protocol.client_messages import (
    Done,
    Event,
    Ping,
    Subscribe,
)
from mlxsup.protocol.codec import encode
from mlxsup.protocol.ids import RequestId
from mlxsup.protocol.states import FinishReason
from mlxsup.supervisor.core.events import ClientGone, ClientSaid, ClientTooSlow
from mlxsup.supervisor.sockets import clients as clients_module
from mlxsup.supervisor.sockets.outbox import MESSAGE_OVERHEAD_BYTES
from mlxsup.supervisor.sockets.transport import NO_SOURCE

from support.played_clients import ME, OTHER, THIRD, Stage, reply

GIVEN_UP = "the client did not read its answers; they were dropped"


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Stage:
    return Stage(monkeypatch, tmp_path / "c.sock")


# ---------------------------------------------------------------- refusals


def test_each_refusal_says_all_that_its_client_needs(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients_module, "MAX_OPEN_PER_CONNECTION", 1)
    own = "a client must not set a routing id: another connection could take its place"
    stage.ask("a", b"me")
    stage.ask("b", b"\1aaaa")
    stage.ask("c", ME, NO_SOURCE)
    stage.ask("d")
    stage.ask("e")
    codes = ["invalid_request"] * 3 + ["overloaded"]
    texts = [own, own, "a client must speak ZMTP 3, which ZeroMQ 4 does"]
    texts.append("a connection has at most 1 requests open")
    assert [(f.id, f.error["code"], f.error["message"]) for f in stage.failed()] == list(
        zip("abce", codes, texts, strict=True)
    )
    assert [said.message.id for said in stage.of_kind(ClientSaid)] == ["d"]


@pytest.mark.parametrize(("turns", "asked"), [([True] * 9, 8), ([True, False, True], 2)])
def test_the_news_of_an_arrival_are_looked_for_as_far_as_they_can_have_come(
    stage: Stage, turns: list[bool], asked: int
) -> None:
    stage.turns = iter(turns)
    stage.socket.source = 8
    stage.take([ME, *encode(Ping(id=RequestId("r")))])
    assert len(list(stage.turns)) == len(turns) - asked
    stage.turns = iter([True])
    stage.ask("s", OTHER, 9)  # of which it has heard
    assert list(stage.turns) == [True]


# ---------------------------------------------------------------- retries


def test_who_has_no_room_is_tried_after_twice_the_time_and_half_a_second_at_most(
    stage: Stage,
) -> None:
    stage.ask()
    stage.full.add(ME)
    stage.clients.send(ME, reply())
    waits_s = []
    for _ in range(12):
        waits_s += stage.loop.waits_s()
        stage.loop.fire()
    assert waits_s == [0.001 * 2**n for n in range(9)] + [0.5] * 3
    stage.full.clear()
    stage.loop.fire()
    assert (stage.sent_to(), stage.loop.timers) == ([reply()], [])
    assert len(stage.tried) == 14


def test_one_that_reads_some_is_tried_soon_and_has_its_time_again(stage: Stage) -> None:
    stage.say(Subscribe(id=RequestId("s")))
    stage.full.add(ME)
    for number in range(2):
        stage.clients.send(ME, Event(id=RequestId("s"), value={"n": number}))
    stage.loop.fire()
    assert stage.loop.waits_s() == [0.002]
    send, room = stage.socket.send, iter([True, False])
    stage.socket.send = lambda frames: next(room)
    stage.now += 6.0
    stage.loop.fire()
    assert stage.loop.waits_s() == [0.001]
    stage.socket.send = send
    stage.now += 10.0  # since it read, which is just in time
    stage.clients.pulse()
    assert stage.of_kind(ClientTooSlow) == []
    stage.now += 0.5
    stage.clients.pulse()
    assert stage.of_kind(ClientTooSlow) == [ClientTooSlow(now=116.5, connection=ME)]


def test_all_whose_time_comes_within_a_millisecond_are_tried_together(stage: Stage) -> None:
    start = stage.loop.moment
    for number, (id, later_s) in enumerate([(ME, 0.0), (OTHER, 0.0005), (THIRD, 0.25)]):
        stage.ask("r", id, 7 + number)
        stage.full.add(id)
        stage.loop.moment = start + later_s
        stage.clients.send(id, reply())
    stage.tried.clear()
    stage.loop.fire()
    assert stage.tried == [ME, OTHER]
    assert stage.loop.waits_s() == [0.002], "the earliest of all"
    stage.loop.fire()
    assert stage.tried == [ME, OTHER] * 2


def test_an_earlier_time_takes_the_place_of_a_later_one_and_no_other_does(stage: Stage) -> None:
    stage.ask()
    stage.ask("r", OTHER, 8)
    stage.full = {ME, OTHER}
    stage.clients.send(ME, reply())
    for _ in range(5):
        stage.loop.fire()
    assert stage.loop.waits_s() == [0.032]
    stage.clients.send(OTHER, reply())
    assert stage.loop.waits_s() == [0.001]
    stage.ask("s")  # who writes is tried, and again after twice its time
    assert stage.loop.waits_s() == [0.001]


def test_who_writes_gets_at_once_what_there_is_room_for_by_now(stage: Stage) -> None:
    stage.ask()
    stage.full.add(ME)
    stage.clients.send(ME, reply())
    stage.full.clear()
    assert stage.sent_to() == []
    stage.ask("s")
    assert stage.sent_to() == [reply()]


# ---------------------------------------------------------------- those who do not read


@pytest.mark.parametrize("limit", ["MAX_UNSENT_BYTES", "MAX_UNSENT_IN_ALL_BYTES"])
def test_a_client_may_owe_as_much_as_the_limit_and_no_byte_more_P15(
    stage: Stage, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = MESSAGE_OVERHEAD_BYTES + sum(map(len, encode(reply())))
    monkeypatch.setattr(clients_module, limit, 2 * size)
    stage.ask()
    stage.ask("open")
    stage.full.add(ME)
    stage.clients.send(ME, reply())
    stage.clients.send(ME, reply())
    assert stage.of_kind(ClientTooSlow) == []
    stage.clients.send(ME, reply())
    assert len(stage.of_kind(ClientTooSlow)) == 1


def test_who_is_given_up_is_told_so_and_keeps_nothing_but_its_ends_P15(stage: Stage) -> None:
    stage.say(Subscribe(id=RequestId("s")))
    stage.ask("r")
    stage.full.add(ME)
    stage.clients.send(ME, Done(id=RequestId("r"), seq=0, finish_reason=FinishReason.STOP))
    stage.clients.send(ME, Event(id=RequestId("s"), value={}))
    stage.now += 10.5
    stage.clients.pulse()
    stage.clients.send(ME, Event(id=RequestId("s"), value={}))
    stage.full.clear()
    stage.loop.fire()
    assert stage.sent_to() == stage.failed()
    assert [(end.id, end.error["message"]) for end in stage.failed()] == [
        ("r", GIVEN_UP),
        ("s", GIVEN_UP),
    ]
    stage.sent.clear()
    stage.clients.pulse()
    assert stage.sent == [], "nothing of it is still open"


def test_who_still_does_not_read_counts_as_gone_after_as_long_again(stage: Stage) -> None:
    stage.ask("r")
    stage.ask("open")
    stage.full.add(ME)
    stage.clients.send(ME, reply())
    stage.now += 10.5
    stage.clients.pulse()
    stage.now += 10.0
    stage.clients.pulse()
    assert (stage.of_kind(ClientGone), stage.turned_away) == ([], [])
    stage.now += 0.5
    stage.clients.pulse()
    assert stage.of_kind(ClientGone) == [ClientGone(now=121.0, connection=ME)]
    assert stage.turned_away == [7]
    stage.tried.clear()
    stage.loop.fire()
    assert (stage.tried, stage.loop.timers) == ([], [])
    asyncio.run(asyncio.wait_for(stage.clients.finish(1e6), 60.0))  # the end waits for nobody


def test_a_descriptor_that_is_another_s_by_now_is_left_alone(stage: Stage) -> None:
    stage.ask("r")
    stage.ask("open")
    stage.full.add(ME)
    stage.clients.send(ME, reply())
    stage.ask("r", OTHER, 7)
    for _ in range(2):
        stage.now += 10.5
        stage.clients.pulse()
    assert [gone.connection for gone in stage.of_kind(ClientGone)] == [ME]
    assert stage.turned_away == []
    stage.happens(zmq.EVENT_DISCONNECTED, 7)
    stage.gone.add(OTHER)
    stage.loop.timers[:] = stage.loop.timers[-1:]
    stage.loop.fire()
    assert [gone.connection for gone in stage.of_kind(ClientGone)] == [ME, OTHER]
