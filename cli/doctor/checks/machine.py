"""The machine: whether it falls asleep, and whether its clock is right."""

from __future__ import annotations

import time
from collections.abc import Iterator

from ..facts import Machine
from ..finding import Finding, note, ok, problem

SLEEP, CLOCK = "sleep", "clock"

DAY_S = 86400.0


def check_machine(facts: Machine) -> Iterator[Finding]:
    """Judges the clock, and on macOS the sleep settings."""
    if facts.now_s + DAY_S < facts.written_s:
        now = time.strftime("%Y-%m-%d", time.gmtime(facts.now_s))
        yield problem(
            CLOCK,
            f"the machine says it is {now}, and {facts.written_path} was written later",
            why="downloads fail because certificates seem not to be valid yet",
            command="sudo timedatectl set-ntp true"
            if facts.system == "Linux"
            else "sudo systemsetup -setusingnetworktime on",
        )
    else:
        yield ok(CLOCK, time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(facts.now_s)))
    if facts.sleep_minutes:
        yield note(
            SLEEP,
            f"the machine sleeps after {facts.sleep_minutes} minutes without a user",
            why="answers stop until somebody wakes it",
            command="sudo pmset -c sleep 0",
        )
    elif facts.sleep_minutes == 0:
        yield ok(SLEEP, "the machine does not sleep by itself")
