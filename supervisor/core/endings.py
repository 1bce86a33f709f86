"""Ends requests: cancelled, dropped, failed, finished, or lost with their process.

Each gets exactly one terminal message (P1), and `end` is the only place that sends it.
"""

from __future__ import annotations

from mlxsup.protocol.client_messages import Done, Failed
from mlxsup.protocol.errors import RemoteError
from mlxsup.protocol.flight import RequestEnded
from mlxsup.protocol.states import FinishReason, NoticeKind, State
from mlxsup.protocol.worker_messages import CancelRow

from .attaching import Attaching
from .deadlines import Deadlines
from .errors import (
    deadline_exceeded,
    for_interrupted,
    insufficient_memory,
    quarantined,
    queue_timeout,
    with_engine_s,
    worker_crashed,
)
from .health.poison import QUARANTINE_S, Evidence, Verdict
from .journal import request_ended
from .model import Model
from .outbox import Outbox
from .pausing import Pausing
from .requests.ledger import MAX_DEATHS_WITHOUT_PROGRESS, Ledger, Request, Stage

GONE = "gone"
"""The outcome of a request whose client is gone."""


class Endings:
    """Ends requests, and puts those that continue back into the queue."""

    def __init__(
        self,
        ledger: Ledger,
        deadlines: Deadlines,
        outbox: Outbox,
        pausing: Pausing,
        attaching: Attaching,
    ) -> None:
        self._ledger = ledger
        self._deadlines = deadlines
        self._outbox = outbox
        self._pausing = pausing
        self._attaching = attaching

    # ------------------------------------------------------------ one request

    def cancel(self, model: Model, request: Request, now: float) -> None:
        """The client cancelled: it is answered at once, and its row leaves later (D4, D13)."""
        self._withdraw(model, request, now)
        self.end(request, finish=FinishReason.CANCELLED, now=now)

    def drop(self, model: Model, request: Request, now: float) -> None:
        """The client is gone: no answer is sent (D12)."""
        self._withdraw(model, request, now)
        ended = self._forget(request, GONE, now)
        self._attaching.ended(request, _done(request, FinishReason.CANCELLED, ended))

    def fail(self, model: Model, request: Request, error: RemoteError, now: float) -> None:
        """The request ends with an error, at any stage."""
        self._withdraw(model, request, now)
        self.end(request, error=error, now=now)

    def due(self, model: Model, request: Request, now: float) -> None:
        """`Request.next_deadline` has come (D15)."""
        if request.limits.deadline is not None and now >= request.limits.deadline:
            error = deadline_exceeded(model.name, "the end of the answer", request.tokens_sent)
        elif (
            request.cost.first_token_at is None
            and request.limits.first_token_deadline is not None
            and now >= request.limits.first_token_deadline
        ):
            error = deadline_exceeded(model.name, "the first token", 0)
        else:
            waited_s = now - request.arrived_at
            error = queue_timeout(model.name, waited_s, model.life.download_cause)
        self.fail(model, request, error, now)

    def end(
        self,
        request: Request,
        *,
        now: float,
        finish: FinishReason | None = None,
        error: RemoteError | None = None,
    ) -> None:
        """Send the terminal message of a request that is neither queued nor running any longer."""
        outcome = error.code if error is not None else finish
        assert outcome is not None
        ended = self._forget(request, outcome.value, now)
        if error is not None:
            if request.cost.engine_s:
                error = with_engine_s(error, request.cost.engine_s)
            message: Done | Failed = Failed(id=request.id, error=error.to_wire())
        else:
            assert finish is not None
            message = _done(request, finish, ended)
        self._outbox.send(request.connection, message)
        self._attaching.ended(request, message)

    # ------------------------------------------------------------ all requests of a model

    def fail_queue(self, model: Model, error: RemoteError, now: float) -> None:
        """Answer everything that waits for this model, except what a living worker may still
        bring to its end: answers that were paused."""
        is_served = model.life.state is State.DRAINING
        for request in _waiting(model):
            if is_served and request.pauses.is_paused:
                if request.stage is Stage.PAUSED:
                    self._pausing.let_queue(model, request, now)
            elif request.has_begun:
                begun = for_interrupted(error, model.name, request.tokens_sent)
                self.fail(model, request, begun, now)
            else:
                self.fail(model, request, error, now)

    def fail_running(self, model: Model, error: RemoteError, now: float) -> None:
        """Answer everything that runs, while the process is still alive."""
        for request in list(model.batch.running.values()):
            if request.acceptance is None:
                self.fail(model, request, error, now)
            else:
                begun = for_interrupted(error, model.name, request.tokens_sent)
                self.fail(model, request, begun, now)

    def lose_running(self, model: Model, text: str, verdict: Verdict, now: float) -> None:
        """The process is gone with its rows, which queue again, ahead of all others.

        Requests that the worker had not accepted are dispatched again as new. A row ends instead if
        it killed the engine, opted out of being resumed, or dies again and again without a token.
        """
        model.settle()
        self._attaching.worker_lost(model.name)
        again: list[Request] = []
        for request in list(model.batch.running.values()):
            del model.batch.running[request.key]
            error = _loss(model, request, text, verdict)
            if error is not None:
                self.end(request, error=error, now=now)
                continue
            was_pausing = request.stage is Stage.PAUSING
            self._interrupt(request, text)
            if was_pausing:
                self._pausing.put_aside(model, request, now)
            else:
                again.append(request)
        for request in _waiting(model):
            if request.has_begun and not request.may_resume:
                lost = worker_crashed(model.name, text, request.tokens_sent)
                self.fail(model, request, lost, now)
        model.queue.rejoin(again, now)
        if verdict.culprit is not None:
            for request in _waiting(model):
                if request.digest == verdict.culprit:
                    error = quarantined(model.name, request.tokens_sent, QUARANTINE_S)
                    self.fail(model, request, error, now)

    # ------------------------------------------------------------ inside

    def _interrupt(self, request: Request, text: str) -> None:
        self._ledger.move(request, Stage.QUEUED)
        request.sent.notices.clear()
        if request.acceptance is None:
            request.run.started_at = None
        else:
            request.crashes.is_interrupted = True
            request.limits.queue_deadline = (
                None  # it limits the wait for the start, and the request was started
            )
            detail = {"cause": text, "tokens_sent": request.tokens_sent}
            self._outbox.notify(request, NoticeKind.INTERRUPTED, detail)
        self._deadlines.set(request.key, request.next_deadline)

    def _withdraw(self, model: Model, request: Request, now: float) -> None:
        """Take a request out of wherever it is; a row keeps its place until it has left."""
        if not request.has_row:
            if request.stage is Stage.QUEUED:
                model.queue.leave(request)
            else:
                del model.paused[request.key]
            model.idle_since = now
            self._pausing.forget_state(model, request.key)
            return
        model.settle()
        del model.batch.running[request.key]
        model.batch.leaving[request.key] = request.held
        if model.life.state in (State.READY, State.DRAINING):
            self._outbox.tell(model.life, CancelRow(key=request.key))

    def _forget(self, request: Request, outcome: str, now: float) -> RequestEnded:
        self._ledger.remove(request)
        self._deadlines.set(request.key, None)
        ended = request_ended(request, outcome, request.usage(), request.timings(now))
        self._outbox.record(ended, now)
        return ended


