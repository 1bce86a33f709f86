"""What pytest does inside a trial: it runs the chosen tests and reports events as lines of JSON.

Loaded with `-p mutation.plugin`; the environment names the report and the list of chosen tests.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path

import pytest

REPORT = "MUTATION_REPORT"
"""The file that events are added to."""
SELECTION = "MUTATION_SELECTION"
"""A file with the ids of the tests to run, as a JSON list; without it all run."""
CONTEXT = "MUTATION_TEST"
"""The test that runs now: what child processes run is counted as its doing."""

_lock = threading.Lock()


def tell(**event: object) -> None:
    """Add an event to the report."""
    with _lock, Path(os.environ[REPORT]).open("a") as report:
        report.write(json.dumps(event) + "\n")


def work_s() -> float:
    """Processor seconds of this process and of its reaped children: a busy machine adds none."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the chosen tests."""
    if selection := os.environ.get(SELECTION):
        chosen = set(json.loads(Path(selection).read_text()))
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
        items[:] = [item for item in items if item.nodeid in chosen]
    tell(collected=len(items))


def pytest_sessionfinish() -> None:
    """Say what was imported, if it is measured what the tests use."""
    if CONTEXT in os.environ:
        files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
        tell(imported=sorted({file for file in files if file}))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A test file that cannot be imported is no test that failed."""
    if report.failed:
        tell(collection_error=str(report.longrepr)[-500:])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Count its work, and say whose doing each covered line is."""
    measured = None
    if CONTEXT in os.environ:
        import coverage

        measured = coverage.Coverage.current()
        os.environ[CONTEXT] = item.nodeid
    if measured is not None:
        measured.switch_context(item.nodeid)
    tell(started=item.nodeid)
    before, began_at = work_s(), time.monotonic()
    result = yield
    tell(ended=item.nodeid, work_s=work_s() - before, wall_s=time.monotonic() - began_at)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Say how it failed."""
    report = yield
    if report.failed:
        error = call.excinfo.value if call.excinfo else AssertionError(report.longreprtext[-200:])
        if kind_of(error) in ("assertion", "time limit"):
            item.session.shouldstop = "a kill"
        tell(
            failed=item.nodeid,
            phase=report.when,
            error=type(error).__name__,
            kind=kind_of(error),
            message=str(error)[:200],
        )
    return report


def kind_of(error: BaseException) -> str:
    """How a test died: `assertion`, `time limit`, `exception` or, which is no kill, `import`."""
    if isinstance(error, BaseExceptionGroup):
        kinds = {kind_of(one) for one in error.exceptions}
        return kinds.pop() if len(kinds) == 1 else "exception"
    if isinstance(error, pytest.fail.Exception):
        return "time limit" if "from pytest-timeout" in str(error) else "assertion"
    if isinstance(error, AssertionError):
        return "assertion"
    return "import" if isinstance(error, ImportError | SyntaxError) else "exception"
