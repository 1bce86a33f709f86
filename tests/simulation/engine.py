"""The oracle's account of engine seconds and of leases."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mlxsup.protocol.client_messages import Done, Failed
from mlxsup.protocol.ids import ModelName, RequestKey
from mlxsup.protocol.worker_messages import Lease, Leases, Step

from .books import Ask
from .ground import check
from .plan import BACKENDS, backend_of
from .requests import CLASSES, pays

if TYPE_CHECKING:
    from .books import Book, Life
    from .record import Record


# ---------------------------------------------------------------- costs

EPSILON_S = 1e-6


@dataclass(slots=True)
class Devices:
    """Which engines have worked since when: a line for each time at which that changed."""

    changes: list[tuple[float, frozenset[ModelName]]] = field(default_factory=list)

    def note(self, now: float, engines: frozenset[ModelName]) -> None:
        """From now on these engines work."""
        if not self.changes or self.changes[-1][1] != engines:
            self.changes.append((now, engines))

    def share(self, model: ModelName, since: float, now: float) -> float:
        """How much of its device a working engine was given, on average, from then until now."""
        if now <= since:
            return 1 / len(self._rivals(model, self.changes[-1][1]))
        given_s, end = 0.0, now
        for began, engines in reversed(self.changes):
            begin = max(began, since)
            if begin < end:
                given_s += (end - begin) / len(self._rivals(model, engines))
                end = begin
            if began <= since:
                break
        return given_s / (now - since)

    @staticmethod
    def _rivals(model: ModelName, engines: frozenset[ModelName]) -> frozenset[ModelName]:
        """The engines on the same device, this one included."""
        alike = {other for other in engines if backend_of(other) == backend_of(model)}
        return frozenset({model, *alike})


def step_costs(record: Record, book: Book, life: Life, message: Step) -> None:
    """A step was reported, none of which has been entered yet."""
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
        if known:
            record.count("read again")
        token_s = (cost_s - decode_s) / computed
        _pay(record, book, life, row.key, len(places - known) * token_s)
        book.repeated_s += len(known) * token_s
        if ask is not None:
            ask.read |= set(range(row.done))


def _known(ask: Ask | None, places: set[int]) -> set[int]:
    """Places of a prompt that were read before, in whichever process."""
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
    """What was reported may have been the last that the engine had to do, or can now."""
    if not life.given or life.turn.only_waits:
        life.works_since = None


def end_costs(ask: Ask, message: Done | Failed) -> None:
    """A request has ended: it says what its steps have cost."""
    if isinstance(message, Done):
        said_s = message.usage.engine_s
    else:
        said_s = message.error["detail"].get("engine_s", 0.0)
    check("engine seconds", abs(said_s - ask.engine_s) < EPSILON_S, f"{ask}: {said_s}")


def compare_costs(book: Book, row: dict[str, object]) -> None:
    """What the status says of a model."""
    for name, known_s in (("engine_s", book.engine_s), ("repeated_s", book.repeated_s)):
        said_s = row[name]
        assert isinstance(said_s, float)
        is_right = abs(said_s - known_s) < EPSILON_S
        check("engine seconds of a model", is_right, f"{book.name}: {name} {said_s}, not {known_s}")


# ---------------------------------------------------------------- leases

LEASE_S = 4.0
SLACK_S = 0.05
"""A tick may come so late, and a little more."""


def stepped(record: Record, life: Life, message: Step) -> None:
    """A process that serves has said so."""
    turn = life.turn
    if message.returns_lease:
        turn.got_at = None
    turn.reads = message.reads_on
    turn.only_waits = message.only_waits
    if message.wants_lease:
        turn.asked = record.questions = record.questions + 1


def told_lease(record: Record, life: Life, message: Leases | Lease) -> None:
    """The supervisor tells a process something about leases."""
    limit = record.plan.settings.max_parallel_prefills
    check("leases without a limit", limit is not None, life.model)
    assert limit is not None
    members = _members(record, backend_of(life.model))
    check("leases of the unready", life in members, life.model)
    if isinstance(message, Leases):
        life.turn.was_told = message.are_needed
        return
    asked = life.turn.asked
    check("lease unasked", asked is not None, life.model)
    waiting = [_lease_place(other) for other in members if other.turn.asked is not None]
    own = _lease_place(life)
    check("lease out of turn", own == min(waiting), f"{life.model}: {own} of {waiting}")
    if min(waiting, key=lambda place: place[1]) != own:
        record.count("lease by class")
    holding = _holding(members, record.now + EPSILON_S)
    check("too many leases", len(holding) < limit, [other.model for other in holding])
    life.turn.asked, life.turn.got_at = None, record.now
    if life.turn.only_waits:
        life.turn.only_waits = False
        life.works_since = record.now
        record.count("back at work")
    record.count("lease")


def look_at_leases(record: Record) -> None:
    """Nobody waits for a lease that is free, and everybody knows whether one is needed."""
    limit = record.plan.settings.max_parallel_prefills
    if limit is None:
        return
    for backend in BACKENDS:
        members = _members(record, backend)
        are_needed = sum(life.turn.takes_part for life in members) > limit
        for life in members:
            check("leases needed", life.turn.was_told == are_needed, f"{life.model}: {are_needed}")
        if any(life.turn.asked is not None for life in members):
            record.count("waits for a lease")
            check("lease left", len(_holding(members, record.now - SLACK_S)) >= limit, limit)


def _members(record: Record, backend: str) -> list[Life]:
    """Processes that can be given a lease of this device."""
    lives = [book.life for book in record.books.values() if backend_of(book.name) == backend]
    return [
        life
        for life in lives
        if life is not None and life.serves and life.unlinked_at is None and not life.is_abandoned
    ]


def _holding(members: list[Life], now: float) -> list[Life]:
    """Those whose lease has not ended by then."""
    return [
        life
        for life in members
        if life.turn.got_at is not None and now < life.turn.got_at + LEASE_S
    ]


def _lease_place(life: Life) -> tuple[int, int]:
    """What turns go by: the highest class of those that have no token from this process, or of
    all if there are none; then the question."""
    held = [ask for ask in life.given.values() if ask.is_open]
    reading = [
        ask for ask in held if ask.first_token_at is None or ask.is_interrupted or ask.is_paused
    ]
    assert life.turn.asked is not None
    return min((ask.standing for ask in reading or held), default=len(CLASSES)), life.turn.asked
