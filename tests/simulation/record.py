"""What was said on the links, event by event, and what must follow from it.

Nothing here reads the core: each event is entered before the core sees it, with the ends that it
must bring about, and each action is held against that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlxsup.protocol.client_messages import (
    Cancel,
    ClientDelta,
    ClientMessage,
    Deltas,
    Done,
    Failed,
    Generate,
    Load,
    Notice,
    Prioritize,
    Reload,
    Reply,
    Restart,
    StatusQuery,
    Stop,
    Unload,
)
from mlxsup.protocol.client_messages import Event as ClientEvent
from mlxsup.protocol.ids import Generation, ModelName
from mlxsup.protocol.message import Message
from mlxsup.protocol.packed_rows import Row
from mlxsup.protocol.rendering import Render, Rendered
from mlxsup.protocol.request_messages import Attach, CancelRequest, PauseRequest, ResumeRequest
from mlxsup.protocol.states import FinishReason, NoticeKind, PauseReason, RowState
from mlxsup.protocol.version import VERSION
from mlxsup.protocol.worker_messages import (
    Accepted,
    CancelRow,
    Dispatch,
    DropKept,
    Dying,
    Exit,
    GiveBack,
    Heartbeat,
    Hello,
    Lease,
    Leases,
    LoadProgress,
    PauseRow,
    Ready,
    Rejected,
    SetBudget,
    Step,
)
from mlxsup.supervisor.core.actions import (
    Abandon,
    Action,
    Announce,
    EndDownload,
    Finish,
    NeedRaised,
    SendToClient,
    SendToWorker,
    SignalWorker,
    Spawn,
    StartDownload,
)
from mlxsup.supervisor.core.events import (
    Appraised,
    ClientGone,
    ClientSaid,
    ClientTooSlow,
    DownloadSaid,
    Event,
    Exited,
    Reloaded,
    Sampled,
    ShutdownAsked,
    Spawned,
    SpawnFailed,
    Started,
    Tick,
    WorkerBroke,
    WorkerSaid,
    WorkerUnlinked,
)

from .books import Ask, Book, Cause, Life, Place, UpFor, Wanted
from .engine import (
    Devices,
    compare_costs,
    end_costs,
    look_at_leases,
    rests,
    step_costs,
    stepped,
    told_lease,
)
from .ground import Violation, check
from .memory import (
    Shortage,
    announced,
    asked_to_give_back,
    asked_to_give_way,
    budget_kept,
    check_eviction,
    check_forecast,
    check_others,
    check_row,
    compare_shortage,
    forget_turns,
    is_called_off,
    is_leaving,
    is_raised,
    is_too_large,
    left_for_memory,
    look_at_due_swaps,
    look_at_rows,
    look_at_shortage,
    look_at_swaps,
    may_have_begun,
    measured,
    need_of,
    note_left,
    refuse,
    returns_to_memory,
    row_memory_measured,
    sampled,
    swap_begins,
    swap_exits,
    told_budget,
)
from .plan import Plan
from .processes import (
    Downloads,
    changes_of_reload,
    commanded_model,
    cut_off,
    death_seen,
    drained,
    is_almost_due,
    judge_signal,
    judge_spawn,
    look_at_limits,
    preload,
    reloaded,
    shut_down,
    ticked,
    up,
)
from .requests import (
    Joining,
    asked_to_leave,
    check_place,
    commanded,
    compare_queue,
    contenders,
    dispatched,
    finished,
    identify,
    joins,
    left_for_class,
    look_at_classes,
    look_at_kept,
    named,
    prioritized,
    refusals,
    row_left,
    set_limits,
    startable,
    waits,
)
from .worker import PlayedWorker

# ---------------------------------------------------------------- pieces


def piece_arrived(record: Record, book: Book, life: Life, row: Row) -> None:
    """A worker has said what one row got, or that it has left."""
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
                record.count("cancel met pause" if row.paused else "cancel met finish")
        return
    if row.paused is None or row.tokens:
        _continues(record, ask)
        ask.gains_since = record.now if ask.gains_since is None else ask.gains_since
    if row.body:
        record.deltas.append((ask, row))
        if ask.first_token_at is None:
            ask.first_token_at, ask.cached = record.now, row.cached_tokens
            ask.prefill_s = row.prefill_s or 0.0
    if row.tokens:
        ask.deaths = 0
        tokens = ask.tokens + len(row.tokens) // 4
        book.suspicion.gained(ask.prompt.number, tokens, record.now)
    if row.warning is not None and row.warning not in ask.warnings:
        ask.warnings.append(row.warning)
    if row.finish is None and row.paused is None:
        return
    del life.given[row.key]
    if row.paused is not None:
        is_short = row.pause_reason is PauseReason.MEMORY or is_leaving(ask)
        if is_short and book.wanted is Wanted.UP:
            ask.is_unread = not (ask.is_interrupted or ask.is_paused or ask.read or ask.sent)
        if is_short or ask.is_for_room:
            left_for_memory(record, ask)
        if row.pause_reason is PauseReason.MEMORY and not _may_return(life, ask):
            ask.is_stranded = True
        left_for_class(book, life, ask, row.paused)
        row_left(record, book, ask, cut_off(record, book))
        return
    life.rows_ended += 1
    record.must[ask] = {f"done:{row.finish}"}
    finished(book, ask)
    book.suspicion.completed(ask.prompt.number)


def _continues(record: Record, ask: Ask) -> None:
    """It has said something, for the first time since its row left or was lost."""
    if ask.is_interrupted:
        ask.resumed += 1
        record.count("resumed")
    if ask.is_paused:
        ask.paused += 1
        record.count("continued after a pause")
    ask.is_interrupted = ask.is_paused = False


def _may_return(life: Life, ask: Ask) -> bool:
    """Whether it may have a row again, though its answer has begun."""
    return ask.may_resume and not life.launch.deterministic


# ---------------------------------------------------------------- heard


def process_seen(record: Record, event: Spawned | WorkerBroke | WorkerUnlinked) -> None:
    """The shell has seen something of a process or of its connection."""
    life = record.life_of(event.model, event.generation)
    if life is None:
        return
    match event:
        case Spawned(pid=pid):
            life.pid = pid
        case WorkerUnlinked():
            life.unlinked_at = record.now
        case WorkerBroke(is_other_version=is_other_version):
            life.broke_at = record.now
            record.stops(life, Cause.VERSION if is_other_version else Cause.BROKEN)


def memory_sampled(record: Record, event: Sampled) -> None:
    """The memory of all processes was measured."""
    record.machine_bytes = event.machine_bytes
    for book in record.books.values():
        if book.life is not None and book.life.pid is not None:
            book.life.footprint = event.footprint_bytes.get(book.life.pid, 0)
        if book.life is not None:
            row_memory_measured(record, book.life)
            measured(record, book, book.life)
    sampled(record, event)


def worker_said(record: Record, book: Book, life: Life, message: object) -> None:
    """A process has said something."""
    match message:
        case Step():
            stepped(record, life, message)
            step_costs(record, book, life, message)
            for row in message.rows:
                piece_arrived(record, book, life, row)
                if row.tokens and life.spoke_at is None:
                    life.spoke_at = record.now
            note_left(record, life)
            rests(life)
            book.busy_at = record.now
        case Accepted(key=key, acceptance=acceptance):
            ask = life.given.get(key)
            if ask is not None and ask.is_open and ask.acceptance is None:
                ask.acceptance = acceptance
            if life.given and life.works_since is None and not life.turn.only_waits:
                life.works_since = record.now
        case Rejected(key=key, error=error):
            ask = life.given.pop(key, None)
            life.rows_ended += 1
            if ask is not None and ask.is_open:
                record.must[ask] = {error["code"]}
            elif ask is not None:
                record.count("cancel met rejection")
            rests(life)
            book.busy_at = record.now
        case Hello(version=version):
            life.has_greeted = True
            _progresses(record, life, ("import", 0.0))
            if version != VERSION:
                record.stops(life, Cause.VERSION)
        case LoadProgress(phase=phase, progress=progress):
            _progresses(record, life, (str(phase), progress))
        case Ready() if life.cause is None and is_too_large(record, book, message):
            record.stops(life, Cause.TOO_LARGE)
            record.count("memory below the need")
        case Ready() if life.cause is None:
            life.ready_at, book.is_restarting = record.now, False
            book.busy_at = record.now
            if book.up_for is UpFor.NEXT_TURN:
                book.up_for = UpFor.SOMEBODY
            if life.launch.max_concurrency > 1:
                book.batching = {
                    "fingerprint": message.fingerprint,
                    "batching": message.batching.value,
                    "reason": message.batching_reason,
                }
        case Rendered():
            record.joining.rendered(record, life, message)
        case Dying(message=words):
            life.announced = words
        case Heartbeat():
            life.reported = message.active_bytes + message.cache_bytes
            budget_kept(record, book, life, message.budget)


def _progresses(record: Record, life: Life, progress: tuple[str, float]) -> None:
    if progress != life.progress:
        life.progress, life.progress_at = progress, record.now


# ---------------------------------------------------------------- to clients


def judge_to_client(record: Record, connection: bytes, message: Message) -> None:
    """Raises Violation if a client is sent something that was not called for."""
    match message:
        case Deltas(deltas=deltas):
            check("pieces to nobody", connection not in record.gone, connection)
            for delta in deltas:
                listener = record.joining.of(connection, delta.id)
                if listener is not None:
                    record.joining.sends(listener, delta)
                else:
                    _delta(record, record.asks[connection, delta.id], delta)
        case Done(id=id) | Failed(id=id) if listener := record.joining.of(connection, id):
            record.joining.ends(record, listener, message)
        case Done(id=id, finish_reason=reason):
            _request_ends(record, record.asks[connection, id], message, f"done:{reason}")
        case Failed(id=id, error=error):
            ask = record.asks.get((connection, id))
            record.is_answered(connection, id)
            record.joining.refuses(connection, id, error["code"])
            if error["code"] == "duplicate_id":
                check("refused as duplicate", record.is_twin, id)
                record.is_twin = False
            elif ask is not None:
                _request_ends(record, ask, message, error["code"])
            elif record.is_unique.get((connection, id)):
                raise Violation("not prioritized", f"{id}: {error}")
            elif (connection, id) in record.may:
                check("pause refused", not record.may[connection, id], f"{id}: {error}")
                check("pause refused otherwise", error["code"] == "invalid_request", error)
        case Reply(id=id, value=value):
            _reply(record, connection, id, value)
        case Notice(id=id, kind=kind, detail=detail):
            ask = record.asks[connection, id]
            check("notice to nobody", ask.is_open, id)
            if kind is NoticeKind.QUEUED:
                book = record.books[ask.model]
                check("queued without waiting", ask in book.queue, ask)
                check_place(record, book, ask, detail["position"])
            elif kind is NoticeKind.PAUSED:
                check("paused without being so", ask.paused_at is not None, f"{ask}: {detail}")
            elif kind is NoticeKind.RESUMED:
                times = ask.resumed if detail["after"] == "crash" else ask.paused
                check("resumes told", detail["times"] == times, f"{ask}: {detail}")
        case ClientEvent(id=id):
            check("event to nobody", connection not in record.gone, id)


def _delta(record: Record, ask: Ask, delta: ClientDelta) -> None:
    check("delta after the end", ask.is_open, ask)
    check("delta from nowhere", bool(record.deltas), ask)
    pairs = [pair for pair in record.deltas if pair[0] is ask]
    check("delta from nowhere", bool(pairs), ask)
    record.deltas.remove(pairs[0])
    row = pairs[0][1]
    check("delta changed", (delta.tokens, delta.body) == (row.tokens, row.body), ask)
    ask.sent += delta.tokens


def _request_ends(record: Record, ask: Ask, message: Done | Failed, code: str) -> None:
    check("ended twice", ask.is_open, f"{ask}: {code}")
    expected = set(record.must.get(ask, ()))
    if ask.is_stranded and ask.tokens:
        expected.add("insufficient_memory")
    if code not in expected:
        name = "ended: " + code.removeprefix("done:")
        raise Violation(name, f"{ask}: {code} and not {sorted(expected)}; {message}")
    ask.end = message
    end_costs(ask, message)
    if isinstance(message, Failed) and "tokens_sent" in message.error["detail"]:
        sent = message.error["detail"]["tokens_sent"]
        check("tokens_sent", sent == ask.tokens, f"{ask}: {sent}")
    record.close(ask)
    record.count("ended: " + code)


def _reply(record: Record, connection: bytes, id: str, value: dict[str, object]) -> None:
    message, at = record.commands[connection, id]
    record.is_answered(connection, id)
    match message:
        case Load(model=model, dry_run=True):
            target = record.books[model]
            is_unseen = target.life is not None and may_have_begun(record, target)
            if not (is_unseen and value["outcome"] == "waits"):
                check_forecast(record, target, value)
        case Reload():
            said = {name: value[name] for name in ("added", "removed")}
            check("changes of a reload", said == record.changes, f"{said} {record.changes}")
        case Load(model=model) | Restart(model=model):
            life = record.books[model].life
            is_ready = life is not None and life.ready_at is not None and life.cause is None
            check("load answered early", is_ready, message)
            if isinstance(message, Restart) and life is not None:
                check("restart answered early", (life.ready_at or 0.0) >= at, message)
        case Unload(model=model):
            book = record.books.get(model)
            check("unload answered early", book is None or book.life is None, message)
        case CancelRequest():
            check("cancelled nobody", record.is_unique[connection, id], message)
        case PauseRequest() | ResumeRequest():
            check("pause allowed", record.may[connection, id], message)
        case StatusQuery():
            _compare(record, value)
        case Prioritize():
            check("prioritized nobody", record.is_unique[connection, id], message)
            check("another class", value["priority"] == message.priority, value)


def _compare(record: Record, value: dict[str, object]) -> None:
    """The status says what the oracle knows."""
    said = value["memory"]
    assert isinstance(said, dict)
    compare_shortage(record, said)
    rows = value["models"]
    assert isinstance(rows, list)
    check("status names all", {row["name"] for row in rows} == set(record.books), rows)
    for row in rows:
        book = record.books[row["name"]]
        book.suspicion.forget(record.now)
        quarantined = len(book.suspicion.quarantined)
        check("status: quarantined", row["quarantined"] == quarantined, row)
        check("status: queued", row["queued"] == len(book.queue), row)
        check_row(record, book, row)
        record.downloads.check_row(book, row)
        given = book.life.given.values() if book.life else ()
        running = [ask.id for ask in given if ask.is_open]
        check("status: running", sorted(row["running"]) == sorted(running), row)
        paused = sorted(ask.id for ask in book.paused)
        check("status: paused", sorted(row["paused"]) == paused, row)
        check("status: failed", (row["state"] == "FAILED") == bool(book.failed), row)
        check("status: pid", row["pid"] == (book.life.pid if book.life else None), row)
        check("status: suspects", row["suspects"] <= len(book.suspicion.suspects) + 8, row)
        compare_costs(book, row)
    queue = value["queue"]
    assert isinstance(queue, dict)
    compare_queue(record, queue)


# ---------------------------------------------------------------- doings

EPSILON_S = 1e-6
MOST_PASSED_OVER = 3
"""Turns that may come before the oldest new request: the one under way, and those of new lives."""


def judge(record: Record, action: Action) -> None:
    """Raises Violation where an action was not called for."""
    match action:
        case SendToClient(connection=connection, message=message):
            judge_to_client(record, bytes(connection), message)
        case SendToWorker(model=model, generation=generation, message=message):
            life = record.life_of(model, generation)
            if life is not None:
                _to_worker(record, record.books[model], life, message)
        case Spawn():
            judge_spawn(record, action)
        case StartDownload() | EndDownload():
            record.downloads.obeyed(record, action)
        case SignalWorker(model=model, generation=generation, signal=signal):
            judge_signal(record, model, generation, signal)
        case Announce(change=change):
            announced(record, change)
        case Abandon(model=model):
            life = record.books[model].life
            check("given up early", life is not None and life.is_abandoned, model)
        case NeedRaised(model=model, raised_bytes=raised_bytes):
            is_raised(record, model, raised_bytes)
        case Finish():
            lives = [book.life for book in record.books.values() if book.life]
            check("ends with processes", all(life.is_abandoned for life in lives), lives)
            check("ends unasked", record.is_shutting_down)


def _to_worker(record: Record, book: Book, life: Life, message: Message) -> None:
    match message:
        case Dispatch():
            _dispatch(record, book, life, message)
        case CancelRow(key=key):
            ask = life.given.get(key)
            check("cancels nobody", ask is not None, key)
            check("cancelled unasked", ask not in record.open or ask in record.must, key)
            life.cancelled.add(key)
        case PauseRow(key=key, keep=keep):
            ask = life.given.get(key)
            check("pauses nobody", ask is not None and ask.is_open, key)
            assert ask is not None
            ask.is_for_memory = False
            if keep and ask in record.to_leave:
                record.to_leave.remove(ask)
            elif keep:
                asked_to_leave(record, book, life, ask)
            else:
                if not book.suspicion.turns_are_taken and book.swaps_until is None:
                    asked_to_give_way(record, book, ask)
                ask.is_yielding, ask.is_by_hand, ask.is_for_class = True, False, False
                record.count("yielded")
        case Leases() | Lease():
            told_lease(record, life, message)
        case DropKept(key=key):
            check("drops what is not kept", key in life.kept, key)
            returning = [a for a in book.waiting if a.key == key and a not in record.must]
            check("drops what may return", not returning, key)
            life.kept.remove(key)
        case SetBudget():
            told_budget(record, book, life, message)
        case GiveBack():
            asked_to_give_back(record, life)
        case Render():
            record.joining.told(record, life, message)
        case Exit():
            _told_to_exit(record, book, life)


def _dispatch(record: Record, book: Book, life: Life, message: Dispatch) -> None:
    if book.swaps_until is not None and book.drain_until is None:
        is_called_off(record, book)
    is_served = book.serves or book.finishes
    check("dispatched unready", is_served and life.unlinked_at is None, book.name)
    ask = _asked_by(record, book, message)
    check("begun while it goes down", book.serves or ask.is_paused, ask)
    number = ask.prompt.number
    if ask.acceptance is None:
        check("resumes nothing", message.resume is None, ask)
    else:
        check("resume lost", message.resume is not None, ask)
        assert message.resume is not None
        check("resume data", message.resume.acceptance == ask.acceptance, ask)
        check("resume tokens", message.resume.delivered == bytes(ask.sent), ask)
        record.count("dispatched to resume")
    if ask.is_unread:
        record.count("begun after it had lacked memory")
    if not ask.has_begun:
        ask.started_at, ask.is_unread = record.now, False
    if book.suspicion.turns_are_taken:
        is_turn = book.suspicion.takes_turn(number)
        check("turn in company", not (is_turn and life.given), ask)
        held = [one for one, _ in life.held() if book.suspicion.takes_turn(one)]
        check("turn in company", not held, ask)
        if is_turn:
            record.count("turns")
            _passes_over(record, book, ask)
    returns_to_memory(record, book, life, ask)
    dispatched(record, book, ask, is_turn=book.suspicion.turns_are_taken)
    book.queue.remove(ask)
    ask.ends_pause(record.now)
    life.kept.discard(message.key)
    ask.place, ask.key = Place.GIVEN, message.key
    ask.given_at, ask.gains_since = record.now, None
    life.given[message.key] = ask
    life.was_given = True
    check("rows", len(life.given) <= book.rows, f"{len(life.given)} of {book.rows}")


def _passes_over(record: Record, book: Book, turn: Ask) -> None:
    """Before each turn new requests start, oldest first, as many as there are rows."""
    newcomers = [
        ask
        for ask in startable(record, book)
        if ask.acceptance is None
        and ask.may_resume
        and ask is not turn
        and ask.prompt.number not in book.suspicion.suspects
    ]
    if newcomers:
        newcomers[0].passed_over += 1
        check("newcomer waits", newcomers[0].passed_over <= MOST_PASSED_OVER, newcomers[0])


def _asked_by(record: Record, book: Book, message: Dispatch) -> Ask:
    """By its key, or, the first time, by its body; of several with that body, the oldest."""
    found = [ask for ask in book.queue if ask.key == message.key]
    if not found and message.resume is None:
        asks = [*contenders(record, book), *startable(record, book)]
        alike = [ask for ask in asks if ask.prompt.body == message.body]
        found = [ask for ask in alike if ask.key is None][:1]
    if len(found) != 1:
        raise Violation("dispatch of nobody's", f"{message}: {found}")
    [ask] = found
    if message.resume is None:
        check("another body", ask.prompt.body == message.body, ask)
    return ask


def _told_to_exit(record: Record, book: Book, life: Life) -> None:
    drained(record, book)  # what waited for the drain may have ended in this event
    life.told.append(("exit", record.now))
    if life.cause is Cause.ASKED:
        return
    is_busy = bool(book.waiting or life.given) and book.wanted is Wanted.UP
    if is_busy and life.cause is None and book.swaps_until is None:
        swap_begins(record, book, life)
    if book.swaps_until is not None and life.cause is None:
        swap_exits(record, book, life)
        return
    check("exit of the faulty", life.cause is None, f"{book.name}: {life.cause}")
    is_idle = book.wanted is Wanted.UP and not book.waiting and not life.given
    idle_s = book.entry.idle_unload_s or None
    check("unloaded while busy", is_idle, book.name)
    is_due = idle_s is not None and record.now >= book.busy_at + idle_s - EPSILON_S
    if record.plan.budget_bytes is not None and not is_due:
        check_eviction(record, book, life)
    else:
        check("unloaded unasked", idle_s is not None, book.name)
        check("unloaded early", is_due, book.name)
        record.count("unloaded as idle")
    book.wanted, book.is_by_user = Wanted.DOWN, False
    record.stops(life, Cause.ASKED)


# ---------------------------------------------------------------- record

Ends = dict[Ask, set[str]]
"""How requests must end in the event at hand: any of these codes, or `done:` and a reason."""


class Record:
    """The oracle's own account of one run.

    Args:
        plan: of the run.
        status: what the supervisor says of itself, to be compared, never believed.
    """

    def __init__(self, plan: Plan, status: Callable[[float], dict[str, Any]]) -> None:
        self.plan = plan
        self.status = status
        self.now = 0.0
        self.event: Event = Started(now=0.0)
        self.books: dict[ModelName, Book] = {e.name: Book(entry=e) for e in plan.models}
        self.asks: dict[tuple[bytes, str], Ask] = {}
        self.open: dict[Ask, None] = {}
        self.limited: dict[Ask, None] = {}
        self.must: Ends = {}
        self.deltas: list[tuple[Ask, Row]] = []
        self.is_twin = self.is_shutting_down = False
        self.machine_bytes = 0
        self.shortage = Shortage()
        self.commands: dict[tuple[bytes, str], tuple[ClientMessage, float]] = {}
        self.is_unique: dict[tuple[bytes, str], bool] = {}
        self.changes: dict[str, list[str]] = {}
        self.gone: set[bytes] = set()
        self.may: dict[tuple[bytes, str], bool] = {}
        self.to_leave: set[Ask] = set()
        self.left_short: list[Ask] = []
        self.dropped: dict[ModelName, list[Ask]] = {}
        self.tried_again: Ask | None = None
        self.counts: dict[str, int] = {}
        self.raised: dict[ModelName, int] = {}
        self.devices = Devices()
        self.downloads = Downloads()
        self.joining = Joining()
        self.appraised: set[ModelName] = set()
        self.questions = 0
        self._admitted = 0

    # ------------------------------------------------------------ what others ask

    def is_sent(self, ask: Ask) -> None:
        """A client has sent a request."""
        self.asks[ask.connection, ask.id] = ask

    def memory_need(self, model: ModelName) -> int:
        """What the process of a model was started with."""
        life = self.books[model].life if model in self.books else None
        return life.granted if life is not None else 0

    def memory_limit(self, model: ModelName) -> int:
        """What the process of a model may hold."""
        life = self.books[model].life if model in self.books else None
        limit = life.launch.memory_limit_bytes if life else None
        return limit or 9000

    def is_served(self, model: ModelName) -> bool:
        """Whether requests for a model are looked at."""
        book = self.books.get(model)
        is_named = book is not None and book.wanted is not Wanted.GONE
        return is_named and not self.is_shutting_down

    def is_answered(self, connection: bytes, id: str) -> None:
        """A command no longer waits for a load."""
        for book in self.books.values():
            book.callers.discard((connection, id))

    def count(self, what: str) -> None:
        """Something that the summary tells."""
        self.counts[what] = self.counts.get(what, 0) + 1

    # ------------------------------------------------------------ events

    def before(self, event: Event) -> None:
        """Enters an event that the core is about to see."""
        self.now, self.event = event.now, event
        self.must, self.deltas, self.is_twin = {}, [], False
        self.to_leave.clear()
        self.tried_again = None
        for book in self.books.values():
            book.freed = 0
        match event:
            case WorkerSaid():
                life = self.life_of(event.model, event.generation)
                if life is not None:
                    worker_said(self, self.books[event.model], life, event.message)
            case Tick():
                ticked(self)
            case ClientSaid():
                self._client_said(event)
            case ClientGone(connection=connection):
                self._client_gone(bytes(connection))
            case ClientTooSlow(connection=connection):
                for ask in self.open:
                    if ask.connection == connection:
                        self.must[ask] = {"slow_consumer"}
                self.joining.is_slow(bytes(connection))
            case Exited() | SpawnFailed():
                death_seen(self, event)
            case DownloadSaid():
                self.downloads.said(self, event)
            case Appraised(needs=needs):
                self.appraised = set(needs)
            case Spawned() | WorkerBroke() | WorkerUnlinked():
                process_seen(self, event)
            case Sampled():
                memory_sampled(self, event)
            case Reloaded(needs=needs):
                self.appraised = set(needs)
                self.changes = changes_of_reload(self, event)
                reloaded(self, event)
            case ShutdownAsked(is_immediate=is_immediate):
                shut_down(self, self.plan.settings.drain_timeout_s, is_now=is_immediate)
            case Started():
                for book in self.books.values():
                    if book.entry.preload:
                        preload(self, book)
        for book in self.books.values():
            drained(self, book)
        self._note_who_works()
        refuse(self)
        forget_turns(self)

    def act(self, action: Action) -> None:
        """Holds an action against what is known."""
        judge(self, action)

    def after(self) -> None:
        """The core has said all that it has to say of the event."""
        for ask, codes in self.must.items():
            is_ended = not ask.is_open or is_almost_due(self, ask, codes)
            check("must end", is_ended, f"{ask}: {sorted(codes)} after {self.event}")
        check("delta lost", not self.deltas, self.deltas[:1])
        check("duplicate answered", not self.is_twin, self.event)
        check("not asked to leave", not self.to_leave, [str(ask) for ask in self.to_leave])
        forget_turns(self)
        self.downloads.look(self)
        self.joining.look(self)
        check_others(self)
        look_at_kept(self)
        self._look_at_cancels()
        look_at_classes(self)
        look_at_rows(self)
        look_at_swaps(self)
        look_at_due_swaps(self)
        look_at_limits(self)
        look_at_leases(self)
        look_at_shortage(self)
        self._note_who_works()

    def _look_at_cancels(self) -> None:
        """Raise if a row of a request that has ended runs on."""
        for book in self.books.values():
            life = book.life
            if life is not None and life.serves and life.unlinked_at is None:
                over = {key for key, ask in life.given.items() if not ask.is_open}
                check("runs on for nobody", over <= life.cancelled, f"{book.name}: {over}")

    def _note_who_works(self) -> None:
        lives = [book.life for book in self.books.values() if book.life]
        working = [life.model for life in lives if life.works_since is not None]
        self.devices.note(self.now, frozenset(working))

    def begins(self, spawn: Spawn, worker: PlayedWorker) -> None:
        """The process that the core asked for is being started."""
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
        book.held = book.life.granted = need_of(self, book)

    def check_ends(self) -> None:
        """Everything is over."""
        check("unanswered", not self.open, [str(ask) for ask in self.open])
        rows = self.status(self.now)["models"]
        for row in rows:
            life = self.books[row["name"]].life
            is_over = row["state"] == "STOPPED" or (life is not None and life.is_abandoned)
            check("everything is down", is_over, row)
            check("reserved", row["footprint_bytes"] == 0 or life is not None, row)
            compare_costs(self.books[row["name"]], row)
        queue = self.status(self.now)["queue"]
        check("nobody waits", queue["waiting"] == 0 and not queue["per_client"], queue)

    # ------------------------------------------------------------ clients

    def _client_said(self, event: ClientSaid) -> None:
        message, connection = event.message, bytes(event.connection)
        match message:
            case Generate():
                self._asked(connection, message, event.process)
            case Cancel(id=id):
                self.joining.cancelled(connection, id)
                ask = self.asks.get((connection, id))
                if ask is not None and ask.is_open:
                    self.must[ask] = {"done:cancelled"}
                    self.count("cancelled")
            case _:
                self.commands[connection, message.id] = (message, event.now)
                if isinstance(message, Prioritize):
                    is_unique = prioritized(self, message)
                    self.is_unique[connection, message.id] = is_unique
                elif isinstance(message, Stop):
                    limit_s = message.timeout_s
                    if limit_s is None:
                        limit_s = self.plan.settings.drain_timeout_s
                    shut_down(self, limit_s, is_now=message.now)
                elif isinstance(message, Attach):
                    self.joining.asked(self, connection, message)
                elif isinstance(message, CancelRequest):
                    self._cancelled_by_name(connection, message)
                elif isinstance(message, PauseRequest | ResumeRequest):
                    commanded(self, connection, message)
                else:
                    commanded_model(self, message, connection)

    def _cancelled_by_name(self, connection: bytes, message: CancelRequest) -> None:
        ask = named(self, message.request)
        self.is_unique[connection, message.id] = ask is not None
        if ask is not None:
            self.must[ask] = {"done:cancelled"}
            self.count("cancelled by another")

    def _asked(self, connection: bytes, message: Generate, process: str) -> None:
        ask = self.asks.get((connection, message.id))
        if ask is None:
            return  # nonsense, which its client expects to be refused
        if ask.is_open:
            self.is_twin = True
            return
        ask.arrived_at = self.now
        identify(self, ask, process, message)
        self.open[ask] = None
        codes = refusals(self, ask, message)
        if codes:
            self.must[ask] = codes
            ask.place = Place.LINE  # for as long as its refusal takes
            return
        self._admitted += 1
        ask.number = self._admitted
        ask.place, ask.placed_at = Place.LINE, self.now
        set_limits(self, ask)
        book = self.books[ask.model]
        joins(self, book, ask)
        waits(self, ask)
        book.queue.append(ask)
        if book.wanted is not Wanted.UP:
            up(self, book, by_user=False)

    def _client_gone(self, connection: bytes) -> None:
        self.gone.add(connection)
        self.joining.gone(connection)
        for book in self.books.values():
            book.callers = {caller for caller in book.callers if caller[0] != connection}
        for ask in list(self.open):
            if ask.connection == connection:
                self.close(ask)

    def close(self, ask: Ask) -> None:
        """A request is over; its row may still be in the batch."""
        book = self.books.get(ask.model)
        if book is not None and ask in book.waiting:
            (book.queue if ask in book.queue else book.paused).remove(ask)
            book.busy_at = self.now
        if book is not None and book.life is not None and ask.key in book.life.given:
            book.life.tokens_at_end[ask.key] = ask.tokens
        ask.place, ask.ended_at = Place.ENDED, self.now
        self.open.pop(ask, None)
        self.limited.pop(ask, None)

    # ------------------------------------------------------------ processes

    def life_of(self, model: ModelName, generation: Generation) -> Life | None:
        """The process, if it is the model's latest and was not given up."""
        book = self.books.get(model)
        life = book.life if book else None
        is_it = life is not None and life.generation == generation and not life.is_abandoned
        return life if is_it else None

    def stops(self, life: Life, cause: Cause) -> None:
        """From now on a process is being ended, if it was not already."""
        if life.cause is None:
            life.cause, life.stopped_serving_at = cause, self.now
