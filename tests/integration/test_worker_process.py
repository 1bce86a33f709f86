"""A real worker process over real sockets: life, streams, stalls, back-pressure."""

import os
import signal
import sys

import psutil
import pytest

from mlxsup.protocol.states import FinishReason, WorkerPhase
from mlxsup.protocol.worker_messages import Dying, Heartbeat, Hello, Step
from mlxsup.worker.engines.fake.text import answer_tokens, decode_tokens, encode_text

from support.eventually import eventually
from support.worker.worker_harness import WorkerHarness


def loaded_modules(pid: int) -> str:
    """The files a process has mapped."""
    return " ".join(mapping.path for mapping in psutil.Process(pid).memory_maps())


def test_hello_load_ready_answer_exit_E3() -> None:
    with WorkerHarness() as worker:
        worker.wait_until_ready()
        key = worker.dispatch("hello", max_tokens=50)
        (stream,) = worker.finish(key)
        expected = answer_tokens(encode_text("hello"), 50)
        assert stream.tokens == expected
        assert stream.text == decode_tokens(expected)
        assert stream.finish is FinishReason.LENGTH
        assert stream.prefill_s is not None
        assert worker.ask_for_exit() == 0
        assert isinstance(worker.messages[0], Hello)
        assert not any(isinstance(message, Dying) for message in worker.messages)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory maps")
def test_the_fake_engine_never_imports_mlx_A3() -> None:
    with WorkerHarness() as worker:
        worker.wait_until_ready()
        worker.finish(worker.dispatch("x", max_tokens=3))
        assert "mlx" not in loaded_modules(worker.process.pid).replace("mlxsup", "")


def test_an_endless_preparation_stops_no_row_G1() -> None:
    """A loop in Python, which fights for the GIL: rows continue, and steps count their tokens."""
    with WorkerHarness() as worker:
        worker.wait_until_ready()
        running = worker.dispatch("running", max_tokens=500)
        worker.wait_for(Step)
        endless = worker.dispatch("[[tokenize loop]]")
        (stream,) = worker.finish(running, timeout_s=90)
        assert (stream.finish, len(stream.tokens)) == (FinishReason.LENGTH, 500)
        assert len(stream.steps) == stream.steps[-1] - stream.steps[0] + 1, "a token in each step"
        assert worker.streams[endless].acceptance is None
        assert not worker.streams[endless].is_over


def test_long_prompts_starve_neither_heartbeats_nor_short_ones_G7() -> None:
    """Long prompts that take for ever to prepare; everything else proceeds as without them."""
    with WorkerHarness() as worker:
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
    with WorkerHarness(fake={"predicted_s": 0.25, "active_bytes": 123}) as worker:
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
    with WorkerHarness() as worker:
        worker.wait_until_ready()
        worker.dispatch("[[fault stall=gil at=1]]")
        eventually(lambda: not worker.has_beat(2.5) or not worker.beat(), timeout_s=60)
        assert worker.process.poll() is None


def test_a_supervisor_that_does_not_read_stops_the_steps() -> None:
    with WorkerHarness(receive_limit=4, fake={"active_bytes": 1}) as worker:
        worker.wait_until_ready()
        key = worker.dispatch("[[fault big=50000]]", max_tokens=3000)
        last = -1

        def is_standing() -> bool:
            nonlocal last
            beat = worker.beat()
            was, last = last, beat.step
            return beat.phase is WorkerPhase.IDLE and beat.step == was > 0

        eventually(is_standing, timeout_s=60)
        assert last < 1000
        worker.cancel(key)
        (stream,) = worker.finish(key)
        assert stream.finish is FinishReason.CANCELLED
        assert worker.ask_for_exit() == 0


def test_nothing_of_a_prompt_reaches_the_log() -> None:
    with WorkerHarness(log_level="debug", log_may_hold=["Traceback"]) as worker:
        worker.wait_until_ready()
        worker.finish(worker.dispatch("secretword [[tokenize raise]]"))
        worker.finish(worker.dispatch("secretword", max_tokens=3))
        worker.dispatch("secretword [[fault raise at=2]]")
        worker.exit_code()
        assert "secretword" not in worker.log()
