"""Workers that live, beat, and have lost their work: noticed and replaced, their streams continue.

Steps that stall and processes that are stopped: tests/integration/test_daemon_stalls.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.client.lossy import LossyDaemon
from support.client.streams import Reader
from support.daemon.daemon import Daemon, fake, row, wait_for_state
from support.daemon.faults import PATIENT, undisturbed
from support.eventually import eventually
from support.models.tiny_model import make_tiny_model

LIMIT_S = 2.0
"""Many times what an honest step takes on a busy machine."""

WAYS = {
    "one frame too large ends its connection": ("frames=oversized at=5", "crash", "connection"),
    "its connection ends": ("link=drop at=5", "crash", "connection"),
    "it is stuck in insert": ("stall=sleep during=insert", "stall", "did not end"),
    "it is stuck in insert, interpreter held": ("stall=gil during=insert", "stall", "no sign"),
    "it is stuck between two steps": ("stall=sleep during=bytes_held at=5", "stall", "did not end"),
    "its engine loses a row": ("row=lost at=5", "crash", "the engine has"),
    "its heartbeats end": ("beats=end at=5", "crash", "heartbeats"),
}
"""What strikes, the reason that the exit is given, and what its detail says."""


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    quick = {"step_s": 0.01}
    models = {
        "m": fake(fake=quick, step_timeout_s=LIMIT_S, restart=PATIENT),
        "other": fake(fake=quick),
    }
    with Daemon(models) as daemon:
        yield daemon


@pytest.mark.parametrize("way", WAYS)
def test_a_worker_that_lives_and_has_lost_its_work_is_replaced_P23(
    daemon: Daemon, way: str
) -> None:
    fault, reason, detail = WAYS[way]
    with daemon.client() as client:
        generation = wait_for_state(client, "m", "READY")["generation"]
        prompt = f"{way} [[fault {fault} generation={generation}]]"
        other = Reader(client, "other", way, max_tokens=200)
        beside = Reader(client, "m", f"beside {way}", max_tokens=60)
        struck = Reader(client, "m", prompt, max_tokens=40)
        result = struck.finished()
        assert result.token_ids == undisturbed(prompt, 40)
        assert beside.finished().token_ids == undisturbed(f"beside {way}", 60)
        after = row(client, "m")
        assert (after["generation"], after["last_exit"]["reason"]) == (generation + 1, reason)
        assert detail in after["last_exit"]["detail"]
        assert other.finished().token_ids == undisturbed(way, 200)
        assert row(client, "other")["generation"] == 1


def test_a_worker_that_is_stuck_in_remove_is_replaced_P23(daemon: Daemon) -> None:
    with daemon.client() as client:
        generation = wait_for_state(client, "m", "READY")["generation"]
        beside = Reader(client, "m", "beside", max_tokens=400).started()
        prompt = f"[[fault stall=sleep during=remove generation={generation}]]"
        Reader(client, "m", prompt, max_tokens=400).started().stream.cancel()
        assert beside.finished().token_ids == undisturbed("beside", 400)
        after = row(client, "m")
        assert (after["generation"], after["last_exit"]["reason"]) == (generation + 1, "stall")


def lossy(what: str) -> LossyDaemon:
    """A daemon whose first worker loses something without a word."""
    entry = fake(fake={"step_s": 0.01}, step_timeout_s=LIMIT_S, restart=PATIENT)
    return LossyDaemon(what, {"m": entry}, supervisor={"drain_timeout_s": 600.0})


def test_a_row_that_a_worker_has_lost_is_noticed_and_continues_P23() -> None:
    with lossy("running") as daemon, daemon.client() as client:
        wait_for_state(client, "m", "READY")
        readers = {
            prompt: Reader(client, "m", prompt, max_tokens=500) for prompt in ("lost", "beside")
        }
        for prompt, reader in readers.items():
            result = reader.finished()
            assert (result.token_ids, result.resumed) == (undisturbed(prompt, 500), 1)
        assert row(client, "m")["suspects"] == 0
        assert "lost 1 of its requests" in row(client, "m")["last_exit"]["detail"]
        assert daemon.struck.exists()


def test_a_row_that_was_lost_while_it_left_holds_no_place_and_no_drain_open_P23() -> None:
    with lossy("leaving") as daemon, daemon.client() as client:
        wait_for_state(client, "m", "READY")
        Reader(client, "m", "leaves", max_tokens=400).started().stream.cancel()
        eventually(daemon.struck.exists)
        client.unload("m")
        assert row(client, "m")["state"] == "STOPPED"


def test_messages_that_vanish_on_the_way_are_missed_P23() -> None:
    """The worker ends its rows and waits for others; the counts of its beats never agree."""
    with lossy("messages") as daemon, daemon.client() as client:
        result = Reader(client, "m", "vanishes", max_tokens=40).finished()
        assert (result.token_ids, result.resumed) == (undisturbed("vanishes", 40), 1)
        assert "nothing moved" in row(client, "m")["last_exit"]["detail"]


@pytest.mark.mlx
@pytest.mark.bits
def test_a_row_that_a_worker_of_a_real_model_has_lost_continues_bit_for_bit_P23(
    tmp_path: Path,
) -> None:
    entry = {"path": str(make_tiny_model(tmp_path / "tiny")), "preload": True, "restart": PATIENT}
    with LossyDaemon("running", {"m": entry}) as daemon, daemon.client() as client:
        wait_for_state(client, "m", "READY")
        answers = [client.complete("m", prompt="Once upon", max_tokens=200) for _ in range(2)]
        assert [answer.resumed for answer in answers] == [1, 0]
        assert answers[0].token_ids == answers[1].token_ids
