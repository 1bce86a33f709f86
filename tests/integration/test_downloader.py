"""Downloads in their own process, from a hub that refuses, lies and hangs up."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from mlxsup.protocol.download import (
    DownloadDone,
    DownloadProblem,
    DownloadProgress,
    Repository,
)

from support.cli.cli import run_cli
from support.daemon.downloads import (
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
    hub_environment,
    parts,
    repo_folder,
    runs_first,
    snapshot,
    start_download,
)
from support.daemon.local_hub import COMMIT, NEXT_COMMIT, Fault, LocalHub, digest, local_hub
from support.eventually import eventually


@contextmanager
def answering(status: int, body: bytes) -> Iterator[str]:
    """Its address, for as long as the block lasts.

    Args:
        status: of an answer to a request without a query; searches are answered with 200.
        body: of every answer.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if "?" in self.path else status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


HELD_AT = 2 * MIB
OFTEN = 100
LISTING = "revision/main"
TOKEN = "hf_secretsecret"

AT_ONCE = """
import time
time.sleep = lambda seconds: None
"""
"""huggingface_hub waits between its attempts."""

SMALL_CHUNKS = """
from huggingface_hub import constants
constants.DOWNLOAD_CHUNK_SIZE = 2**20
"""
"""It writes, and begins again, by chunks of 10 MiB."""

DIES = """
import os, sys
if "mlxsup.downloader" in sys.orig_argv:
    print("no library of that name", flush=True)
    os._exit(3)
"""

Start = Callable[..., Download]


@pytest.fixture
def hub() -> Iterator[LocalHub]:
    with local_hub() as hub:
        hub.add(REPO, FILES)
        yield hub


@pytest.fixture
def start(hub: LocalHub, tmp_path: Path) -> Iterator[Start]:
    """Starts a download whose process runs some lines first; it ends with the test."""
    downloads: list[Download] = []
    first = runs_first(AT_ONCE, tmp_path)

    def begin(repo: str = REPO, lines: str = AT_ONCE, **others: str) -> Download:
        (tmp_path / "first" / "sitecustomize.py").write_text(lines)
        given = hub_environment(hub, tmp_path, **{"PYTHONPATH": first, **others})
        downloads.append(start_download(given, Repository(repo)))
        return downloads[-1]

    yield begin
    for download in downloads:
        download.close()


def hold(hub: LocalHub, start: Start) -> Download:
    """A download of which the first half has been sent, and the rest does not come."""
    hub.break_(WEIGHTS_NAME, Fault(hold_at=HELD_AT))
    download = start()
    eventually(hub.held.is_set)
    return download


def test_files_that_a_model_needs_arrive(hub: LocalHub, tmp_path: Path, start: Start) -> None:
    download = start()
    *progress, done = download.reports()
    folder = str(snapshot(tmp_path))
    assert done == DownloadDone(folder=folder, total_bytes=NEEDED_BYTES, fetched_bytes=NEEDED_BYTES)
    assert contents(snapshot(tmp_path)) == NEEDED
    assert progress[0] == DownloadProgress(done_bytes=0, total_bytes=NEEDED_BYTES)
    assert progress[-1] == DownloadProgress(done_bytes=NEEDED_BYTES, total_bytes=NEEDED_BYTES)
    assert download.process.wait(LIMIT_S) == 0
    assert not any(one.path.endswith(("notes.md", ".py")) for one in hub.asked)
    again = start().end()
    assert again == DownloadDone(folder=folder, total_bytes=NEEDED_BYTES, fetched_bytes=0)
    assert hub.fetched(WEIGHTS_NAME) == [0]


def test_cut_connection_is_continued(hub: LocalHub, tmp_path: Path, start: Start) -> None:
    hub.break_(WEIGHTS_NAME, Fault(cut_at=HELD_AT))
    assert isinstance(start(lines=AT_ONCE + SMALL_CHUNKS).end(), DownloadDone)
    assert hub.fetched(WEIGHTS_NAME) == [0, HELD_AT]
    assert contents(snapshot(tmp_path)) == NEEDED


def test_hub_that_always_hangs_up_is_given_up(hub: LocalHub, tmp_path: Path, start: Start) -> None:
    hub.break_(WEIGHTS_NAME, Fault(cut_at=HELD_AT, times=OFTEN))
    failed = start().failure()
    assert (failed.problem, failed.is_passing) == (DownloadProblem.NETWORK, True)
    assert failed.waits_for == "the network"
    assert not (repo_folder(tmp_path) / "refs" / "main").exists()


