"""The oracle's account of memory: budgets, loads, evictions, swaps, rows, spare workers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mlxsup.protocol.cache_cost import GROWTH_TOKENS, cache_bytes, joining_bytes
from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.states import Priority, State, Why
from mlxsup.protocol.worker_messages import Ready, SetBudget
from mlxsup.supervisor.core.events import Exited, Sampled

from .books import Ask, Book, Cause, Life, UpFor, Wanted
from .ground import check
from .requests import may_run

if TYPE_CHECKING:
    from .record import Record


# ---------------------------------------------------------------- room

SPARE_SHARE = 10
"""A tenth must stay free if a row returns while others run."""
GIVES_AGAIN_AFTER_S = 10.0
"""Sooner, it is not asked to give back what it holds for speed alone."""


def fixed_of(record: Record, book: Book) -> int:
    """What a process takes without rows."""
    return record.plan.needs[book.name] - record.plan.row_bytes


def reserved_for(record: Record, book: Book, life: Life) -> int:
    """What is reserved for a process that was told a budget."""
    reported = max(life.footprint, life.reported)
    least = record.plan.needs[book.name] if book.entry.pinned else 0
    return max(fixed_of(record, book) + life.most_bytes, reported, least)


def raise_of(record: Record, book: Book) -> int:
    """How much more than that may be reserved, because processes of the model ran out of memory: it
    gives way to rows, which nobody can see from outside."""
    life = book.life
    if life is None or not has_budget(life):
        return 0
    return life.granted - record.plan.needs[book.name]


def has_budget(life: Life) -> bool:
    """Whether its worker keeps to a budget, and anybody listens to it."""
    return bool(life.budgets) and not life.is_abandoned


def budget_kept(record: Record, book: Book, life: Life, number: int) -> None:
    """A worker says which budget it keeps to; earlier ones no longer count."""
    if not life.budgets or number != life.budgets[-1].number:
        return
    is_news = len(life.budgets) > 1 or life.is_giving_back
    life.says_it_gave_back |= life.is_giving_back
    life.budgets, life.is_giving_back = life.budgets[-1:], False
    if is_news:
        book.held = reserved_for(record, book, life)


def is_lowering(life: Life) -> bool:
    """Whether its worker was told to take less, and has not said yet that it does."""
    return has_budget(life) and (len(life.budgets) > 1 or life.is_giving_back)


def row_memory_measured(record: Record, life: Life) -> None:
    """What it holds now is what it holds after it gave back, if it has said that it did."""
    if life.says_it_gave_back:
        life.says_it_gave_back, life.gave_back_at = False, record.now


def needs_what_it_holds(record: Record, life: Life) -> bool:
    """Whether it has only just given back whatever it does not need."""
    is_asked = life.is_giving_back or life.says_it_gave_back
    return not is_asked and record.now < life.gave_back_at + GIVES_AGAIN_AFTER_S


def least_of(record: Record, book: Book, held: int) -> int:
    """What is left of what is reserved for a process once it has given back what its rows do not
    need, each with a step of growth, if that gives back nothing that is measured; without a budget,
    that is all of it."""
    life = book.life
    if life is None or not has_budget(life) or not life.serves:
        return held
    return min(held, max(needed_of(record, book, life), life.footprint, life.reported))


def needed_of(record: Record, book: Book, life: Life) -> int:
    """What a process and its rows need, each row with a step of growth."""
    asks = staying(life)
    longest = max(map(length_of, asks), default=0) + GROWTH_TOKENS
    rows = cache_bytes(record.plan.layers, rows=len(asks), longest=longest)
    return fixed_of(record, book) + max(rows, record.plan.row_bytes)


def held_now(book: Book, life: Life) -> int:
    """What it holds of the machine's memory, as far as that is measured."""
    if not has_budget(life):
        return book.held
    is_measured = life.footprint > 0 and life.cause is None
    return max(life.footprint, life.reported) if is_measured else book.held


def length_of(ask: Ask) -> int:
    """Tokens of its prompt, if that is known, and of its answer."""
    prompt = len(ask.acceptance.prompt_tokens) // 4 if ask.acceptance else 0
    return prompt + ask.tokens


def taken_bytes(record: Record, asks: list[Ask]) -> int:
    """What rows take, as far as their lengths are known."""
    longest = max(map(length_of, asks), default=0)
    return cache_bytes(record.plan.layers, rows=len(asks), longest=longest)


def left_for_memory(record: Record, ask: Ask) -> None:
    """The row of an open request has left because there was no room for it."""
    record.left_short.append(ask)
    if not (ask.is_yielding or ask.is_pausing):
        ask.is_for_memory, ask.is_for_class, ask.is_by_hand = True, False, False
    record.count("left for want of memory")


