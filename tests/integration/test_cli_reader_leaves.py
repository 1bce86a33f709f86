"""A reader that leaves while an answer is waited for: its request ends before it has a token."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from mlxsup.client import Client

from support.cli import TIME_LIMIT_S, Piped, command, environment
from support.daemon import Daemon, fake, wait_for_state
from support.eventually import eventually

BROKEN_PIPE = 141
ENDLESS = 4000
LONG_PROMPT = "word " * 400

MODELS = {
    "loads": fake(preload=False, load_stall_timeout_s=3600, fake={"load_stall": "sleep"}),
    "reads": fake(fake={"prefill_tokens_per_step": 1, "step_s": 0.05}),
    "queues": fake(max_concurrency=1, fake={"step_s": 0.05}),
}
"""Each keeps a request waiting for its first token, for another reason."""

COMMANDS: list[list[str]] = [
    ["generate", "MODEL", LONG_PROMPT],
    ["generate", "MODEL", LONG_PROMPT, "--json"],
    ["chat", "MODEL"],
]


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon(MODELS) as daemon, daemon.client() as client:
        for name in ("reads", "queues"):
            wait_for_state(client, name, "READY")
        with client.generate("queues", prompt="first", max_tokens=ENDLESS) as first:
            next(first)  # whoever comes next waits in the queue
            yield daemon


def requests_of(client: Client, model: str) -> list[dict[str, Any]]:
    """Those that have no token yet."""
    listed = client.requests()["requests"]
    return [one for one in listed if one["model"] == model and one["tokens_sent"] == 0]


@contextmanager
def asking(daemon: Daemon, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A command in pipes that has been asked to answer a long prompt."""
    process = subprocess.Popen(
        command(*arguments, "--endpoint", daemon.endpoint),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment(),
    )
    assert process.stdin is not None
    process.stdin.write(f"{LONG_PROMPT}\n")
    process.stdin.close()
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda words: f"{words[0]} {words[-1][:6]}")
def test_a_request_ends_with_its_reader_before_its_first_token(
    daemon: Daemon, arguments: list[str], model: str
) -> None:
    given = [model if word == "MODEL" else word for word in arguments]
    with daemon.client() as client, asking(daemon, *given) as process:
        eventually(lambda: requests_of(client, model))
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(TIME_LIMIT_S) == BROKEN_PIPE
        eventually(lambda: not requests_of(client, model))


def test_who_has_joined_leaves_with_its_reader_and_the_request_stays(daemon: Daemon) -> None:
    with daemon.client() as client:
        own = client.generate("queues", prompt="second", max_tokens=ENDLESS)
        eventually(lambda: requests_of(client, "queues"))
        with Piped("attach", own.request_id, "--endpoint", daemon.endpoint) as piped:
            assert "waiting, place 1" in piped.note()
            assert piped.process.stdout is not None
            piped.process.stdout.close()
            assert piped.process.wait(TIME_LIMIT_S) == BROKEN_PIPE
        assert [one["id"] for one in requests_of(client, "queues")] == [own.request_id]
        own.cancel()
        eventually(lambda: not requests_of(client, "queues"))
