"""A real worker process over real sockets: life, streams, stalls, back-pressure, and its ends."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from mlxsup.protocol.launch import ExitCode, worker_argv
from mlxsup.protocol.states import FinishReason, WorkerPhase
from mlxsup.protocol.worker_messages import Dying, Heartbeat, Hello, Step
from mlxsup.worker.bootstrap import ORPHANED_EXIT
from mlxsup.worker.engines.fake.text import answer_tokens, decode_tokens, encode_text

from support.eventually import eventually
from support.worker.worker_harness import WorkerHarness


def is_gone(pid: int) -> bool:
    """Return True if a process has ended, reaped or not."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_hello_load_ready_answer_exit_without_mlx_E3_A3() -> None:
    with WorkerHarness() as worker:
        worker.wait_until_ready()
        key = worker.dispatch("hello", max_tokens=50)
        (stream,) = worker.finish(key)
        expected = answer_tokens(encode_text("hello"), 50)
        assert stream.tokens == expected
        assert stream.text == decode_tokens(expected)
        assert stream.finish is FinishReason.LENGTH
        assert stream.prefill_s is not None
        if sys.platform == "linux":
            files = [mapping.path for mapping in psutil.Process(worker.process.pid).memory_maps()]
            assert "mlx" not in " ".join(files).replace("mlxsup", "")
        assert worker.ask_for_exit() == 0
        assert isinstance(worker.messages[0], Hello)
        assert not any(isinstance(message, Dying) for message in worker.messages)


def test_an_endless_preparation_stops_no_row_G1() -> None:
    """A loop in Python, which fights for the GIL: rows continue, and steps count their tokens."""
    with WorkerHarness(is_new=False) as worker:
        worker.wait_until_ready()
        running = worker.dispatch("running", max_tokens=100)
        worker.wait_for(Step)
        endless = worker.dispatch("[[tokenize loop]]")
        (stream,) = worker.finish(running, timeout_s=90)
        assert (stream.finish, len(stream.tokens)) == (FinishReason.LENGTH, 100)
        assert len(stream.steps) == stream.steps[-1] - stream.steps[0] + 1, "a token in each step"
        assert worker.streams[endless].acceptance is None
        assert not worker.streams[endless].is_over


def test_long_prompts_starve_neither_heartbeats_nor_short_ones_G7() -> None:
    """Long prompts that take for ever to prepare; everything else proceeds as without them."""
    with WorkerHarness(is_new=False) as worker:
        worker.wait_until_ready()
        long = [worker.dispatch("[[tokenize loop]]" + "l" * 100_000) for _ in range(4)]
        eventually(lambda: worker.beat().requests == 4, what="their arrival")
        for number in range(20):
            (short,) = worker.finish(worker.dispatch(f"short {number}", max_tokens=5))
            assert (short.finish, len(short.tokens)) == (FinishReason.LENGTH, 5)
        while worker.has_beat(0):
            worker.beat()  # said while a short one ran, perhaps
        eventually(lambda: worker.beat().requests == 4, what="the end of the short ones")
        for _ in range(2):
            assert worker.beat().requests == 4
        worker.cancel(long[-1])
        (cancelled,) = worker.finish(long[-1])
        assert cancelled.finish is FinishReason.CANCELLED
        assert not any(worker.streams[key].is_over for key in long[:-1])


def test_heartbeats_flow_while_a_step_is_stuck_F5() -> None:
    with WorkerHarness(is_new=False, fake={"predicted_s": 0.25, "active_bytes": 123}) as worker:
        worker.wait_until_ready()
        worker.dispatch("[[fault stall=sleep at=3]]")

        def stuck_beat() -> Heartbeat | None:
            beat = worker.beat()
            return beat if (beat.step, beat.phase) == (2, WorkerPhase.DECODE) else None

        beat = eventually(stuck_beat, what="the stuck step")
        assert beat is not None
        assert (beat.predicted_s, beat.active_bytes) == (0.25, 123)
        later = worker.beat()
        assert (later.step, later.phase) == (2, WorkerPhase.DECODE)
        assert later.phase_s > beat.phase_s
        os.kill(worker.process.pid, signal.SIGUSR1)
        eventually(lambda: "in stall" in worker.log(), what="the stack dump")


def test_heartbeats_end_while_the_gil_is_held_F6() -> None:
    with WorkerHarness(is_new=False) as worker:
        worker.wait_until_ready()
        worker.dispatch("[[fault stall=gil at=1]]")
        eventually(lambda: not worker.has_beat(2.5) or not worker.beat())
        assert worker.process.poll() is None


