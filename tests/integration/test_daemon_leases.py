"""Models read long prompts in turns: by the order of their chunks, however long each takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import msgpack

from mlxsup.client import Client

from support.daemon import Daemon, fake, row, wait_for_state
from support.eventually import eventually
from support.faults import undisturbed
from support.raw_client import RawClient
from support.streams import Reader

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


def test_without_a_limit_each_reads_as_fast_as_it_can() -> None:
    with two_models(drain_timeout_s=0.1) as daemon, RawClient(daemon.endpoint) as raw:
        assert sum(chunks_between(chunks_of_both(raw), "slow")) > 2 * CHUNKS


def test_answers_go_on_while_a_long_prompt_of_their_model_waits_for_its_turn() -> None:
    with two_models(**ONE_AT_A_TIME) as daemon, daemon.client() as client:
        streaming = Reader(client, "quick", "streams", max_tokens=100_000).started()
        waiting = Reader(client, "quick", ENDLESS_PROMPT, max_tokens=1)
        wait_for_phase(client, "quick", "prefill")
        tokens = len(streaming.tokens)
        answer = client.complete("slow", prompt=PROMPT, max_tokens=3)
        assert answer.token_ids == undisturbed(PROMPT, 3)
        assert len(streaming.tokens) - tokens > 2 * CHUNKS, "more than a token for each turn"
        for reader in (streaming, waiting):
            reader.stream.cancel()
            assert reader.finished().finish_reason == "cancelled"


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
