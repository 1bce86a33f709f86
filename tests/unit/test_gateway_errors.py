"""What a refusal of the daemon says over HTTP: it names the field that was sent."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mlxsup.client import ErrorCode, RequestError

from support.played_gateway import PlayedDaemon, Site, delta, result

HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("path", "body", "parameter", "name"),
    [
        ("/v1/completions", {"prompt": [1]}, "prompt_tokens", "prompt"),
        ("/v1/completions", {"prompt": "a"}, "stop", "stop"),
        ("/v1/chat/completions", {"messages": HI}, "stop", "stop"),
        ("/v1/messages", {"messages": HI, "max_tokens": 1}, "stop", "stop_sequences"),
        ("/v1/messages", {"messages": HI, "max_tokens": 1}, "stop_token", "stop_token"),
    ],
)
def test_a_field_is_called_what_it_was_sent_as(
    path: str, body: dict[str, Any], parameter: str, name: str
) -> None:
    refusal = RequestError(
        ErrorCode.INVALID_REQUEST,
        f"{parameter} takes another value than that of stop",
        retryable=False,
        detail={"parameter": parameter},
    )
    site = Site(PlayedDaemon([refusal]))
    response = asyncio.run(site.ask("POST", path, {"model": "m", **body}))
    assert response.status == 400
    assert response.error["message"] == f"{name} takes another value than that of stop"


LIMITS = ("timeout_s", "queue_timeout_s", "first_token_timeout_s")
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 1},
}


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("path", BODIES)
def test_a_request_has_the_limits_that_it_sets(path: str, name: str) -> None:
    daemon = PlayedDaemon([delta("a"), result("a")])
    site, body = Site(daemon), {"model": "m", **BODIES[path]}
    assert asyncio.run(site.ask("POST", path, body | {name: 2.5})).status == 200
    assert {one: daemon.asked[0].get(one) for one in LIMITS} == {
        one: 2.5 if one == name else None for one in LIMITS
    }
    refusal = asyncio.run(site.ask("POST", path, body | {name: "5m"}))
    assert refusal.status == 400
    assert refusal.error["message"].startswith(f"{name} takes seconds, from 0 up")
    if path != "/v1/messages":
        assert refusal.error["param"] == name


def test_counting_tokens_has_no_limits() -> None:
    body = {"model": "m", "messages": HI, "timeout_s": 1}
    response = asyncio.run(Site(PlayedDaemon()).ask("POST", "/v1/messages/count_tokens", body))
    assert (response.status, "unknown field" in response.error["message"]) == (400, True)


@pytest.mark.parametrize(
    ("code", "status", "theirs"),
    [(ErrorCode.DEADLINE_EXCEEDED, 504, 504), (ErrorCode.QUEUE_TIMEOUT, 503, 529)],
)
def test_a_limit_that_is_reached_is_a_status(code: ErrorCode, status: int, theirs: int) -> None:
    for path, body in BODIES.items():
        refusal = RequestError(code, "too late", retryable=False, detail={})
        site = Site(PlayedDaemon([refusal]))
        response = asyncio.run(site.ask("POST", path, {"model": "m", "timeout_s": 1, **body}))
        assert response.status == (theirs if path == "/v1/messages" else status)
