"""Rows on a real daemon: batches, classes and turns of long prompts, counted in steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import msgpack
import pytest

from mlxsup.worker.engines.fake.text import answer_tokens, encode_text

from support.daemon import Daemon, fake, row, wait_for_state
from support.eventually import eventually
from support.raw_client import RawClient
from support.streams import Reader


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


def test_chunks_of_two_long_prompts_alternate() -> None:
    with two_models(**ONE_AT_A_TIME) as daemon, RawClient(daemon.endpoint) as raw:
        chunks = chunks_of_both(raw)
        assert chunks.count("slow") == CHUNKS - 1, "the last one comes with the answer"
        # The first chunks take no lease: both workers have yet to hear that they need one.
        between = chunks_between(chunks, "slow")[CHUNKS // 2 :]
        assert between == [1] * len(between), "the quick one reads no faster than the slow one"


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