def note_left(record: Record, life: Life) -> None:
    """Of this step everything is known: who has left waits for rows that end after it."""
    for ask in record.left_short:
        ask.short_at = life.rows_ended
    record.left_short.clear()


def may_return(record: Record, life: Life, ask: Ask) -> bool:
    """Whether one whose row has left for want of memory may have one again."""
    if ask.short_at is None or not life.budgets:
        return True
    others = running(life)
    if not others or life.rows_ended > ask.short_at:
        return True
    return fits_beside(record, life, ask, others)


def fits_beside(record: Record, life: Life, ask: Ask, others: list[Ask]) -> bool:
    """Whether there is room for a row next to these with some to spare, or for it alone."""
    size = life.budgets[-1].rows_bytes
    lengths = [length_of(ask), *map(length_of, others)]
    spare = size // SPARE_SHARE if others else 0
    return joining_bytes(record.plan.layers, lengths) <= size - spare


def returns_to_memory(record: Record, book: Book, life: Life, ask: Ask) -> None:
    """A request is dispatched."""
    if ask.short_at is not None:
        check("returns without room", may_return(record, life, ask), f"{ask} of {book.name}")
        record.count("returned to memory")
    ask.short_at, ask.is_for_room = None, False


def forget(book: Book) -> None:
    """The process is gone, and whatever was short there."""
    for ask in book.waiting:
        ask.short_at, ask.is_for_room = None, False


def staying(life: Life) -> list[Ask]:
    """Those that have not been asked to leave for want of memory."""
    return [ask for ask in running(life) if not (ask.is_yielding and ask.is_for_memory)]


def running(life: Life) -> list[Ask]:
    """Its rows that nobody has taken out."""
    return [ask for ask in life.given.values() if ask.is_open]


# ---------------------------------------------------------------- estimates

OUT_OF_MEMORY = 75
SHORT_TOKENS = 256


def need_of(record: Record, book: Book) -> int:
    """What a model needs: the limit of its entry, or what it was appraised at and raised by."""
    limit = book.entry.launch.memory_limit_bytes
    return limit or record.plan.needs[book.name] + raised(record, book)


def is_too_large(record: Record, book: Book, said: Ready) -> bool:
    """Whether a model that says READY leaves no room in its entry's limit for a short request. What
    a worker does not measure counts as appraised, and without a budget nothing is."""
    limit, plan = book.entry.launch.memory_limit_bytes, record.plan
    if limit is None or plan.budget_bytes is None:
        return False
    own = said.own_bytes
    if own is None:
        own = plan.needs[book.name] - plan.row_bytes - plan.weights(book.name)
    row = cache_bytes(said.cache_layers, rows=1, longest=SHORT_TOKENS)
    return limit < said.active_bytes + own + row


def raised(record: Record, book: Book) -> int:
    """As much of its raise as fits into the budget next to what is pinned."""
    if book.entry.launch.memory_limit_bytes:
        return 0
    known = record.raised.get(book.name, 0)
    return min(known, _room(record, book)) if known else 0


def is_raised(record: Record, model: ModelName, raised_bytes: int) -> None:
    """Judge that a model needs more from now on: its process has run out of memory just now."""
    event = record.event
    is_short = isinstance(event, Exited) and event == replace(
        event, model=model, exit_code=OUT_OF_MEMORY
    )
    is_more = raised_bytes > record.raised.get(model, 0)
    check("raised for nothing", is_short and is_more, f"{model}: {event}")
    record.raised[model] = raised_bytes
    record.count("estimate raised")


def _room(record: Record, book: Book) -> int:
    """How far it may be raised."""
    budget = record.plan.budget_bytes
    assert budget is not None, "nothing is raised without one"
    needs = record.plan.needs
    known = [other for other in record.books.values() if other.name in record.appraised]
    others = [other for other in known if other is not book]
    pinned = [other for other in others if _is_pinned(other)]
    assert len(pinned) <= 1, "two pinned models would share what is left"
    if not _is_pinned(book):
        taken = sum(need_of(record, other) for other in pinned)
        return max(0, budget - taken - needs[book.name])
    left = budget - needs[book.name]
    limits = {other.name: other.entry.launch.memory_limit_bytes for other in others}
    sizes = [limits[other.name] or needs[other.name] for other in others]
    return left - max((size for size in sizes if size <= left), default=0)


def _is_pinned(book: Book) -> bool:
    return book.entry.pinned and book.wanted is not Wanted.GONE


# ---------------------------------------------------------------- loads


def check_turn(record: Record, book: Book) -> None:
    """A model is being loaded: it may have to wait for others, but after a crash only for those
    that crashed, too."""
    check("loads side by side", has_turn(record, book), f"{book.name}: {_loading(record)}")
    if _loading(record):
        record.count("loaded side by side")


