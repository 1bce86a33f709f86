"""Pauses: a row leaves the batch on purpose, and its request continues where it stood.

`ask_to_leave` is the only way to make a running row leave without an end, whatever the reason.
Until the worker confirms, the row runs: it holds its place, its tokens count, its end wins, a crash
judges it. A pause accuses nobody. What leaves because a person wants it is PAUSED and waits outside
the queue; everything else queues again: ahead of new requests, if the worker had accepted it.
"""

from __future__ import annotations

from mlxsup.protocol.errors import RemoteError
from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.states import NoticeKind, PauseReason, RowState, State, Wanted
from mlxsup.protocol.step_batch import Row
from mlxsup.protocol.worker_messages import DropKept, PauseRow

from .deadlines import Deadlines
from .errors import already_paused, for_interrupted, may_not_be_paused, not_paused
from .journal import request_paused
from .kv_budget import is_leaving_short
from .model import Model
from .outbox import Outbox
from .requests.ledger import Ledger, Request, Stage
from .status import change_map, expected_s

WHY = {
    PauseReason.USER: "with `mlxsup pause`",
    PauseReason.TURN: "a request that may cause crashes has to run alone",
    PauseReason.CLASS: "an interactive request needs its place",
    PauseReason.SWAP: "its model makes room for another model",
    PauseReason.MEMORY: "its model has too little memory for it right now",
}
"""The reasons in words, for those who watch."""


class Pausing:
    """Takes requests out of the batch or the line, and lets them return."""

    def __init__(self, ledger: Ledger, deadlines: Deadlines, outbox: Outbox) -> None:
        self._ledger = ledger
        self._deadlines = deadlines
        self._outbox = outbox

    # ------------------------------------------------------------ what people ask

    def pause(self, model: Model, request: Request, now: float) -> None:
        """A person pauses a request, at any stage.

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
            self.put_aside(model, request, now)
        elif request.stage is Stage.YIELDING:  # its row has been asked to leave already
            request.pauses.reason = PauseReason.USER
            self._ledger.move(request, Stage.PAUSING)
        else:
            self.ask_to_leave(model, request, PauseReason.USER, keep=True)

    def resume(self, model: Model, request: Request, now: float) -> None:
        """A person lets a paused request continue; once accepted, it queues ahead of new ones.

        Raises:
            RemoteError: `invalid_request`; it is not paused.
        """
        if request.stage is Stage.PAUSING:
            self._ledger.move(request, Stage.YIELDING)
        elif request.stage is Stage.PAUSED:
            self.let_queue(model, request, now)
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
            self._outbox.tell(model.life, PauseRow(key=request.key, keep=keep))

    def row_left(self, model: Model, request: Request, row: Row, now: float) -> RemoteError | None:
        """The worker has confirmed that the row left the batch, or says that there is no memory for
        it; what it delivered is kept.

        Returns:
            The error of a request that may not return, because its model is going down and the
            worker had not accepted it yet.
        """
        is_wanted = model.life.wanted is Wanted.UP
        if not is_wanted and request.acceptance is None:
            return for_interrupted(model.life.waiting_error, model.name, request.tokens_sent)
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
            self.put_aside(model, request, now)
            return None
        self._begin(request, now)
        self._ledger.move(request, Stage.QUEUED)
        model.line_up_again(request, now)
        self._deadlines.set(request.key, request.next_deadline)
        expects_s = None
        if request.pauses.reason is PauseReason.CLASS:
            model.batch.freed += 1
            if request.wants_notices:  # one that stands before it gets the row that it leaves
                place = max(model.queue.place(request) - 1, 1)
                expects_s = expected_s(model, request, place, now)
        if request.pauses.is_paused:
            self._notify(request, now, expects_s)
            self._announce(model, request)
        return None

    def put_aside(self, model: Model, request: Request, now: float) -> None:
        """A request that is neither queued nor running any longer is PAUSED."""
        self._begin(request, now)
        if request.pauses.since is None:
            request.pauses.since = now
        self._ledger.move(request, Stage.PAUSED)
        model.paused[request.key] = request
        self._deadlines.set(request.key, request.next_deadline)
        self._notify(request, now)
        self._announce(model, request)

    def let_queue(self, model: Model, request: Request, now: float) -> None:
        """A PAUSED request waits for a row again."""
        del model.paused[request.key]
        if not request.has_begun:  # what limits the wait for its start did not run
            if request.limits.queue_deadline is not None and request.pauses.since is not None:
                request.limits.queue_deadline += now - request.pauses.since
            request.pauses.end(now)
        self._ledger.move(request, Stage.QUEUED)
        model.line_up(request, now)
        self._deadlines.set(request.key, request.next_deadline)
        note = f"request {request.id} is no longer paused"
        self._outbox.announce(change_map(model, model.life.state, note))

    def forget_state(self, model: Model, key: RequestKey) -> None:
        """A request that had been paused has ended: the worker need not keep its state."""
        if key in model.batch.kept:
            model.batch.kept.remove(key)
            if model.life.state in (State.READY, State.DRAINING):
                self._outbox.tell(model.life, DropKept(key=key))

    # ------------------------------------------------------------ inside

    def _begin(self, request: Request, now: float) -> None:
        """One that the worker has not accepted, or had no memory for, waits as if it were new."""
        request.sent.notices.clear()
        if not request.has_begun:
            request.run.started_at = None
            return
        request.pauses.is_paused = True
        if request.pauses.since is None:
            request.pauses.since = now
        request.limits.queue_deadline = None  # it limits the wait for the start, and it was started

    def _notify(self, request: Request, now: float, expects_s: float | None = None) -> None:
        self._outbox.record(request_paused(request), now)
        detail = {"reason": request.pauses.reason.value, "tokens_sent": request.tokens_sent}
        since_s = 0.0 if request.pauses.since is None else now - request.pauses.since
        self._outbox.notify(
            request, NoticeKind.PAUSED, detail, since_s=since_s, expected_s=expects_s
        )

    def _announce(self, model: Model, request: Request) -> None:
        note = f"request {request.id} is paused: {WHY[request.pauses.reason]}"
        self._outbox.announce(change_map(model, model.life.state, note))


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
    """It waits until there is memory for its row again, whoever found that there is none."""
    request.run.left_short_at = model.batch.ended
    if request.stage is Stage.RUNNING:
        request.pauses.reason = PauseReason.MEMORY
