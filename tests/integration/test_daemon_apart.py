"""What one model does costs another nothing, and the control plane neither: by order and counts.

Whatever is in progress is held open while the others are looked at, so that no time decides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mlxsup.client import Client

from support.daemon import Daemon, fake, row, wait_for_state
from support.eventually import eventually
from support.faults import undisturbed
from support.streams import Reader

SLOW_PREFILL = {"step_s": 0.02, "prefill_tokens_per_step": 1, "context_length": 100_000}
QUICK_PREFILL = {"prefill_tokens_per_step": 1000}
ENDLESS_PROMPT = "x" * 50_000
"""Its prefill takes a quarter of an hour."""

ENDLESS_LOAD = fake(preload=False, load_stall_timeout_s=3600.0, fake={"load_stall": "sleep"})


def is_stuck(found: dict[str, Any]) -> bool:
    return (found["steps"], len(found["running"])) == (2, 1)


def prefills(found: dict[str, Any]) -> bool:
    return bool(found["phase"] == "prefill" and found["steps"] > 2)


def decodes(found: dict[str, Any]) -> bool:
    return bool(found["phase"] == "decode" and found["steps"] > 20)


BUSY = {
    "a step is stuck": ("[[fault stall=sleep at=3]]", QUICK_PREFILL, is_stuck),
    "a step is stuck, interpreter held": ("[[fault stall=gil at=3]]", QUICK_PREFILL, is_stuck),
    "it prefills": (ENDLESS_PROMPT, {}, prefills),
    "it decodes": ("decodes", QUICK_PREFILL, decodes),
}
"""A prompt, options of the engine, and whether the model's row shows a worker busy with it."""


@pytest.mark.parametrize("what", BUSY)
def test_ping_status_and_cancel_are_answered_while_a_worker_is_busy_H1(what: str) -> None:
    prompt, options, is_busy = BUSY[what]
    model = fake(step_timeout_s=3600.0, fake={**SLOW_PREFILL, **options})
    with Daemon({"m": model}, {"drain_timeout_s": 0.1}) as daemon, daemon.client() as client:
        wait_for_state(client, "m", "READY")
        stream = client.generate("m", prompt=prompt, max_tokens=90_000 - len(prompt))
        eventually(lambda: is_busy(row(client, "m")), timeout_s=30.0, what=what)
        for _ in range(50):
            client.ping()
            assert is_busy(row(client, "m")), "and it is still at it"
        stream.cancel()
        list(stream)
        assert stream.result.finish_reason == "cancelled"
        after = row(client, "m")
        assert (after["state"], after["generation"]) == ("READY", 1), "nobody waited for a kill"
        if "stuck" in what:
            assert after["steps"] == 2, "while it still was"


@pytest.mark.parametrize("how", ["sleep", "gil"])
def test_ping_status_and_cancel_are_answered_while_a_model_loads_H1(how: str) -> None:
    loads = {**ENDLESS_LOAD, "fake": {"load_stall": how}}
    with Daemon({"m": loads}) as daemon, daemon.client() as client:
        stream = client.generate("m", prompt="waits", max_tokens=5)
        pid = eventually(lambda: (r := row(client, "m"))["state"] == "LOADING" and r["pid"])
        for _ in range(50):
            client.ping()
            assert row(client, "m")["pid"] == pid
        stream.cancel()
        list(stream)
        assert stream.result.finish_reason == "cancelled"
        assert row(client, "m")["state"] == "LOADING"


def test_a_small_model_answers_between_two_chunks_of_a_big_one_s_prompt_H8() -> None:
    """Also what asks for the first time: its load, its prefill and every token."""
    models = {"big": fake(fake=SLOW_PREFILL), "small": fake(preload=False)}
    with Daemon(models) as daemon, daemon.client() as client:
        wait_for_state(client, "big", "READY")
        big = Reader(client, "big", ENDLESS_PROMPT, max_tokens=5)
        before = eventually(lambda: (r := row(client, "big"))["phase"] == "prefill" and r)
        for number in range(3):
            answer = client.complete("small", prompt=f"small {number}", max_tokens=50)
            assert answer.token_ids == undisturbed(f"small {number}", 50)
        during = eventually(lambda: (r := row(client, "big"))["steps"] > before["steps"] and r)
        assert (during["phase"], during["running"]) == ("prefill", [big.stream.request_id])
        assert big.tokens == [], "its prompt is still being read"
        big.stream.cancel()
        assert big.finished().finish_reason == "cancelled"


@pytest.mark.parametrize("how", ["sleep", "gil"])
def test_a_load_costs_another_model_no_token_and_no_step_B7(how: str) -> None:
    """The load is stuck for as long as the other streams, starts new requests and ends them."""
    models = {
        "one": fake(fake={"step_s": 0.005}),
        "two": {**ENDLESS_LOAD, "fake": {"load_stall": how}},
    }
    with Daemon(models) as daemon, daemon.client() as client:
        wait_for_state(client, "one", "READY")
        streaming = Reader(client, "one", "streams", max_tokens=300).started()
        waits = Reader(client, "two", "waits", max_tokens=1)
        pid = eventually(lambda: (r := row(client, "two"))["state"] == "LOADING" and r["pid"])
        steps = row(client, "one")["steps"]
        fresh = client.complete("one", prompt="fresh", max_tokens=30)
        assert fresh.token_ids == undisturbed("fresh", 30)
        assert streaming.finished().token_ids == undisturbed("streams", 300)
        after = row(client, "one")
        assert after["steps"] >= steps + 30
        assert (after["generation"], after["restarts"]) == (1, 0)
        loading = row(client, "two")
        assert (loading["state"], loading["pid"]) == ("LOADING", pid), "all the while"
        client.unload("two")
        assert waits.failed().code == "unloaded"


WAYS_TO_STOP: dict[str, Callable[[Client], object]] = {
    "unload": lambda client: client.unload("one"),
    "restart": lambda client: client.restart("one", now=True),
}


@pytest.mark.parametrize("is_stuck", [False, True], ids=["at once", "has to be killed"])
@pytest.mark.parametrize("way", WAYS_TO_STOP)
def test_stopping_one_model_touches_no_other_E8(way: str, is_stuck: bool) -> None:
    """The other has a stream that runs, one that waits, and one of another client."""
    models = {
        "one": fake(step_timeout_s=3600.0, fake={"step_s": 0.01}),
        "two": fake(max_concurrency=2, fake={"step_s": 0.005}),
    }
    with Daemon(models, {"drain_timeout_s": 0.5}) as daemon, daemon.client() as client:
        for name in models:
            wait_for_state(client, name, "READY")
        before = row(client, "two")
        prompt = "[[fault stall=gil at=3]]" if is_stuck else "runs"
        stopped = Reader(client, "one", prompt, max_tokens=4000, resume=False).started()
        with daemon.client() as neighbour:
            others = {
                name: Reader(asks, "two", name, max_tokens=count)
                for name, asks, count in (
                    ("runs", client, 400), ("of another", neighbour, 400), ("waits", client, 40),
                )
            }  # fmt: skip
            eventually(
                lambda: (row(client, "two")["queued"], others["runs"].tokens != []) == (1, True)
            )
            WAYS_TO_STOP[way](client)
            assert stopped.failed().code in ("unloaded", "worker_crashed")
            for name, reader in others.items():
                result = reader.finished()
                assert result.token_ids == undisturbed(name, len(result.token_ids))
                assert (result.finish_reason, result.resumed) == ("length", 0)
        after = row(client, "two")
        for key in ("pid", "generation", "restarts", "state", "suspects"):
            assert after[key] == before[key], key
