"""Downloads, in their own process, from a hub that refuses, lies and hangs up."""

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

from support.downloads import (
    CARD,
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
    hub_environment,
    partial,
    repo_folder,
    snapshot,
    start_download,
)
from support.eventually import eventually
from support.http_answers import answering
from support.local_hub import COMMIT, NEXT_COMMIT, Fault, LocalHub, local_hub

HELD_AT = 2 * MIB


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


def hold(hub: LocalHub, home: Path, started: list[Download]) -> Download:
    """A download of which the first half is on the disk, and the rest does not come."""
    hub.break_(WEIGHTS_NAME, Fault(hold_at=HELD_AT))
    download = run_through(hub, home, started)
    eventually(lambda: partial(home).exists() and partial(home).stat().st_size == HELD_AT)
    return download


def test_what_a_model_needs_arrives_and_nothing_else(
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


def test_what_is_there_is_not_fetched_again(
    hub: LocalHub, tmp_path: Path, started: list[Download]
) -> None:
    run_through(hub, tmp_path, started).end()
    done = run_through(hub, tmp_path, started).end()
    assert isinstance(done, DownloadDone)
    assert done.fetched_bytes == 0
    assert hub.fetched(WEIGHTS_NAME) == [0]


def test_a_cut_connection_is_continued(
    hub: LocalHub, tmp_path: Path, started: list[Download]
) -> None:
    hub.break_(WEIGHTS_NAME, Fault(cut_at=HELD_AT))
    assert isinstance(run_through(hub, tmp_path, started).end(), DownloadDone)
    assert hub.fetched(WEIGHTS_NAME) == [0, HELD_AT]
    assert contents(snapshot(tmp_path)) == NEEDED


def test_a_killed_download_is_continued_by_the_next(
    hub: LocalHub, tmp_path: Path, started: list[Download]
) -> None:
    hold(hub, tmp_path, started).close()
    hub.release.set()
    done = run_through(hub, tmp_path, started).end()
    assert isinstance(done, DownloadDone)
    assert done.fetched_bytes == NEEDED_BYTES - HELD_AT
    assert hub.fetched(WEIGHTS_NAME) == [0, HELD_AT]
    assert contents(snapshot(tmp_path)) == NEEDED


def test_it_ends_with_whoever_started_it(
    hub: LocalHub, tmp_path: Path, started: list[Download]
) -> None:
    download = hold(hub, tmp_path, started)
    assert download.process.stdin is not None
    download.process.stdin.close()
    assert download.process.wait(LIMIT_S) == 1
    assert partial(tmp_path).stat().st_size == HELD_AT


def test_a_hub_that_always_ends_in_mid_file_is_given_up(
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


@pytest.mark.parametrize(
    ("listed", "is_"), [(len(WEIGHTS) - MIB, "longer"), (len(WEIGHTS) + MIB, "shorter")]
)
def test_a_hub_that_lies_about_a_size_leaves_nothing(
    hub: LocalHub, tmp_path: Path, started: list[Download], listed: int, is_: str
) -> None:
    hub.lie_about(REPO, WEIGHTS_NAME, listed)
    failed = run_through(hub, tmp_path, started).failure()
    assert failed.problem is DownloadProblem.DAMAGED
    assert f"is {is_} than the {listed} bytes announced" in failed.message
    assert failed.hint.startswith("the hub's data is damaged")
    assert not failed.is_passing
    assert not partial(tmp_path).exists()
    assert not (snapshot(tmp_path) / WEIGHTS_NAME).exists()


def test_a_damaged_part_is_noticed_and_fetched_anew(
    hub: LocalHub, tmp_path: Path, started: list[Download]
) -> None:
    partial(tmp_path).parent.mkdir(parents=True)
    partial(tmp_path).write_bytes(bytes(MIB))
    *progress, done = run_through(hub, tmp_path, started).reports()
    assert isinstance(done, DownloadDone)
    assert progress[-1] == DownloadProgress(done_bytes=NEEDED_BYTES, total_bytes=NEEDED_BYTES)
    assert hub.fetched(WEIGHTS_NAME) == [MIB, 0]
    assert contents(snapshot(tmp_path)) == NEEDED


def test_data_that_is_damaged_each_time_is_said_to_be_so_and_leaves_nothing(
    hub: LocalHub, tmp_path: Path, started: list[Download]
) -> None:
    hub.damage(REPO, WEIGHTS_NAME)
    failed = run_through(hub, tmp_path, started).failure()
    assert failed.problem is DownloadProblem.DAMAGED
    assert "has another digest than was announced" in failed.message
    assert failed.hint.startswith("the hub's data is damaged")
    assert not failed.is_passing
    assert hub.fetched(WEIGHTS_NAME) == [0, 0]
    assert not partial(tmp_path).exists()


@pytest.mark.parametrize("place", ["a file", "a folder that nobody may write to"])
def test_a_cache_that_cannot_be_written_to_is_named_and_not_called_full(
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


def test_what_cannot_fit_on_the_disk_is_not_begun(
    hub: LocalHub, tmp_path: Path, started: list[Download]
) -> None:
    hub.lie_about(REPO, WEIGHTS_NAME, 10**17)
    failed = run_through(hub, tmp_path, started).failure()
    assert failed.problem is DownloadProblem.DISK_FULL
    assert "HF_HOME" in failed.hint
    assert not failed.is_passing
    assert hub.fetched(WEIGHTS_NAME) == []


def test_a_disk_that_is_full_at_90_percent_keeps_what_has_arrived(
    hub: LocalHub, tmp_path: Path, started: list[Download]
) -> None:
    full_at = len(WEIGHTS) * 9 // 10
    download = start_download(hub_environment(hub, tmp_path), file_limit_bytes=full_at)
    started.append(download)
    failed = download.failure()
    assert failed.problem is DownloadProblem.DISK_FULL
    assert partial(tmp_path).stat().st_size == full_at
    assert isinstance(run_through(hub, tmp_path, started).end(), DownloadDone)
    assert hub.fetched(WEIGHTS_NAME) == [0, full_at]
    assert contents(snapshot(tmp_path)) == NEEDED


def test_a_missing_repository_is_answered_with_close_names(
    hub: LocalHub, tmp_path: Path, started: list[Download]
) -> None:
    download = start_download(hub_environment(hub, tmp_path), Repository("org/tiny-modle"))
    started.append(download)
    failed = download.failure()
    assert failed.problem is DownloadProblem.NOT_FOUND
    assert failed.hint == f"did you mean {REPO}?"


def test_a_repository_without_a_model_says_what_it_has(
    hub: LocalHub, tmp_path: Path, started: list[Download]
) -> None:
    hub.add("org/other", {"config.json": b"{}", "model-q4.gguf": b"GGUF"})
    download = start_download(hub_environment(hub, tmp_path), Repository("org/other"))
    started.append(download)
    failed = download.failure()
    assert failed.problem is DownloadProblem.NO_MODEL
    assert "it has .gguf files" in failed.message


def test_offline_means_that_nothing_is_asked(
    hub: LocalHub, tmp_path: Path, started: list[Download]
) -> None:
    failed = run_through(hub, tmp_path, started, HF_HUB_OFFLINE="1").failure()
    assert failed.problem is DownloadProblem.OFFLINE
    assert "HF_HUB_OFFLINE" in failed.hint
    assert hub.asked == []


def test_offline_what_is_complete_is_done(
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


def test_a_push_while_it_is_downloaded_does_not_mix_two_commits(
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


def test_a_model_without_a_card_is_complete(
    hub: LocalHub, tmp_path: Path, started: list[Download]
) -> None:
    bare = {name: content for name, content in NEEDED.items() if name != CARD}
    hub.add(REPO, bare)
    assert isinstance(run_through(hub, tmp_path, started).end(), DownloadDone)
    assert contents(snapshot(tmp_path)) == bare
    done = run_through(hub, tmp_path, started, HF_HUB_OFFLINE="1").end()
    assert isinstance(done, DownloadDone)


def test_a_hub_that_is_not_there_is_the_network(
    hub: LocalHub, tmp_path: Path, started: list[Download]
) -> None:
    failed = run_through(hub, tmp_path, started, HF_ENDPOINT="http://127.0.0.1:9").failure()
    assert failed.problem is DownloadProblem.NETWORK
    assert failed.waits_for == "the network"


@pytest.mark.parametrize("repo", ["../../etc", "org/../x", "org/a/b", "-x/y", "a/b--c", ""])
def test_an_id_that_leaves_its_folder_is_refused(
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
        (404, b"<html>no</html>", DownloadProblem.NOT_FOUND),
        (200, b"[1,2]", DownloadProblem.NETWORK),
        (200, b'{"siblings": 7}', DownloadProblem.NETWORK),
        (200, b"<html>yes</html>", DownloadProblem.NETWORK),
    ],
)
def test_an_answer_that_no_hub_gives_is_put_into_words(
    hub: LocalHub, tmp_path: Path, started: list[Download],
    status: int, body: bytes, problem: DownloadProblem,
) -> None:  # fmt: skip
    with answering(status, body) as endpoint:
        failed = run_through(hub, tmp_path, started, HF_ENDPOINT=endpoint).failure()
    assert failed.problem is problem
    assert endpoint in failed.message
    assert "\x1b" not in failed.message + failed.hint
