"""Streamed answers over HTTP: pieces, ends, comments, and readers that leave."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import MutableMapping, Sequence
from itertools import pairwise
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from mlxsup.client import (
    Delta,
    FinishReason,
    Logprobs,
    Notice,
    NoticeKind,
    Result,
    TokenLogprob,
)
from mlxsup.gateway import limits
from mlxsup.gateway.answers import Progress
from mlxsup.gateway.ask import Ask
from mlxsup.gateway.connection import write_piece
from mlxsup.gateway.openai.chunks import ChatShape, CompletionShape
from mlxsup.gateway.openai.logprobs import (
    PromptOffsets,
    TextOffsets,
    chat_logprobs,
    completion_logprobs,
)
from mlxsup.gateway.sse import WRITE, EventStream

from support.eventually_async import eventually_async
from support.gateway.played_gateway import (
    BODY,
    CHAT,
    MESSAGE,
    FedDaemon,
    Item,
    PlayedDaemon,
    Response,
    Site,
    delta,
    post,
    refused,
    result,
    said,
)

# ---------------------------------------------------------------- the bytes of pieces

TEXTS = ("the", ' "quoted"\\', "größer\n\t\x00\x7f", "\u2028é", "👩‍💻", "</script>")
HALF = "\ufffd".encode()
LOGPROBS = [Logprobs(chosen=TokenLogprob(token=1, logprob=-0.5, text="é"), top=[])]


class Wire:
    """A transport that keeps what is written."""

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
def test_short_way_writes_the_bytes_of_uvicorn(method: str) -> None:
    pieces = [f"data: {'x' * length}\n\n".encode() for length in (1, 9, 200, 70_000)]
    ordinary = streamed(pieces, is_short=False, method=method)
    assert streamed(pieces, is_short=True, method=method) == ordinary
    assert (pieces[-1] in ordinary) == (method == "POST")


def test_nothing_is_written_to_a_reader_that_has_left() -> None:
    async def run() -> None:
        wire = Wire()
        cycle = cycle_of(wire)
        await cycle.send(cast(Any, {"type": "http.response.start", "status": 200}))
        cycle.disconnected = True
        before = wire.sent
        write_piece(cycle, b"data: x\n\n")
        assert wire.sent == before

    asyncio.run(run())


PREFIXES = {"chat.completion.chunk": "chatcmpl", "text_completion": "cmpl"}


def ask(**more: Any) -> Ask:
    return Ask(model="m\n", inputs=(), **more)


def chunk(kind: str, choice: dict[str, Any]) -> bytes:
    """The event of a chunk, encoded as a whole."""
    value: dict[str, Any] = {
        "id": f"{PREFIXES[kind]}-i", "object": kind, "created": 7, "model": "m\n",
        "system_fingerprint": ChatShape(ask(), "i", 7).begin.split('"')[-2], "choices": [choice],
    }  # fmt: skip
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("logprobs", [None, LOGPROBS])
def test_chunk_is_the_json_of_its_parts(text: str, logprobs: list[Logprobs] | None) -> None:
    piece = Delta(text=text, token_ids=[1], logprobs=logprobs)
    about = {} if logprobs is None else {"logprobs": chat_logprobs(logprobs)}
    choice: dict[str, Any] = {
        "index": 3,
        "delta": {"content": text},
        **about,
        "finish_reason": None,
    }
    assert ChatShape(ask(), "i", 7).piece(3, piece) == chunk("chat.completion.chunk", choice)
    if logprobs is None:
        choice = {"index": 3, "text": text, "logprobs": None, "finish_reason": None}
        assert CompletionShape(ask(), "i", 7).piece(3, piece) == chunk("text_completion", choice)
        return
    shape = CompletionShape(ask(has_logprobs=True), "i", 7)
    assert shape.piece(3, piece) is None, "it waits for the next token, or the end"
    of_tokens = completion_logprobs(logprobs, [0])
    choice = {"index": 3, "text": text, "finish_reason": None, "logprobs": of_tokens}
    assert shape.piece(3, piece) == chunk("text_completion", choice)


def test_piece_is_written_in_the_turn_that_brings_it() -> None:
    async def run() -> None:
        asking = await Asking(1).begun()
        (inbox,) = asking.daemon.inboxes
        inbox.put(delta("one"))
        await eventually_async(lambda: b"one" in asking.sent.body)
        for text in ("two", "three"):
            inbox.put(delta(text))
            assert text.encode() in asking.sent.body, "the loop has not turned since"
        inbox.put(result("onetwothree"))
        response = await asking.whole()
        assert response.is_whole
        assert response.body.count(b"data: ") == 6, "the role, three pieces, the reason, the mark"
        assert not asking.daemon.pings, "a single answer needs none"

    asyncio.run(run())


# ---------------------------------------------------------------- ends


def test_one_of_several_that_fails_ends_all() -> None:
    daemon = PlayedDaemon([refused("quarantined")], [delta("a"), asyncio.Event()])
    response = asyncio.run(Site(daemon).ask("POST", CHAT, {**BODY, "n": 2}))
    assert (response.status, response.error["code"]) == (503, "quarantined")
    assert "r2" in daemon.cancelled


def test_one_of_several_that_was_ended_by_hand_ends_all_as_if_it_were_alone() -> None:
    ended: list[Item] = [delta("a"), result("a", FinishReason.CANCELLED)]
    alone = post(CHAT, *ended)
    daemon = PlayedDaemon(said("a"), ended)
    response = asyncio.run(Site(daemon).ask("POST", CHAT, {**BODY, "n": 2}))
    assert (response.status, response.error["code"]) == (alone.status, alone.error["code"])


@pytest.mark.parametrize("parallel_tool_calls", [True, False])
def test_answer_ended_by_the_gateway_is_not_whole(parallel_tool_calls: bool) -> None:
    body = {**BODY, "stream": True, "parallel_tool_calls": parallel_tool_calls}

    async def run() -> Response:
        site = Site(PlayedDaemon([delta("a"), asyncio.Event()]))

        def on_sent(response: Response) -> None:
            if b'"a"' in response.body:
                site.gateway.open_answers.cancel()

        return await asyncio.wait_for(site.ask("POST", CHAT, body, on_sent=on_sent), 60)

    response = asyncio.run(run())
    *chunks, last = response.events()
    assert last["error"]["code"] == "shutting_down"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None]
    assert not response.is_whole


ENDS: dict[str, list[Item]] = {
    "answered": said("a"),
    "refused": [refused("overloaded")],
    "broken off": [delta("a"), refused("worker_crashed", tokens_sent=1)],
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("stream", [False, True])
def test_ended_request_is_forgotten(end: str, stream: bool) -> None:
    async def run() -> None:
        site = Site(PlayedDaemon(ENDS[end]))
        async with site.life():
            await site.ask("POST", CHAT, {**BODY, "stream": stream}, has_life=False)
            assert site.gateway.open_answers.streams == set()

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_reader_that_leaves_ends_its_request(stream: bool) -> None:
    daemon = PlayedDaemon([delta("a"), asyncio.Event()])
    asked = Site(daemon).ask("POST", CHAT, {**BODY, "stream": stream}, until=asyncio.sleep(0))
    response = asyncio.run(asyncio.wait_for(asked, 60))
    assert not response.is_whole
    assert daemon.cancelled == {"r1"}


# ---------------------------------------------------------------- waiting


QUEUED = Notice(kind=NoticeKind.QUEUED, detail={"position": 3, "reason": "rows"})
LOADING = Notice(kind=NoticeKind.LOADING, detail={"state": "LOADING", "fraction": 0.5})
READING = Notice(kind=NoticeKind.PREFILLING, detail={"done": 10, "total": 90})
PAUSED = Notice(kind=NoticeKind.PAUSED, detail={"reason": "swap", "tokens_sent": 1})


async def comments_of(*notices: Notice) -> list[str]:
    """The comments of a stream that gets these notices, and of an error after them."""
    step = asyncio.Event()
    step.set()
    items = [one for notice in notices for one in (notice, step)]
    daemon = PlayedDaemon([*items, *said("a")])
    response = await Site(daemon).ask("POST", CHAT, {**BODY, "stream": True})
    assert response.events()[-1] == "[DONE]"
    return response.comments()


CRASHED = Notice(kind=NoticeKind.RESUMED, detail={"times": 1, "after": "crash"})
GOES_ON = Notice(kind=NoticeKind.RESUMED, detail={"times": 1, "after": "pause"})
ALL_COMMENTS = [
    "queued, place 3", "paused, swap", "continues", "loading, 50%",
    "reading the prompt, 10 of 90 tokens",
]  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "comments"),
    [
        ({}, ALL_COMMENTS[1:3]),
        ({"HOLD_S": 0.0}, ALL_COMMENTS[:3]),
        ({"HOLD_S": 0.0, "COMMENT_INTERVAL_S": 0.0}, ALL_COMMENTS),
    ],
    ids=["only pauses at first", "at a distance", "each"],
)
def test_waiting_stream_gets_comments_on_its_progress(
    changed: dict[str, float], comments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in changed.items():
        monkeypatch.setattr(limits, name, value)
    assert asyncio.run(comments_of(QUEUED, PAUSED, CRASHED, GOES_ON, LOADING, READING)) == comments


def test_stream_of_anthropic_that_waits_gets_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HOLD_S", 0.0)
    step = asyncio.Event()
    step.set()
    response = post(MESSAGE, QUEUED, step, *said("a"), stream=True)
    assert response.named_events()[0][0] == "ping"
    assert response.comments() == ["queued, place 3"]


def test_comment_that_waits_for_the_reader_comes_behind_the_head() -> None:
    sent: list[MutableMapping[str, Any]] = []

    async def run() -> None:
        reads = asyncio.Event()

        async def send(message: MutableMapping[str, Any]) -> None:
            await reads.wait()
            sent.append(message)

        now = 0.0
        progress = Progress(lambda: now)
        out = EventStream({"extensions": {WRITE: None}}, send, {})
        progress.attach(out, ChatShape(ask(), "r1", 1))
        now = limits.HOLD_S
        progress(QUEUED)
        await asyncio.sleep(0)
        assert out.is_started
        progress.close()
        progress(QUEUED)
        last = asyncio.create_task(out.write(b"data: the error"))
        await asyncio.sleep(0)
        reads.set()
        await last

    asyncio.run(run())
    assert [message["type"] for message in sent] == [
        "http.response.start", "http.response.body", "http.response.body",
    ]  # fmt: skip
    assert [message.get("body") for message in sent[1:]] == [
        b": queued, place 3\n\n", b"data: the error",
    ]  # fmt: skip


# ---------------------------------------------------------------- several answers


TURNS = 20
"""Of the loop: more than anything here needs that does not wait for an event."""


class Asking:
    """A streamed chat with several answers, and what the daemon is made to say."""

    def __init__(self, n: int) -> None:
        self.daemon = FedDaemon()
        self.sent = Response()
        body = {**BODY, "stream": True, "n": n}
        asked = Site(self.daemon).ask("POST", CHAT, body, on_sent=self._on_sent)
        self._task = asyncio.create_task(asked)
        self._n = n

    def _on_sent(self, response: Response) -> None:
        self.sent = response

    async def begun(self) -> Asking:
        """Return it once everything was asked of the daemon."""
        await eventually_async(lambda: len(self.daemon.inboxes) == self._n)
        await self.turn()
        return self

    def answer_pings(self) -> None:
        """Let the daemon say that it has read everything that came before them."""
        for inbox in self.daemon.pings:
            inbox.put({})

    async def turn(self) -> None:
        """Let happen what nothing delays."""
        for _ in range(TURNS):
            await asyncio.sleep(0)

    async def whole(self, *, is_answered: bool = False) -> Response:
        """Return the response once it has ended; `is_answered` ends each answer first."""
        for inbox in self.daemon.inboxes if is_answered else ():
            inbox.put(result(""))
        return await self._task


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("first", [[delta("a")], [delta("a"), result("a")], [result("")], [QUEUED]])
def test_refusal_behind_pieces_of_others_is_a_status_and_ends_them(
    first: Sequence[object], is_split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first answer waits outside of its stream if a piece of it has come."""
    monkeypatch.setattr(limits, "HOLD_S", 0.0)

    async def run() -> None:
        asking = await Asking(3).begun()
        for item in first:
            asking.daemon.inboxes[0].put(item)  # type: ignore[arg-type]
        if is_split:
            await asking.turn()
            assert asking.sent.status == 0
        asking.daemon.inboxes[2].put(refused("overloaded"))
        asking.answer_pings()
        response = await asking.whole()
        assert (response.status, response.error["code"]) == (429, "overloaded")
        is_read = isinstance(first[0], Result)
        assert asking.daemon.cancelled == {"r2"} | (set() if is_read else {"r1"})

    asyncio.run(run())


