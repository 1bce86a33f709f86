"""packaging/client: what mlxsup-client declares fits what its files import, and mlxsup."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "packaging/client"
OWN = tomllib.loads((FOLDER / "pyproject.toml").read_text())
WHOLE = tomllib.loads((ROOT / "pyproject.toml").read_text())

DISTRIBUTIONS = {"zmq": "pyzmq"}
"""By the name that is imported, if it is another one."""

SAME = ("requires-python", "license", "license-files", "dynamic")


def imported(path: Path) -> Iterator[str]:
    """Every module that a file imports by its whole name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield str(node.module)


def subpackages() -> list[Path]:
    """The folders of the package that hold Python files, which are links."""
    return [path for path in (FOLDER / "mlxsup").iterdir() if (path / "__init__.py").is_file()]


def sources() -> list[Path]:
    """The files of the package, through its links."""
    folders = subpackages()
    return [FOLDER / "mlxsup/__init__.py", *(p for f in folders for p in f.glob("**/*.py"))]


def test_its_files_import_what_it_requires_or_contains() -> None:
    folders = {path.name for path in subpackages()}
    assert folders == {"client", "protocol"}
    found = set()
    for path in sources():
        for name in imported(path):
            top, *rest = name.split(".")
            if top == "mlxsup":
                assert rest[0] in folders, f"{path} imports {name}"
            elif top not in sys.stdlib_module_names:
                found.add(DISTRIBUTIONS.get(top, top))
    required = [re.split("[<>=]", one)[0] for one in OWN["project"]["dependencies"]]
    assert found == set(required)


@pytest.mark.parametrize("key", SAME)
def test_it_says_the_same_as_mlxsup(key: str) -> None:
    assert OWN["project"][key] == WHOLE["project"][key]


def test_its_requirements_backend_and_version_are_those_of_mlxsup() -> None:
    assert set(OWN["project"]["dependencies"]) < set(WHOLE["project"]["dependencies"])
    assert OWN["build-system"] == WHOLE["build-system"]
    dynamic = OWN["tool"]["setuptools"]["dynamic"]
    assert dynamic == WHOLE["tool"]["setuptools"]["dynamic"]
