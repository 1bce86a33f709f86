"""Somebody else's code, which uses what is installed: do type checkers find its types?"""

from __future__ import annotations

import os
import sys

from support.environments import Environment, run_well

USER = """\
from mlxsup import AsyncClient, Client, ConnectionLost, RequestError, __version__

version: str = __version__
with Client("ipc:///nowhere") as client:
    text: str = client.complete("m", prompt="x").text
    wrong: int = client.complete("m", prompt="x").text  # type: ignore[assignment]
"""
"""Code of somebody else: mypy complains of the comment if it does not know the types."""


def check_types(environment: Environment) -> None:
    """Has mypy check that code against what an environment has; it must find nothing wrong."""
    user = environment.elsewhere / "user.py"
    user.write_text(USER)
    options = ("--strict", "--cache-dir", os.devnull, "--python-executable", environment.python)
    run_well(sys.executable, "-m", "mypy", *options, user, cwd=environment.elsewhere)
