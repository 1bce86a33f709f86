"""A worker that says anything at any time: all of it has a rule, and the model stays usable."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlxsup.protocol.ids import Generation, ModelName, RequestKey
from mlxsup.protocol.rendering import Rendered
from mlxsup.protocol.states import HAS_PROCESS, FinishReason, LoadPhase, State, WorkerPhase
from mlxsup.protocol.version import VERSION
from mlxsup.protocol.worker_messages import (
    WORKER_TO_SUPERVISOR,
    Acceptance,
    Accepted,
    Dying,
    Heartbeat,
    Hello,
    LoadProgress,
    PrefillProgress,
    Ready,
    Rejected,
    RowDelta,
    Step,
    WorkerMessage,
)
from mlxsup.supervisor.core.actions import WorkerSignal

from support.beats import serving
from support.core_states import WITH_PROCESS, in_state


@pytest.mark.parametrize("state", WITH_PROCESS)
def test_a_hello_of_another_version_at_any_time_ends_as_failed(state: State) -> None:
    driver = in_state(state)
    driver.hello(version="9.9.9")
    assert (driver.state(), driver.signals()) == (State.STOPPING, [WorkerSignal.TERM])
    driver.hello(version="9.9.9")
    driver.exit(code=143)
    assert driver.row()["last_exit"]["reason"] == "version"
    is_wanted = state is not State.DRAINING
    assert driver.state() is (State.FAILED if is_wanted else State.STOPPED)


@pytest.mark.parametrize("step", [-1, 0, 3, 10**9])
def test_a_worker_that_counts_its_steps_wrongly_is_killed(step: int) -> None:
    driver = serving()
    driver.worker(Step(step=1))
    driver.worker(Step(step=1))
    assert driver.state() is State.READY, "what was cancelled between two steps has its number"
    driver.worker(Step(step=step))
    assert driver.signals() == [WorkerSignal.KILL]
    driver.exit(signal="SIGKILL")
    assert f"(counted step {step} after step 1)" in "\n".join(driver.model().life.story)


def messages(key: RequestKey) -> list[WorkerMessage]:
    """Every message of a worker, also in forms that make no sense; two of most."""
    acceptance = Acceptance(prompt_tokens=b"\1", opening="", parameters={}, seed=-1, fingerprint="")
    hello = Hello(model=ModelName("m"), generation=Generation(1), token="t", pid=1, version=VERSION)
    odd = Heartbeat(
        step=-5,
        phase=WorkerPhase.LOADING,
        phase_s=-1e14,
        predicted_s=-1e14,
        requests=-1,
        preparing=-1,
        sent=-1,
        received=-1,
    )
    delta = RowDelta(key=key, text="x", tokens=b"\1\0\0\0", finish=FinishReason.STOP)
    found: list[WorkerMessage] = [
        hello,
        replace(hello, version="9.9.9"),
        replace(hello, generation=Generation(7), version=""),
        LoadProgress(phase=LoadPhase.SPAWN, progress=-1.0),
        LoadProgress(phase=LoadPhase.WARMUP, progress=1e14),
        Ready(context_length=-1, fingerprint="", backend="", active_bytes=-1),
        Accepted(key=key, acceptance=acceptance, tokenize_s=-1.0),
        Accepted(key=RequestKey(99), acceptance=acceptance, tokenize_s=-1.0),
        Rejected(key=key, error={}),
        Rejected(key=key, error={"code": "worker_crashed", "message": "m", "retryable": True}),
        Step(step=-1),
        Step(step=0, rows=[delta, delta], prefill=[PrefillProgress(key=key, done=-1, total=0)]),
        Step(step=1, rows=[RowDelta(key=RequestKey(99), finish=FinishReason.CANCELLED)]),
        odd,
        Heartbeat(step=10**9, phase=WorkerPhase.DECODE, phase_s=1e14, predicted_s=1e14),
        Rendered(number=-1, bodies=[]),
        Rendered(number=1, bodies=[b""]),
        Dying(code=-1, message=""),
    ]
    assert {type(message) for message in found} == set(WORKER_TO_SUPERVISOR)
    return found


@pytest.mark.parametrize("state", sorted(HAS_PROCESS))
@pytest.mark.parametrize("number", range(len(messages(RequestKey(1)))))
def test_every_message_at_every_time_has_a_rule(state: State, number: int) -> None:
    """The core is strict: a pair without a rule raises. Afterwards the model can be used."""
    first = messages(RequestKey(1))[number]
    for second in messages(RequestKey(1)):
        driver = in_state(state)
        for message in (first, second, first):
            if driver.state() in HAS_PROCESS:
                driver.worker(message)
            driver.pass_time(0.1)
        for _ in range(2):  # another version ends as FAILED whatever was asked for
            driver.restart(now=True)
            if driver.state() is State.STOPPING:
                driver.exit()
        driver.come_up()
        assert driver.state() is State.READY, (state, first, second)
