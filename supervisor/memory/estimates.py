"""What is known of the models' folders, asked of processes that read them."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import psutil

from .estimator import Answer, Estimate, Place, Question, estimator_argv

QUIET_S = 5.0
"""Without an answer and without work for so long, the folders that are left do not answer."""

BUSY_S = 60.0
"""The same if the process works; what makes it do so is a folder that is made to."""

WORK_S = 0.25
"""Seconds of a CPU within `QUIET_S` that are work, on a busy machine, too; a start takes less."""

KILL_LIMIT_S = 2.0

MAX_LINE_BYTES = 2**20

SILENT = "its folder does not answer: look after its disk, then `mlxsup reload`"
FATAL = "its folder ended the process that read it ({cause}): a file in it is damaged, or made to"


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What is known of a place.

    Attributes:
        path: the folder; empty if it did not answer and never has.
        is_lacking: the cache does not have all files of the repository, or does not answer.
        estimate: what its files say; None if they cannot be read.
        problem: what is wrong with it, a sentence without a full stop; empty if nothing is.
        hint: what to do about it; may be empty.
        is_read: False if it did not answer: what is known of it is what was found before.
    """

    path: str
    is_lacking: bool = False
    estimate: Estimate | None = None
    problem: str = ""
    hint: str = ""
    is_read: bool = True


class Estimates:
    """Looks at folders in processes of their own, and remembers what they hold.

    Args:
        argv: the command that starts such a process, for tests.
        quiet_s: see `QUIET_S`, for tests.
    """

    def __init__(self, argv: Sequence[str] | None = None, quiet_s: float = QUIET_S) -> None:
        self._argv = argv
        self._quiet_s = quiet_s
        # Bounded by `keep`: one entry at most for each model of the configuration.
        self._known: dict[Place, Look] = {}

    def of(self, place: Place) -> Look | None:
        """Return what was found there last; None if it has never answered."""
        return self._known.get(place)

    def know(self, place: Place, look: Look) -> None:
        """Remember this of a place, as if it had been found there."""
        self._known[place] = look

    def keep(self, places: Collection[Place]) -> None:
        """Forget all other places."""
        wanted = set(places)  # a view would be searched from its beginning for each of them
        self._known = {place: look for place, look in self._known.items() if place in wanted}

    async def look_at(self, places: Collection[Place]) -> Mapping[Place, Look]:
        """Return what is there now; in about `quiet_s` after the last folder that answers."""
        asked = list(dict.fromkeys(places))
        questions = [
            Question(number=number, place=place, known=self._fingerprint(place))
            for number, place in enumerate(asked)
        ]
        before = {place: self._known.get(place) for place in asked}
        answers = await ask(questions, argv=self._argv, quiet_s=self._quiet_s)
        looks = {
            place: _look_of(place, answers[number], before[place])
            for number, place in enumerate(asked)
        }
        self._known |= {place: look for place, look in looks.items() if look.is_read}
        return looks

    def _fingerprint(self, place: Place) -> str:
        known = self._known.get(place)
        return known.estimate.fingerprint if known is not None and known.estimate else ""


def _look_of(place: Place, answer: Answer | str, known: Look | None) -> Look:
    if isinstance(answer, str):
        before = known or Look(path=place.path, is_lacking=bool(place.repo))
        return replace(before, problem=answer, hint="", is_read=False)
    estimate = known.estimate if known is not None and answer.is_same else answer.estimate
    return Look(
        path=answer.path,
        is_lacking=answer.is_lacking,
        estimate=estimate,
        problem=answer.problem,
        hint=answer.hint,
    )


async def ask(
    questions: Sequence[Question], *, argv: Sequence[str] | None = None, quiet_s: float = QUIET_S
) -> dict[int, Answer | str]:
    """Ask a process about folders.

    If one of them ends the process, each of those that are left has another one.

    Args:
        questions: with different numbers.
        argv: the command; None: of the estimator.
        quiet_s: see `QUIET_S`.

    Returns:
        For each number the answer, or a sentence that says why there is none.
    """
    if not questions:
        return {}
    found: dict[int, Answer | str] = {}
    cause = await _ask_child(questions, argv or estimator_argv(), quiet_s, found)
    left = [question for question in questions if question.number not in found]
    if not cause or len(questions) == 1:
        sentence = FATAL.format(cause=cause) if cause else SILENT
        return found | dict.fromkeys((question.number for question in left), sentence)
    for question in left:
        found |= await ask([question], argv=argv, quiet_s=quiet_s)
    return found


async def _ask_child(
    questions: Sequence[Question],
    argv: Sequence[str],
    quiet_s: float,
    found: dict[int, Answer | str],
) -> str:
    """Collect answers; return why the process ended before the last, or nothing if it did not."""
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            str(os.getpid()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            # Arenas of each thread would use up the address space.
            env={**os.environ, "MALLOC_ARENA_MAX": "1"},
            limit=MAX_LINE_BYTES,
            process_group=0,  # an interrupt of the terminal is for the daemon
        )
    except OSError as error:
        return f"it could not be started: {error.strerror}"
    assert process.stdin is not None
    is_silent = True  # so if this is cancelled
    try:
        process.stdin.writelines(question.to_line() for question in questions)
        process.stdin.close()
        is_silent = not await _collect(process, len(questions), quiet_s, found)
    finally:
        # Otherwise it ends by itself; asyncio loses the exit code of one that is killed just then.
        if is_silent and process.returncode is None:
            process.kill()
        with suppress(TimeoutError):  # if its disk does not let go of it, the system reaps it later
            async with asyncio.timeout(KILL_LIMIT_S):
                await process.wait()
    if is_silent or len(found) == len(questions) or process.returncode is None:
        return ""
    code = process.returncode
    return f"signal {-code}" if code < 0 else f"exit code {code}"


async def _collect(
    process: asyncio.subprocess.Process,
    count: int,
    quiet_s: float,
    found: dict[int, Answer | str],
) -> bool:
    """Collect answers; return False once no more come, True when all have or the process ends."""
    assert process.stdout is not None
    loop = asyncio.get_running_loop()
    answered_at, worked_s = loop.time(), 0.0
    line = asyncio.ensure_future(process.stdout.readline())
    try:
        while len(found) < count:
            done, _ = await asyncio.wait([line], timeout=quiet_s)
            if not done:
                before, worked_s = worked_s, _cpu_s(process.pid)
                is_at_work = worked_s - before >= WORK_S or _is_runnable(process.pid)
                if not is_at_work or loop.time() - answered_at > BUSY_S:
                    return False
                continue
            data = line.result()
            if not data:
                return True
            answer = Answer.of_line(data)
            found[answer.number] = answer
            answered_at, worked_s = loop.time(), _cpu_s(process.pid)
            line = asyncio.ensure_future(process.stdout.readline())
        return True
    finally:
        line.cancel()


def _cpu_s(pid: int) -> float:
    """How long a process has computed, in seconds; 0 once it is gone."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def _is_runnable(pid: int) -> bool:
    """True if a process only waits for a CPU; macOS says so of processes that sleep, too."""
    try:
        return sys.platform == "linux" and psutil.Process(pid).status() == psutil.STATUS_RUNNING
    except psutil.Error:
        return False
