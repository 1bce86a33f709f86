"""The process of the gateway: what is reported of its life, and of an end that was asked for."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from mlxsup.protocol.gateway import Address, GatewayRules
from mlxsup.supervisor import gateway as gateway_module
from mlxsup.supervisor.core.actions import StartGateway
from mlxsup.supervisor.core.events import Event, GatewayEnded, GatewayListening
from mlxsup.supervisor.gateway import GatewayKeeper, address_of, bind, why_not
from mlxsup.supervisor.log_files import LogWriter
from mlxsup.supervisor.sockets.connection import Turns
from mlxsup.supervisor.workers import process as process_module
from mlxsup.supervisor.workers.instance import Surroundings

from support.daemon.played_daemon import short_folder
from support.eventually_async import eventually_async
from support.gateway.key_place import place_in
from support.unwaited import collect_unwaited

PLAYED = """\
import json, os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
os.write(json.loads(sys.stdin.readline())["beat_pipe"], b".")
signal.pause()
"""
ANYWHERE = StartGateway(number=1, address=Address(host="127.0.0.1", port=0))

DEAF = PLAYED.replace("lambda *_: sys.exit(0)", "signal.SIG_IGN")
LINGERS = """\
import os, sys
sys.stdin.readline()
ready, theirs = os.pipe()
if os.fork() == 0:
    os.setsid()
    os.write(theirs, b"!")
    sys.stdin.read()
    os._exit(0)
