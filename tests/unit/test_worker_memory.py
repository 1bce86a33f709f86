"""Memory of a worker: the budget of its rows, what is freed, what its beats say, and its guard."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsup.protocol.cache_cost import GROWTH_TOKENS, cache_bytes
from mlxsup.protocol.cache_layers import CacheLayers
from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.launch import ExitCode
from mlxsup.protocol.states import LoadPhase, PauseReason, Priority, RowState
from mlxsup.protocol.worker_messages import (
    Accepted,
    GiveBack,
    PauseRow,
    RowDelta,
    SetBudget,
    Step,
)
from mlxsup.supervisor.config.values import parse_size
from mlxsup.worker.engine import BadLaunchError, EngineBytes
from mlxsup.worker.engines.mlx.engine import check_weights, memory_warnings
from mlxsup.worker.heartbeat import LOOK_EVERY_S
from mlxsup.worker.memory_guard import (
    BYTES_PER_BODY_BYTE,
    LOAD_LIMIT_BYTES,
    PROMPT_LIMIT_BYTES,
    Arrays,
    MemoryGuard,
)
from mlxsup.worker.process import own_bytes
from mlxsup.worker.row_memory import RowMemory, who_leaves

from support.worker.turn_bench import FACTS, A, B, Bench, Engine, x

LAYERS = (CacheLayers(layers=1, token_bytes=1),)

PROMPT_TOKENS = 3


@pytest.fixture
def bench() -> Bench:
    return Bench(facts=replace(FACTS, cache_layers=LAYERS))


def bytes_of(rows: int, longest: int) -> int:
    return cache_bytes(LAYERS, rows=rows, longest=longest)


ROOMY = bytes_of(2, PROMPT_TOKENS + GROWTH_TOKENS)
"""Enough for two of them to join each other."""


def budget(rows_bytes: int, number: int = 1, *, gives_back: bool = False) -> SetBudget:
    return SetBudget(number=number, rows_bytes=rows_bytes, gives_back=gives_back)


def left(key: RequestKey) -> RowDelta:
    return RowDelta(key=key, paused=RowState.DROPPED, pause_reason=PauseReason.MEMORY)


def start(bench: Bench, **of_a_and_b: tuple[Any, Any]) -> None:
    """Have A and B read their prompts; each dispatched in its own way."""
    bench.turn(budget(ROOMY))
    for key, place in ((A, 0), (B, 1)):
        bench.dispatch(key, **{name: values[place] for name, values in of_a_and_b.items()})
    bench.prepare(A, B)
    bench.turn()
    assert list(bench.engine.rows) == [A, B]


def test_a_row_without_room_returns_to_the_supervisor_once_it_is_accepted(bench: Bench) -> None:
    bench.around.inbox.append(budget(ROOMY - 1))
    bench.dispatch(A, B)
    bench.prepare(A, B)
    *accepted, step = bench.turn()
    assert [m.key for m in accepted if isinstance(m, Accepted)] == [A, B]
    assert isinstance(step, Step)
    assert step.rows == [left(B)]
    assert list(bench.engine.rows) == [A]
    assert bench.loop.open_keys == {A}
    assert bench.engine.returned == 0, "it held nothing"


def test_a_row_leaves_before_the_step_for_which_there_is_no_room(bench: Bench) -> None:
    """Every token counts, and the last one served leaves, without its state."""
    start(bench)
    bench.give(x(A))
    [row] = bench.rows(budget(bytes_of(2, PROMPT_TOKENS), number=2))
    assert (row.key, row.paused) == (A, None)
    made = len(bench.engine.made)
    assert bench.rows() == [left(B)]
    assert bench.engine.set_asides == [((B,), False)]
    assert bench.engine.returned == 1, "what it had computed is of no use to others"
    assert len(bench.engine.made) == made + 1, "the one that stays runs on"


@pytest.mark.parametrize(
    ("how", "leaves"),
    [
        ({}, B),
        ({"priority": (Priority.BATCH, Priority.INTERACTIVE)}, A),
        ({"may_leave": (True, False)}, A),
        ({"may_leave": (False, False)}, B),
    ],
    ids=str,
)
def test_the_row_leaves_that_may_and_is_of_the_lowest_class(
    bench: Bench, how: dict[str, tuple[Any, Any]], leaves: RequestKey
) -> None:
    start(bench, **how)
    assert bench.rows(budget(bytes_of(1, PROMPT_TOKENS), number=2)) == [left(leaves)]


def test_a_row_that_does_not_fit_alone_leaves_too(bench: Bench) -> None:
    bench.start(A)
    assert bench.rows(budget(bytes_of(1, PROMPT_TOKENS) - 1)) == [left(A)]
    assert bench.loop.open_keys == frozenset()


def test_the_beat_says_which_budget_the_rows_keep_to(bench: Bench) -> None:
    """Only once the row that is too much has left."""
    bench.start(A, B)
    assert bench.board.beat().budget == 0
    bench.around.flushes = [False]  # the supervisor reads nothing: nothing is done
    bench.turn(budget(bytes_of(1, PROMPT_TOKENS), number=1))
    assert (bench.board.beat().budget, len(bench.engine.rows)) == (0, 2)
    bench.turn()
    assert (bench.board.beat().budget, len(bench.engine.rows)) == (1, 1)


@pytest.mark.parametrize("message", [budget(ROOMY, gives_back=True), GiveBack()], ids=repr)
def test_it_gives_back_before_the_next_step_and_after_the_rows_that_must_leave(
    bench: Bench, message: SetBudget | GiveBack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may leave something behind for reuse."""
    bench.start(A, B)
    given: list[tuple[list[RequestKey], list[str]]] = []
    bench.engine.made.clear()
    monkeypatch.setattr(
        bench.engine,
        "give_back",
        lambda: given.append(([*bench.engine.rows], [*bench.engine.made])),
    )
    bench.turn(message, PauseRow(key=B, keep=False))
    assert (given, bench.engine.made) == ([([A], [])], ["step"])


