"""Schemas that are deep, endless or impossible, over HTTP and with a real engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support.client.streams import Reader
from support.daemon.daemon import row
from support.gateway.http_daemon import HttpDaemon, chat
from support.models.tiny_model import make_tiny_model

pytestmark = pytest.mark.mlx

CHAT = "/v1/chat/completions"
DEPTH = 400


def deep(depth: int) -> dict[str, Any]:
    """Objects inside each other."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


CHILD = {"type": "object", "properties": {"c": {"$ref": "#"}}, "required": ["c"]}
BAD = {
    "deep": deep(DEPTH),
    "a reference to itself": {"$ref": "#"},
    "two references to each other": {
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a",
    },
    "an object that needs another one like it": CHILD,
    "a reference to nothing": {"$ref": "#/$defs/none"},
    "no value at all": {"type": "object", "properties": {"a": False}, "required": ["a"]},
}  # fmt: skip


def asked(schema: dict[str, Any]) -> dict[str, Any]:
    """A chat in this form."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return chat("x", max_tokens=8, response_format=form)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpDaemon]:
    folder = make_tiny_model(tmp_path_factory.mktemp("models") / "real")
    with HttpDaemon({"m": {"path": str(folder), "preload": True}}) as running:
        with running.client() as client:
            client.load("m")
        yield running


@pytest.mark.parametrize("name", BAD)
def test_schema_that_no_answer_can_follow_is_refused_beside_a_stream(
    daemon: HttpDaemon, name: str
) -> None:
    pytest.importorskip("llguidance")
    with daemon.client() as client:
        expected = client.complete("m", prompt="untouched", max_tokens=300).token_ids
        untouched = Reader(client, "m", "untouched", max_tokens=300).started()
        status, value = daemon.post(CHAT, asked(BAD[name]))
        assert (status, value["error"]["code"]) == (400, "invalid_request"), value
        assert untouched.finished().token_ids == expected
        assert row(client, "m")["generation"] == 1


def test_recursive_schema_is_followed(daemon: HttpDaemon) -> None:
    pytest.importorskip("llguidance")
    status, value = daemon.post(CHAT, asked({**CHILD, "required": []}))
    assert status == 200
    assert value["choices"][0]["message"]["content"].startswith("{")
