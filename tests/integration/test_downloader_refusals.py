"""What a download makes of a hub that refuses: the list of the files, or one of them.

The codes in `X-Error-Code` are those of the real hub; an answer without one is that of a proxy, or
of another hub. The real one answers 401 with `RepoNotFound` if it does not say whether a repository
is missing or private, and lists a gated repository to everybody, but refuses its files.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxsup.protocol.download import DownloadDone, DownloadProblem

from support.downloads import (
    FILES,
    MIB,
    NEEDED,
    REPO,
    WEIGHTS_NAME,
    contents,
    downloading,
    hub_environment,
    partial,
    runs_first,
    snapshot,
)
from support.local_hub import Fault, LocalHub, local_hub

LISTING = "revision/main"
TOKEN = "hf_secretsecret"
OFTEN = 100

AT_ONCE = """
import time
time.sleep = lambda seconds: None
"""
"""huggingface_hub waits between its attempts."""


@pytest.fixture
def hub() -> Iterator[LocalHub]:
    with local_hub() as hub:
        hub.add(REPO, FILES)
        yield hub


def coded(status: int, code: str) -> Fault:
    """A refusal with the hub's own word for it."""
    return Fault(status=status, headers={"X-Error-Code": code})


def wrong_token() -> Fault:
    message = "Invalid credentials in Authorization header"
    return Fault(status=401, headers={"X-Error-Message": message})


GATED = (DownloadProblem.GATED, "is gated", f"/{REPO}, then")
PRIVATE = (DownloadProblem.NOT_FOUND, "or it is private", "the token must be allowed to read it")
REFUSED = (DownloadProblem.REFUSED, "refuses access", "HF_TOKEN")
UNSENT = (DownloadProblem.REFUSED, "plain HTTP (HTTP 400)", f"`hf download {REPO}` may get it")
LACKING = (DownloadProblem.DAMAGED, "does not have", "the hub's data is damaged")
BUSY = (DownloadProblem.RATE_LIMITED, "too many requests", "in 77 s")
AWAY = (DownloadProblem.NETWORK, "HTTP 500", "what has arrived is kept")
NO_REVISION = (DownloadProblem.NOT_FOUND, "no revision 'main'", "leave the revision out")


@pytest.mark.parametrize(
    ("path", "fault", "expected"),
    [
        (LISTING, Fault(status=401), REFUSED),
        (LISTING, wrong_token(), REFUSED),
        (LISTING, coded(401, "RepoNotFound"), PRIVATE),
        (LISTING, coded(401, "GatedRepo"), GATED),
        (LISTING, Fault(status=403), REFUSED),
        (LISTING, coded(403, "GatedRepo"), GATED),
        (LISTING, Fault(status=404), PRIVATE),
        (LISTING, coded(404, "RepoNotFound"), PRIVATE),
        (LISTING, coded(404, "RevisionNotFound"), NO_REVISION),
        (LISTING, Fault(status=429, headers={"Retry-After": "77"}), BUSY),
        (LISTING, Fault(status=500), AWAY),
        (WEIGHTS_NAME, Fault(status=400), UNSENT),
        (WEIGHTS_NAME, Fault(status=401), REFUSED),
        (WEIGHTS_NAME, coded(401, "RepoNotFound"), PRIVATE),
        (WEIGHTS_NAME, coded(401, "GatedRepo"), GATED),
        (WEIGHTS_NAME, Fault(status=403), REFUSED),
        (WEIGHTS_NAME, coded(403, "GatedRepo"), GATED),
        (WEIGHTS_NAME, Fault(status=404), LACKING),
        (WEIGHTS_NAME, coded(404, "EntryNotFound"), LACKING),
        (WEIGHTS_NAME, Fault(status=429, headers={"Retry-After": "77"}), BUSY),
        (WEIGHTS_NAME, Fault(status=500), AWAY),
        ("config.json", coded(403, "GatedRepo"), GATED),
        ("config.json", coded(404, "EntryNotFound"), LACKING),
    ],
    ids=lambda value: f"{value.status} {value.headers}" if isinstance(value, Fault) else None,
)
def test_a_refusal_names_the_next_step(
    hub: LocalHub,
    tmp_path: Path,
    path: str,
    fault: Fault,
    expected: tuple[DownloadProblem, str, str],
) -> None:
    problem, says, hints = expected
    hub.break_(path, Fault(status=fault.status, headers=fault.headers, times=OFTEN))
    paths = runs_first(AT_ONCE, tmp_path)
    given = hub_environment(hub, tmp_path, HF_TOKEN=TOKEN, PYTHONPATH=paths)
    with downloading(given) as download:
        failed = download.failure()
    assert failed.problem is problem
    assert says in failed.message
    assert hints in failed.hint
    assert failed.retry_after_s == (77 if fault.status == 429 else 0)
    assert any(one.authorization == f"Bearer {TOKEN}" for one in hub.asked)
    assert TOKEN not in f"{failed}{download.noise}"
    assert download.noise == [] or fault.status == 429


def test_without_a_token_the_hint_is_to_log_in(hub: LocalHub, tmp_path: Path) -> None:
    hub.break_(LISTING, coded(401, "RepoNotFound"))
    with downloading(hub_environment(hub, tmp_path)) as download:
        failed = download.failure()
    assert failed.hint == (
        "check its id; if it is private, set HF_TOKEN, or use `hf auth login`"
    ), "and not the name that was given"


def test_a_file_that_is_refused_for_a_while_is_continued(hub: LocalHub, tmp_path: Path) -> None:
    fault = Fault(status=429, headers={"Retry-After": "77"}, times=3)
    hub.break_(WEIGHTS_NAME, fault)
    partial(tmp_path).parent.mkdir(parents=True)
    partial(tmp_path).write_bytes(FILES[WEIGHTS_NAME][:MIB])
    given = hub_environment(hub, tmp_path, PYTHONPATH=runs_first(AT_ONCE, tmp_path))
    with downloading(given) as download:
        assert isinstance(download.end(), DownloadDone)
    assert hub.fetched(WEIGHTS_NAME) == [MIB] * 4
    assert contents(snapshot(tmp_path)) == NEEDED


def test_a_file_that_is_refused_keeps_what_has_arrived(hub: LocalHub, tmp_path: Path) -> None:
    hub.break_(WEIGHTS_NAME, coded(403, "GatedRepo"))
    partial(tmp_path).parent.mkdir(parents=True)
    partial(tmp_path).write_bytes(FILES[WEIGHTS_NAME][:MIB])
    with downloading(hub_environment(hub, tmp_path)) as download:
        assert download.failure().problem is DownloadProblem.GATED
    assert partial(tmp_path).stat().st_size == MIB
