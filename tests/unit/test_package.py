"""What `import mlxsup` gives, and what it costs."""

from __future__ import annotations

import pydoc
import subprocess
import sys

import pytest

import mlxsup
import mlxsup.client
from mlxsup.protocol.version import VERSION

CHEAP = """\
import sys
before = set(sys.modules)
import mlxsup
new = {name.partition(".")[0] for name in set(sys.modules) - before}
others = sorted(new - sys.stdlib_module_names - {"mlxsup"})
heavy = [name for name in ("asyncio", "mlxsup.client") if name in sys.modules]
print(mlxsup.__version__, others, heavy)
"""


def test_the_client_and_the_version_come_from_the_package_itself() -> None:
    assert mlxsup.__version__ == VERSION
    assert {"AsyncClient", "Client", "ConnectionLost", "RequestError"} < set(mlxsup.__all__)
    for name in mlxsup.__all__:
        assert name in dir(mlxsup)
        if name != "__version__":
            assert getattr(mlxsup, name) is getattr(mlxsup.client, name)
    with pytest.raises(AttributeError, match="has no attribute 'Server'"):
        mlxsup.Server  # noqa: B018


@pytest.mark.parametrize("name", ["mlxsup", "mlxsup.client"])
def test_help_and_completion_know_both_clients(name: str) -> None:
    """In a new process, because it is the first mention that matters."""
    code = f"import {name} as module\nprint(dir(module))\nhelp(module)"
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    names, _, helped = said.partition("\n")
    assert {"AsyncClient", "Client"} <= set(eval_names(names))
    assert "class AsyncClient" in pydoc.plain(helped)
    assert "class Client" in pydoc.plain(helped)


def eval_names(line: str) -> list[str]:
    """The texts of a printed list."""
    return [part.strip(" '[]") for part in line.split(",")]


def test_the_import_alone_loads_no_client() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHEAP], capture_output=True, text=True, timeout=60, check=True
    )
    version, _, rest = done.stdout.strip().partition(" ")
    assert version == VERSION
    assert rest == "[] []"
