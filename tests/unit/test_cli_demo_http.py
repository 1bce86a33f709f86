"""The answer over HTTP that `mlxsup demo` shows: when it is whole, refused, or has broken off."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from mlxsup.cli import demo_http
from mlxsup.cli.demo_http import HttpDoor, ask, has_extra
from mlxsup.cli.exit_status import CliError

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
FIRST = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
THINKS = b'data: {"choices":[{"delta":{"reasoning_content":"hm "}}]}\n\n'
SAYS = b'data: {"choices":[{"delta":{"content":"Rome"}}]}\n\n'
ERROR = b'data: {"error":{"message":"the daemon is gone","code":"daemon_lost"}}\n\n'
REFUSED = (
    b'HTTP/1.1 404 Not Found\r\nconnection: close\r\n\r\n{"error":{"message":"no such model"}}'
)


@contextmanager
def server(answer: bytes) -> Iterator[str]:
    """Answers one request with these bytes; gives its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.handle_request)
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}"
        thread.join()


def test_the_text_of_an_answer_is_that_of_all_its_pieces() -> None:
    seen: list[int] = []
    with server(HEAD + FIRST + THINKS + b": a comment\n\n" + SAYS + b"data: [DONE]\n\n") as url:
        assert ask(url, {"model": "m"}, seen.append) == "hm Rome"
    assert seen == [1, 2]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (REFUSED, "no such model"),
        (HEAD + SAYS + ERROR, "the daemon is gone"),
        (HEAD + SAYS, "has broken off"),
        (b"", "has broken off"),
    ],
)
def test_what_is_not_whole_is_an_error(answer: bytes, words: str) -> None:
    with server(answer) as url, pytest.raises(CliError) as caught:
        ask(url, {"model": "m"}, lambda _: None)
    assert words in caught.value.message


def test_the_door_is_where_the_daemon_says_that_it_listens() -> None:
    door = HttpDoor()
    door.heard({"model": "m", "to": "READY"})
    door.heard({"gateway": "http://127.0.0.1:7", "pid": 1})
    assert door.url() == "http://127.0.0.1:7"


def test_without_the_extra_there_is_no_door(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_http, "find_spec", lambda name: None)
    assert not has_extra()
