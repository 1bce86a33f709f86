"""A daemon of another user: exit code 77, whatever is asked of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.cli import environment

LIMIT_S = 60.0
AS_NOBODY = """
import importlib, os, sys
import mlxsup.cli.lock_holder, mlxsup.client, psutil
from mlxsup.cli.main import main
importlib.import_module(f"mlxsup.cli.commands.{sys.argv[1]}")
if os.geteuid() == 0:
    os.seteuid(65534)  # once everything is imported: only root may read this environment
main(sys.argv[1:])
"""


@pytest.fixture
def endpoint() -> Iterator[str]:
    """A socket's path in a folder that only its owner may look into."""
    folder = Path(tempfile.mkdtemp(prefix="mlxsup-t-", dir="/tmp"))
    run = folder / "run"
    run.mkdir(mode=0o700 if os.geteuid() == 0 else 0o000)
    folder.chmod(0o755)
    yield f"ipc://{run}/client.sock"
    run.chmod(0o700)
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    "arguments",
    [["status"], ["generate", "m", "hello"], ["attach", "r1"], ["wait"], ["stop"]],
    ids=" ".join,
)
def test_a_daemon_of_another_user_is_named_as_that(endpoint: str, arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", AS_NOBODY, *arguments, "--endpoint", endpoint, "--json"],
        env=environment(HOME="/nonexistent"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (77, "")
    error = json.loads(done.stdout)["error"]
    assert error["code"] == "no_permission"
    assert error["message"] == f"the daemon at {endpoint} belongs to another user"
    assert "mlxsup config path" in error["hint"]
