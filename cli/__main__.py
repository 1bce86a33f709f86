"""`mlxsup`, and `python -m mlxsup.cli`: what runs first, and imports least."""

from __future__ import annotations

import os
import signal
import sys

MISSING_PARTS = """\
mlxsup: parts of the installed package are missing ({name})
hint: install mlxsup again; mlxsup-client shares files with it, so keep only one of the two"""


def run() -> None:
    """Run a command and exit.

    While its modules are being imported, nothing can turn an interrupt into an exit code: until
    then an interrupt ends the process as it would any other program. So it does while a shell asks
    for completions: a traceback would stand in the line that is being typed.
    """
    is_heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_heard:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        from .main import COMPLETE_VARIABLE, main
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("mlxsup."):
            raise
        sys.exit(MISSING_PARTS.format(name=error.name))

    if is_heard and COMPLETE_VARIABLE not in os.environ:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    main()


if __name__ == "__main__":
    run()
