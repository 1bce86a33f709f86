"""One run of pytest on a copy, in a new process group that ends with it."""

from __future__ import annotations

import json
import shutil
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .interpreter import Interpreter
from .plugin import REPORT, SELECTION
from .tree import environment_of

ALREADY_IMPORTED = "ignore::pytest.PytestAssertRewriteWarning"
"""Plugins whose assertions pytest would rewrite, had the warm process not imported them."""


KERNELS = "mlx"
"""In the folder for temporary files: what MLX has compiled for the CPU, a second for each."""


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
    interpreter: Interpreter,
    *,
    files: Sequence[str],
    chosen: Sequence[str] | None = None,
    limit_s: float,
    test_limit_s: float,
    coverage: Path | None = None,
    extra: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
) -> Run:
    """Run tests of some files on a copy.

    Args:
        files: relative to the copy.
        chosen: ids of the tests; None for all.
        limit_s, test_limit_s: of the whole run and of each test.
        coverage: settings to measure with; None for a run that is not measured.
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
        arguments = ["-q", "-p", "mutation.plugin", "-p", "no:cacheprovider", "-m", "not slow"]
        arguments += ["-W", ALREADY_IMPORTED, "--timeout", str(test_limit_s), *options, *files]
        request = {
            "environment": environment_of(interpreter.copy, environment),
            "output": str(output),
            "arguments": arguments,
            "coverage": str(coverage) if coverage else None,
        }
        kernels = interpreter.copy.root.parent / KERNELS
        copy_missing(kernels, folder / KERNELS)
        exit_code = interpreter.run(request, limit_s)
        if exit_code == 0:  # so none was being compiled when it ended
            copy_missing(folder / KERNELS, kernels)
        events = tuple(json.loads(line) for line in report.read_text().splitlines())
        return Run(
            events=events, exit_code=exit_code, output=output.read_text("utf-8", "replace")[-3000:]
        )


def copy_missing(source: Path, target: Path) -> None:
    """Each file appears in its place at once and whole."""
    for file in source.rglob("*.so"):
        place = target / file.relative_to(source)
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            new = place.with_name(f"{uuid.uuid4().hex}.new")
            shutil.copy2(file, new)
            new.rename(place)
