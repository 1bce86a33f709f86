"""What a person reads while a request waits, if standard error is no terminal."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from mlxsup.client import Client
from mlxsup.protocol.client_messages import Generate, Notice, Ping
from mlxsup.protocol.ids import RequestId
from mlxsup.protocol.message import Message
from mlxsup.protocol.states import NoticeKind

from support.cli import Piped
from support.scripted_supervisor import Peer, answer, finish, scripted_supervisor, send_pieces

TOTAL = 2000


class Waits:
    """A script: the first notices come at once, the others and the answer after a `Ping`."""

    def __init__(self, first: Sequence[Notice], then: Sequence[Notice]) -> None:
        self._first, self._then = first, then
        self._asked: tuple[Peer, RequestId] | None = None

    def __call__(self, peer: Peer, message: Message) -> None:
        if isinstance(message, Generate):
            self._asked = peer, message.id
            self._send(self._first)
        elif isinstance(message, Ping):
            assert self._asked is not None
            self._send(self._then)
            asker, request_id = self._asked
            send_pieces(asker, request_id, ["Paris"])
            finish(asker, request_id, 1)
            answer(peer, message)

    def _send(self, notices: Sequence[Notice]) -> None:
        assert self._asked is not None
        peer, request_id = self._asked
        for notice in notices:
            peer.send(Notice(id=request_id, kind=notice.kind, detail=notice.detail))


def reading(done: int) -> Notice:
    detail = {"done": done, "total": TOTAL}
    return Notice(id=RequestId(""), kind=NoticeKind.PREFILLING, detail=detail)


def loading(phase: str, fraction: float) -> Notice:
    detail = {"state": "LOADING", "phase": phase, "fraction": fraction}
    return Notice(id=RequestId(""), kind=NoticeKind.LOADING, detail=detail)


def queued(expected_s: float) -> Notice:
    detail = {"position": 1, "reason": "load", "expected_s": expected_s}
    return Notice(id=RequestId(""), kind=NoticeKind.QUEUED, detail=detail)


def said_by(
    path: Path, first: Sequence[Notice], then: Sequence[Notice], *command: str
) -> list[str]:
    """What stands on standard error, without the times; the first line stood there by itself."""
    with (
        scripted_supervisor(path, Waits(first, then)) as supervisor,
        Piped(*command, "--endpoint", supervisor.endpoint) as piped,
    ):
        lines = [piped.note()]
        with Client(supervisor.endpoint) as other:
            other.ping()
        code, out, err = piped.end()
    assert (code, out) == (0, "Paris")
    said = [*lines, *err.splitlines(keepends=True)]
    assert all(re.match(r"\d\d:\d\d:\d\dZ m: .+\n", line) for line in said), said
    return [line[len("00:00:00Z m: ") :].rstrip("\n") for line in said]


def test_a_long_prompt_is_a_line_for_each_tenth(path: Path) -> None:
    first, then = map(reading, range(0, 420, 10)), map(reading, range(420, TOTAL + 1, 10))
    said = said_by(path, list(first), list(then), "generate", "m", "x")
    tokens = [410, *range(600, TOTAL + 1, 200)]
    assert said == [
        f"reading the prompt, {done} of {TOTAL} tokens ({done * 100 // TOTAL}%)" for done in tokens
    ]


def test_a_load_is_a_line_for_each_phase_and_tenth_and_an_estimate_is_none(path: Path) -> None:
    first = [queued(9.0), loading("import", 0.0)]
    then = [
        queued(8.0),
        *(loading("weights", number / 50) for number in range(26)),
        queued(7.0),
        loading("warm-up", 0.0),
    ]
    said = said_by(path, first, then, "generate", "m", "x")
    assert said == [
        "loading, import",
        "queued, position 1, about 8s",
        "loading, weights",
        *(f"loading, weights {number}0%" for number in range(1, 6)),
        "loading, warm-up",
    ]
