"""The bounds of the MLX engine, which other tests take from the code."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from mlxsup.protocol import context_length
from mlxsup.worker.engines.mlx import (
    batching,
    chat_checkpoints,
    checkpoints,
    decode,
    draws,
    engine,
    folder,
    gguf,
    load,
    logprobs,
    memory_need,
    pace,
    pace_file,
    pass_cost,
    picking,
    prefill,
    prefix_cache,
    prefix_index,
    prefix_size,
    probe,
    sampling,
    shapes,
    shaping,
    text,
    warm_up,
)

pytestmark = pytest.mark.mlx

NUMBERS: dict[ModuleType, dict[str, Any]] = {
    batching: {"CONTROL_MULTIPLE": 4},
    chat_checkpoints: {"WHOLE_CHARACTERS": 16384, "SYSTEM_ROLES": ("system", "developer")},
    checkpoints: {"LEAST_GAIN": 16, "MAX_CHECKPOINTS": 8},
    context_length: {
        "UNKNOWN_CONTEXT_LENGTH": 4096, "MAX_CONTEXT_LENGTH": 2_147_483_647, "MAX_SHOWN": 20,
    },
    decode: {"CLEAR_EVERY": 512},
    draws: {"BLOCK": 128, "LEAST_SHARE": 2**-33},
    folder: {"MAX_HEADER_BYTES": 104_857_600},
    gguf: {"GROUP_SIZE": 32},
    load: {"GROUP_BYTES": 134_217_728, "MAX_CAUSE_CHARACTERS": 300},
    logprobs: {"LEAST_LOGPROB": -9999},
    memory_need: {"COMFORTABLE_SHARE": 0.8},
    pace: {"LONGEST_S": 3600, "MOST": 2**31},
    pace_file: {"FORMAT": 2, "MAX_BYTES": 4096, "KEEP_EVERY_S": 60},
    pass_cost: {
        "APART": 4, "LEAST_SHARE": 0.25, "LEAST_SHARE_APART": 0.0625, "SMALL_PASSES": 3,
        "EASE": 0.3, "DRIFT": 0.02, "LEAST_S": 1e-9,
    },
    prefill: {
        "SMALLEST_CHUNK": 1, "LARGEST_CHUNK": 2048, "LARGEST_CPU_CHUNK": 256, "FIRST_CHUNK": 8,
        "FIXED_CHUNK": 256,
        "IDLE_TARGET_S": 2, "STEP_TIMEOUT_SHARE": 0.1, "HEADROOM": 0.7, "GROWTH": 2, "DEEP": 2048,
        "CAUTION": 2,
    },
    prefix_cache: {"LEAST_TOKENS": 16, "MAX_ENTRIES": 4096},
    prefix_index: {"BYTES_PER_TOKEN": 4},
    prefix_size: {"FREE_SHARE": 10, "MOST_SHARE": 2},
    probe: {
        "LENGTHS": (2, 4, 3), "TOKENS": (5, 3, 4), "CONTROL_LENGTH": 3, "CONTROL_TOKENS": 3,
        "STARTS": (0.5, 0.8, 0.2), "SEQUENCE_LENGTH": 7,
    },
    picking: {"MOST_CUT": 1024, "NEVER": 2},
    sampling: {"COLDEST": 1e-5},
    shapes: {"COMPILE_S": 15},
    shaping: {"ALL_TOKENS": 2_147_483_647, "LEAST_ROOM": 64},
    text: {"MAX_OPENING": 512},
    warm_up: {
        "SHOWN": (128, 1024), "CHEAP_S": 0.1, "COMPILED": (32, 128, 512, 1024, 2048),
        "BURST_TOKENS": 32, "COMPILE_LIMIT_S": 120, "AGAIN_LIMIT_S": 0.6,
        "PROMPT_TOKENS": 2, "ANSWER_TOKENS": 2, "STEPS_TO_JOIN": 4,
    },
}  # fmt: skip


@pytest.mark.parametrize("module", NUMBERS, ids=lambda module: module.__name__.split(".")[-1])
def test_a_bound_is_what_was_measured_or_decided(module: ModuleType) -> None:
    """The code says behind each why it is this one."""
    wanted = NUMBERS[module]
    assert {name: getattr(module, name) for name in wanted} == wanted


def test_what_rows_may_differ_by_follows_from_the_device() -> None:
    assert (batching.EXACT.floor, batching.EXACT.cap, batching.EXACT.sequences) == (1e-3, 1e-2, 1)
    assert (batching.ROUNDED.floor, batching.ROUNDED.cap) == (2e-2, 1.5e-1)


def test_a_model_without_numbers_is_warned_of_in_words() -> None:
    assert engine.NO_NUMBERS == (
        "its log-probabilities are not numbers (NaN): its answers mean nothing"
    )
