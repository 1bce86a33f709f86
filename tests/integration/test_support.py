"""The gates of the suite see what they are there for: logs, processes, files."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.daemon.daemon import Daemon
from support.daemon.log_gate import Provoked, violations
from support.isolation import Files
from support.worker.worker_harness import FORBIDDEN_IN_LOGS, WorkerHarness

RAISED = """\
2026-01-01T00:00:00.000Z ERROR worker dies code=70
Traceback (most recent call last):
  File "life.py", line 1, in run
    step()
StepError: on demand
2026-01-01T00:00:01.000Z INFO started
"""
EXCUSE = Provoked(word="Traceback", model="m", pattern="StepError: on demand", at_most=1)


def test_a_traceback_is_reported_with_its_exception() -> None:
    (problem,) = violations({}, {"m": RAISED}, [])
    assert problem == "'Traceback' in the log of m: StepError: on demand"


def test_only_the_provoked_traceback_of_that_worker_passes() -> None:
    assert violations({}, {"m": RAISED}, [EXCUSE]) == []
    (another_model,) = violations({}, {"n": RAISED}, [EXCUSE])
    assert another_model.startswith("'Traceback' in the log of n")
    other = RAISED.replace("StepError", "KeyError")
    assert violations({}, {"m": RAISED + other}, [EXCUSE]) == [
        "'Traceback' in the log of m: KeyError: on demand"
    ]


def test_more_than_the_provoked_number_does_not_pass() -> None:
    assert violations({}, {"m": 3 * RAISED}, [EXCUSE]) == [
        "'Traceback' 3 times in the log of m, at most 1 expected"
    ]


def test_nothing_excuses_a_traceback_of_the_supervisor() -> None:
    own = {"mlxsup": "\n".join(f"  {line} m" for line in RAISED.splitlines())}
    (problem,) = violations(own, {"m": RAISED}, [EXCUSE])
    assert problem.startswith("'Traceback' in mlxsup:   StepError: on demand")


def test_the_supervisor_may_quote_the_last_words_of_the_model_that_was_provoked() -> None:
    excuse = Provoked(word="rope", model="m1", pattern=r"rope\(\): wrong", at_most=1)
    quoted = 'model state model=m1 to=FAILED note="rope(): wrong"'
    assert violations({"mlxsup": quoted}, {"m1": "rope(): wrong"}, [excuse]) == []
    for line in (quoted.replace("m1", "m12"), quoted.replace("wrong", "other")):
        assert violations({"mlxsup": line}, {}, [excuse]) == [f"'rope' in mlxsup: {line}"]


TESTS = Path(__file__).parents[1]
CONFTEST = """
from support import isolation
from support.isolation import nothing_is_left_behind, run_of_tests
isolation.GONE_TIMEOUT_S = 0.1
"""
SLEEP = "import time; time.sleep(600)"
ORPHAN = f"""
import subprocess, sys
def test_that_leaves_an_orphan():
    code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', '{SLEEP}'])"
    subprocess.run([sys.executable, "-c", code], start_new_session=True, check=True)
"""
WRITER = """
from support.isolation import HOME
def test_that_writes_into_the_home_folder():
    HOME.mkdir()
    (HOME / "config.toml").write_text("")
"""
LIMITER = """
import mlx.core as mx
def test_that_limits_the_cache():
    mx.set_memory_limit(10**10)
    mx.set_cache_limit(10**9)
"""
HARMLESS = """
import subprocess, sys
def test_that_cleans_up(tmp_path):
    (tmp_path / "mine").write_text("")
    subprocess.run([sys.executable, "-c", ""], check=True)
"""


def test_what_a_module_leaves_is_its_error(tmp_path: Path) -> None:
    """In this order: what is written stays, and is an error of the last module alone."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for number, module in enumerate((HARMLESS, LIMITER, ORPHAN, WRITER)):
        (tmp_path / f"test_{number}.py").write_text(module)
    path = os.pathsep.join([os.fspath(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", os.fspath(tmp_path)],
        env={**os.environ, "PYTHONPATH": path, "HOME": os.fspath(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    for says in (
        "ERROR test_1.py", "MLX is left with limits: (10000000000, 1000000000)",
        "ERROR test_2.py", f"processes are left: ['{sys.executable} -c {SLEEP}']",
        "ERROR test_3.py",
        f"written where every test can see it: ['{tmp_path}/.mlxsup/config.toml']",
        "4 passed, 3 errors in",
    ):  # fmt: skip
        assert says in done.stdout


def test_files_that_come_go_or_change_are_named(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("checkout", "models", "home")]
    models = folders[1]
    for folder in folders:
        folder.mkdir()
        for name in ("changed", "gone"):
            (folder / name).write_text("")
    before = Files.now(*folders)
    assert Files.now(*folders).differences(before) == []

    for folder in folders:
        os.utime(folder / "changed", ns=(0, 0))
        (folder / "gone").unlink()
        (folder / "new").write_text("")
    seen = {"checkout": ["gone", "new"], "home": ["changed", "gone", "new"]}
    expected = [f"{tmp_path / folder / name}" for folder in seen for name in seen[folder]]
    expected += [f"{models / name}" for name in ("changed", "gone")]
    assert Files.now(*folders).differences(before) == sorted(expected)


WORDS = ("rope", "Stream(", "InvalidStateError", "Failed to", "Traceback", "never awaited")


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """One that is not started: its folder alone."""
    daemon = Daemon({})
    yield daemon
    shutil.rmtree(daemon.folder)


@pytest.mark.parametrize("word", WORDS)
def test_a_word_that_no_healthy_run_writes_fails_a_test_in_any_log_J1(
    daemon: Daemon, word: str
) -> None:
    daemon.logs.mkdir()
    (daemon.logs / "other.log").write_text("INFO worker started\n")
    daemon.check_logs()
    said = f"INFO fine\nfirst word {word} last word\nINFO fine\n"
    assert FORBIDDEN_IN_LOGS.search(said), "the gate of a single worker knows it, too"
    for name in ("m.log", "mlxsup.log", "m.log.1"):
        (daemon.logs / name).write_text(said)
        with pytest.raises(AssertionError, match=re.escape(word)):
            daemon.check_logs()
        (daemon.logs / name).unlink()


def test_so_does_one_that_the_daemon_prints_J1(daemon: Daemon) -> None:
    daemon.check_logs()
    (daemon.folder / "output.txt").write_text("RuntimeWarning: coroutine was never awaited\n")
    with pytest.raises(AssertionError, match="never awaited"):
        daemon.check_logs()


def test_the_gate_of_a_single_worker_closes_too_J1() -> None:
    worker = WorkerHarness()
    worker.wait_until_ready()
    worker.dispatch("[[fault raise at=1]]")
    assert worker.exit_code() == 70
    with pytest.raises(AssertionError, match="traceback"):
        worker.__exit__(None, None, None)
