"""How a real worker process ends: crashes, signals, a dead supervisor, a bad launch or load."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from mlxsup.protocol.launch import ExitCode, worker_argv
from mlxsup.protocol.states import FinishReason, WorkerPhase
from mlxsup.protocol.worker_messages import Dying, Hello, Ready, Step
from mlxsup.worker.parent_watch import ORPHANED_EXIT

from support.eventually import eventually
from support.worker.worker_harness import WorkerHarness


def is_gone(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


# ---------------------------------------------------------------- deaths
def test_a_template_that_loops_for_ever_ends_the_worker_even_when_idle() -> None:
    with WorkerHarness(step_timeout_s=0.1) as worker:
        worker.wait_until_ready()
        worker.dispatch("[[tokenize loop]]")
        dying = worker.wait_for(Dying)
        assert dying.code == worker.exit_code() == ExitCode.STUCK_PROMPT
        assert "request 1" in dying.message
        assert "most recent call first" in worker.log(), "the stacks of its threads"


@pytest.mark.parametrize("name", ["SIGSEGV"])
def test_a_crash_on_demand_by_signal_F1(name: str) -> None:
    with WorkerHarness() as worker:
        worker.wait_until_ready()
        worker.dispatch(f"[[fault crash={name} at=5]]")
        assert worker.exit_code() == -getattr(signal, name)


def test_an_exception_out_of_a_step_is_exit_70_and_says_so_F3() -> None:
    with WorkerHarness(log_may_hold=["Traceback"]) as worker:
        worker.wait_until_ready()
        key = worker.dispatch("[[fault raise at=3]]")
        dying = worker.wait_for(Dying)
        assert worker.exit_code() == 70
        assert dying.code == 70
        assert "FakeStepError" in dying.message
        assert len(worker.streams[key].tokens) == 2
        assert "Traceback" in worker.log()


def test_a_wrong_message_from_the_supervisor_is_a_broken_link() -> None:
    with WorkerHarness() as worker:
        worker.wait_until_ready()
        worker.socket.send_multipart([b"\xc1"])
        assert worker.wait_for(Dying).code == worker.exit_code() == ExitCode.LINK_BROKEN


def test_sigterm_closes_between_steps_and_exits_non_zero() -> None:
    with WorkerHarness(fake={"step_s": 0.01}) as worker:
        worker.wait_until_ready()
        worker.dispatch("x", max_tokens=4000)
        worker.wait_for(Step)
        os.kill(worker.process.pid, signal.SIGTERM)
        assert worker.wait_for(Dying).code == 143
        assert worker.exit_code() == 143


def test_sigterm_when_idle_and_sigint_ignored() -> None:
    with WorkerHarness() as worker:
        worker.wait_until_ready()
        os.kill(worker.process.pid, signal.SIGINT)
        assert worker.finish(worker.dispatch("x", max_tokens=2))[0].finish is FinishReason.LENGTH
        os.kill(worker.process.pid, signal.SIGTERM)
        assert worker.exit_code() == 143


def test_sighup_ends_it_by_its_default() -> None:
    with WorkerHarness() as worker:
        worker.wait_until_ready()
        os.kill(worker.process.pid, signal.SIGHUP)
        assert worker.exit_code() == -signal.SIGHUP


@pytest.mark.parametrize("when", ["idle", "busy", "load"])
def test_the_end_of_the_pipe_ends_the_worker_E6(when: str) -> None:
    with WorkerHarness(fake={"load_stall": "sleep"} if when == "load" else None) as worker:
        if when == "load":
            worker.wait_for(Hello)
        else:
            worker.wait_until_ready()
        if when == "busy":
            worker.dispatch("x[[fault stall=busy at=5]]")
            worker.wait_for(Step)
        worker.close_pipe()
        assert worker.exit_code() == ORPHANED_EXIT != 0


def test_another_parent_than_the_one_named_ends_it_at_once_E6() -> None:
    with WorkerHarness(supervisor_pid=1 if os.getpid() != 1 else 2) as worker:
        assert worker.exit_code() == 1
        assert "is gone" in worker.log()


PARENT = """
import sys, time
sys.path.insert(0, {tests!r})
from support.worker.worker_harness import WorkerHarness
worker = WorkerHarness()
worker.wait_until_ready()
if {prompt!r}:
    worker.dispatch({prompt!r})
    worker.receive()
    worker.receive_what_is_there(0.2)
print(worker.process.pid, worker.folder, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("prompt", ["", "[[fault stall=gil at=1]]"])
def test_a_killed_supervisor_takes_its_worker_with_it_P13(prompt: str) -> None:
    if prompt and sys.platform != "linux":
        pytest.skip("a wedged GIL under a dead supervisor needs PDEATHSIG")
    script = PARENT.format(tests=str(Path(__file__).parents[1]), prompt=prompt)
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    try:
        pid, folder = parent.stdout.readline().split()
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    try:
        eventually(lambda: is_gone(int(pid)), timeout_s=60)
    finally:
        for path in Path(folder).iterdir():
            path.unlink()
        Path(folder).rmdir()


# ---------------------------------------------------------------- launch
def run_worker(stdin: bytes, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*worker_argv(), *arguments], input=stdin, capture_output=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    ("stdin", "says"),
    [
        (b"", "mlxsup start"),
        (b"x" * 70_000, "64 KiB"),
    ],
)
def test_a_missing_or_bad_spec_is_exit_64_in_one_sentence(stdin: bytes, says: str) -> None:
    done = run_worker(stdin)
    assert done.returncode == 64
    assert says in done.stderr.decode()
    assert done.stderr.count(b"\n") == 1


# ---------------------------------------------------------------- load
@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        ("missing", 66, "/the/model"),
        ("memory", 75, ""),
    ],
)
def test_load_errors_have_their_exit_codes_B2_B6(error: str, code: int, says: str) -> None:
    with WorkerHarness(path="/the/model", fake={"load_error": error}) as worker:
        dying = worker.wait_for(Dying)
        assert dying.code == worker.exit_code() == code
        assert says in dying.message
        assert not any(isinstance(message, Ready) for message in worker.messages)
        assert sum("ERROR" in line for line in worker.log().splitlines()) == 1


def test_an_unknown_fake_option_is_exit_64_and_names_the_known() -> None:
    with WorkerHarness(fake={"step_ms": 3}) as worker:
        dying = worker.wait_for(Dying)
        assert dying.code == worker.exit_code() == 64
        assert "step_ms" in dying.message
        assert "step_s" in dying.message


@pytest.mark.parametrize(("how", "code"), [("SIGSEGV", -11)])
def test_a_crash_in_load_F8(how: str, code: int) -> None:
    with WorkerHarness(fake={"crash_in_load": how}) as worker:
        assert worker.exit_code() == code


def test_a_load_can_be_ended_B9() -> None:
    with WorkerHarness(fake={"load_s": 60.0, "load_steps": 6000}) as worker:
        worker.wait_for(Hello)
        assert worker.ask_for_exit() == 0


def test_a_load_that_hangs_is_interrupted_by_sigterm() -> None:
    with WorkerHarness(fake={"load_stall": "sleep"}) as worker:
        worker.wait_for(Hello)
        assert worker.beat().phase is WorkerPhase.LOADING
        os.kill(worker.process.pid, signal.SIGTERM)
        assert worker.wait_for(Dying).code == worker.exit_code() == 143
