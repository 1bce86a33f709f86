"""Every worker dies at once, and models that go while they are busy (P1, P4, P8, P20)."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxsup.client import RequestError

from support.client.streams import Reader
from support.daemon.daemon import Daemon, fake, gone_within, row, wait_for_state
from support.daemon.faults import PATIENT, undisturbed
from support.eventually import eventually

NAMES = ("a", "b", "c", "d")
ENTRY = fake(fake={"step_s": 0.04, "load_s": 0.1}, restart=PATIENT)
TOKENS = 150
"""Six seconds of an answer, so that a test on a busy machine can strike within it."""
CHANGE = re.compile(r"model state model=(\w+) from=(\w+) to=(\w+)")


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon(dict.fromkeys(NAMES, ENTRY)) as daemon, daemon.client() as client:
        for name in NAMES:
            wait_for_state(client, name, "READY")
        yield daemon


def most_loading_at_once(log: Path) -> int:
    """Of all moments that the daemon's log tells of."""
    loading: set[str] = set()
    most = 0
    for model, _, state in CHANGE.findall(log.read_text()):
        loading.discard(model)
        if state == "LOADING":
            loading.add(model)
        most = max(most, len(loading))
    return most


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV"])
def test_every_worker_killed_at_once_loads_one_after_the_other_and_loses_nothing_P1_P8(
    daemon: Daemon, name: str
) -> None:
    with daemon.client() as client:
        running = {
            (model, n): Reader(client, model, f"{model} {n}", max_tokens=TOKENS)
            for model in NAMES
            for n in range(3)
        }
        for reader in running.values():
            reader.started()
        pids = [row(client, model)["pid"] for model in NAMES]
        for pid in pids:
            os.kill(pid, getattr(signal, name))
        for (model, n), reader in running.items():
            result = reader.finished()
            assert result.token_ids == undisturbed(f"{model} {n}", TOKENS)
            assert result.resumed == 1
        after = [row(client, model) for model in NAMES]
        assert [seen["generation"] for seen in after] == [2] * len(NAMES)
        assert [seen["suspects"] for seen in after] == [0] * len(NAMES), "they have completed"
    assert most_loading_at_once(daemon.logs / "mlxsup.log") == 1


def test_a_reload_that_removes_a_busy_model_drains_it_and_a_second_one_brings_it_back_P20(
    daemon: Daemon,
) -> None:
    with daemon.client() as client:
        running = Reader(client, "a", "runs", max_tokens=40).started()
        beside = Reader(client, "b", "beside", max_tokens=40).started()
        removed = daemon.processes()
        pid = row(client, "a")["pid"]
        daemon.write_config(dict.fromkeys(NAMES[1:], ENTRY))
        assert daemon.run("reload").returncode == 0
        with pytest.raises(RequestError) as caught:
            client.complete("a", prompt="late", max_tokens=1)
        assert caught.value.code in ("unknown_model", "unloaded")
        assert running.finished().token_ids == undisturbed("runs", 40), "it drains"
        gone_within([process for process in removed if process.pid == pid], 60.0)
        daemon.write_config(dict.fromkeys(NAMES, ENTRY))
        value = json.loads(daemon.run("reload", "--json").stdout)
        assert value["added"] == ["a"]
        assert client.complete("a", prompt="x", max_tokens=5).token_ids == undisturbed("x", 5)
        assert beside.finished().token_ids == undisturbed("beside", 40)
        assert row(client, "b")["generation"] == 1


def test_a_removed_model_whose_worker_dies_while_it_drains_ends_its_streams_once_P1(
    daemon: Daemon,
) -> None:
    with daemon.client() as client:
        running = Reader(client, "a", "runs", max_tokens=1000).started()
        pid = row(client, "a")["pid"]
        daemon.write_config(dict.fromkeys(NAMES[1:], ENTRY))
        client.reload()
        os.kill(pid, signal.SIGKILL)
        assert running.failed().code in ("unloaded", "unknown_model")
        eventually(lambda: [m["name"] for m in client.status()["models"]] == list(NAMES[1:]))
