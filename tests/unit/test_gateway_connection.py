"""Time limits of one HTTP connection, with a transport that is played."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest
import uvicorn
from starlette.responses import PlainTextResponse
from uvicorn.server import ServerState

from mlxsup.gateway import limits
from mlxsup.gateway.connection import LimitedProtocol

TURNS = 3
"""Of the loop, in which a timer of no time has run."""


class Wire:
    """A transport; counts how often it was aborted."""

    def __init__(self) -> None:
        self.aborts = 0

    def get_extra_info(self, name: str) -> None:
        """Nothing is known."""

    def abort(self) -> None:
        """The connection is cut."""
        self.aborts += 1

    def close(self) -> None:
        """It ends in order."""

    def is_closing(self) -> bool:
        """Whether it was."""
        return self.aborts > 0


def aborts_after(*steps: Callable[[LimitedProtocol], None]) -> int:
    """How often a connection was cut on which this happened."""
    wire = Wire()

    async def run() -> None:
        config = uvicorn.Config(
            PlainTextResponse("yes"), lifespan="off", ws="none", log_config=None
        )
        protocol = LimitedProtocol(config, ServerState(), {})
        protocol.connection_made(cast(Any, wire))
        for step in steps:
            step(protocol)
        for _ in range(TURNS):
            await asyncio.sleep(0)

    asyncio.run(run())
    return wire.aborts


def stop(protocol: LimitedProtocol) -> None:
    protocol.pause_writing()


def catch_up(protocol: LimitedProtocol) -> None:
    protocol.resume_writing()


def leave(protocol: LimitedProtocol) -> None:
    protocol.connection_lost(None)


@pytest.mark.parametrize(
    ("steps", "aborts"),
    [
        pytest.param((stop,), 1, id="who never reads is cut off"),
        pytest.param((stop, catch_up), 0, id="who reads on is not"),
        pytest.param((stop, catch_up, stop), 1, id="nor does that excuse the next time"),
        pytest.param((stop, leave), 0, id="who has left keeps no timer"),
    ],
)
def test_a_reader_has_a_limited_time(
    monkeypatch: pytest.MonkeyPatch,
    steps: tuple[Callable[[LimitedProtocol], None], ...],
    aborts: int,
) -> None:
    monkeypatch.setattr(limits, "UNREAD_LIMIT_S", 0.0)
    assert aborts_after(*steps) == aborts


@pytest.mark.parametrize(("steps", "aborts"), [((), 1), ((leave,), 0)])
def test_a_head_has_a_limited_time(
    monkeypatch: pytest.MonkeyPatch,
    steps: tuple[Callable[[LimitedProtocol], None], ...],
    aborts: int,
) -> None:
    monkeypatch.setattr(limits, "HEAD_LIMIT_S", 0.0)
    assert aborts_after(*steps) == aborts
