"""Pages of other sites, and names that a proxy passes on: let in if they are listed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from mlxsup.gateway.keys import Keys
from mlxsup.protocol.key_file import add_key

from support.key_place import place_in
from support.played_gateway import PlayedDaemon, Response, Site, delta, result

CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
LOCAL = "http://localhost:3000"
AWAY = "https://chat.example"
EVIL = "https://evil.example"
TOKEN = "x-mlxsup-token"


def ask(site: Site, method: str, path: str, origin: str, **headers: str) -> Response:
    """A browser's request for a page of this origin."""
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    body = BODY if method == "POST" else None
    return asyncio.run(site.ask(method, path, body, headers={"origin": origin, **given}))


def preflight(site: Site, path: str, origin: str, wanted: str = "content-type") -> Response:
    """What a browser asks before."""
    return ask(
        site, "OPTIONS", path, origin,
        access_control_request_method="POST", access_control_request_headers=wanted,
    )  # fmt: skip


def site_of(*origins: str, keys: Keys | None = None, hosts: tuple[str, ...] = ()) -> Site:
    daemon = PlayedDaemon([delta("a"), result("a")])
    return Site(daemon, keys=keys, origins=origins, hosts=hosts)


def shared(response: Response) -> dict[str, str]:
    """The headers that a browser looks for."""
    return {k: v for k, v in response.headers.items() if k.startswith("access-control-")}


@pytest.mark.parametrize("origin", [LOCAL, EVIL, "null"])
def test_by_default_no_page_of_another_site_may_read_an_answer(origin: str) -> None:
    site = site_of()
    response = ask(site, "GET", "/v1/models", origin)
    assert (response.status, shared(response)) == (200, {})
    response = ask(site, "POST", CHAT, origin)
    assert (response.status, shared(response)) == (200, {})
    response = preflight(site, CHAT, origin)
    assert (response.status, shared(response)) == (405, {})


def test_a_page_that_is_listed_may_ask_and_read() -> None:
    site = site_of(LOCAL)
    question = preflight(site, CHAT, LOCAL, f"content-type, X-Stainless-OS,{TOKEN}, b d")
    assert (question.status, question.body) == (204, b"")
    assert shared(question) == {
        "access-control-allow-origin": LOCAL,
        "access-control-allow-methods": "GET, POST",
        "access-control-allow-headers": "content-type, x-stainless-os",
        "access-control-expose-headers": "x-request-id, request-id, retry-after, x-should-retry",
        "access-control-max-age": "600",
    }
    response = ask(site, "POST", CHAT, LOCAL)
    assert (response.status, response.headers["vary"]) == (200, "origin")
    assert response.headers["access-control-allow-origin"] == LOCAL
    refused = asyncio.run(site.ask("POST", CHAT, b"no", headers={"origin": LOCAL}))
    assert refused.status == 400
    assert refused.headers["access-control-allow-origin"] == LOCAL, "an error can be read, too"


@pytest.mark.parametrize(
    "origin", [EVIL, "null", "http://localhost:3001", "http://localhost", f"{LOCAL}/", f"{LOCAL}0"]
)
def test_others_may_not(origin: str) -> None:
    site = site_of(LOCAL)
    response = ask(site, "GET", "/v1/models", origin)
    assert (response.status, shared(response), response.headers["vary"]) == (200, {}, "origin")
    question = preflight(site, CHAT, origin)
    assert (question.status, shared(question)) == (405, {})


@pytest.mark.parametrize("path", ["/", "/page/state", "/page/page.js"])
def test_no_other_page_may_read_the_page_which_has_the_token(path: str) -> None:
    site = site_of(LOCAL)
    assert shared(ask(site, "GET", path, LOCAL)) == {}
    assert preflight(site, path, LOCAL).status == 405


def test_a_page_that_is_listed_cannot_load_a_model_without_a_key() -> None:
    response = ask(site_of(LOCAL), "POST", "/models/load", LOCAL)
    assert (response.status, response.error["code"]) == (403, "operator_only")


def test_with_keys_a_page_may_ask_whether_it_may_ask_without_one(tmp_path: Path) -> None:
    place = place_in(tmp_path)
    key = add_key(place, name="a", account="a", is_operator=False, created="")
    site = site_of(AWAY, keys=Keys(place))
    assert preflight(site, CHAT, AWAY, "authorization").status == 204
    refused = ask(site, "GET", "/v1/models", AWAY)
    assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, AWAY)
    assert ask(site, "GET", "/v1/models", AWAY, authorization=f"Bearer {key}").status == 200


# ---------------------------------------------------------------- names that a proxy passes on


@pytest.mark.parametrize("host", ["ai.example", "AI.example:443", "[2001:db8::1]:80", "localhost"])
def test_a_name_that_is_listed_is_let_in(host: str) -> None:
    site = site_of(hosts=("Ai.Example", "[2001:db8::1]"))
    assert asyncio.run(site.ask("GET", "/v1/models", headers={"host": host})).status == 200


@pytest.mark.parametrize("host", ["evil.example", "ai.example.evil.example", "x.ai.example", ""])
def test_other_names_stay_out(host: str) -> None:
    site = site_of(LOCAL, hosts=("ai.example",))
    response = asyncio.run(site.ask("GET", "/v1/models", headers={"host": host}))
    assert (response.status, response.error["code"]) == (403, "forbidden_host")
    assert response.error["message"] == (
        "the header `host` takes one of 127.0.0.1, [::1], ai.example, localhost; `hosts` of"
        " [gateway] adds others"
    )


def test_a_preflight_to_another_machine_is_refused() -> None:
    site = site_of(LOCAL)
    response = ask(
        site, "OPTIONS", CHAT, LOCAL, host="evil.example", access_control_request_method="POST"
    )
    assert response.status == 403
