"""Who is taken for the holder of a runtime folder."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlxsup.cli import connection as connection_module
from mlxsup.cli.connection import explain_connection_lost
from mlxsup.cli.lock_holder import LockHolder, lock_holder
from mlxsup.client import ConnectionLost


def test_who_has_the_lock_open_is_the_holder_and_a_used_pid_is_not(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.write_text(f"{os.getpid()} identity\n")
    endpoint = f"ipc://{tmp_path}/client.sock"
    assert lock_holder(endpoint) is None, "another process has that pid by now"
    with lock.open():
        assert lock_holder(endpoint) == LockHolder(
            pid=os.getpid(), is_stopped=False, is_beating=True
        )


def test_a_daemon_that_works_or_turns_away_is_not_one_to_be_killed_P24(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.write_text(f"{os.getpid()} identity\n")
    endpoint = f"ipc://{tmp_path}/client.sock"
    with lock.open():
        lost = ConnectionLost("no daemon answers", endpoint)
        assert "kill" not in explain_connection_lost(lost).hint, "it works"
        os.utime(lock, (0, 0))
        assert "kill" in explain_connection_lost(lost).hint, "it has done nothing since 1970"
        error = ConnectionLost("turned away", endpoint, "try again later", is_turned_away=True)
        turned_away = explain_connection_lost(error)
        assert (turned_away.message, turned_away.hint) == ("turned away", "try again later")


@pytest.mark.parametrize("written", ["", "no number\n", "-1 x\n", f"{2**22 - 1} gone\n"])
def test_what_names_no_process_is_no_holder(tmp_path: Path, written: str) -> None:
    (tmp_path / "lock").write_text(written)
    assert lock_holder(f"ipc://{tmp_path}/client.sock") is None
    assert lock_holder(f"ipc://{tmp_path}/nowhere/client.sock") is None


class OutOfReach:
    """A client whose daemon answers after so many tries."""

    def __init__(self, endpoint: str, failures: int) -> None:
        self.endpoint = endpoint
        self.failures = failures
        self.tries = 0

    def ping(self) -> None:
        self.tries += 1
        if self.tries <= self.failures:
            raise ConnectionLost("no daemon answers", self.endpoint)


def test_a_daemon_that_works_is_waited_for_and_one_that_does_not_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moment = 0.0

    def sleep(wait_s: float) -> None:
        nonlocal moment
        moment += wait_s

    clock = SimpleNamespace(monotonic=lambda: moment, sleep=sleep)
    monkeypatch.setattr(connection_module, "time", clock)
    lock = tmp_path / "lock"
    lock.write_text(f"{os.getpid()} identity\n")
    endpoint = f"ipc://{tmp_path}/client.sock"
    with lock.open():
        client: Any = OutOfReach(endpoint, 20)
        connection_module._reach(client, endpoint)
        assert (client.tries, moment < 3.0) == (21, True)
        client = OutOfReach(endpoint, 1000)
        with pytest.raises(ConnectionLost):
            connection_module._reach(client, endpoint)
        assert 25 < client.tries < 40, "three seconds"
    client = OutOfReach(endpoint, 1000)
    with pytest.raises(ConnectionLost):
        connection_module._reach(client, endpoint)
    assert client.tries == 1, "nobody holds the lock"
    os.utime(lock, (0, 0))
    client = OutOfReach(endpoint, 1000)
    connection_module._reach(client, endpoint)
    assert client.tries == 0, "the command finds that out itself"
