"""Downloads from a hub that refuses, lies and hangs up, over a real socket.

The library runs in this process; what is about the process of a download has a process.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import constants

from mlxsup.downloader import snapshot as snapshot_module
from mlxsup.downloader.failures import DownloadError, explain
from mlxsup.downloader.search import search
from mlxsup.downloader.snapshot import SPARE_DISK_BYTES, bar_class, fetch
from mlxsup.protocol.codec import to_line
from mlxsup.protocol.download import (
    DownloadDone,
    DownloadFailed,
    DownloadProblem,
    DownloadProgress,
    DownloadReport,
    DownloadSpec,
    FoundRepository,
    Repository,
    download_argv,
)
from mlxsup.store.hub_cache import commit_of, write_reference

from support.daemon.downloads import (
    FILES,
    HELD_AT,
    LIMIT_S,
    NEEDED,
    NEEDED_BYTES,
    REPO,
    TOKEN,
    WEIGHTS,
    WEIGHTS_NAME,
    Download,
    contents,
    hub_environment,
    parts,
    repo_folder,
    snapshot,
)
from support.daemon.full_disk import full_disk
from support.daemon.local_hub import COMMIT, NEXT_COMMIT, Fault, LocalHub, digest, local_hub
from support.eventually import eventually

OFTEN = 100
LISTING = "revision/main"
WHOLE = NEEDED_BYTES
FILE_ADDRESS = "/{repo_id}/resolve/{revision}/{filename}"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    """A hub that the library in this process uses, with its cache in the test's folder."""
    home = tmp_path / "hf"
    with local_hub() as hub:
        hub.add(REPO, FILES)
        for name, value in {
            "ENDPOINT": hub.endpoint,
            "HUGGINGFACE_CO_URL_TEMPLATE": hub.endpoint + FILE_ADDRESS,
            "HF_HOME": str(home),
            "HF_HUB_CACHE": str(home / "hub"),
            "HF_TOKEN_PATH": str(home / "token"),
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
        }.items():
            monkeypatch.setattr(constants, name, value)
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        yield hub


Start = Callable[[], Download]


@pytest.fixture
def start(hub: LocalHub, tmp_path: Path) -> Iterator[Start]:
    """Starts a process that downloads; it ends with the test."""
    downloads: list[Download] = []

    def begin() -> Download:
        downloads.append(Download(hub_environment(hub, tmp_path)))
        return downloads[-1]

    yield begin
    for download in downloads:
        download.close()


def hold(hub: LocalHub, start: Start) -> Download:
    """A process to which the first half has been sent, and the rest does not come."""
    hub.break_(WEIGHTS_NAME, Fault(hold_at=HELD_AT))
    download = start()
    eventually(hub.held.is_set)
    return download