@dataclass(frozen=True, kw_only=True)
class Row:
    key: RequestKey
    tokens: int
    priority: Priority = Priority.NORMAL
    may_leave: bool = True


def places_of(*tokens: int, **more: object) -> list[Row]:
    return [Row(key=RequestKey(n), tokens=count) for n, count in enumerate(tokens, start=1)]


lists_of_rows = st.lists(
    st.tuples(st.integers(1, 2000), st.sampled_from(list(Priority)), st.booleans()), max_size=8
).map(
    lambda each: [
        Row(key=RequestKey(n), tokens=tokens, priority=priority, may_leave=may_leave)
        for n, (tokens, priority, may_leave) in enumerate(each, start=1)
    ]
)

budgets = st.integers(0, 20_000)


def size(rows: list[Row]) -> int:
    return bytes_of(len(rows), max((row.tokens for row in rows), default=0))


def without(rows: list[Row], *keys: RequestKey) -> list[Row]:
    return [row for row in rows if row.key not in keys]


@given(lists_of_rows, budgets)
def test_rows_leave_only_if_they_must(rows: list[Row], budget: int) -> None:
    leaving = who_leaves(rows, LAYERS, budget)
    staying = without(rows, *leaving)
    assert size(staying) <= budget
    assert len(set(leaving)) == len(leaving)
    for count in range(len(leaving)):
        assert size(without(rows, *leaving[:count])) > budget, "it fitted already"


@given(lists_of_rows, budgets)
def test_the_one_that_leaves_is_the_last_served_of_the_lowest_class(
    rows: list[Row], budget: int
) -> None:
    for key in who_leaves(rows, LAYERS, budget)[:1]:
        enough = [row for row in rows if size(without(rows, row.key)) <= budget]
        among = [row for row in enough or rows if row.may_leave] or enough or rows
        lowest = max(list(Priority).index(row.priority) for row in among)
        equals = [row for row in among if list(Priority).index(row.priority) == lowest]
        if any(row.may_leave for row in enough or rows):
            assert key == equals[-1].key


def test_the_longest_row_leaves_if_that_alone_is_enough() -> None:
    rows = places_of(900, 100, 100)
    assert who_leaves(rows, LAYERS, bytes_of(2, 100)) == [1]
    assert who_leaves(rows, LAYERS, bytes_of(2, 900)) == [3]


def memory(budget: int) -> tuple[RowMemory, Engine]:
    engine = Engine()
    made = RowMemory(engine, LAYERS)
    made.heard(SetBudget(number=1, rows_bytes=budget))
    return made, engine


def test_a_row_joins_others_only_with_a_step_of_growth_to_spare() -> None:
    one, other = places_of(100, 90)
    exactly = bytes_of(2, 100 + GROWTH_TOKENS)
    assert memory(exactly)[0].has_room(other, [one])
    assert not memory(exactly - 1)[0].has_room(other, [one])


def test_kept_states_go_before_a_row_leaves() -> None:
    rows = places_of(100, 100)
    made, engine = memory(bytes_of(2, 100) + 9)
    engine.kept = {RequestKey(7): 9}
    assert made.leaving(rows) == []
    assert engine.kept, "it still fits"
    engine.kept = {RequestKey(7): 10}
    assert made.leaving(rows) == []
    assert engine.kept == {}