def _done(request: Request, finish: FinishReason, ended: RequestEnded) -> Done:
    return Done(
        id=request.id,
        seq=request.sent.seq,
        finish_reason=finish,
        usage=ended.usage,
        timings=ended.timings,
        seed=request.acceptance.seed if request.acceptance else None,
        warnings=request.sent.warnings,
        resumed=request.crashes.resumed,
        paused=request.pauses.count,
    )


def _waiting(model: Model) -> list[Request]:
    """Those in the queue, and those that are paused."""
    return [*model.queue, *model.paused.values()]


def _loss(model: Model, request: Request, text: str, verdict: Verdict) -> RemoteError | None:
    """The error of a request that does not outlive its worker; None if it does."""
    name, sent = model.name, request.tokens_sent
    if verdict.culprit == request.digest:
        return quarantined(name, sent, QUARANTINE_S)
    if verdict.is_too_large:
        return insufficient_memory(name, text, sent)
    if request.acceptance is not None and not request.may_resume:
        return worker_crashed(name, text, sent)
    if verdict.is_tried_again:
        request.crashes.shortages += 1
    if verdict.evidence is Evidence.NONE:
        request.crashes.deaths += 1
        if request.crashes.deaths >= MAX_DEATHS_WITHOUT_PROGRESS:
            return worker_crashed(name, text, sent)
    return None
