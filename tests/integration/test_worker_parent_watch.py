"""A worker ends with its supervisor, whatever it does at that moment (E6, P13)."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys

import pytest

from mlxsup.worker.parent_watch import ORPHANED_EXIT

LIMIT_S = 60.0

WATCHES_ITS_PARENT = """
import time
from mlxsup.worker.parent_watch import die_with_parent
die_with_parent()
print("watching", flush=True)
time.sleep(600)
"""

STARTS_ONE_AND_ENDS = """
import subprocess, sys
kept = int(sys.argv[2])
command = [sys.executable, "-c", sys.argv[1]]
child = subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=[kept])
assert child.stdout.readline() == b"watching\\n"
"""
"""The worker keeps the pipe `kept` open for as long as it lives."""

WATCHES_ITS_INPUT = """
import time
from mlxsup.worker.parent_watch import watch_pipe
watch_pipe(0)
print("watching", flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of no other system does this")
def test_the_kernel_ends_a_worker_whose_parent_ends_P13() -> None:
    reader, kept = os.pipe()
    command = [sys.executable, "-c", STARTS_ONE_AND_ENDS, WATCHES_ITS_PARENT, str(kept)]
    try:
        parent = subprocess.run(command, pass_fds=[kept], timeout=LIMIT_S, check=False)
    finally:
        os.close(kept)
    assert parent.returncode == 0
    with selectors.DefaultSelector() as selector, open(reader, "rb") as pipe:
        selector.register(pipe, selectors.EVENT_READ)
        assert selector.select(LIMIT_S), "the worker outlives its parent"
        assert pipe.read() == b""


def test_a_worker_whose_input_ends_ends_at_once_P13() -> None:
    command = [sys.executable, "-c", WATCHES_ITS_INPUT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"watching\n"
        worker.stdin.close()
        assert worker.wait(LIMIT_S) == ORPHANED_EXIT
    assert ORPHANED_EXIT != 0
