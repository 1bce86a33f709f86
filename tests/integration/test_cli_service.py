"""`service` with service managers that the test plays."""

from __future__ import annotations

import json
import os
import pwd
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxsup.cli.service import MARKER
from mlxsup.protocol.key_file import KeyPlace, add_key

from support.cli.cli import run_cli
from support.cli.played_service_managers import PlayedServiceManagers
from support.daemon.daemon import Daemon, fake
from support.gateway.json_schemas import problems

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="systemd is played")

ENABLED = [
    "systemctl --user daemon-reload",
    "systemctl --user enable --now mlxsup.service",
]
REPLACED = [
    "systemctl --user daemon-reload",
    "systemctl --user enable mlxsup.service",
    "systemctl --user restart mlxsup.service",
]
UNIT = ".config/systemd/user/mlxsup.service"


@pytest.fixture
def played(tmp_path: Path) -> PlayedServiceManagers:
    return PlayedServiceManagers(tmp_path)


def changes(calls: list[str]) -> list[str]:
    """Those that change something."""
    asking = ("show", "is-system-running", "show-user")
    return [call for call in calls if not any(word in call.split() for word in asking)]


# ---------------------------------------------------------------- install


def test_install_writes_the_unit_and_starts_it_once(played: PlayedServiceManagers) -> None:
    done = played.install()
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"installed: {played.unit}",
        "it is active (running), pid 4711",
    ]
    assert done.stderr.splitlines() == ENABLED
    assert changes(played.calls) == ENABLED
    assert played.files() == [UNIT]
    text = played.unit.read_text()
    assert f'--config "{played.config}"' in text
    assert played.unit.stat().st_mode & 0o777 == 0o644
    made = [played.home / ".mlxsup", played.config.parent / "run", played.config.parent / "logs"]
    assert [one.stat().st_mode & 0o777 for one in made] == [0o700] * 3, "or no daemon starts there"
    assert (played.home / ".cache/huggingface/hub").is_dir(), "or a unit of root may not write it"
    written_at = played.unit.stat().st_mtime_ns
    again = played.install()
    assert again.returncode == 0
    assert again.stdout.startswith(f"already installed: {played.unit}; nothing was changed\n")
    assert changes(played.calls) == []
    assert played.unit.stat().st_mtime_ns == written_at


def test_one_that_does_not_run_is_started_by_another_install(played: PlayedServiceManagers) -> None:
    """As after a first start that has failed."""
    played.answer("systemctl.enable", "exit 1")
    assert played.install().returncode == 1
    played.answer("systemctl.enable", "")
    played.answer("systemctl.show", "printf 'ActiveState=inactive\\nSubState=dead\\nMainPID=0\\n'")
    assert played.calls
    done = played.install()
    assert (done.returncode, changes(played.calls)) == (0, REPLACED)
    assert done.stdout.startswith(f"started: {played.unit}\n")


def test_other_settings_are_shown_and_take_effect(played: PlayedServiceManagers) -> None:
    played.install()
    played.write_config(drain_timeout_s=100)
    played.unit.write_text(played.unit.read_text().replace('=:"', '=:"/other'))
    assert played.calls
    done = played.install()
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, f"installed: {played.unit}")
    shown = done.stderr.splitlines()
    assert {"-TimeoutStopSec=45", "+TimeoutStopSec=115"} < set(shown)
    assert any(line.startswith('-ExecStart=:"/other') for line in shown), "another program"
    assert changes(played.calls) == REPLACED
    assert "TimeoutStopSec=115" in played.unit.read_text()


@pytest.mark.parametrize("command", ["install", "uninstall"])
def test_a_file_of_another_program_stays(played: PlayedServiceManagers, command: str) -> None:
    played.unit.parent.mkdir(parents=True)
    played.unit.write_text("[Service]\nExecStart=/bin/true\n")
    where = ["--config", str(played.config)] if command == "install" else []
    done = played.run(command, *where, "--json")
    assert (done.returncode, done.stderr) == (1, "")
    assert problems(done.stdout, [], is_error=True) == []
    error = json.loads(done.stdout)["error"]
    assert error["code"] == "foreign_service"
    assert "was not written by mlxsup; nothing was changed" in error["message"]
    assert (played.files(), changes(played.calls)) == ([UNIT], [])


