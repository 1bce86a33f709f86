"""The service under a real systemd: installed, killed, wedged, reloaded, stopped, removed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.daemon import toml_of
from support.eventually import eventually
from support.played_daemon import short_folder
from support.real_systemd import RealSystemd, why_not

pytestmark = [pytest.mark.slow, pytest.mark.skipif(why_not() != "", reason=why_not())]

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
