"""The status of the daemon, for commands that work without one, too."""

from __future__ import annotations

from typing import Any

from .connection import Target, explain_connection_lost, explain_request_error


def status_of_daemon(target: Target) -> dict[str, Any] | None:
    """Return the status of the daemon; None if no daemon runs there.

    Raises:
        CliError: one runs, but does not answer.
    """
    from mlxsup.client import Client, ConnectionLost, RequestError

    from .lock_holder import lock_holder

    try:
        with Client(target.find_endpoint()) as client:
            return client.status()
    except RequestError as error:
        raise explain_request_error(error) from None
    except ConnectionLost as error:
        if error.is_turned_away or lock_holder(error.endpoint) is not None:
            raise explain_connection_lost(error) from None
        return None
