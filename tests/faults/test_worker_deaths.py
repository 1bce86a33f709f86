"""Workers that die, hang or lose their work: every answer continues, others notice nothing.

Real: daemons with fake engines, which a prompt makes fail on demand (P1, P4, P8, P20, P23, P25).
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxsup.client import Client, RequestError

from support.cli.scripted_daemon import ScriptedDaemon
from support.client.lossy import LossyDaemon
from support.client.streams import Reader
from support.daemon.daemon import Daemon, fake, gone_within, row, wait_for_state
from support.daemon.faults import PATIENT, undisturbed
from support.eventually import eventually

LAST = 40
LIMIT_S = 2.0
"""Many times what an honest step takes on a busy machine."""

DEATHS = {
    "SIGKILL before its first token": ("crash=SIGKILL at=0", "SIGKILL", ""),
    "SIGABRT in the middle": ("crash=SIGABRT at=5", "SIGABRT", ""),
    "SIGSEGV with its last token": (f"crash=SIGSEGV at={LAST}", "SIGSEGV", ""),
    "a frame too large ends its connection": ("frames=oversized at=5", "crash", "connection"),
    "its connection ends": ("link=drop at=5", "crash", "connection"),
    "stuck in insert": ("stall=sleep during=insert", "stall", "did not end"),
    "stuck in insert, interpreter held": ("stall=gil during=insert", "stall", "no sign"),
    "stuck between two steps": ("stall=sleep during=bytes_held at=5", "stall", "did not end"),
    "its engine loses a row": ("row=lost at=5", "crash", "the engine has"),
    "its heartbeats end": ("beats=end at=5", "crash", "heartbeats"),
}
"""What strikes, the signal or the reason of the exit, and what its detail says."""


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    quick = {"step_s": 0.01, "prefill_tokens_per_step": 8}
    models = {
        "m": fake(fake=quick, step_timeout_s=LIMIT_S, restart=PATIENT),
        "other": fake(fake=quick),
        "loads": fake(fake={"load_s": 1.5, "load_steps": 50}, restart=PATIENT, preload=False),
    }
    with Daemon(models) as daemon:
        with daemon.client() as client:
            wait_for_state(client, "other", "READY")
        yield daemon
        with daemon.client() as client:
            assert row(client, "other")["generation"] == 1


@pytest.mark.parametrize("pieces", [1, 3, 20], ids=["text shown", "half read", "in the answer"])
def test_a_prompt_is_shown_once_whenever_the_worker_dies(daemon: Daemon, pieces: int) -> None:
    prompt = "a fox and an owl " * 40
    asked: dict[str, Any] = {"prompt": prompt, "max_tokens": 30, "prompt_logprobs": 2, "echo": True}
    with daemon.client() as client:
        wait_for_state(client, "m", "READY")
        whole = client.complete("m", **asked)
        stream = client.generate("m", **asked)
        for count, _ in enumerate(stream, start=1):
            if count == pieces:
                os.kill(row(client, "m")["pid"], signal.SIGKILL)
        got = stream.result
    assert got.resumed == 1
    assert got.prompt == whole.prompt == prompt
    assert got.prompt_logprobs is not None
    assert len(got.prompt_logprobs) == len(prompt)
    assert got.prompt_logprobs == whole.prompt_logprobs
    assert got.token_ids == whole.token_ids


@pytest.mark.parametrize("way", DEATHS)
def test_an_answer_continues_in_the_next_process_P1_P4_P8_P23(daemon: Daemon, way: str) -> None:
    fault, how, detail = DEATHS[way]
    with daemon.client() as client:
        generation = wait_for_state(client, "m", "READY")["generation"]
        prompt = f"{way} [[fault {fault} generation={generation}]]"
        other = Reader(client, "other", way, max_tokens=100)
        beside = Reader(client, "m", f"beside {way}", max_tokens=60)
        struck = Reader(client, "m", prompt, max_tokens=LAST)
        result = struck.finished()
        assert result.token_ids == struck.tokens == undisturbed(prompt, LAST)
        # Before its first token it may not have been accepted yet: then it was begun as new.
        assert result.resumed == 1 or not fault.startswith("crash") or "at=0" in fault
        assert beside.finished().token_ids == undisturbed(f"beside {way}", 60)
        after = row(client, "m")
        last_exit = after["last_exit"]
        assert (after["state"], after["generation"]) == ("READY", generation + 1)
        assert how in (last_exit["signal"], last_exit["reason"])
        assert detail in last_exit["detail"]
        assert other.finished().token_ids == undisturbed(way, 100)


def test_a_worker_that_is_stuck_in_remove_is_replaced_P23(daemon: Daemon) -> None:
    with daemon.client() as client:
        generation = wait_for_state(client, "m", "READY")["generation"]
        beside = Reader(client, "m", "beside", max_tokens=300).started()
        prompt = f"[[fault stall=sleep during=remove generation={generation}]]"
        Reader(client, "m", prompt, max_tokens=400).started().stream.cancel()
        assert beside.finished().token_ids == undisturbed("beside", 300)
        after = row(client, "m")
        assert (after["generation"], after["last_exit"]["reason"]) == (generation + 1, "stall")


def test_a_death_at_10_50_and_90_percent_of_a_load_keeps_the_queue_P8(daemon: Daemon) -> None:
    model, kinds = "loads", (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT)
    with daemon.client() as client:
        changes = client.events()
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


# ---------------------------------------------------------------- what is lost without a word


def lossy(what: str) -> LossyDaemon:
    """Return a daemon whose first worker loses something without a word."""
    entry = fake(fake={"step_s": 0.01}, step_timeout_s=LIMIT_S, restart=PATIENT)
    return LossyDaemon(what, {"m": entry}, supervisor={"drain_timeout_s": 600.0})


@pytest.mark.parametrize(
    ("what", "detail"), [("running", "lost 1 of its requests"), ("messages", "made no progress")]
)
def test_a_row_or_a_message_that_is_lost_is_missed_and_its_answer_continues_P23(
    what: str, detail: str
) -> None:
    with lossy(what) as daemon, daemon.client() as client:
        wait_for_state(client, "m", "READY")
        result = Reader(client, "m", "lost", max_tokens=200).finished()
        assert (result.token_ids, result.resumed) == (undisturbed("lost", 200), 1)
        assert row(client, "m")["suspects"] == 0
        assert detail in row(client, "m")["last_exit"]["detail"]


def test_a_row_that_was_lost_while_it_left_holds_no_place_and_no_drain_open_P23() -> None:
    with lossy("leaving") as daemon, daemon.client() as client:
        wait_for_state(client, "m", "READY")
        Reader(client, "m", "leaves", max_tokens=400).started().stream.cancel()
        eventually(daemon.struck.exists)
        client.unload("m")
        assert row(client, "m")["state"] == "STOPPED"


# ---------------------------------------------------------------- all at once, and reloads

NAMES = ("a", "b", "c")
ENTRY = fake(fake={"step_s": 0.04, "load_s": 0.1}, restart=PATIENT)
TOKENS = 150
"""Six seconds of an answer, so that a test on a busy machine can strike within it."""
CHANGE = re.compile(r"model state model=(\w+) from=(\w+) to=(\w+)")


def most_loading_at_once(log: Path) -> int:
    """Return the most of all moments that the daemon's log tells of."""
    loading: set[str] = set()
    most = 0
    for model, _, state in CHANGE.findall(log.read_text()):
        loading.discard(model)
        if state == "LOADING":
            loading.add(model)
        most = max(most, len(loading))
    return most


