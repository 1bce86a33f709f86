"""Access to the gateway: hosts, origins, routes that need a key, and what operators may do."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from mlxsup.client import ConnectionLost, ErrorCode, RequestError
from mlxsup.gateway import limits
from mlxsup.gateway.guard import without_port
from mlxsup.gateway.keys import Keys
from mlxsup.gateway.page.page import FILES
from mlxsup.protocol.key_file import KeyPlace

from support.gateway.key_place import new_key, place_in
from support.gateway.played_gateway import BODY, CHAT, PlayedDaemon, Response, Site, said


class OperatedDaemon(PlayedDaemon):
    """A daemon that accepts commands, or answers all of them with a refusal."""

    def __init__(self, refusal: Exception | None = None) -> None:
        super().__init__()
        self.refusal = refusal

    async def ping(self) -> dict[str, Any]:
        """Answer after what was asked before."""
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        if isinstance(self.refusal, ConnectionLost):
            raise self.refusal
        return {}

    async def command(self, *words: Any) -> dict[str, Any]:
        await super().command(*words)
        await asyncio.sleep(0)
        if self.refusal is not None:
            raise self.refusal
        await asyncio.Event().wait()  # it is not over before the answer
        return {}


LOST = ConnectionLost("no daemon answers", "ipc:///x")


@pytest.fixture
def place(tmp_path: Path) -> KeyPlace:
    return place_in(tmp_path)


# ---------------------------------------------------------------- hosts, types, lengths, paths


def ask(method: str, path: str, body: Any = None, **more: Any) -> Response:
    """The response to one request; a chat is answered."""
    daemon = PlayedDaemon(said("a"))
    daemon.state = more.pop("state", "READY")
    site = Site(daemon, more.pop("at", "127.0.0.1"))
    return asyncio.run(site.ask(method, path, body, **more))


@pytest.mark.parametrize(
    ("header", "name"),
    [("a", "a"), ("a:80", "a"), ("[::1]:80", "[::1]"), ("[::1]", "[::1]"), ("a:b", "a:b"),
     ("::1:80", "::1:80"), ("", "")],
)  # fmt: skip
def test_port_of_a_host_does_not_matter(header: str, name: str) -> None:
    assert without_port(header) == name


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        *(
            ({"content-type": kind, **page}, 415 if page else 200)
            for kind in (
                "", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"
            )
            for page in (
                {}, {"origin": "null"}, {"sec-fetch-site": "cross-site"}, {"referer": "http://a/"}
            )
        ),
        ({"content-encoding": "gzip"}, 415),
        ({"content-type": "Application/JSON; charset=utf-8"}, 200),
    ],
)  # fmt: skip
def test_bodies_that_pages_may_send_unasked_are_refused(
    headers: dict[str, str], status: int
) -> None:
    response = ask("POST", CHAT, BODY, headers=headers)
    assert response.status == status
    if status == 415:
        assert response.error["code"] == "unsupported_media_type"
    assert not any(name.startswith("access-control") for name in response.headers)


def test_body_that_is_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_BODY_BYTES", 1000)
    response = ask("POST", CHAT, {**BODY, "user": "x" * 1000})
    assert (response.status, "connection" in response.headers) == (413, False), "it was read"


@pytest.mark.parametrize(
    ("method", "path", "status", "words"),
    [
        ("GET", CHAT, 405, "must be POST"),
        ("OPTIONS", CHAT, 405, "must be POST"),
        ("DELETE", "/v1/models/m", 405, "must be GET or HEAD"),
        *(("GET", path, 404, "no such path; OpenAI's API is at /v1/chat/completions")
          for path in ("/pages/state", "/x", "//", "/page/x/y")),
        *(("GET", path, 404, f"no such path; did you mean {meant}?") for path, meant in (
            ("/v1/responses/", "/v1/responses"), ("/v1/version", "/version"),
            ("/v1/reranks", "/v1/rerank"),
            ("/completion", "/v1/completions"), ("/tags", "/api/tags"), ("/chat", "/api/chat"),
            ("/chat/completions", "/v1/chat/completions"), ("/completions", "/v1/completions"),
            ("/v1/v1/messages", "/v1/messages"), ("/api/v1/messages", "/v1/messages"),
            ("/v1/chat/completion", "/v1/chat/completions"), ("/healthz", "/health"),
            ("/v1/api/chat", "/api/chat"), ("/api/pul", "/api/pull"),
        )),
        ("GET", "/models/load", 405, "must be POST"),
        ("GET", "/v1/embeddings", 405, "must be POST"),
        ("POST", "/v1/audio/speech", 501, "audio is not there yet"),
    ],
)  # fmt: skip
def test_unknown_path_or_method_is_refused(method: str, path: str, status: int, words: str) -> None:
    response = ask(method, path, BODY if method == "POST" else None)
    assert response.status == status
    error = response.json()["error"]
    assert words in (error if isinstance(error, str) else error["message"])
    if isinstance(error, dict):
        codes = {404: "unknown_path", 405: "method_not_allowed", 501: "not_implemented"}
        assert error["code"] == codes[status]
    assert response.headers["x-request-id"]
    assert ("allow" in response.headers) == (status == 405)


@pytest.mark.parametrize(
    ("state", "status", "words"),
    [
        ("READY", 200, "ready"),
        ("STOPPED", 200, "ready"),
        ("FAILED", 503, "every model has failed"),
        (None, 503, "no model is configured"),
    ],
)
def test_gateway_is_ready_when_a_model_could_answer(
    state: str | None, status: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_models(self: PlayedDaemon) -> dict[str, Any]:
        return {"models": [], "stopping": None}

    if state is None:
        monkeypatch.setattr(PlayedDaemon, "status", no_models)
    response = ask("GET", "/ready", state=state or "READY")
    models = {} if state is None else {"m": state}
    assert (response.status, response.json()["status"]) == (status, words)
    assert response.json()["models"] == models


@pytest.mark.parametrize(
    ("state", "name", "status", "after"),
    [
        ("READY", "m", 200, None),
        ("READY", "m:latest", 200, None),
        ("LOADING", "m", 503, "1"),
        ("BACKOFF", "m", 503, "7"),
        ("STOPPED", "m", 503, None),
        ("FAILED", "m", 503, None),
        ("READY", "other", 404, None),
    ],
)
def test_router_asks_whether_one_model_answers_at_once(
    state: str, name: str, status: int, after: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = PlayedDaemon.status

    async def with_a_time(self: PlayedDaemon) -> dict[str, Any]:
        found = await played(self)
        waits = {"retry_in_s": 6.2 if state == "BACKOFF" else None}
        return {**found, "models": [row | waits for row in found["models"]]}

    monkeypatch.setattr(PlayedDaemon, "status", with_a_time)
    response = ask("GET", "/ready", state=state, query=f"model={name}")
    assert (response.status, response.headers.get("retry-after")) == (status, after)
    if status == 200:
        assert response.json() == {"status": "ready", "models": {"m": "READY"}}
    elif status == 503:
        assert state in response.error["message"]
        assert (response.headers["x-should-retry"] == "true") is (after is not None)


@pytest.mark.parametrize("query", ["", "model=m"])
def test_gateway_of_a_daemon_that_ends_is_not_ready_while_its_models_are(query: str) -> None:
    daemon = PlayedDaemon()
    daemon.stopping = {"running": 1, "limit_s": 30.0}
    response = asyncio.run(Site(daemon).ask("GET", "/ready", query=query))
    assert (response.status, response.error["code"]) == (503, "shutting_down")
    assert response.headers["retry-after"]


def test_gateway_without_a_daemon_is_alive_and_not_ready() -> None:
    assert ask("GET", "/health", state=LOST).status == 200
    response = ask("GET", "/ready", state=LOST)
    assert (response.status, response.error["code"]) == (503, "daemon_lost")
    assert response.error["message"] == str(LOST)


def test_bug_is_an_answer_and_a_log_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        response = ask("GET", "/v1/models", state=ZeroDivisionError("planted"))
    assert (response.status, response.error["code"]) == (500, "internal")
    assert response.headers["x-should-retry"] == "false"
    (record,) = [one for one in caplog.records if one.name == "mlxsup.gateway.guard"]
    assert response.headers["x-request-id"] in record.getMessage()


# ---------------------------------------------------------------- routes and keys


class Leaves:
    """An awaitable of a client that leaves at once."""

    def __await__(self) -> Generator[None, None, None]:
        yield


class WholeDaemon(PlayedDaemon):
    """One with a status that `/metrics` can show."""

    async def status(self) -> dict[str, Any]:
        sizes = ("budget_bytes", "effective_budget_bytes", "reserved_bytes", "machine_bytes")
        memory = dict.fromkeys(sizes, 0)
        return {
            "version": "1", "uptime_s": 0, "memory": memory, "gateway": None, "models": [],
            "log_dir": "/nowhere", "stopping": None,
        }  # fmt: skip

    async def requests(self) -> dict[str, Any]:
        return {"requests": [], "more": 0}


def test_every_route_but_the_open_ones_needs_a_key(
    place: KeyPlace, snapshot: SnapshotAssertion
) -> None:
    """Each method and path, with no key, a wrong one, that of a guest and that of an operator.

    A new route shows up here. Without a key it answers 401 unless it is on this list.
    """
    guest, boss = new_key(place, "guest"), new_key(place, "boss", is_operator=True)
    site = Site(WholeDaemon(), keys=Keys(place))
    loaded = [f"/page/{one}" for one in os.listdir(FILES) if one.endswith((".js", ".css"))]
    others = [("GET", path) for path in (*sorted(loaded), "/nothing", "/health/", "//")]

    async def status(method: str, path: str, key: str) -> int:
        body, headers = b"{}" if method == "POST" else None, {"x-api-key": key}
        # The events of models never end, so that the client has to leave.
        asked = site.ask(method, path, body, headers=headers, until=Leaves(), has_life=False)
        return (await asked).status

    async def run() -> dict[str, list[int]]:
        async with site.life():
            return {
                f"{method} {path}": [
                    await status(method, path, key) for key in ("", "wrong", guest, boss)
                ]
                for method, path in [*site.routes(), *others]
            }

    seen = asyncio.run(run())
    assert {route: " ".join(map(str, statuses)) for route, statuses in seen.items()} == snapshot
    assert {route for route, statuses in seen.items() if statuses[0] != 401} == {
        *(f"{method} {path}" for method in ("GET", "HEAD") for path in (
            "/", "/health", "/docs", "/openapi.json",
        )),
        *(f"GET {path}" for path in loaded),
    }  # fmt: skip
    assert all(statuses[2] != 401 for statuses in seen.values())


# ---------------------------------------------------------------- pages of other sites


LOCAL = "http://localhost:3000"
AWAY = "https://chat.example"
EVIL = "https://evil.example"


def ask_from(site: Site, method: str, path: str, origin: str, **headers: str) -> Response:
    """A browser's request for a page of this origin."""
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    body = BODY if method == "POST" else None
    return asyncio.run(site.ask(method, path, body, headers={"origin": origin, **given}))


