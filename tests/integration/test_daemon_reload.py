"""A reload of a real daemon: whole or not at all; only what has changed is touched (P20)."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from mlxsup.client import Client, RequestError

from support.cli.cli import run_cli
from support.client.streams import Reader
from support.daemon.daemon import fake, row, wait_for_state
from support.eventually import eventually
from support.gateway.http_daemon import HttpDaemon, chat

SLOW = {"step_s": 0.02}
KEPT, BUSY = fake(fake=SLOW), fake(fake=SLOW)
TWO = {"kept": KEPT, "busy": BUSY}
NAMED = fake(aliases=["other", "org/other"], preload=False)
NAMES = """
[models.m.presets.brief]
max_tokens = 2
[gateway.names]
"claude-*" = "other:brief"
"""


def write(daemon: HttpDaemon, models: dict[str, dict[str, Any]], names: str = NAMES) -> None:
    """Writes these models, and one with other names."""
    daemon.write_config(models | {"m": NAMED})
    with daemon.config.open("a") as config:
        config.write(names)


@pytest.fixture(scope="module")
def daemon() -> Iterator[HttpDaemon]:
    """A daemon with a gateway whose configuration file is a link."""
    new = HttpDaemon({})
    write(new, {"old": fake(preload=False)})
    target = new.config.with_name("v1.toml")
    new.config.rename(target)
    new.config.symlink_to(target)
    with new as running:
        yield running


@pytest.fixture
def two(daemon: HttpDaemon, client: Client) -> None:
    """Has the daemon serve two models that are READY."""
    write(daemon, TWO)
    client.reload()
    for name in ("kept", "busy"):
        wait_for_state(client, name, "READY")


def test_a_link_is_followed_anew(daemon: HttpDaemon, client: Client) -> None:
    """Programs that build configurations switch a link from one to the next."""
    target = daemon.config.with_name("v2.toml")
    (daemon.folder / "v1.toml").unlink()
    daemon.config.unlink()
    write(daemon, {"kept": KEPT})
    daemon.config.rename(target)
    daemon.config.symlink_to(target)
    value = client.reload()
    assert (value["added"], value["removed"]) == (["kept"], ["old"])


@pytest.mark.usefixtures("two")
def test_a_dry_run_says_what_would_happen_and_changes_nothing(
    daemon: HttpDaemon, client: Client
) -> None:
    before = client.status()
    logged = daemon.log_text().count("memory budget size=")
    stream = Reader(client, "busy", "runs", max_tokens=2000).started()
    new = {"kept": KEPT | {"idle_unload_s": 500}, "new": fake(fake=SLOW, preload=False)}
    write(daemon, new)
    value = client.reload(dry_run=True)
    becomes = {row["model"]: row["becomes"] for row in value["foreseen"]}
    assert becomes.items() >= {"kept": "READY", "busy": "DRAINING", "new": "STOPPED"}.items()
    done = daemon.run("reload", "--dry-run")
    assert [" ".join(line.split()) for line in done.stdout.splitlines()] == [
        "MODEL CHANGE STATE WHAT HAPPENS",
        "kept changed READY takes effect without a restart",
        "busy removed READY finishes 1 running request, then ends",
        "new added - is loaded on request",
    ]
    after = client.status()
    assert [(row["name"], row["pid"]) for row in after["models"]] == [
        (row["name"], row["pid"]) for row in before["models"]
    ]
    assert daemon.log_text().count("memory budget size=") == logged, "it is no other one yet"
    daemon.config.write_text("nonsense")
    wrong = daemon.run("reload", "--dry-run")
    assert wrong.returncode == 78
    assert "hint: correct the file, then run `mlxsup reload --endpoint" in wrong.stderr
    stream.stream.cancel()
    stream.finished()


@pytest.mark.usefixtures("two")
def test_a_bad_file_changes_nothing_and_names_every_problem_P20(
    daemon: HttpDaemon, client: Client
) -> None:
    pids = [m["pid"] for m in client.status()["models"]]
    refused = daemon.log_text().count("reload refused")
    write(daemon, TWO, '[models.third]\npath = "x"\nmax_concurency = 3\n')
    with pytest.raises(RequestError) as caught:
        client.reload()
    assert caught.value.code == "invalid_request"
    [problem] = caught.value.detail["problems"]
    assert "max_concurrency" in problem
    done = daemon.run("reload")
    assert (done.returncode, "max_concurency" in done.stderr) == (78, True)
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGHUP)
    eventually(lambda: daemon.log_text().count("reload refused") == refused + 3)
    daemon.config.write_text("= not toml")
    with pytest.raises(RequestError):
        client.reload()
    assert [m["pid"] for m in client.status()["models"]] == pids
    assert client.complete("kept", prompt="x", max_tokens=2).finish_reason == "length"


@pytest.mark.usefixtures("two")
def test_a_reload_touches_what_has_changed_once_it_has_drained(
    daemon: HttpDaemon, client: Client
) -> None:
    """One model keeps its process, one gets another, one is removed, one is new."""
    write(daemon, TWO | {"gone": BUSY})
    client.reload()
    wait_for_state(client, "gone", "READY")
    pids = {name: row(client, name)["pid"] for name in ("kept", "busy")}
    running = {
        name: Reader(client, name, "runs", max_tokens=count).started()
        for name, count in (("kept", 150), ("busy", 60), ("gone", 60))
    }
    changed = {"kept": KEPT | {"idle_unload_s": 500}, "busy": BUSY | {"max_concurrency": 3}}
    write(daemon, changed | {"new": fake(fake=SLOW)})
    done = daemon.run("reload", "--json")
    assert done.returncode == 0, done.stderr
    value = json.loads(done.stdout)
    assert (value["added"], value["changed"]) == (["new"], ["kept", "busy"])
    assert (value["removed"], value["later"]) == (["gone"], [])
    for reader in running.values():
        result = reader.finished()
        assert (result.finish_reason, result.resumed) == ("length", 0), "each drains"
    names = ["kept", "busy", "new", "m"]
    eventually(lambda: [m["name"] for m in client.status()["models"]] == names)
    wait_for_state(client, "new", "READY")
    eventually(lambda: row(client, "busy")["generation"] == 2)
    assert wait_for_state(client, "busy", "READY")["row_limit"] == 3
    assert row(client, "kept")["pid"] == pids["kept"]
    with pytest.raises(RequestError) as gone:
        client.complete("gone", prompt="x", max_tokens=1)
    assert gone.value.code == "unknown_model"


# ---------------------------------------------------------------- names


def test_an_alias_and_a_preset_mean_their_model_until_a_reload(
    daemon: HttpDaemon, client: Client
) -> None:
    write(daemon, {})
    client.reload()
    for word in ("load", "restart", "unload"):
        done = run_cli(word, "other", "--json", "--endpoint", daemon.endpoint)
        assert done.returncode == 0, done.stderr
        assert [row["name"] for row in json.loads(done.stdout)["models"]] == ["m"]
    texts = {client.complete(name, prompt="a", max_tokens=3).text for name in ("m", "org/other")}
    assert len(texts) == 1
    named, other = (daemon.run("logs", name).stdout for name in ("m", "org/other"))
    assert named.startswith("--- generation 1")
    assert other == named
    assert "configured: m" in daemon.run("logs", "another").stderr

    def answered(name: str) -> int:
        status, answer = daemon.post("/v1/chat/completions", chat("a", model=name))
        assert (status, answer["model"]) == (200, name)
        return int(answer["usage"]["completion_tokens"])

    assert [answered(n) for n in ("m:brief", "org/other:brief", "claude-opus-9")] == [2, 2, 2]
    write(daemon, {}, NAMES.replace("= 2", "= 3").replace("claude-*", "gpt-*"))
    value = client.reload()
    assert (value["changed"], value["later"]) == (["m"], ["gateway"])
    eventually(lambda: answered("claude-opus-9") == 3)
