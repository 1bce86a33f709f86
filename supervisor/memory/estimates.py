"""The memory of models, asked of processes that read their folders and of one that asks mlx-lm.

Nothing here opens a file or waits for one. A folder that does not answer, ends the process that
looks at it, or keeps it busy costs an answer and nothing else.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import psutil

from mlxsup.protocol.codec import DecodeError, read_part, to_line
from mlxsup.protocol.estimate import ModelMemory, estimate_argv
from mlxsup.protocol.launch import child_environment

from .folder import UNASKED
from .folder_reader import Look, Place, Question, reader_argv

QUIET_S = 5.0
"""Without an answer and without work for so long, the folders that are left do not answer."""

ENGINE_QUIET_S = 20.0
"""The same for the process that asks mlx-lm, which first imports it, maybe from a
cold disk."""

BUSY_S = 60.0
"""Without an answer for so long, a process that works is ended; what makes it work so long is a
folder that is made to."""

WORK_S = 0.25
"""Seconds of a CPU within the quiet time that are work, on a busy machine, too; a start takes
less."""

KILL_LIMIT_S = 2.0

MAX_ANSWER_BYTES = 2**20

SILENT = "its folder does not respond; check its disk, then run `mlxsup reload`"
FATAL = (
    "the process that read its folder has ended ({cause}): a file there, or mlxsup's installation, "
    "is damaged"
)
ENGINE_SILENT = "mlx-lm takes too long to build it"
ENGINE_FATAL = "the process that asked mlx-lm has ended ({cause})"


class Estimates:
    """Looks at folders in processes of their own, and remembers what they hold.

    Args:
        argv: the command that reads folders, for tests.
        quiet_s: see `QUIET_S`, for tests.
    """

    def __init__(self, argv: Sequence[str] | None = None, quiet_s: float = QUIET_S) -> None:
        self._argv = argv
        self._quiet_s = quiet_s
        self._asking_engine = asyncio.Lock()  # one process of mlx-lm at a time takes enough memory
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
        """Return what is there now.

        It takes about `quiet_s` after the last folder that answers, and two seconds more if
        mlx-lm has never been asked about some of them.
        """
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
        looks = await self._with_layers(looks)
        self._known |= {place: look for place, look in looks.items() if look.is_read}
        return looks

    async def _with_layers(self, looks: Mapping[Place, Look]) -> dict[Place, Look]:
        keys = {
            look.path: look.estimate.key
            for look in looks.values()
            if look.estimate and look.estimate.remark == UNASKED
        }
        if not keys:
            return dict(looks)
        async with self._asking_engine:
            said = await ask_engine(keys)
        return {
            place: replace(look, estimate=look.estimate.as_said(said[look.path]))
            if look.estimate and look.path in said
            else look
            for place, look in looks.items()
        }

    def _fingerprint(self, place: Place) -> str:
        known = self._known.get(place)
        return known.estimate.fingerprint if known is not None and known.estimate else ""


def _look_of(place: Place, answer: Look | str, known: Look | None) -> Look:
    if isinstance(answer, str):
        before = known or Look(path=place.path, is_lacking=bool(place.repo))
        return replace(before, problem=answer, hint="", is_read=False)
    if answer.is_same and known is not None:
        return replace(answer, estimate=known.estimate, is_same=False)
    return answer


async def ask(
    questions: Sequence[Question], *, argv: Sequence[str] | None = None, quiet_s: float = QUIET_S
) -> dict[int, Look | str]:
    """Ask a process about folders.

    If one of them ends the process, each of those that are left has another one.

    Args:
        questions: with different numbers.
        argv: the command; None: that of the reader.
        quiet_s: see `QUIET_S`.

    Returns:
        For each number the answer, or a sentence that says why there is none.
    """
    if not questions:
        return {}
    found: dict[int, Look | str] = {}

    def take(line: bytes) -> None:
        number, answer = json.loads(line)
        found[number] = read_part(Look, answer, "")

    lines = [to_line(question) for question in questions]
    cause = await _converse(argv or reader_argv(), lines, take, quiet_s=quiet_s)
    left = [question for question in questions if question.number not in found]
    if not cause or len(questions) == 1:
        sentence = FATAL.format(cause=cause) if cause else SILENT
        return found | dict.fromkeys((question.number for question in left), sentence)
    for question in left:
        found |= await ask([question], argv=argv, quiet_s=quiet_s)
    return found


async def ask_engine(
    keys: Mapping[str, str],
    *,
    argv: Sequence[str] | None = None,
    quiet_s: float = ENGINE_QUIET_S,
) -> dict[str, ModelMemory | str]:
    """Ask mlx-lm what models take, one after the other in one process.

    Args:
        keys: under which the answers are kept, by the folder of each model.
        argv: the command; None: that of the worker's package.
        quiet_s: see `ENGINE_QUIET_S`.

    Returns:
        By folder the answer, or why there is none. The folder that a process ends with, or does not
        answer for, is not asked about again; those behind it are.
    """
    found: dict[str, ModelMemory | str] = {}
    left = list(keys)

    def take(line: bytes) -> None:
        value = json.loads(line)
        found[left[value["number"]]] = _said_in(value)

    while left:
        lines = [
            json.dumps({"number": number, "path": path, "key": keys[path]}).encode() + b"\n"
            for number, path in enumerate(left)
        ]
        environment = child_environment(os.environ) | {"OPENBLAS_NUM_THREADS": "1"}
        cause = await _converse(
            argv or estimate_argv(), lines, take, quiet_s=quiet_s, environment=environment
        )
        left = [path for path in left if path not in found]
        if left:
            found[left[0]] = ENGINE_FATAL.format(cause=cause) if cause else ENGINE_SILENT
            left = left[1:]
    return found


def _said_in(value: Mapping[str, object]) -> ModelMemory | str:
    memory = value["memory"]
    if not isinstance(memory, dict):
        return str(value["problem"])
    try:
        said = read_part(ModelMemory, memory, "")
    except DecodeError:  # such as of a negative size
        said = None
    if said is None or not said.is_possible:
        return "its config.json has impossible sizes"
    return said


async def _converse(
    argv: Sequence[str],
    lines: Sequence[bytes],
    take: Callable[[bytes], None],
    *,
    quiet_s: float,
    environment: Mapping[str, str] = os.environ,
) -> str:
    """Pass on the answers of a program, a line for each line of its input; return why it ended
    before the last, or nothing.

    Args:
        argv: its command, without the pid of its parent.
        lines: one for each question.
        take: takes the line of an answer; if it raises that the line is none, the process counts
            as ended.
        quiet_s: see `QUIET_S`.
        environment: its variables.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            str(os.getpid()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            # Arenas of each thread would use up the address space.
            env={**environment, "MALLOC_ARENA_MAX": "1"},
            limit=MAX_ANSWER_BYTES,
            process_group=0,  # an interrupt of the terminal is for the daemon
        )
    except OSError as error:
        return f"it could not be started: {error.strerror}"
    assert process.stdin is not None
    is_silent, is_whole = True, False  # so if this is cancelled
    try:
        process.stdin.writelines(lines)
        process.stdin.close()
        is_silent, is_whole = await _collect(process, len(lines), quiet_s, take)
    finally:
        # Otherwise it ends by itself; asyncio loses the exit code of one that is killed just then.
        if is_silent and process.returncode is None:
            process.kill()
        with suppress(TimeoutError):  # if its disk does not let go of it, the system reaps it later
            async with asyncio.timeout(KILL_LIMIT_S):
                await process.wait()
    if is_silent or is_whole or process.returncode is None:
        return ""
    code = process.returncode
    return f"signal {-code}" if code < 0 else f"exit code {code}"


async def _collect(
    process: asyncio.subprocess.Process,
    count: int,
    quiet_s: float,
    take: Callable[[bytes], None],
) -> tuple[bool, bool]:
    """Collect answers until the last, or the end of the process, or until no more come.

    Returns:
        Whether it has fallen silent, and whether it has given every answer.
    """
    assert process.stdout is not None
    loop = asyncio.get_running_loop()
    answered_at, worked_s = loop.time(), 0.0
    line = asyncio.ensure_future(process.stdout.readline())
    try:
        while count:
            done, _ = await asyncio.wait([line], timeout=quiet_s)
            if not done:
                before, worked_s = worked_s, _cpu_s(process.pid)
                is_at_work = worked_s - before >= WORK_S or _is_runnable(process.pid)
                if not is_at_work or loop.time() - answered_at > BUSY_S:
                    return True, False
                continue
            data = line.result()
            if not data:
                return False, False
            take(data)
            count -= 1
            answered_at, worked_s = loop.time(), _cpu_s(process.pid)
            line = asyncio.ensure_future(process.stdout.readline())
        return False, True
    finally:
        line.cancel()


def _cpu_s(pid: int) -> float:
    """Return how long a process has computed, in seconds; 0 once it is gone."""
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
