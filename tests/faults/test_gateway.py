"""The gateway while something breaks: the gateway itself, the daemon, its port.

Real: daemons with a gateway process and HTTP over sockets; the engine is fake. A worker that dies:
tests/integration/test_gateway_daemon.py.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from mlxsup.client import Client
from mlxsup.supervisor.core.gateway import FROZEN_S
from mlxsup.supervisor.gateway import RECORDED_AS
from mlxsup.supervisor.workers.orphans import RECORD_NAME

from support.client.streams import Reader
from support.daemon.daemon import fake, is_alive, row
from support.daemon.faults import undisturbed
from support.eventually import eventually
from support.gateway.http_daemon import STREAMED, HttpDaemon, SseReader, asked_at, chat, gateway_of

SLOW = {"step_s": 0.02}


@pytest.fixture(scope="module")
def daemon() -> Iterator[HttpDaemon]:
    with HttpDaemon({"m": fake(fake=SLOW)}) as running:
        with running.client() as client:
            client.load("m")
        yield running


def test_an_interrupt_of_the_gateway_ends_nothing(daemon: HttpDaemon) -> None:
    reader = SseReader(daemon, chat("x", max_tokens=150)).started()
    with daemon.client() as client:
        before = gateway_of(client)
        os.kill(before["pid"], signal.SIGINT)
        reader.finished()
        assert "[DONE]" in reader.events
        assert gateway_of(client)["pid"] == before["pid"]


def test_a_gateway_that_dies_comes_back_and_other_streams_do_not_notice(daemon: HttpDaemon) -> None:
    with daemon.client() as client:
        generation = row(client, "m")["generation"]
        untouched = Reader(client, "m", "untouched", max_tokens=150).started()
        through = SseReader(daemon, chat("cut", max_tokens=3000)).started()
        first = gateway_of(client)
        os.kill(first["pid"], signal.SIGKILL)
        with daemon.connect() as waiting:
            waiting.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"200 OK" in waiting.recv(65536), "it was answered by the next one"
        second = gateway_of(client, after=first["pid"])
        assert (second["restarts"], second["url"]) == (first["restarts"] + 1, daemon.url)
        assert second["cause"] == "it ended with signal SIGKILL"
        assert untouched.finished().token_ids == undisturbed("untouched", 150)
        through.finished()
        assert through.is_cut
        assert "[DONE]" not in through.events
        eventually(lambda: not row(client, "m")["running"], what="the row of the cut stream")
        assert row(client, "m")["generation"] == generation


def test_a_gateway_that_is_asked_to_end_says_so_in_every_stream(daemon: HttpDaemon) -> None:
    readers = [SseReader(daemon, chat(f"{n}", max_tokens=3000)).started() for n in range(2)]
    with daemon.client() as client:
        first = gateway_of(client)
        os.kill(first["pid"], signal.SIGTERM)
        for reader in readers:
            reader.finished()
            assert reader.events[-1]["error"]["code"] == "shutting_down"
            assert reader.is_cut
        eventually(lambda: not row(client, "m")["running"], what="free rows")
        gateway_of(client, after=first["pid"])


def test_a_daemon_that_dies_ends_every_stream_with_an_error_and_the_next_gets_its_port() -> None:
    daemon = HttpDaemon({"m": fake(fake=SLOW, max_concurrency=len(STREAMED))})
    with daemon:
        readers = {path: SseReader(daemon, asked_at(path, "x", 3000), path) for path in STREAMED}
        for reader in readers.values():
            reader.started()
        with daemon.client() as client:
            gateway = psutil.Process(gateway_of(client)["pid"])
        daemon.listen = daemon.url.removeprefix("http://")
        daemon.kill()
        for path, reader in readers.items():
            reader.finished()
            error = reader.events[-1]["error"]
            assert error["message"].endswith(" is gone; `mlxsup start` starts it again")
            # Errors of Anthropic's API have no codes.
            assert error.get("code") == (None if path == "/v1/messages" else "daemon_lost")
            assert not reader.is_complete
        eventually(lambda: not is_alive(gateway))
        daemon.start()
        assert daemon.url == f"http://{daemon.listen}"
        # A gateway that is stopped does not keep the port from the next daemon.
        with daemon.client() as client:
            gateway = psutil.Process(gateway_of(client)["pid"])
        record = daemon.folder / "run" / RECORD_NAME
        recorded = [(entry["model"], entry["pid"]) for entry in json.loads(record.read_text())]
        assert (RECORDED_AS, gateway.pid) in recorded
        gateway.send_signal(signal.SIGSTOP)
        daemon.kill()
        daemon.start()
        assert not is_alive(gateway)
        assert daemon.get("/health")[0] == 200


# ---------------------------------------------------------------- one host of many


def test_a_host_that_drains_is_not_ready_ends_its_answers_and_refuses_others_early() -> None:
    """A router in front of it sends the next requests elsewhere, and no answer is cut."""
    with HttpDaemon({"m": fake(fake=SLOW, max_concurrency=1)}) as daemon:
        body = chat("drained", max_tokens=200)
        whole = SseReader(daemon, body).finished()
        running = SseReader(daemon, body).started()
        waiting = SseReader(daemon, chat("waiting", max_tokens=200))
        with daemon.client() as client:
            eventually(lambda: row(client, "m")["queued"], what="a stream that waits")
            assert daemon.process is not None
            daemon.process.send_signal(signal.SIGTERM)
            eventually(lambda: client.status()["stopping"], what="a daemon that ends")
        for path in ("/ready", "/ready?model=m"):
            assert daemon.get(path)[0] == 503
        assert daemon.get("/health")[0] == 200
        late = SseReader(daemon, body).finished()
        for refused in (late, waiting.finished()):
            assert (refused.status, refused.events) == (503, [])
            assert refused.headers["retry-after"]
        running.finished()
        assert (running.text, running.is_cut) == (whole.text, False)
        assert running.events[-1] == "[DONE]"


def test_a_call_whose_worker_dies_is_delivered_once() -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    call = '<tool_call>{"name": "look", "arguments": {"at": "the sea"}}</tool_call>'
    with HttpDaemon({"m": fake(fake=SLOW)}) as daemon, daemon.client() as client:
        body = chat(f"[[say I look. {call}]] [[fault crash=SIGKILL at=40 generation=1]]")
        reader = SseReader(daemon, {**body, "max_tokens": 400, "tools": tools}).finished()
        assert row(client, "m")["generation"] == 2
    choices = [choice for one in reader.events[:-1] for choice in one["choices"]]
    calls = [call for one in choices for call in one["delta"].get("tool_calls", [])]
    assert [json.loads(one["function"]["arguments"]) for one in calls] == [{"at": "the sea"}]
    assert choices[-1]["finish_reason"] == "tool_calls"


# ---------------------------------------------------------------- a gateway that lives in vain

REPLACED_S = 100.0
"""Ten times what is promised: the machine may be busy."""
FREEZING = """\
import signal, time
def freeze(*_):
    while True:
        time.sleep(3600)
