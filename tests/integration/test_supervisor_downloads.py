"""The keeper of downloads, with small processes in the downloader's place: what it reports of them,
and how they end."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from mlxsup.protocol.download import (
    DownloadDone,
    DownloadFailed,
    DownloadProblem,
    DownloadProgress,
    DownloadReport,
    Repository,
    SnapshotReport,
    report_line,
)
from mlxsup.supervisor import downloads as downloads_module
from mlxsup.supervisor.core.actions import EndDownload, StartDownload
from mlxsup.supervisor.core.events import DownloadSaid
from mlxsup.supervisor.downloads import DownloadKeeper
from mlxsup.supervisor.sockets.connection import Turns
from mlxsup.supervisor.workers import process as process_module
from mlxsup.supervisor.workers.instance import Surroundings

from support.eventually_async import eventually_async
from support.unwaited import collect_unwaited

MODEL = Repository("org/model", "v2")
START = StartDownload(number=3, repository=MODEL)
HALF = DownloadProgress(done_bytes=1, total_bytes=2)
DONE = DownloadDone(folder="/cache/model", total_bytes=2, fetched_bytes=1)
AWAY = DownloadFailed(problem=DownloadProblem.NETWORK, message="no answer", hint="wait")
LISTENS = "import os, sys; spec = sys.stdin.readline()\n"
STAYS = "sys.stdin.read()"
"""It ends when its parent is gone."""

Scene = Callable[["Played"], Awaitable[None]]
Line = tuple[Any, ...]


def said(report: SnapshotReport, number: int = 3) -> DownloadSaid:
    return DownloadSaid(now=5.0, number=number, report=report)


FOUND = [(MODEL, "/cache/model"), said(DONE)]
"""The folder is known before the core hears of it."""


def says(*lines: DownloadReport | str) -> str:
    """What a process does to say all of this at once."""
    texts = [line if isinstance(line, str) else report_line(line) for line in lines]
    return f"os.write(1, {''.join(f'{text}' + chr(10) for text in texts).encode()!r})\n"


def broken(message: str) -> DownloadFailed:
    return DownloadFailed(problem=DownloadProblem.INTERNAL, message=message)


class Played:
    """A keeper whose processes run a script, and what became of them.

    Attributes:
        told: what was posted, and each complete repository with its folder, in order.
        logged: lines of the daemon's log, without the pids.
        pids: of the processes, in the order of their starts.
        reading: waited for before a folder is known; None: nothing is.
    """

    def __init__(self, script: str, argv: Sequence[str] | None = None) -> None:
        self.told: list[object] = []
        self.logged: list[Line] = []
        self.pids: list[int] = []
        self.reading: asyncio.Future[None] | None = None
        self.post: Callable[[object], None] = self.told.append
        log = SimpleNamespace(write=self._log, block=lambda text: self.logged.append((text,)))
        unused: dict[str, Any] = {"folder": None, "record": None, "log": log}
        around = Surroundings(
            **unused, argv=(), post=lambda event: self.post(event), turns=Turns(lambda: 5.0)
        )
        command = argv or (sys.executable, "-I", "-S", "-c", LISTENS + script)
        self.keeper = DownloadKeeper(around, self.found, command)

    def _log(self, level: str, message: str, **facts: Any) -> None:
        if pid := facts.pop("pid", None):
            self.pids.append(pid)
        self.logged.append((level, message, facts))

    async def found(self, repository: Repository, folder: str) -> None:
        self.told.append((repository, folder))
        if self.reading is not None:
            await self.reading

    async def until_told(self, count: int = 1) -> None:
        await eventually_async(lambda: len(self.told) >= count)

    def end(self, number: int = START.number) -> None:
        """Ends one as the core does it, which needs no task for that."""
        unused: Any = None
        self.keeper.carry_out(EndDownload(number=number), unused)


async def nothing(played: Played) -> None:
    pass


def live(script: str, scene: Scene = nothing, *, argv: Sequence[str] | None = None) -> Played:
    """Plays a scene with one download, and waits until its process is gone."""

    async def play() -> Played:
        played = Played(script, argv)
        async with asyncio.timeout(60.0), asyncio.TaskGroup() as tasks:
            played.keeper.carry_out(START, tasks)
            await scene(played)
        await asyncio.sleep(0)  # what was to be called soon has been
        assert not any(map(psutil.pid_exists, played.pids))
        return played

    return asyncio.run(play())


STARTED: Line = ("info", "download started", {"repo": MODEL})
CANCELLED: Line = ("info", "download cancelled", {"repo": MODEL})
COMPLETE: Line = ("info", "download complete", {"repo": MODEL, "bytes": 1})
SPEC = '{"repository":{"repo":"org/model","revision":"v2"}}'


def failed(cause: str, problem: DownloadProblem = DownloadProblem.INTERNAL) -> Line:
    facts = {"repo": MODEL, "cause": cause, "problem": problem}
    return ("warning", "download failed", facts)


EXIT_3, KILLED = "it ended with exit code 3", "it ended with SIGKILL"
LINES = [f"line {number}" for number in range(60)]


@pytest.mark.parametrize(
    ("script", "told", "logged"),
    [
        (says("loading", HALF, DONE, "bye"), [said(HALF), *FOUND], [COMPLETE]),
        (says("x" * (64 * 1024 - 10), HALF, DONE), [said(HALF), *FOUND], [COMPLETE]),
        (
            says("a traceback", broken("a bug")) + "sys.exit(1)",
            [said(broken("a bug"))],
            [failed("a bug"), ("a traceback",)],
        ),
        (
            says("retrying", HALF, AWAY) + "sys.exit(1)",
            [said(HALF), said(AWAY)],
            [failed("no answer", DownloadProblem.NETWORK)],
        ),
        (
            says("one", HALF, "two") + "sys.exit(3)",
            [said(HALF), said(broken(EXIT_3))],
            [failed(EXIT_3), ("one\ntwo",)],
        ),
        (
            says("one") + "os.kill(os.getpid(), 9)",
            [said(broken(KILLED))],
            [failed(KILLED), ("one",)],
        ),
        (
            f"{says(*LINES)}os.write(1, spec.encode() + b'\\xff!\\n')\nsys.exit(3)",
            [said(broken(EXIT_3))],
            [failed(EXIT_3), ("\n".join([*LINES[12:], SPEC, "\ufffd!"]),)],
        ),
        ("sys.exit(3)", [said(broken(EXIT_3))], [failed(EXIT_3)]),
    ],
    ids=[
        "complete", "a report cut by the pipe's 64 KiB", "a bug", "the network", "an exit code",
        "a signal", "the last fifty lines and the spec", "silence",
    ],
)  # fmt: skip
def test_reports_and_output_of_a_download(
    script: str, told: list[object], logged: list[Line]
) -> None:
    played = live(script)
    assert played.told == told
    assert played.logged == [STARTED, *logged]


def test_of_a_line_without_end_its_last_part_is_kept() -> None:
    [text] = live("sys.stdout.write('x' * 500_000 + 'end\\n')").logged[-1]
    assert text.endswith("xend")
    assert 64 * 1024 <= len(text) <= 2 * 64 * 1024


def test_download_that_cannot_be_started_has_failed() -> None:
    played = live("", argv=["/nowhere/python"])
    cause = "it could not be started: No such file or directory"
    assert played.told == [said(broken(cause))]
    assert played.logged == [failed(cause)]


# ---------------------------------------------------------------- ends that are asked for


def test_cancelled_download_is_gone_and_reports_nothing_more() -> None:
    async def scene(played: Played) -> None:
        await played.until_told()
        played.end()

    played = live(says(HALF) + STAYS, scene)
    assert (played.told, played.logged) == ([said(HALF)], [STARTED, CANCELLED])


def test_download_cancelled_before_it_began_is_not_started() -> None:
    async def scene(played: Played) -> None:
        played.end()

    played = live(says(DONE), scene)
    assert (played.told, played.logged) == ([], [CANCELLED])


def test_reports_read_after_a_cancel_are_dropped() -> None:
    """Both lines are read at once, and the first makes the core end it."""

    async def scene(played: Played) -> None:
        def post(event: object) -> None:
            played.told.append(event)
            played.end()

        played.post = post

    assert live(says(HALF, HALF, DONE), scene).told == [said(HALF)]


def test_cancelling_an_ended_download_is_not_logged() -> None:
    async def scene(played: Played) -> None:
        await played.until_told(2)
        played.end()

    assert CANCELLED not in live(says(DONE), scene).logged


def test_each_download_is_cancelled_by_its_number() -> None:
    other = StartDownload(number=4, repository=Repository("org/other"))

    async def play() -> None:
        played = Played(says(HALF) + STAYS)
        async with asyncio.timeout(60.0), asyncio.TaskGroup() as tasks:
            for start in (START, other):
                played.keeper.carry_out(start, tasks)
            await played.until_told(2)
            played.end(4)
            await eventually_async(lambda: not psutil.pid_exists(played.pids[1]))
            assert psutil.pid_exists(played.pids[0])
            played.end(3)
        cancelled = ("info", "download cancelled", {"repo": other.repository})
        assert played.logged[2:] == [cancelled, CANCELLED]

    asyncio.run(play())


def test_at_the_daemons_end_all_are_gone_and_none_has_failed() -> None:
    async def scene(played: Played) -> None:
        await played.until_told()
        await played.keeper.end()
        assert not psutil.pid_exists(played.pids[0])

    played = live(says(HALF) + STAYS, scene)
    assert (played.told, played.logged) == ([said(HALF)], [STARTED])


def test_folder_that_is_being_read_does_not_hold_up_the_end() -> None:
    async def scene(played: Played) -> None:
        played.reading = reading = asyncio.get_running_loop().create_future()
        await played.until_told()
        await played.keeper.end()
        assert reading.cancelled()

    assert live(says(DONE), scene).told == FOUND[:1]


def test_process_that_cannot_be_killed_does_not_hold_up_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It reads on, and its pipe is closed, so that it ends by itself."""
    monkeypatch.setattr(downloads_module, "KILL_LIMIT_S", 0.01)

    async def scene(played: Played) -> None:
        await played.until_told()
        with monkeypatch.context() as patch:
            patch.setattr(os, "killpg", lambda *_: None)
            await played.keeper.end()
            assert psutil.pid_exists(played.pids[0])
            await asyncio.sleep(0)
        await eventually_async(lambda: os.waitpid(played.pids[0], os.WNOHANG) != (0, 0))

    assert live(says(HALF) + STAYS, scene).told == [said(HALF)]
    collect_unwaited()


HEIR = """
import time

def outlive(pid):
    try:
        while True:
            os.kill(pid, 0)
            time.sleep(0.01)
    except ProcessLookupError:  # it has been reaped
        pass

ready, theirs = os.pipe()
if os.fork() == 0:
    os.setsid()
    parent = os.getppid()
    os.write(theirs, b"!")
    {does}
    os._exit(0)
os.read(ready, 1)
os._exit(0)
"""
"""Ends at once; another process, which is not in its group, still has its pipes."""


@pytest.mark.parametrize(
    ("waits_s", "does"),
    [(30.0, f"outlive(parent)\n    {says(DONE)}"), (0.01, f"{says(DONE)}\n    {STAYS}")],
    ids=["a report after the exit counts", "pipes that are held delay nothing"],
)
def test_pipes_of_a_download_may_outlive_it(
    monkeypatch: pytest.MonkeyPatch, waits_s: float, does: str
) -> None:
    monkeypatch.setattr(process_module, "LAST_WORDS_S", waits_s)
    assert live(HEIR.format(does=does)).told == FOUND


def test_no_pipe_stays_open() -> None:
    own = psutil.Process()
    open_files = own.num_fds()
    live(says(HALF, DONE))
    assert own.num_fds() == open_files
