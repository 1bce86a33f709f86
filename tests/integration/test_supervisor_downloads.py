"""The processes of downloads: what is reported of them, and an end that was asked for."""

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
    report_line,
)
from mlxsup.supervisor import downloads as downloads_module
from mlxsup.supervisor.core.actions import EndDownload, StartDownload
from mlxsup.supervisor.core.events import DownloadSaid
from mlxsup.supervisor.downloads import DownloadKeeper

from support.eventually_async import eventually_async
from support.unwaited import collect_unwaited

MODEL = Repository("org/model", "v2")
START = StartDownload(number=3, repository=MODEL)
HALF = DownloadProgress(done_bytes=1, total_bytes=2)
DONE = DownloadDone(folder="/cache/model", total_bytes=2, fetched_bytes=1)
LISTENS = "import os, sys; spec = sys.stdin.readline()\n"
STAYS = "sys.stdin.read()"
"""It ends when nobody is left to download for."""

Scene = Callable[["Played"], Awaitable[None]]


def said(report: DownloadReport, number: int = 3) -> DownloadSaid:
    return DownloadSaid(now=5.0, number=number, report=report)


def says(*lines: DownloadReport | str) -> str:
    """What a process does to say all of this at once."""
    texts = [line if isinstance(line, str) else report_line(line) for line in lines]
    return f"os.write(1, {''.join(f'{text}' + chr(10) for text in texts).encode()!r})\n"


def broken(message: str) -> DownloadFailed:
    return DownloadFailed(problem=DownloadProblem.INTERNAL, message=message)


class Played:
    """A keeper whose processes run a script, and what became of them.

    Attributes:
        around: what it has from the supervisor.
        told: what was posted, and each complete repository with its folder, in order.
        logged: lines of the daemon's log, without the pids.
        pids: of the processes, in the order of their starts.
    """

    def __init__(self, script: str, argv: Sequence[str] | None = None) -> None:
        self.told: list[object] = []
        self.logged: list[tuple[Any, ...]] = []
        self.pids: list[int] = []
        self.post: Callable[[object], None] = self.told.append
        around: Any = SimpleNamespace(
            log=SimpleNamespace(write=self._log, block=lambda text: self.logged.append((text,))),
            post=lambda event: self.post(event),
            now=lambda: 5.0,
        )
        self.around = around
        self.keeper = DownloadKeeper(
            around,
            self.found,
            argv or (sys.executable, "-I", "-S", "-c", LISTENS + script),
        )

    def _log(self, level: str, message: str, **facts: Any) -> None:
        if pid := facts.pop("pid", None):
            self.pids.append(pid)
        self.logged.append((level, message, facts))

    async def found(self, repository: Repository, folder: str) -> None:
        self.told.append((repository, folder))

    async def until_told(self, count: int = 1) -> None:
        await eventually_async(lambda: len(self.told) >= count, timeout_s=30.0)


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


STARTED = ("info", "download started", {"repo": MODEL})
CANCELLED = ("info", "download cancelled", {"repo": MODEL})


def failed(cause: str, problem: DownloadProblem = DownloadProblem.INTERNAL) -> tuple[Any, ...]:
    facts = {"repo": MODEL, "cause": cause, "problem": problem}
    return ("warning", "download failed", facts)


# ---------------------------------------------------------------- what it says


def test_its_reports_are_passed_on_and_the_folder_is_known_before_the_core_hears_of_it() -> None:
    played = live(says("loading", HALF, DONE, "bye"))
    assert played.told == [said(HALF), (MODEL, "/cache/model"), said(DONE)]
    complete = ("info", "download complete", {"repo": MODEL, "bytes": 1})
    assert played.logged == [STARTED, complete]


def test_the_downloader_gets_the_repository_and_its_parent() -> None:
    played = live("print(spec, end='')\nsys.exit(1)")
    spec = (
        '{"repository":{"repo":"org/model","revision":"v2"},"parent_pid":' + str(os.getpid()) + "}"
    )
    assert played.logged[-1] == (spec,)


def test_a_report_that_arrives_in_pieces_is_one_report() -> None:
    """No pipe takes more than 64 KiB at once, so that the second line is cut."""
    assert live(says("x" * (64 * 1024 - 10), HALF, DONE)).told[0] == said(HALF)


def test_an_internal_failure_is_logged_with_the_output() -> None:
    played = live(says("a traceback", broken("a bug")) + "sys.exit(1)")
    assert played.told == [said(broken("a bug"))]
    assert played.logged == [STARTED, failed("a bug"), ("a traceback",)]


@pytest.mark.parametrize(
    ("end", "cause"),
    [
        ("sys.exit(3)", "it ended with exit code 3"),
        ("os.kill(os.getpid(), 9)", "it ended with SIGKILL"),
    ],
)
def test_an_end_without_a_last_report_is_a_failure_with_what_it_printed(
    end: str, cause: str
) -> None:
    played = live(says("one", HALF, "two") + end)
    assert played.told == [said(HALF), said(broken(cause))]
    assert played.logged == [STARTED, failed(cause), ("one\ntwo",)]


