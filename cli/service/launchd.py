"""launchd: where the job is, and the commands that make it count."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path

from ..exit_status import CliError
from . import launchd_plist
from .calls import Command, call, must
from .facts import NAME, ServiceFacts
from .state import ServiceState

UNKNOWN_LIMIT_S = 120.0
"""How long the end of a job may take if its file does not say so."""

MORE_S = 15.0
"""launchd kills a job that takes longer than its file allows, which takes a moment, too."""

LOOK_INTERVAL_S = 0.2
"""launchctl returns before a job that it has ended is gone, and cannot wait for that."""

ENDS_LATER = 36
"""EINPROGRESS: launchctl says so of a job that takes a while to end."""


class Launchd:
    """launchd, with a job of the user or of the machine.

    Args:
        home: the user's home folder.
        is_system: whether it is a job of the machine.
        monotonic, sleep: the clock.
    """

    name = "launchd"

    def __init__(
        self,
        home: Path,
        *,
        is_system: bool,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._is_system = is_system
        self._monotonic = monotonic
        self._sleep = sleep
        folder = Path("/Library/LaunchDaemons") if is_system else home / "Library/LaunchAgents"
        self.path = folder / f"{NAME}.plist"
        # Over SSH there is no graphical session.
        self._domains = ["system"] if is_system else [f"gui/{os.getuid()}", f"user/{os.getuid()}"]

    def text(self, facts: ServiceFacts) -> str:
        """The job."""
        return launchd_plist.plist_text(facts)

    def program_in(self, text: str) -> str | None:
        """Which program a job of ours starts."""
        return launchd_plist.program_in(text)

    def install_commands(self, *, is_new: bool) -> list[Command]:
        """What makes the job count, and starts it; one that runs is drained before."""
        begin = Command(["launchctl", "bootstrap", self._domain(), str(self.path)])
        return [begin] if is_new else [*self.uninstall_commands(), begin]

    def uninstall_commands(self) -> list[Command]:
        """What ends the job, with how long that may take by the file that is there now."""
        if not self._is_known():
            return []
        allowed_s = launchd_plist.exit_time_out_in(self._text())
        limit_s = UNKNOWN_LIMIT_S if allowed_s is None else allowed_s + MORE_S
        return [Command(["launchctl", "bootout", f"{self._domain()}/{NAME}"], limit_s)]

    def forget_commands(self) -> list[Command]:
        """What follows the removal of the file."""
        return []

    def check(self, instead: str) -> None:
        """Whether launchd can be reached.

        Args:
            instead: what may be run if that of the user cannot; may be empty.

        Raises:
            CliError: it cannot.
        """
        called = call(["launchctl", "print", self._domain()])
        if called.code:
            raise CliError(
                f"launchd cannot be reached: {called.last_words}",
                code="no_service_manager",
                hint="log in as the user" + (f", or `{instead}`" if instead else ""),
            )

    def notes(self) -> list[str]:
        """What somebody who has installed the service should know."""
        if self._is_system:
            return []
        return ["it starts when you log in; --system makes it start with the machine"]

    def state(self) -> ServiceState:
        """What launchd says of the job."""
        called = call(["launchctl", "print", f"{self._domain()}/{NAME}"])
        starts_at = "boot" if self._is_system else "login"
        if called.code:
            return ServiceState(state="not loaded", pid=None, is_enabled=False, starts_at=starts_at)
        pid = _found(r"^\s*pid = (\d+)", called.out)
        code = _found(r"^\s*last exit code = (\d+)", called.out)
        return ServiceState(
            state=_found(r"^\s*state = (.+)$", called.out) or "unknown",
            pid=int(pid) if pid else None,
            is_enabled=True,
            starts_at=starts_at,
            last_exit=int(code) if code else None,
        )

    def log_command(self, lines: int, *, is_following: bool) -> list[str]:
        """What prints the output of the job.

        Raises:
            CliError: it is not installed.
        """
        output = launchd_plist.output_in(self._text())
        if output is None:
            raise CliError(
                f"{self.path} names no file for the output",
                code="not_installed",
                hint="install it with `mlxsup service install`",
            )
        follow = ["-F"] if is_following else []
        return ["tail", "-n", str(lines), *follow, output]

    def carry_out(self, command: Command) -> None:
        """Runs one of the commands above, and returns when it has taken effect.

        Raises:
            CliError: it fails.
        """
        if command.end_limit_s is None:
            must(command.argv)
        else:
            must(command.argv, allowed=(0, ENDS_LATER))
            self._wait_until_gone(command.end_limit_s)

    def _wait_until_gone(self, limit_s: float) -> None:
        """Returns when a job that was ended is gone.

        Raises:
            CliError: it stays.
        """
        give_up_at = self._monotonic() + limit_s
        while self._is_known():
            if self._monotonic() > give_up_at:
                raise CliError(
                    f"launchd has not ended the job within {limit_s:g} s",
                    code="service_manager",
                    hint="see `mlxsup service status`",
                )
            self._sleep(LOOK_INTERVAL_S)

    def _text(self) -> str:
        """The file as it is now; empty if there is none."""
        return self.path.read_text(errors="replace") if self.path.is_file() else ""

    def _is_known(self) -> bool:
        return call(["launchctl", "print", f"{self._domain()}/{NAME}"]).code == 0

    def _domain(self) -> str:
        """The first domain that is there."""
        *others, last = self._domains
        return next((one for one in others if not call(["launchctl", "print", one]).code), last)


def _found(pattern: str, text: str) -> str | None:
    found = re.search(pattern, text, re.MULTILINE)
    return found.group(1).strip() if found else None
