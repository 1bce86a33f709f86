"""The distributions of this tree, built from a copy of it, and what is in them."""

from __future__ import annotations

import shutil
import tarfile
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

from support.environments import Environment, need_registry, run_well

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CLIENT_FOLDER = "packaging/client"
"""The second distribution, of the client alone."""

BUILD = """\
import sys
from setuptools import build_meta
print(getattr(build_meta, sys.argv[1])(sys.argv[2]))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Builder:
    """What builds.

    Attributes:
        source: a copy of the checkout.
        environment: with the build backend that pyproject.toml names.
        targets: where each thing that is built gets a folder.
    """

    source: Path
    environment: Environment
    targets: Path

    def build(self, kind: str, where: Path, name: str) -> Path:
        """Has the backend build a thing; returns its file.

        Args:
            kind: `build_wheel` or `build_sdist`.
            where: the folder of its pyproject.toml.
            name: of the folder that it is put into.
        """
        target = self.targets / name
        target.mkdir()
        said = run_well(self.environment.python, "-c", BUILD, kind, target, cwd=where)
        return target / said.splitlines()[-1]

    def build_all(self, where: Path, name: str) -> Built:
        """Has the backend build the sdist of one distribution, and a wheel out of that alone."""
        sdist = self.build("build_sdist", where, f"{name}-sdist")
        with tarfile.open(sdist) as archive:
            archive.extractall(self.targets / f"{name}-unpacked", filter="data")
        (unpacked,) = (self.targets / f"{name}-unpacked").iterdir()
        return Built(self.source, self.build("build_wheel", unpacked, name))


class Built(NamedTuple):
    """A wheel, and the copy of the checkout that it comes from."""

    source: Path
    wheel: Path


@pytest.fixture(scope="session")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    """The build backend, and a copy of the checkout."""
    folder = tmp_path_factory.mktemp("build")
    environment = Environment.make(folder / "builder")
    requirements = PROJECT["build-system"]["requires"]
    need_registry(environment.pip("install", "--quiet", *requirements), "the build backend")
    source = folder / "source"
    unwanted = (".*", "models", "build", "dist", "*.egg-info", "__pycache__", "shared")
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*unwanted), symlinks=True)
    return Builder(source=source, environment=environment, targets=folder)


@pytest.fixture(scope="session")
def built(builder: Builder) -> Built:
    """The wheel of mlxsup."""
    return builder.build_all(builder.source, "mlxsup")


@pytest.fixture(scope="session")
def built_client(builder: Builder) -> Built:
    """The wheel of mlxsup-client."""
    return builder.build_all(builder.source / CLIENT_FOLDER, "client")


def names_in(wheel: Path) -> set[str]:
    """The names of the files of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="session")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """A clean environment with the wheel, and the libraries lent."""
    environment = Environment.make(tmp_path_factory.mktemp("clean") / "env")
    environment.install(built.wheel)
    environment.lend_libraries()
    return environment
