"""The processes that convert long bodies, so that none holds up the streams of others."""

from __future__ import annotations

import asyncio
import sys
from asyncio import StreamWriter
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from itertools import chain
from typing import Any, Self

from mlxsup.protocol.codec import unpack
from mlxsup.protocol.errors import ErrorCode

from . import limits
from .converter import LENGTH, Frame, frame_head
from .failure import Failure

ARGV = (sys.executable, "-P", "-m", "mlxsup.gateway.converter")


WRITE_BYTES = 64 * 1024
"""At once to a converter, and then its pipe is waited for: a body of 48 MiB that is written in one
turn of the event loop takes 90 ms of it."""


class ConverterLost(Exception):
    """A converter has ended in the middle of a body."""


class Converter:
    """A process that converts one body after the other.

    Attributes:
        is_asked: whether it was asked something that it has not answered.
        expiry: ends it, if it stays without work.
    """

    def __init__(self, process: Process) -> None:
        self.is_asked = False
        self.expiry: asyncio.TimerHandle | None = None
        self._process = process

    @classmethod
    async def start(cls) -> Self:
        """Start one."""
        return cls(await asyncio.create_subprocess_exec(*ARGV, stdin=PIPE, stdout=PIPE))

    @property
    def is_alive(self) -> bool:
        """True unless its end is known."""
        return self._process.returncode is None

    async def end(self) -> int:
        """End it at once, as it has nothing to lose; return its exit code, or minus the signal that
        has ended it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if self.is_alive:
            self._process.kill()
        self._process.stdin.close()
        await self._process.stdout.read()  # to its end, or the pipe would be left open
        return await self._process.wait()

    def release(self) -> None:
        """Let it end by itself."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    async def ask(self, values: dict[str, Any], *blobs: Sequence[bytes]) -> Frame:
        """Return its answer.

        Args:
            values: what it is asked.
            blobs: each in its pieces.

        Raises:
            ConverterLost: it has ended instead.
        """
        self.is_asked = True
        assert self._process.stdin is not None
        try:
            await self._write(self._process.stdin, values, blobs)
            answer = await self._read()
        except (ConnectionError, asyncio.IncompleteReadError):
            raise ConverterLost from None
        self.is_asked = False
        return answer

    async def _write(
        self, stdin: StreamWriter, values: dict[str, Any], blobs: Sequence[Sequence[bytes]]
    ) -> None:
        stdin.write(frame_head(values, [sum(map(len, pieces)) for pieces in blobs]))
        for piece in chain.from_iterable(blobs):
            for start in range(0, len(piece), WRITE_BYTES):
                stdin.write(memoryview(piece)[start : start + WRITE_BYTES])
                await stdin.drain()
        await stdin.drain()

    async def _read(self) -> Frame:
        assert self._process.stdout is not None
        read = self._process.stdout.readexactly
        values: dict[str, Any] = unpack(await read(*LENGTH.unpack(await read(LENGTH.size))))
        return values, [await read(size) for size in values.pop("sizes")]


class Converters:
    """The converters of a gateway: started when they are needed, and kept for a while."""

    def __init__(self) -> None:
        self._idle: list[Converter] = []
        self._turns = asyncio.Semaphore(limits.MAX_CONVERTERS)
        self._waiting = 0

    @asynccontextmanager
    async def one(self) -> AsyncIterator[Converter]:
        """Wait for one that is free, and have it until the block is left."""
        if self._waiting >= limits.MAX_WAITING_BODIES:
            raise busy()
        self._waiting += 1
        try:
            await self._turns.acquire()
        finally:
            self._waiting -= 1
        try:
            converter = self._take() or await Converter.start()
            try:
                yield converter
            finally:
                await self._put_back(converter)
        finally:
            self._turns.release()

    async def close(self) -> None:
        """End those without work; the others end with the gateway."""
        while (converter := self._take()) is not None:
            await converter.end()

    def _take(self) -> Converter | None:
        while self._idle:
            converter = self._idle.pop()
            if converter.expiry is not None:
                converter.expiry.cancel()
            if converter.is_alive:
                return converter
        return None

    async def _put_back(self, converter: Converter) -> None:
        if converter.is_asked or not converter.is_alive:
            await converter.end()  # it is still at a body that nobody waits for any longer
            return
        self._idle.append(converter)
        loop = asyncio.get_running_loop()
        converter.expiry = loop.call_later(limits.CONVERTER_IDLE_S, self._expire, converter)

    def _expire(self, converter: Converter) -> None:
        self._idle.remove(converter)
        converter.release()


def busy() -> Failure:
    """Return the refusal of one more long body."""
    size = limits.MAX_SMALL_BODY_BYTES // 1024
    return Failure(
        HTTPStatus.TOO_MANY_REQUESTS,
        f"too many bodies of more than {size} KiB are being read; send this one again in a moment",
        code=ErrorCode.OVERLOADED.value,
        is_retryable=True,
        retry_after_s=1.0,
    )
