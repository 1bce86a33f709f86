"""The gates of the suite see what they are there for: logs, processes, files."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
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


QUOTABLE = Provoked(word="rope", model="m1", pattern=r"rope\(\): wrong", at_most=1)
QUOTED = 'model state model=m1 to=FAILED note="rope(): wrong"'

Logs = dict[str, str]
GATE: dict[str, tuple[Logs, Logs, list[Provoked], list[str]]] = {
    "a traceback is reported with its exception": (
        {}, {"m": RAISED}, [], ["'Traceback' in the log of m: StepError: on demand"],
    ),
    "one that was provoked passes": ({}, {"m": RAISED}, [EXCUSE], []),
    "not in another worker": (
        {}, {"n": RAISED}, [EXCUSE], ["'Traceback' in the log of n: StepError: on demand"],
    ),
    "not with another exception": (
        {}, {"m": RAISED + RAISED.replace("StepError", "KeyError")}, [EXCUSE],
        ["'Traceback' in the log of m: KeyError: on demand"],
    ),
    "not more often than expected": (
        {}, {"m": 3 * RAISED}, [EXCUSE],
        ["'Traceback' 3 times in the log of m, at most 1 expected"],
    ),
    "nothing excuses one of the supervisor": (
        {"mlxsup": "\n".join(f"  {line} m" for line in RAISED.splitlines())}, {"m": RAISED},
        [EXCUSE], ["'Traceback' in mlxsup:   StepError: on demand m"],
    ),
    "the supervisor may quote what was provoked": (
        {"mlxsup": QUOTED}, {"m1": "rope(): wrong"}, [QUOTABLE], [],
    ),
    "but of no other model": (
        {"mlxsup": QUOTED.replace("m1", "m12")}, {}, [QUOTABLE],
        [f"'rope' in mlxsup: {QUOTED.replace('m1', 'm12')}"],
    ),
    "and nothing else": (
        {"mlxsup": QUOTED.replace("wrong", "other")}, {}, [QUOTABLE],
        [f"'rope' in mlxsup: {QUOTED.replace('wrong', 'other')}"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("rule", GATE)
def test_the_log_gate(rule: str) -> None:
    own, workers, provoked, problems = GATE[rule]
    assert violations(own, workers, provoked) == problems


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


def test_a_word_that_no_healthy_run_writes_fails_a_test_in_any_log_and_output_J1() -> None:
    daemon = Daemon({})  # which is not started: its folder alone
    try:
        daemon.logs.mkdir()
        (daemon.logs / "other.log").write_text("INFO worker started\n")
        daemon.check_logs()
        for word in WORDS:
            said = f"INFO fine\nfirst word {word} last word\nINFO fine\n"
            assert FORBIDDEN_IN_LOGS.search(said), "the gate of a single worker knows it, too"
            for name in ("logs/m.log", "logs/mlxsup.log", "logs/m.log.1", "output.txt"):
                (daemon.folder / name).write_text(said)
                with pytest.raises(AssertionError, match=re.escape(word)):
                    daemon.check_logs()
                (daemon.folder / name).unlink()
    finally:
        shutil.rmtree(daemon.folder)


def test_the_gate_of_a_single_worker_closes_too_J1() -> None:
    worker = WorkerHarness()
    worker.wait_until_ready()
    worker.dispatch("[[fault raise at=1]]")
    assert worker.exit_code() == 70
    with pytest.raises(AssertionError, match="traceback"):
        worker.__exit__(None, None, None)
