"""Responses that are kept: continued, read, listed and deleted, by the key that made them alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from mlxsup.client import Channel
from mlxsup.gateway import limits
from mlxsup.gateway.converters import Converter
from mlxsup.gateway.failure import Failure
from mlxsup.gateway.keys import Caller, Keys
from mlxsup.gateway.responses.kept import KeptResponse, KeptResponses

from support.gateway.played_gateway import (
    RESPONSE,
    Item,
    PlayedDaemon,
    Response,
    Site,
    delta,
    refused,
    result,
    said,
)

NOT_FOUND = 404, "response_not_found"
FUNCTION = {"name": "f", "arguments": "{}"}
CALL: Item = delta(
    json.dumps({"id": "c", "type": "function", "function": FUNCTION}), channel=Channel.TOOL_CALL
)
THOUGHT: Item = delta("hm", channel=Channel.REASONING)
ASSISTANT_CALL = {"id": "c", "type": "function", "function": FUNCTION}


class KeyOfHeader(Keys):
    """The header `x-api-key` is the digest of a key."""

    def caller(self, headers: Any) -> Caller:
        return Caller(key=dict(headers).get(b"x-api-key", b"").decode())


class Server:
    """A gateway whose daemon gives these answers; requests are sent one after the other."""

    def __init__(self, *answers: Sequence[Item]) -> None:
        self.daemon = PlayedDaemon(*answers)
        self.site = Site(self.daemon, keys=KeyOfHeader())

    def ask(self, method: str, path: str, body: Any = None, key: str = "", **more: Any) -> Response:
        headers = {"x-api-key": key}
        return asyncio.run(self.site.ask(method, path, body, headers=headers, **more))

    def post(self, input: Any = "hi", key: str = "", **fields: Any) -> Response:
        return self.ask("POST", RESPONSE, {"model": "m", "input": input, **fields}, key)

    def shown(self, number: int = -1) -> list[dict[str, Any]]:
        """Return the messages of a request of the daemon."""
        messages: list[dict[str, Any]] = self.daemon.asked[number]["messages"]
        return messages


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def code(response: Response) -> tuple[int, str]:
    return response.status, response.error["code"]


# ---------------------------------------------------------------- continued


@pytest.mark.parametrize("is_streamed", [False, True])
def test_response_continues_an_earlier_one_without_its_instructions(is_streamed: bool) -> None:
    server = Server([THOUGHT, delta("a"), CALL, result("a")], said("b"), said("c"))
    assert server.post(instructions="be brief", stream=is_streamed).status == 200
    output = {"type": "function_call_output", "call_id": "c", "output": "42"}
    second = server.post([output], previous_response_id="resp_r1", stream=is_streamed)
    server.post("and?", previous_response_id="resp_r2", instructions="be kind")
    told = {"role": "tool", "tool_call_id": "c", "content": "42"}
    called = {"role": "assistant", "content": "a", "reasoning_content": "hm",
              "tool_calls": [ASSISTANT_CALL]}  # fmt: skip
    chat = [user("hi"), called, told]
    assert server.shown(1) == chat
    system = {"role": "system", "content": "be kind"}
    answer = {"role": "assistant", "content": "b"}
    assert server.shown(2) == [system, *chat, answer, user("and?")]
    if not is_streamed:
        assert second.json()["previous_response_id"] == "resp_r1"


def test_empty_name_of_an_earlier_response_is_none() -> None:
    response = Server(said("a")).post(previous_response_id="")
    assert (response.status, response.json()["previous_response_id"]) == (200, None)


def test_conversation_branches() -> None:
    server = Server(said("a"), said("b"), said("c"))
    server.post()
    for text in ("one", "two"):
        server.post(text, previous_response_id="resp_r1")
        assert server.shown()[2] == user(text)


def test_input_refers_to_items_that_are_kept() -> None:
    server = Server(said("a"), said("b"))
    server.post([user("one") | {"id": "msg_own"}, user("two")])
    server.post([
        {"type": "item_reference", "id": "msg_own"}, {"id": "msg_r1_0"}, user("so?"),
        {"type": "item_reference", "id": "item_r1_1"},
    ])  # fmt: skip
    chat = [user("one"), {"role": "assistant", "content": "a"}, user("so?"), user("two")]
    assert server.shown() == chat


LONG = "x" * (limits.MAX_SMALL_BODY_BYTES + 1)


@pytest.mark.parametrize(("first", "then"), [(LONG, "hi"), ("hi", LONG)])
def test_long_conversation_goes_on_in_a_converter(
    first: str, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    apart: list[int] = []
    ask = Converter.ask

    async def note(self: Converter, values: dict[str, Any], *blobs: Any) -> Any:
        apart.append(len(blobs))
        return await ask(self, values, *blobs)

    monkeypatch.setattr(Converter, "ask", note)
    server = Server([CALL, result("")], said("b"))
    space = {"type": "namespace", "name": "s", "tools": [{"type": "function", "name": "f"}]}
    (call,) = server.post(first, tools=[space]).json()["output"]
    assert (call["name"], call["namespace"]) == ("f", "s")
    answered = server.post(then, previous_response_id="resp_r1")
    assert answered.status == 200
    assert 3 in apart, "the converter gets the body, the history and no items"
    assert [len(one["content"]) for one in server.shown()] == [len(first), 0, len(then)]
    listed = server.ask("GET", f"{RESPONSE}/resp_r2/input_items").json()["data"]
    assert [one["content"][0]["text"] for one in listed] == [then]


def test_count_includes_the_conversation() -> None:
    server = Server(said("a"), [result()])
    server.post()
    body = {"model": "m", "input": "and?", "previous_response_id": "resp_r1", "store": True}
    assert server.ask("POST", f"{RESPONSE}/input_tokens", body).json()["input_tokens"] == 5
    assert server.shown() == [user("hi"), {"role": "assistant", "content": "a"}, user("and?")]


# ---------------------------------------------------------------- not there


@pytest.mark.parametrize(
    ("fields", "status", "code", "param"),
    [
        ({"previous_response_id": "resp_r9"}, 404, "previous_response_not_found",
         "previous_response_id"),
        ({"previous_response_id": 3}, 400, "invalid_request", "previous_response_id"),
        ({"input": [user("a"), {"type": "item_reference", "id": "x"}]}, 404, "item_not_found",
         "input[1].id"),
        ({"input": [{"id": "x", "content": "a"}]}, 404, "item_not_found", "input[0].id"),
        ({"input": [{"type": "item_reference"}]}, 400, "invalid_request", "input[0].id"),
        ({"store": 1}, 400, "invalid_request", "store"),
        ({"conversation": "conv_1"}, 400, "invalid_request", "conversation"),
        ({"background": True}, 400, "invalid_request", "background"),
        ({"metadata": 3}, 400, "invalid_request", "metadata"),
    ],
)  # fmt: skip
def test_what_is_not_kept_or_wrong_is_named(
    fields: dict[str, Any], status: int, code: str, param: str
) -> None:
    server = Server()
    response = server.post(**{"input": "hi"} | fields)
    assert (response.status, response.error["code"], response.error["param"]) == (
        status, code, param
    )  # fmt: skip
    assert not server.daemon.asked


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (f"{RESPONSE}/compact", "no input is compacted"),
        (f"{RESPONSE}/resp_r1/cancel", "end the connection"),
        ("/v1/conversations", "continue a response"),
        ("/v1/conversations/conv_1/items", "continue a response"),
    ],
)
def test_what_is_not_offered_says_what_to_do_instead(path: str, words: str) -> None:
    response = Server().ask("POST", path, {"model": "m"})
    assert code(response) == (501, "not_implemented")
    assert response.headers["x-should-retry"] == "false"
    assert words in response.error["message"]


ALL = [("GET", ""), ("DELETE", ""), ("GET", "/input_items")]


@pytest.mark.parametrize(("method", "rest"), ALL)
def test_another_key_sees_nothing(method: str, rest: str) -> None:
    server = Server(said("a"), said("b"))
    server.post(key="ann")
    assert code(server.ask(method, f"{RESPONSE}/resp_r1{rest}", key="bob")) == NOT_FOUND
    other = server.post(key="bob", previous_response_id="resp_r1")
    assert code(other) == (404, "previous_response_not_found")
    referring = server.post([{"type": "item_reference", "id": "msg_r1_0"}], key="bob")
    assert code(referring) == (404, "item_not_found")
    assert server.post(key="ann", previous_response_id="resp_r1").status == 200
    assert server.ask(method, f"{RESPONSE}/resp_r1{rest}", key="ann").status == 200


@pytest.mark.parametrize(
    ("answer", "fields"),
    [
        (said("a"), {"store": False}),
        ([refused("quarantined")], {}),
        ([refused("quarantined")], {"stream": True}),
    ],
    ids=["not stored", "refused", "refused, streamed"],
)
def test_response_that_is_not_stored_is_not_kept(answer: list[Item], fields: Any) -> None:
    server = Server(answer)
    response = server.post(**fields)
    assert response.status != 200 or response.json()["store"] is False
    assert code(server.ask("GET", f"{RESPONSE}/resp_r1")) == NOT_FOUND


def test_failed_stream_is_kept_and_cannot_be_continued() -> None:
    server = Server([delta("a"), refused("worker_crashed", tokens_sent=1)])
    server.post(stream=True)
    kept = server.ask("GET", f"{RESPONSE}/resp_r1").json()
    assert (kept["status"], kept["error"]["code"]) == ("failed", "worker_crashed")
    response = server.post(previous_response_id="resp_r1")
    assert (response.status, response.error["param"]) == (400, "previous_response_id")


def test_reader_that_leaves_leaves_nothing_behind() -> None:
    async def run() -> None:
        left = asyncio.Event()
        site = Site(PlayedDaemon([delta("a"), asyncio.Event()]))
        body = {"model": "m", "input": "hi", "stream": True}
        async with site.life():
            await site.ask("POST", RESPONSE, body, until=left.wait(), has_life=False,
                           on_sent=lambda _: left.set())  # fmt: skip
            response = await site.ask("GET", f"{RESPONSE}/resp_r1", has_life=False)
        assert code(response) == NOT_FOUND

    asyncio.run(run())


# ---------------------------------------------------------------- read


@pytest.mark.parametrize("is_streamed", [False, True])
def test_kept_response_is_the_one_that_was_sent(is_streamed: bool) -> None:
    server = Server(said("é"))
    sent = server.post(stream=is_streamed, metadata={"a": "b"})
    whole = sent.named_events()[-1][1]["response"] if is_streamed else sent.json()
    kept = server.ask("GET", f"{RESPONSE}/resp_r1").json()
    assert kept == whole
    assert (kept["store"], kept["metadata"]) == (True, {"a": "b"})
    assert server.ask("DELETE", f"{RESPONSE}/resp_r1").json() == {
        "id": "resp_r1", "object": "response", "deleted": True
    }  # fmt: skip
    assert code(server.ask("GET", f"{RESPONSE}/resp_r1")) == NOT_FOUND
    assert code(server.ask("DELETE", f"{RESPONSE}/resp_r1")) == NOT_FOUND


@pytest.mark.parametrize(
    ("query", "ids", "has_more"),
    [
        ("", ["item_r1_2", "b", "item_r1_0"], False),
        ("order=asc&limit=3", ["item_r1_0", "b", "item_r1_2"], False),
        ("order=asc&limit=1", ["item_r1_0"], True),
        ("order=asc&after=b", ["item_r1_2"], False),
        ("after=item_r1_0", [], False),
    ],
)
def test_items_of_an_input_are_listed_in_pages(query: str, ids: list[str], has_more: bool) -> None:
    server = Server(said("x"))
    call = {"type": "function_call", "id": "b", "call_id": "c", "name": "f", "arguments": "{}"}
    server.post([user("a"), call, {"role": "assistant", "content": "d", "id": None}])
    page = server.ask("GET", f"{RESPONSE}/resp_r1/input_items", query=query).json()
    assert ([one["id"] for one in page["data"]], page["has_more"]) == (ids, has_more)
    assert page["first_id"] == (ids[0] if ids else None)
    assert page["last_id"] == (ids[-1] if ids else None)


def test_items_are_listed_as_openai_has_them() -> None:
    server = Server(said("x"))
    server.post([user("a"), {"role": "assistant", "content": "d", "id": None}])
    page = server.ask("GET", f"{RESPONSE}/resp_r1/input_items", query="order=asc").json()["data"]
    message = {"type": "message", "status": "completed"}
    text = {"type": "output_text", "text": "d", "annotations": []}
    assert page == [
        message | {"id": "item_r1_0", "role": "user",
                   "content": [{"type": "input_text", "text": "a"}]},
        message | {"id": "item_r1_1", "role": "assistant", "content": [text]},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "query", "param"),
    [
        ("/input_items", "order=up", "order"), ("/input_items", "limit=0", "limit"),
        ("/input_items", "limit=101", "limit"), ("/input_items", "limit=x", "limit"),
        ("/input_items", "after=x", "after"), ("", "stream=true", "stream"),
    ],
)  # fmt: skip
def test_query_that_is_wrong_is_named(path: str, query: str, param: str) -> None:
    server = Server(said("x"))
    server.post()
    response = server.ask("GET", f"{RESPONSE}/resp_r1{path}", query=query)
    assert (response.status, response.error["param"]) == (400, param)


# ---------------------------------------------------------------- how many

SIZE = limits.LEAST_KEPT_BYTES


def kept(id: str, previous: str = "", size: int = 0) -> KeptResponse:
    return KeptResponse(
        id=id, previous=previous, json=b"x" * size, inputs={f"in_{id}": b"{}"},
        outputs={f"out_{id}": b"{}"}, has_failed=False,
    )  # fmt: skip


def ids_in(store: KeptResponses, key: str, *ids: str) -> str:
    found = []
    for id in ids:
        try:
            found.append(store.find(key, id).id)
        except Failure:
            found.append("-")
    return " ".join(found)


def test_key_that_has_most_loses_the_response_that_it_has_not_used_for_longest() -> None:
    store = KeptResponses(4 * SIZE)
    store.keep("light", kept("x"))
    for id in "abcde":
        store.keep("heavy", kept(id))
    assert ids_in(store, "light", "x") == "x"
    assert ids_in(store, "heavy", *"abcde") == "- - c d e"
    store.keep("light", kept("y"))
    store.keep("light", kept("z"))
    assert ids_in(store, "light", *"xyz") == "- y z"
    assert ids_in(store, "heavy", *"cde") == "- d e"


def test_conversation_that_goes_on_is_used_as_a_whole() -> None:
    store = KeptResponses(3 * SIZE)
    for one in (kept("a"), kept("b", "a"), kept("x")):
        store.keep("", one)
    assert json.loads(store.recall("", "b", []).history) == [{}] * 4
    store.keep("", kept("c", "b"))
    assert ids_in(store, "", *"abcx") == "a b c -"


def test_one_that_is_too_long_is_not_kept_and_costs_its_key_alone() -> None:
    store = KeptResponses(4 * SIZE)
    store.keep("other", kept("x"))
    store.keep("", kept("a"))
    store.keep("", kept("b", size=5 * SIZE))
    assert (ids_in(store, "other", "x"), ids_in(store, "", *"ab")) == ("x", "- -")


def test_conversation_with_a_hole_is_not_continued() -> None:
    store = KeptResponses()
    for one in (kept("a"), kept("b", "a"), kept("c", "b")):
        store.keep("", one)
    store.remove("", "a")
    with pytest.raises(
        Failure, match="response a, which b continues, is not stored here"
    ) as caught:
        store.recall("", "c", [])
    assert caught.value.code == "previous_response_not_found"


@pytest.mark.parametrize(
    ("previous", "items", "size"), [("a", [], 4), ("", ["in_a", "out_a"], 4), ("a", ["in_a"], 6)]
)
def test_what_is_referred_to_and_longer_than_any_body_is_refused(
    monkeypatch: pytest.MonkeyPatch, previous: str, items: list[str], size: int
) -> None:
    store = KeptResponses()
    store.keep("", kept("a"))
    monkeypatch.setattr(limits, "MAX_BODY_BYTES", size)
    store.recall("", previous, enumerate(items))
    monkeypatch.setattr(limits, "MAX_BODY_BYTES", size - 1)
    with pytest.raises(Failure, match="exceeds 0 MiB; start a new one"):
        store.recall("", previous, enumerate(items))


def test_what_a_revoked_key_had_is_gone() -> None:
    store = KeptResponses(3 * SIZE)
    for key in ("a", "b", ""):
        store.keep(key, kept(f"r{key}"))
    store.retain({"b"})
    assert [ids_in(store, key, f"r{key}") for key in ("a", "b", "")] == ["-", "rb", "-"]


def test_item_that_two_responses_have_stays_with_the_one_that_is_left() -> None:
    store = KeptResponses()
    first, second = kept("a"), kept("b")
    for one in (first, second):
        object.__setattr__(one, "inputs", {"same": one.id.encode()})
        store.keep("", one)
    store.remove("", "a")
    assert store.recall("", "", [(0, "same")]).referred == b"[b]"


def test_removed_response_leaves_nothing_of_its_items() -> None:
    store = KeptResponses()
    for id in "ab":
        store.keep("", kept(id))
    store.remove("", "a")
    assert set(store._owners[""].places) == {"in_b", "out_b"}
