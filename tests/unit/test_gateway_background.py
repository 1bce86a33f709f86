"""Work that runs next to a block: it ends with the block, and what it raises is said at once."""

from __future__ import annotations

import asyncio
import logging

import pytest

from mlxsup.gateway.background import background


async def fail() -> None:
    raise ZeroDivisionError


async def succeed() -> None:
    pass


def test_a_bug_is_logged_while_the_block_still_runs(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> list[logging.LogRecord]:
        async with background(fail(), lost="nothing is counted"):
            for _ in range(3):  # the task, its end, and the call that follows it
                await asyncio.sleep(0)
            return list(caplog.records)

    (record,) = asyncio.run(run())
    assert (record.levelno, record.getMessage()) == (logging.ERROR, "nothing is counted")
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError


def test_work_ends_with_its_block_and_an_end_is_nothing_to_say(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ended = []

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def run() -> list[bool]:
        async with background(wait(), lost="x"), background(succeed(), lost="y"):
            await asyncio.sleep(0)
        return list(ended)

    assert asyncio.run(run()) == [True]
    assert caplog.records == []
