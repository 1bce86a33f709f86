"""Ctrl-C, or a task that is cancelled, while a stream waits for its next piece."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

from mlxsup.client import AsyncClient, Client
from mlxsup.protocol.client_messages import Cancel, Generate

from support.cli import environment
from support.eventually import eventually
from support.scripted_supervisor import OpenStreams, scripted_supervisor

TYPED = """\
from mlxsup import Client
client = Client({endpoint!r})
for delta in client.generate("m", prompt="x"): print(delta.text, flush=True)

print("ready", flush=True)
"""
"""In an interactive Python, which keeps the latest traceback and so every frame of the stream."""


def test_ctrl_c_in_an_interactive_python_cancels_what_it_waits_for_D4(path: Path) -> None:
    with (
        scripted_supervisor(path, OpenStreams()) as supervisor,
        subprocess.Popen(
            [sys.executable, "-q", "-i"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment(),
        ) as python,
    ):
        assert python.stdin is not None
        assert python.stdout is not None
        python.stdin.write(TYPED.format(endpoint=supervisor.endpoint))
        python.stdin.flush()
        assert python.stdout.readline() == "one\n"
        python.send_signal(signal.SIGINT)
        # It is interactive still, and the traceback has the stream.
        assert python.stdout.readline() == "ready\n"
        eventually(lambda: supervisor.got(Cancel))
        assert [c.id for c in supervisor.got(Cancel)] == [g.id for g in supervisor.got(Generate)]
        python.stdin.close()
        assert python.wait(60) == 0


def test_a_task_that_is_cancelled_cancels_what_it_waits_for_D4(path: Path) -> None:
    async def read(endpoint: str) -> BaseException:
        async with AsyncClient(endpoint) as client:
            has_begun = asyncio.Event()

            async def take() -> None:
                async for _ in client.generate("m", prompt="x"):
                    has_begun.set()

            task = asyncio.create_task(take())
            await has_begun.wait()
            task.cancel()
            [error] = await asyncio.gather(task, return_exceptions=True)
            # Before the client is closed, which would cancel it, and while the error is kept.
            await asyncio.to_thread(eventually, lambda: supervisor.got(Cancel))
            assert error is not None
            return error

    with scripted_supervisor(path, OpenStreams()) as supervisor:
        error = asyncio.run(read(supervisor.endpoint))
        assert isinstance(error, asyncio.CancelledError)
        assert {c.id for c in supervisor.got(Cancel)} == {g.id for g in supervisor.got(Generate)}


def test_a_generator_that_is_closed_early_cancels_what_it_reads_D4(path: Path) -> None:
    with scripted_supervisor(path, OpenStreams()) as supervisor, Client(supervisor.endpoint) as own:

        def texts() -> Generator[str]:
            for delta in own.generate("m", prompt="x"):
                yield delta.text

        reading = texts()
        assert next(reading) == "one"
        assert supervisor.got(Cancel) == []
        reading.close()
        # Before the client is closed, which would cancel it.
        eventually(lambda: supervisor.got(Cancel))
        assert [c.id for c in supervisor.got(Cancel)] == [g.id for g in supervisor.got(Generate)]
