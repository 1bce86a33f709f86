"""The page's requests to a real daemon: crashes that nobody looked at, logs, and the buttons."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from typing import Any
from urllib.request import urlopen

import pytest

from mlxsup.client import Client
from mlxsup.gateway.operator import TOKEN_HEADER

from support.daemon import fake, row, wait_for_state
from support.eventually import eventually
from support.http_daemon import HttpDaemon

SLOW_LOAD_S = 3.0


class PageDaemon(HttpDaemon):
    """One whose page is asked."""

    def token(self) -> str:
        """Of its page."""
        with urlopen(f"{self.url}/", timeout=60) as response:
            text = response.read().decode()
        (token,) = re.findall(r'<meta name="mlxsup-token" content="([^"]+)">', text)
        return str(token)

    def state(self) -> dict[str, Any]:
        """What the page asks for each second."""
        status, value = self.ask("GET", "/page/state", headers={TOKEN_HEADER: self.token()})
        assert status == 200
        return value

    def act(self, action: str, model: str) -> tuple[int, dict[str, Any]]:
        """Presses a button."""
        body = json.dumps({"model": model}).encode()
        return self.ask("POST", f"/models/{action}", body, headers={TOKEN_HEADER: self.token()})


@pytest.fixture
def daemon() -> Iterator[PageDaemon]:
    models = {
        "m": fake(),
        "slow": fake(preload=False, fake={"load_s": SLOW_LOAD_S}),
        "bad": fake(preload=False, fake={"load_error": "missing"}),
    }
    with PageDaemon(models) as running:
        with running.client() as client:
            client.load("m")
        yield running


def kill(client: Client, model: str) -> None:
    """Kills a worker, and returns once its process is no longer the model's."""
    pid = row(client, model)["pid"]
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: row(client, model)["pid"] != pid)


def test_crashes_that_happen_while_nobody_looks_are_listed_with_their_lines(
    daemon: PageDaemon,
) -> None:
    with daemon.client() as client:
        for generation in (1, 2):
            seen = wait_for_state(client, "m", "READY")
            assert seen["generation"] == generation
            kill(client, "m")
        wait_for_state(client, "m", "READY")
    crashes = daemon.state()["crashes"]
    assert [(one["model"], one["generation"], one["signal"]) for one in crashes] == [
        ("m", 2, "SIGKILL"), ("m", 1, "SIGKILL"),
    ]  # fmt: skip
    token = {TOKEN_HEADER: daemon.token()}
    for generation in (1, 2):
        _, value = daemon.ask("GET", f"/page/log?model=m&generation={generation}", headers=token)
        assert f"worker started model=m generation={generation}" in value["lines"][0]
    for query in ("model=../mlxsup&generation=1", "model=m&generation=x", "model=m", ""):
        assert daemon.ask("GET", f"/page/log?{query}", headers=token)[0] == 400


def test_the_buttons_load_unload_and_restart_and_do_not_wait(daemon: PageDaemon) -> None:
    with daemon.client() as client:
        assert daemon.act("load", "slow") == (200, {"success": True, "model": "slow"})
        assert row(client, "slow")["state"] != "READY", "the answer does not wait for the load"
        wait_for_state(client, "slow", "READY")
        assert daemon.act("restart", "m")[0] == 200
        eventually(lambda: row(client, "m")["generation"] == 2)
        wait_for_state(client, "m", "READY")
        assert daemon.act("unload", "m")[0] == 200
        wait_for_state(client, "m", "STOPPED")


def test_a_refused_action_says_why(daemon: PageDaemon) -> None:
    status, value = daemon.act("load", "nothing")
    assert (status, value["error"]["code"]) == (404, "model_not_found")
    status, value = daemon.ask("POST", "/models/unload", b'{"model": "m"}')
    assert (status, value["error"]["code"]) == (403, "operator_only")
    with daemon.client() as client:
        assert row(client, "m")["state"] == "READY"


def test_a_load_that_fails_later_is_in_the_state(daemon: PageDaemon) -> None:
    assert daemon.act("load", "bad")[0] == 200

    def failed() -> list[dict[str, Any]]:
        return [one for one in daemon.state()["crashes"] if one["model"] == "bad"]

    (crash,) = eventually(failed)
    assert crash["reason"] == "load_error"
