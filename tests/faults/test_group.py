"""A model over two ranks under a daemon: whatever a rank dies of, its answers continue."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from support.cli.cli import run_cli
from support.client.streams import Reader
from support.daemon.daemon import Daemon, fake, row, wait_for_state
from support.daemon.faults import PATIENT, undisturbed
from support.eventually import eventually
from support.worker.fake_ssh import FakeSsh

LAST = 40

BEHIND = "; it waits for rank 1 (127.0.0.1)"

DEATHS = {
    "a follower is killed": ("crash=SIGKILL at=5 rank=1", 74, "rank 1 (127.0.0.1) was lost"),
    "a follower's step raises": ("raise at=5 rank=1", 70, "rank 1 (127.0.0.1): FakeStepError"),
    "a follower has another token": ("token=other at=5 rank=1", 70, "rank 1 (127.0.0.1): call"),
    "a follower hangs": ("stall=sleep at=5 rank=1", None, BEHIND),
    "a follower holds its interpreter": ("stall=gil at=5 rank=1", None, BEHIND),
    "the leader is killed": ("crash=SIGKILL at=5", None, "SIGKILL"),
}
"""What strikes, the exit code of the worker, and what its detail says."""


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    entry = fake(hosts=[{}, {}], fake={"step_s": 0.01}, step_timeout_s=2.0, restart=PATIENT)
    with Daemon({"m": entry}) as daemon:
        yield daemon


def workers(daemon: Daemon) -> list[psutil.Process]:
    """Return the processes of all ranks, agents included."""
    with daemon.client() as client:
        leader = psutil.Process(wait_for_state(client, "m", "READY")["pid"])
    return [leader, *leader.children(recursive=True)]


def are_gone(processes: list[psutil.Process]) -> bool:
    """Return True if none of them runs."""
    return all(not one.is_running() or one.status() == psutil.STATUS_ZOMBIE for one in processes)


@pytest.mark.parametrize("way", DEATHS)
def test_an_answer_continues_after_the_death_of_a_rank(daemon: Daemon, way: str) -> None:
    fault, code, detail = DEATHS[way]
    before = workers(daemon)
    if fault.startswith("raise"):
        daemon.provoke("Traceback", model="m", pattern="", at_most=1)
    with daemon.client() as client:
        generation = row(client, "m")["generation"]
        prompt = f"{way} [[fault {fault} generation={generation}]]"
        beside = Reader(client, "m", f"beside {way}", max_tokens=LAST)
        struck = Reader(client, "m", prompt, max_tokens=LAST)
        assert struck.finished().token_ids == undisturbed(prompt, LAST)
        assert beside.finished().token_ids == undisturbed(f"beside {way}", LAST)
        last_exit = row(client, "m")["last_exit"]
        assert row(client, "m")["generation"] == generation + 1
    assert last_exit["code"] == code
    assert detail in (last_exit["detail"] or last_exit["signal"])
    eventually(lambda: are_gone(before), what="the end of all ranks")


def test_status_and_why_name_the_host_of_a_lost_rank(daemon: Daemon) -> None:
    *_, follower = workers(daemon)
    with daemon.client() as client:
        before = row(client, "m")
        follower.kill()
        eventually(lambda: row(client, "m")["generation"] > before["generation"])
        assert row(client, "m")["last_exit"]["cause"] == "rank lost"
    assert [(one["rank"], one["state"]) for one in before["ranks"]] == [(0, "ready"), (1, "ready")]
    told = run_cli("why", "m", "--endpoint", daemon.endpoint)
    assert "was lost: rank 1 (127.0.0.1) was lost with SIGKILL" in " ".join(told.stdout.split())


def test_no_rank_outlives_a_killed_daemon() -> None:
    entry = fake(hosts=[{}, {}], fake={"step_s": 0.01})
    with Daemon({"m": entry}) as daemon:
        processes = workers(daemon)
        processes[-1].send_signal(signal.SIGSTOP)
        assert daemon.process is not None
        daemon.process.kill()
        eventually(lambda: are_gone(processes), what="the end of all ranks")


def test_unloading_ends_all_ranks(daemon: Daemon) -> None:
    processes = workers(daemon)
    with daemon.client() as client:
        client.unload("m")
        last_exit = row(client, "m")["last_exit"]
        assert (last_exit["reason"], last_exit["code"]) == ("asked", 0)
        eventually(lambda: are_gone(processes), what="the end of all ranks")
        client.load("m")


def test_an_answer_continues_without_a_host_that_is_gone_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ssh = FakeSsh(tmp_path)
    monkeypatch.setenv("PATH", ssh.path)
    hosts = [{"address": "127.0.0.1"}, {"address": "127.0.0.1", "ssh": "far"}]
    entry = fake(hosts=hosts, min_hosts=1, fake={"step_s": 0.01}, restart=PATIENT)
    with Daemon({"m": entry}) as daemon, daemon.client() as client:
        processes = workers(daemon)
        stream = Reader(client, "m", "on", max_tokens=LAST)
        eventually(lambda: len(stream.tokens) >= 3, what="tokens")
        ssh.cut_off("far")
        processes[-1].kill()
        assert stream.finished().token_ids == undisturbed("on", LAST)
        assert [psutil.Process(row(client, "m")["pid"])] == workers(daemon)
        (warning,) = row(client, "m")["warnings"]
        assert warning.startswith("rank 1 (far) is unreachable: ssh: connect to host far")
