"""Wheel and sdist: what is in them, and that they work away from the checkout.

Built and installed in separate folders and environments; the libraries that mlxsup needs are
lent from the environment that runs the tests, so that nothing large is downloaded.
"""

from __future__ import annotations

import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from support.cli.installed_daemon import daemon_of
from support.cli.typed_user import check_types
from support.environments import Environment, need_registry, run
from support.wheels import PROJECT, ROOT, Built, names_in

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


def test_licence_entry_point_and_metadata_are_in_the_wheel(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        texts = {
            Path(n).name: archive.read(n).decode() for n in names_in(built.wheel) if "-info" in n
        }
    assert texts["LICENSE"] == (ROOT / "LICENSE").read_text()
    assert "mlxsup = mlxsup.cli.__main__:run" in texts["entry_points.txt"]
    assert "License-Expression: Apache-2.0" in texts["METADATA"]
    for requirement in PROJECT["project"]["dependencies"]:
        name = requirement.partition(">")[0]
        assert f"Requires-Dist: {name}" in texts["METADATA"]


def test_the_sdist_alone_gives_the_same_wheel(built: Built) -> None:
    assert names_in(built.wheel_of_sdist) == names_in(built.wheel)
    with tarfile.open(built.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "PKG-INFO"} <= names


# ---------------------------------------------------------------- that they work


def test_the_command_and_the_worker_run_away_from_the_checkout(installed: Environment) -> None:
    version = installed.evaluates("from mlxsup.protocol.version import VERSION; print(VERSION)")
    assert installed.says("mlxsup", "--version") == f"mlxsup {version}\n"
    assert installed.says("python", "-m", "mlxsup.worker", "--help").startswith("usage: ")
    assert "start" in installed.says("mlxsup", "--help")
    where = installed.evaluates("import mlxsup.cli.main as m; print(m.__file__)")
    assert Path(where).is_relative_to(installed.site_packages), "not the checkout's"


def test_only_the_worker_imports_mlx_A3(installed: Environment) -> None:
    code = (
        "import importlib, sys\n"
        "for name in ('client', 'supervisor.daemon', 'supervisor.config.load', 'cli.main',\n"
        "             'cli.commands.start'):\n"
        "    importlib.import_module('mlxsup.' + name)\n"
        "print(sorted(n for n in sys.modules if n.partition('.')[0] in ('mlx', 'mlx_lm')))\n"
    )
    assert installed.evaluates(code) == "[]"


def test_the_version_is_told_without_importing_what_takes_time(installed: Environment) -> None:
    code = (
        "import sys\n"
        "from mlxsup.cli.main import main\n"
        "try: main(['--version'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = ('pydantic', 'rich', 'zmq', 'msgpack', 'psutil', 'asyncio', 'mlx')\n"
        "print([name for name in heavy if name in sys.modules])\n"
    )
    assert installed.evaluates(code).splitlines()[-1] == "[]"


def test_a_daemon_runs_from_the_wheel(installed: Environment) -> None:
    with daemon_of(installed) as config:
        target = ("--config", str(config))
        said = installed.says("mlxsup", "generate", "m", "[[say hello]]", *target)
        assert said == "hello"
        assert "stopped" in installed.says("mlxsup", "stop", *target)


def test_type_checkers_know_an_editable_install(built: Built, tmp_path: Path) -> None:
    environment = Environment.make(tmp_path / "env")
    requirements = PROJECT["build-system"]["requires"]
    need_registry(environment.pip("install", "--quiet", *requirements), "the build backend")
    how = ("--quiet", "--no-build-isolation", "--no-deps", "--no-index")
    environment.pip_well("install", *how, "--editable", built.source)
    environment.lend_libraries()
    check_types(environment)
    where = environment.evaluates("import mlxsup.client; print(mlxsup.client.__file__)")
    assert Path(where).is_relative_to(built.source)


# ---------------------------------------------------------------- beside PyPI's supervisor


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of PyPI's `supervisor`."""
    folder = tmp_path_factory.mktemp("peer")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet")
    done = run(*pip, "--no-deps", "--dest", folder, "--only-binary", ":all:", PEER, cwd=folder)
    need_registry(done, f"PyPI's {PEER}")
    (wheel,) = folder.iterdir()
    return wheel


def test_pypi_supervisor_works_beside_it_and_after_it(
    built: Built, peer: Path, tmp_path: Path
) -> None:
    environment = Environment.make(tmp_path / "env")
    environment.lend_libraries()
    for wheel in (peer, built.wheel):
        environment.pip_well("install", "--quiet", "--no-deps", "--no-index", wheel)
    files = sorted(names_in(built.wheel) & names_in(peer))
    assert files == [], "both install the same files"

    def peer_version() -> str:
        own = environment.evaluates("import supervisor.supervisord as s; print(s.__file__)")
        assert Path(own).is_relative_to(environment.site_packages / PEER)
        return environment.says("supervisord", "--version").strip()

    version = peer_version()
    assert peer.name.startswith(f"{PEER}-{version}-")
    assert environment.says("mlxsup", "--version").startswith("mlxsup ")
    environment.pip_well("uninstall", "--quiet", "--yes", "mlxsup")
    assert peer_version() == version, "uninstalling mlxsup took something of it"
    assert not any((environment.site_packages / "mlxsup").rglob("*")), "files of it are left"
