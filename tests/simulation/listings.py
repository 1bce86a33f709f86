"""Whether the answer to `requests` says what the oracle knows of each open request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import shares
from .asks import Ask, Place
from .violation import check

if TYPE_CHECKING:
    from .record import Record

EPSILON_S = 1e-6
ORDER = (Place.GIVEN, Place.PAUSED, Place.LINE)
"""Of a model, in this order."""


def compare(record: Record, client: str | None, value: dict[str, Any]) -> None:
    """All that are open are listed, or those of one account, each once, and the line in order."""
    listed: list[dict[str, Any]] = value["requests"]
    asked = [ask for ask in record.open if client is None or _is_of(ask, client)]
    check("listed: count", len(listed) + value["more"] == len(asked), f"{client}: {value}")
    check("listed: none left out", value["more"] == 0, value)
    known = list(asked)
    for one in listed:
        found = [ask for ask in known if _is_same(ask, one)]
        check("listed: unknown", found, f"{one} of {[str(ask) for ask in known]}")
        known.remove(found[0])
        if len([ask for ask in asked if _is_named(ask, one)]) == 1:
            _compare(record, found[0], one)
    for book in record.books.values():
        of_model = [one for one in listed if one["model"] == book.name]
        places = [one["place"] for one in of_model if one["place"] is not None]
        if client is None:
            check("listed: places", places == list(range(1, len(book.queue) + 1)), of_model)
        check("listed: order of the line", places == sorted(places), of_model)
        ranks = [ORDER.index(_place(one)) for one in of_model]
        check("listed: order", ranks == sorted(ranks), of_model)


def _is_of(ask: Ask, client: str) -> bool:
    """Whether it is of the account that is meant, by its name or by the number of a process."""
    number = ask.account.partition("@")[0].rpartition(" ")[2]
    return client in (ask.account, number)


def _is_named(ask: Ask, one: dict[str, Any]) -> bool:
    return (ask.id, ask.model, ask.account) == (one["id"], one["model"], one["client"])


def _is_same(ask: Ask, one: dict[str, Any]) -> bool:
    """Whether a row may be about this request: some have the same id, model and account."""
    return _is_named(ask, one) and _place(one) is ask.place


def _place(one: dict[str, Any]) -> Place:
    match one["state"]:
        case "waiting":
            return Place.LINE
        case "paused":
            return Place.PAUSED
        case _:
            return Place.GIVEN


def _state(ask: Ask) -> str:
    if ask.place is Place.LINE:
        return "waiting"
    if ask.place is Place.PAUSED:
        return "paused"
    if ask.is_pausing:
        return "pausing"
    return "reading" if ask.gains_since is None else "answering"


def _compare(record: Record, ask: Ask, one: dict[str, Any]) -> None:
    accepted = ask.acceptance
    expected = {
        "state": _state(ask),
        "tokens_sent": ask.tokens,
        "prompt_tokens": None if accepted is None else len(accepted.prompt_tokens) // 4,
        "resumed": ask.resumed,
    }
    said = {name: one[name] for name in expected}
    check("listed: what is said", said == expected, f"{ask}: {said} and not {expected}")
    check("listed: reason", (one["reason"] is None) == (one["place"] is None), one)
    for name, seconds in {"engine_s": ask.engine_s, "age_s": record.now - ask.arrived_at}.items():
        check("listed: seconds", abs(one[name] - seconds) < EPSILON_S, f"{ask}: {one}, {seconds}")
    if one["place"] is not None:
        shares.check_place(record, record.books[ask.model], ask, one["place"])
    share = one["prefill"]
    is_share = share is None or (ask.place is Place.GIVEN and 0.0 <= share <= 1.0)
    check("listed: prefill", is_share, one)
    left_s = one["expected_s"]
    check("listed: expected", left_s is None or left_s >= 0.0, one)
