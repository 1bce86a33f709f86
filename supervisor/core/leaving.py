"""The leaving of requests from their rows and the line: paused, interrupted, ended.

Each request gets exactly one terminal message (P1), and `end` is the only place that sends it.

`ask_to_leave` is the only way to make a running row leave without an end. Until the worker has
confirmed that, the row runs: it holds its place, its tokens count, its end wins, a crash judges it.
A pause accuses no request. What leaves because a person wants it is PAUSED and waits outside the
queue; everything else queues again: ahead of new requests, if the worker had accepted it.
"""

from __future__ import annotations

from mlxsup.protocol.client_messages import Done, Failed
from mlxsup.protocol.errors import RemoteError
from mlxsup.protocol.flight import RequestEnded
from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.states import FinishReason, NoticeKind, PauseReason, RowState, State, Wanted
from mlxsup.protocol.step_batch import Row
from mlxsup.protocol.worker_messages import CancelRow, DropKept, PauseRow

from .attaching import Attaching
from .errors import (
    already_paused,
    deadline_exceeded,
    for_interrupted,
    insufficient_memory,
    may_not_be_paused,
    not_paused,
    quarantined,
    queue_timeout,
    with_engine_s,
    worker_crashed,
)
from .journal import request_ended, request_paused
from .kv_budget import is_leaving_short
from .model import Model
from .outbox import Outbox
from .poison import QUARANTINE_S, Evidence, Verdict
from .requests import MAX_DEATHS_WITHOUT_PROGRESS, Ledger, Request, Stage
from .status import change_map, expected_s

GONE = "gone"
"""The outcome of a request whose client is gone."""


WHY = {
    PauseReason.USER: "with `mlxsup pause`",
    PauseReason.TURN: "a request that may cause crashes has to run alone",
    PauseReason.CLASS: "an interactive request needs its place",
    PauseReason.SWAP: "its model makes room for another model",
    PauseReason.MEMORY: "its model has too little memory for it right now",
}
"""The reasons in words, for those who watch."""


