"""The daemon as a service of systemd or launchd: its file, its state, and how its manager is asked.

See systemd.service(5), systemd.exec(5), systemd.syntax(7) and launchd.plist(5).
"""

from __future__ import annotations

import math
import os
import plistlib
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.parsers.expat import ExpatError

from .exit_status import PERMANENT_EXITS, CliError

NAME = "mlxsup"

MARKER = f"Written by `{NAME} service install`; `{NAME} service uninstall` removes it."
"""Is in every file that we write. A file without it is not ours."""

END_S = 15
"""How long ending the processes may take after the drain."""

SYSTEM_PATH = ("/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin")


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
            if any(sign in '\\"' or not sign.isprintable() for sign in text):
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
        manager = "launchd" if argv[0] == "launchctl" else "systemd"
        message = f"{manager} is not available, because {argv[0]} is not installed"
        raise unreachable(message, WITHOUT_MANAGER) from None


def must(argv: Sequence[str], allowed: Collection[int] = (0,)) -> None:
    """Run a command that has to succeed, which these exit codes stand for."""
    done = call(argv)
    if done.returncode not in allowed:
        said = f": {words}" if (words := last_words(done)) else ""
        raise _failed(f"`{shlex.join(argv)}` failed with exit code {done.returncode}{said}")


def _failed(message: str) -> CliError:
    return CliError(message, code="service_manager", hint="see `mlxsup service status`")


def last_words(done: subprocess.CompletedProcess[str]) -> str:
    """Return the last line that a command has written."""
    return (done.stderr.strip() or done.stdout.strip()).rpartition("\n")[2]


WITHOUT_MANAGER = (
    "use `mlxsup start --detach`, or run `mlxsup start` under your own service manager"
)


def unreachable(message: str, hint: str) -> CliError:
    """Return the error for a service manager that cannot be asked."""
    return CliError(message, code="no_service_manager", hint=hint)


# ---------------------------------------------------------------- systemd

UNIT = f"{NAME}.service"

UNIT_TEXT = """\
# {marker}
[Unit]
Description=mlxsup, a server of MLX language models
{after}StartLimitIntervalSec=600
StartLimitBurst=5

[Service]
Type=notify
NotifyAccess=main
ExecStart=:{program} start --config {config}
ExecReload=:{program} reload --config {config}
{environment}WatchdogSec=10
Restart=on-failure
RestartSec=2
RestartPreventExitStatus={permanent}
KillMode=mixed
TimeoutStopSec={stop_s}
OOMPolicy=continue
LimitNOFILE=65536
{of_machine}
[Install]
WantedBy={target}.target
"""
"""Needs systemd 244 or later, as Debian has had since version 11. A colon before a command keeps
systemd from replacing `$NAME` in paths."""

HARDENING = """\
NoNewPrivileges=yes
ProtectSystem=strict
ProtectHome=read-only
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectControlGroups=yes
ProtectClock=yes
ProtectHostname=yes
RestrictSUIDSGID=yes
RestrictRealtime=yes
RestrictNamespaces=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6
LockPersonality=yes
SystemCallFilter=@system-service
SystemCallArchitectures=native
CapabilityBoundingSet=
UMask=0077
"""
"""Of a unit of the machine; a user's own systemd may not set most of these. Not among them:
PrivateDevices, because of GPUs, MemoryDenyWriteExecute, because kernels are compiled, and
MemoryMax, which would kill what the daemon would rather pause."""

TEMPORARY = (Path("/tmp"), Path("/var/tmp"))

CONTAINER_MARKS = (Path("/.dockerenv"), Path("/run/.containerenv"))

SHOWN = (
    "ActiveState", "SubState", "MainPID", "UnitFileState", "StatusText", "ExecMainStatus",
    "NRestarts",
)  # fmt: skip

EXEC = re.compile(r"^ExecStart=\s*[:@+!-]*(.*)$", re.MULTILINE)
"""The signs before the command are not part of it."""


def unit_text(facts: ServiceFacts) -> str:
    """Return the unit of the service."""
    return UNIT_TEXT.format(
        marker=MARKER,
        after="After=network.target\n" if facts.is_system else "",
        program=_quoted(str(facts.program)),
        config=_quoted(str(facts.config)),
        environment="".join(
            f"Environment={_quoted(f'{name}={value}')}\n"
            for name, value in facts.environment.items()
        ),
        permanent=" ".join(str(int(status)) for status in PERMANENT_EXITS),
        stop_s=facts.stop_s,
        of_machine=_lines_of_machine(facts) if facts.is_system else "",
        target="multi-user" if facts.is_system else "default",
    )


def _lines_of_machine(facts: ServiceFacts) -> str:
    paths = (facts.program, facts.config, facts.home, *facts.folders)
    is_temporary = any(path.is_relative_to(folder) for path in paths for folder in TEMPORARY)
    # What is below these folders would not be what the user's commands see there.
    private = "" if is_temporary else "PrivateTmp=yes\n"
    writable = "".join(f"ReadWritePaths={_quoted(f'-{folder}')}\n" for folder in facts.folders)
    return f"User={facts.user}\n{HARDENING}{private}{writable}"


def _quoted(text: str) -> str:
    """Return a word of a unit file: spaces and specifiers (`%h`) mean themselves."""
    return '"' + text.replace("%", "%%") + '"'


