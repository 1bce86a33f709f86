"""Whether what the core does was called for: what it tells workers, and all else elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlxsup.protocol.flight import Entry
from mlxsup.protocol.log_level import LogLevel
from mlxsup.protocol.message import Message
from mlxsup.protocol.rendering import Render
from mlxsup.protocol.worker_messages import (
    CancelRow,
    Dispatch,
    DropKept,
    Exit,
    GiveBack,
    Lease,
    Leases,
    PauseRow,
    SetBudget,
)
from mlxsup.supervisor.core.actions import (
    Abandon,
    Action,
    Announce,
    AppraiseLaunch,
    EndDownload,
    EndSpare,
    Finish,
    NeedRaised,
    RequestEnded,
    SendToClient,
    SendToWorker,
    SetLogLevel,
    SignalWorker,
    Spawn,
    StartDownload,
    StartSpare,
)

from . import (
    budgets,
    estimates,
    giving_way,
    higher,
    leases,
    load_options,
    memory,
    pressure,
    processes,
    room,
    shares,
    swaps,
    to_clients,
    wishes,
)
from .asks import Ask, Place
from .books import Book, Cause, Life, Wanted
from .violation import Violation, check

if TYPE_CHECKING:
    from .record import Record

EPSILON_S = 1e-6
MOST_PASSED_OVER = 3
"""Turns that may come before the oldest new request: the one under way, and those of new lives."""


def judge(record: Record, action: Action) -> None:
    """Raises Violation where an action was not called for."""
    match action:
        case SendToClient(connection=connection, message=message):
            to_clients.judge(record, bytes(connection), message)
        case SendToWorker(model=model, generation=generation, message=message):
            life = record.life_of(model, generation)
            if life is not None:
                _to_worker(record, record.books[model], life, message)
        case Spawn():
            processes.spawn(record, action)
        case StartSpare():
            record.spares.check_start(record, action)
        case EndSpare():
            record.spares.check_end(record, action)
        case StartDownload() | EndDownload():
            record.downloads.obeyed(record, action)
        case AppraiseLaunch():
            record.options.appraises(action)
        case SetLogLevel(level=level):
            record.log_levels.set(level)
        case RequestEnded(facts=facts, is_refused=is_refused):
            record.log_lines.said(facts, is_refused=is_refused)
        case SignalWorker(model=model, generation=generation, signal=signal):
            processes.signal(record, model, generation, signal)
        case Announce(change=change):
            swaps.announced(record, change)
        case Abandon(model=model):
            life = record.books[model].life
            check("given up early", life is not None and life.is_abandoned, model)
        case NeedRaised(model=model, raised_bytes=raised_bytes):
            estimates.is_raised(record, model, raised_bytes)
        case Entry():
            record.flight.take(action)
        case Finish():
            lives = [book.life for book in record.books.values() if book.life]
            check("ends with processes", all(life.is_abandoned for life in lives), lives)
            check("ends unasked", record.is_shutting_down)


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
            ask.is_for_memory = False
            if keep and ask in record.to_leave:
                record.to_leave.remove(ask)
            elif keep:
                higher.asked_to_leave(record, book, life, ask)
            else:
                if not book.suspicion.turns_are_taken and book.swaps_until is None:
                    giving_way.asked(record, book, ask)
                ask.is_yielding, ask.is_by_hand, ask.is_for_class = True, False, False
                record.count("yielded")
        case Leases() | Lease():
            leases.told(record, life, message)
        case DropKept(key=key):
            check("drops what is not kept", key in life.kept, key)
            returning = [a for a in book.waiting if a.key == key and a not in record.must]
            check("drops what may return", not returning, key)
            life.kept.remove(key)
        case SetBudget():
            budgets.told(record, book, life, message)
        case GiveBack():
            pressure.asked(record, life)
        case Render():
            record.joining.told(record, life, message)
        case LogLevel(level=level):
            record.log_levels.told(life, level)
        case Exit():
            _exit(record, book, life)


def _dispatch(record: Record, book: Book, life: Life, message: Dispatch) -> None:
    if book.swaps_until is not None and book.drain_until is None:
        swaps.is_called_off(record, book)
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
    room.returns(record, book, life, ask)
    shares.dispatched(record, book, ask, is_turn=book.suspicion.turns_are_taken)
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
        asks = [*shares.contenders(record, book), *shares.startable(record, book)]
        alike = [ask for ask in asks if ask.prompt.body == message.body]
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
    is_busy = bool(book.waiting or life.given) and book.wanted is Wanted.UP
    if is_busy and life.cause is None and book.swaps_until is None:
        swaps.begins(record, book, life)
    if book.swaps_until is not None and life.cause is None:
        swaps.exits(record, book, life)
        return
    check("exit of the faulty", life.cause is None, f"{book.name}: {life.cause}")
    is_idle = book.wanted is Wanted.UP and not book.waiting and not life.given
    idle_s = load_options.stays_s(book)
    check("unloaded while busy", is_idle, book.name)
    is_due = idle_s is not None and record.now >= book.busy_at + idle_s - EPSILON_S
    if record.plan.budget_bytes is not None and not is_due:
        memory.check_eviction(record, book, life)
    else:
        check("unloaded unasked", idle_s is not None, book.name)
        check("unloaded early", is_due, book.name)
        record.count("unloaded as idle")
        if book.keep_alive_s is not None:
            record.count("unloaded as was said")
    book.wanted, book.is_by_user = Wanted.DOWN, False
    record.stops(life, Cause.ASKED)
