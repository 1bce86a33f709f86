"""Real faults in real workers, each followed by a SIGKILL of the daemon: `why` names each death."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from mlxsup.client import Client
from mlxsup.protocol.flight import MODELS_FILE_NAME

from support.cli import run_cli
from support.daemon import Daemon, fake, wait_for_state
from support.eventually import eventually
from support.faults import PATIENT
from support.streams import Reader

Act = Callable[[Client], object]


def asks(prompt: str) -> Act:
    """Somebody asks for an answer, and waits until the daemon is gone."""

    def ask(client: Client) -> object:
        wait_for_state(client, "m", "READY")
        return Reader(client, "m", prompt, max_tokens=50)

    return ask


def stops_it(client: Client) -> None:
    """Somebody stops the process, as a debugger does."""
    os.kill(wait_for_state(client, "m", "READY")["pid"], signal.SIGSTOP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that ends a worker.

    Attributes:
        death: what `why` calls it.
        entry: of the model.
        act: what somebody does.
        raised: what the worker's traceback ends with; empty: it writes none.
    """

    death: str
    entry: dict[str, Any] = field(default_factory=dict)
    act: Act = lambda client: None
    raised: str = ""


def load(**options: Any) -> dict[str, Any]:
    """An entry whose first load goes wrong."""
    return {"fake": {**options, "load_fault_generations": 1}}


FAULTS = {
    "a load that raises": Fault(
        death="load_error", entry=load(load_error="exception"), raised="raises this on demand"),
    "a load that stalls": Fault(
        death="load_stalled", entry=load(load_stall="sleep") | {"load_stall_timeout_s": 2.0}),
    "SIGSTOP": Fault(death="stopped_from_outside", act=stops_it),
    "a step that raises": Fault(
        death="step_error", act=asks("[[fault raise at=3 generation=1]]"),
        raised="FakeStepError"),
    "SIGSEGV": Fault(death="native_crash", act=asks("[[fault crash=SIGSEGV at=3 generation=1]]")),
    "out of memory": Fault(death="out_of_memory", entry=load(load_error="memory")),
    "a missing folder": Fault(death="model_missing", entry=load(load_error="missing")),
    "an endless template": Fault(
        death="stuck_prompt", entry={"step_timeout_s": 0.2}, act=asks("[[tokenize loop]]")),
}  # fmt: skip


def recorded(daemon: Daemon) -> str:
    path = daemon.logs / MODELS_FILE_NAME
    return path.read_text() if path.exists() else ""


@pytest.mark.parametrize("name", FAULTS)
def test_after_a_fault_and_a_sigkill_of_the_daemon_why_names_the_death(name: str) -> None:
    fault = FAULTS[name]
    with Daemon({"m": fake(restart=PATIENT, **fault.entry)}) as daemon:
        if fault.raised:
            daemon.provoke("Traceback", model="m", pattern=fault.raised, at_most=1)
        with daemon.client() as client:
            acted = fault.act(client)
            eventually(lambda: '"worker_died"' in recorded(daemon), what=f"the end by {name}")
            pid = client.status()["pid"]
            daemon.kill()
        del acted
        done = run_cli("why", "m", "--json", "--endpoint", daemon.endpoint)
        assert done.returncode == 0, done.stderr
        value = json.loads(done.stdout)
        assert (value["daemon"]["has_died"], value["daemon"]["pid"]) == (True, pid)
        [story] = value["stories"]
        deaths = [entry["death"] for entry in story["entries"] if "death" in entry]
        assert deaths
        assert set(deaths) == {fault.death}
        assert story["advice"]
