"""Every promise by the tests that inject its faults: those whose names end with its number."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from .scenario import FAKE, ROOT, Place, Scenario, Values, count
from .watch import require

FAULTS = ROOT / "tests" / "faults"
TEST = re.compile(r"^(?:async )?def (test_\w+?((?:_[A-Z]\d+)+))\(", re.MULTILINE)


def tests_by_promise() -> dict[str, list[str]]:
    """Return the ids of all tests that name a promise, by promise, in the order of the numbers."""
    found: dict[str, list[str]] = {}
    for file in sorted(FAULTS.glob("test_*.py")):
        for name, marks in TEST.findall(file.read_text()):
            for promise in re.findall(r"P\d+", marks):
                found.setdefault(promise, []).append(f"{file.relative_to(ROOT)}::{name}")
    return dict(sorted(found.items(), key=lambda one: int(one[0][1:])))


def run_tests(place: Place, *, tests: list[str]) -> Values:
    """Run them in a process of their own, and count those that fail."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        done = subprocess.run(
            [*(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
             f"--basetemp={folder}/tests", f"--junitxml={report}", *tests],
            cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        require(done.returncode in (0, 1), done.stdout[-1500:])
        said = report.read_text()
    failed = re.findall(r"<testcase [^>]*name=\"([^\"]*)\"[^>]*><(?:failure|error)", said)
    assert not failed, f"failed: {', '.join(failed)}"
    return {"passed": float(said.count("<testcase ")), "failed": 0}


SCENARIOS = tuple(
    Scenario(name=f"faults-{promise.lower()}", promises=promise, where=FAKE, rounds=1,
             run=partial(run_tests, tests=tests), figures=(
        count("failed", "its tests in tests/faults: failed"),
        count("passed", "the same: passed or skipped", None)))
    for promise, tests in tests_by_promise().items()
)  # fmt: skip
