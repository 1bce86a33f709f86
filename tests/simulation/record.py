"""What was said on the links, event by event, and what must follow from it.

Nothing here reads the core: each event is entered before the core sees it, with the ends that it
must bring about, and each action is held against that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from mlxsup.protocol import client_messages as client
from mlxsup.protocol import worker_messages as worker
from mlxsup.protocol.client_messages import (
    Attach,
    CancelRequest,
    ClientMessage,
    Done,
    Failed,
    PauseRequest,
    ResumeRequest,
)
from mlxsup.protocol.ids import Generation, ModelName
from mlxsup.protocol.message import Message
from mlxsup.protocol.states import FinishReason, NoticeKind, PauseReason, RowState
from mlxsup.protocol.step_batch import Row
from mlxsup.protocol.version import VERSION
from mlxsup.protocol.worker_messages import Render, Rendered
from mlxsup.supervisor.core import actions, events

from . import engine, memory, processes, requests
from .books import Ask, Book, Cause, Life, Place, UpFor, Wanted
from .ground import Violation, check
from .plan import Plan
from .worker import PlayedWorker

EPSILON_S = 1e-6
# Turns that may come before the oldest new request: the one under way, and those of new lives.
MOST_PASSED_OVER = 3


class Record:
    """The oracle's own account of one run.

    Args:
        plan: of the run.
        status: what the supervisor says of itself, to be compared, never believed.
    """

    def __init__(self, plan: Plan, status: Callable[[float], dict[str, Any]]) -> None:
        self.plan, self.status = plan, status
        self.now = 0.0
        self.event: events.Event = events.Started(now=0.0)
        self.books: dict[ModelName, Book] = {e.name: Book(entry=e) for e in plan.models}
        self.asks: dict[tuple[bytes, str], Ask] = {}
        self.open: dict[Ask, None] = {}
        self.limited: dict[Ask, None] = {}
        self.gone: set[bytes] = set()
        # How requests must end in this event: by any of these codes, or `done:` and a reason.
        self.must: dict[Ask, set[str]] = {}
        self.deltas: list[tuple[Ask, Row]] = []
        self.is_twin = self.is_shutting_down = False
        # What must be answered to commands: pauses may succeed, names may be unique.
        self.commands: dict[tuple[bytes, str], tuple[ClientMessage, float]] = {}
        self.is_unique: dict[tuple[bytes, str], bool] = {}
        self.may: dict[tuple[bytes, str], bool] = {}
        self.changes: dict[str, list[str]] = {}
        self.to_leave: set[Ask] = set()
        self.left_short: list[Ask] = []
        self.dropped: dict[Book, list[Ask]] = {}
        self.tried_again: Ask | None = None
        self.counts: Counter[str] = Counter()
        self.machine_bytes = 0
        self.shortage = memory.Shortage()
        self.raised: dict[ModelName, int] = {}
        self.appraised: set[ModelName] = set()
        self.devices = engine.Devices()
        self.downloads = processes.Downloads()
        self.joining = requests.Joining()
        self.questions = 0
        self._admitted = 0

    def memory_need(self, model: ModelName) -> int:
        """Return what the process of a model was started with."""
        life = self.books[model].life if model in self.books else None
        return life.granted if life is not None else 0

    def memory_limit(self, model: ModelName) -> int:
        """Return what the process of a model may hold."""
        life = self.books[model].life if model in self.books else None
        return (life.launch.memory_limit_bytes if life else None) or 9000

    def is_served(self, model: ModelName) -> bool:
        """True if requests for a model are looked at."""
        book = self.books.get(model)
        is_named = book is not None and book.wanted is not Wanted.GONE
        return is_named and not self.is_shutting_down

    def count(self, what: str) -> None:
        """Note something that a full run must meet."""
        self.counts[what] += 1

    def life_of(self, model: ModelName, generation: Generation) -> Life | None:
        """Return the process, if it is the model's latest and was not given up."""
        life = self.books[model].life if model in self.books else None
        is_it = life is not None and life.generation == generation and not life.is_abandoned
        return life if is_it else None

    def stops(self, life: Life, cause: Cause) -> None:
        """Note that a process is being ended, if it was not already."""
        if life.cause is None:
            life.cause, life.stopped_serving_at = cause, self.now

    # ------------------------------------------------------------ before and after an event

    def before(self, event: events.Event) -> None:
        """Enter an event that the core is about to see."""
        self.now, self.event = event.now, event
        self.must, self.deltas, self.is_twin = {}, [], False
        self.to_leave.clear()
        self.tried_again = None
        for book in self.books.values():
            book.freed = 0
        match event:
            case events.WorkerSaid():
                if life := self.life_of(event.model, event.generation):
                    self._worker_said(self.books[event.model], life, event.message)
            case events.Tick():
                processes.ticked(self)
            case events.ClientSaid():
                self._client_said(event)
            case events.ClientGone(connection=connection):
                self._client_gone(bytes(connection))
            case events.ClientTooSlow(connection=connection):
                for ask in self.open:
                    if ask.connection == connection:
                        self.must[ask] = {"slow_consumer"}
                self.joining.is_slow(bytes(connection))
            case events.Exited() | events.SpawnFailed():
                processes.death_seen(self, event)
            case events.DownloadSaid():
                self.downloads.said(self, event)
            case events.Appraised(needs=needs):
                self.appraised = set(needs)
            case events.Spawned() | events.WorkerBroke() | events.WorkerUnlinked():
                self._process_seen(event)
            case events.Sampled():
                self.machine_bytes = event.machine_bytes
                for book in self.books.values():
                    if life := book.life:
                        if life.pid is not None:
                            life.footprint = event.footprint_bytes.get(life.pid, 0)
                        memory.measured(self, book, life)
                memory.sampled(self, event)
            case events.Reloaded(is_dry=True, models=entries):
                self.changes = processes.changes(self, entries)
            case events.Reloaded(needs=needs):
                self.appraised = set(needs)
                processes.reloaded(self, event)
            case events.ShutdownAsked(is_immediate=is_immediate):
                processes.shut_down(self, self.plan.settings.drain_timeout_s, is_now=is_immediate)
            case events.Started():
                for book in self.books.values():
                    if book.entry.preload:
                        processes.up(book, by_user=True, up_for=UpFor.FILE)
        for book in self.books.values():
            processes.drained(self, book)
        self._note_who_works()
        memory.refuse(self)
        memory.forget_turns(self)

    def after(self) -> None:
        """Raise unless the core has said all that it has to say of the event."""
        for ask, codes in self.must.items():
            is_ended = not ask.is_open or processes.is_almost_due(self, ask, codes)
            check("must end", is_ended, f"{ask}: {sorted(codes)} after {self.event}")
        check("delta lost", not self.deltas, self.deltas[:1])
        check("duplicate answered", not self.is_twin, self.event)
        check("not asked to leave", not self.to_leave, [str(ask) for ask in self.to_leave])
        memory.forget_turns(self)
        self.downloads.look(self)
        self.joining.look(self)
        for book in self.books.values():
            life = book.life
            if life is not None and life.serves:
                waiting = {ask.key for ask in book.waiting}
                check("kept for nobody", life.kept <= waiting, f"{book.name}: {life.kept}")
                over = {key for key, ask in life.given.items() if not ask.is_open}
                is_told = not life.is_linked or over <= life.cancelled
                check("runs on for nobody", is_told, f"{book.name}: {over}")
        requests.look_at_classes(self)
        memory.look_at_rows(self)
        memory.look_at_swaps(self)
        processes.look_at_limits(self)
        engine.look_at_leases(self)
        memory.look_at_shortage(self)
        self._note_who_works()

    def _note_who_works(self) -> None:
        lives = [book.life for book in self.books.values() if book.life]
        working = [life.model for life in lives if life.works_since is not None]
        self.devices.note(self.now, frozenset(working))

    def check_ends(self) -> None:
        """Raise unless everything is over."""
        check("unanswered", not self.open, [str(ask) for ask in self.open])
        status = self.status(self.now)
        for row in status["models"]:
            life = self.books[row["name"]].life
            is_over = row["state"] == "STOPPED" or (life is not None and life.is_abandoned)
            check("everything is down", is_over, row)
            check("reserved", row["footprint_bytes"] == 0 or life is not None, row)
            engine.compare_costs(self.books[row["name"]], row)
        queue = status["queue"]
        check("nobody waits", queue["waiting"] == 0 and not queue["per_client"], queue)

    # ------------------------------------------------------------ what clients say

    def _client_said(self, event: events.ClientSaid) -> None:
        message, connection = event.message, bytes(event.connection)
        key = connection, message.id
        self.commands[key] = (message, event.now)
        match message:
            case client.Generate():
                self._asked(connection, message, event.process)
            case client.Cancel(id=id):
                self.joining.cancelled(connection, id)
                ask = self.asks.get((connection, id))
                if ask is not None and ask.is_open:
                    self.must[ask] = {"done:cancelled"}
            case client.Prioritize():
                self.is_unique[key] = requests.prioritized(self, message)
            case client.Stop(timeout_s=limit_s):
                usual_s = self.plan.settings.drain_timeout_s
                processes.shut_down(
                    self, usual_s if limit_s is None else limit_s, is_now=message.now
                )
            case Attach():
                self.joining.asked(self, connection, message)
            case CancelRequest():
                ask = requests.named(self, message.request)
                self.is_unique[key] = ask is not None
                if ask is not None:
                    self.must[ask] = {"done:cancelled"}
                    self.count("cancelled by another")
            case PauseRequest() | ResumeRequest():
                requests.commanded(self, connection, message)
            case _:
                processes.commanded_model(self, message, connection)

    def _asked(self, connection: bytes, message: client.Generate, process: str) -> None:
        ask = self.asks.get((connection, message.id))
        if ask is None:
            return  # nonsense, which its client expects to be refused
        if ask.is_open:
            self.is_twin = True
            return
        ask.arrived_at = self.now
        requests.identify(self, ask, process, message)
        self.open[ask] = None
        codes = requests.refusals(self, ask, message)
        if codes:
            self.must[ask] = codes
            ask.place = Place.LINE  # for as long as its refusal takes
            return
        self._admitted += 1
        ask.number = self._admitted
        requests.set_limits(self, ask)
        book = self.books[ask.model]
        requests.joins(self, book, ask)
        requests.line_up(self, book, ask)
        if book.wanted is not Wanted.UP:
            processes.up(book, by_user=False)

    def _client_gone(self, connection: bytes) -> None:
        self.gone.add(connection)
        self.joining.gone(connection)
        for book in self.books.values():
            book.callers = {caller for caller in book.callers if caller[0] != connection}
        for ask in [one for one in self.open if one.connection == connection]:
            self._close(ask)

    def _close(self, ask: Ask) -> None:
        """End a request; its row may still be in the batch."""
        book = self.books.get(ask.model)
        if book is not None and ask in book.waiting:
            (book.queue if ask in book.queue else book.paused).remove(ask)
            book.busy_at = self.now
        if book is not None and book.life is not None and ask.key in book.life.given:
            book.life.tokens_at_end[ask.key] = ask.tokens
        ask.place, ask.ended_at = Place.ENDED, self.now
        self.open.pop(ask, None)
        self.limited.pop(ask, None)

    # ------------------------------------------------------------ what processes do

    def begins(self, spawn: actions.Spawn, worker: PlayedWorker) -> None:
        """Enter that the process is being started that the core asked for."""
        book = self.books[spawn.model]
        book.life = Life(
            model=spawn.model,
            generation=spawn.generation,
            launch=spawn.launch,
            worker=worker,
            spawned_at=self.now,
            is_after_crash=book.is_after_crash,
            is_of_restart=book.is_restarting,
            progress_at=self.now,
        )
        book.retry, book.retry_at, book.drain_until = None, None, None
        book.held = book.life.granted = memory.need_of(self, book)

    def _process_seen(
        self, event: events.Spawned | events.WorkerBroke | events.WorkerUnlinked
    ) -> None:
        life = self.life_of(event.model, event.generation)
        if life is None:
            return
        match event:
            case events.Spawned(pid=pid):
                life.pid = pid
            case events.WorkerUnlinked():
                life.unlinked_at = self.now
            case events.WorkerBroke(is_other_version=is_other_version):
                life.broke_at = self.now
                self.stops(life, Cause.VERSION if is_other_version else Cause.BROKEN)

    def _worker_said(self, book: Book, life: Life, message: Message) -> None:
        match message:
            case worker.Step():
                engine.stepped(self, life, message)
                engine.step_costs(self, book, life, message)
                for row in message.rows:
                    self._piece_arrived(book, life, row)
                    if row.tokens and life.spoke_at is None:
                        life.spoke_at = self.now
                memory.note_left(self, life)
                engine.rests(life)
                book.busy_at = self.now
            case worker.Accepted(key=key, acceptance=acceptance):
                ask = life.given.get(key)
                if ask is not None and ask.is_open and ask.acceptance is None:
                    ask.acceptance = acceptance
                if life.given and life.works_since is None and not life.turn.only_waits:
                    life.works_since = self.now
            case worker.Rejected(key=key, error=error):
                ask = life.given.pop(key, None)
                life.rows_ended += 1
                if ask is not None and ask.is_open:
                    self.must[ask] = {error.code}
                elif ask is not None:
                    self.count("cancel met rejection")
                engine.rests(life)
                book.busy_at = self.now
            case worker.Hello(version=version):
                life.has_greeted = True
                self._progresses(life, ("import", 0.0))
                if version != VERSION:
                    self.stops(life, Cause.VERSION)
            case worker.LoadProgress(phase=phase, progress=progress):
                self._progresses(life, (str(phase), progress))
            case worker.Ready() if life.cause is None and memory.is_too_large(self, book, message):
                self.stops(life, Cause.TOO_LARGE)
            case worker.Ready() if life.cause is None:
                self._is_ready(book, life, message)
            case Rendered():
                self.joining.rendered(life, message)
            case worker.Dying(message=words):
                life.announced = words
            case worker.Heartbeat():
                life.reported = message.active_bytes + message.cache_bytes
                memory.budget_kept(self, book, life, message.budget)

    def _progresses(self, life: Life, progress: tuple[str, float]) -> None:
        if progress != life.progress:
            life.progress, life.progress_at = progress, self.now

    def _is_ready(self, book: Book, life: Life, ready: worker.Ready) -> None:
        life.ready_at, book.is_restarting = self.now, False
        book.busy_at = self.now
        if book.up_for is UpFor.NEXT_TURN:
            book.up_for = UpFor.SOMEBODY
        if life.launch.max_concurrency > 1:
            book.batching = {
                "fingerprint": ready.fingerprint,
                "batching": ready.batching.value,
                "reason": ready.batching_reason,
            }

    def _piece_arrived(self, book: Book, life: Life, row: Row) -> None:
        """Enter what one row got, or that it has left."""
        ask = life.given.get(row.key)
        if ask is None:
            return
        if row.paused is RowState.KEPT:
            life.kept.add(row.key)
        if not ask.is_open:
            if row.finish is not None or row.paused is not None:
                del life.given[row.key]
                life.rows_ended += 1
                if row.finish is not FinishReason.CANCELLED:
                    self.count("cancel met pause" if row.paused else "cancel met finish")
            return
        if row.paused is None or row.tokens:
            self._continues(ask)
        if row.body:
            self.deltas.append((ask, row))
            if ask.first_token_at is None:
                ask.first_token_at, ask.cached = self.now, row.cached_tokens
                ask.prefill_s = row.prefill_s or 0.0
        if row.tokens:
            ask.deaths = 0
            tokens = ask.tokens + len(row.tokens) // 4
            book.suspicion.gained(ask.prompt.number, tokens, self.now)
        if row.warning is not None and row.warning not in ask.warnings:
            ask.warnings.append(row.warning)
        if row.finish is None and row.paused is None:
            return
        del life.given[row.key]
        if row.paused is not None:
            self._row_left(book, life, ask, row)
            return
        life.rows_ended += 1
        self.must[ask] = {f"done:{row.finish}"}
        before_s = ask.engine_s if book.cost_s is None else book.cost_s
        book.cost_s = before_s + 0.2 * (ask.engine_s - before_s)
        book.suspicion.completed(ask.prompt.number)

    def _continues(self, ask: Ask) -> None:
        """Enter a sign of a request, perhaps the first since its row left or was lost."""
        if ask.is_interrupted:
            ask.resumed += 1
            self.count("resumed")
        if ask.is_paused:
            ask.paused += 1
            self.count("continued after a pause")
        ask.is_interrupted = ask.is_paused = False
        ask.gains_since = self.now if ask.gains_since is None else ask.gains_since

    def _row_left(self, book: Book, life: Life, ask: Ask, row: Row) -> None:
        assert row.paused is not None
        lacks_memory = row.pause_reason is PauseReason.MEMORY
        is_short = lacks_memory or (ask.is_yielding and ask.is_for_memory)
        if is_short and book.wanted is Wanted.UP:
            ask.is_unread = not (ask.is_interrupted or ask.is_paused or ask.read or ask.sent)
        if is_short or ask.is_for_room:
            memory.left_for_memory(self, ask)
        if lacks_memory and not (ask.may_resume and not life.launch.deterministic):
            ask.is_stranded = True
        requests.left_for_class(book, life, ask, row.paused)
        requests.row_left(self, book, ask, processes.cut_off(self, book))

    # ------------------------------------------------------------ what the core does

    def judge(self, action: actions.Action) -> None:
        """Raise where an action was not called for."""
        match action:
            case actions.SendToClient(connection=connection, message=message):
                self._to_client(bytes(connection), message)
            case actions.SendToWorker(model=model, generation=generation, message=message):
                if life := self.life_of(model, generation):
                    self._to_worker(self.books[model], life, message)
            case actions.Spawn():
                processes.judge_spawn(self, action)
            case actions.StartDownload() | actions.EndDownload():
                self.downloads.obeyed(action)
            case actions.SignalWorker():
                processes.judge_signal(self, action)
            case actions.Announce(change=change):
                memory.announced(self, change)
            case actions.Abandon(model=model):
                life = self.books[model].life
                check("given up early", life is not None and life.is_abandoned, model)
            case actions.NeedRaised(model=model, raised_bytes=raised_bytes):
                memory.is_raised(self, model, raised_bytes)
            case actions.Finish():
                lives = [book.life for book in self.books.values() if book.life]
                check("ends with processes", all(life.is_abandoned for life in lives), lives)
                check("ends unasked", self.is_shutting_down)

    def _to_client(self, connection: bytes, message: Message) -> None:
        match message:
            case client.Deltas(deltas=deltas):
                check("pieces to nobody", connection not in self.gone, connection)
                for delta in deltas:
                    if listener := self.joining.of(connection, delta.id):
                        self.joining.sends(listener, delta)
                    else:
                        self._delta(self.asks[connection, delta.id], delta)
            case Done(id=id) | Failed(id=id) if listener := self.joining.of(connection, id):
                self.joining.ends(self, listener, message)
            case Done(id=id, finish_reason=reason):
                self._request_ends(self.asks[connection, id], message, f"done:{reason}")
            case Failed(id=id, error=error):
                self._fails(connection, id, message, error.code)
            case client.Reply(id=id, value=value):
                self._reply(connection, id, value)
            case client.Notice(id=id, kind=kind, detail=detail):
                self._notice(self.asks[connection, id], kind, detail)
            case client.Event(id=id):
                check("event to nobody", connection not in self.gone, id)

    def _delta(self, ask: Ask, delta: client.ClientDelta) -> None:
        check("delta after the end", ask.is_open, ask)
        pair = next((pair for pair in self.deltas if pair[0] is ask), None)
        check("delta from nowhere", pair, ask)
        assert pair is not None
        self.deltas.remove(pair)
        is_same = (delta.tokens, delta.body) == (pair[1].tokens, pair[1].body)
        check("delta changed", is_same, ask)
        ask.sent += delta.tokens

    def _fails(self, connection: bytes, id: str, message: Failed, code: str) -> None:
        key = connection, id
        self._answered(key)
        self.joining.refuses(connection, id, code)
        if code == "duplicate_id":
            check("refused as duplicate", self.is_twin, id)
            self.is_twin = False
        elif key in self.asks:
            self._request_ends(self.asks[key], message, code)
        else:
            check("not prioritized", not self.is_unique.get(key), f"{id}: {message.error}")
            check("pause refused", not self.may.get(key), f"{id}: {message.error}")
            is_named = key not in self.may or code == "invalid_request"
            check("pause refused otherwise", is_named, message.error)

    def _answered(self, key: tuple[bytes, str]) -> None:
        for book in self.books.values():
            book.callers.discard(key)

    def _notice(self, ask: Ask, kind: NoticeKind, detail: dict[str, Any]) -> None:
        check("notice to nobody", ask.is_open, ask)
        if kind is NoticeKind.QUEUED:
            book = self.books[ask.model]
            check("queued without waiting", ask in book.queue, ask)
            requests.check_place(self, book, ask, detail["position"])
        elif kind is NoticeKind.PAUSED:
            check("paused without being so", ask.paused_at is not None, f"{ask}: {detail}")
        elif kind is NoticeKind.RESUMED:
            times = ask.resumed if detail["after"] == "crash" else ask.paused
            check("resumes told", detail["times"] == times, f"{ask}: {detail}")

    def _request_ends(self, ask: Ask, message: Done | Failed, code: str) -> None:
        check("ended twice", ask.is_open, f"{ask}: {code}")
        expected = set(self.must.get(ask, ()))
        if ask.is_stranded and ask.tokens:
            expected.add("insufficient_memory")
        if code not in expected:
            name = "ended: " + code.removeprefix("done:")
            raise Violation(name, f"{ask}: {code} and not {sorted(expected)}; {message}")
        ask.end = message
        engine.end_costs(ask, message)
        if isinstance(message, Failed):
            sent = message.error.detail.get("tokens_sent", ask.tokens)
            check("tokens_sent", sent == ask.tokens, f"{ask}: {sent}")
        self._close(ask)
        self.count("ended: " + code)

    def _reply(self, connection: bytes, id: str, value: dict[str, Any]) -> None:
        key = connection, id
        message, at = self.commands[key]
        self._answered(key)
        match message:
            case client.Load(model=model, dry_run=True):
                target = self.books[model]
                is_unseen = target.life is not None and memory.may_have_begun(self, target)
                if not (is_unseen and value["outcome"] == "waits"):
                    memory.check_forecast(self, target, value)
            case client.Reload():
                said = {name: value[name] for name in ("added", "removed")}
                check("changes of a reload", said == self.changes, f"{said} {self.changes}")
                if message.dry_run:
                    known = {*value["added"], *value["changed"], *value["removed"]}
                    foreseen = {one["model"] for one in value["foreseen"]}
                    check("dry run: foreseen", foreseen == known, f"{foreseen} {known}")
                    self.count("dry run of a reload")
            case client.Load(model=model) | client.Restart(model=model):
                life = self.books[model].life
                is_ready = life is not None and life.serves
                check("load answered early", is_ready, message)
                is_new = life is not None and (life.ready_at or 0.0) >= at
                is_new = is_new or isinstance(message, client.Load)
                check("restart answered early", is_new, message)
            case client.Unload(model=model):
                book = self.books.get(model)
                check("unload answered early", book is None or book.life is None, message)
            case CancelRequest() | client.Prioritize():
                check("named nobody", self.is_unique[key], message)
            case PauseRequest() | ResumeRequest():
                check("pause allowed", self.may[key], message)
            case client.StatusQuery():
                self._compare(value)

    def _compare(self, value: dict[str, Any]) -> None:
        """Raise unless the status says what the oracle knows."""
        memory.compare_shortage(self, value["memory"])
        rows = value["models"]
        check("status names all", {row["name"] for row in rows} == set(self.books), rows)
        for row in rows:
            book = self.books[row["name"]]
            book.suspicion.forget(self.now)
            running = book.life.running if book.life else []
            known = {
                "queued": len(book.queue),
                "running": sorted(ask.id for ask in running),
                "paused": sorted(ask.id for ask in book.paused),
                "pid": book.life.pid if book.life else None,
                "quarantined": len(book.suspicion.quarantined),
            }
            for name, right in known.items():
                said = sorted(row[name]) if isinstance(right, list) else row[name]
                check(f"status: {name}", said == right, f"{book.name}: {said}, not {right}")
            check("status: failed", (row["state"] == "FAILED") == bool(book.failed), row)
            check("status: suspects", row["suspects"] <= len(book.suspicion.suspects) + 8, row)
            memory.check_row(self, book, row)
            self.downloads.check_row(book, row)
            engine.compare_costs(book, row)
        requests.compare_queue(self, value["queue"])

    # ------------------------------------------------------------ what workers are told

    def _to_worker(self, book: Book, life: Life, message: Message) -> None:
        match message:
            case worker.Dispatch():
                self._dispatch(book, life, message)
            case worker.CancelRow(key=key):
                ask = life.given.get(key)
                check("cancels nobody", ask is not None, key)
                check("cancelled unasked", ask not in self.open or ask in self.must, key)
                life.cancelled.add(key)
            case worker.PauseRow(key=key, keep=keep):
                self._paused(book, life, life.given.get(key), keep=keep)
            case worker.Leases() | worker.Lease():
                engine.told_lease(self, life, message)
            case worker.DropKept(key=key):
                check("drops what is not kept", key in life.kept, key)
                returning = [a for a in book.waiting if a.key == key and a not in self.must]
                check("drops what may return", not returning, key)
                life.kept.remove(key)
            case worker.SetBudget():
                memory.told_budget(self, book, life, message)
            case worker.GiveBack():
                memory.asked_to_give_back(self, life)
            case Render():
                self.joining.told(life, message)
            case worker.Exit():
                self._told_to_exit(book, life)

    def _paused(self, book: Book, life: Life, ask: Ask | None, *, keep: bool) -> None:
        check("pauses nobody", ask is not None and ask.is_open, ask)
        assert ask is not None
        ask.is_for_memory = False
        if keep and ask in self.to_leave:
            self.to_leave.remove(ask)
        elif keep:
            requests.asked_to_leave(self, book, life, ask)
        else:
            if not book.suspicion.turns_are_taken and book.swaps_until is None:
                ask.is_for_memory = True
                self.dropped.setdefault(book, []).append(ask)
            ask.is_yielding, ask.is_by_hand, ask.is_for_class = True, False, False
            self.count("yielded")

    def _dispatch(self, book: Book, life: Life, message: worker.Dispatch) -> None:
        if book.swaps_until is not None and book.drain_until is None:
            memory.is_called_off(book)
        is_served = book.serves or book.finishes
        check("dispatched unready", is_served and life.unlinked_at is None, book.name)
        ask = self._asked_by(book, message)
        check("begun while it goes down", book.serves or ask.is_paused, ask)
        if ask.acceptance is None:
            check("resumes nothing", message.resume is None, ask)
        else:
            check("resume lost", message.resume is not None, ask)
            assert message.resume is not None
            check("resume data", message.resume.acceptance == ask.acceptance, ask)
            check("resume tokens", message.resume.delivered == bytes(ask.sent), ask)
        if not ask.has_begun:
            ask.started_at, ask.is_unread = self.now, False
        are_turns = book.suspicion.turns_are_taken
        if are_turns:
            is_turn = book.suspicion.takes_turn(ask.prompt.number)
            held = [one for one, _ in life.held() if book.suspicion.takes_turn(one)]
            check("turn in company", not held and not (is_turn and life.given), ask)
            if is_turn:
                self.count("turns")
                self._passes_over(book, ask)
            elif self._is_newcomer(book, ask):
                book.begun.add(ask.account)
        check("returns without room", memory.may_return(self, life, ask), f"{ask} of {book.name}")
        ask.short_at, ask.is_for_room = None, False
        requests.dispatched(self, book, ask, is_turn=are_turns)
        book.queue.remove(ask)
        ask.ends_pause(self.now)
        life.kept.discard(message.key)
        ask.place, ask.key, ask.gains_since = Place.GIVEN, message.key, None
        life.given[message.key] = ask
        life.was_given = True
        check("rows", len(life.given) <= book.rows, f"{len(life.given)} of {book.rows}")

    def _passes_over(self, book: Book, turn: Ask) -> None:
        """Raise unless new requests start before a turn, oldest first, as there are rows.

        A turn makes its account pay: new requests of other accounts then come first, and one that
        has begun since the turn before had the place of the first one left.
        """
        begun, book.begun = book.begun, set()
        startable = requests.startable(self, book)
        first = next((ask for ask in startable if self._is_newcomer(book, ask)), None)
        if first is None or (turn.account == first.account and begun - {first.account}):
            return
        first.passed_over += 1
        check("newcomer waits", first.passed_over <= MOST_PASSED_OVER, first)

    def _is_newcomer(self, book: Book, ask: Ask) -> bool:
        is_accused = ask.prompt.number in book.suspicion.suspects
        return ask.acceptance is None and ask.may_resume and not is_accused

    def _asked_by(self, book: Book, message: worker.Dispatch) -> Ask:
        """Return the request of that number: requests are numbered in the order of their coming."""
        found = [ask for ask in book.queue if ask.number == message.key]
        check("dispatch of nobody's", len(found) == 1, f"{message}: {found}")
        [ask] = found
        is_its_own = message.resume is not None or ask.prompt.body == message.body
        check("another body", is_its_own, ask)
        return ask

    def _told_to_exit(self, book: Book, life: Life) -> None:
        processes.drained(self, book)  # what waited for the drain may have ended in this event
        life.told.append(("exit", self.now))
        if life.cause is Cause.ASKED:
            return
        is_busy = book.is_busy and book.wanted is Wanted.UP
        if is_busy and life.cause is None and book.swaps_until is None:
            memory.swap_begins(self, book, life)
        if book.swaps_until is not None and life.cause is None:
            memory.swap_exits(self, book, life)
            return
        check("exit of the faulty", life.cause is None, f"{book.name}: {life.cause}")
        check("unloaded while busy", book.wanted is Wanted.UP and not book.is_busy, book.name)
        idle_s = book.entry.idle_unload_s
        is_due = bool(idle_s) and self.now >= book.busy_at + idle_s - EPSILON_S
        if self.plan.budget_bytes is not None and not is_due:
            memory.check_eviction(self, book, life)
        else:
            check("unloaded early" if idle_s else "unloaded unasked", is_due, book.name)
            self.count("unloaded as idle")
        book.wanted, book.is_by_user = Wanted.DOWN, False
        self.stops(life, Cause.ASKED)
