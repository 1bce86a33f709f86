"""The supervisor's shell by itself: a real `App` with a scripted core, a played clock and loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlxsup.protocol.launch import LaunchSettings
from mlxsup.supervisor import app as app_module
from mlxsup.supervisor.announcements import Announcer, OnChange
from mlxsup.supervisor.app import App
from mlxsup.supervisor.config.load import DaemonConfig
from mlxsup.supervisor.core.actions import Action, Finish
from mlxsup.supervisor.core.events import Event, Tick
from mlxsup.supervisor.core.memory.pressure import Reading
from mlxsup.supervisor.core.outline import Outline
from mlxsup.supervisor.core.settings import CoreSettings
from mlxsup.supervisor.logs import DaemonLog
from mlxsup.supervisor.memory.snapshot import ConfigSnapshot
from mlxsup.supervisor.service_manager import ServiceManager
from mlxsup.supervisor.sleep import SleepGuard

from support.gateway.key_place import place_in

READING = Reading(available_bytes=9, kept_free_bytes=1)
STORIES = {"a": ["one", "two"], "b": []}


class Log(DaemonLog):
    """What is logged, line by line."""

    def __init__(self) -> None:
        self.lines: list[tuple[Any, ...]] = []
        self.flight: Any = SimpleNamespace(
            started=lambda pid: None,
            alive=lambda: None,
            write=lambda entry: self.lines.append(("flight", entry)),
        )

    def write(self, level: str, message: str, **facts: object) -> None:
        self.lines.append((level, message, facts))

    def block(self, text: str) -> None:
        self.lines.append((text,))


class Loop:
    """Keeps what is to be called later, and what soon."""

    def __init__(self) -> None:
        self.later: list[tuple[float, Callable[[], None]]] = []
        self.soon: list[tuple[Any, ...]] = []
        self.cancelled: list[float] = []
        self.complain: Callable[[Any, dict[str, Any]], None]

    def set_exception_handler(self, handler: Callable[[Any, dict[str, Any]], None]) -> None:
        self.complain = handler

    def call_later(self, delay_s: float, function: Callable[[], None]) -> Any:
        self.later.append((delay_s, function))
        return SimpleNamespace(cancel=lambda: self.cancelled.append(delay_s))

    def call_soon(self, function: Callable[..., None], *arguments: object) -> None:
        self.soon.append((function, *arguments))


class Core:
    """Answers one event with what the test wants done, and notes all others."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self.facts = facts
        self.events: list[Event] = []
        self.answers: list[Action] = []

    def handle(self, event: Event) -> list[Action]:
        if self.answers:
            answers, self.answers = self.answers, []
            return answers
        self.events.append(event)
        return []

    def stories(self) -> dict[str, list[str]]:
        return STORIES

    def ended_by(self, entries: object) -> bool:
        return False

    def outline(self) -> Outline:
        return Outline(states=(), is_busy=False, is_ending=False)

    def left_to_finish(self, is_immediate: bool) -> tuple[int, float]:
        return 2, 0.0 if is_immediate else 30.0


class Sleeps:
    """Each sleep is noted; of one length, only as many end as `ends` says."""

    def __init__(self) -> None:
        self.waits_s: list[float] = []
        self.ends: dict[float, int] = {}

    async def sleep(self, wait_s: float) -> None:
        self.waits_s.append(wait_s)
        if self.waits_s.count(wait_s) > self.ends.get(wait_s, 0):
            await asyncio.Event().wait()


