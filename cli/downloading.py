"""Downloads a repository for a command: in a child process, with its progress on standard error."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

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
from mlxsup.protocol.ids import DEFAULT_REVISION
from mlxsup.store.hub_cache import (
    REPOSITORY_EXPECTED,
    REVISION_EXPECTED,
    check_repository,
    check_revision,
)

from .exit_status import CliError, ExitStatus, Interrupted
from .terminal.output import LiveLine, Output
from .terminal.text import bar, format_bytes, format_duration

TENTHS = 10
"""Off a terminal there is a line for each tenth."""

CONTINUED = frozenset(
    {DownloadProblem.NETWORK, DownloadProblem.DISK_FULL, DownloadProblem.UNWRITABLE}
)
"""Problems after which the same command continues with what has arrived."""


def checked_repository(repo: str, revision: str = DEFAULT_REVISION) -> Repository:
    """Return a repository as a user has named it."""
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
    hint = "a repository is written OWNER/NAME, such as mlx-community/Qwen3-4B-4bit"
    return CliError(message, hint=hint, status=ExitStatus.USAGE)


def download(repository: Repository, output: Output, *, again: str) -> DownloadDone:
    """Download what is missing of a repository; what has arrived is kept, however it ends.

    The command `again` continues it.

    Raises:
        CliError: it failed.
        KeyboardInterrupt: the user has interrupted it.
    """
    last: DownloadDone | DownloadFailed | None = None
    noise = ""
    spec = DownloadSpec(repository=repository)
    with _process(spec) as process, LiveLine(output) as line:
        show = progress_printer(repository, line)
        try:
            for data in process.stdout or ():
                report = read_report(data)
                if isinstance(report, DownloadProgress):
                    show(report)
                elif isinstance(report, DownloadDone | DownloadFailed):
                    last = report
                else:
                    noise = data.decode(errors="replace").strip() or noise
        except KeyboardInterrupt:
            raise Interrupted(f"Stopped. `{again}` continues the download.") from None
    if isinstance(last, DownloadDone):
        return last
    if last is None:
        raise _ended(process.returncode, noise)
    is_usage = last.problem is DownloadProblem.BAD_REPOSITORY
    status = ExitStatus.USAGE if is_usage else ExitStatus.FAILED
    hint = last.hint
    if last.problem in CONTINUED:
        hint += f", then run `{again}` again; it continues where it stopped"
    raise CliError(last.message, code=last.problem.value, hint=hint, status=status)


def _ended(code: int, noise: str) -> CliError:
    """Return the error for a process that has said nothing of its end."""
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return CliError(f"the download ended with {how}", code="internal", hint=noise)


@contextmanager
def _process(spec: DownloadSpec) -> Iterator[subprocess.Popen[bytes]]:
    """Give the process, which has ended when this returns."""
    from mlxsup.protocol.codec import to_line  # help would wait for it

    with subprocess.Popen(
        download_argv(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        try:
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # it has ended already; what it printed says why
                # Not through the buffer, which would be written again when the file is closed.
                os.write(process.stdin.fileno(), to_line(spec))
            yield process
        except BaseException:
            process.kill()
            raise


def progress_printer(repository: Repository, line: LiveLine) -> Callable[[DownloadProgress], None]:
    """Return what shows progress: in a line that changes, or, off a terminal, in one for each
    tenth."""
    begin: tuple[float, int] | None = None

    def show(progress: DownloadProgress) -> None:
        nonlocal begin
        done, total = progress.done_bytes, progress.total_bytes
        speed = drawn = ""
        if progress.is_waiting:
            text, step = "waiting for another process that downloads it", -1
        else:
            now = time.monotonic()
            begin = begin or (now, done)
            share = done / total if total else 0.0
            text, step = f"{share:.0%} of {format_bytes(total)}", int(share * TENTHS)
            drawn = f"{bar(share)} " if line.is_possible else ""
            took_s, arrived = now - begin[0], done - begin[1]
            if arrived > 0 and took_s >= 1:
                rate = arrived / took_s
                left = format_duration((total - done) / rate)
                speed = f", {format_bytes(rate)}/s, {left} left"
        # The line is cut at its end, where the user's own words may go.
        ahead, behind = ("", f"  {repository}") if drawn else (f"{repository}: ", "")
        line.tell(f"{ahead}{drawn}{text}{speed}{behind}", step)

    return show
