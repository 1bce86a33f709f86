"""Downloads in their own process, from a hub that refuses, lies and hangs up."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxsup.protocol.download import (
    DownloadDone,
    DownloadProblem,
    DownloadProgress,
    Repository,
)

from support.cli import run_cli
from support.downloads import (
    FILES,
    LIMIT_S,
    MIB,
    NEEDED,
    NEEDED_BYTES,
    REPO,
    WEIGHTS,
    WEIGHTS_NAME,
    Download,
    contents,
    disk_full_at,
    downloading,
    hub_environment,
    partial,
    repo_folder,
    runs_first,
    snapshot,
    start_download,
)
from support.eventually import eventually
from support.http_answers import answering
from support.local_hub import COMMIT, NEXT_COMMIT, Fault, LocalHub, local_hub


@pytest.fixture
def hub() -> Iterator[LocalHub]:
    with local_hub() as hub:
        hub.add(REPO, FILES)
        yield hub


@pytest.fixture
def started() -> Iterator[list[Download]]:
    """Downloads that end with the test."""
    downloads: list[Download] = []
    yield downloads
    for download in downloads:
        download.close()


def run_through(hub: LocalHub, home: Path, started: list[Download], **others: str) -> Download:
    download = start_download(hub_environment(hub, home, **others))
    started.append(download)
    return download


HELD_AT = 2 * MIB


def hold(hub: LocalHub, home: Path, started: list[Download]) -> Download:
    """A download of which the first half is on the disk, and the rest does not come."""
    hub.break_(WEIGHTS_NAME, Fault(hold_at=HELD_AT))
    download = run_through(hub, home, started)
    eventually(lambda: partial(home).exists() and partial(home).stat().st_size == HELD_AT)
    return download


def test_files_that_a_model_needs_arrive(
    hub: LocalHub, tmp_path: Path, started: list[Download]
) -> None:
    download = run_through(hub, tmp_path, started)
    *progress, done = download.reports()
    assert isinstance(done, DownloadDone)
    assert done.folder == str(snapshot(tmp_path))
    assert done.total_bytes == done.fetched_bytes == NEEDED_BYTES
    assert contents(snapshot(tmp_path)) == NEEDED
    assert progress[-1] == DownloadProgress(done_bytes=NEEDED_BYTES, total_bytes=NEEDED_BYTES)
    assert download.process.wait(LIMIT_S) == 0
    assert not any(one.path.endswith(("notes.md", ".py")) for one in hub.asked)


def test_files_that_are_there_are_not_fetched_again(
    hub: LocalHub, tmp_path: Path, started: list[Download]
) -> None:
    run_through(hub, tmp_path, started).end()
    done = run_through(hub, tmp_path, started).end()
    assert isinstance(done, DownloadDone)
    assert done.fetched_bytes == 0
    assert hub.fetched(WEIGHTS_NAME) == [0]


def test_cut_connection_is_continued(
    hub: LocalHub, tmp_path: Path, started: list[Download]
) -> None:
    hub.break_(WEIGHTS_NAME, Fault(cut_at=HELD_AT))
    assert isinstance(run_through(hub, tmp_path, started).end(), DownloadDone)
    assert hub.fetched(WEIGHTS_NAME) == [0, HELD_AT]
    assert contents(snapshot(tmp_path)) == NEEDED


def test_killed_download_is_continued_by_the_next(
    hub: LocalHub, tmp_path: Path, started: list[Download]
) -> None:
    hold(hub, tmp_path, started).close()
    hub.release.set()
    done = run_through(hub, tmp_path, started).end()
    assert isinstance(done, DownloadDone)
    assert done.fetched_bytes == NEEDED_BYTES - HELD_AT
    assert hub.fetched(WEIGHTS_NAME) == [0, HELD_AT]
    assert contents(snapshot(tmp_path)) == NEEDED


def test_download_ends_with_its_parent(
    hub: LocalHub, tmp_path: Path, started: list[Download]
) -> None:
    download = hold(hub, tmp_path, started)
    assert download.process.stdin is not None
    download.process.stdin.close()
    assert download.process.wait(LIMIT_S) == 1
    assert partial(tmp_path).stat().st_size == HELD_AT


def test_hub_that_always_hangs_up_is_given_up(
    hub: LocalHub, tmp_path: Path, started: list[Download]
) -> None:
    hub.break_(WEIGHTS_NAME, Fault(cut_at=HELD_AT, times=100))
    failed = run_through(hub, tmp_path, started).failure()
    assert failed.problem is DownloadProblem.NETWORK
    assert failed.is_passing
    assert partial(tmp_path).stat().st_size == HELD_AT


def test_two_downloads_of_one_repository_fetch_it_once(
    hub: LocalHub, tmp_path: Path, started: list[Download]
) -> None:
    first = hold(hub, tmp_path, started)
    second = run_through(hub, tmp_path, started)
    reports = second.reports()
    assert next(reports) == DownloadProgress(is_waiting=True)
    hub.release.set()
    assert isinstance(first.end(), DownloadDone)
    *_, done = reports
    assert isinstance(done, DownloadDone)
    assert done.fetched_bytes == 0
    assert hub.fetched(WEIGHTS_NAME) == [0]


@pytest.mark.parametrize("place", ["a file", "a folder that nobody may write to"])
def test_unwritable_cache_is_named(
    hub: LocalHub, tmp_path: Path, started: list[Download], place: str
) -> None:
    home = tmp_path / "home"
    if place == "a file":
        home.touch()
    else:
        home.mkdir(mode=0o500)
        if os.access(home, os.W_OK):
            pytest.skip("this user may write everywhere")
    failed = run_through(hub, home, started).failure()
    assert failed.problem is DownloadProblem.UNWRITABLE
    assert failed.hint == f"set HF_HOME to a folder that you can write to; it is {home}/hf"
    assert not failed.is_passing


def test_model_that_cannot_fit_is_not_begun(
    hub: LocalHub, tmp_path: Path, started: list[Download]
) -> None:
    hub.lie_about(REPO, WEIGHTS_NAME, 10**17)
    failed = run_through(hub, tmp_path, started).failure()
    assert failed.problem is DownloadProblem.DISK_FULL
    assert "HF_HOME" in failed.hint
    assert not failed.is_passing
    assert hub.fetched(WEIGHTS_NAME) == []


def test_missing_repository_is_answered_with_close_names(
    hub: LocalHub, tmp_path: Path, started: list[Download]
) -> None:
    download = start_download(hub_environment(hub, tmp_path), Repository("org/tiny-modle"))
    started.append(download)
    failed = download.failure()
    assert failed.problem is DownloadProblem.NOT_FOUND
    assert failed.hint == f"did you mean {REPO}?"


def test_repository_without_a_model_says_what_it_has(
    hub: LocalHub, tmp_path: Path, started: list[Download]
) -> None:
    hub.add("org/other", {"config.json": b"{}", "model-q4.gguf": b"GGUF"})
    download = start_download(hub_environment(hub, tmp_path), Repository("org/other"))
    started.append(download)
    failed = download.failure()
    assert failed.problem is DownloadProblem.NO_MODEL
    assert "it has .gguf files" in failed.message


def test_offline_asks_nothing(hub: LocalHub, tmp_path: Path, started: list[Download]) -> None:
    failed = run_through(hub, tmp_path, started, HF_HUB_OFFLINE="1").failure()
    assert failed.problem is DownloadProblem.OFFLINE
    assert "HF_HUB_OFFLINE" in failed.hint
    assert hub.asked == []


def test_offline_takes_what_is_complete(
    hub: LocalHub, tmp_path: Path, started: list[Download]
) -> None:
    run_through(hub, tmp_path, started).end()
    asked = list(hub.asked)
    done = run_through(hub, tmp_path, started, HF_HUB_OFFLINE="1").end()
    folder = str(snapshot(tmp_path))
    assert done == DownloadDone(folder=folder, total_bytes=NEEDED_BYTES, fetched_bytes=0)
    (snapshot(tmp_path) / WEIGHTS_NAME).unlink()
    failed = run_through(hub, tmp_path, started, HF_HUB_OFFLINE="1").failure()
    assert failed.problem is DownloadProblem.OFFLINE
    assert hub.asked == asked


def test_push_during_a_download_mixes_no_commits(
    hub: LocalHub, tmp_path: Path, started: list[Download]
) -> None:
    download = hold(hub, tmp_path, started)
    pushed = {**FILES, "config.json": b'{"model_type": "qwen3"}'}
    hub.add(REPO, pushed, NEXT_COMMIT)
    hub.release.set()
    done = download.end()
    assert isinstance(done, DownloadDone)
    assert done.folder == str(snapshot(tmp_path))
    assert contents(snapshot(tmp_path)) == NEEDED
    reference = repo_folder(tmp_path) / "refs" / "main"
    assert reference.read_text() == COMMIT
    assert isinstance(run_through(hub, tmp_path, started).end(), DownloadDone)
    assert reference.read_text() == NEXT_COMMIT
    newer = snapshot(tmp_path).with_name(NEXT_COMMIT)
    assert contents(newer) == {**NEEDED, "config.json": pushed["config.json"]}
    assert hub.fetched(WEIGHTS_NAME) == [0]


def test_missing_hub_is_the_network(hub: LocalHub, tmp_path: Path, started: list[Download]) -> None:
    failed = run_through(hub, tmp_path, started, HF_ENDPOINT="http://127.0.0.1:9").failure()
    assert failed.problem is DownloadProblem.NETWORK
    assert failed.waits_for == "the network"


@pytest.mark.parametrize("repo", ["../../etc", ""])
def test_id_that_leaves_its_folder_is_refused(
    hub: LocalHub, tmp_path: Path, started: list[Download], repo: str
) -> None:
    download = start_download(hub_environment(hub, tmp_path), Repository(repo))
    started.append(download)
    assert download.failure().problem is DownloadProblem.BAD_REPOSITORY
    assert hub.asked == []
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize(
    ("status", "body", "problem"),
    [
        (404, b'{"error":"\x1b[31mno"}', DownloadProblem.NOT_FOUND),
        (200, b"[1,2]", DownloadProblem.NETWORK),
        (200, b'{"siblings": 7}', DownloadProblem.NETWORK),
        (200, b"<html>yes</html>", DownloadProblem.NETWORK),
    ],
)
def test_answer_of_no_hub_is_put_into_words(
    hub: LocalHub, tmp_path: Path, started: list[Download],
    status: int, body: bytes, problem: DownloadProblem,
) -> None:  # fmt: skip
    with answering(status, body) as endpoint:
        failed = run_through(hub, tmp_path, started, HF_ENDPOINT=endpoint).failure()
    assert failed.problem is problem
    assert endpoint in failed.message
    assert "\x1b" not in failed.message + failed.hint


DIES = """
import os, sys
if "mlxsup.downloader" in sys.orig_argv:
    print("no library of that name", flush=True)
    os._exit(3)
