"""A worker's life in this process: what its loop drives, and what it says last."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import count
from types import SimpleNamespace

import pytest

from mlxsup.protocol.launch import ExitCode, LaunchSpec
from mlxsup.protocol.states import Batching, LoadPhase, WorkerPhase
from mlxsup.protocol.version import VERSION
from mlxsup.protocol.worker_messages import (
    Dying,
    Hello,
    LoadProgress,
    Ready,
)
from mlxsup.worker import process as process_module
from mlxsup.worker.engine import Engine, EngineBytes
from mlxsup.worker.engines.fake.engine import FakeEngine
from mlxsup.worker.engines.mlx import engine as mlx_engine
from mlxsup.worker.process import LINGER_S, Life
from mlxsup.worker.thread_guard import OwnedEngine, WrongThreadError

from support.worker_life import IdleLoop, Supervisor, listening, make_spec, run_loop


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    with listening() as made:
        yield made


def in_a_thread(call: Callable[[], object]) -> BaseException | None:
    """What a call raises in another thread."""
    caught: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except WrongThreadError as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return caught[0] if caught else None


def test_the_engine_that_is_served_refuses_every_other_thread_A1(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[BaseException | None] = []

    class ThreadedLoop:
        """A step loop with the fault that the check is there for."""

        is_exit_asked = True

        def __init__(self, *, engine: Engine, **_: object) -> None:
            self._engine = engine

        def run(self, is_terminated: Callable[[], bool]) -> None:
            seen.append(in_a_thread(self._engine.step))
            assert not self._engine.has_rows()

    monkeypatch.setattr(process_module, "StepLoop", ThreadedLoop)
    assert Life(make_spec(supervisor)).run() == ExitCode.ASKED
    assert [type(error) for error in seen] == [WrongThreadError]
    types = [message.TYPE for message in supervisor.heard(last="ready")]
    assert (types[0], types[-1]) == ("hello", "ready")


@pytest.fixture
def idle_loop(monkeypatch: pytest.MonkeyPatch) -> type[IdleLoop]:
    monkeypatch.setattr(process_module, "StepLoop", IdleLoop)
    return IdleLoop


def test_a_life_says_who_it_is_how_it_loads_and_what_it_has_loaded(
    supervisor: Supervisor, idle_loop: type[IdleLoop]
) -> None:
    options = {
        "load_steps": 3,
        "active_bytes": 77,
        "batching": "one_row",
        "warning": "mind",
        "context_length": 300,
    }
    spec = make_spec(
        supervisor,
        generation=7,
        token="secret",
        max_concurrency=3,
        step_timeout_s=12.5,
        sampling={"temperature": 0.5},
        fake=options,
    )
    life = Life(spec)
    assert life.run() == int(ExitCode.ASKED) == 0
    assert supervisor.heard(last="ready") == [
        Hello(model=spec.model, generation=spec.generation, token="secret", pid=os.getpid(),
              version=VERSION),
        LoadProgress(phase=LoadPhase.IMPORT, progress=0.0),
        LoadProgress(phase=LoadPhase.WEIGHTS, progress=1 / 3),
        LoadProgress(phase=LoadPhase.MATERIALISE, progress=2 / 3),
        LoadProgress(phase=LoadPhase.WARMUP, progress=1.0),
        Ready(context_length=300, fingerprint="fake-0", backend="fake", versions={},
              active_bytes=77, batching=Batching.ONE_ROW,
              batching_reason="an option asks for it in life 7", warnings=["mind"]),
    ]  # fmt: skip
    given = idle_loop.given
    assert (given["max_concurrency"], given["step_timeout_s"]) == (3, 12.5)
    assert given["sampling"] == {"temperature": 0.5}
    assert isinstance(given["engine"], OwnedEngine)
    assert (given["facts"].context_length, given["facts"].backend) == (300, "fake")
    assert (given["link"], given["board"]) == (life.link, life.board)
    assert not given["text"].is_alive(), "closed with the life"
    assert life.board.current.phase is WorkerPhase.CLOSING
    assert life.board.current.held == EngineBytes(active=77, peak=77)
    assert life.heartbeat.is_over
    assert life.link.is_closed


def test_a_ready_worker_is_idle_before_the_loop_begins(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def run(loop: IdleLoop, must_end: Callable[[], bool]) -> None:
        current = loop.given["board"].current
        seen.append((current.phase, current.step, current.held.active))
        assert loop.given["text"].is_alive()

    run_loop(monkeypatch, run, asked=True)
    Life(make_spec(supervisor, fake={"active_bytes": 5})).run()
    assert seen == [(WorkerPhase.IDLE, 0, 5)]


def test_progress_that_cannot_leave_at_once_is_dropped(
    supervisor: Supervisor, idle_loop: type[IdleLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is only worth something fresh, and must not push what matters out of the way."""
    life = Life(make_spec(supervisor))
    flush = life.link.flush
    answers = iter([True, False, False, True, True, True, True])
    monkeypatch.setattr(life.link, "flush", lambda: flush() and next(answers, True))
    life.report(LoadPhase.WEIGHTS, 0.25)
    life.report(LoadPhase.WEIGHTS, 0.5)
    monkeypatch.undo()
    life.link.close(10.0)
    assert supervisor.heard(last="load_progress") == [
        LoadProgress(phase=LoadPhase.WEIGHTS, progress=0.25)
    ]


