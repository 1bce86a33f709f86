"""Workers that live and make no progress: found, dumped, replaced; honest work is left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from support.daemon import Daemon, fake, row, wait_for_state
from support.eventually import eventually
from support.streams import Reader

LIMIT_S = 1.0


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    models = {
        "m": fake(fake={"step_s": 0.02}, step_timeout_s=LIMIT_S),
        "other": fake(fake={"step_s": 0.02}),
    }
    with Daemon(models) as daemon:
        yield daemon


@pytest.mark.parametrize("how", ["sleep", "busy", "gil"])
def test_a_stuck_step_is_found_whoever_holds_the_interpreter_F5_F6_P6(
    daemon: Daemon, how: str
) -> None:
    with daemon.client() as client:
        wait_for_state(client, "m", "READY")
        other = Reader(client, "other", "undisturbed", max_tokens=400)
        stuck = Reader(client, "m", f"[[fault stall={how} at=3]]", max_tokens=9, resume=False)
        error = stuck.failed()
        assert error.code == "worker_crashed"
        assert error.detail["tokens_sent"] == 2
        after = wait_for_state(client, "m", "READY")
        assert (after["generation"], after["last_exit"]["reason"]) == (2, "stall")
        assert after["suspects"] == 1, "a stall that the supervisor found accuses"
        assert client.complete("m", prompt="again", max_tokens=3).finish_reason == "length"
        assert other.finished().usage.completion_tokens == 400
    assert "most recent call first" in daemon.log_text(), "the stacks are in the worker's log"
    assert "engines/fake/options.py" in daemon.log_text(), "and show where it was stuck"


def test_a_stopped_worker_is_replaced_and_accuses_nobody_F7_P5(daemon: Daemon) -> None:
    with daemon.client() as client:
        pid = wait_for_state(client, "m", "READY")["pid"]
        stream = Reader(client, "m", "runs", max_tokens=3000, resume=False).started()
        os.kill(pid, signal.SIGSTOP)
        assert "SIGSTOP" in stream.failed().message
        after = wait_for_state(client, "m", "READY")
        assert (after["generation"], after["suspects"]) == (2, 0)
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_worker_that_is_stopped_while_loading_is_replaced_F7_P5() -> None:
    with (
        Daemon({"m": fake(fake={"load_s": 20.0, "load_steps": 400})}) as daemon,
        daemon.client() as client,
    ):
        eventually(lambda: row(client, "m")["phase"] == "loading")
        os.kill(row(client, "m")["pid"], signal.SIGSTOP)
        eventually(lambda: row(client, "m")["generation"] == 2, timeout_s=60.0)
        assert "SIGSTOP" in row(client, "m")["last_exit"]["detail"]


def test_a_load_that_stalls_is_ended_by_its_own_limit() -> None:
    stall = {"load_stall": "gil", "load_fault_generations": 1}
    with (
        Daemon({"m": fake(fake=stall, load_stall_timeout_s=10.0)}) as daemon,
        daemon.client() as client,
    ):
        after = wait_for_state(client, "m", "READY")
        assert (after["generation"], after["last_exit"]["reason"]) == (2, "stall")


def test_a_template_that_never_ends_is_found() -> None:
    with Daemon({"m": fake(step_timeout_s=0.2)}) as daemon, daemon.client() as client:
        stuck = Reader(client, "m", "[[tokenize loop]]", max_tokens=3)
        assert stuck.failed().code == "quarantined", "nothing else was ever there to accuse"
        assert wait_for_state(client, "m", "READY")["generation"] == 4
        assert client.complete("m", prompt="again", max_tokens=3).finish_reason == "length"


def test_long_predicted_work_under_a_small_limit_is_not_killed_F5_P7() -> None:
    slow = {"step_s": 2.5, "predicted_s": 1.0}
    with (
        Daemon({"m": fake(fake=slow, step_timeout_s=LIMIT_S)}) as daemon,
        daemon.client() as client,
    ):
        result = client.complete("m", prompt="x", max_tokens=3)
        assert result.finish_reason == "length"
        assert row(client, "m")["generation"] == 1


READS = """
import sys
from mlxsup.client import Client
with Client(sys.argv[1]) as client:
    stream = client.generate("m", prompt="runs", max_tokens=400)
    next(stream)
    print("reads", flush=True)
    print(1 + sum(len(delta.token_ids) for delta in stream), stream.result.resumed, flush=True)
"""


@pytest.mark.slow
def test_a_pause_of_the_whole_tree_kills_nobody_P7(daemon: Daemon) -> None:
    """As when a machine sleeps: its clients stand still, too. One that did not would hear that
    the supervisor has fallen silent (P2)."""
    with daemon.client() as client:
        for name in ("m", "other"):
            wait_for_state(client, name, "READY")
    reader = subprocess.Popen(
        [sys.executable, "-c", READS, daemon.endpoint], stdout=subprocess.PIPE, text=True
    )
    assert reader.stdout is not None
    assert reader.stdout.readline() == "reads\n"
    tree = [psutil.Process(reader.pid), *daemon.processes()]
    for process in tree:
        process.suspend()
    time.sleep(60.0)  # the pause itself, not a wait for anything
    for process in tree:
        process.resume()
    said, _ = reader.communicate(timeout=60)
    assert said == "400 0\n"
    with daemon.client() as client:
        assert [row(client, name)["generation"] for name in ("m", "other")] == [1, 1]
