"""Findings, and how the checks that return them run at the same time: a disk may hang."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import KW_ONLY, dataclass
from enum import StrEnum
from functools import partial
from typing import TypeVar

Value = TypeVar("Value")

LIMIT_S = 30.0
"""A check that has not answered by then is given up. A busy machine is only slow, and a daemon that
does not answer takes three seconds."""

QUIET_S = 1.0
"""A check that takes no longer than this needs no explanation."""

UNCHECKED = "this check could not run, so it may have missed problems"


class Level(StrEnum):
    """The grade of a finding; a note is worth knowing, a problem does not work or will not."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        subject: what it is about, in a word or two.
        what: a sentence without a full stop.
        level: how bad it is.
        why: why it matters; empty if all is well.
        fix: what to do, for people; empty if all is well, or if `command` does it.
        command: one line for a shell that fixes it; empty if no command alone does.
    """

    subject: str
    what: str
    _: KW_ONLY
    level: Level
    why: str = ""
    fix: str = ""
    command: str = ""


ok = partial(Finding, level=Level.OK)
note = partial(Finding, level=Level.NOTE)
problem = partial(Finding, level=Level.PROBLEM)


def begin(function: Callable[[], Value]) -> Future[Value]:
    """Call a function in a thread that no end of the program waits for."""
    future: Future[Value] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001  raised where the result is taken
            future.set_exception(error)

    threading.Thread(target=run, name="mlxsup-doctor", daemon=True).start()
    return future


def examine(
    checks: Mapping[str, Callable[[], Iterable[Finding]]],
    *,
    on_slow: Callable[[Sequence[str]], None],
    limit_s: float = LIMIT_S,
) -> Iterator[Finding]:
    """Return what all checks find, in their order; of one that cannot run, that it cannot.

    Args:
        checks: by what each looks at; each runs in a thread.
        on_slow: called once with what has not ended after a second.
        limit_s: what has not ended after this time is a finding itself.
    """
    works = {
        subject: begin(lambda check=check: list(check()))  # type: ignore[misc]
        for subject, check in checks.items()
    }
    waiting = wait(works.values(), timeout=min(QUIET_S, limit_s)).not_done
    if waiting:
        on_slow([subject for subject, work in works.items() if work in waiting])
        wait(waiting, timeout=limit_s)
    for subject, work in works.items():
        could_not = "this could not be checked"
        if not work.done():
            why = "a disk or a system program does not respond, which may also block a daemon"
            fix = "look for network disks that are gone (`mount`)"
            yield note(subject, f"{could_not} within {limit_s:.0f} s", why=why, fix=fix)
            continue
        try:
            yield from work.result()
        except OSError as error:
            yield note(subject, f"{could_not}: {error}", why=UNCHECKED, fix="make it readable")
        except Exception as error:  # noqa: BLE001  a bug in one check hides no other finding
            what = f"{could_not}: {type(error).__name__}: {error}"
            fix = "please report it with the file from `mlxsup why --report FILE`"
            yield problem(subject, what, why=UNCHECKED, fix=fix)
