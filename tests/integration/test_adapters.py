"""Adapters in a real daemon: over every way in, through crashes, and through a reload."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from mlxsup.client import Client, RequestError

from support.daemon.daemon import fake, row
from support.gateway.http_daemon import HttpDaemon

PROMPT = "tell me about the sea"
SLOW = {"step_s": 0.02}
AT_ONCE = {"drain_timeout_s": 0}
FOLDERS = {"sql": "/adapters/sql", "poem": "/adapters/poem"}


MODELS = {
    "m": fake(fake=SLOW, adapters=FOLDERS, aliases=["n"]),
    "dies": fake(fake=SLOW, adapters=FOLDERS),
}


@pytest.fixture(scope="module")
def daemon() -> Iterator[HttpDaemon]:
    with HttpDaemon(MODELS, AT_ONCE) as running:
        yield running


def finished(stream: Any) -> Any:
    for _ in stream:
        pass
    return stream.result


def text_of(client: Client, model: str, **named: Any) -> str:
    with client.generate(model, prompt=PROMPT, max_tokens=40, **named) as stream:
        return str(finished(stream).text)


def test_each_way_in_reaches_the_adapter(daemon: HttpDaemon) -> None:
    with daemon.client() as client:
        answers = {name: text_of(client, name) for name in ("m", "m:sql", "m:poem")}
        assert len(set(answers.values())) == 3
        assert text_of(client, "n:sql") == answers["m:sql"]
        with pytest.raises(RequestError, match="'m:none'") as caught:
            text_of(client, "m:none")
        assert caught.value.code == "unknown_model"
        assert caught.value.detail["known"] == ["m", "m:poem", "m:sql"]
        assert row(client, "m")["adapters"] == FOLDERS
    for name, answer in answers.items():
        body = {"model": name, "prompt": PROMPT, "max_tokens": 40}
        status, completion = daemon.post("/v1/completions", body)
        assert (status, completion["choices"][0]["text"]) == (200, answer), name
        done = daemon.run("generate", name, PROMPT, "--raw", "--max-tokens", "40")
        assert done.stdout.rstrip("\n") == answer.rstrip("\n"), name
    missed = daemon.run("generate", "m:sqk", PROMPT)
    assert missed.stderr == (
        "error: there is no model 'm:sqk'; configured: m, m:poem, m:sql\n"
        "hint: did you mean m:sql?\n"
    )
    _, listed = daemon.get("/v1/models")
    names = [one["id"] for one in listed["data"]]
    assert names == ["m", "m:sql", "m:poem", "dies", "dies:sql", "dies:poem"]
    assert daemon.get("/v1/models/n:sql")[1]["parent"] == "m"
    status, error = daemon.post("/v1/completions", {"model": "m:none", "prompt": PROMPT})
    assert (status, error["error"]["code"]) == (404, "model_not_found")


def test_answers_survive_a_kill_and_end_if_their_adapter_has_changed(daemon: HttpDaemon) -> None:
    with daemon.client() as client:
        whole = {}
        for name in ("dies", "dies:sql"):
            with client.generate(name, prompt=PROMPT, max_tokens=60) as stream:
                whole[name] = finished(stream).text
        streams = {
            name: client.generate(name, prompt=PROMPT, max_tokens=60)
            for name in ("dies", "dies:sql")
        }
        for stream in streams.values():
            next(iter(stream))
        os.kill(row(client, "dies")["pid"], signal.SIGKILL)
        assert {name: finished(stream).text for name, stream in streams.items()} == whole
        changed = FOLDERS | {"sql": "/adapters/other"}
        long = {name: client.generate(name, prompt=PROMPT, max_tokens=600) for name in streams}
        for stream in long.values():
            next(iter(stream))
        daemon.write_config(MODELS | {"dies": fake(fake=SLOW, adapters=changed)}, AT_ONCE)
        client.reload()
        with pytest.raises(RequestError, match="the model changed") as caught:
            finished(long["dies:sql"])
        assert caught.value.code == "worker_crashed"
        assert finished(long["dies"]).usage.completion_tokens == 600