def test_the_last_messages_have_two_seconds_to_leave(
    supervisor: Supervisor, idle_loop: type[IdleLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Life(make_spec(supervisor))
    lingered = []
    close = life.link.close

    def close_noted(linger_s: float) -> None:
        lingered.append(linger_s)
        close(linger_s)

    monkeypatch.setattr(life.link, "close", close_noted)
    life.run()
    assert lingered == [LINGER_S] == [2.0]


def test_a_machine_without_mlx_has_no_device(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mlxsup.worker.engines.mlx.engine", None)
    assert Life(make_spec(supervisor, engine="mlx")).run() == 69
    last = supervisor.heard(last="dying")[-1]
    assert isinstance(last, Dying)
    assert (last.code, last.message.split(": ")[0]) == (69, "MLX cannot be imported")


def test_the_log_says_how_long_the_start_took_and_what_was_started(
    supervisor: Supervisor,
    idle_loop: type[IdleLoop],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    times = iter([100.0, 102.5])
    monkeypatch.setattr(process_module, "time", SimpleNamespace(monotonic=lambda: next(times)))
    with caplog.at_level(logging.INFO):
        Life(make_spec(supervisor)).run()
    assert [record.message for record in caplog.records] == [
        "worker started model=m generation=1",
        'model ready model=m backend=fake seconds=2.500 prefix_cache="0.0 MiB" '
        "prefix_cache_tokens=0",
        "worker exits model=m code=0",
    ]


def test_steps_are_timed_with_the_clock_that_every_beat_asks_P7(
    supervisor: Supervisor, idle_loop: type[IdleLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that nobody asks meanwhile would not notice that the process was stopped."""
    clocks: list[Callable[[], float]] = []

    class TimedEngine(FakeEngine):
        def __init__(self, spec: LaunchSpec, clock: Callable[[], float]) -> None:
            super().__init__(spec)
            clocks.append(clock)

    monkeypatch.setattr(mlx_engine, "MlxEngine", TimedEngine)
    values = count(7.0)

    def make_clock() -> SimpleNamespace:
        value = next(values)
        return SimpleNamespace(now=lambda: value)

    monkeypatch.setattr(process_module, "Clock", make_clock)
    life = Life(make_spec(supervisor, engine="mlx"))
    assert life.run() == ExitCode.ASKED
    assert [clock() for clock in clocks] == [7.0]
    assert life.board.current.since == 7.0
