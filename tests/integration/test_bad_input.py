"""Every kind of bad input gets its typed error, and a stream beside it does not change.

The cases are data, in tests/support/bad_*.py.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import subprocess
from collections.abc import Iterator

import pytest

from mlxsup.client import Client, RequestError
from mlxsup.protocol.body import RequestBody
from mlxsup.protocol.client_messages import CLIENT_MESSAGES
from mlxsup.protocol.parameters import SAMPLING

from support.bad.bodies import BODIES, CLIENT_ONLY
from support.bad.commands import COMMANDS, BadCommand
from support.bad.daemon import large_and_small, undisturbed
from support.bad.input import (
    FRAMES,
    HEADERS,
    REQUESTS,
    SMALL,
    SMALL_CONTEXT,
    BadBody,
    BadInput,
    header,
)
from support.client.raw_client import RawClient
from support.client.streams import Reader
from support.daemon import warm
from support.daemon.daemon import Daemon, row

RAW: dict[str, tuple[BadInput, ...]] = {
    "Frames": FRAMES,
    "Headers": HEADERS,
    "Requests and commands": REQUESTS,
    "Bodies": tuple(case.as_input() for case in BODIES),
}
"""All that is sent through a raw socket, by heading."""


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with large_and_small(Daemon) as running:
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


RAW_CASES = [
    pytest.param(case, id=f"{title}: {case.name}") for title, cases in RAW.items() for case in cases
]


@pytest.mark.parametrize("case", RAW_CASES)
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


CLIENT_PARAMETERS = set(inspect.signature(Client.generate).parameters)

CLIENT_CASES = [
    pytest.param(case, id=case.name)
    for case in (*BODIES, *CLIENT_ONLY)
    if isinstance(case.body, dict) and case.body.keys() <= CLIENT_PARAMETERS - {"model"}
]


@pytest.mark.parametrize("case", CLIENT_CASES)
def test_client_raises_the_same_error_C7(daemon: Daemon, case: BadBody) -> None:
    def read_all(client: Client) -> None:
        assert isinstance(case.body, dict)
        stream = client.generate(case.model, **case.body)
        assert not case.is_known_to_client, "it was sent"
        for _ in stream:
            pass

    with daemon.client() as client:
        with pytest.raises(RequestError) as caught:
            read_all(client)
        assert client.status()["queue"]["waiting"] == 0, "the client continues"
    assert caught.value.code == case.code
    assert case.words in caught.value.message


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=ascii(" ".join(case.arguments)[:60])) for case in COMMANDS]
)
def test_command_says_one_sentence(daemon: Daemon, case: BadCommand) -> None:
    target = ("--endpoint", daemon.endpoint)

    def say(*more: str) -> subprocess.CompletedProcess[bytes]:
        command = Daemon.command(*case.arguments, *target, *more)
        return warm.run(command, stdin=case.standard_input, timeout_s=60.0)

    said = say()
    assert (said.returncode, said.stdout) == (case.status, b""), said.stderr
    assert case.words in said.stderr.decode()
    assert b"Traceback" not in said.stderr
    as_json = say("--json")
    assert (as_json.returncode, as_json.stderr) == (case.status, b"")
    error = json.loads(as_json.stdout)["error"]
    assert case.words in f"{error['message']} {error['hint']}"


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


def test_every_parameter_and_field_has_a_case() -> None:
    names = " ".join(case.name for case in BODIES)
    for parameter in {*RequestBody.__dataclass_fields__, *SAMPLING} - {"sampling"}:
        assert f"`{parameter}`" in names, f"no bad body for {parameter}"
    names = " ".join(case.name for case in RAW["Headers"])
    for cls in CLIENT_MESSAGES:
        for field in (f.name for f in dataclasses.fields(cls)):
            assert field in ("id", "v", "body") or f"`{cls.TYPE}` with `{field}`" in names
