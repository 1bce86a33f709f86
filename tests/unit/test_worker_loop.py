"""The step loop, turn by turn, with a scripted engine, text side and link."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.protocol.ids import RequestKey, pack_tokens
from mlxsup.protocol.launch import TEXT_LIMIT_STEPS
from mlxsup.protocol.states import FinishReason, WorkerPhase
from mlxsup.protocol.worker_messages import (
    Acceptance,
    Accepted,
    CancelRow,
    Exit,
    PrefillProgress,
    Rejected,
    Resume,
    RowDelta,
    Step,
)
from mlxsup.worker.engine import EngineBytes, RowPrefill, RowToken, StepResult, WorkerFaultError
from mlxsup.worker.engines.fake.text import encode_text
from mlxsup.worker.idle_time import FREE_AFTER_S, GIVE_BACK_AFTER_S, LOOK_AGAIN_AFTER_S
from mlxsup.worker.link import LinkBrokenError
from mlxsup.worker.preparing import StuckPreprocessingError
from mlxsup.worker.text.grammar import Grammar
from mlxsup.worker.text_threads import Refused

from support.worker.turn_bench import STEP_TIMEOUT_S, A, B, Bench, C, X

TEXT_LIMIT_S = TEXT_LIMIT_STEPS * STEP_TIMEOUT_S


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_request_is_prepared_accepted_and_read_with_the_models_sampling(bench: Bench) -> None:
    bench.dispatch(A)
    assert bench.around.submitted == [(A, b"body", None)]
    bench.prepare(A)
    bench.engine.results = [StepResult(prefill=[RowPrefill(key=A, done=2, total=3),
                                                RowPrefill(key=C, done=1, total=1)])]  # fmt: skip
    assert bench.loop.turn()
    accepted, step = bench.sent()
    assert isinstance(accepted, Accepted)
    assert (accepted.key, accepted.tokenize_s) == (A, 0.25)
    assert accepted.acceptance.parameters["temperature"] == 0.5
    assert (accepted.acceptance.prompt_tokens, accepted.acceptance.fingerprint) == (
        pack_tokens([5, 6, 7]), "f"
    )  # fmt: skip
    assert bench.engine.rows[A].sampling.temperature == 0.5
    assert step == Step(step=1, prefill=[PrefillProgress(key=A, done=2, total=3)])


def test_a_step_says_what_it_cost_and_for_which_rows(bench: Bench) -> None:
    """A row that left before it is no part of it."""
    bench.start(A, B)
    bench.around.inbox.append(CancelRow(key=B))
    bench.engine.results = [
        StepResult(tokens=[RowToken(key=A, token=X)],
                   prefill=[RowPrefill(key=A, done=3, total=3, computed=2)],
                   took_s=0.5, decode_s=0.125)
    ]  # fmt: skip
    bench.loop.turn()
    [step] = bench.sent()
    assert isinstance(step, Step)
    assert [row.key for row in step.rows] == [B, A]
    assert (step.took_s, step.decode_s, step.between_steps) == (0.5, 0.125, 1)
    assert step.prefill == [PrefillProgress(key=A, done=3, total=3, computed=2)]
    bench.engine.results = [StepResult(tokens=[RowToken(key=A, token=X)])]
    bench.loop.turn()
    assert [step.between_steps for step in bench.sent() if isinstance(step, Step)] == [0]


@pytest.mark.parametrize(("cached", "told"), [(0, 0), (2, 2), (3, 3), (5, 3)])
def test_the_first_token_says_what_of_the_prompt_was_known_and_how_long_the_rest_took(
    bench: Bench, cached: int, told: int
) -> None:
    bench.engine.cached = cached
    bench.start(A)
    bench.now += 1.5
    bench.engine.results = [StepResult(tokens=[RowToken(key=A, token=X)])]
    bench.loop.turn()
    [step] = bench.sent()
    assert step == Step(
        step=2,
        rows=[RowDelta(key=A, text="x", tokens=pack_tokens([X]), prefill_s=1.5,
                       cached_tokens=told)],
    )  # fmt: skip


def test_before_a_step_the_board_says_all_of_it_F5(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    step = bench.engine.step

    def look() -> StepResult:
        seen.append(bench.board.current)
        return step()

    monkeypatch.setattr(bench.engine, "step", look)
    bench.engine.results = [
        StepResult(), StepResult(tokens=[RowToken(key=A, token=X)])
    ]  # fmt: skip
    bench.dispatch(A)
    bench.prepare(A)
    for _ in range(3):
        bench.loop.turn()
    assert [(one.phase, one.step) for one in seen] == [
        (WorkerPhase.PREFILL, 0), (WorkerPhase.PREFILL, 1), (WorkerPhase.DECODE, 2)
    ]  # fmt: skip
    assert (seen[0].predicted_s, seen[0].prefill_chunk) == (0.75, 64)
    assert (seen[0].held, seen[0].since) == (EngineBytes(active=1, cache=2, peak=3), 1000.0)
    assert (seen[0].books.requests, seen[0].books.sent) == (1, 1)


def test_a_token_of_a_row_that_has_left_takes_it_out_D8(bench: Bench) -> None:
    bench.start(A)
    bench.engine.rows[C] = bench.engine.rows[A]
    bench.engine.results = [StepResult(tokens=[RowToken(key=C, token=X), RowToken(key=A, token=X)])]
    bench.loop.turn()
    assert bench.engine.removed == [(C,)]
    [step] = bench.sent()
    assert isinstance(step, Step)
    assert [row.key for row in step.rows] == [A]


def test_a_row_that_ended_by_itself_is_not_taken_out_again(bench: Bench) -> None:
    bench.start(A)
    bench.engine.results = [
        StepResult(tokens=[RowToken(key=A, token=X, finish=FinishReason.LENGTH)],
                   prefill=[RowPrefill(key=A, done=3, total=3)])
    ]  # fmt: skip
    bench.loop.turn()
    [step] = bench.sent()
    assert isinstance(step, Step)
    assert ([row.finish for row in step.rows], step.prefill) == ([FinishReason.LENGTH], [])
    assert bench.engine.removed == []
    assert bench.loop.open_keys == frozenset()
    assert not bench.loop.turn()
    assert bench.sent() == []


def form(*, is_refused: bool) -> Grammar:
    """A grammar that was given up, or was not."""
    matcher = SimpleNamespace(
        is_error=lambda: is_refused,
        get_error=lambda: "too complex",
        is_stopped=lambda: False,
        consume_token=lambda token: None,
    )
    return Grammar(matcher, [])


@pytest.mark.parametrize("is_refused", [True, False])
def test_an_answer_whose_form_was_given_up_ends_as_refused(bench: Bench, is_refused: bool) -> None:
    grammar = form(is_refused=is_refused)
    error = grammar.refusal
    assert (error is not None) is is_refused
    bench.dispatch(A)
    bench.prepare(A, grammar=grammar)
    bench.loop.turn()
    bench.sent()
    bench.engine.results = [StepResult(tokens=[RowToken(key=A, token=X, finish=FinishReason.STOP)])]
    bench.loop.turn()
    step, *rest = bench.sent()
    assert isinstance(step, Step)
    assert [row.finish for row in step.rows] == [None if error else FinishReason.STOP]
    assert rest == ([Rejected(key=A, error=error.to_wire())] if error else [])
    assert bench.loop.open_keys == frozenset()


def test_a_request_above_the_context_fails_alone_I6(bench: Bench) -> None:
    bench.dispatch(A, B)
    bench.prepare(A, max_tokens=97)
    bench.prepare(B)
    bench.loop.turn()
    rejected, accepted, _ = bench.sent()
    assert isinstance(rejected, Rejected)
    assert isinstance(accepted, Accepted)
    assert (rejected.key, rejected.error["code"]) == (A, "context_length_exceeded")
    assert bench.loop.open_keys == {B}


def test_cancels_take_a_request_out_wherever_it_is_D2(bench: Bench) -> None:
    bench.start(A, B)
    bench.dispatch(C, RequestKey(4))
    bench.prepare(C)
    bench.loop.turn()
    bench.sent()
    books = bench.board.current.books
    assert (books.requests, books.preparing) == (4, 1), "two in their rows, one waits for a row"
    for key in (A, C, RequestKey(4)):
        bench.around.inbox.append(CancelRow(key=key))
    bench.loop.turn()
    assert bench.around.forgotten == [RequestKey(4)]
    assert bench.engine.removed == [(A,)]
    [step] = bench.sent()
    assert isinstance(step, Step)
    assert step.rows == [
        RowDelta(key=key, finish=FinishReason.CANCELLED) for key in (A, C, RequestKey(4))
    ]
    assert bench.loop.open_keys == {B}


@pytest.mark.parametrize(("rows", "is_fault"), [(1, True), (2, False), (3, False)])
def test_an_engine_may_hold_more_rows_than_run_and_never_fewer_P23(
    bench: Bench, rows: int, is_fault: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.start(A, B)
    monkeypatch.setattr(bench.engine, "row_count", lambda: rows)
    if not is_fault:
        assert bench.loop.turn()
        return
    with pytest.raises(WorkerFaultError, match=r"^the engine has 1 rows, and not 2$"):
        bench.loop.turn()


def test_an_exit_that_is_there_when_the_loop_ends_is_seen(bench: Bench) -> None:
    bench.around.inbox.append(Exit())
    bench.loop.run(lambda: True)
    assert bench.loop.is_exit_asked
    assert bench.sent() == []


def test_a_row_that_a_stop_string_ended_leaves_the_engine_with_that_step(bench: Bench) -> None:
    """Its next token would take it out too, but only after it has cost one more pass."""
    bench.start(A, stop=["x"])
    bench.engine.results = [StepResult(tokens=[RowToken(key=A, token=X)])]
    bench.loop.turn()
    assert bench.engine.removed == [(A,)]
    [step] = bench.sent()
    assert step == Step(
        step=2,
        rows=[RowDelta(key=A, tokens=pack_tokens([X]), prefill_s=0.0, cached_tokens=0,
                       finish=FinishReason.STOP, stop="x")],
    )  # fmt: skip


# ---------------------------------------------------------------- turns of four places


@pytest.fixture
def four() -> Bench:
    """A loop of four places whose engine gives each row an "x" in each step."""
    bench = Bench(places=4)
    bench.engine.plays = True
    return bench


def ask(bench: Bench, *keys: int, max_tokens: int = 5, **body: Any) -> None:
    """Dispatch and prepare requests, so that the next turn inserts them."""
    for key in map(RequestKey, keys):
        bench.dispatch(key)
        bench.prepare(key, max_tokens=max_tokens, **body)


def calls(bench: Bench, name: str) -> list[str]:
    """Return the calls of one name so far, in order."""
    return [said for said in bench.story if said.split()[0] == name]


def steps(bench: Bench) -> list[Step]:
    return [message for message in bench.around.sent_messages if isinstance(message, Step)]


def ends(bench: Bench) -> dict[int, FinishReason]:
    return {row.key: row.finish for step in steps(bench) for row in step.rows if row.finish}


CANCELLED, LENGTH, STOP = FinishReason.CANCELLED, FinishReason.LENGTH, FinishReason.STOP


def test_a_turn_accepts_inserts_steps_and_sends_in_this_order_C1(four: Bench) -> None:
    ask(four, 1)
    assert four.loop.turn()
    assert four.story == ["send accepted", "insert 1", "step", "send step"]


def test_no_more_rows_than_places_are_inserted_and_in_order(four: Bench) -> None:
    ask(four, *range(1, 7))
    four.loop.turn()
    assert calls(four, "insert") == [f"insert {key}" for key in (1, 2, 3, 4)]
    assert len([said for said in four.story if said == "send accepted"]) == 6
    four.run_out()
    assert ends(four) == dict.fromkeys(range(1, 7), LENGTH)
    assert calls(four, "insert")[4:] == ["insert 5", "insert 6"]


def test_an_idle_loop_makes_no_step_waits_and_publishes_it_C5(four: Bench) -> None:
    phases = []

    def see() -> None:
        phases.append(four.board.current.phase)
        four.around.inbox.append(Exit())

    four.around.on_wait = see
    four.loop.run(lambda: False)
    assert (len(four.around.waited_s), phases) == (1, [WorkerPhase.IDLE])
    assert four.loop.is_exit_asked
    assert four.story == []


def test_a_step_is_sent_before_ended_rows_leave_and_the_engine_settles(four: Bench) -> None:
    ask(four, 1, max_tokens=20, stop=["x" * 8])
    four.run_out()
    assert four.story[-3:] == ["step", "send step", "remove 1"]
    settled = ["send step"] * (len(calls(four, "step")) - 1) + ["remove 1"]
    assert four.engine.settled_after == settled


def test_stop_strings_found_in_one_step_change_the_batch_once(four: Bench) -> None:
    ask(four, 1, 2, 3, stop=["xx"])
    ask(four, 4)
    four.run_out()
    assert calls(four, "remove") == ["remove 1 2 3"]
    assert ends(four) == {1: STOP, 2: STOP, 3: STOP, 4: LENGTH}


def test_a_request_that_the_text_side_refuses_fails_alone_C7(four: Bench) -> None:
    ask(four, 1)
    four.dispatch(B)
    error = RemoteError(ErrorCode.INVALID_REQUEST, "wrong")
    four.around.ready.append(Refused(key=B, error=error))
    four.run_out()
    rejected = [said for said in four.around.sent_messages if isinstance(said, Rejected)]
    assert [(said.key, said.error["code"]) for said in rejected] == [(2, "invalid_request")]
    assert ends(four) == {1: LENGTH}


def test_a_supervisor_that_does_not_read_stops_the_steps_but_not_the_cancels(four: Bench) -> None:
    ask(four, 1, 2)
    four.loop.turn()
    four.around.is_blocked = True
    four.cancel(1)
    assert not four.loop.turn()
    assert len(calls(four, "step")) == 1
    assert four.story[-1] == "remove 1"
    four.around.is_blocked = False
    assert four.loop.turn()
    assert ends(four) == {1: CANCELLED}


def test_a_key_dispatched_twice_breaks_the_protocol(four: Bench) -> None:
    with pytest.raises(LinkBrokenError, match="twice"):
        four.dispatch(A, A)


def test_an_exit_stops_the_steps(four: Bench) -> None:
    ask(four, 1)
    four.loop.turn()
    four.around.inbox.append(Exit())
    four.loop.run(lambda: False)
    assert four.loop.is_exit_asked
    assert len(calls(four, "step")) == 1


def test_an_exception_out_of_a_step_leaves_the_loop_F3(
    four: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode() -> StepResult:
        raise ValueError("broken")

    monkeypatch.setattr(four.engine, "step", explode)
    ask(four, 1)
    with pytest.raises(ValueError, match="broken"):
        four.loop.run(lambda: False)


def test_the_preparation_of_a_cancelled_request_has_its_limit_too(four: Bench) -> None:
    four.dispatch(A)
    four.cancel(1)
    four.run()
    start = four.now
    # The first wait comes after the engine has freed what it keeps for reuse, the second after it
    # has given back all that it kept.
    for idle_s in (FREE_AFTER_S, GIVE_BACK_AFTER_S):
        four.now = start + idle_s
        four.around.busy_with = (A, four.now - TEXT_LIMIT_S + 20.0)
        four.run()
        assert four.around.waited_s[-1] == 20.0
    assert four.engine.returned == 1


def test_beats_name_the_phase_of_work_between_steps_P23(four: Bench) -> None:
    seen: dict[str, WorkerPhase] = {}

    def note(name: str) -> None:
        method = getattr(four.engine, name)

        def call(*arguments: Any, **named: Any) -> Any:
            seen[name] = four.board.current.phase
            return method(*arguments, **named)

        setattr(four.engine, name, call)

    for name in ("insert", "remove", "bytes_held", "give_back", "step"):
        note(name)
    ask(four, 1)
    four.loop.turn()
    four.cancel(1)
    four.loop.turn()
    four.run()
    four.now += 2 * GIVE_BACK_AFTER_S
    four.run()
    assert seen.pop("step") is WorkerPhase.PREFILL
    assert seen == dict.fromkeys(("insert", "remove", "bytes_held", "give_back"), WorkerPhase.ROWS)


def test_beats_count_what_is_held_and_what_was_exchanged_P23(four: Bench) -> None:
    def books() -> tuple[int, int, int, int]:
        held = four.board.current.books
        return held.requests, held.preparing, held.sent, held.received

    counts = []
    four.around.on_wait = lambda: counts.append(books())
    four.dispatch(A, B)
    four.run()
    assert counts == [(2, 2, 0, 2)]
    for key in (A, B):
        four.prepare(key)
    four.loop.turn()
    assert books() == (2, 0, 2, 2), "both accepted"
    four.cancel(1)
    four.loop.turn()
    assert books() == (2, 0, 3, 3), "the end of a row that was cancelled has yet to be reported"
    four.loop.turn()
    assert books() == (1, 0, 4, 3)


# ---------------------------------------------------------------- cancels


def test_the_cancels_of_a_turn_change_the_batch_once_D3(four: Bench) -> None:
    """Each change costs a read for every layer; a second cancel and one of nothing are harmless."""
    ask(four, 1, 2, 3, 4, 5)
    four.loop.turn()
    four.cancel(3, 1, 99, 3, 4, 5)
    four.loop.turn()
    assert calls(four, "remove") == ["remove 3 1 4"]
    assert ends(four) == dict.fromkeys((1, 3, 4, 5), CANCELLED)
    assert four.loop.open_keys == {2}


def test_a_cancel_while_nothing_steps_is_answered_at_once(four: Bench) -> None:
    ask(four, 1)
    four.loop.turn()
    four.cancel(1)
    assert not four.loop.turn()
    assert ends(four) == {1: CANCELLED}
    assert steps(four)[-1].step == 1, "no step was made for it"


def test_a_cancel_while_tokenising_drops_the_late_result_G5_D2(four: Bench) -> None:
    four.dispatch(A)
    four.cancel(1)
    four.loop.turn()
    assert ends(four) == {1: CANCELLED}
    four.prepare(A)
    four.loop.turn()
    assert calls(four, "insert") == []
    assert four.loop.open_keys == frozenset()


def test_a_cancel_that_overtakes_its_request_is_remembered_D5(four: Bench) -> None:
    ask(four, 2)
    four.cancel(1)
    four.loop.turn()
    four.dispatch(A)
    assert [given[0] for given in four.around.submitted] == [B], "its prompt is not prepared"
    four.loop.turn()
    four.dispatch(C)
    four.loop.turn()
    assert ends(four) == {1: CANCELLED}
    assert four.loop.open_keys == {2, 3}
    four.loop.turn()
    assert four.board.current.books.requests == 2


def test_as_many_early_cancels_are_remembered_as_there_are_places_D5_D9(four: Bench) -> None:
    four.cancel(*range(1, 1001))
    four.loop.turn()
    assert four.loop.open_keys == frozenset()
    four.dispatch(*map(RequestKey, range(996, 1001)))
    four.loop.turn()
    assert ends(four) == dict.fromkeys((997, 998, 999, 1000), CANCELLED)
    assert four.loop.open_keys == {996}


class Churn(RuleBasedStateMachine):
    """Dispatches, preparations, turns and cancels in any order: one end each, nothing left."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench(places=4)
        self.bench.engine.plays = True
        self.next_key = 1

    @rule(count=st.integers(1, 3))
    def dispatch(self, count: int) -> None:
        self.bench.dispatch(*map(RequestKey, range(self.next_key, self.next_key + count)))
        self.next_key += count

    @rule()
    def prepare(self) -> None:
        for key, *_ in self.bench.around.submitted:
            self.bench.prepare(key, max_tokens=key % 7 + 1)
        self.bench.around.submitted.clear()

    @rule()
    def turn(self) -> None:
        self.bench.loop.turn()

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.bench.cancel(data.draw(st.integers(1, self.next_key)))

    @rule(is_blocked=st.booleans())
    def block(self, is_blocked: bool) -> None:
        self.bench.around.is_blocked = is_blocked

    @invariant()
    def one_end_each_and_nothing_after_it(self) -> None:
        ended: set[int] = set()
        for step in steps(self.bench):
            for row in step.rows:
                assert row.key not in ended
                if row.finish is not None:
                    ended.add(row.key)

    def teardown(self) -> None:
        self.bench.around.is_blocked = False
        around = self.bench.around
        while around.inbox or around.submitted or self.bench.loop.open_keys:
            self.bench.loop.drain()
            self.prepare()
            self.bench.loop.turn()
        self.bench.loop.turn()
        # A cancel can come before its request only for a key that was not dispatched yet.
        assert set(ends(self.bench)) == set(range(1, self.next_key))
        assert not self.bench.engine.has_rows()
        super().teardown()


