"""The oracle's own account of downloads: what is wanted and not there is fetched, and nothing else.

One that ends well leads to a load, unless nobody wants the model any longer: from then on the rules
for models that wait for a load hold for it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mlxsup.protocol.download import (
    DownloadDone,
    DownloadFailed,
    DownloadProgress,
    Repository,
)
from mlxsup.supervisor.core.actions import EndDownload, StartDownload
from mlxsup.supervisor.core.events import DownloadSaid

from . import deaths
from .books import Book, Wanted
from .hub import BUGS, OUTAGES
from .violation import check

if TYPE_CHECKING:
    from .record import Record

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
            deaths.fails(record, book, "download")
            return
        if delays_s is None:
            deaths.fails(record, book, "too often")
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
