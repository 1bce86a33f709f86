"""What a service manager says of the service."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceState:
    """The service as its manager sees it.

    Attributes:
        state: the manager's own word, such as `active` or `not running`.
        pid: of the daemon; None if it does not run.
        is_enabled: whether it starts by itself; None if unknown.
        starts_at: `boot` or `login`.
        note: what the daemon has last said of itself; may be empty.
        last_exit: the exit code of the last daemon; None if unknown.
        restarts: how often the manager has started it again; None if unknown.
    """

    state: str
    pid: int | None
    is_enabled: bool | None
    starts_at: str
    note: str = ""
    last_exit: int | None = None
    restarts: int | None = None

    @property
    def is_on(self) -> bool:
        """Whether it runs, and starts by itself as far as is known."""
        return self.pid is not None and self.is_enabled is not False

    def as_map(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return asdict(self)
