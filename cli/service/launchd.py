"""launchd: the job, where it is, and the commands that make it count. See launchd.plist(5)."""

from __future__ import annotations

import os
import plistlib
import re
import time
from pathlib import Path
from typing import Any
from xml.parsers.expat import ExpatError

from ..exit_status import CliError
from .facts import (
    MARKER,
    NAME,
    ServiceFacts,
    ServiceState,
    Steps,
    call,
    last_words,
    must,
    read_file,
)

OPEN_FILES = 10240
"""The soft limit is 256 unless a job says otherwise."""

OUTPUT_NAME = "service.out"
"""In the log folder: what the daemon prints, above all why it could not start."""

UNKNOWN_LIMIT_S = 120.0
"""How long the end of a job may take if its file does not say so."""

MORE_S = 15.0
"""launchd kills a job that takes longer than its file allows, which takes a moment, too."""

LOOK_INTERVAL_S = 0.2
"""launchctl returns before a job that it has ended is gone, and cannot wait for that."""

ENDS_LATER = 36
"""EINPROGRESS: launchctl says so of a job that takes a while to end."""


def plist(facts: ServiceFacts) -> dict[str, Any]:
    """Return what the job says.

    launchd joins several conditions of `KeepAlive` by *or*, and knows no exception for exit codes,
    so there is only `SuccessfulExit`, and `start --service` ends with 0 if another start would not
    help.
    """
    job: dict[str, Any] = {
        "Label": NAME,
        "ProgramArguments": [
            str(facts.program), "start", "--service", "--config", str(facts.config),
        ],
        "EnvironmentVariables": facts.environment,
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": 10,
        "ExitTimeOut": facts.stop_s,
        "ProcessType": "Interactive",
        "SoftResourceLimits": {"NumberOfFiles": OPEN_FILES},
        "HardResourceLimits": {"NumberOfFiles": OPEN_FILES},
        "StandardOutPath": str(facts.log_dir / OUTPUT_NAME),
        "StandardErrorPath": str(facts.log_dir / OUTPUT_NAME),
    }  # fmt: skip
    if facts.is_system:
        return {**job, "UserName": facts.user}
    return {**job, "LimitLoadToSessionType": ["Aqua", "Background"]}


def read_job(text: str) -> dict[str, Any]:
    """Return what a property list says; nothing if it is not a job."""
    try:
        job = plistlib.loads(text.encode("utf-8", "surrogateescape"))
    except (ValueError, ExpatError, AttributeError):
        return {}
    return job if isinstance(job, dict) else {}


class Launchd:
    """launchd for a user with this home folder, or for the machine; `path` is the job's."""

    name = "launchd"

    def __init__(self, home: Path, *, is_system: bool) -> None:
        self._is_system = is_system
        folder = Path("/Library/LaunchDaemons") if is_system else home / "Library/LaunchAgents"
        self.path = folder / f"{NAME}.plist"

    @staticmethod
    def text(facts: ServiceFacts) -> str:
        """Return the job."""
        text = plistlib.dumps(plist(facts), sort_keys=False).decode()
        return text.replace("<plist ", f"<!-- {MARKER} -->\n<plist ", 1)

    @staticmethod
    def command_in(text: str) -> list[str]:
        """Return the words of the command that a job starts; none if it says none."""
        words = read_job(text).get("ProgramArguments")
        return list(map(str, words)) if isinstance(words, list) else []

    def install_commands(self, *, is_new: bool) -> Steps:
        """Return what is run around the writing of the job; a daemon that runs is drained."""
        before = [] if is_new else self.uninstall_commands()[0]
        return before, [["launchctl", "bootstrap", self._domain(), str(self.path)]]

    def uninstall_commands(self) -> Steps:
        """Return what is run before and after the job is removed."""
        return [["launchctl", "bootout", self._job()]] if self._is_known() else [], []

    def carry_out(self, argv: list[str]) -> None:
        """Run one of the commands above, and return when it has taken effect."""
        if "bootout" not in argv:
            must(argv)
            return
        allowed_s: Any = read_job(self._text()).get("ExitTimeOut")
        is_limit = type(allowed_s) in (int, float) and allowed_s > 0
        limit_s = allowed_s + MORE_S if is_limit else UNKNOWN_LIMIT_S
        must(argv, allowed=(0, ENDS_LATER))
        give_up_at = time.monotonic() + limit_s
        while self._is_known():
            if time.monotonic() > give_up_at:
                raise CliError(
                    f"launchd did not end the job within {limit_s:g} s",
                    code="service_manager",
                    hint="see `mlxsup service status`",
                )
            time.sleep(LOOK_INTERVAL_S)

    def check(self, instead: str) -> None:
        """Refuse to go on if launchd cannot be reached;
        `instead`, if it is not empty, is what may be run then."""
        done = call(["launchctl", "print", self._domain()])
        if done.returncode:
            raise CliError(
                f"launchd cannot be reached: {last_words(done)}",
                code="no_service_manager",
                hint="log in as the user" + (f", or `{instead}`" if instead else ""),
            )

    def notes(self) -> list[str]:
        """Return what the user who has installed the service should know."""
        if self._is_system:
            return []
        return ["it starts when you log in; --system makes it start with the machine"]

    def state(self) -> ServiceState:
        """Return what launchd says of the job."""
        done = call(["launchctl", "print", self._job()])
        starts_at = "boot" if self._is_system else "login"
        if done.returncode:
            return ServiceState(state="not loaded", pid=None, is_enabled=False, starts_at=starts_at)
        pid = _found(r"^\s*pid = (\d+)", done.stdout)
        code = _found(r"^\s*last exit code = (\d+)", done.stdout)
        return ServiceState(
            state=_found(r"^\s*state = (.+)$", done.stdout) or "unknown",
            pid=int(pid) if pid else None,
            is_enabled=True,
            starts_at=starts_at,
            last_exit=int(code) if code else None,
        )

    def log_command(self) -> list[str]:
        """Return what prints the output of the job; nothing if its file does not say it."""
        output = read_job(self._text()).get("StandardErrorPath")
        return ["tail", "-n", "50", output] if isinstance(output, str) else []

    def _text(self) -> str:
        """Return the file as it is now; empty if there is none."""
        return read_file(self.path) or ""

    def _is_known(self) -> bool:
        return call(["launchctl", "print", self._job()]).returncode == 0

    def _job(self) -> str:
        return f"{self._domain()}/{NAME}"

    def _domain(self) -> str:
        """Return the domain of the job: without a graphical session, as over SSH, the user's."""
        if self._is_system:
            return "system"
        graphical = f"gui/{os.getuid()}"
        is_there = call(["launchctl", "print", graphical]).returncode == 0
        return graphical if is_there else f"user/{os.getuid()}"


def _found(pattern: str, text: str) -> str | None:
    found = re.search(pattern, text, re.MULTILINE)
    return found.group(1).strip() if found else None