def preflight(site: Site, path: str, origin: str, wanted: str = "content-type") -> Response:
    """Ask as a browser does before the request of a page."""
    return ask_from(
        site, "OPTIONS", path, origin,
        access_control_request_method="POST", access_control_request_headers=wanted,
    )  # fmt: skip


def site_of(*origins: str, keys: Keys | None = None, hosts: tuple[str, ...] = ()) -> Site:
    daemon = PlayedDaemon(said("a"))
    return Site(daemon, keys=keys, origins=origins, hosts=hosts)


def shared(response: Response) -> dict[str, str]:
    """The headers that a browser looks for."""
    return {k: v for k, v in response.headers.items() if k.startswith("access-control-")}


def test_listed_page_may_ask_and_read() -> None:
    site = site_of(LOCAL)
    question = preflight(site, CHAT, LOCAL, "content-type, X-Stainless-OS,x-mlxsup-token, b d")
    assert (question.status, question.body) == (204, b"")
    assert shared(question) == {
        "access-control-allow-origin": LOCAL,
        "access-control-allow-methods": "GET, POST, DELETE",
        "access-control-allow-headers": "content-type, x-stainless-os",
        "access-control-expose-headers": "x-request-id, request-id, x-mlxsup-changed,"
        " x-mlxsup-ignored, retry-after, x-should-retry",
        "access-control-max-age": "600",
    }
    response = ask_from(site, "POST", CHAT, LOCAL)
    assert (response.status, response.headers["vary"]) == (200, "origin")
    assert response.headers["access-control-allow-origin"] == LOCAL
    refused = asyncio.run(site.ask("POST", CHAT, b"no", headers={"origin": LOCAL}))
    assert refused.status == 400
    assert refused.headers["access-control-allow-origin"] == LOCAL, "an error can be read, too"


