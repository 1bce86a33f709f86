"""The runtime folder: taken, stale, not ours, full, and the end of open files (P18, P19).

Of twenty claims at once one succeeds: tests/integration/test_supervisor_runtime_folder.py. Here
are whole daemons.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from io import FileIO
from pathlib import Path

import pytest

from mlxsup.supervisor.runtime_folder import RuntimeFolder, files_needed

from campaign.watch import Crowd
from support.client.streams import Reader
from support.daemon.daemon import Daemon, fake, row, wait_for_state
from support.daemon.faults import undisturbed
from support.eventually import eventually

SLOW = {"step_s": 0.01}


def start(daemon: Daemon, *prefix: str) -> subprocess.CompletedProcess[str]:
    """A start that is to fail."""
    return subprocess.run(
        [*prefix, *daemon.command("start", "--config", str(daemon.config))],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_four_more_daemons_at_once_name_the_first_which_loses_nothing_P19() -> None:
    with Daemon({"m": fake(fake=SLOW)}) as daemon, daemon.client() as client:
        running = Reader(client, "m", "runs", max_tokens=400).started()
        late = [
            subprocess.Popen(
                daemon.command("start", "--config", str(daemon.config)),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for _ in range(4)
        ]
        assert daemon.process is not None
        for process in late:
            _, said = process.communicate(timeout=60)
            assert process.returncode == 75
            assert f"pid {daemon.process.pid} is already running" in said
        assert running.finished().token_ids == undisturbed("runs", 400)
        assert row(client, "m")["generation"] == 1


def test_a_stale_socket_and_a_foreign_file_are_no_obstacle_P19() -> None:
    daemon = Daemon({"m": fake()})
    run = daemon.folder / "run"
    run.mkdir(mode=0o700)
    for name in ("client.sock", "w1.sock", "w1.sock.beat"):
        with socket.socket(socket.AF_UNIX) as stale:
            stale.bind(str(run / name))
    (run / "lock").write_text("4194303 never-lived\n")
    (run / "workers.json").write_text("{ half of a record")
    with daemon, daemon.client() as client:
        assert client.complete("m", prompt="x", max_tokens=2).finish_reason == "length"


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o777, 0o500])
def test_a_folder_that_is_not_0700_is_refused_with_what_to_do_P19(mode: int) -> None:
    daemon = Daemon({"m": fake()})
    run = daemon.folder / "run"
    run.mkdir()
    run.chmod(mode)
    done = start(daemon)
    assert done.returncode == 73
    assert f"chmod 0700 {run}" in done.stderr
    assert list(run.iterdir()) == [], "nothing was made in there"
    shutil.rmtree(daemon.folder)


def test_a_folder_of_another_user_is_refused_P19() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make a folder that belongs to somebody else")
    daemon = Daemon({"m": fake()})
    run = daemon.folder / "run"
    run.mkdir(mode=0o700)
    os.chown(run, 12345, 12345)
    done = start(daemon)
    assert done.returncode == 73
    assert "belongs to another user (uid 12345)" in done.stderr
    shutil.rmtree(daemon.folder)


# ---------------------------------------------------------------- a folder that is removed


def answers(daemon: Daemon) -> bool:
    return daemon.run("status").returncode == 0


def test_a_folder_that_is_removed_is_made_again_and_nothing_is_lost_P1_P19() -> None:
    with Daemon({"m": fake(fake=SLOW)}) as daemon, daemon.client() as client:
        pid = wait_for_state(client, "m", "READY")["pid"]
        running = Reader(client, "m", "runs", max_tokens=600).started()
        run = daemon.folder / "run"
        gone = run.rename(daemon.folder / "gone")  # in one step: the daemon may write into it
        shutil.rmtree(gone, ignore_errors=True)
        eventually(lambda: answers(daemon), timeout_s=30.0)
        assert run.stat().st_mode & 0o777 == 0o700
        late = start(daemon)
        assert late.returncode == 75, "the lock is this daemon's again"
        os.kill(pid, 9)
        assert running.finished().token_ids == undisturbed("runs", 600)
        assert row(client, "m")["generation"] == 2
        assert f"{row(client, 'm')['pid']}" in (run / "workers.json").read_text()
        assert "runtime folder made again" in (daemon.logs / "mlxsup.log").read_text()
        (run / "client.sock").unlink()
        eventually(lambda: answers(daemon), timeout_s=30.0)
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
            eventually(lambda: "runtime folder lost" in log.read_text(), timeout_s=30.0)
            os.kill(pid, 9)
            eventually(lambda: row(client, "m")["state"] == "BACKOFF", timeout_s=30.0)
            assert {path.name: path.stat().st_ino for path in run.iterdir()} == before
            assert (run / "workers.json").read_text() == "[]"
        other.release()
        # The other one has ended: the first takes the folder again, and its stream continues.
        assert running.finished().token_ids == undisturbed("runs", 1000)
        eventually(lambda: answers(daemon), timeout_s=30.0)
        assert log.read_text().count("runtime folder lost") == 1


# ---------------------------------------------------------------- a full disk


@pytest.fixture
def disk() -> Iterator[Daemon]:
    """A daemon whose runtime and log folders lie on a disk of 64 KiB."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("only root on Linux can mount a disk; /dev/full: test_supervisor_daemon.py")
    daemon = Daemon({"m": fake()})
    place = daemon.folder / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k,mode=0700", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        shutil.rmtree(daemon.folder)
        pytest.skip("mounting is not allowed here")
    try:
        yield daemon
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)
        shutil.rmtree(daemon.folder, ignore_errors=True)


