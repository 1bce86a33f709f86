"""What models are called besides their names: in the client, on the command line, over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from support.cli import run_cli
from support.daemon import fake
from support.eventually import eventually
from support.http_daemon import HttpDaemon, chat

NAMES = """
[models.m.presets.brief]
max_tokens = 2
[gateway.names]
"claude-*" = "other:brief"
"""


@pytest.fixture(scope="module")
def daemon() -> Iterator[HttpDaemon]:
    new = HttpDaemon({"m": fake(aliases=["other", "org/other"], preload=False)})
    new.config.write_text(new.config.read_text() + NAMES)
    with new as running:
        yield running


def test_a_client_may_use_either(daemon: HttpDaemon) -> None:
    with daemon.client() as client:
        client.load("org/other")
        texts = {client.complete(name, prompt="a", max_tokens=3).text for name in ("m", "other")}
    assert len(texts) == 1


@pytest.mark.parametrize("word", ["load", "restart", "unload"])
def test_commands_take_an_alias_and_show_the_model(daemon: HttpDaemon, word: str) -> None:
    done = run_cli(word, "other", "--json", "--endpoint", daemon.endpoint)
    assert done.returncode == 0, done.stderr
    assert [row["name"] for row in json.loads(done.stdout)["models"]] == ["m"]


def test_logs_are_those_of_the_model(daemon: HttpDaemon) -> None:
    with daemon.client() as client:
        client.load("m")
    named, other = (
        run_cli("logs", name, "--endpoint", daemon.endpoint).stdout for name in ("m", "org/other")
    )
    assert named.startswith("--- generation 1")
    assert other == named
    missing = run_cli("logs", "another", "--endpoint", daemon.endpoint)
    assert "configured: m" in missing.stderr


def test_over_http_the_answer_has_the_name_that_was_asked_for(daemon: HttpDaemon) -> None:
    status, answer = daemon.post("/v1/chat/completions", chat("a", max_tokens=3, model="other"))
    assert (status, answer["model"]) == (200, "other")
    _, listed = daemon.get("/v1/models")
    assert [(one["id"], one["aliases"]) for one in listed["data"]] == [
        ("m", ["other", "org/other"]), ("m:brief", []),
    ]  # fmt: skip
    _, one = daemon.get("/v1/models/org/other")
    assert one == listed["data"][0] | {"id": "org/other"}


@pytest.mark.parametrize("name", ["m:brief", "org/other:brief", "claude-opus-9"])
def test_over_http_a_name_may_mean_a_preset(daemon: HttpDaemon, name: str) -> None:
    status, answer = daemon.post("/v1/chat/completions", chat("a", model=name))
    assert (status, answer["model"]) == (200, name)
    assert answer["usage"]["completion_tokens"] == 2


def test_a_reload_changes_presets_and_says_that_names_have_to_wait(daemon: HttpDaemon) -> None:
    text = daemon.config.read_text()
    new = text.replace("max_tokens = 2", "max_tokens = 3").replace("claude-*", "gpt-*")
    daemon.config.write_text(new)
    with daemon.client() as client:
        value = client.reload()
    assert (value["changed"], value["later"]) == (["m"], ["gateway"])

    def tokens() -> bool:
        _, answer = daemon.post("/v1/chat/completions", chat("a", model="claude-opus-9"))
        return bool(answer["usage"]["completion_tokens"] == 3)

    eventually(tokens)


def test_other_names_are_answered_with_those_of_the_configuration(daemon: HttpDaemon) -> None:
    for name in ("m:long", "gpt-9"):
        status, answer = daemon.post("/v1/chat/completions", chat("a", model=name))
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
        assert "configured: m" in answer["error"]["message"]