os.read(ready, 1)
os._exit(3)
"""
"""Ends at once; another process, which is not in its group, still has its pipes."""

Logged = list[tuple[str, str]]


def live(
    scene: Callable[[GatewayKeeper, list[Event]], Awaitable[None]],
    *,
    script: str = PLAYED,
    argv: Sequence[str] | None = None,
    start: StartGateway = ANYWHERE,
    facts: list[dict[str, Any]] | None = None,
    listens: Callable[[str, int], None] = lambda *_: None,
    left: int = 0,
) -> tuple[list[Event], Logged]:
    """What is posted and logged while a scene is played with a keeper.

    Args:
        scene: what is played.
        script: of the process.
        argv: the command that starts a gateway, instead of that.
        start: how it is started.
        facts: gets those of each line of the log.
        listens: called when it listens.
        left: processes that the record of live processes names in the end.
    """
    events: list[Event] = []
    logged: Logged = []
    recorded: dict[int, str] = {}

    def log(level: str, text: str, **given: Any) -> None:
        logged.append((level, text))
        if facts is not None:
            facts.append(given)

    async def play(folder: Path) -> None:
        writer = LogWriter(pytest.fail)
        parts: dict[str, Any] = {
            "folder": SimpleNamespace(path=folder, client_socket=folder / "client.sock"),
            "record": SimpleNamespace(
                add=lambda name, pid: recorded.update({pid: name}), remove=recorded.pop
            ),
            "log": SimpleNamespace(write=log, level="info"),
        }
        around = Surroundings(**parts, argv=(), post=events.append, turns=Turns(lambda: 5.0))
        command = argv or (sys.executable, "-c", script)
        keeper = GatewayKeeper(
            around, folder, writer, listens, GatewayRules(), place_in(folder), command
        )
        async with asyncio.TaskGroup() as tasks:
            keeper.start(start, tasks)
            await scene(keeper, events)
        keeper.close()
        assert writer.close(60.0)

    with short_folder() as folder:
        asyncio.run(asyncio.wait_for(play(folder), 60.0))
    assert len(recorded) == left, recorded
    return events, logged


async def until_it_listens(events: list[Event]) -> None:
    await eventually_async(lambda: any(isinstance(event, GatewayListening) for event in events))


async def until_it_ended(keeper: GatewayKeeper, events: list[Event]) -> None:
    await eventually_async(lambda: events and isinstance(events[-1], GatewayEnded))


def test_one_that_has_not_begun_when_the_end_comes_is_not_started() -> None:
    async def scene(keeper: GatewayKeeper, events: list[Event]) -> None:
        await keeper.end()

    assert live(scene) == ([], [])


KILLED = PLAYED.replace("signal.pause()", "os.kill(os.getpid(), 9)")
CRASHES = {
    "killed": ((sys.executable, "-c", KILLED), "it ended with signal SIGKILL", "gateway exited"),
    "pipes held": ((sys.executable, "-c", LINGERS), "it ended with exit code 3", "gateway exited"),
    "never started": (
        ("/nowhere/python",),
        "it could not be started: No such file or directory",
        "gateway not started",
    ),
}


@pytest.mark.parametrize("name", CRASHES)
def test_an_unexpected_end_is_a_crash_and_leaves_nothing_open(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "LAST_WORDS_S", 0.01)
    argv, cause, said = CRASHES[name]
    open_files = psutil.Process().num_fds()
    events, logged = live(until_it_ended, argv=argv)
    assert events[-1] == GatewayEnded(now=5.0, number=1, cause=cause, is_crash=True)
    assert logged[-1][1] == said
    assert logged[-1][0] in ("warning", "error")
    assert psutil.Process().num_fds() == open_files


def test_without_a_free_file_it_is_not_started_and_posts_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> tuple[int, int]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "pipe", refuse)
    events, logged = live(until_it_ended)
    cause = f"it could not be started: {os.strerror(errno.EMFILE)}"
    assert events == [GatewayEnded(now=5.0, number=1, cause=cause, is_crash=True)]
    assert logged == [("error", "gateway not started")]


def test_one_that_does_not_end_when_it_is_asked_to_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gateway_module, "END_LIMIT_S", 0.01)
    facts: list[dict[str, Any]] = []

    async def scene(keeper: GatewayKeeper, events: list[Event]) -> None:
        await until_it_listens(events)
        await keeper.end()
        assert keeper.pid is None

    _, logged = live(scene, script=DEAF, facts=facts)
    assert logged[-1] == ("info", "gateway exited")
    assert facts[-1]["signal"] == "SIGKILL"


def test_one_that_cannot_be_killed_is_left_behind_and_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("END_LIMIT_S", "KILL_LIMIT_S"):
        monkeypatch.setattr(gateway_module, name, 0.01)
    facts: list[dict[str, Any]] = []
    pids: list[int] = []

    async def scene(keeper: GatewayKeeper, events: list[Event]) -> None:
        await until_it_listens(events)
        assert keeper.pid is not None
        pids.append(keeper.pid)
        with monkeypatch.context() as patch:
            patch.setattr(os, "killpg", lambda *_: None)
            await keeper.end()
            await asyncio.sleep(0)
        os.kill(pids[0], signal.SIGKILL)
        await eventually_async(lambda: os.waitpid(pids[0], os.WNOHANG) != (0, 0))

    events, logged = live(scene, facts=facts, left=1)
    assert [type(event) for event in events] == [GatewayListening]
    assert (logged[-1], facts[-1]) == (("error", "gateway left behind"), {"pid": pids[0]})
    collect_unwaited()


def test_it_reports_its_port_and_an_end_that_was_asked_for_is_no_crash() -> None:
    told: list[tuple[str, int]] = []
    addresses: list[Address] = []

    async def scene(keeper: GatewayKeeper, events: list[Event]) -> None:
        await until_it_listens(events)
        [event] = events
        assert isinstance(event, GatewayListening)
        addresses.append(event.address)
        assert (event.now, event.number, event.pid) == (5.0, 1, keeper.pid)
        socket.create_connection((event.address.host, event.address.port)).close()
        await keeper.end()
        assert keeper.pid is None

    facts: list[dict[str, Any]] = []
    events, logged = live(scene, facts=facts, listens=lambda url, pid: told.append((url, pid)))
    assert [type(event) for event in events] == [GatewayListening], "no other is started"
    [address] = addresses
    assert (address.host, address.port > 0) == ("127.0.0.1", True)
    [(url, pid)] = told
    assert url == address.url
    assert list(zip(logged, facts, strict=True)) == [
        (("info", "gateway started"), {"pid": pid}),
        (("info", "gateway listening"), {"pid": pid, "url": url}),
        (("info", "gateway exited"), {"pid": pid, "code": 0}),
    ]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((address.host, address.port))


def test_a_taken_address_is_posted_each_time_and_printed_once_until_it_listened(
    capfd: pytest.CaptureFixture[str],
) -> None:
    others = [socket.create_server(("127.0.0.1", 0))]
    address = Address(host="127.0.0.1", port=others[0].getsockname()[1])
    start = StartGateway(number=1, address=address)
    why = (
        f"the address {address} is already in use; choose another one with gateway.listen or --http"
    )
    facts: list[dict[str, Any]] = []

    async def scene(keeper: GatewayKeeper, events: list[Event]) -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(2):
                keeper.start(start, tasks)
            await until_it_ended(keeper, events)
            assert keeper.pid is None
            assert facts == [{"address": address, "cause": why}] * 3
            others.pop().close()
            keeper.start(start, tasks)
            await until_it_listens(events)
            keeper.close_listener()
            keeper.start(start, tasks)  # its process still has the address
            await keeper.end()

    events, logged = live(scene, start=start, facts=facts)
    ended = GatewayEnded(now=5.0, number=1, cause=why, is_crash=False)
    assert events[:3] == [ended] * 3
    assert logged.count(("error", "gateway cannot listen")) == 4
    assert capfd.readouterr().err == f"mlxsup: the gateway cannot listen: {why}\n" * 2


def test_each_reason_not_to_listen_says_what_helps() -> None:
    address = Address(host="10.0.0.1", port=80)
    small = f"the port of {address} needs root; choose one from 1024 on"
    for number, why in (
        (errno.EACCES, small),
        (errno.EPERM, small),
        (errno.EADDRNOTAVAIL, f"{address}: {os.strerror(errno.EADDRNOTAVAIL)}"),
    ):
        assert why_not(address, OSError(number, os.strerror(number))) == why


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def test_bind_takes_addresses_of_either_kind() -> None:
    families = {"127.0.0.1": socket.AF_INET, **({"::1": socket.AF_INET6} if has_ipv6() else {})}
    for host, family in families.items():
        with bind(Address(host=host, port=0)) as listener:
            address = address_of(listener)
            assert (address.host, address.port > 0) == (host, True)
            assert listener.family == family


KEYED = """\
import json, os, signal, sys
spec = json.loads(sys.stdin.readline())
has_had_keys = spec.get("has_had_keys", False)
print(has_had_keys, file=open(sys.argv[1], "a"), flush=True)
os.write(spec["beat_pipe"], b"." if has_had_keys else b"K")
signal.pause()
"""
"""Makes a key in its first life, and turns keys off in the next."""


def test_each_life_is_told_whether_keys_were_in_force_at_the_end_of_the_last(
    tmp_path: Path,
) -> None:
    async def until(events: list[Event], kind: type[Event], count: int) -> None:
        await eventually_async(lambda: sum(isinstance(event, kind) for event in events) == count)

    async def scene(keeper: GatewayKeeper, events: list[Event]) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in (1, 2):
                await until(events, GatewayListening, number)
                keeper.kill("its life is over")
                await until(events, GatewayEnded, number)
                keeper.start(replace(ANYWHERE, number=number + 1), tasks)
            await until(events, GatewayListening, 3)
            await keeper.end()

    live(scene, argv=(sys.executable, "-c", KEYED, str(tmp_path / "seen")))
    assert (tmp_path / "seen").read_text().split() == ["False", "True", "False"]
