"""What commands, reloads and signals ask for, and which requests must end because of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlxsup.protocol.client_messages import Load, Restart, Unload
from mlxsup.protocol.message import Message
from mlxsup.supervisor.core.events import Reloaded
from mlxsup.supervisor.core.settings import ModelSettings

from . import pauses
from .books import Book, Cause, UpFor, Wanted

if TYPE_CHECKING:
    from .record import Record


def command(record: Record, message: Message, connection: bytes) -> None:
    """A command about one model; one that names none, or comes too late, is refused."""
    if record.is_shutting_down or not isinstance(message, Load | Unload | Restart):
        return
    book = record.books.get(message.model)
    if book is None or book.wanted is Wanted.GONE:
        return
    if isinstance(message, Load) and not record.options.asked(record, book, message, connection):
        return
    if isinstance(message, Load | Restart):
        book.callers.add((connection, message.id))
    match message:
        case Load():
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
    pauses.model_goes(record, book, code)
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


# ---------------------------------------------------------------- a reload


def changes(record: Record, event: Reloaded) -> dict[str, list[str]]:
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
    pauses.model_goes(record, book, "unknown_model")
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
