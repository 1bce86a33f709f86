"""The step loop over a loaded engine, in one process: what a worker says, without its sockets."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from mlxsup.protocol.body import RequestBody
from mlxsup.protocol.codec import Decoder, encode, encode_body
from mlxsup.protocol.delta import DeltaBody, read_body
from mlxsup.protocol.errors import RemoteError
from mlxsup.protocol.ids import RequestKey, pack_tokens, unpack_tokens
from mlxsup.protocol.states import Channel, FinishReason, Priority
from mlxsup.protocol.worker_messages import (
    SUPERVISOR_TO_WORKER,
    WORKER_TO_SUPERVISOR,
    Acceptance,
    Accepted,
    CancelRow,
    Dispatch,
    DropKept,
    MessageToWorker,
    PauseRow,
    Rejected,
    Render,
    Rendered,
    Resume,
    RowDelta,
    SetBudget,
    Step,
    WorkerMessage,
)
from mlxsup.worker.engine import Engine, EngineFacts
from mlxsup.worker.heartbeat import Board
from mlxsup.worker.link import Link
from mlxsup.worker.loop import StepLoop
from mlxsup.worker.text_threads import TextThreads

from support.client.pieces import unpacked
from support.eventually import eventually

WAIT_S = 30.0
MAX_TURNS = 200_000


@dataclass(slots=True)
class Answer:
    """The messages about one request.

    Attributes:
        deltas: every delta, in order.
        drafted, draft_accepted: guesses that were read, and those of them in the answer.
    """

    acceptance: Acceptance | None = None
    warnings: list[str] = field(default_factory=list)
    error: RemoteError | None = None
    deltas: list[RowDelta] = field(default_factory=list)
    drafted: int = 0
    draft_accepted: int = 0

    @property
    def text(self) -> str:
        """Return the text of the content channel."""
        return self.text_of(Channel.CONTENT)

    def text_of(self, channel: Channel) -> str:
        """Return the text of one channel."""
        return "".join(delta.text for delta in self.deltas if delta.channel is channel)

    @property
    def tokens(self) -> list[int]:
        """Return every token id."""
        return [token for delta in self.deltas for token in unpack_tokens(delta.tokens)]

    @property
    def finish(self) -> FinishReason | None:
        """Return how it ended; None while it runs, or where it failed."""
        return self.deltas[-1].finish if self.deltas else None

    @property
    def is_paused(self) -> bool:
        """Return True if its row has left the batch, and has said nothing since."""
        return bool(self.deltas) and self.deltas[-1].paused is not None

    @property
    def is_over(self) -> bool:
        """Return True if its end has come."""
        return self.error is not None or self.finish is not None

    def resume_after(self, tokens: int) -> Resume:
        """Return what a supervisor sends if the worker died after that many tokens."""
        assert self.acceptance is not None
        return Resume(
            acceptance=self.acceptance,
            delivered=pack_tokens(self.tokens[:tokens]),
            shown=sum(delta.is_prompt for delta in self.until(tokens)),
        )

    def until(self, tokens: int) -> list[RowDelta]:
        """Return the deltas that had come with that many tokens."""
        seen, counted = [], 0
        for delta in self.deltas:
            if delta.tokens:
                counted += 1
            if counted > tokens:
                break
            seen.append(delta)
        return seen


class _Link:
    """Both directions go through the real codec."""

    def __init__(self) -> None:
        self._woken = threading.Event()
        self._inbox: deque[list[bytes]] = deque()
        self._incoming = Decoder(SUPERVISOR_TO_WORKER, is_strict=False)
        self._outgoing = Decoder(WORKER_TO_SUPERVISOR, is_strict=False)
        self.outbox: deque[WorkerMessage] = deque()
        self.sent = self.received = 0

    def post(self, message: MessageToWorker) -> None:
        self._inbox.append(encode(message))

    def wake(self) -> None:
        self._woken.set()

    def receive(self) -> MessageToWorker | None:
        if not self._inbox:
            return None
        self.received += 1
        return self._incoming.decode(self._inbox.popleft())

    def send(self, message: WorkerMessage) -> None:
        self.sent += 1
        self.outbox.append(self._outgoing.decode(encode(message)))

    def flush(self) -> bool:
        return True

    def wait(self, timeout_s: float | None) -> None:
        limit_s = WAIT_S if timeout_s is None else min(timeout_s, WAIT_S)
        is_woken = self._woken.wait(limit_s)
        assert is_woken or limit_s < WAIT_S, "nothing came from the helper threads"
        self._woken.clear()


class LoopDriver:
    """Dispatches requests and turns the loop.

    Attributes:
        answers: what was said of each request.
        messages: all that was said.

    Args:
        engine: loaded, on this thread.
        facts: of its load.
        clock: of the loop, in seconds.
    """

    def __init__(
        self,
        engine: Engine,
        facts: EngineFacts,
        max_concurrency: int = 4,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine = engine
        self.facts = facts
        self._link = _Link()
        self._lock = threading.Lock()
        self._prepared = 0
        self._text = TextThreads(engine.text, self._note_prepared)
        self._text.start()
        self.loop = StepLoop(
            engine=engine,
            facts=facts,
            link=cast(Link, self._link),
            text=self._text,
            board=Board(),
            max_concurrency=max_concurrency,
            step_timeout_s=WAIT_S,
            clock=clock,
        )
        self.answers: dict[int, Answer] = {}
        self.messages: list[WorkerMessage] = []
        self._last_key = self._budgets = 0

    def close(self) -> None:
        """End the helper threads; the engine is its owner's to close."""
        self._text.close()

    def dispatch(
        self,
        resume: Resume | None = None,
        *,
        as_class: Priority = Priority.NORMAL,
        **parameters: Any,
    ) -> int:
        """Send a request, or resume one, and return its key.

        One with pictures resumes with its body, which the parameters are then.
        """
        self._last_key += 1
        key = RequestKey(self._last_key)
        body = b""
        if resume is None or resume.acceptance.needs_body:
            body = encode_body(RequestBody.from_wire(parameters))
        self._link.post(Dispatch(key=key, resume=resume, priority=as_class, body=body))
        self.answers[self._last_key] = Answer()
        return self._last_key

    def dispatch_together(self, *requests: dict[str, Any]) -> list[int]:
        """Send requests whose prompts are all prepared before the next turn; return their keys."""
        prepared = self._prepared
        keys = [self.dispatch(**request) for request in requests]
        self.loop.drain()
        eventually(lambda: self._prepared >= prepared + len(keys))
        return keys

    def cancel(self, key: int) -> None:
        """Cancel a request."""
        self._link.post(CancelRow(key=RequestKey(key)))

    def pause(self, key: int, *, keep: bool) -> Answer:
        """Pause a request, and turn until its row has left; it may have ended instead."""
        self._link.post(PauseRow(key=RequestKey(key), keep=keep))
        answer = self.answers[key]
        for _ in range(MAX_TURNS):
            if answer.is_paused or answer.is_over:
                return answer
            self.turn()
        raise AssertionError("its row does not leave")

    def come_back(self, key: int, **parameters: Any) -> None:
        """Dispatch a paused request again, as a supervisor does; the parameters are those of one
        with pictures."""
        answer = self.answers[key]
        assert answer.is_paused
        resume = answer.resume_after(len(answer.tokens))
        body = encode_body(RequestBody.from_wire(parameters)) if parameters else b""
        self._link.post(Dispatch(key=RequestKey(key), resume=resume, body=body))
        answer.deltas[-1].paused = None

    def set_budget(self, rows_bytes: int) -> None:
        """Set what the rows may take."""
        self._budgets += 1
        self._link.post(SetBudget(number=self._budgets, rows_bytes=rows_bytes))

    def drop(self, key: int) -> None:
        """Say that a paused request does not come back."""
        self._link.post(DropKept(key=RequestKey(key)))
        self.turn()

    def render(self, resume: Resume) -> list[DeltaBody]:
        """Return what a client gets that joins an answer at this point."""
        made = resume.acceptance
        question = Render(
            number=7,
            opening=made.opening,
            parameters=made.parameters,
            seed=made.seed,
            fingerprint=made.fingerprint,
            delivered=resume.delivered,
        )
        self._link.post(question)
        for _ in range(MAX_TURNS):
            self.turn()
            if self.messages and isinstance(said := self.messages[-1], Rendered):
                assert said.number == question.number
                return [read_body(body) for body in said.bodies]
        raise AssertionError("no answer")

    def turn(self) -> None:
        """Take a turn of the loop; wait for the helper threads if nothing else is to do."""
        if not self.loop.turn() and self.loop.open_keys:
            self._link.wait(self.loop.wait_s())
        while self._link.outbox:
            message = self._link.outbox.popleft()
            self.messages.append(message)
            self._note(message)

    def finish(self, *keys: int) -> list[Answer]:
        """Turn until these are over."""
        for _ in range(MAX_TURNS):
            if all(self.answers[key].is_over for key in keys):
                return [self.answers[key] for key in keys]
            self.turn()
        raise AssertionError("no end")

    def answer(self, resume: Resume | None = None, **parameters: Any) -> Answer:
        """Run one request from its dispatch to its end."""
        return self.finish(self.dispatch(resume, **parameters))[0]

    def _note_prepared(self) -> None:
        with self._lock:
            self._prepared += 1
        self._link.wake()

    def _note(self, message: WorkerMessage) -> None:
        match message:
            case Accepted(key=key, acceptance=acceptance, warnings=warnings):
                assert self.answers[key].acceptance in (None, acceptance)
                self.answers[key].acceptance = acceptance
                self.answers[key].warnings = warnings
            case Rejected(key=key, error=error):
                assert not self.answers[key].is_over
                self.answers[key].error = error
            case Step(rows=rows, drafts=drafts):
                for guessed in drafts:
                    self.answers[guessed.key].drafted += guessed.read
                    self.answers[guessed.key].draft_accepted += guessed.accepted
                for row in unpacked(rows):
                    answer = self.answers[row.key]
                    assert not answer.is_over, "a delta after the end"
                    answer.deltas.append(row)


