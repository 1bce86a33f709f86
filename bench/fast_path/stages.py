"""Runs what lacks, row by row, and can be interrupted at any moment.

A stage measures several rows with the same processes. Each stage runs in its own process, so
that one that fails, hangs or runs out of memory takes no other along; a row is saved as soon as it
has been measured, and what is saved at the same commit is not measured again.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from .document import Kept, Sheet
from .results import Failure, Founds, Result, Store, commit_of
from promises.results import UncleanTreeError
from support.verdict import EXIT_CODES, NotShown, Verdict

ROOT = Path(__file__).parents[2]
UNCLEAN = 64
GPU_ROW_LIMIT_S = 480.0

END_LIMIT_S = 60.0
"""How long a stage that was interrupted may take to end its processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a stage is given.

    Attributes:
        models: a folder for models that it makes, kept for the next stage.
        is_small: tiny shapes and few runs, to try the script on any machine.
        trained: a folder with a trained model; None if there is none.
    """

    models: Path
    is_small: bool
    trained: Path | None = None

    def runs(self, count: int) -> int:
        """How many, if it should be this many."""
        return min(count, 2) if self.is_small else count


Rows = AsyncGenerator[tuple[str, Founds], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Rows that are measured with the same processes.

    Attributes:
        name: for the command line.
        rows: in the order in which they are measured.
        measure: yields each of the wanted rows as soon as it is complete.
        limit_s: for each row, the start of its processes included.
    """

    name: str
    rows: tuple[str, ...]
    measure: Callable[[Setting, Sequence[str]], Rows]
    limit_s: float = GPU_ROW_LIMIT_S


def tell(text: str) -> None:
    """Progress, apart from the report."""
    print(text, file=sys.stderr, flush=True)


# ---------------------------------------------------------------- one stage, in its own process


async def measure(
    stage: Stage, setting: Setting, wanted: Sequence[str], store: Store, sheet: Sheet
) -> None:
    """Measures rows of a stage and saves each."""
    async with aclosing(stage.measure(setting, wanted)) as found:
        begin = time.monotonic()
        async for row, founds in found:
            lacking = {claim.id for claim in sheet.rows[row].claims}.symmetric_difference(founds)
            assert not lacking, f"{row} is not complete: {lacking}"
            result = store.save(row, founds, time.monotonic() - begin)
            tell("\n".join(sheet.written(Kept(results={row: result}), [row])))
            begin = time.monotonic()


# ---------------------------------------------------------------- all of them, from outside


def run_stage(command: Sequence[str], limit_s: float) -> str:
    """Runs a stage; why it failed, or nothing.

    Args:
        command: of the process.
        limit_s: then it is interrupted, so that it ends what it has started.
    """
    paths = (str(ROOT / "tests"), str(ROOT), os.environ.get("PYTHONPATH", ""))
    process = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    said = [""]
    echo = threading.Thread(target=_echo, args=(process, said), name="echo")
    echo.start()
    reason = ""
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        reason = f"it took longer than {limit_s:g} s"
    finally:
        if process.poll() is None:
            _interrupt(process)
        echo.join()
    if not reason and process.returncode:
        reason = said[-1] or f"it ended with exit code {process.returncode}"
    return reason.replace(f"{ROOT}/", "")


def _echo(process: subprocess.Popen[str], said: list[str]) -> None:
    """Repeats what a process says, and remembers its last words."""
    assert process.stderr is not None
    with process.stderr as errors:
        for text in errors:
            sys.stderr.write(text)
            if text.strip():
                said[:] = [text.strip()]