TestChurnD2D9 = Churn.TestCase

TestChurnD2D9.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)


# ---------------------------------------------------------------- time limits


def test_a_row_begins_only_while_what_was_accepted_can_leave(bench: Bench) -> None:
    bench.dispatch(A)
    bench.prepare(A)
    bench.around.flushes = [True, False]
    assert not bench.loop.turn()
    assert list(bench.engine.rows) == [A], "in its place, and not read yet"
    assert [message.TYPE for message in bench.sent()] == ["accepted"]
    assert bench.loop.turn()


def test_a_preparation_has_the_time_of_some_steps(bench: Bench) -> None:
    bench.dispatch(A)
    bench.around.busy_with = (A, bench.now - TEXT_LIMIT_S + 0.25)
    assert bench.loop.text_time_left_s() == 0.25
    bench.now += 0.25
    with pytest.raises(StuckPreprocessingError) as caught:
        bench.loop.turn()
    said = f"preparing the prompt of request 1 took more than {TEXT_LIMIT_S:g} s"
    assert str(caught.value) == said


def test_the_wait_for_a_beginning_counts_from_the_first_that_waits(bench: Bench) -> None:
    assert bench.loop.text_time_left_s() is None
    bench.dispatch(A)
    bench.now += 1.0
    bench.dispatch(B)
    assert bench.loop.text_time_left_s() == TEXT_LIMIT_S - 1.0
    bench.prepare(A)
    bench.loop.turn()
    assert bench.loop.text_time_left_s() == TEXT_LIMIT_S, "one was prepared: it works"
    bench.now += TEXT_LIMIT_S
    with pytest.raises(WorkerFaultError, match=r"^a thread that prepares prompts does not begin$"):
        bench.loop.turn()
    bench.around.is_there = False
    with pytest.raises(WorkerFaultError, match=r"^a thread that prepares prompts has ended$"):
        bench.loop.turn()


