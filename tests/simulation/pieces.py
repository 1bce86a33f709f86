"""What rows get, piece by piece, and how they leave."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlxsup.protocol.packed_rows import Row
from mlxsup.protocol.states import FinishReason, PauseReason, RowState

from . import giving_way, higher, pauses, room, shares, wishes
from .asks import Ask
from .books import Book, Life, Wanted

if TYPE_CHECKING:
    from .record import Record


def arrived(record: Record, book: Book, life: Life, row: Row) -> None:
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
        is_short = row.pause_reason is PauseReason.MEMORY or giving_way.is_leaving(ask)
        if is_short and book.wanted is Wanted.UP:
            ask.is_unread = not (ask.is_interrupted or ask.is_paused or ask.read or ask.sent)
        if is_short or ask.is_for_room:
            room.left(record, ask)
        if row.pause_reason is PauseReason.MEMORY and not _may_return(life, ask):
            ask.is_stranded = True
        higher.left(book, life, ask, row.paused)
        pauses.row_left(record, book, ask, wishes.cut_off(record, book))
        return
    life.rows_ended += 1
    record.must[ask] = {f"done:{row.finish}"}
    shares.finished(book, ask)
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