class Leaving:
    """Takes requests out of the batch or the line, lets them return, and ends them."""

    def __init__(self, ledger: Ledger, outbox: Outbox, attaching: Attaching) -> None:
        self._ledger = ledger
        self._outbox = outbox
        self._attaching = attaching

    # ------------------------------------------------------------ one request ends

    def cancel(self, model: Model, request: Request, now: float) -> None:
        """Answer a client that cancelled at once; its row leaves later (D4, D13)."""
        self._withdraw(model, request, now)
        self.end(request, finish=FinishReason.CANCELLED, now=now)

    def drop(self, model: Model, request: Request, now: float) -> None:
        """End a request whose client is gone without an answer (D12)."""
        self._withdraw(model, request, now)
        ended = self._forget(request, GONE, now)
        self._attaching.ended(request, _done(request, FinishReason.CANCELLED, ended))

    def fail(self, model: Model, request: Request, error: RemoteError, now: float) -> None:
        """End a request with an error, at any stage."""
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
            message: Done | Failed = Failed(id=request.id, error=error)
        else:
            assert finish is not None
            message = _done(request, finish, ended)
        self._outbox.send(request.connection, message)
        self._attaching.ended(request, message)

    # ------------------------------------------------------------ what people ask

    def pause(self, model: Model, request: Request, now: float) -> None:
        """Pause a request for a person, at any stage.

        Raises:
            RemoteError: `invalid_request`; it is paused already, or may not be paused.
        """
        if request.stage in (Stage.PAUSING, Stage.PAUSED):
            raise already_paused(model.name, request.id)
        _check_allowed(model, request)
        if request.stage is Stage.QUEUED:
            model.queue.leave(request)
            request.waiting.end(now)
            request.pauses.reason = PauseReason.USER
            self._put_aside(model, request, now)
        elif request.stage is Stage.YIELDING:  # its row has been asked to leave already
            request.pauses.reason = PauseReason.USER
            self._ledger.move(request, Stage.PAUSING)
        else:
            self.ask_to_leave(model, request, PauseReason.USER, keep=True)

    def resume(self, model: Model, request: Request, now: float) -> None:
        """Let a request continue that a person has paused; once accepted, it queues ahead of new
        ones.

        Raises:
            RemoteError: `invalid_request`; it is not paused.
        """
        if request.stage is Stage.PAUSING:
            self._ledger.move(request, Stage.YIELDING)
        elif request.stage is Stage.PAUSED:
            self._let_queue(model, request, now)
        else:
            raise not_paused(model.name, request.id)

    # ------------------------------------------------------------ what rows do

    def ask_to_leave(
        self, model: Model, request: Request, reason: PauseReason, *, keep: bool
    ) -> None:
        """Make a running row leave the batch; it runs until the worker confirms that.

        Args:
            reason: decides where it waits then, and what its client is notified of.
            keep: whether the worker keeps what it has computed for it.
        """
        is_by_person = reason is PauseReason.USER
        request.pauses.reason = reason
        self._ledger.move(request, Stage.PAUSING if is_by_person else Stage.YIELDING)
        if model.life.state in (State.READY, State.DRAINING):
            self._outbox.tell(model, PauseRow(key=request.key, keep=keep))

    def row_left(self, model: Model, request: Request, row: Row, now: float) -> None:
        """Queue or put aside a request whose row has left the batch, as the worker has confirmed,
        or for which the worker has no memory; what it delivered is kept. If its model is going
        down, a request that the worker had not accepted yet may not return."""
        is_wanted = model.life.wanted is Wanted.UP
        if not is_wanted and request.acceptance is None:
            error = for_interrupted(model.life.waiting_error, model.name, request.tokens_sent)
            self.end(request, error=error, now=now)
            return
        is_short = row.pause_reason is PauseReason.MEMORY or is_leaving_short(request)
        if is_short and is_wanted and request.is_unread:
            request.run.started_at = (
                None  # it never had a row; in a drain, it has to come to its end
            )
        if is_short or request.run.left_short_at is not None:
            _left_short(model, request)
        if row.paused is RowState.KEPT:
            model.batch.kept.add(request.key)
            model.batch.keeps_states = True
        elif request.pauses.reason is PauseReason.CLASS and request.run.gains_since is not None:
            model.batch.keeps_states = False
        if request.stage is Stage.PAUSING and is_wanted:
            self._put_aside(model, request, now)
            return
        self._begin_pause(request, now)
        self._ledger.move(request, Stage.QUEUED)
        model.line_up_again(request, now)
        expects_s = None
        if request.pauses.reason is PauseReason.CLASS:
            model.batch.freed += 1
            if request.wants_notices:  # one that stands before it gets the row that it leaves
                place = max(model.queue.place(request) - 1, 1)
                expects_s = expected_s(model, request, place, now)
        if request.pauses.is_paused:
            self._notify_paused(request, now, expects_s)
            self._announce_paused(model, request)

    def _put_aside(self, model: Model, request: Request, now: float) -> None:
        """Make a request PAUSED that is neither queued nor running any longer."""
        self._begin_pause(request, now)
        if request.pauses.since is None:
            request.pauses.since = now
        self._ledger.move(request, Stage.PAUSED)
        model.paused[request.key] = request
        self._notify_paused(request, now)
        self._announce_paused(model, request)

    def _let_queue(self, model: Model, request: Request, now: float) -> None:
        """Let a PAUSED request wait for a row again."""
        del model.paused[request.key]
        if not request.has_begun:  # what limits the wait for its start did not run
            if request.limits.queue_deadline is not None and request.pauses.since is not None:
                request.limits.queue_deadline += now - request.pauses.since
            request.pauses.end(now)
        self._ledger.move(request, Stage.QUEUED)
        model.line_up(request, now)
        note = f"request {request.id} is no longer paused"
        self._outbox.announce(change_map(model, note))

    def _forget_state(self, model: Model, key: RequestKey) -> None:
        """Let the worker drop the state of a request that had been paused and has ended."""
        if key in model.batch.kept:
            model.batch.kept.remove(key)
            if model.life.state in (State.READY, State.DRAINING):
                self._outbox.tell(model, DropKept(key=key))

    # ------------------------------------------------------------ all requests of a model

    def fail_queue(self, model: Model, error: RemoteError, now: float) -> None:
        """Answer everything that waits for this model, except what a living worker may still
        bring to its end: answers that were paused."""
        is_served = model.life.state is State.DRAINING
        for request in _waiting(model):
            if is_served and request.pauses.is_paused:
                if request.stage is Stage.PAUSED:
                    self._let_queue(model, request, now)
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
        """Queue the rows of a process that is gone again, ahead of all others.

        Requests that the worker had not accepted are dispatched again as new. A row ends instead if
        it killed the engine, opted out of being resumed, or dies again and again without a token.
        """
        model.settle()
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
                self._put_aside(model, request, now)
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

    def _begin_pause(self, request: Request, now: float) -> None:
        """Begin a pause. One that the worker has not accepted, or had no memory for, waits as if it
        were new."""
        request.sent.notices.clear()
        if not request.has_begun:
            request.run.started_at = None
            return
        request.pauses.is_paused = True
        if request.pauses.since is None:
            request.pauses.since = now
        request.limits.queue_deadline = None  # it limits the wait for the start, and it was started

    def _notify_paused(self, request: Request, now: float, expects_s: float | None = None) -> None:
        self._outbox.record(request_paused(request))
        detail = {"reason": request.pauses.reason.value, "tokens_sent": request.tokens_sent}
        since_s = 0.0 if request.pauses.since is None else now - request.pauses.since
        self._outbox.notify(
            request, NoticeKind.PAUSED, detail, since_s=since_s, expected_s=expects_s
        )

    def _announce_paused(self, model: Model, request: Request) -> None:
        note = f"request {request.id} is paused: {WHY[request.pauses.reason]}"
        self._outbox.announce(change_map(model, note))

    def _interrupt(self, request: Request, text: str) -> None:
        has_started = request.acceptance is not None
        if has_started:  # what limits the wait for the start counts no longer
            request.limits.queue_deadline = None
        self._ledger.move(request, Stage.QUEUED)
        request.sent.notices.clear()
        if not has_started:
            request.run.started_at = None
            return
        request.crashes.is_interrupted = True
        detail = {"cause": text, "tokens_sent": request.tokens_sent}
        self._outbox.notify(request, NoticeKind.INTERRUPTED, detail)

    def _withdraw(self, model: Model, request: Request, now: float) -> None:
        """Take a request out of wherever it is; a row keeps its place until it has left."""
        if not request.has_row:
            if request.stage is Stage.QUEUED:
                model.queue.leave(request)
            else:
                del model.paused[request.key]
            model.idle_since = now
            self._forget_state(model, request.key)
            return
        model.settle()
        del model.batch.running[request.key]
        model.batch.leaving[request.key] = request.held
        if model.life.state in (State.READY, State.DRAINING):
            self._outbox.tell(model, CancelRow(key=request.key))

    def _forget(self, request: Request, outcome: str, now: float) -> RequestEnded:
        self._ledger.remove(request)
        ended = request_ended(request, outcome, request.usage(), request.timings(now))
        self._outbox.record(ended)
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
    """Return those in the queue, and those that are paused."""
    return [*model.queue, *model.paused.values()]


def _loss(model: Model, request: Request, text: str, verdict: Verdict) -> RemoteError | None:
    """Return the error of a request that does not outlive its worker; None if it does."""
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


def _check_allowed(model: Model, request: Request) -> None:
    """Refuse what must run through once it has begun.

    Raises:
        RemoteError: `invalid_request`.
    """
    life = model.life
    if not request.may_resume:
        raise may_not_be_paused(model.name, request.id, "it was sent with `resume` false")
    if life.launch.deterministic:
        raise may_not_be_paused(model.name, request.id, f"{model.name} is `deterministic`")
    if life.wanted is not Wanted.UP:
        raise may_not_be_paused(model.name, request.id, life.waiting_error.message)


def _left_short(model: Model, request: Request) -> None:
    """Let a request wait until there is memory for its row again."""
    request.run.left_short_at = model.batch.ended
    if request.stage is Stage.RUNNING:
        request.pauses.reason = PauseReason.MEMORY