def end_of(
    repo: str = REPO, report: Callable[[DownloadReport], None] = lambda report: None
) -> DownloadReport:
    """The last report of a download in this process; `report` gets those before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "sleep", lambda seconds: None)  # between the library's attempts
        try:
            return fetch(Repository(repo), report)
        except Exception as error:  # noqa: BLE001  as the process of a download does
            return explain(error, Repository(repo))


def failure(repo: str = REPO) -> DownloadFailed:
    last = end_of(repo)
    assert isinstance(last, DownloadFailed), last
    return last


def done(fetched_bytes: int, home: Path) -> DownloadDone:
    folder = str(snapshot(home))
    return DownloadDone(folder=folder, total_bytes=WHOLE, fetched_bytes=fetched_bytes)


# ---------------------------------------------------------------- processes


def test_files_that_a_model_needs_arrive(hub: LocalHub, tmp_path: Path, start: Start) -> None:
    download = start()
    *progress, last = download.reports()
    assert last == done(WHOLE, tmp_path)
    assert contents(snapshot(tmp_path)) == NEEDED
    assert progress[0] == DownloadProgress(done_bytes=0, total_bytes=WHOLE)
    assert progress[-1] == DownloadProgress(done_bytes=WHOLE, total_bytes=WHOLE)
    assert download.process.wait(LIMIT_S) == 0
    assert not any(one.path.endswith(("notes.md", ".py")) for one in hub.asked)
    assert end_of() == done(0, tmp_path)
    assert hub.fetched(WEIGHTS_NAME) == [0]


def test_part_of_a_killed_download_is_removed_by_the_next(
    hub: LocalHub, tmp_path: Path, start: Start
) -> None:
    hold(hub, start).close()
    assert parts(tmp_path)
    (repo_folder(tmp_path) / "blobs" / "of-another.12345678.incomplete").touch()
    hub.release.set()
    locks = tmp_path / "hf" / "hub" / ".locks" / repo_folder(tmp_path).name
    with (locks / "of-another.lock").open("w") as lock:  # as `hf download` holds it
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert isinstance(end_of(), DownloadDone)
    assert [path.name for path in parts(tmp_path)] == ["of-another.12345678.incomplete"]
    assert contents(snapshot(tmp_path)) == NEEDED


def test_download_ends_with_its_parent(hub: LocalHub, start: Start) -> None:
    download = hold(hub, start)
    assert download.process.stdin is not None
    download.process.stdin.close()
    assert download.process.wait(LIMIT_S) == 1


def test_process_without_a_spec_or_its_parent_asks_nothing(hub: LocalHub, tmp_path: Path) -> None:
    orphan = to_line(DownloadSpec(repository=Repository(REPO)))  # its input ends at once
    for line, code, said in ((b"[]\n", 64, b"`mlxsup pull` starts one"), (orphan, 1, b"")):
        environment = hub_environment(hub, tmp_path)
        ended = subprocess.run(
            download_argv(), input=line, env=environment, capture_output=True, check=False
        )
        assert (ended.returncode, said in ended.stderr) == (code, True)
    assert hub.asked == []


def test_two_downloads_of_one_repository_fetch_it_once(
    hub: LocalHub, tmp_path: Path, start: Start
) -> None:
    first = hold(hub, start)
    reports = start().reports()
    assert next(reports) == DownloadProgress(is_waiting=True)
    hub.release.set()
    assert [*first.reports()][-1] == done(WHOLE, tmp_path)
    assert [*reports][-1] == done(0, tmp_path)
    assert hub.fetched(WEIGHTS_NAME) == [0]


def test_push_during_a_download_mixes_no_commits(
    hub: LocalHub, tmp_path: Path, start: Start
) -> None:
    download = hold(hub, start)
    pushed = {**FILES, "config.json": b'{"model_type": "qwen3"}'}
    hub.add(REPO, pushed, NEXT_COMMIT)
    reference = repo_folder(tmp_path) / "refs" / "main"
    assert not reference.exists(), "not before it is complete"
    hub.release.set()
    assert [*download.reports()][-1] == done(WHOLE, tmp_path)
    assert contents(snapshot(tmp_path)) == NEEDED
    assert reference.read_text() == COMMIT
    assert isinstance(end_of(), DownloadDone)
    assert reference.read_text() == NEXT_COMMIT
    newer = snapshot(tmp_path).with_name(NEXT_COMMIT)
    assert contents(newer) == {**NEEDED, "config.json": pushed["config.json"]}
    assert hub.fetched(WEIGHTS_NAME) == [0]


# ---------------------------------------------------------------- what arrives, and what does not


def test_cut_connection_is_continued(
    hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It writes, and begins again, by chunks.
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 2**20)
    hub.break_(WEIGHTS_NAME, Fault(cut_at=HELD_AT))
    assert end_of() == done(WHOLE, tmp_path)
    assert hub.fetched(WEIGHTS_NAME) == [0, HELD_AT]
    assert contents(snapshot(tmp_path)) == NEEDED


def test_hub_that_always_hangs_up_is_given_up(hub: LocalHub, tmp_path: Path) -> None:
    hub.break_(WEIGHTS_NAME, Fault(cut_at=HELD_AT, times=OFTEN))
    failed = failure()
    assert (failed.problem, failed.is_passing) == (DownloadProblem.NETWORK, True)
    assert failed.waits_for == "the network"
    assert not (repo_folder(tmp_path) / "refs" / "main").exists()


@pytest.mark.parametrize("list_name", [f"{REPO}/revision/main", f"{REPO}/tree/{COMMIT}"])
def test_hub_that_never_lists_is_given_up(
    hub: LocalHub, monkeypatch: pytest.MonkeyPatch, list_name: str
) -> None:
    """As a firewall does that takes connections and says nothing."""
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    hub.break_(list_name, Fault(is_silent=True, times=OFTEN))
    failed = failure()
    hub.release.set()
    assert (failed.problem, failed.message) == (
        DownloadProblem.NETWORK, f"cannot reach {hub.endpoint}",
    )  # fmt: skip


def test_file_refused_for_a_while_arrives(hub: LocalHub, tmp_path: Path) -> None:
    hub.break_(WEIGHTS_NAME, Fault(status=429, headers={"Retry-After": "77"}, times=3))
    assert end_of() == done(WHOLE, tmp_path)
    assert hub.fetched(WEIGHTS_NAME) == [0] * 4
    assert contents(snapshot(tmp_path)) == NEEDED


@pytest.mark.parametrize("revision", ["main", COMMIT])
def test_digest_is_compared_although_the_process_before_died(
    hub: LocalHub, tmp_path: Path, revision: str
) -> None:
    assert isinstance(end_of(), DownloadDone)
    (repo_folder(tmp_path) / "refs" / "main").unlink()  # it is written last, and not of a commit
    blob = repo_folder(tmp_path) / "blobs" / digest(WEIGHTS)
    blob.write_bytes(bytes(len(WEIGHTS)))
    fetch(Repository(REPO, revision), lambda report: None)
    assert contents(snapshot(tmp_path)) == NEEDED


def test_damaged_file_is_fetched_once_more(hub: LocalHub, tmp_path: Path) -> None:
    hub.damage(REPO, WEIGHTS_NAME, 2)
    failed = failure()
    assert failed.problem is DownloadProblem.DAMAGED
    assert f"model.safetensors of {REPO} has the wrong checksum" in failed.message
    assert failed.hint.startswith("the data on the hub is damaged")
    assert hub.fetched(WEIGHTS_NAME) == [0, 0]
    assert not (snapshot(tmp_path) / WEIGHTS_NAME).exists()
    assert not (repo_folder(tmp_path) / "refs" / "main").exists()
    hub.damage(REPO, WEIGHTS_NAME, 1)
    told: list[DownloadReport] = []
    assert end_of(report=told.append) == done(len(WEIGHTS), tmp_path)
    others_bytes = WHOLE - len(WEIGHTS)
    assert told[0] == DownloadProgress(done_bytes=others_bytes, total_bytes=WHOLE)
    assert hub.fetched(WEIGHTS_NAME) == [0] * 4
    assert contents(snapshot(tmp_path)) == NEEDED


def test_unwritable_cache_is_named(
    hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(constants, "HF_HOME", f"{tmp_path}/file/hf")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", f"{tmp_path}/file/hf/hub")
    failed = failure()
    assert failed.problem is DownloadProblem.UNWRITABLE
    assert failed.hint == f"set HF_HOME to a writable folder; it is {tmp_path}/file/hf now"
    assert not failed.is_passing


@pytest.mark.parametrize(
    ("listed", "free", "problem", "says"),
    [
        (1000, 999, DownloadProblem.DISK_FULL, "needs 1.1 KiB more, but the disk of"),
        (60 * 10**9, 70 * 10**9, DownloadProblem.REFUSED, "over plain HTTP: a file of it has"),
    ],
)
def test_file_that_cannot_fit_or_be_sent_is_not_begun(
    hub: LocalHub,
    monkeypatch: pytest.MonkeyPatch,
    listed: int,
    free: int,
    problem: DownloadProblem,
    says: str,
) -> None:
    usage = SimpleNamespace(free=free + SPARE_DISK_BYTES)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    hub.lie_about(REPO, WEIGHTS_NAME, listed)
    failed = failure()
    assert (failed.problem, failed.is_passing) == (problem, False)
    assert says in failed.message
    assert hub.fetched(WEIGHTS_NAME) == []


def test_full_disk_makes_room_and_keeps_other_files(hub: LocalHub, tmp_path: Path) -> None:
    with full_disk(len(WEIGHTS) * 9 // 10):
        failed = failure()
    assert (failed.problem, failed.is_passing) == (DownloadProblem.DISK_FULL, False)
    assert failed.message == f"the disk is full, so {REPO} is incomplete"
    assert failed.hint.startswith("free some space, or set HF_HOME")
    assert parts(tmp_path) == []
    assert contents(snapshot(tmp_path)).keys() == NEEDED.keys() - {WEIGHTS_NAME}
    assert end_of() == done(len(WEIGHTS), tmp_path)


def test_offline_asks_nothing(
    hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_of()
    asked = list(hub.asked)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert end_of() == done(0, tmp_path)
    (snapshot(tmp_path) / WEIGHTS_NAME).unlink()
    failed = failure()
    assert failed.problem is DownloadProblem.OFFLINE
    assert "HF_HUB_OFFLINE" in failed.hint
    assert hub.asked == asked


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("repo", "problem", "says"),
    [
        ("org/tiny-modle", DownloadProblem.NOT_FOUND, "`mlxsup search tiny-modle` finds"),
        ("org/other", DownloadProblem.NO_MODEL, "it has .gguf files"),
        ("../../etc", DownloadProblem.BAD_REPOSITORY, ""),
        ("", DownloadProblem.BAD_REPOSITORY, ""),
    ],
)
def test_repository_that_is_none_says_what_is_wrong(
    hub: LocalHub, tmp_path: Path, repo: str, problem: DownloadProblem, says: str
) -> None:
    hub.add("org/other", {"config.json": b"{}", "model-q4.gguf": b"GGUF"})
    failed = failure(repo)
    assert failed.problem is problem
    assert says in f"{failed.message} {failed.hint}"
    if problem is DownloadProblem.BAD_REPOSITORY:
        assert hub.asked == []
        assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize(
    ("status", "body", "problem"),
    [
        (404, b'{"error":"\x1b[31mno"}', DownloadProblem.NOT_FOUND),
        (200, b"[1,2]", DownloadProblem.NETWORK),
        (200, b'{"siblings": 7}', DownloadProblem.NETWORK),
        (200, b"<html>yes</html>", DownloadProblem.NETWORK),
        (200, b'{"id": "org/m", "sha": "../../../else"}', DownloadProblem.NETWORK),
        (0, b"", DownloadProblem.NETWORK),
    ],
)
def test_answer_of_no_hub_is_put_into_words(
    hub: LocalHub,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    body: bytes,
    problem: DownloadProblem,
) -> None:
    hub.break_(LISTING, Fault(status=status, body=body, times=OFTEN))
    if not status:
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    failed = failure()
    assert failed.problem is problem
    assert constants.ENDPOINT in failed.message
    assert "\x1b" not in failed.message + failed.hint


def coded(status: int, code: str) -> Fault:
    """A refusal with the hub's own word for it."""
    return Fault(status=status, headers={"X-Error-Code": code})


