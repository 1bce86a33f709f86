"""`python -P -m mlxsup.worker.group.inspection ENGINE PATH ADDRESS PARALLEL SIZE`: what a host can
contribute. With a size, it also tries whether so many hosts can divide the model.

It prints one line of JSON, a `HostReport`, and waits for the end of its standard input: until then
it answers lines that are sent to its address, by which the other side measures the link.
"""

from __future__ import annotations

import os
import platform
import socket
import sys
import threading
from contextlib import ExitStack, suppress

import psutil

from mlxsup.protocol.codec import to_line
from mlxsup.protocol.group import READ_BYTES, HostReport
from mlxsup.protocol.ids import Generation, ModelName
from mlxsup.protocol.launch import ExitCode, LaunchSpec
from mlxsup.protocol.version import VERSION

from ..engine import BadLaunchError, BadModelError, ModelMissingError, NoDeviceError
from ..engines.opening import identify, try_division

STDIN = 0


def main(arguments: list[str]) -> int:
    """Report, and wait for the end of standard input; return the exit code."""
    engine, path, address, parallel, size = arguments
    spec = LaunchSpec(
        model=ModelName("inspected"),
        generation=Generation(1),
        token="",
        endpoint="",
        supervisor_pid=os.getppid(),
        engine=engine,
        path=path,
        parallel=parallel,
    )
    versions, fingerprint, problem, port = {"mlxsup": VERSION}, "", "", 0
    with ExitStack() as open_sockets:
        try:
            files = identify(spec)
            versions, fingerprint = files.versions, files.fingerprint
            try_division(spec, int(size))
        except (BadLaunchError, BadModelError, ModelMissingError, NoDeviceError) as error:
            problem = str(error)
        try:
            listening = open_sockets.enter_context(socket.create_server((address, 0)))
            port = listening.getsockname()[1]
            threading.Thread(target=_answer, args=(listening,), daemon=True).start()
        except OSError:  # or a name that is not known there
            problem = problem or f"{address} is not its address"
        report = HostReport(
            python=platform.python_version(),
            versions=versions,
            available_bytes=psutil.virtual_memory().available,
            fingerprint=fingerprint,
            problem=problem,
            port=port,
        )
        sys.stdout.buffer.write(to_line(report))
        sys.stdout.flush()
        while os.read(STDIN, 4096):
            pass
    return ExitCode.ASKED


def _answer(listening: socket.socket) -> None:
    """Send a newline for each line that a connection brings."""
    while True:
        link, _ = listening.accept()
        with link, suppress(ConnectionError):
            while received := link.recv(READ_BYTES):
                if received.endswith(b"\n"):
                    link.sendall(b"\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