def test_the_last_fifty_lines_that_it_printed_are_kept() -> None:
    played = live(says(*[f"line {number}" for number in range(60)]))
    assert played.logged[-1] == ("\n".join(f"line {number}" for number in range(10, 60)),)


def test_of_a_line_without_end_its_last_part_is_kept() -> None:
    [text] = live("sys.stdout.write('x' * 500_000 + 'end\\n')").logged[-1]
    assert text.endswith("xend")
    assert 64 * 1024 <= len(text) <= 2 * 64 * 1024


# ---------------------------------------------------------------- its life


def test_one_that_cannot_be_started_has_failed() -> None:
    played = live("", argv=["/nowhere/python"])
    cause = "it could not be started: No such file or directory"
    assert played.told == [said(broken(cause))]
    assert played.logged == [failed(cause)]


def test_one_that_was_ended_is_gone_and_reports_nothing_more() -> None:
    async def scene(played: Played) -> None:
        await played.until_told()
        end(played.keeper)

    played = live(says(HALF) + STAYS, scene)
    assert played.told == [said(HALF)]
    assert played.logged == [STARTED, CANCELLED]


def test_one_that_was_ended_before_it_began_is_not_started() -> None:
    async def scene(played: Played) -> None:
        end(played.keeper)

    played = live(says(DONE), scene)
    assert (played.told, played.logged) == ([], [CANCELLED])


def test_reports_read_after_the_end_of_a_download_are_dropped() -> None:
    """Both lines are read at once, and the first makes the core end it."""

    async def scene(played: Played) -> None:
        def post(event: object) -> None:
            played.told.append(event)
            end(played.keeper)

        played.post = post

    assert live(says(HALF, HALF, DONE), scene).told == [said(HALF)]


def test_each_is_ended_by_its_number() -> None:
    other = StartDownload(number=4, repository=Repository("org/other"))

    async def play() -> None:
        played = Played(says(HALF) + STAYS)
        async with asyncio.timeout(60.0), asyncio.TaskGroup() as tasks:
            for start in (START, other):
                played.keeper.carry_out(start, tasks)
            await played.until_told(2)
            end(played.keeper, 4)
            await eventually_async(lambda: not psutil.pid_exists(played.pids[1]))
            assert psutil.pid_exists(played.pids[0])
            end(played.keeper, 3)
        assert played.logged[2:] == [
            ("info", "download cancelled", {"repo": other.repository}),
            CANCELLED,
        ]

    asyncio.run(play())


def test_at_the_end_all_are_gone_and_none_has_failed() -> None:
    async def scene(played: Played) -> None:
        await played.until_told()
        await played.keeper.end()
        assert not psutil.pid_exists(played.pids[0])

    played = live(says(HALF) + STAYS, scene)
    assert (played.told, played.logged) == ([said(HALF)], [STARTED])


def test_one_that_cannot_be_killed_does_not_hold_up_the_end(
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


def test_a_report_after_the_exit_of_a_download_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(downloads_module, "LAST_WORDS_S", 30.0)
    heir = HEIR.format(does=f"outlive(parent)\n    {says(DONE)}")
    assert live(heir).told == [(MODEL, "/cache/model"), said(DONE)]


def test_nothing_stays_open_and_the_limits_are_those_that_are_documented() -> None:
    own = psutil.Process()
    open_files = own.num_fds()
    live(says(HALF, DONE))
    assert own.num_fds() == open_files
    assert (downloads_module.LAST_WORDS_S, downloads_module.KILL_LIMIT_S) == (1.0, 10.0)


def end(keeper: DownloadKeeper, number: int = START.number) -> None:
    """As the core does it, which needs no task for that."""
    unused: Any = None
    keeper.carry_out(EndDownload(number=number), unused)


def test_a_failure_is_reported_with_its_reason() -> None:
    gone = DownloadFailed(problem=DownloadProblem.NETWORK, message="no answer", hint="wait")
    played = live(says("retrying", HALF, gone) + "sys.exit(1)")
    assert played.told == [said(HALF), said(gone)]
    assert played.logged == [STARTED, failed("no answer", DownloadProblem.NETWORK)]


def test_output_that_is_no_text_is_logged() -> None:
    assert live(r"os.write(1, b'\xff!\n')").logged[-1] == ("\ufffd!",)


def test_a_silent_failure_logs_no_output() -> None:
    played = live(says(HALF))
    assert played.logged == [STARTED, failed("it ended with exit code 0")]


def test_ending_an_ended_download_is_not_logged() -> None:
    async def scene(played: Played) -> None:
        await played.until_told(2)
        end(played.keeper)

    assert CANCELLED not in live(says(DONE), scene).logged


def test_held_pipes_do_not_delay_the_end_of_a_download(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads_module, "LAST_WORDS_S", 0.01)
    heir = HEIR.format(does=f"{says(DONE)}\n    {STAYS}")
    assert live(heir).told == [(MODEL, "/cache/model"), said(DONE)]