@pytest.mark.parametrize(
    ("listed", "origin"),
    [
        *(((), origin) for origin in (LOCAL, EVIL, "null")),
        *(
            ((LOCAL,), origin)
            for origin in (
                EVIL, "null", "http://localhost:3001", "http://localhost", f"{LOCAL}/", f"{LOCAL}0"
            )
        ),
    ],
)  # fmt: skip
def test_page_that_is_not_listed_may_read_nothing(listed: tuple[str, ...], origin: str) -> None:
    site = site_of(*listed)
    response = ask_from(site, "GET", "/v1/models", origin)
    assert (response.status, shared(response)) == (200, {})
    assert response.headers.get("vary") == ("origin" if listed else None)
    question = preflight(site, CHAT, origin)
    assert (question.status, shared(question)) == (405, {})


def test_two_origins_are_none() -> None:
    asked = site_of(LOCAL).ask("GET", "/v1/models", headers={"origin": (LOCAL, EVIL)})
    assert shared(asyncio.run(asked)) == {}


@pytest.mark.parametrize("path", ["/", "/page/state", "/page/page.js"])
def test_page_with_the_token_is_read_by_no_listed_page(path: str) -> None:
    site = site_of(LOCAL)
    assert shared(ask_from(site, "GET", path, LOCAL)) == {}
    assert preflight(site, path, LOCAL).status == 405


