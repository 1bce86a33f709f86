"""Starts a daemon in the background, and waits until it answers."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .exit_status import CliError, ExitStatus
from .held_interrupt import held_interrupt
from .private_folders import make_private_folder

OUTPUT_NAME = "daemon.out"
MAX_OUTPUT_BYTES = 1024 * 1024
"""The output of earlier daemons is moved aside once it is longer."""

ANSWER_LIMIT_S = 60.0
LOOK_INTERVAL_S = 0.05
"""How often to look for the daemon: a process that is not up yet cannot announce itself."""

END_LIMIT_S = 30.0
CODES = {
    ExitStatus.USAGE: "usage",
    ExitStatus.RUNTIME_FOLDER: "runtime_folder",
    ExitStatus.ALREADY_RUNNING: "already_running",
    ExitStatus.BAD_CONFIGURATION: "bad_configuration",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A daemon that answers.

    Attributes:
        endpoint: where it answers.
        pid: the daemon's process.
        output: the file that gets what it prints.
    """

    endpoint: str
    pid: int
    output: Path


def start_detached(endpoint: str, log_dir: Path, arguments: Sequence[str]) -> Started:
    """Starts `mlxsup start` with these arguments, in its own session.

    Args:
        endpoint: where it will listen.
        log_dir: where the file with its output goes.
        arguments: for `start`; relative paths are relative to the current folder.

    Raises:
        CliError: it did not come up; message and status are the daemon's.
    """
    path = log_dir / OUTPUT_NAME
    output = _open_output(path)
    process = None
    try:
        begin = os.fstat(output).st_size
        with held_interrupt():
            process = subprocess.Popen(
                # -P: nothing may be imported from whatever folder is the current one.
                [sys.executable, "-P", "-m", "mlxsup.cli", "start", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        _wait(process, endpoint, path, begin)
    except BaseException:
        # Given up or interrupted: otherwise nobody would know that it runs.
        if process is not None:
            _end(process)
        raise
    finally:
        os.close(output)
    return Started(endpoint=endpoint, pid=process.pid, output=path)


def _open_output(path: Path) -> int:
    try:
        make_private_folder(path.parent)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        descriptor = os.open(path, flags, 0o600)
        if os.fstat(descriptor).st_size > MAX_OUTPUT_BYTES:
            os.close(descriptor)
            path.replace(path.with_name(f"{path.name}.1"))
            descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        raise _unwritable(path, error) from None
    return descriptor


def _unwritable(path: Path, error: OSError) -> CliError:
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    where = "set log_dir to a folder that you can write to"
    return CliError(
        f"cannot write to the log folder {path.parent}: {error.strerror}",
        code="runtime_folder",
        hint=f"free some space, or {where}" if is_full else where,
        status=ExitStatus.RUNTIME_FOLDER,
    )


def _check_writable(path: Path) -> None:
    """Finds out why a daemon may have ended without a word.

    Raises:
        CliError: nothing more can be written there.
    """
    try:
        with path.open("ab", buffering=0) as file:
            file.write(b"\n")
    except OSError as error:
        raise _unwritable(path, error) from None


def _wait(process: subprocess.Popen[bytes], endpoint: str, output: Path, begin: int) -> None:
    socket = Path(endpoint.removeprefix("ipc://"))
    give_up_at = time.monotonic() + ANSWER_LIMIT_S
    while time.monotonic() < give_up_at:
        try:
            process.wait(LOOK_INTERVAL_S)
        except subprocess.TimeoutExpired:
            # Another daemon may answer there while ours finds out that it is not needed.
            if socket.exists() and _pid_at(endpoint) == process.pid:
                return
            continue
        raise _failure(process.returncode, output, begin)
    raise CliError(f"the daemon did not answer within {ANSWER_LIMIT_S:g} s", hint=f"see {output}")


def _pid_at(endpoint: str) -> int | None:
    from mlxsup.client import Client, ConnectionLost, RequestError

    try:
        with Client(endpoint) as client:
            return int(client.status()["pid"])
    except (ConnectionLost, RequestError):
        return None


def _failure(code: int, output: Path, begin: int) -> CliError:
    """The error that the daemon printed before it ended, as if it had happened here.

    Raises:
        CliError: it could print nothing.
    """
    with output.open("rb") as file:
        file.seek(begin)
        text = file.read().decode("utf-8", "replace").strip()
    status = ExitStatus(code) if code in list(ExitStatus) else ExitStatus.FAILED
    _, marker, said = text.rpartition("error: ")
    message, _, hint = said.partition("\nhint: ")
    if not marker:
        _check_writable(output)
        message, hint = f"the daemon ended with exit code {code}", f"see {output}"
    return CliError(message, code=CODES.get(status, "failed"), hint=hint, status=status)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
