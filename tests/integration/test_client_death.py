"""A supervisor in a separate process that is killed or stopped (P2)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxsup.client import AsyncClient, Client, ConnectionLost

TESTS = Path(__file__).parents[1]
PROGRAM = """
import sys
from pathlib import Path
from support.scripted_supervisor import OpenStreams, ScriptedSupervisor
ScriptedSupervisor(Path(sys.argv[1]), OpenStreams())
print("listening", flush=True)
"""


@contextlib.contextmanager
def supervisor_process() -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    with tempfile.TemporaryDirectory(prefix="mlxsup-", dir="/tmp") as folder:
        path = Path(folder) / "client.sock"
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(path)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])},
            stdout=subprocess.PIPE,
        )
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"listening\n"
            yield process, f"ipc://{path}"
        finally:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_sync_client_learns_of_the_death_of_the_supervisor_P2(number: signal.Signals) -> None:
    with supervisor_process() as (process, endpoint), Client(endpoint) as client:
        streams = [client.generate("m", prompt="x") for _ in range(8)]
        for stream in streams:
            assert next(stream).text == "one"
        process.send_signal(number)
        for stream in streams:
            with pytest.raises(ConnectionLost):
                next(stream)
        if number == signal.SIGKILL:
            with pytest.raises(ConnectionLost, match="no daemon answers"):
                client.status()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_async_client_learns_of_the_death_of_the_supervisor_P2(number: signal.Signals) -> None:
    async def run(process: subprocess.Popen[bytes], endpoint: str) -> None:
        async with AsyncClient(endpoint) as client:
            streams = [client.generate("m", prompt="x") for _ in range(8)]
            for stream in streams:
                assert (await anext(stream)).text == "one"
            process.send_signal(number)
            for stream in streams:
                with pytest.raises(ConnectionLost):
                    await anext(stream)

    with supervisor_process() as (process, endpoint):
        asyncio.run(run(process, endpoint))


def test_supervisor_that_is_stopped_before_the_handshake_is_no_daemon_P2() -> None:
    with supervisor_process() as (process, endpoint), Client(endpoint) as client:
        process.send_signal(signal.SIGSTOP)
        # Returns once every thread stands still; until then one could still answer.
        os.waitpid(process.pid, os.WUNTRACED)
        with pytest.raises(ConnectionLost):
            client.ping()
