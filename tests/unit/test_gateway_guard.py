"""What the gateway refuses before it asks the daemon: hosts, types, lengths, methods, paths."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from mlxsup.client import ConnectionLost
from mlxsup.gateway import limits
from mlxsup.gateway.guard import without_port

from support.played_gateway import PlayedDaemon, Response, Site, delta, result

CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def ask(method: str, path: str, body: Any = None, **more: Any) -> Response:
    """The response to one request; a chat is answered."""
    daemon = PlayedDaemon([delta("a"), result("a")])
    daemon.state = more.pop("state", "READY")
    site = Site(daemon, more.pop("at", "127.0.0.1"))
    return asyncio.run(site.ask(method, path, body, **more))


@pytest.mark.parametrize(
    ("header", "name"),
    [("a", "a"), ("a:80", "a"), ("[::1]:80", "[::1]"), ("[::1]", "[::1]"), ("a:b", "a:b"),
     ("::1:80", "::1:80"), ("", "")],
)  # fmt: skip
def test_the_port_of_a_host_does_not_matter(header: str, name: str) -> None:
    assert without_port(header) == name


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:8484", "[::1]:8484"])
def test_names_of_this_machine_are_let_in(host: str) -> None:
    assert ask("GET", "/health", headers={"host": host}).status == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:8484", "", "10.0.0.1"])
def test_a_page_whose_name_suddenly_means_this_machine_is_refused(host: str) -> None:
    response = ask("GET", "/v1/models", headers={"host": host})
    assert (response.status, response.error["code"]) == (403, "forbidden_host")
    assert response.headers["x-request-id"]


def test_the_address_that_it_listens_at_is_let_in() -> None:
    assert ask("GET", "/health", headers={"host": "127.0.0.9:1"}, at="127.0.0.9").status == 200


@pytest.mark.parametrize(
    "kind", ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]
)
def test_what_a_page_may_send_to_another_site_unasked_is_refused(kind: str) -> None:
    response = ask("POST", CHAT, BODY, headers={"content-type": kind})
    assert (response.status, response.error["code"]) == (415, "unsupported_media_type")
    assert not any(name.startswith("access-control") for name in response.headers)


def test_compressed_bodies_are_refused() -> None:
    assert ask("POST", CHAT, BODY, headers={"content-encoding": "gzip"}).status == 415


def test_json_with_a_charset_is_json() -> None:
    kind = {"content-type": "Application/JSON; charset=utf-8"}
    assert ask("POST", CHAT, BODY, headers=kind).status == 200


def test_a_body_that_is_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_BODY_BYTES", 1000)
    response = ask("POST", CHAT, {**BODY, "user": "x" * 1000})
    assert (response.status, "connection" in response.headers) == (413, False), "it was read"


@pytest.mark.parametrize(
    ("method", "path", "status", "words"),
    [
        ("GET", CHAT, 405, "takes POST"),
        ("OPTIONS", CHAT, 405, "takes POST"),
        ("DELETE", "/v1/models/m", 405, "takes GET"),
        ("GET", "/nothing", 404, "no such path; OpenAI's API is at /v1/chat/completions"),
        ("GET", "/pages/state", 404, "no such path; OpenAI's API is at /v1/chat/completions"),
        ("POST", "/chat/completions", 404, "did you mean /v1/chat/completions?"),
        ("POST", "/v1/v1/messages", 404, "did you mean /v1/messages?"),
        ("POST", "/v1/responses/", 404, "did you mean /v1/responses?"),
        ("GET", "/models/load", 405, "takes POST"),
        ("POST", "/v1/embeddings", 501, "embeddings are not there yet"),
        ("POST", "/v1/audio/speech", 501, "audio is not there yet"),
    ],
)
def test_what_is_not_there_says_so(method: str, path: str, status: int, words: str) -> None:
    response = ask(method, path, BODY if method == "POST" else None)
    assert response.status == status
    assert words in response.error["message"]
    assert response.headers["x-request-id"]
    assert ("allow" in response.headers) == (status == 405)


def test_models_are_listed_with_their_states() -> None:
    (model,) = ask("GET", "/v1/models").json()["data"]
    assert (model["id"], model["object"], model["owned_by"]) == ("m", "model", "mlxsup")
    assert (model["status"], model["meta"]) == ({"value": "loaded"}, {"n_ctx": 64})
    one = ask("GET", "/v1/models/m").json()
    assert one == model | {"created": one["created"]}, "each gateway began when it did"


def test_an_unknown_model_is_answered_with_those_that_there_are() -> None:
    response = ask("GET", "/v1/models/a/b")
    assert (response.status, response.error["code"]) == (404, "model_not_found")
    assert response.error["message"] == "no model is called 'a/b'; configured: m"


@pytest.mark.parametrize(("state", "status"), [("READY", 200), ("STOPPED", 200), ("FAILED", 503)])
def test_it_is_ready_when_a_model_could_answer(state: str, status: int) -> None:
    response = ask("GET", "/ready", state=state)
    assert (response.status, response.json()["models"]) == (status, {"m": state})


def test_without_a_model_nothing_is_said_to_have_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def status(self: PlayedDaemon) -> dict[str, Any]:
        return {"models": []}

    assert ask("GET", "/ready", state="FAILED").json()["status"] == "every model has failed"
    monkeypatch.setattr(PlayedDaemon, "status", status)
    response = ask("GET", "/ready")
    assert (response.status, response.json()["status"]) == (503, "no model is configured")


def test_without_a_daemon_it_is_alive_but_not_ready() -> None:
    lost = ConnectionLost("no daemon answers", "ipc:///x")
    assert ask("GET", "/health", state=lost).status == 200
    response = ask("GET", "/ready", state=lost)
    assert (response.status, response.error["code"]) == (503, "daemon_lost")


def test_a_bug_is_an_answer_and_a_log_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        response = ask("GET", "/v1/models", state=ZeroDivisionError("planted"))
    assert (response.status, response.error["code"]) == (500, "internal")
    assert response.headers["x-should-retry"] == "false"
    (record,) = [one for one in caplog.records if one.name == "mlxsup.gateway.guard"]
    assert response.headers["x-request-id"] in record.getMessage()
