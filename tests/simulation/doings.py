"""Whether what the core does was called for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlxsup.protocol.client_messages import (
    ClientDelta,
    Deltas,
    Done,
    Event,
    Failed,
    Load,
    Notice,
    PauseRequest,
    Prioritize,
    Reload,
    Reply,
    Restart,
    ResumeRequest,
    StatusQuery,
    Unload,
)
from mlxsup.protocol.ids import Generation, ModelName
from mlxsup.protocol.message import Message
from mlxsup.protocol.states import NoticeKind
from mlxsup.protocol.worker_messages import (
    CancelRow,
    Dispatch,
    DropKept,
    Exit,
    Lease,
    Leases,
    PauseRow,
)
from mlxsup.supervisor.core.actions import (
    Abandon,
    Action,
    Finish,
    SendToClient,
    SendToWorker,
    SignalWorker,
    Spawn,
    WorkerSignal,
)

from . import costs, leases, memory, shares, wishes
from .asks import Ask, Place
from .books import Book, Cause, Life, Wanted
from .violation import Violation, check

if TYPE_CHECKING:
    from .record import Record

EPSILON_S = 1e-6
DUMP_S = 0.5
MOST_PASSED_OVER = 3
"""Turns that may come before the oldest new request: the one under way, and those of new lives."""

STALLS = ("stall", "gil", "blocked", "mute", "waits_on", "load_stalls", "load_stops")
BREAKS = ("stop", "load_stops", "garbage", "link_drops", "row_lost")


def judge(record: Record, action: Action) -> None:
    """Raises Violation where an action was not called for."""
    match action:
        case SendToClient(connection=connection, message=message):
            _to_client(record, bytes(connection), message)
        case SendToWorker(model=model, generation=generation, message=message):
            life = record.life_of(model, generation)
            if life is not None:
                _to_worker(record, record.books[model], life, message)
        case Spawn():
            _spawn(record, action)
        case SignalWorker(model=model, generation=generation, signal=signal):
            _signal(record, model, generation, signal)
        case Abandon(model=model):
            life = record.books[model].life
            check("given up early", life is not None and life.is_abandoned, model)
        case Finish():
            lives = [book.life for book in record.books.values() if book.life]
            check("ends with processes", all(life.is_abandoned for life in lives), lives)
            check("ends unasked", record.is_shutting_down)


# ---------------------------------------------------------------- clients


def _to_client(record: Record, connection: bytes, message: Message) -> None:
    match message:
        case Deltas(deltas=deltas):
            for delta in deltas:
                _delta(record, record.asks[connection, delta.id], delta)
        case Done(id=id, finish_reason=reason):
            _end(record, record.asks[connection, id], message, f"done:{reason}")
        case Failed(id=id, error=error):
            ask = record.asks.get((connection, id))
            record.is_answered(connection, id)
            if error["code"] == "duplicate_id":
                check("refused as duplicate", record.is_twin, id)
                record.is_twin = False
            elif ask is not None:
                _end(record, ask, message, error["code"])
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
                shares.check_place(record, book, ask, detail["position"])
            elif kind is NoticeKind.PAUSED:
                check("paused without being so", ask.paused_at is not None, f"{ask}: {detail}")
            elif kind is NoticeKind.RESUMED:
                times = ask.resumed if detail["after"] == "crash" else ask.paused
                check("resumes told", detail["times"] == times, f"{ask}: {detail}")
        case Event(id=id):
            check("event to nobody", connection not in record.gone, id)


def _delta(record: Record, ask: Ask, delta: ClientDelta) -> None:
    check("delta after the end", ask.is_open, ask)
    check("delta from nowhere", bool(record.deltas), ask)
    pairs = [pair for pair in record.deltas if pair[0] is ask]
    check("delta from nowhere", bool(pairs), ask)
    record.deltas.remove(pairs[0])
    row = pairs[0][1]
    said = delta.text, delta.tokens, delta.logprobs
    check("delta changed", said == (row.text, row.tokens, row.logprobs), ask)
    ask.sent += delta.tokens


def _end(record: Record, ask: Ask, message: Done | Failed, code: str) -> None:
    check("ended twice", ask.is_open, f"{ask}: {code}")
    expected = record.must.get(ask, set())
    if code not in expected:
        name = "ended: " + code.removeprefix("done:")
        raise Violation(name, f"{ask}: {code} and not {sorted(expected)}; {message}")
    ask.end = message
    costs.end(ask, message)
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
            memory.check_forecast(record, record.books[model], value)
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
        case PauseRequest() | ResumeRequest():
            check("pause allowed", record.may[connection, id], message)
        case StatusQuery():
            _compare(record, value)
        case Prioritize():
            check("prioritized nobody", record.is_unique[connection, id], message)
            check("another class", value["priority"] == message.priority, value)


def _compare(record: Record, value: dict[str, object]) -> None:
    """The status says what the oracle knows."""
    rows = value["models"]
    assert isinstance(rows, list)
    check("status names all", {row["name"] for row in rows} == set(record.books), rows)
    for row in rows:
        book = record.books[row["name"]]
        book.suspicion.forget(record.now)
        quarantined = len(book.suspicion.quarantined)
        check("status: quarantined", row["quarantined"] == quarantined, row)
        check("status: queued", row["queued"] == len(book.queue), row)
        memory.check_row(record, book, row)
        given = book.life.given.values() if book.life else ()
        running = [ask.id for ask in given if ask.is_open]
        check("status: running", sorted(row["running"]) == sorted(running), row)
        paused = sorted(ask.id for ask in book.paused)
        check("status: paused", sorted(row["paused"]) == paused, row)
        check("status: failed", (row["state"] == "FAILED") == bool(book.failed), row)
        check("status: pid", row["pid"] == (book.life.pid if book.life else None), row)
        check("status: suspects", row["suspects"] <= len(book.suspicion.suspects) + 8, row)
        costs.compare(book, row)
    queue = value["queue"]
    assert isinstance(queue, dict)
    shares.compare(record, queue)


# ---------------------------------------------------------------- workers


def _to_worker(record: Record, book: Book, life: Life, message: Message) -> None:
    match message:
        case Dispatch():
            _dispatch(record, book, life, message)
        case CancelRow(key=key):
            ask = life.given.get(key)
            check("cancels nobody", ask is not None, key)
            check("cancelled unasked", ask not in record.open or ask in record.must, key)
        case PauseRow(key=key, keep=keep):
            ask = life.given.get(key)
            check("pauses nobody", ask is not None and ask.is_open, key)
            assert ask is not None
            if keep:
                check("paused unasked", ask in record.to_leave, ask)
                record.to_leave.remove(ask)
            else:
                check("taken out", book.suspicion.turns_are_taken, ask)
                ask.is_yielding, ask.is_by_hand = True, False
                record.count("yielded")
        case Leases() | Lease():
            leases.told(record, life, message)
        case DropKept(key=key):
            check("drops what is not kept", key in life.kept, key)
            returning = [a for a in book.waiting if a.key == key and a not in record.must]
            check("drops what may return", not returning, key)
            life.kept.remove(key)
        case Exit():
            _exit(record, book, life)


def _dispatch(record: Record, book: Book, life: Life, message: Dispatch) -> None:
    is_served = book.serves or book.finishes
    check("dispatched unready", is_served and life.unlinked_at is None, book.name)
    ask = _asked_by(record, book, message)
    check("begun while it goes down", book.serves or ask.is_paused, ask)
    number = ask.prompt.number
    if ask.acceptance is None:
        check("resumes nothing", message.resume is None, ask)
        ask.started_at = record.now
    else:
        check("resume lost", message.resume is not None, ask)
        assert message.resume is not None
        check("resume data", message.resume.acceptance == ask.acceptance, ask)
        check("resume tokens", message.resume.delivered == bytes(ask.sent), ask)
        record.count("dispatched to resume")
    if book.suspicion.turns_are_taken:
        is_turn = book.suspicion.takes_turn(number)
        check("turn in company", not (is_turn and life.given), ask)
        held = [one for one, _ in life.held() if book.suspicion.takes_turn(one)]
        check("turn in company", not held, ask)
        if is_turn:
            record.count("turns")
            _passes_over(record, book, ask)
    shares.dispatched(record, book, ask, is_turn=book.suspicion.turns_are_taken)
    book.queue.remove(ask)
    ask.ends_pause(record.now)
    life.kept.discard(message.key)
    ask.place, ask.key = Place.GIVEN, message.key
    life.given[message.key] = ask
    check("rows", len(life.given) <= book.rows, f"{len(life.given)} of {book.rows}")


def _passes_over(record: Record, book: Book, turn: Ask) -> None:
    """Before each turn new requests start, oldest first, as many as there are rows."""
    newcomers = [
        ask
        for ask in shares.startable(record, book)
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
        startable = shares.startable(record, book)
        alike = [ask for ask in startable if ask.prompt.body == message.body]
        found = [ask for ask in alike if ask.key is None][:1]
    if len(found) != 1:
        raise Violation("dispatch of nobody's", f"{message}: {found}")
    [ask] = found
    if message.resume is None:
        check("another body", ask.prompt.body == message.body, ask)
    return ask


def _exit(record: Record, book: Book, life: Life) -> None:
    wishes.drained(record, book)  # what waited for the drain may have ended in this event
    life.told.append(("exit", record.now))
    if life.cause is Cause.ASKED:
        return
    check("exit of the faulty", life.cause is None, f"{book.name}: {life.cause}")
    is_idle = book.wanted is Wanted.UP and not book.waiting and not life.given
    idle_s = book.entry.idle_unload_s
    check("unloaded while busy", is_idle, book.name)
    is_due = idle_s > 0 and record.now >= book.busy_at + idle_s - EPSILON_S
    if record.plan.budget_bytes is not None and not is_due:
        memory.check_eviction(record, book, life)
    else:
        check("unloaded unasked", idle_s > 0, book.name)
        check("unloaded early", is_due, book.name)
        record.count("unloaded as idle")
    book.wanted, book.is_by_user = Wanted.DOWN, False
    record.stops(life, Cause.ASKED)


def _spawn(record: Record, spawn: Spawn) -> None:
    book = record.books[spawn.model]
    check("two processes", book.life is None, spawn.model)
    check("spawned unwanted", book.wanted is Wanted.UP and not book.failed, spawn.model)
    check("old launch", spawn.launch == book.entry.launch, spawn.model)
    check("known batching", spawn.known_batching == book.batching, spawn.known_batching)
    memory.check_spawn(record, book)
    if book.retry is not None:
        earliest, _ = book.retry
        check("back-off too short", record.now >= earliest - EPSILON_S, f"{spawn.model}")
        check("earlier than announced", book.retry_at is None, f"{spawn.model}: {book.retry_at}")
        record.count("back-off")
    loading = [
        other.life
        for other in record.books.values()
        if other.life and other.life.ready_at is None and not other.life.is_abandoned
    ]
    is_alone = (
        not loading if not book.is_after_crash else not any(life.is_after_crash for life in loading)
    )
    check("loads side by side", is_alone, spawn.model)


def _signal(record: Record, model: ModelName, generation: Generation, signal: WorkerSignal) -> None:
    life = record.life_of(model, generation)
    check("signal to nobody", life is not None, f"{model} {generation}")
    assert life is not None
    fault = life.worker.fault.name if life.worker.fault else ""
    asked_at, term_at = life.was_told("exit"), life.was_told(WorkerSignal.TERM)
    dump_at, kill_at = life.was_told(WorkerSignal.DUMP), life.was_told(WorkerSignal.KILL)
    grace_s, now = record.plan.settings.exit_grace_s, record.now + EPSILON_S
    is_hurried = life.hurried_at == record.now
    life.told.append((signal, record.now))
    detail = f"{signal} to {model}: {life.cause}, {fault or 'no fault'}"
    match signal:
        case WorkerSignal.DUMP:
            check("false alarm", life.cause is None and fault in STALLS, detail)
            record.stops(life, Cause.STALL)
            record.count("stall found")
        case WorkerSignal.TERM if asked_at is not None:
            check("SIGTERM early", now >= asked_at + grace_s or is_hurried, detail)
        case WorkerSignal.TERM:
            check("SIGTERM unasked", life.cause in (Cause.ASKED, Cause.VERSION), detail)
        case WorkerSignal.KILL if kill_at is not None:
            check("SIGKILL again", is_hurried or life.told[0][0] == signal, detail)
        case WorkerSignal.KILL if dump_at is not None:
            check("SIGKILL early", now >= dump_at + DUMP_S or is_hurried, detail)
        case WorkerSignal.KILL if term_at is not None:
            began_at = term_at  # for a process that had no pid yet, when SIGTERM was due
            if life.told[0][0] == WorkerSignal.TERM and life.stopped_serving_at is not None:
                began_at = life.stopped_serving_at
            check("SIGKILL early", now >= began_at + grace_s or is_hurried, detail)
        case WorkerSignal.KILL if asked_at is not None:
            check("SIGKILL before SIGTERM", is_hurried, detail)
        case WorkerSignal.KILL if life.cause is None:
            check("false kill", fault in BREAKS or not life.worker.is_alive, detail)
            is_stall = fault in ("load_stops", "load_stalls") and not life.has_greeted
            silent_s = record.now - life.progress_at
            is_limit = silent_s >= record.books[model].entry.load_stall_timeout_s - EPSILON_S
            record.stops(life, Cause.STALL if is_stall and is_limit else Cause.BROKEN)
            record.count("broken found")
