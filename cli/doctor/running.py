"""Checks of what runs: the daemon, its gateway, and the service that starts it."""

from __future__ import annotations

import errno
import getpass
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from mlxsup.protocol.discovery import socket_at
from mlxsup.protocol.folders import LOCK_NAME
from mlxsup.protocol.gateway import Address
from mlxsup.protocol.key_file import have_been_made
from mlxsup.protocol.version import VERSION

from .. import port
from ..lock_holder import LockHolder, lock_holder
from ..service.facts import read_file
from ..service.launchd import Launchd
from ..service.systemd import Systemd
from ..terminal.status import BROKEN_MODELS
from ..terminal.text import counted
from .finding import Finding, note, ok, problem
from .installed import Setting, system_name

START = "mlxsup start --detach"

LINGERING = Path("/var/lib/systemd/linger")
"""Has a file for each user whose services run without a login."""

# ---------------------------------------------------------------- the daemon


def check_daemon(setting: Setting) -> Iterator[Finding]:
    """Judge the holder of the runtime folder, what answers there, and its gateway."""
    status, failure = ask_status(setting.endpoint)
    holder = lock_holder(setting.endpoint)
    if status is not None:
        yield from _running(setting, status)
    elif holder is not None:
        yield _silent(setting.endpoint, holder, failure)
    else:
        yield _absent(setting.endpoint, socket_at(setting.endpoint).parent)
    yield from _gateway(setting, status or {}, holder)


def ask_status(endpoint: str) -> tuple[Mapping[str, Any] | None, str]:
    """Return what the daemon says of itself, or why it refuses to."""
    from mlxsup.client import Client, ConnectionLost, RequestError

    try:
        with Client(endpoint) as client:
            return client.status(), ""
    except ConnectionLost as error:
        return None, error.message if error.is_turned_away else ""
    except RequestError as error:
        return None, error.message
    except ValueError:
        return None, ""  # the path is too long, which is a finding about the folder


def _running(setting: Setting, status: Mapping[str, Any]) -> Iterator[Finding]:
    broken = [row for row in status["models"] if row["state"] in BROKEN_MODELS]
    for row in broken:
        name = shlex.quote(str(row["name"]))
        cause = row.get("cause") or (row.get("last_exit") or {}).get("reason") or ""
        yield problem(
            "daemon",
            f"{row['name']} {BROKEN_MODELS[row['state']]}" + (f": {cause}" if cause else ""),
            why="requests for it fail or wait",
            fix=f"read `mlxsup logs {name}`, fix the cause, then `mlxsup restart {name}`",
        )
    if status["version"] != VERSION:
        yield problem(
            "daemon",
            f"the daemon has version {status['version']}, but this command has {VERSION}",
            why="they may not understand each other",
            fix="restart it with `mlxsup stop` and `mlxsup start`",
        )
    path, here = status.get("config_path"), setting.config
    # Not Path.resolve, which raises for links that lead in a circle.
    if path and here is not None and os.path.realpath(path) != os.path.realpath(here):
        yield note(
            "daemon",
            f"the daemon uses {path}, but commands here read {os.path.realpath(here)}",
            why="changes of the latter do not affect it",
            fix="choose the file with --config, or stop the daemon and start it here",
        )
    if not broken:
        models = counted(len(status["models"]), "model")
        yield ok("daemon", f"answers at {setting.endpoint} (pid {status['pid']}, {models})")


def _silent(endpoint: str, holder: LockHolder, failure: str) -> Finding:
    pid, said = holder.pid, f": {failure}" if failure else ""
    if holder.is_stopped:
        return problem(
            "daemon",
            f"process {pid} of the daemon is stopped by Ctrl-Z or SIGSTOP",
            why="it cannot answer, and no other daemon can start in its folder",
            command=f"kill -CONT {pid}",
        )
    if holder.is_beating:
        return problem(
            "daemon",
            f"process {pid} of the daemon is alive but does not answer at {endpoint}{said}",
            why="it is busy, or has too many open files",
            fix="try again in a moment; the end of its log may show the cause",
        )
    return problem(
        "daemon",
        f"process {pid} of the daemon is alive but does not answer at {endpoint}{said}",
        why="no other daemon can start in its folder",
        fix=f"look at the end of its log; if it does not recover, end it with `kill {pid}` and, "
        f"after a minute, `kill -KILL {pid}`",
    )


