"""A model hub on this machine (`HF_ENDPOINT`) that refuses, lies, stalls and hangs up on demand.

It keeps what it serves in memory, and notes every request: what a test believes about a download
comes from here, and not from the process that downloads.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "c0ffee" * 6 + "beef"
NEXT_COMMIT = "decade" * 6 + "beef"
PIECE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request.

    Attributes:
        method: `GET` or `HEAD`.
        path: decoded, without the query.
        begins_at: the first byte that was asked for.
        ends_at: the byte behind the last one that was asked for; None: all of them.
        authorization: that header; empty for none.
    """

    method: str
    path: str
    begins_at: int
    ends_at: int | None
    authorization: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A file at a commit."""

    name: str
    content: bytes
    commit: str


@dataclass(slots=True, kw_only=True)
class Fault:
    """What happens to requests for a path, some times.

    Attributes:
        status: answer with this error; 0 for none.
        headers: of that answer.
        cut_at: close the connection before this byte of the file; None: send all of it.
        hold_at: wait for `release` before this byte; None: do not wait.
        times: how many requests meet it.
    """

    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    cut_at: int | None = None
    hold_at: int | None = None
    times: int = 1


class LocalHub:
    """A hub with some repositories.

    Attributes:
        endpoint: for `HF_ENDPOINT`.
        asked: every request so far, in the order of their arrival.
        held: set once a request waits at `hold_at`.
        release: set it to let such requests proceed.
    """

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.held = threading.Event()
        self.release = threading.Event()
        self._commits: dict[str, dict[str, dict[str, bytes]]] = {}
        self._listed_sizes: dict[tuple[str, str], int] = {}
        self._damaged: Counter[tuple[str, str]] = Counter()
        self._faults: dict[str, Fault] = {}
        self._lock = threading.Lock()
        self._server = _Server(self)
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, name="local-hub", daemon=True).start()

    def close(self) -> None:
        """Ends it, and lets whoever waits proceed."""
        self.release.set()
        self._server.shutdown()
        self._server.server_close()

    def add(self, repo: str, files: Mapping[str, bytes], commit: str = COMMIT) -> None:
        """Serves a repository, with its branch at this commit from now on.

        `*.safetensors` are large files, with a digest.
        """
        earlier = self._commits.get(repo, {})
        self._commits[repo] = {**earlier, commit: dict(files)}

    def lie_about(self, repo: str, path: str, size_bytes: int) -> None:
        """Lists a file with another size."""
        self._listed_sizes[repo, path] = size_bytes

    def damage(self, repo: str, path: str, times: int = 100) -> None:
        """Sends a file so often with another last byte than it is listed with."""
        self._damaged[repo, path] = times

    def break_(self, path: str, fault: Fault) -> None:
        """Has requests meet a fault if their path ends so."""
        self._faults[path] = fault

    def heal(self) -> None:
        """From now on, no request meets a fault."""
        self._faults.clear()

    def fetched(self, path: str) -> list[int]:
        """The first bytes that were asked for, of a file, by each `GET`."""
        return [
            one.begins_at for one in self.asked if one.method == "GET" and one.path.endswith(path)
        ]

    # ------------------------------------------------------------ for the handler

    def note(self, asked: Asked) -> Fault | None:
        """Notes a request; returns the fault that it meets."""
        with self._lock:
            self.asked.append(asked)
            for ending, fault in self._faults.items():
                if asked.path.endswith(ending) and fault.times > 0 and asked.method == "GET":
                    fault.times -= 1
                    return fault
        return None

    def answer(self, path: str, query: Mapping[str, list[str]]) -> Any:
        """What an address of the API answers; None if there is nothing."""
        if path == "/api/models":
            searched = query.get("search", [""])[0].lower()
            author = query.get("author", [""])[0]
            found = [repo for repo in self._commits if searched in repo.lower()]
            return [{"id": repo} for repo in found if repo.startswith(author)]
        for repo, commits in self._commits.items():
            for commit, files in commits.items():
                if path == f"/api/models/{repo}/tree/{commit}":
                    return [self._entry(repo, name, content) for name, content in files.items()]
            if path in (f"/api/models/{repo}", f"/api/models/{repo}/revision/main"):
                return {"id": repo, "sha": list(commits)[-1], "siblings": []}
        return None

    def content(self, path: str, *, is_sent: bool) -> Found | None:
        """The file at an address; None if there is none."""
        for repo, commits in self._commits.items():
            revisions = {**{commit: commit for commit in commits}, "main": list(commits)[-1]}
            for revision, commit in revisions.items():
                prefix = f"/{repo}/resolve/{revision}/"
                name = path.removeprefix(prefix)
                if path.startswith(prefix) and name in commits[commit]:
                    content = commits[commit][name]
                    if is_sent and self._damaged[repo, name] > 0:
                        self._damaged[repo, name] -= 1
                        content = content[:-1] + bytes([content[-1] ^ 1])
                    return Found(name=name, content=content, commit=commit)
        return None

    def _entry(self, repo: str, name: str, content: bytes) -> dict[str, Any]:
        size = self._listed_sizes.get((repo, name), len(content))
        oid = hashlib.sha1(content, usedforsecurity=False).hexdigest()
        entry = {"type": "file", "path": name, "size": size, "oid": oid}
        if is_large(name):
            entry["lfs"] = {"oid": digest(content), "size": size, "pointerSize": 134}
        return entry


def is_large(name: str) -> bool:
    """Whether a file is listed with its digest."""
    return name.endswith(".safetensors")


def digest(content: bytes) -> str:
    """What such a file is called in the cache."""
    return hashlib.sha256(content).hexdigest()


@contextmanager
def local_hub() -> Iterator[LocalHub]:
    """A hub without repositories."""
    hub = LocalHub()
    try:
        yield hub
    finally:
        hub.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, hub: LocalHub) -> None:
        self.hub = hub
        super().__init__(("127.0.0.1", 0), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing: its clients are killed."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def _hub(self) -> LocalHub:
        assert isinstance(self.server, _Server)
        return self.server.hub

    def do_GET(self) -> None:
        self._serve(has_body=True)

    def do_HEAD(self) -> None:
        self._serve(has_body=False)

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _serve(self, *, has_body: bool) -> None:
        parts = urlsplit(self.path)
        path = unquote(parts.path)
        first, _, last = self.headers.get("Range", "").removeprefix("bytes=").partition("-")
        asked = Asked(
            method=self.command,
            path=path,
            begins_at=int(first or 0),
            ends_at=int(last) + 1 if last else None,
            authorization=self.headers.get("Authorization", ""),
        )
        fault = self._hub.note(asked)
        if fault is not None and fault.status:
            self._send(fault.status, {**fault.headers}, b"{}", has_body=has_body)
            return
        if (found := self._hub.content(path, is_sent=has_body)) is not None:
            self._send_file(found, asked, fault, has_body=has_body)
            return
        answer = self._hub.answer(path, parse_qs(parts.query))
        if answer is None:
            headers = {"X-Error-Code": "RepoNotFound", "X-Error-Message": "not found"}
            self._send(404, headers, b"{}", has_body=has_body)
        else:
            headers = {"Content-Type": "application/json"}
            self._send(200, headers, json.dumps(answer).encode(), has_body=has_body)

    def _send(
        self, status: int, headers: Mapping[str, str], body: bytes, *, has_body: bool
    ) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if has_body:
            self.wfile.write(body)

    def _send_file(
        self, found: Found, asked: Asked, fault: Fault | None, *, has_body: bool
    ) -> None:
        content, begins_at = found.content, asked.begins_at
        is_part = begins_at > 0 or asked.ends_at is not None
        etag = digest(content) if is_large(found.name) else hashlib.sha1(content).hexdigest()
        body = content[begins_at : asked.ends_at]
        self.send_response(206 if is_part else 200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{etag}"')
        self.send_header("X-Repo-Commit", found.commit)
        self.send_header("Accept-Ranges", "bytes")
        if is_part:
            last = begins_at + len(body) - 1
            self.send_header("Content-Range", f"bytes {begins_at}-{last}/{len(content)}")
        self.end_headers()
        if has_body:
            self._send_body(body, begins_at, fault)

    def _send_body(self, body: bytes, begins_at: int, fault: Fault | None) -> None:
        try:
            for start in _pieces(len(body), begins_at, fault):
                at = begins_at + start
                if fault is not None and fault.hold_at == at:
                    self._hub.held.set()
                    self._hub.release.wait()
                if fault is not None and fault.cut_at == at:
                    self.close_connection = True
                    return
                self.wfile.write(body[start : _end(start, len(body), begins_at, fault)])
                self.wfile.flush()
        except ConnectionError:  # it was killed
            self.close_connection = True


def _pieces(length: int, begins_at: int, fault: Fault | None) -> Iterator[int]:
    """Where each piece begins, relative to the body; the places of a fault begin one."""
    start = 0
    while start < length:
        yield start
        start = _end(start, length, begins_at, fault)


def _end(start: int, length: int, begins_at: int, fault: Fault | None) -> int:
    """Where a piece ends that begins there."""
    ends = [start + PIECE_BYTES, length]
    places = (fault.cut_at, fault.hold_at) if fault is not None else ()
    ends += [place - begins_at for place in places if place is not None]
    return min(end for end in ends if end > start)
