"""The step loop as an object: scripted engine, link and text side; no process, socket or sleep."""

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from mlxsup.protocol.body import RequestBody
from mlxsup.protocol.codec import encode_body
from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.protocol.ids import Generation, ModelName, RequestKey, pack_tokens
from mlxsup.protocol.launch import LaunchSpec
from mlxsup.protocol.message import Message
from mlxsup.protocol.states import FinishReason, WorkerPhase
from mlxsup.protocol.worker_messages import (
    Acceptance,
    Accepted,
    CancelRow,
    Dispatch,
    Exit,
    MessageToWorker,
    Rejected,
    Resume,
    Step,
)
from mlxsup.worker.engine import Prompt, Row, StepResult, TextCodec, WorkerFaultError
from mlxsup.worker.engines.fake.engine import FakeEngine
from mlxsup.worker.engines.fake.text import answer_tokens, decode_tokens, encode_text
from mlxsup.worker.heartbeat import Board
from mlxsup.worker.link import LinkBrokenError
from mlxsup.worker.loop import GIVE_BACK_AFTER_S, StepLoop
from mlxsup.worker.preparing import StuckPreprocessingError
from mlxsup.worker.text_threads import Refused, Tokenised

SPEC = LaunchSpec(
    model=ModelName("m"),
    generation=Generation(1),
    token="t",
    endpoint="ipc:///x",
    supervisor_pid=1,
    engine="fake",
    path="/x",
    max_concurrency=4,
    step_timeout_s=30.0,
    decode_stall_target_ms=250,
    fake={"prefill_tokens_per_step": 8},
)


class RecordingEngine(FakeEngine):
    """The fake engine, noting each call in the shared story."""

    def __init__(self, story: list[str]) -> None:
        super().__init__(SPEC)
        self.story = story

    def insert(self, row: Row) -> int:
        self.story.append(f"insert {row.key}")
        return super().insert(row)

    def give_back(self) -> None:
        self.story.append("give back")

    def remove(self, *keys: RequestKey) -> None:
        self.story.append(" ".join(["remove", *map(str, keys)]))
        super().remove(*keys)

    def step(self) -> StepResult:
        self.story.append("step")
        return super().step()


class MemoryLink:
    """A link in memory; `is_blocked` is a supervisor that does not read."""

    def __init__(self, story: list[str]) -> None:
        self.story = story
        self.inbox: deque[MessageToWorker] = deque()
        self.outbox: list[Message] = []
        self.sent = self.received = 0
        self.is_blocked = False
        self.waits = 0
        self.on_wait: Callable[[], object] = lambda: None
        self.waited_s: float | None = None

    def receive(self) -> MessageToWorker | None:
        if not self.inbox:
            return None
        self.received += 1
        return self.inbox.popleft()

    def send(self, message: Message) -> None:
        self.story.append(f"send {message.TYPE}")
        self.sent += 1
        self.outbox.append(message)

    def flush(self) -> bool:
        return not self.is_blocked

    def wait(self, timeout_s: float | None) -> None:
        self.waits += 1
        self.waited_s = timeout_s
        self.on_wait()


class ScriptedText:
    """Prepares when told to."""

    def __init__(self, codec: TextCodec) -> None:
        self.codec = codec
        self.pending: dict[RequestKey, bytes] = {}
        self.results: list[Tokenised | Refused] = []
        self.busy_since: float | None = None
        self.has_threads = True

    def submit(self, key: RequestKey, body: bytes, resume: Resume | None = None) -> None:
        self.pending[key] = body

    def forget(self, key: RequestKey) -> None:
        pass  # it has begun: the result still comes

    def take(self) -> list[Tokenised | Refused]:
        results, self.results = self.results, []
        return results

    def busy(self) -> tuple[RequestKey, float] | None:
        return None if self.busy_since is None else (RequestKey(1), self.busy_since)

    def is_alive(self) -> bool:
        return self.has_threads

    def prepare(self) -> None:
        for key, _ in self.pending.items():
            body = RequestBody(prompt="p" * 3, max_tokens=BUDGETS.get(key, 5), stop=STOPS.get(key))
            prompt = self.codec.encode(body)
            self.results.append(Tokenised(key=key, body=body, prompt=prompt, tokenize_s=0.0))
        self.pending.clear()


