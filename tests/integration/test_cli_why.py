"""`mlxsup why` on a daemon that runs, on one that was killed, and in terminals of any width."""

from __future__ import annotations

import json
import os
import signal
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.cli.cli import run_cli
from support.client.streams import Reader
from support.daemon.daemon import Daemon, fake, row, wait_for_state
from support.daemon.faults import PATIENT
from support.eventually import eventually
from support.gateway.json_schemas import problems

PROMPT = "[[fault slow=0.01]] my secret diary"


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon({"m": fake(restart=PATIENT, aliases=["em"]), "other": fake()}) as daemon:
        with daemon.client() as client:
            for name in ("m", "other"):
                wait_for_state(client, name, "READY")
        yield daemon


def killed_in_an_answer(daemon: Daemon) -> str:
    """Kills the worker of `m` in the middle of an answer, which then ends; its id."""
    with daemon.client() as client:
        reader = Reader(client, "m", PROMPT, max_tokens=60)
        assert reader.has_started.wait(60)
        os.kill(row(client, "m")["pid"], signal.SIGKILL)
        assert reader.finished().resumed == 1
        return str(reader.stream.request_id)


def why(daemon: Daemon, *arguments: str) -> str:
    done = run_cli("why", *arguments, "--endpoint", daemon.endpoint)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_killed_worker_is_told_in_a_report_and_after_sigkill_of_the_daemon_itself(
    daemon: Daemon, tmp_path: Path
) -> None:
    request = killed_in_an_answer(daemon)
    check_report(daemon, tmp_path / "report.tar.gz")
    with daemon.client() as client:
        reader = Reader(client, "other", PROMPT, max_tokens=4000)
        assert reader.has_started.wait(60)
        pid = client.status()["pid"]
        # It is in the file before the daemon is killed.
        eventually(lambda: str(reader.stream.request_id) in written(daemon))
        daemon.kill()
    done = run_cli("why", "em", "--config", str(daemon.config))
    assert done.returncode == 0
    assert "this is from its flight recorder" in done.stderr
    assert f"the daemon (pid {pid}) was killed (SIGKILL)" in done.stdout
    assert "another program killed its process (SIGKILL)" in done.stdout
    assert f"{request} (#1), after " in done.stdout
    everything = why(daemon)
    assert "1 request ended with it:" in everything
    assert f"{reader.stream.request_id} (#" in everything
    assert "was lost with the daemon" in why(daemon, str(reader.stream.request_id))
    value = json.loads(why(daemon, "--json"))
    assert value["daemon"]["has_died"]
    daemon.start()
    told = why(daemon)
    assert told.startswith("the daemon (pid ")
    assert f"the daemon before it (pid {pid}) was killed (SIGKILL)" in told
    assert "another program killed its process (SIGKILL)" in why(daemon, "m")


def written(daemon: Daemon) -> str:
    return "".join(path.read_text() for path in daemon.logs.glob("mlxsup-flight*.jsonl"))


def check_report(daemon: Daemon, path: Path) -> None:
    """A report has no prompt, and is never written over a file."""
    arguments = ["why", "--report", str(path), "--endpoint", daemon.endpoint]
    done = run_cli(*arguments, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert problems(done.stdout, ["why"]) == []
    with tarfile.open(path) as archive:
        texts = {one.name: file.read() for one in archive if (file := archive.extractfile(one))}
    assert {"mlxsup-report/logs/m.log", "mlxsup-report/status.json"} <= set(texts)
    assert b"SIGKILL" in texts["mlxsup-report/flight.json"]
    assert not any(b"secret diary" in text for text in texts.values())
    again = run_cli(*arguments)
    assert (again.returncode, f"{path} already exists" in again.stderr) == (64, True)
