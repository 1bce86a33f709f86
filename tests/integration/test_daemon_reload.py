"""A reload of the configuration: whole or not at all; only what has changed is touched (P20)."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator

import pytest

from mlxsup.client import RequestError

from support.daemon import Daemon, fake, gone_within, row, wait_for_state
from support.eventually import eventually
from support.streams import Reader

SLOW = {"step_s": 0.02}


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon({"kept": fake(fake=SLOW), "busy": fake(fake=SLOW)}) as daemon:
        with daemon.client() as client:
            for name in ("kept", "busy"):
                wait_for_state(client, name, "READY")
        yield daemon


@pytest.mark.parametrize("how", ["client", "signal", "command"])
def test_a_reload_touches_only_what_has_changed(daemon: Daemon, how: str) -> None:
    with daemon.client() as client:
        before = row(client, "kept")
        stream = Reader(client, "kept", "runs", max_tokens=150).started()
        removed = Reader(client, "busy", "runs", max_tokens=60).started()
        daemon.write_config({"kept": fake(fake=SLOW, idle_unload_s=500), "new": fake(fake=SLOW)})
        if how == "client":
            value = client.reload()
            assert (value["added"], value["changed"]) == (["new"], ["kept"])
            assert (value["removed"], value["later"]) == (["busy"], [])
        elif how == "command":
            done = daemon.run("reload", "--json")
            assert done.returncode == 0, done.stderr
            assert json.loads(done.stdout)["removed"] == ["busy"]
        else:
            assert daemon.process is not None
            daemon.process.send_signal(signal.SIGHUP)
        eventually(lambda: len(client.status()["models"]) in (2, 3))
        assert removed.finished().finish_reason == "length", "a removed busy model drains"
        eventually(lambda: [m["name"] for m in client.status()["models"]] == ["kept", "new"])
        wait_for_state(client, "new", "READY")
        with pytest.raises(RequestError) as gone:
            client.complete("busy", prompt="x", max_tokens=1)
        assert gone.value.code == "unknown_model"
        assert stream.finished().finish_reason == "length"
        assert row(client, "kept")["pid"] == before["pid"]


def test_a_link_is_followed_anew() -> None:
    """As whatever builds configurations switches from one to the next."""
    daemon = Daemon({})
    targets = [daemon.config.with_name(f"v{number}.toml") for number in (1, 2)]
    for name, target in zip(("old", "new"), targets, strict=True):
        daemon.write_config({name: fake(fake=SLOW)})
        daemon.config.rename(target)
    daemon.config.symlink_to(targets[0])
    with daemon, daemon.client() as client:
        daemon.config.unlink()
        targets[0].unlink()
        daemon.config.symlink_to(targets[1])
        value = client.reload()
        assert (value["added"], value["removed"]) == (["new"], ["old"])


def test_a_bad_file_changes_nothing_and_names_every_problem_P20(daemon: Daemon) -> None:
    good = daemon.config.read_text()
    with daemon.client() as client:
        pids = [m["pid"] for m in client.status()["models"]]
        daemon.config.write_text(good + '\n[models.third]\npath = "x"\nmax_concurency = 3\n')
        with pytest.raises(RequestError) as caught:
            client.reload()
        assert caught.value.code == "invalid_request"
        [problem] = caught.value.detail["problems"]
        assert "max_concurrency" in problem
        done = daemon.run("reload")
        assert done.returncode == 78
        assert "max_concurency" in done.stderr
        assert daemon.process is not None
        daemon.process.send_signal(signal.SIGHUP)
        eventually(lambda: daemon.log_text().count("reload refused") == 3)
        assert [m["pid"] for m in client.status()["models"]] == pids
        daemon.config.write_text("= not toml")
        with pytest.raises(RequestError):
            client.reload()
        assert client.complete("kept", prompt="x", max_tokens=2).finish_reason == "length"


def test_what_takes_effect_later_is_said(daemon: Daemon) -> None:
    models = {"kept": fake(fake=SLOW), "busy": fake(fake=SLOW)}
    daemon.write_config(models, {"log_level": "debug"})
    with daemon.client() as client:
        value = client.reload()
        assert (value["changed"], value["later"]) == ([], ["log_level"])


def test_a_changed_launch_gets_a_new_process_once_it_has_drained(daemon: Daemon) -> None:
    with daemon.client() as client:
        pids = {name: row(client, name)["pid"] for name in ("kept", "busy")}
        stream = Reader(client, "busy", "runs", max_tokens=60).started()
        other = fake(fake=SLOW, max_concurrency=3)
        daemon.write_config({"kept": fake(fake=SLOW), "busy": other})
        assert client.reload()["changed"] == ["busy"]
        assert stream.finished().finish_reason == "length"
        eventually(lambda: row(client, "busy")["generation"] == 2)
        assert wait_for_state(client, "busy", "READY")["row_limit"] == 3
        assert row(client, "kept")["pid"] == pids["kept"]


def test_a_stop_shortens_the_drain_of_a_model_that_a_reload_removes_P12() -> None:
    long = {"drain_timeout_s": 600.0}
    models = {"kept": fake(fake=SLOW), "busy": fake(fake=SLOW)}
    with Daemon(models, long) as daemon, daemon.client() as client:
        wait_for_state(client, "busy", "READY")
        running = Reader(client, "busy", "runs", max_tokens=3000).started()
        processes = daemon.processes()
        daemon.write_config({"kept": fake(fake=SLOW)}, long)
        assert client.reload()["removed"] == ["busy"]
        assert row(client, "busy")["state"] == "DRAINING"
        done = daemon.run("stop", "--timeout", "1")
        assert done.returncode == 0, done.stderr
        assert running.failed().code == "shutting_down"
        gone_within(processes, 60.0)


def test_a_step_under_way_keeps_its_limit_when_a_reload_lowers_it_P7() -> None:
    slow = {"step_s": 4.0, "predicted_s": 0.0}
    with Daemon({"m": fake(fake=slow)}) as daemon, daemon.client() as client:
        wait_for_state(client, "m", "READY")
        running = Reader(client, "m", "runs", max_tokens=3)
        eventually(lambda: row(client, "m")["phase"] in ("prefill", "decode"))
        daemon.write_config({"m": fake(fake=slow, step_timeout_s=0.5)})
        assert client.reload()["changed"] == ["m"]
        result = running.finished()
        assert (result.finish_reason, result.resumed) == ("length", 0)
        after = wait_for_state(client, "m", "READY")
        assert (after["generation"], after["restarts"], after["suspects"]) == (2, 0, 0)


def test_a_dry_run_says_what_would_happen_and_changes_nothing(daemon: Daemon) -> None:
    with daemon.client() as client:
        before = client.status()
        logged = daemon.log_text().count("memory budget size=")
        stream = Reader(client, "busy", "runs", max_tokens=2000).started()
        daemon.write_config(
            {"kept": fake(fake=SLOW, idle_unload_s=500), "new": fake(fake=SLOW, preload=False)}
        )
        value = client.reload(dry_run=True)
        assert {row["model"]: row["becomes"] for row in value["foreseen"]} == {
            "kept": "READY", "busy": "DRAINING", "new": "STOPPED",
        }  # fmt: skip
        done = daemon.run("reload", "--dry-run")
        assert [" ".join(line.split()) for line in done.stdout.splitlines()] == [
            "MODEL CHANGE STATE WHAT HAPPENS",
            "kept changed READY takes effect without a restart",
            "busy removed READY finishes 1 running request, then ends",
            "new added - is loaded on request",
        ]
        after = client.status()
        assert [row["name"] for row in after["models"]] == ["kept", "busy"]
        assert [row["pid"] for row in after["models"]] == [row["pid"] for row in before["models"]]
        assert daemon.log_text().count("memory budget size=") == logged, "it is no other one yet"
        daemon.config.write_text("nonsense")
        wrong = daemon.run("reload", "--dry-run")
        assert wrong.returncode == 78
        assert "hint: correct the file, then `mlxsup reload --endpoint" in wrong.stderr
        stream.stream.cancel()


def test_a_dry_run_names_who_would_be_evicted_and_who_could_not_be_loaded() -> None:
    models = {name: fake(memory="1GiB") for name in ("a", "b")}
    with Daemon(models, {"memory_budget": "3GiB"}) as daemon, daemon.client() as client:
        wait_for_state(client, "a", "READY")
        wait_for_state(client, "b", "READY")
        large = {**models, "large": fake(memory="3GiB", preload=False)}
        daemon.write_config(large, {"memory_budget": "1.5GiB"})
        said = daemon.run("reload", "--dry-run").stderr
        assert "512.0 MiB more is reserved than the new memory budget: a would be evicted\n" in said
        assert "large could not be loaded: it needs 3.00 GiB, and the memory budget is 1.5" in said
        assert client.reload(dry_run=True)["evicts"] == ["a"]
        assert [one["state"] for one in client.status()["models"]] == ["READY", "READY"]
        client.reload()
        wait_for_state(client, "a", "STOPPED")
        assert row(client, "b")["state"] == "READY"
