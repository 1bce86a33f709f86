"""Who may ask the gateway: keys that are missing, wrong, new or revoked, and their accounts."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from mlxsup.gateway.keys import Caller, Keys
from mlxsup.protocol.key_file import KEYS_NAME, add_key, revoke_key

from support.played_gateway import Item, PlayedDaemon, Response, Site, delta, result

CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / KEYS_NAME


def made(path: Path, name: str, *, account: str = "", is_operator: bool = False) -> str:
    key = add_key(path, name=name, account=account or name, is_operator=is_operator, created="now")
    assert key is not None
    return key


def bearer(key: str) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", f"Bearer {key}".encode())]


def ask(
    site: Site, path: str = "/v1/models", method: str = "GET", body: Any = None, **headers: str
) -> Response:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    return asyncio.run(site.ask(method, path, body, headers=given))


def test_without_a_file_anybody_of_this_machine_may_ask_with_any_key(path: Path) -> None:
    keys = Keys(path)
    assert keys.caller([]) == keys.caller(bearer("anything")) == Caller()


def test_with_a_file_nobody_may_ask_without_a_key(path: Path) -> None:
    key = made(path, "a")
    site = Site(PlayedDaemon(), keys=Keys(path))
    response = ask(site)
    assert (response.status, response.error["code"]) == (401, "missing_api_key")
    assert response.error["type"] == "authentication_error"
    assert "`mlxsup key new NAME` makes one" in response.error["message"]
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.headers["x-request-id"]
    assert ask(site, authorization=f"Bearer {key}").status == 200
    assert ask(site, x_api_key=key).status == 200


@pytest.mark.parametrize(
    "headers",
    [{"authorization": "Bearer sk-mlxsup-x"}, {"x_api_key": "sk-mlxsup-x"},
     {"authorization": "Bearer \xff\xfe"}, {"authorization": "Bearer " + "x" * 60_000}],
)  # fmt: skip
def test_a_wrong_key_is_refused(path: Path, headers: dict[str, str]) -> None:
    made(path, "a")
    response = ask(Site(PlayedDaemon(), keys=Keys(path)), **headers)
    assert (response.status, response.error["code"]) == (401, "invalid_api_key")
    assert "x-should-retry" not in response.headers


@pytest.mark.parametrize("value", ["Bearer", "Bearer ", "Basic {}", "{}", "Bearer: {}"])
def test_a_key_that_is_sent_in_another_way_is_missing(path: Path, value: str) -> None:
    key = made(path, "a")
    response = ask(Site(PlayedDaemon(), keys=Keys(path)), authorization=value.format(key))
    assert (response.status, response.error["code"]) == (401, "missing_api_key")


def test_one_of_two_keys_is_enough(path: Path) -> None:
    key = made(path, "a")
    keys = Keys(path)
    assert keys.caller([*bearer("other"), (b"x-api-key", key.encode())]).account == "a"
    assert keys.caller([*bearer(key), (b"x-api-key", b"other")]).account == "a"


def test_the_hash_in_the_file_is_no_key(path: Path) -> None:
    made(path, "a")
    digest = path.read_text().split('"digest": "')[1].split('"')[0]
    assert ask(Site(PlayedDaemon(), keys=Keys(path)), x_api_key=digest).status == 401


def test_a_request_without_a_key_reaches_no_route(path: Path) -> None:
    made(path, "a")
    daemon = PlayedDaemon([delta("a"), result("a")])
    site = Site(daemon, keys=Keys(path))
    for method, route in (("POST", CHAT), ("GET", "/ready"), ("GET", "/nothing"), ("PUT", CHAT)):
        assert ask(site, route, method, BODY).status == 401
    assert daemon.asked == []


def test_only_whether_it_lives_is_answered_without_a_key(path: Path) -> None:
    made(path, "a")
    site = Site(PlayedDaemon(), keys=Keys(path))
    assert ask(site, "/health").status == 200
    assert ask(site, "/health/").status == 401


def test_new_and_revoked_keys_count_at_once(path: Path) -> None:
    keys = Keys(path)
    assert keys.caller([]) == Caller()
    first = made(path, "first")
    assert keys.caller(bearer(first)).account == "first"
    second = made(path, "second", account="alice", is_operator=True)
    assert keys.caller(bearer(second)) == Caller("alice", is_operator=True, has_key=True)
    revoke_key(path, "first")
    site = Site(PlayedDaemon(), keys=keys)
    assert ask(site, x_api_key=first).error["code"] == "invalid_api_key"
    revoke_key(path, "second")
    assert ask(site, x_api_key=second).status == 401
    assert ask(site).status == 401, "revoking the last key does not let everybody in"
    path.unlink()
    assert ask(site).status == 200


def test_where_others_reach_it_a_key_is_needed_even_without_a_file(path: Path) -> None:
    keys = Keys(path, is_needed=True)
    site = Site(PlayedDaemon(), "10.0.0.1", keys)
    assert ask(site).status == 401
    key = made(path, "a")
    assert ask(site, x_api_key=key).status == 200
    path.unlink()
    assert ask(site, x_api_key=key).status == 401


def test_a_file_that_cannot_be_used_lets_nobody_in(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key = made(path, "a")
    site = Site(PlayedDaemon(), keys=Keys(path))
    assert ask(site, x_api_key=key).status == 200
    path.chmod(0o644)
    with caplog.at_level(logging.ERROR):
        responses = [ask(site, x_api_key=key), ask(site)]
    for response in responses:
        assert (response.status, response.error["code"]) == (503, "keys_unusable")
        assert response.headers["x-should-retry"] == "false"
        assert str(path) not in response.error["message"]
    (record,) = [one for one in caplog.records if one.name == "mlxsup.gateway.keys"]
    assert str(path) in record.getMessage()
    path.chmod(0o600)
    assert ask(site, x_api_key=key).status == 200


def test_a_request_belongs_to_the_account_of_its_key(path: Path) -> None:
    key = made(path, "laptop", account="alice")
    daemon = PlayedDaemon([delta("a"), result("a")], [delta("a"), result("a")])
    site = Site(daemon, keys=Keys(path))
    assert ask(site, CHAT, "POST", BODY, x_api_key=key).status == 200
    path.unlink()
    assert ask(site, CHAT, "POST", BODY).status == 200
    assert [asked.get("client") for asked in daemon.asked] == ["alice", None]


@pytest.mark.parametrize("host", ["box.example:8484", "10.0.0.1", "", "localhost"])
def test_where_every_request_needs_a_key_it_may_be_sent_to_any_name(path: Path, host: str) -> None:
    key = made(path, "a")
    site = Site(PlayedDaemon(), "10.0.0.1", Keys(path, is_needed=True))
    assert ask(site, host=host, x_api_key=key).status == 200
    assert ask(site, host=host).status == 401


def test_on_loopback_the_name_still_counts(path: Path) -> None:
    key = made(path, "a")
    site = Site(PlayedDaemon(), keys=Keys(path))
    assert ask(site, host="evil.example", x_api_key=key).status == 403


@pytest.mark.parametrize("path_of", [CHAT, "/v1/completions"])
@pytest.mark.parametrize(
    "field",
    [
        {"keep_alive": 0}, {"keep_alive": "-1m"}, {"ttl": -1}, {"keep_alive": 0.001},
        {"ttl": 59.9}, {"keep_alive": "25h"},
    ],
)  # fmt: skip
def test_with_keys_only_an_operator_unloads_a_model_or_keeps_it_for_ever(
    path: Path, path_of: str, field: dict[str, Any]
) -> None:
    user, operator = made(path, "user"), made(path, "admin", is_operator=True)
    whole: list[Item] = [delta("a"), result("a")]
    daemon = PlayedDaemon(*[whole] * 5)
    site = Site(daemon, keys=Keys(path))
    body = {"model": "m", "messages": BODY["messages"]} if path_of == CHAT else {
        "model": "m", "prompt": "hi"
    }  # fmt: skip
    refused = ask(site, path_of, "POST", body | field, x_api_key=user)
    assert (refused.status, refused.error["code"]) == (403, "operator_only")
    assert refused.error["param"] == "keep_alive"
    assert "mlxsup key new NAME --operator" in refused.error["message"]
    assert daemon.asked == []
    for allowed in ("1m", 24 * 3600):
        response = ask(site, path_of, "POST", body | {"keep_alive": allowed}, x_api_key=user)
        assert response.status == 200
    assert ask(site, path_of, "POST", body, x_api_key=user).status == 200
    assert ask(site, path_of, "POST", body | field, x_api_key=operator).status == 200
    path.unlink()
    assert ask(site, path_of, "POST", body | field).status == 200
