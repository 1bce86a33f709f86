"""The process of the gateway: what is reported of its life, and of an end that was asked for."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlxsup.protocol.gateway import Address, GatewayRules
from mlxsup.supervisor.core.actions import StartGateway
from mlxsup.supervisor.core.events import Event, GatewayEnded, GatewayListening
from mlxsup.supervisor.gateway import GatewayKeeper
from mlxsup.supervisor.log_files import LogWriter

from support.eventually_async import eventually_async
from support.played_daemon import short_folder

PLAYED = """\
import json, os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
os.write(json.loads(sys.stdin.readline())["ready_pipe"], b"1")
signal.pause()
"""
ANYWHERE = StartGateway(number=1, address=Address(host="127.0.0.1", port=0))

Logged = list[tuple[str, str]]


def live(
    scene: Callable[[GatewayKeeper, list[Event]], Awaitable[None]],
) -> tuple[list[Event], Logged]:
    """What is posted and logged while a scene is played with a keeper."""
    events: list[Event] = []
    logged: Logged = []

    async def play(folder: Path) -> None:
        writer = LogWriter(pytest.fail)
        around: Any = SimpleNamespace(
            folder=SimpleNamespace(path=folder, client_socket=folder / "client.sock"),
            record=SimpleNamespace(add=lambda *_: None, remove=lambda *_: None),
            log=SimpleNamespace(write=lambda level, text, **_: logged.append((level, text))),
            log_level="info",
            post=events.append,
            now=lambda: 5.0,
        )
        argv = (sys.executable, "-c", PLAYED)
        keeper = GatewayKeeper(around, folder, writer, lambda *_: None, GatewayRules(), argv)
        async with asyncio.TaskGroup() as tasks:
            keeper.start(ANYWHERE, tasks)
            await scene(keeper, events)
        keeper.close()
        assert writer.close(60.0)

    with short_folder() as folder:
        asyncio.run(asyncio.wait_for(play(folder), 60.0))
    return events, logged


async def until_it_listens(events: list[Event]) -> None:
    await eventually_async(
        lambda: any(isinstance(event, GatewayListening) for event in events), timeout_s=30.0
    )


def test_an_end_that_was_asked_for_is_no_crash() -> None:
    async def scene(keeper: GatewayKeeper, events: list[Event]) -> None:
        await until_it_listens(events)
        assert keeper.pid is not None
        await keeper.end()
        assert keeper.pid is None

    events, logged = live(scene)
    assert [type(event) for event in events] == [GatewayListening], "nobody starts another one"
    assert logged[-1] == ("info", "gateway exited")


def test_one_that_has_not_begun_when_the_end_comes_is_not_started() -> None:
    async def scene(keeper: GatewayKeeper, events: list[Event]) -> None:
        await keeper.end()

    assert live(scene) == ([], [])


def test_an_end_that_nobody_asked_for_is_a_crash() -> None:
    async def scene(keeper: GatewayKeeper, events: list[Event]) -> None:
        await until_it_listens(events)
        assert keeper.pid is not None
        os.kill(keeper.pid, signal.SIGKILL)
        await eventually_async(lambda: isinstance(events[-1], GatewayEnded), timeout_s=30.0)

    events, logged = live(scene)
    assert events[-1] == GatewayEnded(
        now=5.0, number=1, cause="it ended with signal SIGKILL", is_crash=True
    )
    assert ("warning", "gateway exited") in logged
