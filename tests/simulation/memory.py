"""The oracle's account of memory: budgets, loads, evictions, swaps, and rows that lack room."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mlxsup.protocol.cache_cost import GROWTH_TOKENS, cache_bytes, joining_bytes
from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.states import Priority, State, Why
from mlxsup.protocol.worker_messages import Ready, SetBudget
from mlxsup.supervisor.core.events import Exited, Sampled

from .books import Ask, Book, Cause, Life, UpFor, Wanted
from .ground import check
from .requests import LOWEST, may_run_more

if TYPE_CHECKING:
    from .record import Record

EPSILON_S = 1e-6
SLACK_S = 0.05
OUT_OF_MEMORY = 75
NOBODY = len(Priority)


def _others(record: Record, book: Book) -> list[Book]:
    return [other for other in record.books.values() if other is not book]


# ---------------------------------------------------------------- what is needed


def need_of(record: Record, book: Book) -> int:
    """Return the limit of its entry, or what it was appraised at and raised by."""
    limit = book.entry.launch.memory_limit_bytes
    return limit or record.plan.needs[book.name] + raised(record, book)


def _pinned_bytes(record: Record, book: Book) -> int:
    return need_of(record, book) if book.entry.pinned else 0


def is_too_large(record: Record, book: Book, said: Ready) -> bool:
    """True if a model that says READY leaves no room in its limit for a short request."""
    limit, plan = book.entry.launch.memory_limit_bytes, record.plan
    if limit is None or plan.budget_bytes is None:
        return False
    own = said.own_bytes
    if own is None:  # what a worker does not measure counts as appraised
        own = plan.needs[book.name] - plan.row_bytes - plan.weights(book.name)
    row = cache_bytes(said.cache_layers, rows=1, longest=256)
    return limit < said.active_bytes + own + row


def raised(record: Record, book: Book) -> int:
    """Return as much of its raise as fits into the budget next to what is pinned."""
    known = record.raised.get(book.name, 0)
    if book.entry.launch.memory_limit_bytes or not known:
        return 0
    budget, needs = record.plan.budget_bytes, record.plan.needs
    assert budget is not None, "nothing is raised without one"
    left = budget - needs[book.name]
    others = [one for one in _others(record, book) if one.name in record.appraised]
    if not _is_pinned(book):
        taken = sum(need_of(record, other) for other in others if _is_pinned(other))
        return min(known, max(0, left - taken))
    sizes = [one.entry.launch.memory_limit_bytes or needs[one.name] for one in others]
    return min(known, left - max((size for size in sizes if size <= left), default=0))


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


def _is_pinned(book: Book) -> bool:
    return book.entry.pinned and book.wanted is not Wanted.GONE


# ---------------------------------------------------------------- what is held

# A tenth must stay free if a row returns while others run.
SPARE_SHARE = 10
# Sooner, a worker is not asked to give back what it holds for speed alone.
GIVES_AGAIN_AFTER_S = 10.0
# For so long no model is evicted because memory is short: a worker may be giving some back.
ASKED_S = 0.9
ASKED_AGAIN_S = 10.0


def measured(record: Record, book: Book, life: Life) -> None:
    """Enter what its process was measured at, if it is more than what was reserved."""
    if life.says_it_gave_back:
        life.says_it_gave_back, life.gave_back_at = False, record.now
    if _has_budget(life):
        book.held = _reserved(record, book, life)
        return
    reported = 0 if life.is_abandoned else life.reported
    may_shrink = life.serves and record.now < life.asked_back_at + ASKED_AGAIN_S
    book.held = max(life.granted if may_shrink else book.held, life.footprint, reported)


def _fixed(record: Record, book: Book) -> int:
    return record.plan.needs[book.name] - record.plan.row_bytes


def _reserved(record: Record, book: Book, life: Life) -> int:
    """Return what is reserved for a process that was told a budget."""
    least = record.plan.needs[book.name] if book.entry.pinned else 0
    return max(_fixed(record, book) + life.most_bytes, life.footprint, life.reported, least)


def _raise_of(record: Record, book: Book) -> int:
    """Return how much more may be reserved for past shortages; it gives way to rows, unseen."""
    life = book.life
    if life is None or not _has_budget(life):
        return 0
    return life.granted - record.plan.needs[book.name]


def _has_budget(life: Life) -> bool:
    return bool(life.budgets) and not life.is_abandoned


def budget_kept(record: Record, book: Book, life: Life, number: int) -> None:
    """Enter which budget a worker keeps to; earlier ones no longer count."""
    if not life.budgets or number != life.budgets[-1].number:
        return
    is_news = len(life.budgets) > 1 or life.is_giving_back
    life.says_it_gave_back |= life.is_giving_back
    life.budgets, life.is_giving_back = life.budgets[-1:], False
    if is_news:
        book.held = _reserved(record, book, life)


def _held(record: Record, book: Book) -> int:
    """Return what its process holds, or what is kept for it if it is pinned."""
    return max(book.held if book.life is not None else 0, _pinned_bytes(record, book))


def _least(record: Record, book: Book) -> int:
    """Return what stays reserved for a model that has given back what it does not need."""
    held, life = _held(record, book), book.life
    if life is None or not _has_budget(life) or not life.serves:
        return held
    rows = _rows_bytes(record, _not_short(life))
    return min(held, max(_fixed(record, book) + rows, life.footprint, life.reported))


def _not_short(life: Life) -> list[Ask]:
    """Return rows that were not asked to leave for want of memory."""
    return [ask for ask in life.running if not (ask.is_yielding and ask.is_for_memory)]


def _length(ask: Ask) -> int:
    prompt = len(ask.acceptance.prompt_tokens) // 4 if ask.acceptance else 0
    return prompt + ask.tokens


def _rows_bytes(record: Record, asks: Sequence[Ask]) -> int:
    """Return what rows need, each with a step of growth; there is always room for one."""
    longest = max(map(_length, asks), default=0) + GROWTH_TOKENS
    rows = cache_bytes(record.plan.layers, rows=len(asks), longest=longest)
    return max(rows, record.plan.row_bytes)


# ---------------------------------------------------------------- budgets of rows


def told_budget(record: Record, book: Book, life: Life, message: SetBudget) -> None:
    """Judge what a worker hears that its rows may take."""
    before = life.budgets[-1] if life.budgets else None
    number = 1 if before is None else before.number + 1
    check("budgets are counted", message.number == number, f"{book.name}: {message}")
    check("a budget of no row", message.rows_bytes >= record.plan.row_bytes, message)
    life.budgets.append(message)
    if before is None or message.rows_bytes > before.rows_bytes:
        _budget_raised(record, book, life)
        return
    if message.rows_bytes < before.rows_bytes:
        rows = _not_short(life)
        longest = max(map(_length, rows), default=0)
        taken = cache_bytes(record.plan.layers, rows=len(rows), longest=longest)
        is_enough = message.rows_bytes >= taken
        check("less than rows hold", is_enough, f"{book.name}: {message}, {taken}")
    if message.gives_back:
        is_for_others = any(other.waits_for_memory for other in record.books.values())
        is_needed = is_for_others or is_over(record)
        check("gives back for nothing", is_needed, f"{book.name}: {message}")
        life.is_giving_back, life.says_it_gave_back = True, False


def _budget_raised(record: Record, book: Book, life: Life) -> None:
    before, book.held = book.held, _reserved(record, book, life)
    if book.held > before:
        total = sum(_held(record, one) for one in record.books.values())
        _check_total(record, "rows", book, total)
        record.count("a budget is raised")


def _check_total(record: Record, what: str, book: Book, total: int) -> None:
    budget, room = record.plan.budget_bytes, record.shortage.room
    if budget is not None:
        check(f"{what} over the budget", total <= budget, f"{book.name}: {total} of {budget}")
        check(f"{what} over the room", total <= max(room, 0), f"{book.name}: {total} of {room}")


def left_for_memory(record: Record, ask: Ask) -> None:
    """Note that the row of an open request has left because there was no room for it."""
    record.left_short.append(ask)
    if not ask.is_leaving:
        ask.is_for_memory, ask.is_for_class, ask.is_by_hand = True, False, False
    record.count("left for want of memory")


def note_left(record: Record, life: Life) -> None:
    """Have who has left wait for rows that end after this step."""
    for ask in record.left_short:
        ask.short_at = life.rows_ended
    record.left_short.clear()


def may_return(record: Record, life: Life, ask: Ask) -> bool:
    """True if one whose row has left for want of memory may have one again."""
    if ask.short_at is None or not life.budgets:
        return True
    others = life.running
    if not others or life.rows_ended > ask.short_at:
        return True
    size = life.budgets[-1].rows_bytes
    lengths = [_length(one) for one in (ask, *others)]
    return joining_bytes(record.plan.layers, lengths) <= size - size // SPARE_SHARE


# ---------------------------------------------------------------- loads


def check_spawn(record: Record, book: Book) -> None:
    """Judge a load: all must be within the budget with it, and it must be its turn."""
    held = sum(_held(record, other) for other in _others(record, book))
    _check_total(record, "load", book, held + need_of(record, book))
    check("loads side by side", has_turn(record, book), book.name)
    if _loading(record):
        record.count("loaded side by side")


def has_turn(record: Record, book: Book) -> bool:
    """True if a load need not wait for others; after a crash only for those that crashed, too."""
    loading = _loading(record)
    after_crash = [life for life in loading if life.is_after_crash]
    in_the_way = after_crash if book.is_after_crash else loading
    return len(in_the_way) < record.plan.settings.parallel_loads


def _loading(record: Record) -> list[Life]:
    """Return processes on their way up, or ended on it and still there."""
    lives = [book.life for book in record.books.values() if book.life]
    return [life for life in lives if life.ready_at is None and not life.is_abandoned]


def refuse(record: Record) -> None:
    """Have who waits for what can never fit, whatever goes, answered in this event."""
    budget = record.plan.budget_bytes
    if budget is None or record.is_shutting_down:
        return
    for book in record.books.values():
        if not (book.waits_for_memory and book.is_awaited):
            continue
        others = _others(record, book)
        fixed = sum(_kept(record, one) for one in others if _is_abandoned(one) or _is_pinned(one))
        if fixed + need_of(record, book) <= budget:
            continue
        for ask in book.waiting:
            record.must.setdefault(ask, set()).add("insufficient_memory")
        book.callers.clear()
        record.count("refused for memory")
        if not book.entry.preload or book.up_for is not UpFor.FILE:
            book.wanted, book.is_by_user, book.is_restarting = Wanted.DOWN, False, False


def _kept(record: Record, book: Book) -> int:
    """Return what a model keeps whatever is asked for, and whatever ends."""
    life = book.life
    if _is_abandoned(book):
        return _held(record, book)
    if life is None or not book.serves or book.drain_until is not None:
        return need_of(record, book)
    if not record.plan.layers_of(life.launch):  # its rows have no budget
        return _held(record, book)
    is_asked = life.is_giving_back or life.says_it_gave_back
    is_fresh = record.now < life.gave_back_at + GIVES_AGAIN_AFTER_S
    has_given_back = life.gave_back_at > book.busy_at and is_fresh and not is_asked
    is_least = has_given_back and not book.is_busy
    return _least(record, book) if is_least else need_of(record, book)


def _is_abandoned(book: Book) -> bool:
    return book.life is not None and book.life.is_abandoned


def forget_turns(record: Record) -> None:
    """Want who has made room no longer once nothing waits for it."""
    for book in record.books.values():
        is_next = book.waits_for_memory and book.up_for is UpFor.NEXT_TURN
        if is_next and not (book.is_awaited or book.paused):
            book.wanted, book.is_by_user, book.is_restarting = Wanted.DOWN, False, False


def may_wait(record: Record, book: Book) -> bool:
    """True if a model that is wanted may be without a process although nothing else loads."""
    budget, others = record.plan.budget_bytes, _others(record, book)
    if budget is None:
        return False
    if not is_whole(record) or any(map(_is_leaving, others)):
        return True  # what is being freed may be for another
    if any(other.life and _is_lowering(other.life) for other in others):
        return True
    taken = need_of(record, book)
    for other in others:
        taken += _raise_of(record, other)
        if not (book.is_awaited and _is_ripe(record, other, -0.1)):
            taken += _least(record, other)
        may_load = other.wanted is Wanted.UP and other.entry.download is None
        if other.life is None and may_load and not other.failed:
            taken += need_of(record, other)
    return taken > budget


def _is_lowering(life: Life) -> bool:
    """True if its worker was told to take less, and has not said yet that it does."""
    return _has_budget(life) and (len(life.budgets) > 1 or life.is_giving_back)


def _is_leaving(book: Book) -> bool:
    life = book.life
    if life is None or life.is_abandoned:
        return False
    return life.cause is not None or book.is_going


# ---------------------------------------------------------------- evictions

RESIDENCY_LOADS = 3.0


def check_eviction(record: Record, book: Book, life: Life) -> None:
    """Judge that an idle model goes although that was not asked for."""
    budget = record.plan.budget_bytes
    assert budget is not None
    check("pinned and evicted", not book.entry.pinned, book.name)
    others = [other for other in _others(record, book) if other.waits_for_memory]
    books = record.books.values()
    held = sum(one.held for one in books if one.life or one.wanted is Wanted.UP)
    by_others = sum(_held(record, other) for other in _others(record, book))
    most = max(held, by_others + book.held) + sum(_raise_of(record, one) for one in books)
    is_over = most > budget or record.shortage.since is not None
    is_commanded = any(other.callers for other in others)
    is_asked = any(other.queue for other in others) and _is_ripe(record, book, EPSILON_S)
    detail = f"{book.name}, ready at {life.ready_at}, busy at {book.busy_at}"
    check("evicted for nobody", is_over or is_commanded or is_asked, detail)
    if not (is_commanded or is_asked):
        _check_patience(record)
    record.count("evicted")


def _is_ripe(record: Record, book: Book, slack_s: float) -> bool:
    """True if it is idle, and a request for another model may evict it."""
    life = book.life
    if not book.serves or life is None or life.ready_at is None:
        return False
    if book.is_busy or book.entry.pinned:
        return False
    load_s = life.ready_at - life.spawned_at
    residency_s = max(record.plan.settings.min_residency_s, RESIDENCY_LOADS * load_s)
    ripe_at = min(book.busy_at + load_s, life.ready_at + residency_s)
    return record.now + slack_s >= ripe_at


def check_row(record: Record, book: Book, row: dict[str, Any]) -> None:
    """Compare what the status says of the memory of a model."""
    if not book.entry.launch.memory_limit_bytes:
        check("status: raised", row["raised_bytes"] == raised(record, book), row)
    if record.plan.budget_bytes is not None and book.life is not None:
        held = _held(record, book)
        most = held + _raise_of(record, book)
        check("status: reserved", held <= row["reserved_bytes"] <= most, row)


def check_forecast(record: Record, book: Book, value: dict[str, Any]) -> None:
    """Judge a dry run: what a load would do, and whether there is anything to do."""
    life, outcome = book.life, value["outcome"]
    is_up = life is not None and life.cause is None and not book.is_going
    check("dry run: loaded", (outcome == "loaded") == is_up, f"{book.name}: {value}")
    lacks_files = book.entry.download is not None
    foreseen = (
        "loaded",
        "waits",
        *(("downloads",) if lacks_files else ("fits", "evicts", "swaps")),
    )
    check("dry run: downloads", outcome in foreseen, f"{book.name}: {value}")
    budget = record.plan.budget_bytes
    if outcome == "fits" and budget is not None:
        others = sum(_least(record, other) for other in _others(record, book))
        is_right = others + need_of(record, book) <= budget
        check("dry run: fits", is_right, f"{book.name}: {value}")
    for name in value["evicts"]:
        other = record.books[name]
        check("dry run: evicts", other.serves and not other.is_busy, f"{name}: {value}")
    record.count("dry run")


# ---------------------------------------------------------------- pressure

# Memory that has been short for so long has found something that gives way, if anything can.
GIVES_WAY_S = 1.5
# The budget is whole after so long with more room than that.
COMES_BACK_S, CALM_FACTOR = 23.0, 1.1


@dataclass(slots=True)
class Shortage:
    """What the measurements of a run said."""

    since: float | None = None  # None: memory is not short
    calm_since: float | None = 0.0  # there has been room for the whole budget and more
    room: float = math.inf  # what models may hold by the latest measurement
    is_known: bool = False


def sampled(record: Record, event: Sampled) -> None:
    """Enter the memory of the machine, once what processes hold was entered."""
    reading, shortage, whole = event.reading, record.shortage, record.plan.budget_bytes
    if reading is None or whole is None:
        return
    held = 0
    for book in record.books.values():
        if life := book.life:
            is_measured = _has_budget(life) and life.footprint > 0 and life.cause is None
            whole_bytes = book.held + _raise_of(record, book)  # counts until it is gone
            held += max(life.footprint, life.reported) if is_measured else whole_bytes
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
    """True if nothing may be left of a shortage."""
    shortage = record.shortage
    if not shortage.is_known or record.plan.budget_bytes is None:
        return True
    since = shortage.calm_since
    return since is not None and record.now >= since + COMES_BACK_S


def is_over(record: Record) -> bool:
    """True if models must give back: others lack memory, or more is held than the budget."""
    budget = record.plan.budget_bytes
    if budget is None:
        return False
    total = 0
    for book in record.books.values():
        is_kept = book.life is not None or book.wanted is Wanted.UP
        total += max(book.held if is_kept else 0, _pinned_bytes(record, book))
        total += _raise_of(record, book)
    return record.shortage.since is not None or total > budget


def asked_to_give_back(record: Record, life: Life) -> None:
    """Judge that a worker is asked to give back what it keeps for reuse."""
    is_for_another = record.tried_again is not None
    check("gives back for nothing", is_for_another or is_over(record), life.model)
    check("gives back unready", life.serves, life.model)
    is_again = record.now < life.asked_back_at + ASKED_AGAIN_S
    check("gives back again", is_for_another or not is_again, life.model)
    life.asked_back_at = record.now
    record.count("asked to give back")


def _check_patience(record: Record) -> None:
    """Raise if a model goes because memory is short while a worker may still give some back."""
    is_too_early = record.shortage.is_known and _is_any_giving_back(record)
    check("evicted too early", not is_too_early, record.now)


def _is_any_giving_back(record: Record) -> bool:
    lives = [book.life for book in record.books.values() if book.life]
    return any(record.now < life.asked_back_at + ASKED_S for life in lives)


def _may_be_evicted(book: Book) -> bool:
    return book.serves and not book.is_busy and not book.entry.pinned


def _check_idle(record: Record, book: Book) -> None:
    """Raise if something busy has to go because memory is short while another is idle."""
    idle = [one.name for one in _others(record, book) if _may_be_evicted(one)]
    check("busy before idle", not idle, f"{book.name}, {idle}")


def look_at_shortage(record: Record) -> None:
    """Raise if memory has been short for a while, and a model is idle that may go."""
    ask = record.tried_again
    for book in record.books.values():
        if ask is not None and ask.is_open and book.serves and book.name != ask.model:
            assert book.life is not None
            check("did not give back", book.life.asked_back_at == record.now, book.name)
    since = record.shortage.since
    if since is None or record.now < since + GIVES_WAY_S or not isinstance(record.event, Sampled):
        return
    books = list(record.books.values())
    are_going = any(
        one.life
        and not one.life.is_abandoned
        and (one.life.cause is not None or one.drain_until is not None)
        for one in books
    )
    if record.is_shutting_down or are_going or _is_any_giving_back(record):
        return
    for book in books:
        check("nothing gives way", not _may_be_evicted(book), f"{book.name}: short since {since}")


def compare_shortage(record: Record, memory: dict[str, Any]) -> None:
    """Compare what the status says is left of the budget."""
    budget, left = record.plan.budget_bytes, memory["effective_budget_bytes"]
    if budget is not None:
        check("status: budget", memory["budget_bytes"] == budget, memory)
        check("status: left", 0 <= left <= min(budget, max(record.shortage.room, 0)), memory)
        check("status: comes back", left == budget or not is_whole(record), memory)
        check("status: shortage", bool(memory["shortage"]) == (left < budget), memory)


def look_at_rows(record: Record) -> None:
    """Judge rows that were asked to leave without their state, though no turn or swap is on."""
    for book, asks in record.dropped.items():
        life = book.life
        assert life is not None
        stay = life.staying
        check("no row stays", stay, book.name)
        check("a row leaves for nothing", record.shortage.since is not None, book.name)
        check("a row leaves unready", book.serves and life.is_linked, book.name)
        check("a row leaves that is fixed", not life.launch.deterministic, book.name)
        _check_patience(record)
        _check_idle(record, book)
        for ask in asks:
            check("a row leaves that must stay", ask.may_resume and ask.rank == LOWEST, ask)
            frees = _rows_bytes(record, [*stay, ask]) > _rows_bytes(record, stay)
            check("a row leaves that frees nothing", frees, ask)
        record.count("rows gave way")
    record.dropped.clear()


# ---------------------------------------------------------------- swaps

# Beside `swap_after_s`: a swap begins, and the look at the model's files may take as long again.
BEGINS_WITHIN_S = 1.0


def swap_begins(record: Record, book: Book, life: Life) -> None:
    """Judge that a busy model has to go though that was not asked for: a swap must be due."""
    settings, now, name = record.plan.settings, record.now, book.name
    check("swapped without a budget", record.plan.budget_bytes is not None, name)
    check("pinned and swapped", not book.entry.pinned, name)
    check("swapped unready", book.serves, name)
    assert life.ready_at is not None
    given = life.running
    check("swapped though it must run through", all(ask.may_resume for ask in given), name)
    has_spoken = life.spoke_at is not None or not life.was_given
    check("a turn without a token", has_spoken or not given, name)  # or all have ended
    began_at = life.ready_at if life.spoke_at is None else life.spoke_at
    load_s = life.ready_at - life.spawned_at
    least_s = max(settings.min_residency_s, RESIDENCY_LOADS * load_s)
    check("a turn too short", now >= began_at + least_s - EPSILON_S, f"{name}: since {began_at}")
    highest = min((ask.rank for ask in given), default=NOBODY)
    others = [other for other in _others(record, book) if _waits_long_enough(record, other)]
    if any(_urgency(other) <= highest for other in others):
        record.count("swapped for another")
    else:
        check("swapped for a lower class" if others else "swapped for nobody",
              is_over(record), name)  # fmt: skip
        check("swapped though that is off", settings.swap, name)
        _check_patience(record)
        check("nobody serves", any(one.serves for one in _others(record, book)), name)
        _check_idle(record, book)
    book.swaps_until = now + settings.drain_timeout_s
    book.up_for = UpFor.NEXT_TURN


def may_have_begun(record: Record, book: Book) -> bool:
    """True if there may be a swap unseen: all rows had ended or been asked to leave before."""
    life = book.life
    assert life is not None
    rows = life.given.values()
    if not rows or not all(not ask.is_open or ask.is_leaving for ask in rows):
        return False
    return any(_waits_long_enough(record, other) for other in _others(record, book))


def swap_exits(record: Record, book: Book, life: Life) -> None:
    """Judge that it is asked to exit: its rows have left, or their time is up."""
    assert book.swaps_until is not None
    is_late = record.now >= book.swaps_until - EPSILON_S
    check("swapped out with its rows", not life.running or is_late, book.name)
    book.swaps_until = None
    record.stops(life, Cause.SWAP)


def announced(record: Record, change: dict[str, Any]) -> None:
    """Enter that a swap begins, or is called off before any row returns."""
    book, edge = record.books.get(change["model"]), (change["from"], change["to"])
    if book is None or book.life is None:
        return
    if edge == (State.DRAINING, State.READY) and book.swaps_until is not None:
        is_called_off(book)
    elif edge == (State.READY, State.DRAINING) and change["why"] == Why.SWAP:
        swap_begins(record, book, book.life)


def is_called_off(book: Book) -> None:
    book.swaps_until, book.up_for = None, UpFor.SOMEBODY


def look_at_swaps(record: Record) -> None:
    """Note who waits for memory since when, which swaps are over, and whether one is late."""
    for book in record.books.values():
        if not (book.waits_for_memory and book.is_awaited):
            book.waits_since = None
        elif book.waits_since is None:
            book.waits_since = record.now
    is_for_any = is_over(record) or any(
        one.waits_since is not None for one in record.books.values()
    )
    for book in record.books.values():
        life = book.life
        if book.swaps_until is None:
            continue
        is_done = life is None or life.ready_at is None or life.cause is not None
        if is_done or book.wanted is not Wanted.UP:
            book.swaps_until = None
        elif not is_for_any:
            is_called_off(book)
        else:
            check("swap late", record.now <= book.swaps_until + SLACK_S, book.name)
            assert life is not None
            check("rows run on", not life.staying, book.name)
            check("swap does not end", life.given or not book.queue, book.name)
    if record.plan.budget_bytes is not None:
        _look_at_due_swaps(record)


def _waits_long_enough(record: Record, book: Book) -> bool:
    since = book.waits_since
    if since is None or not (book.waits_for_memory and book.is_awaited):
        return False
    return record.now >= since + record.plan.settings.swap_after_s - EPSILON_S


def _urgency(book: Book) -> int:
    return 0 if book.callers else min((ask.rank for ask in book.queue), default=NOBODY)


def _look_at_due_swaps(record: Record) -> None:
    """Note which turns have begun to count, and raise if a swap is late."""
    for book in record.books.values():
        life = book.life
        if life is None or life.settled_at is not None or not (life.serves and life.spoke_at):
            continue
        if all(ask.gains_since is not None for ask in life.running):
            life.settled_at = record.now
    limit_s = record.plan.settings.swap_after_s + 2 * BEGINS_WITHIN_S
    for book in record.books.values():
        if not _must_get_a_turn(record, book):
            book.due_since = None
        elif book.due_since is None:
            book.due_since = record.now
            record.count("a swap is due")
        else:
            is_late = record.now > book.due_since + limit_s
            check("no turn", not is_late, f"{book.name}: due since {book.due_since}")


def _must_get_a_turn(record: Record, book: Book) -> bool:
    """True if one model alone waits for memory, and all that holds some may be swapped out."""
    if book.waits_since is None or not book.queue or book.callers or not _is_calm(record):
        return False
    budget = record.plan.budget_bytes
    assert budget is not None
    others = _others(record, book)
    if any(other.waits_for_memory for other in others):
        return False  # it may be another one's turn
    if not all(may_run_more(record, ask.account) for ask in book.queue):
        return False
    pinned = [other for other in others if other.entry.pinned]
    left = [other for other in others if other.life is not None and other not in pinned]
    lowest = max(ask.rank for ask in book.queue)
    held = sum(max(other.held, need_of(record, other)) for other in pinned)
    if held + need_of(record, book) > budget or not left:
        return False
    return all(_may_be_swapped(record, other, lowest) for other in left)


def _is_calm(record: Record) -> bool:
    """True if nothing is on its way in or out, and others lack no memory."""
    if not record.plan.settings.swap or record.is_shutting_down or not is_whole(record):
        return False
    if record.shortage.since is not None or _loading(record):
        return False
    for book in record.books.values():
        life = book.life
        if life is None:
            if book.held and book.is_resting:
                return False  # what a crashed model held may be kept for it
        elif life.is_giving_back or life.is_abandoned or life.cause or book.is_going:
            return False
    return True


def _may_be_swapped(record: Record, book: Book, lowest: int) -> bool:
    """True if a model that holds memory has had its turn, or is idle, and must go if asked."""
    life = book.life
    assert life is not None
    if not book.serves or life.ready_at is None:
        return False
    if not book.is_busy:
        return _is_ripe(record, book, -BEGINS_WITHIN_S)
    if life.settled_at is None or may_have_begun(record, book):
        return False
    given = life.running
    is_allowed = not life.launch.deterministic and all(ask.may_resume for ask in given)
    if not is_allowed or any(ask.rank < lowest for ask in given):
        return False
    cost_s = life.settled_at - life.spawned_at
    least_s = max(record.plan.settings.min_residency_s, RESIDENCY_LOADS * cost_s)
    return record.now >= life.settled_at + least_s
