"""The way of a request: admitted, queued, dispatched, streamed, ended; each exactly once (P1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlxsup.protocol.errors import RemoteError
from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.messages import (
    Accepted,
    CancelRow,
    ClientDelta,
    Deltas,
    Dispatch,
    Done,
    Failed,
    Generate,
    Message,
    Notice,
    Resume,
    RowDelta,
    Step,
)
from mlxsup.protocol.states import FinishReason, NoticeKind, State, Wanted

from .actions import Action, SendToClient, SendToWorker
from .deadlines import Deadlines
from .errors import (
    cut_off,
    deadline_exceeded,
    duplicate_id,
    for_interrupted,
    insufficient_memory,
    quarantined,
    queue_timeout,
    worker_crashed,
)
from .events import ConnectionId
from .health.blame import QUARANTINE_S, Evidence, Verdict, digest_of
from .health.suspects import end_intake, next_in_line
from .model import Model
from .requests.admission import refuse_for_quarantine, refuse_for_room, refuse_for_state
from .requests.ledger import MAX_DEATHS_WITHOUT_PROGRESS, Ledger, Request, Stage
from .settings import CoreSettings
from .status import load_progress, wait_reason, waiting_news


class Serving:
    """Moves requests between the ledger, the lines and the workers.

    Args:
        settings: the limits.
        deadlines: where the times of requests are kept.
        do: takes an action.
    """

    def __init__(
        self, settings: CoreSettings, deadlines: Deadlines, do: Callable[[Action], None]
    ) -> None:
        self.settings = settings
        self.ledger = Ledger()
        self._deadlines = deadlines
        self._do = do

    # ------------------------------------------------------------ in

    def admit(
        self,
        model: Model,
        message: Generate,
        connection: ConnectionId,
        *,
        models: int,
        now: float,
    ) -> RemoteError | None:
        """Lets a request wait, or says why not.

        Args:
            model: who is to answer.
            message: the request.
            connection: who asks.
            models: how many there are to share the queue.
            now: monotonic seconds.
        """
        if self.ledger.find(connection, message.id) is not None:
            return duplicate_id(message.id)
        client = message.client or connection.hex()
        digest = digest_of(model.name, message.body)
        model.recovery.expire(now)
        refusal = refuse_for_state(model.life) or refuse_for_quarantine(
            model.name, model.recovery, digest, now
        )
        refusal = refusal or refuse_for_room(
            model,
            connection=connection,
            client=client,
            body_bytes=len(message.body),
            ledger=self.ledger,
            models=models,
            settings=self.settings,
        )
        if refusal is not None:
            return refusal
        queue_limit_s = message.queue_timeout_s
        if queue_limit_s is None:
            queue_limit_s = self.settings.queue_timeout_s
        request = Request(
            key=self.ledger.new_key(),
            connection=connection,
            id=message.id,
            client=client,
            model=model.name,
            body=message.body,
            digest=digest,
            arrived_at=now,
            queue_deadline=_after(now, queue_limit_s, 0.0),
            first_token_deadline=_after(
                now, message.first_token_timeout_s, self.settings.first_token_timeout_s
            ),
            deadline=_after(now, message.timeout_s, 0.0),
            may_resume=message.resume,
            wants_notices=message.notices,
        )
        self.ledger.add(request)
        model.line.join(request.key)
        self._set_deadline(request)
        return None

    def dispatch(self, model: Model, now: float) -> None:
        """Hands waiting requests to a READY worker while it has room; asks rows to leave where
        a suspect has to run alone."""
        model.recovery.expire(now)
        if model.life.state is not State.READY:
            return
        while model.has_room and (request := next_in_line(model, self.ledger)) is not None:
            model.line.leave(request.key)
            self.ledger.move(request, Stage.RUNNING)
            request.dispatched_at = now
            model.running[request.key] = request
            self._set_deadline(request)
            self._tell(model, self._dispatch_of(request, now))
        for request in end_intake(model, self.ledger):
            self.ledger.move(request, Stage.YIELDING)
            self._tell(model, CancelRow(key=request.key))

    @staticmethod
    def _dispatch_of(request: Request, now: float) -> Dispatch:
        if request.acceptance is None:
            request.started_at = now
            return Dispatch(key=request.key, body=request.body)
        resume = Resume(acceptance=request.acceptance, delivered=bytes(request.sent_tokens))
        return Dispatch(key=request.key, resume=resume)

    def tell_waiting(self, model: Model) -> None:
        """Tells those who asked for it what they wait for, if that is news (`WaitingLine`).

        A change that concerns everybody is rare; else few are looked at, however many wait.
        """
        if not self.ledger.has_listeners:
            model.line.skip_news()
            return
        news = waiting_news(model)
        is_for_all, model.told_waiting = news != model.told_waiting, news
        places = model.line.take_news()
        reason, progress = wait_reason(model), load_progress(model)
        for key, position in (model.line.places() if is_for_all else places).items():
            request = self._request(key)
            self._notify(request, NoticeKind.QUEUED, {"position": position, "reason": reason.value})
            if progress is not None:
                detail = {"state": model.life.state.value, **progress}
                self._notify(request, NoticeKind.LOADING, detail)

    def _tell_prefill(self, model: Model, message: Step) -> None:
        for row in message.prefill:
            request = model.running.get(row.key)
            if request is not None:
                detail = {"done": row.done, "total": row.total}
                self._notify(request, NoticeKind.PREFILLING, detail)

    def _notify(self, request: Request, kind: NoticeKind, detail: dict[str, Any]) -> None:
        if request.wants_notices and request.told.get(kind) != detail:
            request.told[kind] = detail
            notice = Notice(id=request.id, kind=kind, detail=detail)
            self._do(SendToClient(connection=request.connection, message=notice))

    # ------------------------------------------------------------ what the worker says

    def accepted(self, model: Model, message: Accepted) -> None:
        """The worker took the request: its body is not needed any more."""
        request = model.running.get(message.key)
        if request is not None and request.acceptance is None:  # a resumed answer keeps its first
            self.ledger.accept(request, message.acceptance)
            request.tokenize_s = message.tokenize_s

    def rejected(self, model: Model, key: RequestKey, error: RemoteError, now: float) -> None:
        """The request was wrong by itself (C7), or cannot go on in this worker."""
        model.leaving.pop(key, None)
        request = model.running.pop(key, None)
        if request is not None:
            if request.acceptance is not None:
                error = for_interrupted(error, model.name, request.tokens_sent)
            self._end(request, error=error)
        model.idle_since = now

    def step(self, model: Model, message: Step, now: float) -> bool:
        """One engine step: the deltas of each connection in one message, then what has ended.

        Returns:
            Whether there may be room for others now.
        """
        model.steps = message.step
        has_freed = False
        deltas: dict[ConnectionId, list[ClientDelta]] = {}
        finished: list[tuple[Request, FinishReason]] = []
        for row in message.rows:
            request = model.running.get(row.key)
            if request is None:
                if row.finish is not None:
                    model.leaving.pop(row.key, None)
                    has_freed = True
                continue
            if request.is_interrupted:
                self._go_on(request)
            if row.text or row.tokens:
                deltas.setdefault(request.connection, []).append(
                    self._take_delta(model, request, row, now)
                )
            if row.tokens and model.recovery.gained(request.held, now):
                model.story.append(f"{now:.3f} {request.id} has come past the crash")
                has_freed = True
            if row.warning is not None and row.warning not in request.warnings:
                request.warnings.append(row.warning)
            if row.finish is FinishReason.CANCELLED and request.stage is Stage.YIELDING:
                has_freed = True
                self._wait_again(model, request)
            elif row.finish is not None:
                del model.running[row.key]  # at once: whatever else is said of it is not read
                finished.append((request, row.finish))
        for connection, pieces in deltas.items():
            self._do(SendToClient(connection=connection, message=Deltas(deltas=pieces)))
        for request, reason in finished:
            assert request.dispatched_at is not None
            if request.dispatched_at == request.started_at:  # it ran through, with no interruption
                model.learn_service(now - request.dispatched_at)
            if reason is not FinishReason.CANCELLED:
                model.recovery.completed(request.digest)
            self._end(request, finish=reason, now=now)
        if message.prefill and self.ledger.has_listeners:
            self._tell_prefill(model, message)
        model.idle_since = now
        return has_freed or bool(finished) or model.recovery.is_anyone_on_probation

    def _take_delta(self, model: Model, request: Request, row: RowDelta, now: float) -> ClientDelta:
        if row.tokens:
            self.ledger.deliver(request, row.tokens)
            request.deaths = 0
        model.tokens += len(row.tokens) // 4
        if request.first_token_at is None:
            request.first_token_at = now
            request.prefill_s = row.prefill_s or 0.0
            request.cached_tokens = row.cached_tokens
            self._set_deadline(request)
        delta = ClientDelta(
            id=request.id,
            seq=request.seq,
            text=row.text,
            tokens=row.tokens,
            channel=row.channel,
            logprobs=row.logprobs,
        )
        request.seq += 1
        return delta

    def _go_on(self, request: Request) -> None:
        request.is_interrupted = False
        request.resumed += 1
        self._notify(request, NoticeKind.RESUMED, {"times": request.resumed})

    def _wait_again(self, model: Model, request: Request) -> None:
        """The row of a request that yields has left the batch; what it delivered is kept."""
        del model.running[request.key]
        if model.life.wanted is not Wanted.UP:  # decided since: nothing is dispatched any more
            error = model.life.removal or cut_off(model.name, model.life.why)
            self._end(request, error=for_interrupted(error, model.name, request.tokens_sent))
            return
        self.ledger.move(request, Stage.QUEUED)
        request.queue_deadline = None  # a limit for the start, and it was started
        model.line.rejoin([request.key])
        self._set_deadline(request)

    # ------------------------------------------------------------ out

    def cancel(self, model: Model, request: Request, now: float) -> None:
        """The client wants no more: answered at once, whatever the worker does (D4, D13)."""
        self._withdraw(model, request)
        self._end(request, finish=FinishReason.CANCELLED, now=now)

    def drop(self, model: Model, request: Request) -> None:
        """The client is gone: nobody is answered (D12)."""
        self._withdraw(model, request)
        self._forget(request)

    def fail(self, model: Model, request: Request, error: RemoteError) -> None:
        """The request ends with an error, wherever it stands."""
        self._withdraw(model, request)
        self._end(request, error=error)

    def fail_queue(self, model: Model, error: RemoteError) -> None:
        """Everything that waits for this model is answered."""
        for key in list(model.line):
            request = self._request(key)
            if request.acceptance is not None:
                self.fail(model, request, for_interrupted(error, model.name, request.tokens_sent))
            else:
                self.fail(model, request, error)

    def fail_running(self, model: Model, error: RemoteError) -> None:
        """Everything that runs is answered while the process still lives."""
        for request in list(model.running.values()):
            self.fail(model, request, error)

    def lose_running(self, model: Model, text: str, verdict: Verdict) -> None:
        """The process is gone with its rows: they wait again, before all others, to be resumed.

        What the worker had not accepted yet is dispatched again as new. A row ends instead where
        it killed the engine, opted out of going on, or meets death after death without a token.
        """
        again: list[Request] = []
        for request in list(model.running.values()):
            del model.running[request.key]
            error = self._loss(model, request, text, verdict)
            if error is not None:
                self._end(request, error=error)
            else:
                self._interrupt(request, text)
                again.append(request)
        for key in list(model.line):
            request = self._request(key)
            if request.acceptance is not None and not request.may_resume:
                self.fail(model, request, worker_crashed(model.name, text, request.tokens_sent))
        model.line.rejoin(request.key for request in again)
        if verdict.culprit is not None:
            for key in list(model.line):
                request = self._request(key)
                if request.digest == verdict.culprit:
                    error = quarantined(model.name, request.tokens_sent, QUARANTINE_S)
                    self.fail(model, request, error)

    @staticmethod
    def _loss(model: Model, request: Request, text: str, verdict: Verdict) -> RemoteError | None:
        """Why a request does not outlive its worker; None where it does."""
        name, sent = model.name, request.tokens_sent
        if verdict.culprit == request.digest:
            return quarantined(name, sent, QUARANTINE_S)
        if verdict.is_too_large:
            return insufficient_memory(name, text, sent)
        if request.acceptance is not None and not request.may_resume:
            return worker_crashed(name, text, sent)
        if verdict.evidence is Evidence.NONE:
            request.deaths += 1
            if request.deaths >= MAX_DEATHS_WITHOUT_PROGRESS:
                return worker_crashed(name, text, sent)
        return None

    def _interrupt(self, request: Request, text: str) -> None:
        self.ledger.move(request, Stage.QUEUED)
        request.dispatched_at = None
        request.told.clear()
        if request.acceptance is None:
            request.started_at = None
        else:
            request.is_interrupted = True
            request.queue_deadline = None  # a limit for the start, and it was started
            detail = {"cause": text, "tokens_sent": request.tokens_sent}
            self._notify(request, NoticeKind.INTERRUPTED, detail)
        self._set_deadline(request)

    def due(self, model: Model, request: Request, now: float) -> None:
        """A time of this request may have come (D15)."""
        if request.deadline is not None and now >= request.deadline:
            error = deadline_exceeded(model.name, "the end of the answer", request.tokens_sent)
        elif (
            request.first_token_at is None
            and request.first_token_deadline is not None
            and now >= request.first_token_deadline
        ):
            error = deadline_exceeded(model.name, "the first token", 0)
        elif (
            request.stage is Stage.QUEUED
            and request.queue_deadline is not None
            and now >= request.queue_deadline
        ):
            error = queue_timeout(model.name, now - request.arrived_at)
        else:
            self._set_deadline(request)
            return
        self.fail(model, request, error)

    # ------------------------------------------------------------ inside

    def _withdraw(self, model: Model, request: Request) -> None:
        """Takes a request out of the line or the batch; a row holds its place until it left."""
        if request.stage is Stage.QUEUED:
            model.line.leave(request.key)
            return
        del model.running[request.key]
        model.leaving[request.key] = request.held
        if model.life.state in (State.READY, State.DRAINING):
            self._tell(model, CancelRow(key=request.key))

    def _end(
        self,
        request: Request,
        *,
        finish: FinishReason | None = None,
        error: RemoteError | None = None,
        now: float = 0.0,
    ) -> None:
        """The only place where a request gets its terminal message."""
        self._forget(request)
        if error is not None:
            message: Message = Failed(id=request.id, error=error.to_wire())
        else:
            assert finish is not None
            message = Done(
                id=request.id,
                seq=request.seq,
                finish_reason=finish,
                usage=request.usage(),
                timings=request.timings(now),
                seed=request.acceptance.seed if request.acceptance else None,
                warnings=request.warnings,
                resumed=request.resumed,
            )
        self._do(SendToClient(connection=request.connection, message=message))

    def _forget(self, request: Request) -> None:
        self.ledger.remove(request)
        self._deadlines.set(request.key, None)

    def _set_deadline(self, request: Request) -> None:
        times = [request.deadline]
        if request.stage is Stage.QUEUED:
            times.append(request.queue_deadline)
        if request.first_token_at is None:
            times.append(request.first_token_deadline)
        self._deadlines.set(request.key, min((t for t in times if t is not None), default=None))

    def _request(self, key: RequestKey) -> Request:
        request = self.ledger.get(key)
        assert request is not None
        return request

    def _tell(self, model: Model, message: Message) -> None:
        self._do(SendToWorker(model=model.name, generation=model.life.generation, message=message))


def _after(now: float, asked_s: float | None, default_s: float) -> float | None:
    limit_s = default_s if asked_s is None else asked_s
    return now + limit_s if limit_s > 0 else None
