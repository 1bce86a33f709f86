"""What ended a download, as a sentence and the next step; repeats no text of a hub, no token."""

from __future__ import annotations

import difflib
import errno
from collections.abc import Sequence
from typing import Any

import httpx2
from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils._http import parse_ratelimit_headers

from mlxsup.protocol.download import DownloadFailed, DownloadProblem, Repository
from mlxsup.store.repositories import REPOSITORY_EXPECTED, is_owned_repository

FULL_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
KEPT_HINT = "what has arrived is kept"
DAMAGED_HINT = (
    "the hub's data is damaged, or a proxy changes it: report it to the owner of the repository, or"
    " name another revision or repository"
)
LOGIN_HINT = "set HF_TOKEN, or use `hf auth login`"
REQUEST_TIMEOUT = 408
MAX_CLOSE_NAMES = 3
SEARCHED_MODELS = 50

MISSHAPEN = (ValueError, TypeError, KeyError, AttributeError)
"""What huggingface_hub raises about an answer that is not JSON, or JSON of another shape."""


class BadRepositoryError(Exception):
    """No repository or revision can be called that."""


class DiskFullError(Exception):
    """The model does not fit on the disk; the message is one sentence."""


class DamagedError(Exception):
    """What arrived twice is not what had been announced; the message is one sentence."""


class MissingFileError(Exception):
    """The hub does not have a file that it lists; the message is one sentence."""


class MisleadingHubError(Exception):
    """The hub's answer cannot be used; the message is one sentence."""


class NoModelError(Exception):
    """The repository holds no model that can be served.

    Args:
        repository: which.
        paths: the files that it holds.
    """

    def __init__(self, repository: Repository, paths: Sequence[str]) -> None:
        suffixes = {path.rpartition(".")[2] for path in paths}
        what = next((name for name in ("gguf", "bin", "npz") if name in suffixes), "")
        has = f"; it has .{what} files" if what else ""
        super().__init__(f"{repository} holds no config.json with model*.safetensors{has}")


def explain(error: BaseException, repository: Repository) -> DownloadFailed:
    """Puts any error of a download into words."""
    match error:
        case OfflineModeIsEnabled():
            return _failed(
                DownloadProblem.OFFLINE,
                f"{repository} is not complete on this disk, and HF_HUB_OFFLINE is set",
                "unset HF_HUB_OFFLINE to download it",
            )
        case DiskFullError():
            return _failed(DownloadProblem.DISK_FULL, str(error), _disk_hint())
        case DamagedError() | MissingFileError():
            return _failed(DownloadProblem.DAMAGED, str(error), DAMAGED_HINT)
        case MisleadingHubError():
            return _failed(DownloadProblem.NETWORK, str(error), _endpoint_hint())
        case NoModelError():
            hint = "mlx-lm's format is needed: look for a repository with `mlx` in its name"
            return _failed(DownloadProblem.NO_MODEL, str(error), hint)
        case HfHubHTTPError():
            return _of_hub(error, repository)
        case BadRepositoryError() | HFValidationError():
            message = f"no repository can be called {repository.repo!r} ({repository.revision})"
            hint = f"name {REPOSITORY_EXPECTED}, as in its address"
            return _failed(DownloadProblem.BAD_REPOSITORY, message, hint)
        case ValueError():
            message = f"{constants.ENDPOINT} does not answer as a model hub does"
            return _failed(DownloadProblem.NETWORK, message, _endpoint_hint())
        case LocalEntryNotFoundError() if isinstance(error.__cause__, Exception):
            return explain(error.__cause__, repository)
        case httpx2.HTTPError():
            message = f"{constants.ENDPOINT} does not answer, or no longer: {type(error).__name__}"
            return _failed(DownloadProblem.NETWORK, message, KEPT_HINT)
        case OSError(errno=number) if number in FULL_DISK:
            message = f"the disk is full: {repository} is not complete"
            return _failed(DownloadProblem.DISK_FULL, message, f"{_disk_hint()}; {KEPT_HINT}")
        case OSError(errno=None):
            message = f"{repository} did not arrive as it was announced"
            return _failed(DownloadProblem.DAMAGED, message, DAMAGED_HINT)
        case OSError():
            message = f"{constants.HF_HUB_CACHE} cannot be written: {error.strerror}"
            return _failed(DownloadProblem.UNWRITABLE, message, _folder_hint())
        case _:
            message = f"internal error: {type(error).__name__}"
            return _failed(DownloadProblem.INTERNAL, message, "please report it")


