"""`mlxsup service` in a process that takes itself for a Mac's, with launchd played."""

from __future__ import annotations

import os
import plistlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mlxsup.cli import service
from mlxsup.cli.exit_status import CliError

from support.cli.cli import TIME_LIMIT_S, environment
from support.cli.played_service_managers import PlayedServiceManagers
from support.daemon import warm

PROGRAM = """
import sys
from mlxsup.cli.main import main
sys.platform = "darwin"
main(sys.argv[1:])
"""
RUNNING = (
    "printf '\\tstate = running\\n\\tpid = 4711\\n\\tlast exit code = 70: EX_SOFTWARE\\n"
    "\\t\\tstate = active\\n'"
)
PLIST = "Library/LaunchAgents/mlxsup.plist"


class Mac(PlayedServiceManagers):
    """The same, with launchd."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.plist = self.home / PLIST
        self.loaded = folder / "loaded"
        # Known from bootstrap to bootout; a domain is always there.
        self.answer("launchctl.bootstrap", f"touch {self.loaded}")
        self.answer("launchctl.bootout", f"rm {self.loaded}; exit 36")
        known = f'case "$2" in */mlxsup) [ -f {self.loaded} ] || exit 113;; esac'
        self.answer("launchctl.print", f"{known}\n{RUNNING}")

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """`mlxsup service` with these arguments."""
        path = f"{self.home.parent}/bin:/usr/bin:/bin"
        return warm.run_text(
            [sys.executable, "-c", PROGRAM, "service", *arguments],
            environment=environment(HOME=str(self.home), PATH=path, SUDO_USER="", **variables),
            timeout_s=TIME_LIMIT_S,
        )

    def job(self) -> dict[str, Any]:
        """What is installed."""
        job: dict[str, Any] = plistlib.loads(self.plist.read_bytes())
        return job


@pytest.fixture
def mac(tmp_path: Path) -> Mac:
    return Mac(tmp_path)


def done_by(mac: Mac) -> list[str]:
    """The commands that change something, without where."""
    return [call.split()[1] for call in mac.calls if call.split()[1] != "print"]


def test_install_twice_with_other_settings_and_uninstall(mac: Mac) -> None:
    done = mac.install()
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"installed: {mac.plist}", "it is running, pid 4711"]
    assert mac.job()["ProgramArguments"][1:] == ["start", "--service", "--config", str(mac.config)]
    assert (mac.home.parent / "logs").is_dir(), "launchd does not make it"
    assert done_by(mac) == ["bootstrap"]
    again = mac.value("install", "--config", str(mac.config))
    assert (again["is_changed"], done_by(mac)) == (False, [])
    mac.loaded.unlink()  # as after `launchctl bootout` by hand
    assert mac.install().stdout.startswith(f"started: {mac.plist}\n")
    assert done_by(mac) == ["bootstrap"]
    mac.write_config(drain_timeout_s=100)
    assert mac.install().returncode == 0
    assert done_by(mac) == ["bootout", "bootstrap"]
    assert mac.job()["ExitTimeOut"] == 115
    status = mac.value("status")
    assert (status["manager"], status["service"]["pid"]) == ("launchd", 4711)
    assert status["service"]["last_exit"] == 70
    log = f"log        tail -n 50 {mac.home.parent}/logs/service.out"
    assert log in mac.run("status").stdout.splitlines()
    done = mac.run("uninstall")
    assert (done.returncode, done.stdout) == (0, f"removed: {mac.plist}\n")
    assert done_by(mac) == ["bootout"]
    assert mac.files() == []


def test_uninstall_of_a_job_that_launchd_does_not_know_removes_the_file(mac: Mac) -> None:
    mac.install()
    mac.loaded.unlink()
    assert done_by(mac) == ["bootstrap"]
    assert mac.value("status")["service"]["state"] == "not loaded"
    assert mac.run("uninstall").returncode == 0
    assert (done_by(mac), mac.files()) == ([], [])


class Clock:
    """A clock of which half a minute passes with each look."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += 30.0


@pytest.mark.parametrize("looks", [20, 30])
def test_a_job_may_take_as_long_to_end_as_its_file_says(
    mac: Mac, monkeypatch: pytest.MonkeyPatch, looks: int
) -> None:
    mac.write_config(drain_timeout_s=600)
    assert mac.install().returncode == 0
    left = mac.loaded.with_name("left")
    mac.answer("launchctl.bootout", f"printf %0{looks}d 0 > {left}; exit 36")
    known = f"[ -s {left} ] || exit 113; truncate -s -1 {left}"
    mac.answer("launchctl.print", f'case "$2" in */mlxsup) {known};; esac')
    monkeypatch.setenv("PATH", f"{mac.home.parent}/bin:/usr/bin:/bin")
    monkeypatch.setattr(service, "time", Clock())
    job = service.Launchd(mac.home, is_system=False)
    bootout = ["launchctl", "bootout", f"gui/{os.getuid()}/mlxsup"]
    if looks == 20:
        job.carry_out(bootout)
    else:
        with pytest.raises(CliError, match=r"within 630 s"):
            job.carry_out(bootout)


@pytest.mark.parametrize("has_session", [True, False])
def test_the_job_is_the_graphical_session_s_if_there_is_one(mac: Mac, has_session: bool) -> None:
    """Over SSH there is none."""
    if not has_session:
        known = f"[ -f {mac.loaded} ] || exit 113"
        mac.answer("launchctl.print", f'case "$2" in gui/*) exit 113;; */mlxsup) {known};; esac')
    domain = f"{'gui' if has_session else 'user'}/{os.getuid()}"
    assert mac.install().returncode == 0
    changing = [call for call in mac.calls if call.split()[1] != "print"]
    assert changing == [f"launchctl bootstrap {domain} {mac.plist}"]
    assert mac.run("uninstall").returncode == 0
    changing = [call for call in mac.calls if call.split()[1] != "print"]
    assert changing == [f"launchctl bootout {domain}/mlxsup"]