def has_turn(record: Record, book: Book) -> bool:
    """Whether a load of this model would not have to wait for others."""
    loading = _loading(record)
    after_crash = [life for life in loading if life.is_after_crash]
    in_the_way = after_crash if book.is_after_crash else loading
    return len(in_the_way) < record.plan.settings.parallel_loads


def is_loading(book: Book) -> bool:
    """Whether a process of this model is on its way up, or was ended on it and is still there."""
    life = book.life
    return life is not None and life.ready_at is None and not life.is_abandoned


def _loading(record: Record) -> list[Life]:
    return [book.life for book in record.books.values() if book.life and is_loading(book)]


# ---------------------------------------------------------------- pressure

GIVES_WAY_S = 1.5
"""Memory that has been short for so long has found something that gives way, if anything can."""
ASKED_S = 0.9
"""For so long nobody is evicted because memory is short: a worker may be giving some back."""
ASKED_AGAIN_S = 10.0
COMES_BACK_S = 23.0
"""The budget is whole after so long with more room than that."""
CALM_FACTOR = 1.1


@dataclass(slots=True)
class Shortage:
    """What the measurements of a run said.

    Attributes:
        since: since when memory has been short; None: it is not.
        calm_since: since when there has been room for the whole budget and more.
        room: what models may hold by the latest measurement, at most.
        is_known: whether it is measured at all.
    """

    since: float | None = None
    calm_since: float | None = 0.0
    room: float = math.inf
    is_known: bool = False


def sampled(record: Record, event: Sampled) -> None:
    """The memory of the machine was measured, and what processes hold was entered."""
    reading, shortage, whole = event.reading, record.shortage, record.plan.budget_bytes
    if reading is None or whole is None:
        return
    held = sum(held_now(book, book.life) for book in record.books.values() if book.life)
    shortage.is_known = True
    shortage.room = held + reading.free_bytes
    if reading.free_bytes >= 0:
        shortage.since = None
    elif shortage.since is None:
        shortage.since = record.now
        record.count("memory short")
    if shortage.room < CALM_FACTOR * whole:
        shortage.calm_since = None
    elif shortage.calm_since is None:
        shortage.calm_since = record.now


def is_whole(record: Record) -> bool:
    """Whether nothing may be left of a shortage."""
    shortage = record.shortage
    if not shortage.is_known or record.plan.budget_bytes is None:
        return True
    since = shortage.calm_since
    return since is not None and record.now >= since + COMES_BACK_S


def is_over(record: Record) -> bool:
    """Whether models must give back memory: others lack it, or more is held than the budget."""
    budget = record.plan.budget_bytes
    if budget is None:
        return False
    held = [max(one.held if _keeps(one) else 0, _least(record, one)) for one in _books(record)]
    raised = [raise_of(record, one) for one in _books(record)]
    return record.shortage.since is not None or sum(held) + sum(raised) > budget


def asked_to_give_back(record: Record, life: Life) -> None:
    """A worker is asked to give back what it keeps for reuse."""
    is_for_another = record.tried_again is not None
    check("gives back for nothing", is_for_another or is_over(record), life.model)
    check("gives back unready", life.serves, life.model)
    is_again = record.now < life.asked_back_at + ASKED_AGAIN_S
    check("gives back again", is_for_another or not is_again, life.model)
    life.asked_back_at = record.now
    record.count("asked to give back")


def check_patience(record: Record) -> None:
    """A model is evicted only because memory is short: no worker may still be giving some back."""
    is_too_early = record.shortage.is_known and is_anybody_giving_back(record)
    check("evicted too early", not is_too_early, record.now)


def is_anybody_giving_back(record: Record) -> bool:
    """Whether a worker may still be giving back what it was asked for."""
    lives = [book.life for book in _books(record) if book.life]
    return any(record.now < life.asked_back_at + ASKED_S for life in lives)


def check_idle(record: Record, name: ModelName) -> None:
    """Something that is busy has to go because memory is short: nobody else is idle."""
    idle = [one.name for one in _books(record) if one.name != name and _may_be_evicted(one)]
    check("busy before idle", not idle, f"{name}, {idle}")


def check_others(record: Record) -> None:
    """If a request is tried again that ran out of memory alone, all others were asked at once."""
    ask = record.tried_again
    if ask is None or not ask.is_open:
        return
    for book in _books(record):
        if book.serves and book.name != ask.model:
            assert book.life is not None
            check("did not give back", book.life.asked_back_at == record.now, book.name)


