"""Memory on real daemons: evictions, refusals, swaps, rows, and what other programs take."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mlxsup.client import Client, Notice, RequestError, Result

from support.cli.cli import run_cli
from support.cli.scripted_daemon import ScriptedDaemon
from support.client.streams import Reader
from support.daemon.daemon import Daemon, fake, row, wait_for_state
from support.daemon.faults import undisturbed
from support.daemon.played_daemon import write_config
from support.eventually import eventually
from support.models.tiny_model import make_tiny_model

MIB = 2**20
GIB = 2**30
BUDGET = {"memory_budget": "700MiB", "min_residency_s": 0}


NONE = {"none": fake(preload=False)}
"""The least that a daemon takes."""


def sized(mib: int, **options: Any) -> dict[str, Any]:
    """A model that reserves so much."""
    return fake(memory=f"{mib}MiB", **options)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """A daemon that found a damaged file of measurements; each test gives it its own models."""
    daemon = Daemon(NONE, BUDGET)
    (daemon.folder / "run").mkdir(mode=0o700)
    (daemon.folder / "run" / "measured.json").write_bytes(b'{"format": 1, "models": [{"path"')
    with daemon:
        yield daemon
        words = "measured.json is ignored (it is damaged); models are measured again"
        assert daemon.log_text().count(words) == 1


def configure(
    daemon: Daemon, client: Client, models: dict[str, dict[str, Any]], **supervisor: Any
) -> None:
    """Gives the daemon these models alone, once all earlier ones have gone."""
    daemon.write_config(NONE, BUDGET)
    client.reload()
    eventually(lambda: list(states(client)) == list(NONE))
    daemon.write_config(models, BUDGET | supervisor)
    client.reload()


SMALL = sized(300, preload=False)
IMPOSSIBLE: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]], str]] = {
    "pinned models that do not fit together": (
        BUDGET,
        dict.fromkeys("abc", SMALL | {"pinned": True}),
        "need 900.0 MiB together, but the memory budget is 700.0 MiB",
    ),
    "memory below what one short request needs": (
        {},
        {"a": SMALL | {"memory": "30MiB"}},
        "its memory is 30.0 MiB, but it needs at least 64.0 MiB for its process; set memory",
    ),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_a_configuration_that_memory_makes_impossible_is_refused(tmp_path: Path, name: str) -> None:
    supervisor, models, words = IMPOSSIBLE[name]
    config = write_config(tmp_path, models, supervisor)
    said = run_cli("config", "check", str(config))
    assert (said.returncode, said.stdout) == (78, f"checking {config}\n")
    assert words in said.stderr


@pytest.mark.mlx
def test_the_memory_that_a_refusal_names_loads_the_model_when_typed(tmp_path: Path) -> None:
    """At the check of the file, and at the load, which measures the process."""
    folder = make_tiny_model(tmp_path / "model")
    models = {"a": {"path": str(folder), "memory": "1MiB", "preload": False}}
    config = write_config(tmp_path, models, {})
    said = run_cli("config", "check", str(config)).stderr
    models["a"]["memory"] = said.partition('set memory to "')[2].partition('"')[0]
    with Daemon(models) as daemon, daemon.client() as client:
        client.load("a")
        assert wait_for_state(client, "a", "READY")


def states(client: Client) -> dict[str, str]:
    return {model["name"]: model["state"] for model in client.status()["models"]}


def events_from_now(watcher: Client) -> Iterator[dict[str, Any]]:
    events = watcher.events()
    watcher.ping()  # answered after the subscription has begun
    return events


def test_a_load_evicts_as_its_dry_run_said_and_the_impossible_is_refused_H9_I2_I4(
    daemon: Daemon,
) -> None:
    models = {
        "a": sized(300, pinned=True), "b": sized(300), "c": sized(300),
        "big": sized(500, preload=False), "huge": sized(800, preload=False),
    }  # fmt: skip
    with daemon.client() as client, daemon.client() as watcher:
        configure(daemon, client, models)
        for name in ("a", "b"):
            wait_for_state(client, name, "READY")
        eventually(lambda: row(client, "c")["memory_wait"])
        assert row(client, "c")["state"] == "PENDING"
        shown = daemon.run("status").stdout
        assert "may grow to 600.0 MiB of 700.0 MiB" in shown
        assert "waited for memory" in shown
        foreseen = daemon.run("load", "c", "--dry-run", "--json")
        assert foreseen.returncode == 0, foreseen.stderr
        value = json.loads(foreseen.stdout)
        assert (value["outcome"], value["evicts"]) == ("evicts", ["b"])
        assert row(client, "b")["state"] == "READY"

        events = events_from_now(watcher)
        client.load("c")
        assert states(client) == {
            "a": "READY", "b": "STOPPED", "c": "READY", "big": "STOPPED", "huge": "STOPPED",
        }  # fmt: skip
        seen = []
        for change in events:
            seen.append((change["model"], change["to"]))
            if change["to"] == "DRAINING":
                assert change["note"].startswith("evicted for c, which needs 300.0 MiB")
            if seen[-1] == ("c", "LOADING"):
                break
        evicted = [to for model, to in seen if model == "b"]
        assert evicted == ["DRAINING", "STOPPING", "STOPPED"], "before c was spawned"
        memory = client.status()["memory"]
        assert (memory["reserved_bytes"], memory["budget_bytes"]) == (600 * MIB, 700 * MIB)

        with pytest.raises(RequestError) as refused:
            client.complete("big", prompt="hi", max_tokens=1)
        assert refused.value.code == "insufficient_memory"
        assert refused.value.detail["blocked_by"] == ["a"]
        pinned = "500.0 MiB of 700.0 MiB: a is pinned and holds 300.0 MiB"
        larger = "800.0 MiB, but the memory budget is 700.0 MiB"
        for name, why in (("big", pinned), ("huge", larger)):
            for more in ([], ["--dry-run"]):
                done = daemon.run("load", name, *more)
                assert (done.returncode, done.stdout) == (1, "")
                error, hint = done.stderr.splitlines()
                assert error == f"error: {name} cannot be loaded: it needs {why}"
                assert hint.startswith("hint: `mlxsup status")
        assert client.complete("a", prompt="hi", max_tokens=2).finish_reason == "length"


def test_a_model_that_ran_out_of_memory_gets_more_at_its_next_load(daemon: Daemon) -> None:
    with daemon.client() as client, daemon.client() as watcher:
        configure(daemon, client, {"m": fake()})
        needed = wait_for_state(client, "m", "READY")["needed_bytes"]
        events = events_from_now(watcher)
        with pytest.raises(
            RequestError, match="ran out of memory twice while it ran only this request"
        ):
            client.complete("m", prompt="[[fault crash=exit:75 at=2]]", max_tokens=5)
        notes = (change["note"] for change in events)
        first = next(
            note
            for note in notes
            if note.startswith("it ran out of memory, so a load now reserves")
        )
        assert "more than estimated" in first
        after = wait_for_state(client, "m", "READY")
        assert after["needed_bytes"] == needed + after["raised_bytes"] > needed
        assert after["reserved_bytes"] >= after["needed_bytes"]
        assert "because it ran out of memory before" in daemon.run("status").stdout


LENGTH = 500_000
"""Tokens of a fake answer: more than any number of turns is enough for."""


def has_more_than(reader: Reader, tokens: int) -> bool:
    return len(reader.tokens) > tokens


def test_two_busy_models_take_turns_and_no_stream_loses_a_token(daemon: Daemon) -> None:
    model = sized(300, preload=False, fake={"step_s": 0.02, "context_length": 2 * LENGTH})
    told: list[Notice] = []
    with daemon.client() as client, daemon.client() as watcher:
        configure(
            daemon, client, {"a": model, "b": model}, memory_budget="400MiB", swap_after_s=0.2
        )
        events = events_from_now(watcher)
        first = Reader(client, "a", "one", max_tokens=LENGTH, on_notice=told.append).started()
        second = Reader(client, "b", "two", max_tokens=LENGTH)
        eventually(
            lambda: sum(row(client, name)["generation"] for name in "ab") >= 3, timeout_s=300.0
        )
        assert len(daemon.processes()) <= 2, "the supervisor and one worker"
        note = next(change["note"] for change in events if change["why"] == "swap")
        assert note.startswith("swapped out for b, which needs 300.0 MiB and has waited for")
        for reader, prompt in ((first, "one"), (second, "two")):
            sent = len(reader.tokens)
            eventually(partial(has_more_than, reader, sent), timeout_s=300.0)
            reader.stream.cancel()
            result = reader.finished()
            assert (result.paused > 0, result.resumed) == (True, 0)
            assert result.token_ids == undisturbed(prompt, len(result.token_ids))
        assert [row(client, name)["restarts"] for name in "ab"] == [0, 0]
    reasons = [(str(one.kind), one.detail.get("reason")) for one in told]
    assert ("paused", "swap") in reasons
    assert ("queued", "swap") in reasons


def test_requests_that_do_not_fit_together_are_answered_one_after_the_other(
    daemon: Daemon,
) -> None:
    """A row takes a quarter of a MiB for each token, and 64 MiB to grow: two never fit."""
    model = sized(300, max_concurrency=4, fake={"token_bytes": 128 * 1024})
    notices: dict[int, list[Notice]] = {number: [] for number in range(4)}

    def ask(number: int) -> Result:
        with daemon.client() as own:
            return own.complete(
                "m", prompt=f"[[fault slow=0.02]] {number}", max_tokens=12,
                on_notice=notices[number].append,
            )  # fmt: skip

    with daemon.client() as client, ThreadPoolExecutor(4) as pool:
        configure(daemon, client, {"m": model})
        wait_for_state(client, "m", "READY")
        results = list(pool.map(ask, range(4)))
        assert 0 < row(client, "m")["row_budget_bytes"] < 300 * GIB
    for number, result in enumerate(results):
        assert result.token_ids == undisturbed(f"[[fault slow=0.02]] {number}", 12)
        assert result.paused == 0, "those that waited had no row yet"
    waited = [one for each in notices.values() for one in each if one.kind == "queued"]
    assert "memory" in {one.detail["reason"] for one in waited}


# ---------------------------------------------------------------- other programs

SETUP = """
import types
import psutil

