"""Test readers that attach to the stream of another request."""

from __future__ import annotations

from typing import Any

import pytest

from mlxsup.protocol.client_messages import Attach, Cancel, CancelRequest, Deltas, Done, Failed
from mlxsup.protocol.delta import DeltaBody, pack_body
from mlxsup.protocol.ids import RequestId, RequestKey, pack_tokens
from mlxsup.protocol.states import Channel, FinishReason
from mlxsup.protocol.worker_messages import CancelRow, Render, Rendered, RowDelta, Step
from mlxsup.supervisor.core import attaching
from mlxsup.supervisor.core.events import ClientTooSlow

from support.core.driver import Driver, entry
from support.core.looks import ALICE, BOB
from support.core.scripts import play

TOKEN = pack_tokens([9])
EARLIER = pack_body(DeltaBody(text="earlier"))


def up(*ids: str) -> tuple[Driver, list[RequestKey]]:
    """A model that runs these, beside an idle one."""
    driver = Driver([entry(), entry("other")])
    for name in ("m", "other"):
        driver.load(name)
        driver.come_up(name)
    keys = driver.serve(*ids)
    for key in keys:
        driver.accept(key)
    return driver, keys


def behind() -> tuple[Driver, RequestKey, Render]:
    """Bob joins an answer that has a token, which is to be rendered for him."""
    driver, [key] = up("one")
    driver.token(key)
    asked = attach(driver)
    assert asked is not None
    assert asked.before == pack_tokens([3]), "the last one of the prompt"
    return driver, key, asked


def attach(driver: Driver, request: str = "one", *, id: str = "join") -> Render | None:
    """Bob joins; returns what the worker is asked."""
    driver.say(Attach(id=RequestId(id), request=RequestId(request)), BOB)
    asked = driver.told(Render)
    return asked[0] if asked else None


def pieces(driver: Driver) -> list[tuple[str, int, bytes, bytes]]:
    """What Bob got from the latest event."""
    return [
        (str(delta.id), delta.seq, delta.tokens, delta.body)
        for message in driver.sent(Deltas, BOB)
        for delta in message.deltas
    ]


def body(text: str) -> bytes:
    return pack_body(DeltaBody(text=text))


def test_attach_before_the_first_token_gets_every_piece() -> None:
    driver, [key] = up("one")
    assert attach(driver) is None, "there is nothing to render"
    driver.token(key)
    assert pieces(driver) == [("join", 0, TOKEN, body("x"))]
    driver.token(key, finish=FinishReason.STOP)
    assert pieces(driver) == [("join", 1, TOKEN, body("x"))]
    [end], [own] = driver.sent(Done, BOB), driver.sent(Done, ALICE)
    assert (end.id, end.seq, end.finish_reason) == ("join", 2, FinishReason.STOP)
    assert (end.usage, end.timings, end.seed) == (own.usage, own.timings, own.seed)


def test_a_newcomer_gets_no_piece_of_the_prompt() -> None:
    driver, [key] = up("one")
    assert attach(driver) is None
    shown = RowDelta(key=key, text="p", channel=Channel.PROMPT, is_prompt=True)
    driver.worker(Step(step=1, rows=[shown], between_steps=1))
    assert pieces(driver) == []
    driver.token(key)
    assert pieces(driver) == [("join", 0, TOKEN, body("x"))]


def test_earlier_text_is_rendered_before_later_pieces() -> None:
    driver, [key] = up("one")
    driver.token(key)
    driver.token(key)
    asked = attach(driver)
    assert asked is not None
    assert (asked.delivered, asked.seed, asked.fingerprint) == (TOKEN * 2, 5, "f")
    driver.token(key)
    assert pieces(driver) == [], "it waits"
    bodies = [pack_body(DeltaBody(text="why", channel=Channel.REASONING)), EARLIER]
    driver.worker(Rendered(number=asked.number, bodies=bodies))
    assert pieces(driver) == [
        ("join", 0, TOKEN * 2, bodies[0]),
        ("join", 1, b"", bodies[1]),
        ("join", 2, TOKEN, body("x")),
    ]
    driver.token(key)
    assert pieces(driver) == [("join", 3, TOKEN, body("x"))]


def test_end_waits_for_the_rendered_text() -> None:
    driver, key, asked = behind()
    driver.token(key, finish=FinishReason.LENGTH)
    assert driver.sent_in_order(BOB) == []
    driver.worker(Rendered(number=asked.number, bodies=[EARLIER]))
    assert [piece[1:] for piece in pieces(driver)] == [(0, TOKEN, EARLIER), (1, TOKEN, body("x"))]
    [end] = driver.sent(Done, BOB)
    assert (end.seq, end.finish_reason) == (2, FinishReason.LENGTH)


@pytest.mark.parametrize("is_behind", [False, True])
def test_leaving_ends_the_listening_and_not_the_request(is_behind: bool) -> None:
    driver, [key] = up("one")
    if is_behind:
        driver.token(key)
    asked = attach(driver)
    driver.say(Cancel(id=RequestId("join")), BOB)
    [end] = driver.sent(Done, BOB)
    assert (end.id, end.finish_reason) == ("join", FinishReason.CANCELLED)
    assert driver.told(CancelRow) == []
    driver.token(key)
    assert (len(driver.sent(Deltas, ALICE)), driver.sent_in_order(BOB)) == (1, [])
    if asked is not None:
        driver.worker(Rendered(number=asked.number, bodies=[EARLIER]))
        assert driver.sent_in_order(BOB) == []
    driver.token(key, finish=FinishReason.STOP)
    assert (len(driver.sent(Done, ALICE)), driver.sent_in_order(BOB)) == (1, [])


