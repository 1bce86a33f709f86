"""A daemon whose models come from a hub of the test."""

from __future__ import annotations

from typing import Any

from support.daemon.daemon import Daemon
from support.daemon.downloads import hub_environment
from support.daemon.local_hub import LocalHub

TOKEN = "hf_secretsecret"
"""Must never be seen again."""


class DownloadingDaemon(Daemon):
    """A daemon that uses a hub, with a separate cache and token.

    Args:
        hub: that it uses.
        models: entries by name.
        others: further variables.
    """

    def __init__(self, hub: LocalHub, models: dict[str, dict[str, Any]], **others: str) -> None:
        super().__init__(models)
        self._variables = hub_environment(hub, self.folder, HF_TOKEN=TOKEN, **others)

    def start(self, *, environment: dict[str, str] | None = None) -> None:
        """Starts it with these variables, too."""
        super().start(environment={**self._variables, **(environment or {})})
