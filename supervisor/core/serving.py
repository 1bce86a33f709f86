"""A request's way to its end: admitted, queued, dispatched, streamed; paused, interrupted, ended.

Each request gets exactly one terminal message (P1), and `end` is the only place that sends it.

`ask_to_leave` is the only way to make a running row leave without an end. Until the worker has
confirmed that, the row runs: it holds its place, its tokens count, its end wins, a crash judges it.
A pause accuses no request. What leaves because a person wants it is PAUSED and waits outside the
queue; everything else queues again: ahead of new requests, if the worker had accepted it.

What can start at once is never refused for a queue, and beyond `max_queue` each model has an equal
share of it, so that one model that loads for a minute does not shut all the others (H2).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import Any

from mlxsup.protocol.client_messages import (
    ClientDelta,
    Deltas,
    Done,
    Failed,
    Generate,
    Notice,
)
from mlxsup.protocol.errors import RemoteError
from mlxsup.protocol.flight import (
    PROMPT_ONLY,
    RequestContinued,
    RequestEnded,
    RequestPaused,
    RequestStarted,
)
from mlxsup.protocol.ids import ConnectionId, RequestKey
from mlxsup.protocol.states import (
    SERVES,
    FinishReason,
    NoticeKind,
    PauseReason,
    Priority,
    RowState,
    State,
    Wanted,
    Why,
)
from mlxsup.protocol.step_batch import Row
from mlxsup.protocol.worker_messages import (
    Accepted,
    CancelRow,
    Dispatch,
    DropKept,
    PauseRow,
    Resume,
    Step,
)

from .actions import Outbox
from .attaching import Attaching
from .errors import (
    already_paused,
    cut_off,
    deadline_exceeded,
    for_interrupted,
    insufficient_memory,
    may_not_be_paused,
    model_failed,
    not_paused,
    overloaded,
    priority_too_high,
    quarantined,
    queue_timeout,
    row_does_not_fit,
    with_engine_s,
    worker_crashed,
)
from .model import Model
from .poison import QUARANTINE_S, Evidence, Verdict, digest_of
from .preemption import (
    end_intake,
    is_held_back,
    needs_in_vain,
    next_for_row,
    next_in_line,
    who_yields,
)
from .requests import MAX_DEATHS_WITHOUT_PROGRESS, Ledger, Limits, Request, Stage, Waiting
from .status import change_map, expected_s, load_progress, wait_of, waiting_news

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


class Serving:
    """Moves requests between the ledger, the queues and the workers.

    Attributes:
        attaching: the streams that have more than one reader.
    """

    def __init__(self, ledger: Ledger, outbox: Outbox) -> None:
        self.ledger = ledger
        self.attaching = Attaching(outbox)
        self._outbox = outbox

    # ------------------------------------------------------------ in

    def admit(
        self,
        model: Model,
        message: Generate,
        connection: ConnectionId,
        *,
        adapter: str,
        process: str,
        models: int,
        now: float,
    ) -> None:
        """Queue a request.

        Args:
            message, connection, process: who asks for what, as in `ClientSaid`.
            adapter: of the model; empty: none is named.
            models: how many models share the queue.

        Raises:
            RemoteError: why it may not wait.
        """
        account = self.ledger.terms.account(message.client, process, connection)
        request = Request(
            key=self.ledger.next_key,
            connection=connection,
            id=message.id,
            account=account,
            model=model.name,
            adapter=adapter,
            priority=message.priority or self.ledger.terms.of(account).priority,
            body=message.body,
            digest=digest_of(model.name, message.body, adapter),
            may_resume=message.resume,
            wants_notices=message.notices,
            limits=self._limits_of(message, now),
            waiting=Waiting(arrived_at=now),
        )
        model.blame.expire(now)
        self._check(model, request, models, now)
        self.ledger.add(request)
        model.line_up(request, now)

    def _check(self, model: Model, request: Request, models: int, now: float) -> None:
        """Raise RemoteError if a request may not wait."""
        terms, life = self.ledger.terms, model.life
        highest = terms.of(request.account).max_priority
        if request.priority.is_above(highest):
            raise priority_too_high(request.priority, highest, terms.table_of(request.account))
        if life.state is State.FAILED:
            raise model_failed(life.name, life.failure)
        is_going = life.state in (State.DRAINING, State.STOPPING)
        if is_going and life.wanted is Wanted.DOWN and life.why is Why.USER:
            raise cut_off(life.name, life.why)
        lifted_in_s = model.blame.quarantined_for_s(request.digest, now)
        if lifted_in_s is not None:
            raise quarantined(model.name, 0, lifted_in_s)
        full = self._what_is_full(model, request, models)
        if full is not None:
            limit, sentence = full
            raise overloaded(
                model.name,
                limit,
                sentence,
                queue_depth=self.ledger.waiting,
                running=[one.id for one in model.batch.running.values()],
                retry_after_s=model.next_free_s(),
            )

    def _what_is_full(self, model: Model, request: Request, models: int) -> tuple[str, str] | None:
        """Return the setting that leaves no room for one more request, and how near it is; None if
        there is room (H3, H5).

        A request that can start at once does not wait, so no queue refuses it; its bytes still
        count. Beyond `max_queue` overall, each model still has an equal share of it, so that the
        queue of a loading or slow model does not block the others: at most twice `max_queue` wait.
        """
        ledger, account, queued = self.ledger, request.account, len(model.queue)
        settings = ledger.terms.settings
        if ledger.held_bytes + len(request.body) > settings.max_queue_bytes:
            sentence = f"open requests hold {ledger.held_bytes} bytes, close to the limit"
            return "max_queue_bytes", sentence
        if ledger.may_run(account) and model.can_start:
            return None
        if ledger.waiting >= settings.max_queue and queued >= max(1, settings.max_queue // models):
            waiting = f"{ledger.waiting} requests are waiting, {queued} of them for this model"
            return "max_queue", f"{waiting}, which is the limit"
        own = ledger.waiting_by_account[account]
        if own < ledger.terms.most_waiting(account):
            return None
        has_table = ledger.terms.of(account).max_queue
        table = f"{ledger.terms.table_of(account)} max_queue"
        sentence = f"{own} requests of this client are waiting, which is the limit"
        return table if has_table else "max_queue_per_client", sentence

    def _limits_of(self, message: Generate, now: float) -> Limits:
        settings = self.ledger.terms.settings
        first_token_s = settings.first_token_timeout_s
        return Limits(
            queue_deadline=_after(now, message.queue_timeout_s, settings.queue_timeout_s),
            first_token_deadline=_after(now, message.first_token_timeout_s, first_token_s),
            deadline=_after(now, message.timeout_s, 0.0),
        )

    def prioritize(self, model: Model, request: Request, priority: Priority, now: float) -> None:
        """Give a request another class; a person may go beyond its client's `max_priority`."""
        if request.stage is Stage.QUEUED:
            model.queue.prioritize(request, priority, now)
        else:
            request.priority = request.waiting.standing = priority
            request.waiting.waited_s = 0.0

    def dispatch(self, model: Model, now: float) -> None:
        """Hand waiting requests to a worker that serves while it has room; ask rows to leave if a
        suspect has to run alone, or a request of a higher class waits. While a model goes down,
        only answers that were paused wait."""
        model.blame.expire(now)
        model.queue.age(now)
        model.batch.held_back = None
        if model.queue:
            model.meter.settle()
        if not model.serves_queue:
            model.batch.freed, model.batch.yields_at = 0, None
            return
        had_room = model.has_room
        while model.has_room and (request := next_for_row(model)) is not None:
            needed_bytes = needs_in_vain(model, request)
            if needed_bytes is not None:
                assert model.batch.budget is not None
                error = row_does_not_fit(
                    model.name,
                    needed_bytes=needed_bytes,
                    available_bytes=model.batch.budget.could_bytes,
                    tokens_sent=request.tokens_sent,
                )
                self.fail(model, request, error, now)
                continue
            if is_held_back(model, request):
                model.batch.held_back = request.key  # others of its class would keep it waiting
                break
            self._start(model, request, now)
        for request in end_intake(model, had_room=had_room):
            self.ask_to_leave(model, request, PauseReason.TURN, keep=False)
        model.batch.freed = 0
        yields = who_yields(model, now)
        for request in yields.rows:
            self.ask_to_leave(model, request, PauseReason.CLASS, keep=True)
            request.run.left_short_at = model.batch.ended if yields.is_for_memory else None
        model.batch.yields_at = yields.at
        model.has_settled_in(now)

    def _start(self, model: Model, request: Request, now: float) -> None:
        """Hand a waiting request to the worker, as new or to be continued."""
        model.queue.leave(request)
        model.queue.counters.dispatched(request.account)
        self.ledger.move(request, Stage.RUNNING)
        request.waiting.end(now)
        request.pauses.end(now)
        run, resume = request.run, None
        run.dispatched_at, run.gains_since, run.left_short_at = now, None, None
        model.batch.kept.discard(request.key)
        model.batch.running[request.key] = request
        if not request.has_begun:
            run.started_at = now
            self._outbox.record(
                RequestStarted(
                    id=request.id,
                    number=request.key,
                    model=request.model,
                    client=request.account,
                    generation=model.life.generation,
                    queued_s=now - request.waiting.arrived_at,
                )
            )
        if request.acceptance is not None:
            resume = Resume(
                acceptance=request.acceptance,
                delivered=bytes(request.sent.tokens),
                shown=request.sent.shown,
            )
        dispatch = Dispatch(
            key=request.key,
            resume=resume,
            adapter=request.adapter,
            priority=request.waiting.standing,
            may_leave=model.may_leave(request),
            body=request.body,
        )
        self._outbox.tell(model, dispatch)

    def ask_rows_to_leave(
        self, model: Model, reason: PauseReason, keys: Collection[RequestKey] | None = None
    ) -> None:
        """Ask these rows to leave, or all if None. Those that leave already, do."""
        for key, request in model.batch.running.items():
            if request.stage is Stage.RUNNING and (keys is None or key in keys):
                self.ask_to_leave(model, request, reason, keep=False)

    def tell_waiting(self, model: Model, now: float) -> None:
        """Notify those who asked for it of what they are waiting for, if that is news (`Queue`).

        A change that concerns all of them is rare; otherwise few are looked at, however many wait.
        """
        if not self.ledger.has_listeners:
            model.queue.skip_news()
            return
        news = waiting_news(model)
        is_for_all, model.told_waiting = news != model.told_waiting, news
        places = model.queue.take_news()
        progress = load_progress(model)
        for key, position in (model.queue.places() if is_for_all else places).items():
            request = self.ledger.get(key)
            assert request is not None
            reason, wait_s = wait_of(model, self.ledger, request, position, now)
            detail: dict[str, Any] = {"position": position, "reason": reason.value}
            since_s = now - request.waiting.queued_at
            self._notify(request, NoticeKind.QUEUED, detail, since_s=since_s, expected_s=wait_s)
            if progress is not None:
                detail = {"state": model.life.state.value, **progress}
                self._notify(request, NoticeKind.LOADING, detail)

    # ------------------------------------------------------------ what the worker says

    def accepted(self, model: Model, message: Accepted, now: float) -> None:
        """Take what the worker made of a request: its body is no longer needed."""
        request = model.batch.running.get(message.key)
        if (
            request is not None and request.acceptance is None
        ):  # a resumed answer keeps its first acceptance
            self.ledger.accept(request, message.acceptance)
            request.cost.tokenize_s = message.tokenize_s
            if message.warnings:
                request.sent.warnings += message.warnings
                self._notify(request, NoticeKind.CHANGED, {"warnings": message.warnings})
        if model.batch.computes:
            model.meter.works(now)

    def rejected(self, model: Model, key: RequestKey, error: RemoteError, now: float) -> None:
        """Something was wrong with the request (C7), or it cannot continue in this worker."""
        model.meter.settle()
        model.batch.leaving.pop(key, None)
        request = model.batch.running.pop(key, None)
        model.batch.ended += 1
        if request is not None:
            if request.acceptance is not None:
                error = for_interrupted(error, model.name, request.tokens_sent)
            self.end(request, error=error, now=now)
        model.idle_since = now
        self._rest_if_idle(model, now)

    def step(self, model: Model, message: Step, now: float) -> bool:
        """Handle one engine step: each connection's deltas in one message, then what has ended.

        Returns:
            Whether there may be room for others now, or at a later time than before, or another
            request than the one that is held back may be first, because clients have been charged.
        """
        model.process.steps = message.step
        if model.batch.rows:
            model.meter.add(message, model.batch.running, now)
        has_begun = has_freed = False
        has_suspects = bool(model.blame.suspects)
        deltas: defaultdict[ConnectionId, list[ClientDelta]] = defaultdict(list)
        finished: list[tuple[Request, FinishReason]] = []
        left: list[tuple[Request, Row]] = []
        for guessed in message.drafts:
            model.totals.drafted += guessed.read
            model.totals.draft_accepted += guessed.accepted
            if (request := model.batch.running.get(guessed.key)) is not None:
                request.cost.drafted += guessed.read
                request.cost.draft_accepted += guessed.accepted
        for row in message.rows:
            request = model.batch.running.get(row.key)
            if request is None:
                if row.finish is not None or row.paused is not None:
                    self._row_is_gone(model, row)
                    has_freed = True
                continue
            if request.run.gains_since is None and not row.is_prompt:
                self._begin_to_gain(model, request, row, now)
                has_begun = True
            if row.body:
                deltas[request.connection].append(self._take_delta(model, request, row, now))
            if has_suspects and row.tokens and model.blame.gained(request.held, now):
                model.life.story.append(f"{now:.3f} {request.id} has come past the crash")
                has_freed = True
            if row.warning is not None and row.warning not in request.sent.warnings:
                request.sent.warnings.append(row.warning)
            if row.paused is not None:
                del model.batch.running[row.key]
                left.append((request, row))
            elif row.finish is not None:
                del model.batch.running[row.key]  # at once: nothing more is read about it
                finished.append((request, row.finish))
        model.batch.only_waits = message.only_waits
        model.batch.ended += len(finished)
        if has_freed or finished or left or model.batch.only_waits:
            self._rest_if_idle(model, now)
            model.meter.settle()
        for connection, pieces in deltas.items():
            self._outbox.send(connection, Deltas(deltas=pieces))
        for request, reason in finished:
            if reason is not FinishReason.CANCELLED:
                model.queue.counters.learn(request.cost.engine_s)
                model.blame.completed(request.digest)
            self.end(request, finish=reason, now=now)
        for request, row in left:
            self.row_left(model, request, row, now)
        for read in message.prefill:
            request = model.batch.running.get(read.key)
            if request is not None and request.wants_notices:
                detail = {"done": read.done, "total": read.total}
                self._notify(request, NoticeKind.PREFILLING, detail)
        model.idle_since = now
        is_awaited = has_begun and bool(model.queue.urgent)
        is_awaited = is_awaited or (model.batch.held_back is not None and _is_passed(model))
        residency = model.process.residency
        is_settling = residency is not None and residency.is_open
        has_changed = has_freed or bool(finished or left)
        has_changed = has_changed or (is_settling and model.has_settled_in(now))
        return has_changed or is_awaited or (has_suspects and model.blame.is_anyone_on_probation)

    def _take_delta(self, model: Model, request: Request, row: Row, now: float) -> ClientDelta:
        tokens = row.tokens
        if tokens:
            self.ledger.deliver(request, tokens)
            request.crashes.deaths = 0
            model.totals.tokens += len(tokens) // 4
        if row.is_prompt:
            request.sent.shown += 1
        elif request.cost.first_token_at is None:
            self.ledger.speaks(request, now)
            request.cost.prefill_s = row.prefill_s or 0.0
            request.cost.cached_tokens = row.cached_tokens
        delta = ClientDelta(request.id, request.sent.seq, tokens, row.body)
        request.sent.seq += 1
        return delta

    def _row_is_gone(self, model: Model, row: Row) -> None:
        """Forget the row of a request that was answered before: it has left the batch."""
        model.batch.ended += 1
        model.batch.leaving.pop(row.key, None)
        # Its pause had been asked for before its end came.
        if row.paused is RowState.KEPT and model.life.state in SERVES:
            self._outbox.tell(model, DropKept(key=row.key))

    def _begin_to_gain(self, model: Model, request: Request, row: Row, now: float) -> None:
        """Note that the row of a request says something for the first time since it was dispatched:
        perhaps a stream continues after a crash, a pause, or both."""
        if row.paused is not None and not row.tokens:
            return  # it has left again before it said anything
        request.run.gains_since = now
        if not (request.crashes.is_interrupted or request.pauses.is_paused):
            return
        request.crashes.resumed += request.crashes.is_interrupted
        after, times = "pause", request.pauses.count + 1
        if request.crashes.is_interrupted:
            after, times = "crash", request.crashes.resumed
        self._outbox.record(
            RequestContinued(
                id=request.id,
                number=request.key,
                model=request.model,
                after=after,
                generation=model.life.generation,
                tokens=request.tokens_sent,
            )
        )
        request.pauses.count += request.pauses.is_paused
        request.crashes.is_interrupted = request.pauses.is_paused = False
        self._notify(request, NoticeKind.RESUMED, {"times": times, "after": after})

    def got_lease(self, model: Model, now: float) -> None:
        """Note that an engine computes again if it only waited for a lease; it may wait for the
        acceptance of a request instead, because the row that asked has left."""
        if model.batch.only_waits:
            model.batch.only_waits = False
            model.meter.works(now)

    def _rest_if_idle(self, model: Model, now: float) -> None:
        if not model.batch.computes:
            model.meter.rests(now)

    # ------------------------------------------------------------ one request ends

    def cancel(self, model: Model, request: Request, now: float) -> None:
        """Answer a client that cancelled at once; its row leaves later (D4, D13)."""
        self._withdraw(model, request, now)
        self.end(request, finish=FinishReason.CANCELLED, now=now)

    def drop(self, model: Model, request: Request, now: float) -> None:
        """End a request whose client is gone without an answer (D12)."""
        self._withdraw(model, request, now)
        ended = self._forget(request, GONE, now)
        self.attaching.ended(request, _done(request, FinishReason.CANCELLED, ended))

    def fail(self, model: Model, request: Request, error: RemoteError, now: float) -> None:
        """End a request with an error, at any stage."""
        self._withdraw(model, request, now)
        self.end(request, error=error, now=now)

    def due(self, model: Model, request: Request, now: float) -> None:
        """`Request.next_deadline` has come (D15)."""
        if request.limits.deadline is not None and now >= request.limits.deadline:
            error = deadline_exceeded(model.name, "the end of the answer", request.tokens_sent)
        elif (
            request.limits.first_token_deadline is not None
            and now >= request.limits.first_token_deadline
        ):
            error = deadline_exceeded(model.name, "the first token", 0)
        else:
            waited_s = now - request.waiting.arrived_at
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
        self.attaching.ended(request, message)

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
            self.ledger.move(request, Stage.PAUSING)
        else:
            self.ask_to_leave(model, request, PauseReason.USER, keep=True)

    def resume(self, model: Model, request: Request, now: float) -> None:
        """Let a request continue that a person has paused; once accepted, it queues ahead of new
        ones.

        Raises:
            RemoteError: `invalid_request`; it is not paused.
        """
        if request.stage is Stage.PAUSING:
            self.ledger.move(request, Stage.YIELDING)
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
        self.ledger.move(request, Stage.PAUSING if is_by_person else Stage.YIELDING)
        if model.life.state in SERVES:
            self._outbox.tell(model, PauseRow(key=request.key, keep=keep))

    def row_left(self, model: Model, request: Request, row: Row, now: float) -> None:
        """Queue or put aside a request whose row has left the batch, as the worker has confirmed,
        or for which the worker has no memory; what it delivered is kept. If its model is going
        down, a request that the worker had not accepted yet may not return."""
        refusal = model.life.refusal
        is_wanted = refusal is None
        if refusal is not None and request.acceptance is None:
            error = for_interrupted(refusal, model.name, request.tokens_sent)
            self.end(request, error=error, now=now)
            return
        is_short = row.pause_reason is PauseReason.MEMORY or request.is_leaving_short
        if is_short and is_wanted and request.is_unread:
            request.run.started_at = (
                None  # it never had a row; in a drain, it has to come to its end
            )
        if is_short or request.run.left_short_at is not None:
            _left_short(model, request)
        if row.paused is RowState.KEPT:
            model.batch.kept.add(request.key)
            model.batch.keeps_states = True
        elif request.pauses.reason is PauseReason.CLASS:
            model.batch.keeps_states = False
        if request.stage is Stage.PAUSING and is_wanted:
            self._put_aside(model, request, now)
            return
        self._begin_pause(request, now)
        self.ledger.move(request, Stage.QUEUED)
        model.line_up_again(request, now)
        expects_s = None
        if request.pauses.reason is PauseReason.CLASS:
            model.batch.freed += 1
            if request.wants_notices:  # one that stands before it gets the row that it leaves
                place = max(model.queue.place(request) - 1, 1)
                expects_s = expected_s(model, request, place, now)
        if request.pauses.is_paused:
            self._tell_paused(model, request, now, expects_s)

    def _put_aside(self, model: Model, request: Request, now: float) -> None:
        """Make a request PAUSED that is neither queued nor running any longer."""
        self._begin_pause(request, now)
        if request.pauses.since is None:
            request.pauses.since = now
        self.ledger.move(request, Stage.PAUSED)
        model.paused[request.key] = request
        self._tell_paused(model, request, now)

    def _let_queue(self, model: Model, request: Request, now: float) -> None:
        """Let a PAUSED request wait for a row again."""
        del model.paused[request.key]
        if not request.has_begun:  # what limits the wait for its start did not run
            if request.limits.queue_deadline is not None and request.pauses.since is not None:
                request.limits.queue_deadline += now - request.pauses.since
            request.pauses.end(now)
        self.ledger.move(request, Stage.QUEUED)
        model.line_up(request, now)
        note = f"request {request.id} is no longer paused"
        self._outbox.announce(change_map(model, note))

    def _forget_state(self, model: Model, key: RequestKey) -> None:
        """Let the worker drop the state of a request that had been paused and has ended."""
        if key in model.batch.kept:
            model.batch.kept.remove(key)
            if model.life.state in SERVES:
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
            else:
                begun = for_interrupted(error, model.name, request.tokens_sent)
                self.fail(model, request, begun if request.has_begun else error, now)

    def fail_running(self, model: Model, error: RemoteError, now: float) -> None:
        """Answer everything that runs, while the process is still alive."""
        for request in list(model.batch.running.values()):
            begun = for_interrupted(error, model.name, request.tokens_sent)
            self.fail(model, request, error if request.acceptance is None else begun, now)

    def lose_worker(self, model: Model, text: str, verdict: Verdict, now: float) -> None:
        """Queue the rows of a process that is gone again, ahead of all others; what it was asked to
        render for readers does not come.

        Requests that the worker had not accepted are dispatched again as new. A row ends instead if
        it killed the engine, opted out of being resumed, or dies again and again without a token.
        """
        if self.attaching.asking:
            self.attaching.worker_lost(model.name)
        model.meter.settle()
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
        model.meter.rests(now)

    # ------------------------------------------------------------ inside

    def _notify(
        self,
        request: Request,
        kind: NoticeKind,
        detail: dict[str, Any],
        **times: float | None,
    ) -> None:
        """Send a notice to a client that wants them, unless it got the same one before.

        Args:
            times: seconds that it says besides; they alone are no news. None: not known, left out.
        """
        if request.wants_notices and request.sent.notices.get(kind) != detail:
            request.sent.notices[kind] = detail
            known = {name: seconds for name, seconds in times.items() if seconds is not None}
            notice = Notice(id=request.id, kind=kind, detail={**detail, **known})
            self._outbox.send(request.connection, notice)

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

    def _tell_paused(
        self, model: Model, request: Request, now: float, expects_s: float | None = None
    ) -> None:
        """Record that the row of a request has left the batch, and notify its client and all who
        watch.

        Args:
            expects_s: seconds until it should get a row again; None: not known.
        """
        self._outbox.record(
            RequestPaused(
                id=request.id,
                number=request.key,
                model=request.model,
                reason=request.pauses.reason.value,
                tokens=request.tokens_sent,
            )
        )
        detail = {"reason": request.pauses.reason.value, "tokens_sent": request.tokens_sent}
        since_s = 0.0 if request.pauses.since is None else now - request.pauses.since
        self._notify(request, NoticeKind.PAUSED, detail, since_s=since_s, expected_s=expects_s)
        note = f"request {request.id} is paused: {WHY[request.pauses.reason]}"
        self._outbox.announce(change_map(model, note))

    def _interrupt(self, request: Request, text: str) -> None:
        has_started = request.acceptance is not None
        if has_started:  # what limits the wait for the start counts no longer
            request.limits.queue_deadline = None
        self.ledger.move(request, Stage.QUEUED)
        request.sent.notices.clear()
        if not has_started:
            request.run.started_at = None
            return
        request.crashes.is_interrupted = True
        detail = {"cause": text, "tokens_sent": request.tokens_sent}
        self._notify(request, NoticeKind.INTERRUPTED, detail)

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
        model.meter.settle()
        del model.batch.running[request.key]
        model.batch.leaving[request.key] = request.held
        if model.life.state in SERVES:
            self._outbox.tell(model, CancelRow(key=request.key))

    def _forget(self, request: Request, outcome: str, now: float) -> RequestEnded:
        """Close the books of a request, and record its end.

        Args:
            outcome: its finish reason, the code of its error, or `GONE`.
        """
        self.ledger.remove(request)
        usage = request.usage()
        if outcome == FinishReason.LENGTH and not usage.completion_tokens:
            outcome = PROMPT_ONLY
        ended = RequestEnded(
            id=request.id,
            number=request.key,
            model=request.model,
            outcome=outcome,
            client=request.account,
            usage=usage,
            timings=request.timings(now),
            resumed=request.crashes.resumed,
            paused=request.pauses.count,
            warnings=list(request.sent.warnings),
        )
        self._outbox.record(ended)
        return ended


def _after(now: float, asked_s: float | None, default_s: float) -> float | None:
    limit_s = default_s if asked_s is None else asked_s
    return now + limit_s if limit_s > 0 else None


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
    if life.refusal is not None:
        raise may_not_be_paused(model.name, request.id, life.refusal.message)


def _is_passed(model: Model) -> bool:
    """True if another request than the one that is held back for memory may be first now, because
    clients have been charged, or may have rows freed; nothing else that keeps it waiting changes
    with a step that ends nothing."""
    model.meter.settle()
    first = next_in_line(model)
    return bool(model.queue.urgent) or first is None or first.key != model.batch.held_back


def _left_short(model: Model, request: Request) -> None:
    """Let a request wait until there is memory for its row again."""
    request.run.left_short_at = model.batch.ended
    if request.stage is Stage.RUNNING:
        request.pauses.reason = PauseReason.MEMORY
