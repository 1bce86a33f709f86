"""Whether a request may be refused at the door, by the oracle's own count."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlxsup.protocol.client_messages import Generate

from . import shares
from .asks import Ask, Place
from .books import Book, Wanted

if TYPE_CHECKING:
    from .record import Record


def refusals(record: Record, ask: Ask, message: Generate) -> set[str]:
    """The codes with which a request must be refused; empty if it must not be."""
    if record.is_shutting_down:
        return {"shutting_down"}
    book = record.books.get(ask.model)
    if book is None or book.wanted is Wanted.GONE:
        return {"unknown_model"}
    if shares.is_too_urgent(record, ask):
        return {"invalid_request"}
    if book.failed:
        return {"model_failed"}
    life = book.life
    if life is not None and book.wanted is Wanted.DOWN and book.is_by_user:
        return {"unloaded"}
    book.suspicion.forget(record.now)
    if ask.prompt.number in book.suspicion.quarantined:
        return {"quarantined"}
    return {"overloaded"} if _is_full(record, book, ask) else set()


def _is_full(record: Record, book: Book, ask: Ask) -> bool:
    settings = record.plan.settings
    others = [one for one in record.open if one is not ask]
    if sum(map(_held, others)) + len(ask.prompt.body) > settings.max_queue_bytes:
        return True
    if can_start(record, book, ask.account):
        return False
    waiting = [one for one in others if one.is_waiting]
    share = max(1, settings.max_queue // len(record.books))
    if len(waiting) >= settings.max_queue and len(book.queue) >= share:
        return True
    mine = sum(one.account == ask.account for one in waiting)
    return mine >= shares.most_waiting(record, ask.account)


def _held(ask: Ask) -> int:
    """Bytes: the body, and once it is no longer needed, what it takes to resume; while somebody has
    paused it, 4 KiB more."""
    own = 4096 if ask.place is Place.PAUSED else 0
    if ask.acceptance is None:
        return own + len(ask.prompt.body)
    parameters = len(repr(ask.acceptance.parameters))
    return own + len(ask.acceptance.prompt_tokens) + parameters + len(ask.sent)


def can_start(record: Record, book: Book, account: str) -> bool:
    """Whether a request of an account that came now would be dispatched at once."""
    life = book.life
    if not book.serves or life is None or life.unlinked_at is not None:
        return False
    if shares.startable(record, book) or not shares.may_run(record, account):
        return False
    if any(book.suspicion.takes_turn(number) for number, _ in life.held()):
        return False
    return len(life.given) < book.rows


def set_limits(record: Record, ask: Ask) -> None:
    """When the limits of a request that was let in are over."""
    settings, now = record.plan.settings, record.now
    ask.queue_until = _until(now, ask.queue_s, settings.queue_timeout_s)
    ask.first_token_until = _until(now, ask.first_token_s, settings.first_token_timeout_s)
    ask.until = _until(now, ask.total_s, 0.0)
    if (ask.queue_until, ask.first_token_until, ask.until) != (None, None, None):
        record.limited[ask] = None


def _until(now: float, asked_s: float | None, usual_s: float) -> float | None:
    limit_s = usual_s if asked_s is None else asked_s
    return now + limit_s if limit_s > 0 else None
