"""`python -P -m mlxsup.worker`: one model in one process, started by the supervisor.

The launch spec comes as one line of JSON on standard input, which then stays open for as long as
the supervisor lives.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from mlxsup.protocol.launch import PREWARM_OPTION, ExitCode

from .bootstrap import (
    ORPHANED_EXIT,
    LaunchError,
    OrphanedError,
    check_parent,
    die_with_parent,
    prepare_process,
    read_launch_spec,
    wait_for_spec,
    watch_pipe,
)
from .logs import configure
from .process import Life

USAGE = """\
usage: python -P -m mlxsup.worker < launch-spec

Runs one model for the mlxsup supervisor. Not meant to be started by hand: `mlxsup start` does.
The launch spec is one line of JSON on standard input; see protocol/launch.py.
"""

STANDARD_INPUT = 0


def main(arguments: list[str]) -> int:
    """One worker's life; returns its exit code."""
    ready_pipe = _ready_pipe(arguments)
    if arguments and ready_pipe is None:
        is_help = arguments[0] in ("-h", "--help")
        print(USAGE, end="", file=sys.stdout if is_help else sys.stderr)
        return ExitCode.ASKED if is_help else ExitCode.BAD_LAUNCH
    try:
        prepare_process()
        die_with_parent()
        if os.isatty(STANDARD_INPUT):
            raise LaunchError("workers are not started by hand: use `mlxsup start`")
        if ready_pipe is None:
            spec = read_launch_spec(STANDARD_INPUT)
        else:
            spec = wait_for_spec(STANDARD_INPUT, ready_pipe)
        check_parent(spec.supervisor_pid)
    except LaunchError as error:
        print(f"mlxsup worker: {error}", file=sys.stderr)
        return ExitCode.BAD_LAUNCH
    except ImportError as error:
        print(f"mlxsup worker: MLX cannot be imported: {error}", file=sys.stderr)
        return ExitCode.NO_DEVICE
    except OrphanedError as error:
        print(f"mlxsup worker: {error}", file=sys.stderr)
        return ORPHANED_EXIT
    if ready_pipe is None:
        watch_pipe(STANDARD_INPUT)
    configure(spec.log_level, sys.stderr)
    return Life(spec).run()


def _ready_pipe(arguments: list[str]) -> int | None:
    """Return the descriptor that a prewarmed worker was given; None for any other worker."""
    match arguments:
        case [option, number] if option == PREWARM_OPTION and number.isdecimal():
            return int(number)
    return None


def leave(code: int) -> NoReturn:
    """Exits without the interpreter's teardown, in which Metal can abort and change the code."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
