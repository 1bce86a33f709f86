"""Wheel and sdist: what is in them, and that they work away from the checkout.

Built and installed in separate folders and environments; the libraries that mlxsup needs are
lent from the environment that runs the tests, so that nothing large is downloaded.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(1200)

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PARTS = ("protocol", "supervisor", "worker", "client", "gateway", "cli")
PAGE_FILES = "gateway/page/files"
"""What browsers get: no Python, and no folder below it."""

PEER = "supervisor"
"""PyPI's process supervisor: its package has the name of one of our folders."""

BUILD = """\
import sys
from setuptools import build_meta
print(getattr(build_meta, sys.argv[1])(sys.argv[2]))
"""


def run(*command: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a command without anything of this checkout on its path."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "MLXSUP"))}
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def run_well(*command: str | Path, cwd: Path) -> str:
    """Runs a command that must succeed; returns what it printed."""
    done = run(*command, cwd=cwd)
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """A virtual environment.

    Attributes:
        folder: where it is.
        elsewhere: a working folder far from the checkout.
    """

    folder: Path
    elsewhere: Path

    @classmethod
    def make(cls, folder: Path) -> Environment:
        venv.create(folder, symlinks=True, with_pip=False)
        elsewhere = folder / "elsewhere"
        elsewhere.mkdir()
        return cls(folder=folder, elsewhere=elsewhere)

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        (found,) = self.folder.glob("lib/python*/site-packages")
        return found

    def pip(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """Runs the tests' own pip for this environment."""
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", self.python)
        return run(*pip, *arguments, cwd=self.elsewhere)

    def pip_well(self, *arguments: str | Path) -> None:
        """Runs pip, which must succeed."""
        done = self.pip(*arguments)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"

    def lend_libraries(self) -> None:
        """Makes the libraries of the running environment importable here, after what is here.

        Files of a kind that run at the start of Python, the editable install of mlxsup among them,
        are not looked at in a folder that is only named in a file like this one.
        """
        lent = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
        (self.site_packages / "lent.pth").write_text("".join(f"{path}\n" for path in sorted(lent)))

    def says(self, *command: str) -> str:
        """What a program of this environment prints, run in a folder far from the checkout."""
        return run_well(self.folder / "bin" / command[0], *command[1:], cwd=self.elsewhere)

    def evaluates(self, code: str) -> str:
        """What a piece of Python prints there."""
        return self.says("python", "-c", code).strip()


def need_registry(done: subprocess.CompletedProcess[str], what: str) -> None:
    """Skips where a package registry cannot be reached; any other trouble is a failure."""
    said = done.stdout + done.stderr
    if done.returncode and any(
        sign in said
        for sign in (
            "NewConnectionError",
            "NameResolutionError",
            "ConnectTimeoutError",
            "ProxyError",
        )
    ):
        pytest.skip(f"no package registry can be reached, which {what} would come from")
    assert done.returncode == 0, said


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """What was built.

    Attributes:
        source: the copy of the checkout that it was built from.
        wheel: out of a copy of the checkout.
        sdist: likewise.
        wheel_of_sdist: out of the unpacked sdist alone.
    """

    source: Path
    wheel: Path
    sdist: Path
    wheel_of_sdist: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Wheel and sdist, by the build backend that pyproject.toml names."""
    folder = tmp_path_factory.mktemp("build")
    builder = Environment.make(folder / "builder")
    requirements = PROJECT["build-system"]["requires"]
    need_registry(builder.pip("install", "--quiet", *requirements), "the build backend")
    source = folder / "source"
    unwanted = (".*", "models", "build", "dist", "*.egg-info", "__pycache__", "shared")
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*unwanted), symlinks=True)

    def build(kind: str, where: Path, target: Path) -> Path:
        target.mkdir()
        said = run_well(builder.python, "-c", BUILD, kind, target, cwd=where)
        return target / said.splitlines()[-1]

    sdist = build("build_sdist", source, folder / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return Built(
        source=source,
        sdist=sdist,
        wheel=build("build_wheel", source, folder / "wheel"),
        wheel_of_sdist=build("build_wheel", unpacked, folder / "wheel-of-sdist"),
    )


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """A clean environment with the wheel, and the libraries lent."""
    environment = Environment.make(tmp_path_factory.mktemp("clean") / "env")
    environment.pip_well("install", "--quiet", "--no-deps", "--no-index", built.wheel)
    environment.lend_libraries()
    return environment


# ---------------------------------------------------------------- what is in them


def test_the_wheel_holds_every_file_of_every_package_and_nothing_else(built: Built) -> None:
    expected = set()
    for part in PARTS:
        for path in (built.source / part).rglob("*"):
            is_of_page = path.parent == built.source / PAGE_FILES
            if path.suffix == ".py" or path.name == "py.typed" or is_of_page:
                expected.add(f"mlxsup/{path.relative_to(built.source).as_posix()}")
    names = names_in(built.wheel)
    assert {name for name in names if ".dist-info/" not in name} == expected
    for top_level in ("mlxsup/protocol", "mlxsup/supervisor", "mlxsup/worker", "mlxsup/client"):
        assert f"{top_level}/py.typed" in names


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


def test_a_daemon_runs_from_the_wheel(installed: Environment, tmp_path: Path) -> None:
    folder = Path("/tmp") / f"mlxsup-t-{os.getpid()}-wheel"
    folder.mkdir()
    try:
        config = folder / "config.toml"
        config.write_text(
            f'[supervisor]\nruntime_dir = "{folder}/run"\nlog_dir = "{folder}/logs"\n'
            '[models.m]\nengine = "fake"\n'
        )
        command = installed.folder / "bin" / "mlxsup"
        with (folder / "output").open("w") as output:
            daemon = subprocess.Popen(
                [command, "start", "--config", config],
                cwd=installed.elsewhere,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
            )
        try:
            assert daemon.stdout is not None
            assert "ipc://" in daemon.stdout.readline()
            target = ("--config", str(config))
            assert installed.says("mlxsup", "generate", "m", "[[say hello]]", *target) == "hello"
            assert "stopped" in installed.says("mlxsup", "stop", *target)
            assert daemon.wait(60) == 0
        finally:
            daemon.kill()
            daemon.wait(60)
            if daemon.stdout is not None:
                daemon.stdout.close()
    finally:
        shutil.rmtree(folder)


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


@pytest.mark.parametrize(
    "is_peer_first",
    [
        pytest.param(True, id="peer first"),
        pytest.param(False, id="mlxsup first", marks=pytest.mark.slow),
    ],
)
def test_pypi_supervisor_works_beside_it_and_after_it(
    built: Built, peer: Path, tmp_path: Path, is_peer_first: bool
) -> None:
    environment = Environment.make(tmp_path / "env")
    environment.lend_libraries()
    wheels = [peer, built.wheel] if is_peer_first else [built.wheel, peer]
    for wheel in wheels:
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
