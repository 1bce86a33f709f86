"""Workers that die: who notices, who does not, what comes back by itself."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import psutil
import pytest

from mlxsup.client import RequestError

from support.daemon import Daemon, fake, gone_within, row, wait_for_state
from support.eventually import eventually
from support.streams import Reader

SLOW = {"step_s": 0.02}


@pytest.fixture
def pair() -> Iterator[Daemon]:
    """Two fake models, one row each in `one`, so that a second request must wait."""
    models = {"one": fake(fake=SLOW, max_concurrency=1), "two": fake(fake=SLOW)}
    with Daemon(models) as daemon:
        yield daemon


def kill(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    os.kill(pid, number)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
def test_a_killed_worker_disturbs_nobody_and_comes_back_F1_F2(
    pair: Daemon, number: signal.Signals
) -> None:
    with pair.client() as client:
        for name in ("one", "two"):
            client.load(name)
        undisturbed = client.complete("two", prompt="the other", max_tokens=120)
        pids = {name: row(client, name)["pid"] for name in ("one", "two")}
        assert pair.process is not None
        assert len({*pids.values(), pair.process.pid}) == 3
        victim = Reader(client, "one", "dies", max_tokens=10_000 // 4, resume=False)
        other = Reader(client, "two", "the other", max_tokens=120)
        victim.started()
        other.started()
        queued = [Reader(client, "one", f"queued {n}", max_tokens=5) for n in range(3)]
        eventually(lambda: row(client, "one")["queued"] == 3)
        kill(pids["one"], number)
        error = victim.failed()
        assert error.code == "worker_crashed"
        assert error.retryable
        assert error.detail["tokens_sent"] >= len(victim.tokens) > 0
        assert signal.Signals(number).name in error.message
        for reader in queued:
            assert reader.finished().finish_reason == "length", "with no new request needed"
            assert len(reader.tokens) == 5
        assert other.finished().token_ids == undisturbed.token_ids
        after = row(client, "one")
        assert (after["state"], after["generation"], after["restarts"]) == ("READY", 2, 1)
        assert after["last_exit"]["signal"] == signal.Signals(number).name
        assert row(client, "two")["generation"] == 1


def test_a_step_that_raises_ends_the_worker_F3(pair: Daemon) -> None:
    raised = "FakeStepError: the step raised this on demand"
    pair.provoke("Traceback", model="one", pattern=raised, at_most=1)
    with pair.client() as client:
        with pytest.raises(RequestError) as caught:
            client.complete("one", prompt="[[fault raise at=3]]", max_tokens=9, resume=False)
        assert caught.value.code == "worker_crashed"
        after = wait_for_state(client, "one", "READY")
        assert after["generation"] == 2
        assert after["last_exit"]["code"] == 70
        assert client.complete("one", prompt="again", max_tokens=3).finish_reason == "length"


def test_a_worker_that_sends_garbage_is_replaced(pair: Daemon) -> None:
    with pair.client() as client:
        reader = Reader(client, "one", "[[fault frames=garbage at=3]]", max_tokens=10, resume=False)
        assert reader.failed().code == "worker_crashed"
        assert wait_for_state(client, "one", "READY")["generation"] == 2


def test_a_crash_loop_ends_as_failed_with_the_last_cause_F2_P9() -> None:
    restart = {"max_restarts": 2, "window_s": 60.0, "backoff_initial_s": 0.05}
    model = fake(fake={"crash_in_load": "SIGKILL"}, preload=False, restart=restart)
    with Daemon({"m": model}) as daemon, daemon.client() as client:
        with pytest.raises(RequestError) as caught:
            client.complete("m", prompt="hi", max_tokens=1)
        assert caught.value.code == "load_failed"
        failed = wait_for_state(client, "m", "FAILED")
        assert failed["generation"] == 3, "max_restarts + 1 starts"
        assert "SIGKILL" in failed["cause"]
        with pytest.raises(RequestError) as again:
            client.complete("m", prompt="hi", max_tokens=1)
        assert again.value.code == "model_failed"
        assert row(client, "m")["generation"] == 3


def test_a_worker_that_dies_while_loading_is_noticed_at_once_B3_F8() -> None:
    """Half a load is time enough to ask twice."""
    options = {"crash_in_load": "SIGKILL", "load_fault_generations": 1, "load_s": 3.0}
    model = fake(preload=False, fake=options)
    with Daemon({"m": model}) as daemon, daemon.client() as client:
        waiting = Reader(client, "m", "waits", max_tokens=2)
        with pytest.raises(RequestError) as caught:
            client.load("m")
        assert caught.value.code == "load_failed"
        assert caught.value.retryable
        assert waiting.finished().finish_reason == "length", "the queue is kept"
        assert row(client, "m")["generation"] == 2


@pytest.mark.parametrize(("kind", "code"), [("missing", 66), ("bad", 65), ("device", 69)])
def test_a_permanent_load_error_is_tried_once_and_everyone_hears_of_it_B2_B6(
    kind: str, code: int
) -> None:
    model = fake(fake={"load_error": kind, "load_s": 2.0}, preload=False)
    with Daemon({"m": model}) as daemon, daemon.client() as client:
        waiting = Reader(client, "m", "waits", max_tokens=2)
        with pytest.raises(RequestError) as caught:
            client.load("m")
        assert caught.value.code == "load_failed"
        assert waiting.failed().code == "load_failed"
        after = row(client, "m")
        assert (after["state"], after["generation"]) == ("FAILED", 1)
        assert after["last_exit"]["code"] == code
        assert after["cause"]


def test_a_missing_model_folder_is_a_load_error_that_names_it_B6() -> None:
    with Daemon({"m": {"path": "no/such/folder", "preload": False}}) as daemon:
        with daemon.client() as client, pytest.raises(RequestError) as caught:
            client.load("m")
        assert "no/such/folder" in caught.value.message
        with daemon.client() as client:
            assert row(client, "m")["state"] == "FAILED"


def test_many_requests_for_a_cold_model_cause_one_spawn_B8_B4() -> None:
    model = fake(fake={"load_s": 5.0}, preload=False)
    with Daemon({"m": model}) as daemon, daemon.client() as client:
        readers = [Reader(client, "m", f"prompt {n}", max_tokens=4) for n in range(20)]
        late = Reader(client, "m", "impatient", max_tokens=4, queue_timeout_s=0.1)
        assert late.failed().code == "queue_timeout"
        for reader in readers:
            assert len(reader.finished().token_ids) == 4
        assert row(client, "m")["generation"] == 1


# ---------------------------------------------------------------- the supervisor dies


@pytest.mark.parametrize("window", ["load", "prefill", "decode", "idle"])
def test_nothing_is_left_of_a_killed_supervisor_E6(window: str) -> None:
    options = {"step_s": 0.05, "prefill_tokens_per_step": 1}
    if window == "load":
        options["load_s"] = 30.0
    daemon = Daemon({"m": fake(fake=options)})
    daemon.start()
    try:
        with daemon.client() as client:
            wait_for_state(client, "m", "LOADING" if window == "load" else "READY")
            if window == "load":
                eventually(lambda: row(client, "m")["pid"])
            if window in ("prefill", "decode"):
                prompt = "x" * 500 if window == "prefill" else "x"
                reader = Reader(client, "m", prompt, max_tokens=1000)
                eventually(lambda: row(client, "m")["steps"] > 2)
                if window == "decode":
                    reader.started()
            processes = daemon.processes()
            assert len(processes) == 2
            daemon.kill()
            gone_within(processes, 60.0)
        assert (daemon.folder / "run" / "client.sock").exists(), "a stale socket is left"
        if window == "load":
            daemon.write_config({"m": fake()})
        daemon.start()
        with daemon.client() as client:
            assert client.complete("m", prompt="again", max_tokens=2).finish_reason == "length"
    finally:
        daemon.__exit__(None, None, None)


def test_the_next_start_ends_a_worker_that_was_left_over_E6() -> None:
    daemon = Daemon({"m": fake()})
    daemon.start()
    with daemon.client() as client:
        worker = psutil.Process(wait_for_state(client, "m", "READY")["pid"])
        # Stopped, it cannot see the pipe close; on Linux the kernel ends it all the same.
        worker.suspend()
    daemon.kill()
    daemon.start()
    gone_within([worker], 60.0)
    with daemon.client() as client:
        assert client.complete("m", prompt="again", max_tokens=2).finish_reason == "length"
    daemon.__exit__(None, None, None)
