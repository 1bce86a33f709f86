"""A daemon whose parts are replaced by a few lines of Python before it begins."""

from __future__ import annotations

import sys

from support.daemon.daemon import Daemon

SCRIPT = """
import sys
from pathlib import Path
from mlxsup.supervisor import app, daemon
from mlxsup.supervisor.config.load import load_config
{setup}
sys.exit(daemon.run_daemon(
    load_config(Path(sys.argv[1])),
    on_change={on_change},
    on_listening=lambda endpoint: print(endpoint, flush=True),
    argv={argv!r},
))
"""


class ScriptedDaemon(Daemon):
    """A daemon that a script runs; call `scripted` before it is entered."""

    script = ""

    def scripted(
        self, setup: str = "", argv: list[str] | None = None, on_change: str = "lambda change: None"
    ) -> ScriptedDaemon:
        """Itself, with a script.

        Args:
            setup: Python that the supervisor runs before it begins; `app` and `daemon` are there.
            argv: what is started in a worker's place.
            on_change: an expression, told of each change of a model's state.
        """
        self.script = SCRIPT.format(setup=setup, argv=argv, on_change=on_change)
        return self

    def start_command(self) -> list[str]:
        """The script."""
        return [sys.executable, "-c", self.script, str(self.config)]
