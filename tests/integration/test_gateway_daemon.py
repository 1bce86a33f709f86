"""The gateway in front of a real daemon: answers, waits, its process, metrics and the page."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from functools import partial
from typing import Any
from urllib.request import Request, urlopen

import pytest

from mlxsup.client import Client
from mlxsup.gateway.operator import TOKEN_HEADER
from mlxsup.worker.engines.fake.text import encode_text

from support.bad.exposed import DECLARED, Exposed, declared_samples
from support.client.streams import Reader
from support.daemon.daemon import Daemon, fake, row, wait_for_state
from support.daemon.faults import undisturbed
from support.eventually import eventually
from support.gateway.http_daemon import CHAT, HttpDaemon, SseReader, chat, gateway_of

COMPLETION = "/v1/completions"


@pytest.fixture(scope="module")
def daemon() -> Iterator[HttpDaemon]:
    models = {
        "m": fake(fake={"step_s": 0.005}, max_concurrency=8),
        "narrow": fake(fake={"step_s": 0.01}, max_concurrency=1),
        "other": fake(preload=False),
        "slow": fake(fake={"load_s": 60.0}, preload=False),
    }
    with HttpDaemon(models) as running:
        with running.client() as client:
            for name in ("m", "narrow"):
                wait_for_state(client, name, "READY")
        yield running


def data_of(**body: Any) -> bytes:
    """Return a chat as it is sent."""
    data = json.dumps(chat("leaves", max_tokens=3000, **body)).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\n"
    more = f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return (head + more).encode() + data


# ---------------------------------------------------------------- answers

ECHO = "né 🦊 end"
ASKED = ("echo", "logprobs", "stream", "several")
CASES = {
    "-".join(name for name, is_asked in zip(ASKED, case, strict=True) if is_asked): case
    for case in itertools.product((False, True), repeat=len(ASKED))
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_completion_in_each_combination_of_what_may_be_asked(
    daemon: HttpDaemon, case: tuple[bool, ...]
) -> None:
    """SGLang's own tests of its server ask these."""
    has_echo, has_logprobs, is_streamed, has_several = case
    ids = encode_text(ECHO)
    body = {
        "model": "m", "prompt": [ids] * 2 if has_several else ECHO, "max_tokens": 5,
        "n": 1 + has_several, "echo": has_echo, "logprobs": 2 if has_logprobs else None,
    }  # fmt: skip
    if is_streamed:
        read = SseReader(daemon, body, COMPLETION).finished()
        assert read.status == 200
        chunks = [choice for event in read.events[:-1] for choice in event["choices"]]
    else:
        status, value = daemon.post(COMPLETION, body)
        assert status == 200
        chunks = value["choices"]
    assert {chunk["index"] for chunk in chunks} == set(range(4 if has_several else 1))
    for index in {chunk["index"] for chunk in chunks}:
        own = [chunk for chunk in chunks if chunk["index"] == index]
        assert [one["finish_reason"] for one in own] == [None] * (len(own) - 1) + ["length"]
        assert own[0]["text"].startswith(ECHO) == has_echo
        text = "".join(one["text"] for one in own)
        assert text.removeprefix(ECHO) == text[len(ECHO) * has_echo :]
        if not has_logprobs:
            assert {one["logprobs"] for one in own} == {None}
            continue
        assert all(one["logprobs"]["tokens"] for one in own), "in each chunk"
        lists: Any = {
            name: [item for one in own for item in one["logprobs"][name]]
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        }
        told = len(ids) * has_echo
        assert {len(items) for items in lists.values()} == {told + 5}
        nothing = [place for place, one in enumerate(lists["token_logprobs"]) if one is None]
        assert nothing == ([0] if has_echo else [])
        assert nothing == [n for n, one in enumerate(lists["top_logprobs"]) if one is None]
        for token, place in zip(lists["tokens"], lists["text_offset"], strict=True):
            assert token.startswith("bytes:") or text[place:].startswith(token)


