"""Who is next on a real daemon: processes and listed names are accounts, classes come in order."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from mlxsup.client import Client, RequestError

from support.cli import command, run_cli
from support.daemon import Daemon, fake, row, wait_for_state
from support.eventually import eventually
from support.streams import Reader

CLIENTS = """
[clients.nightly]
priority = "batch"
max_priority = "normal"
[clients.alice]
weight = 2
"""


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """One row, held by an answer without an end; five may wait for each client."""
    models = {"m": fake(max_concurrency=1, fake={"step_s": 0.1})}
    daemon = Daemon(models, {"max_queue_per_client": 5})
    with daemon.config.open("a") as config:
        config.write(CLIENTS)
    with daemon, daemon.client() as client:
        wait_for_state(client, "m", "READY")
        held = client.generate("m", prompt="held")
        eventually(lambda: row(client, "m")["running"] == [held.request_id])
        yield daemon
        held.cancel()
        for _ in held:
            pass


def line(client: Client) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = row(client, "m")["line"]
    return found


def test_connections_of_this_process_are_one_account_and_a_listed_name_is_another(
    daemon: Daemon,
) -> None:
    with daemon.client() as one, daemon.client() as two:
        readers = [
            Reader(client, "m", "x", max_tokens=1, client=f"invented {number}")
            for number, client in enumerate((one, two, one, two, one))
        ]
        eventually(lambda: row(one, "m")["queued"] == 5)
        with pytest.raises(RequestError) as caught:
            two.complete("m", prompt="x", max_tokens=1)
        assert caught.value.detail["limit"] == "max_queue_per_client"
        listed = Reader(two, "m", "x", max_tokens=1, client="alice")
        eventually(lambda: row(one, "m")["queued"] == 6)
        waiting = one.status()["queue"]["per_client"]
        [process] = {name for name in waiting if name != "alice"}
        assert process.startswith(f"process {os.getpid()}@")
        assert waiting == {process: 5, "alice": 1}
        for reader in (*readers, listed):
            reader.stream.cancel()
            reader.finished()


def test_another_process_has_its_own_account(daemon: Daemon) -> None:
    with daemon.client() as client:
        readers = [Reader(client, "m", "x", max_tokens=1) for _ in range(5)]
        eventually(lambda: row(client, "m")["queued"] == 5)
        done = run_cli(
            "generate", "m", "x", "--max-tokens", "1", "--timeout", "0.5s",
            "--endpoint", daemon.endpoint, "--json",
        )  # fmt: skip
        assert json.loads(done.stdout)["error"]["code"] == "deadline_exceeded", "it could wait"
        for reader in readers:
            reader.stream.cancel()
            reader.finished()


def test_classes_come_in_order_and_may_be_changed_by_hand(daemon: Daemon) -> None:
    with daemon.client() as client:
        asked = {
            name: Reader(client, "m", name, max_tokens=1, **more)
            for name, more in (
                ("nightly", {"client": "nightly"}),
                ("normal", {}),
                ("batch", {"priority": "batch"}),
                ("urgent", {"priority": "interactive"}),
            )
        }
        ids = {reader.stream.request_id: name for name, reader in asked.items()}
        eventually(lambda: row(client, "m")["queued"] == 4)
        assert [ids[one["id"]] for one in line(client)] == ["urgent", "normal", "nightly", "batch"]
        done = run_cli(
            "prioritize", asked["batch"].stream.request_id, "interactive",
            "--endpoint", daemon.endpoint,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")
        id = asked["batch"].stream.request_id
        assert done.stdout == f"{id} waits for m as interactive (was batch)\n"
        assert [ids[one["id"]] for one in line(client)] == ["batch", "urgent", "normal", "nightly"]
        number = next(one["number"] for one in line(client) if ids[one["id"]] == "nightly")
        assert client.prioritize(number, "interactive")["client"] == "nightly"
        shown = run_cli("status", "--endpoint", daemon.endpoint).stdout
        assert "waiting: 3 interactive, 1 normal" in shown
        for reader in asked.values():
            reader.stream.cancel()
            reader.finished()


def test_commands_of_one_terminal_are_one_account_and_a_program_is_its_own(daemon: Daemon) -> None:
    generate = command("generate", "m", "x", "--endpoint", daemon.endpoint)
    named = [*generate, "--client", "alice"]
    lines = [f"{shlex.join(one)} &" for one in (generate, generate, named)]
    # A session of its own: that of the tests may be led from outside their container.
    shell = ["sh", "-c", "\n".join([*lines, "wait"])]
    with daemon.client() as client, subprocess.Popen(shell, start_new_session=True) as terminal:
        program = Reader(client, "m", "x", max_tokens=1)
        try:
            eventually(lambda: row(client, "m")["queued"] == 4)
            accounts = sorted(one["client"].partition(" ")[0] for one in line(client))
            assert accounts == ["alice", "process", "terminal", "terminal"]
            assert len({one["client"] for one in line(client)}) == 3
        finally:
            os.killpg(terminal.pid, signal.SIGTERM)
            program.stream.cancel()
            program.finished()


def test_a_class_that_a_client_may_not_use_is_refused(daemon: Daemon) -> None:
    done = run_cli(
        "generate", "m", "x", "--client", "nightly", "--priority", "interactive",
        "--endpoint", daemon.endpoint,
    )  # fmt: skip
    assert done.returncode == 1
    assert "priority interactive is above what this client may use: send normal" in done.stderr
    assert "raise max_priority in [clients.nightly] and reload" in done.stderr


def test_a_reload_changes_what_clients_are_granted(daemon: Daemon) -> None:
    with daemon.client() as client:
        text = daemon.config.read_text()
        daemon.config.write_text(text.replace('max_priority = "normal"', ""))
        client.reload()
        urgent = Reader(client, "m", "x", client="nightly", priority="interactive", max_tokens=1)
        eventually(lambda: row(client, "m")["queued_per_class"]["interactive"] == 1)
        urgent.stream.cancel()
        urgent.finished()
        daemon.config.write_text(text.replace('"batch"', '"urgent"'))
        with pytest.raises(RequestError) as caught:
            client.reload()
        assert 'clients.nightly.priority takes "interactive", "normal" or "batch"' in str(
            caught.value
        )
