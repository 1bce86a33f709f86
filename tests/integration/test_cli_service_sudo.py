"""`mlxsup service install --system` under sudo: the service is that of whoever asks."""

from __future__ import annotations

import os
import pwd
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxsup.protocol.key_file import KeyPlace, add_key

from support.played_service_managers import PlayedServiceManagers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="systemd is played")


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
        "error: sudo does not reach the service manager of nobody",
        "hint: run it without sudo, or with --system",
    ]
    assert of_nobody.files() == []
