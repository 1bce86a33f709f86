"""The service under a real systemd, and what systemd says of the units."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from mlxsup.cli.service import unit_text

from support.cli.cli import environment
from support.cli.service_facts import facts
from support.daemon.daemon import toml_of
from support.daemon.played_daemon import short_folder
from support.eventually import eventually

ANALYZE = shutil.which("systemd-analyze")

pytestmark = pytest.mark.skipif(ANALYZE is None, reason="needs systemd-analyze")

MOST_EXPOSED = 3.0
"""Of 10; a unit without any hardening has 9.6."""


def analyze(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    assert ANALYZE is not None
    return subprocess.run(
        [ANALYZE, *arguments],
        env={**os.environ, "XDG_RUNTIME_DIR": str(folder)},  # or it knows no user
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def written(folder: Path, *, is_system: bool, name: str = "mlxsup") -> Path:
    """A unit whose program exists, with everything in its path that a unit file could misread."""
    program = folder / "my %h $HOME" / name
    program.parent.mkdir(exist_ok=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit = folder / "mlxsup.service"
    odd = facts(program=program, config=folder / "a %h $b.toml", is_system=is_system, user="root")
    unit.write_text(unit_text(odd))
    return unit


@pytest.mark.parametrize("is_system", [False, True])
def test_systemd_has_nothing_to_say_of_a_unit(tmp_path: Path, is_system: bool) -> None:
    scope = [] if is_system else ["--user"]
    done = analyze(
        tmp_path, "verify", "--man=no", *scope, str(written(tmp_path, is_system=is_system))
    )
    assert (done.returncode, ours(done)) == (0, [])


def test_what_systemd_does_not_know_would_be_found(tmp_path: Path) -> None:
    unit = written(tmp_path, is_system=True)
    unit.write_text(unit.read_text().replace("WatchdogSec=10", "WatchdogSeconds=10"))
    done = analyze(tmp_path, "verify", "--man=no", str(unit))
    assert any("WatchdogSeconds" in line for line in ours(done))


def ours(done: subprocess.CompletedProcess[str]) -> list[str]:
    """What it says of our unit, and not of those of the machine."""
    return [line for line in done.stderr.splitlines() if "mlxsup" in line or "rror" in line]


def test_a_unit_of_the_machine_exposes_little(tmp_path: Path) -> None:
    unit = written(tmp_path, is_system=True)
    done = analyze(tmp_path, "security", "--offline=true", "--json=short", str(unit))
    assert done.returncode == 0, done.stderr
    exposure = sum(float(row["exposure"] or 0) for row in json.loads(done.stdout))
    shown = analyze(tmp_path, "security", "--offline=true", str(unit)).stdout
    overall = float(shown.rpartition("mlxsup.service: ")[2].split()[0])
    assert exposure > 0
    assert overall <= MOST_EXPOSED


SYSTEMD = Path("/lib/systemd/systemd")
HIERARCHY = Path("/sys/fs/cgroup/systemd")
TIME_LIMIT_S = 120.0

INIT = """
echo $$ > {cgroup}/cgroup.procs
mount -t tmpfs tmpfs /run
mkdir -p /run/systemd/system
{systemd} --user --unit=basic.target --log-target=console --log-level=notice &
wait
"""


class RealSystemd:
    """A user's systemd that is real, in namespaces that end with the test.

    It needs root on Linux, and a kernel that lets root make namespaces. Nothing of the machine's
    own systemd, if there is one, takes part: /run is empty there, and only units of users start.

    Args:
        folder: for its sockets and the user's home; its path is short.
    """

    def __init__(self, folder: Path) -> None:
        self.home = folder / "home"
        runtime = folder / "run"
        for one in (self.home, runtime):
            one.mkdir(mode=0o700)
        self._private = runtime / "systemd" / "private"
        self._cgroup = HIERARCHY / f"mlxsup-test-{os.getpid()}"
        self._variables = {
            "HOME": str(self.home), "XDG_CACHE_HOME": str(self.home / ".cache"),
            "XDG_RUNTIME_DIR": str(runtime), "SUDO_USER": "",
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin:/usr/sbin:/sbin",
        }  # fmt: skip
        self._log = folder / "systemd.log"

    def __enter__(self) -> Self:
        self._cgroup.mkdir()
        init = INIT.format(cgroup=self._cgroup, systemd=SYSTEMD)
        namespaces = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [*namespaces, "/bin/sh", "-c", init],
                env=environment(**self._variables),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        eventually(self._is_there, timeout_s=TIME_LIMIT_S)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            print(self._log.read_text())
        self._process.send_signal(signal.SIGKILL)  # and with it everything in its namespace
        self._process.wait()
        eventually(self._has_removed_cgroup, timeout_s=TIME_LIMIT_S)

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Runs a command as that user, to its end."""
        [init] = self._children()
        inside = ["nsenter", "--mount", "--pid", "--target", str(init), *command]
        return subprocess.run(
            inside,
            env=environment(**self._variables),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT_S,
            check=False,
        )

    def show(self, name: str) -> str:
        """A property of the service."""
        done = self.run("systemctl", "--user", "show", "mlxsup.service", f"--property={name}")
        return done.stdout.strip().removeprefix(f"{name}=")

    def _children(self) -> list[int]:
        path = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        return [int(pid) for pid in path.read_text().split()]

    def _is_there(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()
        return self._private.exists()

    def _has_removed_cgroup(self) -> bool:
        for folder, _, _ in os.walk(self._cgroup, topdown=False):
            try:
                os.rmdir(folder)
            except OSError:  # its processes are ending
                return False
        return True


MODEL = {'models."m"': {"engine": "fake", "fake": {"step_s": 0.02}}}
TOKENS = 500
"""Of the answer that runs during a stop: ten seconds."""


@pytest.fixture(scope="module")
def systemd() -> Iterator[RealSystemd]:
    with short_folder() as folder, RealSystemd(folder) as systemd:
        yield systemd


@pytest.fixture(scope="module")
def config(systemd: RealSystemd) -> Path:
    path = systemd.home / "config.toml"
    path.write_text(toml_of(MODEL))
    return path


def pid_of(systemd: RealSystemd) -> int:
    """The daemon's, as its own namespace has it."""
    return int(systemd.show("MainPID"))


def test_a_service_lives_as_it_should(systemd: RealSystemd, config: Path) -> None:
    done = systemd.run("mlxsup", "service", "install", "--config", str(config))
    assert done.returncode == 0, done.stderr
    # enable --now has returned, so READY was heard.
    assert (systemd.show("ActiveState"), systemd.show("SubState")) == ("active", "running")
    eventually(lambda: systemd.show("StatusText") == "1 READY")
    first = pid_of(systemd)

    # It is killed, and comes back.
    assert systemd.run("kill", "-KILL", str(first)).returncode == 0
    eventually(lambda: pid_of(systemd) not in (0, first))
    eventually(lambda: systemd.show("StatusText") == "1 READY")
    assert systemd.show("NRestarts") == "1"

    # Its loop stands still, and the watchdog ends it.
    second = pid_of(systemd)
    assert systemd.run("kill", "-STOP", str(second)).returncode == 0
    eventually(lambda: pid_of(systemd) not in (0, second))
    eventually(lambda: systemd.show("StatusText") == "1 READY")
    assert systemd.show("NRestarts") == "2"

    # A reload, a refused one, and what the status says of that.
    assert systemd.run("systemctl", "--user", "reload", "mlxsup").returncode == 0
    sound = config.read_text()
    config.write_text("nonsense = 1\n")
    assert systemd.run("systemctl", "--user", "reload", "mlxsup").returncode != 0
    eventually(lambda: "reload refused" in systemd.show("StatusText"))
    assert systemd.show("ActiveState") == "active"

    # A configuration that is wrong is not tried again.
    systemd.run("systemctl", "--user", "restart", "mlxsup")
    assert systemd.show("ActiveState") == "failed"
    assert systemd.show("ExecMainStatus") == "78"
    config.write_text(sound)

    # It is stopped and removed while an answer runs, which finishes before.
    assert systemd.run("systemctl", "--user", "start", "mlxsup").returncode == 0
    answer, code = systemd.home / "answer", systemd.home / "code"
    generate = f"mlxsup generate m hello --max-tokens {TOKENS} --config {config} > {answer}"
    background = f"({generate}; echo $? > {code}) > {systemd.home}/errors 2>&1 &"
    assert systemd.run("sh", "-c", background).returncode == 0
    eventually(lambda: answer.exists() and answer.read_text() != "")
    done = systemd.run("mlxsup", "service", "uninstall")
    assert done.returncode == 0, done.stderr
    eventually(lambda: code.exists() and code.read_text() == "0\n")
    log = (systemd.home / ".mlxsup/logs/mlxsup.log").read_text()
    signalled = log.rindex("signal received signal=SIGTERM")
    assert "outcome=length prompt_tokens=" in log[signalled:]
    assert f"completion_tokens={TOKENS}" in log[signalled:]
    assert systemd.show("LoadState") == "not-found"
    assert systemd.show("MainPID") == "0"
    assert not (systemd.home / ".config/systemd/user/mlxsup.service").exists()
