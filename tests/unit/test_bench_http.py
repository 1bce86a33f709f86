"""What `python -m bench http` claims, and makes of what it has read. No process, no clock."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from typing import Any, cast

import pytest

from mlxsup.cli.benchmark.asking import checked
from mlxsup.cli.benchmark.burst import AnswerError, Burst
from mlxsup.cli.benchmark.http_reading import Reader, request_of

from bench.burst import TARGET_RATIO
from bench.fast_path.claims import ROWS as FAST_PATH_ROWS
from bench.fast_path.document import verdict
from bench.fast_path.results import Found
from bench.http.bursts import Contest, Rounds
from bench.http.claims import ROWS
from bench.http.cost import STREAMS, at_pace, event_of, paced_founds, per_chunk_us
from bench.http.document import HTTP
from bench.http.servers import OverHttp
from bench.http.stages import STAGES, beside_founds
from bench.two_models import Seen
from support.verdict import NotShown, Verdict

BY_ID = {claim.id: claim for row in ROWS.values() for claim in row.claims}

LIMITS = {
    "http_cpu": 60.0, "http_paced": 100.0, "http_paced_uvloop": None, "http_tiny_1": 0.75,
    "http_tiny_16": 0.90, "http_tiny_4": None, "http_tiny_64": None, "http_tiny_16_first": None,
    "http_burst": 1.25, "http_beside": 100, "http_beside_first": 2.0, "http_smollm2_1": None,
}  # fmt: skip
"""As they were asked for; None is reported only."""


def test_the_limits_are_those_that_were_asked_for() -> None:
    assert {id: BY_ID[id].limit for id in LIMITS} == LIMITS
    assert BY_ID["http_burst"].limit == TARGET_RATIO
    assert {id for id, claim in BY_ID.items() if claim.is_least} >= {"http_tiny_1", "http_tiny_16"}


def test_a_claim_is_missed_on_the_wrong_side_of_its_limit() -> None:
    for id, limit in LIMITS.items():
        if limit is None:
            assert verdict(BY_ID[id], Found(values=[1.0])) is Verdict.REPORTED
            continue
        worse = limit - 0.01 if BY_ID[id].is_least else limit + 0.01
        assert verdict(BY_ID[id], Found(values=[limit])) is Verdict.KEPT
        assert verdict(BY_ID[id], Found(values=[worse])) is Verdict.MISSED


def test_the_gateway_is_compared_with_each_forwarder_round_by_round() -> None:
    spent = {"gateway": [20.0, 50.0], "asyncio": [5.0, 1.0], "uvloop": [4.0, 3.0]}
    found = paced_founds(spent)
    assert {id: one.values for id, one in found.items()} == {
        "http_paced": [15.0, 49.0], "http_paced_uvloop": [16.0, 47.0],
    }  # fmt: skip
    assert set(found["http_paced"].sides) == {"gateway", "forwarder, asyncio"}


def test_each_row_is_measured_by_one_stage() -> None:
    measured = [row for stage in STAGES for row in stage.rows]
    assert sorted(measured) == sorted(ROWS)
    assert not set(ROWS) & set(FAST_PATH_ROWS)


def test_the_document_is_what_the_kept_rows_make() -> None:
    text = HTTP.place.document.read_text()
    filled = HTTP.place.filled(text, HTTP.written(HTTP.load()))
    assert text == filled, "python -m bench.http FOLDER --keep"
    assert re.findall(r'^\| <a id="(\w+)"></a>', HTTP.place.content(text), re.M) == list(BY_ID)


# ---------------------------------------------------------------- what was read


def event(text: str, **more: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": text}], **more}).encode() + b"\n\n"


def chunked(*bodies: bytes) -> list[bytes]:
    return [b"%x\r\n%b\r\n" % (len(body), body) for body in bodies]


USAGE = {"prompt_tokens": 3, "completion_tokens": 2}
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
WHOLE = [
    HEAD,
    *chunked(event("a"), event(""), event("b")),
    *chunked(b'data: {"choices":[],"usage":' + json.dumps(USAGE).encode() + b"}\n\n"),
    *chunked(b"data: [DONE]\n\n"),
    b"0\r\n\r\n",
]


def reader_of(pieces: Sequence[bytes], *, told: list[float] | None = None) -> Reader:
    """A reader to which these bytes have come."""

    async def run() -> Reader:
        reader = Reader(b"", None if told is None else told.append)
        for piece in pieces:
            reader.data_received(piece)
        reader.connection_lost(None)
        await reader.ended
        return reader

    return asyncio.run(run())


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_an_answer_is_read_however_the_network_cuts_it(size: int) -> None:
    raw = b"".join(WHOLE)
    told: list[float] = []
    pieces = [raw[at : at + size] for at in range(0, len(raw), size)]
    reader = reader_of(pieces, told=told)
    read = reader.read()
    assert (len(read.times), read.prompt_tokens, read.tokens) == (2, 3, 2)
    assert list(read.times) == sorted(read.times)
    assert len(told) == (1 if size == 10_000 else 2), "told once for each arrival that has text"
    assert set(told) <= set(read.times)


def test_an_answer_to_an_old_server_ends_with_its_connection() -> None:
    bare = [b"HTTP/1.0 200 OK\r\n\r\n", event("a"), event("b", usage=USAGE), b"data: [DONE]\n\n"]
    assert reader_of(bare).read().tokens == 2


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        (WHOLE[:-2], "unfinished"),
        ([HEAD], "unfinished"),
        ([b"HTTP/1.1 429 Too Many Requests\r\n\r\n"], "refused"),
        ([], "refused"),
    ],
)
def test_an_answer_that_is_none_is_no_figure(pieces: list[bytes], said: str) -> None:
    with pytest.raises(AnswerError, match=said):
        reader_of(pieces).read()


def test_an_answer_of_another_length_is_no_figure() -> None:
    read = reader_of(WHOLE).read()
    assert checked(read, 2) is read
    with pytest.raises(AnswerError, match="2 tokens came instead of 3"):
        checked(read, 3)


def test_every_server_is_asked_for_the_same() -> None:
    request = request_of(("127.0.0.1", 80), "/v1/completions", {"model": "m"})
    head, body = request.split(b"\r\n\r\n")
    assert b"Connection: close" in head
    assert f"Content-Length: {len(body)}".encode() in head
    assert json.loads(body)["stream_options"] == {"include_usage": True}


# ---------------------------------------------------------------- the gateway's own cost

PID = 7


def test_a_chunk_costs_what_all_threads_have_spent() -> None:
    whole = {"events": 32, "tokens": 32}
    before, after = {PID: 1000, 8: 500}, {PID: 33_000, 8: 4500, 9: 2000}
    assert per_chunk_us(before, after, PID, whole, 32) == (1.0, 6 / 32)


@pytest.mark.parametrize(
    "whole",
    [{"events": 16, "tokens": 32}, {"events": 31, "tokens": 31}, {"events": 33, "tokens": 32}],
)
def test_chunks_that_were_merged_or_are_missing_give_no_figure(whole: dict[str, int]) -> None:
    with pytest.raises(NotShown, match="chunks came for 32 tokens"):
        per_chunk_us({PID: 0}, {PID: 1}, PID, whole, 32)


def test_whoever_passes_nothing_on_gives_no_figure() -> None:
    assert at_pace(900, 5.0) == 900
    with pytest.raises(NotShown, match="499 chunks came in 5 s, at least 500"):
        at_pace(499, 5.0)
    with pytest.raises(NotShown):
        at_pace(0, 0.5)


def test_the_forwarder_is_handed_events_of_the_same_size() -> None:
    for size in (100, 205):
        made = event_of(size)
        assert (len(made), made[-2:]) == (size, "\n\n")
        assert json.loads(made.removeprefix("data: "))["choices"]
    assert STREAMS == 16


# ---------------------------------------------------------------- next to others


def burst(seconds: float) -> Burst:
    return Burst(sent_s=[0.0], times=[[seconds / 2, seconds]])


class Quick:
    """Answers a burst in as many seconds as it is given, as a server and as one process."""

    def __init__(self, name: str, seconds: list[float]) -> None:
        self.name = name
        self.process = self
        self.seconds = seconds
        self.is_over = False
        self.sent: list[list[float]] = []

    def over_http(self) -> OverHttp:
        return cast(OverHttp, _Asked(self))

    def burst(
        self, prompts: Sequence[str], sent_s: Sequence[float], tokens: int
    ) -> list[list[float]]:
        self.sent.append(list(sent_s))
        return [[self.seconds.pop(0)] * tokens]

    def give_up(self) -> None:
        self.is_over = True


class _Asked:
    def __init__(self, quick: Quick) -> None:
        self.name, self.process, self._quick = quick.name, quick, quick

    async def burst(self, model: str, prompts: Sequence[str], tokens: int) -> Burst:
        seconds = self._quick.seconds.pop(0)
        if seconds < 0:
            raise AnswerError("a stream was left unfinished: b'/of/this/machine'")
        return Burst(sent_s=[0.25], times=[[seconds] * tokens])


def test_ours_is_held_against_one_process_and_the_order_changes() -> None:
    floor = Quick("in process", [9.0, 1.0, 2.0])
    peer = Quick("other", [9.0, 4.0, 4.0])
    contest = Contest(
        ours=Quick("mlxsup", [9.0, 2.0, 2.0]).over_http(), floor=cast(Any, floor),
        peers=[peer.over_http()], model="m", missing={"third": "it is not installed"},
    )  # fmt: skip
    rounds = Rounds()
    asyncio.run(contest.round(None, 1, 4))
    for _ in range(2):
        asyncio.run(contest.round(rounds, 1, 4))
    found = rounds.found("whole_per_s", "tok/s")
    assert found.values == [0.5, 1.0]
    assert found.sides == {"mlxsup": [2.0, 2.0], "in process": [4.0, 2.0], "other": [1.0, 1.0]}
    assert found.note == "third is missing: it is not installed"
    assert floor.sent == [[0.25], [0.0], [0.25]], "ours goes first, then one process, and so on"


def test_a_server_that_fails_is_left_out_and_says_nothing_of_this_machine() -> None:
    peer = Quick("other", [1.0, -1.0])
    contest = Contest(
        ours=Quick("mlxsup", [1.0] * 3).over_http(),
        floor=cast(Any, Quick("in process", [1.0] * 3)), peers=[peer.over_http()], model="m",
    )  # fmt: skip
    rounds = Rounds()
    for _ in range(3):
        asyncio.run(contest.round(rounds, 1, 4))
    assert peer.is_over
    found = rounds.found("first_s", "ms", 1000.0)
    assert (list(found.sides), len(found.values)) == (["mlxsup", "in process"], 3)
    assert found.note == "other is missing: it has failed"


def test_gaps_are_ours_and_new_requests_are_held_against_undisturbed_ones() -> None:
    def seen(silence_ms: float, *first_ms: float) -> Seen:
        return Seen(silence_ms=silence_ms, first_ms=list(first_ms))

    founds = beside_founds(
        {
            "mlxsup": [(seen(10, 20, 30), seen(40, 50)), (seen(11, 10), seen(30, 15))],
            "mlx_lm.server": [(seen(1, 1), seen(9000, 9000)), (seen(1, 1), seen(8000, 9000))],
        }
    )
    assert founds["http_beside"].values == [40, 30]
    assert "swaps" in founds["http_beside"].note
    assert founds["http_beside_first"].values == [2.0, 1.5]
    assert founds["http_beside"].sides["mlx_lm.server, meanwhile"] == [9000, 8000]
