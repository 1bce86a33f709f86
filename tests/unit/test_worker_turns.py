"""What one turn of the step loop makes of what its engine, its texts and its link give."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from mlxsup.protocol.body import RequestBody
from mlxsup.protocol.ids import RequestKey, pack_tokens
from mlxsup.protocol.launch import TEXT_LIMIT_STEPS
from mlxsup.protocol.message import Message
from mlxsup.protocol.states import FinishReason, WorkerPhase
from mlxsup.protocol.worker_messages import (
    Acceptance,
    Accepted,
    CancelRow,
    Dispatch,
    Exit,
    MessageToWorker,
    PrefillProgress,
    Rejected,
    Resume,
    RowDelta,
    Step,
)
from mlxsup.worker.engine import (
    EngineBytes,
    EngineFacts,
    Prompt,
    Row,
    RowPrefill,
    RowToken,
    StepResult,
    WorkerFaultError,
)
from mlxsup.worker.engines.fake.text import FakeTextCodec, encode_text
from mlxsup.worker.heartbeat import Board
from mlxsup.worker.loop import GIVE_BACK_AFTER_S, StepLoop
from mlxsup.worker.preparing import StuckPreprocessingError
from mlxsup.worker.text.grammar import Grammar
from mlxsup.worker.text_threads import Refused, Tokenised

FACTS = EngineFacts(context_length=99, vocabulary_size=300, fingerprint="f", backend="fake")
A, B, C = RequestKey(1), RequestKey(2), RequestKey(3)
X = encode_text("x")[0]
STEP_TIMEOUT_S = 3.0
TEXT_LIMIT_S = TEXT_LIMIT_STEPS * STEP_TIMEOUT_S


class Engine:
    """Gives the results it was told to, in order, and notes what it is asked."""

    def __init__(self) -> None:
        self.text = FakeTextCodec()
        self.rows: dict[RequestKey, Row] = {}
        self.results: list[StepResult] = []
        self.removed: list[tuple[RequestKey, ...]] = []
        self.cached = 0
        self.returned = 0

    def insert(self, row: Row) -> int:
        self.rows[row.key] = row
        return self.cached

    def remove(self, *keys: RequestKey) -> None:
        self.removed.append(keys)
        for key in keys:
            self.rows.pop(key, None)

    def has_rows(self) -> bool:
        return bool(self.rows)

    def row_count(self) -> int:
        return len(self.rows)

    def predict_step_s(self) -> float:
        return 0.75

    def prefill_chunk(self) -> int:
        return 64

    def bytes_held(self) -> EngineBytes:
        return EngineBytes(active=1, cache=2, peak=3)

    def give_back(self) -> None:
        self.returned += 1

    def step(self) -> StepResult:
        result = self.results.pop(0) if self.results else StepResult()
        for token in result.tokens:
            if token.finish is not None:
                self.rows.pop(token.key, None)
        return result


class Around:
    """The loop's link and its text side."""

    def __init__(self) -> None:
        self.inbox: list[MessageToWorker] = []
        self.sent_messages: list[Message] = []
        self.sent = self.received = 0
        self.flushes: list[bool] = []
        self.submitted: list[tuple[Any, ...]] = []
        self.forgotten: list[RequestKey] = []
        self.ready: list[Tokenised | Refused] = []
        self.busy_with: tuple[RequestKey, float] | None = None
        self.is_there = True

    def receive(self) -> MessageToWorker | None:
        return self.inbox.pop(0) if self.inbox else None

    def send(self, message: Message) -> None:
        self.sent += 1
        self.sent_messages.append(message)

    def flush(self) -> bool:
        return self.flushes.pop(0) if self.flushes else True

    def wait(self, timeout_s: float | None) -> None:
        raise NotImplementedError

    def submit(self, *given: Any) -> None:
        self.submitted.append(given)

    def forget(self, key: RequestKey) -> None:
        self.forgotten.append(key)

    def take(self) -> list[Tokenised | Refused]:
        ready, self.ready = self.ready, []
        return ready

    def busy(self) -> tuple[RequestKey, float] | None:
        return self.busy_with

    def is_alive(self) -> bool:
        return self.is_there


class Bench:
    """A loop of two places on a clock of the test's own."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.engine, self.around = Engine(), Around()
        self.board = Board(clock=lambda: self.now)
        self.loop = StepLoop(
            engine=self.engine,  # type: ignore[arg-type]
            facts=FACTS,
            link=self.around,
            text=self.around,
            board=self.board,
            max_concurrency=2,
            step_timeout_s=STEP_TIMEOUT_S,
            sampling={"temperature": 0.5},
            clock=lambda: self.now,
        )

    def dispatch(self, *keys: RequestKey, resume: Resume | None = None) -> None:
        self.around.inbox += [Dispatch(key=key, body=b"body", resume=resume) for key in keys]
        self.loop.drain()

    def prepare(
        self,
        key: RequestKey,
        *,
        resume: Resume | None = None,
        grammar: Grammar | None = None,
        **body: Any,
    ) -> None:
        self.around.ready.append(
            Tokenised(
                key=key,
                body=RequestBody.from_wire({"prompt": "p", "max_tokens": 9, "seed": 1} | body),
                prompt=Prompt(tokens=[5, 6, 7], grammar=grammar),
                tokenize_s=0.25,
                resume=resume,
            )
        )

    def start(self, *keys: RequestKey, **body: Any) -> None:
        self.dispatch(*keys)
        for key in keys:
            self.prepare(key, **body)
        self.loop.turn()
        self.around.sent_messages.clear()

    def sent(self) -> list[Message]:
        found, self.around.sent_messages = self.around.sent_messages, []
        return found


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


def test_before_a_step_the_board_says_all_of_it_F5(bench: Bench) -> None:
    seen = []
    step = bench.engine.step

    def look() -> StepResult:
        seen.append(bench.board.current)
        return step()

    bench.engine.step = look  # type: ignore[method-assign]
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
    assert bench.sent()[1:] == [Step(step=0, rows=[RowDelta(key=A, finish=FinishReason.LENGTH)])]
    assert bench.engine.rows == {}


def test_what_does_not_fit_is_refused_alone_I6(bench: Bench) -> None:
    bench.dispatch(A, B)
    bench.prepare(A, max_tokens=97)
    bench.prepare(B)
    bench.loop.turn()
    rejected, accepted, _ = bench.sent()
    assert isinstance(rejected, Rejected)
    assert isinstance(accepted, Accepted)
    assert (rejected.key, rejected.error["code"]) == (A, "context_length_exceeded")
    assert bench.loop.open_keys == {B}


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
    assert GIVE_BACK_AFTER_S == 300.0
    assert bench.loop.wait_s() == 300.0
    bench.now += 299.0
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
    bench: Bench, rows: int, is_fault: bool
) -> None:
    bench.start(A, B)
    bench.engine.row_count = lambda: rows  # type: ignore[method-assign]
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
                       finish=FinishReason.STOP)],
    )  # fmt: skip
