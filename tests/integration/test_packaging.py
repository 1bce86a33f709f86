"""The wheels of mlxsup and mlxsup-client, built from sdists, and what they do when installed.

Libraries are lent from the environment that runs the tests, so that nothing large is downloaded;
the client alone has pyzmq, msgpack and psutil from a registry.
"""

from __future__ import annotations

import os
import sys
import zipfile
from pathlib import Path

import pytest

from support.cli.installed_daemon import daemon_of
from support.environments import Environment, need_registry, run, run_well
from support.wheels import PROJECT, ROOT, Builder, Built, names_in

pytestmark = pytest.mark.timeout(1200)

PARTS = ("protocol", "store", "supervisor", "worker", "client", "gateway", "downloader", "cli")
PAGE_FILES = "gateway/page/files"
"""What browsers get: no Python, and no folder below it."""

SCHEMA = "cli/mlxsup.schema.json"
"""What `mlxsup config schema` prints."""

PEER = "supervisor"
"""PyPI's process supervisor: its package has the name of one of our folders."""

# ---------------------------------------------------------------- what is in them


def test_the_wheel_holds_every_file_of_every_package_and_nothing_else(built: Built) -> None:
    expected = {"mlxsup/__init__.py", "mlxsup/py.typed", f"mlxsup/{SCHEMA}"}
    for part in PARTS:
        for path in (built.source / part).rglob("*"):
            is_of_page = path.parent == built.source / PAGE_FILES
            if path.suffix == ".py" or path.name == "py.typed" or is_of_page:
                expected.add(f"mlxsup/{path.relative_to(built.source).as_posix()}")
    names = names_in(built.wheel)
    assert {name for name in names if ".dist-info/" not in name} == expected
    for part in ("protocol", "supervisor", "worker", "client"):
        assert f"mlxsup/{part}/py.typed" in names


def metadata(wheel: Path) -> dict[str, str]:
    """The texts beside the package, by the name of their file."""
    with zipfile.ZipFile(wheel) as archive:
        return {Path(n).name: archive.read(n).decode() for n in names_in(wheel) if "-info" in n}


def test_licence_entry_point_and_metadata_are_in_the_wheel(built: Built) -> None:
    texts = metadata(built.wheel)
    assert texts["LICENSE"] == (ROOT / "LICENSE").read_text()
    assert "mlxsup = mlxsup.cli.__main__:run" in texts["entry_points.txt"]
    assert "License-Expression: Apache-2.0" in texts["METADATA"]
    for requirement in PROJECT["project"]["dependencies"]:
        name = requirement.partition(">")[0]
        assert f"Requires-Dist: {name}" in texts["METADATA"]


CLIENT_PARTS = ("client", "protocol")
SHARED = ("mlxsup/__init__.py", "mlxsup/py.typed", *(f"mlxsup/{part}/" for part in CLIENT_PARTS))


def contents(wheel: Path) -> dict[str, bytes]:
    """Every file of the package in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in names_in(wheel) if ".dist-info/" not in name}


def test_the_client_s_wheel_holds_the_shared_files_a_licence_and_no_command(
    built: Built, built_client: Built
) -> None:
    shared = {n: text for n, text in contents(built.wheel).items() if n.startswith(SHARED)}
    own = contents(built_client.wheel)
    assert own == shared
    assert {f"mlxsup/{part}/py.typed" for part in CLIENT_PARTS} < set(own)
    texts = metadata(built_client.wheel)
    assert texts["LICENSE"] == (ROOT / "LICENSE").read_text()
    assert "entry_points.txt" not in texts
    required = [line for line in texts["METADATA"].splitlines() if "Requires-Dist" in line]
    assert required == [
        "Requires-Dist: pyzmq>=26",
        "Requires-Dist: msgpack>=1.1.0",
        "Requires-Dist: psutil>=5.9",
    ]


# ---------------------------------------------------------------- that they work


@pytest.mark.slow
def test_the_command_and_the_worker_run_away_from_the_checkout(installed: Environment) -> None:
    version = installed.evaluates("from mlxsup.protocol.version import VERSION; print(VERSION)")
    assert installed.says("mlxsup", "--version") == f"mlxsup {version}\n"
    assert installed.says("python", "-m", "mlxsup.worker", "--help").startswith("usage: ")
    assert "start" in installed.says("mlxsup", "--help")
    where = installed.evaluates("import mlxsup.cli.main as m; print(m.__file__)")
    assert Path(where).is_relative_to(installed.site_packages), "not the checkout's"


@pytest.mark.slow
def test_only_the_worker_imports_mlx_A3(installed: Environment) -> None:
    code = (
        "import importlib, sys\n"
        "for name in ('client', 'supervisor.daemon', 'supervisor.config.load', 'cli.main',\n"
        "             'cli.commands.start'):\n"
        "    importlib.import_module('mlxsup.' + name)\n"
        "print(sorted(n for n in sys.modules if n.partition('.')[0] in ('mlx', 'mlx_lm')))\n"
    )
    assert installed.evaluates(code) == "[]"


PROGRAM = """\
import sys
from mlxsup import AsyncClient, Client

