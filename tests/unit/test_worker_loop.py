"""The step loop, turn by turn, with a scripted engine, text side, link and clock."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.protocol.ids import RequestKey, pack_tokens
from mlxsup.protocol.launch import TEXT_LIMIT_STEPS
from mlxsup.protocol.pooling import PoolingBody
from mlxsup.protocol.states import FinishReason, RowState, WorkerPhase
from mlxsup.protocol.worker_messages import (
    Acceptance,
    Accepted,
    CancelRow,
    DropKept,
    Exit,
    Lease,
    Leases,
    PauseRow,
    PrefillProgress,
    Rejected,
    Resume,
    RowDelta,
    RowDrafts,
    Step,
)
from mlxsup.worker.engine import (
    Guessed,
    Prompt,
    RowPrefill,
    RowToken,
    StepResult,
    WorkerFaultError,
)
from mlxsup.worker.idle_time import FREE_AFTER_S, GIVE_BACK_AFTER_S, LOOK_AGAIN_AFTER_S
from mlxsup.worker.link import LinkBrokenError
from mlxsup.worker.text.grammar import Grammar
from mlxsup.worker.text_threads import Refused, Tokenised
from mlxsup.worker.tokenising import StuckPreprocessingError

from support.worker.turn_bench import FACTS, STEP_TIMEOUT_S, A, B, Bench, C, D, X, x

CANCELLED, LENGTH, STOP = FinishReason.CANCELLED, FinishReason.LENGTH, FinishReason.STOP
TEXT_LIMIT_S = TEXT_LIMIT_STEPS * STEP_TIMEOUT_S


@pytest.fixture
def bench() -> Bench:
    return Bench()


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


def cancels(*keys: int) -> list[CancelRow]:
    return [CancelRow(key=RequestKey(key)) for key in keys]


def calls(bench: Bench, name: str) -> list[str]:
    """Return the calls of one name so far, in order."""
    return [said for said in bench.story if said.split()[0] == name]


# ---------------------------------------------------------------- turns
def test_a_request_is_prepared_accepted_and_read_with_the_models_sampling(bench: Bench) -> None:
    bench.dispatch(A)
    assert bench.around.submitted == [(A, b"body", None)]
    bench.prepare(A)
    bench.give(prefill=[RowPrefill(key=A, done=2, total=3), RowPrefill(key=C, done=1, total=1)])
    accepted, step = bench.turn()
    assert isinstance(accepted, Accepted)
    assert (accepted.key, accepted.tokenize_s) == (A, 0.25)
    made = accepted.acceptance
    assert (made.prompt_tokens, made.fingerprint) == (pack_tokens([5, 6, 7]), "f")
    assert made.parameters["temperature"] == bench.engine.rows[A].sampling.temperature == 0.5
    assert step == Step(step=1, prefill=[PrefillProgress(key=A, done=2, total=3)])
    assert bench.story == ["send accepted", "insert 1", "step", "send step"]


def test_a_step_says_what_it_cost_and_which_rows_left_before_it(bench: Bench) -> None:
    bench.start(A, B)
    read = RowPrefill(key=A, done=3, total=3, computed=2)
    bench.give(x(A), prefill=[read], took_s=0.5, decode_s=0.125)
    [step] = bench.turn(*cancels(B))
    assert isinstance(step, Step)
    assert [row.key for row in step.rows] == [B, A]
    assert (step.took_s, step.decode_s, step.between_steps) == (0.5, 0.125, 1)
    assert step.prefill == [PrefillProgress(key=A, done=3, total=3, computed=2)]
    bench.give(x(A))
    [step] = bench.turn()
    assert isinstance(step, Step)
    assert step.between_steps == 0


@pytest.mark.parametrize(
    ("stop", "tokens", "accepted"), [([], 3, 2), ([], 4, 3), (["xx"], 4, 1), ([], 0, 0)], ids=str
)
def test_guesses_that_were_right_are_tokens_of_the_answer_behind_the_first(
    bench: Bench, stop: list[str], tokens: int, accepted: int
) -> None:
    bench.start(A, stop=stop)
    bench.give(*[x(A)] * tokens, guessed={A: Guessed(read=4, accepted=3)})
    [step] = bench.turn()
    assert isinstance(step, Step)
    assert step.drafts == [RowDrafts(key=A, read=4, accepted=accepted)]
    assert calls(bench, "remove") == ["remove 1"] * len(stop), "only once"


def test_beats_say_what_prompts_cost_the_rows_beside_them_and_what_new_shapes_took(
    bench: Bench,
) -> None:
    bench.start(A)  # nothing decodes yet
    bench.give(x(A), took_s=9.0)
    bench.turn()
    bench.give(x(A), took_s=9.0, decode_s=9.0)  # nothing is read
    bench.turn()
    bench.start(B)
    for took_s, decode_s in ((3.0, 1.0), (1.0, 1.0)):  # a chunk, and a step between two of them
        bench.give(x(A), took_s=took_s, decode_s=decode_s, is_new_shape=took_s > 1.0)
        bench.turn()
    beat = bench.board.beat()
    assert (beat.interleaved_s, beat.interleaved_decode_s) == (4.0, 2.0)
    assert (beat.shapes_seen, beat.shapes_s) == (1, 3.0)


@pytest.mark.parametrize(("cached", "told"), [(0, 0), (2, 2), (3, 3), (5, 3)])
def test_the_first_token_says_how_it_was_picked_what_was_cached_and_how_long_the_rest_took(
    bench: Bench, cached: int, told: int
) -> None:
    bench.engine.cached = cached
    bench.start(A)
    bench.now += 1.5
    bench.give(x(A))
    assert bench.rows() == [
        RowDelta(
            key=A, text="x", tokens=pack_tokens([X]), prefill_s=1.5, cached_tokens=told,
            sampling={"temperature": 0.5},
        )
    ]  # fmt: skip


def test_tokens_that_another_prompt_has_read_for_a_row_are_told_as_cached(bench: Bench) -> None:
    bench.start(A)
    bench.give(prefill=[RowPrefill(key=A, done=3, total=3, known=2)])
    bench.turn()
    bench.give(x(A))
    assert [row.cached_tokens for row in bench.rows()] == [2]


@pytest.mark.parametrize("delivered", [[], [1]])
def test_a_request_for_vectors_gets_those_that_it_does_not_have(
    bench: Bench, delivered: list[int]
) -> None:
    body = PoolingBody(texts=["a", "bc"], dimensions=4)
    prompt = Prompt(tokens=[5, 6, 7], lengths=(1, 2))
    seen = pack_tokens(delivered)
    resume = replace(resume_of(delivered=0), delivered=seen) if delivered else None
    bench.dispatch(A, resume=resume)
    bench.around.ready.append(
        Tokenised(key=A, body=body, prompt=prompt, tokenize_s=0.0, resume=resume)
    )
    accepted, _ = bench.turn()
    assert isinstance(accepted, Accepted)
    made = accepted.acceptance
    if resume is None:
        assert (made.prompt_tokens, made.fingerprint) == (pack_tokens([5, 6, 7]), "f")
        assert made.parameters == {"dimensions": 4, "lengths": [1, 2]}
    else:
        assert made == resume.acceptance
    row = bench.engine.rows[A]
    assert (row.lengths, row.dimensions, row.delivered) == ((1, 2), 4, delivered)
    bench.now += 1.5
    left = [number for number in (1, 0) if number not in delivered]
    bench.give(*[RowToken(key=A, token=number, vector=b"v") for number in left])
    assert bench.rows() == [
        RowDelta(
            key=A, tokens=pack_tokens([number]), vector=b"v",
            prefill_s=1.5 if number == left[0] else None,
            finish=STOP if number == 0 else None,
        )
        for number in left
    ]  # fmt: skip
    assert bench.loop.open_keys == frozenset()


def test_before_a_step_the_board_says_all_of_it_F5(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    step = bench.engine.step

    def look() -> StepResult:
        seen.append(bench.board.beat())
        return step()

    monkeypatch.setattr(bench.engine, "step", look)
    bench.engine.results = [StepResult(), StepResult(tokens=[x(A)])]
    bench.engine.kept = {B: 4}
    bench.dispatch(A)
    bench.prepare(A)
    for _ in range(3):
        bench.turn()
    assert [(one.phase, one.step) for one in seen] == [
        (WorkerPhase.PREFILL, 0), (WorkerPhase.PREFILL, 1), (WorkerPhase.DECODE, 2)
    ]  # fmt: skip
    assert seen[0].predicted_s == 0.75
    assert (seen[0].active_bytes, seen[0].cache_bytes, seen[0].peak_bytes) == (1, 2, 3)
    assert (seen[0].kept_bytes, seen[0].prefix_bytes) == (4, 5)
    assert (seen[0].phase_s, seen[0].requests, seen[0].sent) == (0.0, 1, 1)


def test_a_token_of_a_row_that_has_left_takes_it_out_D8(bench: Bench) -> None:
    bench.start(A)
    bench.engine.rows[C] = bench.engine.rows[A]
    bench.give(x(C), x(A))
    assert [row.key for row in bench.rows()] == [A]
    assert bench.engine.removed == [(C,)]


def test_a_row_that_ended_by_itself_is_not_taken_out_again(bench: Bench) -> None:
    bench.start(A)
    bench.give(x(A, LENGTH), prefill=[RowPrefill(key=A, done=3, total=3)])
    [step] = bench.turn()
    assert isinstance(step, Step)
    assert ([row.finish for row in step.rows], step.prefill) == ([LENGTH], [])
    assert (bench.engine.removed, bench.loop.open_keys) == ([], frozenset())
    assert (bench.turn(), bench.has_stepped) == ([], False)


def test_a_row_that_a_stop_string_ended_leaves_the_engine_with_that_step(bench: Bench) -> None:
    """Its next token would take it out too, but only after it has cost one more pass."""
    bench.start(A, stop=["x"])
    bench.give(x(A))
    assert bench.rows() == [
        RowDelta(key=A, tokens=pack_tokens([X]), prefill_s=0.0, cached_tokens=0,
                 sampling={"temperature": 0.5},
                 finish=STOP, stop="x")
    ]  # fmt: skip
    assert bench.engine.removed == [(A,)]


def test_a_step_is_sent_before_ended_rows_leave_together_and_the_engine_settles(
    four: Bench,
) -> None:
    ask(four, 1, 2, 3, max_tokens=20, stop=["xx"])
    ask(four, 4, max_tokens=3)
    four.run_out()
    assert four.ends == {1: STOP, 2: STOP, 3: STOP, 4: LENGTH}
    assert calls(four, "remove") == ["remove 1 2 3"]
    assert four.story[-5:] == ["step", "send step", "remove 1 2 3", "step", "send step"]
    assert four.engine.settled_after == ["send step", "remove 1 2 3", "send step"]


@pytest.mark.parametrize("is_refused", [True, False])
def test_an_answer_whose_form_was_given_up_ends_as_refused(bench: Bench, is_refused: bool) -> None:
    matcher = SimpleNamespace(
        is_error=lambda: is_refused,
        get_error=lambda: "too complex",
        is_stopped=lambda: False,
        consume_token=lambda token: None,
        get_grammar_warnings=list,
    )
    grammar = Grammar(matcher, [])
    bench.dispatch(A)
    bench.prepare(A, grammar=grammar)
    bench.turn()
    bench.give(x(A, STOP))
    step, *rest = bench.turn()
    assert isinstance(step, Step)
    assert [row.finish for row in step.rows] == [None if is_refused else STOP]
    error = grammar.refusal(is_over=True)
    assert (error is not None) is is_refused
    assert rest == ([Rejected(key=A, error=error)] if error else [])
    assert bench.loop.open_keys == frozenset()


def test_a_request_with_something_wrong_fails_alone_C7_I6(bench: Bench) -> None:
    bench.dispatch(A, B)
    bench.prepare(A, max_tokens=97)
    bench.around.ready.append(Refused(key=B, error=RemoteError(ErrorCode.INVALID_REQUEST, "wrong")))
    ask(bench, C)
    rejected = [said for said in bench.turn() if isinstance(said, Rejected)]
    assert [(said.key, said.error.code) for said in rejected] == [
        (A, "context_length_exceeded"), (B, "invalid_request")
    ]  # fmt: skip
    assert list(bench.engine.rows) == [C]
    assert bench.loop.open_keys == {C}


@pytest.mark.parametrize(("rows", "is_fault"), [(1, True), (2, False), (3, False)])
def test_an_engine_may_hold_more_rows_than_run_and_never_fewer_P23(
    bench: Bench, rows: int, is_fault: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.start(A, B)
    monkeypatch.setattr(bench.engine, "row_count", lambda: rows)
    if is_fault:
        with pytest.raises(WorkerFaultError, match=r"^the engine has 1 rows, and not 2$"):
            bench.turn()
    else:
        bench.turn()
        assert bench.has_stepped


def test_no_more_rows_than_places_are_inserted_and_in_order(four: Bench) -> None:
    ask(four, *range(1, 7))
    assert [said.TYPE for said in four.turn()] == ["accepted"] * 6 + ["step"]
    assert calls(four, "insert") == [f"insert {key}" for key in (1, 2, 3, 4)]
    four.run_out()
    assert four.ends == dict.fromkeys(range(1, 7), LENGTH)
    assert calls(four, "insert")[4:] == ["insert 5", "insert 6"]


def test_an_idle_loop_makes_no_step_waits_and_publishes_it_C5(four: Bench) -> None:
    phases = []

    def see() -> None:
        phases.append(four.board.beat().phase)
        four.around.inbox.append(Exit())

    four.around.on_wait = see
    four.loop.run(lambda: False)
    assert (len(four.around.waited_s), phases) == (1, [WorkerPhase.IDLE])
    assert four.loop.is_exit_asked
    assert four.story == []


@pytest.mark.parametrize("has_rows", [True, False])
def test_an_exit_stops_the_steps_and_is_seen_when_the_loop_ends(
    four: Bench, has_rows: bool
) -> None:
    if has_rows:
        four.start(A)
    four.around.inbox.append(Exit())
    four.loop.run(lambda: not has_rows)
    assert four.loop.is_exit_asked
    assert len(calls(four, "step")) == has_rows


def test_a_supervisor_that_does_not_read_stops_the_steps_but_not_the_cancels(four: Bench) -> None:
    four.start(A, B)
    four.around.is_blocked = True
    four.turn(*cancels(1))
    assert not four.has_stepped
    assert four.story[-1] == "remove 1"
    four.around.is_blocked = False
    four.turn()
    assert four.has_stepped
    assert four.ends == {1: CANCELLED}


def test_a_row_begins_only_while_what_was_accepted_can_leave(bench: Bench) -> None:
    bench.dispatch(A)
    bench.prepare(A)
    bench.around.flushes = [True, False]
    assert [message.TYPE for message in bench.turn()] == ["accepted"]
    assert (list(bench.engine.rows), bench.has_stepped) == ([A], False)
    bench.turn()
    assert bench.has_stepped


def test_a_key_dispatched_twice_breaks_the_protocol(four: Bench) -> None:
    with pytest.raises(LinkBrokenError, match="twice"):
        four.dispatch(A, A)


def test_an_exception_out_of_a_step_leaves_the_loop_F3(
    four: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode() -> StepResult:
        raise ValueError("broken")

    monkeypatch.setattr(four.engine, "step", explode)
    ask(four, 1)
    with pytest.raises(ValueError, match="broken"):
        four.loop.run(lambda: False)


def test_beats_name_the_phase_of_work_between_steps_P23(four: Bench) -> None:
    seen: dict[str, WorkerPhase] = {}

    def note(name: str) -> None:
        method = getattr(four.engine, name)

        def call(*arguments: Any, **named: Any) -> Any:
            seen[name] = four.board.beat().phase
            return method(*arguments, **named)

        setattr(four.engine, name, call)

    for name in ("insert", "remove", "bytes_held", "give_back", "step"):
        note(name)
    four.start(A)
    four.turn(*cancels(1))
    four.run()
    four.now += 2 * GIVE_BACK_AFTER_S
    four.run()
    assert seen.pop("step") is WorkerPhase.PREFILL
    assert seen == dict.fromkeys(("insert", "remove", "bytes_held", "give_back"), WorkerPhase.ROWS)


def test_beats_count_what_is_held_and_what_was_exchanged_P23(four: Bench) -> None:
    def books() -> tuple[int, int, int, int]:
        beat = four.board.beat()
        return beat.requests, beat.preparing, beat.sent, beat.received

    counts = []
    four.around.on_wait = lambda: counts.append(books())
    four.dispatch(A, B)
    four.run()
    assert counts == [(2, 2, 0, 2)]
    four.prepare(A, B)
    four.turn()
    assert books() == (2, 0, 2, 2), "both accepted"
    four.turn(*cancels(1))
    assert books() == (2, 0, 3, 3), "the end of a row that was cancelled has yet to be reported"
    four.turn()
    assert books() == (1, 0, 4, 3)


# ---------------------------------------------------------------- cancels
def test_cancels_take_requests_out_wherever_they_are_in_one_change_D2_D3(four: Bench) -> None:
    """Each change costs a read for every layer; a second cancel and one of nothing are harmless."""
    ask(four, 1, 2, 3, 4, 5)
    four.dispatch(RequestKey(6))
    four.turn()
    beat = four.board.beat()
    assert (beat.requests, beat.preparing) == (6, 1)
    rows = four.rows(*cancels(3, 1, 99, 3, 4, 5, 6))
    assert rows[:5] == [RowDelta(key=RequestKey(key), finish=CANCELLED) for key in (3, 1, 4, 5, 6)]
    assert calls(four, "remove") == ["remove 3 1 4"]
    assert four.around.forgotten == [6]
    assert four.loop.open_keys == {2}


def test_a_cancel_while_nothing_steps_is_answered_at_once(four: Bench) -> None:
    four.start(A)
    assert four.turn(*cancels(1)) == [
        Step(step=1, rows=[RowDelta(key=A, finish=CANCELLED)], between_steps=1)
    ]
    assert not four.has_stepped


def test_a_cancel_while_tokenising_drops_the_late_result_G5_D2(four: Bench) -> None:
    four.dispatch(A)
    four.turn(*cancels(1))
    assert four.ends == {1: CANCELLED}
    four.prepare(A)
    four.turn()
    assert (calls(four, "insert"), four.loop.open_keys) == ([], frozenset())


def test_a_cancel_that_overtakes_its_request_is_remembered_D5(four: Bench) -> None:
    ask(four, 2)
    four.turn(*cancels(1))
    four.dispatch(A)
    assert [given[0] for given in four.around.submitted] == [B], "its prompt is not prepared"
    four.turn()
    four.dispatch(C)
    four.turn()
    assert four.ends == {1: CANCELLED}
    assert four.loop.open_keys == {2, 3}
    four.turn()
    assert four.board.beat().requests == 2


def test_as_many_early_cancels_are_remembered_as_there_are_places_D5_D9(four: Bench) -> None:
    four.turn(*cancels(*range(1, 1001)))
    assert four.loop.open_keys == frozenset()
    four.dispatch(*map(RequestKey, range(996, 1001)))
    four.turn()
    assert four.ends == dict.fromkeys((997, 998, 999, 1000), CANCELLED)
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
        self.bench.turn()

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.bench.around.inbox += cancels(data.draw(st.integers(1, self.next_key)))

    @rule(is_blocked=st.booleans())
    def block(self, is_blocked: bool) -> None:
        self.bench.around.is_blocked = is_blocked

    @invariant()
    def one_end_each_and_nothing_after_it(self) -> None:
        ended: set[int] = set()
        for step in self.bench.said:
            for row in step.rows if isinstance(step, Step) else ():
                assert row.key not in ended
                if row.finish is not None:
                    ended.add(row.key)

    def teardown(self) -> None:
        bench = self.bench
        bench.around.is_blocked = False
        while bench.around.inbox or bench.around.submitted or bench.loop.open_keys:
            bench.loop.drain()
            self.prepare()
            bench.turn()
        bench.turn()
        # A cancel can come before its request only for a key that was not dispatched yet.
        assert set(bench.ends) == set(range(1, self.next_key))
        assert not bench.engine.row_count()
        super().teardown()


TestChurnD2D9 = Churn.TestCase

TestChurnD2D9.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)


# ---------------------------------------------------------------- pauses
def pauses(*keys: RequestKey, keep: bool = True) -> list[PauseRow]:
    return [PauseRow(key=key, keep=keep) for key in keys]


@pytest.mark.parametrize(("keep", "state"), [(True, RowState.KEPT), (False, RowState.DROPPED)])
def test_rows_pause_in_one_change_and_each_says_whether_its_state_is_kept(
    bench: Bench, keep: bool, state: RowState
) -> None:
    bench.start(A, B)
    assert bench.rows(*pauses(A, B, keep=keep)) == [
        RowDelta(key=A, paused=state), RowDelta(key=B, paused=state)
    ]  # fmt: skip
    assert bench.engine.set_asides == [((A, B), keep)]
    assert (bench.engine.removed, bench.engine.dropped) == ([], [])
    assert bench.loop.open_keys == frozenset()


def test_a_pause_between_two_steps_is_counted_until_it_was_told(bench: Bench) -> None:
    bench.start(A, B)
    counts = []
    step = bench.engine.step

    def look() -> StepResult:
        counts.append(bench.board.beat().requests)
        return step()

    bench.engine.step = look  # type: ignore[method-assign]
    bench.turn(*pauses(A))
    assert counts == [2], "one runs, and one has left without the supervisor knowing"


@pytest.mark.parametrize(
    ("stop", "token"), [([], x(A, LENGTH)), (["x"], x(A))], ids=["token", "stop"]
)
def test_an_answer_that_ends_with_the_token_of_its_pause_is_not_paused(
    bench: Bench, stop: list[str], token: Any
) -> None:
    bench.start(A, stop=stop)
    bench.engine.ahead[A] = token
    [row] = bench.rows(*pauses(A))
    assert (row.finish, row.paused) == (STOP if stop else LENGTH, None)
    assert bench.engine.dropped == [A], "nothing comes back for its state"


def test_a_request_without_a_row_pauses_wherever_it_is(bench: Bench) -> None:
    bench.start(A, B)
    bench.dispatch(C, D)
    bench.prepare(C)
    bench.turn()
    assert bench.rows(*pauses(C, D)) == [
        RowDelta(key=key, paused=RowState.DROPPED) for key in (C, D)
    ]
    assert bench.around.forgotten == [D]
    assert bench.loop.open_keys == {A, B}


def test_a_pause_of_what_has_ended_or_is_cancelled_is_not_answered(bench: Bench) -> None:
    bench.start(A)
    assert bench.rows(*pauses(B)) == [], "its end is on the way"
    assert bench.rows(*pauses(A), *cancels(A)) == [RowDelta(key=A, finish=CANCELLED)]
    assert (bench.engine.set_asides, bench.engine.removed) == ([], [(A,)])


def test_a_state_that_is_not_needed_is_dropped(bench: Bench) -> None:
    assert bench.turn(DropKept(key=A)) == []
    assert bench.engine.dropped == [A]


# ---------------------------------------------------------------- resumes
def resume_of(fingerprint: str = "f", delivered: int = 2) -> Resume:
    acceptance = Acceptance(
        prompt_tokens=pack_tokens([5, 6, 7]), opening="", parameters={"mine": 1}, seed=1,
        fingerprint=fingerprint,
    )  # fmt: skip
    return Resume(acceptance=acceptance, delivered=pack_tokens([X] * delivered))


def test_a_resumed_request_is_accepted_as_it_was_and_continues_behind_it_F10(bench: Bench) -> None:
    resume = resume_of()
    bench.dispatch(A, resume=resume)
    assert bench.around.submitted == [(A, b"body", resume)]
    bench.prepare(A, resume=resume)
    accepted, _ = bench.turn()
    assert isinstance(accepted, Accepted)
    assert accepted.acceptance == resume.acceptance
    assert bench.engine.rows[A].delivered == [X, X]


def test_a_resume_with_an_adapter_needs_that_adapter_as_it_was_F10() -> None:
    bench = Bench(facts=replace(FACTS, adapters={"one": "f with one"}))
    bench.dispatch(A, resume=resume_of("f with one"), adapter="one")
    bench.dispatch(B, resume=resume_of("f"), adapter="one")
    assert [(said.key, said.error.code) for said in bench.sent() if isinstance(said, Rejected)] == [
        (B, "worker_crashed")
    ]
    assert bench.loop.open_keys == {A}


@pytest.mark.parametrize(("delivered", "reports"), [(1, 1), (1024, 1), (1025, 2), (2049, 3)])
def test_a_long_replay_says_again_and_again_that_it_progresses_P7(
    delivered: int, reports: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(facts=replace(FACTS, context_length=9999))
    resume = resume_of(delivered=delivered)
    bench.dispatch(A, resume=resume)
    bench.prepare(A, resume=resume, max_tokens=3000)
    publish, phases = bench.board.publish, list[WorkerPhase]()

    def noted(phase: WorkerPhase, **more: Any) -> None:
        phases.append(phase)
        publish(phase, **more)

    monkeypatch.setattr(bench.board, "publish", noted)
    bench.turn()
    beside = 3  # what is drained, what was prepared, and what is inserted
    assert phases == [WorkerPhase.ROWS] * (beside + reports) + [WorkerPhase.PREFILL]


@pytest.mark.parametrize(
    ("resume", "max_tokens", "code"),
    [
        (resume_of(), 0, ""),
        (resume_of("another"), 0, "worker_crashed"),
        (resume_of(), 97, "context_length_exceeded"),
        (resume_of(delivered=9), 9, ""),
    ],
    ids=["cancelled", "another model", "too long", "was whole"],
)
def test_a_kept_state_is_dropped_if_its_request_never_gets_a_row_again_F10(
    bench: Bench, resume: Resume, max_tokens: int, code: str
) -> None:
    bench.dispatch(A, resume=resume)
    if max_tokens:
        bench.prepare(A, resume=resume, max_tokens=max_tokens)
    elif not code:
        bench.around.inbox += cancels(1)
    said = [*bench.sent(), *bench.turn()]
    assert bench.engine.dropped == [A]
    codes = [one.error.code for one in said if isinstance(one, Rejected)]
    assert codes == [code] * bool(code)
    assert (bench.loop.open_keys, bench.engine.rows, bench.has_stepped) == (frozenset(), {}, False)
    assert len(bench.around.submitted) == (code != "worker_crashed")
    if max_tokens == 9:
        end = RowDelta(key=A, finish=LENGTH)
        assert said[1:] == [Step(step=0, rows=[end], between_steps=1)]


# ---------------------------------------------------------------- leases
NEEDED, NOT_NEEDED = Leases(are_needed=True), Leases(are_needed=False)


@pytest.fixture
def reader() -> Bench:
    """A worker that reads a long prompt, and knows of no leases."""
    bench = Bench()
    bench.engine.is_long, bench.engine.is_decoding = True, False
    bench.start(A)
    bench.engine.made.clear()
    return bench


def test_while_no_lease_is_needed_steps_say_whether_a_long_prompt_is_left(reader: Bench) -> None:
    assert [reader.turn() for _ in range(2)] == [
        [Step(step=2, reads_on=True)],
        [Step(step=3, reads_on=True)],
    ]
    reader.engine.is_long = False
    assert reader.turn() == [Step(step=4)]
    assert reader.turn(NEEDED) == [Step(step=5)], "short prompts take no lease"
    assert reader.engine.made == ["step"] * 4


def test_it_asks_once_and_reads_nothing_until_the_lease_comes(reader: Bench) -> None:
    asked = Step(step=1, reads_on=True, wants_lease=True, only_waits=True)
    assert reader.turn(NEEDED) == [asked]
    assert (reader.turn(), reader.engine.made) == ([], [])
    both = Step(step=2, reads_on=True, returns_lease=True, wants_lease=True, only_waits=True)
    assert reader.turn(Lease()) == [both], "one lease is for one chunk"
    assert (reader.turn(), reader.engine.made) == ([], ["step"])


def test_rows_that_decode_continue_while_it_waits(reader: Bench) -> None:
    reader.engine.is_decoding = True
    for number, messages in enumerate([(NEEDED,), (), ()], 2):
        assert reader.turn(*messages) == [
            Step(step=number, reads_on=True, wants_lease=bool(messages))
        ]
    assert reader.turn(Lease()) == [
        Step(step=5, reads_on=True, returns_lease=True, wants_lease=True)
    ]
    assert reader.engine.made == ["decode"] * 3 + ["step"]


def test_when_its_last_answer_ends_it_says_that_it_only_waits(reader: Bench) -> None:
    reader.engine.is_decoding = True
    reader.turn(NEEDED)
    reader.dispatch(B)
    reader.prepare(B)
    reader.turn()
    reader.engine.is_decoding = False
    [said] = reader.turn(*cancels(B))
    assert isinstance(said, Step)
    assert (said.wants_lease, said.only_waits) == (False, True)


def test_while_it_waits_the_beat_says_so_and_not_that_it_is_idle(reader: Bench) -> None:
    phases: list[WorkerPhase] = []
    reader.turn(NEEDED)
    reader.around.on_wait = lambda: phases.append(reader.board.beat().phase)
    reader.run()
    assert phases == [WorkerPhase.WAITING]


@pytest.mark.parametrize(
    ("message", "left"),
    [
        (CancelRow(key=A), {"finish": CANCELLED}),
        (PauseRow(key=A, keep=True), {"paused": RowState.KEPT}),
        (PauseRow(key=A, keep=False), {"paused": RowState.DROPPED}),
    ],
    ids=["cancel", "pause", "pause for long"],
)
def test_a_cancel_or_a_pause_needs_no_lease_and_a_late_one_goes_back_at_once(
    reader: Bench, message: CancelRow | PauseRow, left: dict[str, Any]
) -> None:
    reader.turn(NEEDED)
    reader.engine.is_long = False
    assert reader.turn(message) == [Step(step=1, rows=[RowDelta(key=A, **left)], between_steps=1)]
    assert reader.engine.rows == {}
    assert reader.turn(Lease()) == [Step(step=1, returns_lease=True)]
    assert (reader.turn(), reader.engine.made) == ([], [])


def test_requests_are_taken_in_while_it_waits_and_an_exit_ends_the_wait(reader: Bench) -> None:
    reader.turn(NEEDED)
    reader.dispatch(B)
    reader.prepare(B)
    reader.turn()
    assert set(reader.engine.rows) == {A, B}
    reader.turn(Exit())
    assert reader.loop.is_exit_asked
    assert reader.engine.made == []


def test_a_lease_that_was_asked_for_is_waited_for_though_none_is_needed_any_longer(
    reader: Bench,
) -> None:
    reader.turn(NEEDED)
    reader.turn(NOT_NEEDED)
    assert not reader.has_stepped
    assert reader.turn(Lease()) == [Step(step=2, reads_on=True, returns_lease=True)]
    assert reader.turn() == [Step(step=3, reads_on=True)]


@pytest.mark.parametrize("messages", [(Lease(),), (NEEDED, Lease()), (Lease(), Lease())], ids=str)
def test_a_lease_that_was_not_asked_for_breaks_the_link(
    reader: Bench, messages: tuple[Lease | Leases, ...]
) -> None:
    if messages == (Lease(), Lease()):
        reader.turn(NEEDED)
    with pytest.raises(LinkBrokenError, match=r"^a lease came that was not asked for$"):
        reader.turn(*messages)


# ---------------------------------------------------------------- time limits
def test_a_preparation_has_the_time_of_some_steps(bench: Bench) -> None:
    bench.dispatch(A)
    bench.around.busy_with = (A, bench.now - TEXT_LIMIT_S + 0.25)
    assert bench.loop.text_time_left_s() == 0.25
    bench.now += 0.25
    said = f"^preparing the prompt of request 1 took more than {TEXT_LIMIT_S:g} s$"
    with pytest.raises(StuckPreprocessingError, match=said):
        bench.turn()


def test_the_preparation_of_a_cancelled_request_has_its_limit_too(four: Bench) -> None:
    four.dispatch(A)
    four.around.inbox += cancels(1)
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


def test_the_wait_for_a_beginning_counts_from_the_first_that_waits(bench: Bench) -> None:
    assert bench.loop.text_time_left_s() is None
    bench.dispatch(A)
    bench.now += 1.0
    bench.dispatch(B)
    assert bench.loop.text_time_left_s() == TEXT_LIMIT_S - 1.0
    bench.prepare(A)
    bench.turn()
    assert bench.loop.text_time_left_s() == TEXT_LIMIT_S, "one was prepared: it works"
    bench.now += TEXT_LIMIT_S
    with pytest.raises(WorkerFaultError, match=r"^a thread that prepares prompts does not begin$"):
        bench.turn()
    bench.around.is_there = False
    with pytest.raises(WorkerFaultError, match=r"^a thread that prepares prompts has ended$"):
        bench.turn()


def test_a_prompt_that_was_ready_in_time_takes_the_whole_limit_anew(bench: Bench) -> None:
    bench.dispatch(A, B)
    bench.now += TEXT_LIMIT_S
    bench.prepare(A)
    assert bench.loop.text_time_left_s() == TEXT_LIMIT_S
    assert bench.loop.open_keys == {A, B}


def test_an_idle_engine_is_waited_with_until_it_gives_back(bench: Bench) -> None:
    assert bench.loop.wait_s() == LOOK_AGAIN_AFTER_S
    bench.now += LOOK_AGAIN_AFTER_S
    assert bench.loop.wait_s() == FREE_AFTER_S - LOOK_AGAIN_AFTER_S
    bench.now += FREE_AFTER_S - LOOK_AGAIN_AFTER_S
    left_s = GIVE_BACK_AFTER_S - FREE_AFTER_S
    assert (bench.loop.wait_s(), bench.engine.freed, bench.engine.returned) == (left_s, 1, 0)
    bench.now += left_s - 1.0
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


def test_an_engine_prepares_for_later_once_nothing_has_come_for_a_while(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that waited for the load, or are resumed, come some milliseconds after READY, and a
    piece of such work takes a GPU 0.4 s."""
    phases: list[WorkerPhase] = []

    def prepare() -> bool:
        phases.append(bench.board.beat().phase)
        return len(phases) < 3

    def turns(after_s: float) -> list[bool]:
        bench.now += after_s
        bench.loop.wait_s()
        return [bench.loop.turn() for _ in range(4)]

    monkeypatch.setattr(bench.engine, "prepare", prepare)
    assert turns(0.0) == turns(LOOK_AGAIN_AFTER_S - 0.125) == [False] * 4
    bench.start(A)
    bench.turn(*cancels(1))
    bench.run()
    assert turns(LOOK_AGAIN_AFTER_S - 0.125) == [False] * 4, "counted from the request's end"
    assert turns(0.125) == [True, True, False, False]
    assert phases == [WorkerPhase.PREFILL] * 3
    assert bench.board.beat().phase is WorkerPhase.ROWS
    assert turns(10.0) == [False] * 4


def test_nothing_is_prepared_for_later_while_a_request_is_held(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    monkeypatch.setattr(bench.engine, "prepare", lambda: made.append("piece"))
    bench.loop.wait_s()
    bench.now += LOOK_AGAIN_AFTER_S
    bench.dispatch(A)
    assert (bench.loop.turn(), made) == (False, []), "its prompt is being prepared"
    bench.turn(*cancels(1))
    bench.loop.turn()
    assert made == ["piece"]
