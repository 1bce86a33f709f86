"""Rows on a real daemon: batches, bursts, classes and turns of long prompts, counted in steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgpack
import pytest

from mlxsup.client import Client
from mlxsup.protocol.body import RequestBody
from mlxsup.protocol.client_messages import Generate
from mlxsup.protocol.codec import encode, encode_body
from mlxsup.protocol.ids import ModelName, RequestId, unpack_tokens
from mlxsup.worker.engines.fake.text import answer_tokens, encode_text

from support.daemon import Daemon, fake, row, wait_for_state
from support.eventually import eventually
from support.raw_client import RawClient
from support.streams import Reader
from support.tiny_model import make_tiny_model

LONG_PROMPT_TOKENS = 40_000


@pytest.mark.parametrize("concurrency", [1, 4, 8, 16])
def test_every_chunk_exactly_once_in_order_J2(concurrency: int) -> None:
    model = fake(max_concurrency=16, fake={"step_s": 0.001})
    with Daemon({"m": model}) as daemon, daemon.client() as client:
        alone = {
            n: client.complete("m", prompt=f"prompt {n}", max_tokens=64).token_ids
            for n in range(concurrency)
        }
        readers = [Reader(client, "m", f"prompt {n}", max_tokens=64) for n in range(concurrency)]
        for number, reader in enumerate(readers):
            result = reader.finished()
            assert (result.finish_reason, result.usage.completion_tokens) == ("length", 64)
            assert result.token_ids == reader.tokens == alone[number]
            assert result.text == reader.text


def test_requests_share_steps_instead_of_waiting_for_the_batch_to_empty_C1_C2() -> None:
    model = fake(max_concurrency=4, fake={"step_s": 0.02})
    with Daemon({"m": model}) as daemon, daemon.client() as client:
        first = Reader(client, "m", "long", max_tokens=4000).started()
        second = client.complete("m", prompt="short", max_tokens=10)
        assert second.finish_reason == "length"
        assert first.is_alive(), "the short one did not wait for the long one"
        steps = row(client, "m")["steps"]
        first.stream.cancel()
        assert steps <= len(first.finished().token_ids), "both ran in the same steps"


def test_no_step_is_made_when_nothing_runs_C5() -> None:
    with Daemon({"m": fake()}) as daemon, daemon.client() as client:
        client.complete("m", prompt="hi", max_tokens=5)
        before = row(client, "m")["steps"]
        for _ in range(20):
            client.ping()
        assert row(client, "m")["steps"] == before


def test_a_40k_token_prompt_on_a_slow_model_is_no_stall_C9_F5_P7() -> None:
    """Steps far below their limit, as `worker/engines/mlx/prefill.py` cuts them, for more than two
    limits; nothing is predicted, so that only the steps themselves say that all is well."""
    options = {
        "step_s": 0.05,
        "predicted_s": 0.0,
        "prefill_tokens_per_step": 500,
        "context_length": 65_536,
    }
    model = fake(max_concurrency=4, step_timeout_s=1.5, fake=options)
    with Daemon({"m": model}) as daemon, daemon.client() as client:
        beside = Reader(client, "m", "beside", max_tokens=100)
        result = client.complete("m", prompt="p" * LONG_PROMPT_TOKENS, max_tokens=3)
        assert (result.finish_reason, result.resumed) == ("length", 0)
        assert result.usage.prompt_tokens == LONG_PROMPT_TOKENS
        assert len(beside.finished().token_ids) == 100
        after = row(client, "m")
        assert (after["generation"], after["restarts"]) == (1, 0)
        assert after["steps"] <= 100 + LONG_PROMPT_TOKENS // 500, "both in the same steps"


@pytest.mark.mlx
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_40k_token_prompt_on_real_mlx_is_no_stall_C9_F5_P7(tmp_path: Path) -> None:
    """At this depth two cores read some two hundred tokens a second: minutes, under a limit of two
    seconds."""
    folder = make_tiny_model(tmp_path / "tiny", config={"max_position_embeddings": 49_152})
    model = {"path": str(folder), "max_concurrency": 2, "step_timeout_s": 2.0}
    with Daemon({"m": model}) as daemon, daemon.client() as client:
        beside = Reader(client, "m", "beside", max_tokens=40_000).started()
        prompt = [300 + (n * 7919) % 1700 for n in range(LONG_PROMPT_TOKENS)]
        result = client.complete("m", prompt_tokens=prompt, max_tokens=3)
        assert (result.finish_reason, result.resumed) == ("length", 0)
        assert result.usage.prompt_tokens == LONG_PROMPT_TOKENS
        assert beside.is_alive(), "it continued all the while"
        beside.stream.cancel()
        assert beside.finished().finish_reason == "cancelled"
        after = row(client, "m")
        assert (after["generation"], after["restarts"]) == (1, 0)


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


CHUNK = 4
LONG = {"prefill_tokens_per_step": CHUNK, "context_length": 1_000_000}
QUICK, SLOW = {**LONG, "step_s": 0.001}, {**LONG, "step_s": 0.01}
ENDLESS_PROMPT = "x" * 200_000
CHUNKS = 40
PROMPT = "y" * (CHUNK * CHUNKS)
ONE_AT_A_TIME = {"max_parallel_prefills": 1, "drain_timeout_s": 0.1}


@contextmanager
def two_models(**limits: Any) -> Iterator[Daemon]:
    """A quick and a slow one, both READY."""
    models = {"quick": fake(fake=QUICK), "slow": fake(fake=SLOW)}
    with Daemon(models, limits) as daemon, daemon.client() as client:
        for name in models:
            wait_for_state(client, name, "READY")
        yield daemon


def ask(raw: RawClient, model: str, prompt: str) -> None:
    """A request with notices, called like its model."""
    header = {"type": "generate", "id": model, "model": model, "notices": True}
    raw.say([msgpack.packb(header), msgpack.packb({"prompt": prompt, "max_tokens": 1})])


def chunks_of_both(raw: RawClient) -> list[str]:
    """The models whose chunks the supervisor hears of, in order: the quick one has begun when the
    slow one does, and does not end."""
    ask(raw, "quick", ENDLESS_PROMPT)
    while raw.hear()["kind"] != "prefilling":
        pass
    ask(raw, "slow", PROMPT)
    chunks = []
    while (message := raw.hear())["type"] != "done":
        if message["kind"] == "prefilling":
            chunks.append(message["id"])
    return chunks


def chunks_between(chunks: list[str], model: str) -> list[int]:
    """How many chunks of the other there are between each two of this one."""
    places = [place for place, name in enumerate(chunks) if name == model]
    return [after - before - 1 for before, after in pairwise(places)]


def wait_for_phase(client: Client, model: str, phase: str) -> None:
    eventually(lambda: row(client, model)["phase"] == phase, what=f"{model} in {phase}")


def wait_for_steps(client: Client, model: str, steps: int) -> None:
    eventually(lambda: row(client, model)["steps"] >= steps, what=f"{steps} steps of {model}")


def test_chunks_of_two_long_prompts_alternate() -> None:
    with two_models(**ONE_AT_A_TIME) as daemon, RawClient(daemon.endpoint) as raw:
        chunks = chunks_of_both(raw)
        assert chunks.count("slow") == CHUNKS - 1, "the last one comes with the answer"
        # The first chunks take no lease: both workers have yet to hear that they need one.
        between = chunks_between(chunks, "slow")[CHUNKS // 2 :]
        assert between == [1] * len(between), "the quick one reads no faster than the slow one"


def test_a_chunk_that_never_ends_holds_nobody_up_for_longer_than_its_lease() -> None:
    names = ("stuck", "one", "other")
    models = {name: fake(step_timeout_s=3600.0, fake=QUICK) for name in names}
    with Daemon(models, ONE_AT_A_TIME) as daemon, daemon.client() as client:
        for name in names:
            wait_for_state(client, name, "READY")
        endless = [Reader(client, name, ENDLESS_PROMPT, max_tokens=1) for name in names[1:]]
        for name in names[1:]:
            wait_for_phase(client, name, "waiting")
        stuck = Reader(client, "stuck", "[[fault stall=sleep at=0]]" + PROMPT, max_tokens=1)
        wait_for_phase(client, "stuck", "prefill")
        before = {name: row(client, name)["steps"] for name in names}
        for name in names[1:]:
            wait_for_steps(client, name, before[name] + 3)
        assert row(client, "stuck")["steps"] == before["stuck"] == 0
        for reader in (*endless, stuck):
            reader.stream.cancel()
            assert reader.finished().finish_reason == "cancelled"


SLOW_HIGHER_CLASS = fake(max_concurrency=2, fake={"step_s": 0.01})
ENDLESS = 4000


def test_a_batch_answer_gives_its_row_and_continues_where_it_stood_C12() -> None:
    told: list[tuple[str, dict[str, Any]]] = []
    with Daemon({"m": SLOW_HIGHER_CLASS}, {"min_run_s": 0.05}) as daemon, daemon.client() as client:
        changes = client.events()
        first = Reader(client, "m", "first", max_tokens=ENDLESS, priority="batch").started()
        second = Reader(
            client, "m", "second", max_tokens=ENDLESS, priority="batch",
            on_notice=lambda notice: told.append((str(notice.kind), notice.detail)),
        ).started()  # fmt: skip
        eventually(lambda: len(second.tokens) > 20)  # past `min_run_s`, too
        own = Reader(client, "m", "own", max_tokens=ENDLESS, priority="interactive").started()
        id = str(second.stream.request_id)
        found = row(client, "m")
        assert (found["yielded"], found["line"][0]["paused"]) == ([id], "class")
        assert "1 gave way" in daemon.run("status").stdout
        own.stream.cancel()
        sent = len(second.tokens)
        eventually(lambda: len(second.tokens) > sent)
        assert row(client, "m")["yielded"] == []
        for stream, prompt in ((first, "first"), (second, "second")):
            stream.stream.cancel()
            ids = stream.finished().token_ids
            assert ids == answer_tokens(encode_text(prompt), len(ids))
        assert (first.stream.result.paused, second.stream.result.paused) == (0, 1)
        note = next(str(change["note"]) for change in changes if "pause" in str(change["note"]))
        assert note == f"request {id} is paused: an interactive request needs its row"
    assert dict(told)["paused"]["reason"] == "class"
    assert dict(told)["resumed"] == {"times": 1, "after": "pause"}
