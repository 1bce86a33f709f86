"""A program `ssh` for groups whose hosts are all this machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

PROGRAM = f"""\
#!{sys.executable}
import os, subprocess, sys
host, command = sys.argv[-2:]
if os.path.exists(os.path.join(os.path.dirname(__file__), "down", host)):
    print(f"ssh: connect to host {{host}} port 22: No route to host", file=sys.stderr)
    sys.exit(255)
sys.exit(subprocess.run(["sh", "-c", command], start_new_session=True).returncode % 256)
"""


class FakeSsh:
    """Runs its command here, in a session of its own as sshd's are, or refuses.

    Args:
        folder: for the program.
        monkeypatch: puts it before the real one.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (folder / "ssh").write_text(PROGRAM)
        (folder / "ssh").chmod(0o755)
        self._down = folder / "down"
        self._down.mkdir()
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def cut_off(self, host: str) -> None:
        """Refuse new connections to a host."""
        (self._down / host).touch()
