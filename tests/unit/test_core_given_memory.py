"""The `memory` of an entry is its limit: a model that needs more fails, and says how much."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlxsup.protocol.cache_layers import CacheLayers
from mlxsup.protocol.states import State
from mlxsup.supervisor.config.values import parse_size
from mlxsup.supervisor.core.events import Reloaded
from mlxsup.supervisor.core.memory.given import known_problem
from mlxsup.supervisor.core.memory.need import Figure, Need, Source
from mlxsup.supervisor.core.settings import ModelSettings

from support.core_driver import LAUNCH
from support.core_memory import limited
from support.core_rows import FIXED, RowsDriver, bytes_for, need_of, served
from support.needs import MIB

SHORT = bytes_for(rows=1, longest=256)
ENOUGH = FIXED + SHORT


def driver_of(given_bytes: int, **changes: object) -> RowsDriver:
    """One model with this `memory`, and far more budget."""
    return RowsDriver("a", 10**9, {"a": need_of(given=given_bytes, **changes)})


def test_enough_for_one_short_request_is_enough() -> None:
    driver = driver_of(ENOUGH)
    driver.bring_up("a")
    assert driver.state("a") is State.READY
    assert (driver.budget("a"), driver.reserved()) == (SHORT, ENOUGH)
    assert driver.begin("a", "r1", prompt=100) in driver.model("a").running


@pytest.mark.parametrize("given_bytes", [ENOUGH - 1, FIXED, 1])
def test_less_than_that_fails_and_never_reserves_more(given_bytes: int) -> None:
    driver = driver_of(given_bytes)
    driver.ask("r1", "a")
    assert driver.reserved() == given_bytes
    driver.come_up("a")
    assert (driver.state("a"), driver.reserved()) == (State.STOPPING, given_bytes)
    assert driver.budgets["a"] == []
    driver.exit("a", 143)
    assert (driver.state("a"), driver.reserved()) == (State.FAILED, 0)
    error = driver.failure_of("r1").error
    assert error["code"] == "load_failed"
    assert "and it needs at least" in error["message"]
    assert error["message"].endswith('set memory to at least "10.8 KiB", or to "auto"')
    assert parse_size("10.8 KiB") >= ENOUGH


def test_a_context_shorter_than_a_short_request_needs_less() -> None:
    driver = driver_of(FIXED + bytes_for(rows=1, longest=10), context=10, least=10)
    driver.bring_up("a")
    assert driver.state("a") is State.READY


def test_an_entry_with_more_that_comes_meanwhile_is_loaded() -> None:
    driver = driver_of(FIXED)
    driver.load("a")
    driver.come_up("a")
    models, needs = (_with_memory(ENOUGH),), {driver.model("a").name: need_of(given=ENOUGH)}
    driver.do(Reloaded(now=driver.now, settings=limited(10**9), models=models, needs=needs))
    driver.exit("a", 143)
    assert driver.state("a") is State.LOADING
    driver.come_up("a")
    assert driver.state("a") is State.READY


def _with_memory(size_bytes: int) -> ModelSettings:
    entry = served("a")
    return replace(entry, launch=replace(entry.launch, memory_limit_bytes=size_bytes))


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


# ---------------------------------------------------------------- before a load


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
def test_what_is_only_estimated_does_not_count_before_a_load(
    need: Need, least_bytes: int, least_again_bytes: int
) -> None:
    for is_measured_again, least in ((False, least_bytes), (True, least_again_bytes)):
        for given_bytes, is_wrong in ((least - 1, True), (least, False)):
            one = replace(need, given_bytes=given_bytes)
            said = known_problem(one, is_measured_again=is_measured_again)
            assert bool(said) is is_wrong
            assert not is_wrong or f'at least "{least // MIB}.0 MiB"' in said


def test_the_sentence_names_each_part_and_what_would_do() -> None:
    assert known_problem(known(100 * MIB)) == (
        "its memory is 100.0 MiB, and it needs at least 96.0 MiB for its weights + 32.0 MiB for its"
        ' process + 1.0 MiB for a short request: set memory to at least "129.0 MiB", or to "auto"'
    )
    assert known_problem(known(None)) == ""
