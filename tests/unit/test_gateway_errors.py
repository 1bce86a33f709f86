"""What a refusal of the daemon says over HTTP: it names the field that was sent."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mlxsup.client import ErrorCode, RequestError

from support.played_gateway import PlayedDaemon, Site

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
