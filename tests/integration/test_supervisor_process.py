"""A worker's process: spawned, captured, signalled, and its exit seen, with real processes."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
from functools import partial
from typing import Any

import psutil
import pytest

from mlxsup.supervisor.workers import exit_watch
from mlxsup.supervisor.workers import process as process_module
from mlxsup.supervisor.workers.exit_watch import watch_with_thread
from mlxsup.supervisor.workers.process import (
    WorkerProcess,
    describe_exit,
)

from support.daemon import is_alive
from support.eventually import eventually
from support.eventually_async import eventually_async
from support.spawned import run_with


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


def test_nothing_is_awaited_of_pipes_that_are_closed_and_its_exit_still_is() -> None:
    async def body(process: WorkerProcess, output: bytearray) -> None:
        for _ in range(2):
            process.close_pipes()
            assert process.output_ended.is_set()
        assert await process.exited == 0, "the end of its input"
        assert not output

    run_with("import sys; sys.stdin.read()", body)


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
    "a crash": "import os; os._exit(70)",
    "SIGKILL": "import os; os.kill(os.getpid(), 9)",
    "SIGSEGV": "import os; os.kill(os.getpid(), 11)",
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


def test_where_no_descriptor_tells_of_an_exit_a_thread_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process_module, "watch_exit", watch_with_thread)

    async def body(process: WorkerProcess, output: bytearray) -> None:
        assert await process.exited == 7

    run_with("import sys; sys.exit(7)", body)


def test_an_exit_is_seen_though_no_file_is_left_to_tell_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(pid: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(exit_watch, "pollable", fail)

    async def body(process: WorkerProcess, output: bytearray) -> None:
        assert await process.exited == 7

    run_with("import sys; sys.exit(7)", body)


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


def test_a_command_that_is_not_there_raises() -> None:
    async def run() -> None:
        with pytest.raises(FileNotFoundError):
            WorkerProcess.spawn(["/nonexistent/python"], b"\n", lambda _: None)

    asyncio.run(run())


def test_return_codes_are_told_apart() -> None:
    assert describe_exit(65) == (65, None, "")
    assert describe_exit(0) == (0, None, "")
    assert describe_exit(-1) == (None, 1, "SIGHUP")
    assert describe_exit(-99) == (None, 99, "signal 99")
    assert describe_exit(-9) == (None, 9, "SIGKILL")
    assert describe_exit(-64) == (None, 64, describe_exit(-64)[2])


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
def test_a_debugger_that_holds_a_dead_worker_holds_up_nobody_else_P26() -> None:
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
