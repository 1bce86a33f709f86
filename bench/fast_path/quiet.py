"""Waits until nothing else runs on this machine."""

from __future__ import annotations

import asyncio
import time

import psutil

from .stages import Setting, tell
from support.verdict import NotShown

MOST_LOAD = 0.3
PATIENCE_S = 600.0
LOOK_EVERY_S = 1.0


async def until_quiet(setting: Setting) -> None:
    """Returns once the load average of a minute is below MOST_LOAD; at once in a trial.

    Raises:
        NotShown: something else runs all the time.
    """
    begin = time.monotonic()
    has_told = setting.is_small
    while not setting.is_small and (load := psutil.getloadavg()[0]) >= MOST_LOAD:
        if time.monotonic() - begin > PATIENCE_S:
            raise NotShown(f"the load average is {load:.2f} and was not below {MOST_LOAD} for long")
        if not has_told:
            tell(f"the load average is {load:.2f}: waiting until it is below {MOST_LOAD}")
            has_told = True
        await asyncio.sleep(LOOK_EVERY_S)
