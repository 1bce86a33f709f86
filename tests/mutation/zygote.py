"""The warm process of a copy: it has imported what tests need, and forks once for each run.

Importing pytest, MLX and transformers takes longer than most tests. It imports no tests and nothing
that a bug is planted in: each run must read these from the copy.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

PRELOADED = (
    "pytest", "hypothesis", "_hypothesis_pytestplugin", "pytest_timeout", "xdist.plugin",
    "coverage", "zmq.asyncio", "msgpack", "pydantic", "click.testing", "rich.console", "asyncio",
    "numpy", "regex", "jinja2",
)  # fmt: skip
PRELOADED_WITH_MLX = (
    "mlx.core", "mlx.nn", "safetensors.numpy", "tokenizers", "transformers", "mlx_lm",
    "llguidance.hf", "llguidance.mlx",
)  # fmt: skip
"""On Linux only: what macOS keeps for a GPU does not survive a fork."""


def serve(connection: Connection, root: Path) -> int:
    """Fork for each request, and report the child's id and then its exit code.

    A request is a JSON object: `environment`; `output`, a file; and either `arguments` of pytest,
    with `coverage`, a settings file or None, or `module`, which is imported.

    Args:
        root: of the copy; nothing below it may be loaded but this package.
    """
    preload()
    if reasons := what_is_not_clean(root):
        raise RuntimeError(f"no run could trust this process: {reasons}")
    gc.freeze()  # children share these pages, and look through fewer objects
    request = request_of_child(connection)
    return 0 if request is None else run(request)


def request_of_child(connection: Connection) -> dict[str, Any] | None:
    """Returns in each child, with what it must do, and at the end here, with None."""
    with suppress(EOFError, BrokenPipeError):  # whoever asked has ended
        connection.send_bytes(b"null")
        while True:
            request: dict[str, Any] = json.loads(connection.recv_bytes())
            if (child := os.fork()) == 0:
                os.setsid()
                connection.close()
                return request
            connection.send_bytes(json.dumps(child).encode())
            _, status = os.waitpid(child, 0)
            connection.send_bytes(json.dumps(os.waitstatus_to_exitcode(status)).encode())
    return None


def preload() -> None:
    """Import what is installed of the libraries."""
    names = PRELOADED + (PRELOADED_WITH_MLX if sys.platform == "linux" else ())
    for name in names:
        if importlib.util.find_spec(name.partition(".")[0]):
            importlib.import_module(name)


def what_is_not_clean(root: Path) -> list[str]:
    """Modules whose files belong to the copy, and threads, which no child would inherit."""
    files = {name: getattr(module, "__file__", None) for name, module in sys.modules.items()}
    loaded = [
        name
        for name, file in files.items()
        if file and Path(file).resolve().is_relative_to(root) and "mutation" not in Path(file).parts
    ]
    threads = psutil.Process().num_threads()
    return [*sorted(loaded), *([f"{threads} threads"] if threads > 1 else [])]


def run(request: dict[str, Any]) -> int:
    """In the child: what a fresh interpreter would do; returns the exit code."""
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # it is chosen once, and TMPDIR differs
    importlib.invalidate_caches()
    if module := request.get("module"):
        importlib.import_module(module)
        return 0
    sys.argv = ["pytest", *request["arguments"]]
    if request["coverage"]:
        return _measured(request["coverage"], lambda: _pytest(request["arguments"]))
    return _pytest(request["arguments"])


def _pytest(arguments: list[str]) -> int:
    import pytest

    return int(pytest.main(arguments))


def _measured(settings: str, call: Callable[[], int]) -> int:
    import coverage

    measured = coverage.Coverage(config_file=settings)
    measured.start()
    try:
        return call()
    finally:
        measured.stop()
        measured.save()


if __name__ == "__main__":
    sys.exit(serve(Connection(int(sys.argv[1])), Path.cwd()))
