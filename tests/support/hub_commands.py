"""Commands that use a hub of the test, in a home folder that is empty at first."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .cli import run_cli
from .downloading_daemon import TOKEN
from .downloads import hub_environment
from .local_hub import LocalHub


@contextmanager
def home_folder() -> Iterator[Path]:
    """A home folder with a short path, because sockets go there."""
    folder = Path(tempfile.mkdtemp(prefix="mlxsup-h-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


def variables(hub: LocalHub, home: Path, **others: str) -> dict[str, str]:
    """What a command gets in its environment."""
    return hub_environment(hub, home, **{"HOME": str(home), "HF_TOKEN": TOKEN, **others})


def mlxsup(
    hub: LocalHub, home: Path, *arguments: str, stdin: str = "", **others: str
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end, in pipes; it shows no token, no escape byte and no traceback."""
    done = run_cli(*arguments, stdin=stdin, **variables(hub, home, **others))
    assert TOKEN not in done.stdout + done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    return done
