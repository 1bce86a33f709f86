"""The bounds of a worker, which other tests take from the code, and its warnings, word for word."""

from __future__ import annotations

from inspect import signature
from types import ModuleType
from typing import Any

import pytest

from mlxsup.worker import (
    __main__,
    bootstrap,
    heartbeat,
    idle_time,
    link,
    parent_watch,
    process,
    rows,
    text_threads,
    thread_guard,
)
from mlxsup.worker.text import bare_calls, channels, detokenizer, grammar, harmony

NUMBERS: dict[ModuleType, dict[str, Any]] = {
    __main__: {"STANDARD_INPUT": 0},
    bootstrap: {"SWITCH_INTERVAL_S": 0.001},
    heartbeat: {"PULSE_S": 0.5, "BEAT_HIGH_WATER_MARK": 4},
    link: {"HIGH_WATER_MARK": 32},
    idle_time: {"LOOK_AGAIN_AFTER_S": 0.5, "FREE_AFTER_S": 3, "GIVE_BACK_AFTER_S": 300},
    parent_watch: {"ORPHANED_EXIT": 1},
    process: {"LINGER_S": 2, "TERMINATED_EXIT": 143, "MAX_CAUSE": 500},
    rows: {"SEED_BITS": 63, "BYTES_PER_TOKEN": 4, "REPLAY_REPORT_TOKENS": 1024},
    text_threads: {"SLOW_S": 1, "LONG_BODY_BYTES": 16384, "BYTES_PER_TURN": 16384},
    thread_guard: {"WEDGE_FACTOR": 10},
    bare_calls: {"MAX_BEGINNING": 512},
    detokenizer: {"MAX_WAITING_TOKENS": 16},
    grammar: {"MAX_KEPT": 32, "MAX_CHOICES": 20_000, "FREE_STEPS": 2, "WALKED_TOKENS": 16},
    harmony: {"MAX_WORD": 200, "MAX_HEADER": 512},
}


@pytest.mark.parametrize("module", NUMBERS, ids=lambda module: module.__name__.split(".")[-1])
def test_a_bound_is_what_was_measured_or_decided(module: ModuleType) -> None:
    """The code says behind each why it is this one."""
    wanted = NUMBERS[module]
    assert {name: getattr(module, name) for name in wanted} == wanted


def test_what_a_caller_is_warned_of_is_one_clear_sentence() -> None:
    assert (channels.UNREADABLE_CALL, channels.BROKEN_HEADER) == (
        "the model began a tool call that cannot be read; it is left in the text",
        "the model broke the format of its answers; what it wrote is left in the text",
    )


def test_beats_come_twice_a_second_unless_told_otherwise() -> None:
    assert signature(heartbeat.HeartbeatThread).parameters["interval_s"].default == 0.5