"""


def started_after(lines: str, hub: LocalHub, home: Path, **others: str) -> Download:
    """A download whose process has run these lines at its start."""
    given = {"PYTHONPATH": runs_first(lines, home), **others}
    return start_download(hub_environment(hub, home, **given))


def test_full_disk_keeps_what_has_arrived(hub: LocalHub, tmp_path: Path) -> None:
    full_at = len(WEIGHTS) * 9 // 10
    download = started_after(disk_full_at(full_at), hub, tmp_path)
    try:
        failed = download.failure()
    finally:
        download.close()
    assert failed.problem is DownloadProblem.DISK_FULL
    assert failed.message == f"the disk is full: {REPO} is not complete"
    assert failed.hint.endswith("what has arrived is kept")
    assert not failed.is_passing
    assert partial(tmp_path).stat().st_size == full_at


def test_last_words_of_a_dead_download_are_told(tmp_path: Path) -> None:
    paths = runs_first(DIES, tmp_path)
    done = run_cli("pull", REPO, HOME=str(tmp_path), PYTHONPATH=paths)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines() == [
        "error: the download ended with exit code 3",
        "hint: no library of that name",
    ]


# ---------------------------------------------------------------- refusals of a hub


LISTING = "revision/main"


TOKEN = "hf_secretsecret"


OFTEN = 100


AT_ONCE = """
import time
time.sleep = lambda seconds: None
"""
"""huggingface_hub waits between its attempts."""


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
        (LISTING, coded(403, "GatedRepo"), GATED),
        (LISTING, Fault(status=404), PRIVATE),
        (LISTING, coded(404, "RevisionNotFound"), NO_REVISION),
        (LISTING, Fault(status=429, headers={"Retry-After": "77"}), BUSY),
        (LISTING, Fault(status=500), AWAY),
        (WEIGHTS_NAME, Fault(status=400), UNSENT),
        (WEIGHTS_NAME, Fault(status=401), REFUSED),
        (WEIGHTS_NAME, coded(403, "GatedRepo"), GATED),
        (WEIGHTS_NAME, coded(404, "EntryNotFound"), LACKING),
        (WEIGHTS_NAME, Fault(status=429, headers={"Retry-After": "77"}), BUSY),
        (WEIGHTS_NAME, Fault(status=500), AWAY),
        ("config.json", coded(403, "GatedRepo"), GATED),
    ],
    ids=lambda value: f"{value.status} {value.headers}" if isinstance(value, Fault) else None,
)
def test_refusal_names_the_next_step(
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


def test_refusal_without_a_token_says_to_log_in(hub: LocalHub, tmp_path: Path) -> None:
    hub.break_(LISTING, coded(401, "RepoNotFound"))
    with downloading(hub_environment(hub, tmp_path)) as download:
        failed = download.failure()
    assert failed.hint == (
        "check its id; if it is private, set HF_TOKEN, or use `hf auth login`"
    ), "and not the name that was given"


def test_file_refused_for_a_while_is_continued(hub: LocalHub, tmp_path: Path) -> None:
    fault = Fault(status=429, headers={"Retry-After": "77"}, times=3)
    hub.break_(WEIGHTS_NAME, fault)
    partial(tmp_path).parent.mkdir(parents=True)
    partial(tmp_path).write_bytes(FILES[WEIGHTS_NAME][:MIB])
    given = hub_environment(hub, tmp_path, PYTHONPATH=runs_first(AT_ONCE, tmp_path))
    with downloading(given) as download:
        assert isinstance(download.end(), DownloadDone)
    assert hub.fetched(WEIGHTS_NAME) == [MIB] * 4
    assert contents(snapshot(tmp_path)) == NEEDED
