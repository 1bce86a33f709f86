"""What a client checks before it sends, and what streams and errors are to their users."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from mlxsup.client.async_client import AsyncClient
from mlxsup.client.client import Client
from mlxsup.client.errors import ConnectionLost, RequestError, internal
from mlxsup.client.parameters import (
    check_client,
    check_limit,
    check_model,
    check_request,
    encode_generate,
    load,
)
from mlxsup.client.results import Delta, Notice, Result
from mlxsup.client.session import Item
from mlxsup.client.streams import StreamBase, value_of
from mlxsup.protocol.client_messages import CLIENT_MESSAGES, Generate, Timings, Usage
from mlxsup.protocol.codec import Decoder
from mlxsup.protocol.errors import ErrorCode
from mlxsup.protocol.ids import RequestId
from mlxsup.protocol.message import Message
from mlxsup.protocol.places import check_endpoint, endpoint_in, find_place
from mlxsup.protocol.states import FinishReason, NoticeKind

ID = RequestId("r")
DONE = Result(text="x", finish_reason=FinishReason.STOP)


def encoded(model: Any = "m", **changes: Any) -> Message:
    values: dict[str, Any] = {
        "timeout_s": None,
        "queue_timeout_s": None,
        "first_token_timeout_s": None,
        "client": None,
        "priority": None,
        "resume": True,
        "keep_alive": None,
        "notices": False,
    }
    frames = encode_generate(ID, model, {"prompt": "p"}, **(values | changes))
    return Decoder(CLIENT_MESSAGES, is_strict=True).decode(frames)


def test_every_argument_reaches_the_header() -> None:
    message = encoded(
        timeout_s=3, queue_timeout_s=1, first_token_timeout_s=2, client="me", notices=True
    )
    assert isinstance(message, Generate)
    assert (message.id, message.model, message.client) == ("r", "m", "me")
    assert (message.timeout_s, message.queue_timeout_s, message.first_token_timeout_s) == (3, 1, 2)
    assert (message.notices, message.resume) == (True, True)
    other = encoded(resume=False, keep_alive=-1)
    assert isinstance(other, Generate)
    assert (other.notices, other.resume, other.timeout_s) == (False, False, None)
    assert (message.keep_alive, other.keep_alive) == (None, -1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": ""}, "model takes text of 1 to 128 characters, not text of 0"),
        ({"model": "x" * 129}, "model takes text of 1 to 128 characters, not text of 129"),
        ({"model": 5}, "model takes text of 1 to 128 characters, not 5"),
        ({"model": "\ud800"}, "model takes text that can be encoded as UTF-8, not lone surrogates"),
        ({"client": ""}, "client takes text of 1 to 1024 characters, not text of 0"),
        ({"client": "x" * 1025}, "client takes text of 1 to 1024 characters, not text of 1025"),
        (
            {"priority": "urgent"},
            "priority takes one of interactive, normal, batch, not 'urgent'",
        ),
        ({"priority": 1}, "priority takes one of interactive, normal, batch, not 1"),
        ({"resume": 1}, "resume takes true or false, not 1"),
        ({"timeout_s": -0.1}, "timeout_s takes seconds, from 0 up, not -0.1"),
        ({"timeout_s": True}, "timeout_s takes seconds, from 0 up, not True"),
        ({"timeout_s": "1"}, "timeout_s takes seconds, from 0 up, not text"),
        ({"queue_timeout_s": float("nan")}, "queue_timeout_s takes seconds, from 0 up, not nan"),
        ({"first_token_timeout_s": 2e9}, "first_token_timeout_s takes seconds, from 0 up, not "),
    ],
)
def test_what_is_wrong_is_named_before_anything_is_sent_C7(
    changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(RequestError) as caught:
        encoded(**changes)
    assert caught.value.message.startswith(words)
    assert caught.value.code is ErrorCode.INVALID_REQUEST
    assert caught.value.detail["parameter"] == next(iter(changes))


COUNT = "context_length takes an integer from 0 to 2147483647, not "
STAYS = "keep_alive takes seconds, from 0 up, or -1 for ever, not "


def load_with(**changes: Any) -> Message:
    return load(ID, "m", dry_run=False, **({"keep_alive": None, "context_length": None} | changes))


@pytest.mark.parametrize(
    ("check", "parameter", "value", "words"),
    [
        *((load_with, "context_length", value, COUNT) for value in (-1, 1.5, True, "1", 2**31)),
        *((load_with, "keep_alive", value, STAYS) for value in (-2, True, "1", float("nan"))),
        (check_client, "client", "", "client takes text of 1 to 1024 characters, not text of 0"),
        (check_request, "request", "", "request takes text of 1 to 128 characters, not text of 0"),
    ],
)
def test_what_is_wrong_with_a_command_is_named(
    check: Any, parameter: str, value: object, words: str
) -> None:
    with pytest.raises(RequestError) as caught:
        check(**{parameter: value})
    assert caught.value.message.startswith(words)
    assert caught.value.detail["parameter"] == parameter


def test_what_is_just_right_is_sent_C7() -> None:
    name, client = "x" * 128, "\U0001f98a" * 1024
    message = encoded(name, client=client, timeout_s=0, queue_timeout_s=1e9)
    assert isinstance(message, Generate)
    assert (message.model, message.client, message.timeout_s) == (name, client, 0.0)
    assert check_limit("timeout_s", 1e9) == 1e9
    assert check_limit("timeout_s", None) is None
    assert check_model(name) == name
    with pytest.raises(RequestError, match="timeout_s takes"):
        check_limit("timeout_s", -1)


# ---------------------------------------------------------------- endpoints


def test_the_endpoint_is_that_named_then_that_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("MLXSUP_ENDPOINT", "ipc:///of/the/environment")
    assert find_place("ipc:///named").endpoint == "ipc:///named"
    assert find_place().endpoint == "ipc:///of/the/environment"
    monkeypatch.delenv("MLXSUP_ENDPOINT")
    assert find_place().endpoint == "ipc:///home/somebody/.mlxsup/run/client.sock"
    assert endpoint_in("~/run") == "ipc:///home/somebody/run/client.sock"


@pytest.mark.parametrize("wrong", ["tcp://127.0.0.1:5", "/a/path", "ipc://", ""])
def test_an_endpoint_is_a_socket_in_a_folder(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"^an endpoint is ipc:// and the path of a socket, not "):
        check_endpoint(wrong)


def test_both_clients_look_where_the_environment_says_if_nothing_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLXSUP_ENDPOINT", "ipc:///of/the/environment")
    with Client() as client:
        assert client.endpoint == "ipc:///of/the/environment"

    async def endpoint() -> str:
        async with AsyncClient() as client:
            return client.endpoint

    assert asyncio.run(endpoint()) == "ipc:///of/the/environment"


def test_a_path_that_some_system_cannot_bind_is_refused() -> None:
    assert check_endpoint("ipc:///" + "x" * 102)
    with pytest.raises(ValueError, match="103"):
        check_endpoint("ipc:///" + "x" * 103)


# ---------------------------------------------------------------- streams and errors


class Taking(StreamBase):
    """A stream that is given its items one by one."""

    def tell(self, notice: Notice) -> None:
        self._tell(notice)

    def take(self, item: Item) -> Delta | None:
        return self._take(item)


class Stream:
    """A stream, with what it cancelled and what reached it."""

    def __init__(self) -> None:
        self.cancelled: list[str] = []
        self.notices: list[Notice] = []
        self.base = Taking(ID, self.cancelled.append, self.notices.append)


def test_a_stream_has_no_result_before_its_end() -> None:
    stream = Stream()
    assert stream.base.request_id == "r"
    expected = "there is no result until the stream has been read to its end"
    with pytest.raises(RuntimeError, match=f"^{expected}$"):
        _ = stream.base.result
    delta = Delta(text="x", token_ids=[1])
    assert stream.base.take(delta) is delta
    assert stream.base.take(DONE) is None
    assert stream.base.result is DONE


def test_a_stream_raises_its_error_whenever_it_is_asked() -> None:
    stream = Stream()
    lost = ConnectionLost("gone", "ipc:///x")
    with pytest.raises(ConnectionLost):
        stream.base.take(lost)
    with pytest.raises(ConnectionLost):
        _ = stream.base.result


def test_a_stream_is_cancelled_while_it_runs_and_not_after_its_end_D4() -> None:
    stream = Stream()
    stream.base.cancel()
    stream.base.take(DONE)
    stream.base.cancel()
    assert stream.cancelled == ["r"]


def test_a_stream_that_nobody_can_read_any_more_is_cancelled() -> None:
    stream, ended = Stream(), Stream()
    ended.base.take(DONE)
    del stream.base, ended.base
    assert (stream.cancelled, ended.cancelled) == (["r"], [])


def test_notices_are_handed_on_to_who_asked() -> None:
    notice = Notice(kind=NoticeKind.LOADING, detail={})
    stream = Stream()
    stream.base.tell(notice)
    assert stream.notices == [notice]
    silent = Taking(ID, lambda _: None, None)
    silent.tell(notice)
    silent.take(DONE)


@pytest.mark.parametrize("item", [{"n": 1}, Notice(kind=NoticeKind.LOADING, detail={})])
def test_a_stream_that_is_given_something_else_ends_with_an_error(item: Item) -> None:
    stream = Stream()
    with pytest.raises(RequestError, match=r"^a stream was given a reply$"):
        stream.base.take(item)
    with pytest.raises(RequestError):
        _ = stream.base.result


def test_a_command_gives_its_map_or_raises() -> None:
    assert value_of({"n": 1}) == {"n": 1}
    with pytest.raises(RequestError, match=r"^a command was given a piece of a stream$"):
        value_of(DONE)
    with pytest.raises(ConnectionLost):
        value_of(ConnectionLost("gone", "ipc:///x"))


def test_a_result_that_says_no_more_is_of_text_alone() -> None:
    assert (DONE.reasoning, DONE.tool_calls, DONE.token_ids, DONE.logprobs) == ("", [], [], None)
    assert (DONE.usage, DONE.timings) == (Usage(), Timings())
    assert (DONE.seed, DONE.resumed, DONE.warnings) == (None, 0, [])


def test_errors_read_as_sentences() -> None:
    plain = ConnectionLost("gone", "ipc:///x")
    assert (str(plain), plain.hint, plain.is_turned_away) == ("gone", "", False)
    error = internal("odd")
    assert (error.code, str(error), error.retryable) == ("internal", "odd", False)
    assert repr(error) == "RequestError(internal, 'odd', detail={})"


def test_a_limit_of_a_stop_is_checked_by_both_clients_C7() -> None:
    with Client("ipc:///x") as client, pytest.raises(RequestError) as caught:
        client.stop(timeout_s=-1)
    assert caught.value.detail["parameter"] == "timeout_s"

    async def stop() -> None:
        async with AsyncClient("ipc:///x") as client:
            await client.stop(timeout_s=-1)

    with pytest.raises(RequestError) as caught:
        asyncio.run(stop())
    assert caught.value.detail["parameter"] == "timeout_s"