def _absent(endpoint: str, folder: Path) -> Finding:
    recorded = None
    with suppress(OSError, ValueError, IndexError):
        recorded = int((folder / LOCK_NAME).read_text().split()[0])
    stranger = "" if recorded is None else port.program_of(recorded)
    if stranger:
        return note(
            "daemon",
            f"no daemon runs; the lock names process {recorded}, which is now another program "
            f"({stranger})",
            why="do not end that process: it is not the daemon",
            command=START,
        )
    if leftovers := len([*folder.glob("*.sock")]):
        was = f" (pid {recorded})" if recorded is not None else ""
        return note(
            "daemon",
            f"no daemon runs; the last one{was} was killed and left its "
            f"socket{'' if leftovers == 1 else 's'}",
            why="the next start removes what is left",
            command=START,
        )
    return ok("daemon", f"no daemon runs at {endpoint}")


# ---------------------------------------------------------------- its gateway


def _gateway(
    setting: Setting, status: Mapping[str, Any], holder: LockHolder | None
) -> Iterator[Finding]:
    """Judge the address and the keys of a gateway; nothing without one."""
    try:
        address = Address.parse(setting.listen)
    except ValueError:
        return  # there is none, or what is wrong with it is a finding
    is_sound = True
    if setting.key_need and not have_been_made(setting.keys):
        is_sound = False
        yield problem(
            "gateway",
            f"{setting.key_need}, but there is no API key",
            why="anyone could use your models, so `mlxsup start` exits with 78",
            command="mlxsup key new laptop",
        )
    is_ours = (status.get("gateway") or {}).get("address") == str(address)
    refused = None if is_ours else port.refused_at(address)
    if refused is not None:
        is_taken = refused.errno == errno.EADDRINUSE
        listener = port.listener_at(address) if is_taken else None
        if listener is not None and holder is not None and _parent_of(listener) == holder.pid:
            is_ours = True  # of a daemon that does not answer
        else:
            is_sound = False
            free = port.free_address(address) if is_taken else ""
            reason = refused.strerror or str(refused)
            yield problem(
                "gateway",
                f"{address} is taken{port.holder_of(address)}"
                if free
                else f"{address} cannot be used: {reason}",
                why="the HTTP gateway cannot listen and keeps retrying",
                fix=(
                    f'set listen = "{free or "127.0.0.1:8484"}" in [gateway], or quit that program'
                ),
            )
    if is_sound:
        yield ok("gateway", f"{'listens at' if is_ours else 'can listen at'} {setting.listen}")


def _parent_of(pid: int) -> int | None:
    with suppress(psutil.Error):
        return int(psutil.Process(pid).ppid())
    return None


# ---------------------------------------------------------------- the service


def check_services(setting: Setting) -> Iterator[Finding]:
    """Judge the files of services, this user's and then the machine's."""
    kind = Launchd if system_name() == "Darwin" else Systemd
    for is_system in (False, True):
        yield from _service(kind(Path.home(), is_system=is_system), is_system=is_system)


def _service(manager: Launchd | Systemd, *, is_system: bool) -> Iterator[Finding]:
    """Judge the file of a service: what it starts, with which configuration, and when."""
    applied = "`launchctl bootout` and `bootstrap` apply it"
    if isinstance(manager, Systemd):
        applied = f"`systemctl{'' if is_system else ' --user'} daemon-reload` applies it"
    path = manager.path
    trouble = "names no program to start"
    try:
        text = read_file(path)
    except OSError as error:
        trouble, text = f"cannot be read: {error.strerror}", ""
    if text is None:
        return
    words = manager.command_in(text)
    if not words:
        why = "the service manager cannot start the daemon"
        fix = f"correct the file; {applied}"
        yield problem("service", f"{path} {trouble}", why=why, fix=fix)
        return
    config, found = _config_in(words), []
    if not os.access(words[0], os.X_OK):
        found.append(
            problem(
                "service",
                f"{path} starts {words[0]}, which does not exist",
                why="the service manager cannot start the daemon",
                fix=f"replace it by the path that `command -v mlxsup` prints; {applied}",
            )
        )
    if config is not None and not config.exists():
        found.append(
            problem(
                "service",
                f"{path} names {config}, which does not exist",
                why="the daemon exits with 78 and is not restarted",
                fix=f"correct the path; {applied}",
            )
        )
    is_users = isinstance(manager, Systemd) and not is_system
    if is_users and LINGERING.parent.exists() and not (LINGERING / getpass.getuser()).exists():
        what = f"{path} runs only while you are logged in"
        why = "the daemon ends when you log out, and does not start with the machine"
        found.append(note("service", what, why=why, command="loginctl enable-linger"))
    yield from found or [ok("service", f"{path} starts {words[0]}")]


def _config_in(words: Sequence[str]) -> Path | None:
    """Return the configuration file that a command line names."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == "--config" and following:
            return Path(following)
        if word.startswith("--config="):
            return Path(word.removeprefix("--config="))
    return None