def test_a_prompt_that_was_ready_in_time_takes_the_whole_limit_anew(bench: Bench) -> None:
    bench.dispatch(A, B)
    bench.now += TEXT_LIMIT_S
    bench.prepare(A)
    assert bench.loop.text_time_left_s() == TEXT_LIMIT_S
    assert bench.loop.open_keys == {A, B}


def test_an_idle_engine_is_waited_with_until_it_gives_back(bench: Bench) -> None:
    assert (LOOK_AGAIN_AFTER_S, FREE_AFTER_S, GIVE_BACK_AFTER_S) == (0.5, 3.0, 300.0)
    assert bench.loop.wait_s() == 0.5
    bench.now += 0.5
    assert bench.loop.wait_s() == 2.5
    bench.now += 2.5
    assert (bench.loop.wait_s(), bench.engine.freed, bench.engine.returned) == (297.0, 1, 0)
    bench.now += 296.0
    assert bench.loop.wait_s() == 1.0
    bench.around.busy_with = (A, bench.now)
    assert bench.loop.wait_s() == 1.0, "the nearer of the two"
    bench.now += 1.0
    assert bench.loop.wait_s() == TEXT_LIMIT_S - 1.0
    bench.around.busy_with = None
    assert (bench.loop.wait_s(), bench.engine.returned) == (None, 1)
    bench.now += 1000.0
    assert (bench.loop.wait_s(), bench.engine.returned) == (None, 1)
    bench.dispatch(A)
    assert bench.loop.wait_s() == TEXT_LIMIT_S
    bench.around.inbox.append(Exit())


