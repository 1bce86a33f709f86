"""The step loop as an object: rounds, slots, idling and its end; no process, socket or sleep."""

import pytest

from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.states import FinishReason, WorkerPhase
from mlxsup.protocol.worker_messages import (
    Accepted,
    Exit,
    Rejected,
)
from mlxsup.worker.engine import EngineBytes
from mlxsup.worker.engines.fake.text import answer_tokens, decode_tokens, encode_text
from mlxsup.worker.idle_time import GIVE_BACK_AFTER_S
from mlxsup.worker.link import LinkBrokenError
from mlxsup.worker.text_threads import Refused

from support.loop_bench import BUDGETS, STOPS, Bench


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_one_round_is_insert_step_send_and_the_acceptance_goes_first_C1(bench: Bench) -> None:
    bench.start(1)
    assert bench.loop.turn()
    assert bench.story == ["send accepted", "insert 1", "step", "send step"]


def test_one_message_holds_every_rows_delta_C1(bench: Bench) -> None:
    bench.start(1, 2, 3)
    for _ in range(4):
        bench.loop.turn()
    assert len(bench.steps()) == bench.story.count("step") == 4
    assert {row.key for row in bench.steps()[-1].rows} == {1, 2, 3}
    assert [step.step for step in bench.steps()] == [1, 2, 3, 4]


def test_a_request_that_arrives_in_mid_decode_is_in_by_the_next_step_C2(bench: Bench) -> None:
    bench.start(1)
    bench.loop.turn()
    bench.start(2)
    bench.loop.turn()
    assert bench.story[-4:] == ["send accepted", "insert 2", "step", "send step"]
    assert bench.finishes() == {}, "it did not wait for the batch to empty"


def test_never_more_rows_than_slots_and_first_come_first_in(bench: Bench) -> None:
    bench.start(*range(1, 7))
    bench.loop.turn()
    assert [s for s in bench.story if s.startswith("insert")] == [
        f"insert {k}" for k in (1, 2, 3, 4)
    ]
    assert sum(isinstance(message, Accepted) for message in bench.link.outbox) == 6
    while bench.loop.turn():
        pass
    assert bench.finishes() == dict.fromkeys(range(1, 7), FinishReason.LENGTH)
    assert [s for s in bench.story if s.startswith("insert")][4:] == ["insert 5", "insert 6"]


def test_an_engine_without_a_request_gives_back_once_after_a_while(bench: Bench) -> None:
    bench.run()
    bench.now = GIVE_BACK_AFTER_S - 1
    bench.run()
    assert "give back" not in bench.story
    bench.start(1)
    while bench.loop.turn():
        pass
    bench.now = GIVE_BACK_AFTER_S + 1
    bench.run()
    assert "give back" not in bench.story, "the time counts from the last request"
    bench.now = 3 * GIVE_BACK_AFTER_S
    bench.run()
    bench.run()
    assert bench.story.count("give back") == 1


def test_no_step_when_idle_C5(bench: Bench) -> None:
    assert [bench.loop.turn() for _ in range(3)] == [False] * 3
    assert bench.story == []


def test_idle_waits_and_publishes_it_C5(bench: Bench) -> None:
    phases = []

    def see() -> None:
        phases.append(bench.board.current.phase)
        bench.link.inbox.append(Exit())

    bench.link.on_wait = see
    bench.loop.run(lambda: False)
    assert bench.link.waits == 1
    assert phases == [WorkerPhase.IDLE]
    assert bench.loop.is_exit_asked


def test_memory_is_looked_at_again_once_the_last_step_is_long_over(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, seen = [EngineBytes(active=30), EngineBytes(active=13)], []
    monkeypatch.setattr(bench.engine, "bytes_held", lambda: held[0])

    def see() -> None:
        seen.append((bench.link.waited_s, bench.board.current.held.active))
        bench.now += bench.link.waited_s or 0.0
        del held[:-1]
        if len(seen) == 2:
            bench.link.inbox.append(Exit())

    bench.link.on_wait = see
    bench.loop.run(lambda: False)
    assert seen == [(0.5, 30), (2.5, 13)]


def test_no_token_waits_for_what_a_step_leaves_to_do(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its message is on its way before a row that has ended leaves the batch, and is kept."""
    tokens = answer_tokens(encode_text("ppp"), 8)
    monkeypatch.setitem(STOPS, 1, [decode_tokens(tokens)])
    monkeypatch.setitem(BUDGETS, 1, 20)
    bench.start(1)
    while bench.loop.turn():
        pass
    assert bench.story[-3:] == ["step", "send step", "remove 1"]
    settled_after = bench.engine.settled_after
    assert settled_after == ["send step"] * (bench.story.count("step") - 1) + ["remove 1"]


def test_stop_strings_of_one_step_change_the_batch_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = answer_tokens(encode_text("ppp"), 8)
    for key in (1, 2, 3):
        # The fake engine reads one prompt in a step: each answer is a token behind the one before.
        monkeypatch.setitem(STOPS, key, [decode_tokens(tokens[: 9 - key])])
        monkeypatch.setitem(BUDGETS, key, 20)
    bench.start(1, 2, 3, 4)
    while bench.loop.turn():
        pass
    assert [said for said in bench.story if said.startswith("remove")] == ["remove 1 2 3"]
    assert bench.finishes() == dict.fromkeys((1, 2, 3), FinishReason.STOP) | {
        4: FinishReason.LENGTH
    }


def test_a_refused_request_fails_alone_C7(bench: Bench) -> None:
    bench.start(1)
    bench.dispatch(2)
    bench.loop.drain()
    error = RemoteError(ErrorCode.INVALID_REQUEST, "wrong")
    bench.text.results.append(Refused(key=RequestKey(2), error=error))
    while bench.loop.turn():
        pass
    rejected = [message for message in bench.link.outbox if isinstance(message, Rejected)]
    assert [(r.key, r.error["code"]) for r in rejected] == [(2, "invalid_request")]
    assert bench.finishes() == {1: FinishReason.LENGTH}


def test_a_supervisor_that_does_not_read_stops_the_steps_but_not_the_cancels(bench: Bench) -> None:
    bench.start(1, 2)
    bench.loop.turn()
    bench.link.is_blocked = True
    bench.cancel(1)
    assert not bench.loop.turn()
    assert bench.story.count("step") == 1
    assert bench.story[-1] == "remove 1"
    bench.link.is_blocked = False
    assert bench.loop.turn()
    assert bench.finishes() == {1: FinishReason.CANCELLED}


def test_a_key_dispatched_twice_breaks_the_protocol(bench: Bench) -> None:
    bench.dispatch(1)
    bench.dispatch(1)
    with pytest.raises(LinkBrokenError, match="twice"):
        bench.loop.turn()


def test_an_exit_stops_the_steps(bench: Bench) -> None:
    bench.start(1)
    bench.loop.turn()
    bench.link.inbox.append(Exit())
    bench.loop.run(lambda: False)
    assert bench.loop.is_exit_asked
    assert bench.story.count("step") == 1
