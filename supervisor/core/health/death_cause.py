"""Why a worker died, as far as its exit and its last lines show: a class to count and to act on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum

from mlxsup.protocol.launch import ExitCode


class Cause(StrEnum):
    """The class of a death: what people would look for first."""

    OUT_OF_MEMORY = "out of memory"
    GPU_TIMEOUT = "GPU time-out"
    GPU_FAULT_ELSEWHERE = "GPU fault of another process"
    NO_DEVICE = "no usable device"
    MODEL_MISSING = "model missing"
    BAD_MODEL = "bad model"
    STREAM_ERROR = "stream error"
    UNKNOWN = "unknown"


_BY_EXIT = {
    ExitCode.OUT_OF_MEMORY: Cause.OUT_OF_MEMORY,
    ExitCode.GPU_FAULT_ELSEWHERE: Cause.GPU_FAULT_ELSEWHERE,
    ExitCode.NO_DEVICE: Cause.NO_DEVICE,
    ExitCode.MODEL_MISSING: Cause.MODEL_MISSING,
    ExitCode.BAD_MODEL: Cause.BAD_MODEL,
}

_BY_LINE: tuple[tuple[Cause, re.Pattern[str]], ...] = tuple(
    (cause, re.compile(pattern, re.IGNORECASE))
    for cause, pattern in (
        (Cause.STREAM_ERROR, r"there is no stream\("),
        (Cause.GPU_TIMEOUT, r"gpu (timeout|time-out|hang)|CallbackErrorTimeout|LaunchTimeout"),
        (Cause.GPU_FAULT_ELSEWHERE, r"innocent ?victim"),
        (
            Cause.OUT_OF_MEMORY,
            r"out ?of ?memory|insufficient memory|memoryerror|bad_alloc|cannot allocate memory"
            r"|unable to allocate|attempting to allocate|MemoryAllocation",
        ),
        (Cause.MODEL_MISSING, r"FileNotFoundError|no such file or directory"),
    )
)
"""Patterns of the causes: Metal, CUDA, the C++ library and Python each use their own words."""


def classify(exit_code: int | None, lines: Sequence[str], *, is_over_memory: bool = False) -> Cause:
    """The cause of a death.

    Args:
        exit_code: None if a signal ended it.
        is_over_memory: whether it was killed while it held more memory than its limit.
    """
    for code, cause in _BY_EXIT.items():
        if exit_code == code:
            return cause
    for line in reversed(lines):
        for cause, pattern in _BY_LINE:
            if pattern.search(line):
                return cause
    return Cause.OUT_OF_MEMORY if is_over_memory else Cause.UNKNOWN
