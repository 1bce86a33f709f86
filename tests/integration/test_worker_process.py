"""A real worker process over real sockets: life, streams, parent watch, exits."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from mlxsup.protocol.errors import ErrorCode
from mlxsup.protocol.launch import worker_argv
from mlxsup.protocol.states import FinishReason, WorkerPhase
from mlxsup.protocol.worker_messages import Dying, Exit, Heartbeat, Hello, Ready, Step
from mlxsup.worker.engines.fake.text import answer_tokens, decode_tokens, encode_text
from support.eventually import eventually
from support.worker_harness import WorkerHarness


def is_gone(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


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


def test_sixteen_streams_at_once_are_whole_and_in_order_C4() -> None:
    with WorkerHarness(max_concurrency=16) as worker:
        worker.wait_until_ready()
        prompts = {worker.dispatch(p, max_tokens=64): p for p in (f"canary {n}" for n in range(16))}
        for key, stream in zip(prompts, worker.finish(*prompts), strict=True):
            assert stream.tokens == answer_tokens(encode_text(prompts[key]), 64)
            assert stream.text == decode_tokens(stream.tokens)
            assert stream.steps == sorted(stream.steps)
        steps = [message.step for message in worker.messages if isinstance(message, Step)]
        assert steps == sorted(steps)
        assert worker.ask_for_exit() == 0


def test_a_late_request_is_in_by_the_next_step_C2() -> None:
    with WorkerHarness(fake={"step_s": 0.02}) as worker:
        worker.wait_until_ready()
        first = worker.dispatch("a long one", max_tokens=4000)
        worker.wait_for(Step)
        second = worker.dispatch("short", max_tokens=2)
        worker.finish(second)
        assert not worker.streams[first].is_over
        worker.cancel(first)
        worker.finish(first)
        assert set(worker.streams[second].steps) <= set(worker.streams[first].steps)


def test_bad_requests_fail_alone_C7() -> None:
    with WorkerHarness(fake={"context_length": 64}) as worker:
        worker.wait_until_ready()
        good = worker.dispatch("good", max_tokens=40)
        bad = {
            worker.dispatch(body=b"\xc1"): ErrorCode.INVALID_REQUEST,
            worker.dispatch("x" * 64): ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            worker.dispatch("x", max_tokens=64): ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            worker.dispatch(prompt_tokens=[9999]): ErrorCode.INVALID_REQUEST,
            worker.dispatch("[[tokenize raise]]"): ErrorCode.INVALID_REQUEST,
            worker.dispatch("[[fault nonsense=1]]"): ErrorCode.INVALID_REQUEST,
        }
        worker.finish(good, *bad)
        assert worker.streams[good].finish is FinishReason.LENGTH
        for key, code in bad.items():
            error = worker.streams[key].error
            assert error is not None
            assert error["code"] == code
        assert worker.ask_for_exit() == 0


def test_stop_strings_over_token_borders() -> None:
    with WorkerHarness() as worker:
        worker.wait_until_ready()
        key = worker.dispatch("[[say tide 🦊 END tail]]", stop=["END"])
        (stream,) = worker.finish(key)
        assert stream.text == "tide 🦊 "
        assert stream.finish is FinishReason.STOP
        assert decode_tokens(stream.tokens) == "tide 🦊 END"


def test_an_answer_can_end_by_itself_even_at_once() -> None:
    with WorkerHarness() as worker:
        worker.wait_until_ready()
        streams = worker.finish(worker.dispatch("[[answer 7]]"), worker.dispatch("[[answer 0]]"))
        assert [len(stream.tokens) for stream in streams] == [7, 0]
        assert {stream.finish for stream in streams} == {FinishReason.STOP}


@pytest.mark.parametrize("window", ["tokenising", "prefill", "decode", "over"])
def test_cancel_in_each_window_D3_G5(window: str) -> None:
    fake = {"step_s": 0.005, "prefill_tokens_per_step": 1}
    with WorkerHarness(fake=fake, max_concurrency=1) as worker:
        worker.wait_until_ready()
        match window:
            case "tokenising":
                key = worker.dispatch("[[tokenize slow=0.3]]")
            case "prefill":
                key = worker.dispatch("p" * 3000)
                worker.wait_for(Step)
            case "decode":
                key = worker.dispatch("d")
                eventually(lambda: worker.receive() and worker.streams[key].tokens)
            case _:
                key = worker.dispatch("o", max_tokens=1)
                worker.finish(key)
        worker.cancel(key)
        worker.cancel(key)
        (stream,) = worker.finish(key)
        if window != "over":
            assert stream.finish is FinishReason.CANCELLED
        # The only slot is free at once, and nothing comes for the old key (asserted on receipt).
        (after,) = worker.finish(worker.dispatch("next", max_tokens=3))
        assert len(after.tokens) == 3
        assert worker.ask_for_exit() == 0


def test_a_preparation_that_never_ends_stops_nobody_G1() -> None:
    """A loop in Python, which fights for the GIL: the rows go on, and steps count their tokens."""
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
    """Long prompts that take for ever to prepare; everything else goes on as without them."""
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


def test_idle_costs_no_processor_time_C5() -> None:
    with WorkerHarness() as worker:
        worker.wait_until_ready()
        worker.finish(worker.dispatch("x", max_tokens=3))
        process = psutil.Process(worker.process.pid)
        before = process.cpu_times()
        for _ in range(3):
            worker.beat()
        started = time.monotonic()
        for _ in range(2):
            worker.beat()
        after, elapsed_s = process.cpu_times(), time.monotonic() - started
        used_s = after.user + after.system - before.user - before.system
        assert used_s < 0.05 * max(2.0, elapsed_s)


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


def test_wrong_frames_on_demand() -> None:
    with WorkerHarness() as worker:
        worker.wait_until_ready()
        worker.dispatch("[[fault frames=garbage at=2]]", max_tokens=3)
        received: list[list[bytes]] = []
        while len(received) < 5:  # accepted, step, garbage, step, step
            assert worker.socket.poll(10_000)
            received.append(worker.socket.recv_multipart())
        assert [b"\xc1not a message"] in received


# ---------------------------------------------------------------- deaths


def test_a_template_that_loops_for_ever_ends_the_worker_even_when_idle() -> None:
    with WorkerHarness(step_timeout_s=0.1) as worker:
        worker.wait_until_ready()
        worker.dispatch("[[tokenize loop]]")
        dying = worker.wait_for(Dying)
        assert dying.code == worker.exit_code() == 70
        assert "request 1" in dying.message


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGABRT"])
def test_a_crash_on_demand_by_signal_F1(name: str) -> None:
    with WorkerHarness() as worker:
        worker.wait_until_ready()
        worker.dispatch(f"[[fault crash={name} at=5]]")
        assert worker.exit_code() == -getattr(signal, name)


def test_a_fault_can_be_for_one_generation_only() -> None:
    with WorkerHarness(generation=2) as worker:
        worker.wait_until_ready()
        key = worker.dispatch("[[fault crash=exit:70 at=2 generation=1]]", max_tokens=4)
        assert worker.finish(key)[0].finish is FinishReason.LENGTH


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


def test_a_wrong_message_from_the_supervisor_is_exit_70() -> None:
    with WorkerHarness() as worker:
        worker.wait_until_ready()
        worker.socket.send_multipart([b"\xc1"])
        assert worker.wait_for(Dying).code == worker.exit_code() == 70


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


def test_sigterm_after_exit_was_asked_is_0() -> None:
    with WorkerHarness(fake={"step_s": 3.0}) as worker:
        worker.wait_until_ready()
        worker.dispatch("x", max_tokens=4000)

        def is_early_in_a_step() -> bool:
            beat = worker.beat()
            return beat.phase is WorkerPhase.DECODE and beat.phase_s < 1.5

        # The message travels while the step under way goes on; only then does anybody look.
        eventually(is_early_in_a_step, timeout_s=60)
        worker.send(Exit())
        os.kill(worker.process.pid, signal.SIGTERM)
        assert worker.exit_code(30) == 0


def test_sighup_ends_it_by_its_default() -> None:
    with WorkerHarness() as worker:
        worker.wait_until_ready()
        os.kill(worker.process.pid, signal.SIGHUP)
        assert worker.exit_code() == -signal.SIGHUP


@pytest.mark.parametrize("when", ["idle", "decode", "busy", "load"])
def test_the_end_of_the_pipe_ends_the_worker_E6(when: str) -> None:
    with WorkerHarness(fake={"load_stall": "sleep"} if when == "load" else None) as worker:
        if when == "load":
            worker.wait_for(Hello)
        else:
            worker.wait_until_ready()
        if when in ("decode", "busy"):
            worker.dispatch("x[[fault stall=busy at=5]]" if when == "busy" else "x[[fault slow=1]]")
            worker.wait_for(Step)
        worker.close_pipe()
        assert worker.exit_code() not in (0, None)


def test_another_parent_than_the_one_named_ends_it_at_once_E6() -> None:
    with WorkerHarness(supervisor_pid=1 if os.getpid() != 1 else 2) as worker:
        assert worker.exit_code() == 1
        assert "is gone" in worker.log()


PARENT = """
import sys, time
sys.path.insert(0, {tests!r})
from support.worker_harness import WorkerHarness
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