def swapped(record: Record, book: Book) -> None:
    """A busy model has to go only because memory is short."""
    settings = record.plan.settings
    check("swapped though that is off", settings.swap, book.name)
    check_patience(record)
    stay = [one for one in _books(record) if one is not book]
    check("nobody serves", any(one.serves for one in stay), book.name)
    check_idle(record, book.name)
    record.count("swapped for a shortage")


def look_at_shortage(record: Record) -> None:
    """After each event: if memory has been short for a while, and nobody is just giving some back,
    nobody is idle who may go."""
    since = record.shortage.since
    if since is None or record.now < since + GIVES_WAY_S or not isinstance(record.event, Sampled):
        return
    if record.is_shutting_down or any(_goes(book) for book in _books(record)):
        return
    if is_anybody_giving_back(record):
        return
    for book in _books(record):
        check("nothing gives way", not _may_be_evicted(book), f"{book.name}: short since {since}")


def compare_shortage(record: Record, memory: dict[str, object]) -> None:
    """The status says what is left of the budget."""
    budget, left = record.plan.budget_bytes, memory["effective_budget_bytes"]
    if budget is None:
        return
    assert isinstance(left, int)
    check("status: budget", memory["budget_bytes"] == budget, memory)
    check("status: left", 0 <= left <= min(budget, max(record.shortage.room, 0)), memory)
    check("status: comes back", left == budget or not is_whole(record), memory)
    check("status: shortage", bool(memory["shortage"]) == (left < budget), memory)


def _books(record: Record) -> list[Book]:
    return list(record.books.values())


def _least(record: Record, book: Book) -> int:
    return need_of(record, book) if book.entry.pinned else 0


def _keeps(book: Book) -> bool:
    return book.life is not None or book.wanted is Wanted.UP


def _goes(book: Book) -> bool:
    life = book.life
    if life is None or life.is_abandoned:
        return False
    return life.cause is not None or book.drain_until is not None


def _may_be_evicted(book: Book) -> bool:
    life = book.life
    is_busy = life is None or bool(book.waiting or life.given)
    return book.serves and not is_busy and not book.entry.pinned


# ---------------------------------------------------------------- memory

EPSILON_S = 1e-6
RIPE_SLACK_S = 0.1
RESIDENCY_LOADS = 3.0
OUTCOMES = {"loaded", "downloads", "fits", "evicts", "swaps", "waits"}


def measured(record: Record, book: Book, life: Life) -> None:
    """What its process was measured at counts, if it is more than what was reserved; less than
    before, if it was asked to give some back, and never less than it was started with."""
    if has_budget(life):
        book.held = reserved_for(record, book, life)
        return
    reported = 0 if life.is_abandoned else life.reported
    may_shrink = life.serves and record.now < life.asked_back_at + ASKED_AGAIN_S
    least = life.granted if may_shrink else book.held
    book.held = max(least, life.footprint, reported)


def held_by_others(record: Record, book: Book) -> int:
    """What all other processes hold, and what is kept for pinned models without one."""
    return sum(held_by(record, other) for other in record.books.values() if other is not book)


def held_by_all(record: Record) -> int:
    """What all processes hold, and what is kept for pinned models."""
    return sum(held_by(record, book) for book in record.books.values())


def held_by(record: Record, book: Book) -> int:
    """What its process holds, or what is kept for it if it is pinned."""
    least = need_of(record, book) if book.entry.pinned else 0
    return max(book.held if book.life is not None else 0, least)


def least_by(record: Record, book: Book) -> int:
    """What must stay reserved for a model once it has given back what it does not need."""
    return least_of(record, book, held_by(record, book))


def waits(book: Book) -> bool:
    """Whether a model is wanted and has no process, not even one to come after a delay, and lacks
    no files."""
    is_at_rest = bool(book.failed) or book.retry_at is not None
    is_wanted = book.wanted is Wanted.UP and book.life is None and not is_at_rest
    return is_wanted and book.entry.download is None


def is_wanted_by_somebody(book: Book) -> bool:
    """Whether anybody waits for its load."""
    return bool(book.queue or book.callers)


def check_spawn(record: Record, book: Book) -> None:
    """A model is being loaded: with it, everybody must be within the budget."""
    budget = record.plan.budget_bytes
    if budget is not None:
        total = held_by_others(record, book) + need_of(record, book)
        check("over the budget", total <= budget, f"{book.name}: {total} of {budget}")
        most = record.shortage.room
        check("over the room", total <= most, f"{book.name}: {total} of {most}")