def test_waiting_answers_hold_no_other_back() -> None:
    async def run() -> None:
        asking = await Asking(limits.MAX_CHOICES).begun()
        asking.daemon.inboxes[1].put(delta("b"))
        asking.answer_pings()
        await eventually_async(lambda: b'"b"' in asking.sent.body)
        assert asking.sent.status == 200
        assert (await asking.whole(is_answered=True)).is_whole

    asyncio.run(run())


def test_comments_come_once_all_requests_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HOLD_S", 0.0)

    async def run() -> None:
        asking = await Asking(2).begun()
        asking.answer_pings()
        await asking.turn()
        asking.daemon.inboxes[1].put(QUEUED)
        await eventually_async(lambda: asking.sent.comments() == ["queued, place 3"])
        assert (await asking.whole(is_answered=True)).is_whole

    asyncio.run(run())


@pytest.mark.parametrize(
    ("told", "shown"), [((QUEUED,), "queued, place 3"), ((delta("a"), PAUSED), "paused, swap")]
)
def test_comment_is_repeated_while_a_stream_stands_still(
    told: Sequence[Delta | Notice], shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The place in the queue has come before comments may, and does not change."""
    monkeypatch.setattr(limits, "HOLD_S", 0.01)
    monkeypatch.setattr(limits, "REPEAT_COMMENT_S", 0.01)
    monkeypatch.setattr(limits, "COMMENT_INTERVAL_S", 0.0)

    async def run() -> None:
        asking = await Asking(1).begun()
        for item in told:
            asking.daemon.inboxes[0].put(item)
        await eventually_async(lambda: asking.sent.comments()[:3] == [shown] * 3)
        assert (await asking.whole(is_answered=True)).is_whole

    asyncio.run(run())


def test_repeated_comment_keeps_its_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HOLD_S", 0.0)
    monkeypatch.setattr(limits, "REPEAT_COMMENT_S", 0.0)
    monkeypatch.setattr(limits, "COMMENT_INTERVAL_S", 3600.0)

    async def run() -> None:
        asking = await Asking(1).begun()
        asking.daemon.inboxes[0].put(QUEUED)
        await eventually_async(lambda: asking.sent.comments() != [])
        await asking.turn()
        assert asking.sent.comments() == ["queued, place 3"]
        assert (await asking.whole(is_answered=True)).is_whole

    asyncio.run(run())


@pytest.mark.parametrize("goes_on", [delta("a"), CRASHED])
def test_comment_is_not_repeated_once_a_stream_goes_on(
    goes_on: Delta | Notice, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HOLD_S", "REPEAT_COMMENT_S", "COMMENT_INTERVAL_S"):
        monkeypatch.setattr(limits, name, 0.0)

    async def run() -> None:
        asking = await Asking(1).begun()
        for item in (QUEUED, goes_on):
            asking.daemon.inboxes[0].put(item)
        await asking.turn()
        told = asking.sent.comments()
        await asking.turn()
        assert asking.sent.comments() == told
        assert (await asking.whole(is_answered=True)).is_whole

    asyncio.run(run())


# ---------------------------------------------------------------- where tokens begin


TEXT = st.text(st.sampled_from("ab é€𝄞"), max_size=12)


def parts(content: bytes, cuts: list[int]) -> list[bytes]:
    """Return the parts between the cuts."""
    places = [0, *sorted(cut % (len(content) + 1) for cut in cuts), len(content)]
    return [content[a:b] for a, b in pairwise(places)]


def shown_of(content: bytes) -> str:
    """The text of what is there of the characters that are whole."""
    return content.decode(errors="ignore")


@given(TEXT, st.lists(st.integers(0, 100)))
def test_half_characters_begin_where_their_character_does(text: str, cuts: list[int]) -> None:
    offsets, read, shown = TextOffsets(), b"", ""
    for part in parts(text.encode(), cuts):
        before, read = shown_of(read), read + part
        now = shown_of(read)
        found = offsets.take(now.removeprefix(shown), [part.decode(errors="replace")])
        assert found == [len(before)]
        shown = now


@pytest.mark.parametrize(
    ("pieces", "offsets"),
    [
        (
            [("", ["<"]), ("", ["\ufffd"]), ("", ["\ufffd"]), ("", [""]), ("", ["b"]),
             ("<éb>", [">"]), ("c", ["c"])],
            [[0], [1], [1], [1], [2], [3], [4]],
        ),
        # Text without tokens counts; nothing is held back behind it.
        ([("four", []), ("", ["a"]), ("ab", []), ("c", ["c"])], [[], [4], [], [6]]),
        # Some tokenizers drop the space before the first word.
        ([("so", [" so"]), (" be", [" be"])], [[0], [2]]),
    ],
    ids=["half a character", "text without tokens", "tokens that differ from the text"],
)  # fmt: skip
def test_offsets_of_tokens(pieces: list[tuple[str, list[str]]], offsets: list[list[int]]) -> None:
    found = TextOffsets()
    assert [found.take(text, tokens) for text, tokens in pieces] == offsets


PROMPTS = {
    "words": ("Hello you", [b"Hello", b" you"], [0, 5]),
    "a mark at its beginning": ("Hi you", [b"<s>", b"Hi", b" you"], [0, 0, 2]),
    "a mark within": ("a<b>c", [b"a", b"<b>", b"c"], [0, 1, 4]),
    "no space before the first word": ("Hi you", [b"<s>", b" Hi", b" you"], [0, 0, 2]),
    "other characters than those of the text": ("aé b c", ["ae\u0301".encode(), b" b", b" c"],
                                                [0, 2, 4]),
    "no spaces of words alone": ("a b c", [b"a", b"b", b"c"], [0, 1, 3]),
    "characters in parts": ("né🦊x", [b"n", b"\xc3", b"\xa9\xf0", b"\x9f\xa6", b"\x8a", b"x"],
                            [0, 1, 1, 2, 2, 3]),
    "parts of which nothing is known": ("é x", [HALF, HALF, b" x"], [0, 0, 1]),
    "a token without text": ("ab", [b"a", b"", b"b"], [0, 1, 1]),
}  # fmt: skip


@pytest.mark.parametrize("case", PROMPTS)
def test_tokens_of_a_prompt_begin_where_its_text_has_them(case: str) -> None:
    text, tokens, expected = PROMPTS[case]
    for size in (1, 2, len(tokens)):
        offsets = PromptOffsets()
        offsets.add(text)
        taken = (offsets.take(tokens[at : at + size]) for at in range(0, len(tokens), size))
        assert [offset for some in taken for offset in some] == expected