def test_workers_that_all_die_load_one_by_one_and_a_busy_model_that_is_removed_drains_P1_P8_P20(
) -> None:  # fmt: skip
    with Daemon(dict.fromkeys(NAMES, ENTRY)) as daemon, daemon.client() as client:
        for name in NAMES:
            wait_for_state(client, name, "READY")
        running = {
            (model, n): Reader(client, model, f"{model} {n}", max_tokens=TOKENS)
            for model in NAMES
            for n in range(3)
        }
        for reader in running.values():
            reader.started()
        for pid in [row(client, model)["pid"] for model in NAMES]:
            os.kill(pid, signal.SIGSEGV)
        for (model, n), reader in running.items():
            result = reader.finished()
            assert (result.token_ids, result.resumed) == (undisturbed(f"{model} {n}", TOKENS), 1)
        after = [(seen["generation"], seen["suspects"]) for seen in client.status()["models"]]
        assert after == [(2, 0)] * len(NAMES), "they have completed"
        assert most_loading_at_once(daemon.logs / "mlxsup.log") == 1

        # Removed by a reload, a busy model drains; a second reload brings it back.
        drains = Reader(client, "a", "runs", max_tokens=40).started()
        removed = [p for p in daemon.processes() if p.pid == row(client, "a")["pid"]]
        daemon.write_config(dict.fromkeys(NAMES[1:], ENTRY))
        assert client.reload()["removed"] == ["a"]
        with pytest.raises(RequestError) as caught:
            client.complete("a", prompt="late", max_tokens=1)
        assert caught.value.code in ("unknown_model", "unloaded")
        assert drains.finished().token_ids == undisturbed("runs", 40), "it drains"
        gone_within(removed, 60.0)
        daemon.write_config(dict.fromkeys(NAMES, ENTRY))
        assert client.reload()["added"] == ["a"]
        assert client.complete("a", prompt="x", max_tokens=5).token_ids == undisturbed("x", 5)

        # One that dies while it drains ends its streams once.
        dies = Reader(client, "a", "runs", max_tokens=1000).started()
        pid = row(client, "a")["pid"]
        daemon.write_config(dict.fromkeys(NAMES[1:], ENTRY))
        client.reload()
        os.kill(pid, signal.SIGKILL)
        assert dies.failed().code in ("unloaded", "unknown_model")
        eventually(lambda: [m["name"] for m in client.status()["models"]] == list(NAMES[1:]))