def test_a_dry_run_prints_the_file_and_does_nothing(played: PlayedServiceManagers) -> None:
    for program in ("systemctl", "loginctl"):
        played.remove(program)
    done = played.install("--dry-run")
    assert done.returncode == 0
    assert done.stdout.startswith(f"# {MARKER}\n[Unit]\n")
    assert done.stderr.splitlines() == [
        f"would write {played.unit}:",
        *[f"would run {command}" for command in ENABLED],
    ]
    assert (played.files(), played.calls) == ([], [])
    value = played.value("install", "--config", str(played.config), "--dry-run")
    assert value["text"] == done.stdout
    assert [" ".join(command) for command in value["commands"]] == ENABLED
    assert (value["is_changed"], value["service"]) == (False, None)


def test_it_says_that_the_service_ends_with_the_login(played: PlayedServiceManagers) -> None:
    played.answer("loginctl.show-user", "echo Linger=no")
    assert "loginctl enable-linger" in played.install().stderr
    assert played.value("status")["service"]["starts_at"] == "login"


def test_a_daemon_that_is_no_service_is_named_and_that_of_the_service_is_no_stranger(
    played: PlayedServiceManagers,
) -> None:
    with Daemon({"m": fake()}) as daemon:
        assert daemon.process is not None
        install = ["install", "--config", str(daemon.config)]
        done = played.run(*install)
        assert done.returncode == 75
        assert f"(pid {daemon.process.pid})" in done.stderr
        assert f"stop it with `mlxsup stop --config {daemon.config}`" in done.stderr
        assert played.files() == []
        played.unit.parent.mkdir(parents=True)
        played.unit.write_text(played.run(*install, "--dry-run").stdout)
        again = played.run(*install)
        assert (again.returncode, again.stdout.split(":")[0]) == (0, "already installed")


def test_a_command_that_fails_is_named_with_its_last_words(played: PlayedServiceManagers) -> None:
    played.answer("systemctl.enable", "echo 'Job failed.' >&2; exit 1")
    done = played.install()
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-2:] == [
        "error: `systemctl --user enable --now mlxsup.service` failed with exit code 1:"
        " Job failed.",
        "hint: see `mlxsup service status`",
    ]


# ---------------------------------------------------------------- no service manager


NO_BUS = "Failed to connect to bus: No medium found"


@pytest.mark.parametrize(
    ("answer", "error", "hint"),
    [
        ("echo offline; exit 1", "systemd does not run ", "mlxsup start"),
        (
            f"echo '{NO_BUS}' >&2; exit 1",
            f"the user's systemd cannot be reached: {NO_BUS}",
            "service install --system --config ",
        ),
    ],
)
def test_a_systemd_that_does_not_answer_gets_one_sentence_and_the_next_step(
    played: PlayedServiceManagers, answer: str, error: str, hint: str
) -> None:
    played.answer("systemctl.is-system-running", answer)
    done = played.install()
    assert (done.returncode, done.stdout) == (1, "")
    first, second = done.stderr.splitlines()
    assert first.startswith(f"error: {error}")
    assert hint in second
    assert played.files() == []


@pytest.mark.parametrize("command", ["install", "uninstall", "status"])
def test_a_machine_without_systemctl(played: PlayedServiceManagers, command: str) -> None:
    played.install()
    played.remove("systemctl")
    where = ["--config", str(played.config)] if command == "install" else []
    done = played.run(command, *where, PATH=f"{played.home.parent}/bin")
    assert done.returncode == 1
    assert done.stderr.splitlines()[0].startswith("error: systemd is not available, because ")
    assert played.unit.exists()


def test_without_a_configuration_it_says_how_to_get_one(played: PlayedServiceManagers) -> None:
    for more in ([], ["--config", str(played.home / "none.toml")]):
        done = played.run("install", *more)
        assert done.returncode == 78
        assert "mlxsup init" in done.stderr
    played.config.write_text("nonsense = 1\n")
    assert played.install().returncode == 78
    assert played.files() == []


# ---------------------------------------------------------------- uninstall, status


def test_uninstall_stops_and_removes_what_install_has_written(
    played: PlayedServiceManagers,
) -> None:
    played.install()
    assert played.calls
    removed = ["systemctl --user disable --now mlxsup.service", "systemctl --user daemon-reload"]
    done = played.run("uninstall")
    assert (done.returncode, done.stdout) == (0, f"removed: {played.unit}\n")
    assert changes(played.calls) == removed
    assert played.files() == []
    again = played.value("uninstall")
    assert (again["is_removed"], again["commands"], changes(played.calls)) == (False, [], [])


