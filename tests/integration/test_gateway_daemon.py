"""The gateway in front of a real daemon: answers, a row that is free again, its own process."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest

from support.daemon import Daemon, fake, row
from support.eventually import eventually
from support.http_daemon import HttpDaemon, SseReader, chat, gateway_of

SLOW = {"step_s": 0.02}


@pytest.fixture(scope="module")
def daemon() -> Iterator[HttpDaemon]:
    models = {"m": fake(fake=SLOW, max_concurrency=2), "other": fake(preload=False)}
    with HttpDaemon(models) as running:
        with running.client() as client:
            client.load("m")
        yield running


def test_a_chat_over_http_is_the_chat_of_the_python_client(daemon: HttpDaemon) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    with daemon.client() as client:
        expected = client.complete("m", messages=messages, max_tokens=30, seed=4, temperature=1.0)
    body = {"model": "m", "messages": messages, "max_tokens": 30, "seed": 4, "temperature": 1}
    status, value = daemon.post("/v1/chat/completions", body)
    assert status == 200
    (choice,) = value["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (expected.text, "length")
    assert value["usage"]["prompt_tokens"] == expected.usage.prompt_tokens
    assert value["usage"]["completion_tokens"] == 30
    streamed = SseReader(daemon, body).finished()
    assert (streamed.status, streamed.text) == (200, expected.text)
    assert streamed.events[-1] == "[DONE]"
    assert not streamed.is_cut


def test_a_completion_over_http_is_that_of_the_python_client(daemon: HttpDaemon) -> None:
    with daemon.client() as client:
        texts = [client.complete("m", prompt=p, max_tokens=9).text for p in ("one", "two")]
    body = {"model": "m", "prompt": ["one", "two"], "max_tokens": 9}
    status, value = daemon.post("/v1/completions", body)
    assert (status, [choice["text"] for choice in value["choices"]]) == (200, texts)


def test_tokens_of_a_completion_begin_where_their_text_does_streamed_or_whole(
    daemon: HttpDaemon,
) -> None:
    """Half characters are no text, what is held back as the beginning of a stop string is, and the
    stop string itself would have begun where the text ends."""
    body = {"model": "m", "prompt": "[[say é</b> STOP x]]", "max_tokens": 30, "logprobs": 0}
    body |= {"stop": ["STOP"]}
    status, value = daemon.post("/v1/completions", body)
    (whole,) = value["choices"]
    assert (status, whole["text"]) == (200, "é</b> ")
    streamed = SseReader(daemon, body, path="/v1/completions").finished()
    choices = [choice for one in streamed.events[:-1] for choice in one["choices"]]
    logprobs = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    tokens = [token for one in logprobs for token in one["tokens"]]
    offsets = [offset for one in logprobs for offset in one["text_offset"]]
    assert (tokens, offsets) == (whole["logprobs"]["tokens"], whole["logprobs"]["text_offset"])
    begins = dict(zip(tokens, offsets, strict=True))
    assert [begins[token] for token in "</b> "] == [1, 2, 3, 4, 5]
    assert begins["S"] == len("é</b> ")
    assert [begins[half] for half in (r"bytes:\xc3", r"bytes:\xa9")] == [0, 0]


def test_the_bytes_of_tokens_add_up_to_the_answer(daemon: HttpDaemon) -> None:
    body = chat("[[say a🦊é]]", max_tokens=7, logprobs=True, top_logprobs=1)
    status, value = daemon.post("/v1/chat/completions", body)
    (choice,) = value["choices"]
    content = choice["logprobs"]["content"]
    assert (status, choice["message"]["content"]) == (200, "a🦊é")
    assert bytes(byte for token in content for byte in token["bytes"]).decode() == "a🦊é"
    assert [len(token["bytes"]) for token in content] == [1] * 7


def test_a_tool_call_and_reasoning_have_their_places(daemon: HttpDaemon) -> None:
    call = '{"name": "weather", "arguments": {"city": "Rome"}}'
    said = f"[[say <think>hm</think>It is <tool_call>{call}</tool_call>]]"
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    status, value = daemon.post("/v1/chat/completions", chat(said, tools=[tool], max_tokens=200))
    assert status == 200
    (choice,) = value["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning_content"] == "hm"
    (made,) = choice["message"]["tool_calls"]
    assert made["function"]["name"] == "weather"
    assert json.loads(made["function"]["arguments"]) == {"city": "Rome"}
    assert value["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


def test_models_are_listed_and_one_of_them_loads_with_its_first_request(daemon: HttpDaemon) -> None:
    _, value = daemon.get("/v1/models")
    states = {model["id"]: model["status"]["value"] for model in value["data"]}
    assert states == {"m": "loaded", "other": "unloaded"}
    status, _ = daemon.post("/v1/chat/completions", chat("hi", max_tokens=1) | {"model": "other"})
    assert status == 200
    assert daemon.get("/v1/models/other")[1]["status"] == {"value": "loaded"}
    assert daemon.get("/health") == (200, {"status": "ok"})
    assert daemon.get("/ready")[0] == 200


def test_errors_of_the_daemon_have_their_status_and_their_field(daemon: HttpDaemon) -> None:
    status, value = daemon.post("/v1/chat/completions", chat("hi") | {"model": "n"})
    assert (status, value["error"]["code"]) == (404, "model_not_found")
    assert "configured: m, other" in value["error"]["message"]
    assert value["error"]["known"] == ["m", "other"]
    status, value = daemon.post("/v1/completions", {"model": "m", "prompt": [9999]})
    assert (status, value["error"]["param"]) == (400, "prompt")
    status, value = daemon.post("/v1/completions", {"model": "m", "prompt": "x" * 5000})
    assert (status, value["error"]["code"]) == (400, "context_length_exceeded")


def test_a_request_has_the_time_limits_that_it_sets(daemon: HttpDaemon) -> None:
    status, value = daemon.post("/v1/chat/completions", chat("a", max_tokens=3000, timeout_s=0.1))
    assert (status, value["error"]["code"]) == (504, "deadline_exceeded")
    with daemon.client() as client:
        others = [client.generate("m", prompt="long", max_tokens=3000) for _ in range(2)]
        eventually(lambda: len(row(client, "m")["running"]) == 2)
        status, value = daemon.post("/v1/chat/completions", chat("b", queue_timeout_s=0.1))
        assert (status, value["error"]["code"]) == (503, "queue_timeout")
        status, value = daemon.post("/v1/chat/completions", chat("c", first_token_timeout_s=0.1))
        assert (status, value["error"]["code"]) == (504, "deadline_exceeded")
        for other in others:
            other.cancel()
        eventually(lambda: not row(client, "m")["running"], what="free rows")


@pytest.mark.parametrize("stream", [False, True])
def test_a_reader_that_leaves_frees_its_row(daemon: HttpDaemon, stream: bool) -> None:
    data = json.dumps(chat("leaves", max_tokens=3000, stream=stream)).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    with daemon.client() as client:
        with daemon.connect() as connection:
            connection.sendall(head.encode() + data)
            eventually(lambda: row(client, "m")["running"])
        eventually(lambda: not row(client, "m")["running"], what="a free row")


def test_the_request_id_is_the_one_that_the_status_shows(daemon: HttpDaemon) -> None:
    data = json.dumps(chat("named", max_tokens=3000, stream=True)).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    with daemon.client() as client, daemon.connect() as connection:
        connection.sendall(head.encode() + data)
        received = connection.recv(65536).decode()
        (running,) = eventually(lambda: row(client, "m")["running"])
        assert f"x-request-id: {running}\r\n" in received


def test_the_gateway_is_a_process_that_status_shows_and_stop_ends() -> None:
    with HttpDaemon({"m": fake()}) as daemon:
        with daemon.client() as client:
            gateway = gateway_of(client)
        assert gateway["url"] == daemon.url
        assert gateway["pid"] in [process.pid for process in daemon.processes()]
        shown = daemon.run("status").stdout.splitlines()
        assert shown[-1] == f"http: {daemon.url} (pid {gateway['pid']})"
        assert f"HTTP at {daemon.url} (pid {gateway['pid']})" in daemon.output
        daemon_log = (daemon.logs / "mlxsup.log").read_text()
        assert f"gateway listening url={daemon.url} pid={gateway['pid']}" in daemon_log
        address = daemon.address
        assert daemon.run("stop").returncode == 0
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address).close()
        assert "gateway exited" in (daemon.logs / "mlxsup.log").read_text()


def test_a_daemon_without_the_setting_has_no_gateway() -> None:
    with Daemon({"m": fake()}) as daemon, daemon.client() as client:
        assert client.status()["gateway"] is None


def test_the_table_of_the_file_is_enough_and_a_reload_says_when_it_takes_effect() -> None:
    daemon = Daemon({"m": fake()})
    before = daemon.config.read_text()
    daemon.config.write_text('[gateway]\nlisten = "127.0.0.1:0"\n' + before)
    with daemon, daemon.client() as client:
        assert gateway_of(client)["url"].startswith("http://127.0.0.1:")
        daemon.config.write_text(before)
        assert client.reload()["later"] == ["gateway"]
        assert gateway_of(client)["state"] == "listening"
