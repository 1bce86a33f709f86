"""A program `ssh` for groups whose hosts are all this machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path

PROGRAM = f"""\
#!{sys.executable}
import os, shlex, shutil, subprocess, sys, threading
host, command = sys.argv[-2:]
if os.path.exists(os.path.join(os.path.dirname(__file__), "down", host)):
    print(f"ssh: connect to host {{host}} port 22: No route to host", file=sys.stderr)
    sys.exit(255)
# A login shell with the exit code of csh for what it cannot run itself.
words = shlex.split(command)
assert words.pop(0) == "exec"
if shutil.which(words[0]) is None:
    sys.exit(1)
far = subprocess.Popen(
    words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True
)

def relay(source, target):
    try:
        while piece := os.read(source, 65536):
            while piece:
                piece = piece[os.write(target, piece):]
    except BrokenPipeError:
        if target == 1:
            os._exit(255)
    os.close(target)

threading.Thread(target=relay, args=(0, far.stdin.fileno()), daemon=True).start()
relay(far.stdout.fileno(), 1)
os._exit(far.wait() % 256)
"""


class FakeSsh:
    """Runs its command here, in a session of its own as sshd's are, or refuses. What both sides
    send passes through it, so a link is silent while it is stopped.

    Args:
        folder: for the program.
    """

    def __init__(self, folder: Path) -> None:
        (folder / "ssh").write_text(PROGRAM)
        (folder / "ssh").chmod(0o755)
        self._folder = folder
        self._down = folder / "down"
        self._down.mkdir()

    @property
    def path(self) -> str:
        """Return a `PATH` on which it is before the real one."""
        return f"{self._folder}{os.pathsep}{os.environ['PATH']}"

    def cut_off(self, host: str) -> None:
        """Refuse new connections to a host."""
        (self._down / host).touch()