def refuse(record: Record) -> None:
    """Who waits for what can never fit, whatever goes, must be answered in this event."""
    budget = record.plan.budget_bytes
    if budget is None or record.is_shutting_down:
        return
    for book in record.books.values():
        if not waits(book) or not is_wanted_by_somebody(book):
            continue
        fixed = sum(
            _kept_by(record, other)
            for other in record.books.values()
            if other is not book and _is_fixed(other)
        )
        if fixed + need_of(record, book) <= budget:
            continue
        for ask in book.waiting:
            record.must.setdefault(ask, set()).add("insufficient_memory")
        book.callers.clear()
        record.count("refused for memory")
        if not book.entry.preload or book.up_for is not UpFor.FILE:
            book.wanted, book.is_by_user, book.is_restarting = Wanted.DOWN, False, False


def _kept_by(record: Record, book: Book) -> int:
    """What a model keeps whatever is asked for, and whoever ends: all that it holds if its process
    cannot be ended, or serves rows that have no budget; otherwise what a pinned one needs, or what
    is left of it when it has just given back and does nothing."""
    life = book.life
    if life is not None and life.is_abandoned:
        return held_by(record, book)
    if life is None or not book.serves or book.drain_until is not None:
        return need_of(record, book)
    if not record.plan.layers_of(life.launch):
        return held_by(record, book)
    is_idle = not (book.waiting or life.given)
    has_given_back = life.gave_back_at > book.busy_at and needs_what_it_holds(record, life)
    return least_by(record, book) if is_idle and has_given_back else need_of(record, book)


def forget_turns(record: Record) -> None:
    """Who has made room is not wanted any longer once nobody waits for it."""
    for book in record.books.values():
        is_next = waits(book) and book.up_for is UpFor.NEXT_TURN
        if is_next and not (is_wanted_by_somebody(book) or book.paused):
            book.wanted, book.is_by_user, book.is_restarting = Wanted.DOWN, False, False
            record.count("stopped after a swap")


def _is_fixed(book: Book) -> bool:
    if book.life is not None and book.life.is_abandoned:
        return True
    return book.entry.pinned and book.wanted is not Wanted.GONE


def may_wait(record: Record, book: Book) -> bool:
    """Whether a model that is wanted may be without a process although nothing else loads."""
    budget = record.plan.budget_bytes
    if budget is None:
        return False
    others = [other for other in record.books.values() if other is not book]
    if not is_whole(record):
        return True
    if any(_is_leaving(other) for other in others):
        return True  # what is being freed may be for another
    if any(other.life and is_lowering(other.life) for other in others):
        return True
    taken = sum(least_by(record, other) for other in others) + need_of(record, book)
    taken += sum(raise_of(record, other) for other in others)
    for other in others:
        may_load = other.wanted is Wanted.UP and other.entry.download is None
        if other.life is None and may_load and not other.failed:
            taken += need_of(record, other)
    if is_wanted_by_somebody(book):
        ripe = [other for other in others if is_ripe(record, other, -RIPE_SLACK_S)]
        taken -= sum(least_by(record, other) for other in ripe)
    return taken > budget


def _is_leaving(book: Book) -> bool:
    life = book.life
    if life is None or life.is_abandoned:
        return False
    is_going = book.drain_until is not None or book.swaps_until is not None
    return life.cause is not None or is_going


def check_eviction(record: Record, book: Book, life: Life) -> None:
    """An idle model is evicted although nobody asked for it to go."""
    budget = record.plan.budget_bytes
    assert budget is not None
    check("pinned and evicted", not book.entry.pinned, book.name)
    others = [other for other in record.books.values() if other is not book and waits(other)]
    held = sum(one.held for one in record.books.values() if one.life or one.wanted is Wanted.UP)
    most = max(held, held_by_others(record, book) + book.held)
    is_over = most + sum(raise_of(record, one) for one in record.books.values()) > budget
    is_over = is_over or record.shortage.since is not None
    is_commanded = any(other.callers for other in others)
    is_asked = any(other.queue for other in others) and is_ripe(record, book, EPSILON_S)
    detail = f"{book.name}, ready at {life.ready_at}, busy at {book.busy_at}"
    check("evicted for nobody", is_over or is_commanded or is_asked, detail)
    if not (is_commanded or is_asked):
        check_patience(record)
    record.count("evicted")


def is_ripe(record: Record, book: Book, slack_s: float) -> bool:
    """Whether it is idle, and a request for another model may evict it."""
    life = book.life
    if not book.serves or life is None or life.ready_at is None:
        return False
    if book.waiting or life.given or book.entry.pinned:
        return False
    load_s = life.ready_at - life.spawned_at
    residency_s = max(record.plan.settings.min_residency_s, RESIDENCY_LOADS * load_s)
    ripe_at = min(book.busy_at + load_s, life.ready_at + residency_s)
    return record.now + slack_s >= ripe_at


