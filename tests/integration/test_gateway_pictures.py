"""Pictures to a worker, through a real daemon; those of the packages: test_gateway_sdks.py."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from mlxsup.gateway import limits

from support.daemon.daemon import fake
from support.gateway.http_daemon import CHAT, HttpDaemon
from support.gateway.large_bodies import LargeBody, send_all
from support.gateway.pictures import PNG, PNG_URL, data_url, png

SEEING = {"takes_pictures": True}
SHOWN = f"user: [{len(PNG)} bytes]look"


@pytest.fixture(scope="module")
def daemon() -> Iterator[HttpDaemon]:
    models = {"m": fake(fake=SEEING), "reader": fake(), "late": fake(fake=SEEING, preload=False),
              "late_reader": fake(preload=False)}  # fmt: skip
    with HttpDaemon(models) as running:
        with running.client() as client:
            for name in ("m", "reader"):
                client.load(name)
        yield running


def prompt(daemon: HttpDaemon, model: str, content: Any) -> tuple[int, Any]:
    """Return the rendered prompt of a message, as the worker gets it; or the refusal."""
    messages = [{"role": "user", "content": content}]
    return daemon.post("/apply-template", {"model": model, "messages": messages})


def part(url: str = PNG_URL) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def test_a_worker_gets_the_bytes_and_a_text_model_says_what_it_takes(daemon: HttpDaemon) -> None:
    look = {"type": "text", "text": "look"}
    for model in ("m", "late"):
        status, answer = prompt(daemon, model, [part(), look])
        assert (status, answer["prompt"].startswith(SHOWN)) == (200, True), answer
    status, refused = prompt(daemon, "reader", [look, part()])
    assert (status, refused["error"]["param"]) == (400, "messages[0].content[1]")
    assert refused["error"]["message"] == (
        "messages[0].content[1]: reader takes text only, no pictures; send the picture to m or late"
    )
    status, refused = prompt(daemon, "late_reader", [look, part()])  # its worker says it
    assert (status, refused["error"]["param"]) == (400, "messages[0].content[1]")


def test_photographs_are_taken_several_at_a_time(daemon: HttpDaemon) -> None:
    photograph = png(padding=1_500_000)
    content = [*[part(data_url(photograph))] * 5, {"type": "text", "text": "look"}]
    asked = {"model": "m", "max_tokens": 3, "messages": [{"role": "user", "content": content}]}
    body = LargeBody("", CHAT, json.dumps(asked).encode())
    for status, answer in send_all(daemon, [body] * 3):
        assert status == 200, answer[:300]
        assert json.loads(answer)["usage"]["prompt_tokens"] == len(
            "user: " + f"[{len(photograph)} bytes]" * 5 + "look\nassistant:"
        )
    too_long = body.data.ljust(limits.MAX_BODY_BYTES + 1)
    status, answer = send_all(daemon, [LargeBody("", CHAT, too_long)])[0]
    assert status in (0, 413)
    assert re.search(b"at most|^$", answer)
