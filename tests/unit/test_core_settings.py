"""Defaults, limits and words that others rely on: a change of one of them is a decision."""

from __future__ import annotations

from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.launch import LaunchSettings
from mlxsup.protocol.parameters import sampling_defaults
from mlxsup.protocol.states import Priority, State
from mlxsup.supervisor.core import (
    attaching,
    flight,
    gateway,
    giving_back,
    head_room,
    keep_alive,
    last_moments,
    load_looks,
    loading,
    model,
    queue_status,
    request_status,
    rows_memory,
    spares,
    status,
    swapping,
    worker_events,
)
from mlxsup.supervisor.core.actions import WorkerSignal
from mlxsup.supervisor.core.health import blame, watchdog
from mlxsup.supervisor.core.health.death_cause import Cause
from mlxsup.supervisor.core.lifecycle import files, life, states
from mlxsup.supervisor.core.memory import change, pressure, raising, residency
from mlxsup.supervisor.core.memory import head_room as model_head_room
from mlxsup.supervisor.core.requests import ledger, naming, queue
from mlxsup.supervisor.core.settings import (
    ClientSettings,
    CoreSettings,
    ModelSettings,
    RestartSettings,
)
from mlxsup.supervisor.core.sharing import counters, leases

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


def test_a_file_that_sets_nothing_has_these_settings() -> None:
    assert CoreSettings() == CoreSettings(
        max_queue=1024,
        max_queue_per_client=64,
        max_queue_bytes=268_435_456,
        drain_timeout_s=30.0,
        queue_timeout_s=600.0,
        first_token_timeout_s=0.0,
        max_parallel_prefills=None,
        parallel_loads=1,
        spare_workers=0,
        spare_bytes=0,
        exit_grace_s=2.0,
        aging_s=60.0,
        min_run_s=2.0,
        clients={},
        min_residency_s=30.0,
        swap=True,
        swap_after_s=20.0,
        budget=None,
    )
    assert RestartSettings() == RestartSettings(
        max_restarts=8,
        window_s=1800.0,
        stable_s=60.0,
        backoff_initial_s=1.0,
        backoff_max_s=60.0,
    )
    assert ClientSettings() == ClientSettings(
        weight=1.0,
        priority=Priority.NORMAL,
        max_priority=Priority.INTERACTIVE,
        max_queue=0,
        max_running=0,
    )


def test_the_times_that_no_entry_sets() -> None:
    assert (life.KILL_LIMIT_S, life.KILL_LIMIT_S_PER_GB, life.DUMP_GRACE_S) == (10.0, 0.5, 0.5)
    assert (watchdog.SILENCE_S, watchdog.RECHECK_S, watchdog.UNLINKED_S) == (2.5, 1.0, 2.0)
    assert (watchdog.SLACK_S, watchdog.PREDICTIONS) == (0.75, 4.0)
    assert (blame.PROBATION_TOKENS, blame.PROBATION_S) == (3, 0.015)
    assert (model.RATE_WINDOW_S, model.SHORTEST_FREE_S) == (5.0, 0.1)
    assert (model.GIVING_BACK_S, model.ASK_AGAIN_S) == (0.9, 10.0)
    assert (loading.PATIENCE_S, leases.LEASE_S, files.COUNTS_FOR_S) == (20.0, 4.0, 5.0)
    assert (residency.RESIDENCY_LOADS, states.KEPT_BACKOFF_S) == (3.0, 5.0)
    assert (pressure.CALM_S, model_head_room.GIVES_AGAIN_AFTER_S) == (10.0, 10.0)
    assert (spares.FIRST_DELAY_S, spares.MOST_DELAY_S, spares.STABLE_S) == (1.0, 60.0, 60.0)
    assert (gateway.FIRST_DELAY_S, gateway.MOST_DELAY_S, gateway.STABLE_S) == (0.5, 30.0, 60.0)
    assert keep_alive.FOR_EVER == -1.0


def test_the_numbers_that_no_entry_sets() -> None:
    assert (blame.MAX_SUSPECTS, blame.MAX_QUARANTINED, blame.MAX_PLACES) == (
        4096, 4096, 8,
    )  # fmt: skip
    assert (blame.MAX_QUARANTINES_IN_A_ROW, blame.APPROACH_TOKENS) == (3, 64)
    assert ledger.MAX_DEATHS_WITHOUT_PROGRESS == 3
    assert (gateway.LOOP_ENDS, swapping.PASSED_OVER_AGINGS) == (3, 2)
    assert (counters.COST_WEIGHT, counters.UNKNOWN_COST_S) == (0.2, 1.0)
    assert counters.MAX_ACCOUNTS == 4096
    assert (attaching.MOST_READERS, attaching.MOST_HELD_BYTES) == (8, 4_194_304)
    assert (ledger.PAUSED_BYTES, worker_events.MAX_LAST_WORDS) == (4096, 200)
    assert (queue.NEAR, queue.FARTHEST_TOLD) == (8, 1024)
    assert load_looks.MOST_PASSES == 10


def test_how_much_is_kept_and_listed() -> None:
    assert (flight.CHANGES_OF_A_MODEL, flight.DEATHS_OF_A_MODEL) == (40, 8)
    assert (flight.OF_REQUESTS, flight.MOST_MODELS, life.STORY_LENGTH) == (256, 1024, 200)
    assert (request_status.MOST_LISTED, request_status.LEAST_READ) == (256, 0.02)
    assert (queue_status.MOST_LISTED, naming.MOST_LISTED, last_moments.MOST_ROWS) == (32, 8, 32)
    assert status.SCHEMA_VERSION == 1


def test_the_shares_and_steps_of_memory() -> None:
    assert model.MACHINE_SHARE == 0.9
    assert (change.LEAST_CONTEXT_TOKENS, change.STEP_TOKENS) == (512, 256)
    assert (giving_back.LEAST_SHARE, head_room.LEAST_CHANGE) == (100, 8)
    assert (rows_memory.SPARE_SHARE, raising.LEAST_SHARE) == (10, 10)
    assert (pressure.STEPS, pressure.STALLED_FACTOR) == (50, 2)


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
