"""Cancels, deadlines and clients that leave, at every moment; the ledgers agree afterwards."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from mlxsup.client import AsyncClient, Client, RequestError

from support.daemon import Daemon, fake, row, wait_for_state
from support.eventually import eventually
from support.quiet import is_quiet
from support.streams import Reader

SLOW = {"step_s": 0.02}


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    options = {**SLOW, "prefill_tokens_per_step": 8}
    with Daemon({"m": fake(fake=options, max_concurrency=2)}) as daemon:
        with daemon.client() as client:
            client.load("m")
        yield daemon


# ---------------------------------------------------------------- cancel, window by window


def hold_rows(client: Client) -> list[Reader]:
    """Fills both rows of `m`."""
    return [Reader(client, "m", f"holds {n}", max_tokens=4000).started() for n in range(2)]


def test_cancel_in_every_window_D1_D2_D3_G5(daemon: Daemon) -> None:
    with daemon.client() as client:
        held = hold_rows(client)
        queued = client.generate("m", prompt="queued", max_tokens=5)
        eventually(lambda: row(client, "m")["queued"] == 1)
        queued.cancel()
        assert [list(queued), queued.result.finish_reason] == [[], "cancelled"]
        for reader in held:
            reader.stream.cancel()
            assert reader.finished().finish_reason == "cancelled"

        at_once = client.generate("m", prompt="at once", max_tokens=4000)
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
        assert row(client, "m")["generation"] == 1


def test_a_cancel_right_behind_its_request_is_never_lost_D5(daemon: Daemon) -> None:
    """It overtakes the tokenising, the dispatch or the insert; never the request itself, or the
    answer would end with `length`."""
    with daemon.client() as client:
        streams = [client.generate("m", prompt=f"p{n}", max_tokens=4000) for n in range(60)]
        for stream in streams:
            stream.cancel()
        for stream in streams:
            list(stream)
            assert stream.result.finish_reason == "cancelled"
        eventually(lambda: is_quiet(client))


def test_no_token_comes_after_a_cancel_and_the_caller_never_waits_D3_D4(daemon: Daemon) -> None:
    with daemon.client() as client:
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


def test_deadlines_act_as_cancels_D15(daemon: Daemon) -> None:
    with daemon.client() as client:
        with pytest.raises(RequestError) as total:
            client.complete("m", prompt="x", max_tokens=4000, timeout_s=0.3)
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
    stream = client.generate("m", prompt=f"{pause} {number}", max_tokens=max_tokens, **limits)
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


def test_two_thousand_lives_end_once_each_and_three_ledgers_agree_D2_D8_D9() -> None:
    model = fake(max_concurrency=8, fake={"step_s": 0.001})
    limits = {"max_queue_per_client": 1000}
    with Daemon({"m": model}, limits) as daemon, daemon.client() as client:
        client.load("m")
        ends = asyncio.run(live_many(daemon.endpoint, 2000, seed=20))
        assert sum(ends.values()) == 2000
        assert min(ends["length"], ends["cancelled"], ends["deadline_exceeded"]) > 20, ends
        eventually(lambda: is_quiet(client))
        after = row(client, "m")
        assert (after["generation"], after["restarts"]) == (1, 0)


# ---------------------------------------------------------------- commands, health


def test_commands_and_requests_in_any_order_end_each_I5_B9(daemon: Daemon) -> None:
    dice = random.Random(11)
    outcomes: Counter[str] = Counter()

    def worker(seed: int) -> None:
        own = random.Random(seed)
        with daemon.client() as client:
            for _ in range(8):
                verb = own.choice(["load", "unload", "restart", "restart_now", "ask", "ask", "ask"])
                try:
                    if verb == "ask":
                        client.complete("m", prompt="x", max_tokens=own.randint(1, 10))
                    elif verb == "restart_now":
                        client.restart("m", now=True)
                    else:
                        getattr(client, verb)("m")
                    outcomes["ok"] += 1
                except RequestError as error:
                    outcomes[str(error.code)] += 1

    threads = [threading.Thread(target=worker, args=(dice.randrange(2**32),)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    assert sum(outcomes.values()) == 48
    known = {"ok", "unloaded", "superseded", "worker_crashed", "load_failed"}
    assert set(outcomes) <= known, outcomes
    with daemon.client() as client:
        client.load("m")
        assert client.complete("m", prompt="x", max_tokens=2).finish_reason == "length"
        assert row(client, "m")["restarts"] == 0


def test_nothing_warns_and_nothing_is_left_unawaited_B11() -> None:
    strict = {"PYTHONWARNINGS": "error", "PYTHONASYNCIODEBUG": "1", "PYTHONDEVMODE": "1"}
    daemon = Daemon({"m": fake(fake=SLOW), "cold": fake(preload=False)})
    daemon.start(environment=strict)
    with daemon.client() as client:
        running = Reader(client, "m", "runs", max_tokens=4000, resume=False).started()
        client.complete("cold", prompt="x", max_tokens=2)
        os.kill(row(client, "m")["pid"], signal.SIGKILL)
        assert running.failed().code == "worker_crashed"
        wait_for_state(client, "m", "READY")
        client.restart("cold")
        client.unload("cold")
    assert daemon.run("stop").returncode == 0
    assert "Warning" not in daemon.output + daemon.log_text()
    daemon.__exit__(None, None, None)


# ---------------------------------------------------------------- streams that nobody reads


def test_a_stream_that_is_dropped_is_cancelled_D12(daemon: Daemon) -> None:
    with daemon.client() as client:
        for _ in range(8):
            for _ in client.generate("m", prompt="dropped"):
                break  # without max_tokens it would fill the context
        result = client.complete("m", prompt="next", max_tokens=2, queue_timeout_s=30.0)
        assert result.finish_reason == "length"
        eventually(lambda: is_quiet(client))
