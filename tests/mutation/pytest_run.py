"""One run of pytest on a copy, in a process group of its own that ends with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .parts import Project
from .plugin import REPORT, SELECTION
from .tree import environment_of

REAP_S = 60.0
"""A killed group is gone long before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a run of pytest left.

    Attributes:
        events: what the plugin wrote, in order.
        exit_code: pytest's own; None if the whole run reached its limit and was killed.
        output: the end of what it printed.
    """

    events: tuple[dict[str, Any], ...]
    exit_code: int | None
    output: str

    def values(self, key: str) -> list[Any]:
        """What the events of one kind say."""
        return [event[key] for event in self.events if key in event]


def run_pytest(
    copy: Project,
    *,
    files: Sequence[str],
    chosen: Sequence[str] | None = None,
    limit_s: float,
    test_limit_s: float,
    prefix: Sequence[str] = (),
    extra: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
) -> Run:
    """Run tests of some files on a copy.

    Args:
        files: relative to the copy.
        chosen: ids of the tests; None for all.
        limit_s, test_limit_s: of the whole run and of each test.
        prefix: what runs pytest, after `python`.
    """
    with tempfile.TemporaryDirectory(prefix="mutation-") as name:
        folder = Path(name)
        report, selection, output = folder / "report", folder / "selection", folder / "output"
        report.touch()
        folder.chmod(0o711)  # tests that become another user have their files in it
        # The temporary files of killed tests end with this folder.
        environment = {REPORT: str(report), "TMPDIR": name, **(extra or {})}
        if chosen is not None:
            selection.write_text(json.dumps(list(chosen)))
            environment[SELECTION] = str(selection)
        command = [sys.executable, *prefix, "-m", "pytest", "-q", "-p", "mutation.plugin"]
        command += ["-p", "no:cacheprovider", "-m", "not slow", "--timeout", str(test_limit_s)]
        with output.open("wb") as sink:
            process = subprocess.Popen(
                [*command, *options, *files],
                cwd=copy.root,
                env=environment_of(copy, environment),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            exit_code = _end_of(process, limit_s)
        events = tuple(json.loads(line) for line in report.read_text().splitlines())
        return Run(
            events=events, exit_code=exit_code, output=output.read_text("utf-8", "replace")[-3000:]
        )


def _end_of(process: subprocess.Popen[bytes], limit_s: float) -> int | None:
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)  # its children too, whatever became of it
        except ProcessLookupError:
            pass
        process.wait(REAP_S)
