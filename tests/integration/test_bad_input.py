"""Every kind of bad input gets its typed error, and a stream beside it does not change.

The cases are data, in tests/support/bad.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from collections.abc import Iterator

import pytest

from mlxsup.client import RequestError
from mlxsup.protocol.client_messages import CLIENT_MESSAGES

from support.bad.daemon import undisturbed
from support.bad.input import (
    BODIES,
    FRAMES,
    HEADERS,
    MODEL,
    REQUESTS,
    SMALL,
    SMALL_CONTEXT,
    VALUES,
    WRONG_FIELDS,
    BadInput,
    header,
)
from support.client.raw_client import RawClient
from support.client.streams import Reader
from support.daemon import warm
from support.daemon.daemon import Daemon, fake, row


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    models = {
        MODEL: fake(fake={"step_s": 0.004, "context_length": 10_000_000}),
        SMALL: fake(context_length=SMALL_CONTEXT),
    }
    with Daemon(models) as running:
        with running.client() as client:
            for name in models:
                client.load(name)
        yield running


@pytest.fixture(scope="module", autouse=True)
def live(daemon: Daemon) -> Iterator[Reader]:
    """A stream beside all of these tests; in the end nothing of it may have changed."""
    with undisturbed(daemon) as reader:
        yield reader


@pytest.fixture(autouse=True)
def live_goes_on(live: Reader) -> Iterator[None]:
    yield
    assert live.error is None


@pytest.mark.parametrize(
    "case", [*FRAMES, *HEADERS, *VALUES, *REQUESTS, *BODIES], ids=lambda case: case.name
)
def test_bad_message_gets_its_error_C7_D7_G6_H10(daemon: Daemon, case: BadInput) -> None:
    with RawClient(daemon.endpoint) as raw:
        for frames in case.sends:
            raw.say(frames)
        answer = raw.hear_error()
        error = answer["error"]
        assert (answer["id"], error["code"], error["retryable"]) == (case.id, case.code, False)
        assert case.words in error["message"]
        # The same connection is as good as before, and nothing else is on its way.
        raw.say([header("ping", id="after")])
        reply = raw.hear()
        assert (reply["type"], reply["id"]) == ("reply", "after")


NO_REQUEST = "no open request has the id or number 'nobody'"
NO_MODEL = "there is no model 'nobody'"
COMMANDS: list[tuple[tuple[str, ...], int, str]] = [
    (("wait", "nobody"), 1, NO_MODEL),
    (("why", "nobody"), 1, "there is no model or request 'nobody'; models: "),
    (("why", "smal"), 1, "did you mean small?"),
    (("why", MODEL, "--report", "/nowhere/r.tar.gz"), 1,
     "cannot write /nowhere/r.tar.gz: No such file"),
    (("why", MODEL, "--report", os.devnull), 64, "/dev/null already exists"),
    (("generate", MODEL), 64, "Missing argument 'PROMPT'"),
    (("generate", "hi"), 64, "name a model: "),
    (("chat", "--seed", "1"), 64, "name a model: "),
    (("bench", "nobody"), 1, NO_MODEL),
    (("bench", SMALL, "--prompt-tokens", str(SMALL_CONTEXT)), 1,
     f"do not fit into the {SMALL_CONTEXT} tokens"),
    (("bench", MODEL, "--concurrency", "5000"), 1, "requests at once, but you asked for 5000"),
    (("generate", MODEL, "-"), 64, "at least one character"),
    (("generate", "smal", "hi"), 1, "did you mean small?"),
    (("load", "nobody"), 1, NO_MODEL),
    (("load", ""), 1, "there is no model ''"),
    (("prioritize", "nobody", "batch"), 1, NO_REQUEST),
    (("attach", "nobody"), 1, NO_REQUEST),
    (("cancel", "nobody"), 1, NO_REQUEST),
    (("connect", "zed"), 1, "the daemon runs without HTTP"),
    (("key", "revoke", "nobody"), 1, "there is no key named 'nobody'"),
    (("generate", SMALL, "y" * SMALL_CONTEXT), 1,
     f"maximum context length is {SMALL_CONTEXT} tokens"),
]  # fmt: skip
"""Commands, their exit codes, and words of their errors; test_cli_commands.py has those that need
no daemon."""


def check_command(
    daemon: Daemon, arguments: tuple[str, ...], status: int, words: str, stdin: bytes = b""
) -> None:
    target = ("--endpoint", daemon.endpoint)

    def say(*more: str) -> subprocess.CompletedProcess[bytes]:
        command = Daemon.command(*arguments, *target, *more)
        return warm.run(command, stdin=stdin, timeout_s=60.0)

    said = say()
    assert (said.returncode, said.stdout) == (status, b""), said.stderr
    assert words in said.stderr.decode()
    assert b"Traceback" not in said.stderr
    as_json = say("--json")
    assert (as_json.returncode, as_json.stderr) == (status, b"")
    error = json.loads(as_json.stdout)["error"]
    assert words in f"{error['message']} {error['hint']}"


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [pytest.param(*case, id=ascii(" ".join(case[0])[:60])) for case in COMMANDS],
)
def test_command_says_one_sentence(
    daemon: Daemon, arguments: tuple[str, ...], status: int, words: str
) -> None:
    check_command(daemon, arguments, status, words)


def test_prompt_that_is_no_text_is_refused_with_its_place(daemon: Daemon) -> None:
    words = "the prompt on stdin is not UTF-8: invalid start byte at byte 2"
    check_command(daemon, ("generate", MODEL, "-"), 64, words, stdin=b"hi\xff")


def test_prompt_over_the_context_reaches_no_engine_I6(daemon: Daemon) -> None:
    with daemon.client() as client:
        steps = row(client, SMALL)["steps"]
        for body in (
            {"prompt": "y" * SMALL_CONTEXT},
            {"prompt": "y" * 1_000_000},
            {"prompt": "y", "max_tokens": SMALL_CONTEXT},
        ):
            with pytest.raises(RequestError) as caught:
                client.complete(SMALL, **body)
            assert caught.value.code == "context_length_exceeded"
            assert caught.value.detail["context_length"] == SMALL_CONTEXT
        assert row(client, SMALL)["steps"] == steps, "nothing reached the engine"


def test_every_field_of_a_header_has_a_case() -> None:
    names = " ".join(case.name for case in WRONG_FIELDS)
    for cls in CLIENT_MESSAGES:
        for field in {f.name for f in dataclasses.fields(cls)} - {"id", "v", "body"}:
            assert f"`{cls.TYPE}` with `{field}`" in names
