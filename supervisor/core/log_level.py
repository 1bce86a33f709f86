"""How much workers log, once a person has changed that."""

from __future__ import annotations

from collections.abc import Iterable

from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.protocol.log_level import LogLevel
from mlxsup.protocol.states import SERVES
from mlxsup.protocol.text import LOG_LEVELS

from .actions import SetLogLevel
from .model import Model
from .outbox import Outbox


class WorkerLogLevel:
    """Tells the workers that serve, and each that becomes READY.

    Args:
        outbox: takes what is sent to them.
    """

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._level: str | None = None  # None: as each was started

    def change(self, level: str, models: Iterable[Model]) -> None:
        """From now on, the daemon and these models' workers log from this level on.

        Raises:
            RemoteError: `invalid_request`; there is no such level.
        """
        if level not in LOG_LEVELS:
            raise RemoteError(
                ErrorCode.INVALID_REQUEST,
                f"level must be one of {', '.join(LOG_LEVELS)}, not {level[:60]!r}",
                detail={"parameter": "level"},
            )
        self._level = level
        self._outbox.add(SetLogLevel(level=level))
        for model in models:
            self.tell(model)

    def tell(self, model: Model) -> None:
        """The worker of this model may have become READY: it may have been started before."""
        if self._level is not None and model.life.state in SERVES:
            self._outbox.tell(model.life, LogLevel(level=self._level))