def check_row(record: Record, book: Book, row: dict[str, object]) -> None:
    """The status says what a process holds, and what running out of memory has raised."""
    if not book.entry.launch.memory_limit_bytes:
        check("status: raised", row["raised_bytes"] == raised(record, book), row)
    if record.plan.budget_bytes is not None and book.life is not None:
        held, said = held_by(record, book), row["reserved_bytes"]
        assert isinstance(said, int)
        most = held + raise_of(record, book)
        check("status: reserved", held <= said <= most, row)


def check_forecast(record: Record, book: Book, value: dict[str, object]) -> None:
    """A dry run says what a load would do, and whether there is anything to do."""
    life = book.life
    is_going = book.drain_until is not None or book.swaps_until is not None
    is_up = life is not None and life.cause is None and not is_going
    check("dry run: loaded", (value["outcome"] == "loaded") == is_up, f"{book.name}: {value}")
    lacks_files = book.entry.download is not None
    foreseen = ("loaded", "downloads", "waits") if lacks_files else OUTCOMES - {"downloads"}
    check("dry run: downloads", value["outcome"] in foreseen, f"{book.name}: {value}")
    budget = record.plan.budget_bytes
    if value["outcome"] == "fits" and budget is not None:
        others = [other for other in record.books.values() if other is not book]
        total = sum(least_by(record, other) for other in others) + need_of(record, book)
        check("dry run: fits", total <= budget, f"{book.name}: {value}")
    names = value["evicts"]
    assert isinstance(names, list)
    for name in names:
        other = record.books[name]
        is_idle = other.serves and not other.waiting and other.life and not other.life.given
        check("dry run: evicts", bool(is_idle), f"{name}: {value}")
    record.count("dry run")


# ---------------------------------------------------------------- giving way

LOWEST = 2


def is_leaving(ask: Ask) -> bool:
    """Whether its row was asked to leave for want of memory, and has not left yet."""
    return ask.is_open and ask.is_yielding and ask.is_for_memory


def asked_to_give_way(record: Record, book: Book, ask: Ask) -> None:
    """A row is asked to leave without its state, though no turn or swap is on."""
    ask.is_for_memory = True
    record.dropped.setdefault(book.name, []).append(ask)


def _judge(record: Record, book: Book, asks: list[Ask]) -> None:
    """These rows of a model were asked to leave in one event."""
    name, life = book.name, book.life
    assert life is not None
    check("no row stays", bool(rows_that_stay(life)), name)
    check("a row leaves for nothing", record.shortage.since is not None, name)
    check("a row leaves unready", book.serves and life.unlinked_at is None, name)
    check("a row leaves that is fixed", not life.launch.deterministic, name)
    check_patience(record)
    check_idle(record, name)
    for ask in asks:
        check("a row leaves that must stay", ask.may_resume and ask.rank == LOWEST, ask)
        frees = _rows_bytes(record, [*rows_that_stay(life), ask]) > _rows_bytes(
            record, rows_that_stay(life)
        )
        check("a row leaves that frees nothing", frees, ask)
    record.count("rows gave way")


def look_at_rows(record: Record) -> None:
    """Judge which rows were asked to leave in an event."""
    for name, asks in record.dropped.items():
        _judge(record, record.books[name], asks)
    record.dropped.clear()


def rows_that_stay(life: Life) -> list[Ask]:
    """Rows that nobody has asked to leave."""
    given = [ask for ask in life.given.values() if ask.is_open]
    return [ask for ask in given if not (ask.is_yielding or ask.is_pausing)]


def _rows_bytes(record: Record, asks: list[Ask]) -> int:
    """What rows need, each with a step of growth; there is always room for one."""
    longest = max(map(length_of, asks), default=0) + GROWTH_TOKENS
    rows = cache_bytes(record.plan.layers, rows=len(asks), longest=longest)
    return max(rows, record.plan.row_bytes)


# ---------------------------------------------------------------- swaps

SLACK_S = 0.05
NOBODY = len(Priority)


def swap_begins(record: Record, book: Book, life: Life) -> None:
    """A model that is busy has to go, though nobody asked for that: a swap must be due."""
    settings, now = record.plan.settings, record.now
    name = book.name
    check("swapped without a budget", record.plan.budget_bytes is not None, name)
    check("pinned and swapped", not book.entry.pinned, name)
    check("swapped unready", book.serves, name)
    assert life.ready_at is not None
    given = [ask for ask in life.given.values() if ask.is_open]
    check("swapped though it must run through", all(ask.may_resume for ask in given), name)
    has_spoken = life.spoke_at is not None or not life.was_given
    check("a turn without a token", has_spoken or not given, name)  # or all have ended
    began_at = life.ready_at if life.spoke_at is None else life.spoke_at
    load_s = life.ready_at - life.spawned_at
    least_s = max(settings.min_residency_s, RESIDENCY_LOADS * load_s)
    check("a turn too short", now >= began_at + least_s - EPSILON_S, f"{name}: since {began_at}")
    highest = min((ask.rank for ask in given), default=NOBODY)
    others = [
        other
        for other in record.books.values()
        if other is not book and _waits_long_enough(record, other)
    ]
    if any(_urgency(other) <= highest for other in others):
        record.count("swapped for another")
    elif is_over(record):
        swapped(record, book)
    else:
        check("swapped for nobody", bool(others), name)
        check("swapped for a lower class", False, name)
    book.swaps_until = now + settings.drain_timeout_s
    book.swaps += 1
    book.up_for = UpFor.NEXT_TURN
    record.count("swapped out")


