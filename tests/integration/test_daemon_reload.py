"""A reload of the configuration: whole or not at all; only what has changed is touched (P20)."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator

import pytest

from mlxsup.client import RequestError

from support.cli.cli import run_cli
from support.client.streams import Reader
from support.daemon.daemon import Daemon, fake, row, wait_for_state
from support.eventually import eventually
from support.gateway.http_daemon import HttpDaemon, chat

SLOW = {"step_s": 0.02}


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon({"kept": fake(fake=SLOW), "busy": fake(fake=SLOW)}) as daemon:
        with daemon.client() as client:
            for name in ("kept", "busy"):
                wait_for_state(client, name, "READY")
        yield daemon


def test_a_reload_touches_only_what_has_changed(daemon: Daemon) -> None:
    with daemon.client() as client:
        before = row(client, "kept")
        stream = Reader(client, "kept", "runs", max_tokens=150).started()
        removed = Reader(client, "busy", "runs", max_tokens=60).started()
        daemon.write_config({"kept": fake(fake=SLOW, idle_unload_s=500), "new": fake(fake=SLOW)})
        done = daemon.run("reload", "--json")
        assert done.returncode == 0, done.stderr
        value = json.loads(done.stdout)
        assert (value["added"], value["changed"]) == (["new"], ["kept"])
        assert (value["removed"], value["later"]) == (["busy"], [])
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


NAMES = """
[models.m.presets.brief]
max_tokens = 2
[gateway.names]
"claude-*" = "other:brief"
"""


@pytest.fixture(scope="module")
def named_daemon() -> Iterator[HttpDaemon]:
    new = HttpDaemon({"m": fake(aliases=["other", "org/other"], preload=False)})
    new.config.write_text(new.config.read_text() + NAMES)
    with new as running:
        yield running


def test_a_client_may_use_either(named_daemon: HttpDaemon) -> None:
    with named_daemon.client() as client:
        client.load("org/other")
        texts = {client.complete(name, prompt="a", max_tokens=3).text for name in ("m", "other")}
    assert len(texts) == 1


@pytest.mark.parametrize("word", ["load", "restart", "unload"])
def test_commands_take_an_alias_and_show_the_model(named_daemon: HttpDaemon, word: str) -> None:
    done = run_cli(word, "other", "--json", "--endpoint", named_daemon.endpoint)
    assert done.returncode == 0, done.stderr
    assert [row["name"] for row in json.loads(done.stdout)["models"]] == ["m"]


def test_logs_are_those_of_the_model(named_daemon: HttpDaemon) -> None:
    with named_daemon.client() as client:
        client.load("m")
    named, other = (
        run_cli("logs", name, "--endpoint", named_daemon.endpoint).stdout
        for name in ("m", "org/other")
    )
    assert named.startswith("--- generation 1")
    assert other == named
    missing = run_cli("logs", "another", "--endpoint", named_daemon.endpoint)
    assert "configured: m" in missing.stderr


@pytest.mark.parametrize("name", ["m:brief", "org/other:brief", "claude-opus-9"])
def test_over_http_a_name_may_mean_a_preset(named_daemon: HttpDaemon, name: str) -> None:
    status, answer = named_daemon.post("/v1/chat/completions", chat("a", model=name))
    assert (status, answer["model"]) == (200, name)
    assert answer["usage"]["completion_tokens"] == 2


def test_a_reload_changes_presets_and_says_that_names_have_to_wait(
    named_daemon: HttpDaemon,
) -> None:
    text = named_daemon.config.read_text()
    new = text.replace("max_tokens = 2", "max_tokens = 3").replace("claude-*", "gpt-*")
    named_daemon.config.write_text(new)
    with named_daemon.client() as client:
        value = client.reload()
    assert (value["changed"], value["later"]) == (["m"], ["gateway"])

    def tokens() -> bool:
        _, answer = named_daemon.post("/v1/chat/completions", chat("a", model="claude-opus-9"))
        return bool(answer["usage"]["completion_tokens"] == 3)

    eventually(tokens)
