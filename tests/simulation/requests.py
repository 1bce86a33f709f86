"""The oracle's account of requests: admission, order, pauses, rows for higher classes, readers."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from mlxsup.protocol.client_messages import (
    Attach,
    ClientDelta,
    Done,
    Failed,
    Generate,
    PauseRequest,
    Prioritize,
    ResumeRequest,
)
from mlxsup.protocol.states import RowState
from mlxsup.protocol.worker_messages import Render, Rendered
from mlxsup.supervisor.core.settings import ClientSettings

from .books import Ask, Book, Life, Listener, Place, Wanted
from .ground import check

if TYPE_CHECKING:
    from .record import Record

EPSILON_S = 1e-6
# So late a tick may come.
TICK_S = 0.05
CLASSES = ("interactive", "normal", "batch")
HIGHEST, LOWEST = 0, 2

# ---------------------------------------------------------------- accounts and order

# Class; whether it is new; of a new one what its account will have received, of another whether it
# was paused and not interrupted since; number.
Places = tuple[int, int, float, int]


def _terms(record: Record, account: str) -> ClientSettings:
    granted = record.plan.settings.clients
    return granted.get(account) or granted.get("*") or ClientSettings()


def identify(record: Record, ask: Ask, process: str, message: Generate) -> None:
    """Read a request: whose it is, and of which class."""
    name = message.client or ""
    if name in record.plan.settings.clients:
        ask.account = name
    else:
        ask.account = process or f"connection {ask.connection.hex()}"
    ask.rank = CLASSES.index(message.priority or _terms(record, ask.account).priority)


def may_run_more(record: Record, account: str, wanted: int = 1) -> int:
    """Return how many more of an account may run, over all models, if that many want to."""
    most = _terms(record, account).max_running
    running = sum(one.place is Place.GIVEN and one.account == account for one in record.open)
    return min(wanted, max(most - running, 0)) if most else wanted


def startable(record: Record, book: Book) -> list[Ask]:
    """Return those who wait and whom no limit of their account keeps from running, in order."""
    return [ask for ask in _in_order(record, book.queue, book) if may_run_more(record, ask.account)]


def joins(record: Record, book: Book, ask: Ask) -> None:
    """Let an account come to a line, perhaps after an absence."""
    held = book.life.running if book.life else []
    others = {one.account for one in [*book.queue, *held] if one not in record.must}
    if ask.account in others:
        return
    if others:
        floor = min(book.received[account] for account in others)
    else:
        floor = book.received.get(book.latest, 0.0)
    book.received[ask.account] = max(book.received.get(ask.account, floor), floor)


def pays(record: Record, book: Book, ask: Ask, engine_s: float) -> None:
    """Charge an open request for its part of a step."""
    book.received[ask.account] += engine_s / _terms(record, ask.account).weight


def rank_now(record: Record, ask: Ask, late_s: float = EPSILON_S) -> int:
    """Return the class in which a request waits: higher by one each time it waited long enough."""
    aging_s = record.plan.settings.aging_s
    waited_s = ask.waited_s + record.now - ask.waits_since + late_s
    return max(0, ask.rank - int(waited_s / aging_s)) if aging_s else ask.rank


def has_just_aged(record: Record, ask: Ask) -> bool:
    return rank_now(record, ask) != rank_now(record, ask, -TICK_S)


def _in_order(record: Record, asks: list[Ask], book: Book) -> list[Ask]:
    return sorted(asks, key=_places(record, book, asks).__getitem__)


def _places(record: Record, book: Book, queue: list[Ask]) -> dict[Ask, Places]:
    """Return the places of requests as they would start if each cost as much as earlier ones."""
    cost_s = 1.0 if book.cost_s is None else book.cost_s
    taken: Counter[tuple[int, str]] = Counter()
    places: dict[Ask, Places] = {}
    for ask in sorted(queue, key=lambda ask: ask.number):
        rank = rank_now(record, ask)
        if ask.is_again:
            by_wish = ask.is_by_hand or ask.is_for_class or ask.is_for_memory
            was_paused = ask.is_paused and not ask.is_interrupted and by_wish
            places[ask] = (rank, 0, float(was_paused or ask.is_unread), ask.number)
            continue
        before = taken[rank, ask.account]
        taken[rank, ask.account] += 1
        step_s = cost_s / _terms(record, ask.account).weight
        places[ask] = (rank, 1, book.received[ask.account] + before * step_s, ask.number)
    return places


def contenders(record: Record, book: Book) -> list[Ask]:
    """Return who may get the next row: one that was freed for the highest class goes to it."""
    urgent = [a for a in book.queue if a.rank == HIGHEST and may_run_more(record, a.account)]
    return _in_order(record, urgent, book) if book.freed and urgent else startable(record, book)


def dispatched(record: Record, book: Book, ask: Ask, *, is_turn: bool) -> None:
    """Judge who starts; without turns of suspects it must be the first of those that may."""
    check("runs more than its client may", may_run_more(record, ask.account), ask)
    if not is_turn:
        asks = contenders(record, book)
        first = asks[0]
        if book.freed and first.rank == HIGHEST:
            book.freed -= 1
            check("another class got the row", ask.rank == HIGHEST, f"{ask}: {first}")
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
    ask.waited_s += record.now - ask.waits_since
    book.latest = ask.account


def check_place(record: Record, book: Book, ask: Ask, position: int) -> None:
    """Compare a place; who has received as much may be before it or behind.

    So may those who move up at this moment, because the tick that moves them may come later.
    """
    places = _places(record, book, book.queue)
    rising = {other for other in places if has_just_aged(record, other)}
    rank, is_new, received_s, number = places[ask]
    low = (rank, is_new, received_s - EPSILON_S * is_new, number)
    high = (rank + (ask in rising), is_new, received_s + EPSILON_S * is_new, number)
    before = sum(place < low for other, place in places.items() if other not in rising)
    most = sum(place <= high or other in rising for other, place in places.items())
    check("place in line", before + 1 <= position <= most, f"{ask}: {position} of {places}")


def named(record: Record, id: str) -> Ask | None:
    """Return the request that a person means; None if none is called that, or several are."""
    found = [ask for ask in record.open if ask.id == id or f"#{ask.key}" == id]
    return found[0] if len(found) == 1 else None


def prioritized(record: Record, message: Prioritize) -> bool:
    """Give a request another class; return whether it is the only one of that name."""
    ask = named(record, message.request)
    if ask is not None:
        ask.rank = ask.standing = CLASSES.index(message.priority)
        ask.waited_s, ask.waits_since = 0.0, record.now
    return ask is not None


def compare_queue(record: Record, queue: dict[str, Any]) -> None:
    """Compare what the status says of all who wait and run."""
    waiting = Counter(ask.account for ask in record.open if ask.is_waiting)
    check("status: per client", queue["per_client"] == dict(waiting), queue)
    asks = [ask for book in record.books.values() for ask in book.queue]
    for count in range(1, len(CLASSES) + 1):
        # Who moves up just now does so with the next tick.
        least, most = (
            sum(rank_now(record, ask, late_s) < count for ask in asks)
            for late_s in (-TICK_S, EPSILON_S)
        )
        shown = sum(queue["per_class"][name] for name in CLASSES[:count])
        check("status: per class", least <= shown <= most, f"{queue} {least} {most}")
    running = Counter(ask.account for ask in record.open if ask.place is Place.GIVEN)
    shown = {name: one["running"] for name, one in queue["clients"].items() if one["running"]}
    check("status: running", shown == dict(running), f"{queue} {running}")


# ---------------------------------------------------------------- admission


def refusals(record: Record, ask: Ask, message: Generate) -> set[str]:
    """Return the codes with which a request must be refused; empty if it must not be."""
    if record.is_shutting_down:
        return {"shutting_down"}
    book = record.books.get(ask.model)
    if book is None or book.wanted is Wanted.GONE:
        return {"unknown_model"}
    if ask.rank < CLASSES.index(_terms(record, ask.account).max_priority):
        return {"invalid_request"}
    if book.failed:
        return {"model_failed"}
    if book.life is not None and book.wanted is Wanted.DOWN and book.is_by_user:
        return {"unloaded"}
    book.suspicion.forget(record.now)
    if ask.prompt.number in book.suspicion.quarantined:
        return {"quarantined"}
    return {"overloaded"} if _is_full(record, book, ask) else set()


def _is_full(record: Record, book: Book, ask: Ask) -> bool:
    settings = record.plan.settings
    others = [one for one in record.open if one is not ask]
    if sum(map(_held_bytes, others)) + len(ask.prompt.body) > settings.max_queue_bytes:
        return True
    if _can_start(record, book, ask.account):
        return False
    waiting = [one for one in others if one.is_waiting]
    share = max(1, settings.max_queue // len(record.books))
    if len(waiting) >= settings.max_queue and len(book.queue) >= share:
        return True
    mine = sum(one.account == ask.account for one in waiting)
    return mine >= (_terms(record, ask.account).max_queue or settings.max_queue_per_client)


def _held_bytes(ask: Ask) -> int:
    """Return the body, and once it is not needed, what it takes to resume; 4 KiB more if paused."""
    own = 4096 if ask.place is Place.PAUSED else 0
    if ask.acceptance is None:
        return own + len(ask.prompt.body)
    parameters = len(repr(ask.acceptance.parameters))
    return own + len(ask.acceptance.prompt_tokens) + parameters + len(ask.sent)


def _can_start(record: Record, book: Book, account: str) -> bool:
    """True if a request of an account that came now would be dispatched at once."""
    life = book.life
    if not book.serves or life is None or not life.is_linked:
        return False
    if startable(record, book) or not may_run_more(record, account):
        return False
    if any(book.suspicion.takes_turn(number) for number, _ in life.held()):
        return False
    return len(life.given) < book.rows


def set_limits(record: Record, ask: Ask) -> None:
    """Note when the limits of a request that was let in are over."""
    settings, now = record.plan.settings, record.now
    ask.queue_until, ask.first_token_until, ask.until = (
        now + limit_s if limit_s > 0 else None
        for own_s, usual_s in (
            (ask.queue_s, settings.queue_timeout_s),
            (ask.first_token_s, settings.first_token_timeout_s),
            (ask.total_s, 0.0),
        )
        for limit_s in (usual_s if own_s is None else own_s,)
    )
    if (ask.queue_until, ask.first_token_until, ask.until) != (None, None, None):
        record.limited[ask] = None


# ---------------------------------------------------------------- pauses


def commanded(record: Record, connection: bytes, message: PauseRequest | ResumeRequest) -> None:
    """Pause or resume a request by hand; `record.may` notes whether that must succeed."""
    ask = named(record, message.request)
    book = record.books.get(ask.model) if ask is not None else None
    is_good = False
    if ask is not None and book is not None:
        if isinstance(message, ResumeRequest):
            is_good = ask.is_pausing or ask in book.paused
        else:
            launch = book.life.launch if book.life is not None else book.entry.launch
            may_leave = ask.may_resume and not launch.deterministic
            is_good = not ask.is_put_aside and may_leave and book.wanted is Wanted.UP
        if is_good and isinstance(message, PauseRequest):
            _pause(record, book, ask)
        elif is_good and ask.is_pausing:
            ask.is_pausing, ask.is_yielding = False, True
        elif is_good:
            _comes_back(record, book, ask)
    record.may[connection, message.id] = is_good
    record.count(f"{message.TYPE}{'' if is_good else ' refused'}")


def _pause(record: Record, book: Book, ask: Ask) -> None:
    ask.is_by_hand, ask.is_for_class, ask.is_for_memory = True, False, False
    if ask.place is Place.LINE:
        book.queue.remove(ask)
        ask.waited_s += record.now - ask.waits_since
        puts_aside(record, book, ask)
        return
    if not ask.is_yielding and book.life is not None and book.life.serves:
        record.to_leave.add(ask)
    ask.is_pausing, ask.is_yielding = True, False


def puts_aside(record: Record, book: Book, ask: Ask) -> None:
    """Have a request wait outside the line until it is resumed by hand."""
    _begins(record, ask)
    ask.paused_at = record.now if ask.paused_at is None else ask.paused_at
    ask.place, ask.is_pausing = Place.PAUSED, False
    book.paused.append(ask)


def _begins(record: Record, ask: Ask) -> None:
    if ask.has_begun:
        ask.is_paused, ask.queue_until = True, None
        ask.paused_at = record.now if ask.paused_at is None else ask.paused_at


def _comes_back(record: Record, book: Book, ask: Ask) -> None:
    book.paused.remove(ask)
    if not ask.has_begun:
        if ask.queue_until is not None and ask.paused_at is not None:
            ask.queue_until += record.now - ask.paused_at
        ask.ends_pause(record.now)
    joins(record, book, ask)
    _queues_again(record, book, ask)


def _queues_again(record: Record, book: Book, ask: Ask) -> None:
    ask.is_again = ask.acceptance is not None
    line_up(record, book, ask)


def line_up(record: Record, book: Book, ask: Ask) -> None:
    ask.place, ask.placed_at, ask.waits_since = Place.LINE, record.now, record.now
    book.queue.append(ask)


def row_left(record: Record, book: Book, ask: Ask, code: str) -> None:
    """Note that a row has left the batch, but not for good; `code` ends what may not return."""
    was_pausing = ask.is_pausing
    ask.is_yielding = ask.is_pausing = False
    if book.wanted is not Wanted.UP and ask.acceptance is None:
        record.must.setdefault(ask, set()).add(code)
    elif was_pausing and book.wanted is Wanted.UP:
        puts_aside(record, book, ask)
    else:
        _begins(record, ask)
        _queues_again(record, book, ask)


def model_goes(record: Record, book: Book, code: str) -> None:
    """End what waits, except paused answers, which a worker that lives may bring to their end."""
    is_served = book.life is not None and not book.life.is_abandoned and book.life.serves
    for ask in book.waiting:
        if not (is_served and ask.is_paused):
            record.must.setdefault(ask, set()).add(code)
        elif ask.place is Place.PAUSED:
            _comes_back(record, book, ask)


# ---------------------------------------------------------------- rows for the highest class


def _run_s(record: Record, life: Life, ask: Ask) -> float:
    """Return for how long it has gained tokens, beyond what it must before it may be freed."""
    if ask.gains_since is None:
        return float("-inf")
    least_s = record.plan.settings.min_run_s
    if not life.keeps:
        assert ask.acceptance is not None
        prompt = len(ask.acceptance.prompt_tokens) // 4
        repeat_s = ask.prefill_s * (prompt + ask.tokens) / max(prompt - ask.cached, 1)
        least_s = max(least_s, repeat_s)
    return record.now - ask.gains_since - least_s


def asked_to_leave(record: Record, book: Book, life: Life, ask: Ask) -> None:
    """Judge a row that is asked to leave for the highest class, or for its memory."""
    check("freed of a deterministic model", not life.launch.deterministic, ask)
    may_leave = ask.may_resume and not ask.is_leaving
    check("freed a row that must not leave", may_leave and ask.rank == LOWEST, ask)
    check("freed for nobody", any(one.rank == HIGHEST for one in book.queue), ask)
    ask.is_yielding, ask.is_by_hand, ask.is_for_class = True, False, True
    ask.is_for_room = len(life.given) < book.rows
    if not ask.is_for_room:
        check("freed too early", _run_s(record, life, ask) >= -EPSILON_S, ask)
        check("freed too many", _rows_leaving(life) <= _wanting(record, book), ask)
    record.count("made room" if ask.is_for_room else "paused for a class")


def look_at_classes(record: Record) -> None:
    """Raise if the highest class waits for a row while one could be freed."""
    for book in record.books.values():
        life = book.life
        if not book.serves or life is None or not life.is_linked:
            continue
        if book.suspicion.turns_are_taken or life.launch.deterministic:
            continue
        is_ripe = any(
            ask.rank == LOWEST and ask.may_resume and _run_s(record, life, ask) >= TICK_S
            for ask in life.staying
        )
        if is_ripe and len(life.given) >= book.rows:
            is_fair = _wanting(record, book) <= _rows_leaving(life)
            check("no row is freed", is_fair, f"{book.name} {[str(a) for a in book.queue]}")


def _rows_leaving(life: Life) -> int:
    return sum(not ask.is_open or ask.is_leaving for ask in life.given.values())


def _wanting(record: Record, book: Book) -> int:
    """Return how many of the highest class could start if there were rows."""
    waiting = Counter(ask.account for ask in book.queue if ask.rank == HIGHEST)
    return sum(may_run_more(record, account, count) for account, count in waiting.items())


def left_for_class(book: Book, life: Life, ask: Ask, state: RowState) -> None:
    """Note that a row has left the batch, but not for good."""
    if state is RowState.KEPT:
        life.keeps = True
    elif ask.is_for_class and ask.gains_since is not None:
        life.keeps = False
    book.freed += ask.is_for_class


# ---------------------------------------------------------------- readers

MOST_READERS = 8
Key = tuple[bytes, str]


class Joining:
    """Who listens to which request; `sent` holds every listener that any client has sent."""

    def __init__(self) -> None:
        self.sent: dict[Key, Listener] = {}
        self._listening: dict[Key, Listener] = {}
        self._refused: set[Key] = set()

    def of(self, connection: bytes, id: str) -> Listener | None:
        return self._listening.get((connection, id))

    def asked(self, record: Record, connection: bytes, message: Attach) -> None:
        """Let a client join if only one request is called that, and its worker can show it all."""
        key = connection, message.id
        ask = named(record, message.request)
        readers = sum(one.ask is ask for one in self._listening.values())
        if ask is None or readers >= MOST_READERS or (ask.tokens and not _renderer(record, ask)):
            self._refused.add(key)
            record.count("attach refused")
            return
        listener = self._listening[key] = self.sent[key]
        listener.ask = ask
        if ask.tokens:
            listener.asked, listener.is_waiting = _renderer(record, ask), True
            record.count("attached later")

    def cancelled(self, connection: bytes, id: str) -> None:
        if listener := self.of(connection, id):
            listener.has_left = True

    def gone(self, connection: bytes) -> None:
        """Owe nothing to a connection that is closed."""
        for key in [key for key in self._listening if key[0] == connection]:
            del self._listening[key]

    def is_slow(self, connection: bytes) -> None:
        for key, listener in self._listening.items():
            listener.is_slow |= key[0] == connection

    def rendered(self, life: Life, message: Rendered) -> None:
        for listener in self._listening.values():
            if listener.asked is life and listener.number == message.number:
                listener.is_waiting, listener.has_nothing = False, not message.bodies

    def told(self, life: Life, message: Render) -> None:
        """Judge what a worker is asked to render."""
        new = [one for one in self._listening.values() if one.asked is life and one.number is None]
        check("renders for nobody", new, message)
        listener, ask = new[0], new[0].ask
        assert ask is not None
        accepted = listener.accepted()
        asked = message.opening, message.parameters, message.seed, message.fingerprint
        known = accepted.opening, accepted.parameters, accepted.seed, accepted.fingerprint
        check("renders another answer", asked == known, f"{listener}: {asked}, {known}")
        check("renders other tokens", message.delivered == bytes(ask.sent), listener)
        listener.number = message.number

    def sends(self, listener: Listener, delta: ClientDelta) -> None:
        check("reader: sent after its end", not listener.ended, listener)
        check("reader: too early", not listener.is_waiting, listener)
        listener.sent += len(delta.tokens) // 4

    def ends(self, record: Record, listener: Listener, end: Done | Failed) -> None:
        """Judge the end of a reader: that of the request, or of the listening alone."""
        check("reader: ended twice", not listener.ended, listener)
        listener.ended = True
        code, expected = _end_of(end), _codes(record, listener)
        check("reader: ended", code in expected, f"{listener}: {code} and not {expected}")

    def refuses(self, connection: bytes, id: str, code: str) -> None:
        if (connection, id) in self._refused:
            self._refused.remove((connection, id))
            check("attach refused otherwise", code == "invalid_request", code)

    def look(self, record: Record) -> None:
        """Raise unless readers have got what there is, and those that can get no more their end."""
        check("attached all the same", not self._refused, self._refused)
        for key, listener in list(self._listening.items()):
            if listener.ended:
                del self._listening[key]
                continue
            check("reader: no end", not _codes(record, listener), listener)
            if listener.is_waiting:
                check("reader: nobody renders", listener.number is not None, listener)
                continue
            assert listener.ask is not None
            is_level = listener.sent == listener.ask.tokens
            check("reader: behind", is_level, f"{listener}: {listener.sent}")


def _codes(record: Record, listener: Listener) -> set[str]:
    """Return how a reader must end now; empty if it must not."""
    ask, life, codes = listener.ask, listener.asked, set[str]()
    assert ask is not None
    if listener.has_left:
        codes.add("done:cancelled")
    if listener.is_slow:
        codes.add("slow_consumer")
    if listener.has_nothing:
        codes.add("invalid_request")
    if listener.is_waiting and life and record.life_of(life.model, life.generation) is not life:
        codes.add("worker_crashed")
    if not (ask.is_open or listener.is_waiting):  # whose client is gone counts as cancelled
        codes.add(_end_of(ask.end) if ask.end else "done:cancelled")
    return codes


def _end_of(end: Done | Failed) -> str:
    return f"done:{end.finish_reason}" if isinstance(end, Done) else str(end.error.code)


def _renderer(record: Record, ask: Ask) -> Life | None:
    """Return the process that can show what a request has been sent; None if none can now."""
    book = record.books.get(ask.model)
    life = book.life if book is not None else None
    return life if life and life.is_linked and not life.is_abandoned else None
