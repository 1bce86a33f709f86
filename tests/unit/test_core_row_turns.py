"""Rows that take turns pay for their own steps, even if each step has equally many."""

from __future__ import annotations

from dataclasses import replace

from mlxsup.protocol.ids import RequestKey

from support.core_driver import LAUNCH, Driver, entry


def test_steps_of_other_rows_are_not_alike() -> None:
    driver = Driver([entry(launch=replace(LAUNCH, max_concurrency=3))])
    driver.load()
    driver.come_up()
    for key in driver.serve("a", "b", "c"):
        driver.accept(key)
    for keys in ((1, 2), (1, 2), (2, 3), (2, 3), (1, 3)):
        driver.compute(1.0, *keys)
    driver.row()  # whoever looks has everything charged
    running = driver.model().running
    assert [running[RequestKey(key)].engine_s for key in (1, 2, 3)] == [1.5, 2.0, 1.5]
