"""The Hugging Face cache: names of repositories, their snapshots, and the lock of a download.

`models--OWNER--NAME/refs/REVISION` names a commit, and `snapshots/COMMIT` is the folder with the
files, links to `blobs`.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mlxsup.protocol.ids import DEFAULT_REVISION
from mlxsup.protocol.regular_file import lock, open_regular

from .description import missing_files

PREFIX = "models--"
SNAPSHOTS = "snapshots"
REFERENCES = "refs"
LOCKS = ".locks"
LOCK_NAME = "mlxsup.lock"

OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
YES = {"1", "ON", "YES", "TRUE"}
"""What huggingface_hub takes for true in these variables."""

REPOSITORY_EXPECTED = 'a repository such as "mlx-community/SmolLM2-135M-Instruct"'
REVISION_EXPECTED = "a branch, tag or commit"

MAX_REFERENCE_BYTES = 256

# The hub's own rules: at most 96 characters for each of the two parts.
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?"
_REPOSITORY = re.compile(f"(?:{_PART}/)?{_PART}")
_OWNED = re.compile(f"{_PART}/{_PART}")
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./+@-]{0,254}")


# ---------------------------------------------------------------- names


def check_repository(name: str) -> str:
    """Return the name if a hub may have a repository that is called so.

    Raises:
        ValueError: no hub has; says what was expected.
    """
    if _REPOSITORY.fullmatch(name) and not _leads_elsewhere(name):
        return name
    raise ValueError(REPOSITORY_EXPECTED)


def check_revision(name: str) -> str:
    """Return the name if a branch, tag or commit may be called so.

    Raises:
        ValueError: none may; says what was expected.
    """
    parts = name.split("/")
    if _REVISION.fullmatch(name) and all(part and part[0] != "." for part in parts):
        return name
    raise ValueError(REVISION_EXPECTED)


def is_owned_repository(text: str) -> bool:
    """True if a text reads as OWNER/NAME; a relative folder may be called so as well."""
    return bool(_OWNED.fullmatch(text)) and not _leads_elsewhere(text)


def _leads_elsewhere(name: str) -> bool:
    # In the names of a cache's folders `--` separates the parts, and `..` leaves the folder.
    return "--" in name or ".." in name or name.endswith(".git")


def is_offline() -> bool:
    """True if the user has forbidden to ask a hub, by huggingface_hub's variables."""
    return any(os.environ.get(name, "").upper() in YES for name in OFFLINE_VARIABLES)


# ---------------------------------------------------------------- folders


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The files of a repository at one revision.

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
        """True if a load finds all its files."""
        return not self.missing


def find_cache() -> Path:
    """Return the folder of the cache, as huggingface_hub finds it; it need not exist."""
    given = os.environ
    home = os.path.join(given.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    default = os.path.join(given.get("HF_HOME", home), "hub")
    chosen = given.get("HF_HUB_CACHE", given.get("HUGGINGFACE_HUB_CACHE", default))
    return Path(os.path.expandvars(os.path.expanduser(chosen))).absolute()


def repository_folder(repo: str, cache: Path) -> Path:
    """Return where the cache has, or would have, a repository.

    Raises:
        ValueError: there is no repository of this name.
    """
    return cache / (PREFIX + check_repository(repo).replace("/", "--"))


def find_snapshot(
    repo: str, revision: str = DEFAULT_REVISION, *, cache: Path | None = None
) -> Snapshot | None:
    """Return the snapshot of a repository; None if the cache does not have it.

    Raises:
        ValueError: the name or the revision cannot be one.
        OSError: the cache cannot be read.
    """
    folder = repository_folder(repo, find_cache() if cache is None else cache)
    commit = commit_of(folder, check_revision(revision))
    path = folder / SNAPSHOTS / commit
    if not path.is_dir():
        return None
    return Snapshot(
        repo=repo, revision=revision, commit=commit, path=path, missing=missing_files(path)
    )


def commit_of(folder: Path, revision: str) -> str:
    """Return the commit that a revision means; a commit means itself."""
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


def write_reference(folder: Path, revision: str, commit: str) -> None:
    """Write down which commit a branch or tag means, whose files are complete.

    Raises:
        OSError: the cache cannot be written to.
    """
    if commit_of(folder, revision) == commit:  # a commit means itself
        return
    reference = folder / REFERENCES / revision
    reference.parent.mkdir(parents=True, exist_ok=True)
    new = reference.with_name(f"{reference.name}.{os.getpid()}.tmp")
    new.write_text(commit)
    os.replace(new, reference)


def repositories(cache: Path) -> Iterator[str]:
    """Yield the models in a cache, in the order of their names.

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
    """Return the repository that a folder of a cache is for, by its name; None: for none."""
    if not folder.name.startswith(PREFIX):
        return None
    repo = folder.name.removeprefix(PREFIX).replace("--", "/", 1)
    try:
        return check_repository(repo)
    except ValueError:
        return None


# ---------------------------------------------------------------- one download at a time


class InUseError(Exception):
    """Another process of this machine downloads or removes the repository."""


def lock_of(folder: Path) -> Path:
    """Return the file that is locked for the repository that a cache has, or would have, in this
    folder; it is beside huggingface_hub's own locks."""
    return folder.parent / LOCKS / folder.name / LOCK_NAME


@contextmanager
def sole_download(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Wait until no other process of this machine has the lock, and hold it.

    On a disk without locks what huggingface_hub writes is safe, but may be fetched twice.

    Args:
        path: of `lock_of`.
        on_wait: called if there is another one to wait for; what it raises ends the waiting.

    Raises:
        OSError: the file cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        lock(file.fileno(), on_wait)
        yield


@contextmanager
def no_download(path: Path) -> Iterator[None]:
    """Hold the lock.

    Raises:
        InUseError: another process has it.
        OSError: the file cannot be made.
    """

    def refuse() -> None:
        raise InUseError

    with sole_download(path, refuse):
        yield
