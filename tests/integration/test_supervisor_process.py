"""Real processes of workers: spawned, read, signalled and reaped."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import psutil
import pytest

from mlxsup.supervisor.workers.process import (
    READ_BYTES,
    READ_SLICE_BYTES,
    READ_SLICE_S,
    Exit,
    WorkerProcess,
)

from support.daemon.daemon import is_alive
from support.eventually import eventually
from support.eventually_async import eventually_async

Body = Callable[[WorkerProcess, bytearray], Awaitable[None]]


def run_with(
    code: str,
    body: Body,
    first_line: bytes = b"hello\n",
    on_output: Callable[[bytes], None] = lambda _: None,
) -> None:
    """Runs Python code as a worker process, and the body with it and its output so far."""

    async def run() -> None:
        output = bytearray()
        argv = [sys.executable, "-c", code]

        def take(data: bytes) -> None:
            output.extend(data)
            on_output(data)

        process = WorkerProcess.spawn(argv, first_line, take)
        try:
            async with asyncio.timeout(60):
                await body(process, output)
        finally:
            process.close()
            await process.exited

    asyncio.run(run())


class Readers:
    """What event loops read from now on: the callbacks by their descriptors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._callbacks: dict[int, Callable[..., object]] = {}
        add, remove = asyncio.SelectorEventLoop.add_reader, asyncio.SelectorEventLoop.remove_reader

        def add_noted(
            loop: asyncio.SelectorEventLoop, fd: int, callback: Callable[..., object]
        ) -> None:
            self._callbacks[fd] = callback
            add(loop, fd, callback)

        def remove_noted(loop: asyncio.SelectorEventLoop, fd: int) -> bool:
            self._callbacks.pop(fd, None)
            return remove(loop, fd)

        monkeypatch.setattr(asyncio.SelectorEventLoop, "add_reader", add_noted)
        monkeypatch.setattr(asyncio.SelectorEventLoop, "remove_reader", remove_noted)

    def of(self, owner: object) -> dict[int, Callable[..., object]]:
        """Those whose callback is a method of this object."""
        return {
            descriptor: callback
            for descriptor, callback in self._callbacks.items()
            if getattr(callback, "__self__", None) is owner
        }


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


def test_it_leads_a_group_of_its_own_in_the_same_session() -> None:
    code = "import sys; print('up', flush=True); sys.stdin.read()"

    async def body(process: WorkerProcess, output: bytearray) -> None:
        await eventually_async(lambda: output == b"up\n")
        assert os.getpgid(process.pid) == process.pid
        assert os.getsid(process.pid) == os.getsid(0)
        process.signal(signal.SIGTERM)
        assert await process.exited == -signal.SIGTERM

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


ENDS = {
    "a clean exit": "",
    "SIGKILL": "import os; os.kill(os.getpid(), 9)",
}


@pytest.mark.parametrize("how", ENDS)
def test_its_children_do_not_outlive_it(how: str) -> None:
    code = f"""
import subprocess, sys
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
children = [subprocess.Popen(sleep, stdout=subprocess.DEVNULL) for _ in range(3)]
print(*(child.pid for child in children), flush=True)
sys.stdin.readline()
{ENDS[how]}
"""
    children: list[psutil.Process] = []

    async def body(process: WorkerProcess, output: bytearray) -> None:
        await process.output_ended.wait()
        await process.exited
        for child in children:
            await eventually_async(partial(is_dead, child))

    def look(data: bytes) -> None:
        children.extend(psutil.Process(int(pid)) for pid in data.split())

    run_with(code, body, on_output=look)
    assert len(children) == 3


def is_dead(process: psutil.Process) -> bool:
    """Whether that very process runs no more."""
    return not is_alive(process)


def test_its_group_is_killed_while_its_id_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    killpg, reaped = os.killpg, []

    def kill_watched(pid: int, number: int) -> None:
        try:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            reaped.append(False)
        except ChildProcessError:
            reaped.append(True)
        killpg(pid, number)

    monkeypatch.setattr(os, "killpg", kill_watched)

    async def body(process: WorkerProcess, output: bytearray) -> None:
        assert await process.exited == 0
        assert reaped == [False]

    run_with("pass", body)


def test_processes_leave_no_open_files_behind() -> None:
    run_with("pass", exits)
    before = psutil.Process().num_fds()
    for _ in range(5):
        run_with("pass", exits)
    assert psutil.Process().num_fds() == before


async def exits(process: WorkerProcess, output: bytearray) -> None:
    await process.exited
    await process.output_ended.wait()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # its pipes
def test_a_first_line_that_a_pipe_does_not_take_is_an_error_and_leaves_no_child(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def noted(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", noted)

    async def run() -> None:
        argv = [sys.executable, "-c", "import time; time.sleep(600)"]
        with pytest.raises(
            OSError, match=r"^\[Errno \d+\] its launch spec is longer than a pipe takes$"
        ):
            WorkerProcess.spawn(argv, b"x" * 10_000_000, lambda _: None)

    asyncio.run(run())
    assert [process.returncode for process in started] == [-signal.SIGKILL]


def test_after_its_exit_nothing_is_signalled(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(process: WorkerProcess, output: bytearray) -> None:
        await process.exited
        monkeypatch.setattr(os, "killpg", lambda *_: pytest.fail("signalled another process"))
        process.signal(signal.SIGKILL)

    run_with("pass", body)


def test_an_exit_is_read_from_a_return_code() -> None:
    assert Exit.of(65) == (65, "")
    assert Exit.of(0) == (0, "")
    assert Exit.of(-1) == (None, "SIGHUP")
    assert Exit.of(-99) == (None, "signal 99")
    assert Exit.of(-9) == (None, "SIGKILL")
    assert Exit.of(-64) == (None, Exit.of(-64)[1])


TRACER = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
if libc.ptrace(0x4206, int(sys.argv[1]), None, None):  # PTRACE_SEIZE
    sys.exit(3)
print("holds", flush=True)
sys.stdin.read()
"""


def trace(pid: int) -> subprocess.Popen[bytes]:
    """A debugger that has attached itself to the process; skips if it may not."""
    tracer = subprocess.Popen(
        [sys.executable, "-c", TRACER, str(pid)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert tracer.stdout is not None
    if not tracer.stdout.readline():
        pytest.skip("this user may not trace its processes")
    return tracer


@pytest.mark.skipif(sys.platform != "linux", reason="traces as Linux does")
def test_a_debugger_that_holds_a_dead_worker_does_not_block_the_loop_P26() -> None:
    async def body(process: WorkerProcess, output: bytearray) -> None:
        await eventually_async(lambda: output == b"runs\n")
        with trace(process.pid) as tracer:
            process.signal(signal.SIGKILL)
            await eventually_async(lambda: psutil.Process(process.pid).status() == "zombie")
            for _ in range(100):  # the loop turns, and does not wait for the debugger
                await asyncio.sleep(0)
            assert not process.exited.done()
            tracer.kill()
        assert await process.exited == -signal.SIGKILL

    run_with("print('runs', flush=True); import time; time.sleep(600)", body)


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


def test_closed_pipes_are_not_read_again(
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


def test_endless_output_is_read_at_a_bounded_rate() -> None:
    code = "import os\nwhile True: os.write(1, b'x' * 65536)"

    async def body(process: WorkerProcess, output: bytearray) -> None:
        began_at = time.monotonic()
        await eventually_async(lambda: len(output) > 20 * READ_SLICE_BYTES)
        slices = (time.monotonic() - began_at) / READ_SLICE_S
        assert len(output) <= (slices + 2) * (READ_SLICE_BYTES + READ_BYTES)

    run_with(code, body)
