"""A daemon that a command runs in its own process and ends itself, so that none outlives it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

from .connection import Target, connect
from .exit_status import CliError

if TYPE_CHECKING:
    from mlxsup.client import Client

Value = TypeVar("Value")


def visit_own_daemon(serve: Callable[..., int], visit: Callable[[Client], Value]) -> Value:
    """Runs the daemon here and a visit in a thread, and ends the daemon after the visit.

    Args:
        serve: runs the daemon until it is asked to end; takes `on_listening`.
        visit: what is done with it.

    Returns:
        What the visit has returned.

    Raises:
        CliError: the daemon did not start, or a request failed.
        OSError: nobody reads the output.
        KeyboardInterrupt: a signal ended it.
    """
    visitor = _Visitor(visit)
    code = serve(on_listening=visitor.begin)
    failure = visitor.finish()
    if code:
        raise CliError(f"the daemon ended with exit code {code}", code="internal")
    if isinstance(failure, CliError) and failure.code in ("shutting_down", "connection_lost"):
        raise KeyboardInterrupt
    if failure is not None:
        raise failure
    return visitor.values[0]


class _Visitor(threading.Thread, Generic[Value]):
    """The visit, in a thread next to the daemon's.

    Args:
        visit: what is done.

    Attributes:
        values: what it has returned, once it has.
    """

    def __init__(self, visit: Callable[[Client], Value]) -> None:
        super().__init__(name="mlxsup-visitor", daemon=True)
        self.values: list[Value] = []
        self._visit = visit
        self._failure: CliError | OSError | None = None
        self._endpoint = ""

    def begin(self, endpoint: str) -> None:
        """The daemon listens there."""
        self._endpoint = endpoint
        self.start()

    def run(self) -> None:
        """Does everything, and ends the daemon."""
        try:
            with connect(Target(endpoint=self._endpoint)) as client:
                try:
                    self.values.append(self._visit(client))
                finally:
                    client.stop(now=True)
        except (CliError, OSError) as error:  # OSError: nobody reads the output
            self._failure = error

    def finish(self) -> CliError | OSError | None:
        """Waits for its end; returns why it broke off, or None if it did not.

        Raises:
            KeyboardInterrupt: it never began.
        """
        if self.ident is None:
            raise KeyboardInterrupt
        self.join()
        return self._failure
