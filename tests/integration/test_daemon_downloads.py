"""Daemons with models that have to be downloaded first, from a hub on this machine."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from mlxsup.client import Client, Notice, RequestError

from support.client.streams import Reader
from support.daemon.daemon import Daemon, fake, row
from support.daemon.downloads import (
    FILES,
    HELD_AT,
    NEEDED,
    NEEDED_BYTES,
    REPO,
    TOKEN,
    WEIGHTS_NAME,
    DownloadingDaemon,
    contents,
    repo_folder,
    snapshot,
)
from support.daemon.local_hub import Fault, LocalHub, local_hub
from support.eventually import eventually
from support.models.tiny_model import make_tiny_model

OTHER = "org/other"


@pytest.fixture
def hub() -> Iterator[LocalHub]:
    with local_hub() as hub:
        hub.add(REPO, FILES)
        hub.add(OTHER, FILES)
        hub.break_(WEIGHTS_NAME, Fault(hold_at=HELD_AT))
        yield hub


@contextmanager
def serving(hub: LocalHub, **models: dict[str, Any]) -> Iterator[tuple[Daemon, Client]]:
    with DownloadingDaemon(hub, models) as daemon, daemon.client() as client:
        yield daemon, client
        assert TOKEN not in daemon.output + daemon.log_text()


def lacking(repo: str = REPO, **more: Any) -> dict[str, Any]:
    return fake(repo=repo, preload=False, **more)


def held(hub: LocalHub, client: Client, model: str = "m") -> None:
    """Waits until half of the weights has arrived, and the daemon has heard of it."""
    eventually(hub.held.is_set)
    eventually(lambda: (row(client, model)["progress"] or {}).get("total_bytes") == NEEDED_BYTES)


def hold_again(hub: LocalHub) -> None:
    hub.held.clear()
    hub.release.clear()
    hub.break_(WEIGHTS_NAME, Fault(hold_at=HELD_AT))


def downloaders(daemon: Daemon) -> list[psutil.Process]:
    return [one for one in daemon.processes() if "mlxsup.downloader" in words_of(one)]


def words_of(process: psutil.Process) -> list[str]:
    """Its command line; empty once it has ended."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:  # of which a zombie is one
        return []


@pytest.mark.mlx
def test_request_for_a_model_that_is_nowhere_is_answered(tmp_path: Path) -> None:
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
            shutil.rmtree(repo_folder(daemon.folder))  # as `mlxsup rm` does
            after = client.complete("m", prompt="tell me", max_tokens=4, seed=1)
            assert after.token_ids == result.token_ids
            assert hub.fetched(WEIGHTS_NAME) == [0, 0]
            assert row(client, "m")["restarts"] == 0


def test_download_is_pending_until_unload_kill_or_stop(hub: LocalHub) -> None:
    notices: list[Notice] = []
    with serving(hub, m=lacking(), n=lacking(OTHER)) as (daemon, client):
        # It shows its progress, and an unload ends it and what waits for it.
        stream = client.generate("m", prompt="p", max_tokens=3)
        held(hub, client)
        seen = row(client, "m")
        assert (seen["state"], seen["progress"]["phase"]) == ("PENDING", "download")
        said = daemon.run("status").stdout
        assert "PENDING" in said
        assert "download" in said
        foreseen = daemon.run("load", "m", "--dry-run")
        assert foreseen.stdout.startswith("m would be downloaded first: it has missing files"), (
            foreseen
        )
        client.unload("m")
        with pytest.raises(RequestError, match="unload"):
            list(stream)
        assert row(client, "m")["state"] == "STOPPED"
        eventually(lambda: downloaders(daemon) == [])

        # A killed one is tried again, which costs no restart.
        hub.release.set()
        hold_again(hub)
        reader = Reader(client, "m", "p", max_tokens=3, on_notice=notices.append)
        held(hub, client)
        (process,) = downloaders(daemon)
        process.send_signal(signal.SIGKILL)
        reader.join()
        assert len(reader.tokens) == 3
        assert row(client, "m")["restarts"] == 0
        assert contents(snapshot(daemon.folder)) == NEEDED
        assert downloaders(daemon) == []
        phases = [one.detail.get("phase") for one in notices if one.kind == "loading"]
        assert phases[0] == "download"
        assert "weights" in phases

        # A stop ends it.
        hold_again(hub)
        client.generate("n", prompt="p", max_tokens=3)
        held(hub, client, "n")
        (process,) = downloaders(daemon)
        assert daemon.run("stop").returncode == 0
        assert not process.is_running()


def test_download_does_not_outlive_its_supervisor(hub: LocalHub) -> None:
    with DownloadingDaemon(hub, {"m": fake(repo=REPO)}) as daemon:
        with daemon.client() as client:
            held(hub, client)
        (process,) = downloaders(daemon)
        daemon.kill()
        eventually(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)


def test_outage_is_waited_for_and_a_refusal_fails_the_model(hub: LocalHub) -> None:
    hub.heal()
    away = Fault(status=503, times=2)
    hub.break_(f"{REPO}/revision/main", away)
    gated = Fault(status=403, headers={"X-Error-Code": "GatedRepo"}, times=10)
    hub.break_(f"{OTHER}/revision/main", gated)
    limits = {"max_restarts": 1, "backoff_initial_s": 0.1, "backoff_max_s": 0.2}
    with serving(hub, m=lacking(restart=limits), n=lacking(OTHER)) as (daemon, client):
        assert client.complete("m", prompt="p", max_tokens=3).usage.completion_tokens == 3
        assert away.times == 0
        assert row(client, "m")["restarts"] == 0

        with pytest.raises(RequestError) as raised:
            client.complete("n", prompt="p")
        assert raised.value.code == "load_failed"
        assert f"accept its terms at {hub.endpoint}/{OTHER}" in raised.value.message
        assert row(client, "n")["state"] == "FAILED"
        said = daemon.run("load", "n")
        assert (said.returncode, "is gated" in said.stderr) == (1, True)
        hub.heal()
        client.restart("n")
        assert row(client, "n")["state"] == "READY"
