"""A worker's process: spawned, captured, signalled, and its exit seen, with real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable

import psutil
import pytest
from mlxsup.supervisor.process import WorkerProcess, describe_exit, use_best_child_watcher
from support.eventually import eventually
from support.eventually_async import eventually_async

Body = Callable[[WorkerProcess, bytearray], Awaitable[None]]


def run_with(code: str, body: Body, first_line: bytes = b"hello\n") -> None:
    """Runs Python code as a worker process, and the body with it and its output so far."""

    async def run() -> None:
        output = bytearray()
        argv = [sys.executable, "-c", code]
        process = await WorkerProcess.spawn(argv, first_line, output.extend)
        try:
            async with asyncio.timeout(60):
                await body(process, output)
        finally:
            process.close()
            await process.exited

    use_best_child_watcher()
    asyncio.run(run())


def test_it_gets_its_line_and_both_outputs_come_back() -> None:
    code = """
import sys
line = sys.stdin.readline()
print("out", line.strip())
print("err", file=sys.stderr)
sys.exit(7)
"""

    async def body(process: WorkerProcess, output: bytearray) -> None:
        assert await process.exited == 7
        await process.output_ended.wait()
        assert bytes(output) == b"out hello\nerr\n"

    run_with(code, body)


def test_its_input_stays_open_for_as_long_as_the_supervisor_lives() -> None:
    code = "import sys; sys.stdin.readline(); print('waits', flush=True); sys.stdin.read()"

    async def body(process: WorkerProcess, output: bytearray) -> None:
        await eventually_async(lambda: output == b"waits\n")
        assert not process.exited.done()

    run_with(code, body)


def test_it_leads_a_group_of_its_own_in_the_same_session() -> None:
    code = "import sys; print('up', flush=True); sys.stdin.read()"

    async def body(process: WorkerProcess, output: bytearray) -> None:
        await eventually_async(lambda: output == b"up\n")
        assert os.getpgid(process.pid) == process.pid
        assert os.getsid(process.pid) == os.getsid(0)
        process.signal(signal.SIGTERM)
        assert await process.exited == -signal.SIGTERM

    run_with(code, body)


def test_a_flood_of_output_is_drained_to_its_end() -> None:
    code = "import sys; sys.stdout.write('x' * 5_000_000)"

    async def body(process: WorkerProcess, output: bytearray) -> None:
        assert await process.exited == 0
        await process.output_ended.wait()
        assert len(output) == 5_000_000

    run_with(code, body)


def test_an_exit_is_seen_though_a_grandchild_holds_the_pipe() -> None:
    code = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], process_group=0)
print(child.pid, flush=True)
"""
    grandchild = []

    async def body(process: WorkerProcess, output: bytearray) -> None:
        assert await process.exited == 0
        await eventually_async(lambda: output.endswith(b"\n"))
        grandchild.append(psutil.Process(int(output)))
        assert not process.output_ended.is_set()

    run_with(code, body)
    grandchild[0].kill()
    eventually(lambda: not grandchild[0].is_running())


def test_the_whole_group_is_signalled() -> None:
    code = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""

    async def body(process: WorkerProcess, output: bytearray) -> None:
        await eventually_async(lambda: output.endswith(b"\n"))
        grandchild = psutil.Process(int(output))
        process.signal(signal.SIGKILL)
        assert await process.exited == -signal.SIGKILL
        await process.output_ended.wait()
        await eventually_async(
            lambda: not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE
        )

    run_with(code, body)


def test_after_its_exit_nothing_is_signalled(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(process: WorkerProcess, output: bytearray) -> None:
        await process.exited
        monkeypatch.setattr(os, "killpg", lambda *_: pytest.fail("signalled another process"))
        process.signal(signal.SIGKILL)

    run_with("pass", body)


def test_a_command_that_is_not_there_raises() -> None:
    async def run() -> None:
        with pytest.raises(FileNotFoundError):
            await WorkerProcess.spawn(["/nonexistent/python"], b"\n", lambda _: None)

    use_best_child_watcher()
    asyncio.run(run())


def test_return_codes_are_told_apart() -> None:
    assert describe_exit(65) == (65, None, "")
    assert describe_exit(-9) == (None, 9, "SIGKILL")
    assert describe_exit(-64) == (None, 64, describe_exit(-64)[2])