def may_have_begun(record: Record, book: Book) -> bool:
    """A swap that nobody can see yet: all rows had ended or been asked to leave before."""
    life = book.life
    assert life is not None
    leaves = [not ask.is_open or ask.is_yielding or ask.is_pausing for ask in life.given.values()]
    if not (leaves and all(leaves)):
        return False
    others = (other for other in record.books.values() if other is not book)
    return any(_waits_long_enough(record, other) for other in others)


def swap_exits(record: Record, book: Book, life: Life) -> None:
    """Its rows have left, or their time is up: it is asked to exit."""
    assert book.swaps_until is not None
    is_late = record.now >= book.swaps_until - EPSILON_S
    still_runs = [ask for ask in life.given.values() if ask.is_open]
    check("swapped out with its rows", not still_runs or is_late, book.name)
    book.swaps_until = None
    record.stops(life, Cause.SWAP)


def announced(record: Record, change: dict[str, Any]) -> None:
    """Watchers are notified of a change: a swap may be called off before any row returns, and begin
    again while rows are still leaving."""
    book, edge = record.books.get(change["model"]), (change["from"], change["to"])
    if book is None or book.life is None:
        return
    if edge == (State.DRAINING, State.READY) and book.swaps_until is not None:
        is_called_off(record, book)
    elif edge == (State.READY, State.DRAINING) and change["why"] == Why.SWAP:
        swap_begins(record, book, book.life)


def is_called_off(record: Record, book: Book) -> None:
    """It serves on."""
    book.swaps_until, book.up_for = None, UpFor.SOMEBODY
    record.count("swap called off")


def look_at_swaps(record: Record) -> None:
    """After an event: who waits for memory since when, and which swaps are over."""
    for book in record.books.values():
        is_waiting = waits(book) and is_wanted_by_somebody(book)
        if not is_waiting:
            book.waits_since = None
        elif book.waits_since is None:
            book.waits_since = record.now
    for book in record.books.values():
        life = book.life
        if book.swaps_until is None:
            continue
        is_over = life is None or life.ready_at is None or life.cause is not None
        if is_over or book.wanted is not Wanted.UP:
            book.swaps_until = None
        elif not _may_be_for_somebody(record):
            is_called_off(record, book)
        else:
            check("swap late", record.now <= book.swaps_until + SLACK_S, book.name)
            assert life is not None
            rows = [ask for ask in life.given.values() if ask.is_open]
            leave = all(ask.is_yielding or ask.is_pausing for ask in rows)
            check("rows run on", leave, book.name)
            is_stuck = not life.given and bool(book.queue)
            check("swap does not end", not is_stuck, book.name)


def _may_be_for_somebody(record: Record) -> bool:
    waits = any(other.waits_since is not None for other in record.books.values())
    return waits or is_over(record)


def _waits_long_enough(record: Record, book: Book) -> bool:
    since = book.waits_since
    if since is None or not (waits(book) and is_wanted_by_somebody(book)):
        return False
    return record.now >= since + record.plan.settings.swap_after_s - EPSILON_S


def _urgency(book: Book) -> int:
    if book.callers:
        return 0
    return min((ask.rank for ask in book.queue), default=NOBODY)


# ---------------------------------------------------------------- due swaps

BEGINS_WITHIN_S = 1.0
"""Beside `swap_after_s`, from the moment at which nothing forbids a swap any more."""
FILES_LOOK_S = 1.0
"""So long a look at the model's files may take."""


def look_at_due_swaps(record: Record) -> None:
    """After an event: notes which turns have begun to count, and whether a swap is late."""
    if record.plan.budget_bytes is None:
        return
    for book in record.books.values():
        if book.life is not None and book.life.settled_at is None:
            _settles(record, book.life)
    limit_s = record.plan.settings.swap_after_s + BEGINS_WITHIN_S + FILES_LOOK_S
    for book in record.books.values():
        if not _must_get_a_turn(record, book):
            book.due_since = None
        elif book.due_since is None:
            book.due_since = record.now
            record.count("a swap is due")
        else:
            is_late = record.now > book.due_since + limit_s
            check("no turn", not is_late, f"{book.name}: due since {book.due_since}")


