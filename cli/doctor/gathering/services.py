"""The files of services that start mlxsup, where systemd and launchd look for them."""

from __future__ import annotations

import getpass
import os
import plistlib
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from xml.parsers.expat import ExpatError

from mlxsup.protocol.places import DEFAULT_USER_FOLDER, USER_FOLDER_VARIABLE

from ..facts import Service

UNIT = "mlxsup.service"
JOB = "mlxsup.plist"

EXEC = "ExecStart="
EXEC_PREFIXES = ":@-+!"
"""Signs before a command of systemd that are not part of it."""

LINGERING = Path("/var/lib/systemd/linger")
"""Has a file for each user whose services run without a login."""


def gather_services() -> tuple[Service, ...]:
    """Those of this user, then those of the machine."""
    if sys.platform == "darwin":
        folders = (Path("~/Library/LaunchAgents").expanduser(), Path("/Library/LaunchDaemons"))
        return tuple(read_job(folder / JOB) for folder in folders if (folder / JOB).exists())
    given = os.environ.get(USER_FOLDER_VARIABLE) or DEFAULT_USER_FOLDER
    user = Path(given).expanduser() / "systemd" / "user" / UNIT
    units = []
    if user.exists():
        lingers = (LINGERING / getpass.getuser()).exists() if LINGERING.parent.exists() else None
        units.append(read_unit(user, lingers=lingers))
    machine = Path("/etc/systemd/system") / UNIT
    if machine.exists():
        units.append(read_unit(machine, lingers=None))
    return tuple(units)


def read_unit(path: Path, *, lingers: bool | None) -> Service:
    """What a unit of systemd starts.

    Args:
        path: the unit.
        lingers: see `Service`.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        command = next((line for line in lines if line.startswith(EXEC)), EXEC)
        home = str(Path.home())
        text = command.removeprefix(EXEC).lstrip(EXEC_PREFIXES)
        words = [word.replace("%h", home).replace("%%", "%") for word in shlex.split(text)]
    except OSError as error:
        return Service(path=path, manager="systemd", problem=f"cannot be read: {error.strerror}")
    except ValueError:
        words = []
    return _service(path, "systemd", words, lingers=lingers)


def read_job(path: Path) -> Service:
    """What a job of launchd starts."""
    try:
        job = plistlib.loads(path.read_bytes())
        words = [str(word) for word in job["ProgramArguments"]]
        is_interactive = job.get("ProcessType") == "Interactive"
    except OSError as error:
        return Service(path=path, manager="launchd", problem=f"cannot be read: {error.strerror}")
    except (ValueError, ExpatError, KeyError, TypeError, AttributeError):
        words, is_interactive = [], True
    return _service(path, "launchd", words, is_interactive=is_interactive)


def _service(
    path: Path,
    manager: str,
    words: Sequence[str],
    *,
    lingers: bool | None = None,
    is_interactive: bool = True,
) -> Service:
    if not words:
        return Service(path=path, manager=manager, problem="does not say what to start")
    own = shutil.which("mlxsup")
    program = Path(words[0])
    config = _config_in(words)
    return Service(
        path=path,
        manager=manager,
        program=words[0],
        has_program=os.access(program, os.X_OK),
        is_own_program=None if own is None else os.path.realpath(own) == os.path.realpath(program),
        config=config,
        has_config=config is not None and config.exists(),
        is_interactive=is_interactive,
        lingers=lingers,
    )


def _config_in(words: Sequence[str]) -> Path | None:
    """The file that a command line names."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == "--config" and following:
            return Path(following)
        if word.startswith("--config="):
            return Path(word.removeprefix("--config="))
    return None
