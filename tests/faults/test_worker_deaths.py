"""A worker is killed or crashes, at every moment of an answer and of a load (P1, P4, P8, P10)."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from support.client.streams import Reader
from support.daemon.daemon import Daemon, fake, row, wait_for_state
from support.daemon.faults import PATIENT, undisturbed
from support.eventually import eventually

LAST = 12
LOAD = {"load_s": 1.5, "load_steps": 50}


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    models = {
        "m": fake(fake={"step_s": 0.005, "prefill_tokens_per_step": 8}, restart=PATIENT),
        "other": fake(fake={"step_s": 0.005}),
        "loads": fake(fake=LOAD, restart=PATIENT, preload=False),
    }
    with Daemon(models) as daemon:
        with daemon.client() as client:
            for name in ("m", "other"):
                wait_for_state(client, name, "READY")
        yield daemon


@pytest.mark.parametrize(
    ("token", "name"),
    [(0, "SIGKILL"), (1, "SIGSEGV"), (5, "SIGABRT"), (LAST - 1, "SIGKILL"), (LAST, "SIGSEGV")],
)
def test_a_death_at_token_k_pauses_the_answer_and_disturbs_nobody_P1_P4_P8(
    daemon: Daemon, name: str, token: int
) -> None:
    with daemon.client() as client:
        before = wait_for_state(client, "m", "READY")
        generation = before["generation"]
        fault = f"[[fault crash={name} at={token} generation={generation}]] token {token}"
        beside = f"beside {name} {token}"
        other = Reader(client, "other", beside, max_tokens=60).started()
        victim = Reader(client, "m", fault, max_tokens=LAST)
        result = victim.finished()
        assert result.token_ids == victim.tokens == undisturbed(fault, LAST)
        assert result.finish_reason == "length"
        # In the prefill it may not have been accepted yet: then it was begun as new.
        assert result.resumed in ((1,) if token else (0, 1))
        assert other.finished().token_ids == undisturbed(beside, 60)
        after = row(client, "m")
        assert (after["state"], after["generation"]) == ("READY", generation + 1)
        assert after["last_exit"]["signal"] == name
        assert row(client, "other")["generation"] == 1


def test_a_death_at_10_50_and_90_percent_of_a_load_keeps_the_queue_P8(daemon: Daemon) -> None:
    model, kinds = "loads", (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT)
    with daemon.client() as client:
        changes = client.events()
        other = Reader(client, "other", "beside a load", max_tokens=200).started()
        waiting = [Reader(client, model, f"waits {n}", max_tokens=4) for n in range(3)]
        for generation, percent in enumerate((10, 50, 90), start=1):
            # Each change is sent, so that none is missed, however late it is heard.
            at = next(
                change
                for change in changes
                if (change["model"], change["generation"]) == (model, generation)
                and (change["progress"] or {}).get("fraction", 0.0) >= percent / 100
            )
            assert at["to"] == "LOADING"
            os.kill(at["pid"], kinds[generation - 1])
        for number, reader in enumerate(waiting):
            assert reader.finished().token_ids == undisturbed(f"waits {number}", 4)
        after = eventually(lambda: (seen := row(client, model))["generation"] == 4 and seen)
        assert after["suspects"] == 0
        wait_for_state(client, model, "READY")
        assert other.finished().token_ids == undisturbed("beside a load", 200)
