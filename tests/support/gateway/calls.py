"""The number of functions that code calls: a cost that other work on the machine leaves alone."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType


def calls_of(function: Callable[[], object]) -> int:
    """Return the number of calls, those of the interpreter included.

    The garbage collector is held meanwhile: it runs when it likes, and calls what others gave it.
    """
    count = 0

    def seen(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before, collects = sys.getprofile(), gc.isenabled()
    gc.disable()
    sys.setprofile(seen)
    try:
        function()
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()
    return count
