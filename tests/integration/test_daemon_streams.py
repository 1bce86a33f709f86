"""Streams of a real daemon: batches, classes and cancels, counted in steps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mlxsup.client import Client, Notice

from support.client.streams import Reader
from support.daemon.daemon import Daemon, fake, row, wait_for_state
from support.daemon.faults import undisturbed
from support.eventually import eventually

MODELS = {
    "m": fake(max_concurrency=2, fake={"step_s": 0.02, "prefill_tokens_per_step": 8}),
    "wide": fake(max_concurrency=16, preload=False, fake={"step_s": 0.001}),
    "fresh": fake(max_concurrency=4, preload=False, fake={"step_s": 0.02}),
}
LIMITS = {"max_queue_per_client": 1000, "min_run_s": 0.05}
ENDLESS = 4000


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon(MODELS, LIMITS) as daemon:
        with daemon.client() as client:
            wait_for_state(client, "m", "READY")
        yield daemon


def is_quiet(client: Client) -> bool:
    """True if neither the supervisor nor the worker holds any request of `m`."""
    status = client.status()
    [found] = [r for r in status["models"] if r["name"] == "m"]
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
        assert "1 made room" in daemon.run("status").stdout
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
        assert note == f"request {id} is paused: an interactive request needs its place"
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
    stream = client.generate("m", prompt="[[fault slow=2]] x", max_tokens=3000)
    next(iter(stream))
    stream.cancel()
    stream.cancel()  # twice does nothing (D6)
    rest = list(stream)
    assert stream.result.finish_reason == "cancelled"
    # What was on its way when the cancel was sent, and one further step: with two seconds to a
    # token, a busy machine has ten for the cancel.
    assert len(rest) <= 5
    stream.cancel()
    assert len(stream.result.token_ids) == stream.result.usage.completion_tokens
