"""Streams of a real daemon: batches, classes, turns, cancels and deadlines, counted in steps."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import msgpack
import pytest

from mlxsup.client import AsyncClient, Client, Notice, RequestError

from support.client.raw_client import RawClient
from support.client.streams import Reader
from support.daemon.daemon import Daemon, fake, row, wait_for_state
from support.daemon.faults import undisturbed
from support.eventually import eventually

CHUNK = 4
CHUNKS = 40
LONG = {"prefill_tokens_per_step": CHUNK, "context_length": 1_000_000}
MODELS = {
    "m": fake(max_concurrency=2, fake={"step_s": 0.02, "prefill_tokens_per_step": 8}),
    "wide": fake(max_concurrency=16, fake={"step_s": 0.001}),
    "fresh": fake(max_concurrency=4, preload=False, fake={"step_s": 0.02}),
    "quick": fake(preload=False, fake={**LONG, "step_s": 0.001}),
    "slow": fake(preload=False, fake={**LONG, "step_s": 0.01}),
}
LIMITS = {"max_queue_per_client": 1000, "max_parallel_prefills": 1, "min_run_s": 0.05}
ENDLESS = 4000


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon(MODELS, LIMITS) as daemon:
        with daemon.client() as client:
            for name in ("m", "wide"):
                wait_for_state(client, name, "READY")
        yield daemon


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with daemon.client() as client:
        yield client


def is_quiet(client: Client, model: str = "m") -> bool:
    """True if neither the supervisor nor the worker holds any request of the model."""
    status = client.status()
    [found] = [r for r in status["models"] if r["name"] == model]
    return bool(
        (status["queue"]["waiting"], status["queue"]["clients"]) == (0, {})
        and found["running"] == []
        and found["queued"] == 0
        and found["held_by_worker"] == 0
    )


def test_every_chunk_exactly_once_in_order_J2(client: Client) -> None:
    readers = [Reader(client, "wide", f"prompt {n}", max_tokens=64) for n in range(16)]
    for number, reader in enumerate(readers):
        result = reader.finished()
        assert (result.finish_reason, result.usage.completion_tokens) == ("length", 64)
        assert result.token_ids == reader.tokens == undisturbed(f"prompt {number}", 64)
        assert result.text == reader.text


def test_requests_share_steps_instead_of_waiting_for_the_batch_to_empty_C1_C2(
    client: Client,
) -> None:
    first = Reader(client, "fresh", "long", max_tokens=ENDLESS).started()
    second = client.complete("fresh", prompt="short", max_tokens=10)
    assert second.finish_reason == "length"
    assert first.is_alive(), "the short one did not wait for the long one"
    steps = row(client, "fresh")["steps"]
    first.stream.cancel()
    assert steps <= len(first.finished().token_ids), "both ran in the same steps"


def ask(raw: RawClient, model: str, prompt: str) -> None:
    """A request with notices, called like its model."""
    header = {"type": "generate", "id": model, "model": model, "notices": True}
    raw.say([msgpack.packb(header), msgpack.packb({"prompt": prompt, "max_tokens": 1})])


def test_chunks_of_two_long_prompts_alternate(daemon: Daemon, client: Client) -> None:
    """The quick model's prompt has begun when the slow one's comes, and does not end."""
    for name in ("quick", "slow"):
        client.load(name)
    with RawClient(daemon.endpoint) as raw:
        ask(raw, "quick", "x" * 200_000)
        while raw.hear()["kind"] != "prefilling":
            pass
        ask(raw, "slow", "y" * (CHUNK * CHUNKS))
        chunks = []
        while (message := raw.hear())["type"] != "done":
            if message["kind"] == "prefilling":
                chunks.append(message["id"])
    places = [place for place, name in enumerate(chunks) if name == "slow"]
    assert len(places) == CHUNKS - 1, "the last one comes with the answer"
    # The first chunks take no lease: both workers have yet to hear that they need one.
    between = [after - before - 1 for before, after in pairwise(places)][CHUNKS // 2 :]
    assert between == [1] * len(between), "the quick one reads no faster than the slow one"


def test_a_batch_answer_gives_its_row_and_continues_where_it_stood_C12(
    daemon: Daemon, client: Client
) -> None:
    told: list[Notice] = []
    with daemon.client() as watcher:
        changes = watcher.events()
        watcher.ping()
        first = Reader(client, "m", "first", max_tokens=ENDLESS, priority="batch").started()
        second = Reader(
            client, "m", "second", max_tokens=ENDLESS, priority="batch", on_notice=told.append
        ).started()
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
            assert ids == undisturbed(prompt, len(ids))
        assert (first.stream.result.paused, second.stream.result.paused) == (0, 1)
        note = next(str(change["note"]) for change in changes if "pause" in str(change["note"]))
        assert note == f"request {id} is paused: an interactive request needs its row"
    details = {str(one.kind): one.detail for one in told}
    assert details["paused"]["reason"] == "class"
    assert details["resumed"] == {"times": 1, "after": "pause"}


# ---------------------------------------------------------------- cancel, window by window


def hold_rows(client: Client) -> list[Reader]:
    """Fills both rows of `m`."""
    return [Reader(client, "m", f"holds {n}", max_tokens=ENDLESS).started() for n in range(2)]


def test_cancel_in_every_window_D1_D2_D3_G5(client: Client) -> None:
    before = row(client, "m")
    held = hold_rows(client)
    queued = client.generate("m", prompt="queued", max_tokens=5)
    eventually(lambda: row(client, "m")["queued"] == 1)
    queued.cancel()
    assert [list(queued), queued.result.finish_reason] == [[], "cancelled"]
    for reader in held:
        reader.stream.cancel()
        assert reader.finished().finish_reason == "cancelled"

    at_once = client.generate("m", prompt="at once", max_tokens=ENDLESS)
    at_once.cancel()
    list(at_once)
    assert at_once.result.finish_reason == "cancelled"

    eventually(lambda: is_quiet(client))  # or an older beat would answer the next question
    # Long prompts are prepared on a separate thread: nobody waits for this one.
    prompt = "[[tokenize slow=60]]" + "l" * 20_000
    tokenising = client.generate("m", prompt=prompt, max_tokens=5)
    eventually(lambda: row(client, "m")["held_by_worker"] == 1)
    tokenising.cancel()
    assert [list(tokenising), tokenising.result.finish_reason] == [[], "cancelled"]

    prefilling = client.generate("m", prompt="x" * 3000, max_tokens=5)
    eventually(lambda: row(client, "m")["phase"] == "prefill")
    prefilling.cancel()
    assert [list(prefilling), prefilling.result.finish_reason] == [[], "cancelled"]
    eventually(lambda: is_quiet(client))
    assert client.complete("m", prompt="free", max_tokens=3).finish_reason == "length"
    assert row(client, "m")["generation"] == before["generation"]


def test_a_cancel_right_behind_its_request_is_never_lost_D5(client: Client) -> None:
    """It overtakes the tokenising, the dispatch or the insert; never the request itself, or the
    answer would end with `length`."""
    streams = [client.generate("m", prompt=f"p{n}", max_tokens=ENDLESS) for n in range(60)]
    for stream in streams:
        stream.cancel()
    for stream in streams:
        list(stream)
        assert stream.result.finish_reason == "cancelled"
    eventually(lambda: is_quiet(client))


def test_no_token_comes_after_a_cancel_and_the_caller_never_waits_D3_D4(
    client: Client,
) -> None:
    stream = client.generate("m", prompt="[[fault slow=0.4]] x", max_tokens=3000)
    next(iter(stream))
    stream.cancel()
    stream.cancel()  # twice does nothing (D6)
    rest = list(stream)
    assert stream.result.finish_reason == "cancelled"
    # What was on its way when the cancel was sent, and one further step.
    assert len(rest) <= 5
    stream.cancel()
    assert len(stream.result.token_ids) == stream.result.usage.completion_tokens


def test_deadlines_act_as_cancels_D15(client: Client) -> None:
    with pytest.raises(RequestError) as total:
        client.complete("m", prompt="x", max_tokens=ENDLESS, timeout_s=0.3)
    assert total.value.code == "deadline_exceeded"
    with pytest.raises(RequestError) as first:
        client.complete("m", prompt="[[tokenize slow=3]]", first_token_timeout_s=0.2)
    assert first.value.code == "deadline_exceeded"
    held = hold_rows(client)
    with pytest.raises(RequestError) as queue:
        client.complete("m", prompt="x", max_tokens=5, queue_timeout_s=0.2)
    assert queue.value.code == "queue_timeout"
    for reader in held:
        reader.stream.cancel()
        reader.finished()
    eventually(lambda: is_quiet(client))


# ---------------------------------------------------------------- many lives at once


async def live(client: AsyncClient, number: int, dice: random.Random, ends: Counter[str]) -> None:
    """One request with a random end; asserts what its own ledger must say."""
    max_tokens = dice.randint(1, 12)
    pause = dice.choice(["", "", "[[tokenize slow=0.02]]", "[[fault slow=0.005]]"])
    limits: dict[str, Any] = {}
    if dice.random() < 0.15:
        limits["timeout_s"] = dice.choice([0.001, 0.05, 0.3])
    cancel_after = dice.choice([None, None, None, 0, 0, 1, 2, 5])
    stream = client.generate("wide", prompt=f"{pause} {number}", max_tokens=max_tokens, **limits)
    if cancel_after == 0:
        for _ in range(dice.choice([0, 0, 1, 3])):
            await asyncio.sleep(dice.random() * 0.02)  # the moment of the cancel is the subject
        stream.cancel()
    tokens: list[int] = []
    try:
        async for delta in stream:
            tokens += delta.token_ids
            if cancel_after and len(tokens) >= cancel_after:
                stream.cancel()
    except RequestError as error:
        if error.code != "deadline_exceeded" or not limits:
            raise
        ends[str(error.code)] += 1
        return
    result = stream.result
    ends[str(result.finish_reason)] += 1
    assert result.token_ids == tokens
    assert result.usage.completion_tokens == len(tokens)
    if result.finish_reason == "length":
        assert len(tokens) == max_tokens
    else:
        assert result.finish_reason == "cancelled"
        assert cancel_after is not None
        assert len(tokens) <= max_tokens


async def live_many(endpoint: str, count: int, seed: int) -> Counter[str]:
    """That many lives, 48 at a time, over four connections."""
    dice = random.Random(seed)
    ends: Counter[str] = Counter()
    gate = asyncio.Semaphore(48)
    clients = [AsyncClient(endpoint) for _ in range(4)]

    async def one(number: int) -> None:
        async with gate:
            await live(clients[number % 4], number, random.Random(dice.random()), ends)

    await asyncio.gather(*(one(number) for number in range(count)))
    for client in clients:
        await client.close()
    return ends


def test_many_lives_end_once_each_and_three_ledgers_agree_D2_D8_D9(
    daemon: Daemon, client: Client
) -> None:
    ends = asyncio.run(live_many(daemon.endpoint, 200, seed=20))
    assert sum(ends.values()) == 200
    assert min(ends["length"], ends["cancelled"], ends["deadline_exceeded"]) > 5, ends
    eventually(lambda: is_quiet(client, "wide"))
    after = row(client, "wide")
    assert (after["generation"], after["restarts"]) == (1, 0)


# ---------------------------------------------------------------- commands, health


def test_commands_and_requests_in_any_order_end_each_I5_B9(daemon: Daemon, client: Client) -> None:
    outcomes: Counter[str] = Counter()

    def act(seed: int) -> None:
        dice = random.Random(seed)
        with daemon.client() as own:
            for _ in range(4):
                verb = dice.choice(["load", "unload", "restart", "restart_now", "ask", "ask"])
                try:
                    if verb == "ask":
                        own.complete("m", prompt="x", max_tokens=dice.randint(1, 10))
                    elif verb == "restart_now":
                        own.restart("m", now=True)
                    else:
                        getattr(own, verb)("m")
                    outcomes["ok"] += 1
                except RequestError as error:
                    outcomes[str(error.code)] += 1

    with ThreadPoolExecutor(5) as pool:
        list(pool.map(act, range(5), timeout=300.0))
    assert sum(outcomes.values()) == 20
    known = {"ok", "unloaded", "superseded", "worker_crashed", "load_failed"}
    assert set(outcomes) <= known, outcomes
    client.load("m")
    assert client.complete("m", prompt="x", max_tokens=2).finish_reason == "length"
    assert row(client, "m")["restarts"] == 0


# ---------------------------------------------------------------- streams that nobody reads


def test_a_stream_that_is_dropped_is_cancelled_D12(client: Client) -> None:
    for _ in range(8):
        for _ in client.generate("m", prompt="dropped"):
            break  # without max_tokens it would fill the context
    result = client.complete("m", prompt="next", max_tokens=2, queue_timeout_s=30.0)
    assert result.finish_reason == "length"
    eventually(lambda: is_quiet(client))
