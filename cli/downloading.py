"""Downloads a repository for a command: in a child process, with its progress on standard error."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mlxsup.protocol.download import (
    DownloadDone,
    DownloadFailed,
    DownloadProblem,
    DownloadProgress,
    DownloadSpec,
    Repository,
    download_argv,
    read_report,
)
from mlxsup.store.hub_cache import (
    DEFAULT_REVISION,
    REPOSITORY_EXPECTED,
    REVISION_EXPECTED,
    check_repository,
    check_revision,
)

from .exit_status import CliError, ExitStatus
from .terminal.live_line import LiveLine
from .terminal.output import Output
from .terminal.quantities import format_bytes, format_duration

TENTHS = 10
"""Off a terminal there is a line for each tenth."""

CONTINUED = frozenset(
    {DownloadProblem.NETWORK, DownloadProblem.DISK_FULL, DownloadProblem.UNWRITABLE}
)
"""Problems after which the same command continues with what has arrived."""


def checked_repository(repo: str, revision: str = DEFAULT_REVISION) -> Repository:
    """A repository as a user has named it.

    Raises:
        CliError: there can be no such repository, or no such revision.
    """
    try:
        check_repository(repo)
    except ValueError:
        raise _usage(f"{repo!r} is not {REPOSITORY_EXPECTED}") from None
    try:
        check_revision(revision)
    except ValueError:
        raise _usage(f"{revision!r} is not {REVISION_EXPECTED}") from None
    return Repository(repo, revision)


def _usage(message: str) -> CliError:
    hint = "a repository is OWNER/NAME, as in its address"
    return CliError(message, code="usage", hint=hint, status=ExitStatus.USAGE)


def download(repository: Repository, output: Output, *, again: str) -> DownloadDone:
    """Downloads what is missing of a repository; files that have arrived are kept.

    Args:
        repository: which.
        output: how to write output.
        again: the command that continues it.

    Raises:
        CliError: it failed.
        KeyboardInterrupt: the user has interrupted it.
    """
    last: DownloadDone | DownloadFailed | None = None
    noise = ""
    with _process(repository) as process, LiveLine(output) as line:
        shown = _Shown(repository, line, output)
        try:
            for data in process.stdout or ():
                report = read_report(data)
                if isinstance(report, DownloadProgress):
                    shown.show(report)
                elif report is not None:
                    last = report
                else:
                    noise = data.decode(errors="replace").strip() or noise
        except KeyboardInterrupt:
            line.clear()
            output.end_line()
            output.note(f"files that have arrived are kept: `{again}` continues")
            raise
    if isinstance(last, DownloadDone):
        return last
    if last is None:
        code = process.returncode
        what = f"signal {-code}" if code < 0 else f"exit code {code}"
        raise CliError(f"the download ended with {what}", code="internal", hint=noise)
    is_usage = last.problem is DownloadProblem.BAD_REPOSITORY
    status = ExitStatus.USAGE if is_usage else ExitStatus.FAILED
    hint = f"{last.hint}; `{again}` continues" if last.problem in CONTINUED else last.hint
    raise CliError(last.message, code=last.problem.value, hint=hint, status=status)


@contextmanager
def _process(repository: Repository) -> Iterator[subprocess.Popen[bytes]]:
    """The process, which has ended when this returns."""
    with subprocess.Popen(
        download_argv(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        try:
            spec = DownloadSpec(repository=repository, parent_pid=os.getpid())
            assert process.stdin is not None
            process.stdin.write(spec.to_line())
            process.stdin.flush()
            yield process
        except BaseException:
            process.kill()
            raise


class _Shown:
    """What of the progress is written: a line that changes, or, off a terminal, one for each tenth.

    Args:
        repository: what is downloaded.
        line: of the terminal.
        output: how to write output.
        clock: seconds.
    """

    def __init__(
        self,
        repository: Repository,
        line: LiveLine,
        output: Output,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._repository = repository
        self._line = line
        self._output = output
        self._clock = clock
        self._first: tuple[float, int] | None = None
        self._told: object = None

    def show(self, progress: DownloadProgress) -> None:
        """Shows how far it has come, if that is news."""
        now = self._clock()
        if progress.is_waiting:
            text, step = "another process is downloading it: waiting", -1
        else:
            if self._first is None:
                self._first = (now, progress.done_bytes)
            share = progress.done_bytes / progress.total_bytes if progress.total_bytes else 0.0
            text = f"{share:.0%} of {format_bytes(progress.total_bytes)}"
            step = int(share * TENTHS)
        if self._line.is_possible:
            self._line.show(f"{self._repository}: {text}{self._speed(progress, now)}")
        elif step != self._told:
            self._told = step
            self._output.note(f"{self._repository}: {text}")

    def _speed(self, progress: DownloadProgress, now: float) -> str:
        if self._first is None or progress.is_waiting:
            return ""
        since, before = self._first
        arrived = progress.done_bytes - before
        if arrived <= 0 or now - since < 1:
            return ""
        rate = arrived / (now - since)
        left_s = (progress.total_bytes - progress.done_bytes) / rate
        return f", {format_bytes(rate)}/s, {format_duration(left_s)} left"
