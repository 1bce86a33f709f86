"""Ends a worker whose model or prompt takes memory without end, before the machine runs short.

What a folder's files describe is built by loops in Python, and a chat template is a program: both
may ask for any amount of memory. Neither can be interrupted, so the process ends with a sentence.
The guard looks from the thread of the heartbeats. While something holds the interpreter that thread
stands still; then the supervisor ends the process (`supervisor/core/watchdog.py`).
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

import psutil

from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.launch import ExitCode
from mlxsup.protocol.states import LoadPhase
from mlxsup.protocol.text import log_line, size_text

GUARD_EVERY_S = 0.1

LOAD_LIMIT_BYTES = 3 * 2**29
"""Between two reports of a load. A model of 47,705 tensors takes 87 MiB besides its arrays, a
tokenizer of 262,000 tokens 400 MiB, and the largest tokenizers there are twice that."""

PROMPT_LIMIT_BYTES = 2**30
BYTES_PER_BODY_BYTE = 256
"""What one prompt may take, and how much more for each byte of its body: 8 MiB of hard text, 4.9
million tokens, took 2 GiB."""

logger = logging.getLogger(__name__)


class Arrays(NamedTuple):
    """Memory of the engine's arrays: with what is kept for reuse, and the most there ever was."""

    now: int
    peak: int


@dataclass(slots=True, kw_only=True)
class _Work:
    """Work that is under way.

    Attributes:
        limit_bytes: how much the process may grow by.
        code: what the process exits with if it grows by more.
        cause: the sentence for people.
        resident_bytes: of the process when the work began.
        arrays: what its arrays took then.
        explained_bytes: the most that they have grown by since. It never shrinks: the system
            needs time to take back what they have given back, and the allocator may keep it.
        is_over: whether the latest look found that it takes too much; the next one decides.
    """

    limit_bytes: int
    code: ExitCode
    cause: str
    resident_bytes: int
    arrays: Arrays
    explained_bytes: int = 0
    is_over: bool = False


def end_process(code: ExitCode, cause: str) -> NoReturn:
    """End this process at once from any thread; its last line says why."""
    logger.error(log_line("worker dies", code=int(code), cause=cause))
    faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
    print(cause, file=sys.stderr, flush=True)
    os._exit(code)


class MemoryGuard:
    """Compares how the process grows during a load step or a prompt with what it may take.

    Args:
        resident_bytes: measures the process.
        arrays: measures what the engine's arrays take of it.
        end: called with the exit code and the cause if the work takes too much.
    """

    def __init__(
        self,
        resident_bytes: Callable[[], int] | None = None,
        arrays: Callable[[], Arrays] | None = None,
        end: Callable[[ExitCode, str], object] = end_process,
    ) -> None:
        self._resident_bytes = resident_bytes or _resident_bytes()
        self._arrays = arrays or _mlx_arrays
        self._end = end
        self._lock = threading.Lock()
        self._works: list[_Work] = []
        self._load: _Work | None = None
        self._body_bytes = 0

    def loads(self, phase: LoadPhase) -> None:
        """Note that a step of the load begins; from MATERIALISE on, what grows is arrays."""
        self._finish(self._load)
        self._load = None
        if phase is LoadPhase.WEIGHTS:
            self._load = self._begin(
                LOAD_LIMIT_BYTES,
                ExitCode.BAD_MODEL,
                "the folder describes more than its weight files hold: config.json or the"
                f" tokenizer takes more than {size_text(LOAD_LIMIT_BYTES)} to build",
            )

    @contextmanager
    def prepares(self, key: RequestKey, body_bytes: int) -> Iterator[None]:
        """Watch while a prompt is prepared, on the thread that does it.

        Args:
            key: of the request.
            body_bytes: what it may take grows with this.
        """
        most = size_text(PROMPT_LIMIT_BYTES + BYTES_PER_BODY_BYTE * body_bytes)
        work = self._begin(
            PROMPT_LIMIT_BYTES,
            ExitCode.STUCK_PROMPT,
            f"preparing the prompt of request {key} takes more than {most}: the model's chat"
            " template or tokenizer builds more than any prompt needs",
        )
        self._add_body(body_bytes)
        try:
            yield
        finally:
            self._add_body(-body_bytes)
            self._finish(work)

    def look(self) -> bool:
        """End the process if some work has taken too much; True if there is work to look at."""
        with self._lock:
            works, body_bytes = list(self._works), self._body_bytes
        if not works:
            return False
        arrays = self._arrays()  # before the process: what is being freed counts for it still
        resident = self._resident_bytes()
        for work in works:
            grown = max(arrays.now - work.arrays.now, arrays.peak - work.arrays.peak)
            work.explained_bytes = max(
                work.explained_bytes, grown + BYTES_PER_BODY_BYTE * body_bytes
            )
            limit = work.resident_bytes + work.explained_bytes + work.limit_bytes
            if resident > limit and work.is_over:
                self._end(work.code, work.cause)
            work.is_over = resident > limit
        return True

    def _begin(self, limit_bytes: int, code: ExitCode, cause: str) -> _Work:
        work = _Work(
            limit_bytes=limit_bytes,
            code=code,
            cause=cause,
            resident_bytes=self._resident_bytes(),
            arrays=self._arrays(),
        )
        with self._lock:
            self._works.append(work)
        return work

    def _add_body(self, count: int) -> None:
        with self._lock:
            self._body_bytes += count

    def _finish(self, work: _Work | None) -> None:
        if work is not None:
            with self._lock:
                self._works = [other for other in self._works if other is not work]


def _resident_bytes() -> Callable[[], int]:
    process = psutil.Process()
    return lambda: int(process.memory_info().rss)


def _mlx_arrays() -> Arrays:
    """Measure MLX's arrays, if the engine has imported it."""
    mlx = sys.modules.get("mlx.core")
    if mlx is None or not hasattr(mlx, "get_cache_memory"):  # its import is under way
        return Arrays(0, 0)
    now = mlx.get_active_memory() + mlx.get_cache_memory()
    return Arrays(int(now), int(mlx.get_peak_memory()))
