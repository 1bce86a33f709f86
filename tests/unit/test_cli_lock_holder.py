"""Who is taken for the holder of a runtime folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

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