def test_a_supervisor_that_does_not_read_stops_the_steps() -> None:
    with WorkerHarness(is_new=False, receive_limit=4, fake={"active_bytes": 1}) as worker:
        worker.wait_until_ready()
        key = worker.dispatch("[[fault big=50000]]", max_tokens=3000)
        last = -1

        def is_standing() -> bool:
            nonlocal last
            beat = worker.beat()
            was, last = last, beat.step
            return beat.phase is WorkerPhase.IDLE and beat.step == was > 0

        eventually(is_standing)
        assert last < 1000
        worker.cancel(key)
        (stream,) = worker.finish(key)
        assert stream.finish is FinishReason.CANCELLED
        assert worker.ask_for_exit() == 0


# ---------------------------------------------------------------- ends
def test_an_exception_out_of_a_step_is_exit_70_and_no_prompt_reaches_the_log_F3() -> None:
    with WorkerHarness(is_new=False, log_level="debug", log_may_hold=["Traceback"]) as worker:
        worker.wait_until_ready()
        worker.finish(worker.dispatch("secretword [[tokenize raise]]"))
        key = worker.dispatch("secretword [[fault raise at=3]]")
        dying = worker.wait_for(Dying)
        assert worker.exit_code() == dying.code == 70
        assert "FakeStepError" in dying.message
        assert len(worker.streams[key].tokens) == 2
        assert "Traceback" in worker.log()
        assert "secretword" not in worker.log()


def test_a_template_that_loops_for_ever_ends_the_worker_even_when_idle() -> None:
    with WorkerHarness(is_new=False, step_timeout_s=0.1) as worker:
        worker.wait_until_ready()
        worker.dispatch("[[tokenize loop]]")
        dying = worker.wait_for(Dying)
        assert dying.code == worker.exit_code() == ExitCode.STUCK_PROMPT
        assert "request 1" in dying.message
        assert "most recent call first" in worker.log(), "the stacks of its threads"


def test_sigterm_when_idle_and_sigint_ignored() -> None:
    with WorkerHarness(is_new=False) as worker:
        worker.wait_until_ready()
        os.kill(worker.process.pid, signal.SIGINT)
        assert worker.finish(worker.dispatch("x", max_tokens=2))[0].finish is FinishReason.LENGTH
        os.kill(worker.process.pid, signal.SIGTERM)
        assert worker.exit_code() == 143


def test_it_logs_from_the_level_of_its_spec_on() -> None:
    for level, is_silent in (("info", False), ("warning", True)):
        with WorkerHarness(is_new=False, log_level=level) as worker:
            worker.wait_until_ready()
            assert worker.ask_for_exit() == 0
            assert (worker.log() == "") == is_silent, worker.log()


def test_sighup_ends_it_by_its_default() -> None:
    with WorkerHarness(is_new=False) as worker:
        worker.wait_until_ready()
        os.kill(worker.process.pid, signal.SIGHUP)
        assert worker.exit_code() == -signal.SIGHUP


@pytest.mark.parametrize("when", ["busy", "load"])
def test_the_end_of_the_pipe_ends_the_worker_E6(when: str) -> None:
    with WorkerHarness(
        is_new=False, fake={"load_stall": "sleep"} if when == "load" else None
    ) as worker:
        if when == "load":
            worker.wait_for(Hello)
        else:
            worker.wait_until_ready()
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
worker.dispatch("[[fault stall=gil at=1]]")
worker.receive()
worker.receive_what_is_there(0.2)
print(worker.process.pid, worker.folder, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs PDEATHSIG")
def test_a_killed_supervisor_takes_a_worker_that_holds_the_gil_with_it_P13() -> None:
    script = PARENT.format(tests=str(Path(__file__).parents[1]))
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    try:
        pid, folder = parent.stdout.readline().split()
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    try:
        eventually(lambda: is_gone(int(pid)))
    finally:
        shutil.rmtree(folder)


def test_a_missing_spec_is_exit_64_in_one_sentence() -> None:
    done = subprocess.run(worker_argv(), input=b"", capture_output=True, timeout=60, check=False)
    assert done.returncode == 64
    assert b"mlxsup start" in done.stderr
    assert done.stderr.count(b"\n") == 1


def test_a_load_that_hangs_is_interrupted_by_sigterm() -> None:
    with WorkerHarness(is_new=False, fake={"load_stall": "sleep"}) as worker:
        worker.wait_for(Hello)
        assert worker.beat().phase is WorkerPhase.LOADING
        os.kill(worker.process.pid, signal.SIGTERM)
        assert worker.wait_for(Dying).code == worker.exit_code() == 143
