"""A program `ssh` for groups whose hosts are all this machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

PROGRAM = f"""\
#!{sys.executable}
import os, shlex, shutil, subprocess, sys
host, command = sys.argv[-2:]
if os.path.exists(os.path.join(os.path.dirname(__file__), "down", host)):
    print(f"ssh: connect to host {{host}} port 22: No route to host", file=sys.stderr)
    sys.exit(255)
# A login shell with the exit code of csh for what it cannot run itself.
words = shlex.split(command)
assert words.pop(0) == "exec"
ran = shutil.which(words[0]) and subprocess.run(words, start_new_session=True)
sys.exit(ran.returncode % 256 if ran else 1)
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
