"""The burst: sixteen requests at once onto four rows, each read to its end (C3).

Everything is asked over one connection. It gets one message of pieces for each step of the engine,
so that counting these messages counts steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mlxsup.protocol.body import RequestBody
from mlxsup.protocol.client_messages import Generate
from mlxsup.protocol.codec import encode, encode_body
from mlxsup.protocol.ids import ModelName, RequestId, unpack_tokens

from support.daemon import Daemon, fake, row
from support.raw_client import RawClient
from support.reference import greedy_answers
from support.tiny_model import make_tiny_model

REQUESTS = 16
ROWS = 4


@dataclass(slots=True)
class Seen:
    """What came for one request; steps are counted over the whole connection."""

    tokens: list[int] = field(default_factory=list)
    pieces: int = 0
    first_step: int = 0
    end_step: int = 0
    done: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Burst:
    """All that came.

    Attributes:
        order: `first` with a request's first token and `end` with its last, as they came.
    """

    seen: list[Seen]
    steps: int = 0
    order: list[tuple[str, int]] = field(default_factory=list)

    @property
    def firsts(self) -> list[int]:
        """The requests in the order of their first tokens."""
        return [number for what, number in self.order if what == "first"]

    @property
    def most_rows(self) -> int:
        """How many requests were between first token and end at the same time."""
        running = most = 0
        for what, _ in self.order:
            running += 1 if what == "first" else -1
            most = max(most, running)
        return most

    def take(self, message: dict[str, Any]) -> None:
        """Notes one message."""
        if message["type"] == "deltas":
            self.steps += 1
            for delta in message["deltas"]:
                self._take_piece(int(delta["id"]), delta)
        elif message["type"] != "alive":
            assert message["type"] == "done", message
            number = int(message["id"])
            assert not self.seen[number].done, "two ends"
            self.seen[number].done = message
            self.seen[number].end_step = self.steps
            self.order.append(("end", number))

    def _take_piece(self, number: int, delta: dict[str, Any]) -> None:
        seen = self.seen[number]
        assert not seen.done, "a piece after the end"
        assert delta["seq"] == seen.pieces
        seen.pieces += 1
        tokens = unpack_tokens(delta.get("tokens", b""))
        if tokens and not seen.tokens:
            seen.first_step = self.steps
            self.order.append(("first", number))
        seen.tokens += tokens


def run_burst(daemon: Daemon, prompts: list[str], lengths: list[int]) -> Burst:
    """Asks for everything at once and reads until every stream has ended (J2)."""
    burst = Burst([Seen() for _ in prompts])
    with RawClient(daemon.endpoint) as raw:
        for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            body = encode_body(RequestBody(prompt=prompt, max_tokens=length))
            raw.say(encode(Generate(id=RequestId(str(number)), model=ModelName("m"), body=body)))
        while not all(seen.done for seen in burst.seen):
            burst.take(raw.hear_any())
    for seen, length in zip(burst.seen, lengths, strict=True):
        assert (seen.done["finish_reason"], seen.done["seq"]) == ("length", seen.pieces)
        assert seen.done["usage"]["completion_tokens"] == len(seen.tokens) == length
    return burst


def test_who_waits_begins_as_soon_as_a_row_ends_C3() -> None:
    """One long answer keeps the batch from ever being empty; the others share three rows and end
    twenty steps apart, so that each end has let the next one in before there is another."""
    long = 340
    lengths = [long, 20, 40, 60] + [60] * (REQUESTS - ROWS)
    model = fake(max_concurrency=ROWS, fake={"step_s": 0.03})
    with Daemon({"m": model}) as daemon, daemon.client() as client:
        burst = run_burst(daemon, [f"prompt {n}" for n in range(REQUESTS)], lengths)
        steps = row(client, "m")["steps"]
    assert burst.firsts == list(range(REQUESTS)), "first come, first served"
    assert burst.most_rows == ROWS
    waited = burst.order[ROWS : ROWS + 2 * (REQUESTS - ROWS)]
    assert [what for what, _ in waited] == ["end", "first"] * (REQUESTS - ROWS)
    assert burst.order[-1] == ("end", 0), "nobody waited for the long one"
    # In its steps everything else was done: one more for each prompt at the most.
    assert steps <= long + REQUESTS
    assert burst.steps <= steps


@pytest.mark.mlx
def test_a_burst_on_a_real_model_is_whole_and_equals_solo_answers_C3_C10(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    prompts = [f"tell me about number {n:02}" for n in range(REQUESTS)]
    lengths = [600] + [40 + n for n in range(1, REQUESTS)]
    truth = greedy_answers(folder, prompts[:1], lengths[0])
    truth += greedy_answers(folder, prompts[1:], max(lengths[1:]))
    entry = {"path": str(folder), "max_concurrency": ROWS}
    with Daemon({"m": entry}) as daemon, daemon.client() as client:
        client.load("m")
        before = row(client, "m")["steps"]
        burst = run_burst(daemon, prompts, lengths)
        steps = row(client, "m")["steps"] - before
    for seen, expected, length in zip(burst.seen, truth, lengths, strict=True):
        assert seen.tokens == expected[:length]
    assert burst.firsts == list(range(REQUESTS))
    assert burst.most_rows == ROWS
    assert burst.order[-1] == ("end", 0), "nobody waited for the batch to empty"
    # Beside the long answer's own steps there are only those before its first token.
    assert steps <= lengths[0] + REQUESTS
