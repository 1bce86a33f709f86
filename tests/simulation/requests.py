"""The oracle's account of requests: who is let in, who is next, who pauses, who listens."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlxsup.protocol.client_messages import ClientDelta, Done, Failed, Generate, Prioritize
from mlxsup.protocol.delta_body import read_body
from mlxsup.protocol.ids import unpack_tokens
from mlxsup.protocol.rendering import Render, Rendered
from mlxsup.protocol.request_messages import Attach, PauseRequest, ResumeRequest
from mlxsup.protocol.states import FinishReason, Priority, RowState
from mlxsup.supervisor.core.settings import ClientSettings

from .books import Ask, Book, Life, Place, Wanted
from .ground import check
from .plan import answer_length, answer_shown, answer_token

if TYPE_CHECKING:
    from .record import Record


# ---------------------------------------------------------------- ripe

TICK_S = 0.05
"""So late a tick may come."""
LOWEST = 2


def ripe(record: Record, life: Life, late_s: float, *, keeps: bool | None = None) -> list[Ask]:
    """Who has run for long enough, give or take a moment; `keeps`: whether its state will be kept,
    if that is known."""
    given = [ask for ask in life.given.values() if ask.is_open and ask.rank == LOWEST]
    staying = [ask for ask in given if not (ask.is_yielding or ask.is_pausing)]
    may_leave = [ask for ask in staying if ask.may_resume]
    return [a for a in may_leave if run_s(record, life, a, keeps=keeps) + late_s >= 0]


def run_s(record: Record, life: Life, ask: Ask, *, keeps: bool | None = None) -> float:
    """For how long it has gained tokens, beyond what it must."""
    if ask.gains_since is None:
        return float("-inf")
    least_s = record.plan.settings.min_run_s
    if not (life.keeps if keeps is None else keeps):
        assert ask.acceptance is not None
        prompt = len(ask.acceptance.prompt_tokens) // 4
        repeat_s = ask.prefill_s * (prompt + ask.tokens) / max(prompt - ask.cached, 1)
        least_s = max(least_s, repeat_s)
    return record.now - ask.gains_since - least_s


# ---------------------------------------------------------------- shares

CLASSES = ("interactive", "normal", "batch")
HIGHEST = 0
ACCOUNTS = ("ann", "bob", "eve")
PROCESSES = ("", "process 7@1", "process 8@1")
EPSILON_S = 1e-6
Places = tuple[int, int, float, int]
"""What an order is by: class; whether it is new; of a new one what its account will have received,
of another whether it was paused and not interrupted since; number."""


def ask_for(dice: random.Random, ask: Ask) -> None:
    """On whose behalf a client asks, and how urgently."""
    ask.client = dice.choice((None, None, *ACCOUNTS))
    ask.priority = dice.choice((None, None, None, *Priority))


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


def compare_queue(record: Record, queue: dict[str, object]) -> None:
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


# ---------------------------------------------------------------- admission


def refusals(record: Record, ask: Ask, message: Generate) -> set[str]:
    """The codes with which a request must be refused; empty if it must not be."""
    if record.is_shutting_down:
        return {"shutting_down"}
    book = record.books.get(ask.model)
    if book is None or book.wanted is Wanted.GONE:
        return {"unknown_model"}
    if is_too_urgent(record, ask):
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
    return mine >= most_waiting(record, ask.account)


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
    if startable(record, book) or not may_run(record, account):
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


# ---------------------------------------------------------------- pauses


def commanded(record: Record, connection: bytes, message: PauseRequest | ResumeRequest) -> None:
    """Somebody pauses or resumes a request; `record.may`: whether that must succeed."""
    ask = named(record, message.request)
    book = record.books.get(ask.model) if ask is not None else None
    is_pause = isinstance(message, PauseRequest)
    is_good = False
    if ask is not None and book is not None:
        is_good = _may_pause(book, ask) if is_pause else ask.is_pausing or ask in book.paused
        if is_good and is_pause:
            _pause(record, book, ask)
        elif is_good:
            _resume(record, book, ask)
    record.may[connection, message.id] = is_good
    record.count(f"{message.TYPE}{'' if is_good else ' refused'}")
    if message.request.startswith("#"):
        record.count("named by number")


def _may_pause(book: Book, ask: Ask) -> bool:
    is_new = not ask.is_pausing and ask.place is not Place.PAUSED
    launch = book.life.launch if book.life is not None else book.entry.launch
    may_leave = ask.may_resume and not launch.deterministic
    return is_new and may_leave and book.wanted is Wanted.UP


def _pause(record: Record, book: Book, ask: Ask) -> None:
    ask.is_by_hand, ask.is_for_class, ask.is_for_memory = True, False, False
    if ask.place is Place.LINE:
        book.queue.remove(ask)
        has_waited(record, ask)
        puts_aside(record, book, ask)
        return
    life = book.life
    if not ask.is_yielding and life is not None and life.serves:
        record.to_leave.add(ask)
    ask.is_pausing, ask.is_yielding = True, False


def _resume(record: Record, book: Book, ask: Ask) -> None:
    if ask.is_pausing:
        ask.is_pausing, ask.is_yielding = False, True
    else:
        _comes_back(record, book, ask)


def puts_aside(record: Record, book: Book, ask: Ask) -> None:
    """A request waits outside the line until somebody resumes it."""
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
    _queues(record, book, ask)


def _queues(record: Record, book: Book, ask: Ask) -> None:
    ask.place, ask.placed_at = Place.LINE, record.now
    ask.is_again = ask.acceptance is not None
    waits(record, ask)
    book.queue.append(ask)


def row_left(record: Record, book: Book, ask: Ask, code: str) -> None:
    """A row has left the batch, but not for good; `code` ends what may not return."""
    was_pausing = ask.is_pausing
    ask.is_yielding = ask.is_pausing = False
    if book.wanted is not Wanted.UP and ask.acceptance is None:
        record.must.setdefault(ask, set()).add(code)
    elif was_pausing and book.wanted is Wanted.UP:
        puts_aside(record, book, ask)
    else:
        _begins(record, ask)
        _queues(record, book, ask)


def model_goes(record: Record, book: Book, code: str) -> None:
    """A model is no longer wanted: what waits ends, except answers that were paused, which a
    worker that lives may bring to their end."""
    life = book.life
    is_served = life is not None and not life.is_abandoned and _serves(life)
    for ask in book.waiting:
        if not (is_served and ask.is_paused):
            record.must.setdefault(ask, set()).add(code)
        elif ask.place is Place.PAUSED:
            _comes_back(record, book, ask)


def look_at_kept(record: Record) -> None:
    """A worker keeps the state of those who return, and of nobody else."""
    for book in record.books.values():
        if book.life is not None and _serves(book.life):
            waiting = {ask.key for ask in book.waiting}
            check("kept for nobody", book.life.kept <= waiting, f"{book.name}: {book.life.kept}")


def _serves(life: Life) -> bool:
    return life.ready_at is not None and life.cause is None


# ---------------------------------------------------------------- higher


def asked_to_leave(record: Record, book: Book, life: Life, ask: Ask) -> None:
    """A row is asked to leave that nobody has paused by hand: somebody of the highest class waits
    for it, or for its memory."""
    check("freed of a deterministic model", not life.launch.deterministic, ask)
    may_leave = ask.may_resume and not (ask.is_yielding or ask.is_pausing)
    check("freed a row that must not leave", may_leave and ask.rank == LOWEST, ask)
    check("freed for nobody", any(one.rank == HIGHEST for one in book.queue), ask)
    ask.is_yielding, ask.is_by_hand, ask.is_for_class = True, False, True
    ask.is_for_room = len(life.given) < book.rows
    if not ask.is_for_room:
        check("freed too early", run_s(record, life, ask) >= -EPSILON_S, ask)
        check("freed too many", _rows_leaving(life) <= _wanting(record, book), ask)
    record.count("made room" if ask.is_for_room else "paused for a class")


def look_at_classes(record: Record) -> None:
    """Nobody of the highest class waits for a row while one could be freed."""
    for book in record.books.values():
        life = book.life
        if not book.serves or life is None or life.unlinked_at is not None:
            continue
        if book.suspicion.turns_are_taken or life.launch.deterministic:
            continue
        if len(life.given) >= book.rows and ripe(record, life, -TICK_S):
            is_fair = _wanting(record, book) <= _rows_leaving(life)
            check("no row is freed", is_fair, f"{book.name} {[str(a) for a in book.queue]}")


def _rows_leaving(life: Life) -> int:
    """Rows that are on their way out."""
    rows = life.given.values()
    return sum(not ask.is_open or ask.is_yielding or ask.is_pausing for ask in rows)


def _wanting(record: Record, book: Book) -> int:
    """How many of the highest class could start if there were rows."""
    count = 0
    for account in {ask.account for ask in book.queue}:
        waiting = sum(ask.rank == HIGHEST and ask.account == account for ask in book.queue)
        count += min(waiting, may_run_more(record, account, waiting))
    return count


def left_for_class(book: Book, life: Life, ask: Ask, state: RowState) -> None:
    """A row has left the batch, but not for good."""
    if state is RowState.KEPT:
        life.keeps = True
    elif ask.is_for_class and ask.gains_since is not None:
        life.keeps = False
    book.freed += ask.is_for_class


# ---------------------------------------------------------------- listeners


@dataclass(slots=True, kw_only=True, eq=False)
class Listener:
    """One that was sent, from its client's words to its end.

    Attributes:
        connection, id: whose, and under which name its stream comes.
        ask: the request that it has joined; None before, and if it was refused.
        asked: the process that renders what was delivered before; None: nothing was.
        number: of that question.
        is_waiting: whether that has not been answered yet.
        has_nothing: the answer was that nothing can be shown.
        has_left, is_slow: its client listens no longer, or does not read.
        sent: tokens that the supervisor has sent to it.
        ended: the supervisor has sent its end.
        tokens, pieces, text, end: what has arrived.
    """

    connection: bytes
    id: str
    ask: Ask | None = None
    asked: Life | None = None
    number: int | None = None
    is_waiting: bool = False
    has_nothing: bool = False
    has_left: bool = False
    is_slow: bool = False
    sent: int = 0
    ended: bool = False
    tokens: int = 0
    pieces: int = 0
    text: str = ""
    end: Done | Failed | None = None

    def __str__(self) -> str:
        return f"{self.connection.decode()}/{self.id} listens to {self.ask}"

    def takes(self, delta: ClientDelta) -> None:
        """A piece arrives: with the tokens of the answer, in order, and their text."""
        check("reader: after the end", self.end is None, self)
        check("reader: sequence", delta.seq == self.pieces, f"{self}: {delta.seq}")
        self.pieces += 1
        assert self.ask is not None
        accepted = self.ask.acceptance
        check("reader: before acceptance", accepted is not None, self)
        assert accepted is not None
        for token in unpack_tokens(delta.tokens):
            expected = answer_token(accepted, self.tokens)
            check("reader: tokens", token == expected, f"{self}: {token} is no. {self.tokens}")
            self.tokens += 1
        self.text += read_body(delta.body).text
        is_end = self.tokens == answer_length(accepted)
        shown = answer_shown(accepted, self.tokens, is_end=is_end)
        check("reader: text", shown.startswith(self.text), f"{self}: {self.text!r} of {shown!r}")

    def ends(self, end: Done | Failed, *, is_slow: bool) -> None:
        """Its end arrives: if that is the end of the answer, all of it has been there."""
        check("reader: two ends", self.end is None, self)
        self.end = end
        if is_slow or not isinstance(end, Done):
            return
        check("reader: pieces counted", end.seq == self.pieces, f"{self}: {end.seq}")
        if end.finish_reason is FinishReason.CANCELLED:
            return
        assert self.ask is not None
        assert self.ask.acceptance is not None
        accepted = self.ask.acceptance
        check("reader: whole answer", self.tokens == answer_length(accepted), self)
        shown = answer_shown(accepted, self.tokens, is_end=True)
        check("reader: whole text", self.text == shown, f"{self}: {self.text!r} of {shown!r}")


# ---------------------------------------------------------------- joining

MOST_READERS = 8
"""Of one request."""
Key = tuple[bytes, str]


class Joining:
    """Who listens to which request.

    Attributes:
        sent: every listener that any client has sent, by its connection and id.
    """

    def __init__(self) -> None:
        self.sent: dict[Key, Listener] = {}
        self._listening: dict[Key, Listener] = {}
        self._refused: set[Key] = set()

    def of(self, connection: bytes, id: str) -> Listener | None:
        """Who listens under this id; None if nobody does."""
        return self._listening.get((connection, id))

    # ------------------------------------------------------------ events

    def asked(self, record: Record, connection: bytes, message: Attach) -> None:
        """Somebody wants to join a request that only one is called, that has not too many readers,
        and whose worker can show what was delivered, if anything was."""
        key = connection, message.id
        ask = named(record, message.request)
        if ask is None or self._is_full(ask) or (ask.tokens and _renderer(record, ask) is None):
            self._refused.add(key)
            record.count("attach refused")
            return
        listener = self._listening[key] = self.sent[key]
        listener.ask = ask
        if ask.tokens:
            listener.asked, listener.is_waiting = _renderer(record, ask), True
        record.count("attached later" if ask.tokens else "attached at the beginning")

    def cancelled(self, connection: bytes, id: str) -> None:
        """Somebody listens no longer, if it does."""
        listener = self.of(connection, id)
        if listener is not None:
            listener.has_left = True

    def gone(self, connection: bytes) -> None:
        """Nothing is owed to a connection that is closed."""
        for key in [key for key in self._listening if key[0] == connection]:
            del self._listening[key]

    def is_slow(self, connection: bytes) -> None:
        """A client does not read what it listens to."""
        for key, listener in self._listening.items():
            listener.is_slow |= key[0] == connection

    def rendered(self, record: Record, life: Life, message: Rendered) -> None:
        """A worker shows what was delivered, or cannot."""
        for listener in self._listening.values():
            if listener.asked is life and listener.number == message.number:
                listener.is_waiting, listener.has_nothing = False, not message.bodies
                record.count("shown to a reader")

    # ------------------------------------------------------------ actions

    def told(self, record: Record, life: Life, message: Render) -> None:
        """A worker is asked to render what a request has been sent."""
        new = [one for one in self._listening.values() if one.asked is life and one.number is None]
        check("renders for nobody", new, message)
        listener, ask = new[0], new[0].ask
        assert ask is not None
        assert ask.acceptance is not None
        accepted = ask.acceptance
        asked = message.opening, message.parameters, message.seed, message.fingerprint
        known = accepted.opening, accepted.parameters, accepted.seed, accepted.fingerprint
        check("renders another answer", asked == known, f"{listener}: {asked}, {known}")
        check("renders other tokens", message.delivered == bytes(ask.sent), listener)
        listener.number = message.number

    def sends(self, listener: Listener, delta: ClientDelta) -> None:
        """A reader is sent a piece."""
        check("reader: sent after its end", not listener.ended, listener)
        check("reader: too early", not listener.is_waiting, listener)
        listener.sent += len(delta.tokens) // 4

    def ends(self, record: Record, listener: Listener, end: Done | Failed) -> None:
        """A reader is sent its end: that of the request, or of the listening alone."""
        check("reader: ended twice", not listener.ended, listener)
        listener.ended = True
        code = f"done:{end.finish_reason}" if isinstance(end, Done) else str(end.error["code"])
        expected = self._codes(record, listener)
        check("reader: ended", code in expected, f"{listener}: {code} and not {expected}")
        record.count(f"reader ended: {code}")

    def refuses(self, connection: bytes, id: str, code: str) -> None:
        """Something fails that is no request: if it was to join one, that cannot be done."""
        if (connection, id) in self._refused:
            self._refused.remove((connection, id))
            check("attach refused otherwise", code == "invalid_request", code)

    # ------------------------------------------------------------ after an event

    def look(self, record: Record) -> None:
        """Everybody has got what there is, and whoever can get no more has its end."""
        check("attached all the same", not self._refused, self._refused)
        for key, listener in list(self._listening.items()):
            if listener.ended:
                del self._listening[key]
                continue
            check("reader: no end", not self._codes(record, listener), listener)
            if listener.is_waiting:
                check("reader: nobody renders", listener.number is not None, listener)
                continue
            assert listener.ask is not None
            is_level = listener.sent == listener.ask.tokens
            check("reader: behind", is_level, f"{listener}: {listener.sent}")

    # ------------------------------------------------------------ inside

    def _is_full(self, ask: Ask) -> bool:
        return sum(one.ask is ask for one in self._listening.values()) >= MOST_READERS

    @staticmethod
    def _codes(record: Record, listener: Listener) -> set[str]:
        """How it must end now; empty if it must not."""
        ask = listener.ask
        assert ask is not None
        codes = set()
        if listener.has_left:
            codes.add("done:cancelled")
        if listener.is_slow:
            codes.add("slow_consumer")
        if listener.has_nothing:
            codes.add("invalid_request")
        if listener.is_waiting and _is_lost(record, listener):
            codes.add("worker_crashed")
        if not (ask.is_open or listener.is_waiting):
            codes.add(_code(ask))
        return codes


def _code(ask: Ask) -> str:
    """How a request has ended; one whose client is gone counts as cancelled."""
    if ask.end is None:
        return "done:cancelled"
    return f"done:{ask.end.finish_reason}" if isinstance(ask.end, Done) else ask.code


def _renderer(record: Record, ask: Ask) -> Life | None:
    """The process that can show what a request has been sent; None if none can now."""
    book = record.books.get(ask.model)
    life = book.life if book is not None else None
    if life is None or not life.serves or life.is_abandoned or life.unlinked_at is not None:
        return None
    return life


def _is_lost(record: Record, listener: Listener) -> bool:
    """Whether the process that was asked is gone."""
    life = listener.asked
    assert life is not None
    return record.life_of(life.model, life.generation) is not life
