"""Loads, restarts, stalls and ends of real processes, while streams run."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from mlxsup.client import Client

from support.cli.scripted_daemon import ScriptedDaemon
from support.client.streams import Reader
from support.daemon.daemon import Daemon, fake, is_alive, row, wait_for_state
from support.daemon.faults import undisturbed
from support.eventually import eventually

SLOW = {"step_s": 0.02}


@pytest.fixture(scope="module")
def pair() -> Iterator[Daemon]:
    models = {"one": fake(fake=SLOW, max_concurrency=2), "two": fake(fake=SLOW)}
    with Daemon(models) as daemon:
        with daemon.client() as client:
            for name in models:
                client.load(name)
        yield daemon


def test_restart_drains_while_the_other_streams_F14_E8(pair: Daemon) -> None:
    with pair.client() as client:
        alone = client.complete("two", prompt="other", max_tokens=150)
        other = Reader(client, "two", "other", max_tokens=150).started()
        running = Reader(client, "one", "runs", max_tokens=40).started()
        before = row(client, "one")
        finished = pair.run("restart", "one")
        assert finished.returncode == 0, finished.stderr
        assert running.finished().finish_reason == "length", "it was allowed to finish"
        assert len(running.tokens) == 40
        after = row(client, "one")
        assert (after["state"], after["generation"]) == ("READY", before["generation"] + 1)
        assert after["pid"] != before["pid"]
        assert not psutil.pid_exists(before["pid"]) or not is_alive(psutil.Process(before["pid"]))
        assert other.finished().token_ids == alone.token_ids
        assert row(client, "two")["generation"] == 1, "only the other has a new process"


def test_restart_now_does_not_wait_and_the_queue_survives_F14(pair: Daemon) -> None:
    with pair.client() as client:
        before = row(client, "one")["generation"]
        running = [
            Reader(client, "one", f"r{n}", max_tokens=3000, resume=False).started()
            for n in range(2)
        ]
        queued = Reader(client, "one", "queued", max_tokens=5)
        eventually(lambda: row(client, "one")["queued"] == 1)
        client.restart("one", now=True)
        assert [reader.failed().code for reader in running] == ["worker_crashed"] * 2
        assert len(queued.finished().token_ids) == 5
        assert row(client, "one")["generation"] == before + 1


def test_unload_ends_the_process_I1(pair: Daemon) -> None:
    with pair.client() as client:
        before = row(client, "one")
        worker = psutil.Process(before["pid"])
        finished = pair.run("unload", "one")
        assert finished.returncode == 0, finished.stderr
        assert not is_alive(worker)
        after = row(client, "one")
        assert (after["state"], after["pid"], after["footprint_bytes"]) == ("STOPPED", None, 0)
        assert client.complete("one", prompt="hi", max_tokens=2).finish_reason == "length"
        assert row(client, "one")["generation"] == before["generation"] + 1


# ---------------------------------------------------------------- the end


def test_stop_lets_streams_finish_and_returns_when_every_process_is_gone_E1_E3_E5() -> None:
    with Daemon({"m": fake(fake=SLOW, max_concurrency=1)}) as daemon:
        with daemon.client() as client:
            running = Reader(client, "m", "runs", max_tokens=200).started()
            queued = Reader(client, "m", "waits", max_tokens=5)
            eventually(lambda: row(client, "m")["queued"] == 1)
            processes = daemon.processes()
            stopped = daemon.run("stop")
            assert stopped.returncode == 0, stopped.stderr
            assert [p for p in processes if is_alive(p)] == []
            assert running.finished().finish_reason == "length"
            assert queued.failed().code == "shutting_down"
        assert daemon.process is not None
        assert daemon.process.wait(60) == 0
        assert not (daemon.folder / "run" / "client.sock").exists()
        assert daemon.run("stop").returncode == 69


LIMIT_S = 1.0


@pytest.fixture
def watched() -> Iterator[Daemon]:
    models = {
        "m": fake(fake={"step_s": 0.02}, step_timeout_s=LIMIT_S),
        "other": fake(fake={"step_s": 0.02}),
    }
    with Daemon(models) as daemon:
        yield daemon


def test_a_stuck_step_that_holds_the_interpreter_is_found_F5_F6_P6(watched: Daemon) -> None:
    with watched.client() as client:
        wait_for_state(client, "m", "READY")
        other = Reader(client, "other", "undisturbed", max_tokens=400)
        stuck = Reader(client, "m", "[[fault stall=gil at=3]]", max_tokens=9, resume=False)
        error = stuck.failed()
        assert error.code == "worker_crashed"
        assert error.detail["tokens_sent"] == 2
        after = wait_for_state(client, "m", "READY")
        assert (after["generation"], after["last_exit"]["reason"]) == (2, "stall")
        assert after["suspects"] == 1, "a stall that the supervisor found accuses"
        assert client.complete("m", prompt="again", max_tokens=3).finish_reason == "length"
        assert other.finished().usage.completion_tokens == 400
    assert "most recent call first" in watched.log_text(), "the stacks are in the worker's log"
    assert "engines/fake/options.py" in watched.log_text(), "and show where it was stuck"


SLOW_PREFILL = {"step_s": 0.02, "prefill_tokens_per_step": 1, "context_length": 100_000}
ENDLESS_PROMPT = "x" * 50_000
"""Its prefill takes a quarter of an hour."""

ENDLESS_LOAD = fake(preload=False, load_stall_timeout_s=3600.0, fake={"load_stall": "gil"})


BUSY: dict[str, tuple[str, Callable[[dict[str, Any]], bool]]] = {
    "stuck": ("[[fault stall=gil at=3]]", lambda r: (r["steps"], len(r["running"])) == (2, 1)),
    "prefills": (ENDLESS_PROMPT, lambda r: r["phase"] == "prefill" and r["steps"] > 2),
    "loads": ("waits", lambda r: r["state"] == "LOADING" and r["pid"] is not None),
}
"""Models with a prompt that keeps their worker busy, and whether a row shows that it is."""


def test_ping_status_and_cancel_are_answered_while_a_worker_is_busy_H1() -> None:
    models = {
        "stuck": fake(
            step_timeout_s=3600.0, fake={**SLOW_PREFILL, "prefill_tokens_per_step": 1000}
        ),
        "prefills": fake(step_timeout_s=3600.0, fake=SLOW_PREFILL),
        "loads": ENDLESS_LOAD,
    }
    with Daemon(models, {"drain_timeout_s": 0.1}) as daemon, daemon.client() as client:
        for name in ("stuck", "prefills"):
            wait_for_state(client, name, "READY")
        for name, (prompt, is_busy) in BUSY.items():
            stream = client.generate(name, prompt=prompt, max_tokens=90_000 - len(prompt))
            eventually(partial(is_busy_now, client, name, is_busy), timeout_s=30.0, what=name)
            for _ in range(50):
                client.ping()
                assert is_busy(row(client, name)), "and it is still at it"
            stream.cancel()
            list(stream)
            assert stream.result.finish_reason == "cancelled"
        after = {name: row(client, name) for name in BUSY}
        assert [one["state"] for one in after.values()] == ["READY", "READY", "LOADING"]
        assert [one["generation"] for one in after.values()] == [1, 1, 1], "no wait for a kill"
        assert after["stuck"]["steps"] == 2, "while it still was"


def is_busy_now(client: Client, name: str, is_busy: Callable[[dict[str, Any]], bool]) -> bool:
    return is_busy(row(client, name))


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


def test_a_load_costs_another_model_no_token_and_no_step_B7() -> None:
    """The load is stuck for as long as the other streams, starts new requests and ends them."""
    models = {"one": fake(fake={"step_s": 0.005}), "two": ENDLESS_LOAD}
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


@pytest.mark.parametrize(("way", "is_stuck"), [("unload", True), ("restart", False)])
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


@pytest.fixture
def client_of() -> Iterator[Any]:
    clients: list[Client] = []

    def make(daemon: Daemon) -> Client:
        clients.append(daemon.client())
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def test_a_hangup_that_was_ignored_at_the_start_stays_ignored(client_of: Any) -> None:
    setup = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    with ScriptedDaemon({"a": fake()}).scripted(setup) as daemon:
        client = client_of(daemon)
        assert daemon.process is not None
        daemon.process.send_signal(signal.SIGHUP)
        wait_for_state(client, "a", "READY")
        assert client.status()["pid"] == daemon.process.pid


def test_processes_come_and_go_without_leaving_anything_P14(client_of: Any) -> None:
    with Daemon({"a": fake()}) as daemon:
        client = client_of(daemon)
        wait_for_state(client, "a", "READY")
        assert daemon.process is not None
        supervisor = psutil.Process(daemon.process.pid)

        def counts() -> tuple[int, int, int]:
            children = supervisor.children(recursive=True)
            return supervisor.num_fds(), supervisor.num_threads(), len(children)

        client.restart("a", now=True)  # the first one may open what stays
        eventually(lambda: row(client, "a")["phase"] == "idle")
        seen: list[tuple[int, int, int]] = []

        def is_settled() -> bool:
            seen.append(counts())
            return seen[-2:-1] == seen[-1:]

        eventually(is_settled)
        before = seen[-1]
        for _ in range(5):
            client.restart("a", now=True)
        eventually(lambda: counts() == before)
        sockets = [p.name for p in (daemon.folder / "run").glob("*.sock*")]
        assert "client.sock" in sockets
        assert len(sockets) <= 2, "and that for beats until the first one has come"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_a_full_log_disk_stops_no_daemon() -> None:
    daemon = Daemon({"a": fake()})
    daemon.logs.mkdir(mode=0o700)
    logs = [daemon.logs / name for name in ("a.log", "mlxsup.log")]
    for log in logs:
        log.symlink_to("/dev/full")
    with daemon:
        try:
            with daemon.client() as client:
                assert client.complete("a", prompt="x", max_tokens=3).finish_reason == "length"
            assert "cannot be written, lines are lost" in daemon.output
        finally:
            for log in logs:
                log.unlink()  # reading it would not end
