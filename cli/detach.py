"""A daemon that is started in the background, and waited for until it answers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxsup.protocol.discovery import endpoint_in, socket_at
from mlxsup.protocol.gateway import Address
from mlxsup.protocol.regular_file import room_hint

from .configuration import read_configuration
from .connection import START_S, Target, status_of_daemon
from .exit_status import PERMANENT_EXITS, CliError, ExitStatus
from .terminal.output import LiveLine, Output

OUTPUT_NAME = "daemon.out"
MAX_OUTPUT_BYTES = 1024 * 1024
"""The output of earlier daemons is moved aside once it is longer."""

LOOK_INTERVAL_S = 0.05
"""How often to look for the daemon: a process that is not up yet cannot announce itself."""

END_LIMIT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A daemon that answers.

    Attributes:
        endpoint: where it listens.
        pid: its process.
        output: the file that gets what it prints.
        gateway: what its status says of its gateway, which has listened or failed to; None: it has
            none.
        is_ours: false if another command has started it at the same time.
    """

    endpoint: str
    pid: int
    output: Path
    gateway: Mapping[str, Any] | None
    is_ours: bool = True


def start_detached(endpoint: str, log_dir: Path, arguments: Sequence[str]) -> Started:
    """Start `mlxsup start` with these arguments, in its own session.

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
                # -P: nothing may be imported from the folder that happens to be the current one.
                [sys.executable, "-P", "-m", "mlxsup.cli", "start", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        gateway = _wait(process, endpoint, path, begin)
    except BaseException:
        # Given up or interrupted: the user would not know that it runs.
        if process is not None:
            _end(process)
        raise
    finally:
        os.close(output)
    return Started(endpoint=endpoint, pid=process.pid, output=path, gateway=gateway)


def start_configured(path: Path, *options: str) -> Started:
    """Start the daemon of a configuration file with these options of `start` in the background.

    If another command starts one there at the same time, the lock of the runtime folder decides
    which of them runs, and that one is returned.

    Raises:
        CliError: the file is wrong, or the daemon did not come up.
    """
    configuration = read_configuration(path)
    arguments = ["--config", os.path.abspath(path.expanduser()), *options]
    endpoint = endpoint_in(configuration.runtime_dir)
    try:
        return start_detached(endpoint, configuration.log_dir, arguments)
    except CliError as error:
        if error.status is not ExitStatus.ALREADY_RUNNING:
            raise
        status = status_of_daemon(Target(endpoint=endpoint), START_S)
        if status is None:
            raise
        return Started(
            endpoint=endpoint,
            pid=status["pid"],
            output=configuration.log_dir / OUTPUT_NAME,
            gateway=status["gateway"],
            is_ours=False,
        )


def report(started: Started, first: str, target: Target, output: Output) -> None:
    """Say where a daemon listens, what to do next, and how it is ended.

    Args:
        started: the daemon.
        first: the name of its first model; empty if it has none.
        target: the options with which commands reach it.
    """
    from .foreground import http_lines, next_commands

    gateway = started.gateway or {}
    url = gateway["url"] if gateway.get("state") == "listening" else ""
    value = {"endpoint": started.endpoint, "pid": started.pid, "output": str(started.output)}
    lines = [f"listening at {started.endpoint} (pid {started.pid})"]
    lines += [http_lines(url, gateway["pid"])] if url else []
    output.result(value | ({"gateway": url} if url else {}), "\n".join(lines))
    _warn_without_http(started, output)
    output.note(f"its output is in {started.output}")
    output.note(target.repeat_in(f"{next_commands(first)}; `mlxsup stop` ends it"))


def note_started(started: Started, target: Target, output: Output) -> None:
    """Say on standard error that a daemon runs now, where it serves HTTP, and how it is ended."""
    gateway = started.gateway or {}
    is_listening = gateway.get("state") == "listening"
    where = f" with a page and an API at {gateway['url']}" if is_listening else ""
    how = "started a daemon" if started.is_ours else "another command started the daemon"
    end = target.repeat_in("`mlxsup stop` ends it")
    output.note(f"{how} (pid {started.pid}){where}; {end}")
    _warn_without_http(started, output)


def _warn_without_http(started: Started, output: Output) -> None:
    """Say why a gateway does not listen, if there is one; it is tried again."""
    from . import port

    gateway = started.gateway
    if gateway is not None and gateway["state"] != "listening":
        by = port.holder_of(Address.parse(gateway["address"]))
        why = f"{gateway['address']} is taken{by}" if by else gateway["cause"]
        output.note(f"warning: HTTP is not served, and is tried again: {why}")


def make_private_folder(path: Path) -> None:
    """Make a folder and the missing ones above it, each with mode 0700: one of those may be the
    runtime folder, which a daemon refuses with any other mode. What exists stays as it is.

    Raises:
        OSError: a folder cannot be created.
    """
    missing = [folder for folder in path.parents if not folder.exists()]
    for folder in (*reversed(missing), path):
        folder.mkdir(mode=0o700, exist_ok=True)


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
    return CliError(
        f"cannot write to the log folder {path.parent}: {error.strerror}",
        hint=room_hint(error, "set log_dir to a writable folder"),
        status=ExitStatus.RUNTIME_FOLDER,
    )


def _wait(
    process: subprocess.Popen[bytes], endpoint: str, output: Path, begin: int
) -> Mapping[str, Any] | None:
    """Return what the daemon says of its gateway, once both are up, or the gateway has failed."""
    give_up_at = time.monotonic() + START_S
    with LiveLine(Output()) as line:
        line.show("starting the daemon")
        while time.monotonic() < give_up_at:
            try:
                process.wait(LOOK_INTERVAL_S)
            except subprocess.TimeoutExpired:
                status = None
                if socket_at(endpoint).exists():
                    with suppress(CliError):  # it is too busy to answer
                        status = status_of_daemon(Target(endpoint=endpoint), 0.0)
                # Another daemon may answer there while ours finds out that it is not needed.
                if status is None or status["pid"] != process.pid:
                    continue
                gateway: Mapping[str, Any] | None = status["gateway"]
                if gateway is None or gateway["state"] != "starting":
                    return gateway
                line.show("the daemon runs; starting its HTTP gateway")
            else:
                raise _failure(process.returncode, output, begin)
    raise CliError(f"the daemon did not answer within {START_S:g} s", hint=f"see {output}")


def _failure(code: int, output: Path, begin: int) -> CliError:
    """Return the error that the daemon printed before it ended, as if it had happened here; if it
    printed none, find out whether it could."""
    with output.open("rb") as file:
        file.seek(begin)
        text = file.read().decode("utf-8", "replace").strip()
    status = ExitStatus(code) if code in list(ExitStatus) else ExitStatus.FAILED
    _, marker, said = text.rpartition("error: ")
    message, _, hint = said.partition("\nhint: ")
    if not marker:
        try:
            with output.open("ab", buffering=0) as file:
                file.write(b"\n")
        except OSError as error:
            return _unwritable(output, error)
        message, hint = f"the daemon ended with exit code {code}", f"see {output}"
    code_name = status.name.lower() if status in PERMANENT_EXITS else "failed"
    return CliError(message, code=code_name, hint=hint, status=status)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def held_interrupt() -> Iterator[None]:
    """Let an interrupt wait until the block has ended.

    A process exists before the call that starts it returns; an interrupt in between would leave
    it without an owner.

    Raises:
        KeyboardInterrupt: at the end of the block, if an interrupt came and counts here.
    """
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)
