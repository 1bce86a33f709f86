"""What is due by now, and whether what was due has happened: limits, drains, stalls, turns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlxsup.supervisor.core.actions import WorkerSignal
from mlxsup.supervisor.core.events import DownloadSaid, Exited, SpawnFailed, Tick

from . import deaths, load_options, loads, memory, room, shares, swaps, wishes
from .asks import Ask, Place
from .books import Book, Life, Wanted
from .violation import Violation, check

if TYPE_CHECKING:
    from .record import Record

SLACK_S = 0.05
"""A tick may come so late, and a little more."""

EPSILON_S = 1e-6
ON_THE_WAY_S = 3.0
"""A beat and what it tells of may be under way for so long, in all."""

FOUND_WITHIN_S = {
    "stall": 1.0,
    "blocked": 1.0,
    "waits_on": 1.0,
    "gil": 2.5,
    "mute": 30.0,
    "stop": 2.0,
    "load_stops": 2.0,
    "link_drops": 2.0,
    "garbage": 0.0,
}
"""Beside a limit for a step, for what is judged by one: from the fault to the first signal."""

BY_STEP = ("stall", "blocked", "waits_on", "gil")
SILENCE_S = 3.5
LOAD_STALL_S = 6.0


def tick(record: Record) -> None:
    """The time has come for whatever was due."""
    now = record.now + EPSILON_S
    for ask in record.limited:
        codes = _due(ask, now)
        if codes:
            record.must.setdefault(ask, set()).update(codes)
    for book in list(record.books.values()):
        if book.retry_at is not None and now >= book.retry_at:
            book.retry_at = None  # it waits for its turn now
        life = book.life
        if life is None or life.is_abandoned:
            continue
        kill_at = life.kill_stage_at
        if kill_at is not None and life.cause is not None:
            limit_s = deaths.KILL_LIMIT_S + deaths.KILL_LIMIT_S_PER_BYTE * life.footprint
            if now >= kill_at + limit_s:
                deaths.given_up(record, book)
                continue
        if book.drain_until is not None and life.cause is None and now >= book.drain_until:
            wishes.cuts_off(record, book)


def _due(ask: Ask, now: float) -> set[str]:
    codes = set()
    if ask.until is not None and now >= ask.until:
        codes.add("deadline_exceeded")
    is_speechless = ask.first_token_at is None
    if is_speechless and ask.first_token_until is not None and now >= ask.first_token_until:
        codes.add("deadline_exceeded")
    is_limited = ask.place is Place.LINE and ask.queue_until is not None
    if is_limited and now >= max(ask.queue_until or 0.0, ask.placed_at):
        codes.add("queue_timeout")
    return codes


def is_almost_due(record: Record, ask: Ask, codes: set[str]) -> bool:
    """Whether a limit lies so little ahead of the clock that the next tick is for it."""
    return codes <= {"deadline_exceeded", "queue_timeout"} and not _due(ask, record.now)


def look(record: Record) -> None:
    """What should have happened by now has."""
    for ask in record.limited:
        late = _due(ask, record.now - SLACK_S)
        if late:
            raise Violation("limit passed", f"{ask}: {late}")
    for book in record.books.values():
        if book.life is None:
            _returns(record, book)
        elif not book.life.is_abandoned:
            _works(record, book, book.life)
            _is_found(record, book, book.life)
    if not isinstance(record.event, Tick | SpawnFailed | Exited | DownloadSaid):
        return
    for row in record.status(record.now)["models"]:
        book = record.books[row["name"]]
        check("FAILED", (row["state"] == "FAILED") == bool(book.failed), f"{row} {book.failed}")
        if book.retry is not None and row["retry_in_s"] is not None:
            _backs_off(record, book, row["retry_in_s"])


def _backs_off(record: Record, book: Book, retry_in_s: float) -> None:
    """The delay is what the oracle has counted, a random part of its half taken off."""
    assert book.retry is not None
    earliest, latest = book.retry
    if retry_in_s == 0.0 and record.now >= latest:
        return  # it is due, and `_returns` says how soon it must be tried
    retry_at = record.now + retry_in_s
    check("back-off too short", retry_at >= earliest - EPSILON_S, f"{book.name} {retry_at}")
    check("back-off too long", retry_at <= latest + EPSILON_S, f"{book.name} {retry_at}")
    is_drawn = latest > earliest  # and no hub has said how long to wait
    is_whole = abs(retry_at - latest) <= 1e-9
    check("no jitter", not (is_drawn and is_whole), f"{book.name} {retry_at}")
    if book.retry_at is not None:
        book.retry_at = retry_at


def _returns(record: Record, book: Book) -> None:
    """A model that is wanted is started again, once nothing is in its way."""
    if book.wanted is not Wanted.UP or book.failed or record.is_shutting_down:
        check("lets requests wait for nothing", not book.waiting, book.name)
        return
    if book.entry.download is not None:
        return  # `downloads.look` says what must happen
    if book.retry is not None and record.now <= book.retry[1] + SLACK_S:
        return
    has_turn = loads.has_turn(record, book)
    check(
        "nobody is loaded",
        not has_turn or memory.may_wait(record, book),
        book.name,
    )


def _works(record: Record, book: Book, life: Life) -> None:
    """Whoever waits runs if there is room; who has nothing to do is unloaded."""
    if not book.serves or life.unlinked_at is not None:
        return
    startable = shares.startable(record, book) if book.queue else []
    prompts = [*(ask.prompt.number for ask in startable), *(number for number, _ in life.held())]
    if startable and any(map(book.suspicion.takes_turn, prompts)):
        check("turn missed", bool(life.given), startable[0])
    elif startable and _may_start(record, book, life, startable):
        check("room left", len(life.given) >= book.rows, startable[0])
    idle_s = load_options.stays_s(book)
    if idle_s is not None and not book.waiting and not life.given:
        check("idle and loaded", record.now <= book.busy_at + idle_s + SLACK_S, book.name)


def _may_start(record: Record, book: Book, life: Life, startable: list[Ask]) -> bool:
    """Whether the first must start; a row that was freed for the highest class may be left to one
    that has no memory for it yet."""
    if swaps.may_have_begun(record, book):
        return False
    if any(shares.has_just_aged(record, ask) for ask in startable):
        return False
    urgent = (ask for ask in startable if ask.rank == shares.HIGHEST)
    return all(room.may_return(record, life, ask) for ask in (startable[0], *urgent))


def _is_found(record: Record, book: Book, life: Life) -> None:
    """A fault is found within its limit, and a process that must end ends."""
    now, fault = record.now, life.worker.fault
    if life.cause is None:
        _drain_ends(record, book)
        if fault is None or not life.worker.is_alive:
            return
        limit_s = FOUND_WITHIN_S.get(fault.name)
        if fault.name == "load_stalls":
            limit_s = book.entry.load_stall_timeout_s
        if limit_s is None:
            return
        if fault.name in BY_STEP:
            limit_s += life.launch.step_timeout_s * 4.0
        if fault.name in ("stop", "load_stops", "gil"):
            limit_s += SILENCE_S
        check("found late", now <= fault.since + limit_s + ON_THE_WAY_S, f"{book.name}: {fault}")
        return
    if life.pid is None or not life.worker.is_alive:
        return
    grace_s = record.plan.settings.exit_grace_s + SLACK_S
    asked_at, term_at = life.was_told("exit"), life.was_told(WorkerSignal.TERM)
    dump_at, kill_at = life.was_told(WorkerSignal.DUMP), life.was_told(WorkerSignal.KILL)
    check("never told", bool(life.told), f"{book.name}: {life.cause}")
    if asked_at is not None and term_at is None and kill_at is None:
        check("SIGTERM late", now <= asked_at + grace_s, book.name)
    if term_at is not None and kill_at is None:
        check("SIGKILL late", now <= term_at + grace_s, book.name)
    if dump_at is not None and kill_at is None:
        check("SIGKILL late", now <= dump_at + 0.5 + SLACK_S, book.name)
    if kill_at is not None:
        check("given up late", now <= kill_at + deaths.KILL_LIMIT_S + SLACK_S, book.name)


def _drain_ends(record: Record, book: Book) -> None:
    if book.drain_until is not None:
        check("drain late", record.now <= book.drain_until + SLACK_S, book.name)
