"""Gives every program its turn, one after the other, and keeps its row in docs/clients.md."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from ...report import print_table
from ..case import Verdict
from ..document import PAGE, PROGRAMS_HEAD, keep, markdown, program_rows
from ..document import PROGRAMS as BLOCK
from .environments import FOLDER, NotInstalled
from .programs import PROGRAMS, Program
from .turns import Turn, TurnFailed
from support.daemon import fake
from support.http_daemon import HttpDaemon

CONTEXT_TOKENS = 200_000
"""Programs that write code begin with prompts of ten thousand tokens and more."""


def run(names: Sequence[str]) -> None:
    """Installs what is missing, and runs it.

    Args:
        names: of the programs; none: all.

    Raises:
        AssertionError: one that is installed has not done its turn.
    """
    wanted = [one for one in PROGRAMS if not names or one.name in names]
    model = fake(fake={"context_length": CONTEXT_TOKENS}, preload=False)
    failed = []
    for program in wanted:
        with HttpDaemon({"m": model}) as daemon:
            row = _row(program, daemon)
        print_table(PROGRAMS_HEAD, [row])
        order = [one.name for one in PROGRAMS]
        rows = program_rows(PAGE.read_text(), {program.name: row}, order)
        keep(BLOCK, "\n".join(markdown(rows)))
        if row[-1].startswith(Verdict.FAILED):
            failed.append(program.name)
    assert not failed, f"these did not do their turn: {', '.join(failed)}"


def _row(program: Program, daemon: HttpDaemon) -> list[str]:
    """A program's row: whether it did its turn, or why not."""
    name = f"`{program.name}`"
    environment = program.environment
    try:
        environment.install()
    except NotInstalled as error:
        return [name, "", program.does, f"not installed: {error}"]
    with tempfile.TemporaryDirectory(prefix="mlxsup-p-", dir="/tmp") as home:
        try:
            program.turn(Turn(daemon=daemon, environment=environment, home=Path(home)))
            result = str(Verdict.PASSED)
        except TurnFailed as error:
            said = str(error).replace(home, "~").replace(str(FOLDER), "build/clients")
            result = f"{Verdict.FAILED}: {said}"
    return [name, environment.version, program.does, result]
