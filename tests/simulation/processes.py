"""The oracle's account of processes: what is wanted, what deaths lead to, what is due by now."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mlxsup.protocol.client_messages import Load, Restart, Unload
from mlxsup.protocol.download import DownloadDone, DownloadFailed, DownloadProgress, Repository
from mlxsup.protocol.ids import Generation, ModelName
from mlxsup.protocol.message import Message
from mlxsup.supervisor.core.actions import EndDownload, Spawn, StartDownload, WorkerSignal
from mlxsup.supervisor.core.events import DownloadSaid, Exited, Reloaded, SpawnFailed, Tick
from mlxsup.supervisor.core.settings import ModelSettings

from .books import PERMANENT, Ask, Book, Cause, Finding, Life, Place, Says, UpFor, Wanted
from .engine import rests
from .ground import Violation, check
from .memory import (
    check_spawn,
    check_turn,
    forget,
    has_turn,
    may_have_begun,
    may_return,
    may_wait,
    need_of,
)
from .requests import HIGHEST, has_just_aged, model_goes, puts_aside, startable, waits
from .shell import BUGS, OUTAGES

if TYPE_CHECKING:
    from .record import Record


# ---------------------------------------------------------------- wishes


def commanded_model(record: Record, message: Message, connection: bytes) -> None:
    """A command about one model; one that names none, or comes too late, is refused."""
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
            up(record, book, by_user=True)
        case Unload():
            down(record, book, record.plan.settings.drain_timeout_s, by_user=True)
        case Restart(now=is_now):
            book.suspicion.lift()
            restart(record, book, is_now=is_now)


def up(record: Record, book: Book, *, by_user: bool) -> None:
    """A model is wanted."""
    life, before = book.life, book.wanted
    if life is not None and life.is_abandoned:
        return  # refused: never two processes of one model
    book.wanted = Wanted.UP
    if before is not Wanted.UP:
        book.up_for = UpFor.SOMEBODY
    if life is None:
        if before is not Wanted.UP or book.is_resting:
            _starts_afresh(book, is_clean=by_user)
        return
    is_draining = book.drain_until is not None and life.cause is None
    if is_draining and before is not Wanted.UP and life.launch == book.entry.launch:
        book.drain_until = None


def preload(record: Record, book: Book) -> None:
    """A model comes up because the configuration says so."""
    up(record, book, by_user=True)
    book.up_for = UpFor.FILE


def _starts_afresh(book: Book, *, is_clean: bool) -> None:
    book.up_for = UpFor.SOMEBODY
    if is_clean:
        book.clean()
    book.failed, book.retry, book.retry_at, book.is_after_crash = "", None, None, False
    book.is_restarting = False


def down(record: Record, book: Book, drain_s: float, *, by_user: bool) -> None:
    """A model is no longer wanted: what waits ends, what runs may finish for a while."""
    book.wanted, book.is_by_user = Wanted.DOWN, by_user
    book.is_restarting = False
    code = cut_off(record, book)
    model_goes(record, book, code)
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


def restart(record: Record, book: Book, *, is_now: bool) -> None:
    """One new process is wanted."""
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
    elif life.ready_at is None:
        if is_now and life.is_of_restart:
            return  # it joins
        if is_now:
            record.stops(life, Cause.ASKED)
            life.is_restart = True
    elif is_now:
        record.stops(life, Cause.ASKED)
        life.is_restart = True
    elif book.drain_until is None:
        _drains_to_return(record, book)


def _drains_to_return(record: Record, book: Book) -> None:
    """It goes down to come up again: a swap that had begun ends with this drain instead."""
    book.drain_until = record.now + record.plan.settings.drain_timeout_s
    book.swaps_until = None


def shut_down(record: Record, drain_s: float, *, is_now: bool) -> None:
    """The supervisor is to end."""
    record.is_shutting_down = True
    for book in record.books.values():
        life = book.life
        was_stopping = life is not None and life.cause is not None and not life.is_abandoned
        down(record, book, drain_s, by_user=False)
        if life is None or life.is_abandoned or not is_now:
            continue
        if was_stopping:
            life.hurried_at = record.now
        elif life.ready_at is not None:
            cuts_off(record, book)


def cuts_off(record: Record, book: Book) -> None:
    """What still runs when a drain is over ends, unless the model is to come back."""
    life = book.life
    assert life is not None
    if book.wanted is not Wanted.UP:
        for ask in book.waiting:
            record.must.setdefault(ask, set()).add(cut_off(record, book))
        for ask in life.given.values():
            if ask.is_open:
                code = "shutting_down" if record.is_shutting_down else "unloaded"
                record.must.setdefault(ask, set()).add(code)
    record.stops(life, Cause.ASKED)
    life.is_restart = life.is_restart or book.wanted is Wanted.UP


def drained(record: Record, book: Book) -> None:
    """Nothing is left running: the process must exit."""
    life = book.life
    if life is None or book.drain_until is None or life.cause is not None or life.given:
        return
    if book.queue and book.wanted is not Wanted.UP:
        return
    record.stops(life, Cause.ASKED)
    life.is_restart = book.wanted is Wanted.UP


def cut_off(record: Record, book: Book) -> str:
    """The code of what ends because its model is not wanted."""
    if book.wanted is Wanted.GONE:
        return "unknown_model"
    return "shutting_down" if record.is_shutting_down else "unloaded"


def changes_of_reload(record: Record, event: Reloaded) -> dict[str, list[str]]:
    """The names that a reload brings and takes away."""
    old = [book.name for book in record.books.values() if book.wanted is not Wanted.GONE]
    new = [entry.name for entry in event.models]
    return {
        "added": [name for name in new if name not in old],
        "removed": [name for name in old if name not in new],
    }


def reloaded(record: Record, event: Reloaded) -> None:
    """The configuration was read again."""
    if record.is_shutting_down:
        return
    names = {entry.name for entry in event.models}
    for book in list(record.books.values()):
        if book.name not in names and book.wanted is not Wanted.GONE:
            _removed(record, book)
    for entry in event.models:
        known = record.books.get(entry.name)
        if known is not None:
            reconfigured(record, known, entry)
            continue
        book = record.books[entry.name] = Book(entry=entry)
        if entry.preload:
            preload(record, book)


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


def _wanted_by_reload(book: Book) -> None:
    """What comes up now does so for the reload: a restart does not join it."""
    book.wanted, book.up_for = Wanted.UP, UpFor.FILE
    book.is_restarting = False


def reconfigured(record: Record, book: Book, entry: ModelSettings) -> None:
    """An entry counts from now on; a process that was started with another launch is replaced."""
    is_replaced = entry.launch != book.entry.launch or book.wanted is Wanted.GONE
    if entry != book.entry:
        book.suspicion.lift()
        book.clean()
    is_resting = book.is_resting
    book.entry = entry
    life = book.life
    if not is_replaced:
        return
    if life is None:
        if is_resting:
            book.wanted = Wanted.UP
            _starts_afresh(book, is_clean=False)
            book.up_for = UpFor.FILE
    elif life.is_abandoned or life.cause is not None:
        if book.wanted is not Wanted.DOWN:
            _wanted_by_reload(book)
            life.is_restart = True
    elif life.ready_at is None:
        _wanted_by_reload(book)
        record.stops(life, Cause.ASKED)
        life.is_restart = True
    elif book.drain_until is None:
        _wanted_by_reload(book)
        _drains_to_return(record, book)
    elif book.wanted is not Wanted.DOWN:
        _wanted_by_reload(book)


# ---------------------------------------------------------------- deaths

MOST_DEATHS = 3
"""In a row, without a token and without evidence."""
MOST_SHORTAGES = 2
"""Of memory, while a process holds nobody else."""
MODEL_MISSING = 66
CAUSED_ELSEWHERE = (72, 75)
TERMINATED = 143
KILL_LIMIT_S = 10.0


def death_seen(record: Record, event: Exited | SpawnFailed) -> None:
    """The end of a process is seen, or it could not be started."""
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
    says = life.says(event, record.machine_bytes)
    record.count(f"death: {says}")
    if any(ask.is_open for ask in life.given.values()):
        record.count("death under requests")
    finding = book.suspicion.died(says, life.held(), record.now)
    if finding.culprit is not None:
        record.count("quarantine")
    if any(not ask.is_open for ask in life.given.values()):
        record.count("cancel met exit")
    _ends(record, book, life, event, finding)


def given_up(record: Record, book: Book) -> None:
    """SIGKILL has not ended a process within its limit: nobody waits for it any longer (P26)."""
    life = book.life
    assert life is not None
    says = Says.ASKED
    if life.cause is Cause.STALL:
        says = Says.ACCUSES if life.ready_at is not None else Says.NOTHING
    elif life.cause is Cause.BROKEN and not life.is_restart:
        says = Says.NOTHING
    finding = book.suspicion.died(says, life.held(), record.now)
    _requests_end(record, book, life, finding)
    code = "load_failed" if book.wanted is Wanted.UP else cut_off(record, book)
    for ask in book.waiting:
        record.must.setdefault(ask, set()).add(_worded(ask, code))
    life.is_abandoned = True
    life.given.clear()
    rests(life)
    book.failed, book.drain_until = "it cannot be ended", None
    book.retry = book.retry_at = None
    record.count("given up")


def _ends(record: Record, book: Book, life: Life, exited: Exited | None, finding: Finding) -> None:
    ready_s = None
    if life.ready_at is not None:
        ready_s = (life.stopped_serving_at or record.now) - life.ready_at
    is_alike = _fails_alike(book, life, exited)
    is_swap = life.cause is Cause.SWAP
    if ready_s is not None and not is_swap and ready_s >= book.entry.restart.stable_s:
        book.in_a_row = 0
    was_draining = book.drain_until is not None
    code = exited.exit_code if exited is not None else None
    is_first_miss = code == MODEL_MISSING != book.last_code
    book.last_code = code
    _requests_end(record, book, life, finding)
    forget(book)
    book.held = min(book.held, need_of(record, book))
    book.life, book.drain_until = None, None
    book.retry, book.retry_at, book.is_after_crash = None, None, False
    if book.wanted is not Wanted.UP:
        for ask in book.waiting:
            record.must.setdefault(ask, set()).add(cut_off(record, book))
        if book.wanted is Wanted.GONE:
            del record.books[book.name]
        return
    cause = life.ended_by(exited)
    is_permanent = (
        cause is None
        and exited is not None
        and life.ready_at is None
        and exited.exit_code in PERMANENT
    )
    is_restart = life.is_restart if cause is not None else was_draining and life.cause is None
    is_lost = is_permanent and is_first_miss and bool(book.entry.repo)
    if cause is Cause.VERSION:
        fails(record, book, "version")
    elif cause is Cause.TOO_LARGE and not is_restart:
        fails(record, book, "too large")
    elif not is_lost and (is_permanent or (is_alike and cause is None)):
        fails(record, book, "load")
    elif finding.is_broken:
        fails(record, book, "engine")
    elif is_lost:
        lost = Repository(book.entry.repo, book.entry.revision)
        book.entry = replace(book.entry, download=lost)
        record.count("fetched again")
    elif is_restart:
        book.clean()
    elif cause in (Cause.ASKED, Cause.SWAP):
        pass
    elif finding.culprit is not None:
        book.is_after_crash = True
    else:
        _crashes(record, book)


def _crashes(record: Record, book: Book) -> None:
    delays = book.crashed(record.now)
    record.count("crash")
    if delays is None:
        fails(record, book, "too often")
        return
    book.is_after_crash = True
    if delays[1] > 0.0:
        book.retry = record.now + delays[0], record.now + delays[1]
        book.retry_at = book.retry[1]  # at the latest; what has been drawn is announced


def fails(record: Record, book: Book, why: str) -> None:
    """A model is FAILED: whatever waits for it ends."""
    book.failed = why
    record.count(f"FAILED: {why}")
    for ask in book.waiting:
        record.must.setdefault(ask, set()).add(_worded(ask, "load_failed"))


def _worded(ask: Ask, code: str) -> str:
    """An answer that had begun was not waiting for a load: its worker has crashed."""
    is_begun = ask.has_begun and code == "load_failed"
    return "worker_crashed" if is_begun else code


def _requests_end(record: Record, book: Book, life: Life, finding: Finding) -> None:
    for ask in life.given.values():
        if not ask.is_open:
            continue
        code = _loss(book, ask, finding)
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
            continue
        ask.place, ask.placed_at = Place.LINE, record.now
        waits(record, ask)
        book.queue.append(ask)
    for ask in book.waiting:
        if ask.has_begun and not ask.may_resume:
            record.must[ask] = {"worker_crashed"}
        elif finding.culprit is not None and ask.prompt.number == finding.culprit:
            record.must[ask] = {"quarantined"}


def _loss(book: Book, ask: Ask, finding: Finding) -> str:
    """Why a request does not outlive its process; empty if it does."""
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


def _fails_alike(book: Book, life: Life, exited: Exited | None) -> bool:
    """Whether it failed to load with the error of the attempt right before."""
    error = ""
    code = exited.exit_code if exited else None
    is_own = life.ready_at is None and life.ended_by(exited) is None
    if is_own and life.announced and code not in (*CAUSED_ELSEWHERE, TERMINATED):
        error = f"{code} {re.sub(r'0x[0-9a-f]+|[0-9]+', '#', life.announced)}"
    before, book.last_load_error = book.last_load_error, error
    return error != "" and error == before


# ---------------------------------------------------------------- downloads

PERCENT = 0.01


@dataclass(slots=True)
class Running:
    """A download that was started, and not ended.

    Attributes:
        repository: what it fetches.
        fraction: how much of that is there, as it has said.
        is_waiting: whether it waits for another one.
    """

    repository: Repository
    fraction: float = 0.0
    is_waiting: bool = False


def waits_for_files(book: Book) -> bool:
    """Whether a model is wanted, has no process, not even one to come after a delay, and lacks
    files."""
    is_at_rest = bool(book.failed) or book.retry_at is not None
    is_wanted = book.wanted is Wanted.UP and book.life is None and not is_at_rest
    return is_wanted and book.entry.download is not None


class Downloads:
    """Those that run, by number."""

    def __init__(self) -> None:
        self._running: dict[int, Running] = {}
        self._latest = 0
        self._failed: list[Book] = []

    # ------------------------------------------------------------ actions

    def obeyed(self, record: Record, action: StartDownload | EndDownload) -> None:
        """One is started, under a new number, or ended."""
        if isinstance(action, EndDownload):
            check("ends no download", action.number in self._running, action)
            del self._running[action.number]
            record.count("download ended")
            return
        check("download numbers", action.number > self._latest, action)
        running = [one.repository for one in self._running.values()]
        check("downloaded twice", action.repository not in running, action)
        self._latest = action.number
        self._running[action.number] = Running(action.repository)

    # ------------------------------------------------------------ events

    def said(self, record: Record, event: DownloadSaid) -> None:
        """One has reported."""
        running, report = self._running[event.number], event.report
        books = record.books.values()
        waiting = [
            book
            for book in books
            if waits_for_files(book) and book.entry.download == running.repository
        ]
        match report:
            case DownloadProgress():
                running.fraction = report.done_bytes / report.total_bytes
                running.is_waiting = report.is_waiting
                return
            case DownloadDone():
                for book in waiting:
                    launch = replace(book.entry.launch, path=report.folder)
                    book.entry = replace(book.entry, launch=launch, download=None)
                    book.outages_in_a_row = 0
                    record.count("downloaded")
            case DownloadFailed():
                for book in waiting:
                    self._fails(record, book, report)
        del self._running[event.number]

    def _fails(self, record: Record, book: Book, failed: DownloadFailed) -> None:
        """What ends by itself is waited for, however often; a bug counts as a crash. Commands that
        wait are answered now."""
        book.is_after_crash = False
        self._failed.append(book)
        delays_s: tuple[float, float] | None
        if failed.problem in OUTAGES:
            record.count("download that waits for others")
            delays_s = book.kept_out()
        elif failed.problem in BUGS:
            record.count("download to be tried again")
            delays_s = book.crashed(record.now)
        else:
            fails(record, book, "download")
            return
        if delays_s is None:
            fails(record, book, "too often")
            return
        earliest_s, latest_s = (max(one, failed.retry_after_s) for one in delays_s)
        book.retry = record.now + earliest_s, record.now + latest_s
        book.retry_at = book.retry[1]

    # ------------------------------------------------------------ after an event

    def look(self, record: Record) -> None:
        """What models wait for is being fetched, each repository once, and nothing else."""
        books = record.books.values()
        lacked = {book.entry.download for book in books if waits_for_files(book)}
        running = {one.repository for one in self._running.values()}
        check("downloads", running == lacked, f"{running} run, {lacked} are waited for")
        for book in self._failed:
            check("waits for a failed download", not book.callers, book.name)
        self._failed.clear()

    def check_row(self, book: Book, row: dict[str, object]) -> None:
        """The status says who waits for files, and how far that has come."""
        progress = row["progress"]
        assert progress is None or isinstance(progress, dict)
        phase = progress["phase"] if progress is not None else ""
        waits = waits_for_files(book)
        check("status: download", ("download" in phase) == waits, f"{book.name}: {progress}")
        if not waits or progress is None:
            return
        [one] = [one for one in self._running.values() if one.repository == book.entry.download]
        if not one.is_waiting:
            missed = abs(progress["fraction"] - one.fraction)
            check("status: fraction", missed <= PERCENT, f"{book.name}: {progress}, {one}")


# ---------------------------------------------------------------- processes

EPSILON_S = 1e-6
DUMP_S = 0.5
STALLS = ("stall", "gil", "blocked", "mute", "waits_on", "load_stalls", "load_stops")
BREAKS = ("stop", "load_stops", "garbage", "link_drops", "row_lost")


def judge_spawn(record: Record, spawn: Spawn) -> None:
    """A process is started."""
    book = record.books[spawn.model]
    check("two processes", book.life is None, spawn.model)
    check("spawned unwanted", book.wanted is Wanted.UP and not book.failed, spawn.model)
    check("spawned without its files", book.entry.download is None, spawn.model)
    check("old launch", spawn.launch == book.entry.launch, spawn.model)
    check("known batching", spawn.known_batching == book.batching, spawn.known_batching)
    check_spawn(record, book)
    if book.retry is not None:
        earliest, _ = book.retry
        check("back-off too short", record.now >= earliest - EPSILON_S, f"{spawn.model}")
        check("earlier than announced", book.retry_at is None, f"{spawn.model}: {book.retry_at}")
        record.count("back-off")
    check_turn(record, book)


def judge_signal(
    record: Record, model: ModelName, generation: Generation, signal: WorkerSignal
) -> None:
    """A process is signalled: a false kill is found by the truth about it."""
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
            check(
                "SIGTERM unasked",
                life.cause in (Cause.ASKED, Cause.VERSION, Cause.TOO_LARGE),
                detail,
            )
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


# ---------------------------------------------------------------- timely

SLACK_S = 0.05
"""A tick may come so late, and a little more."""
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


def ticked(record: Record) -> None:
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
        if kill_at is not None and life.cause is not None and now >= kill_at + KILL_LIMIT_S:
            given_up(record, book)
            continue
        if book.drain_until is not None and life.cause is None and now >= book.drain_until:
            cuts_off(record, book)


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


def look_at_limits(record: Record) -> None:
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
    is_turn = has_turn(record, book)
    check(
        "nobody is loaded",
        not is_turn or may_wait(record, book),
        book.name,
    )


def _works(record: Record, book: Book, life: Life) -> None:
    """Whoever waits runs if there is room; who has nothing to do is unloaded."""
    if not book.serves or life.unlinked_at is not None:
        return
    able = startable(record, book) if book.queue else []
    prompts = [*(ask.prompt.number for ask in able), *(number for number, _ in life.held())]
    if able and any(map(book.suspicion.takes_turn, prompts)):
        check("turn missed", bool(life.given), able[0])
    elif able and _may_start(record, book, life, able):
        check("room left", len(life.given) >= book.rows, able[0])
    idle_s = book.entry.idle_unload_s or None
    if idle_s is not None and not book.waiting and not life.given:
        check("idle and loaded", record.now <= book.busy_at + idle_s + SLACK_S, book.name)


def _may_start(record: Record, book: Book, life: Life, startable: list[Ask]) -> bool:
    """Whether the first must start; a row that was freed for the highest class may be left to one
    that has no memory for it yet."""
    if may_have_begun(record, book):
        return False
    if any(has_just_aged(record, ask) for ask in startable):
        return False
    urgent = (ask for ask in startable if ask.rank == HIGHEST)
    return all(may_return(record, life, ask) for ask in (startable[0], *urgent))


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
        check("given up late", now <= kill_at + KILL_LIMIT_S + SLACK_S, book.name)


def _drain_ends(record: Record, book: Book) -> None:
    if book.drain_until is not None:
        check("drain late", record.now <= book.drain_until + SLACK_S, book.name)
