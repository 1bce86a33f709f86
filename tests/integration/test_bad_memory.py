"""What can be wrong about memory is said, with what follows; a daemon serves on."""

from __future__ import annotations

from typing import Any

import pytest

from support import warm
from support.bad_memory import BEFORE_START, RELOADED, SERVED, SMALL, BadMemory
from support.daemon import Daemon, row
from support.eventually import eventually


def daemon_of(case: BadMemory) -> Daemon:
    models: dict[str, dict[str, Any]] = {name: dict(one) for name, one in case.models.items()}
    return Daemon(models, dict(case.supervisor))


@pytest.mark.parametrize("case", BEFORE_START, ids=lambda case: case.name)
def test_a_configuration_that_cannot_be_used_is_refused(case: BadMemory) -> None:
    daemon = daemon_of(case)
    command = Daemon.command(*case.arguments, str(daemon.config))
    said = warm.run_text(command, timeout_s=60)
    assert (said.returncode, said.stdout) == (case.status, f"checking {daemon.config}\n")
    assert case.words in said.stderr


@pytest.mark.parametrize("case", SERVED, ids=lambda case: case.name)
def test_a_daemon_says_it_and_serves_its_other_models(case: BadMemory) -> None:
    daemon = daemon_of(case)
    if case.measured is not None:
        folder = daemon.folder / "run"
        folder.mkdir(mode=0o700)
        (folder / "measured.json").write_bytes(case.measured)
    with daemon:
        said = daemon.run(*case.arguments)
        assert said.returncode == case.status
        assert case.words in said.stderr + daemon.log_text()
        with daemon.client() as client:
            assert client.complete("a", prompt="hi", max_tokens=2).finish_reason == "length"


def test_a_reload_that_lowers_the_budget_drains_down_to_it_and_says_so() -> None:
    case = RELOADED
    models: dict[str, dict[str, Any]] = {name: dict(SMALL) for name in case.models}
    models["b"]["fake"] = {"step_s": 0.05}
    with Daemon(models, {"memory_budget": "700MiB"}) as daemon, daemon.client() as client:
        for name in models:
            client.load(name)
        for budget, over, left in (("400MiB", "200.0 MiB", "STOPPED"), ("200MiB", "100.0 MiB", "")):
            stream = client.generate("b", prompt="go on", max_tokens=4000)
            next(stream)
            daemon.write_config(models, {"memory_budget": budget})
            said = daemon.run(*case.arguments)
            assert said.returncode == case.status
            assert f"{over} {case.words}" in said.stderr
            if left:
                eventually(lambda: row(client, "a")["state"] == "STOPPED")
            assert row(client, "b")["state"] == "READY", "it is busy"
            stream.cancel()
        eventually(lambda: row(client, "b")["state"] == "STOPPED")
        assert client.status()["memory"]["over_bytes"] == 0