def text_by_channel(pieces: Iterable[RowDelta | DeltaBody]) -> dict[Channel, str]:
    """Join the texts of each channel that got one."""
    texts: dict[Channel, str] = {}
    for piece in pieces:
        if piece.text:
            texts[piece.channel] = texts.get(piece.channel, "") + piece.text
    return texts


def check_every_resume(worker: LoopDriver, whole: Answer, *, at_once: int = 4) -> None:
    """Resume an answer after each number of tokens and compare what both parts make.

    Of a long answer every third point is enough: characters and marks that are split over two or
    four tokens are cut at each of their places all the same.
    """
    count = len(whole.tokens)
    points = range(count) if count <= 16 else [*range(4), *range(4, count, 3)]
    check_resumes(worker, whole, points, at_once=at_once)


def check_resumes(
    worker: LoopDriver, whole: Answer, points: Sequence[int], *, at_once: int = 4
) -> None:
    """Resume an answer after these numbers of tokens and compare what both parts make."""
    assert whole.finish is not None
    for first in range(0, len(points), at_once):
        some = points[first : first + at_once]
        keys = [worker.dispatch(whole.resume_after(point)) for point in some]
        for point, rest in zip(some, worker.finish(*keys), strict=True):
            assert rest.acceptance == whole.acceptance
            assert rest.tokens == whole.tokens[point:], f"other tokens after {point}"
            assert rest.finish is whole.finish
            both = text_by_channel([*whole.until(point), *rest.deltas])
            assert both == text_by_channel(whole.deltas), point
