"""The rules of docs/architecture.md that a machine can read: imports, packages, modules."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("protocol", "store", "supervisor", "worker", "client", "gateway", "downloader", "cli")

ALLOWED = {
    "protocol": set(),
    "store": {"protocol"},
    "worker": {"protocol"},
    "supervisor": {"protocol", "store"},
    "client": {"protocol"},
    "gateway": {"protocol", "client"},
    "downloader": {"protocol", "store"},
    "cli": {"protocol", "store", "client", "supervisor"},
}
MLX_ONLY_IN = "worker/engines/mlx/"
HUB_ONLY_IN = "downloader"
WORDS = ("start", "config", "plan", "init", "show")
SUPERVISOR_ONLY_IN = {f"cli/commands/{word}.py" for word in WORDS} | {
    "cli/checked_folders.py",
    "cli/doctor/gathering/folders.py",
    "cli/doctor/gathering/machine.py",
    "cli/doctor/gathering/setting.py",
    "cli/proof/subject.py",
    "cli/model_catalog.py",
}
CORE_FORBIDDEN = {"asyncio", "zmq", "psutil", "os", "time", "threading", "socket", "subprocess"}
FORBIDDEN = {"pickle", "marshal", "shelve", "dill"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}


def sources() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Modules that a file imports, absolute; relative ones as `.level` counts."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, 0
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "", node.level


@pytest.fixture(params=[str(path.relative_to(ROOT)) for path in sources()])
def source(request: pytest.FixtureRequest) -> Path:
    name: str = request.param
    return ROOT / name


def test_imports_between_packages_are_those_allowed(source: Path) -> None:
    package = source.relative_to(ROOT).parts[0]
    for name, _ in imports(source):
        if name.startswith("mlxsup."):
            other = name.split(".")[1]
            assert other != package, f"{source}: import siblings with a dot, not {name}"
            assert other in ALLOWED[package], f"{source} imports {name}"
            if other == "supervisor":
                assert str(source.relative_to(ROOT)) in SUPERVISOR_ONLY_IN


def test_only_the_engine_imports_mlx_A3(source: Path) -> None:
    is_engine = source.relative_to(ROOT).as_posix().startswith(MLX_ONLY_IN)
    roots = {name.split(".")[0] for name, level in imports(source) if level == 0}
    assert is_engine or not roots & {"mlx", "mlx_lm", "transformers", "tokenizers"}


def test_only_the_downloader_imports_the_hub(source: Path) -> None:
    roots = {name.split(".")[0] for name, level in imports(source) if level == 0}
    is_downloader = source.relative_to(ROOT).parts[0] == HUB_ONLY_IN
    assert is_downloader or not roots & {"huggingface_hub", "httpx2", "hf_xet"}


def test_nobody_uses_the_streams_that_mlx_lm_makes_at_import_A5(source: Path) -> None:
    names = {
        node.id if isinstance(node, ast.Name) else getattr(node, "attr", getattr(node, "name", ""))
        for node in ast.walk(ast.parse(source.read_text()))
    }
    assert "generation_stream" not in names


def test_the_core_is_pure(source: Path) -> None:
    parts = source.relative_to(ROOT).parts
    if parts[:2] != ("supervisor", "core"):
        return
    depth = len(parts) - 2
    for name, level in imports(source):
        assert name.split(".")[0] not in CORE_FORBIDDEN, f"{source} imports {name}"
        assert level <= depth, f"{source} imports from the shell"


def test_the_worker_has_no_event_loop(source: Path) -> None:
    if source.relative_to(ROOT).parts[0] == "worker":
        assert "asyncio" not in {name.split(".")[0] for name, _ in imports(source)}


def test_msgpack_is_imported_by_the_codec_alone(source: Path) -> None:
    if source != ROOT / "protocol" / "codec.py":
        assert "msgpack" not in {name for name, _ in imports(source)}


def test_nothing_is_unpickled_or_evaluated(source: Path) -> None:
    tree = ast.parse(source.read_text())
    roots = {name.split(".")[0] for name, _ in imports(source)}
    assert not roots & FORBIDDEN
    calls = {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not calls & FORBIDDEN_CALLS


def test_workers_are_executed_never_forked_A9(source: Path) -> None:
    tree = ast.parse(source.read_text())
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not attributes & {"fork", "forkpty"}
    assert "multiprocessing" not in {name.split(".")[0] for name, _ in imports(source)}


def test_every_folder_of_the_product_is_a_package(source: Path) -> None:
    """setuptools finds those that have an `__init__.py`, and no others."""
    assert (source.parent / "__init__.py").is_file()


def test_what_is_installed_is_every_package_and_the_root_above_them() -> None:
    entries = list((ROOT / "typings" / "mlxsup").iterdir())
    links = {entry.name: entry.resolve() for entry in entries if entry.is_symlink()}
    assert links == {package: ROOT / package for package in PACKAGES}
    files = {entry.name for entry in entries if not entry.is_symlink()}
    assert files - {"__pycache__"} == {"__init__.py", "py.typed"}
