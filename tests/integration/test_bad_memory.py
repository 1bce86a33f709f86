"""What can be wrong about memory is said, with what follows; a daemon serves on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from support.daemon import warm
from support.daemon.daemon import Daemon, row
from support.eventually import eventually

SMALL = {"engine": "fake", "memory": "300MiB", "preload": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class BadMemory:
    """A configuration, or a file in the runtime folder, that memory makes impossible.

    Attributes:
        name: what is wrong, for people.
        follows: what happens, for people.
        words: stand in what is said about it.
        supervisor: keys of `[supervisor]`.
        models: entries by name.
        arguments: the command that meets it.
        status: its exit code.
        measured: the content of `measured.json`; None: there is none.
    """

    name: str
    follows: str
    words: str
    arguments: tuple[str, ...]
    status: int
    supervisor: Mapping[str, Any] = field(default_factory=dict)
    models: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"a": SMALL})
    measured: bytes | None = None


BEFORE_START = (
    BadMemory(
        name="a memory budget larger than the machine",
        follows="exit code 78",
        words="supervisor.memory_budget takes at most what this machine has",
        supervisor={"memory_budget": "1000000GiB"},
        arguments=("config", "check"),
        status=78,
    ),
    BadMemory(
        name="pinned models that do not fit into the budget together",
        follows="exit code 78, also of `start`; a reload changes nothing",
        words="need 900.0 MiB together, and the memory budget is 700.0 MiB",
        supervisor={"memory_budget": "700MiB"},
        models={name: {**SMALL, "pinned": True} for name in "abc"},
        arguments=("config", "check"),
        status=78,
    ),
    BadMemory(
        name="`memory` below what the model needs for one short request",
        follows="exit code 78, also of `start`; FAILED if only the load shows it",
        words="its memory is 30.0 MiB, and it needs at least 64.0 MiB for its process: set memory",
        models={"a": {**SMALL, "memory": "30MiB"}},
        arguments=("config", "check"),
        status=78,
    ),
)
"""Found before a daemon serves."""

SERVED = (
    BadMemory(
        name="a model larger than the budget",
        follows="`insufficient_memory`; other models are served",
        words="big cannot be loaded: it needs 800.0 MiB, and the memory budget is 700.0 MiB",
        supervisor={"memory_budget": "700MiB"},
        models={"a": SMALL, "big": {**SMALL, "memory": "800MiB"}},
        arguments=("load", "big"),
        status=1,
    ),
    BadMemory(
        name="a damaged `measured.json`",
        follows="a line in the log; it is begun afresh",
        words="measured.json is not used (it is damaged): models are measured again",
        arguments=("load", "a"),
        status=0,
        measured=b'{"format": 1, "models": [{"path"',
    ),
)
"""Met by a daemon that serves."""

RELOADED = BadMemory(
    name="a reload that lowers the budget below what is in use",
    follows="idle models are evicted, busy ones go when their turn is over, or once they are idle",
    words="more is reserved than the new memory budget",
    models=dict.fromkeys("ab", SMALL),
    arguments=("reload",),
    status=0,
)
"""Met by a daemon that has two models loaded."""


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
