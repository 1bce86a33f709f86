"""Loading, unloading and restarting over HTTP: who may, and when the answer comes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from mlxsup.client import ConnectionLost
from mlxsup.gateway import limits
from mlxsup.gateway.keys import Keys
from mlxsup.gateway.operator import TOKEN_HEADER, Operator
from mlxsup.protocol.key_file import KeyPlace, add_key

from support.key_place import place_in
from support.operated_daemon import OperatedDaemon, unknown
from support.played_gateway import Response, Site

ACTIONS = ["load", "unload", "restart"]


@pytest.fixture
def place(tmp_path: Path) -> KeyPlace:
    return place_in(tmp_path)


def made(place: KeyPlace, name: str, *, is_operator: bool = False) -> str:
    key = add_key(place, name=name, account=name, is_operator=is_operator, created="")
    assert key is not None
    return key


def act(site: Site, action: str = "load", body: Any = None, **headers: str) -> Response:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    asked = {"model": "m"} if body is None else body
    return asyncio.run(site.ask("POST", f"/models/{action}", asked, headers=given))


def token_of(site: Site) -> str:
    """What a page of it would contain."""
    token: str = site.gateway.operator.token
    return token


@pytest.mark.parametrize("action", ACTIONS)
def test_an_operator_may_and_the_answer_comes_before_the_end(place: KeyPlace, action: str) -> None:
    key = made(place, "boss", is_operator=True)
    daemon = OperatedDaemon()
    response = act(Site(daemon, keys=Keys(place)), action, x_api_key=key)
    assert (response.status, response.json()) == (200, {"success": True, "model": "m"})
    assert daemon.commands == [(action, "m")]


@pytest.mark.parametrize("action", ACTIONS)
def test_other_keys_may_not(place: KeyPlace, action: str) -> None:
    key = made(place, "laptop")
    daemon = OperatedDaemon()
    response = act(Site(daemon, keys=Keys(place)), action, x_api_key=key)
    assert (response.status, response.error["code"]) == (403, "operator_only")
    assert "mlxsup key new NAME --operator" in response.error["message"]
    assert daemon.commands == []


@pytest.mark.parametrize("action", ACTIONS)
def test_without_keys_only_a_page_of_the_gateway_may(place: KeyPlace, action: str) -> None:
    daemon = OperatedDaemon()
    site = Site(daemon, keys=Keys(place))
    for headers in ({}, {"x_mlxsup_token": "x"}, {"x_mlxsup_token": "\xff"}, {"x_api_key": "x"}):
        response = act(site, action, **headers)
        assert (response.status, response.error["code"]) == (403, "operator_only")
        assert "key new" not in response.error["message"], "a first key locks all others out"
        assert "`mlxsup load`" in response.error["message"]
    assert daemon.commands == []
    assert act(site, action, x_mlxsup_token=token_of(site)).status == 200
    assert daemon.commands == [(action, "m")]
    assert TOKEN_HEADER == "x-mlxsup-token"


def test_the_token_is_worth_nothing_where_keys_are_needed(place: KeyPlace) -> None:
    key = made(place, "laptop")
    daemon = OperatedDaemon()
    site = Site(daemon, keys=Keys(place))
    assert act(site, x_mlxsup_token=token_of(site)).status == 401
    assert act(site, x_mlxsup_token=token_of(site), x_api_key=key).status == 403
    assert daemon.commands == []


def test_each_gateway_has_its_own_token() -> None:
    assert Operator(lambda: None).token != Operator(lambda: None).token  # type: ignore[arg-type,return-value]
    assert len(Operator(lambda: None).token) >= 32  # type: ignore[arg-type,return-value]


def test_a_refusal_of_the_daemon_is_the_answer(place: KeyPlace) -> None:
    key = made(place, "boss", is_operator=True)
    daemon = OperatedDaemon()
    site = Site(daemon, keys=Keys(place))
    daemon.refusal = unknown("n")
    response = act(site, body={"model": "n"}, x_api_key=key)
    assert (response.status, response.error["code"]) == (404, "model_not_found")
    daemon.refusal = ConnectionLost("no daemon answers", "ipc:///x")
    response = act(site, x_api_key=key)
    assert (response.status, response.error["code"]) == (503, "daemon_lost")


def test_a_daemon_that_says_nothing_is_not_waited_for(
    place: KeyPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = made(place, "boss", is_operator=True)
    monkeypatch.setattr(limits, "STATUS_LIMIT_S", 0.01)

    class Silent(OperatedDaemon):
        async def ping(self) -> dict[str, Any]:
            return await self._command("ping", "")

    response = act(Site(Silent(), keys=Keys(place)), x_api_key=key)
    assert (response.status, response.error["code"]) == (503, "daemon_silent")
    assert response.headers["x-should-retry"] == "true"


@pytest.mark.parametrize(
    ("body", "param"),
    [({}, "model"), ({"model": ""}, "model"), ({"model": 3}, "model"),
     ({"model": "m", "now": True}, "now")],
)  # fmt: skip
def test_a_wrong_body_is_refused_with_its_field(place: KeyPlace, body: Any, param: str) -> None:
    key = made(place, "boss", is_operator=True)
    daemon = OperatedDaemon()
    response = act(Site(daemon, keys=Keys(place)), body=body, x_api_key=key)
    assert (response.status, response.error["param"]) == (400, param)
    assert daemon.commands == []


def test_what_is_under_way_is_not_asked_for_twice(place: KeyPlace) -> None:
    key = made(place, "boss", is_operator=True)
    daemon = OperatedDaemon()
    site = Site(daemon, keys=Keys(place))

    async def twice() -> list[Response]:
        headers = {"x-api-key": key}
        both = (site.ask("POST", "/models/load", {"model": "m"}, headers=headers) for _ in "12")
        return [await one for one in both]

    assert [response.status for response in asyncio.run(twice())] == [200, 200]
    assert daemon.commands == [("load", "m")]


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded"])
def test_what_a_page_may_send_to_another_site_unasked_is_refused(
    place: KeyPlace, kind: str
) -> None:
    daemon = OperatedDaemon()
    site = Site(daemon, keys=Keys(place))
    response = act(site, x_mlxsup_token=token_of(site), content_type=kind)
    assert response.status == 415
    assert daemon.commands == []