def test_status_shows_what_the_manager_knows(played: PlayedServiceManagers) -> None:
    done = played.run("status")
    assert (done.returncode, done.stdout) == (0, f"not installed: {played.unit} does not exist\n")
    assert played.value("status")["service"] is None
    played.install()
    done = played.run("status")
    assert done.returncode == 0
    assert done.stdout.splitlines()[:5] == [
        "state      active (running)",
        "pid        4711",
        "says       1 READY",
        "restarts   2",
        "starts     at boot",
    ]
    value = played.value("status")
    assert value["service"]["pid"] == 4711
    assert value["program"].endswith("/mlxsup")
    assert value["service"]["last_exit"] is None, "it runs"
    ended = "ActiveState=failed\\nSubState=failed\\nMainPID=0\\nExecMainStatus=78\\n"
    played.answer("systemctl.show", f"printf '{ended}'")
    done = played.run("status")
    assert done.returncode == 0
    assert "last exit  78" in done.stdout.splitlines()
    assert "pid" not in done.stdout
    assert "log        journalctl --user-unit mlxsup.service" in done.stdout.splitlines()
    assert "its log may show why it does not run" in done.stderr


# ---------------------------------------------------------------- start --service


def test_launchd_is_not_asked_to_try_again_what_cannot_work(tmp_path: Path) -> None:
    done = run_cli("start", "--service", "--config", str(tmp_path / "none.toml"))
    assert done.returncode == 0
    assert done.stderr.splitlines()[0] == f"error: {tmp_path}/none.toml does not exist"


@pytest.fixture
def of_nobody() -> Iterator[PlayedServiceManagers]:
    """A home folder that root can give away to the user nobody."""
    with tempfile.TemporaryDirectory() as folder:
        yield PlayedServiceManagers(Path(folder))


def give_away(folder: Path) -> None:
    """Makes it, and all that is in it, the user nobody's."""
    user = pwd.getpwnam("nobody")
    for parent, _, files in os.walk(folder):
        for one in (parent, *(os.path.join(parent, file) for file in files)):
            os.chown(one, user.pw_uid, user.pw_gid)


def test_a_service_of_the_machine_runs_as_the_user_who_asks(
    of_nobody: PlayedServiceManagers,
) -> None:
    if os.geteuid() == 0:
        give_away(of_nobody.config.parent)
    done = of_nobody.install("--system", "--dry-run", SUDO_USER="nobody")
    assert done.returncode == 0, done.stderr
    assert "User=nobody\n" in done.stdout
    assert "would write /etc/systemd/system/mlxsup.service:" in done.stderr
    assert "would run systemctl enable --now mlxsup.service" in done.stderr
    assert 'ReadWritePaths="-/nonexistent/.mlxsup"' in done.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can play sudo")
def test_under_sudo_files_are_read_as_the_user_as_whom_the_daemon_will_read_them(
    of_nobody: PlayedServiceManagers,
) -> None:
    folder = of_nobody.config.parent
    of_nobody.config.write_text(
        '[supervisor]\nruntime_dir = "run"\n[gateway]\nlisten = "0.0.0.0:8484"\n'
        '[models.m]\nengine = "fake"\n'
    )
    (folder / "run").mkdir(mode=0o700)
    add_key(
        KeyPlace.beside(of_nobody.config, folder / "run"),
        name="k", account="k", is_operator=False, created="2026-01-01T00:00:00Z",
    )  # fmt: skip
    give_away(folder)
    done = of_nobody.install("--system", "--dry-run", SUDO_USER="nobody")
    assert done.returncode == 0, done.stderr


def test_sudo_without_the_system_is_refused_before_anything_is_written(
    of_nobody: PlayedServiceManagers,
) -> None:
    done = of_nobody.install(SUDO_USER="nobody")
    if done.returncode == 0:
        pytest.skip("only root is taken for somebody else")
    assert done.returncode == 64
    assert done.stderr.splitlines() == [
        "error: sudo cannot reach the service manager of nobody",
        "hint: run this without sudo, or with --system",
    ]
    assert of_nobody.files() == []
