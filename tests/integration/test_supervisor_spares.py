"""One spare worker in the shell: ready, taken over, dead before anybody took it over, ended."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from mlxsup.supervisor.core.events import Event, SpareEnded, SpareReady
from mlxsup.supervisor.workers import spare as spare_module
from mlxsup.supervisor.workers.spare import SpareUnit, SpareUnits

from support.eventually_async import eventually_async
from support.unwaited import collect_unwaited

READY = "import os, sys; print('imported', flush=True); os.write(int(sys.argv[-1]), b'!')"
ECHO = f"{READY}; print('got', sys.stdin.readline().strip(), flush=True); sys.stdin.read()"
DIES = "import sys; sys.exit('no MLX here')"


class Around:
    """What a spare's life needs from the supervisor, and what it reported.

    Attributes:
        events: what was posted, in order.
        recorded: pids in the list of live workers.
        lines: the daemon's log.
    """

    def __init__(self, script: str) -> None:
        self.events: list[Event] = []
        self.recorded: dict[int, str] = {}
        self.lines: list[str] = []
        self.argv: tuple[str, ...] = (sys.executable, "-c", script)
        self.post = self.events.append
        self.now = lambda: 5.0
        self.log = SimpleNamespace(write=self._log, block=self.lines.append)
        self.record = SimpleNamespace(
            add=lambda model, pid: self.recorded.update({pid: model}), remove=self.recorded.pop
        )

    def _log(self, level: str, message: str, **facts: Any) -> None:
        cause = facts.get("signal") or facts.get("code", "")
        self.lines.append(f"{level} {message} {cause}".strip())


def unit_of(around: Around) -> SpareUnit:
    return SpareUnit(around, 7)  # type: ignore[arg-type]  # a stand-in


def units_of(around: Around) -> SpareUnits:
    return SpareUnits(around)  # type: ignore[arg-type]  # a stand-in


async def until_ready(around: Around) -> int:
    """The pid of a spare that has just become ready."""
    await eventually_async(lambda: bool(around.events), timeout_s=60.0)
    [event] = around.events
    assert isinstance(event, SpareReady)
    assert (event.number, event.now) == (7, 5.0)
    return event.pid


def test_one_that_is_ready_gets_its_line_and_its_new_reader_everything_it_printed() -> None:
    async def play() -> None:
        around, output = Around(ECHO), list[bytes]()
        unit = unit_of(around)
        life = asyncio.create_task(unit.live())
        pid = await until_ready(around)
        assert (unit.pid, around.recorded) == (pid, {pid: "(spare worker)"})
        process = unit.take(b"spec\n", output.append)
        assert process is not None
        assert (process.pid, unit.pid) == (pid, None)
        await eventually_async(lambda: b"got spec" in b"".join(output), timeout_s=60.0)
        assert b"".join(output) == b"imported\ngot spec\n", "each once, in order"
        await life
        unit.kill()  # it is somebody's now
        assert not process.exited.done()
        process.close()
        await process.exited
        process.close_pipes()
        assert around.recorded == {pid: "(spare worker)"}, "whoever took it records what it is now"
        assert [type(event) for event in around.events] == [SpareReady]

    asyncio.run(play())


def test_one_that_has_just_died_is_taken_over_by_nobody() -> None:
    async def play() -> None:
        around = Around(ECHO)
        unit = unit_of(around)
        life = asyncio.create_task(unit.live())
        pid = await until_ready(around)
        os.kill(pid, signal.SIGKILL)
        # The loop has not seen it yet, and does not while this blocks it.
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222
        assert unit.take(b"spec\n", lambda data: None) is None
        await life
        await asyncio.sleep(0)
        assert [type(event) for event in around.events] == [SpareReady, SpareEnded]
        assert around.recorded == {}
        assert "warning spare worker exited SIGKILL" in around.lines

    asyncio.run(play())


def test_one_that_dies_by_itself_is_reported_with_what_it_printed() -> None:
    async def play() -> None:
        around = Around(DIES)
        await unit_of(around).live()
        await asyncio.sleep(0)
        assert [type(event) for event in around.events] == [SpareEnded]
        assert "warning spare worker exited 1" in around.lines
        assert around.recorded == {}

    asyncio.run(play())


def test_one_that_cannot_be_started_has_ended() -> None:
    async def play() -> None:
        around = Around(ECHO)
        around.argv = ("/nowhere/python",)
        before = set(os.listdir("/proc/self/fd")) if sys.platform == "linux" else set()
        await unit_of(around).live()
        await asyncio.sleep(0)
        assert [type(event) for event in around.events] == [SpareEnded]
        if sys.platform == "linux":
            assert set(os.listdir("/proc/self/fd")) == before

    asyncio.run(play())


@pytest.mark.parametrize("is_early", [True, False])
def test_one_that_is_told_to_end_does_so_whenever_that_comes(is_early: bool) -> None:
    async def play() -> None:
        around = Around(ECHO)
        units = units_of(around)
        async with asyncio.TaskGroup() as tasks:
            units.start(7, tasks)
            if not is_early:
                pid = await until_ready(around)
                assert units.pids == [pid]
            units.kill(7)
            unit = units.get(7)
            assert unit is not None
            assert unit.take(b"spec\n", lambda data: None) is None, "it is about to go"
        await asyncio.sleep(0)
        assert isinstance(around.events[-1], SpareEnded)
        assert (units.get(7), units.pids, around.recorded) == (None, [], {})
        assert "info spare worker exited SIGKILL" in around.lines

    asyncio.run(play())


def test_all_are_gone_when_the_daemon_ends() -> None:
    async def play() -> None:
        around = Around(ECHO)
        units = units_of(around)
        async with asyncio.TaskGroup() as tasks:
            for number in (1, 2):
                units.start(number, tasks)
            await eventually_async(lambda: len(around.events) == 2, timeout_s=60.0)
            await units.end()
            assert (units.pids, units.leave()) == ([], 0)

    asyncio.run(play())


def test_one_that_cannot_be_ended_is_counted_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for it any longer; it ends here because its input does."""
    monkeypatch.setattr(spare_module, "END_LIMIT_S", 0.01)

    async def play() -> None:
        around = Around(ECHO)
        units = units_of(around)
        async with asyncio.TaskGroup() as tasks:
            units.start(7, tasks)
            pid = await until_ready(around)
            with monkeypatch.context() as patch:
                patch.setattr(os, "killpg", lambda *_: None)
                await units.end()
                assert units.pids == [pid]
                assert units.leave() == 1
                await eventually_async(lambda: units.pids == [])
            assert around.lines[-1] == "error spare worker left behind"
            assert around.recorded == {pid: "(spare worker)"}, "the next start looks for it"
            await eventually_async(lambda: os.waitpid(pid, os.WNOHANG) != (0, 0))

    asyncio.run(play())
    collect_unwaited()


def test_the_others_are_ended_by_their_numbers_and_nobody_by_an_unknown_one() -> None:
    async def play() -> None:
        around = Around(ECHO)
        units = units_of(around)
        async with asyncio.TaskGroup() as tasks:
            for number in (1, 2):
                units.start(number, tasks)
            await eventually_async(lambda: len(around.events) == 2, timeout_s=60.0)
            units.kill(3)
            assert (units.get(None), units.get(3)) == (None, None)
            first, second = units.get(1), units.get(2)
            assert first is not None
            assert second is not None
            assert units.pids == [first.pid, second.pid]
            units.kill(1)
            await eventually_async(lambda: units.get(1) is None)
            assert units.pids == [second.pid]
            units.kill(2)
        assert [e.number for e in around.events if isinstance(e, SpareEnded)] == [1, 2]

    asyncio.run(play())


def test_the_limits_of_spares_are_those_that_are_documented() -> None:
    assert (spare_module.KEPT_BYTES, spare_module.END_LIMIT_S) == (16 * 1024, 10.0)
