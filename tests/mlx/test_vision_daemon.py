"""Pictures through a whole daemon: clients, supervisor, worker, and a worker that is killed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxsup.client import RequestError

pytest.importorskip("mlx_vlm")

from support.client.lossy import LossyDaemon
from support.client.streams import Reader
from support.daemon.daemon import Daemon, row
from support.gateway.http_daemon import HttpDaemon
from support.gateway.pictures import data_url, in_base64
from support.models.tiny_vision import FAMILIES, asked, make_tiny_vision, picture

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(900)]

TOKENS = 40


def test_pictures_are_answered_and_an_answer_outlives_its_worker(tmp_path: Path) -> None:
    folder = make_tiny_vision(tmp_path / "sight")
    chats = [[asked("what is it", picture(seed))] for seed in (1, 2)]
    with Daemon({"sight": {"path": str(folder)}}) as daemon, daemon.client() as client:
        client.load("sight")
        assert row(client, "sight")["capabilities"] == ["text", "images"]
        one, two = (
            client.complete("sight", messages=chat, max_tokens=TOKENS).token_ids for chat in chats
        )
        assert one != two
        whole = client.complete("sight", messages=chats[0], max_tokens=1000)
        reader = Reader(client, "sight", messages=chats[0], max_tokens=1000)
        reader.started()
        os.kill(row(client, "sight")["pid"], signal.SIGKILL)
        resumed = reader.finished(600)
        assert resumed.token_ids == whole.token_ids
        assert resumed.token_ids[:TOKENS] == one
        assert row(client, "sight")["generation"] == 2
        bad: list[dict[str, Any]] = [asked("what is it", b"no picture")]
        with pytest.raises(RequestError, match="no picture that can be opened"):
            client.complete("sight", messages=bad, max_tokens=2)
        text = daemon.log_text()
        assert "IHDR" not in text


@pytest.mark.parametrize(
    "family",
    [
        name if name == "qwen3_vl" else pytest.param(name, marks=pytest.mark.slow)
        for name in FAMILIES
    ],
)
def test_a_worker_that_dies_while_its_tower_looks_costs_no_token(
    family: str, tmp_path: Path
) -> None:
    folder = make_tiny_vision(tmp_path / "sight", family)
    said: list[dict[str, Any]] = [{"role": "user", "content": "tell me a story of the sea"}]
    seen = [asked("what is it", picture(1))]
    with (
        LossyDaemon("tower", {"sight": {"path": str(folder)}}) as daemon,
        daemon.client() as client,
    ):
        client.load("sight")
        beside = Reader(client, "sight", messages=said, max_tokens=1000).started()
        answer = client.complete("sight", messages=seen, max_tokens=TOKENS)
        assert daemon.struck.exists()
        assert row(client, "sight")["generation"] == 2
        assert row(client, "sight")["last_exit"]["signal"] == "SIGKILL"
        client.restart("sight")  # so that nothing is kept of the picture
        for messages, found in ((seen, answer), (said, beside.finished(600))):
            again = client.complete("sight", messages=messages, max_tokens=len(found.token_ids))
            assert again.token_ids == found.token_ids


# ---------------------------------------------------------------- packages of other makers

SHOWN = (
    (picture(1),),
    (picture(2),),
    (picture(1), picture(3, (32, 64), "JPEG")),
    (picture(3, (32, 64), "JPEG"), picture(1)),
)
QUESTION, LATER, CALL = "which one is it", "and then", {"name": "look", "arguments": "{}"}
FEW = 16


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpDaemon]:
    parent = tmp_path_factory.mktemp("sdks")
    folder, ending = (make_tiny_vision(parent / name) for name in ("sight", "ending"))
    ends = {"eos_token_id": list(range(300, 1900, 3))}  # an answer ends soon
    (ending / "generation_config.json").write_text(json.dumps(ends))
    with HttpDaemon({"sight": {"path": str(folder)}, "ending": {"path": str(ending)}}) as running:
        yield running


def said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def in_chat(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data)}}


def in_response(data: bytes) -> dict[str, Any]:
    return {"type": "input_image", "image_url": data_url(data), "detail": "auto"}


def in_message(data: bytes) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": in_base64(data)}
    return {"type": "image", "source": source}


def test_packages_get_what_the_client_gets_about_pictures_and_in_the_next_turn(
    daemon: HttpDaemon,
) -> None:
    openai, anthropic = pytest.importorskip("openai"), pytest.importorskip("anthropic")
    text, input_text = ({"type": kind, "text": QUESTION} for kind in ("text", "input_text"))
    answers = []
    with (
        daemon.client() as client,
        openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="none") as gpt,
        anthropic.Anthropic(base_url=daemon.url, api_key="none") as claude,
    ):

        def own(*messages: dict[str, Any]) -> str:
            return client.complete("sight", messages=list(messages), max_tokens=FEW).text

        def chat(*messages: dict[str, Any]) -> str:
            made = gpt.chat.completions.create(model="sight", messages=messages, max_tokens=FEW)
            return str(made.choices[0].message.content)

        def message(*messages: dict[str, Any]) -> str:
            made = claude.messages.create(model="sight", messages=messages, max_tokens=FEW)
            return str(made.content[0].text)

        def response(given: Any, **more: Any) -> Any:
            return gpt.responses.create(model="sight", input=given, max_output_tokens=FEW, **more)

        for files in SHOWN:
            answer = own(asked(QUESTION, *files))
            told = response([said("user", [*map(in_response, files), input_text])])
            of_chat = said("user", [*map(in_chat, files), text])
            of_message = said("user", [*map(in_message, files), text])
            assert [chat(of_chat), message(of_message), told.output_text] == [answer] * 3
            turn = [said("assistant", answer), said("user", LATER)]
            later = own(asked(QUESTION, *files), *turn)
            next_told = response(LATER, previous_response_id=told.id)
            assert [chat(of_chat, *turn), message(of_message, *turn)] == [later] * 2
            assert next_told.output_text == later
            answers += [answer, later]

            call = said("assistant", "") | {
                "tool_calls": [{"id": "c", "type": "function", "function": CALL}]
            }
            result = {"role": "tool", "tool_call_id": "c", "content": asked("", *files)["content"]}
            by_tool = own(said("user", LATER), call, result)
            of_chat = result | {"content": [*map(in_chat, files), {"type": "text", "text": ""}]}
            assert chat(said("user", LATER), call, of_chat) == by_tool
            blocks = [*map(in_message, files)]
            assert message(
                said("user", LATER),
                said("assistant", [{"type": "tool_use", "id": "c", "name": "look", "input": {}}]),
                said("user", [{"type": "tool_result", "tool_use_id": "c", "content": blocks}]),
            ) == by_tool  # fmt: skip
            items = [
                said("user", LATER),
                {"type": "function_call", "call_id": "c", **CALL},
                {"type": "function_call_output", "call_id": "c",
                 "output": [*map(in_response, files)]},
            ]  # fmt: skip
            assert response(items).output_text == by_tool
            answers.append(by_tool)
    assert len(set(answers)) == len(answers), "each picture, and each order of them, decides"


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_a_picture_is_answered_as_open_responses_demands(
    daemon: HttpDaemon, *, is_streamed: bool
) -> None:
    """The case `image-input`: a picture of 32 x 32 pixels behind the text, no limit of tokens."""
    question = {"type": "input_text", "text": "What do you see? Answer in one sentence."}
    content = [question, {"type": "input_image", "image_url": data_url(picture(1, (32, 32)))}]
    given = {"model": "ending", "input": [{"type": "message", **said("user", content)}]}
    gpt = pytest.importorskip("openai").OpenAI(base_url=f"{daemon.url}/v1", api_key="none")
    if is_streamed:
        events = list(gpt.responses.create(**given, stream=True))
        assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
        answer = events[-1].response
    else:
        answer = gpt.responses.create(**given)
    assert answer.status == "completed"
    assert [item.type for item in answer.output] == ["message"]
    assert answer.output_text
