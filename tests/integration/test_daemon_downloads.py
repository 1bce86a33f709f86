"""Daemons with models that nobody has downloaded yet."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from mlxsup.client import Client, Notice, RequestError

from support.client.streams import Reader
from support.daemon.daemon import Daemon, fake, row, wait_for_state
from support.daemon.downloading_daemon import TOKEN, DownloadingDaemon
from support.daemon.downloads import (
    FILES,
    MIB,
    NEEDED,
    NEEDED_BYTES,
    REPO,
    WEIGHTS,
    WEIGHTS_NAME,
    contents,
    disk_full_at,
    runs_first,
    snapshot,
)
from support.daemon.local_hub import Fault, LocalHub, local_hub
from support.eventually import eventually
from support.models.tiny_model import make_tiny_model

HELD_AT = 2 * MIB


@pytest.fixture
def hub() -> Iterator[LocalHub]:
    with local_hub() as hub:
        hub.add(REPO, FILES)
        yield hub


@contextmanager
def serving(
    hub: LocalHub, variables: Mapping[str, str] | None = None, /, **models: dict[str, Any]
) -> Iterator[tuple[Daemon, Client]]:
    """A daemon that uses the hub and has these variables, and a client of it."""
    with DownloadingDaemon(hub, models, **(variables or {})) as daemon, daemon.client() as client:
        yield daemon, client
        assert TOKEN not in daemon.output + daemon.log_text()


def lacking(**more: Any) -> dict[str, Any]:
    return fake(repo=REPO, preload=False, **more)


def held(hub: LocalHub, daemon: Daemon, client: Client) -> None:
    """Waits until half of the weights has arrived, and the daemon has heard of it."""
    eventually(hub.held.is_set)
    eventually(lambda: (row(client, "m")["progress"] or {}).get("total_bytes") == NEEDED_BYTES)


def downloaders(daemon: Daemon) -> list[psutil.Process]:
    return [one for one in daemon.processes() if "mlxsup.downloader" in words_of(one)]


def words_of(process: psutil.Process) -> list[str]:
    """Its command line; empty once it has ended."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:  # of which a zombie is one
        return []


@pytest.mark.mlx
def test_a_request_for_a_model_that_is_nowhere_is_answered(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "m", seed=3)
    with local_hub() as hub:
        hub.add(REPO, contents(folder))
        with serving(hub, m={"repo": REPO, "preload": False}) as (daemon, client):
            result = client.complete("m", prompt="tell me", max_tokens=4, seed=1)
            assert result.usage.completion_tokens == 4
            assert row(client, "m")["generation"] == 1
            assert row(client, "m")["needed_bytes"] > 0
            assert snapshot(daemon.folder).is_dir()
            client.unload("m")
            shutil.rmtree(snapshot(daemon.folder).parents[1])  # as `mlxsup rm` does
            after = client.complete("m", prompt="tell me", max_tokens=4, seed=1)
            assert after.token_ids == result.token_ids
            assert hub.fetched(WEIGHTS_NAME) == [0, 0]
            assert row(client, "m")["restarts"] == 0


def test_a_download_is_pending_with_progress_and_notices(hub: LocalHub) -> None:
    hub.break_(WEIGHTS_NAME, Fault(hold_at=HELD_AT))
    notices: list[Notice] = []
    with serving(hub, m=lacking()) as (daemon, client):
        reader = Reader(client, "m", "p", max_tokens=3, on_notice=notices.append)
        held(hub, daemon, client)
        seen = row(client, "m")
        assert seen["state"] == "PENDING"
        assert seen["progress"]["phase"] == "download"
        said = daemon.run("status").stdout
        assert "PENDING" in said
        assert "download" in said
        foreseen = daemon.run("load", "m", "--dry-run")
        assert foreseen.stdout.startswith("m would be downloaded first: it lacks files"), foreseen
        hub.release.set()
        reader.join()
        assert len(reader.tokens) == 3
        assert contents(snapshot(daemon.folder)) == NEEDED
        assert downloaders(daemon) == []
    phases = [one.detail.get("phase") for one in notices if one.kind == "loading"]
    assert phases[0] == "download"
    assert "weights" in phases


