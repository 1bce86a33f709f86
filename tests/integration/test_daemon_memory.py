"""Memory on real daemons: evictions, swaps, rows that do not fit, and what other programs take."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxsup.client import Client, Notice, RequestError, Result
from mlxsup.worker.engines.fake.text import answer_tokens, encode_text
from mlxsup.worker.idle_time import GIVE_BACK_AFTER_S

from support.cli.cli import run_cli
from support.cli.scripted_daemon import ScriptedDaemon
from support.client.streams import Reader
from support.daemon.daemon import Daemon, fake, row, wait_for_state
from support.eventually import TIMEOUT_S, eventually
from support.models.tiny_model import make_tiny_model

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


def test_a_model_that_can_never_fit_is_refused_everywhere_I4() -> None:
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


PAIR = ("a", "b")
ONE_FITS = {"memory_budget": "400MiB", "min_residency_s": 0, "swap_after_s": 0.2}
LENGTH = 500_000
"""Tokens of a fake answer: more than any number of turns is enough for."""

SWAPS = 3


def large(**options: Any) -> dict[str, Any]:
    """A model of which one fits."""
    return fake(
        memory="300MiB",
        preload=False,
        fake={"step_s": 0.005, "context_length": 2 * LENGTH},
        **options,
    )


def turns(client: Client) -> int:
    """How many processes there have been."""
    return sum(row(client, name)["generation"] for name in PAIR)


def goes_on(reader: Reader) -> None:
    """Waits until a stream has gained another token."""
    sent = len(reader.tokens)
    eventually(lambda: len(reader.tokens) > sent, timeout_s=300.0)


def test_two_fake_models_take_turns_and_no_stream_loses_a_token() -> None:
    with Daemon({name: large() for name in PAIR}, ONE_FITS) as daemon, daemon.client() as client:
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


# ---------------------------------------------------------------- MLX


KIB = 1024
ROW_MIB = 1024 * KIB
ROWS_LENGTH = 12

ROWS_MODEL = fake(memory="300MiB", preload=True, max_concurrency=4, fake={"token_bytes": 128 * KIB})
"""A row takes a quarter of a MiB for each token, and 64 MiB to grow: two never fit."""


@pytest.fixture
def rows_daemon() -> Iterator[Daemon]:
    with Daemon({"a": ROWS_MODEL}) as rows_daemon:
        yield rows_daemon


def test_requests_that_do_not_fit_together_are_answered_one_after_the_other(
    rows_daemon: Daemon,
) -> None:
    notices: dict[int, list[Notice]] = {number: [] for number in range(4)}
    results: dict[int, Result] = {}

    def ask(number: int) -> None:
        with rows_daemon.client() as client:
            results[number] = client.complete(
                "a", prompt=f"[[fault slow=0.02]] {number}", max_tokens=ROWS_LENGTH,
                on_notice=notices[number].append,
            )  # fmt: skip

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with rows_daemon.client() as client:
        alone = [
            client.complete("a", prompt=f"[[fault slow=0.02]] {number}", max_tokens=ROWS_LENGTH)
            for number in range(4)
        ]
        assert 0 < row(client, "a")["row_budget_bytes"] < 300 * ROW_MIB
    assert [results[n].token_ids for n in range(4)] == [one.token_ids for one in alone]
    waited = [one for each in notices.values() for one in each if one.kind == "queued"]
    assert "memory" in {one.detail["reason"] for one in waited}
    assert [one.paused for one in results.values()] == [0] * 4  # those that waited had no row yet
    assert [one.paused for one in alone] == [0] * 4


LONG_ANSWER: dict[str, Any] = {"max_tokens": 400, "seed": 7, "temperature": 0.8, "ignore_eos": True}
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
    with Daemon(models, ONE_FITS) as daemon, daemon.client() as client:
        truth = client.complete("a", prompt="One", **LONG_ANSWER).token_ids
        watcher = daemon.client()
        changes = watcher.events()
        watcher.ping()
        answer = Reader(client, "a", "One", **LONG_ANSWER).started()
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


@pytest.mark.mlx
def test_an_idle_worker_frees_its_memory_for_reuse_and_keeps_known_prompts(tmp_path: Path) -> None:
    """Long before it frees these as well, and without being asked."""
    assert GIVE_BACK_AFTER_S > 2 * TIMEOUT_S
    folder = make_tiny_model(tmp_path / "tiny")
    models: dict[str, dict[str, Any]] = {"m": {"path": str(folder), "prefix_cache": "64MiB"}}
    with Daemon(models) as daemon, daemon.client() as client:
        prompt = "tell me about the memory of other models " * 20
        first = client.complete("m", prompt=prompt, max_tokens=32)
        eventually(lambda: (seen := row(client, "m"))["cache_bytes"] == 0 < seen["prefix_bytes"])
        again = client.complete("m", prompt=prompt, max_tokens=32)
        assert again.usage.cached_tokens > 0
        assert again.token_ids == first.token_ids


GIB = 2**30
SETUP = """
from functools import partial
daemon.run_daemon = partial(daemon.run_daemon, proc=Path({proc!r}))
"""
PRESSED_BUDGET = {"memory_budget": "2GiB", "min_residency_s": 0}


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
def pressed_daemon(machine: Machine) -> Iterator[ScriptedDaemon]:
    models = {
        "idle": fake(memory="300MiB", fake={"cache_bytes": 200 * MIB}),
        "busy": fake(memory="300MiB", fake={"step_s": 0.05}),
    }
    daemon = ScriptedDaemon(models, PRESSED_BUDGET).scripted(SETUP.format(proc=str(machine.proc)))
    with daemon:
        yield daemon


def test_idle_models_give_way_and_come_back_and_a_stream_does_not_notice(
    machine: Machine, pressed_daemon: ScriptedDaemon
) -> None:
    with pressed_daemon.client() as client, pressed_daemon.client() as watcher:
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
        shown = pressed_daemon.run("status").stdout
        assert "memory is short, " in shown
        assert "more is reserved than that: models go once they can" in shown

        answers: list[Result] = []

        def ask() -> None:
            with pressed_daemon.client() as other:
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
    log = pressed_daemon.log_text()
    assert "WARNING memory budget lowered" in log
    assert "INFO memory budget whole again" in log


def test_a_machine_that_does_not_say_what_is_available_serves_as_before(
    machine: Machine, pressed_daemon: ScriptedDaemon
) -> None:
    with pressed_daemon.client() as client:
        machine.has_available(0)
        eventually(lambda: client.status()["memory"]["shortage"])
        (machine.proc / "meminfo").unlink()
        eventually(lambda: not client.status()["memory"]["shortage"])
        assert client.complete("idle", prompt="hi", max_tokens=2).finish_reason == "length"
    assert pressed_daemon.log_text().count("available memory not read") == 1
