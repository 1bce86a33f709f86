"""A user's systemd that is real, in namespaces that end with the test.

It needs root on Linux, and a kernel that lets root make namespaces. Nothing of the machine's own
systemd, if there is one, takes part: /run is empty there, and only units of users are started.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from .cli import environment
from .eventually import eventually

SYSTEMD = Path("/lib/systemd/systemd")
HIERARCHY = Path("/sys/fs/cgroup/systemd")
TIME_LIMIT_S = 120.0

INIT = """
echo $$ > {cgroup}/cgroup.procs
mount -t tmpfs tmpfs /run
mkdir -p /run/systemd/system
{systemd} --user --unit=basic.target --log-target=console --log-level=notice &
wait
"""


def why_not() -> str:
    """Why no systemd can be started here; empty if one can."""
    if sys.platform != "linux" or not SYSTEMD.exists() or shutil.which("unshare") is None:
        return "there is no systemd to start"
    if os.getuid() != 0 or not os.access(HIERARCHY, os.W_OK):
        return "only root may start one, with its own control group"
    return ""


class RealSystemd:
    """A systemd of a user whose home is a folder of the test.

    Args:
        folder: for its sockets and the user's home; its path is short.
    """

    def __init__(self, folder: Path) -> None:
        self.home = folder / "home"
        runtime = folder / "run"
        for one in (self.home, runtime):
            one.mkdir(mode=0o700)
        self._private = runtime / "systemd" / "private"
        self._cgroup = HIERARCHY / f"mlxsup-test-{os.getpid()}"
        self._variables = {
            "HOME": str(self.home), "XDG_RUNTIME_DIR": str(runtime), "SUDO_USER": "",
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin:/usr/sbin:/sbin",
        }  # fmt: skip
        self._log = folder / "systemd.log"

    def __enter__(self) -> Self:
        self._cgroup.mkdir()
        init = INIT.format(cgroup=self._cgroup, systemd=SYSTEMD)
        namespaces = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [*namespaces, "/bin/sh", "-c", init],
                env=environment(**self._variables),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        eventually(self._is_there, timeout_s=TIME_LIMIT_S)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            print(self._log.read_text())
        self._process.send_signal(signal.SIGKILL)  # and with it everything in its namespace
        self._process.wait()
        eventually(self._has_removed_cgroup, timeout_s=TIME_LIMIT_S)

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Runs a command as that user, to its end."""
        [init] = self._children()
        inside = ["nsenter", "--mount", "--pid", "--target", str(init), *command]
        return subprocess.run(
            inside,
            env=environment(**self._variables),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT_S,
            check=False,
        )

    def show(self, name: str) -> str:
        """A property of the service."""
        done = self.run("systemctl", "--user", "show", "mlxsup.service", f"--property={name}")
        return done.stdout.strip().removeprefix(f"{name}=")

    def _children(self) -> list[int]:
        path = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        return [int(pid) for pid in path.read_text().split()]

    def _is_there(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()
        return self._private.exists()

    def _has_removed_cgroup(self) -> bool:
        for folder, _, _ in os.walk(self._cgroup, topdown=False):
            try:
                os.rmdir(folder)
            except OSError:  # its processes are ending
                return False
        return True
