"""Batch answers that give way while other programs need memory, on a daemon with a played /proc."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxsup.client import Notice
from mlxsup.worker.engines.fake.text import answer_tokens, encode_text

from .test_daemon_pressure import GIB, MIB, SETUP, Machine
from support.daemon import fake, row, wait_for_state
from support.eventually import eventually
from support.scripted_daemon import ScriptedDaemon
from support.streams import Reader

TOKENS = 400
MODELS = ("own", "batch")
BUDGET = {"memory_budget": "6GiB", "min_residency_s": 3600}
"""So much memory that rows do not lack any otherwise, and no turn that ends."""

OPTIONS = {"step_s": 0.05, "token_bytes": MIB // 4, "context_length": 512}
"""A row takes half a MiB for each token, and 128 MiB to grow."""


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    machine = Machine(tmp_path)
    machine.has_available(12 * GIB)
    return machine


@pytest.fixture
def daemon(machine: Machine) -> Iterator[ScriptedDaemon]:
    models = {name: fake(max_concurrency=4, fake=OPTIONS) for name in MODELS}
    daemon = ScriptedDaemon(models, BUDGET).scripted(SETUP.format(proc=str(machine.proc)))
    with daemon:
        yield daemon


def test_batch_rows_give_way_and_continue_where_they_stood_while_models_stay(
    machine: Machine, daemon: ScriptedDaemon
) -> None:
    told: list[tuple[str, str]] = []

    def hear(notice: Notice) -> None:
        told.append((str(notice.kind), str(notice.detail.get("reason"))))

    with daemon.client() as client, daemon.client() as watcher:
        for name in MODELS:
            wait_for_state(client, name, "READY")
        changes = watcher.events()
        watcher.ping()
        own = [Reader(client, "own", "own", max_tokens=TOKENS).started() for _ in range(2)]
        batch = [
            Reader(
                client, "batch", f"b{n}", max_tokens=TOKENS, priority="batch", on_notice=hear
            ).started()
            for n in range(3)
        ]  # fmt: skip
        machine.has_available(0)
        eventually(lambda: len(row(client, "batch")["yielded"]) == 2)
        ids = [str(one.stream.request_id) for one in batch]
        assert sorted(row(client, "batch")["yielded"]) == sorted(ids[1:])
        assert [row(client, name)["state"] for name in MODELS] == ["READY", "READY"]
        assert "2 gave way" in daemon.run("status").stdout
        note = next(str(change["note"]) for change in changes if "batch row" in change["note"])
        assert note.startswith("2 batch rows leave because other programs need memory: ")
        assert "0.0 MiB is available on this machine, and 512.0 MiB must stay free" in note
        note = next(str(change["note"]) for change in changes if "is paused" in change["note"])
        assert note.endswith(" is paused: its model has too little memory for its row now")
        assert row(client, "batch")["line"][0]["paused"] == "memory"
        machine.has_available(12 * GIB)
        results = [one.finished() for one in batch]
        assert [one.paused for one in results] == [0, 1, 1]
        for number, result in enumerate(results):
            assert result.token_ids == answer_tokens(encode_text(f"b{number}"), TOKENS)
        assert [one.finished().paused for one in own] == [0, 0]
    paused = [reason for kind, reason in told if kind == "paused"]
    assert paused == ["memory"] * 2