def test_a_joining_row_frees_the_states_of_others() -> None:
    """Its own state becomes its row, so it is not there twice."""
    one, other = places_of(100, 90)
    made, engine = memory(bytes_of(2, 100 + GROWTH_TOKENS))
    engine.kept = {RequestKey(2): 5, RequestKey(7): 5}
    assert made.has_room(other, [one])
    assert engine.kept == {RequestKey(2): 5}
    made, engine = memory(bytes_of(2, 100 + GROWTH_TOKENS) + 5)
    engine.kept = {RequestKey(7): 5}
    assert made.has_room(other, [one])
    assert engine.kept, "all of it fits"


def test_a_row_that_has_grown_too_long_is_found_at_any_step() -> None:
    made, _ = memory(bytes_of(2, 100))
    assert made.leaving(places_of(99, 100)) == []
    assert made.leaving(places_of(99, 101)) == [2]
    made.heard(SetBudget(number=2, rows_bytes=bytes_of(2, 101)))
    assert made.leaving(places_of(99, 101)) == []


def test_the_engine_is_told_what_its_rows_may_take() -> None:
    made, engine = memory(300)
    assert engine.bounds == [300]
    made.heard(SetBudget(number=2, rows_bytes=200))
    made.heard(GiveBack())
    assert engine.bounds == [300, 200]


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes that the engine of the next bench holds."""
    sizes = [10]
    monkeypatch.setattr(
        "support.worker.turn_bench.Engine.bytes_held", lambda self: EngineBytes(active=sizes[0])
    )
    return sizes


def step(bench: Bench) -> tuple[int, int]:
    """Return what the board says during a step: of the memory, and of the messages."""
    bench.give(x(A))
    bench.turn()
    bench.loop.drain()
    beat = bench.board.beat()
    return beat.active_bytes, beat.sent


def test_memory_is_looked_at_once_in_many_steps_and_the_books_in_each(held: list[int]) -> None:
    bench = Bench()
    bench.start(A)
    held[0] = 20
    assert step(bench) == (10, 2)
    bench.now += LOOK_EVERY_S / 2
    assert step(bench) == (10, 3)
    bench.now += LOOK_EVERY_S / 2
    assert step(bench) == (20, 4)
    held[0] = 30
    bench.now += 0.99 * LOOK_EVERY_S
    assert step(bench) == (20, 5)


def test_the_memory_of_another_budget_is_that_after_it_came(held: list[int]) -> None:
    """Memory given back for it must show as soon as the rows are said to keep to it."""
    bench = Bench()
    bench.start(A)
    held[0] = 20
    bench.around.inbox.append(SetBudget(number=1, rows_bytes=100))
    assert step(bench) == (20, 2)
    assert bench.board.beat().budget == 1
    held[0] = 30
    assert step(bench)[0] == 20, "looked at once, as without a budget"


HELD = EngineBytes(active=600, cache=100, peak=9000)


@pytest.mark.parametrize(
    ("backend", "own"), [("cpu", 300), ("cuda", None), ("metal", None), ("fake", None)]
)
def test_own_memory_is_resident_without_arrays_where_that_can_be_known(
    monkeypatch: pytest.MonkeyPatch, backend: str, own: int | None
) -> None:
    process = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=1000))
    monkeypatch.setattr(psutil, "Process", lambda: process)
    assert own_bytes(backend, HELD) == own


GIB = 2**30

MODEL = Path("/models/m")


def test_weights_above_the_limit_are_refused_with_both_numbers_and_the_key() -> None:
    with pytest.raises(BadLaunchError) as caught:
        check_weights(MODEL, 3 * GIB, 2 * GIB)
    assert str(caught.value) == (
        'the weights of /models/m need 3.00 GiB, but memory is limited to 2.00 GiB; set memory to '
        '"auto"'
    )  # fmt: skip


def test_a_limit_that_is_nearly_used_up_is_warned_of() -> None:
    assert memory_warnings(3 * GIB, None) == ()
    assert memory_warnings(4 * GIB, 5 * GIB) == ()
    assert memory_warnings(4 * GIB + 1, 5 * GIB) == (
        "4.01 GiB of the memory limit of 5.00 GiB are in use before the first request, which "
        'makes answers slow; set memory to at least "5.01 GiB"',
    )


@pytest.mark.parametrize("size", [7, 123_456_789, 987_654_321, 5_555_555_555, 81_234_567_890])
def test_the_limit_that_is_named_is_enough(size: int) -> None:
    (warning,) = memory_warnings(size, size)
    named = parse_size(warning.split('"')[1])
    check_weights(MODEL, size, named)
    assert memory_warnings(size, named) == ()


MIB = 2**20


class Process:
    """A process whose memory a test sets.

    Attributes:
        resident: its size.
        arrays: what arrays take of that.
        ended: the codes and causes with which the guard would have ended it.
    """

    def __init__(self) -> None:
        self.resident = 5 * GIB
        self.arrays = Arrays(2 * GIB, 4 * GIB)
        self.ended: list[tuple[ExitCode, str]] = []
        self.guard = MemoryGuard(
            lambda: self.resident,
            lambda: self.arrays,
            lambda code, cause: self.ended.append((code, cause)),
        )

    def prompt(self, body_bytes: int = 0, key: int = 7) -> AbstractContextManager[None]:
        return self.guard.prepares(RequestKey(key), body_bytes)

    def grow(self, count: int) -> None:
        """Grow, and be looked at often enough to be judged."""
        self.resident += count
        self.guard.look()
        self.guard.look()


@pytest.fixture
def process() -> Process:
    return Process()


def test_a_prompt_that_takes_too_much_ends_the_process_with_a_sentence(process: Process) -> None:
    with process.prompt():
        process.grow(PROMPT_LIMIT_BYTES)
        assert process.ended == []
        process.grow(MIB)
    code, cause = process.ended[0]
    assert code is ExitCode.STUCK_PROMPT
    assert "prompt of request 7 takes more than 1.00 GiB" in cause


def test_a_long_body_may_take_more_whichever_thread_prepares_it(process: Process) -> None:
    with process.prompt(key=1), process.prompt(8 * MIB, key=2):
        process.grow(PROMPT_LIMIT_BYTES + 8 * MIB * BYTES_PER_BODY_BYTE)
        assert process.ended == []
        process.grow(MIB)
    assert [cause for _, cause in process.ended if "request 1 takes more than 1.00 GiB" in cause]
    assert [cause for _, cause in process.ended if "request 2 takes more than 3.00 GiB" in cause]


def test_a_long_body_lets_no_prompt_after_it_take_more(process: Process) -> None:
    with process.prompt(8 * MIB, key=1):
        pass
    with process.prompt(key=2):
        process.grow(PROMPT_LIMIT_BYTES + MIB)
    assert process.ended


def test_short_prompts_beside_do_not_hide_one_that_grows(process: Process) -> None:
    with process.prompt():
        for _ in range(20):
            with process.prompt(key=8):
                process.grow(64 * MIB)
    assert "request 7" in process.ended[0][1]


def rows_grow(process: Process) -> None:
    process.arrays = Arrays(process.arrays.now + 3 * GIB, process.arrays.peak)
    process.resident += 3 * GIB


def a_step_of_which_only_the_peak_is_seen(process: Process) -> None:
    process.arrays = Arrays(process.arrays.now, process.arrays.peak + 3 * GIB)
    process.resident += 3 * GIB


def rows_end_and_their_memory_is_kept(process: Process) -> None:
    rows_grow(process)
    process.guard.look()
    process.arrays = Arrays(2 * GIB, process.arrays.peak)


def one_look_between_an_array_s_end_and_its_return(process: Process) -> None:
    process.resident += 3 * GIB
    process.guard.look()
    process.resident -= 3 * GIB


@pytest.mark.parametrize(
    "happens",
    [
        rows_grow,
        a_step_of_which_only_the_peak_is_seen,
        rows_end_and_their_memory_is_kept,
        one_look_between_an_array_s_end_and_its_return,
    ],
)
def test_arrays_of_running_rows_accuse_no_prompt_P7(
    process: Process, happens: Callable[[Process], None]
) -> None:
    with process.prompt():
        happens(process)
        process.grow(0)
    assert process.ended == []


def test_each_step_of_a_load_may_take_its_limit_and_no_more(process: Process) -> None:
    process.guard.loads(LoadPhase.IMPORT)
    process.grow(3 * GIB)
    for _ in range(3):
        process.guard.loads(LoadPhase.WEIGHTS)
        process.grow(LOAD_LIMIT_BYTES)
    assert process.ended == []
    process.grow(MIB)
    code, cause = process.ended[0]
    assert code is ExitCode.BAD_MODEL
    assert "describes more than its weight files hold" in cause
    process.guard.loads(LoadPhase.MATERIALISE)
    assert not process.guard.look()
