"""A model whose files change while it serves: a swap must not end what only its process can
continue."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.daemon import Daemon, row
from support.eventually import eventually
from support.streams import Reader
from support.tiny_model import make_tiny_model

BUDGET = {"memory_budget": "400MiB", "min_residency_s": 0, "swap_after_s": 0.2}
ANSWER: dict[str, Any] = {"max_tokens": 400, "seed": 7, "temperature": 0.8, "ignore_eos": True}
CHANGE = "config.json has changed since it was loaded"


def touch(folder: Path) -> None:
    """Somebody edits the configuration of a model: its answers might be others from now on."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "edited_by": "somebody"}))


@pytest.mark.mlx
@pytest.mark.timeout(900)
def test_a_paused_answer_survives_a_change_of_files_because_its_model_is_not_swapped_out_I7(
    tmp_path: Path,
) -> None:
    folders = {name: make_tiny_model(tmp_path / name, seed=n) for n, name in enumerate("ab")}
    models: dict[str, dict[str, Any]] = {
        name: {"path": str(folder), "max_concurrency": 1, "memory": "300MiB", "preload": False}
        for name, folder in folders.items()
    }
    with Daemon(models, BUDGET) as daemon, daemon.client() as client:
        truth = client.complete("a", prompt="One", **ANSWER).token_ids
        watcher = daemon.client()
        changes = watcher.events()
        watcher.ping()
        answer = Reader(client, "a", "One", **ANSWER).started()
        client.pause(str(answer.stream.request_id))
        eventually(lambda: row(client, "a")["paused"] != [])
        touch(folders["a"])
        other = Reader(client, "b", "Two", max_tokens=3)
        note = next(change["note"] for change in changes if change["note"].endswith(CHANGE))
        assert note == f"is not swapped out while its answers are open: {CHANGE}"
        watcher.close()
        lack = row(client, "b")["memory_wait"]["reason"]
        assert lack.endswith(f"a stays until its answers have ended, because {CHANGE}")
        generation = row(client, "a")["generation"]
        client.resume(str(answer.stream.request_id))
        assert answer.finished(300.0).token_ids == truth
        assert len(other.finished(300.0).token_ids) == 3
        assert row(client, "a")["generation"] == generation, "its process lived until then"
