"""Cancels that cross something else on the way: one end each, and no place lost (D5, D6)."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from mlxsup.protocol.client_messages import Done
from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.states import FinishReason, State
from mlxsup.protocol.worker_messages import CancelRow, Rejected
from mlxsup.supervisor.core.events import ConnectionId

from support.core_driver import Driver
from support.core_looks import ALICE, BOB
from support.core_states import in_state

ROWS = 2
"""Of the model in READY."""


def reject(driver: Driver) -> object:
    error = RemoteError(ErrorCode.INVALID_REQUEST, "no").to_wire()
    return driver.worker(Rejected(key=RequestKey(1), error=error))


CROSSINGS: dict[str, Callable[[Driver], object]] = {
    "its end": lambda driver: driver.token(1, finish=FinishReason.STOP),
    "a token and its end": lambda driver: (
        driver.token(1),
        driver.token(1, finish=FinishReason.LENGTH),
    ),
    "a rejection": reject,
    "the row's leaving": lambda driver: driver.row_left(1),
}
"""What the worker had sent when the cancel of its request 1 reached the supervisor."""


def ends(driver: Driver, id: str = "r1", connection: ConnectionId = ALICE) -> list[str]:
    """How a request ended, each time that its client heard of an end."""
    return [
        str(message.finish_reason) if isinstance(message, Done) else message.error["code"]
        for message in driver.terminals.get((connection, id), [])
    ]


@pytest.mark.parametrize("cancels", [1, 2, 3])
@pytest.mark.parametrize("crossing", CROSSINGS)
def test_a_cancel_that_crosses_an_end_is_one_end_and_one_free_place_D6(
    crossing: str, cancels: int
) -> None:
    driver = in_state(State.READY)
    told = []
    for _ in range(cancels):
        driver.cancel()
        told += driver.told(CancelRow)
    assert told == [CancelRow(key=RequestKey(1))], "the worker hears of it once"
    CROSSINGS[crossing](driver)
    driver.cancel()
    assert driver.actions == []
    assert ends(driver) == ["cancelled"]
    for number in range(ROWS + 1):
        driver.ask(f"next{number}", connection=BOB)
    assert len(driver.row()["running"]) == ROWS, "its place is free"
    driver.token(2, finish=FinishReason.STOP)
    assert driver.dispatched() == [4]
    driver.token(3, 4, finish=FinishReason.STOP)
    assert [ends(driver, f"next{n}", BOB) for n in range(ROWS + 1)] == [["stop"]] * 3


@pytest.mark.parametrize("is_first", [True, False], ids=["cancel, exit", "exit, cancel"])
def test_a_cancel_that_crosses_a_crash_is_one_end_and_nothing_is_resumed_D6(
    is_first: bool,
) -> None:
    driver = in_state(State.READY)
    driver.token(1)
    events: list[Callable[[], object]] = [driver.cancel, driver.exit]
    for event in events if is_first else reversed(events):
        event()
    driver.come_up()
    assert driver.dispatched() == []
    assert ends(driver) == ["cancelled"]
    assert (driver.row()["running"], driver.row()["queued"]) == ([], 0)


def test_what_a_worker_is_told_of_a_request_is_told_in_order_D5() -> None:
    """Asked for, cancelled and asked for again in all orders of three ids: no cancel of a key goes
    to the worker before its dispatch."""
    for order in itertools.permutations("abcabc"):
        driver = Driver()
        driver.load()
        driver.come_up()
        dispatched: set[int] = set()
        is_open: set[str] = set()
        for id in order:
            (driver.cancel if id in is_open else driver.ask)(id)
            is_open ^= {id}
            dispatched.update(driver.dispatched())
            for cancel in driver.told(CancelRow):
                assert cancel.key in dispatched, order
        assert all(ends(driver, id) == ["cancelled"] for id in "abc")
