"""Ctrl-C on a terminal reaches the whole process group: 130, no traceback, nothing is left."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from support.cli import Terminal
from support.daemon import Daemon, fake, row, wait_for_state
from support.eventually import eventually
from support.streams import Reader

ENDLESS = fake(fake={"step_s": 0.02, "answer_tokens": 100_000})
NEVER_LOADED = fake(fake={"load_s": 3600.0, "load_steps": 36_000})
LONG = 4000


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon({"m": ENDLESS, "never": NEVER_LOADED}) as daemon, daemon.client() as client:
        wait_for_state(client, "m", "READY")
        yield daemon


def interrupted(terminal: Terminal) -> str:
    """Signals the group of the command, as a terminal does; gives all that it wrote."""
    assert os.getpgid(terminal.process.pid) == terminal.process.pid
    os.killpg(terminal.process.pid, signal.SIGINT)
    text = terminal.end()
    assert terminal.process.returncode == 130
    assert "Traceback" not in text
    return text


def test_generate_cancels_its_request(daemon: Daemon) -> None:
    arguments = ("generate", "m", "hi", "--max-tokens", str(LONG), "--endpoint", daemon.endpoint)
    with daemon.client() as client, Terminal(*arguments) as terminal:
        eventually(lambda: len(row(client, "m")["running"]) == 1)
        terminal.read_more()
        interrupted(terminal)
        eventually(lambda: row(client, "m")["running"] == [])


def test_attach_leaves_the_request_alone(daemon: Daemon) -> None:
    with daemon.client() as client:
        reader = Reader(client, "m", "hi", max_tokens=LONG).started()
        id = str(reader.stream.request_id)
        with Terminal("attach", id, "--endpoint", daemon.endpoint) as terminal:
            terminal.read_more()
            interrupted(terminal)
        before = len(reader.tokens)
        eventually(lambda: len(reader.tokens) > before)
        assert row(client, "m")["running"] == [id]
        reader.stream.cancel()


def test_wait_leaves_the_load_alone(daemon: Daemon) -> None:
    with daemon.client() as client:
        wait_for_state(client, "never", "LOADING")
        pid = row(client, "never")["pid"]
        with Terminal("wait", "never", "--endpoint", daemon.endpoint) as terminal:
            terminal.read_more()
            interrupted(terminal)
        seen = row(client, "never")
        assert (seen["state"], seen["pid"]) == ("LOADING", pid)
