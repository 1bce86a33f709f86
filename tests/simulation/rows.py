"""The rows of a played worker: prompts are prepared, read and answered, token by token."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.protocol.ids import RequestKey, pack_tokens, unpack_tokens
from mlxsup.protocol.states import FinishReason, PauseReason, Priority, RowState
from mlxsup.protocol.worker_messages import (
    Acceptance,
    Accepted,
    Dispatch,
    PrefillProgress,
    Rejected,
    RowDelta,
    Step,
    WorkerMessage,
)

from . import answers
from .plan import Prompt
from .reading import Has, Reading
from .row_memory import PlayedMemory
from .violation import check

LONG_STEPS = 4
"""A long prompt is read in that many steps."""

LONG_TOKENS = 16


@dataclass(slots=True, kw_only=True)
class Row:
    """One request that the worker holds.

    Attributes:
        prompt: what it is, with its faults.
        acceptance: what the worker made of it; None while it is being prepared.
        resumes: what an earlier life had made of it.
        count: tokens computed, those of earlier lives too.
        unread_steps: steps that reading the prompt still takes.
        read: tokens of the prompt, and of what was delivered, that are known.
        has_spoken: whether this life has given a token.
        priority, may_leave: as it was dispatched.
    """

    key: RequestKey
    prompt: Prompt
    acceptance: Acceptance | None = None
    resumes: Acceptance | None = None
    count: int = 0
    unread_steps: int = 0
    read: int = 0
    has_spoken: bool = False
    priority: Priority = Priority.NORMAL
    may_leave: bool = True


@dataclass(slots=True, kw_only=True)
class Batch:
    """All rows of one worker.

    Attributes:
        generation: of the worker.
        max_rows: as its launch says.
        prompts: by number and by body, as the plan made them.
        say: sends the supervisor a message.
        rows: by key, in order of arrival.
        ended: what cancels and pauses took out since the last step message.
        keeps: the share of paused rows whose state there is memory for.
        kept: paused requests whose state is kept.
        steps: made so far.
        reading: whether it may read.
        memory: what its rows take, and may take.
    """

    dice: random.Random
    generation: int
    max_rows: int
    by_number: dict[int, Prompt]
    by_body: dict[bytes, Prompt]
    say: Callable[[WorkerMessage], None]
    keeps: float = 1.0
    rows: dict[RequestKey, Row] = field(default_factory=dict)
    ended: list[RowDelta] = field(default_factory=list)
    kept: set[RequestKey] = field(default_factory=set)
    steps: int = 0
    reading: Reading = field(default_factory=Reading)
    memory: PlayedMemory = field(default_factory=lambda: PlayedMemory(()))

    @property
    def held(self) -> int:
        """Requests that the supervisor must not miss in a beat."""
        return len(self.rows) + len(self.ended)

    @property
    def preparing(self) -> int:
        """Those that are being tokenised."""
        return sum(row.acceptance is None for row in self.rows.values())

    @property
    def is_reading(self) -> bool:
        """Whether the next step reads a long prompt, if it may."""
        return any(row.acceptance and row.unread_steps for row in self.rows.values())

    @property
    def may_read(self) -> bool:
        """Whether it may, or has nothing to read."""
        return self.reading.may_read(is_reading=self.is_reading)

    @property
    def reads_with_lease(self) -> bool:
        """Whether it has the lease with which the next step reads a long prompt."""
        return self.reading.has is Has.A_LEASE and self.is_reading

    @property
    def can_step(self) -> bool:
        """Whether a step would do anything."""
        may_read = self.may_read
        rows = self.rows.values()
        return any(row.acceptance and (may_read or not row.unread_steps) for row in rows)

    @property
    def has_news(self) -> bool:
        """Whether there is something to say without a step."""
        return bool(self.ended) or self.reading.has_news(is_reading=self.is_reading)

    def begin(self, dispatch: Dispatch) -> None:
        """A request is dispatched."""
        check("dispatched twice", dispatch.key not in self.rows, dispatch.key)
        resume = dispatch.resume
        if resume is None:
            prompt = self.by_body.get(dispatch.body)
            check("dispatched body", prompt is not None, dispatch.body)
            assert prompt is not None
            row = Row(key=dispatch.key, prompt=prompt)
        else:
            prompt = self.by_number[answers.number_of(resume.acceptance)]
            count = len(unpack_tokens(resume.delivered))
            row = Row(key=dispatch.key, prompt=prompt, resumes=resume.acceptance, count=count)
        row.priority, row.may_leave = dispatch.priority, dispatch.may_leave
        if dispatch.key in self.kept:
            self.kept.remove(dispatch.key)
        elif prompt.is_long:
            row.unread_steps = LONG_STEPS
            row.read = dispatch.key % 3  # from a cache
        self.rows[dispatch.key] = row
        check("too many rows", len(self.rows) <= self.max_rows, f"{len(self.rows)} rows")

    def cancel(self, key: RequestKey) -> bool:
        """Takes a row out; one that is not there has its end under way already."""
        if self.rows.pop(key, None) is None:
            return False
        self.ended.append(RowDelta(key=key, finish=FinishReason.CANCELLED))
        return True

    def pause(self, key: RequestKey, *, keep: bool) -> bool:
        """Takes a row out until it is dispatched again, sometimes after a token that was computed
        already; one that is not there has its end under way."""
        row = self.rows.pop(key, None)
        if row is None:
            return False
        has_read = row.acceptance is not None and not row.unread_steps
        delta = RowDelta(key=key)
        is_safe = has_read and row.count != row.prompt.poison_at
        if row.acceptance is not None and is_safe and self.dice.random() < 0.5:
            self.rows[key] = row
            delta = self._advance(row, row.acceptance)
            self.rows.pop(key, None)
        if delta.finish is None:
            is_kept = keep and has_read and self.dice.random() < self.keeps
            delta.paused = RowState.KEPT if is_kept else RowState.DROPPED
        if delta.paused is RowState.KEPT:
            self.kept.add(key)
        self.ended.append(delta)
        return True

    def lose_one(self) -> None:
        """A bug: a row is gone, and nobody was notified."""
        del self.rows[self.dice.choice(list(self.rows))]

    def keep_to_budget(self) -> None:
        """Makes rows leave that there is no memory for."""
        for key in self.memory.leaving(self._running()):
            self._lacks_memory(key)

    def taken_bytes(self) -> int:
        """What its rows take."""
        return self.memory.taken_bytes(self._running())

    def _running(self) -> list[Row]:
        return [row for row in self.rows.values() if row.acceptance is not None]

    def _lacks_memory(self, key: RequestKey) -> None:
        del self.rows[key]
        state, reason = RowState.DROPPED, PauseReason.MEMORY
        self.ended.append(RowDelta(key=key, paused=state, pause_reason=reason))

    def prepare(self) -> None:
        """Answers the preparation of prompts: accepted or rejected, in any order, some later."""
        for key, row in list(self.rows.items()):
            if row.acceptance is not None or self.dice.random() < 0.25:
                continue
            if row.prompt.is_refused:
                del self.rows[key]
                error = RemoteError(ErrorCode.INVALID_REQUEST, f"no {key}")
                self.say(Rejected(key=key, error=error.to_wire()))
                continue
            others = self._running()
            row.acceptance = row.resumes or answers.accept(row.prompt, self.generation)
            self.say(Accepted(key=key, acceptance=row.acceptance, tokenize_s=0.01))
            if not self.memory.has_room(row, others):
                self._lacks_memory(key)

    def poison(self) -> bool:
        """Whether a row is about to kill the engine."""
        return any(
            row.acceptance is not None
            and not row.unread_steps
            and row.count == row.prompt.poison_at
            for row in self.rows.values()
        )

    def step(self, took_s: float) -> None:
        """One engine step, and its message."""
        may_read = self.may_read
        self.steps += 1
        deltas, self.ended = self.ended, []
        between_steps = len(deltas)
        prefill = []
        for row in list(self.rows.values()):
            if row.acceptance is None:
                continue
            if row.unread_steps:
                if may_read:
                    prefill.append(self._read(row))
                continue
            deltas.append(self._advance(row, row.acceptance))
        decode_s = took_s * (self.steps % 4) / 4 if len(deltas) > between_steps else 0.0
        self._say(
            Step(
                step=self.steps,
                rows=deltas,
                prefill=prefill,
                took_s=took_s,
                decode_s=decode_s,
                between_steps=between_steps,
            )
        )

    def flush(self) -> None:
        """Tells of what happened between two steps."""
        if self.has_news:
            deltas, self.ended = self.ended, []
            self._say(Step(step=self.steps, rows=deltas, between_steps=len(deltas)))

    def _say(self, step: Step) -> None:
        rows = self.rows.values()
        can_decode = any(row.acceptance and not row.unread_steps for row in rows)
        said = self.reading.fill_in(step, is_reading=self.is_reading, can_decode=can_decode)
        self.say(said)

    @staticmethod
    def _read(row: Row) -> PrefillProgress:
        row.unread_steps -= 1
        total = LONG_TOKENS + row.count
        before, row.read = row.read, total // (row.unread_steps + 1)
        return PrefillProgress(key=row.key, done=row.read, total=total, computed=row.read - before)

    def _advance(self, row: Row, accepted: Acceptance) -> RowDelta:
        before = row.count
        row.count = min(before + self.dice.choice((1, 1, 1, 2)), answers.length(accepted))
        poison_at = row.prompt.poison_at
        if poison_at is not None and before < poison_at < row.count:
            row.count = poison_at
        if answers.channel(accepted, before) != answers.channel(accepted, row.count - 1):
            row.count = before + 1
        is_last = row.count == answers.length(accepted)
        text = answers.shown(accepted, row.count, is_end=is_last)
        tokens = [answers.token(accepted, index) for index in range(before, row.count)]
        is_first, row.has_spoken = not row.has_spoken, True
        if is_last:
            del self.rows[row.key]
        return RowDelta(
            key=row.key,
            text=text[len(answers.shown(accepted, before)) :],
            tokens=pack_tokens(tokens),
            logprobs=answers.logprobs(accepted, tokens),
            channel=answers.channel(accepted, before),
            warning=answers.warning(accepted) if is_first else None,
            finish=answers.finish(accepted) if is_last else None,
            prefill_s=0.5 if is_first else None,
            cached_tokens=row.key % 3 + self.generation if is_first else 0,
        )
