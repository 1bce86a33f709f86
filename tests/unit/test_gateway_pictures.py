"""Pictures over HTTP in every API: what the daemon is asked, and what is refused and how."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from mlxsup.client import RequestError
from mlxsup.gateway import limits
from mlxsup.gateway.converter import Api, encode_ask, read_ask
from mlxsup.gateway.errors import failure_of
from mlxsup.gateway.failure import Failure
from mlxsup.protocol import codec
from mlxsup.protocol.pictures import MAX_IMAGE_BYTES, MAX_IMAGES

from support.client.sent_requests import asked_in, sent
from support.gateway.pictures import PNG, PNG_BASE64, PNG_URL, data_url, in_base64, png
from support.gateway.played_gateway import CHAT, LEAST_OF, MESSAGE, PlayedDaemon, Site, said

GIF = b"GIF89a" + bytes(20)
OLD_GIF = b"GIF87a" + bytes(20)
LOOK = {"type": "text", "text": "look"}
CALL = {"role": "assistant", "tool_calls": [
    {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}  # fmt: skip
USED = {"role": "assistant", "content": [
    {"type": "tool_use", "id": "c", "name": "f", "input": {}}]}  # fmt: skip


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def image_url(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, "detail": "high"}}


def source(data: Any, **more: Any) -> dict[str, Any]:
    given = {"type": "base64", "media_type": "image/png", "data": data, **more}
    return {"type": "image", "source": given}


def read(api: Api, **fields: Any) -> Any:
    return read_ask(api, json.dumps(LEAST_OF[api] | fields).encode())


def refusal(api: Api, **fields: Any) -> str:
    with pytest.raises((Failure, RequestError)) as caught:
        sent(read(api, **fields))
    error = caught.value
    failure = failure_of(error) if isinstance(error, RequestError) else error
    assert isinstance(failure, Failure)
    assert (failure.status, failure.code) == (400, "invalid_request")
    assert failure.message.startswith(failure.param) or failure.param == "messages"
    return failure.message


def shown(data: bytes, at: str) -> dict[str, Any]:
    return {"type": "image", "data": data, "at": at}


# ---------------------------------------------------------------- what the daemon is asked

CHATS: list[tuple[Api, dict[str, Any], list[Any]]] = [
    (Api.CHAT, {"messages": [user(LOOK, image_url(PNG_URL))]},
     [LOOK, shown(PNG, "messages[0].content[1]")]),
    (Api.CHAT, {"messages": [user({"type": "image_url", "image_url": PNG_URL})]},
     [shown(PNG, "messages[0].content[0]")]),
    (Api.CHAT, {"messages": [user(image_url(data_url(OLD_GIF, "image/gif")))]},
     [shown(OLD_GIF, "messages[0].content[0]")]),
    (Api.CHAT, {"messages": [CALL, {"role": "tool", "tool_call_id": "c", "content": [
        LOOK, image_url(data_url(GIF, "image/gif"))]}]},
     [LOOK, shown(GIF, "messages[1].content[1]")]),
    (Api.RESPONSE, {"input": [user({"type": "input_text", "text": "look"}, {
        "type": "input_image", "image_url": PNG_URL, "detail": "low"})]},
     [LOOK, shown(PNG, "input[0].content[1]")]),
    (Api.RESPONSE, {"input": [user("x") | {"content": "x"}, {
        "type": "function_call_output", "call_id": "c", "output": [
            {"type": "input_image", "image_url": PNG_URL}]}]},
     [shown(PNG, "input[1].output[0]")]),
    (Api.MESSAGE, {"messages": [user(source(PNG_BASE64), LOOK, LOOK)]},
     [shown(PNG, "messages[0].content[0]"), {"type": "text", "text": "look\nlook"}]),
    (Api.MESSAGE, {"messages": [USED, user({"type": "tool_result", "tool_use_id": "c", "content": [
        LOOK, source(PNG_BASE64)]})]},
     [LOOK, shown(PNG, "messages[1].content[0].content[1]")]),
    (Api.MESSAGE, {"messages": [USED, user({"type": "tool_result", "tool_use_id": "c",
                                            "is_error": True, "content": [source(PNG_BASE64)]})]},
     [{"type": "text", "text": "error: "}, shown(PNG, "messages[1].content[0].content[0]")]),
    (Api.COUNT, {"messages": [user(source(PNG_BASE64))]},
     [shown(PNG, "messages[0].content[0]")]),
]  # fmt: skip


@pytest.mark.parametrize(("api", "fields", "content"), CHATS)
def test_a_picture_reaches_the_daemon_as_bytes(
    api: Api, fields: dict[str, Any], content: list[Any]
) -> None:
    [frames] = sent(read(api, **fields))
    assert asked_in(frames)["messages"][-1]["content"] == content


def test_a_detail_that_asks_for_another_size_is_named() -> None:
    low = {"type": "input_image", "image_url": PNG_URL, "detail": "low"}
    output = {"type": "function_call_output", "call_id": "c", "output": [low]}
    given = read(Api.RESPONSE, input=[user(low | {"detail": "auto"}, low), output])
    assert list(given.unread) == ["input[0].content[1].detail", "input[1].output[0].detail"]
    given = read(Api.CHAT, messages=[user(LOOK, image_url(PNG_URL))])
    assert list(given.unread) == ["messages[0].content[1].image_url.detail"]


@pytest.mark.parametrize(
    "url",
    [
        PNG_URL.rstrip("="),
        PNG_URL.replace("base64", "charset=x; BASE64 "),
        PNG_URL.replace("data:image/png", " DATA:"),
        PNG_URL[:40] + " \r\n\t" + PNG_URL[40:] + "\n",
        PNG_URL.replace("+", "%2B").replace("/", "%2f").replace("=", "%3D"),
    ],
    ids=["no padding", "parameters", "no type", "spaces", "percent"],
)
def test_a_data_url_may_be_written_in_several_ways(url: str) -> None:
    [given] = read(Api.CHAT, messages=[user(image_url(url))]).inputs
    assert given["messages"][0]["content"][0]["data"] == PNG


# ---------------------------------------------------------------- what is refused

ANY = "must be PNG, JPEG, WebP, GIF or BMP, not "
URLS = [
    ("https://x.example/a.png", "not an address: nothing is fetched here"),
    ("HTTP://x.example/a.png", "not an address: nothing is fetched here"),
    ("file:///etc/passwd", "must be a data: URL with base64"),
    ("data:image/png,%89PNG", "must be a data: URL with base64"),
    ("x" * 300, "must be a data: URL with base64"),
    ("", "must be a data: URL with base64"),
    (3, "must be text"),
    (PNG_URL.replace("A", "!"), "this is not base64"),
    (PNG_URL + "x", "this is not base64"),
    (PNG_URL + "é", "this is not base64"),
    ("data:image/png;base64,", "must be a picture, not empty"),
    (data_url(b"hello", "text/plain"), ANY + "something else"),
    (data_url(b'<?xml version="1.0"?><svg/>', "image/svg+xml"), ANY + "SVG"),
    (data_url(b"\0\0\0\x18ftypheic", "image/heic"), ANY + "HEIC"),
    (data_url(b"%PDF-1.7"), ANY + "PDF"),
    (data_url(b"II*\0\x08\0\0\0"), ANY + "TIFF"),
    (data_url(png(padding=MAX_IMAGE_BYTES)), "at most 20 MiB, not 20.0 MiB"),
]  # fmt: skip


@pytest.mark.parametrize(("url", "words"), URLS, ids=[str(url)[:30] for url, _ in URLS])
def test_what_is_no_picture_is_refused_with_the_reason(url: Any, words: str) -> None:
    message = refusal(Api.CHAT, messages=[user(image_url(url))])
    assert message.startswith("messages[0].content[0].image_url.url ")
    assert words in message
    if isinstance(url, str) and len(url) > MAX_IMAGE_BYTES:
        return  # once is enough: it takes seconds
    item = {"type": "input_image", "image_url": url}
    assert words in refusal(Api.RESPONSE, input=[user(item)])


@pytest.mark.parametrize(
    ("api", "fields", "message"),
    [
        (Api.MESSAGE, {"messages": [user({"type": "image", "source": {
            "type": "url", "url": "https://x.example/a.png"}})]},
         "messages[0].content[0].source.type must be base64, not url: nothing is fetched here"),
        (Api.MESSAGE, {"messages": [user({"type": "image", "source": {
            "type": "file", "file_id": "f"}})]},
         "messages[0].content[0].source.type must be base64, not file: no files are kept here"),
        (Api.MESSAGE, {"messages": [user({"type": "image"})]},
         "messages[0].content[0].source is missing"),
        (Api.MESSAGE, {"messages": [user({"type": "image", "source": "x"})]},
         "messages[0].content[0].source must be an object of type base64"),
        (Api.MESSAGE, {"messages": [user(source(3))]},
         "messages[0].content[0].source.data must be a picture in base64"),
        (Api.MESSAGE, {"messages": [{"role": "assistant", "content": [source(PNG_BASE64)]}]},
         "messages[0].content[0].type must not be image in a message of role assistant"),
        (Api.MESSAGE, {"system": [source(PNG_BASE64)]},
         "system[0]: a picture must be in a message of the user or of a tool, not of the system"),
        (Api.RESPONSE, {"input": [user({"type": "input_image", "file_id": "f"})]},
         "input[0].content[0].file_id must be left out: no files are kept here"),
        (Api.RESPONSE, {"input": [user({"type": "input_image"})]},
         "input[0].content[0].image_url is missing"),
        *((Api.CHAT, {"messages": [{"role": role, "content": [image_url(PNG_URL)]}]},
           "messages[0].content[0]: a picture must be in a message of the user or of a tool")
          for role in ("system", "developer", "assistant")),
        (Api.CHAT, {"messages": [user(*[image_url(PNG_URL)] * 30)] * 2},
         "messages must be a chat with at most 50 pictures, not one with 60"),
    ],
)  # fmt: skip
def test_a_picture_that_cannot_be_shown_is_refused(
    api: Api, fields: dict[str, Any], message: str
) -> None:
    assert refusal(api, **fields).startswith(message)


def test_as_many_pictures_as_a_request_may_have_are_taken() -> None:
    ask = read(Api.CHAT, messages=[user(*[image_url(PNG_URL)] * MAX_IMAGES)])
    assert len(ask.inputs[0]["messages"][0]["content"]) == MAX_IMAGES


# ---------------------------------------------------------------- how much


def test_a_handful_of_photographs_fits_and_as_much_text_does_not() -> None:
    ask = read(Api.CHAT, messages=[user(*[image_url(data_url(png(padding=3_000_000)))] * 3)])
    [(_, frames)] = encode_ask(ask)
    assert sum(map(len, frames)) > 9_000_000
    photograph = ask.inputs[0]["messages"][0]["content"][0]
    with pytest.raises(Failure, match="at most 8 MiB besides pictures in base64; send less"):
        read(Api.CHAT, messages=[user({"type": "text", "text": "word " * 1_700_000})])
    with pytest.raises(RequestError, match="at most 8388608 bytes besides its pictures"):
        encode_ask(read(Api.CHAT, messages=[user({"type": "text", "text": "x" * 9_000_000})]))
    with pytest.raises(RequestError, match=f"at most {codec.MAX_BODY_BYTES} bytes"):
        encode_ask(replace(ask, inputs=({"messages": [user(*[photograph] * 12)]},)))
    with pytest.raises(Failure, match="use a smaller n"):
        encode_ask(replace(ask, n=8))


def test_all_that_the_daemon_takes_fits_into_a_body_in_base64() -> None:
    assert limits.MAX_BODY_BYTES * 3 >= codec.MAX_BODY_BYTES * 4
    assert len(in_base64(bytes(3000))) == 4000


# ---------------------------------------------------------------- to a model that takes text only


def ask_played(path: str, daemon: PlayedDaemon, **fields: Any) -> Any:
    daemon.answers.append(said("a"))
    body = {"model": "m", "max_tokens": 9, **fields}
    return asyncio.run(Site(daemon).ask("POST", path, body))


@pytest.mark.parametrize("length", [1, 100_000], ids=["here", "in a converter"])
def test_a_loaded_model_that_takes_text_only_is_not_asked(length: int) -> None:
    text = {"type": "text", "text": "x" * length}
    begun = {"role": "assistant", "content": "It shows"}
    for path, picture, more in (
        (CHAT, image_url(PNG_URL), []), (MESSAGE, source(PNG_BASE64), [begun]),
    ):  # fmt: skip
        daemon = PlayedDaemon()
        daemon.row["capabilities"] = ["text"]
        response = ask_played(path, daemon, messages=[user(text, picture), *more])
        message = response.json()["error"]["message"]
        assert (response.status, daemon.asked) == (400, [])
        assert message == ("messages[0].content[1]: m takes text only, no pictures; send text")


@pytest.mark.parametrize(
    "known", [["text", "images"], []], ids=["it does", "its files are not here yet"]
)
def test_a_model_that_may_take_pictures_is_asked(known: list[str]) -> None:
    daemon = PlayedDaemon()
    daemon.row["capabilities"] = known
    assert ask_played(CHAT, daemon, messages=[user(image_url(PNG_URL))]).status == 200
    assert daemon.asked[0]["messages"][0]["content"][0]["data"] == PNG


@pytest.mark.parametrize(
    "messages",
    [
        [user(image_url(PNG_URL)), {"role": "assistant", "content": "a"}, user(LOOK)],
        [user(LOOK), CALL, {"role": "tool", "tool_call_id": "c", "content": [image_url(PNG_URL)]}],
        [user(image_url(PNG_URL)), CALL, {"role": "tool", "tool_call_id": "c", "content": "42"}],
    ],
    ids=["an earlier message", "a result", "before a result"],
)
def test_what_a_client_cannot_take_back_is_left_to_the_worker(messages: list[Any]) -> None:
    daemon = PlayedDaemon()
    daemon.row["capabilities"] = ["text"]
    assert ask_played(CHAT, daemon, messages=messages).status == 200
    assert len(daemon.asked) == 1
