"""Spare workers of a real daemon: taken over by a restart, replaced after a death, gone with it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from mlxsup.client import Client

from support.daemon import Daemon, fake, row
from support.eventually import eventually
from support.streams import Reader
from support.tiny_model import make_tiny_model

pytestmark = pytest.mark.mlx

WAIT_S = 120.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "m", seed=3)


def waiting(client: Client) -> list[int]:
    """The pids of the spare workers that wait for a load."""
    workers: list[dict[str, Any]] = client.status()["spares"]["workers"]
    return [worker["pid"] for worker in workers if worker["state"] == "waiting"]


def one_waiting(client: Client, *, after: int | None = None) -> int:
    """The pid of the only one, once it waits, and is another one than that before it."""
    found: list[int] = []

    def waits() -> bool:
        found[:] = waiting(client)
        return len(found) == 1 and found != [after]

    eventually(waits, timeout_s=WAIT_S)
    return found[0]


def is_gone(pid: int) -> bool:
    """Whether the process has ended."""
    return not psutil.pid_exists(pid)


def test_a_restart_after_a_crash_takes_over_the_spare_and_the_answer_is_resumed(
    folder: Path,
) -> None:
    entry = {"path": str(folder), "preload": True, "max_concurrency": 2}
    with Daemon({"m": entry}, {"spare_workers": 1}) as daemon, daemon.client() as client:
        whole = client.complete("m", prompt="tell me", max_tokens=60, seed=1)
        spare = one_waiting(client)
        assert row(client, "m")["pid"] != spare
        reader = Reader(client, "m", "tell me", max_tokens=60, seed=1)
        reader.started()
        os.kill(row(client, "m")["pid"], signal.SIGKILL)
        eventually(lambda: row(client, "m")["pid"] == spare, timeout_s=WAIT_S)
        assert reader.finished(600).token_ids == whole.token_ids
        assert row(client, "m")["generation"] == 2
        assert one_waiting(client) != spare, "another one waits"
        assert daemon.log_text().count(f"generation=2 pid={spare} spare=yes") == 1


def test_a_spare_that_dies_is_replaced_and_no_model_has_crashed(folder: Path) -> None:
    entry = {"path": str(folder), "preload": True}
    with Daemon({"m": entry}, {"spare_workers": 1}) as daemon, daemon.client() as client:
        spare = one_waiting(client)
        os.kill(spare, signal.SIGKILL)
        assert one_waiting(client, after=spare) != spare
        model = row(client, "m")
        assert (model["state"], model["generation"], model["restarts"]) == ("READY", 1, 0)
        text = daemon.log_text()
        assert "spare worker exited" in text


def test_spares_make_room_for_a_model_and_come_back_after_it(folder: Path) -> None:
    big = fake(memory="1GiB", preload=False)
    models = {"m": {"path": str(folder), "preload": False}, "big": big}
    settings = {"spare_workers": 1, "memory_budget": "1100MiB"}
    with Daemon(models, settings) as daemon, daemon.client() as client:
        spare = one_waiting(client)
        client.load("big")
        assert is_gone(spare)
        assert client.status()["spares"]["workers"] == []
        client.unload("big")
        assert one_waiting(client) != spare


def test_a_spare_does_not_outlive_a_supervisor_that_is_killed(folder: Path) -> None:
    entry = {"path": str(folder), "preload": False}
    with Daemon({"m": entry}, {"spare_workers": 2}) as daemon, daemon.client() as client:
        eventually(lambda: len(waiting(client)) == 2, timeout_s=WAIT_S)
        pids = waiting(client)
        daemon.kill()
        eventually(lambda: all(map(is_gone, pids)), timeout_s=WAIT_S)