BUDGETS: dict[int, int] = {}
STOPS: dict[int, list[str]] = {}


class Bench:
    """A loop with everything around it."""

    def __init__(self) -> None:
        self.story: list[str] = []
        self.engine = RecordingEngine(self.story)
        facts = self.engine.load(lambda phase, progress: None)
        self.link = MemoryLink(self.story)
        self.text = ScriptedText(self.engine.text)
        self.board = Board(clock=lambda: 0.0)
        self.now = 0.0
        self.loop = StepLoop(
            engine=self.engine,
            facts=facts,
            link=self.link,
            text=self.text,
            board=self.board,
            max_concurrency=4,
            step_timeout_s=30.0,
            clock=lambda: self.now,
        )

    def dispatch(self, key: int) -> None:
        body = encode_body(RequestBody(prompt="ppp"))
        self.link.inbox.append(Dispatch(key=RequestKey(key), body=body))

    def cancel(self, key: int) -> None:
        self.link.inbox.append(CancelRow(key=RequestKey(key)))

    def start(self, *keys: int) -> None:
        """Dispatches and prepares, so that the next turn inserts."""
        for key in keys:
            self.dispatch(key)
        self.loop.drain()
        self.text.prepare()

    def run(self) -> None:
        """Runs the loop until it has waited once."""
        waits = self.link.waits
        self.loop.run(lambda: self.link.waits > waits)

    def steps(self) -> list[Step]:
        return [message for message in self.link.outbox if isinstance(message, Step)]

    def finishes(self) -> dict[int, FinishReason]:
        return {row.key: row.finish for s in self.steps() for row in s.rows if row.finish}


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


def test_a_cancelled_row_ends_at_once_and_frees_its_slot_D3_D11(bench: Bench) -> None:
    bench.start(1, 2, 3, 4, 5)
    bench.loop.turn()
    bench.cancel(2)
    bench.loop.turn()
    assert "remove 2" in bench.story
    assert bench.finishes() == {2: FinishReason.CANCELLED}
    assert bench.story.index("remove 2") < bench.story.index("insert 5")
    bench.loop.turn()
    assert 2 not in {row.key for row in bench.steps()[-1].rows}


def test_the_cancels_of_a_turn_change_the_batch_once_D3(bench: Bench) -> None:
    """Each change costs a read for every layer."""
    bench.start(1, 2, 3, 4, 5)
    bench.loop.turn()
    for key in (3, 1, 99, 3, 4, 5):
        bench.cancel(key)
    bench.loop.turn()
    assert [said for said in bench.story if said.startswith("remove")] == ["remove 3 1 4"]
    assert bench.finishes() == dict.fromkeys((1, 3, 4, 5), FinishReason.CANCELLED)
    assert bench.engine.row_count() == 1
    assert bench.loop.open_keys == {2}


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


def test_a_cancel_while_nothing_steps_is_answered_at_once(bench: Bench) -> None:
    bench.start(1)
    bench.loop.turn()
    bench.cancel(1)
    assert not bench.loop.turn()
    assert bench.finishes() == {1: FinishReason.CANCELLED}
    assert bench.steps()[-1].step == 1, "no step was made for it"


def test_a_cancel_while_tokenising_drops_the_late_result_G5_D2(bench: Bench) -> None:
    bench.dispatch(1)
    bench.loop.turn()
    bench.cancel(1)
    bench.loop.turn()
    assert bench.finishes() == {1: FinishReason.CANCELLED}
    bench.text.prepare()
    bench.loop.turn()
    assert not any(s.startswith("insert") for s in bench.story)
    assert bench.loop.open_keys == frozenset()


def test_double_and_unknown_cancels_are_harmless_D6(bench: Bench) -> None:
    bench.start(1)
    bench.loop.turn()
    for key in (1, 1, 99):
        bench.cancel(key)
    bench.loop.turn()
    assert bench.story.count("remove 1") == 1
    assert sum(len(step.rows) for step in bench.steps()) == 2


