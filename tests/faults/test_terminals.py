"""A terminal that is gone, or an output that nobody reads, changes no exit code and holds up no end
(P12)."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from mlxsup.client import ConnectionLost

from support.daemon.daemon import Daemon, fake, row
from support.daemon.hub_caches import write_folder
from support.eventually import eventually

LIMIT_S = 60.0
BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}

LEFT_IN_BUFFERS = """
import os, signal, sys
from mlxsup.cli.commands import start
from mlxsup.cli.main import main

def serve(configuration, **_):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.write(1, b"serves")
    try:
        while os.read(0, 1):
            pass
    except OSError:
        pass  # the terminal is gone
    for name in {names!r}:
        getattr(sys, name).stream.buffer.write(b"left")
    return 0

start.serve = serve
main(["start", "--model", {model!r}])
"""


@pytest.mark.parametrize("names", [("stdout", "stderr")])
def test_what_a_lost_terminal_did_not_take_changes_no_exit_code_P12(
    names: tuple[str, ...], tmp_path: Path
) -> None:
    model = str(write_folder(tmp_path / "m"))
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", LEFT_IN_BUFFERS.format(names=names, model=model)],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env=BUFFERED,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(follower)
    try:
        seen = b""
        while b"serves" not in seen:
            seen += os.read(leader, 4096)
    finally:
        os.close(leader)
    try:
        assert process.wait(LIMIT_S) == 0
    finally:
        process.kill()
        process.wait()


def test_an_output_that_nobody_reads_holds_up_no_end_P12() -> None:
    daemon = Daemon({"m": fake()})
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    while select.select([], [writer], [], 0)[1]:
        os.write(writer, b"x" * 4096)
    os.set_blocking(writer, True)
    process = subprocess.Popen(
        daemon.command("start", "--config", str(daemon.config)),
        stdout=writer,
        stderr=writer,
        env=BUFFERED,
    )
    try:
        eventually(lambda: is_ready(daemon), timeout_s=LIMIT_S)
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 0
    finally:
        process.kill()
        process.wait()
        os.close(reader)
        os.close(writer)
        daemon.__exit__(None, None, None)


def is_ready(daemon: Daemon) -> bool:
    """Whether it answers, and its model serves; while it starts, nobody may be there yet."""
    try:
        with daemon.client() as client:
            return bool(row(client, "m")["state"] == "READY")
    except ConnectionLost:
        return False
