"""Arguments of both clients: what reaches the daemon, and what is refused before it is sent."""

from __future__ import annotations

import asyncio
import inspect
import re
import subprocess
import sys
from typing import Any

import pytest

from mlxsup.client.async_client import AsyncClient
from mlxsup.client.client import Client
from mlxsup.client.connection import RequestIds
from mlxsup.client.errors import RequestError
from mlxsup.client.parameters import check_client, check_request, encode_generate
from mlxsup.protocol.client_messages import CLIENT_MESSAGES, Generate
from mlxsup.protocol.codec import Decoder
from mlxsup.protocol.errors import ErrorCode
from mlxsup.protocol.ids import RequestId
from mlxsup.protocol.message import Message

ID = RequestId("r")


def encoded(model: Any = "m", **changes: Any) -> Message:
    values: dict[str, Any] = {
        "timeout_s": None,
        "queue_timeout_s": None,
        "first_token_timeout_s": None,
        "client": None,
        "priority": None,
        "resume": True,
        "keep_alive": None,
        "notices": False,
    }
    frames = encode_generate(ID, model, {"prompt": "p"}, **(values | changes))
    return Decoder(CLIENT_MESSAGES, is_strict=True).decode(frames)


def test_every_argument_reaches_the_header() -> None:
    message = encoded(
        timeout_s=3, queue_timeout_s=1, first_token_timeout_s=2, client="me", notices=True
    )
    assert isinstance(message, Generate)
    assert (message.id, message.model, message.client) == ("r", "m", "me")
    assert (message.timeout_s, message.queue_timeout_s, message.first_token_timeout_s) == (3, 1, 2)
    assert (message.notices, message.resume) == (True, True)
    other = encoded(resume=False, keep_alive=-1)
    assert isinstance(other, Generate)
    assert (other.notices, other.resume, other.timeout_s) == (False, False, None)
    assert (message.keep_alive, other.keep_alive) == (None, -1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": ""}, "model must be text of 1 to 128 characters, not empty"),
        ({"model": "x" * 129}, "model must be text of 1 to 128 characters, not text of 129"),
        ({"model": 5}, "model must be text of 1 to 128 characters, not 5"),
        (
            {"model": "\ud800"},
            "model must be text that can be encoded as UTF-8, not lone surrogates",
        ),
        ({"client": ""}, "client must be text of 1 to 1024 characters, not empty"),
        ({"client": "x" * 1025}, "client must be text of 1 to 1024 characters, not text of 1025"),
        (
            {"priority": "urgent"},
            "priority must be one of interactive, normal, batch, not 'urgent'",
        ),
        ({"priority": 1}, "priority must be one of interactive, normal, batch, not 1"),
        ({"resume": 1}, "resume must be true or false, not 1"),
        ({"timeout_s": -0.1}, "timeout_s must be a number of seconds, 0 or more, not -0.1"),
        ({"timeout_s": True}, "timeout_s must be a number of seconds, 0 or more, not True"),
        ({"timeout_s": "1"}, "timeout_s must be a number of seconds, 0 or more, not text"),
        (
            {"queue_timeout_s": float("nan")},
            "queue_timeout_s must be a number of seconds, 0 or more, not nan",
        ),
        (
            {"keep_alive": -2},
            "keep_alive must be a number of seconds, or -1 to keep the model loaded, not -2",
        ),
        (
            {"keep_alive": "5m"},
            "keep_alive must be a number of seconds, or -1 to keep the model loaded, not text",
        ),
        (
            {"first_token_timeout_s": 2e9},
            "first_token_timeout_s must be a number of seconds, 0 or more, not ",
        ),
    ],
)
def test_wrong_argument_is_refused_before_anything_is_sent_C7(
    changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(RequestError) as caught:
        encoded(**changes)
    assert caught.value.message.startswith(words)
    assert caught.value.code is ErrorCode.INVALID_REQUEST
    assert caught.value.detail["parameter"] == next(iter(changes))


COUNT = "context_length must be an integer from 0 to 2147483647, not "
STAYS = "keep_alive must be a number of seconds, or -1 to keep the model loaded, not "


def load_with(**changes: Any) -> None:
    with Client("ipc:///x") as client:
        client.load("m", **changes)


def embed_with(texts: Any) -> None:
    with Client("ipc:///x") as client:
        client.embed("m", texts)


def configure_with(changes: Any) -> None:
    with Client("ipc:///x") as client:
        client.configure(changes)


@pytest.mark.parametrize(
    ("check", "parameter", "value", "words"),
    [
        *((load_with, "context_length", value, COUNT) for value in (-1, 1.5, True, "1", 2**31)),
        *((load_with, "keep_alive", value, STAYS) for value in (-2, True, "1", float("nan"))),
        *((embed_with, "texts", value, "texts must be a list of texts, not") for value in (5, "a")),
        (configure_with, "changes", [1], "changes must be a map of texts by key, not a list"),
        (check_client, "client", "", "client must be text of 1 to 1024 characters, not empty"),
        (
            check_request,
            "request",
            "",
            "request must be text of 1 to 128 characters, not empty",
        ),
    ],
)
def test_wrong_argument_of_a_command_is_refused(
    check: Any, parameter: str, value: object, words: str
) -> None:
    with pytest.raises(RequestError) as caught:
        check(**{parameter: value})
    assert caught.value.message.startswith(words)
    assert caught.value.detail["parameter"] == parameter


def test_largest_arguments_are_sent_C7() -> None:
    name, client = "x" * 128, "\U0001f98a" * 1024
    message = encoded(name, client=client, timeout_s=0, queue_timeout_s=1e9)
    assert isinstance(message, Generate)
    assert (message.model, message.client, message.timeout_s) == (name, client, 0.0)
    assert message.queue_timeout_s == 1e9


def test_both_clients_find_the_endpoint_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXSUP_ENDPOINT", "ipc:///of/the/environment")
    with Client() as client:
        assert client.endpoint == "ipc:///of/the/environment"

    async def endpoint() -> str:
        async with AsyncClient() as client:
            return client.endpoint

    assert asyncio.run(endpoint()) == "ipc:///of/the/environment"


def test_both_clients_check_the_limit_of_a_stop_C7() -> None:
    with Client("ipc:///x") as client, pytest.raises(RequestError) as caught:
        client.stop(timeout_s=-1)
    assert caught.value.detail["parameter"] == "timeout_s"

    async def stop() -> None:
        async with AsyncClient("ipc:///x") as client:
            await client.stop(timeout_s=-1)

    with pytest.raises(RequestError) as caught:
        asyncio.run(stop())
    assert caught.value.detail["parameter"] == "timeout_s"


def test_client_imports_neither_mlx_nor_anything_heavy_A3() -> None:
    code = (
        "import sys, mlxsup.client\n"
        "heavy = {'mlx', 'mlx_lm', 'pydantic', 'rich', 'numpy', 'asyncio', 'mlxsup.supervisor',"
        " 'mlxsup.worker'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
        "mlxsup.client.AsyncClient\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[]", "['asyncio']"]


def test_request_ids_never_repeat() -> None:
    one, other = RequestIds(), RequestIds()
    ids = [ids.next() for ids in (one, other) for _ in range(3)]
    assert len(set(ids)) == 6
    assert [name.split("-")[1] for name in ids] == ["1", "2", "3"] * 2
    assert len({name.split("-")[0] for name in ids}) == 2
    assert all(re.fullmatch(r"[0-9a-f]{8}-\d", name) for name in ids), "short enough for logs"


COMMANDS = (
    "ping", "status", "load", "unload", "restart", "prioritize", "pause", "resume", "reload",
    "requests", "cancel", "attach",
    "stop", "events", "complete",
)  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_both_clients_take_the_same_arguments(name: str) -> None:
    def taken(client: type[Any]) -> dict[str, Any]:
        parameters = inspect.signature(getattr(client, name)).parameters.values()
        return {one.name: (one.kind, one.default) for one in parameters}

    assert taken(Client) == taken(AsyncClient)
    flags = {
        name: default
        for name, (_, default) in taken(Client).items()
        if default is not inspect.Parameter.empty
    }
    assert flags == {
        "requests": {"client": None},
        "status": {"debug": False},
        "load": {"dry_run": False, "keep_alive": None, "context_length": None},
        "reload": {"dry_run": False},
        "restart": {"now": False, "wait": True},
        "stop": {"now": False, "timeout_s": None},
    }.get(name, {})
