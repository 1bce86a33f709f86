"""Pieces of a stream are written on a shorter way than everything else, and in the same bytes."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from typing import Any, cast

import pytest
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from mlxsup.client import Channel, Delta, Logprobs, TokenLogprob
from mlxsup.gateway.connection import write_piece
from mlxsup.gateway.openai.chunks import (
    ChatShape,
    CompletionShape,
    chat_logprobs,
    completion_logprobs,
)
from mlxsup.gateway.sse import WRITE, EventStream

from support.eventually_async import eventually_async
from support.played_gateway import FedDaemon, Response, Site, delta, result

TEXTS = ("the", ' "quoted"\\', "größer\n\t\x00\x7f", "\u2028é", "👩‍💻", "</script>")
LOGPROBS = [Logprobs(chosen=TokenLogprob(token=1, logprob=-0.5, text="é"), top=[])]


class Wire:
    """What a transport was given."""

    def __init__(self) -> None:
        self.sent = b""

    def write(self, data: bytes) -> None:
        self.sent += data


def cycle_of(wire: Wire, method: str = "POST") -> RequestResponseCycle:
    """A request as uvicorn has it once its head was read."""
    transport = cast(Any, wire)
    logger = logging.getLogger(__name__)
    return RequestResponseCycle(
        scope=cast(Any, {"type": "http", "method": method, "http_version": "1.1"}),
        transport=transport, flow=FlowControl(transport), logger=logger, access_logger=logger,
        access_log=False, default_headers=[], message_event=asyncio.Event(),
        expect_100_continue=False, keep_alive=True, on_response=lambda: None,
    )  # fmt: skip


def streamed(pieces: Sequence[bytes], *, is_short: bool, method: str = "POST") -> bytes:
    """The whole response, its pieces on the short way or through uvicorn's own `send`."""
    wire = Wire()

    async def run() -> None:
        cycle = cycle_of(wire, method)
        scope = {"extensions": {WRITE: lambda data: write_piece(cycle, data)}}
        out = EventStream(scope, cast(Any, cycle.send), {"x-request-id": "r1"})
        await out.write(pieces[0])
        for piece in pieces[1:]:
            if is_short:
                out.pass_on(piece)
            else:
                await out.write(piece)
        await out.end()

    asyncio.run(run())
    return wire.sent


@pytest.mark.parametrize("method", ["POST", "HEAD"])
def test_the_bytes_of_a_response_are_the_same_on_both_ways(method: str) -> None:
    pieces = [f"data: {'x' * length}\n\n".encode() for length in (1, 9, 200, 70_000)]
    ordinary = streamed(pieces, is_short=False, method=method)
    assert streamed(pieces, is_short=True, method=method) == ordinary
    assert (pieces[-1] in ordinary) == (method == "POST")


def test_nothing_is_written_for_a_reader_who_has_left() -> None:
    async def run() -> None:
        wire = Wire()
        cycle = cycle_of(wire)
        await cycle.send(cast(Any, {"type": "http.response.start", "status": 200}))
        cycle.disconnected = True
        before = wire.sent
        write_piece(cycle, b"data: x\n\n")
        assert wire.sent == before

    asyncio.run(run())


# ---------------------------------------------------------------- what is in them


def chunk(kind: str, choice: dict[str, Any]) -> bytes:
    """The event of a chunk, encoded as a whole."""
    value: dict[str, Any] = {
        "id": "i", "object": kind, "created": 7, "model": "m\n",
        "system_fingerprint": ChatShape("i", 7, "m").begin.split('"')[-2], "choices": [choice],
    }  # fmt: skip
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("logprobs", [None, LOGPROBS])
def test_a_chunk_is_the_json_of_its_parts(text: str, logprobs: list[Logprobs] | None) -> None:
    piece = Delta(text=text, token_ids=[1], logprobs=logprobs)
    about = {} if logprobs is None else {"logprobs": chat_logprobs(logprobs)}
    choice: dict[str, Any] = {
        "index": 3,
        "delta": {"content": text},
        **about,
        "finish_reason": None,
    }
    chat = ChatShape("i", 7, "m\n").piece(3, piece)
    assert chat == chunk("chat.completion.chunk", choice)
    of_tokens = None if logprobs is None else completion_logprobs(logprobs, [0])
    choice = {"index": 3, "text": text, "logprobs": of_tokens, "finish_reason": None}
    assert CompletionShape("i", 7, "m\n").piece(3, piece) == chunk("text_completion", choice)


def test_a_piece_without_text_is_shown_only_for_its_log_probabilities() -> None:
    empty = Delta(text="", token_ids=[1])
    with_some = Delta(text="", token_ids=[1], logprobs=LOGPROBS)
    for shape in (ChatShape("i", 7, "m"), CompletionShape("i", 7, "m")):
        assert shape.piece(0, empty) is None
        assert shape.piece(0, with_some) is not None


def test_offsets_count_the_text_of_pieces_that_had_no_log_probabilities() -> None:
    shape = CompletionShape("i", 7, "m")
    shape.piece(0, Delta(text="four", token_ids=[1]))
    last = shape.piece(0, Delta(text="é", token_ids=[1], logprobs=LOGPROBS))
    assert last is not None
    (choice,) = json.loads(last.removeprefix(b"data: "))["choices"]
    assert choice["logprobs"]["text_offset"] == [4]


def test_reasoning_of_a_chat_is_counted_and_that_of_a_completion_is_left_out() -> None:
    thought = Delta(text="hm", token_ids=[1, 2], channel=Channel.REASONING)
    chat, completion = ChatShape("i", 7, "m"), CompletionShape("i", 7, "m")
    assert b'"delta":{"reasoning_content":"hm"}' in (chat.piece(0, thought) or b"")
    assert completion.piece(0, thought) is None
    assert [one.count(0).reasoning_tokens for one in (chat, completion)] == [2, 2]


# ---------------------------------------------------------------- when they are written


def test_a_piece_is_written_in_the_turn_of_the_loop_that_brings_it() -> None:
    async def run() -> None:
        fed = FedDaemon()
        sent: list[Response] = []
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        asking = asyncio.create_task(
            Site(fed).ask("POST", "/v1/chat/completions", body, on_sent=sent.append)
        )
        await eventually_async(lambda: fed.inboxes)
        (inbox,) = fed.inboxes
        inbox.put(delta("one"))
        await eventually_async(lambda: sent and b"one" in sent[-1].body)
        for text in ("two", "three"):
            inbox.put(delta(text))
            assert text.encode() in sent[-1].body, "the loop has not turned since"
        inbox.put(result("onetwothree"))
        response = await asking
        assert response.is_whole
        assert response.body.count(b"data: ") == 6, "the role, three pieces, the reason, the mark"

    asyncio.run(run())