def resume_of(fingerprint: str, delivered: str) -> Resume:
    acceptance = Acceptance(
        prompt_tokens=pack_tokens([5, 6, 7]), opening="", parameters={"mine": 1}, seed=1,
        fingerprint=fingerprint,
    )  # fmt: skip
    return Resume(acceptance=acceptance, delivered=pack_tokens(encode_text(delivered)))


def test_a_resumed_request_is_accepted_as_it_was_and_continues_behind_it_F10(
    bench: Bench,
) -> None:
    resume = resume_of("f", "ab")
    bench.dispatch(A, resume=resume)
    assert bench.around.submitted == [(A, b"body", resume)]
    bench.prepare(A, resume=resume)
    bench.loop.turn()
    accepted = bench.sent()[0]
    assert isinstance(accepted, Accepted)
    assert accepted.acceptance == resume.acceptance
    assert bench.engine.rows[A].delivered == encode_text("ab")


def test_a_resume_in_another_model_is_refused_before_it_is_prepared_F10(bench: Bench) -> None:
    bench.dispatch(A, resume=resume_of("g", "ab"))
    [rejected] = bench.sent()
    assert isinstance(rejected, Rejected)
    assert (rejected.key, rejected.error["code"]) == (A, "worker_crashed")
    assert (bench.around.submitted, bench.loop.open_keys) == ([], frozenset())


def test_a_resumed_answer_that_was_whole_ends_without_a_step_F10(bench: Bench) -> None:
    resume = resume_of("f", "ab")
    bench.dispatch(A, resume=resume)
    bench.prepare(A, resume=resume, max_tokens=2)
    assert not bench.loop.turn()
    end = RowDelta(key=A, finish=FinishReason.LENGTH)
    assert bench.sent()[1:] == [Step(step=0, rows=[end], between_steps=1)]
    assert bench.engine.rows == {}
