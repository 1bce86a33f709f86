"""Other programs take memory, and give it back: a daemon that reads a played /proc."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxsup.client import Result

from support.daemon import fake, row, wait_for_state
from support.eventually import eventually
from support.scripted_daemon import ScriptedDaemon

MIB = 2**20
GIB = 2**30
SETUP = """
from functools import partial
daemon.run_daemon = partial(daemon.run_daemon, proc=Path({proc!r}))
"""
BUDGET = {"memory_budget": "2GiB", "min_residency_s": 0}


class Machine:
    """A machine of 16 GiB, half a GiB of which must stay available."""

    def __init__(self, folder: Path) -> None:
        self.proc = folder

    def has_available(self, size_bytes: int) -> None:
        """From now on so much is available."""
        new = self.proc / "new"
        new.write_text(f"MemTotal: {16 * GIB // 1024} kB\nMemAvailable: {size_bytes // 1024} kB\n")
        new.replace(self.proc / "meminfo")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    machine = Machine(tmp_path)
    machine.has_available(12 * GIB)
    return machine


@pytest.fixture
def daemon(machine: Machine) -> Iterator[ScriptedDaemon]:
    models = {
        "idle": fake(memory="300MiB", fake={"cache_bytes": 200 * MIB}),
        "busy": fake(memory="300MiB", fake={"step_s": 0.05}),
    }
    daemon = ScriptedDaemon(models, BUDGET).scripted(SETUP.format(proc=str(machine.proc)))
    with daemon:
        yield daemon


def test_idle_models_give_way_and_come_back_and_a_stream_does_not_notice(
    machine: Machine, daemon: ScriptedDaemon
) -> None:
    with daemon.client() as client, daemon.client() as watcher:
        for name in ("idle", "busy"):
            wait_for_state(client, name, "READY")
        cancelled = client.generate("idle", prompt="hi", max_tokens=4000)
        next(cancelled)
        cancelled.cancel()
        eventually(lambda: row(client, "idle")["cache_bytes"] == 200 * MIB)
        stream = client.generate("busy", prompt="go on", max_tokens=2000)
        next(stream)
        changes = watcher.events()
        watcher.ping()

        machine.has_available(0)
        seen = []
        for change in changes:
            seen.append((change["model"], change["to"], change["note"]))
            if change["to"] == "STOPPED":
                break
        assert [(model, to) for model, to, _ in seen] == [
            ("idle", "READY"), ("idle", "DRAINING"), ("idle", "STOPPING"), ("idle", "STOPPED"),
        ]  # fmt: skip
        assert seen[0][2].startswith("asked to give back 200.0 MiB kept for reuse: 600.0 MiB of ")
        assert "0.0 MiB is available on this machine, and 512.0 MiB must stay free" in seen[1][2]
        memory = client.status()["memory"]
        assert memory["budget_bytes"] == 2 * GIB
        assert memory["effective_budget_bytes"] < 300 * MIB, "what the busy one is measured at"
        assert memory["over_bytes"] > 0
        shown = daemon.run("status").stdout
        assert "memory is short, " in shown
        assert "more is reserved than that: models go once they can" in shown

        answers: list[Result] = []

        def ask() -> None:
            with daemon.client() as other:
                answers.append(other.complete("idle", prompt="hi", max_tokens=3))

        asking = threading.Thread(target=ask)
        asking.start()
        eventually(lambda: row(client, "idle")["memory_wait"])
        reason = row(client, "idle")["memory_wait"]["reason"]
        assert reason.endswith("other programs hold the rest of the memory budget")
        machine.has_available(12 * GIB)
        asking.join(60)
        assert [answer.finish_reason for answer in answers] == ["length"]
        memory = client.status()["memory"]
        assert (memory["effective_budget_bytes"], memory["shortage"]) == (2 * GIB, "")
        stream.cancel()
    log = daemon.log_text()
    assert "WARNING memory budget lowered" in log
    assert "INFO memory budget whole again" in log


def test_a_machine_that_does_not_say_what_is_available_serves_as_before(
    machine: Machine, daemon: ScriptedDaemon
) -> None:
    with daemon.client() as client:
        machine.has_available(0)
        eventually(lambda: client.status()["memory"]["shortage"])
        (machine.proc / "meminfo").unlink()
        eventually(lambda: not client.status()["memory"]["shortage"])
        assert client.complete("idle", prompt="hi", max_tokens=2).finish_reason == "length"
    assert daemon.log_text().count("available memory not read") == 1