def fill(place: Path) -> Path:
    """Leaves not one byte; returns what to remove."""
    ballast = place / "ballast"
    with ballast.open("ab", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        write_for_ever(file)
    return ballast


def write_for_ever(file: FileIO) -> None:
    """Until it raises."""
    while True:
        file.write(b"x" * 512)


def test_a_full_disk_refuses_a_start_and_stops_no_daemon_P1_P8(disk: Daemon) -> None:
    place = disk.folder / "disk"
    models = {"m": fake(fake=SLOW)}
    disk.logs = place / "logs"
    disk.write_config(models, {"runtime_dir": f"{place}/run"})
    ballast = fill(place)
    refused = start(disk)
    assert refused.returncode == 73
    assert refused.stderr.splitlines()[0].endswith("No space left on device")
    ballast.unlink()
    # Sockets take no room: the daemon's own stay where the client looks for them.
    disk.write_config(models)
    with disk, disk.client() as client:
        wait_for_state(client, "m", "READY")
        running = Reader(client, "m", "runs", max_tokens=300).started()
        ballast = fill(place)
        os.kill(row(client, "m")["pid"], 9)
        assert running.finished().token_ids == undisturbed("runs", 300)
        client.restart("m", now=True)
        assert row(client, "m")["generation"] == 3
        ballast.unlink()
        client.restart("m", now=True)
        eventually(lambda: "generation 4 pid" in (place / "logs" / "m.log").read_text())


# ---------------------------------------------------------------- no more open files


def test_too_few_open_files_are_refused_before_anything_is_made_P18() -> None:
    daemon = Daemon({"m": fake()})
    done = start(daemon, "sh", "-c", 'ulimit -n 128; exec "$@"', "sh")
    assert done.returncode == 73
    assert (
        "only 128 files may be open at once; a daemon needs 400 for its models (1)" in done.stderr
    )
    assert "ulimit -Hn" in done.stderr
    assert not (daemon.folder / "run").exists()
    shutil.rmtree(daemon.folder)


class CrampedDaemon(Daemon):
    """May open as few files as a daemon needs."""

    @staticmethod
    def command(*arguments: str) -> list[str]:
        """The command line, under the limit."""
        line = f'ulimit -n {files_needed(1)}; exec "$@"'
        return ["sh", "-c", line, "sh", *Daemon.command(*arguments)]


def test_connections_beyond_the_open_files_end_no_daemon_and_no_worker_P18() -> None:
    with CrampedDaemon({"m": fake(fake=SLOW)}) as daemon:
        with daemon.client() as client:
            wait_for_state(client, "m", "READY")
        with Crowd("storm", str(daemon.folder / "run" / "client.sock"), "3000", "1") as storm:
            assert storm.result()["connected"] == 3000
        eventually(lambda: serves(daemon), timeout_s=60.0)
        with daemon.client() as client:
            pid = row(client, "m")["pid"]
            os.kill(pid, 9)
            assert client.complete("m", prompt="x", max_tokens=2).finish_reason == "length"
            assert row(client, "m")["generation"] == 2


def serves(daemon: Daemon) -> bool:
    """Whether a new client is answered."""
    assert daemon.process is not None
    assert daemon.process.poll() is None, "a storm has ended the daemon"
    try:
        with daemon.client() as client:
            return client.complete("m", prompt="x", max_tokens=2).finish_reason == "length"
    except ConnectionError:
        return False
