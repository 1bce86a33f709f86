"""Fetches one repository into the Hugging Face cache, and picks up what an earlier attempt left.

huggingface_hub lists the repository, fetches files, and makes the snapshot. What it does not do is
keep half a file when its process ends, and so the large files are fetched here, into the places
where it looks for them, before it is asked for the snapshot.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.file_download import (
    _cache_commit_hash_for_specific_revision as write_reference,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils._paths import filter_repo_objects

from mlxsup.protocol.download import (
    DownloadDone,
    DownloadProgress,
    DownloadReport,
    Repository,
)
from mlxsup.protocol.text import size_text
from mlxsup.protocol.version import VERSION
from mlxsup.store.download_lock import lock_of, sole_download
from mlxsup.store.hub_cache import find_snapshot, repository_folder
from mlxsup.store.repositories import check_repository, check_revision

from .failures import (
    BadRepositoryError,
    DiskFullError,
    MisleadingHubError,
    NoModelError,
)
from .large_file import LargeFile, fetch_large
from .progress import Meter

PATTERNS = (
    "*.json",
    "model*.safetensors",
    "tokenizer.model",
    "*.tiktoken",
    "tiktoken.model",
    "*.txt",
    "*.jsonl",
    "*.jinja",
    "README.md",
)
"""What mlx-lm reads of a repository, except for Python files: no code of a model is ever run; and
its card, which names its licence."""

PARALLEL_FILES = 4
SPARE_DISK_BYTES = 64 * 2**20
"""What stays free on the disk, for logs and for the files that come with the large ones."""

_COMMIT = re.compile(r"[0-9a-f]{40}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Listing:
    """What a repository holds at a commit.

    Attributes:
        commit: its id.
        files: those that a model needs.
    """

    commit: str
    files: Sequence[RepoFile]


def fetch(repository: Repository, report: Callable[[DownloadReport], None]) -> DownloadDone:
    """Downloads what is missing of a repository, and returns when all of it is there.

    Offline, nothing is asked: a repository that is complete is done, and any other one fails.

    Args:
        repository: what to download.
        report: called with the progress, a few times a second at most.

    Raises:
        Exception: anything that `failures.explain` puts into words.
    """
    try:
        check_repository(repository.repo)
        check_revision(repository.revision)
    except ValueError as error:
        raise BadRepositoryError from error
    cache = Path(constants.HF_HUB_CACHE).absolute()
    if constants.HF_HUB_OFFLINE and (done := _found_offline(repository, cache)):
        return done
    folder = repository_folder(repository.repo, cache)
    with sole_download(lock_of(folder), lambda: report(DownloadProgress(is_waiting=True))):
        listing = _list(HfApi(library_name="mlxsup", library_version=VERSION), repository)
        return _fetch_files(repository, listing, folder, report)


def _found_offline(repository: Repository, cache: Path) -> DownloadDone | None:
    """What the cache has of a repository; None if files of it are missing."""
    snapshot = find_snapshot(repository.repo, repository.revision, cache=cache)
    if snapshot is None or not snapshot.is_complete:
        return None
    files = (path for path in snapshot.path.rglob("*") if path.is_file())
    total_bytes = sum(path.stat().st_size for path in files)
    return DownloadDone(folder=str(snapshot.path), total_bytes=total_bytes, fetched_bytes=0)


def _list(api: HfApi, repository: Repository) -> _Listing:
    try:
        commit = api.model_info(repository.repo, revision=repository.revision).sha or ""
    except (TypeError, KeyError, AttributeError) as error:
        message = f"{constants.ENDPOINT} does not answer as a model hub does"
        raise MisleadingHubError(message) from error
    if not _COMMIT.fullmatch(commit):
        raise MisleadingHubError(f"{constants.ENDPOINT} gives no commit for {repository}")
    tree = api.list_repo_tree(repository.repo, recursive=True, revision=commit)
    files = {entry.path: entry for entry in tree if isinstance(entry, RepoFile)}
    chosen = list(filter_repo_objects(files, allow_patterns=list(PATTERNS)))
    has_weights = any(path.endswith(".safetensors") for path in chosen)
    if "config.json" not in chosen or not has_weights:
        raise NoModelError(repository, list(files))
    return _Listing(commit=commit, files=[files[path] for path in chosen])


def _fetch_files(
    repository: Repository,
    listing: _Listing,
    folder: Path,
    report: Callable[[DownloadReport], None],
) -> DownloadDone:
    """Fetches the large files, then has the snapshot made of them, with the small ones."""
    snapshot = folder / "snapshots" / listing.commit
    missing = [one for one in listing.files if not (snapshot / one.path).exists()]
    large = [found for one in missing if (found := _large(repository, listing, one, folder))]
    total_bytes = sum(one.size for one in listing.files)
    here_bytes = total_bytes - sum(one.size for one in missing)
    large_bytes = sum(one.done_bytes for one in large)
    fetched_before = here_bytes + large_bytes
    _check_disk(folder, total_bytes - fetched_before, repository)
    meter = Meter(total_bytes, fetched_before, report)
    with ThreadPoolExecutor(PARALLEL_FILES, thread_name_prefix="fetch") as pool:
        for done in [pool.submit(fetch_large, one, meter) for one in large]:
            done.result()
    path = snapshot_download(
        repository.repo,
        revision=listing.commit,  # the branch may have moved since
        allow_patterns=[one.path for one in listing.files],
        library_name="mlxsup",
        library_version=VERSION,
    )
    write_reference(str(folder), repository.revision, listing.commit)
    report(DownloadProgress(done_bytes=total_bytes, total_bytes=total_bytes))
    return DownloadDone(
        folder=path, total_bytes=total_bytes, fetched_bytes=total_bytes - fetched_before
    )


def _large(
    repository: Repository, listing: _Listing, file: RepoFile, folder: Path
) -> LargeFile | None:
    """A file that is fetched here; None for a small one, and for one whose digest is not given."""
    digest = file.lfs.sha256 if file.lfs is not None else ""
    if not _DIGEST.fullmatch(digest):
        return None
    return LargeFile(
        repo=repository.repo,
        commit=listing.commit,
        path=file.path,
        size_bytes=file.size,
        digest=digest,
        blob=folder / "blobs" / digest,
    )


def _check_disk(folder: Path, missing_bytes: int, repository: Repository) -> None:
    """Raises DiskFullError if what is missing cannot fit."""
    existing = next(parent for parent in folder.parents if parent.is_dir())
    free_bytes = shutil.disk_usage(existing).free
    if missing_bytes and missing_bytes + SPARE_DISK_BYTES > free_bytes:
        raise DiskFullError(
            f"{repository} needs {size_text(missing_bytes)} more on the disk of {existing}, of"
            f" which {size_text(free_bytes)} are free"
        )