def test_part_of_a_killed_download_is_removed_by_the_next(
    hub: LocalHub, tmp_path: Path, start: Start
) -> None:
    hold(hub, start).close()
    left = parts(tmp_path)
    assert left
    (repo_folder(tmp_path) / "blobs" / "of-another.12345678.incomplete").touch()
    hub.release.set()
    locks = tmp_path / "hf" / "hub" / ".locks" / repo_folder(tmp_path).name
    with (locks / "of-another.lock").open("w") as lock:  # as `hf download` holds it
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert isinstance(start().end(), DownloadDone)
    assert [path.name for path in parts(tmp_path)] == ["of-another.12345678.incomplete"]
    assert contents(snapshot(tmp_path)) == NEEDED


def test_digest_is_compared_although_the_process_before_died(
    hub: LocalHub, tmp_path: Path, start: Start
) -> None:
    first = start().end()
    assert isinstance(first, DownloadDone), first
    (repo_folder(tmp_path) / "refs" / "main").unlink()  # it is written last
    blob = repo_folder(tmp_path) / "blobs" / digest(WEIGHTS)
    blob.write_bytes(bytes(len(WEIGHTS)))
    assert isinstance(start().end(), DownloadDone)
    assert contents(snapshot(tmp_path)) == NEEDED


def test_damaged_file_is_fetched_once_more(hub: LocalHub, tmp_path: Path, start: Start) -> None:
    hub.damage(REPO, WEIGHTS_NAME, 2)
    failed = start().failure()
    assert failed.problem is DownloadProblem.DAMAGED
    assert f"model.safetensors of {REPO} has another digest than was announced" in failed.message
    assert hub.fetched(WEIGHTS_NAME) == [0, 0]
    assert not (snapshot(tmp_path) / WEIGHTS_NAME).exists()
    assert not (repo_folder(tmp_path) / "refs" / "main").exists()
    hub.damage(REPO, WEIGHTS_NAME, 1)
    assert isinstance(start().end(), DownloadDone)
    assert hub.fetched(WEIGHTS_NAME) == [0] * 4
    assert contents(snapshot(tmp_path)) == NEEDED


def test_download_ends_with_its_parent(hub: LocalHub, start: Start) -> None:
    download = hold(hub, start)
    assert download.process.stdin is not None
    download.process.stdin.close()
    assert download.process.wait(LIMIT_S) == 1


def test_two_downloads_of_one_repository_fetch_it_once(hub: LocalHub, start: Start) -> None:
    first = hold(hub, start)
    reports = start().reports()
    assert next(reports) == DownloadProgress(is_waiting=True)
    hub.release.set()
    assert isinstance(first.end(), DownloadDone)
    *_, done = reports
    assert isinstance(done, DownloadDone)
    assert done.fetched_bytes == 0
    assert hub.fetched(WEIGHTS_NAME) == [0]


@pytest.mark.parametrize("place", ["a file", "a folder that nobody may write to"])
def test_unwritable_cache_is_named(tmp_path: Path, start: Start, place: str) -> None:
    home = tmp_path / "home"
    if place == "a file":
        home.touch()
    else:
        home.mkdir(mode=0o500)
        if os.access(home, os.W_OK):
            pytest.skip("this user may write everywhere")
    failed = start(HF_HOME=str(home / "hf")).failure()
    assert failed.problem is DownloadProblem.UNWRITABLE
    assert failed.hint == f"set HF_HOME to a folder that you can write to; it is {home}/hf"
    assert not failed.is_passing


@pytest.mark.parametrize(
    ("size_bytes", "problem", "says"),
    [
        (40 * 10**9, DownloadProblem.DISK_FULL, "more on the disk of"),
        (60 * 10**9, DownloadProblem.REFUSED, "over plain HTTP: a file of it has"),
    ],
)
def test_file_that_cannot_fit_or_be_sent_is_not_begun(
    hub: LocalHub, start: Start, size_bytes: int, problem: DownloadProblem, says: str
) -> None:
    hub.lie_about(REPO, WEIGHTS_NAME, size_bytes)
    full = "import shutil, types\nshutil.disk_usage = lambda path: types.SimpleNamespace(free=1)"
    failed = start(lines=full).failure()
    assert failed.problem is problem
    assert says in failed.message
    assert not failed.is_passing
    assert hub.fetched(WEIGHTS_NAME) == []


