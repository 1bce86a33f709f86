"""What a worker's process prints: taken whole, at a bounded rate, to its end."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import time
from typing import Any

import pytest

from mlxsup.supervisor.workers import process as process_module
from mlxsup.supervisor.workers.process import (
    READ_BYTES,
    READ_SLICE_BYTES,
    READ_SLICE_S,
    WorkerProcess,
)

from support.eventually import eventually
from support.eventually_async import eventually_async
from support.spawned import Readers, run_with


def test_its_output_never_blocks_the_loop_and_is_not_looked_at_after_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    readers = Readers(monkeypatch)

    async def body(process: WorkerProcess, output: bytearray) -> None:
        ((descriptor, read),) = readers.of(process).items()
        assert not os.get_blocking(descriptor)
        read()  # nothing is there: it returns at once
        process.signal(signal.SIGKILL)
        await process.output_ended.wait()
        assert asyncio.get_running_loop().remove_reader(descriptor) is False
        assert await process.exited == -signal.SIGKILL

    run_with("import time; time.sleep(600)", body)


def test_a_flood_of_output_is_drained_to_its_end() -> None:
    code = "import sys; sys.stdout.write('x' * 5_000_000)"

    async def body(process: WorkerProcess, output: bytearray) -> None:
        assert await process.exited == 0
        await process.output_ended.wait()
        assert len(output) == 5_000_000

    run_with(code, body)


def test_who_is_closed_while_its_output_waits_is_not_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    readers = Readers(monkeypatch)
    code = "import os\nwhile True: os.write(1, b'x' * 65536)"
    complaints: list[dict[str, Any]] = []

    async def body(process: WorkerProcess, output: bytearray) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: complaints.append(context))
        await eventually_async(lambda: not readers.of(process))
        assert not process.output_ended.is_set()
        process.close_pipes()
        over = asyncio.Event()
        loop.call_later(2 * READ_SLICE_S, over.set)
        await over.wait()

    run_with(code, body)
    assert complaints == []


def test_who_prints_without_end_is_read_at_a_bounded_rate() -> None:
    code = "import os\nwhile True: os.write(1, b'x' * 65536)"

    async def body(process: WorkerProcess, output: bytearray) -> None:
        began_at = time.monotonic()
        await eventually_async(lambda: len(output) > 20 * READ_SLICE_BYTES, timeout_s=60.0)
        slices = (time.monotonic() - began_at) / READ_SLICE_S
        assert len(output) <= (slices + 2) * (READ_SLICE_BYTES + READ_BYTES)

    run_with(code, body)


def test_what_was_printed_earlier_does_not_count_against_a_slice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    readers = Readers(monkeypatch)
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def noted(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", noted)
    monkeypatch.setattr(process_module, "READ_SLICE_S", 20.0)
    monkeypatch.setattr(process_module, "READ_SLICE_BYTES", 10)
    code = "import os, sys\nfor line in sys.stdin.buffer: os.write(1, line)"

    async def body(process: WorkerProcess, output: bytearray) -> None:
        (descriptor,) = readers.of(process)
        [own] = started
        assert own.stdin is not None
        pipe = own.stdin.fileno()
        await eventually_async(lambda: output == b"hello\n")
        loop = asyncio.get_running_loop()
        time_ = loop.time
        monkeypatch.setattr(loop, "time", lambda: time_() + 20.0)
        os.write(pipe, b"abcd\n")
        await eventually_async(lambda: output == b"hello\nabcd\n")
        os.write(pipe, b"ef\n")
        await eventually_async(lambda: output == b"hello\nabcd\nef\n")
        os.write(pipe, b"ghi\n")  # with this it has had its share
        await eventually_async(lambda: output == b"hello\nabcd\nef\nghi\n")
        os.write(pipe, b"too much\n")
        eventually(lambda: select.select([descriptor], [], [], 0)[0])
        for _ in range(10):
            await asyncio.sleep(0)
        assert not output.endswith(b"too much\n")
        monkeypatch.setattr(loop, "time", lambda: time_() + 40.0)
        await eventually_async(lambda: output.endswith(b"too much\n"))

    run_with(code, body)


def test_what_an_orphan_of_it_prints_last_is_read_to_the_end() -> None:
    code = """
import os
began, go = os.pipe()
if os.fork():
    os.read(began, 1)
    os._exit(3)
parent = os.getppid()
os.setsid()
os.write(go, b"x")
while os.getppid() == parent: pass
os.write(1, b"the end")
"""

    async def body(process: WorkerProcess, output: bytearray) -> None:
        assert await process.exited == 3
        await process.output_ended.wait()
        assert output == b"the end"

    run_with(code, body)
