"""The oracle's account of processes: what is wanted, what deaths lead to, what is due by now."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mlxsup.protocol.client_messages import Load, Restart, Unload
from mlxsup.protocol.download import (
    DownloadDone,
    DownloadFailed,
    DownloadProblem,
    DownloadProgress,
    Repository,
)
from mlxsup.protocol.message import Message
from mlxsup.supervisor.core.actions import (
    EndDownload,
    SignalWorker,
    Spawn,
    StartDownload,
    WorkerSignal,
)
from mlxsup.supervisor.core.events import DownloadSaid, Exited, Reloaded, SpawnFailed, Tick
from mlxsup.supervisor.core.settings import ModelSettings

from .books import Ask, Book, Cause, Finding, Life, Place, Says, UpFor, Wanted
from .engine import rests
from .ground import Violation, check
from .memory import check_spawn, has_turn, may_have_begun, may_return, may_wait, need_of
from .requests import HIGHEST, has_just_aged, line_up, model_goes, puts_aside, startable

if TYPE_CHECKING:
    from .record import Record

EPSILON_S = 1e-6
# A tick may come so late, and a little more.
SLACK_S = 0.05
PERMANENT = (64, 65, 66, 69)
MODEL_MISSING = 66
# Exits that are not the model's: a GPU fault elsewhere, out of memory, SIGTERM.
NOT_ITS_OWN = (72, 75, 143)
# In a row, without a token and without evidence.
MOST_DEATHS = 3
# Of memory, while a process holds one request alone.
MOST_SHORTAGES = 2
KILL_LIMIT_S = 10.0
DUMP_S = 0.5

# ---------------------------------------------------------------- what is wanted


def commanded_model(record: Record, message: Message, connection: bytes) -> None:
    """Enter a command about one model, unless it names none or comes too late."""
    if record.is_shutting_down or not isinstance(message, Load | Unload | Restart):
        return
    book = record.books.get(message.model)
    if book is None or book.wanted is Wanted.GONE:
        return
    if isinstance(message, Load) and message.dry_run:
        return
    if isinstance(message, Load | Restart):
        book.callers.add((connection, message.id))
    match message:
        case Load():
            book.busy_at = record.now
            if book.failed:
                book.suspicion.lift()
            up(book, by_user=True)
        case Unload():
            _down(record, book, record.plan.settings.drain_timeout_s, by_user=True)
        case Restart(now=is_now):
            book.suspicion.lift()
            _restart(record, book, is_now=is_now)


def up(book: Book, *, by_user: bool, up_for: UpFor | None = None) -> None:
    """Want a model."""
    life, before = book.life, book.wanted
    if life is None or not life.is_abandoned:  # never two processes of one model
        book.wanted = Wanted.UP
        if before is not Wanted.UP:
            book.up_for = UpFor.SOMEBODY
        if life is None:
            if before is not Wanted.UP or book.is_resting:
                _starts_afresh(book, is_clean=by_user)
        elif before is not Wanted.UP and life.cause is None and life.launch == book.entry.launch:
            book.drain_until = None
    book.up_for = up_for or book.up_for


def _starts_afresh(book: Book, *, is_clean: bool) -> None:
    book.up_for = UpFor.SOMEBODY
    if is_clean:
        book.clean()
    book.failed, book.retry, book.retry_at, book.is_after_crash = "", None, None, False
    book.is_restarting = False


def _down(record: Record, book: Book, drain_s: float, *, by_user: bool) -> None:
    """Want a model no longer: what waits ends, what runs may finish for a while."""
    book.wanted, book.is_by_user = Wanted.DOWN, by_user
    book.is_restarting = False
    model_goes(record, book, cut_off(record, book))
    life = book.life
    if life is None:
        book.failed, book.retry, book.retry_at = "", None, None
    elif life.is_abandoned or life.cause is not None:
        pass
    elif life.ready_at is None:
        record.stops(life, Cause.ASKED)
    else:
        until = record.now + drain_s
        book.drain_until = until if book.drain_until is None else min(book.drain_until, until)


def _restart(record: Record, book: Book, *, is_now: bool) -> None:
    """Want one new process."""
    life = book.life
    if life is not None and life.is_abandoned:
        return
    is_at_rest = book.wanted is not Wanted.UP or book.is_resting
    book.wanted, book.up_for = Wanted.UP, UpFor.SOMEBODY
    if life is None and is_at_rest:
        _starts_afresh(book, is_clean=True)
    book.is_restarting = True
    if life is None:
        return
    if life.cause is not None:
        life.is_restart = True
    elif is_now and not (life.ready_at is None and life.is_of_restart):  # or it joins
        _stops_to_return(record, life)
    elif life.ready_at is not None and book.drain_until is None:
        _drains_to_return(record, book)


def _stops_to_return(record: Record, life: Life) -> None:
    record.stops(life, Cause.ASKED)
    life.is_restart = True


def _drains_to_return(record: Record, book: Book) -> None:
    """Have it go down to come up again: a swap that had begun ends with this drain instead."""
    book.drain_until = record.now + record.plan.settings.drain_timeout_s
    book.swaps_until = None


def shut_down(record: Record, drain_s: float, *, is_now: bool) -> None:
    """End the supervisor."""
    record.is_shutting_down = True
    for book in record.books.values():
        life = book.life
        was_stopping = life is not None and life.cause is not None and not life.is_abandoned
        _down(record, book, drain_s, by_user=False)
        if life is None or life.is_abandoned or not is_now:
            continue
        if was_stopping:
            life.hurried_at = record.now
        elif life.ready_at is not None:
            _cuts_off(record, book)


def _cuts_off(record: Record, book: Book) -> None:
    """End what still runs when a drain is over, unless the model is to come back."""
    life = book.life
    assert life is not None
    if book.wanted is not Wanted.UP:
        code = "shutting_down" if record.is_shutting_down else "unloaded"
        _all_end(record, book, cut_off(record, book))
        for ask in life.running:
            record.must.setdefault(ask, set()).add(code)
    record.stops(life, Cause.ASKED)
    life.is_restart = life.is_restart or book.wanted is Wanted.UP


def _all_end(record: Record, book: Book, code: str) -> None:
    """End what waits; an answer that had begun was not waiting for a load: its worker crashed."""
    for ask in book.waiting:
        is_begun = ask.has_begun and code == "load_failed"
        record.must.setdefault(ask, set()).add("worker_crashed" if is_begun else code)


def drained(record: Record, book: Book) -> None:
    """Have a process exit that has nothing left running."""
    life = book.life
    if life is None or book.drain_until is None or life.cause is not None or life.given:
        return
    if not (book.queue and book.wanted is not Wanted.UP):
        record.stops(life, Cause.ASKED)
        life.is_restart = book.wanted is Wanted.UP


def cut_off(record: Record, book: Book) -> str:
    """Return the code of what ends because its model is not wanted."""
    if book.wanted is Wanted.GONE:
        return "unknown_model"
    return "shutting_down" if record.is_shutting_down else "unloaded"


def changes(record: Record, entries: Iterable[ModelSettings]) -> dict[str, list[str]]:
    """Return the names of the models that a reload with these entries adds and removes."""
    old = [book.name for book in record.books.values() if book.wanted is not Wanted.GONE]
    new = [entry.name for entry in entries]
    return {
        "added": [name for name in new if name not in old],
        "removed": [name for name in old if name not in new],
    }


def reloaded(record: Record, event: Reloaded) -> None:
    """Enter that the configuration was read again."""
    record.changes = changes(record, event.models)
    if record.is_shutting_down:
        return
    for book in [one for one in record.books.values() if one.name in record.changes["removed"]]:
        _removed(record, book)
    for entry in event.models:
        known = record.books.get(entry.name)
        if known is not None:
            _reconfigured(record, known, entry)
            continue
        book = record.books[entry.name] = Book(entry=entry)
        if entry.preload:
            up(book, by_user=True, up_for=UpFor.FILE)


def _removed(record: Record, book: Book) -> None:
    book.wanted = Wanted.GONE
    model_goes(record, book, "unknown_model")
    life = book.life
    if life is None:
        del record.books[book.name]
    elif life.is_abandoned or life.cause is not None:
        pass
    elif life.ready_at is None:
        record.stops(life, Cause.ASKED)
    elif book.drain_until is None:
        book.drain_until = record.now + record.plan.settings.drain_timeout_s


def _reconfigured(record: Record, book: Book, entry: ModelSettings) -> None:
    """Have an entry count; a process that was started with another launch is replaced."""
    is_replaced = entry.launch != book.entry.launch or book.wanted is Wanted.GONE
    if entry != book.entry:
        book.suspicion.lift()
        book.clean()
    is_resting = book.is_resting
    book.entry, book.entry_since = entry, record.now
    life = book.life
    if not is_replaced:
        return
    if life is None:
        if is_resting:
            book.wanted = Wanted.UP
            _starts_afresh(book, is_clean=False)
            book.up_for = UpFor.FILE
        return
    is_ending = life.is_abandoned or life.cause is not None
    is_draining = life.ready_at is not None and book.drain_until is not None
    if book.wanted is Wanted.DOWN and (is_ending or is_draining):
        return
    # What comes up now does so for the reload: a restart does not join it.
    book.wanted, book.up_for, book.is_restarting = Wanted.UP, UpFor.FILE, False
    if is_ending:
        life.is_restart = True
    elif life.ready_at is None:
        _stops_to_return(record, life)
    elif not is_draining:
        _drains_to_return(record, book)


# ---------------------------------------------------------------- deaths


def death_seen(record: Record, event: Exited | SpawnFailed) -> None:
    """Enter the end of a process, or that it could not be started."""
    book = record.books.get(event.model)
    life = book.life if book else None
    if book is None or life is None or life.generation != event.generation:
        return
    if life.is_abandoned:
        book.life, book.failed = None, ""
        book.is_after_crash = False
        if book.wanted is Wanted.GONE:
            del record.books[book.name]
        return
    if isinstance(event, SpawnFailed):
        _ends(record, book, life, None, Finding(says=Says.NOTHING))
        return
    finding = book.suspicion.died(life.says(event, record.machine_bytes), life.held(), record.now)
    if finding.culprit is not None:
        record.count("quarantine")
    if any(not ask.is_open for ask in life.given.values()):
        record.count("cancel met exit")
    _ends(record, book, life, event, finding)


def _given_up(record: Record, book: Book, life: Life) -> None:
    """Wait no longer for a process that SIGKILL has not ended within its limit (P26)."""
    says = Says.ASKED
    if life.cause is Cause.STALL:
        says = Says.ACCUSES if life.ready_at is not None else Says.NOTHING
    elif life.cause is Cause.BROKEN and not life.is_restart:
        says = Says.NOTHING
    _requests_end(record, book, life, book.suspicion.died(says, life.held(), record.now))
    code = "load_failed" if book.wanted is Wanted.UP else cut_off(record, book)
    _all_end(record, book, code)
    life.is_abandoned = True
    life.given.clear()
    rests(life)
    book.failed, book.drain_until = "it cannot be ended", None
    book.retry = book.retry_at = None
    record.count("given up")


def _ends(record: Record, book: Book, life: Life, exited: Exited | None, finding: Finding) -> None:
    was_draining, cause = book.drain_until is not None, life.ended_by(exited)
    if life.ready_at is not None:
        ready_s = (life.stopped_serving_at or record.now) - life.ready_at
        if ready_s >= book.entry.restart.stable_s:
            book.in_a_row = 0
    code = exited.exit_code if exited is not None else None
    is_alike = _fails_alike(book, life, code, cause)
    is_first_miss = code == MODEL_MISSING != book.last_code
    book.last_code = code
    _requests_end(record, book, life, finding)
    for ask in book.waiting:
        ask.short_at, ask.is_for_room = None, False
    book.held = min(book.held, need_of(record, book))
    book.life, book.drain_until = None, None
    book.retry, book.retry_at, book.is_after_crash = None, None, False
    if book.wanted is not Wanted.UP:
        _all_end(record, book, cut_off(record, book))
        if book.wanted is Wanted.GONE:
            del record.books[book.name]
        return
    is_permanent = cause is None and life.ready_at is None and code in PERMANENT
    is_restart = life.is_restart if cause is not None else was_draining and life.cause is None
    is_lost = is_permanent and is_first_miss and bool(book.entry.repo)
    if cause is Cause.VERSION:
        _fails(record, book, "version")
    elif cause is Cause.TOO_LARGE and not is_restart:
        _fails(record, book, "too large")
    elif not is_lost and (is_permanent or (is_alike and cause is None)):
        _fails(record, book, "load")
    elif finding.is_broken:
        _fails(record, book, "engine")
    elif is_lost:
        lost = Repository(book.entry.repo, book.entry.revision)
        book.entry = replace(book.entry, download=lost)
    elif is_restart:
        book.clean()
    elif cause in (Cause.ASKED, Cause.SWAP):
        pass
    elif finding.culprit is not None:
        book.is_after_crash = True
    else:
        delays = book.crashed(record.now)
        book.is_after_crash = delays is not None
        if delays != (0.0, 0.0):
            _retries(record, book, delays)


def _retries(
    record: Record, book: Book, delays: tuple[float, float] | None, least_s: float = 0.0
) -> None:
    """Have a model wait for its next start; None if there is none."""
    if delays is None:
        _fails(record, book, "too often")
        return
    earliest_s, latest_s = (max(one, least_s) for one in delays)
    book.retry = record.now + earliest_s, record.now + latest_s
    book.retry_at = book.retry[1]  # at the latest; what has been drawn is announced


def _fails(record: Record, book: Book, why: str) -> None:
    """Enter that a model is FAILED: whatever waits for it ends."""
    book.failed = why
    record.count(f"FAILED: {why}")
    _all_end(record, book, "load_failed")


def _requests_end(record: Record, book: Book, life: Life, finding: Finding) -> None:
    for ask in life.running:
        code = _loss(ask, finding)
        if code:
            record.must[ask] = {code}
            continue
        if finding.is_alone:
            record.tried_again = ask
            record.count("tried again for memory")
        if ask.acceptance is not None:
            ask.is_interrupted, ask.queue_until = True, None
            record.count("interrupted")
        ask.is_again, ask.is_yielding = True, False
        if ask.is_pausing:
            puts_aside(record, book, ask)
        else:
            line_up(record, book, ask)
    for ask in book.waiting:
        if ask.has_begun and not ask.may_resume:
            record.must[ask] = {"worker_crashed"}
        elif finding.culprit is not None and ask.prompt.number == finding.culprit:
            record.must[ask] = {"quarantined"}


def _loss(ask: Ask, finding: Finding) -> str:
    """Return why a request does not outlive its process; empty if it does."""
    if finding.culprit == ask.prompt.number:
        return "quarantined"
    ask.shortages += finding.is_alone
    if finding.is_alone and ask.shortages == MOST_SHORTAGES:
        return "insufficient_memory"
    if ask.acceptance is not None and not ask.may_resume:
        return "worker_crashed"
    if finding.says is Says.NOTHING:
        ask.deaths += 1
        if ask.deaths >= MOST_DEATHS:
            return "worker_crashed"
    return ""


def _fails_alike(book: Book, life: Life, code: int | None, cause: Cause | None) -> bool:
    """True if it failed to load with the error of the attempt right before."""
    error = ""
    if life.ready_at is None and cause is None and life.announced and code not in NOT_ITS_OWN:
        error = f"{code} {re.sub(r'0x[0-9a-f]+|[0-9]+', '#', life.announced)}"
    before, book.last_load_error = book.last_load_error, error
    return error != "" and error == before


# ---------------------------------------------------------------- downloads


@dataclass(slots=True)
class Running:
    """A download that was started, and not ended: what it fetches and how far it has come."""

    repository: Repository
    fraction: float = 0.0
    is_waiting: bool = False


class Downloads:
    """Those that run, by number."""

    def __init__(self) -> None:
        self._running: dict[int, Running] = {}
        self._latest = 0
        self._failed: list[Book] = []
        self.almost_due: set[Repository | None] = set()  # by this event's time, as rounded

    def obeyed(self, action: StartDownload | EndDownload) -> None:
        """Judge that one is started under a new number, or ended."""
        if isinstance(action, EndDownload):
            check("ends no download", action.number in self._running, action)
            del self._running[action.number]
            return
        check("download numbers", action.number > self._latest, action)
        running = [one.repository for one in self._running.values()]
        check("downloaded twice", action.repository not in running, action)
        self._latest = action.number
        self._running[action.number] = Running(action.repository)

    def said(self, record: Record, event: DownloadSaid) -> None:
        running, report = self._running[event.number], event.report
        if isinstance(report, DownloadProgress):
            running.fraction = report.done_bytes / report.total_bytes
            running.is_waiting = report.is_waiting
            return
        for book in [book for book in record.books.values() if book.waits_for_files]:
            if book.entry.download != running.repository:
                continue
            if isinstance(report, DownloadDone):
                launch = replace(book.entry.launch, path=report.folder)
                book.entry = replace(book.entry, launch=launch, download=None)
                book.outages_in_a_row = 0
                record.count("downloaded")
            elif isinstance(report, DownloadFailed):
                self._fails(record, book, report)
        del self._running[event.number]

    def _fails(self, record: Record, book: Book, failed: DownloadFailed) -> None:
        """Wait for what ends by itself, however often; a bug counts as a crash."""
        book.is_after_crash = False
        self._failed.append(book)
        match failed.problem:
            case DownloadProblem.NETWORK | DownloadProblem.RATE_LIMITED:
                _retries(record, book, book.kept_out(), failed.retry_after_s)
            case DownloadProblem.INTERNAL:
                _retries(record, book, book.crashed(record.now), failed.retry_after_s)
            case _:
                _fails(record, book, "download")

    def look(self, record: Record) -> None:
        """Raise unless what models wait for is being fetched, once, and nothing else."""
        books = record.books.values()
        lacked = {book.entry.download for book in books if book.waits_for_files}
        running = {one.repository for one in self._running.values()}
        is_right = lacked - self.almost_due <= running <= lacked
        self.almost_due.clear()
        check("downloads", is_right, f"{running} run, {lacked} are waited for")
        for book in self._failed:  # commands that waited were answered
            check("waits for a failed download", not book.callers, book.name)
        self._failed.clear()

    def check_row(self, book: Book, row: dict[str, Any]) -> None:
        """Compare what the status says of who waits for files, and how far that has come."""
        progress = row["progress"]
        phase = progress["phase"] if progress is not None else ""
        waits = book.waits_for_files
        check("status: download", ("download" in phase) == waits, f"{book.name}: {progress}")
        if waits:
            [one] = [one for one in self._running.values() if one.repository == book.entry.download]
            is_near = one.is_waiting or abs(progress["fraction"] - one.fraction) <= 0.01
            check("status: fraction", is_near, f"{book.name}: {progress}, {one}")


# ---------------------------------------------------------------- starts and signals

STALLS = ("stall", "gil", "blocked", "mute", "waits_on", "load_stalls", "load_stops")
BREAKS = ("stop", "load_stops", "garbage", "link_drops", "row_lost")


def judge_spawn(record: Record, spawn: Spawn) -> None:
    book = record.books[spawn.model]
    check("two processes", book.life is None, spawn.model)
    check("spawned unwanted", book.wanted is Wanted.UP and not book.failed, spawn.model)
    check("spawned without its files", book.entry.download is None, spawn.model)
    check("old launch", spawn.launch == book.entry.launch, spawn.model)
    check("known batching", spawn.known_batching == book.batching, spawn.known_batching)
    if book.retry is not None:
        is_due = record.now >= book.retry[0] - EPSILON_S
        check("back-off too short", is_due, f"{spawn.model}")
        check("earlier than announced", book.retry_at is None, f"{spawn.model}: {book.retry_at}")
        record.count("back-off")
    check_spawn(record, book)


def judge_signal(record: Record, action: SignalWorker) -> None:
    """Judge a signal; a false kill is found by the truth about the process."""
    signal = action.signal
    life = record.life_of(action.model, action.generation)
    check("signal to nobody", life is not None, action)
    assert life is not None
    fault = life.worker.fault.name if life.worker.fault else ""
    asked_at, term_at = life.was_told("exit"), life.was_told(WorkerSignal.TERM)
    dump_at, kill_at = life.was_told(WorkerSignal.DUMP), life.was_told(WorkerSignal.KILL)
    grace_s, now = record.plan.settings.exit_grace_s, record.now + EPSILON_S
    is_hurried = life.hurried_at == record.now
    life.told.append((signal, record.now))
    detail = f"{signal} to {life.model}: {life.cause}, {fault or 'no fault'}"
    match signal:
        case WorkerSignal.DUMP:
            check("false alarm", life.cause is None and fault in STALLS, detail)
            record.stops(life, Cause.STALL)
            record.count("stall found")
        case WorkerSignal.TERM if asked_at is not None:
            check("SIGTERM early", now >= asked_at + grace_s or is_hurried, detail)
        case WorkerSignal.TERM:
            is_due = life.cause in (Cause.ASKED, Cause.VERSION, Cause.TOO_LARGE)
            check("SIGTERM unasked", is_due, detail)
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
            silent_s = record.now - life.progress_at + EPSILON_S
            is_limit = silent_s >= record.books[life.model].entry.load_stall_timeout_s
            record.stops(life, Cause.STALL if is_stall and is_limit else Cause.BROKEN)
            record.count("broken found")


# ---------------------------------------------------------------- what is due

# A beat and what it tells of may be under way for so long, in all.
ON_THE_WAY_S = 3.0
# From the fault to the first signal, beside a limit for a step for what is judged by one.
FOUND_WITHIN_S = {"stall": 1.0, "blocked": 1.0, "waits_on": 1.0, "gil": 6.0, "mute": 30.0,
                  "stop": 5.5, "load_stops": 5.5, "link_drops": 2.0, "garbage": 0.0,
                  "load_stalls": 0.0}  # fmt: skip
BY_STEP = ("stall", "blocked", "waits_on", "gil")


def ticked(record: Record) -> None:
    """Enter whatever was due by the clock."""
    now = record.now + EPSILON_S
    for ask in record.limited:
        if codes := _due(ask, now):
            record.must.setdefault(ask, set()).update(codes)
    for book in list(record.books.values()):
        if book.retry_at is not None and now >= book.retry_at:
            if record.now < book.retry_at:  # another clock has rung a hair before
                record.downloads.almost_due.add(book.entry.download)
            book.retry_at = None  # it waits for its turn now
        life = book.life
        if life is None or life.is_abandoned:
            continue
        kill_at = life.was_told(WorkerSignal.KILL)
        if kill_at is not None and life.cause is not None and now >= kill_at + KILL_LIMIT_S:
            _given_up(record, book, life)
        elif book.drain_until is not None and life.cause is None and now >= book.drain_until:
            _cuts_off(record, book)


def _due(ask: Ask, now: float) -> set[str]:
    codes = set()
    first_until = ask.first_token_until if ask.first_token_at is None else None
    if any(until is not None and now >= until for until in (ask.until, first_until)):
        codes.add("deadline_exceeded")
    is_limited = ask.place is Place.LINE and ask.queue_until is not None
    if is_limited and now >= max(ask.queue_until or 0.0, ask.placed_at):
        codes.add("queue_timeout")
    return codes


def is_almost_due(record: Record, ask: Ask, codes: set[str]) -> bool:
    """True if a limit lies so little ahead of the clock that the next tick is for it."""
    return codes <= {"deadline_exceeded", "queue_timeout"} and not _due(ask, record.now)


def look_at_limits(record: Record) -> None:
    """Raise unless what should have happened by now has."""
    for ask in record.limited:
        if late := _due(ask, record.now - SLACK_S):
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
            _backs_off(record, book, book.retry, row["retry_in_s"])


def _backs_off(record: Record, book: Book, retry: tuple[float, float], retry_in_s: float) -> None:
    """Raise unless the delay is what the oracle has counted, up to half of it taken off."""
    earliest, latest = retry
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
    """Raise unless a model that is wanted is started once nothing is in its way."""
    if book.wanted is not Wanted.UP or book.failed or record.is_shutting_down:
        check("lets requests wait for nothing", not book.waiting, book.name)
        return
    if book.entry.download is not None:
        return  # `downloads.look` says what must happen
    if book.retry is not None and record.now <= book.retry[1] + SLACK_S:
        return
    check("nobody is loaded", not has_turn(record, book) or may_wait(record, book), book.name)


def _works(record: Record, book: Book, life: Life) -> None:
    """Raise unless who waits runs if there is room, and who has nothing to do is unloaded."""
    if not book.serves or not life.is_linked:
        return
    able = startable(record, book) if book.queue else []
    prompts = [*(ask.prompt.number for ask in able), *(number for number, _ in life.held())]
    if able and any(map(book.suspicion.takes_turn, prompts)):
        check("turn missed", life.given, able[0])
    elif able and _may_start(record, book, life, able):
        check("room left", len(life.given) >= book.rows, able[0])
    if book.entry.idle_unload_s and not book.is_busy:
        due_at = max(book.busy_at + book.entry.idle_unload_s, book.entry_since)
        is_late = record.now > due_at + SLACK_S
        check("idle and loaded", not is_late, book.name)


def _may_start(record: Record, book: Book, life: Life, able: list[Ask]) -> bool:
    """True if the first must start; a row may be left to one that has no memory for it yet."""
    if may_have_begun(record, book) or any(has_just_aged(record, ask) for ask in able):
        return False
    urgent = (ask for ask in able if ask.rank == HIGHEST)
    return all(may_return(record, life, ask) for ask in (able[0], *urgent))


def _is_found(record: Record, book: Book, life: Life) -> None:
    """Raise unless a fault is found within its limit, and a process that must end ends."""
    now, fault, name = record.now - SLACK_S, life.worker.fault, book.name
    if life.cause is None:
        check("drain late", book.drain_until is None or now <= book.drain_until, name)
        if fault is None or not life.worker.is_alive or fault.name not in FOUND_WITHIN_S:
            return
        limit_s = FOUND_WITHIN_S[fault.name] + ON_THE_WAY_S
        if fault.name == "load_stalls":
            limit_s += book.entry.load_stall_timeout_s
        if fault.name in BY_STEP:
            limit_s += life.launch.step_timeout_s * 4.0
        check("found late", record.now <= fault.since + limit_s, f"{name}: {fault}")
        return
    if life.pid is None or not life.worker.is_alive:
        return
    grace_s = record.plan.settings.exit_grace_s
    asked_at, term_at = life.was_told("exit"), life.was_told(WorkerSignal.TERM)
    dump_at, kill_at = life.was_told(WorkerSignal.DUMP), life.was_told(WorkerSignal.KILL)
    check("never told", life.told, f"{name}: {life.cause}")
    if kill_at is not None:
        check("given up late", now <= kill_at + KILL_LIMIT_S, name)
        return
    if asked_at is not None and term_at is None:
        check("SIGTERM late", now <= asked_at + grace_s, name)
    if term_at is not None:
        check("SIGKILL late", now <= term_at + grace_s, name)
    if dump_at is not None:
        check("SIGKILL late", now <= dump_at + DUMP_S, name)
