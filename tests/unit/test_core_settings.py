"""Defaults, limits and words that others rely on: a change of one of them is a decision."""

from __future__ import annotations

from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.launch import LaunchSettings
from mlxsup.protocol.parameters import sampling_defaults
from mlxsup.protocol.states import Priority, State
from mlxsup.supervisor.core import model, worker_events
from mlxsup.supervisor.core.actions import WorkerSignal
from mlxsup.supervisor.core.health import blame, watchdog
from mlxsup.supervisor.core.health.death_cause import Cause
from mlxsup.supervisor.core.lifecycle import life
from mlxsup.supervisor.core.requests import ledger
from mlxsup.supervisor.core.settings import (
    ClientSettings,
    CoreSettings,
    ModelSettings,
    RestartSettings,
)
from mlxsup.supervisor.core.sharing import counters

from support.core_states import in_state


def test_an_entry_that_names_only_a_path_has_these_settings() -> None:
    launch = LaunchSettings(path="/m")
    assert launch == LaunchSettings(
        path="/m",
        engine="mlx",
        max_concurrency=8,
        step_timeout_s=30.0,
        decode_stall_target_ms=250,
        context_length=0,
        deterministic=False,
        memory_limit_bytes=None,
        cache_limit_bytes=None,
        wired_limit_bytes=0,
        prefix_cache_bytes=None,
        sampling=sampling_defaults(),
        fake={},
    )
    assert ModelSettings(name=ModelName("m"), launch=launch) == ModelSettings(
        name=ModelName("m"),
        launch=launch,
        preload=True,
        pinned=False,
        idle_unload_s=0.0,
        load_stall_timeout_s=120.0,
        restart=RestartSettings(),
    )


def test_the_limits_that_no_entry_sets() -> None:
    assert (life.KILL_LIMIT_S, life.KILL_LIMIT_S_PER_GB, life.DUMP_GRACE_S) == (10.0, 0.5, 0.5)
    assert (model.MACHINE_SHARE, life.STORY_LENGTH, model.RATE_WINDOW_S) == (0.9, 200, 5.0)
    assert model.SHORTEST_FREE_S == 0.1
    assert (counters.COST_WEIGHT, counters.UNKNOWN_COST_S) == (0.2, 1.0)
    assert counters.MAX_ACCOUNTS == 4096
    assert (CoreSettings().aging_s, CoreSettings().min_run_s) == (60.0, 2.0)
    assert ClientSettings() == ClientSettings(
        weight=1.0,
        priority=Priority.NORMAL,
        max_priority=Priority.INTERACTIVE,
        max_queue=0,
        max_running=0,
    )
    assert (blame.MAX_SUSPECTS, blame.MAX_QUARANTINED, blame.MAX_PLACES) == (
        4096, 4096, 8,
    )  # fmt: skip
    assert ledger.MAX_DEATHS_WITHOUT_PROGRESS == 3
    assert worker_events.MAX_LAST_WORDS == 200
    assert watchdog.SILENCE_S == 2.5


def test_the_signals_and_the_causes_have_the_names_that_people_know() -> None:
    assert [signal.value for signal in WorkerSignal] == ["SIGUSR1", "SIGTERM", "SIGKILL"]
    assert [cause.value for cause in Cause] == [
        "out of memory",
        "GPU time-out",
        "GPU fault of another process",
        "no usable device",
        "model missing",
        "bad model",
        "stream error",
        "unknown",
    ]


def test_a_rate_is_that_of_the_latest_sixteen_samples() -> None:
    driver = in_state(State.READY)
    start = driver.now
    for number in range(20):
        driver.now = start + number / 8
        if number > 4:
            driver.token(1)
        driver.sample(0)
    assert driver.row()["tokens_per_s"] == 8.0
