"""The oracle's account of engine seconds and of leases; all played engines share one device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlxsup.protocol.client_messages import Done, Failed
from mlxsup.protocol.ids import ModelName, RequestKey
from mlxsup.protocol.worker_messages import Lease, Leases, Step

from .books import Ask
from .ground import check
from .requests import CLASSES, pays

if TYPE_CHECKING:
    from .books import Book, Life
    from .record import Record

EPSILON_S = 1e-6
LEASE_S = 4.0
# A tick may come so late, and a little more.
SLACK_S = 0.05

# ---------------------------------------------------------------- costs


class Devices:
    """Which engines have worked since when: an entry for each time at which that changed."""

    def __init__(self) -> None:
        self._changes: list[tuple[float, frozenset[ModelName]]] = []

    def note(self, now: float, engines: frozenset[ModelName]) -> None:
        if not self._changes or self._changes[-1][1] != engines:
            self._changes.append((now, engines))

    def share(self, model: ModelName, since: float, now: float) -> float:
        """Return how much of the device a working engine was given, on average, until now."""
        if now <= since:
            return 1 / len(self._changes[-1][1] | {model})
        given_s, end = 0.0, now
        for began, engines in reversed(self._changes):
            begin = max(began, since)
            if begin < end:
                given_s += (end - begin) / len(engines | {model})
                end = begin
            if began <= since:
                break
        return given_s / (now - since)


def step_costs(record: Record, book: Book, life: Life, message: Step) -> None:
    """Charge a step, none of which has been entered yet."""
    since = record.now if life.works_since is None else life.works_since
    share = record.devices.share(book.name, since, record.now)
    cost_s = message.took_s * share
    if share < 1 - EPSILON_S and message.took_s:
        record.count("engines at once")
    life.works_since = record.now
    decoded = {row.key for row in message.rows[message.between_steps :]}
    computed = sum(row.computed for row in message.prefill)
    decode_s = cost_s if decoded else 0.0
    if decoded and computed:
        decode_s = cost_s * message.decode_s / message.took_s
    for key in decoded:
        _pay(record, book, life, key, decode_s / len(decoded))
    for row in message.prefill:
        ask = life.given.get(row.key)
        places = set(range(row.done - row.computed, row.done))
        known = _known(ask, places)
        token_s = (cost_s - decode_s) / computed
        _pay(record, book, life, row.key, len(places - known) * token_s)
        book.repeated_s += len(known) * token_s
        if ask is not None:
            ask.read |= set(range(row.done))


def _known(ask: Ask | None, places: set[int]) -> set[int]:
    """Return places of a prompt that were read before, in whichever process."""
    if ask is None or not ask.is_open:
        return set()
    return places if ask.tokens else places & ask.read


def _pay(record: Record, book: Book, life: Life, key: RequestKey, seconds: float) -> None:
    book.engine_s += seconds
    ask = life.given.get(key)
    if ask is not None and ask.is_open:
        ask.engine_s += seconds
        pays(record, book, ask, seconds)


def rests(life: Life) -> None:
    """Note that what was reported may have been the last that the engine had to do, or can now."""
    if not life.given or life.turn.only_waits:
        life.works_since = None


def end_costs(ask: Ask, message: Done | Failed) -> None:
    """Compare what a request says at its end that its steps have cost."""
    if isinstance(message, Done):
        said_s = message.usage.engine_s
    else:
        said_s = message.error.detail.get("engine_s", 0.0)
    check("engine seconds", abs(said_s - ask.engine_s) < EPSILON_S, f"{ask}: {said_s}")


def compare_costs(book: Book, row: dict[str, Any]) -> None:
    for name, known_s in (("engine_s", book.engine_s), ("repeated_s", book.repeated_s)):
        is_right = abs(row[name] - known_s) < EPSILON_S
        check("engine seconds of a model", is_right, f"{name} {row[name]}, not {known_s}")


# ---------------------------------------------------------------- leases


def stepped(record: Record, life: Life, message: Step) -> None:
    """Enter what a process has said of its long prompts."""
    turn = life.turn
    if message.returns_lease:
        turn.got_at = None
    turn.reads = message.reads_on
    turn.only_waits = message.only_waits
    if message.wants_lease:
        turn.asked = record.questions = record.questions + 1


def told_lease(record: Record, life: Life, message: Leases | Lease) -> None:
    """Judge what the supervisor tells a process about leases."""
    limit, turn = record.plan.settings.max_parallel_prefills, life.turn
    check("leases without a limit", limit is not None, life.model)
    assert limit is not None
    members = _members(record)
    check("leases of the unready", life in members, life.model)
    if isinstance(message, Leases):
        turn.was_told = message.are_needed
        return
    check("lease unasked", turn.asked is not None, life.model)
    waiting = [_place(other) for other in members if other.turn.asked is not None]
    own = _place(life)
    check("lease out of turn", own == min(waiting), f"{life.model}: {own} of {waiting}")
    holding = _holding(members, record.now + EPSILON_S)
    check("too many leases", len(holding) < limit, [other.model for other in holding])
    turn.asked, turn.got_at = None, record.now
    if turn.only_waits:
        turn.only_waits = False
        life.works_since = record.now
    record.count("lease")


def look_at_leases(record: Record) -> None:
    """Raise if a process waits for a lease that is free, or does not know if one is needed."""
    limit = record.plan.settings.max_parallel_prefills
    if limit is None:
        return
    members = _members(record)
    are_needed = sum(life.turn.takes_part for life in members) > limit
    for life in members:
        check("leases needed", life.turn.was_told == are_needed, f"{life.model}: {are_needed}")
    if any(life.turn.asked is not None for life in members):
        check("lease left", len(_holding(members, record.now - SLACK_S)) >= limit, limit)


def _members(record: Record) -> list[Life]:
    """Return processes that can be given a lease."""
    lives = [book.life for book in record.books.values() if book.life]
    return [life for life in lives if life.is_linked and not life.is_abandoned]


def _holding(members: list[Life], now: float) -> list[Life]:
    """Return those whose lease has not ended by then."""
    got = [life for life in members if life.turn.got_at is not None]
    return [life for life in got if now < (life.turn.got_at or 0.0) + LEASE_S]


def _place(life: Life) -> tuple[int, int]:
    """Return the highest class of those without a token from this process, then the question."""
    held = life.running
    reading = [
        ask for ask in held if ask.first_token_at is None or ask.is_interrupted or ask.is_paused
    ]
    assert life.turn.asked is not None
    return min((ask.standing for ask in reading or held), default=len(CLASSES)), life.turn.asked
