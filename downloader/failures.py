"""Put what ended a download into a sentence and a next step; no text of a hub, no token."""

from __future__ import annotations

import re
import shlex
from typing import Any

import httpx2
from huggingface_hub import constants, get_token
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

from mlxsup.protocol.download import DownloadFailed, DownloadProblem, Repository, Search
from mlxsup.protocol.regular_file import FULL_DISK
from mlxsup.store.hub_cache import REPOSITORY_EXPECTED

NETWORK_HINT = "check the network"
SEARCH_HINT = f"{NETWORK_HINT}; `mlxsup models` lists what is on this machine"
DAMAGED_HINT = (
    "the data on the hub is damaged, or a proxy changes it; tell the owner of the repository, "
    "or use another revision or repository"
)
DISK_HINT = f"free some space, or set HF_HOME to a folder on another disk than {constants.HF_HOME}"
ENDPOINT_HINT = "check HF_ENDPOINT, firewall and proxy"
LOGIN_HINT = "set HF_TOKEN, or use `hf auth login`"
NO_MODEL_HINT = "mlx-lm's format is needed: `mlxsup search NAME` finds repositories that have it"
ANOTHER_WAY = "`hf download {repo}` may work, because it uses another protocol"
REQUEST_TIMEOUT = 408


class DownloadError(Exception):
    """A failure that is already in words."""

    def __init__(self, problem: DownloadProblem, message: str, hint: str) -> None:
        super().__init__(message)
        self.report = DownloadFailed(problem=problem, message=message, hint=hint)


def bad_repository(repository: Repository) -> DownloadError:
    """Return the failure of an id or a revision that no repository can have."""
    message = f"{repository.repo!r} ({repository.revision}) is not a valid repository"
    hint = f"give {REPOSITORY_EXPECTED}"
    return DownloadError(DownloadProblem.BAD_REPOSITORY, message, hint)


def explain(error: BaseException, work: Repository | Search) -> DownloadFailed:
    """Put any error of a download or a search into words."""
    match error:
        case DownloadError():
            return error.report
        case OfflineModeIsEnabled() if isinstance(work, Search):
            message = "HF_HUB_OFFLINE is set, so the hub is not asked"
            hint = "unset it to search; `mlxsup models` lists what is on this machine"
            return _failed(DownloadProblem.OFFLINE, message, hint)
        case OfflineModeIsEnabled():
            return _failed(
                DownloadProblem.OFFLINE,
                f"{work} is not fully downloaded, and HF_HUB_OFFLINE is set",
                "unset HF_HUB_OFFLINE to download it",
            )
        case HfHubHTTPError() if error.response.status_code == 429:
            return _rate_limited(error)
        case HfHubHTTPError() if isinstance(work, Repository):
            return _of_hub(error, work)
        case HfHubHTTPError():
            message = f"{constants.ENDPOINT} answered the search with HTTP"
            message += f" {error.response.status_code}"
            return _failed(DownloadProblem.REFUSED, message, ENDPOINT_HINT)
        case HFValidationError() if isinstance(work, Repository):
            return bad_repository(work).report
        case ValueError():
            message = f"{constants.ENDPOINT} is not a model hub"
            return _failed(DownloadProblem.NETWORK, message, ENDPOINT_HINT)
        case LocalEntryNotFoundError() if isinstance(error.__cause__, Exception):
            return explain(error.__cause__, work)
        case httpx2.HTTPError():
            message = f"the connection to {constants.ENDPOINT} broke ({type(error).__name__})"
            if isinstance(error, httpx2.ConnectError | httpx2.TimeoutException):
                message = f"cannot reach {constants.ENDPOINT}"
            hint = SEARCH_HINT if isinstance(work, Search) else NETWORK_HINT
            return _failed(DownloadProblem.NETWORK, message, hint)
        case OSError(errno=number) if number in FULL_DISK:
            message = f"the disk is full, so {work} is incomplete"
            return _failed(DownloadProblem.DISK_FULL, message, DISK_HINT)
        case OSError(errno=None):
            message = f"{work} arrived damaged"
            return _failed(DownloadProblem.DAMAGED, message, DAMAGED_HINT)
        case OSError():
            message = f"cannot write to {constants.HF_HUB_CACHE}: {error.strerror}"
            hint = f"set HF_HOME to a writable folder; it is {constants.HF_HOME} now"
            return _failed(DownloadProblem.UNWRITABLE, message, hint)
        case _:
            message = f"internal error: {type(error).__name__}"
            return _failed(DownloadProblem.INTERNAL, message, "please report it")


