"""A gateway that lives and does nothing: noticed and replaced, and no other one taken for it."""

from __future__ import annotations

import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from mlxsup.client import Client
from mlxsup.supervisor.core.gateway import FROZEN_S

from support.client.streams import Reader
from support.daemon.daemon import fake
from support.eventually import eventually
from support.gateway.http_daemon import HttpDaemon, gateway_of

REPLACED_S = 100.0
"""Ten times what is promised: the machine may be busy."""

LOOPING = """\
import signal
def loop(*_):
    while True:
        pass
signal.signal(signal.SIGUSR2, loop)
"""
"""Makes a process of Python do nothing else once it gets the signal."""

SILENT = 2000


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[HttpDaemon]:
    (tmp_path / "sitecustomize.py").write_text(LOOPING)
    with ExitStack() as life:
        running = HttpDaemon({"m": fake(fake={"step_s": 0.01})})
        life.push(running)
        running.start(environment={"PYTHONPATH": str(tmp_path)})
        yield running


def stop(pid: int) -> None:
    """As a debugger does, or a terminal."""
    os.kill(pid, signal.SIGSTOP)


def loop(pid: int) -> None:
    """As a bug does."""
    os.kill(pid, signal.SIGUSR2)


@pytest.mark.parametrize("freeze", [stop, loop])
def test_a_gateway_that_freezes_is_replaced_and_other_streams_do_not_notice(
    daemon: HttpDaemon, freeze: Callable[[int], None]
) -> None:
    with daemon.client() as client:
        expected = client.complete("m", prompt="goes on", max_tokens=900).token_ids
        untouched = Reader(client, "m", "goes on", max_tokens=900)
        untouched.started()
        first = gateway_of(client)
        freeze(first["pid"])

        def replaced() -> dict[str, Any] | None:
            value: dict[str, Any] = client.status()["gateway"]
            return value if value["state"] == "listening" and value["restarts"] else None

        second = eventually(replaced, REPLACED_S)
        assert second["pid"] != first["pid"]
        assert second["url"] == daemon.url
        assert second["cause"] == f"it was frozen: no sign of life for {FROZEN_S:g} s"
        assert daemon.get("/health")[0] == 200
        assert untouched.finished().token_ids == expected
        assert untouched.stream.result.resumed == 0
    assert second["cause"] in daemon.run("status").stdout
    log = (daemon.logs / "mlxsup.log").read_text()
    assert f"ERROR gateway killed pid={first['pid']}" in log


def has_lived_on(client: Client, pid: int) -> None:
    """Returns once this gateway has beaten for longer than a silent one may live."""
    since_s = client.status()["gateway"]["since_s"]

    def is_older() -> bool:
        gateway = client.status()["gateway"]
        assert (gateway["pid"], gateway["restarts"]) == (pid, 0), gateway["cause"]
        return bool(gateway["since_s"] > since_s + FROZEN_S + 2.0)

    eventually(is_older, REPLACED_S)


def test_a_pause_of_the_whole_tree_is_none_of_the_gateway(daemon: HttpDaemon) -> None:
    assert daemon.process is not None
    supervisor = psutil.Process(daemon.process.pid)
    with daemon.client() as client:
        pid = gateway_of(client)["pid"]
    tree = [supervisor, *supervisor.children(recursive=True)]
    for process in tree:
        process.suspend()
    threading.Event().wait(FROZEN_S + 3.0)  # the pause itself
    for process in tree:
        process.resume()
    with daemon.client() as client:
        has_lived_on(client, pid)


def test_a_storm_of_silent_connections_does_not_make_a_gateway_look_frozen(
    daemon: HttpDaemon,
) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    try:
        with ExitStack() as storm, daemon.client() as client:
            pid = gateway_of(client)["pid"]
            for _ in range(SILENT):
                storm.enter_context(daemon.connect())
            has_lived_on(client, pid)
        assert daemon.get("/health")[0] == 200
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
