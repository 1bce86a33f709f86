"""The synchronous client against a scripted supervisor."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mlxsup.client import Client, RequestError
from mlxsup.client.tool_calls import NO_CALL
from mlxsup.protocol.client_messages import (
    Cancel,
    ClientDelta,
    Deltas,
    Event,
    Generate,
    Ping,
    Restart,
    StatusQuery,
    Stop,
    Subscribe,
)
from mlxsup.protocol.codec import encode
from mlxsup.protocol.ids import RequestId
from mlxsup.protocol.message import Message

from support.eventually import eventually
from support.scripted_supervisor import (
    OpenStreams,
    Peer,
    answer,
    call_badly,
    fail,
    finish,
    say_hello,
    scripted_supervisor,
    send_pieces,
)

WRONG_SEQ = [
    frame.replace(b"seq\0", b"seq\xc0")
    for frame in encode(
        Deltas(
            deltas=[
                ClientDelta(id=RequestId("r"), seq=0, tokens=b"", body=b"\x80"),
            ]
        )
    )
]


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


def test_complete_gives_the_result(path: Path) -> None:
    with scripted_supervisor(path, say_hello) as supervisor, Client(supervisor.endpoint) as client:
        assert client.complete("m", prompt_tokens=[1, 2]).text == "Hello, you!"


def test_bad_parameters_are_refused_before_anything_is_sent(path: Path) -> None:
    with Client(f"ipc://{path}") as client:
        with pytest.raises(RequestError) as caught:
            client.generate("m", prompt="x", temperature=-1)
        assert caught.value.code == "invalid_request"
        assert caught.value.detail["parameter"] == "temperature"
        with pytest.raises(RequestError, match="exactly one of prompt"):
            client.generate("m", prompt="x", prompt_tokens=[1])
        with pytest.raises(RequestError, match="timeout_s takes seconds"):
            client.generate("m", prompt="x", timeout_s=-1)
        with pytest.raises(RequestError, match="model takes text"):
            client.load("")
        with pytest.raises(TypeError, match="urgency"):
            client.generate("m", prompt="x", urgency=5)  # type: ignore[call-arg]  # unknown
        with pytest.raises(TypeError, match="urgency"):
            client.complete("m", prompt="x", urgency=5)  # type: ignore[call-arg]  # unknown


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


def test_cancel_ends_the_iteration_normally_from_any_thread_D4(path: Path) -> None:
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
        client.ping()
        assert len(supervisor.got(Cancel)) == 1


def test_leaving_the_block_of_a_stream_cancels_it_D12(path: Path) -> None:
    script = OpenStreams()
    with scripted_supervisor(path, script) as supervisor, Client(supervisor.endpoint) as client:
        with client.generate("m", prompt="x") as stream:
            next(stream)
        client.ping()
        assert script.open == []


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


def test_request_error_carries_code_and_detail(path: Path) -> None:
    def script(peer: Peer, message: Message) -> None:
        if isinstance(message, Generate):
            send_pieces(peer, message.id, ["He"])
            fail(peer, message.id, "worker_crashed", "the worker crashed", tokens_sent=1)

    with scripted_supervisor(path, script) as supervisor, Client(supervisor.endpoint) as client:
        stream = client.generate("m", prompt="x")
        assert next(stream).text == "He"
        with pytest.raises(RequestError) as caught:
            next(stream)
        assert (caught.value.code, caught.value.detail) == ("worker_crashed", {"tokens_sent": 1})
        with pytest.raises(RequestError):
            stream.result  # noqa: B018
        assert list(stream) == []


def test_gap_in_the_stream_is_an_error_and_cancels_it_J2(path: Path) -> None:
    def script(peer: Peer, message: Message) -> None:
        if isinstance(message, Generate):
            send_pieces(peer, message.id, ["a"])
            send_pieces(peer, message.id, ["c"], first_seq=2)
            finish(peer, message.id, 3)
        elif isinstance(message, Ping):
            answer(peer, message)

    with scripted_supervisor(path, script) as supervisor, Client(supervisor.endpoint) as client:
        stream = client.generate("m", prompt="x")
        assert next(stream).text == "a"
        with pytest.raises(RequestError, match="piece 1 of the stream is missing"):
            next(stream)
        client.ping()
        assert [c.id for c in supervisor.got(Cancel)] == [stream.request_id]


def test_a_tool_call_that_is_no_json_reaches_its_caller_J2(path: Path) -> None:
    with scripted_supervisor(path, call_badly) as supervisor, Client(supervisor.endpoint) as client:
        result = client.complete("m", prompt="x")
        assert [call["function"]["arguments"] for call in result.tool_calls] == ["f(1)"]
        assert result.warnings == [NO_CALL]
        assert client.ping() == {}


def test_missing_end_of_the_stream_is_an_error_J2(path: Path) -> None:
    def script(peer: Peer, message: Message) -> None:
        if isinstance(message, Generate):
            send_pieces(peer, message.id, ["a"])
            finish(peer, message.id, 2)

    with (
        scripted_supervisor(path, script) as supervisor,
        Client(supervisor.endpoint) as client,
        pytest.raises(RequestError, match="piece 1"),
    ):
        client.complete("m", prompt="x")


@pytest.mark.parametrize("frames", [[b"\xc1"], [b"\x80"], [b"a", b"b", b"c"], [b""], WRONG_SEQ])
def test_garbage_from_the_daemon_is_an_internal_error(path: Path, frames: list[bytes]) -> None:
    def script(peer: Peer, message: Message) -> None:
        if isinstance(message, Generate):
            peer.send_frames(frames)
        elif isinstance(message, Ping):
            answer(peer, message)

    with scripted_supervisor(path, script) as supervisor, Client(supervisor.endpoint) as client:
        with pytest.raises(RequestError) as caught:
            client.complete("m", prompt="x")
        assert caught.value.code == "internal"
        client.ping()


def test_error_without_an_id_ends_everything_that_is_open(path: Path) -> None:
    requests: list[Message] = []

    def script(peer: Peer, message: Message) -> None:
        requests.append(message)
        if len(requests) == 2:
            fail(peer, "", "invalid_request", "unknown type 'x'")

    with scripted_supervisor(path, script) as supervisor, Client(supervisor.endpoint) as client:
        for stream in [client.generate("m", prompt="x") for _ in range(2)]:
            with pytest.raises(RequestError) as caught:
                next(stream)
            assert caught.value.code == "internal"
            assert "unknown type 'x'" in caught.value.message


def test_commands_and_events(path: Path) -> None:
    def script(peer: Peer, message: Message) -> None:
        match message:
            case Restart(model="bad"):
                fail(peer, message.id, "unknown_model", "unknown model", known=["m"])
            case Restart(now=False):
                pass
            case Subscribe():
                for generation in (1, 2):
                    peer.send(Event(id=message.id, value={"generation": generation}))
            case Stop():
                answer(peer, message, pids=[1, 2], supervisor_pid=3)
            case Cancel():
                pass
            case _:
                answer(peer, message, kind=message.TYPE)

    with scripted_supervisor(path, script) as supervisor, Client(supervisor.endpoint) as client:
        assert client.status() == {"kind": "status"}
        assert client.load("m") == {"kind": "load"}
        assert client.unload("m") == {"kind": "unload"}
        assert client.restart("m", now=True) == {"kind": "restart"}
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
        assert client.stop(now=True, timeout_s=1)["supervisor_pid"] == 3
        assert supervisor.got(Stop)[0].timeout_s == 1
        assert len(supervisor.got(StatusQuery)) == 1


def test_client_that_nobody_closes_does_not_keep_the_interpreter(path: Path) -> None:
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