def _of_hub(error: HfHubHTTPError, repository: Repository) -> DownloadFailed:
    """Put a refusal of the hub into words."""
    status = error.response.status_code
    match error:
        case GatedRepoError():
            page = f"{constants.ENDPOINT}/{repository.repo}"
            then = "try again" if get_token() else LOGIN_HINT
            hint = f"accept its terms at {page}, then {then}"
            return _failed(DownloadProblem.GATED, f"{repository.repo} is gated", hint)
        case RevisionNotFoundError():
            message = f"{repository.repo} has no revision {repository.revision!r}"
            return _failed(DownloadProblem.NOT_FOUND, message, "without a revision, `main` is used")
        case RepositoryNotFoundError():
            return _not_found(repository)
        case RemoteEntryNotFoundError():
            message = f"{constants.ENDPOINT} lists a file of {repository} but does not have it"
            return _failed(DownloadProblem.DAMAGED, message, DAMAGED_HINT)
    if status in (401, 403):
        message = f"{constants.ENDPOINT} refuses access to {repository.repo} (HTTP {status})"
        hint = "check HF_TOKEN: `hf auth whoami`" if get_token() else LOGIN_HINT
        return _failed(DownloadProblem.REFUSED, message, hint)
    if status == 404:
        return _not_found(repository)
    if 400 <= status < 500 and status != REQUEST_TIMEOUT:
        message = f"{constants.ENDPOINT} does not send {repository} over plain HTTP (HTTP {status})"
        return _failed(DownloadProblem.REFUSED, message, ANOTHER_WAY.format(repo=repository.repo))
    message = f"{constants.ENDPOINT} answered with HTTP {status}"
    return _failed(DownloadProblem.NETWORK, message, "wait a while")


def _rate_limited(error: HfHubHTTPError) -> DownloadFailed:
    wait_s = _retry_after(error.response.headers)
    when = f" in {wait_s:.0f} s" if wait_s else " in some minutes"
    return DownloadFailed(
        problem=DownloadProblem.RATE_LIMITED,
        message=f"{constants.ENDPOINT} limits the rate of your requests",
        hint=f"try again{when}; a token (HF_TOKEN) raises the limit",
        retry_after_s=wait_s,
    )


def _not_found(repository: Repository) -> DownloadFailed:
    message = f"{constants.ENDPOINT} has no model repository {repository.repo!r}, or it is private"
    login = "the token needs permission to read it" if get_token() else LOGIN_HINT
    name = shlex.quote(repository.repo.rpartition("/")[2])
    hint = f"`mlxsup search {name}` finds similar ones; if it is private, {login}"
    return _failed(DownloadProblem.NOT_FOUND, message, hint)


def _retry_after(headers: Any) -> float:
    """Return the seconds until the hub allows another request; 0 if it does not say."""
    given = headers.get("Retry-After", "")
    if given.isascii() and given.isdigit():
        return float(min(int(given), 24 * 3600))
    # The hub's own header: `"api";r=0;t=55`.
    found = re.search(r"\bt\s*=\s*(\d{1,5})\b", headers.get("RateLimit", ""))
    return float(found[1]) if found else 0.0


def _failed(problem: DownloadProblem, message: str, hint: str) -> DownloadFailed:
    return DownloadFailed(problem=problem, message=message, hint=hint)
