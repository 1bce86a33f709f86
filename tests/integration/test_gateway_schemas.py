"""Schemas that are deep, endless or impossible, over HTTP and with a real engine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.daemon import row
from support.http_daemon import HttpDaemon, chat
from support.streams import Reader
from support.tiny_model import make_tiny_model

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
def test_a_schema_that_no_answer_can_follow_is_refused_and_a_stream_does_not_notice(
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


def test_a_schema_that_may_go_round_is_followed(daemon: HttpDaemon) -> None:
    pytest.importorskip("llguidance")
    status, value = daemon.post(CHAT, asked({**CHILD, "required": []}))
    assert status == 200
    assert value["choices"][0]["message"]["content"].startswith("{")


class BareDaemon(HttpDaemon):
    """One whose environment has no llguidance."""

    def start(self, *, environment: dict[str, str] | None = None) -> None:
        """See `Daemon.start`."""
        package = self.folder / "without" / "llguidance"
        package.mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").write_text("raise ImportError('not installed')\n")
        paths = f"{package.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        super().start(environment={"PYTHONPATH": paths, **(environment or {})})


def test_without_llguidance_the_answer_names_the_extra(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "real")
    with BareDaemon({"m": {"path": str(folder), "preload": True}}) as daemon:
        with daemon.client() as client:
            client.load("m")
        status, value = daemon.post(CHAT, asked({"type": "object"}))
        assert (status, value["error"]["param"]) == (400, "response_format")
        assert "install mlxsup[structured]" in value["error"]["message"]
        assert daemon.post(CHAT, chat("x", max_tokens=3))[0] == 200
