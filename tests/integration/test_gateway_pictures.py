"""Pictures from the packages of OpenAI, Anthropic and Ollama to a worker, through a real daemon."""

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
from support.gateway.pictures import PNG, PNG_BASE64, PNG_URL, data_url, png

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


def test_the_packages_send_pictures(daemon: HttpDaemon) -> None:
    openai = pytest.importorskip("openai")
    anthropic = pytest.importorskip("anthropic")
    ollama = pytest.importorskip("ollama")
    with openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="none") as client:
        content = [part(), {"type": "text", "text": "look"}]
        asked = [{"role": "user", "content": content}]
        chat = client.chat.completions.create(model="m", messages=asked, max_tokens=8)
        shown = [{"type": "input_image", "image_url": PNG_URL, "detail": "auto"},
                 {"type": "input_text", "text": "look"}]  # fmt: skip
        first = client.responses.create(
            model="m", input=[{"role": "user", "content": shown}],
            max_output_tokens=8,
        )  # fmt: skip
        second = client.responses.create(model="m", input="and?", previous_response_id=first.id)
        with pytest.raises(openai.BadRequestError, match="takes text only"):
            client.chat.completions.create(model="reader", messages=asked)
        asked = [{"role": "user", "content": [part("https://x.example/a.png")]}]
        with pytest.raises(openai.BadRequestError, match="nothing is fetched here"):
            client.chat.completions.create(model="m", messages=asked)
    with anthropic.Anthropic(base_url=daemon.url, api_key="none") as client:
        source = {"type": "base64", "media_type": "image/png", "data": PNG_BASE64}
        content = [{"type": "image", "source": source}, {"type": "text", "text": "look"}]
        message = client.messages.create(
            model="m", messages=[{"role": "user", "content": content}], max_tokens=8
        )
    with ollama.Client(daemon.url) as client:
        told = client.chat(
            "m", [{"role": "user", "content": "look", "images": [PNG]}],
            options={"num_predict": 8},
        )  # fmt: skip
        assert "vision" in client.show("m").capabilities
    prompts = {chat.usage.prompt_tokens, first.usage.input_tokens, message.usage.input_tokens,
               told.prompt_eval_count}  # fmt: skip
    assert prompts == {len(f"{SHOWN}\nassistant:")}
    assert second.usage.input_tokens > first.usage.input_tokens, "the picture is kept with it"


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