WRONG_TOKEN = {"X-Error-Message": "Invalid credentials in Authorization header"}
GATED = (DownloadProblem.GATED, "is gated", f"/{REPO}, then try again")
PRIVATE = (DownloadProblem.NOT_FOUND, "or it is private", "the token needs permission to read it")
REFUSED = (DownloadProblem.REFUSED, "refuses access", "HF_TOKEN")
UNSENT = (DownloadProblem.REFUSED, "plain HTTP (HTTP 400)", f"`hf download {REPO}` may work")
LACKING = (DownloadProblem.DAMAGED, "does not have", "the data on the hub is damaged")
BUSY = (DownloadProblem.RATE_LIMITED, "limits the rate", "in 77 s")
AWAY = (DownloadProblem.NETWORK, "HTTP 500", "wait a while")
LATE = (DownloadProblem.NETWORK, "HTTP 408", "wait a while")
NO_REVISION = (DownloadProblem.NOT_FOUND, "no revision 'main'", "without a revision")


@pytest.mark.parametrize(
    ("path", "fault", "expected"),
    [
        (LISTING, Fault(status=401), REFUSED),
        (LISTING, Fault(status=403), REFUSED),
        (LISTING, Fault(status=401, headers=WRONG_TOKEN), REFUSED),
        (LISTING, coded(401, "RepoNotFound"), PRIVATE),
        (LISTING, coded(403, "GatedRepo"), GATED),
        (LISTING, Fault(status=404), PRIVATE),
        (LISTING, coded(404, "RevisionNotFound"), NO_REVISION),
        (LISTING, Fault(status=429, headers={"Retry-After": "77"}), BUSY),
        (LISTING, Fault(status=429, headers={"RateLimit": '"api";r=0;t=77'}), BUSY),
        (LISTING, Fault(status=500), AWAY),
        (LISTING, Fault(status=408), LATE),
        (WEIGHTS_NAME, Fault(status=400), UNSENT),
        (WEIGHTS_NAME, Fault(status=401), REFUSED),
        (WEIGHTS_NAME, coded(403, "GatedRepo"), GATED),
        (WEIGHTS_NAME, coded(404, "EntryNotFound"), LACKING),
        (WEIGHTS_NAME, Fault(status=429, headers={"Retry-After": "77"}), BUSY),
        (WEIGHTS_NAME, Fault(status=500), AWAY),
    ],
    ids=lambda value: f"{value.status} {value.headers}" if isinstance(value, Fault) else None,
)
def test_refusal_names_the_next_step_and_no_token(
    hub: LocalHub,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    path: str,
    fault: Fault,
    expected: tuple[DownloadProblem, str, str],
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    problem, says, hints = expected
    hub.break_(path, Fault(status=fault.status, headers=fault.headers, times=OFTEN))
    failed = failure()
    assert failed.problem is problem
    assert says in failed.message
    assert hints in failed.hint
    assert failed.retry_after_s == (77 if fault.status == 429 else 0)
    if fault.status in (400, 401, 403):
        assert len(hub.fetched(WEIGHTS_NAME)) <= 1, "a refusal does not change"
    assert any(one.authorization == f"Bearer {TOKEN}" for one in hub.asked)
    assert TOKEN not in f"{failed}{capfd.readouterr()}"


def test_hub_cannot_put_off_a_download_for_longer_than_a_day(hub: LocalHub) -> None:
    hub.break_(LISTING, Fault(status=429, headers={"Retry-After": "9" * 12}, times=OFTEN))
    assert failure().retry_after_s == 24 * 3600


@pytest.mark.parametrize("code", ["RepoNotFound", "GatedRepo"])
def test_refusal_without_a_token_says_to_log_in(hub: LocalHub, code: str) -> None:
    hub.break_(LISTING, coded(401, code))
    assert failure().hint.endswith(" set HF_TOKEN, or use `hf auth login`")


def test_search_takes_what_a_hub_lists_with_care(
    hub: LocalHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)  # the user's own models are listed, too
    listed: list[Any] = [
        {"id": "a/b", "downloads": 5, "gated": "auto", "tags": ["mlx", 3, "license:mit"],
         "safetensors": {"parameters": {"BF16": 10, "U8": 3, "F32": -9, "I32": "x"}}},
        {"id": "a/c", "downloads": "many", "tags": "license:x", "safetensors": {"parameters": 3}},
        {"id": "m"}, {"id": "../x"}, {"id": 7}, "a/d",
    ]  # fmt: skip
    hub.break_("/api/models", Fault(status=200, body=json.dumps(listed).encode()))
    assert search("b").found == [
        FoundRepository(repo="a/b", downloads=5, size_bytes=23, is_gated=True, licence="mit"),
        FoundRepository(repo="a/c", downloads=0, size_bytes=0, is_gated=False, licence=""),
    ]
    assert [one.authorization for one in hub.asked] == [f"Bearer {TOKEN}"]


# ---------------------------------------------------------------- parts of a download

MODEL = Repository("org/m")


def test_snapshot_that_the_library_calls_complete_and_is_not_is_refused(tmp_path: Path) -> None:
    file: Any = SimpleNamespace(path="config.json", lfs=None)
    with pytest.raises(DownloadError, match=r"config\.json is missing") as raised:
        snapshot_module._check_files(MODEL, [file], tmp_path)
    assert raised.value.report.problem is DownloadProblem.NETWORK


def test_files_are_on_the_disk_before_the_reference_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda file: flushed.append(os.fstat(file).st_ino))
    (tmp_path / "config.json").write_bytes(b"{}")
    file: Any = SimpleNamespace(path="config.json", lfs=None)
    snapshot_module._check_files(MODEL, [file], tmp_path)
    assert flushed == [(tmp_path / "config.json").stat().st_ino]


