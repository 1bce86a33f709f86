"""Templates and tokenisation next to the owner thread: bytes in, plain lists of ids out (A7, G2).

Two helper threads, one for short and one for long prompts; they touch no MLX object. The encoders
of most models release the GIL, so that a prompt of 40,000 tokens, 0.1 s of work, holds up the owner
thread for a few steps at most.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from mlxsup.protocol.body import MAX_SHOWN_IDS, RequestBody
from mlxsup.protocol.codec import decode_body
from mlxsup.protocol.errors import ErrorCode, RemoteError, unfit
from mlxsup.protocol.ids import RequestKey, unpack_tokens
from mlxsup.protocol.pooling import PoolingBody
from mlxsup.protocol.states import AnswerForm
from mlxsup.protocol.text import log_line
from mlxsup.protocol.worker_messages import Resume

from .engine import Picture, Prompt, TextCodec
from .memory_guard import MemoryGuard
from .prompt_pieces import MAX_TEXT_BYTES

SLOW_S = 1.0
"""Preprocessing that takes longer is logged (G4)."""

LONG_BODY_BYTES = 16 * 1024
"""Larger bodies have their own thread (G7): a smaller one is tokenised in milliseconds."""

BYTES_PER_TURN = 16 * 1024
"""Among long ones, a body lets one later and smaller body go first per this many bytes (G7): no
long prompt waits for every longer one, and a longer one is overtaken a bounded number of times."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenised:
    """A request that is ready to be inserted.

    Attributes:
        key: the request this belongs to.
        body: the request; if it is resumed, what its first life made of it.
        prompt: the ids.
        tokenize_s: counted from its submission.
        resume: how far the answer had got when an earlier life of the worker ended.
    """

    key: RequestKey
    body: RequestBody | PoolingBody
    prompt: Prompt
    tokenize_s: float
    resume: Resume | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A request that has something wrong with it."""

    key: RequestKey
    error: RemoteError


@dataclass(frozen=True, slots=True, order=True)
class _Job:
    rank: int
    arrival: int
    key: RequestKey
    body: bytes
    submitted_at: float
    resume: Resume | None


class TextThreads:
    """Turns bodies into prompts, short ones and long ones on a thread each (G7).

    A long prompt may take seconds, and a short one never waits for it. Each thread has its own
    codec, because two threads must not share a tokenizer; the one for long prompts is made when the
    first of them comes.

    Attributes:
        lanes: the thread of the short ones and that of the long ones.

    Args:
        codec: the engine's text side.
        wake: called from either thread after each result, so that the step loop looks.
        guard: watches the memory that each prompt takes.
    """

    def __init__(
        self,
        codec: TextCodec,
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        guard: MemoryGuard | None = None,
    ) -> None:
        guard = guard or MemoryGuard()
        self._results: deque[Tokenised | Refused] = deque()
        self._wake = wake
        self._short = Lane("text", lambda: codec, self._finished, clock, guard)
        self._long = Lane("long text", codec.twin, self._finished, clock, guard)
        self.lanes = (self._short, self._long)

    def start(self) -> None:
        """Starts both threads."""
        for lane in self.lanes:
            lane.thread.start()

    def submit(self, key: RequestKey, body: bytes, resume: Resume | None = None) -> None:
        """Asks for a prompt; the answer comes through `take`.

        A request that continues an answer has everything already: nothing is rendered or
        tokenised again, which might give another prompt. Only pictures are read again.
        """
        lane = self._long if len(body) > LONG_BODY_BYTES else self._short
        lane.submit(key, body, resume)

    def forget(self, key: RequestKey) -> None:
        """Drops a request that has not been begun; the result of one that has may still come."""
        for lane in self.lanes:
            lane.forget(key)

    def take(self) -> list[Tokenised | Refused]:
        """Take what has been finished since the last call, in that order."""
        results: list[Tokenised | Refused] = []
        while self._results:
            results.append(self._results.popleft())
        return results

    def busy(self) -> tuple[RequestKey, float] | None:
        """Return the request that has been in preparation the longest, and since when
        (monotonic)."""
        short, long = self._short.busy, self._long.busy
        if short is None or long is None:
            return short or long
        return min(short, long, key=lambda busy: busy[1])

    def is_alive(self) -> bool:
        """True if both threads are there to prepare what was asked for."""
        return all(lane.thread.is_alive() for lane in self.lanes)

    def close(self) -> None:
        """Ends the threads after what they are doing now, without waiting for it."""
        for lane in self.lanes:
            lane.close()

    def _finished(self, result: Tokenised | Refused) -> None:
        self._results.append(result)
        self._wake()


class Lane:
    """One thread with its own queue and codec.

    Attributes:
        arrivals: how many requests it was given.
        busy: what it is preparing, and since when.
        thread: runs from `TextThreads.start` until `close`.

    Args:
        name: the thread's name.
        make_codec: called on the thread, with its first job.
        finished: called with each result, on the thread.
        guard: watches the memory that each prompt takes.
    """

    def __init__(
        self,
        name: str,
        make_codec: Callable[[], TextCodec],
        finished: Callable[[Tokenised | Refused], None],
        clock: Callable[[], float],
        guard: MemoryGuard,
    ) -> None:
        self._guard = guard
        self._make_codec = make_codec
        self._codec: TextCodec | None = None
        self._finished = finished
        self._clock = clock
        self._changed = threading.Condition()
        self._jobs: list[_Job] = []  # bounded by what the supervisor dispatches at once
        self.arrivals = 0
        self._is_closed = False
        self.busy: tuple[RequestKey, float] | None = None
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def submit(self, key: RequestKey, body: bytes, resume: Resume | None) -> None:
        """See `TextThreads.submit`."""
        with self._changed:
            self.arrivals += 1
            rank = self.arrivals + len(body) // BYTES_PER_TURN
            job = _Job(rank, self.arrivals, key, body, self._clock(), resume)
            heapq.heappush(self._jobs, job)
            self._changed.notify()

    def forget(self, key: RequestKey) -> None:
        """See `TextThreads.forget`."""
        with self._changed:
            self._jobs = [job for job in self._jobs if job.key != key]
            heapq.heapify(self._jobs)

    def close(self) -> None:
        """See `TextThreads.close`."""
        with self._changed:
            self._is_closed = True
            self._jobs.clear()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._jobs and not self._is_closed:
                    self._changed.wait()
                if self._is_closed:
                    return
                job = heapq.heappop(self._jobs)
                began_at = self._clock()
                self.busy = (job.key, began_at)
            with self._guard.prepares(job.key, len(job.body)):
                result = self._prepare(job)
            self.busy = None
            self._finished(result)
            took_s = self._clock() - began_at
            if took_s > SLOW_S:
                tokens = len(result.prompt.tokens) if isinstance(result, Tokenised) else 0
                logger.warning(
                    log_line("slow preprocessing", key=job.key, tokens=tokens, seconds=took_s)
                )

    def _prepare(self, job: _Job) -> Tokenised | Refused:
        try:
            body, prompt = self._encoded(job)
        except RemoteError as error:
            return Refused(key=job.key, error=error)
        except MemoryError:
            message = "there is not enough memory to prepare the prompt"
            refusal = RemoteError(ErrorCode.INSUFFICIENT_MEMORY, message)
            return Refused(key=job.key, error=refusal)
        except Exception as error:  # noqa: BLE001
            # A template may raise anything: the request's own error, never the worker's death (G6).
            name = type(error).__name__
            logger.warning(log_line("a prompt could not be prepared", key=job.key, error=name))
            # A template's message may contain anything; on the link it must be UTF-8.
            said = str(error)[:300].encode(errors="replace").decode()
            message = f"the prompt could not be prepared: {name}: {said}"
            return Refused(key=job.key, error=RemoteError(ErrorCode.INVALID_REQUEST, message))
        return Tokenised(
            key=job.key,
            body=body,
            prompt=prompt,
            tokenize_s=self._clock() - job.submitted_at,
            resume=job.resume,
        )

    def _encoded(self, job: _Job) -> tuple[RequestBody | PoolingBody, Prompt]:
        """Return the body of a request and its prompt.

        Raises:
            RemoteError: the request's own fault.
        """
        if job.resume is None:
            body = decode_body(job.body)
            if isinstance(body, PoolingBody):
                return body, self._own_codec().encode_texts(body)
            prompt = self._own_codec().encode(body)
        else:
            body, prompt = _from_acceptance(job.resume)
            if isinstance(body, PoolingBody):
                return body, prompt
            if job.resume.acceptance.needs_body:
                prompt = replace(prompt, pictures=self._pictures_again(job, prompt))
        if body.shows_ids:
            _check_count(prompt)
        has_form = body.form is not AnswerForm.TEXT or body.strict_tools
        if has_form and body.tokenize is None:
            prompt = self._own_codec().constrain(body, prompt)
        if body.echo and (job.resume is None or not job.resume.shown):
            prompt = replace(prompt, text=self._shown_text(body, prompt))
        return body, prompt

    def _pictures_again(self, job: _Job, prompt: Prompt) -> tuple[Picture, ...]:
        """Read the pictures of a prompt again that an earlier life has read.

        Raises:
            RemoteError: `worker_crashed`; they are read otherwise now.
        """
        body = decode_body(job.body)
        again = self._own_codec().encode(body) if isinstance(body, RequestBody) else None
        if again is None or again.tokens != prompt.tokens:
            raise RemoteError(
                ErrorCode.WORKER_CRASHED,
                "the pictures of the prompt are read otherwise since its worker was restarted, so"
                " the answer cannot continue",
            )
        return again.pictures

    def _shown_text(self, body: RequestBody, prompt: Prompt) -> str:
        """Return the text of a prompt that is shown before the answer.

        Raises:
            RemoteError: `invalid_request`; it is too long for one piece.
        """
        text = self._own_codec().prompt_text(body, prompt.tokens)
        if (size := len(text.encode())) > MAX_TEXT_BYTES:
            raise unfit(
                "echo",
                f"text that is shown must have at most {MAX_TEXT_BYTES:,} bytes, not {size:,}",
            )
        return text

    def _own_codec(self) -> TextCodec:
        if self._codec is None:
            self._codec = self._make_codec()
        return self._codec


def _check_count(prompt: Prompt) -> None:
    """Raise if a prompt has too many tokens to be shown."""
    if (count := len(prompt.tokens)) > MAX_SHOWN_IDS:
        raise unfit(
            "prompt", f"the prompt must have at most {MAX_SHOWN_IDS:,} tokens, not {count:,}"
        )


def _from_acceptance(resume: Resume) -> tuple[RequestBody | PoolingBody, Prompt]:
    acceptance = resume.acceptance
    tokens = unpack_tokens(acceptance.prompt_tokens)
    if lengths := acceptance.parameters.get("lengths"):
        vectors = PoolingBody.accepted(tokens, acceptance.parameters)
        return vectors, Prompt(tokens=tokens, lengths=tuple(lengths))
    body = RequestBody.accepted(tokens, acceptance.parameters, acceptance.seed)
    return body, Prompt(tokens=tokens, opening=acceptance.opening)
