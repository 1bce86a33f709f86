"""Senders that dawdle or flood: cut off or put up with, and nobody else notices."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator

import psutil
import pytest

from support.daemon import fake, row
from support.eventually import eventually
from support.http_daemon import HttpDaemon, SseReader, chat, everything

HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
)


@pytest.fixture(scope="module")
def daemon() -> Iterator[HttpDaemon]:
    with HttpDaemon({"m": fake(fake={"step_s": 0.01})}) as running:
        yield running


def told(daemon: HttpDaemon, data: bytes) -> bytes:
    """What comes back for these bytes, until the connection is closed."""
    with daemon.connect() as connection:
        connection.sendall(data)
        return everything(connection)


def test_two_hosts_are_none(daemon: HttpDaemon) -> None:
    data = b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n"
    with daemon.connect() as connection:
        connection.sendall(data)
        first = connection.recv(65536)
    assert first.startswith((b"HTTP/1.1 403 ", b"HTTP/1.1 400 "))


def test_requests_behind_each_other_on_one_connection_are_answered_in_order(
    daemon: HttpDaemon,
) -> None:
    get = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    last = b"GET /nothing HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    answer = told(daemon, get + get + last)
    assert re.findall(rb"HTTP/1\.1 (\d+) ", answer) == [b"200", b"200", b"404"]


REFUSED = [("/nothing", "", 404), ("/health", "", 405), ("/v1/embeddings", "", 501),
           ("/models/load", "", 403), ("/v1/chat/completions", "Content-Encoding: gzip\r\n", 415),
           ("/v1/chat/completions", "Host: evil.example\r\n", 403)]  # fmt: skip
"""Paths, further headers, and statuses of requests whose bodies nobody wants."""


@pytest.mark.parametrize(("path", "more", "status"), REFUSED)
def test_a_long_body_that_nobody_wants_is_no_further_request(
    daemon: HttpDaemon, path: str, more: str, status: int
) -> None:
    head = HEAD.replace(b"/v1/chat/completions", path.encode()) + more.encode()
    body = b" " * 1_500_000
    last = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    answer = told(daemon, head + b"Content-Length: %d\r\n\r\n" % len(body) + body + last)
    statuses = re.findall(rb"HTTP/1\.1 (\d+) ", answer)
    first = answer.partition(b"\r\n\r\n")[0]
    # If it takes longer than a moment to come, the connection ends with the refusal.
    expected = [b"%d" % status] if b"connection: close" in first else [b"%d" % status, b"200"]
    assert statuses == expected


def test_who_asks_before_it_sends_a_body_that_nobody_wants_is_not_told_to(
    daemon: HttpDaemon,
) -> None:
    head = HEAD.replace(b"application/json", b"text/plain") + b"Expect: 100-continue\r\n"
    answer = told(daemon, head + b"Content-Length: 5\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 415 ")
    assert b"connection: close" in answer


def test_a_client_that_offers_another_protocol_is_answered_in_this_one(daemon: HttpDaemon) -> None:
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMA\r\n"
    body = json.dumps(chat("offers", max_tokens=3)).encode()
    last = b"GET /nothing HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    head = HEAD + offer + b"Content-Length: %d\r\n\r\n" % len(body)
    with daemon.connect() as connection:
        connection.sendall(head)
        connection.sendall(body + last)
        answer = everything(connection)
    assert re.findall(rb"HTTP/1\.1 (\d+) ", answer) == [b"200", b"404"]
    assert b'"completion_tokens":3' in answer


def test_who_leaves_while_a_further_request_waits_frees_the_row(daemon: HttpDaemon) -> None:
    body = json.dumps(chat("leaves", max_tokens=3000, stream=True)).encode()
    head = HEAD + b"Content-Length: %d\r\n\r\n" % len(body)
    with daemon.client() as client:
        with daemon.connect() as connection:
            connection.sendall(head + body + b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            eventually(lambda: row(client, "m")["running"])
        eventually(lambda: not row(client, "m")["running"], what="a free row")


def test_who_closes_only_the_side_that_sends_has_left(daemon: HttpDaemon) -> None:
    body = json.dumps(chat("half", max_tokens=3000, stream=True)).encode()
    with daemon.client() as client, daemon.connect() as connection:
        connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        eventually(lambda: row(client, "m")["running"])
        connection.shutdown(socket.SHUT_WR)
        eventually(lambda: not row(client, "m")["running"], what="a free row")
        assert b"[DONE]" not in everything(connection)


def test_a_thousand_idle_connections_do_not_keep_others_out(daemon: HttpDaemon) -> None:
    idle = [daemon.connect() for _ in range(1000)]
    try:
        assert daemon.get("/health")[0] == 200
        reader = SseReader(daemon, chat("next to them", max_tokens=20)).finished()
        assert reader.events[-1] == "[DONE]"
        eventually(lambda: is_closed(idle[0]), what="an idle connection that was closed")
    finally:
        for connection in idle:
            connection.close()


def is_closed(connection: socket.socket) -> bool:
    """Whether the other side has closed it."""
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_a_head_that_comes_byte_by_byte_is_cut_off(daemon: HttpDaemon) -> None:
    with daemon.connect() as connection:
        connection.sendall(HEAD)

        def sends_one_more() -> bool:
            try:
                connection.send(b"x")
            except (BrokenPipeError, ConnectionResetError):
                return False
            return True

        eventually(lambda: not sends_one_more(), what="a sender that is cut off")


def test_a_head_without_an_end_behind_an_open_answer_is_cut_off(daemon: HttpDaemon) -> None:
    body = json.dumps(chat("goes before", max_tokens=3000, stream=True)).encode()
    with daemon.client() as client, daemon.connect() as connection:
        connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        eventually(lambda: row(client, "m")["running"])
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")

        def sends_more() -> bool:
            try:
                connection.sendall(b"X: y\r\n" * 1000)
            except (BrokenPipeError, ConnectionResetError):
                return False
            return True

        eventually(lambda: not sends_more(), what="a sender that is cut off")
        eventually(lambda: not row(client, "m")["running"], what="a free row")
        reader = SseReader(daemon, chat("next to it", max_tokens=20)).finished()
        assert reader.events[-1] == "[DONE]"


def test_its_own_process_holds_no_more_connections_than_there_are(daemon: HttpDaemon) -> None:
    with daemon.client() as client:
        gateway = psutil.Process(client.status()["gateway"]["pid"])
    eventually(lambda: gateway.num_fds() < 64, what="connections that are closed")
