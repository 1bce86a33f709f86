"""The synchronous client against a scripted supervisor, and each command of both clients."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
import zmq

from mlxsup.client import AsyncClient, Client, ConnectionLost, Embeddings, Ranking, RequestError
from mlxsup.protocol.client_messages import (
    AddModel,
    Cancel,
    CancelRequest,
    Configure,
    Deltas,
    Event,
    Generate,
    Load,
    PauseRequest,
    Ping,
    Prioritize,
    Reload,
    RemoveModel,
    RequestsQuery,
    Restart,
    ResumeRequest,
    SettingsQuery,
    StatusQuery,
    Stop,
    Subscribe,
    Unload,
    Usage,
)
from mlxsup.protocol.codec import encode
from mlxsup.protocol.ids import ModelName, RequestId, pack_tokens
from mlxsup.protocol.message import Message
from mlxsup.protocol.states import Priority

from support.cli.cli import environment
from support.client.pieces import piece
from support.client.scripted_supervisor import (
    OpenStreams,
    Peer,
    answer,
    fail,
    finish,
    say_hello,
    scripted_supervisor,
)
from support.client.sent_requests import asked_in
from support.eventually import eventually


def test_stream_is_read_to_its_end_and_has_a_result_J2(path: Path) -> None:
    with scripted_supervisor(path, say_hello) as supervisor, Client(supervisor.endpoint) as client:
        stream = client.generate("m", prompt="hi", max_tokens=5, seed=7, client="someone")
        with pytest.raises(RuntimeError, match="read to its end"):
            stream.result  # noqa: B018
        deltas = list(stream)
        assert [d.text for d in deltas] == ["He", "llo", ",", " you", "!"]
        assert [d.token_ids for d in deltas] == [[0], [1], [2], [3], [4]]
        result = stream.result
        assert (result.text, result.token_ids) == ("Hello, you!", [0, 1, 2, 3, 4])
        assert (result.finish_reason, result.seed, result.resumed) == ("stop", 7, 0)
        assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (3, 5)
        assert list(stream) == []
        request = supervisor.got(Generate)[0]
        assert (request.id, request.client) == (stream.request_id, "someone")
        stream.cancel()
        assert client.ping() == {}
        assert supervisor.got(Cancel) == []


def test_many_threads_share_one_client_C4(path: Path) -> None:
    texts: list[str] = []
    with scripted_supervisor(path, say_hello) as supervisor, Client(supervisor.endpoint) as client:

        def work() -> None:
            for _ in range(20):
                texts.append(client.complete("m", prompt="x").text)

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert texts == ["Hello, you!"] * 160


def test_cancel_ends_the_iteration_normally_from_any_thread_D4_D12(path: Path) -> None:
    script = OpenStreams()
    with scripted_supervisor(path, script) as supervisor, Client(supervisor.endpoint) as client:
        stream = client.generate("m", prompt="x")
        assert next(stream).text == "one"
        thread = threading.Thread(target=stream.cancel)
        thread.start()
        assert list(stream) == []
        thread.join()
        stream.cancel()
        assert (stream.result.text, stream.result.finish_reason) == ("one", "cancelled")
        with client.generate("m", prompt="x") as left:
            next(left)
        client.ping()
        assert script.open == [], "leaving its block cancels a stream, too"
        assert len(supervisor.got(Cancel)) == 2


def test_closing_the_client_cancels_its_streams_D12(path: Path) -> None:
    script = OpenStreams()
    with scripted_supervisor(path, script) as supervisor:
        client = Client(supervisor.endpoint)
        streams = [client.generate("m", prompt="x") for _ in range(3)]
        for stream in streams:
            next(stream)
        client.close()
        client.close()
        for stream in streams:
            stream.cancel()
            assert list(stream) == []
            assert (stream.result.text, stream.result.finish_reason) == ("one", "cancelled")
        with pytest.raises(RuntimeError, match="closed"):
            client.ping()
        eventually(lambda: not script.open)


def test_refusals_and_events(path: Path) -> None:
    def script(peer: Peer, message: Message) -> None:
        match message:
            case Restart(model="bad"):
                fail(peer, message.id, "unknown_model", "unknown model", known=["m"])
            case Subscribe():
                for generation in (1, 2):
                    peer.send(Event(id=message.id, value={"generation": generation}))
            case Ping():
                answer(peer, message)
            case _:  # a restart that is not waited for, a cancel
                pass

    with scripted_supervisor(path, script) as supervisor, Client(supervisor.endpoint) as client:
        assert client.restart("m", wait=False) == {}
        with pytest.raises(RequestError) as caught:
            client.restart("bad", wait=False)
        assert caught.value.detail == {"known": ["m"]}
        with client.events() as events:
            assert [next(events)["generation"] for _ in range(2)] == [1, 2]
            reader = threading.Thread(target=lambda: list(events), daemon=True)
            reader.start()
        reader.join(60)
        assert not reader.is_alive(), "it waited for the next event"
        assert list(events) == []


def test_unclosed_client_does_not_keep_the_interpreter(path: Path) -> None:
    script = OpenStreams()
    with scripted_supervisor(path, script) as supervisor:
        code = (
            "from mlxsup.client import Client\n"
            f"client = Client({supervisor.endpoint!r})\n"
            "print(next(client.generate('m', prompt='x')).text)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
        )
    assert (done.returncode, done.stdout, done.stderr) == (0, "one\n", "")


# ---------------------------------------------------------------- a daemon that is gone


@pytest.mark.parametrize("is_stale", [False, True], ids=["no socket", "a stale socket"])
def test_missing_daemon_is_said_at_once_E6(path: Path, is_stale: bool) -> None:
    if is_stale:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
    assert path.exists() == is_stale
    with Client(f"ipc://{path}") as client:
        with pytest.raises(ConnectionLost, match=r"no daemon answers at .*mlxsup start"):
            client.status()
        with pytest.raises(ConnectionLost):
            client.complete("m", prompt="x")


def test_refused_connection_says_why_P24(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        told = threading.Event()

        def turn_away() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.shutdown(socket.SHUT_RDWR)
                told.wait(60.0)

        turning = threading.Thread(target=turn_away)
        turning.start()
        with Client(f"ipc://{path}") as client, pytest.raises(ConnectionLost) as caught:
            client.ping()
        told.set()
        turning.join()
    assert "refused the connection" in caught.value.message
    assert caught.value.is_turned_away


def test_connection_that_ends_unanswered_was_refused_P24(path: Path) -> None:
    listening, heard = threading.Event(), threading.Event()

    def listen_once() -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
            router.bind(f"ipc://{path}")
            listening.set()
            heard.set() if router.poll(30_000) else None

    listener = threading.Thread(target=listen_once)
    listener.start()
    assert listening.wait(60.0)
    with Client(f"ipc://{path}") as client, pytest.raises(ConnectionLost) as caught:
        client.ping()
    listener.join()
    assert heard.is_set()
    assert "ended the connection before it answered" in caught.value.message
    assert caught.value.is_turned_away


def test_client_goes_on_after_the_death_of_the_daemon_P2(path: Path) -> None:
    with Client(f"ipc://{path}") as client:
        with scripted_supervisor(path, OpenStreams()):
            streams = [client.generate("m", prompt="x") for _ in range(3)]
            cancelled = client.generate("m", prompt="x")
            for stream in [*streams, cancelled]:
                assert next(stream).text == "one"
        for stream in streams:
            with pytest.raises(ConnectionLost, match="is gone"):
                next(stream)
        with scripted_supervisor(path, say_hello) as supervisor:
            assert client.complete("m", prompt="x").text == "Hello, you!"
            # Nothing is sent a second time.
            assert len(supervisor.got(Generate)) == 1


def test_pieces_sent_before_the_death_are_read_H7(path: Path) -> None:
    def script(peer: Peer, message: Message) -> None:
        if isinstance(message, Generate):
            for start in range(0, 3000, 10):
                pieces = [
                    piece(message.id, n, "x", tokens=pack_tokens([n]))
                    for n in range(start, start + 10)
                ]
                peer.send(Deltas(deltas=pieces))
            finish(peer, message.id, 3000)

    with Client(f"ipc://{path}") as client:
        with scripted_supervisor(path, script) as supervisor:
            stream = client.generate("m", prompt="x")
            eventually(lambda: supervisor.got(Generate))
        assert len(list(stream)) == 3000
        assert stream.result.token_ids == list(range(3000))


# ---------------------------------------------------------------- interrupts


TYPED = """\
from mlxsup import Client
client = Client({endpoint!r})
for delta in client.generate("m", prompt="x"): print(delta.text, flush=True)