def _settles(record: Record, life: Life) -> None:
    """Every row that it was given at first has gained a token or ended: at the latest now."""
    rows = life.given.values()
    has_gained = all(ask.gains_since is not None for ask in rows if ask.is_open)
    if life.serves and life.spoke_at is not None and has_gained:
        life.settled_at = record.now


def _must_get_a_turn(record: Record, book: Book) -> bool:
    """Whether one model alone waits for memory, and all that holds some may be swapped out."""
    if book.waits_since is None or not book.queue or book.callers or not _is_calm(record):
        return False
    budget = record.plan.budget_bytes
    assert budget is not None
    others = [other for other in record.books.values() if other is not book]
    if any(waits(other) for other in others):
        return False  # it may be another one's turn
    if not all(may_run(record, ask.account) for ask in book.queue):
        return False
    fixed = [other for other in others if other.entry.pinned]
    left = [other for other in others if other.life is not None and other not in fixed]
    lowest = max(ask.rank for ask in book.queue)
    held = sum(max(other.held, need_of(record, other)) for other in fixed)
    if held + need_of(record, book) > budget or not left:
        return False
    return all(_may_be_swapped(record, other, lowest) for other in left)


def _is_calm(record: Record) -> bool:
    """Whether nothing is on its way in or out, and others lack no memory."""
    settings, books = record.plan.settings, record.books.values()
    if not settings.swap or record.is_shutting_down or record.shortage.since is not None:
        return False
    if not is_whole(record):
        return False
    if any(other.life is None and other.held and other.is_resting for other in books):
        return False  # what a crashed model held may be kept for it
    if any(other.life is not None and other.life.is_giving_back for other in books):
        return False  # its worker answers at the end of its step, however long that takes
    return not any(is_loading(other) or _leaves(record, other) for other in books)


def _leaves(record: Record, book: Book) -> bool:
    life = book.life
    if life is None:
        return False
    is_going = book.drain_until is not None or book.swaps_until is not None
    return life.is_abandoned or life.cause is not None or is_going


def _may_be_swapped(record: Record, book: Book, lowest: int) -> bool:
    """Whether a model that holds memory has had its turn, or is idle, and must go if asked."""
    life = book.life
    assert life is not None
    if not book.serves or life.ready_at is None:
        return False
    if not (book.waiting or life.given):
        return is_ripe(record, book, -BEGINS_WITHIN_S)
    if life.settled_at is None or may_have_begun(record, book):
        return False
    given = [ask for ask in life.given.values() if ask.is_open]
    is_allowed = not life.launch.deterministic and all(ask.may_resume for ask in given)
    if not is_allowed or any(ask.rank < lowest for ask in given):
        return False
    cost_s = life.settled_at - life.spawned_at
    least_s = max(record.plan.settings.min_residency_s, RESIDENCY_LOADS * cost_s)
    return record.now >= life.settled_at + least_s


# ---------------------------------------------------------------- budgets


def told_budget(record: Record, book: Book, life: Life, message: SetBudget) -> None:
    """A worker hears what its rows may take."""
    before = life.budgets[-1] if life.budgets else None
    number = 1 if before is None else before.number + 1
    check("budgets are counted", message.number == number, f"{book.name}: {message}")
    check("a budget of no row", message.rows_bytes >= record.plan.row_bytes, message)
    life.budgets.append(message)
    if before is None or message.rows_bytes > before.rows_bytes:
        _budget_raised(record, book, life)
        return
    if message.rows_bytes < before.rows_bytes:
        taken = taken_bytes(record, staying(life))
        is_enough = message.rows_bytes >= taken
        check("less than rows hold", is_enough, f"{book.name}: {message}, {taken}")
        record.count("a budget is lowered")
    if message.gives_back:
        is_for_others = any(waits(other) for other in record.books.values())
        is_needed = is_for_others or is_over(record)
        check("gives back for nothing", is_needed, f"{book.name}: {message}")
        life.is_giving_back, life.says_it_gave_back = True, False
        record.count("rows give back")


def _budget_raised(record: Record, book: Book, life: Life) -> None:
    before, book.held = book.held, reserved_for(record, book, life)
    if book.held <= before:
        return
    budget = record.plan.budget_bytes
    assert budget is not None
    total = held_by_all(record)
    check("rows over the budget", total <= budget, f"{book.name}: {total} of {budget}")
    most = record.shortage.room
    check("rows over the room", total <= max(most, 0), f"{book.name}: {total} of {most}")
    record.count("a budget is raised")