def test_help_needs_no_spec() -> None:
    done = run_worker(b"", "--help")
    assert done.returncode == 0
    assert done.stdout.startswith(b"usage:")


@pytest.mark.parametrize(
    ("stdin", "says"),
    [
        (b"", "mlxsup start"),
        (b"nonsense\n", "launch spec"),
        (b"{}\n", "exactly the keys"),
        (b"x" * 70_000, "64 KiB"),
    ],
)
def test_a_missing_or_bad_spec_is_exit_64_in_one_sentence(stdin: bytes, says: str) -> None:
    done = run_worker(stdin)
    assert done.returncode == 64
    assert says in done.stderr.decode()
    assert done.stderr.count(b"\n") == 1


def test_an_unknown_argument_is_exit_64() -> None:
    assert run_worker(b"", "--fast").returncode == 64


def test_a_spec_that_comes_in_pieces_is_read_whole() -> None:
    with WorkerHarness() as worker:
        values = json.loads(worker.spec.to_line())
        worker.wait_until_ready()
    values["endpoint"] = "tcp://nowhere:1"
    values["supervisor_pid"] = os.getpid()
    line = json.dumps(values).encode() + b"\n"
    process = subprocess.Popen(
        worker_argv(), stdin=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
    )
    assert process.stdin is not None
    for piece in (line[:10], line[10:200], line[200:]):
        process.stdin.write(piece)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 64
    assert b"endpoint takes an ipc:// endpoint" in errors