print("ready", flush=True)
"""
"""In an interactive Python, which keeps the latest traceback and so every frame of the stream."""


def test_ctrl_c_in_an_interactive_python_cancels_the_stream_D4(path: Path) -> None:
    with (
        scripted_supervisor(path, OpenStreams()) as supervisor,
        subprocess.Popen(
            [sys.executable, "-q", "-i"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment(),
        ) as python,
    ):
        assert python.stdin is not None
        assert python.stdout is not None
        python.stdin.write(TYPED.format(endpoint=supervisor.endpoint))
        python.stdin.flush()
        assert python.stdout.readline() == "one\n"
        python.send_signal(signal.SIGINT)
        # It is interactive still, and the traceback has the stream.
        assert python.stdout.readline() == "ready\n"
        eventually(lambda: supervisor.got(Cancel))
        assert [c.id for c in supervisor.got(Cancel)] == [g.id for g in supervisor.got(Generate)]
        python.stdin.close()
        assert python.wait(60) == 0


BLOCKED = """\
import signal
from mlxsup import Client
client = Client({endpoint!r})
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
try:
    for delta in client.generate("m", prompt="x"): print(delta.text, flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
"""The client's thread takes the signal, so that it does not wake the one that waits: as if it came
just before that one had begun to wait."""


def test_ctrl_c_that_does_not_wake_the_waiting_thread_is_seen_nevertheless_D4(path: Path) -> None:
    with (
        scripted_supervisor(path, OpenStreams()) as supervisor,
        subprocess.Popen(
            [sys.executable, "-c", BLOCKED.format(endpoint=supervisor.endpoint)],
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        ) as python,
    ):
        assert python.stdout is not None
        assert python.stdout.readline() == "one\n"
        eventually(lambda: psutil.Process(python.pid).status() == psutil.STATUS_SLEEPING)
        python.send_signal(signal.SIGINT)
        assert python.stdout.readline() == "interrupted\n"


# ---------------------------------------------------------------- every command of both clients


ID = RequestId("some")
REQUEST = RequestId("#12")
MODEL = ModelName("m")

COMMANDS: list[tuple[str, list[Any], dict[str, Any], Message]] = [
    ("ping", [], {}, Ping(id=ID)),
    ("status", [], {"debug": True}, StatusQuery(id=ID, debug=True)),
    ("load", ["m"], {"dry_run": True, "keep_alive": 9, "context_length": 512},
     Load(id=ID, model=MODEL, dry_run=True, keep_alive=9.0, context_length=512)),
    ("unload", ["m"], {}, Unload(id=ID, model=MODEL)),
    ("restart", ["m"], {"now": True}, Restart(id=ID, model=MODEL, now=True)),
    ("prioritize", ["#12", "batch"], {},
     Prioritize(id=ID, request=REQUEST, priority=Priority.BATCH)),
    ("pause", ["#12"], {}, PauseRequest(id=ID, request=REQUEST)),
    ("resume", ["#12"], {}, ResumeRequest(id=ID, request=REQUEST)),
    ("reload", [], {"dry_run": True}, Reload(id=ID, dry_run=True)),
    ("stop", [], {"now": True, "timeout_s": 3}, Stop(id=ID, now=True, timeout_s=3.0)),
    ("requests", [], {"client": "me"}, RequestsQuery(id=ID, client="me")),
    ("cancel", ["#12"], {}, CancelRequest(id=ID, request=REQUEST)),
    ("add", ["o/m"], {"name": "m", "revision": "r"},
     AddModel(id=ID, model="o/m", name="m", revision="r")),
    ("remove", ["m"], {}, RemoveModel(id=ID, model=MODEL)),
    ("configure", [{"defaults.preload": "true", "models.m.memory": None}], {},
     Configure(id=ID, changes={"defaults.preload": "true", "models.m.memory": None})),
    ("settings", ["m"], {}, SettingsQuery(id=ID, model=MODEL)),
]  # fmt: skip


def reply(peer: Peer, message: Message) -> None:
    """A script: an answer that nothing else could have made."""
    answer(peer, message, said="so", state="READY")


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_each_command_reaches_the_daemon_and_is_answered(path: Path, is_async: bool) -> None:
    async def ask_all(endpoint: str) -> list[Any]:
        async with AsyncClient(endpoint) as client:
            return [
                await getattr(client, name)(*given, **more) for name, given, more, _ in COMMANDS
            ]

    with scripted_supervisor(path, reply) as supervisor:
        if is_async:
            values = asyncio.run(ask_all(supervisor.endpoint))
        else:
            with Client(supervisor.endpoint) as client:
                values = [
                    getattr(client, name)(*given, **more) for name, given, more, _ in COMMANDS
                ]
        got = [supervisor.got(type(message)) for *_, message in COMMANDS]
    assert values == [{"said": "so", "state": "READY"}] * len(COMMANDS)
    sent = [[replace(cast(Any, one), id=ID) for one in each] for each in got]
    assert sent == [[message] for *_, message in COMMANDS]


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_texts_reach_the_daemon_with_all_that_is_said_of_them(path: Path, is_async: bool) -> None:
    options = {"timeout_s": 9.0, "priority": "batch", "client": "me", "keep_alive": 7.0}
    embedded = {"texts": ["a", [1, 2]], "dimensions": 3, "input_type": "query", "truncate": False}
    ranked = {"texts": ["a"], "query": "q", "truncate": False}
    calls: list[tuple[str, list[Any], dict[str, Any]]] = [
        ("embed", [embedded["texts"]], {**embedded, **options}),
        ("rerank", ["q", ranked["texts"]], {"truncate": False, **options}),
        ("rerank", ["q", ranked["texts"]], {}),
    ]
    del calls[0][2]["texts"]

    async def ask_all(endpoint: str) -> list[Any]:
        async with AsyncClient(endpoint) as client:
            return [await getattr(client, name)("m", *given, **more) for name, given, more in calls]

    def no_vectors(peer: Peer, message: Message) -> None:
        if isinstance(message, Generate):
            finish(peer, message.id, 0)

    with scripted_supervisor(path, no_vectors) as supervisor:
        if is_async:
            values = asyncio.run(ask_all(supervisor.endpoint))
        else:
            with Client(supervisor.endpoint) as client:
                values = [getattr(client, name)("m", *given, **more) for name, given, more in calls]
        got = [asked_in(encode(one)) for one in supervisor.got(Generate)]
    usage = Usage(prompt_tokens=3, engine_s=0.25)
    rest = Ranking(results=[], usage=usage)
    assert values == [Embeddings(vectors=[], usage=usage), rest, rest]
    assert got == [
        {"model": "m", **embedded, **options},
        {"model": "m", **ranked, **options},
        {"model": "m", **ranked, "truncate": True},
    ]
