"""The Hugging Face cache: the repositories that it holds, and the folder of a snapshot.

`models--OWNER--NAME/refs/REVISION` names a commit, and `snapshots/COMMIT` is the folder with the
files, links to `blobs`. Nothing is copied, and nothing is written here.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mlxsup.protocol.regular_file import open_regular

from .contents import missing_files
from .repositories import DEFAULT_REVISION, check_repository, check_revision

PREFIX = "models--"
SNAPSHOTS = "snapshots"
REFERENCES = "refs"

MAX_REFERENCE_BYTES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The files of a repository at one revision, as far as they are in the cache.

    Attributes:
        repo: OWNER/NAME.
        revision: as it was asked for.
        commit: that the revision means in this cache.
        path: the folder.
        missing: the names of files that a load needs and the folder does not have: a download
            that has not ended, or a repository that is no model of mlx-lm.
    """

    repo: str
    revision: str
    commit: str
    path: Path
    missing: tuple[str, ...]

    @property
    def is_complete(self) -> bool:
        """Whether a load finds all its files."""
        return not self.missing


def find_cache(environment: Mapping[str, str] | None = None) -> Path:
    """The folder of the cache, as huggingface_hub finds it; it need not exist.

    Args:
        environment: of the process; None: this one's.
    """
    given = os.environ if environment is None else environment
    home = given.get("HF_HOME")
    if home is None:
        home = os.path.join(given.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    default = os.path.join(home, "hub")
    chosen = given.get("HF_HUB_CACHE", given.get("HUGGINGFACE_HUB_CACHE", default))
    return Path(os.path.expandvars(os.path.expanduser(chosen))).absolute()


def repository_folder(repo: str, cache: Path) -> Path:
    """Where the cache has, or would have, a repository.

    Raises:
        ValueError: there is no repository of this name.
    """
    return cache / (PREFIX + check_repository(repo).replace("/", "--"))


def find_snapshot(
    repo: str, revision: str = DEFAULT_REVISION, *, cache: Path | None = None
) -> Snapshot | None:
    """The snapshot of a repository; None if the cache does not have it.

    Args:
        repo: OWNER/NAME.
        revision: a branch, tag or full commit.
        cache: the folder of the cache; None: that of this process's environment.

    Raises:
        ValueError: the name or the revision cannot be one.
        OSError: the cache cannot be read.
    """
    folder = repository_folder(repo, find_cache() if cache is None else cache)
    commit = _commit(folder, check_revision(revision))
    path = folder / SNAPSHOTS / commit
    if not path.is_dir():
        return None
    return Snapshot(
        repo=repo, revision=revision, commit=commit, path=path, missing=missing_files(path)
    )


def _commit(folder: Path, revision: str) -> str:
    """What a revision means; a commit means itself."""
    try:
        with open(open_regular(folder / REFERENCES / revision), "rb") as file:
            text = file.read(MAX_REFERENCE_BYTES).decode("ascii", "replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return revision
    except OSError as error:
        if error.errno == errno.EINVAL:  # a folder, because other revisions begin with its name
            return revision
        raise
    try:
        return check_revision(text)
    except ValueError:
        return revision


def repositories(cache: Path) -> Iterator[str]:
    """The models in a cache, in the order of their names.

    Raises:
        OSError: the cache cannot be read.
    """
    if not cache.is_dir():
        return
    for name in sorted(os.listdir(cache)):
        repo = repository_of(cache / name)
        if repo is not None and os.path.isdir(cache / name):
            yield repo


def repository_of(folder: Path) -> str | None:
    """The repository that a folder of a cache is for, by its name; None if it is none."""
    if not folder.name.startswith(PREFIX):
        return None
    repo = folder.name.removeprefix(PREFIX).replace("--", "/", 1)
    try:
        return check_repository(repo)
    except ValueError:
        return None
