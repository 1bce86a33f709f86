"""Files and functions stay readable, imports form no circle, tests keep out of private parts."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRODUCT = ("protocol", "store", "supervisor", "worker", "client", "gateway", "downloader", "cli")
OTHERS = ("tests", "bench", "tools")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
DOCUMENTED_SIGNATURES = {("client/api.py", "generate")}
"""The one signature that lists every parameter with its sentence."""

OWN = {"self", "cls", "mcs"}
FOREIGN = {"os._exit", "asyncio.Handle._run", "interpreter._receive"}
"""Of the standard library, and of the class that a test tool defines itself."""


def files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_no_file_is_longer_than_a_reader_can_hold() -> None:
    long = {
        name(path): lines
        for path in files(*PRODUCT, *OTHERS)
        if (lines := path.read_text().count("\n")) > MAX_FILE_LINES
    }
    assert long == {}


def test_no_function_is_longer_than_a_screen() -> None:
    long = {
        (name(path), node.name): node.end_lineno - node.lineno + 1
        for path in files(*PRODUCT, *OTHERS)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
    }
    assert set(long) <= DOCUMENTED_SIGNATURES, long


# ---------------------------------------------------------------- circles


def modules(*folders: str, prefix: str, base: Path) -> dict[str, Path]:
    """Every module below the folders, by the name that it is imported by."""
    found = {}
    for path in files(*folders):
        parts = path.relative_to(base).with_suffix("").parts
        found[prefix + ".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(module: str, path: Path, known: dict[str, Path]) -> Iterator[str]:
    """The modules that one imports when it is imported; not those inside of functions."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                parent = ".".join(parts[: len(parts) - node.level + 1])
                base = f"{parent}.{base}".strip(".")
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield full if full in known else base
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def circle(known: dict[str, Path]) -> list[str]:
    """A circle of imports; empty if there is none."""
    graph = {
        module: {other for other in imported(module, path, known) if other in known} - {module}
        for module, path in known.items()
    }
    done: set[str] = set()

    def walk(module: str, above: list[str]) -> list[str]:
        if module in above:
            return [*above[above.index(module) :], module]
        if module in done:
            return []
        for other in sorted(graph[module]):
            if found := walk(other, [*above, module]):
                return found
        done.add(module)
        return []

    for module in graph:
        if found := walk(module, []):
            return found
    return []


@pytest.mark.parametrize(
    ("folders", "prefix", "base"), [(PRODUCT, "mlxsup.", "."), (("tests",), "", "tests")]
)
def test_imports_form_no_circle(folders: tuple[str, ...], prefix: str, base: str) -> None:
    known = modules(*folders, prefix=prefix, base=ROOT / base)
    assert len(known) > 90
    assert circle(known) == []


# ---------------------------------------------------------------- private parts


def test_no_test_reaches_into_private_attributes() -> None:
    found = [
        f"{name(path)}:{node.lineno}: {ast.unparse(node)}"
        for path in files(*OTHERS)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and not (isinstance(node.value, ast.Name) and node.value.id in OWN)
        and ast.unparse(node) not in FOREIGN
    ]
    assert found == []