# ---------------------------------------------------------------- transient faults

ROWS = 8
LONG = 600
"""Six seconds of an answer: on a busy machine, too, two faults and a newcomer come within it."""
STEPS_OF_A_TURN = 4 + 3
"""The tokens of a probation, and what it takes to read the prompt and to leave the batch."""


def strike(client: Client, readers: list[Reader]) -> int:
    """Send SIGSEGV once every row has gained a token in this life; return the new generation."""
    held = [len(reader.tokens) for reader in readers]
    eventually(lambda: all(len(r.tokens) > n for r, n in zip(readers, held, strict=True)))
    before = row(client, "m")
    os.kill(before["pid"], signal.SIGSEGV)
    eventually(lambda: row(client, "m")["generation"] > before["generation"])
    return int(wait_for_state(client, "m", "READY")["generation"])


def test_two_transient_faults_cost_a_few_steps_and_hold_up_no_newcomer_P25_F10() -> None:
    entry = fake(fake={"step_s": 0.01}, restart=PATIENT, max_concurrency=ROWS + 1)
    with Daemon({"m": entry}) as daemon, daemon.client() as client:
        wait_for_state(client, "m", "READY")
        prompts = [f"suspect {n}" for n in range(ROWS)]
        readers = [Reader(client, "m", prompt, max_tokens=LONG) for prompt in prompts]
        strike(client, readers)
        generation = strike(client, readers)
        newcomer = Reader(client, "m", "newcomer", max_tokens=LONG).started()
        assert all(reader.is_alive() for reader in readers), "it waited for a suspect to end"
        for prompt, reader in zip(prompts, readers, strict=True):
            result = reader.finished(120)
            assert (result.token_ids, result.resumed) == (undisturbed(prompt, LONG), 2)
        assert newcomer.finished(120).token_ids == undisturbed("newcomer", LONG)
        assert row(client, "m")["generation"] == generation, "no third crash"
        # One after the other it would be ROWS times as many.
        assert row(client, "m")["steps"] <= LONG + ROWS * 2 * STEPS_OF_A_TURN
        assert row(client, "m")["suspects"] == 0


# ---------------------------------------------------------------- a clock that jumps

JUMPING = """
import itertools, time
_real, _hours = time.time, itertools.cycle((0, 3600, -3600))
time.time = lambda: _real() + next(_hours)
time.time_ns = lambda: int(time.time() * 1e9)
"""
WORKER = "from mlxsup.worker import __main__ as worker; worker.leave(worker.main([]))"


def test_a_wall_clock_that_jumps_by_an_hour_kills_no_worker_and_ends_no_request_P7() -> None:
    model = fake(
        fake={"step_s": 0.01}, step_timeout_s=60.0, load_stall_timeout_s=300.0, idle_unload_s=900.0
    )
    argv = [sys.executable, "-P", "-c", JUMPING + WORKER]
    with (
        ScriptedDaemon({"m": model, "n": model}).scripted(JUMPING, argv) as daemon,
        daemon.client() as client,
    ):
        limits = {"timeout_s": 900.0, "queue_timeout_s": 900.0, "first_token_timeout_s": 900.0}
        asked = [(name, f"{name} {number}") for name in ("m", "n") for number in range(4)]
        readers = [Reader(client, name, one, max_tokens=300, **limits) for name, one in asked]
        readers[-1].started()
        os.kill(row(client, "n")["pid"], signal.SIGKILL)
        for reader, (_, prompt) in zip(readers, asked, strict=True):
            assert reader.finished().token_ids == undisturbed(prompt, 300)
        wait_for_state(client, "n", "READY")
        assert [row(client, name)["generation"] for name in ("m", "n")] == [1, 2]
        times = [line[:20] for line in (daemon.logs / "mlxsup.log").read_text().splitlines()]
        assert times != sorted(times), "the clock did jump"
        eventually(lambda: row(client, "m")["phase"] == "idle")
