"""A spare worker: it imports everything, and then waits for its launch spec.

It is spawned and not forked: MLX and the tokenizers start threads, and a forked process must not
use Metal. It has no token and no socket until it has a model, so taking it over needs no second
handshake.
"""

from __future__ import annotations

import os
import queue
import threading

from mlxsup.protocol.launch import LaunchSpec

from .bootstrap import LaunchError, read_launch_spec
from .parent_watch import ORPHANED_EXIT


def wait_for_spec(spec_pipe: int, ready_pipe: int) -> LaunchSpec:
    """Imports everything, says so, and returns the launch spec once there is one.

    From the start on, the process ends at once when the supervisor closes the pipe of the spec.

    Args:
        spec_pipe: where the spec will come from, a line of JSON.
        ready_pipe: gets one byte when everything is imported, and is closed.

    Raises:
        LaunchError: the spec is wrong.
        ImportError: MLX cannot be imported.
    """
    # One entry at most: the spec, or what is wrong with it.
    received: queue.SimpleQueue[LaunchSpec | LaunchError] = queue.SimpleQueue()

    def read() -> None:
        try:
            received.put(read_launch_spec(spec_pipe))
        except LaunchError as error:
            received.put(error)
        while os.read(spec_pipe, 4096):
            pass
        os._exit(ORPHANED_EXIT)

    threading.Thread(target=read, name="parent-watch", daemon=True).start()
    from .engines.mlx.imports import import_everything

    import_everything()
    os.write(ready_pipe, b"\0")
    os.close(ready_pipe)
    found = received.get()
    if isinstance(found, LaunchError):
        raise found
    return found
