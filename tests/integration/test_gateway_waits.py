"""Answers over HTTP that are held up, or that nobody waits for any longer."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from mlxsup.client import Client

from support.daemon import fake, row, wait_for_state
from support.eventually import eventually
from support.faults import undisturbed
from support.http_daemon import HttpDaemon, SseReader, chat, gateway_of
from support.streams import Reader

CHAT = "/v1/chat/completions"
STREAMS = 4


@pytest.fixture(scope="module")
def daemon() -> Iterator[HttpDaemon]:
    models = {
        "m": fake(fake={"step_s": 0.005}, max_concurrency=8),
        "narrow": fake(fake={"step_s": 0.01}, max_concurrency=1),
        "slow": fake(fake={"load_s": 60.0}, preload=False),
    }
    with HttpDaemon(models) as running:
        with running.client() as client:
            for name in ("m", "narrow"):
                wait_for_state(client, name, "READY")
        yield running


def data_of(**body: Any) -> bytes:
    """A chat as it is sent."""
    data = json.dumps(chat("leaves", max_tokens=3000, **body)).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\n"
    more = f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return (head + more).encode() + data


def test_a_stream_that_is_paused_by_hand_and_resumed_is_only_a_delay(daemon: HttpDaemon) -> None:
    body = chat("paused", max_tokens=300)
    expected = text_of(daemon.post(CHAT, body))
    reader = SseReader(daemon, body).started()
    with daemon.client() as client:
        pause_and_resume(client)
    reader.finished()
    assert (reader.text, reader.is_cut, reader.events[-1]) == (expected, False, "[DONE]")


def test_an_answer_that_is_paused_by_hand_and_resumed_is_only_a_delay(daemon: HttpDaemon) -> None:
    body = chat("paused", max_tokens=300)
    expected = text_of(daemon.post(CHAT, body))
    with ThreadPoolExecutor(1) as pool, daemon.client() as client:
        asked = pool.submit(daemon.post, CHAT, body)
        pause_and_resume(client)
        assert text_of(asked.result()) == expected


def text_of(answer: tuple[int, dict[str, Any]]) -> str:
    """The text of an answer that is not streamed."""
    status, value = answer
    assert status == 200, value
    text: str = value["choices"][0]["message"]["content"]
    return text


def pause_and_resume(client: Client) -> None:
    """Pauses the only request of `m`, and lets it continue once another one was answered."""
    (id,) = eventually(lambda: row(client, "m")["running"])
    client.pause(id)
    eventually(lambda: row(client, "m")["paused"] == [id])
    assert client.complete("m", prompt="other", max_tokens=20).text
    assert row(client, "m")["paused"] == [id]
    client.resume(id)


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_while_the_request_waits_in_line_is_no_longer_in_it(
    daemon: HttpDaemon, stream: bool
) -> None:
    with daemon.client() as client:
        first = Reader(client, "narrow", "first", max_tokens=4000).started()
        with daemon.connect() as connection:
            connection.sendall(data_of(model="narrow", stream=stream))
            eventually(lambda: row(client, "narrow")["queued"])
        eventually(lambda: not row(client, "narrow")["queued"], what="an empty line")
        (running,) = row(client, "narrow")["running"]
        assert running == str(first.stream.request_id)
        first.stream.cancel()
        count = len(first.finished().token_ids)
        assert first.tokens == undisturbed("first", count)


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_while_the_model_loads_is_no_longer_waited_for(
    daemon: HttpDaemon, stream: bool
) -> None:
    with daemon.client() as client:
        with daemon.connect() as connection:
            connection.sendall(data_of(model="slow", stream=stream))
            eventually(lambda: row(client, "slow")["queued"])
            wait_for_state(client, "slow", "LOADING")
        eventually(lambda: not row(client, "slow")["queued"], what="nobody who waits")
        client.unload("slow")
        wait_for_state(client, "slow", "STOPPED")


def test_a_gateway_that_does_not_read_ends_its_streams_with_slow_consumer(
    daemon: HttpDaemon,
) -> None:
    with daemon.client() as client:
        first = gateway_of(client)
        gateway = psutil.Process(first["pid"])
        readers = [
            SseReader(daemon, chat(f"[[fault big=20000]] {n}", max_tokens=3000)).started()
            for n in range(STREAMS)
        ]
        gateway.send_signal(signal.SIGSTOP)
        try:
            other = Reader(client, "m", "other", max_tokens=300)
            eventually(lambda: len(row(client, "m")["running"]) <= 1, what="streams given up")
            assert other.finished().token_ids == undisturbed("other", 300)
        finally:
            gateway.send_signal(signal.SIGCONT)
        for reader in readers:
            reader.finished()
            assert reader.events[-1]["error"]["code"] == "slow_consumer"
            assert (reader.status, reader.is_cut) == (200, True)
            assert "[DONE]" not in reader.events
        assert gateway_of(client)["pid"] == first["pid"]
        assert daemon.get("/health")[0] == 200