def test_chat_is_the_chat_of_the_python_client(daemon: HttpDaemon) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    with daemon.client() as client:
        expected = client.complete("m", messages=messages, max_tokens=30, seed=4, temperature=1.0)
    body = {"model": "m", "messages": messages, "max_tokens": 30, "seed": 4, "temperature": 1}
    status, value = daemon.post(CHAT, body)
    assert status == 200
    (choice,) = value["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (expected.text, "length")
    assert value["usage"]["prompt_tokens"] == expected.usage.prompt_tokens
    assert value["usage"]["completion_tokens"] == 30
    streamed = SseReader(daemon, body).finished()
    assert (streamed.status, streamed.text, streamed.is_cut) == (200, expected.text, False)
    assert streamed.events[-1] == "[DONE]"


def test_first_request_loads_its_model(daemon: HttpDaemon) -> None:
    _, value = daemon.get("/v1/models")
    states = {model["id"]: model["status"]["value"] for model in value["data"]}
    assert states == {"m": "loaded", "narrow": "loaded", "other": "unloaded", "slow": "unloaded"}
    assert daemon.post(CHAT, chat("hi", max_tokens=1) | {"model": "other"})[0] == 200
    assert daemon.get("/v1/models/other")[1]["status"] == {"value": "loaded"}
    assert daemon.get("/ready")[0] == 200


# ---------------------------------------------------------------- waits


def has_queue(client: Client, model: str, is_so: bool) -> bool:
    return bool(row(client, model)["queued"]) == is_so


def test_client_that_leaves_is_no_longer_waited_for(daemon: HttpDaemon) -> None:
    """In a queue, whole and streamed, and while its model is loaded."""
    with daemon.client() as client:
        first = Reader(client, "narrow", "first", max_tokens=4000).started()
        for model, stream in (("narrow", False), ("narrow", True), ("slow", True)):
            with daemon.connect() as connection:
                connection.sendall(data_of(model=model, stream=stream))
                eventually(partial(has_queue, client, model, True))
            eventually(partial(has_queue, client, model, False), what="an empty queue")
        assert row(client, "narrow")["running"] == [str(first.stream.request_id)]
        first.stream.cancel()
        count = len(first.finished().token_ids)
        assert first.tokens == undisturbed("first", count)
        client.unload("slow")
        wait_for_state(client, "slow", "STOPPED")


# ---------------------------------------------------------------- metrics and the page


def scrape(daemon: HttpDaemon) -> Exposed:
    with urlopen(f"{daemon.url}/metrics", timeout=60) as response:
        return Exposed(response.read().decode())


class Page:
    """The page of a gateway, with its token."""

    def __init__(self, daemon: HttpDaemon) -> None:
        self._daemon = daemon
        browser = Request(f"{daemon.url}/", headers={"accept": "text/html"})
        with urlopen(browser, timeout=60) as response:
            text = response.read().decode()
        (token,) = re.findall(r'<meta name="mlxsup-token" content="([^"]+)">', text)
        self._token = {TOKEN_HEADER: str(token)}

    def get(self, path: str) -> tuple[int, dict[str, Any]]:
        return self._daemon.ask("GET", path, headers=self._token)

    def act(self, action: str, model: str) -> tuple[int, dict[str, Any]]:
        """Press a button."""
        body = json.dumps({"model": model}).encode()
        return self._daemon.ask("POST", f"/models/{action}", body, headers=self._token)


def test_metrics_and_page_follow_crashes_loads_and_evictions() -> None:
    sized = {"memory": "300MiB"}
    models = {
        "m": fake(fake={"step_s": 0.02}, **sized),
        "n": fake(preload=False, **sized),
        "bad": fake(preload=False, fake={"load_error": "missing"}),
    }
    budget = {"memory_budget": "400MiB", "min_residency_s": 0}
    with HttpDaemon(models, budget) as daemon, daemon.client() as client:
        wait_for_state(client, "m", "READY")
        reader = SseReader(daemon, chat("resumed", max_tokens=100)).started()
        running = eventually(lambda: scrape(daemon).value("mlxsup_requests_running", model="m"))
        assert running == 1
        os.kill(row(client, "m")["pid"], signal.SIGKILL)
        reader.finished()
        assert daemon.post(CHAT, chat("hi") | {"model": "nobody"})[0] == 404
        seen = scrape(daemon)
        assert seen.kinds == {metric.name: metric.kind for metric in DECLARED}
        known = declared_samples()
        for name, labels, _ in seen.samples:
            assert set(labels) == known[name], name
        assert seen.value("mlxsup_model_state", model="m", state="READY") == 1
        assert seen.value("mlxsup_model_restarts_total", model="m") == 1
        assert seen.value("mlxsup_requests_resumed_total", model="m") == 1
        assert seen.value("mlxsup_requests_total", model="m", finish_reason="length") == 1
        assert seen.value("mlxsup_generation_tokens_total", model="m") == 100
        assert seen.value("mlxsup_request_errors_total", model="", code="unknown_model") == 1
        page = Page(daemon)
        (crash,) = page.get("/page/crashes")[1]["crashes"]
        assert (crash["model"], crash["generation"], crash["continue"]) == ("m", 1, 1)
        assert "another program killed" in crash["what"]
        _, log = page.get("/page/log/process?name=m&generation=1")
        assert "worker started model=m generation=1" in log["lines"][0]
        page.get("/page/state")  # a sample is taken while a page is open
        assert page.get("/page/history")[1]["samples"][-1]["models"]["m"][1]
        assert page.act("load", "n") == (200, {"success": True, "model": "n"})
        wait_for_state(client, "n", "READY")
        assert row(client, "m")["state"] == "STOPPED"
        counted = scrape(daemon).value("mlxsup_evictions_total", model="m", reason="evict")
        assert counted == 1
        assert page.act("restart", "n")[0] == 200
        eventually(lambda: row(client, "n")["generation"] == 2)
        wait_for_state(client, "n", "READY")
        assert page.act("unload", "n")[0] == 200
        wait_for_state(client, "n", "STOPPED")
        assert page.act("load", "nothing")[0] == 404
        assert page.act("load", "bad")[0] == 200
        eventually(
            lambda: "bad" in [one["model"] for one in page.get("/page/crashes")[1]["crashes"]]
        )


# ---------------------------------------------------------------- its process


def test_gateway_is_a_process_that_status_shows_and_stop_ends() -> None:
    with HttpDaemon({"m": fake(preload=False)}) as daemon:
        with daemon.client() as client:
            gateway = gateway_of(client)
        assert gateway["url"] == daemon.url
        assert gateway["pid"] in [process.pid for process in daemon.processes()]
        shown = daemon.run("status").stdout.splitlines()
        assert shown[-1] == f"http: {daemon.url} (pid {gateway['pid']})"
        assert f"HTTP at {daemon.url}/v1 (pid {gateway['pid']})" in daemon.output
        daemon_log = (daemon.logs / "mlxsup.log").read_text()
        assert f"gateway listening url={daemon.url} pid={gateway['pid']}" in daemon_log
        address = daemon.address
        assert daemon.run("stop").returncode == 0
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address).close()
        assert "gateway exited" in (daemon.logs / "mlxsup.log").read_text()


def test_table_of_the_file_starts_a_gateway_and_a_reload_changes_it_later() -> None:
    daemon = Daemon({"m": fake(preload=False)})
    before = daemon.config.read_text()
    daemon.config.write_text('[gateway]\nlisten = "127.0.0.1:0"\n' + before)
    with daemon, daemon.client() as client:
        assert gateway_of(client)["url"].startswith("http://127.0.0.1:")
        daemon.config.write_text(before)
        assert client.reload()["later"] == ["gateway"]
        assert gateway_of(client)["state"] == "listening"
