"""A model hub on this machine (`HF_ENDPOINT`) that refuses, lies, stalls and hangs up on demand.

It serves from memory and notes every request: what a test believes about a download comes from
here, and not from the process that downloads.
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
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "c0ffee" * 6 + "beef"
NEXT_COMMIT = "decade" * 6 + "beef"
MISSING = {"X-Error-Code": "RepoNotFound", "X-Error-Message": "not found"}


class Asked(NamedTuple):
    """One request; `begins_at` is the first byte that was asked for."""

    method: str
    path: str
    begins_at: int
    authorization: str


@dataclass(slots=True, kw_only=True)
class Fault:
    """What happens to requests for a path, some times.

    Attributes:
        status: answer with this; 0: as otherwise.
        headers, body: of that answer.
        cut_at: close the connection before this byte of the file; None: send all of it.
        hold_at: wait for `release` before this byte; None: do not wait.
        is_silent: send nothing until `release`.
        times: how many requests meet it.
    """

    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b"{}"
    cut_at: int | None = None
    hold_at: int | None = None
    is_silent: bool = False
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
        """Ends it, and lets requests that are held proceed."""
        self.release.set()
        self._server.shutdown()
        self._server.server_close()

    def add(self, repo: str, files: Mapping[str, bytes], commit: str = COMMIT) -> None:
        """Serves a repository, with its branch at this commit from now on.

        `*.safetensors` are large files, with a digest.
        """
        self._commits[repo] = {**self._commits.get(repo, {}), commit: dict(files)}

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
            return [self._listed(repo) for repo in self._commits if searched in repo.lower()]
        for repo, commits in self._commits.items():
            for commit, files in commits.items():
                if path == f"/api/models/{repo}/tree/{commit}":
                    return [self._entry(repo, name, content) for name, content in files.items()]
                if path == f"/api/models/{repo}/revision/{commit}":
                    return {"id": repo, "sha": commit, "siblings": []}
            if path in (f"/api/models/{repo}", f"/api/models/{repo}/revision/main"):
                return {"id": repo, "sha": list(commits)[-1], "siblings": []}
        return None

    def _listed(self, repo: str) -> dict[str, Any]:
        files = list(self._commits[repo].values())[-1]
        count = sum(len(content) for name, content in files.items() if is_large(name)) // 2
        numbers = {"parameters": {"BF16": count}, "total": count}
        return {"id": repo, "downloads": 7, "gated": False, "safetensors": numbers,
                "tags": ["mlx", "license:apache-2.0"]}  # fmt: skip

    def content(self, path: str, *, is_sent: bool) -> tuple[bytes, dict[str, str]] | None:
        """The file at an address, and what its headers say of it; None if there is none."""
        for repo, commits in self._commits.items():
            revisions = {**{commit: commit for commit in commits}, "main": list(commits)[-1]}
            for revision, commit in revisions.items():
                prefix = f"/{repo}/resolve/{revision}/"
                name = path.removeprefix(prefix)
                if not path.startswith(prefix) or name not in commits[commit]:
                    continue
                content = commits[commit][name]
                etag = digest(content) if is_large(name) else hashlib.sha1(content).hexdigest()
                if is_sent and self._damaged[repo, name] > 0:
                    self._damaged[repo, name] -= 1
                    content = content[:-1] + bytes([content[-1] ^ 1])
                return content, {"ETag": f'"{etag}"', "X-Repo-Commit": commit}
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

    def do_GET(self) -> None:
        assert isinstance(self.server, _Server)
        hub, is_get = self.server.hub, self.command == "GET"
        parts = urlsplit(self.path)
        path = unquote(parts.path)
        begins_at = int(self.headers.get("Range", "bytes=0-")[len("bytes=") :].partition("-")[0])
        asked = Asked(self.command, path, begins_at, self.headers.get("Authorization", ""))
        fault = hub.note(asked)
        if fault is not None and fault.is_silent:
            hub.release.wait()
            self.close_connection = True
        elif fault is not None and fault.status:
            self._send(fault.status, fault.headers, fault.body)
        elif (found := hub.content(path, is_sent=is_get)) is not None:
            content, headers = found
            if begins_at:
                last = len(content) - 1
                headers["Content-Range"] = f"bytes {begins_at}-{last}/{len(content)}"
            headers["Accept-Ranges"] = "bytes"
            status = 206 if begins_at else 200
            self._send(status, headers, content[begins_at:], fault, begins_at)
        elif (answer := hub.answer(path, parse_qs(parts.query))) is not None:
            self._send(200, {"Content-Type": "application/json"}, json.dumps(answer).encode())
        else:
            self._send(404, MISSING, b"{}")

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""

    def _send(
        self,
        status: int,
        headers: Mapping[str, str],
        body: bytes,
        fault: Fault | None = None,
        begins_at: int = 0,
    ) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        assert isinstance(self.server, _Server)
        place = len(body)
        if fault is not None:
            place = next(at for at in (fault.cut_at, fault.hold_at) if at is not None) - begins_at
        try:
            self.wfile.write(body[: max(0, place)])
            self.wfile.flush()
            if fault is not None and fault.cut_at is not None:
                self.close_connection = True
                return
            if fault is not None:
                self.server.hub.held.set()
                self.server.hub.release.wait()
            self.wfile.write(body[max(0, place) :])
        except ConnectionError:  # it was killed
            self.close_connection = True
