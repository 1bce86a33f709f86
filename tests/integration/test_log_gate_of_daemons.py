"""The gate that reads the logs after every test with processes, seen to close (J1)."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator

import pytest

from support.daemon import Daemon
from support.worker_harness import FORBIDDEN_IN_LOGS, WorkerHarness

WORDS = ("rope", "Stream(", "InvalidStateError", "Failed to", "Traceback", "never awaited")


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """One that is not started: its folder alone."""
    daemon = Daemon({})
    yield daemon
    shutil.rmtree(daemon.folder)


@pytest.mark.parametrize("file", ["m.log", "mlxsup.log", "m.log.1"])
@pytest.mark.parametrize("word", WORDS)
def test_a_word_that_no_healthy_run_writes_fails_a_test_in_any_log_J1(
    daemon: Daemon, word: str, file: str
) -> None:
    daemon.logs.mkdir()
    (daemon.logs / "other.log").write_text("INFO worker started\n")
    daemon.check_logs()
    (daemon.logs / file).write_text(f"INFO fine\nfirst word {word} last word\nINFO fine\n")
    with pytest.raises(AssertionError, match=re.escape(word)):
        daemon.check_logs()


def test_so_does_one_that_the_daemon_prints_J1(daemon: Daemon) -> None:
    daemon.check_logs()
    (daemon.folder / "output.txt").write_text("RuntimeWarning: coroutine was never awaited\n")
    with pytest.raises(AssertionError, match="never awaited"):
        daemon.check_logs()


@pytest.mark.parametrize("word", WORDS)
def test_the_gate_of_a_single_worker_knows_the_same_words_J1(word: str) -> None:
    assert FORBIDDEN_IN_LOGS.search(f"INFO fine\nfirst word {word} last word\n")


def test_the_gate_of_a_single_worker_closes_too_J1() -> None:
    worker = WorkerHarness()
    worker.wait_until_ready()
    worker.dispatch("[[fault raise at=1]]")
    assert worker.exit_code() == 70
    with pytest.raises(AssertionError, match="traceback"):
        worker.__exit__(None, None, None)