def test_full_disk_makes_room_and_keeps_other_files(
    hub: LocalHub, tmp_path: Path, start: Start
) -> None:
    failed = start(lines=disk_full_at(len(WEIGHTS) * 9 // 10)).failure()
    assert failed.problem is DownloadProblem.DISK_FULL
    assert failed.message == f"the disk is full: {REPO} is not complete"
    assert failed.hint.startswith("free some space, or set HF_HOME")
    assert failed.hint.endswith("files that have arrived are kept")
    assert not failed.is_passing
    assert parts(tmp_path) == []
    assert contents(snapshot(tmp_path)).keys() == NEEDED.keys() - {WEIGHTS_NAME}


@pytest.mark.parametrize(
    ("repo", "problem", "says"),
    [
        ("org/tiny-modle", DownloadProblem.NOT_FOUND, f"did you mean {REPO}?"),
        ("org/other", DownloadProblem.NO_MODEL, "it has .gguf files"),
        ("../../etc", DownloadProblem.BAD_REPOSITORY, "no repository can be called"),
        ("", DownloadProblem.BAD_REPOSITORY, "no repository can be called"),
    ],
)
def test_repository_that_is_none_says_what_is_wrong(
    hub: LocalHub, tmp_path: Path, start: Start, repo: str, problem: DownloadProblem, says: str
) -> None:
    hub.add("org/other", {"config.json": b"{}", "model-q4.gguf": b"GGUF"})
    failed = start(repo).failure()
    assert failed.problem is problem
    assert says in f"{failed.message} {failed.hint}"
    if problem is DownloadProblem.BAD_REPOSITORY:
        assert hub.asked == []
        assert not (tmp_path / "hf").exists()


def test_offline_asks_nothing(hub: LocalHub, tmp_path: Path, start: Start) -> None:
    start().end()
    asked = list(hub.asked)
    done = start(HF_HUB_OFFLINE="1").end()
    folder = str(snapshot(tmp_path))
    assert done == DownloadDone(folder=folder, total_bytes=NEEDED_BYTES, fetched_bytes=0)
    (snapshot(tmp_path) / WEIGHTS_NAME).unlink()
    failed = start(HF_HUB_OFFLINE="1").failure()
    assert failed.problem is DownloadProblem.OFFLINE
    assert "HF_HUB_OFFLINE" in failed.hint
    assert hub.asked == asked


def test_push_during_a_download_mixes_no_commits(
    hub: LocalHub, tmp_path: Path, start: Start
) -> None:
    download = hold(hub, start)
    pushed = {**FILES, "config.json": b'{"model_type": "qwen3"}'}
    hub.add(REPO, pushed, NEXT_COMMIT)
    reference = repo_folder(tmp_path) / "refs" / "main"
    assert not reference.exists(), "not before it is complete"
    hub.release.set()
    done = download.end()
    assert isinstance(done, DownloadDone)
    assert done.folder == str(snapshot(tmp_path))
    assert contents(snapshot(tmp_path)) == NEEDED
    assert reference.read_text() == COMMIT
    assert isinstance(start().end(), DownloadDone)
    assert reference.read_text() == NEXT_COMMIT
    newer = snapshot(tmp_path).with_name(NEXT_COMMIT)
    assert contents(newer) == {**NEEDED, "config.json": pushed["config.json"]}
    assert hub.fetched(WEIGHTS_NAME) == [0]


@pytest.mark.parametrize(
    ("status", "body", "problem"),
    [
        (404, b'{"error":"\x1b[31mno"}', DownloadProblem.NOT_FOUND),
        (200, b"[1,2]", DownloadProblem.NETWORK),
        (200, b'{"siblings": 7}', DownloadProblem.NETWORK),
        (200, b"<html>yes</html>", DownloadProblem.NETWORK),
        (0, b"", DownloadProblem.NETWORK),
    ],
)
def test_answer_of_no_hub_is_put_into_words(
    start: Start, status: int, body: bytes, problem: DownloadProblem
) -> None:
    with answering(status or 200, body) as endpoint:
        endpoint = endpoint if status else "http://127.0.0.1:9"
        failed = start(HF_ENDPOINT=endpoint).failure()
    assert failed.problem is problem
    assert endpoint in failed.message
    assert "\x1b" not in failed.message + failed.hint


def test_last_words_of_a_dead_download_are_told(tmp_path: Path) -> None:
    paths = runs_first(DIES, tmp_path)
    done = run_cli("pull", REPO, HOME=str(tmp_path), PYTHONPATH=paths)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines() == [
        "error: the download ended with exit code 3",
        "hint: no library of that name",
    ]


# ---------------------------------------------------------------- refusals of a hub


def coded(status: int, code: str) -> Fault:
    """A refusal with the hub's own word for it."""
    return Fault(status=status, headers={"X-Error-Code": code})


WRONG_TOKEN = {"X-Error-Message": "Invalid credentials in Authorization header"}
GATED = (DownloadProblem.GATED, "is gated", f"/{REPO}, then")
PRIVATE = (DownloadProblem.NOT_FOUND, "or it is private", "the token must be allowed to read it")
REFUSED = (DownloadProblem.REFUSED, "refuses access", "HF_TOKEN")
UNSENT = (DownloadProblem.REFUSED, "plain HTTP (HTTP 400)", f"`hf download {REPO}` may get it")
LACKING = (DownloadProblem.DAMAGED, "does not have", "the hub's data is damaged")
BUSY = (DownloadProblem.RATE_LIMITED, "too many requests", "in 77 s")
AWAY = (DownloadProblem.NETWORK, "HTTP 500", "files that have arrived are kept")
NO_REVISION = (DownloadProblem.NOT_FOUND, "no revision 'main'", "leave the revision out")


@pytest.mark.parametrize(
    ("path", "fault", "expected"),
    [
        (LISTING, Fault(status=401), REFUSED),
        (LISTING, Fault(status=401, headers=WRONG_TOKEN), REFUSED),
        (LISTING, coded(401, "RepoNotFound"), PRIVATE),
        (LISTING, coded(403, "GatedRepo"), GATED),
        (LISTING, Fault(status=404), PRIVATE),
        (LISTING, coded(404, "RevisionNotFound"), NO_REVISION),
        (LISTING, Fault(status=429, headers={"Retry-After": "77"}), BUSY),
        (LISTING, Fault(status=429, headers={"RateLimit": '"api";r=0;t=77'}), BUSY),
        (LISTING, Fault(status=500), AWAY),
        (WEIGHTS_NAME, Fault(status=400), UNSENT),
        (WEIGHTS_NAME, Fault(status=401), REFUSED),
        (WEIGHTS_NAME, coded(403, "GatedRepo"), GATED),
        (WEIGHTS_NAME, coded(404, "EntryNotFound"), LACKING),
        (WEIGHTS_NAME, Fault(status=429, headers={"Retry-After": "77"}), BUSY),
        (WEIGHTS_NAME, Fault(status=500), AWAY),
    ],
    ids=lambda value: f"{value.status} {value.headers}" if isinstance(value, Fault) else None,
)
def test_refusal_names_the_next_step(
    hub: LocalHub,
    start: Start,
    path: str,
    fault: Fault,
    expected: tuple[DownloadProblem, str, str],
) -> None:
    problem, says, hints = expected
    hub.break_(path, Fault(status=fault.status, headers=fault.headers, times=OFTEN))
    download = start(HF_TOKEN=TOKEN)
    failed = download.failure()
    assert failed.problem is problem
    assert says in failed.message
    assert hints in failed.hint
    assert failed.retry_after_s == (77 if fault.status == 429 else 0)
    assert any(one.authorization == f"Bearer {TOKEN}" for one in hub.asked)
    assert TOKEN not in f"{failed}{download.noise}"
    assert download.noise == [] or fault.status == 429


def test_refusal_without_a_token_says_to_log_in(hub: LocalHub, start: Start) -> None:
    hub.break_(LISTING, coded(401, "RepoNotFound"))
    assert start().failure().hint == (
        "check its id; if it is private, set HF_TOKEN, or use `hf auth login`"
    ), "and not the name that was given"


def test_file_refused_for_a_while_arrives(hub: LocalHub, tmp_path: Path, start: Start) -> None:
    hub.break_(WEIGHTS_NAME, Fault(status=429, headers={"Retry-After": "77"}, times=3))
    assert isinstance(start().end(), DownloadDone)
    assert hub.fetched(WEIGHTS_NAME) == [0] * 4
    assert contents(snapshot(tmp_path)) == NEEDED