def test_an_unload_ends_the_download_and_a_load_begins_it_again(hub: LocalHub) -> None:
    hub.break_(WEIGHTS_NAME, Fault(hold_at=HELD_AT))
    with serving(hub, m=lacking()) as (daemon, client):
        stream = client.generate("m", prompt="p", max_tokens=3)
        held(hub, daemon, client)
        client.unload("m")
        with pytest.raises(RequestError, match="unload"):
            list(stream)
        assert row(client, "m")["state"] == "STOPPED"
        eventually(lambda: downloaders(daemon) == [])
        hub.release.set()
        client.load("m")
        assert hub.fetched(WEIGHTS_NAME) == [0, 0]
        assert contents(snapshot(daemon.folder)) == NEEDED


def test_a_stop_ends_the_download(hub: LocalHub) -> None:
    hub.break_(WEIGHTS_NAME, Fault(hold_at=HELD_AT))
    with serving(hub, m=fake(repo=REPO)) as (daemon, client):
        held(hub, daemon, client)
        (process,) = downloaders(daemon)
        assert daemon.run("stop").returncode == 0
        assert not process.is_running()


def test_a_download_does_not_outlive_its_supervisor(hub: LocalHub) -> None:
    hub.break_(WEIGHTS_NAME, Fault(hold_at=HELD_AT))
    with DownloadingDaemon(hub, {"m": fake(repo=REPO)}) as daemon:
        with daemon.client() as client:
            held(hub, daemon, client)
        (process,) = downloaders(daemon)
        daemon.kill()
        eventually(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)


def test_a_killed_download_is_tried_again(hub: LocalHub) -> None:
    hub.break_(WEIGHTS_NAME, Fault(hold_at=HELD_AT))
    with serving(hub, m=fake(repo=REPO)) as (daemon, client):
        held(hub, daemon, client)
        hub.release.set()
        hub.heal()
        (process,) = downloaders(daemon)
        process.send_signal(signal.SIGKILL)
        wait_for_state(client, "m", "READY")
        assert row(client, "m")["restarts"] == 0
        assert contents(snapshot(daemon.folder)) == NEEDED


def test_a_disk_that_fills_up_fails_the_model_and_a_restart_continues(
    hub: LocalHub, tmp_path: Path
) -> None:
    full_at = len(WEIGHTS) * 9 // 10
    paths = runs_first(disk_full_at(full_at), tmp_path)
    with serving(hub, {"PYTHONPATH": paths}, m=fake(repo=REPO)) as (daemon, client):
        seen = wait_for_state(client, "m", "FAILED")
        assert f"the disk is full: {REPO} is not complete; free some space" in seen["cause"]
        assert "files that have arrived are kept" in seen["cause"]
        (tmp_path / "first" / "sitecustomize.py").write_text("")  # there is room again
        client.restart("m")
        assert row(client, "m")["state"] == "READY"
        assert contents(snapshot(daemon.folder)) == NEEDED


def test_a_gated_repository_fails_with_what_to_do(hub: LocalHub) -> None:
    gated = Fault(status=403, headers={"X-Error-Code": "GatedRepo"}, times=10)
    hub.break_("revision/main", gated)
    with serving(hub, m=lacking()) as (daemon, client):
        with pytest.raises(RequestError) as raised:
            client.complete("m", prompt="p")
        assert raised.value.code == "load_failed"
        assert f"accept its terms at {hub.endpoint}/{REPO}" in raised.value.message
        assert row(client, "m")["state"] == "FAILED"
        said = daemon.run("load", "m")
        assert said.returncode == 1
        assert "is gated" in said.stderr
        hub.heal()
        client.restart("m")
        assert row(client, "m")["state"] == "READY"


def test_a_network_that_is_away_is_waited_for_and_costs_no_restart(hub: LocalHub) -> None:
    away = Fault(status=503, times=4)
    hub.break_("revision/main", away)
    limits = {"max_restarts": 1, "backoff_initial_s": 0.1, "backoff_max_s": 0.2}
    with serving(hub, m=lacking(restart=limits)) as (_, client):
        assert client.complete("m", prompt="p", max_tokens=3).usage.completion_tokens == 3
        assert away.times == 0
        assert row(client, "m")["restarts"] == 0
