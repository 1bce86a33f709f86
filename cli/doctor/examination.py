"""Looks at everything at the same time, and waits for nothing for long: a disk may hang."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TypeVar

from .finding import Finding, note

Value = TypeVar("Value")

LIMIT_S = 10.0
"""What has not answered for this long, while nothing else was done either, is given up. A busy
machine is only slow, and a daemon that does not answer takes three seconds."""

LOOK_S = 0.1
"""How often to look whether anything is done."""

BUSY_S = 0.05
"""A thread that has used this much processor time is at work; looking around takes less."""

QUIET_S = 1.0
"""What takes no longer than this needs no explanation."""


def begin(function: Callable[[], Value]) -> Future[Value]:
    """Calls a function in a thread that no end of the program waits for."""
    future: Future[Value] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001  whoever takes the result gets it
            future.set_exception(error)

    threading.Thread(target=run, name="mlxsup-doctor", daemon=True).start()
    return future


def settle(futures: Iterable[Future[Value]], limit_s: float = LIMIT_S) -> bool:
    """Waits until all of them are done; False if nothing was done for too long.

    Args:
        futures: what to wait for.
        limit_s: for how long.
    """
    waiting = set(futures)
    idle_since, used_s = time.monotonic(), time.process_time()
    while waiting and time.monotonic() - idle_since < limit_s:
        done, waiting = wait(waiting, LOOK_S, return_when=FIRST_COMPLETED)
        if done or time.process_time() - used_s > BUSY_S:
            idle_since, used_s = time.monotonic(), time.process_time()
    return not waiting


def examine(
    examinations: Mapping[str, Callable[[], Iterable[Finding]]],
    *,
    on_slow: Callable[[Sequence[str]], None],
    limit_s: float = LIMIT_S,
) -> Iterator[Finding]:
    """What all of them find, in their order.

    Args:
        examinations: by what each looks at.
        on_slow: called once with what has not ended after a second.
        limit_s: what has not ended after this time without any progress is a finding itself.
    """
    works = {subject: begin(_listing(look)) for subject, look in examinations.items()}
    waiting = wait(works.values(), timeout=min(QUIET_S, limit_s)).not_done
    if waiting:
        on_slow([subject for subject, work in works.items() if work in waiting])
        settle(waiting, limit_s)
    for subject, work in works.items():
        if not work.done():
            yield note(
                subject,
                f"this could not be looked at: nothing has answered for {limit_s:.0f} s",
                why="a disk or a program of the system does not answer, and may stop a daemon, too",
                fix="look for disks of the network that are gone (`mount`)",
            )
            continue
        try:
            yield from work.result()
        except OSError as error:
            yield note(
                subject,
                f"this could not be looked at: {error}",
                why="what is wrong here, if anything, is not among the findings",
                fix="make it readable for you",
            )


def _listing(look: Callable[[], Iterable[Finding]]) -> Callable[[], list[Finding]]:
    return lambda: list(look())
