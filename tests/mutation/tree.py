"""Copies of a tree in which a bug is planted: the tree itself is never changed."""

from __future__ import annotations

import compileall
import contextlib
import hashlib
import io
import os
import py_compile
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from .parts import Project
from support.verdict import NotShown

TESTS = Path(__file__).parents[1]
NOT_DOCS = ":(exclude)docs"
"""The document that a run writes does not change what it measures."""


def commit_of(root: Path, *, is_dirty_allowed: bool) -> str:
    """The commit that is measured.

    Raises:
        NotShown: if files differ from it.
    """
    changed = _git(root, "status", "--porcelain", "--untracked-files=all", "--", ".", NOT_DOCS)
    if changed and not is_dirty_allowed:
        raise NotShown(f"files differ from the commit, which gives the seed:\n{changed}")
    return _git(root, "rev-parse", "HEAD")


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise NotShown(done.stderr.strip())
    return done.stdout.strip()


def copy_of(project: Project, folder: Path) -> Project:
    """A copy, compiled so that a file's content decides whether its compiled form is stale.

    By default its size and its time do, and a planted bug may change neither.
    """
    shutil.copytree(project.root, folder, symlinks=True, ignore=_left_behind)
    if (models := project.root / "models").is_dir():
        (folder / "models").symlink_to(models.resolve())
    with contextlib.redirect_stdout(io.StringIO()):
        compileall.compile_dir(
            folder, quiet=2, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH
        )
    return project.at(folder)


def _left_behind(folder: str, names: list[str]) -> set[str]:
    big = {"models", "build", "dist", "__pycache__"}
    return {
        name for name in names if name in big or (name.startswith(".") and name != ".gitignore")
    }


def environment_of(copy: Project, extra: Mapping[str, str]) -> dict[str, str]:
    """What processes of a trial run with: the copy's code before any that is installed."""
    roots = [os.fspath(copy.root / folder) for folder in copy.import_roots]
    path = os.pathsep.join([*roots, os.fspath(TESTS)])
    return {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0", **extra}


def digest_of(root: Path, paths: Iterable[str]) -> str:
    """One value for the content of files and of all Python files in folders."""
    found = hashlib.sha256()
    for path in sorted(paths):
        place = root / path
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            found.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return found.hexdigest()


def digests_of(root: Path, paths: Iterable[str]) -> dict[str, str]:
    """The digest of each file or folder; empty for what does not exist."""
    return {p: digest_of(root, [p]) if (root / p).exists() else "" for p in sorted(paths)}
