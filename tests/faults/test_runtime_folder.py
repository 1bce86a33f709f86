"""The runtime folder: stale, removed, or taken by another daemon (P1, P19). Real: whole daemons.

Which folders are refused: tests/unit/test_supervisor_runtime_folder.py; starts at once:
tests/integration/test_supervisor_process.py.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from contextlib import ExitStack

from mlxsup.supervisor.runtime_folder import RuntimeFolder

from support.client.streams import Reader
from support.daemon.daemon import Daemon, fake, row, wait_for_state
from support.daemon.faults import undisturbed
from support.eventually import eventually

SLOW = {"step_s": 0.01}


def answers(daemon: Daemon) -> bool:
    return daemon.run("status").returncode == 0


def test_a_folder_that_is_removed_is_made_again_and_nothing_is_lost_P1_P19() -> None:
    with Daemon({"m": fake(fake=SLOW)}) as daemon, daemon.client() as client:
        pid = wait_for_state(client, "m", "READY")["pid"]
        running = Reader(client, "m", "runs", max_tokens=600).started()
        run = daemon.folder / "run"
        gone = run.rename(daemon.folder / "gone")  # in one step: the daemon may write into it
        shutil.rmtree(gone, ignore_errors=True)
        eventually(lambda: answers(daemon))
        assert run.stat().st_mode & 0o777 == 0o700
        late = subprocess.run(
            daemon.command("start", "--config", str(daemon.config)),
            capture_output=True,
            timeout=60,
            check=False,
        )
        assert late.returncode == 75, "the lock is this daemon's again"
        os.kill(pid, 9)
        assert running.finished().token_ids == undisturbed("runs", 600)
        eventually(lambda: row(client, "m")["generation"] == 2)
        wait_for_state(client, "m", "READY")
        assert f"{row(client, 'm')['pid']}" in (run / "workers.json").read_text()
        assert "runtime folder made again" in (daemon.logs / "mlxsup.log").read_text()
        (run / "client.sock").unlink()
        eventually(lambda: answers(daemon))
        assert daemon.run("stop").returncode == 0
        assert not (run / "client.sock").exists()


def test_a_folder_that_another_daemon_has_taken_is_left_to_it_P19() -> None:
    """The window: the folder is gone, and another daemon, here the test, is faster than its own."""
    with Daemon({"m": fake(fake=SLOW)}) as daemon, daemon.client() as client:
        pid = wait_for_state(client, "m", "READY")["pid"]
        running = Reader(client, "m", "runs", max_tokens=1000).started()
        run, others = daemon.folder / "run", daemon.folder / "others"
        other = RuntimeFolder.claim(others)
        record = others / "workers.json"
        record.write_text("[]")
        with ExitStack() as sockets:
            for name in ("client.sock", "w2.sock"):
                one = sockets.enter_context(socket.socket(socket.AF_UNIX))
                one.bind(str(others / name))
            before = {path.name: path.stat().st_ino for path in others.iterdir()}
            run.rename(daemon.folder / "moved")
            others.rename(run)
            log = daemon.logs / "mlxsup.log"
            eventually(lambda: "runtime folder lost" in log.read_text())
            os.kill(pid, 9)
            eventually(lambda: row(client, "m")["state"] == "BACKOFF")
            assert {path.name: path.stat().st_ino for path in run.iterdir()} == before
            assert (run / "workers.json").read_text() == "[]"
        other.close()
        # The other one has ended: the first takes the folder again, and its stream continues.
        assert running.finished().token_ids == undisturbed("runs", 1000)
        eventually(lambda: answers(daemon))
        assert log.read_text().count("runtime folder lost") == 1
