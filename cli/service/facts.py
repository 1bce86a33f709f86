"""A service: what its file says, what its manager says of it, and how that manager is asked."""

from __future__ import annotations

import math
import shlex
import subprocess
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..exit_status import CliError

NAME = "mlxsup"

MARKER = f"Written by `{NAME} service install`; `{NAME} service uninstall` removes it."
"""Is in every file that we write. A file without it is not ours."""

END_S = 15
"""How long ending the processes may take after the drain."""

SYSTEM_PATH = ("/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin")

FORBIDDEN = '\\"'


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceFacts:
    """Everything that a service file says: the same facts give the same file.

    Attributes:
        program: the `mlxsup` that it starts: a path that outlives an upgrade.
        config: the configuration file.
        home: the home folder of the user that it runs as.
        user: that user's name.
        is_system: whether it is a service of the machine, which runs without a login.
        drain_s: how long running requests may take when it is stopped.
        runtime_dir: where its sockets are.
        log_dir: where its logs are.
        model_cache: the Hugging Face cache.
        variables: further variables of its environment.
        more_path: folders to look for programs in, besides the usual ones.
    """

    program: Path
    config: Path
    home: Path
    user: str
    is_system: bool
    drain_s: float
    runtime_dir: Path
    log_dir: Path
    model_cache: Path
    variables: tuple[tuple[str, str], ...] = ()
    more_path: tuple[str, ...] = ()

    @property
    def stop_s(self) -> int:
        """Return how long the service manager waits for its end, in seconds."""
        return math.ceil(self.drain_s) + END_S

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables that it is started with."""
        folders = dict.fromkeys([str(self.program.parent), *self.more_path, *SYSTEM_PATH])
        return {"PATH": ":".join(folders), **dict(self.variables)}

    @property
    def folders(self) -> tuple[Path, ...]:
        """Return the folders that it writes to, without those inside of others."""
        wanted = sorted({self.home / f".{NAME}", self.runtime_dir, self.log_dir, self.model_cache})
        return tuple(
            one for one in wanted if not any(one != o and one.is_relative_to(o) for o in wanted)
        )

    def check(self) -> None:
        """Refuse paths that no service file can express."""
        texts = [self.program, self.config, *self.folders, *self.environment.values()]
        for text in map(str, texts):
            try:
                text.encode()
            except UnicodeEncodeError:
                shown = text.encode("utf-8", "replace").decode()
                raise _unusable(f"{shown} is not UTF-8 text") from None
            if any(sign in FORBIDDEN or not sign.isprintable() for sign in text):
                raise _unusable(
                    f"{text!r} has a character that a service file cannot contain: a quotation "
                    "mark, a backslash or a control character"
                )


def _unusable(why: str) -> CliError:
    message, hint = f"cannot write a service file: {why}", "move or rename it"
    return CliError(message, code="unusable_path", hint=hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceState:
    """The service as its manager sees it, and as `--json` prints it.

    Attributes:
        state: the manager's own word, such as `active` or `not running`.
        pid: of the daemon; None if it does not run.
        is_enabled: whether it starts by itself.
        starts_at: `boot` or `login`.
        note: what the daemon has last said of itself; may be empty.
        last_exit: the exit code of the last daemon; None if unknown.
        restarts: how often the manager has started it again; None if unknown.
    """

    state: str
    pid: int | None
    is_enabled: bool
    starts_at: str
    note: str = ""
    last_exit: int | None = None
    restarts: int | None = None

    @property
    def is_on(self) -> bool:
        """True if it runs, and starts by itself."""
        return self.pid is not None and self.is_enabled


Steps = tuple[list[list[str]], list[list[str]]]
"""Commands of a service manager: those before and those after its file is written or removed."""


def read_file(path: Path) -> str | None:
    """Return a service file; None if there is none."""
    try:
        return path.read_bytes().decode("utf-8", "surrogateescape")
    except FileNotFoundError:
        return None


def call(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command of the service manager to its end, or say that there is none."""
    try:
        return subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
        )
    except FileNotFoundError:
        raise no_program(argv[0]) from None


def must(argv: Sequence[str], allowed: Collection[int] = (0,)) -> None:
    """Run a command that has to succeed, which these exit codes stand for."""
    done = call(argv)
    if done.returncode not in allowed:
        said = f": {words}" if (words := last_words(done)) else ""
        raise CliError(
            f"`{shlex.join(argv)}` failed with exit code {done.returncode}{said}",
            code="service_manager",
            hint="see `mlxsup service status`",
        )


def last_words(done: subprocess.CompletedProcess[str]) -> str:
    """Return the last line that a command has written."""
    return (done.stderr.strip() or done.stdout.strip()).rpartition("\n")[2]


def no_program(name: str) -> CliError:
    """Return the error for a service manager whose command is not there."""
    manager = "launchd" if name == "launchctl" else "systemd"
    return CliError(
        f"{manager} is not available, because {name} is not installed",
        code="no_service_manager",
        hint="use `mlxsup start --detach`, or run `mlxsup start` under your own service manager",
    )
