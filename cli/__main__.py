"""`mlxsup`, and `python -m mlxsup.cli`: what runs first, and imports least."""

from __future__ import annotations

import signal


def run() -> None:
    """Runs a command and exits.

    While its modules are being imported, nothing can turn an interrupt into an exit code: until
    then an interrupt ends the process as it would any other program.
    """
    is_heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_heard:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from .main import main

    if is_heard:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    main()


if __name__ == "__main__":
    run()