def test_preflight_needs_no_key(place: KeyPlace) -> None:
    key = new_key(place, "a")
    site = site_of(AWAY, keys=Keys(place))
    assert preflight(site, CHAT, AWAY, "authorization").status == 204
    refused = ask_from(site, "GET", "/v1/models", AWAY)
    assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, AWAY)
    assert ask_from(site, "GET", "/v1/models", AWAY, authorization=f"Bearer {key}").status == 200


@pytest.mark.parametrize(
    "host",
    [
        "ai.example", "AI.example:443", "[2001:db8::1]:80",
        "localhost", "LOCALHOST:1", "127.0.0.1:8484", "[::1]:8484",
    ],
)  # fmt: skip
def test_listed_host_and_own_ones_are_let_in(host: str) -> None:
    hosts = ("Ai.Example", "[2001:db8::1]")
    site = Site(PlayedDaemon(), "127.0.0.9", hosts=hosts)
    assert asyncio.run(site.ask("GET", "/health", headers={"host": host})).status == 200


@pytest.mark.parametrize(
    ("own", "host"),
    [("127.0.0.9", "127.0.0.9:1"), ("0:0:0:0:0:0:0:1", "[0:0:0:0:0:0:0:1]:8484")],
)
def test_address_that_it_listens_at_is_let_in(own: str, host: str) -> None:
    site = Site(PlayedDaemon(), own)
    assert asyncio.run(site.ask("GET", "/health", headers={"host": host})).status == 200


@pytest.mark.parametrize("host", ["evil.example", "ai.example.evil.example", "x.ai.example", ""])
def test_host_that_is_not_listed_is_refused(host: str) -> None:
    site = site_of(LOCAL, hosts=("ai.example",))
    for hosts in (host, ("ai.example", host or "evil.example")):
        response = asyncio.run(site.ask("GET", "/v1/models", headers={"host": hosts}))
        assert (response.status, response.error["code"]) == (403, "forbidden_host")
    assert response.error["message"] == (
        "the header `host` must be one of 127.0.0.1, [::1], ai.example, localhost; `hosts` of"
        " [gateway] adds others"
    )
    asked = ask_from(site, "OPTIONS", CHAT, LOCAL, host=host, access_control_request_method="POST")
    assert asked.status == 403, "a preflight, too"


# ---------------------------------------------------------------- what operators may do


ACTIONS = ["load", "unload", "restart"]


def act(site: Site, action: str = "load", body: Any = None, **headers: str) -> Response:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    asked = {"model": "m"} if body is None else body
    return asyncio.run(site.ask("POST", f"/models/{action}", asked, headers=given))


def token_of(site: Site) -> str:
    token: str = site.gateway.operator.token
    return token


@pytest.mark.parametrize("action", ACTIONS)
def test_only_an_operator_may_and_is_answered_before_the_end(place: KeyPlace, action: str) -> None:
    daemon = OperatedDaemon()
    guest, boss = new_key(place, "laptop"), new_key(place, "boss", is_operator=True)
    site = Site(daemon, keys=Keys(place))
    refused = act(site, action, x_api_key=guest)
    assert (refused.status, refused.error["code"]) == (403, "operator_only")
    assert "mlxsup key new NAME --operator" in refused.error["message"]
    assert daemon.commands == []
    response = act(site, action, x_api_key=boss)
    assert (response.status, response.json()) == (200, {"success": True, "model": "m"})
    assert daemon.commands == [(action, "m")]


