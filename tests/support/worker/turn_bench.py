"""A step loop whose engine, link, text side and clock are scripted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from mlxsup.protocol.body import RequestBody
from mlxsup.protocol.ids import Generation, ModelName, RequestKey
from mlxsup.protocol.launch import LaunchSpec
from mlxsup.protocol.message import Message
from mlxsup.protocol.states import FinishReason
from mlxsup.protocol.worker_messages import Dispatch, MessageToWorker, Resume, RowDelta, Step
from mlxsup.worker.engine import (
    EngineBytes,
    EngineFacts,
    Prompt,
    ReportProgress,
    Row,
    RowSetAside,
    RowToken,
    StepResult,
)
from mlxsup.worker.engines.fake.text import FakeTextCodec, encode_text
from mlxsup.worker.heartbeat import Board
from mlxsup.worker.link import Link
from mlxsup.worker.loop import StepLoop
from mlxsup.worker.text.grammar import Grammar
from mlxsup.worker.text_threads import Refused, TextThreads, Tokenised

from support.client.pieces import unpacked

FACTS = EngineFacts(context_length=99, vocabulary_size=300, fingerprint="f", backend="fake")
A, B, C, D = (RequestKey(number) for number in range(1, 5))
X = encode_text("x")[0]
STEP_TIMEOUT_S = 3.0


def make_spec(**changes: Any) -> LaunchSpec:
    """Return a launch spec of the fake engine, but for the changes."""
    values: dict[str, Any] = {
        "model": ModelName("m"),
        "generation": Generation(1),
        "token": "t",
        "endpoint": "ipc:///tmp/x.sock",
        "supervisor_pid": 1,
        "engine": "fake",
        "path": "/x",
        "max_concurrency": 4,
        "step_timeout_s": 30.0,
        "decode_stall_target_ms": 250,
    }
    return LaunchSpec(**(values | changes))


class Engine:
    """Gives the results it was given, in order, and notes what it is asked.

    Attributes:
        story: calls that change rows or compute, in order, with what the loop sends between them.
        plays: give each row the token of "x" in each step, up to its limit.
    """

    def __init__(self, story: list[str] | None = None) -> None:
        self.story: list[str] = [] if story is None else story
        self.settled_after: list[str] = []
        self.plays = False
        self.played: dict[RequestKey, int] = {}
        self.text = FakeTextCodec()
        self.rows: dict[RequestKey, Row] = {}
        self.results: list[StepResult] = []
        self.removed: list[tuple[RequestKey, ...]] = []
        self.set_asides: list[tuple[tuple[RequestKey, ...], bool]] = []
        self.dropped: list[RequestKey] = []
        self.kept: dict[RequestKey, int] = {}
        self.ahead: dict[RequestKey, RowToken] = {}
        self.cached = 0
        self.returned = 0
        self.freed = 0
        self.made: list[str] = []
        self.bounds: list[int] = []
        self.is_long = False
        self.is_decoding = True
        self.pass_s, self.cheap_tokens = 0.0, 99

    def load(self, report: ReportProgress) -> EngineFacts:
        return FACTS

    def close(self) -> None:
        pass

    def insert(self, row: Row) -> int:
        self.story.append(f"insert {row.key}")
        self.rows[row.key] = row
        return self.cached

    def remove(self, *keys: RequestKey) -> None:
        self.story.append(" ".join(["remove", *map(str, keys)]))
        self.removed.append(keys)
        for key in keys:
            self.rows.pop(key, None)

    def set_aside(self, *keys: RequestKey, keep: bool) -> list[RowSetAside]:
        self.set_asides.append((keys, keep))
        had = {key: self.rows.pop(key, None) is not None for key in keys}
        return [
            RowSetAside(key=key, token=self.ahead.get(key), is_kept=keep and had[key])
            for key in keys
        ]

    def drop_kept(self, *keys: RequestKey) -> None:
        self.dropped += keys

    def free_kept(self, *, spared: RequestKey | None = None) -> None:
        self.kept = {key: size for key, size in self.kept.items() if key == spared}

    def row_count(self) -> int:
        return len(self.rows)

    def predict_step_s(self) -> float:
        return 0.75

    def has_long_prompt(self) -> bool:
        return self.is_long

    def has_decoding(self) -> bool:
        return self.is_decoding

    def shared_pass_s(self, tokens: int) -> float:
        return self.pass_s if tokens <= self.cheap_tokens else 0.0

    def bytes_held(self) -> EngineBytes:
        return EngineBytes(active=1, cache=2, peak=3, kept=sum(self.kept.values()), prefix=5)

    def give_back(self, *, keeps_prefixes: bool = False) -> None:
        if keeps_prefixes:
            self.freed += 1
        else:
            self.returned += 1

    def prepare(self) -> bool:
        return False

    def settle(self) -> None:
        self.settled_after.append(self.story[-1] if self.story else "")

    def bound_rows(self, rows_bytes: int) -> None:
        self.bounds.append(rows_bytes)

    def step(self) -> StepResult:
        self.story.append("step")
        self.made.append("step")
        return self._result()

    def decode(self) -> StepResult:
        self.made.append("decode")
        return self._result()

    def _result(self) -> StepResult:
        result = self.results.pop(0) if self.results else StepResult()
        if self.plays:
            result = StepResult(tokens=[self._play(row) for row in self.rows.values()])
        for token in result.tokens:
            if token.finish is not None:
                self.rows.pop(token.key, None)
        return result

    def _play(self, row: Row) -> RowToken:
        count = self.played[row.key] = self.played.get(row.key, 0) + 1
        finish = FinishReason.LENGTH if count == row.max_tokens else None
        return RowToken(key=row.key, token=X, finish=finish)


class Around:
    """Stands for the loop's link and its text threads."""

    def __init__(self, story: list[str] | None = None) -> None:
        self.story: list[str] = [] if story is None else story
        self.is_blocked = False
        self.waited_s: list[float | None] = []
        self.on_wait: Callable[[], object] = lambda: None
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
        if not self.inbox:
            return None
        self.received += 1
        return self.inbox.pop(0)

    def send(self, message: Message) -> None:
        self.story.append(f"send {message.TYPE}")
        self.sent += 1
        self.sent_messages.append(message)

    def flush(self) -> bool:
        return self.flushes.pop(0) if self.flushes else not self.is_blocked

    def wait(self, timeout_s: float | None) -> None:
        self.waited_s.append(timeout_s)
        self.on_wait()

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
    """A loop on a clock of the test's own; of two places unless it says otherwise.

    Attributes:
        has_stepped: whether the latest `turn` made a step.
        said: all that was sent, without what waits for `sent`.
    """

    def __init__(self, places: int = 2, facts: EngineFacts = FACTS) -> None:
        self.now = 1000.0
        self.story: list[str] = []
        self.engine, self.around = Engine(self.story), Around(self.story)
        self.board = Board(clock=lambda: self.now)
        self.has_stepped = False
        self.said: list[Message] = []
        self.loop = StepLoop(
            engine=self.engine,
            facts=facts,
            link=cast(Link, self.around),
            text=cast(TextThreads, self.around),
            board=self.board,
            max_concurrency=places,
            step_timeout_s=STEP_TIMEOUT_S,
            sampling={"temperature": 0.5},
            clock=lambda: self.now,
        )

    def dispatch(self, *keys: RequestKey, **how: Any) -> None:
        self.around.inbox += [Dispatch(key=key, body=b"body", **how) for key in keys]
        self.loop.drain()

    def prepare(
        self,
        *keys: RequestKey,
        resume: Resume | None = None,
        grammar: Grammar | None = None,
        **body: Any,
    ) -> None:
        """Have the text side prepare prompts of three tokens."""
        wire = {"prompt": "p", "max_tokens": 9, "seed": 1} | body
        self.around.ready += [
            Tokenised(
                key=key,
                body=RequestBody.from_wire(wire),
                prompt=Prompt(tokens=[5, 6, 7], grammar=grammar),
                tokenize_s=0.25,
                resume=resume,
            )
            for key in keys
        ]

    def start(self, *keys: RequestKey, **body: Any) -> None:
        """Have requests read their prompts, and forget what was sent."""
        self.dispatch(*keys)
        self.prepare(*keys, **body)
        self.turn()

    def give(self, *tokens: RowToken, **more: Any) -> None:
        """Set the result of the next step."""
        self.engine.results = [StepResult(tokens=list(tokens), **more)]

    def turn(self, *messages: MessageToWorker) -> list[Message]:
        """Take a turn that begins with these messages; return what is sent in it."""
        self.around.inbox += messages
        self.has_stepped = self.loop.turn()
        return self.sent()

    def rows(self, *messages: MessageToWorker) -> list[RowDelta]:
        """Take a turn; return the deltas of its steps."""
        said = [one for one in self.turn(*messages) if isinstance(one, Step)]
        return [row for step in said for row in unpacked(step.rows)]

    def run(self) -> None:
        """Run the loop until it has waited once more."""
        waits = len(self.around.waited_s)
        self.loop.run(lambda: len(self.around.waited_s) > waits)

    def run_out(self) -> None:
        """Take turns while there is something to compute."""
        self.turn()
        while self.has_stepped:
            self.turn()

    def sent(self) -> list[Message]:
        """Take what was sent since the last call."""
        found, self.around.sent_messages = self.around.sent_messages, []
        self.said += found
        return found

    @property
    def ends(self) -> dict[int, FinishReason]:
        """Return how each answer ended."""
        steps = [one for one in self.said if isinstance(one, Step)]
        return {row.key: row.finish for step in steps for row in step.rows if row.finish}


def x(key: RequestKey, finish: FinishReason | None = None) -> RowToken:
    """Return an "x" for a row."""
    return RowToken(key=key, token=X, finish=finish)
