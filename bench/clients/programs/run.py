"""Gives every program its turn, one after the other, and keeps its row in docs/clients.*."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from ...report import print_table
from ..case import Verdict
from ..document import keep, program_result, program_table, read_results, with_program
from .environments import FOLDER, NotInstalled
from .programs import PROGRAMS, Program
from .turns import Turn, TurnFailed
from promises.results import clean_commit
from support.daemon import fake
from support.http_daemon import HttpDaemon

CONTEXT_TOKENS = 200_000
"""Programs that write code begin with prompts of ten thousand tokens and more."""


def run(names: Sequence[str]) -> None:
    """Installs what is missing, and runs it.

    Args:
        names: of the programs; none: all.

    Raises:
        SystemExit: a name is none of a program.
        UncleanTreeError: the tree is that of no commit.
        AssertionError: one that is installed has not done its turn.
    """
    order = [one.name for one in PROGRAMS]
    if unknown := [name for name in names if name not in order]:
        raise SystemExit(f"no program is called {unknown[0]!r}; there are {', '.join(order)}")
    commit = clean_commit()
    wanted = [one for one in PROGRAMS if not names or one.name in names]
    model = fake(fake={"context_length": CONTEXT_TOKENS}, preload=False)
    failed = []
    for program in wanted:
        with HttpDaemon({"m": model}) as daemon:
            measured = _measured(program, daemon, commit)
        head, row = program_table([measured])
        print_table(head, [row])
        keep(with_program(read_results(), measured, order))
        if measured["result"].startswith(Verdict.FAILED):
            failed.append(program.name)
    assert not failed, f"these did not do their turn: {', '.join(failed)}"


def _measured(program: Program, daemon: HttpDaemon, commit: str) -> dict[str, str]:
    """Whether a program did its turn, or why not."""
    environment = program.environment
    try:
        environment.install()
    except NotInstalled as error:
        return program_result(program.name, "", program.does, f"not installed: {error}", commit)
    with tempfile.TemporaryDirectory(prefix="mlxsup-p-", dir="/tmp") as home:
        try:
            program.turn(Turn(daemon=daemon, environment=environment, home=Path(home)))
            result = str(Verdict.PASSED)
        except TurnFailed as error:
            said = str(error).replace(home, "~").replace(str(FOLDER), "build/clients")
            result = f"{Verdict.FAILED}: {said}"
    return program_result(program.name, environment.version, program.does, result, commit)