@pytest.mark.parametrize("action", ACTIONS)
def test_without_keys_only_the_page_may_operate(place: KeyPlace, action: str) -> None:
    daemon = OperatedDaemon()
    site = Site(daemon, keys=Keys(place))
    for headers in ({}, {"x_mlxsup_token": "x"}, {"x_mlxsup_token": "\xff"}, {"x_api_key": "x"}):
        response = act(site, action, **headers)
        assert (response.status, response.error["code"]) == (403, "operator_only")
        assert "key new" not in response.error["message"], "a first key locks all others out"
        assert "`mlxsup add`" in response.error["message"]
    assert daemon.commands == []
    assert act(site, action, x_mlxsup_token=token_of(site)).status == 200
    assert daemon.commands == [(action, "m")]


def test_token_of_the_page_is_no_key(place: KeyPlace) -> None:
    key = new_key(place, "laptop")
    daemon = OperatedDaemon()
    site = Site(daemon, keys=Keys(place))
    assert act(site, x_mlxsup_token=token_of(site)).status == 401
    assert act(site, x_mlxsup_token=token_of(site), x_api_key=key).status == 403
    assert daemon.commands == []


class SilentDaemon(OperatedDaemon):
    """A daemon that does not answer at all."""

    async def ping(self) -> dict[str, Any]:
        return await self.command("ping", "")


UNKNOWN = RequestError(ErrorCode.UNKNOWN_MODEL, "there is no model 'n'; configured: m", detail={})


@pytest.mark.parametrize(
    ("daemon", "error"),
    [
        (OperatedDaemon(UNKNOWN), (404, "model_not_found", None)),
        (OperatedDaemon(LOST), (503, "daemon_lost", "true")),
        (SilentDaemon(), (503, "daemon_silent", "true")),
    ],
    ids=["refused", "lost", "silent"],
)
def test_refusal_of_the_daemon_is_the_answer(
    place: KeyPlace, daemon: OperatedDaemon, error: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "STATUS_LIMIT_S", 0.01 if isinstance(daemon, SilentDaemon) else 60)
    key = new_key(place, "boss", is_operator=True)
    response = act(Site(daemon, keys=Keys(place)), body={"model": "n"}, x_api_key=key)
    retry = response.headers.get("x-should-retry")
    assert (response.status, response.error["code"], retry) == error


@pytest.mark.parametrize(
    ("body", "param"),
    [({}, "model"), ({"model": ""}, "model"), ({"model": 3}, "model"),
     ({"model": "m", "now": True}, "now")],
)  # fmt: skip
def test_wrong_action_is_refused_with_its_field(place: KeyPlace, body: Any, param: str) -> None:
    key = new_key(place, "boss", is_operator=True)
    daemon = OperatedDaemon()
    response = act(Site(daemon, keys=Keys(place)), body=body, x_api_key=key)
    assert (response.status, response.error["param"]) == (400, param)
    assert daemon.commands == []


def test_action_under_way_is_not_asked_for_twice_and_another_one_is(place: KeyPlace) -> None:
    headers = {"x-api-key": new_key(place, "boss", is_operator=True)}
    daemon = OperatedDaemon()
    site = Site(daemon, keys=Keys(place))

    async def ask() -> list[int]:
        actions = ("load", "load", "unload")
        asks = [
            site.ask("POST", f"/models/{action}", {"model": "m"}, headers=headers)
            for action in actions
        ]
        return [(await one).status for one in asks]

    assert asyncio.run(ask()) == [200, 200, 200]
    assert daemon.commands == [("load", "m"), ("unload", "m")]


def test_action_that_is_over_is_asked_for_again(place: KeyPlace) -> None:
    headers = {"x-api-key": new_key(place, "boss", is_operator=True)}
    daemon = OperatedDaemon(UNKNOWN)
    site = Site(daemon, keys=Keys(place))

    async def ask() -> None:
        async with site.life():
            for _ in range(2):
                await site.ask(
                    "POST", "/models/load", {"model": "m"}, headers=headers, has_life=False
                )

    asyncio.run(ask())
    assert daemon.commands == [("load", "m")] * 2