def test_a_cancel_that_overtakes_its_request_is_remembered_D5(bench: Bench) -> None:
    bench.start(2)
    bench.cancel(1)
    bench.loop.turn()
    bench.dispatch(1)
    bench.loop.turn()
    assert 1 not in bench.text.pending, "nobody prepares it"
    bench.dispatch(3)
    bench.loop.turn()
    assert bench.finishes() == {1: FinishReason.CANCELLED}
    assert [row.key for step in bench.steps() for row in step.rows].count(RequestKey(1)) == 1
    assert bench.loop.open_keys == {2, 3}
    bench.loop.turn()
    assert bench.board.current.books.requests == 2


def test_a_request_that_was_cancelled_early_is_answered_with_nothing_else_to_do_D5(
    bench: Bench,
) -> None:
    bench.cancel(1)
    bench.dispatch(1)
    bench.run()
    assert bench.finishes() == {1: FinishReason.CANCELLED}


def test_of_cancels_that_came_early_as_many_are_remembered_as_there_are_places_D5_D9(
    bench: Bench,
) -> None:
    for key in range(1, 1001):
        bench.cancel(key)
    bench.loop.turn()
    assert bench.loop.open_keys == frozenset()
    for key in range(996, 1001):
        bench.dispatch(key)
    bench.loop.turn()
    assert bench.finishes() == dict.fromkeys((997, 998, 999, 1000), FinishReason.CANCELLED)
    assert bench.loop.open_keys == {996}


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


def test_an_exception_out_of_a_step_leaves_the_loop_F3(bench: Bench) -> None:
    def explode() -> StepResult:
        raise ValueError("broken")

    bench.engine.step = explode  # type: ignore[method-assign]
    bench.start(1)
    with pytest.raises(ValueError, match="broken"):
        bench.loop.run(lambda: False)


def test_a_preparation_without_end_ends_the_worker(bench: Bench) -> None:
    bench.text.busy_since = 0.0
    bench.now = 299.0
    bench.loop.turn()
    bench.now = 301.0
    with pytest.raises(StuckPreprocessingError, match="request 1"):
        bench.loop.turn()


def test_a_preparation_that_nobody_begins_ends_the_worker_P23(bench: Bench) -> None:
    bench.now = 1000.0
    bench.dispatch(1)
    bench.loop.turn()
    bench.now += 299.0
    bench.loop.turn()
    bench.now += 2.0
    with pytest.raises(WorkerFaultError, match="does not begin"):
        bench.loop.turn()


def test_a_preparation_that_ended_in_a_long_step_was_begun(bench: Bench) -> None:
    bench.now = 1000.0
    bench.dispatch(1)
    bench.loop.turn()
    bench.text.prepare()
    bench.now += 301.0
    bench.loop.turn()
    assert bench.loop.open_keys == {1}


def test_the_preparation_of_a_cancelled_request_has_its_limit_too(bench: Bench) -> None:
    bench.dispatch(1)
    bench.loop.drain()
    bench.cancel(1)
    # The second wait comes after the engine has given back what it kept.
    for now in (100.0, 100.0 + GIVE_BACK_AFTER_S):
        bench.now, bench.text.busy_since = now, now - 10.0
        bench.run()
        assert bench.link.waited_s == 290.0
    assert "give back" in bench.story


def test_what_is_done_between_steps_is_a_phase_of_its_own_P23(bench: Bench) -> None:
    """Whatever blocks there, the beats say so."""
    seen: dict[str, WorkerPhase] = {}

    def note(name: str) -> None:
        method = getattr(bench.engine, name)

        def call(*arguments: Any) -> Any:
            seen[name] = bench.board.current.phase
            return method(*arguments)

        setattr(bench.engine, name, call)

    for name in ("insert", "remove", "bytes_held", "give_back", "step"):
        note(name)
    bench.start(1)
    bench.loop.turn()
    bench.cancel(1)
    bench.loop.turn()
    bench.run()
    bench.now = 2 * GIVE_BACK_AFTER_S
    bench.run()
    assert seen.pop("step") is WorkerPhase.PREFILL
    assert seen == dict.fromkeys(seen, WorkerPhase.ROWS)
    assert len(seen) == 4


