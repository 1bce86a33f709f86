"""A daemon that lives and does not answer: no advice harms it or blames its own gateway."""

from __future__ import annotations

import json
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from support.cli import run_cli
from support.daemon import Daemon, fake, wait_for_state
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


def test_a_daemon_whose_socket_was_removed_a_moment_ago_is_waited_for(daemon: HttpDaemon) -> None:
    Path(daemon.endpoint.removeprefix("ipc://")).unlink()
    done = daemon.run("status")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_daemon_that_works_and_lets_nobody_in_is_not_to_be_killed(daemon: HttpDaemon) -> None:
    assert daemon.process is not None
    process = psutil.Process(daemon.process.pid)
    with daemon.client() as client:
        wait_for_state(client, "m", "READY")
    limits = process.rlimit(resource.RLIMIT_NOFILE)
    process.rlimit(resource.RLIMIT_NOFILE, (process.num_fds(), limits[1]))
    try:
        done = daemon.run("status")
        [problem] = [
            one
            for one in findings(daemon)
            if (one["subject"], one["level"]) == ("daemon", "problem")
        ]
    finally:
        process.rlimit(resource.RLIMIT_NOFILE, limits)
    assert done.returncode == 69
    assert f"pid {daemon.process.pid} does not answer" in done.stderr
    for text in (done.stderr, problem["fix"]):
        assert "again in a moment" in text
        assert "kill" not in text
    assert daemon.run("status").returncode == 0
