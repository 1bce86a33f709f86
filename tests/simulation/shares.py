"""Who must be next, by the oracle's own account of classes, waits and engine seconds."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

from mlxsup.protocol.client_messages import Generate, Prioritize
from mlxsup.protocol.states import Priority
from mlxsup.supervisor.core.settings import ClientSettings

from .asks import Ask, Place
from .violation import check

if TYPE_CHECKING:
    from .books import Book
    from .record import Record

CLASSES = ("interactive", "normal", "batch")
HIGHEST = 0
NAMES = ("ann", "bob", "eve")
PROCESSES = ("", "process 7@1", "process 8@1")
EPSILON_S = 1e-6
TICK_S = 0.05
"""So late a tick may come."""

Places = tuple[int, int, float, int]
"""What an order is by: class; whether it is new; of a new one what its account will have received,
of another whether it was paused and not interrupted since; number."""


def ask_for(dice: random.Random, ask: Ask) -> None:
    """On whose behalf a client asks, and how urgently."""
    ask.client = dice.choice((None, None, *NAMES))
    ask.priority = dice.choice((None, None, None, *Priority))


# ---------------------------------------------------------------- who, and what it may


def _terms(record: Record, account: str) -> ClientSettings:
    granted = record.plan.settings.clients
    return granted.get(account) or granted.get("*") or ClientSettings()


def identify(record: Record, ask: Ask, process: str, message: Generate) -> None:
    """The supervisor reads a request: whose it is, and of which class."""
    name = message.client or ""
    if name in record.plan.settings.clients:
        ask.account = name
    else:
        ask.account = process or f"connection {ask.connection.hex()}"
    wanted = message.priority or _terms(record, ask.account).priority
    ask.rank = CLASSES.index(wanted)


def is_too_urgent(record: Record, ask: Ask) -> bool:
    """Whether its class is above what its account may use."""
    return ask.rank < CLASSES.index(_terms(record, ask.account).max_priority)


def most_waiting(record: Record, account: str) -> int:
    """How many of an account may wait."""
    return _terms(record, account).max_queue or record.plan.settings.max_queue_per_client


def may_run(record: Record, account: str) -> bool:
    """Whether one more of an account may run, over all models."""
    return may_run_more(record, account, 1) == 1


def may_run_more(record: Record, account: str, wanted: int) -> int:
    """How many more of an account may run, over all models, if that many want to."""
    most = _terms(record, account).max_running
    running = sum(one.place is Place.GIVEN and one.account == account for one in record.open)
    return min(wanted, max(most - running, 0)) if most else wanted


def startable(record: Record, book: Book) -> list[Ask]:
    """Those who wait and whom no limit of their account keeps from running, in order."""
    return [ask for ask in in_order(record, book) if may_run(record, ask.account)]


# ---------------------------------------------------------------- what accounts have received


def joins(record: Record, book: Book, ask: Ask) -> None:
    """An account comes to a line, perhaps after an absence."""
    held = book.life.given.values() if book.life else ()
    present = [*book.queue, *(one for one in held if one.is_open)]
    others = {one.account for one in present if one not in record.must}
    if ask.account in others:
        return
    if others:
        floor = min(book.received[account] for account in others)
    else:
        floor = book.received.get(book.latest, 0.0)
    book.received[ask.account] = max(book.received.get(ask.account, floor), floor)


def pays(record: Record, book: Book, ask: Ask, engine_s: float) -> None:
    """A step has cost an open request this much."""
    book.received[ask.account] += engine_s / _terms(record, ask.account).weight


def finished(book: Book, ask: Ask) -> None:
    """A request has come to its end: the next ones are expected to cost as much."""
    before_s = ask.engine_s if book.cost_s is None else book.cost_s
    book.cost_s = before_s + 0.2 * (ask.engine_s - before_s)


# ---------------------------------------------------------------- waiting


def waits(record: Record, ask: Ask) -> None:
    """A request begins to wait, or to wait again."""
    ask.waits_since = record.now


def has_waited(record: Record, ask: Ask) -> None:
    """A request leaves the line: it is dispatched, or somebody has paused it."""
    ask.waited_s += record.now - ask.waits_since


def rank_now(record: Record, ask: Ask, late_s: float = EPSILON_S) -> int:
    """The class in which a request waits: one higher each time it has waited long enough."""
    aging_s = record.plan.settings.aging_s
    waited_s = ask.waited_s + record.now - ask.waits_since + late_s
    return max(0, ask.rank - int(waited_s / aging_s)) if aging_s else ask.rank


def has_just_aged(record: Record, ask: Ask) -> bool:
    """Whether it has moved up a class so lately that nobody may have noticed."""
    return rank_now(record, ask) != rank_now(record, ask, -TICK_S)


def in_order(record: Record, book: Book) -> list[Ask]:
    """Those who wait for a model, as they would start if each cost as much as earlier ones."""
    places = _places(record, book, book.queue)
    return sorted(book.queue, key=places.__getitem__)


def _places(record: Record, book: Book, queue: list[Ask]) -> dict[Ask, Places]:
    cost_s = 1.0 if book.cost_s is None else book.cost_s
    taken: Counter[tuple[int, str]] = Counter()
    places = {}
    for ask in sorted(queue, key=lambda ask: ask.number):
        rank = rank_now(record, ask)
        if ask.is_again:
            was_paused = ask.is_paused and not ask.is_interrupted
            was_paused = was_paused and (ask.is_by_hand or ask.is_for_class or ask.is_for_memory)
            was_paused = was_paused or ask.is_unread
            places[ask] = (rank, 0, float(was_paused), ask.number)
            continue
        before = taken[rank, ask.account]
        taken[rank, ask.account] += 1
        step_s = cost_s / _terms(record, ask.account).weight
        places[ask] = (rank, 1, book.received[ask.account] + before * step_s, ask.number)
    return places


def contenders(record: Record, book: Book) -> list[Ask]:
    """Who may get the next row, in order: one that was freed in this event for the highest class
    goes to somebody who asked for that class."""
    urgent = [ask for ask in book.queue if ask.rank == HIGHEST and may_run(record, ask.account)]
    if not (book.freed and urgent):
        return startable(record, book)
    places = _places(record, book, urgent)
    return sorted(urgent, key=places.__getitem__)


def dispatched(record: Record, book: Book, ask: Ask, *, is_turn: bool) -> None:
    """A request starts; without turns of suspects it must be the first of those that may."""
    check("runs more than its client may", may_run(record, ask.account), ask)
    if not is_turn:
        asks = contenders(record, book)
        first = asks[0]
        if book.freed and first.rank == HIGHEST:
            book.freed -= 1
            check("another class got the row", ask.rank == HIGHEST, f"{ask}: {first}")
            if startable(record, book)[0].rank != HIGHEST:
                record.count("got its row before those who had moved up")
        else:
            asks = book.queue
        places = _places(record, book, asks)
        own = places[ask]
        is_alike = own[:2] == places[first][:2] and own[1] == 1
        is_first = ask is first or (is_alike and abs(own[2] - places[first][2]) < EPSILON_S)
        check("line order", is_first, f"{ask} {own} before {first} {places[first]}")
        if own[0] < ask.rank:
            record.count("moved up")
    for other in book.queue:
        if other.number < ask.number:
            other.passed_over = 0  # by a newer one, as the order has it
    ask.standing = rank_now(record, ask)
    has_waited(record, ask)
    book.latest = ask.account


def check_place(record: Record, book: Book, ask: Ask, position: int) -> None:
    """A place is that in the order; those who have received as much may be before it or behind."""
    places = _places(record, book, book.queue)
    rank, is_new, received_s, number = places[ask]
    before = sum(
        place < (rank, is_new, received_s - EPSILON_S * is_new, number) for place in places.values()
    )
    last = (rank, is_new, received_s + EPSILON_S * is_new, number)
    most = sum(place <= last for place in places.values())
    check("place in line", before + 1 <= position <= most, f"{ask}: {position} of {places}")


# ---------------------------------------------------------------- by hand


def named(record: Record, id: str) -> Ask | None:
    """The open request that a person means, by its id or as `#12` by the supervisor's number; None
    if none is called that, or several are."""
    found = [ask for ask in record.open if ask.id == id or f"#{ask.key}" == id]
    return found[0] if len(found) == 1 else None


def prioritized(record: Record, message: Prioritize) -> bool:
    """Somebody names a request; returns whether it is the only one of that name."""
    ask = named(record, message.request)
    if ask is None:
        return False
    ask.rank = ask.standing = CLASSES.index(message.priority)
    ask.waited_s, ask.waits_since = 0.0, record.now
    record.count("prioritized")
    return True


def _standing(record: Record, late_s: float) -> Counter[str]:
    waiting = [ask for book in record.books.values() for ask in book.queue]
    return Counter(CLASSES[rank_now(record, ask, late_s)] for ask in waiting)


def compare(record: Record, queue: dict[str, object]) -> None:
    """What the status says of all who wait and run."""
    waiting = Counter(ask.account for ask in record.open if ask.is_waiting)
    check("status: per client", queue["per_client"] == dict(waiting), queue)
    shown = queue["per_class"]
    assert isinstance(shown, dict)
    # Who moves up just now does so with the next tick.
    low, high = (_standing(record, late_s) for late_s in (-TICK_S, EPSILON_S))
    for count in range(1, len(CLASSES) + 1):
        up_to = CLASSES[:count]
        least, most = (sum(standing[name] for name in up_to) for standing in (low, high))
        is_right = least <= sum(shown[name] for name in up_to) <= most
        check("status: per class", is_right, f"{queue} {low} {high}")
    running = Counter(ask.account for ask in record.open if ask.place is Place.GIVEN)
    clients = queue["clients"]
    assert isinstance(clients, dict)
    shown_running = {name: one["running"] for name, one in clients.items() if one["running"]}
    check("status: running", shown_running == dict(running), f"{queue} {running}")
