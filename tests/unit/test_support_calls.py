"""A count of calls is that of the code alone, whatever the garbage collector does meanwhile."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from support.gateway.calls import calls_of


@pytest.fixture
def busy_collector() -> Iterator[None]:
    """A collector that runs at every few objects and calls a function each time."""

    def called(phase: str, info: dict[str, int]) -> None:
        pass

    threshold = gc.get_threshold()
    gc.callbacks.append(called)
    gc.set_threshold(5)
    yield
    gc.set_threshold(*threshold)
    gc.callbacks.remove(called)


def make_objects() -> None:
    kept: list[object] = []
    for _ in range(100):
        kept.append([kept])


@pytest.mark.usefixtures("busy_collector")
def test_the_collector_is_not_counted() -> None:
    appends, last_call = 100, 1
    assert calls_of(make_objects) == 1 + appends + last_call
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        calls_of(make_objects)
        assert not gc.isenabled()
    finally:
        gc.enable()
