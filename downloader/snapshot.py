"""Download one repository into the Hugging Face cache, by the hub library's public functions.

huggingface_hub fetches the files and makes the snapshot. Here is decided which files a model needs
and whether the disk has room for them; digests are compared; and the branch is written down last.
Until then a worker that loads the model finds the commit that was complete before.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, get_session, snapshot_download
from huggingface_hub.hf_api import RepoFile
from tqdm.auto import tqdm  # type: ignore[import-untyped]

from mlxsup.protocol.download import (
    DownloadDone,
    DownloadProblem,
    DownloadProgress,
    DownloadReport,
    Repository,
)
from mlxsup.protocol.text import size_text
from mlxsup.protocol.version import VERSION
from mlxsup.store.hub_cache import (
    SNAPSHOTS,
    InUseError,
    check_repository,
    check_revision,
    commit_of,
    find_snapshot,
    repository_folder,
    sole_user,
    write_reference,
)
from mlxsup.store.model_folder import CONFIG, missing_files

from .failures import (
    ANOTHER_WAY,
    DAMAGED_HINT,
    DISK_HINT,
    ENDPOINT_HINT,
    NO_MODEL_HINT,
    DownloadError,
    bad_repository,
    explain,
)

PATTERNS = (
    "*.json",
    "model*.safetensors",
    "[0-9]_Dense/model.safetensors",
    "tokenizer.model",
    "*.tiktoken",
    "tiktoken.model",
    "*.txt",
    "*.jsonl",
    "*.jinja",
    "README.md",
)
"""What a worker reads of a repository, except for Python files: no code of a model is ever run; and
its card, which names its licence."""

PARALLEL_FILES = 4
SPARE_DISK_BYTES = 64 * 2**20
"""What stays free on the disk, for logs and for the records of the cache."""

REPORT_INTERVAL_S = 0.25

_COMMIT = re.compile(r"[0-9a-f]{40}")


def fetch(repository: Repository, report: Callable[[DownloadReport], None]) -> DownloadDone:
    """Download what is missing of a repository, and return when all of it is there.

    Offline, nothing is asked: a repository that is complete is done, and any other one fails.

    Raises:
        Exception: anything that `failures.explain` puts into words.
    """
    try:
        check_repository(repository.repo)
        check_revision(repository.revision)
    except ValueError:
        raise bad_repository(repository) from None
    cache = Path(constants.HF_HUB_CACHE).absolute()
    if constants.HF_HUB_OFFLINE and (done := _found_offline(repository, cache)):
        return done
    folder = repository_folder(repository.repo, cache)
    with sole_user(folder, lambda: report(DownloadProgress(is_waiting=True))):
        commit, files = _list(repository)
        return _fetch_files(repository, commit, files, folder, report)


def _found_offline(repository: Repository, cache: Path) -> DownloadDone | None:
    """Return what the cache has of a repository; None if files of it are missing."""
    snapshot = find_snapshot(repository.repo, repository.revision, cache=cache)
    if snapshot is None or missing_files(snapshot):
        return None
    files = (path for path in snapshot.rglob("*") if path.is_file())
    total_bytes = sum(path.stat().st_size for path in files)
    return DownloadDone(folder=str(snapshot), total_bytes=total_bytes, fetched_bytes=0)


def _list(repository: Repository) -> tuple[str, list[RepoFile]]:
    """Return the commit that a revision means, and those of its files that a model needs."""
    api = HfApi(library_name="mlxsup", library_version=VERSION)
    get_session().event_hooks["request"].append(_limit_silence)
    endpoint = constants.ENDPOINT
    try:
        commit = api.model_info(repository.repo, revision=repository.revision).sha or ""
    except (TypeError, KeyError, AttributeError):
        message = f"{endpoint} is not a model hub"
        raise DownloadError(DownloadProblem.NETWORK, message, ENDPOINT_HINT) from None
    if not _COMMIT.fullmatch(commit):
        message = f"{endpoint} did not return a commit for {repository}"
        raise DownloadError(DownloadProblem.NETWORK, message, ENDPOINT_HINT)
    tree = api.list_repo_tree(repository.repo, recursive=True, revision=commit)
    files = {entry.path: entry for entry in tree if isinstance(entry, RepoFile)}
    chosen = [path for path in files if any(fnmatchcase(path, name) for name in PATTERNS)]
    if CONFIG not in chosen or not any(path.endswith(".safetensors") for path in chosen):
        suffixes = {path.rpartition(".")[2] for path in files}
        other = next((name for name in ("gguf", "bin", "npz") if name in suffixes), "")
        message = f"{repository} is not an MLX model: config.json or *.safetensors is missing"
        message += f"; it has .{other} files" if other else ""
        raise DownloadError(DownloadProblem.NO_MODEL, message, NO_MODEL_HINT)
    return commit, [files[path] for path in chosen]


def _limit_silence(request: Any) -> None:
    """Limit how long the hub may be silent, for what the library asks without a limit: lists."""
    limits = request.extensions["timeout"]
    request.extensions["timeout"] = {
        name: constants.HF_HUB_DOWNLOAD_TIMEOUT if limit_s is None else limit_s
        for name, limit_s in limits.items()
    }


def _fetch_files(
    repository: Repository,
    commit: str,
    files: Sequence[RepoFile],
    folder: Path,
    report: Callable[[DownloadReport], None],
) -> DownloadDone:
    snapshot = folder / SNAPSHOTS / commit
    _remove_parts(folder)
    missing = [file for file in files if not _is_here(file, folder, snapshot)]
    missing_bytes = sum(file.size for file in missing)
    total_bytes = sum(file.size for file in files)
    _check_sizes(repository, missing)
    _check_disk(folder, missing_bytes, repository)
    # Files of a commit that no reference names may come from a process that died before it had
    # compared their digests.
    is_known = commit_of(folder, repository.revision) == commit != repository.revision
    unchecked = missing if is_known else files
    done_bytes = total_bytes - missing_bytes
    # A byte may be damaged on the way; a file that is wrong twice is wrong at the hub.
    for is_last in (False, True):
        try:
            path = snapshot_download(
                repository.repo,
                revision=commit,  # the branch may have moved since
                allow_patterns=[file.path for file in files],
                max_workers=PARALLEL_FILES,
                tqdm_class=bar_class(done_bytes, total_bytes, report),
                library_name="mlxsup",
                library_version=VERSION,
            )
            _check_files(repository, unchecked, snapshot)
            break
        except (DownloadError, OSError) as error:
            if is_last or explain(error, repository).problem is not DownloadProblem.DAMAGED:
                raise
    write_reference(folder, repository.revision, commit)
    report(DownloadProgress(done_bytes=total_bytes, total_bytes=total_bytes))
    return DownloadDone(folder=path, total_bytes=total_bytes, fetched_bytes=missing_bytes)


def _remove_parts(folder: Path) -> None:
    """Remove the halves of files that killed downloads have left: the library begins anew.

    It names each part after its file's digest and a random number (huggingface_hub pull request
    4228), and holds the file's lock meanwhile.
    """
    for part in folder.glob("blobs/*.incomplete"):
        # Another program may fetch it, or another user own it.
        with suppress(InUseError, OSError), sole_user(folder, name=part.name.partition(".")[0]):
            part.unlink(missing_ok=True)


def _is_here(file: RepoFile, folder: Path, snapshot: Path) -> bool:
    blob = file.lfs.sha256 if file.lfs is not None else file.blob_id
    return (snapshot / file.path).exists() or (folder / "blobs" / blob).exists()


def _check_sizes(repository: Repository, missing: Sequence[RepoFile]) -> None:
    """Raise DownloadError if a file is larger than the library fetches without Xet."""
    most = max((file.size for file in missing), default=0)
    if constants.HF_HUB_DISABLE_XET and most > constants.MAX_HTTP_DOWNLOAD_SIZE:
        message = (
            f"{constants.ENDPOINT} does not send {repository} over plain HTTP: a file of it has"
            f" {size_text(most)}"
        )
        hint = ANOTHER_WAY.format(repo=repository.repo)
        raise DownloadError(DownloadProblem.REFUSED, message, hint)


def _check_disk(folder: Path, missing_bytes: int, repository: Repository) -> None:
    """Raise DownloadError if what is missing cannot fit."""
    existing = next(parent for parent in folder.parents if parent.is_dir())
    free_bytes = shutil.disk_usage(existing).free
    if missing_bytes and missing_bytes + SPARE_DISK_BYTES > free_bytes:
        message = (
            f"{repository} needs {size_text(missing_bytes)} more, but the disk of {existing} "
            f"has only {size_text(free_bytes)} free"
        )
        raise DownloadError(DownloadProblem.DISK_FULL, message, DISK_HINT)


def _check_files(repository: Repository, files: Sequence[RepoFile], snapshot: Path) -> None:
    """Flush files to the disk, and remove each one whose digest is not what the hub lists.

    Raises:
        DownloadError: a file is damaged, or the library has given up without an error.
    """
    for file in files:
        path = snapshot / file.path
        if not path.exists():  # the library takes a folder that is there if the hub falls silent
            message = f"cannot reach {constants.ENDPOINT}: {file.path} is missing"
            raise DownloadError(DownloadProblem.NETWORK, message, ENDPOINT_HINT)
        with path.open("rb") as content:
            os.fsync(content.fileno())  # the reference must not outlive them in a power cut
            if file.lfs is None:
                continue
            digest = hashlib.file_digest(content, "sha256").hexdigest()
        if digest != file.lfs.sha256:
            path.resolve().unlink()
            path.unlink(missing_ok=True)
            message = f"{file.path} of {repository} has the wrong checksum"
            raise DownloadError(DownloadProblem.DAMAGED, message, DAMAGED_HINT)


def bar_class(
    before_bytes: int, total_bytes: int, report: Callable[[DownloadReport], None]
) -> type[Any]:
    """Return the class of a bar that draws nothing, and report now and then how much has arrived.

    The library counts files, the bytes that it receives and those that it writes, each on a bar;
    the bar that is ahead is reported.

    Args:
        before_bytes: what was there before.
        total_bytes: of the model.
        report: called with the progress, from any thread, one call at a time.
    """
    arrived: Counter[int] = Counter()
    lock = threading.Lock()
    reported_at = float("-inf")

    def count(bar: int, more_bytes: int) -> None:
        nonlocal reported_at
        with lock:
            arrived[bar] += more_bytes
            now = time.monotonic()
            if now >= reported_at + REPORT_INTERVAL_S:
                reported_at = now
                done_bytes = min(before_bytes + max(arrived.values()), total_bytes)
                report(DownloadProgress(done_bytes=done_bytes, total_bytes=total_bytes))

    class Bar(tqdm):  # type: ignore[misc]
        monitor_interval = 0  # no thread that redraws

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> None:
            count(id(self), int(n or 0))

    # tqdm's own lock is shared by processes, for which a Mac starts one more.
    Bar.set_lock(threading.RLock())
    count(0, 0)
    return Bar