with Client() as client:
    for delta in client.generate("m", prompt="[[say hello from another environment]]"):
        print(delta.text, end="", flush=True)
print()
print(AsyncClient.__module__)
print(sorted(name for name in sys.modules if name.startswith(("mlx.", "mlx_lm", "pydantic"))))
"""


@pytest.fixture
def of_client(built_client: Built, tmp_path: Path) -> Environment:
    """A clean environment with mlxsup-client and what it requires, and nothing lent."""
    environment = Environment.make(tmp_path / "env")
    done = environment.pip("install", "--quiet", "--no-compile", built_client.wheel)
    need_registry(done, "pyzmq, msgpack and psutil")
    return environment


@pytest.mark.slow
def test_a_daemon_serves_its_command_and_the_client_of_another_environment(
    installed: Environment, of_client: Environment
) -> None:
    packages = {path.name.partition("-")[0] for path in of_client.site_packages.glob("*.dist-info")}
    assert packages == {"mlxsup_client", "pyzmq", "msgpack", "psutil"}
    program = of_client.elsewhere / "program.py"
    program.write_text(PROGRAM)
    with daemon_of(installed) as config:
        target = ("--config", str(config))
        assert installed.says("mlxsup", "generate", "m", "[[say hello]]", *target) == "hello\n"
        done = run(of_client.python, program, cwd=of_client.elsewhere, MLXSUP_CONFIG=str(config))
        assert "stopped" in installed.says("mlxsup", "stop", *target)
    assert (done.returncode, done.stderr) == (0, "")
    said = ["hello from another environment", "mlxsup.client.async_client", "[]"]
    assert done.stdout.splitlines() == said


TYPED = """\
from mlxsup import AsyncClient, Client, ConnectionLost, RequestError, __version__

version: str = __version__
with Client("ipc:///nowhere") as client:
    text: str = client.complete("m", prompt="x").text
    wrong: int = client.complete("m", prompt="x").text  # type: ignore[assignment]
"""
"""Code of a user: mypy complains of the comment if it does not know the types."""


@pytest.mark.slow
def test_type_checkers_know_an_editable_install(builder: Builder) -> None:
    """They look into py.typed, and not where an import hook of an editable install would lead."""
    environment = builder.environment
    how = ("--quiet", "--no-build-isolation", "--no-deps", "--no-index")
    environment.pip_well("install", *how, "--editable", builder.source)
    environment.lend_libraries()
    user = environment.elsewhere / "user.py"
    user.write_text(TYPED)
    options = ("--strict", "--cache-dir", os.devnull, "--python-executable", environment.python)
    run_well(sys.executable, "-m", "mypy", *options, user, cwd=environment.elsewhere)
    where = environment.evaluates("import mlxsup.client; print(mlxsup.client.__file__)")
    assert Path(where).is_relative_to(builder.source)


# ---------------------------------------------------------------- beside other distributions


@pytest.mark.slow
def test_neither_the_client_nor_pypi_s_supervisor_is_in_the_way(
    built: Built, built_client: Built, tmp_path: Path
) -> None:
    """All three are installed; then one is removed after the other."""
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet")
    only = ("--no-deps", "--dest", tmp_path / "peer", "--only-binary", ":all:")
    need_registry(run(*pip, *only, PEER, cwd=tmp_path), f"PyPI's {PEER}")
    (peer,) = (tmp_path / "peer").iterdir()
    environment = Environment.make(tmp_path / "env")
    environment.lend_libraries()
    environment.install(peer, built.wheel, built_client.wheel)
    files = sorted(names_in(built.wheel) & names_in(peer))
    assert files == [], "both install the same files"
    version = environment.says("mlxsup", "--version")
    assert version.startswith("mlxsup "), "the same files, whichever was installed last"

    environment.pip_well("uninstall", "--quiet", "--yes", "mlxsup-client")
    broken = run(environment.folder / "bin" / "mlxsup", "--version", cwd=environment.elsewhere)
    assert (broken.returncode, broken.stdout) == (1, "")
    assert broken.stderr == (
        "mlxsup: parts of the installed package are missing (mlxsup.protocol)\n"
        "hint: install mlxsup again; mlxsup-client shares files with it, so keep only one of the"
        " two\n"
    )
    environment.install("--force-reinstall", built.wheel)
    assert environment.says("mlxsup", "--version") == version

    def peer_version() -> str:
        own = environment.evaluates("import supervisor.supervisord as s; print(s.__file__)")
        assert Path(own).is_relative_to(environment.site_packages / PEER)
        return environment.says("supervisord", "--version").strip()

    assert peer.name.startswith(f"{PEER}-{peer_version()}-")
    environment.pip_well("uninstall", "--quiet", "--yes", "mlxsup")
    assert peer.name.startswith(f"{PEER}-{peer_version()}-"), "something of it was taken"
    assert not any((environment.site_packages / "mlxsup").rglob("*.py")), "files of it are left"