signal.signal(signal.SIGUSR2, freeze)
"""
"""Stops the loop of a process of Python once it gets the signal, as a call that blocks does."""
SILENT = 1000


def has_lived_on(client: Client, pid: int) -> None:
    """Wait until this gateway has beaten for longer than a silent one may live."""
    since_s = client.status()["gateway"]["since_s"]

    def is_older() -> bool:
        gateway = client.status()["gateway"]
        assert (gateway["pid"], gateway["restarts"]) == (pid, 0), gateway["cause"]
        return bool(gateway["since_s"] > since_s + FROZEN_S + 2.0)

    eventually(is_older, REPLACED_S)


def test_a_gateway_is_replaced_when_it_freezes_but_not_for_a_pause_or_a_storm_P32(
    tmp_path: Path,
) -> None:
    (tmp_path / "sitecustomize.py").write_text(FREEZING)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    with ExitStack() as life:
        life.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        daemon = HttpDaemon({"m": fake(fake={"step_s": 0.01})})
        life.push(daemon)
        daemon.start(environment={"PYTHONPATH": str(tmp_path)})
        with daemon.client() as client:
            pid = gateway_of(client)["pid"]
        tree = daemon.processes()
        for process in tree:
            process.suspend()
        threading.Event().wait(FROZEN_S + 3.0)  # the pause itself
        for process in tree:
            process.resume()
        with ExitStack() as storm, daemon.client() as client:
            for _ in range(SILENT):
                storm.enter_context(daemon.connect())
            has_lived_on(client, pid)
        with daemon.client() as client:
            untouched = Reader(client, "m", "goes on", max_tokens=900).started()
            os.kill(pid, signal.SIGUSR2)

            def replaced() -> dict[str, Any] | None:
                value: dict[str, Any] = client.status()["gateway"]
                return value if value["state"] == "listening" and value["restarts"] else None

            second = eventually(replaced, REPLACED_S)
            assert (second["pid"] != pid, second["url"]) == (True, daemon.url)
            assert second["cause"] == f"it was frozen: no sign of life for {FROZEN_S:g} s"
            assert daemon.get("/health")[0] == 200
            assert untouched.finished().token_ids == undisturbed("goes on", 900)
            assert untouched.stream.result.resumed == 0
        assert second["cause"] in daemon.run("status").stdout
        log = (daemon.logs / "mlxsup.log").read_text()
        assert f"ERROR gateway killed pid={pid}" in log