def _of_hub(error: HfHubHTTPError, repository: Repository) -> DownloadFailed:
    """The hub has refused."""
    status = error.response.status_code
    match error:
        case GatedRepoError():
            page = f"{constants.ENDPOINT}/{repository.repo}"
            then = "try again" if get_token() else LOGIN_HINT
            hint = f"accept its terms at {page}, then {then}"
            return _failed(DownloadProblem.GATED, f"{repository.repo} is gated", hint)
        case RevisionNotFoundError():
            message = f"{repository.repo} has no revision {repository.revision!r}"
            return _failed(DownloadProblem.NOT_FOUND, message, "leave the revision out for `main`")
        case RepositoryNotFoundError():
            return _not_found(repository)
        case RemoteEntryNotFoundError():
            message = f"{constants.ENDPOINT} lists a file of {repository} that it does not have"
            return _failed(DownloadProblem.DAMAGED, message, DAMAGED_HINT)
    if status == 429:
        wait_s = _retry_after(error.response.headers)
        when = f" in {wait_s:.0f} s" if wait_s else " in some minutes"
        return DownloadFailed(
            problem=DownloadProblem.RATE_LIMITED,
            message=f"{constants.ENDPOINT} gets too many requests from here",
            hint=f"try again{when}; a token (HF_TOKEN) raises the limit",
            retry_after_s=wait_s,
        )
    if status in (401, 403):
        message = f"{constants.ENDPOINT} refuses access to {repository.repo} (HTTP {status})"
        hint = "check HF_TOKEN: `hf auth whoami`" if get_token() else LOGIN_HINT
        return _failed(DownloadProblem.REFUSED, message, hint)
    if status == 404:
        return _not_found(repository)
    if 400 <= status < 500 and status != REQUEST_TIMEOUT:
        message = f"{constants.ENDPOINT} does not send {repository} over plain HTTP (HTTP {status})"
        hint = f"`hf download {repository.repo}` may get it: it knows another way"
        return _failed(DownloadProblem.REFUSED, message, hint)
    message = f"{constants.ENDPOINT} answers with HTTP {status}"
    return _failed(DownloadProblem.NETWORK, message, KEPT_HINT)


def _not_found(repository: Repository) -> DownloadFailed:
    message = f"{constants.ENDPOINT} has no model repository {repository.repo!r}, or it is private"
    close = _close_names(repository.repo)
    if close:
        hint = f"did you mean {' or '.join(close)}?"
    elif get_token():
        hint = "check its id; if it is private, the token must be allowed to read it"
    else:
        hint = f"check its id; if it is private, {LOGIN_HINT}"
    return _failed(DownloadProblem.NOT_FOUND, message, hint)


def _close_names(repo: str) -> list[str]:
    """Repositories with similar names; none if the hub has this one, or cannot be asked."""
    author, _, name = repo.partition("/")
    api = HfApi()
    try:
        found = [one.id for one in api.list_models(search=name, limit=SEARCHED_MODELS)]
        found += [one.id for one in api.list_models(author=author, limit=SEARCHED_MODELS)]
    except (HfHubHTTPError, httpx2.HTTPError, *MISSHAPEN):
        return []
    if repo in found:
        return []  # it is there, and cannot be read
    known = [one for one in dict.fromkeys(found) if is_owned_repository(one)]
    return difflib.get_close_matches(repo, known, n=MAX_CLOSE_NAMES)


def _retry_after(headers: Any) -> float:
    """Seconds until the hub allows another request; 0 if it does not say."""
    given = headers.get("Retry-After", "")
    if given.isascii() and given.isdigit():
        return float(min(int(given), 24 * 3600))
    limits = parse_ratelimit_headers(headers)
    return float(limits.reset_in_seconds) if limits is not None else 0.0


def _disk_hint() -> str:
    return f"free some space, or set HF_HOME to a folder on another disk than {constants.HF_HOME}"


def _folder_hint() -> str:
    return f"set HF_HOME to a folder that you can write to; it is {constants.HF_HOME}"


def _endpoint_hint() -> str:
    return "check HF_ENDPOINT, firewall and proxy"


def _failed(problem: DownloadProblem, message: str, hint: str) -> DownloadFailed:
    return DownloadFailed(problem=problem, message=message, hint=hint)