class Systemd:
    """The systemd of a user with this home folder, or of the machine; `path` is the unit's."""

    name = "systemd"

    def __init__(self, home: Path, *, is_system: bool) -> None:
        self._is_system = is_system
        if is_system:
            folder = Path("/etc/systemd/system")
        else:
            given = os.environ.get("XDG_CONFIG_HOME", "")
            folder = (Path(given) if os.path.isabs(given) else home / ".config") / "systemd/user"
        self.path = folder / UNIT

    text = staticmethod(unit_text)

    @staticmethod
    def command_in(text: str) -> list[str]:
        """Return the words of the command that a unit starts; none if it says none."""
        found = EXEC.search(text)
        try:
            words = shlex.split(found.group(1)) if found else []
        except ValueError:
            return []
        meant = {"%%": "%", "%h": str(Path.home())}
        return [re.sub("%[%h]", lambda found: meant[found[0]], word) for word in words]

    def install_commands(self, *, is_new: bool) -> Steps:
        """Return what is run around the writing of the unit; a daemon that runs is drained."""
        calls = [("enable", "--now", UNIT)] if is_new else [("enable", UNIT), ("restart", UNIT)]
        return [], [self._control(*words) for words in [("daemon-reload",), *calls]]

    def uninstall_commands(self) -> Steps:
        """Return what is run before and after the unit is removed."""
        return [self._control("disable", "--now", UNIT)], [self._control("daemon-reload")]

    carry_out = staticmethod(must)

    def check(self, instead: str) -> None:
        """Refuse to go on if systemd does not run or cannot be reached;
        `instead`, if it is not empty, is what may be run then."""
        done = call(self._control("is-system-running"))
        if done.stdout.strip() == "offline" or "not been booted with systemd" in done.stderr:
            where, hint = "on this machine", WITHOUT_MANAGER
            if any(mark.exists() for mark in CONTAINER_MARKS):
                where = "in this container"
                hint = "let the container run `mlxsup start`, with a restart policy"
            raise unreachable(f"systemd does not run {where}", hint)
        if not done.stdout.strip():
            cause = last_words(done) or f"exit code {done.returncode}"
            whose, hint = "systemd", "is it running?"
            if not self._is_system:
                whose = "the user's systemd"
                hint = "log in as the user (not with su)" + (f", or `{instead}`" if instead else "")
            raise unreachable(f"{whose} cannot be reached: {cause}", hint)

    def notes(self) -> list[str]:
        """Return what the user who has installed the service should know."""
        if not self._is_system and self._has_linger() is False:
            return [
                "it starts when you log in and ends when you log out; `loginctl "
                "enable-linger` lets it start with the machine"
            ]
        return []

    def state(self) -> ServiceState:
        """Return what systemd says of the service."""
        done = call(self._control("show", UNIT, f"--property={','.join(SHOWN)}"))
        pairs = (line.partition("=")[::2] for line in done.stdout.splitlines())
        shown = dict(pairs)
        pid = _number(shown.get("MainPID"))
        return ServiceState(
            state=f"{shown.get('ActiveState', 'unknown')} ({shown.get('SubState', 'unknown')})",
            pid=pid or None,
            is_enabled=shown.get("UnitFileState", "").startswith("enabled"),
            starts_at="boot" if self._is_system or self._has_linger() else "login",
            note=shown.get("StatusText", ""),
            last_exit=None if pid else _number(shown.get("ExecMainStatus")),
            restarts=_number(shown.get("NRestarts")),
        )

    def log_command(self) -> list[str]:
        """Return what prints the journal of the service."""
        return ["journalctl", "--unit" if self._is_system else "--user-unit", UNIT]

    def _control(self, *arguments: str) -> list[str]:
        return ["systemctl", *([] if self._is_system else ["--user"]), *arguments]

    def _has_linger(self) -> bool | None:
        """True if the user's systemd runs without a login; None if loginctl does not say."""
        try:
            done = call(["loginctl", "show-user", str(os.getuid()), "--property=Linger"])
        except CliError:
            return None
        # It does not know a user who neither lingers nor is logged in.
        return {"Linger=yes": True, "Linger=no": False}.get(done.stdout.strip())


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


# ---------------------------------------------------------------- launchd

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
        allowed_s: Any = read_job(read_file(self.path) or "").get("ExitTimeOut")
        is_limit = type(allowed_s) in (int, float) and allowed_s > 0
        limit_s = allowed_s + MORE_S if is_limit else UNKNOWN_LIMIT_S
        must(argv, allowed=(0, ENDS_LATER))
        give_up_at = time.monotonic() + limit_s
        while self._is_known():
            if time.monotonic() > give_up_at:
                raise _failed(f"launchd did not end the job within {limit_s:g} s")
            time.sleep(LOOK_INTERVAL_S)

    def check(self, instead: str) -> None:
        """Refuse to go on if launchd cannot be reached;
        `instead`, if it is not empty, is what may be run then."""
        done = call(["launchctl", "print", self._domain()])
        if done.returncode:
            hint = "log in as the user" + (f", or `{instead}`" if instead else "")
            raise unreachable(f"launchd cannot be reached: {last_words(done)}", hint)

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
        lines = (line.strip().partition(" = ")[::2] for line in done.stdout.splitlines())
        said = dict(reversed(list(lines)))  # the first counts
        return ServiceState(
            state=said.get("state", "unknown"),
            pid=_number(said.get("pid")),
            is_enabled=True,
            starts_at=starts_at,
            last_exit=_number(said.get("last exit code", "").partition(":")[0]),
        )

    def log_command(self) -> list[str]:
        """Return what prints the output of the job; nothing if its file does not say it."""
        output = read_job(read_file(self.path) or "").get("StandardErrorPath")
        return ["tail", "-n", "50", output] if isinstance(output, str) else []

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


Manager = Systemd | Launchd


def manager_here(home: Path, *, is_system: bool) -> Manager:
    """Return what starts services on this machine: of the user with this home folder, or of the
    machine."""
    kind = Launchd if sys.platform == "darwin" else Systemd
    return kind(home, is_system=is_system)
