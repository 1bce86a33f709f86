"""The asynchronous client against a scripted supervisor."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from mlxsup.client import AsyncClient, RequestError
from mlxsup.protocol.client_messages import (
    Cancel,
    Deltas,
    Failed,
    Generate,
    Ping,
    Reply,
    Restart,
)
from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.protocol.ids import pack_tokens
from mlxsup.protocol.message import Message

from support.client.pieces import piece
from support.client.scripted_supervisor import (
    OpenStreams,
    Peer,
    finish,
    scripted_supervisor,
)
from support.eventually import eventually


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


def test_a_restart_that_is_not_waited_for_ends_with_its_acceptance_or_refusal(path: Path) -> None:
    def script(peer: Peer, message: Message) -> None:
        match message:
            case Restart(model="bad"):
                error = RemoteError(ErrorCode.UNKNOWN_MODEL, "there is no model 'bad'")
                peer.send(Failed(id=message.id, error=error))
            case Ping():
                peer.send(Reply(id=message.id, value={}))
            case _:  # the other restart takes its time
                pass

    async def run(endpoint: str) -> None:
        async with AsyncClient(endpoint) as client, asyncio.timeout(60):
            assert await client.restart("m", wait=False) == {}
            with pytest.raises(RequestError, match="there is no model 'bad'"):
                await client.restart("bad", wait=False)

    with scripted_supervisor(path, script) as supervisor:
        asyncio.run(run(supervisor.endpoint))
