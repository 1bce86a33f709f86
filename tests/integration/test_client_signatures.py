"""What both clients take, and what they call their requests."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

from mlxsup.client.api import ClientBase
from mlxsup.client.async_client import AsyncClient
from mlxsup.client.client import Client
from mlxsup.client.connection import RequestIds


def test_ids_of_two_clients_differ_and_one_never_repeats() -> None:
    one, other = RequestIds(), RequestIds()
    ids = [ids.next() for ids in (one, other) for _ in range(3)]
    assert len(set(ids)) == 6
    assert [name.split("-")[1] for name in ids] == ["1", "2", "3"] * 2
    assert len({name.split("-")[0] for name in ids}) == 2
    assert all(re.fullmatch(r"[0-9a-f]{8}-\d", name) for name in ids), "short enough for logs"


COMMANDS = (
    "ping", "status", "load", "unload", "restart", "prioritize", "pause", "resume", "reload",
    "requests", "cancel", "attach", "log_level",
    "stop", "events", "complete",
)  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_both_clients_take_the_same(name: str) -> None:
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


def test_nothing_but_the_model_must_be_said_of_a_request() -> None:
    parameters = inspect.signature(ClientBase.generate).parameters
    _, model, *others = parameters.values()
    assert model.default is inspect.Parameter.empty
    assert {one.name for one in others if one.default is not None} == {"resume"}
    assert parameters["resume"].default is True
