"""A worker's life in this process: what its loop drives, what it says last, and how it ends."""

from __future__ import annotations

import faulthandler
import inspect
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq

from mlxsup.protocol.cache_layers import CacheLayers
from mlxsup.protocol.codec import Decoder, encode
from mlxsup.protocol.ids import Generation, RequestKey
from mlxsup.protocol.launch import ExitCode
from mlxsup.protocol.message import Message
from mlxsup.protocol.states import Batching, LoadPhase, WorkerPhase
from mlxsup.protocol.tasks import Task
from mlxsup.protocol.version import VERSION
from mlxsup.protocol.worker_messages import (
    WORKER_TO_SUPERVISOR,
    CancelRow,
    Dying,
    Exit,
    Hello,
    LoadProgress,
    Ready,
)
from mlxsup.worker import process as process_module
from mlxsup.worker.engine import (
    BadLaunchError,
    BadModelError,
    DivergedError,
    Engine,
    EngineFacts,
    GpuFaultElsewhereError,
    ModelMissingError,
    NoDeviceError,
    ReportProgress,
    WorkerFaultError,
)
from mlxsup.worker.engines import opening
from mlxsup.worker.engines.fake.engine import FakeEngine
from mlxsup.worker.engines.fake.options import FakeOptionError
from mlxsup.worker.link import Link, LinkBrokenError
from mlxsup.worker.process import LINGER_S, Life, TerminatedError, TerminationHandler, judge
from mlxsup.worker.thread_guard import OwnedEngine, WrongThreadError
from mlxsup.worker.tokenising import StuckPreprocessingError

from support.worker.turn_bench import make_spec


@pytest.mark.parametrize(
    ("error", "code", "is_expected"),
    [
        (ModelMissingError("gone"), 66, True),
        (BadModelError("bad"), 65, True),
        (BadLaunchError("more than fits"), 64, True),
        (NoDeviceError("none"), 69, True),
        (GpuFaultElsewhereError("innocent"), 72, True),
        (FakeOptionError("odd"), 64, True),
        (WorkerFaultError("a row is lost"), 71, True),
        (DivergedError("another result"), 70, True),
        (MemoryError(), 75, True),
        (StuckPreprocessingError("too long"), 73, True),
        (LinkBrokenError("odd"), 76, True),
        (TerminatedError("term"), 143, True),
        (ValueError("odd"), 70, False),
        (RecursionError(), 70, False),
        (SystemExit(0), 70, False),
    ],
)
def test_every_exception_has_an_exit_code(
    error: BaseException, code: int, is_expected: bool
) -> None:
    death = judge(error)
    assert (death.code, death.is_expected) == (code, is_expected)
    assert death.message


# ---------------------------------------------------------------- lives
class Supervisor:
    """The other end of a worker's sockets."""

    def __init__(self, folder: Path) -> None:
        self.endpoint = f"ipc://{folder}/w.sock"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.bind(self.endpoint)
        self._beats = self._context.socket(zmq.PULL)
        self._beats.bind(self.endpoint + ".beat")
        self._decoder = Decoder(WORKER_TO_SUPERVISOR, is_strict=False)

    def life(self, **changes: Any) -> Life:
        spec = {"endpoint": self.endpoint, "path": "/nowhere", "max_concurrency": 2} | changes
        return Life(make_spec(**spec))

    def say(self, message: Message, link: Link) -> None:
        """Send a message, and wait until the worker has it."""
        self._socket.send_multipart(encode(message))
        link.wait(60.0)

    def heard(self, last: str) -> list[Message]:
        """Return everything that has come, once a message of this type has."""
        messages: list[Message] = []
        while self._socket.poll(0 if last in [one.TYPE for one in messages] else 60_000):
            messages.append(self._decoder.decode(self._socket.recv_multipart()))
        return messages

    def last_words(self) -> Dying:
        last = self.heard(last="dying")[-1]
        assert isinstance(last, Dying)
        return last

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    """A supervisor's end in its own folder; SIGTERM does afterwards what it did before."""
    folder = Path(tempfile.mkdtemp(prefix="mlxsup-t-", dir="/tmp"))
    before = signal.getsignal(signal.SIGTERM)
    made = Supervisor(folder)
    yield made
    made.close()
    signal.signal(signal.SIGTERM, before)
    shutil.rmtree(folder)


class IdleLoop:
    """A step loop that serves nothing, and what it was given."""

    is_exit_asked = True
    given: dict[str, Any]

    def __init__(self, **given: Any) -> None:
        type(self).given = given

    def run(self, must_end: Callable[[], bool]) -> None:
        assert must_end() is False