def virtual_memory():
    available = int(Path({path!r}).read_text())
    return types.SimpleNamespace(total=16 * 2**30, available=available)

psutil.virtual_memory = virtual_memory
"""


def test_idle_models_give_way_to_other_programs_and_come_back(tmp_path: Path) -> None:
    """The machine has 16 GiB, of which half a GiB must stay available, and a busy model stays."""

    def has_available(size_bytes: int) -> None:
        new = tmp_path / "new"
        new.write_text(f"{size_bytes}")
        new.replace(tmp_path / "available")

    has_available(12 * GIB)
    models = {
        "idle": sized(300, fake={"cache_bytes": 200 * MIB}),
        "busy": sized(300, fake={"step_s": 0.05}),
    }
    limits = {"memory_budget": "2GiB", "min_residency_s": 0}
    daemon = ScriptedDaemon(models, limits).scripted(SETUP.format(path=str(tmp_path / "available")))
    with daemon, daemon.client() as client, daemon.client() as watcher:
        for name in models:
            wait_for_state(client, name, "READY")
        cancelled = client.generate("idle", prompt="hi", max_tokens=4000)
        next(cancelled)
        cancelled.cancel()
        eventually(lambda: row(client, "idle")["cache_bytes"] == 200 * MIB)
        stream = client.generate("busy", prompt="go on", max_tokens=4000)
        next(stream)
        changes = events_from_now(watcher)

        has_available(0)
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
        assert "memory is short: " in shown
        assert "more than that: some are unloaded once they can be" in shown

        waits = Reader(client, "idle", "hi", max_tokens=3)
        eventually(lambda: row(client, "idle")["memory_wait"])
        reason = row(client, "idle")["memory_wait"]["reason"]
        assert reason.endswith("other programs hold the rest of the memory budget")
        has_available(12 * GIB)
        assert waits.finished().finish_reason == "length"
        memory = client.status()["memory"]
        assert (memory["effective_budget_bytes"], memory["shortage"]) == (2 * GIB, "")
        log = daemon.log_text()
        assert "WARNING memory budget lowered" in log
        assert "INFO memory budget restored" in log

        has_available(0)
        eventually(lambda: client.status()["memory"]["shortage"])
        (tmp_path / "available").unlink()
        eventually(lambda: "memory not measured" in daemon.log_text())
        assert client.status()["memory"]["shortage"], "what was measured last counts"
        stream.cancel()