class Case:
    """An `App` of which only what a test looks at is real.

    Attributes:
        now: what the clock says.
        announcer: its own.
        briefing: what it asks about memory.
        looks: how often it was asked.
        sampled: what became of the measuring.
        end: asks for the end, as a signal would; given the signal and whether it is a repeated one.
        reload: asks for a reload, as SIGHUP would.
        workers: plays the workers, with `spares`.
        learnt: what a worker that has measured its model calls.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        on_change: OnChange = lambda change: None,
        config_path: Path | None = None,
    ) -> None:
        self.now, self.looks = 100.0, 0
        self.log, self.loop, self.sleeps = Log(), Loop(), Sleeps()
        self.sampled: list[object] = []
        self.end: Callable[..., None]
        self.reload: Callable[[], None]
        self.learnt: Callable[[LaunchSettings, str], None]
        self.clients = SimpleNamespace(
            endpoint="e", pulse=object(), finish=self._nothing, close=lambda: None, listener=None,
            admitted=0, limit_to=lambda room: None,
        )  # fmt: skip
        self.spares = SimpleNamespace(end=self._nothing)
        self._monkeypatch = monkeypatch
        self._play()
        record: Any = SimpleNamespace(write_again=lambda: self.sampled.append("written"))
        folder: Any = SimpleNamespace(client_socket=Path("/run/client.sock"))
        unused: Any = None
        sleep = SleepGuard("off", self.log)
        self.announcer = Announcer(self.log, on_change, ServiceManager(), sleep)
        self.app = App(
            DaemonConfig(
                config_path=config_path,
                runtime_dir=Path("/run"),
                keys=place_in(Path("/")),
                log_dir=Path("/l"),
                log_level="info",
                memory_budget=None,
                core=CoreSettings(),
                models=(),
            ),
            folder=folder,
            record=record,
            log=self.log,
            writer=unused,
            context=unused,
            argv=[],
            announcer=self.announcer,
        )

    def do(self, *actions: Action) -> None:
        """Has the core ask for this."""
        self.core.answers = list(actions)
        self.app.dispatch(Tick(now=0.0))

    async def turns(self) -> None:
        """Lets tasks that were begun go on, and calls what they want to be called soon."""
        for _ in range(5):
            turn = self._real.create_future()
            self._real.call_soon(turn.set_result, None)
            await turn
        soon, self.loop.soon = self.loop.soon, []
        for function, *arguments in soon:
            function(*arguments)

    def run(self, body: Callable[[], Awaitable[None] | None] = lambda: None) -> int:
        """Runs the app, calls or awaits this in it and then ends it; returns its exit code."""
        failures: list[BaseException] = []

        async def play() -> None:
            try:
                if (rest := body()) is not None:
                    await rest
            except BaseException as error:  # noqa: BLE001  raised again below
                failures.append(error)
            self.do(Finish())

        async def run() -> int:
            real = self._real = asyncio.get_running_loop()
            self._monkeypatch.setattr(asyncio, "get_running_loop", lambda: self.loop)
            begun: list[asyncio.Task[None]] = []
            begin = lambda: begun.append(real.create_task(play()))  # noqa: E731
            return await self.app.run(lambda endpoint: _after_tasks(real, begin), open_files=100)

        code = asyncio.run(run())
        if failures:
            raise failures[0]
        return code

    async def _read(self, config: DaemonConfig) -> ConfigSnapshot:
        return ConfigSnapshot(config=config, places={}, unread={})

    async def _nothing(self, limit_s: float = 0.0) -> None:
        pass

    def _clock_now(self) -> float:
        self.looks += 1
        return self.now

    def _play(self) -> None:
        """Puts played parts in the place of the app's own."""

        def core(settings: object, models: object, *, facts: dict[str, Any], **_: object) -> Core:
            self.core = Core(facts)
            return self.core

        def signals(end: Callable[..., None], reload: Callable[[], None]) -> Any:
            self.end, self.reload = end, reload
            return SimpleNamespace(ignore=lambda: None)

        def workers(around: object, log_dir: object, writer: object, learnt: Any) -> Any:
            self.learnt = learnt
            return self.workers

        clock = SimpleNamespace(now=self._clock_now, delay_until=lambda when: when - self.now)
        self.workers = SimpleNamespace(
            pids=[7], models=frozenset(), end=self._nothing, leave=lambda: 0, close=lambda: None,
            measurements=None, spares=self.spares,
        )  # fmt: skip
        self.briefing = SimpleNamespace(
            needs={},
            read=self._read,
            needs_of=lambda reading: {},
            adopt=lambda reading, needs: None,
            outdated=lambda launch, loaded: [],
            settings_of=lambda config, is_dry=False: config.core,
            watch=lambda proc: None,
        )
        parts = {
            "Clock": lambda: clock, "Core": core, "Signals": signals,
            "Clients": lambda *_, **__: self.clients, "Workers": workers,
            "Sampler": self._sampler, "MemorySnapshot": lambda *_: self.briefing,
        }  # fmt: skip
        for name, part in parts.items():
            self._monkeypatch.setattr(app_module, name, part)
        self._monkeypatch.setattr(asyncio, "sleep", self.sleeps.sleep)

    def _sampler(self, report: Callable[[OSError], None], watch: object) -> Any:
        async def measure(pids: list[int]) -> None:
            self.sampled.append(pids)

        report(OSError(24, "Too many open files"))
        return SimpleNamespace(
            measure=measure,
            close=lambda: self.sampled.append("closed"),
            footprint_bytes={7: 70},
            machine_bytes=99,
            reading=READING,
        )


def _after_tasks(loop: asyncio.AbstractEventLoop, play: Callable[[], None]) -> None:
    """Two rounds later, when the tasks that begin now wait."""
    loop.call_soon(loop.call_soon, play)