def run_loop(
    monkeypatch: pytest.MonkeyPatch, run: Callable[..., None] = IdleLoop.run, *, asked: bool = True
) -> type[IdleLoop]:
    """Have the life's loop do this."""
    made = type("Loop", (IdleLoop,), {"is_exit_asked": asked, "run": run})
    monkeypatch.setattr(process_module, "StepLoop", made)
    return made


@pytest.fixture
def idle_loop(monkeypatch: pytest.MonkeyPatch) -> type[IdleLoop]:
    return run_loop(monkeypatch)


def test_a_life_says_hello_progress_and_ready(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def run(loop: IdleLoop, must_end: Callable[[], bool]) -> None:
        beat = loop.given["board"].beat()
        seen.append((beat.phase, beat.step, beat.active_bytes))
        assert loop.given["text"].is_alive()
        assert must_end() is False

    given = run_loop(monkeypatch, run)
    load = FakeEngine.load
    found: dict[str, Any] = {
        "versions": {"mlx": "1"},
        "task": Task.EMBED,
        "dimensions": 5,
        "takes_pictures": True,
        "draft_tokens": 6,
        "parallel": "tensor",
    }
    facts = found | {"sampling": {"temperature": 0.1, "top_p": 0.9}}
    monkeypatch.setattr(FakeEngine, "load", lambda engine, report: replace(
        load(engine, report), **facts))  # fmt: skip
    lingered = []
    options = {"load_steps": 3, "active_bytes": 77, "batching": "one_row", "warning": "mind",
               "context_length": 300, "token_bytes": 8}  # fmt: skip
    life = supervisor.life(
        generation=7,
        token="secret",
        max_concurrency=3,
        step_timeout_s=12.5,
        sampling={"temperature": 0.5},
        fake=options,
    )
    close = life.link.close

    def close_noted(linger_s: float) -> None:
        lingered.append(linger_s)
        close(linger_s)

    monkeypatch.setattr(life.link, "close", close_noted)
    assert life.run() == int(ExitCode.ASKED) == 0
    assert supervisor.heard(last="ready") == [
        Hello(model=make_spec().model, generation=Generation(7), token="secret",
              pid=os.getpid(), version=VERSION),
        LoadProgress(phase=LoadPhase.IMPORT, progress=0.0),
        LoadProgress(phase=LoadPhase.WEIGHTS, progress=1 / 3),
        LoadProgress(phase=LoadPhase.MATERIALISE, progress=2 / 3),
        LoadProgress(phase=LoadPhase.WARMUP, progress=1.0),
        Ready(context_length=300, fingerprint="fake-0", backend="fake", active_bytes=77,
              cache_layers=[CacheLayers(layers=1, token_bytes=8)], batching=Batching.ONE_ROW,
              batching_reason="an option asks for it in life 7", warnings=["mind"], **found),
    ]  # fmt: skip
    assert seen == [(WorkerPhase.IDLE, 0, 77)], "it is idle before the loop begins"
    loop = given.given
    assert (loop["max_concurrency"], loop["step_timeout_s"]) == (3, 12.5)
    assert loop["sampling"] == {"temperature": 0.5, "top_p": 0.9}, "of the entry, then the makers'"
    assert isinstance(loop["engine"], OwnedEngine)
    assert (loop["facts"].context_length, loop["facts"].backend) == (300, "fake")
    assert (loop["link"], loop["board"]) == (life.link, life.board)
    assert not loop["text"].is_alive(), "closed with the life"
    beat = life.board.beat()
    assert (beat.phase, beat.active_bytes, beat.peak_bytes) == (WorkerPhase.CLOSING, 77, 77)
    assert life.heartbeat.is_over
    assert life.link.is_closed
    assert lingered == [LINGER_S] == [2.0], "the last messages have that long to leave"


def test_progress_that_cannot_leave_at_once_is_dropped(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is only worth something fresh, and must not push what matters out of the way."""
    life = supervisor.life()
    flush = life.link.flush
    answers = iter([True, False, False])
    monkeypatch.setattr(life.link, "flush", lambda: flush() and next(answers, True))
    life.report(LoadPhase.WEIGHTS, 0.25)
    life.report(LoadPhase.WEIGHTS, 0.5)
    monkeypatch.undo()
    life.link.close(10.0)
    assert supervisor.heard(last="load_progress") == [
        LoadProgress(phase=LoadPhase.WEIGHTS, progress=0.25)
    ]


def test_a_machine_without_mlx_has_no_device(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mlxsup.worker.engines.mlx.engine", None)
    assert supervisor.life(engine="mlx").run() == 69
    last = supervisor.last_words()
    assert (last.code, last.message.split(": ")[0]) == (69, "MLX cannot be imported")


@pytest.mark.usefixtures("idle_loop")
def test_an_exit_during_the_load_ends_it_without_a_cause_B9(supervisor: Supervisor) -> None:
    life = supervisor.life()
    supervisor.say(Exit(), life.link)
    assert life.run() == ExitCode.ASKED
    types = [message.TYPE for message in supervisor.heard(last="load_progress")]
    assert types == ["hello", "load_progress"], "the load ends at its first report"
    assert not life.termination.is_interrupting


@pytest.mark.usefixtures("idle_loop")
def test_a_message_before_ready_breaks_the_link(supervisor: Supervisor) -> None:
    life = supervisor.life()
    supervisor.say(CancelRow(key=RequestKey(1)), life.link)
    assert life.run() == 76
    assert supervisor.last_words() == Dying(code=76, message="cancel_row came before READY")


@pytest.mark.parametrize(
    ("fake", "code", "cause", "has_traceback"),
    [
        ({"load_error": "missing"}, 66, "the model folder /nowhere does not exist", False),
        ({"load_error": "memory"}, 75, "the weights do not fit into memory", False),
        ({"load_error": "exception"}, 70, "RuntimeError: life 1 raises this on demand", True),
        (
            {"load_steps": 0},
            64,
            "the fake engine's load_steps must be an integer of 1 or more",
            False,
        ),
    ],
)
@pytest.mark.usefixtures("idle_loop")
def test_a_load_that_fails_is_the_last_thing_said_F3(
    supervisor: Supervisor,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    fake: dict[str, Any],
    code: int,
    cause: str,
    has_traceback: bool,
) -> None:
    life = supervisor.life(fake=fake)
    with caplog.at_level(logging.ERROR):
        assert life.run() == code
    assert not life.termination.is_interrupting, "a SIGTERM interrupts no end that is under way"
    assert supervisor.last_words() == Dying(code=code, message=cause)
    assert ("Traceback" in capsys.readouterr().err) is has_traceback
    assert f"worker dies code={code} cause=" in caplog.text


# ---------------------------------------------------------------- SIGTERM
@pytest.mark.parametrize(
    ("message", "code", "last"),
    [(None, 143, "dying"), (CancelRow(key=RequestKey(1)), 143, "dying"), (Exit(), 0, "ready")],
    ids=["nothing", "a cancel", "an exit"],
)
def test_sigterm_between_steps_is_a_death_unless_the_exit_was_asked_for_too_E5(
    supervisor: Supervisor,
    monkeypatch: pytest.MonkeyPatch,
    message: Message | None,
    code: int,
    last: str,
) -> None:
    has_come = []

    def run(loop: IdleLoop, must_end: Callable[[], bool]) -> None:
        if message is not None:
            supervisor.say(message, loop.given["link"])
        has_come.append(must_end())
        signal.raise_signal(signal.SIGTERM)
        has_come.append(must_end())

    run_loop(monkeypatch, run, asked=False)
    assert supervisor.life().run() == code
    assert has_come == [False, True], "it interrupts no step"
    end = supervisor.heard(last=last)[-1]
    assert last == end.TYPE
    assert not code or end == Dying(code=143, message="ended by SIGTERM")


def test_sigterm_interrupts_a_load_where_it_stands_B9(
    supervisor: Supervisor, idle_loop: type[IdleLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    reached = []

    class Loading(FakeEngine):
        def load(self, report: ReportProgress) -> EngineFacts:
            reached.append("load")
            signal.raise_signal(signal.SIGTERM)
            reached.append("behind the signal")
            return super().load(report)

    monkeypatch.setattr(opening, "FakeEngine", Loading)
    life = supervisor.life()
    assert life.run() == 143
    assert reached == ["load"]
    assert not life.termination.is_interrupting


class Waking(Link):
    """A link without a socket, for a termination handler."""

    def __init__(self) -> None:
        self.wakes = 0

    def wake(self) -> None:
        self.wakes += 1


def test_sigterm_interrupts_once_while_it_may_and_else_wakes_the_loop() -> None:
    """A signal that came before counts too: a load that hangs would never look."""
    link = Waking()
    handler = TerminationHandler(link)
    assert not handler.has_come()
    handler.interrupt_from_now_on()
    with pytest.raises(TerminatedError, match=r"^ended by SIGTERM$"):
        handler(signal.SIGTERM, None)
    assert (handler.has_come(), link.wakes) == (True, 0)
    handler(signal.SIGTERM, None)
    assert link.wakes == 1
    with pytest.raises(TerminatedError, match=r"^ended by SIGTERM$"):
        handler.interrupt_from_now_on()
    handler(signal.SIGTERM, None)
    assert link.wakes == 2


def test_heartbeats_that_have_ended_end_the_worker_P23(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(loop: IdleLoop, must_end: Callable[[], bool]) -> None:
        assert not must_end()
        life.heartbeat.stop()
        must_end()

    run_loop(monkeypatch, run, asked=False)
    life = supervisor.life()
    assert life.run() == 71
    said = "the thread that sends heartbeats has ended"
    assert supervisor.last_words() == Dying(code=71, message=said)


# ---------------------------------------------------------------- the engine's thread
METHODS = sorted(
    name for name, found in vars(Engine).items() if not name.startswith("_") and callable(found)
)
"""Those of the protocol; `text` is a property."""


class Recorder:
    """An engine that notes what is called, and gives a different value for each."""

    def __init__(self) -> None:
        self.text: Any = object()
        self.calls: list[tuple[Any, ...]] = []
        self.predicted_s: Any = "value of predict_step_s"

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            self.calls.append((name, arguments, named))
            return self.predicted_s if name == "predict_step_s" else f"value of {name}"

        return call


def arguments_of(name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments that differ from each other for a method of an engine."""
    takes = [*inspect.signature(getattr(Engine, name)).parameters.values()][1:]
    named = {one.name: object() for one in takes if one.kind is one.KEYWORD_ONLY}
    several = any(one.kind is one.VAR_POSITIONAL for one in takes)
    return tuple(object() for _ in range(len(takes) - len(named) + several)), named


@pytest.mark.parametrize("name", ["insert", "set_aside", "step", "decode"])
def test_an_owned_engine_passes_calls_and_results_on(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    recorder = Recorder()
    engine = OwnedEngine(recorder, 30.0)
    arguments, named = arguments_of(name)
    value = getattr(engine, name)(*arguments, **named)
    assert value == f"value of {name}"
    assert recorder.calls == [(name, arguments, named)]
    assert engine.text is recorder.text


def test_an_owned_engine_refuses_every_thread_but_its_owner_A1(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop of a life has the fault that the check is there for, with every method."""
    refused: list[str] = []

    def run(loop: IdleLoop, must_end: Callable[[], bool]) -> None:
        engine = loop.given["engine"]

        def call_each() -> None:
            for name in [*METHODS, "text"]:
                arguments, named = ((), {}) if name == "text" else arguments_of(name)
                try:
                    getattr(engine, name)(*arguments, **named)
                except WrongThreadError:
                    refused.append(name)

        thread = threading.Thread(target=call_each)
        thread.start()
        thread.join()
        assert not engine.row_count()

    run_loop(monkeypatch, run)
    assert supervisor.life().run() == ExitCode.ASKED
    assert refused == [*METHODS, "text"]
    assert len(METHODS) > 15


@pytest.mark.parametrize("is_broken", [False, True])
def test_where_nothing_else_ends_a_wedged_step_a_timer_does_E6(
    monkeypatch: pytest.MonkeyPatch, is_broken: bool
) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    recorder = Recorder()
    engine = OwnedEngine(recorder, 30.0)
    recorder.predicted_s = 2.5
    timers: list[tuple[object, ...]] = []
    monkeypatch.setattr(
        faulthandler,
        "dump_traceback_later",
        lambda limit_s, *, exit: timers.append((limit_s, exit, list(recorder.calls))),
    )
    monkeypatch.setattr(
        faulthandler,
        "cancel_dump_traceback_later",
        lambda: timers.append(("cancelled", list(recorder.calls))),
    )
    steps: list[tuple[Any, ...]] = [("step", (), {})]
    if is_broken:

        def broken() -> None:
            raise ValueError("broken")

        monkeypatch.setattr(recorder, "step", broken, raising=False)
        with pytest.raises(ValueError, match="broken"):
            engine.step()
        steps = []
    else:
        stepped: object = engine.step()
        assert stepped == "value of step"
    predicted: tuple[Any, ...] = ("predict_step_s", (), {})
    assert timers == [
        (10 * (30.0 + 4 * 2.5), True, [predicted]),
        ("cancelled", [predicted, *steps]),
    ]
