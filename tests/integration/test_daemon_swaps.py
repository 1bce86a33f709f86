"""Two models that do not fit together, both with streams: real processes that take turns."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from mlxsup.client import Client, RequestError, Result
from mlxsup.worker.engines.fake.text import answer_tokens, encode_text

from support.daemon import Daemon, fake, row
from support.eventually import eventually
from support.json_schemas import problems
from support.streams import Reader
from support.tiny_model import make_tiny_model

NAMES = ("a", "b")
BUDGET = {"memory_budget": "400MiB", "min_residency_s": 0, "swap_after_s": 0.2}
LENGTH = 4000
"""Tokens of a fake answer: more than a few turns are enough for."""

SWAPS = 5
REAL_SWAPS = 3

ANSWER: dict[str, Any] = {"max_tokens": 200, "seed": 7, "temperature": 0.8, "ignore_eos": True}


def sized(**options: Any) -> dict[str, Any]:
    """A model of which one fits."""
    return fake(memory="300MiB", preload=False, fake={"step_s": 0.005}, **options)


def turns(client: Client) -> int:
    """How many processes there have been."""
    return sum(row(client, name)["generation"] for name in NAMES)


def goes_on(reader: Reader) -> None:
    """Waits until a stream has gained another token."""
    sent = len(reader.tokens)
    eventually(lambda: len(reader.tokens) > sent, timeout_s=300.0)


def workers(daemon: Daemon) -> int:
    """How many workers live; the supervisor has no other children."""
    return len(daemon.processes()) - 1


def test_two_fake_models_take_turns_and_no_stream_loses_a_token() -> None:
    with Daemon({name: sized() for name in NAMES}, BUDGET) as daemon, daemon.client() as client:
        told: list[tuple[str, dict[str, Any]]] = []
        watcher = daemon.client()
        events = watcher.events()
        watcher.ping()
        first = Reader(
            client, "a", "one", max_tokens=LENGTH,
            on_notice=lambda notice: told.append((str(notice.kind), notice.detail)),
        ).started()  # fmt: skip
        second = Reader(client, "b", "two", max_tokens=LENGTH)
        eventually(lambda: turns(client) >= SWAPS + 1, timeout_s=300.0)
        assert workers(daemon) <= 1
        note = next(change["note"] for change in events if change["why"] == "swap")
        assert note.startswith("swapped out for b, which needs 300.0 MiB and has waited for")
        watcher.close()
        for reader, prompt in ((first, "one"), (second, "two")):
            goes_on(reader)
            reader.stream.cancel()
            result = reader.finished()
            assert result.paused > 0
            assert result.resumed == 0
            whole = answer_tokens(encode_text(prompt), len(result.token_ids))
            assert result.token_ids == whole
        assert row(client, "a")["restarts"] == row(client, "b")["restarts"] == 0
    assert {"reason": "swap"}.items() <= dict(told)["paused"].items()
    assert [d["reason"] for kind, d in told if kind == "queued"].count("swap") > 0


def test_an_unload_of_a_model_that_waits_for_its_turn_says_how_far_its_answers_came() -> None:
    slow = {**BUDGET, "min_residency_s": 600}
    with Daemon({name: sized() for name in NAMES}, BUDGET) as daemon, daemon.client() as client:
        first = Reader(client, "a", "one", max_tokens=LENGTH).started()
        second = Reader(client, "b", "two", max_tokens=LENGTH).started()
        daemon.write_config({name: sized() for name in NAMES}, slow)  # from now on `b` stays
        client.reload()
        eventually(lambda: row(client, "a")["why"] == "swap" or row(client, "b")["why"] == "swap")
        out = next(name for name in NAMES if row(client, name)["state"] != "READY")
        waits, runs = (first, second) if out == "a" else (second, first)
        client.unload(out)
        error = waits.failed()
        assert (error.code, error.detail["tokens_sent"]) == ("unloaded", len(waits.tokens))
        runs.stream.cancel()
        runs.finished()


def test_a_dry_run_names_who_would_be_swapped_out_and_with_swap_off_a_load_is_refused() -> None:
    stays = {**BUDGET, "min_residency_s": 600}
    with Daemon({name: sized() for name in NAMES}, stays) as daemon, daemon.client() as client:
        stream = Reader(client, "a", "one", max_tokens=LENGTH).started()
        line = daemon.run("load", "b", "--dry-run", "--json").stdout
        assert problems(line, ["load"]) == []
        value = json.loads(line)
        assert (value["outcome"], value["swaps"]) == ("swaps", ["a"])
        assert "after swapping out a" in daemon.run("load", "b", "--dry-run").stdout
        off = {**BUDGET, "swap": False}
        daemon.write_config({name: sized() for name in NAMES}, off)
        client.reload()
        with pytest.raises(RequestError) as refused:
            client.load("b")
        assert refused.value.code == "insufficient_memory"
        assert refused.value.detail["blocked_by"] == ["a"]
        stream.stream.cancel()
        stream.finished()


# ---------------------------------------------------------------- MLX


class Asker(threading.Thread):
    """Asks one model for the same answer, again and again, until it is asked to stop."""

    def __init__(self, daemon: Daemon, model: str, is_over: threading.Event) -> None:
        super().__init__(daemon=True)
        self._daemon, self.model, self._is_over = daemon, model, is_over
        self.results: list[Result] = []
        self.start()

    def run(self) -> None:
        """Asks."""
        with self._daemon.client() as client:
            while not self._is_over.is_set():
                self.results.append(client.complete(self.model, prompt="One", **ANSWER))


@pytest.mark.mlx
@pytest.mark.timeout(900)
def test_two_real_models_take_turns_and_seeded_streams_stay_as_they_are(tmp_path: Path) -> None:
    folders = {name: make_tiny_model(tmp_path / name, seed=n) for n, name in enumerate(NAMES)}
    models: dict[str, dict[str, Any]] = {
        name: {"path": str(folder), "max_concurrency": 1, "memory": "300MiB", "preload": False}
        for name, folder in folders.items()
    }
    with Daemon(models) as daemon, daemon.client() as client:
        truth = {n: client.complete(n, prompt="One", **ANSWER).token_ids for n in NAMES}
    with Daemon(models, BUDGET) as daemon, daemon.client() as client:
        is_over = threading.Event()
        askers = [Asker(daemon, name, is_over) for name in (*NAMES, *NAMES)]  # never idle
        eventually(lambda: turns(client) > REAL_SWAPS, timeout_s=800.0)
        is_over.set()
        for asker in askers:
            asker.join(300.0)
            assert asker.results
            assert all(result.token_ids == truth[asker.model] for result in asker.results)
        results = [result for asker in askers for result in asker.results]
        assert sum(result.resumed for result in results) == 0
        assert sum(result.paused for result in results) >= REAL_SWAPS - 1
