"""Test needs of models: given limits, raises, other context lengths."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlxsup.protocol.cache_layers import CacheLayers
from mlxsup.protocol.client_messages import Failed, Load, Subscribe
from mlxsup.protocol.context_length import MAX_CONTEXT_LENGTH
from mlxsup.protocol.errors import ErrorCode
from mlxsup.protocol.ids import ModelName, RequestId
from mlxsup.protocol.states import State, WorkerPhase
from mlxsup.protocol.worker_messages import Heartbeat, Ready
from mlxsup.supervisor.config.values import parse_size
from mlxsup.supervisor.core.actions import AdoptLaunch, AppraiseLaunch, Finish, NeedRaised, Spawn
from mlxsup.supervisor.core.budget import Figure, Need, Source, raised
from mlxsup.supervisor.core.events import Appraised, LaunchAppraised, Reloaded
from mlxsup.supervisor.core.settings import CoreSettings

from support.core.driver import LAUNCH, Driver, entry
from support.core.memory import SUBSCRIPTION, MemoryDriver, limited, notes, sized, states
from support.core.needs import GIB, MIB, need
from support.core.rows import CONTEXT, FIXED, ONE_ROW, RowsDriver, bytes_for, need_of, served
from support.core.scripts import play

# `memory` of an entry

SHORT = bytes_for(rows=1, longest=256)
ENOUGH = FIXED + SHORT


def driver_of(given_bytes: int, **changes: object) -> RowsDriver:
    """One model with this `memory`, and far more budget."""
    return RowsDriver("a", 10**9, {"a": need_of(given=given_bytes, **changes)})


@pytest.mark.parametrize("given_bytes", [ENOUGH - 1, FIXED, 1])
def test_less_than_that_fails_and_never_reserves_more(given_bytes: int) -> None:
    driver = driver_of(given_bytes)
    given = f"reserved -> returns={given_bytes}"
    play(driver, f"ask r1 a; {given}; up a -> a=STOPPING; {given}; exit a 143 -> a=FAILED")
    assert (driver.budgets["a"], driver.reserved()) == ([], 0)
    error = driver.failure_of("r1").error
    assert error.code == "load_failed"
    assert "but it needs at least" in error.message
    assert parse_size(hinted(error.message)) >= ENOUGH


def hinted(problem: str) -> str:
    """Return the size that a problem says to set."""
    return problem.partition('set memory to "')[2].partition('"')[0]


def test_an_entry_with_more_that_comes_meanwhile_is_loaded() -> None:
    driver = play(driver_of(FIXED), "load a; up a")
    launch = replace(served("a").launch, memory_limit_bytes=ENOUGH)
    models, needs = (entry("a", launch=launch),), {ModelName("a"): need_of(given=ENOUGH)}
    driver.do(Reloaded(now=driver.now, settings=limited(10**9), models=models, needs=needs))
    play(driver, "exit a 143 -> a=LOADING; up a -> a=READY")


def test_a_process_that_cannot_be_measured_counts_as_appraised() -> None:
    """On a GPU, and with the fake engine."""
    assert LAUNCH.memory_limit_bytes is None
    for own, state in ((100 * MIB, State.READY), (100 * MIB + 1, State.STOPPING)):
        need = replace(
            need_of(given=100 * MIB + FIXED - FIXED // 4 + SHORT),
            own=Figure(size_bytes=own, source=Source.ESTIMATED),
        )
        driver = RowsDriver("a", 10**9, {"a": need}, own_bytes=None)
        driver.bring_up("a")
        assert driver.state("a") is state


def known(given: int | None, *, own: Source = Source.MEASURED, remark: str = "") -> Need:
    """96 MiB of weights, 32 MiB of process, 512 KiB for each MiB of a row."""
    return Need(
        weights=Figure(size_bytes=96 * MIB, source=Source.ESTIMATED),
        own=Figure(size_bytes=32 * MIB, source=own),
        layers=(CacheLayers(layers=1, token_bytes=MIB // 1024),),  # a short request takes 1 MiB
        layers_source=Source.ESTIMATED,
        context_tokens=4096,
        least_tokens=4096,
        max_rows=4,
        remark=remark,
        given_bytes=given,
    )


ALL, WITHOUT_PROCESS = 129 * MIB, 97 * MIB


@pytest.mark.parametrize(
    ("need", "least_bytes", "least_again_bytes"),
    [
        (known(1), ALL, WITHOUT_PROCESS),
        (known(1, own=Source.GIVEN), ALL, ALL),
        (known(1, own=Source.ESTIMATED), WITHOUT_PROCESS, WITHOUT_PROCESS),
        (known(1, remark="unknown type"), 128 * MIB, 96 * MIB),
    ],
)
def test_estimates_do_not_refuse_a_load(
    need: Need, least_bytes: int, least_again_bytes: int
) -> None:
    for is_measured_again, least in ((False, least_bytes), (True, least_again_bytes)):
        for given_bytes, is_wrong in ((least - 1, True), (least, False)):
            one = replace(need, given_bytes=given_bytes)
            said = one.known_problem(is_measured_again=is_measured_again)
            assert bool(said) is is_wrong


@pytest.mark.parametrize("own", list(Source))
@pytest.mark.parametrize("remark", ["", "unknown type"])
def test_the_size_that_a_hint_names_is_enough_at_every_later_check(
    own: Source, remark: str
) -> None:
    """A process that was guessed at takes up to twice as much, a measured one a quarter more."""
    typed = known(parse_size(hinted(known(1, own=own, remark=remark).known_problem())))
    most = {Source.GIVEN: 32, Source.MEASURED: 40, Source.ESTIMATED: 64}[own] * MIB
    ready = Ready(
        context_length=4096,
        fingerprint="f",
        backend="cpu",
        active_bytes=96 * MIB,
        own_bytes=most,
        cache_layers=list(typed.layers),
    )
    later = replace(typed, own=Figure(size_bytes=most, source=Source.MEASURED))
    assert typed.loaded_problem(ready) == later.known_problem() == ""
    too_little = replace(typed, given_bytes=97 * MIB + most - 1)
    again = replace(typed, given_bytes=parse_size(hinted(too_little.loaded_problem(ready))))
    larger = replace(ready, own_bytes=most + most // 4)
    assert again.loaded_problem(larger) == ""


@pytest.mark.parametrize(
    ("stream_tokens", "row_tokens"),
    [(0, 1024), (1024, 1024), (1025, 1025), (4095, 4095), (9000, 4096)],
)
def test_the_reserved_row_has_room_for_the_longest_answer_within_the_context(
    stream_tokens: int, row_tokens: int
) -> None:
    """An answer counts with a step of growth, which may take it beyond the context."""
    one = replace(known(None), least_tokens=1024)
    assert one.row_tokens(stream_tokens) == row_tokens
    assert one.needed_for(stream_tokens) == one.bytes_for(rows=1, longest=row_tokens)


# Needs raised after running out of memory

MODEL = FIXED + ONE_ROW
BESIDES = FIXED // 4 + ONE_ROW
"""What a model here needs besides its weights."""
LEAST = BESIDES // 10


def up(budget_bytes: int = 10 * MODEL) -> RowsDriver:
    driver = RowsDriver("a", budget_bytes)
    driver.bring_up("a")
    return driver


def need_raised(driver: MemoryDriver) -> list[int]:
    """What the latest event told the shell to remember."""
    return [one.raised_bytes for one in driver.of(NeedRaised)]


def test_out_of_memory_raises_the_next_reservation_by_a_tenth_besides_weights() -> None:
    higher = raised(need_of(), planned_bytes=MODEL, held_bytes=MODEL + 1)
    assert higher.needed_bytes == MODEL + LEAST
    driver = up()
    driver.say(Subscribe(id=SUBSCRIPTION))
    driver.exit("a", code=75)
    assert need_raised(driver) == [LEAST]
    assert notes(driver)[0].startswith("it ran out of memory, so a load now reserves ")
    row = driver.row("a")
    assert (row["state"], row["raised_bytes"]) == (State.LOADING, LEAST)
    assert row["needed_bytes"] == row["reserved_bytes"] == MODEL + LEAST
    driver.spawned("a", ord("a"))
    driver.measure(a=MODEL + 6000)
    driver.exit("a", code=75)
    assert need_raised(driver) == [6000], "a load that runs out of memory counts"
    assert driver.row("a")["needed_bytes"] == MODEL + 6000


def test_what_a_process_kept_for_reuse_is_not_needed() -> None:
    driver = RowsDriver("a", 10 * MODEL)
    driver.load("a")
    driver.spawned("a", ord("a"))
    driver.worker(Heartbeat(step=0, phase=WorkerPhase.LOADING, phase_s=0.0, cache_bytes=6000), "a")
    driver.measure(a=MODEL + 6000)
    driver.exit("a", code=75)
    assert need_raised(driver) == [LEAST]


@pytest.mark.parametrize("code", [0, 1, 70, 72, None])
def test_only_out_of_memory_raises_a_need(code: int | None) -> None:
    driver = up()
    driver.exit("a", code=code)
    assert (need_raised(driver), driver.row("a")["raised_bytes"]) == ([], 0)


def test_given_memory_is_never_raised() -> None:
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
    driver = up(MODEL + 10_000)
    driver.exit("a", code=75)
    settings, needs = limited(MODEL + 50), driver.core.fleet.needs
    driver.do(Reloaded(now=driver.now, settings=settings, models=(served("a"),), needs=needs))
    assert driver.row("a")["raised_bytes"] == 50


def test_raise_gives_way_to_a_begun_answer() -> None:
    driver = up(FIXED + bytes_for(1, 6000 + 256))
    key = driver.begin("a", "r", prompt=6000)
    driver.exit("a", code=75)
    assert driver.state("a") is State.LOADING, "the raise makes way"
    driver.come_up("a")
    assert driver.dispatched() == [key]


def test_a_pinned_model_is_raised_no_further_than_the_budget() -> None:
    driver = RowsDriver("ab", 2 * MODEL + 9, pinned="ab")
    driver.bring_up("a")
    driver.load("b")
    driver.confirm("a")
    driver.measure()
    driver.come_up("b")
    for name in "ab":
        driver.exit(name, code=75)
    assert [driver.row(name)["raised_bytes"] for name in "ab"] == [9, 0]
    assert driver.reserved() == 2 * MODEL + 9


def test_appraisal_replaces_a_raise() -> None:
    driver = up()
    driver.exit("a", code=75)
    for appraised, raised_bytes in (
        (replace(need_of(), raised_bytes=123), 123),
        (need_of(context=CONTEXT - 1), 0),  # its files have changed
    ):
        driver.do(Appraised(now=driver.now, needs={ModelName("a"): appraised}))
        assert driver.row("a")["raised_bytes"] == raised_bytes


def test_a_process_of_an_older_entry_raises_nothing() -> None:
    driver = up()
    driver.begin("a", "r")
    changed = entry("a", launch=replace(served("a").launch, context_length=77))
    driver.do(Reloaded(now=driver.now, settings=limited(10 * MODEL), models=(changed,)))
    driver.exit("a", code=75)
    assert need_raised(driver) == []


def test_unknown_need_keeps_its_process_reserved() -> None:
    driver = up()
    driver.do(Appraised(now=driver.now, needs={}))
    assert driver.row("a")["needed_bytes"] == MODEL
    driver.exit("a", code=75)
    assert need_raised(driver) == []
    driver.unload("a")
    driver.exit("a", code=0)
    driver.do(Appraised(now=driver.now, needs={}))
    assert driver.row("a")["needed_bytes"] == 0


# Loads with another context length

A = ModelName("a")
LOAD = RequestId("load")


def need_gib(gib: float, raised_gib: float = 0) -> Need:
    """A model that needs so much, and what running out of memory has raised that by."""
    return Need(
        weights=Figure(size_bytes=0, source=Source.MEASURED),
        own=Figure(size_bytes=int(gib * GIB), source=Source.MEASURED),
        layers=(),
        layers_source=Source.MEASURED,
        context_tokens=8192,
        least_tokens=100,
        max_rows=2,
        raised_bytes=int(raised_gib * GIB),
    )


def models(pinned: str = "", raised_gib: float = 0, **changes: Any) -> MemoryDriver:
    """`a`, `b` and `c` need 4 GiB each of 16; `b` more if its processes ran out of memory."""
    entries = [entry(name, pinned=name in pinned) for name in "abc"]
    driver = MemoryDriver(entries, limited(16 * GIB, **changes))
    needs = {ModelName(name): need_gib(4) for name in "abc"}
    needs[ModelName("b")] = need_gib(4, raised_gib)
    driver.do(Appraised(now=driver.now, needs=needs))
    return driver


def load(driver: Driver, tokens: int = 4096) -> AppraiseLaunch:
    """Asks for a load with a context; returns what the shell is asked first."""
    driver.say(Load(id=LOAD, model=A, context_length=tokens))
    [asked] = driver.of(AppraiseLaunch)
    return asked


def appraise(driver: Driver, asked: AppraiseLaunch, need: Need | None) -> None:
    """The shell answers what it was asked."""
    driver.do(
        LaunchAppraised(
            now=driver.now, model=asked.model, launch=asked.launch, caller=asked.caller, need=need
        )
    )


def load_longer(driver: Driver, gib: float) -> None:
    """Loads `a` with a context with which it needs so much."""
    appraise(driver, load(driver), need_gib(gib))


def context(driver: Driver) -> int:
    return driver.model("a").life.launch.context_length


def test_a_stopped_model_is_planned_and_started_with_the_context_that_was_asked_for() -> None:
    driver = models("b")
    asked = load(driver)
    assert (asked.model, asked.launch.context_length) == ("a", 4096)
    assert driver.state("a") is State.STOPPED, "nothing begins before its need is known"
    appraise(driver, asked, need_gib(12))
    [adopted], [spawn] = driver.of(AdoptLaunch), driver.of(Spawn)
    assert adopted.launch.context_length == spawn.launch.context_length == 4096
    assert (adopted.model, adopted.need) == ("a", need_gib(12))
    assert driver.reserved() == 16 * GIB
    driver.come_up("a")
    assert driver.replies() == [LOAD]


def test_load_with_another_context_drains_first_and_a_reload_brings_the_old_one_back() -> None:
    driver = models()
    driver.bring_up("a")
    [key] = driver.serve("runs", model="a")
    load_longer(driver, 8)
    assert (driver.state("a"), driver.replies()) == (State.DRAINING, [])
    driver.row_ends("a", key)
    driver.exit("a", code=0)
    assert context(driver) == 4096
    driver.come_up("a")
    assert driver.replies() == [LOAD]
    entries = tuple(entry(name) for name in "abc")
    driver.do(Reloaded(now=driver.now, settings=driver.core.fleet.settings, models=entries))
    assert driver.state("a") is State.STOPPING
    driver.exit("a", code=0)
    assert context(driver) == 0


def test_another_need_of_a_model_leaves_the_order_of_the_configuration() -> None:
    """Pinned models are raised in that order."""
    driver = models()
    load_longer(driver, 8)
    assert driver.core.fleet.needs[A] == need_gib(8)
    assert "".join(driver.core.fleet.needs) == "abc"
    appraise(driver, load(driver, 8192), None)
    assert "".join(driver.core.fleet.needs) == "bc", "its files cannot be read"


@pytest.mark.parametrize("event", ["removal", "another folder", "shutdown"])
def test_a_load_whose_need_comes_too_late_starts_nothing(event: str) -> None:
    driver = models()
    asked = load(driver)
    if event == "shutdown":
        driver.signal()
        assert driver.errors() == {LOAD: "shutting_down"}
        assert driver.of(Finish) == [Finish()]
    else:
        elsewhere = entry("a", launch=replace(LAUNCH, path="/elsewhere"))
        models_then = (elsewhere,) if event == "another folder" else (entry("b"),)
        driver.do(Reloaded(now=driver.now, settings=CoreSettings(), models=models_then))
    appraise(driver, asked, need_gib(8))
    code = {"removal": "unknown_model", "another folder": "superseded"}.get(event)
    assert driver.errors() == ({LOAD: code} if code else {}), "once"
    assert driver.of(Spawn) == []


def test_invalid_context_length_is_refused() -> None:
    driver = models()
    driver.say(Load(id=LOAD, model=A, context_length=-1))
    assert driver.of(AppraiseLaunch) == []
    [failed] = driver.sent(Failed)
    assert failed.error.code == "invalid_request"
    assert failed.error.message == (
        f"context_length must be an integer from 0 to {MAX_CONTEXT_LENGTH}, not -1"
    )
    assert failed.error.detail["parameter"] == "context_length"
    assert driver.state("a") is State.STOPPED


def test_a_context_that_the_model_does_not_have_is_refused_before_its_process_ends() -> None:
    driver = models()
    driver.load("a")
    driver.come_up("a")
    appraise(driver, load(driver, 8193), need_gib(4))
    [failed] = driver.sent(Failed)
    assert failed.error.message == "a has a context of 8192 tokens, not of 8193"
    assert driver.state("a") is State.READY
    assert driver.of(AdoptLaunch) == []


@pytest.mark.parametrize("name", ["context_length", "keep_alive"])
def test_a_dry_run_of_another_load_than_the_configured_one_is_refused(name: str) -> None:
    driver = models()
    changes: dict[str, Any] = {name: 5}
    driver.say(Load(id=LOAD, model=A, dry_run=True, **changes))
    [failed] = driver.sent(Failed)
    assert failed.error.code == "invalid_request"
    assert failed.error.message.endswith(f"uses the configured settings; remove {name}")
    assert failed.error.detail == {"parameter": name}
    assert driver.state("a") is State.STOPPED


@pytest.mark.parametrize(
    ("pinned", "gib", "why"),
    [
        ("", 40, "it needs 40.00 GiB, but the memory budget is 16.00 GiB"),
        ("a", 40, "it needs 40.00 GiB, but the memory budget is 16.00 GiB"),
        (
            "bc",
            9,
            "it needs 9.00 GiB of 16.00 GiB: b is pinned and holds 4.00 GiB;"
            " c is pinned and holds 4.00 GiB",
        ),
    ],
)
def test_load_that_cannot_fit_changes_nothing(pinned: str, gib: int, why: str) -> None:
    driver = models(pinned)
    driver.bring_up("a", "b", "c")
    [key] = driver.serve("r1", model="a")
    load_longer(driver, gib)
    error = driver.failure_of(LOAD).error
    assert error.code == ErrorCode.INSUFFICIENT_MEMORY
    assert error.message == f"a cannot be loaded: {why}"
    assert (context(driver), driver.row("a")["needed_bytes"]) == (0, 4 * GIB)
    assert driver.of(AdoptLaunch) == []
    assert states(driver) == [State.READY] * 3
    assert driver.reserved() == 12 * GIB
    driver.row_ends("a", key)
    assert driver.errors() == {}


def test_raise_of_a_pinned_model_gives_way() -> None:
    driver = models("b", raised_gib=6)
    assert driver.row("b")["reserved_bytes"] == 10 * GIB
    load_longer(driver, 11)
    assert driver.state("a") is State.LOADING
    assert driver.row("b")["reserved_bytes"] == 5 * GIB


def test_without_a_budget_nothing_is_refused() -> None:
    driver = models(budget=None)
    load_longer(driver, 400)
    assert driver.state("a") is State.LOADING
