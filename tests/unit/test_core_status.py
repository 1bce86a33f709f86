"""What `status --json` and watchers are shown: every key, in each kind of state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.states import Batching, FinishReason, LoadPhase, State, WorkerPhase
from mlxsup.protocol.version import VERSION
from mlxsup.protocol.worker_messages import Heartbeat, LoadProgress, Ready
from mlxsup.supervisor.core.events import Appraised, Sampled
from mlxsup.supervisor.core.requests.ledger import Ledger
from mlxsup.supervisor.core.settings import CoreSettings
from mlxsup.supervisor.core.sharing.accounts import Terms
from mlxsup.supervisor.core.status import Daemon, status_map

from support.core_driver import LAUNCH, Driver, entry
from support.core_looks import BOB
from support.core_states import in_state
from support.needs import need

NO_BUDGET = {
    "budget_bytes": None,
    "effective_budget_bytes": None,
    "shortage": "",
    "over_bytes": 0,
}
NEVER_STARTED: dict[str, Any] = {
    "name": "m",
    "aliases": [],
    "presets": {},
    "repo": None,
    "revision": None,
    "folder": "/m",
    "state": "STOPPED",
    "wanted": "down",
    "why": "user",
    "since_s": None,
    "generation": 0,
    "pid": None,
    "restarts": 0,
    "last_exit": None,
    "exits": [],
    "cause": None,
    "retry_in_s": None,
    "progress": None,
    "queued": 0,
    "queued_per_class": {"interactive": 0, "normal": 0, "batch": 0},
    "line": [],
    "running": [],
    "rows": [],
    "paused": [],
    "yielded": [],
    "paused_rows": [],
    "alone": None,
    "row_limit": 2,
    "suspects": 0,
    "on_probation": 0,
    "quarantined": 0,
    "tokens_per_s": 0.0,
    "steps": 0,
    "engine_s": 0.0,
    "repeated_s": 0.0,
    "share": None,
    "pinned": False,
    "needed_bytes": 0,
    "raised_bytes": 0,
    "reserved_bytes": 0,
    "row_budget_bytes": None,
    "memory_wait": None,
    "footprint_bytes": 0,
    "phase": None,
    "phase_s": None,
    "held_by_worker": 0,
    "active_bytes": 0,
    "cache_bytes": 0,
    "peak_bytes": 0,
    "kept_bytes": 0,
    "prefix_bytes": 0,
    "prefill_chunk": None,
    "decode_stall_target_ms": 250,
    "backend": None,
    "context_length": None,
    "batching": None,
    "warnings": [],
    "loaded_for_s": None,
    "load_phases_s": None,
}


def differences(row: dict[str, Any], than: dict[str, Any]) -> dict[str, Any]:
    """What a row has otherwise; both have the same keys."""
    assert row.keys() == than.keys()
    return {key: value for key, value in row.items() if value != than[key]}


def test_a_model_that_was_never_started() -> None:
    driver = Driver()
    driver.now += 5.0
    assert driver.row() == NEVER_STARTED


def test_a_model_that_is_not_loaded_has_the_context_of_its_files() -> None:
    driver = Driver()
    known = {ModelName("m"): need(context=2048)}
    driver.do(Appraised(now=driver.now, needs=known))
    assert driver.row()["context_length"] == 2048
    driver.load()
    driver.come_up()
    assert driver.row()["context_length"] == 100, "as its worker says"
    driver.do(Appraised(now=driver.now, needs={}))
    assert driver.row()["context_length"] == 100


def test_the_memory_of_the_machine_is_nothing_until_it_was_measured() -> None:
    memory = Driver().core.status(1000.0)["memory"]
    assert memory == {**NO_BUDGET, "reserved_bytes": 0, "machine_bytes": 0}
    driver = in_state(State.READY)
    driver.model().life.footprint_bytes = 10**9
    assert not driver.model().is_over_memory


def shown(id: str, number: int, waited_s: float = 0.0) -> dict[str, Any]:
    """A request of ALICE in the line or in the batch."""
    return {
        "id": id,
        "number": f"#{number}",
        "client": "connection 616c696365",
        "priority": "normal",
        "class": "normal",
        "waited_s": waited_s,
        "paused": None,
        "resumed": 0,
        "prompt_tokens": None,
        "read_tokens": 0,
        "tokens_sent": 0,
    }


def test_a_daemon_that_has_not_begun_counts_from_the_beginning_of_its_clock() -> None:
    status = status_map(
        [], Ledger(Terms(CoreSettings())), Daemon(facts={}), None, 5.0, spares={"workers": []}
    )
    assert status["uptime_s"] == 5.0


def test_the_whole_status_of_a_daemon() -> None:
    driver = Driver([entry("a"), entry("b")])
    for pid, name in enumerate("ab", start=5):
        driver.load(name)
        driver.come_up(name, pid)
    driver.ask("r1", "a")
    driver.ask("r2", "a", BOB, "process 7@1")
    driver.ask("r3", "a", BOB, "process 7@1")
    driver.now += 12.0
    driver.do(Sampled(now=driver.now, footprint_bytes={5: 300, 6: 40}, machine_bytes=9000))
    status = driver.core.status(driver.now)
    rows = status.pop("models")
    assert [(row["name"], row["footprint_bytes"]) for row in rows] == [("a", 300), ("b", 40)]
    assert status == {
        "schema_version": 1,
        "pid": 1,
        "version": VERSION,
        "uptime_s": 12.0,
        "memory": {**NO_BUDGET, "reserved_bytes": 340, "machine_bytes": 9000},
        "gateway": None,
        "spares": {"wanted": 0, "retry_in_s": None, "workers": []},
        "queue": {
            "waiting": 1,
            "per_client": {"process 7@1": 1},
            "per_class": {"interactive": 0, "normal": 1, "batch": 0},
            "clients": {
                "connection 616c696365": {"waiting": 0, "running": 1, "weight": 1.0},
                "process 7@1": {"waiting": 1, "running": 1, "weight": 1.0},
            },
        },
    }


def test_a_ready_model_shows_what_its_worker_says_of_itself() -> None:
    driver = Driver([entry(launch=replace(LAUNCH, decode_stall_target_ms=99))])
    driver.load()
    driver.now += 1.0
    driver.spawned()
    driver.hello()
    ready = Ready(
        context_length=2048, fingerprint="f", backend="gpu",
        batching=Batching.SERIAL_PREFILL, batching_reason="why", warnings=["careful"],
    )  # fmt: skip
    driver.worker(ready)
    for id in ("r1", "r2", "r3"):
        driver.ask(id)
    driver.worker(
        Heartbeat(
            step=0, phase=WorkerPhase.PREFILL, phase_s=0.5, requests=2, active_bytes=10,
            cache_bytes=20, peak_bytes=30, prefill_chunk=64,
        )
    )  # fmt: skip
    driver.sample(1234)
    driver.token(1)
    driver.now += 2.5
    assert differences(driver.row(), NEVER_STARTED) == {
        "state": "READY",
        "wanted": "up",
        "since_s": 2.5,
        "generation": 1,
        "pid": 77,
        "queued": 1,
        "queued_per_class": {"interactive": 0, "normal": 1, "batch": 0},
        "line": [shown("r3", 3, 2.5)],
        "running": ["r1", "r2"],
        "rows": [shown("r1", 1) | {"tokens_sent": 1}, shown("r2", 2)],
        "steps": 1,
        "reserved_bytes": 1234,
        "footprint_bytes": 1234,
        "phase": "prefill",
        "phase_s": 0.5,
        "held_by_worker": 2,
        "active_bytes": 10,
        "cache_bytes": 20,
        "peak_bytes": 30,
        "prefill_chunk": 64,
        "decode_stall_target_ms": 99,
        "backend": "gpu",
        "context_length": 2048,
        "batching": {"mode": "serial_prefill", "reason": "why"},
        "warnings": ["careful"],
        "loaded_for_s": 2.5,
        "load_phases_s": {"spawn": 1.0, "import": 0.0},
    }


def test_a_load_shows_how_far_it_is_and_one_that_waits_what_for() -> None:
    driver = Driver([entry("z"), entry()])
    driver.load("z")
    driver.load()
    driver.now += 3.0
    assert differences(driver.row(), NEVER_STARTED) == {
        "state": "PENDING",
        "wanted": "up",
        "since_s": 3.0,
        "progress": {"phase": "waiting for turn", "fraction": 0.0},
    }
    driver.come_up("z", 5)
    driver.spawned()
    driver.hello()
    driver.worker(LoadProgress(phase=LoadPhase.WEIGHTS, progress=0.25))
    driver.now += 4.0
    assert differences(driver.row(), NEVER_STARTED) == {
        "state": "LOADING",
        "wanted": "up",
        "since_s": 4.0,
        "generation": 1,
        "pid": 77,
        "progress": {"phase": "weights", "fraction": 0.25},
        "load_phases_s": {"spawn": 0.0, "import": 0.0, "weights": 4.0},
    }


def test_a_model_that_crashed_shows_how_and_when_it_is_started_again() -> None:
    driver = in_state(State.READY)
    driver.exit(signal="SIGSEGV", last_lines=("boom",), at=11.0)
    driver.come_up()
    driver.exit(code=70, last_lines=("bang",), at=12.0)
    retry_in_s = driver.row()["retry_in_s"]
    driver.now += 0.25
    row = driver.row()
    assert row["retry_in_s"] == pytest.approx(retry_in_s - 0.25)
    driver.now += 60.0
    assert differences(driver.row(), NEVER_STARTED) == {
        "state": "BACKOFF",
        "wanted": "up",
        "since_s": 60.25,
        "generation": 2,
        "restarts": 1,
        "last_exit": {
            "reason": "crash",
            "code": 70,
            "signal": None,
            "detail": "bang",
            "at": 12.0,
            "cause": "unknown",
        },
        "exits": [{"reason": "crash", "cause": "unknown", "count": 2}],
        "retry_in_s": 0.0,
        "queued": 1,
        "queued_per_class": {"interactive": 1, "normal": 0, "batch": 0},
        "line": [shown("r1", 1, 60.25) | {"class": "interactive", "prompt_tokens": 3}],
        "load_phases_s": {"spawn": 0.0, "import": 0.0},
        "suspects": 1,
        "on_probation": 1,
    }


def test_a_failed_and_a_stopped_model_show_why_and_since_when() -> None:
    driver = in_state(State.LOADING)
    driver.exit(code=66, last_lines=("no such folder",), at=3.0)
    driver.now += 1.0
    last_exit = {
        "reason": "load_error",
        "code": 66,
        "signal": None,
        "detail": "no such folder",
        "at": 3.0,
        "cause": "model missing",
    }
    assert differences(driver.row(), NEVER_STARTED) == {
        "state": "FAILED",
        "wanted": "up",
        "since_s": 1.0,
        "generation": 1,
        "last_exit": last_exit,
        "load_phases_s": {"spawn": 0.0, "import": 0.0},
        "exits": [{"reason": "load_error", "cause": "model missing", "count": 1}],
        "cause": "exit code 66, model missing: no such folder",
    }
    driver.unload()
    driver.now += 2.0
    assert differences(driver.row(), NEVER_STARTED) == {
        "since_s": 2.0,
        "exits": [{"reason": "load_error", "cause": "model missing", "count": 1}],
        "generation": 1,
        "last_exit": last_exit,
        "load_phases_s": {"spawn": 0.0, "import": 0.0},
    }


def test_the_rate_is_that_of_the_last_seconds() -> None:
    driver = in_state(State.READY)
    start = driver.now
    for second, count in enumerate([0, 10, 10, 10, 4, 4, 4, 4]):
        driver.now = start + second
        for _ in range(count):
            driver.token(1)
        driver.sample(0)
        expected = {0: 0.0, 1: 10.0, 2: 10.0, 4: 34 / 4, 5: 38 / 5, 6: 32 / 5, 7: 26 / 5}
        if second in expected:
            assert driver.row()["tokens_per_s"] == expected[second], second
    driver.now = start + 11.0
    assert driver.row()["tokens_per_s"] == 4.0, "of two samples that are left"
    driver.now = start + 12.5
    assert driver.row()["tokens_per_s"] == 0.0, "of one, nothing is known"


def test_two_samples_of_one_moment_tell_no_rate() -> None:
    driver = in_state(State.READY)
    driver.sample(0)
    driver.token(1)
    driver.sample(0)
    assert driver.row()["tokens_per_s"] == 0.0


def test_what_models_have_computed_is_shown_as_shares_of_all() -> None:
    driver = Driver([entry("a"), entry("b"), entry("c")])
    for pid, name in enumerate("ab", start=5):
        driver.load(name)
        driver.come_up(name, pid)
        [key] = driver.serve(f"r{name}", model=name)
        driver.accept(key, name)
    for seconds in (1.0, 2.0):
        driver.compute(seconds, 1, model="a")
    driver.token(1, model="a", finish=FinishReason.STOP)
    driver.compute(1.0, 2, model="b")
    rows = driver.core.status(driver.now)["models"]
    total_s = sum(row["engine_s"] for row in rows)
    assert [row["share"] for row in rows] == [row["engine_s"] / total_s for row in rows]
    assert 0.0 == rows[2]["share"] < rows[1]["share"] < rows[0]["share"] < 1.0