def _interrupt(process: subprocess.Popen[str]) -> None:
    """Ends a stage with what it has started."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(END_LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def missing(
    stages: Sequence[Stage], store: Store, names: Sequence[str]
) -> Iterator[tuple[Stage, list[str]]]:
    """Which rows of which stages are wanted and not there."""
    for stage in stages:
        rows = [row for row in stage.rows if row in names and store.load(row) is None]
        if rows:
            yield stage, rows


def parser_of(prog: str, about: str | None, rows: Sequence[str]) -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog=prog, description=about)
    add = parser.add_argument
    add("folder", type=Path, help="holds a JSON file for each row that was measured")
    add("--rows", nargs="+", metavar="NAME", default=list(rows), help=", ".join(rows))
    add("--small", action="store_true", help="tiny shapes and few runs, to try the script")
    add("--trained", type=Path, metavar="FOLDER", help="a trained model, for rates of equality")
    add("--models", type=Path, metavar="FOLDER", help="where models are made; FOLDER/models")
    add("--commit", help="that of the tree, if there is no history to ask")
    add("--render", action="store_true", help="measure nothing; print the table")
    add("--keep", action="store_true", help="measure nothing; put the rows into docs/")
    add("--stage", help=argparse.SUPPRESS)
    return parser


def main(
    stages: Sequence[Stage],
    module: str,
    about: str | None,
    *,
    sheet: Sheet,
    words: Sequence[str] | None = None,
    kept: Callable[[Mapping[str, Result]], None] | None = None,
) -> int:
    """The command line of a list of stages; returns the exit code.

    Args:
        stages: in order of importance.
        module: that runs this with the same stages.
        about: for the help.
        sheet: the table of their rows.
        words: the command line; None for the process's own.
        kept: also called with the rows that are put into docs/.
    """
    rows = [row for stage in stages for row in stage.rows]
    parser = parser_of(f"python -m {module}", about, rows)
    given = parser.parse_args(words)
    if given.keep and given.small:
        parser.error("--keep: what was measured with small shapes is for nobody to read")
    if unknown := sorted(set(given.rows) - set(rows)):
        parser.error(f"{', '.join(unknown)}: known are {', '.join(rows)}")
    try:
        store = Store(given.folder, commit_of(given.commit, is_small=given.small))
    except UncleanTreeError as error:
        tell(f"{error}\nName the commit with --commit, or try the script with --small.")
        return UNCLEAN
    # A daemon takes a relative path from its file's folder, and not from here.
    models = (given.models or given.folder / "models").resolve()
    setting = Setting(models=models, is_small=given.small, trained=given.trained)
    if given.stage:
        [stage] = [one for one in stages if one.name == given.stage]
        try:
            asyncio.run(measure(stage, setting, given.rows, store, sheet))
        except NotShown as error:
            tell(str(error))
            return EXIT_CODES[Verdict.NOT_SHOWN]
        return 0
    if not (given.render or given.keep):
        again = sys.argv[1:] if words is None else list(words)
        run_all(stages, module, again, store, given.rows)
    found = {row: result for row in given.rows if (result := store.load(row)) is not None}
    if given.keep:
        sheet.keep(found.values(), store.failures())
        sheet.render()
        if kept is not None:
            kept(found)
    return report(sheet, found, store.failures(), given.rows)


def run_all(
    stages: Sequence[Stage], module: str, words: Sequence[str], store: Store, names: Sequence[str]
) -> None:
    """Runs every stage that has rows to measure, one after the other."""
    for stage, rows in missing(stages, store, names):
        tell(f"\n## {stage.name}: {', '.join(rows)}\n")
        # The last --rows counts; the commit stays the same if somebody commits meanwhile.
        more = ["--stage", stage.name, "--commit", store.commit, "--rows", *rows]
        command = [sys.executable, "-m", module, *words, *more]
        reason = run_stage(command, len(rows) * stage.limit_s)
        lacking = [row for row in rows if store.load(row) is None]
        if reason:
            tell(f"{stage.name} failed: {reason}")
        if lacking:
            store.note_failure(lacking, reason or "it gave no figures")


def report(
    sheet: Sheet, found: Mapping[str, Result], failures: list[Failure], rows: Sequence[str]
) -> int:
    """Prints the table; returns the exit code."""
    lines = sheet.written(Kept(results=dict(found), failures=failures), rows)
    print("\n".join(lines), flush=True)
    if len(found) < len(rows):
        return EXIT_CODES[Verdict.NOT_SHOWN]
    is_missed = any("**MISSED**" in text for text in lines)
    return EXIT_CODES[Verdict.MISSED if is_missed else Verdict.KEPT]
