"""A memory budget that two of three models fill: real processes, evictions, refusals, a pin."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from mlxsup.client import Client, RequestError

from support import warm
from support.cli import run_cli
from support.daemon import Daemon, fake, row, wait_for_state
from support.eventually import eventually

MIB = 2**20
NAMES = ("a", "b", "c")
BUDGET = {"memory_budget": "700MiB", "min_residency_s": 0}


def sized(**options: Any) -> dict[str, Any]:
    """A model of which two fit."""
    return fake(memory="300MiB", **options)


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    models = {name: sized(preload=False) for name in NAMES}
    with Daemon(models, BUDGET) as daemon:
        yield daemon


def states(client: Client) -> dict[str, str]:
    return {model["name"]: model["state"] for model in client.status()["models"]}


def workers(daemon: Daemon) -> int:
    """How many workers live; the supervisor has no other children."""
    return len(daemon.processes()) - 1


def test_the_third_model_is_loaded_after_the_least_recently_used_has_gone_H9_I2(
    daemon: Daemon,
) -> None:
    with daemon.client() as client, daemon.client() as watcher:
        for name in NAMES[:2]:
            client.load(name)
        client.complete("a", prompt="hi", max_tokens=2)
        events = watcher.events()
        watcher.ping()
        client.load(
            "c"
        )  # a request would wait until one has been idle for as long as its load took
        assert states(client) == {"a": "READY", "b": "STOPPED", "c": "READY"}
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


def test_requests_for_three_models_are_all_answered_by_two_processes_at_a_time(
    daemon: Daemon,
) -> None:
    answers: list[str] = []

    def ask(name: str) -> None:
        with daemon.client() as client:
            for number in range(3):
                result = client.complete(name, prompt=f"{name}{number}", max_tokens=3)
                answers.append(str(result.finish_reason))

    threads = [threading.Thread(target=ask, args=(name,)) for name in NAMES]
    for thread in threads:
        thread.start()
    most = 0
    while any(thread.is_alive() for thread in threads):
        most = max(most, workers(daemon))
    for thread in threads:
        thread.join()
    assert answers == ["length"] * 9
    assert most == 2


def test_a_preload_waits_and_a_dry_run_and_a_load_say_and_do_the_same() -> None:
    with Daemon({name: sized() for name in NAMES}, BUDGET) as daemon, daemon.client() as client:
        for name in NAMES[:2]:
            wait_for_state(client, name, "READY")
        eventually(lambda: row(client, "c")["memory_wait"])
        assert row(client, "c")["state"] == "PENDING"
        shown = daemon.run("status").stdout
        assert "memory: 600.0 MiB of 700.0 MiB reserved" in shown
        assert "waiting for memory" in shown
        foreseen = daemon.run("load", "c", "--dry-run", "--json")
        assert foreseen.returncode == 0, foreseen.stderr
        value = json.loads(foreseen.stdout)
        assert (value["outcome"], value["evicts"]) == ("evicts", ["a"])
        assert "after evicting a" in daemon.run("load", "c", "--dry-run").stdout
        assert row(client, "a")["state"] == "READY"
        client.load("c")
        assert states(client) == {"a": "STOPPED", "b": "READY", "c": "READY"}


def test_what_can_never_fit_is_refused_by_every_door_I4() -> None:
    models = {"a": sized(pinned=True), "big": fake(memory="500MiB", preload=False)}
    with Daemon(models, BUDGET) as daemon, daemon.client() as client:
        wait_for_state(client, "a", "READY")
        with pytest.raises(RequestError) as refused:
            client.complete("big", prompt="hi", max_tokens=1)
        assert refused.value.code == "insufficient_memory"
        assert refused.value.detail["blocked_by"] == ["a"]
        for arguments in (["load", "big"], ["load", "big", "--dry-run"]):
            done = daemon.run(*arguments)
            assert (done.returncode, done.stdout) == (1, "")
            error, hint = done.stderr.splitlines()
            assert error == (
                "error: big cannot be loaded: it needs 500.0 MiB of 700.0 MiB: a is pinned and"
                " holds 300.0 MiB"
            )
            assert hint.startswith("hint: see what holds memory with `mlxsup status")


def test_a_reload_lowers_the_budget_and_pins_that_do_not_fit_are_refused(daemon: Daemon) -> None:
    models = {name: sized(preload=False) for name in NAMES}
    with daemon.client() as client:
        for name in NAMES[:2]:
            client.load(name)
        daemon.write_config(models, {**BUDGET, "memory_budget": "400MiB"})
        client.reload()
        eventually(lambda: states(client) == {"a": "STOPPED", "b": "READY", "c": "STOPPED"})
        pinned = {name: sized(preload=False, pinned=True) for name in NAMES}
        daemon.write_config(pinned, {**BUDGET, "memory_budget": "400MiB"})
        with pytest.raises(RequestError) as refused:
            client.reload()
        assert refused.value.code == "invalid_request"
        [problem] = refused.value.detail["problems"]
        assert "a (300.0 MiB), b (300.0 MiB) and c (300.0 MiB) need 900.0 MiB together" in problem
        assert states(client)["b"] == "READY"
    checked = warm.run_text(Daemon.command("config", "check", str(daemon.config)), timeout_s=60)
    assert checked.returncode == 78


def test_a_model_that_ran_out_of_memory_gets_more_at_its_next_load() -> None:
    with (
        Daemon({"m": fake()}, {"memory_budget": "700MiB"}) as daemon,
        daemon.client() as client,
        daemon.client() as watcher,
    ):
        needed = wait_for_state(client, "m", "READY")["needed_bytes"]
        events = watcher.events()
        watcher.ping()
        with pytest.raises(RequestError, match="ran out of memory for this request alone, twice"):
            client.complete("m", prompt="[[fault crash=exit:75 at=2]]", max_tokens=5)
        notes = (change["note"] for change in events)
        first = next(note for note in notes if note.startswith("it ran out of memory: from now on"))
        assert "more than it was appraised at" in first
        after = wait_for_state(client, "m", "READY")
        assert after["needed_bytes"] == needed + after["raised_bytes"] > needed
        assert after["reserved_bytes"] >= after["needed_bytes"]
        shown = run_cli("status", "--config", str(daemon.config)).stdout
        assert "of it because it ran out of memory before" in shown
