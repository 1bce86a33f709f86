"""How a worker notices that its supervisor is gone: the pipe, the signal, the parent's pid."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from types import SimpleNamespace

import pytest

from mlxsup.worker import parent_watch
from mlxsup.worker.parent_watch import OrphanedError, check_parent, die_with_parent, watch_pipe


def test_only_the_end_of_the_pipe_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    reads, codes, is_over = [b"", b"two", b"one"], [], threading.Event()

    def end(code: int) -> None:
        codes.append((code, len(reads)))
        is_over.set()

    pipe = SimpleNamespace(read=lambda descriptor, size: reads.pop(), _exit=end)
    monkeypatch.setattr(parent_watch, "os", pipe)
    watch_pipe(7)
    assert is_over.wait(60.0)
    assert codes == [(1, 0)], "after everything was read, and not with the code of success"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the signal")
def test_a_kernel_that_refuses_the_signal_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refuse(*arguments: int) -> int:
        asked.append(arguments)
        return -1

    monkeypatch.setattr(ctypes, "CDLL", lambda name, use_errno: SimpleNamespace(prctl=refuse))
    with pytest.raises(OSError, match=r" prctl\(PR_SET_PDEATHSIG\)$"):
        die_with_parent()
    assert asked == [(1, 9, 0, 0, 0)]


def test_a_parent_that_is_not_the_supervisor_is_named() -> None:
    check_parent(os.getppid())
    other = os.getpid()
    with pytest.raises(OrphanedError, match=f"^the supervisor {other} is gone: the parent is "):
        check_parent(other)
