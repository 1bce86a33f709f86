"""What the tests of the fault list share: patient restarts, and what an undisturbed answer is."""

from __future__ import annotations

import sys
from typing import Any

from mlxsup.worker.fake_text import answer_tokens, encode_text

from .daemon import Daemon

PATIENT: dict[str, Any] = {
    "max_restarts": 10_000,
    "backoff_initial_s": 0.01,
    "backoff_max_s": 0.05,
}
"""A `restart` table for models that die again and again without being given up."""


def undisturbed(prompt: str, count: int) -> list[int]:
    """The fake engine's greedy answer to a prompt: so many tokens, with no process asked."""
    return answer_tokens(encode_text(prompt), count)


PROGRAM = """
import sys
from pathlib import Path
from mlxsup.supervisor import daemon
from mlxsup.supervisor.config import load_config
{setup}
sys.exit(daemon.run_daemon(
    load_config(Path(sys.argv[1])),
    on_change=lambda change: None,
    on_listening=lambda endpoint: None,
    argv={argv!r},
))
"""


class SubstitutedWorkers(Daemon):
    """A daemon that starts its workers with another command line.

    Args:
        models: entries by name.
        argv: what is started in a worker's place.
        setup: Python that the supervisor runs before it begins.
    """

    def __init__(
        self, models: dict[str, dict[str, Any]], *, argv: list[str], setup: str = ""
    ) -> None:
        super().__init__(models)
        self._program = PROGRAM.format(argv=argv, setup=setup)

    def command(self, *arguments: str) -> list[str]:  # type: ignore[override]
        """The program that runs this daemon."""
        return [sys.executable, "-c", self._program, str(self.config)]