def test_a_long_replay_says_that_it_advances_P7(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the answer was, its pieces are far below the limit of a step."""
    bench.dispatch(1)
    bench.loop.drain()
    begun: list[WorkerPhase] = []
    publish = bench.board.publish

    def publish_noted(phase: WorkerPhase, **facts: Any) -> None:
        begun.append(phase)
        publish(phase, **facts)

    monkeypatch.setattr(bench.board, "publish", publish_noted)
    prompt = Prompt(tokens=[5])
    body = RequestBody(prompt="p", max_tokens=4000)
    acceptance = Acceptance(
        prompt_tokens=pack_tokens([5]), opening=prompt.opening, parameters={}, seed=1,
        fingerprint="f",
    )  # fmt: skip
    resume = Resume(acceptance=acceptance, delivered=pack_tokens([100] * 3000))
    ready = Tokenised(key=RequestKey(1), body=body, prompt=prompt, tokenize_s=0.0, resume=resume)
    bench.text.results.append(ready)
    bench.loop.turn()
    said = "one for what came, the row, each 1,024 tokens, and the place in the engine"
    assert begun.count(WorkerPhase.ROWS) == 1 + 1 + 3 + 1, said


def test_beats_count_what_is_held_and_what_was_exchanged_P23(bench: Bench) -> None:
    def books() -> tuple[int, int, int, int]:
        held = bench.board.current.books
        return held.requests, held.preparing, held.sent, held.received

    counts = []
    bench.link.on_wait = lambda: counts.append(books())
    bench.dispatch(1)
    bench.dispatch(2)
    bench.run()
    assert counts == [(2, 2, 0, 2)]
    bench.text.prepare()
    bench.loop.turn()
    assert books() == (2, 0, 2, 2), "both accepted"
    bench.cancel(1)
    bench.loop.turn()
    assert books() == (2, 0, 3, 3), "the end of a row that was cancelled has yet to be told"
    bench.loop.turn()
    assert books() == (1, 0, 4, 3)


def test_a_row_that_the_engine_has_lost_ends_the_worker_P23(bench: Bench) -> None:
    bench.start(1, 2)
    bench.loop.turn()
    bench.engine.remove(RequestKey(1))
    with pytest.raises(WorkerFaultError, match="1 rows, and not 2"):
        bench.loop.turn()


def test_a_text_thread_that_has_ended_ends_the_worker_P23(bench: Bench) -> None:
    bench.text.has_threads = False
    bench.loop.turn()
    bench.dispatch(1)
    with pytest.raises(WorkerFaultError, match="prepares prompts"):
        bench.loop.turn()


def test_the_board_names_the_phase_and_counts_ended_steps_F5(bench: Bench) -> None:
    bench.start(1)
    bench.loop.turn()
    assert (bench.board.current.phase, bench.board.current.step) == (WorkerPhase.PREFILL, 0)
    bench.loop.turn()
    assert (bench.board.current.phase, bench.board.current.step) == (WorkerPhase.DECODE, 1)


class Churn(RuleBasedStateMachine):
    """Dispatches, preparations, turns and cancels in any order: one end each, nothing left."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench()
        self.next_key = 1

    @rule(count=st.integers(1, 3))
    def dispatch(self, count: int) -> None:
        for _ in range(count):
            BUDGETS[self.next_key] = self.next_key % 7 + 1
            self.bench.dispatch(self.next_key)
            self.next_key += 1

    @rule()
    def prepare(self) -> None:
        self.bench.text.prepare()

    @rule()
    def turn(self) -> None:
        self.bench.loop.turn()

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.bench.cancel(data.draw(st.integers(1, self.next_key)))

    @rule(is_blocked=st.booleans())
    def block(self, is_blocked: bool) -> None:
        self.bench.link.is_blocked = is_blocked

    @invariant()
    def one_end_each_and_nothing_after_it(self) -> None:
        ended: set[int] = set()
        for step in self.bench.steps():
            for row in step.rows:
                assert row.key not in ended
                if row.finish is not None:
                    ended.add(row.key)

    def teardown(self) -> None:
        self.bench.link.is_blocked = False
        while self.bench.link.inbox or self.bench.text.pending or self.bench.loop.open_keys:
            self.bench.loop.drain()
            self.bench.text.prepare()
            self.bench.loop.turn()
        self.bench.loop.turn()
        # Each request has its end, and the engine is empty (D9). A cancel can come before its
        # request only for a key that was not dispatched yet: it is ignored.
        assert set(self.bench.finishes()) == set(range(1, self.next_key))
        assert not self.bench.engine.has_rows()
        super().teardown()


TestChurnD2D9 = Churn.TestCase
TestChurnD2D9.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
