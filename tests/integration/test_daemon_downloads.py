"""Real daemons whose models come from a hub of the test, by real downloaders."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

from mlxsup.client import Client, Notice, RequestError

from support.client.streams import Reader
from support.daemon.daemon import Daemon, fake, is_alive, row
from support.daemon.downloading_daemon import TOKEN, DownloadingDaemon
from support.daemon.downloads import (
    FILES,
    MIB,
    NEEDED,
    NEEDED_BYTES,
    REPO,
    WEIGHTS_NAME,
    contents,
    snapshot,
)
from support.daemon.local_hub import Fault, LocalHub, local_hub
from support.eventually import eventually

PROXY = "http://u:pw-secret@proxy.example"


@pytest.fixture
def hub() -> Iterator[LocalHub]:
    """A hub that holds the weights back at half until it is released."""
    with local_hub() as hub:
        hub.add(REPO, FILES)
        hub.break_(WEIGHTS_NAME, Fault(hold_at=2 * MIB, times=2))
        yield hub


@contextmanager
def serving(hub: LocalHub, **options: Any) -> Iterator[tuple[Daemon, Client]]:
    """A daemon with the hub's model, which is not there, and a client of it."""
    models = {"m": fake(repo=REPO, preload=False, **options)}
    daemon = DownloadingDaemon(hub, models, https_proxy=PROXY)
    with daemon, daemon.client() as client:
        yield daemon, client
        said = daemon.output + daemon.log_text()
        assert (TOKEN in said, PROXY in said) == (False, False)


def held(hub: LocalHub, daemon: Daemon, client: Client) -> psutil.Process:
    """The downloader, once half of the weights has arrived and the daemon has heard of it."""
    eventually(hub.held.is_set)
    eventually(lambda: (row(client, "m")["progress"] or {}).get("total_bytes") == NEEDED_BYTES)
    (process,) = downloaders(daemon)
    return process


def downloaders(daemon: Daemon) -> list[psutil.Process]:
    return [one for one in daemon.processes() if "mlxsup.downloader" in words_of(one)]


def words_of(process: psutil.Process) -> list[str]:
    """Its command line; empty once it has ended."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:  # of which a zombie is one
        return []


def test_a_request_downloads_its_model_and_an_unload_ends_that(hub: LocalHub) -> None:
    notices: list[Notice] = []
    with serving(hub) as (daemon, client):
        waits = Reader(client, "m", "p", max_tokens=3)
        process = held(hub, daemon, client)
        secrets = {"HF_TOKEN": TOKEN, "https_proxy": PROXY}
        assert process.environ().items() >= secrets.items(), "a download needs them"
        seen = row(client, "m")
        assert (seen["state"], seen["progress"]["phase"]) == ("PENDING", "download")
        assert "download" in daemon.run("status").stdout
        foreseen = daemon.run("load", "m", "--dry-run").stdout
        assert foreseen.startswith("m would be downloaded first: it lacks files"), foreseen
        client.unload("m")
        assert waits.failed().code == "unloaded"
        assert row(client, "m")["state"] == "STOPPED"
        eventually(lambda: not is_alive(process))

        hub.release.set()
        answer = client.complete("m", prompt="p", max_tokens=3, on_notice=notices.append)
        assert len(answer.token_ids) == 3
        assert contents(snapshot(daemon.folder)) == NEEDED
        assert downloaders(daemon) == []

        assert hub.fetched(WEIGHTS_NAME) == [0, 0]
        assert row(client, "m")["restarts"] == 0
    phases = [one.detail.get("phase") for one in notices if one.kind == "loading"]
    assert phases[0] == "download"
    assert "weights" in phases


def test_a_gate_is_named_and_outages_and_deaths_are_tried_again(hub: LocalHub) -> None:
    gated = Fault(status=403, headers={"X-Error-Code": "GatedRepo"}, times=10)
    hub.break_("revision/main", gated)
    limits = {"max_restarts": 1, "backoff_initial_s": 0.1, "backoff_max_s": 0.2}
    with serving(hub, restart=limits) as (daemon, client):
        with pytest.raises(RequestError) as raised:
            client.complete("m", prompt="p")
        assert raised.value.code == "load_failed"
        assert f"accept its terms at {hub.endpoint}/{REPO}" in raised.value.message
        assert row(client, "m")["state"] == "FAILED"
        said = daemon.run("load", "m")
        assert (said.returncode, "is gated" in said.stderr) == (1, True)

        away = Fault(status=503, times=2)
        hub.break_("revision/main", away)
        with pytest.raises(RequestError, match="it waits for the network"):
            client.restart("m")
        waits = Reader(client, "m", "p", max_tokens=3)
        process = held(hub, daemon, client)
        hub.release.set()
        process.send_signal(signal.SIGKILL)
        assert len(waits.finished().token_ids) == 3
        seen = row(client, "m")
        assert (seen["state"], seen["restarts"], away.times) == ("READY", 0, 0)
        assert contents(snapshot(daemon.folder)) == NEEDED


def test_a_download_ends_with_its_daemon_killed_or_stopped(hub: LocalHub) -> None:
    with DownloadingDaemon(hub, {"m": fake(repo=REPO)}) as daemon:
        with daemon.client() as client:
            process = held(hub, daemon, client)
        daemon.kill()
        eventually(lambda: not is_alive(process))
        hub.held.clear()
        daemon.start()
        with daemon.client() as client:
            process = held(hub, daemon, client)
        assert daemon.run("stop").returncode == 0
        assert not is_alive(process)
