"""A process that runs out of memory raises what is reserved for the next one, within bounds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsup.protocol.client_messages import Subscribe
from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.states import State, WorkerPhase
from mlxsup.protocol.worker_messages import Heartbeat
from mlxsup.supervisor.core.actions import NeedRaised
from mlxsup.supervisor.core.events import Appraised, Reloaded
from mlxsup.supervisor.core.memory.need import Need
from mlxsup.supervisor.core.memory.raising import bounded, raised

from support.core_memory import SUBSCRIPTION, MemoryDriver, limited, notes, sized
from support.core_rows import CONTEXT, FIXED, ONE_ROW, RowsDriver, bytes_for, need_of, served
from support.needs import GIB, need

MODEL = FIXED + ONE_ROW
BESIDES = FIXED // 4 + ONE_ROW
"""What a model here needs besides its weights."""

LEAST = BESIDES // 10

# ---------------------------------------------------------------- by how much


def test_it_is_raised_by_what_was_held_beyond_the_plan() -> None:
    one = need_of()
    higher = raised(one, planned_bytes=MODEL, held_bytes=MODEL + 7000)
    assert higher.needed_bytes == MODEL + 7000
    assert raised(higher, planned_bytes=MODEL + 7000, held_bytes=0).raised_bytes > 7000


def test_it_is_raised_by_a_tenth_of_what_it_needs_besides_its_weights_at_least() -> None:
    higher = raised(need_of(), planned_bytes=MODEL, held_bytes=MODEL + 1)
    assert higher.needed_bytes == MODEL + LEAST


def test_what_the_entry_gives_stays() -> None:
    given_need = need_of(given=MODEL)
    assert raised(given_need, planned_bytes=MODEL, held_bytes=9 * MODEL) == given_need
    assert replace(given_need, raised_bytes=500).needed_bytes == MODEL


def test_it_is_not_raised_beyond_what_there_may_be() -> None:
    one = replace(need_of(), most_bytes=MODEL + 30)
    higher = raised(one, planned_bytes=MODEL, held_bytes=9 * MODEL)
    assert (higher.raised_bytes, higher.needed_bytes) == (30, MODEL + 30)
    assert raised(higher, planned_bytes=MODEL, held_bytes=9 * MODEL) == higher


def test_a_long_answer_takes_the_room_of_the_raise() -> None:
    one = replace(need_of(), raised_bytes=5000, most_bytes=FIXED + bytes_for(1, 4000))
    assert one.needed_for(1000) == FIXED + bytes_for(1, 1000) + 5000
    assert one.needed_for(2000) == FIXED + bytes_for(1, 4000), "4000 of 5000"
    assert one.needed_for(4000) == FIXED + bytes_for(1, 4000)
    assert one.needed_for(6000) == FIXED + bytes_for(1, 6000)


sizes = st.integers(0, 50)
raises = st.integers(0, 200)


@given(
    needs=st.lists(st.tuples(sizes, raises, st.booleans(), st.booleans()), min_size=1, max_size=6),
    budget=st.integers(0, 200),
)
def test_whoever_fits_as_all_were_appraised_fits_raised(
    needs: list[tuple[int, int, bool, bool]], budget: int
) -> None:
    names = [ModelName(f"m{place}") for place in range(len(needs))]
    plain, all_raised, pinned = {}, {}, []
    for name, (size, more, is_given, is_pinned) in zip(names, needs, strict=True):
        one = need(size, layers=(), given=size if is_given else None)
        plain[name], all_raised[name] = one.needed_bytes, replace(one, raised_bytes=more)
        if is_pinned:
            pinned.append(name)
    found = bounded(all_raised, pinned, budget)
    assert list(found) == names
    for name in names:
        assert plain[name] <= found[name].needed_bytes <= plain[name] + needs[names.index(name)][1]
    if sum(plain[name] for name in pinned) > budget:
        assert all(found[name].needed_bytes == plain[name] for name in pinned)
        return
    held = sum(found[name].needed_bytes for name in pinned)
    assert held <= budget
    left = budget - sum(plain[name] for name in pinned)
    for name in names:
        if name not in pinned and plain[name] <= left:
            assert found[name].needed_bytes <= budget - held


# ---------------------------------------------------------------- when, and what follows


def need_raised(driver: MemoryDriver) -> list[int]:
    """What the latest event told the shell to remember."""
    return [one.raised_bytes for one in driver.actions if isinstance(one, NeedRaised)]


def test_the_next_load_reserves_more_and_everybody_is_told() -> None:
    driver = RowsDriver("a", 10 * MODEL)
    driver.say(Subscribe(id=SUBSCRIPTION))
    driver.bring_up("a")
    driver.exit("a", code=75)
    assert need_raised(driver) == [LEAST]
    assert notes(driver)[0].startswith("it ran out of memory: from now on ")
    row = driver.row("a")
    assert (row["state"], row["raised_bytes"]) == (State.LOADING, LEAST)
    assert row["needed_bytes"] == row["reserved_bytes"] == MODEL + LEAST


def test_a_process_that_is_ready_leaves_the_raise_to_nobody() -> None:
    driver = RowsDriver("a", MODEL + 10_000)
    driver.bring_up("a")
    assert driver.budget("a") == ONE_ROW + 10_000
    driver.exit("a", code=75)
    driver.come_up("a")
    assert driver.budget("a") == ONE_ROW + 10_000 - LEAST
    assert driver.reserved() == MODEL + 10_000


def test_what_a_process_was_last_measured_at_counts_without_what_it_kept_for_reuse() -> None:
    driver = RowsDriver("a", 10 * MODEL)
    driver.bring_up("a")
    planned = driver.reserved()
    beat = Heartbeat(
        step=0, phase=WorkerPhase.IDLE, phase_s=0.0, budget=1, cache_bytes=1000, prefix_bytes=500
    )
    driver.worker(beat, "a")
    driver.measure(a=planned + 9000)
    driver.exit("a", code=75)
    assert need_raised(driver) == [7500]


def test_a_load_that_runs_out_of_memory_counts() -> None:
    driver = RowsDriver("a", 10 * MODEL)
    driver.load("a")
    driver.spawned("a", ord("a"))
    driver.measure(a=MODEL + 6000)
    driver.exit("a", code=75)
    assert need_raised(driver) == [6000]
    assert driver.row("a")["needed_bytes"] == MODEL + 6000


@pytest.mark.parametrize("code", [0, 1, 70, 72])
def test_no_other_exit_raises_anything(code: int) -> None:
    driver = RowsDriver("a", 10 * MODEL)
    driver.bring_up("a")
    driver.exit("a", code=code)
    assert (need_raised(driver), driver.row("a")["raised_bytes"]) == ([], 0)


def test_a_kill_raises_nothing() -> None:
    driver = RowsDriver("a", 10 * MODEL)
    driver.bring_up("a")
    driver.exit("a", signal="SIGKILL")
    assert need_raised(driver) == []


def test_a_model_whose_entry_gives_its_memory_needs_what_it_says() -> None:
    driver = MemoryDriver([sized("a", 4 * GIB)], limited(8 * GIB))
    given_need = need(GIB, given=4 * GIB)
    driver.do(Appraised(now=driver.now, needs={ModelName("a"): given_need}))
    driver.bring_up("a")
    driver.exit("a", code=75)
    assert (need_raised(driver), driver.row("a")["needed_bytes"]) == ([], 4 * GIB)


def test_a_model_alone_is_never_refused_because_of_it() -> None:
    driver = RowsDriver("a", MODEL + 100)
    for _ in range(4):
        driver.bring_up("a")
        driver.exit("a", code=75)
        assert driver.row("a")["needed_bytes"] <= MODEL + 100
        driver.now += 1000.0
        driver.pass_time(0.0)
    assert driver.row("a")["raised_bytes"] == 100
    driver.come_up("a")
    assert driver.state("a") is State.READY


def test_a_smaller_budget_takes_the_raise_back_first() -> None:
    driver = RowsDriver("a", MODEL + 10_000)
    driver.bring_up("a")
    driver.exit("a", code=75)
    assert driver.row("a")["raised_bytes"] == LEAST
    settings, needs = limited(MODEL + 50), driver.core.fleet.needs
    driver.do(Reloaded(now=driver.now, settings=settings, models=(served("a"),), needs=needs))
    assert driver.row("a")["raised_bytes"] == 50


def test_an_answer_that_needs_all_there_is_gets_it_from_the_raise() -> None:
    longest = bytes_for(1, 6000 + 256)
    driver = RowsDriver("a", FIXED + longest)
    driver.bring_up("a")
    driver.exit("a", code=75)
    driver.come_up("a")
    assert driver.budget("a") == longest - LEAST
    key = driver.begin("a", "r", prompt=6000)
    driver.confirm("a")
    driver.now += 1
    driver.measure()
    assert driver.budget("a") == longest
    driver.end("a", key)
    assert driver.errors() == {}


def test_no_more_of_the_raise_gives_way_than_an_answer_needs() -> None:
    longest = bytes_for(1, 6000 + 256)
    driver = RowsDriver("a", FIXED + longest)
    driver.bring_up("a")
    driver.exit("a", code=75)
    driver.come_up("a")
    prompt = 6000 - LEAST // 4
    driver.begin("a", "r", prompt=prompt)
    driver.confirm("a")
    driver.now += 1
    driver.measure()
    assert longest - LEAST < driver.budget("a") == bytes_for(1, prompt + 256) < longest


def test_its_next_load_has_room_for_an_answer_that_has_begun() -> None:
    longest = bytes_for(1, 6000 + 256)
    driver = RowsDriver("a", FIXED + longest)
    driver.bring_up("a")
    key = driver.begin("a", "r", prompt=6000)
    driver.exit("a", code=75)
    assert driver.state("a") is State.LOADING, "the raise makes way"
    driver.come_up("a")
    assert driver.dispatched() == [key]


def test_a_pinned_model_is_raised_no_further_than_the_budget() -> None:
    driver = MemoryDriver(
        [served("a", pinned=True), served("b", pinned=True)], limited(2 * MODEL + 9)
    )
    needs = {ModelName(name): need_of() for name in "ab"}
    driver.do(Appraised(now=driver.now, needs=needs))
    driver.bring_up("a", "b")
    for name in "ab":
        driver.exit(name, code=75)
    assert [driver.row(name)["raised_bytes"] for name in "ab"] == [9, 0]
    assert driver.reserved() == 2 * MODEL + 9


def test_what_the_shell_says_replaces_it() -> None:
    driver = RowsDriver("a", 10 * MODEL)
    driver.bring_up("a")
    driver.exit("a", code=75)
    remembered: dict[ModelName, Need] = {ModelName("a"): replace(need_of(), raised_bytes=123)}
    driver.do(Appraised(now=driver.now, needs=remembered))
    assert driver.row("a")["raised_bytes"] == 123
    driver.do(Appraised(now=driver.now, needs={ModelName("a"): need_of(context=CONTEXT - 1)}))
    assert driver.row("a")["raised_bytes"] == 0, "its files have changed"


def test_a_process_of_an_older_entry_raises_nothing() -> None:
    driver = RowsDriver("a", 10 * MODEL)
    driver.bring_up("a")
    driver.begin("a", "r")
    entry = served("a")
    changed = replace(entry, launch=replace(entry.launch, context_length=77))
    driver.do(Reloaded(now=driver.now, settings=limited(10 * MODEL), models=(changed,)))
    driver.exit("a", code=75)
    assert need_raised(driver) == []


def test_what_is_no_longer_known_counts_for_its_process_and_is_not_raised() -> None:
    driver = RowsDriver("a", 10 * MODEL)
    driver.bring_up("a")
    driver.do(Appraised(now=driver.now, needs={}))
    assert driver.row("a")["needed_bytes"] == MODEL
    driver.exit("a", code=75)
    assert need_raised(driver) == []
    driver.unload("a")
    driver.exit("a", code=0)
    driver.do(Appraised(now=driver.now, needs={}))
    assert driver.row("a")["needed_bytes"] == 0
