"""Loads, unloads and waiting, window by window: what is reported, and what is not held up."""

from __future__ import annotations

import random

import pytest

from mlxsup.client import Notice, RequestError

from support.daemon import Daemon, fake, row, wait_for_state
from support.eventually import eventually
from support.streams import Reader

# ---------------------------------------------------------------- load and unload, window by window


def test_unload_during_a_load_answers_who_waited_and_gives_everything_back_B9() -> None:
    model = fake(fake={"load_s": 20.0}, preload=False)
    with Daemon({"m": model}) as daemon, daemon.client() as client:
        waiting = Reader(client, "m", "waits", max_tokens=1)
        loading = wait_for_state(client, "m", "LOADING")
        eventually(lambda: row(client, "m")["pid"])
        client.unload("m")
        assert waiting.failed().code == "unloaded"
        after = row(client, "m")
        assert (after["state"], after["pid"], after["footprint_bytes"]) == ("STOPPED", None, 0)
        assert loading["generation"] == after["generation"] == 1


def test_idle_unload_meets_a_new_request_I5() -> None:
    model = fake(idle_unload_s=0.3, preload=False)
    with Daemon({"m": model}) as daemon, daemon.client() as client:
        dice = random.Random(5)
        for _ in range(12):
            assert client.complete("m", prompt="x", max_tokens=2).finish_reason == "length"
            if dice.random() < 0.5:
                wait_for_state(client, "m", ("DRAINING", "STOPPING", "STOPPED"))
        wait_for_state(client, "m", "STOPPED")
        after = row(client, "m")
        assert (after["wanted"], after["why"]) == ("down", "idle")
        assert after["generation"] > 1
        assert after["restarts"] == 0


# ---------------------------------------------------------------- being told


def test_a_waiting_request_is_told_what_it_waits_for() -> None:
    model = fake(fake={"load_s": 1.0, "prefill_tokens_per_step": 16}, preload=False)
    told: list[Notice] = []
    with Daemon({"m": model}) as daemon, daemon.client() as client:
        result = client.complete("m", prompt="x" * 200, max_tokens=3, on_notice=told.append)
        assert result.finish_reason == "length"
    kinds = [str(notice.kind) for notice in told]
    assert kinds[0] == "queued"
    assert told[0].detail == {"position": 1, "reason": "load", "since_s": 0.0}
    assert list(dict.fromkeys(kinds)) == ["queued", "loading", "prefilling"]
    fractions = [n.detail["fraction"] for n in told if str(n.kind) == "loading"]
    assert fractions == sorted(fractions)
    assert len(set(fractions)) > 2
    done = [n.detail["done"] for n in told if str(n.kind) == "prefilling"]
    assert done == sorted(done)


def test_a_thousand_that_wait_and_listen_are_served_without_a_flood_of_notices() -> None:
    waiting = 1024
    limits = {"max_queue": waiting, "max_queue_per_client": waiting}
    model = fake(fake={"step_s": 0.002}, max_concurrency=4)
    told: list[Notice] = []
    with Daemon({"m": model}, limits) as daemon, daemon.client() as client:
        wait_for_state(client, "m", "READY")
        streams = [
            client.generate("m", prompt="x", max_tokens=2, on_notice=told.append)
            for _ in range(waiting)
        ]
        for stream in streams:
            assert len(list(stream)) == 2
            assert stream.result.finish_reason == "length"
    assert waiting < len(told) < 20 * waiting


# ---------------------------------------------------------------- the control plane


def test_the_control_plane_answers_while_a_model_loads_and_the_queue_is_full_H1_H5() -> None:
    limits = {"max_queue": 8, "max_queue_per_client": 8}
    model = fake(fake={"load_s": 4.0}, preload=False)
    with Daemon({"m": model}, limits) as daemon, daemon.client() as client:
        readers = [Reader(client, "m", f"p{n}", max_tokens=1) for n in range(8)]
        eventually(lambda: row(client, "m")["queued"] == 8)
        with pytest.raises(RequestError) as caught:
            client.complete("m", prompt="too many", max_tokens=1)
        assert caught.value.code == "overloaded"
        detail = caught.value.detail
        assert (detail["model"], detail["queue_depth"], detail["running"]) == ("m", 8, [])
        assert detail["retry_after_s"] > 0
        for _ in range(20):
            client.ping()
        readers[0].stream.cancel()
        assert readers[0].finished().finish_reason == "cancelled"
        for reader in readers[1:]:
            assert reader.finished().finish_reason == "length"