def test_slow_reader_fails_alone_H7() -> None:
    driver, [key] = up("one")
    attach(driver)
    driver.do(ClientTooSlow(now=driver.now, connection=BOB))
    assert driver.errors(BOB) == {"join": "slow_consumer"}
    driver.token(key)
    assert (len(driver.sent(Deltas, ALICE)), driver.sent_in_order(BOB)) == (1, [])


@pytest.mark.parametrize("how", ["cancel", "gone", "cancel_request"])
def test_cancel_of_the_request_ends_its_readers(how: str) -> None:
    driver, [key] = up("one")
    attach(driver)
    driver.token(key)
    if how == "cancel":
        driver.cancel("one")
    elif how == "gone":
        driver.leave(ALICE)
    else:
        driver.say(CancelRequest(id=RequestId("c"), request=RequestId("one")), ALICE)
    [end] = driver.sent(Done, BOB)
    assert (end.id, end.seq, end.finish_reason) == ("join", 1, FinishReason.CANCELLED)


def test_connection_that_is_gone_gets_no_end_of_its_own_request() -> None:
    driver, _ = up("one")
    driver.say(Attach(id=RequestId("join"), request=RequestId("one")), ALICE)
    driver.leave(ALICE)
    assert driver.sent(Done, ALICE) == []


def test_error_reaches_readers_under_their_own_id() -> None:
    driver, _ = up()
    play(driver, "serve one resume=False; accept 1")
    attach(driver)
    play(driver, "token 1; exit -> errors={one: worker_crashed}")
    assert driver.errors(BOB) == {"join": "worker_crashed"}


def test_readers_get_every_token_once_over_a_crash() -> None:
    driver, _ = up("one")
    attach(driver)
    play(driver, "token 1; exit; up; accept 1; token 1 finish=stop")
    assert pieces(driver) == [("join", 1, TOKEN, body("x"))]
    assert [end.resumed for end in driver.sent(Done, BOB)] == [1]


def test_a_worker_that_dies_over_a_question_is_an_error_and_asking_waits_for_the_next() -> None:
    driver, key, _ = behind()
    driver.exit()
    [failed] = driver.sent(Failed, BOB)
    assert failed.error.code == "worker_crashed"
    assert failed.error.detail == {
        "model": "m",
        "request": "one",
        "cause": "its worker has ended or is too slow",
    }
    assert failed.error.retryable
    attach(driver, id="again")
    assert driver.errors(BOB) == {"again": "invalid_request"}, "no worker can render it now"
    driver.come_up()
    driver.accept(key)
    assert attach(driver, id="later") is not None


def test_an_answer_of_another_engine_is_not_shown() -> None:
    driver, key, asked = behind()
    driver.worker(Rendered(number=asked.number, bodies=[]))
    assert driver.errors(BOB) == {"join": "invalid_request"}
    driver.token(key)
    assert driver.sent_in_order(BOB) == []


def test_only_the_answer_of_the_model_and_to_its_question_counts() -> None:
    driver, _, asked = behind()
    driver.worker(Rendered(number=asked.number, bodies=[EARLIER]), model="other")
    driver.worker(Rendered(number=99, bodies=[EARLIER]))
    assert driver.sent_in_order(BOB) == []
    driver.exit("other")
    assert driver.errors(BOB) == {}, "the crash of another model"
    driver.worker(Rendered(number=asked.number, bodies=[EARLIER]))
    assert len(pieces(driver)) == 1


def test_two_streams_never_come_under_one_id_of_a_connection() -> None:
    driver, [key] = up("one")
    driver.ask("two", connection=BOB)
    assert attach(driver, id="two") is None
    assert driver.errors(BOB) == {"two": "duplicate_id"}
    attach(driver, id="join")
    driver.ask("join", connection=BOB)
    assert driver.errors(BOB) == {"join": "duplicate_id"}
    driver.token(key)
    assert pieces(driver) == [("join", 0, TOKEN, body("x"))], "who had joined hears on"


def test_readers_of_a_request_are_bounded() -> None:
    driver, [key] = up("one")
    for number in range(attaching.MOST_READERS):
        attach(driver, id=f"join{number}")
    attach(driver, id="late")
    assert driver.errors(BOB) == {"late": "invalid_request"}
    driver.token(key)
    assert len(pieces(driver)) == attaching.MOST_READERS


def test_pieces_held_for_rendering_are_bounded(monkeypatch: Any) -> None:
    monkeypatch.setattr(attaching, "MOST_HELD_BYTES", 3 * len(TOKEN + body("x")))
    driver, key, _ = behind()
    for _ in range(3):
        driver.token(key)
        assert driver.sent_in_order(BOB) == []
    driver.token(key)
    assert driver.errors(BOB) == {"join": "worker_crashed"}


def test_what_is_not_open_is_refused() -> None:
    driver, [key] = up("one")
    attach(driver, "nobody")
    assert driver.errors(BOB) == {"join": "invalid_request"}
    driver.token(key, finish=FinishReason.STOP)
    attach(driver, "one", id="late")
    assert driver.errors(BOB) == {"late": "invalid_request"}
    assert attach(driver, "nobody", id="x") is None
