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
from pathlib import Path

from mlxsup.protocol.ids import DEFAULT_REVISION
from mlxsup.protocol.regular_file import lock, open_regular

PREFIX = "models--"
SNAPSHOTS = "snapshots"
REFERENCES = "refs"

OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
YES = {"1", "ON", "YES", "TRUE"}
"""What huggingface_hub takes for true in these variables."""

REPOSITORY_EXPECTED = 'a repository such as "mlx-community/SmolLM2-135M-Instruct"'
REVISION_EXPECTED = "a branch, tag or commit"

MAX_REFERENCE_BYTES = 256

# The hub's own rules: at most 96 characters for each of the two parts.
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?"
_REPOSITORY = re.compile(f"({_PART}/)?{_PART}")
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./+@-]{0,254}")


# ---------------------------------------------------------------- names


def check_repository(name: str) -> str:
    """Return the name if a hub may have a repository that is called so.

    Raises:
        ValueError: no hub has; says what was expected.
    """
    # In the names of a cache's folders `--` separates the parts, and `..` leaves the folder.
    leads_elsewhere = "--" in name or ".." in name or name.endswith(".git")
    if leads_elsewhere or not _REPOSITORY.fullmatch(name):
        raise ValueError(REPOSITORY_EXPECTED)
    return name


def check_revision(name: str) -> str:
    """Return the name if a branch, tag or commit may be called so.

    Raises:
        ValueError: none may; says what was expected.
    """
    has_odd_part = any(not part or part.startswith(".") for part in name.split("/"))
    if has_odd_part or not _REVISION.fullmatch(name):
        raise ValueError(REVISION_EXPECTED)
    return name


def is_owned_repository(text: str) -> bool:
    """True if a text reads as OWNER/NAME; a relative folder may be called so as well."""
    try:
        return "/" in check_repository(text)
    except ValueError:
        return False


def is_offline() -> bool:
    """True if the user has forbidden to ask a hub, by huggingface_hub's variables."""
    return any(os.environ.get(name, "").upper() in YES for name in OFFLINE_VARIABLES)


# ---------------------------------------------------------------- folders


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


def repository_of(folder: Path) -> str | None:
    """Return the repository that a folder of a cache is for, by its name; None: for none."""
    if not folder.name.startswith(PREFIX):
        return None
    try:
        return check_repository(folder.name.removeprefix(PREFIX).replace("--", "/", 1))
    except ValueError:
        return None


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


def find_snapshot(
    repo: str, revision: str = DEFAULT_REVISION, *, cache: Path | None = None
) -> Path | None:
    """Return the folder with what has arrived of a repository; None if the cache has nothing.

    Raises:
        ValueError: the name or the revision cannot be one.
        OSError: the cache cannot be read.
    """
    folder = repository_folder(repo, find_cache() if cache is None else cache)
    path = folder / SNAPSHOTS / commit_of(folder, check_revision(revision))
    return path if path.is_dir() else None


def commit_of(folder: Path, revision: str) -> str:
    """Return the commit that a revision means; a commit means itself."""
    try:
        with open(open_regular(folder / REFERENCES / revision), "rb") as file:
            return check_revision(file.read(MAX_REFERENCE_BYTES).decode("ascii", "replace").strip())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return revision
    except OSError as error:
        if error.errno == errno.EINVAL:  # a folder, because other revisions begin with its name
            return revision
        raise


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


# ---------------------------------------------------------------- one download at a time


class InUseError(Exception):
    """Another process of this machine downloads or removes the repository."""


def _refuse() -> None:
    raise InUseError


@contextmanager
def sole_user(
    folder: Path, on_wait: Callable[[], None] = _refuse, *, name: str = "mlxsup"
) -> Iterator[None]:
    """Hold the lock of a repository, that of downloads and removals, or of one of its files.

    On a disk without locks what huggingface_hub writes is safe, but may be fetched twice.

    Args:
        folder: that a cache has, or would have, for the repository. The lock is beside those of
            huggingface_hub.
        on_wait: called if another process has the lock, which is then waited for unless this
            raises.
        name: of the lock; huggingface_hub's are the digests of its files.

    Raises:
        InUseError: another process has it, without `on_wait`.
        OSError: the file of the lock cannot be made.
    """
    path = folder.parent / ".locks" / folder.name / f"{name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        lock(file.fileno(), on_wait)
        yield
