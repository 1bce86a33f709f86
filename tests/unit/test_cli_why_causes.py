"""For each class of death, `mlxsup why` names the cause, also when the daemon has been killed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mlxsup.cli.flight.causes import KINDS, explain
from mlxsup.cli.flight.of_model import of_model
from mlxsup.protocol.flight import WorkerDied
from mlxsup.protocol.states import State, WorkerPhase
from mlxsup.protocol.worker_messages import Dying

from support.core_driver import LAUNCH, Driver
from support.core_states import in_state
from support.flight import BEGAN, Recorder

LIMITED = replace(LAUNCH, memory_limit_bytes=2**30)

Fault = Callable[[Driver], object]


def exits(code: int, *lines: str) -> Fault:
    return lambda driver: driver.exit(code=code, last_lines=lines)


def is_killed(signal: str) -> Fault:
    return lambda driver: driver.exit(signal=signal, last_lines=())


def is_stopped_from_outside(driver: Driver) -> None:
    driver.pass_time(2.5)
    driver.seen(is_stopped=True)
    driver.pass_time(1.0)
    driver.seen(is_stopped=True)
    driver.exit()


def hangs_in_a_step(driver: Driver) -> None:
    for half_seconds in range(64):
        driver.now += 0.5
        driver.beat(WorkerPhase.DECODE, step=0, phase_s=half_seconds / 2)
    driver.seen(is_stopped=False)
    driver.exit()


def holds_the_interpreter(driver: Driver) -> None:
    driver.pass_time(31.0)
    driver.seen(is_stopped=False)
    driver.exit()


def load_hangs(driver: Driver) -> None:
    driver.pass_time(20.0)
    driver.exit()


def load_raises(driver: Driver) -> None:
    driver.worker(Dying(code=70, message="RuntimeError: no such layer"))
    driver.exit(code=70, last_lines=("RuntimeError: no such layer",))
    assert driver.state() in (State.PENDING, State.BACKOFF, State.LOADING), "it is tried again"


def fails_twice_alike(driver: Driver) -> None:
    for _ in range(2):
        driver.worker(Dying(code=70, message="no such layer"))
        driver.exit(code=70, last_lines=("no such layer",))
        if driver.state() is State.LOADING:
            driver.spawned()
            driver.hello()


def loses_its_connection(driver: Driver) -> None:
    driver.unlinked()
    driver.pass_time(2.0)
    driver.exit()


def speaks_garbage(driver: Driver) -> None:
    driver.broke()
    driver.exit()


def is_another_version(driver: Driver) -> None:
    driver.hello(version="9.9.9")
    driver.exit(signal="SIGTERM")


def is_killed_over_its_limit(driver: Driver) -> None:
    driver.sample(2**31, machine_bytes=2**36)
    driver.exit(last_lines=())


def is_restarted_at_once(driver: Driver) -> None:
    driver.restart(now=True)
    driver.exit(code=0, last_lines=())


METAL = "[METAL] Command buffer execution failed: Caused GPU Timeout Error"
STREAM = "RuntimeError: There is no Stream(gpu, 1) in current thread."

DEATHS: dict[str, tuple[State, Fault, str, str]] = {
    "SIGKILL while it serves": (
        State.READY, is_killed("SIGKILL"), "killed_from_outside", "killed its process (SIGKILL)"),
    "SIGKILL while it loads": (
        State.LOADING, is_killed("SIGKILL"), "killed_from_outside", "while it was being loaded"),
    "SIGSEGV": (State.READY, is_killed("SIGSEGV"), "native_crash", "native code (SIGSEGV)"),
    **{
        name: (State.READY, is_killed(name), "native_crash", f"native code ({name})")
        for name in ("SIGBUS", "SIGILL", "SIGFPE", "SIGTRAP")
    },
    "SIGABRT while it loads": (
        State.LOADING, is_killed("SIGABRT"), "native_crash", "native code (SIGABRT)"),
    "SIGTERM": (
        State.READY, is_killed("SIGTERM"), "terminated_from_outside", "to end (SIGTERM)"),
    "SIGTERM that it handles": (
        State.READY, exits(143), "terminated_from_outside", "to end (SIGTERM)"),
    "another signal": (State.READY, is_killed("SIGHUP"), "signal", "(SIGHUP)"),
    "a kill over its limit": (
        State.READY, is_killed_over_its_limit, "killed_over_memory",
        "when it held 2.00 GiB, with a limit of 1.00 GiB"),
    "out of memory": (
        State.READY, exits(75, "MemoryError"), "out_of_memory", "ran out of memory (exit code 75)"),
    "out of memory while it loads": (
        State.LOADING, exits(75, "MemoryError"), "out_of_memory", "while it was being loaded"),
    "a missing model folder": (
        State.LOADING, exits(66, "no folder /m"), "model_missing", "missing: no folder /m"),
    "a bad config.json, or a truncated shard": (
        State.LOADING, exits(65, "config.json is no JSON"), "bad_model", "config.json is no JSON"),
    "no device": (State.LOADING, exits(69, "no GPU"), "no_device", "no GPU"),
    "a bad entry": (State.LOADING, exits(64, "no option x"), "bad_launch", "no option x"),
    "a load that raises": (
        State.LOADING, load_raises, "load_error",
        "while it was being loaded: its load failed (exit code 70): RuntimeError: no such layer"),
    "the same error in two loads": (
        State.LOADING, fails_twice_alike, "load_error", "no such layer"),
    "a load that hangs": (
        State.LOADING, load_hangs, "load_stalled", "the load made no progress for 20 s"),
    "a process that cannot be started": (
        State.LOADING, lambda d: (d.exit(), d.spawn_failed()), "not_started", "no memory"),
    "SIGSTOP": (State.READY, is_stopped_from_outside, "stopped_from_outside", "SIGSTOP"),
    "an endless loop in a step": (State.READY, hangs_in_a_step, "stuck", "step 1 (decode) did not"),
    "the GIL held": (
        State.READY, holds_the_interpreter, "silent", "something held the interpreter"),
    "a lost connection": (
        State.READY, loses_its_connection, "broken", "its connection has ended"),
    "garbage": (State.READY, speaks_garbage, "broken", "garbage"),
    "a step that raises": (State.READY, exits(70, "boom"), "step_error", "failed: boom"),
    "an endless template": (
        State.READY, exits(73, "preparing the prompt of request 1 took more than 300 s"),
        "stuck_prompt", "or too much memory: preparing the prompt of request 1"),
    "a broken link": (
        State.READY, exits(76, "the supervisor sent no message"), "broken_link",
        "did not expect: the supervisor sent no message"),
    "a broken link while it loads": (
        State.LOADING, exits(76, "load came before READY"), "broken_link", "before READY"),
    "a lost thread": (State.READY, exits(71, "gone"), "lost_thread", "gone"),
    "the GPU takes too long": (State.READY, exits(70, METAL), "gpu_timeout", METAL),
    "the GPU fails elsewhere": (
        State.READY, exits(72, "InnocentVictim"), "gpu_fault_elsewhere", "another process"),
    "a stream of another thread": (State.READY, exits(70, STREAM), "stream_error", STREAM),
    "it thinks that it is an orphan": (State.READY, exits(1), "orphaned", "exit code 1"),
    "it just exits": (State.READY, exits(0), "exited", "nobody had asked"),
    "an unknown exit code": (State.READY, exits(99), "unknown", "exit code 99"),
    "another version": (State.LOADING, is_another_version, "other_version", "upgraded to 9.9.9"),
    "SIGKILL has no effect": (
        State.STOPPING, lambda d: d.pass_time(60.0), "cannot_be_ended", "SIGKILL has not ended"),
}  # fmt: skip

BY_HAND = {
    "bug": WorkerDied(
        model="m", generation=1, reason="internal", after="FAILED", ended_by="internal",
        detail="internal error: no rule",
    ),
    "too_large": WorkerDied(
        model="m", generation=1, reason="load_error", after="FAILED", ended_by="too_large",
        detail="needs 9 GiB of 8 GiB",
    ),
    "asked": WorkerDied(model="m", generation=1, reason="asked", after="PENDING", code=0),
}  # fmt: skip


@pytest.mark.parametrize("fault", DEATHS)
def test_each_class_of_death_has_its_cause_and_what_to_do_after_the_daemon_was_killed(
    fault: str, tmp_path: Path
) -> None:
    state, happens, name, words = DEATHS[fault]
    changes = {"launch": LIMITED} if name == "killed_over_memory" else {}
    driver = in_state(state, **changes)
    recorder = Recorder(driver)
    happens(driver)
    death = recorder.deaths[-1]
    assert explain(death).name == name
    story = of_model(recorder.read(tmp_path), "m", None, BEGAN + 20_000.0)
    text = "\n".join(story.lines(None))
    assert "died without a word" in text, "the daemon itself"
    [told] = [line for line in story.sentences if line.startswith("it last died")]
    assert words in told
    assert "MODEL" not in text
    advice = {one.replace(" --previous", "") for one in story.advice}
    assert set(explain(death).advice) <= advice


@pytest.mark.parametrize("fault", DEATHS)
def test_each_class_of_death_says_how_a_model_that_has_failed_comes_back(
    fault: str, tmp_path: Path
) -> None:
    state, happens, name, _ = DEATHS[fault]
    driver = in_state(state, **({"launch": LIMITED} if name == "killed_over_memory" else {}))
    recorder = Recorder(driver)
    happens(driver)
    recording = recorder.read(tmp_path)
    advice = "\n".join(of_model(recording, "m", {**driver.row(), "state": "FAILED"}, BEGAN).advice)
    commands = "`mlxsup restart m`", "`mlxsup reload`", "`mlxsup start`", "it is loaded again once"
    assert any(command in advice for command in commands)
    assert advice.count("`mlxsup restart m`") <= 1
    assert "nothing else" not in advice


@pytest.mark.parametrize("rows", [0, 1])
def test_only_a_death_with_requests_speaks_of_a_request_that_does_it_again(rows: int) -> None:
    driver = Driver()
    recorder = Recorder(driver)
    driver.load()
    driver.come_up()
    if rows:
        driver.serve("r")
    driver.exit(signal="SIGSEGV")
    advice = "\n".join(explain(recorder.deaths[-1]).advice)
    assert ("with the same request" in advice) == bool(rows)


@pytest.mark.parametrize("name", BY_HAND)
def test_what_no_played_worker_does_has_its_cause_too(name: str) -> None:
    explanation = explain(BY_HAND[name])
    assert explanation.name == name
    assert BY_HAND[name].detail in explanation.what


def test_every_kind_is_tried() -> None:
    tried = {name for _, _, name, _ in DEATHS.values()} | set(BY_HAND)
    assert tried == {kind.name for kind in KINDS}


def test_braces_in_last_words_do_no_harm(tmp_path: Path) -> None:
    driver = in_state(State.READY)
    recorder = Recorder(driver)
    driver.exit(code=70, last_lines=("{0} {pid} MODEL",))
    text = "\n".join(of_model(recorder.read(tmp_path), "m", None, BEGAN + 1.0).lines(None))
    assert "{0} {pid}" in text
