"""A daemon that lives and does not answer: no advice harms it or blames its own gateway."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.cli import run_cli
from support.daemon import Daemon, fake
from support.http_daemon import HttpDaemon
from support.planted_defects import free_port


@pytest.fixture
def daemon() -> Iterator[HttpDaemon]:
    daemon = HttpDaemon({"m": fake()})
    daemon.listen = f"127.0.0.1:{free_port()}"
    with daemon.config.open("a") as file:
        file.write(f'[gateway]\nlisten = "{daemon.listen}"\n')
    with daemon:
        yield daemon


def findings(daemon: Daemon) -> list[dict[str, str]]:
    done = run_cli("doctor", "--json", "--config", str(daemon.config))
    found: list[dict[str, str]] = json.loads(done.stdout)["findings"]
    return found


def test_the_gateway_of_a_daemon_that_is_stopped_is_no_stranger(daemon: HttpDaemon) -> None:
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGSTOP)
    try:
        found = findings(daemon)
    finally:
        daemon.process.send_signal(signal.SIGCONT)
    assert [one["subject"] for one in found if one["level"] == "problem"] == ["daemon"]
    [gateway] = [one for one in found if one["subject"] == "gateway"]
    assert gateway["what"] == f"listens at {daemon.listen}"


def test_a_daemon_whose_socket_is_gone_ends_in_order_as_the_hint_says(daemon: HttpDaemon) -> None:
    assert daemon.process is not None
    Path(daemon.endpoint.removeprefix("ipc://")).unlink()
    done = daemon.run("status")
    assert done.returncode == 69
    [problem] = [
        one for one in findings(daemon) if (one["subject"], one["level"]) == ("daemon", "problem")
    ]
    commands = [f"kill {daemon.process.pid}", f"kill -KILL {daemon.process.pid}"]
    for text in (done.stderr.splitlines()[1], problem["fix"]):
        assert re.findall(r"`(kill [^`]*)`", text) == commands, "the gentle one comes first"
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.process.wait(60) == 0
