"""The asynchronous client against a scripted supervisor."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from mlxsup.client import AsyncClient, RequestError
from mlxsup.protocol.client_messages import (
    Cancel,
    Deltas,
    Event,
    Generate,
    Ping,
    Restart,
    Subscribe,
)
from mlxsup.protocol.ids import pack_tokens
from mlxsup.protocol.message import Message

from support.client.pieces import piece
from support.client.scripted_supervisor import (
    OpenStreams,
    Peer,
    answer,
    fail,
    finish,
    scripted_supervisor,
)
from support.eventually import eventually
from support.eventually_async import eventually_async


def test_many_streams_at_once_lose_nothing_C4(path: Path) -> None:
    def script(peer: Peer, message: Message) -> None:
        if isinstance(message, Generate):
            for seq in range(40):
                one = piece(message.id, seq, "x", tokens=pack_tokens([seq]))
                peer.send(Deltas(deltas=[one]))
            finish(peer, message.id, 40)

    async def run(endpoint: str) -> None:
        async with AsyncClient(endpoint) as client:

            async def work() -> None:
                for _ in range(3):
                    result = await client.complete("m", prompt="x")
                    assert result.token_ids == list(range(40))

            await asyncio.gather(*(work() for _ in range(32)))

    with scripted_supervisor(path, script) as supervisor:
        asyncio.run(run(supervisor.endpoint))
        assert len(supervisor.got(Generate)) == 96


def test_cancel_from_the_loop_and_from_another_thread_D4(path: Path) -> None:
    async def run(endpoint: str) -> None:
        async with AsyncClient(endpoint) as client:
            for is_own_thread in (True, False):
                stream = client.generate("m", prompt="x")
                assert (await anext(stream)).text == "one"
                if is_own_thread:
                    stream.cancel()
                else:
                    thread = threading.Thread(target=stream.cancel)
                    thread.start()
                    thread.join()
                assert [delta async for delta in stream] == []
                assert stream.result.finish_reason == "cancelled"
                stream.cancel()

    with scripted_supervisor(path, OpenStreams()) as supervisor:
        asyncio.run(run(supervisor.endpoint))
        assert len(supervisor.got(Cancel)) == 2


def test_cancelling_the_task_of_complete_cancels_the_request_D12(path: Path) -> None:
    script = OpenStreams()

    async def run(endpoint: str) -> None:
        async with AsyncClient(endpoint) as client:
            asking = asyncio.create_task(client.complete("m", prompt="x"))
            await eventually_async(lambda: script.open)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            await client.ping()
            assert script.open == []

    with scripted_supervisor(path, script) as supervisor:
        asyncio.run(run(supervisor.endpoint))
        assert len(supervisor.got(Cancel)) == 1


def test_errors_restarts_and_events(path: Path) -> None:
    def script(peer: Peer, message: Message) -> None:
        match message:
            case Generate():
                fail(peer, message.id, "overloaded", "too much", retry_after_s=1.0)
            case Restart(now=False):
                pass
            case Subscribe():
                peer.send(Event(id=message.id, value={"generation": 1}))
            case Ping() | Restart():
                answer(peer, message)
            case Cancel():
                pass

    async def run(endpoint: str) -> None:
        async with AsyncClient(endpoint) as client:
            with pytest.raises(RequestError) as caught:
                await client.complete("m", prompt="x")
            assert (caught.value.code, caught.value.detail) == (
                "overloaded",
                {"retry_after_s": 1.0},
            )
            assert await client.restart("m", wait=False) == {}
            async with client.events() as events:
                assert await anext(events) == {"generation": 1}
            assert [event async for event in events] == []

    with scripted_supervisor(path, script) as supervisor:
        asyncio.run(run(supervisor.endpoint))


def test_cancelled_task_cancels_its_stream_D4(path: Path) -> None:
    async def read(endpoint: str) -> BaseException:
        async with AsyncClient(endpoint) as client:
            has_begun = asyncio.Event()

            async def take() -> None:
                async for _ in client.generate("m", prompt="x"):
                    has_begun.set()

            task = asyncio.create_task(take())
            await has_begun.wait()
            task.cancel()
            [error] = await asyncio.gather(task, return_exceptions=True)
            # Before the client is closed, which would cancel it, and while the error is kept.
            await asyncio.to_thread(eventually, lambda: supervisor.got(Cancel))
            assert error is not None
            return error

    with scripted_supervisor(path, OpenStreams()) as supervisor:
        error = asyncio.run(read(supervisor.endpoint))
        assert isinstance(error, asyncio.CancelledError)
        assert {c.id for c in supervisor.got(Cancel)} == {g.id for g in supervisor.got(Generate)}