# ---------------------------------------------------------------- load


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        ("missing", 66, "/the/model"),
        ("bad", 65, "config.json"),
        ("memory", 75, ""),
        ("device", 69, ""),
    ],
)
def test_load_errors_have_their_exit_codes_B2_B6(error: str, code: int, says: str) -> None:
    with WorkerHarness(path="/the/model", fake={"load_error": error}) as worker:
        dying = worker.wait_for(Dying)
        assert dying.code == worker.exit_code() == code
        assert says in dying.message
        assert not any(isinstance(message, Ready) for message in worker.messages)
        assert sum("ERROR" in line for line in worker.log().splitlines()) == 1


def test_an_unexpected_load_error_is_70_with_a_traceback() -> None:
    with WorkerHarness(fake={"load_error": "exception"}, log_may_hold=["Traceback"]) as worker:
        assert worker.wait_for(Dying).code == worker.exit_code() == 70
        assert "Traceback" in worker.log()


def test_an_unknown_fake_option_is_exit_64_and_names_the_known() -> None:
    with WorkerHarness(fake={"step_ms": 3}) as worker:
        dying = worker.wait_for(Dying)
        assert dying.code == worker.exit_code() == 64
        assert "step_ms" in dying.message
        assert "step_s" in dying.message


@pytest.mark.parametrize(("how", "code"), [("SIGKILL", -9), ("SIGSEGV", -11), ("exit:3", 3)])
def test_a_crash_in_load_F8(how: str, code: int) -> None:
    with WorkerHarness(fake={"crash_in_load": how}) as worker:
        assert worker.exit_code() == code


def test_progress_grows_and_every_phase_is_named_B1() -> None:
    with WorkerHarness(fake={"load_steps": 6, "load_s": 0.05}) as worker:
        worker.wait_until_ready()
        progress = [m.progress for m in worker.messages if m.TYPE == "load_progress"]  # type: ignore[attr-defined]
        assert progress == sorted(progress)
        assert len(progress) == 7
        assert progress[-1] == 1.0


@pytest.mark.parametrize("how", ["exit", "term"])
def test_a_load_can_be_ended_B9(how: str) -> None:
    with WorkerHarness(fake={"load_s": 60.0, "load_steps": 6000}) as worker:
        worker.wait_for(Hello)
        if how == "exit":
            assert worker.ask_for_exit() == 0
        else:
            os.kill(worker.process.pid, signal.SIGTERM)
            assert worker.exit_code() in (143, -signal.SIGTERM)


def test_a_load_that_hangs_is_interrupted_by_sigterm() -> None:
    with WorkerHarness(fake={"load_stall": "sleep"}) as worker:
        worker.wait_for(Hello)
        assert worker.beat().phase is WorkerPhase.LOADING
        os.kill(worker.process.pid, signal.SIGTERM)
        assert worker.wait_for(Dying).code == worker.exit_code() == 143


def test_nothing_of_a_prompt_reaches_the_log() -> None:
    with WorkerHarness(log_level="debug", log_may_hold=["Traceback"]) as worker:
        worker.wait_until_ready()
        worker.finish(worker.dispatch("secretword [[tokenize raise]]"))
        worker.finish(worker.dispatch("secretword", max_tokens=3))
        worker.dispatch("secretword [[fault raise at=2]]")
        worker.exit_code()
        assert "secretword" not in worker.log()
