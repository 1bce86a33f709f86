"""When a process ended is known although it may be gone before anybody looks."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest

from promises.watching import ExitWatch


def test_who_is_gone_already_ended_when_it_was_last_known_to_live() -> None:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    assert ExitWatch(done.pid, lived_at=5.0).ended_at() == 5.0
    with pytest.raises((psutil.NoSuchProcess, ProcessLookupError)):
        ExitWatch(done.pid)


def test_who_still_lives_ended_later() -> None:
    process = subprocess.Popen(["sleep", "0.1"])
    before = time.monotonic()
    watch = ExitWatch(process.pid, lived_at=before - 100)
    assert watch.ended_at() >= before
    process.wait()