def test_progress_is_that_of_the_bar_that_is_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[DownloadReport] = []
    bar = bar_class(10, 100, told.append)
    assert told == [DownloadProgress(done_bytes=10, total_bytes=100)]
    received, written, files = bar(unit="B", total=0), bar(unit="B", total=0), bar(total=3)

    def tell() -> int:
        with monkeypatch.context() as patch:
            patch.setattr(snapshot_module, "REPORT_INTERVAL_S", 0)
            received.update(0)
        assert isinstance(told[-1], DownloadProgress)
        return told[-1].done_bytes

    assert tell() == 10
    received.update(30)
    written.update(20)
    files.update(1)
    assert tell() == 40
    received.update(-30)
    assert tell() == 30, "the hub sends a file from its beginning"
    written.update(500)
    assert tell() == 100
    seen = len(told)
    written.update(1)
    assert len(told) == seen, "not after each chunk"


def test_reference_of_a_branch_is_replaced_and_of_a_commit_not_written(tmp_path: Path) -> None:
    write_reference(tmp_path, "refs/pr/1", "a" * 40)
    with (tmp_path / "refs/refs/pr/1").open() as reader:
        write_reference(tmp_path, "refs/pr/1", "b" * 40)
        assert reader.read() == "a" * 40, "a worker reads the old one or the new one"
    assert commit_of(tmp_path, "refs/pr/1") == "b" * 40
    assert [path.name for path in (tmp_path / "refs/refs/pr").iterdir()] == ["1"]
    write_reference(tmp_path, "c" * 40, "c" * 40)
    assert not (tmp_path / "refs" / ("c" * 40)).exists()
