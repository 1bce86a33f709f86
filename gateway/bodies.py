"""The bodies that requests for answers bring: a short one is read on the event loop, a long one in
a converter, so that no body holds up the streams of others."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from http import HTTPStatus
from typing import Any, Self, TypeVar

from starlette.requests import Request

from mlxsup.client import RequestError
from mlxsup.protocol.codec import unpack
from mlxsup.protocol.errors import ErrorCode, RemoteError

from . import limits
from .answers import gone
from .ask import Ask
from .body import Disconnected, read_body
from .conversion import Api, Sent, ask_of, encode_ask, read_ask
from .converter import LENGTH, Frame, frame_of
from .failure import Failure
from .fields import check_unread
from .keep_alive import check_keep_alive
from .keys import CALLER, Caller
from .metrics.meter import Meter
from .openai.errors import failure_of
from .responses.kept import Item, KeptResponses, Recalled
from .responses.requests import ResponseAsk

ARGV = (sys.executable, "-P", "-m", "mlxsup.gateway.converter")

T = TypeVar("T")

Resolve = Callable[[Ask, Caller], Awaitable[Ask]]
"""Finds out what the name of a request's model means to its caller; raises `Failure`."""


class ConverterLost(Exception):
    """A converter has ended in the middle of a body."""


class Converter:
    """A process that converts one body after the other.

    Attributes:
        is_asked: whether it was asked something that it has not answered.
        expiry: ends it, if it stays without work.

    Args:
        process: it.
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

    async def ask(self, values: dict[str, Any], *blobs: bytes) -> Frame:
        """Return its answer.

        Raises:
            ConverterLost: it has ended instead.
        """
        self.is_asked = True
        assert self._process.stdin is not None
        try:
            self._process.stdin.writelines(frame_of(values, blobs))
            await self._process.stdin.drain()
            answer = await self._read()
        except (ConnectionError, asyncio.IncompleteReadError):
            raise ConverterLost from None
        self.is_asked = False
        return answer

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
        """Wait for one that is free, and have it until the block is left.

        Raises:
            Failure: too many wait.
        """
        if self._waiting >= limits.MAX_WAITING_BODIES:
            raise _busy()
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


class Bodies:
    """Reads bodies.

    Args:
        resolve: see `Resolve`.
        meter: counts those that the daemon would refuse.
        kept: what requests may refer to.
        refuses_unread: true if a field that is not read here is an error.
    """

    def __init__(
        self, resolve: Resolve, meter: Meter, kept: KeptResponses, *, refuses_unread: bool
    ) -> None:
        self._resolve = resolve
        self._meter = meter
        self._kept = kept
        self._refuses_unread = refuses_unread
        self._converters = Converters()
        self._held_bytes = 0

    async def close(self) -> None:
        """End the converters."""
        await self._converters.close()

    async def read(self, request: Request, api: Api) -> tuple[Ask, Sequence[Sent]]:
        """Return what a request asks for, and what the daemon is to be sent for it.

        Raises:
            Failure: the body is wrong, too long or too slow, or there are too many.
            Disconnected: nobody waits for the answer any longer.
        """
        caller: Caller = request.scope[CALLER]
        with self._room() as take:
            data = await read_body(request, limits.MAX_BODY_BYTES, take)
            if len(data) > limits.MAX_SMALL_BODY_BYTES:
                return await _unless_gone(request, self._convert(api, data, caller, take))
            ask = read_ask(api, data)
            if (recalled := self._recall(ask, caller, take)) is not None:
                if sum(map(len, recalled)) > limits.MAX_SMALL_BODY_BYTES:
                    work = self._convert(api, data, caller, take, recalled)
                    return await _unless_gone(request, work)
                ask = read_ask(api, data, recalled)
        ask = await self._resolved(ask.in_name_of(caller.account), caller)
        with self._counting(ask):
            return ask, encode_ask(ask)

    def _recall(self, ask: Ask, caller: Caller, take: Callable[[int], None]) -> Recalled | None:
        """Return what a response refers to; None: it refers to nothing."""
        if not isinstance(ask, ResponseAsk) or not (ask.previous or ask.references):
            return None
        recalled = self._kept.recall(caller.key, ask.previous, ask.references)
        take(sum(map(len, recalled)))
        return recalled

    async def _convert(
        self,
        api: Api,
        data: bytes,
        caller: Caller,
        take: Callable[[int], None],
        recalled: Recalled | None = None,
    ) -> tuple[Ask, Sequence[Sent]]:
        """The same with a converter."""
        async with self._converters.one() as converter:
            try:
                async with asyncio.timeout(limits.CONVERT_LIMIT_S):
                    asked = {"api": api.value, "account": caller.account}
                    head, _ = _checked(await converter.ask(asked, data, *(recalled or ())))
                    ask = ask_of(api, head)
                    if recalled is None and (recalled := self._recall(ask, caller, take)):
                        head, _ = _checked(await converter.ask(asked, data, *recalled))
                        ask = ask_of(api, head)
                    ask = await self._resolved(ask, caller)
                    meant = {"target": ask.target, "preset": ask.preset}
                    answer = await converter.ask(meant)
            except TimeoutError:
                raise _too_slow() from None
            except ConverterLost:
                raise _lost(await converter.end()) from None
        with self._counting(ask):
            named, frames = _checked(answer)
        if isinstance(ask, ResponseAsk):
            ask = replace(ask, items=[Item(*item) for item in unpack(frames.pop())])
        pairs = [frames[place : place + 2] for place in range(0, len(frames), 2)]
        return ask, list(zip(named["ids"], pairs, strict=True))

    async def _resolved(self, ask: Ask, caller: Caller) -> Ask:
        if self._refuses_unread:
            check_unread(ask.unread)
        check_keep_alive(ask.parameters, caller)
        return await self._resolve(ask, caller)

    @contextmanager
    def _counting(self, ask: Ask) -> Iterator[None]:
        """Count a request with a wrong parameter, and make a response of its error."""
        try:
            yield
        except RequestError as error:
            self._meter.failed(ask.target or ask.model, error)
            raise failure_of(error) from None

    @contextmanager
    def _room(self) -> Iterator[Callable[[int], None]]:
        """Count the bytes of a body as long as the block lasts; those of a short one are free."""
        length = 0

        def take(more: int) -> None:
            nonlocal length
            before, length = _counted(length), length + more
            self._held_bytes += _counted(length) - before
            if self._held_bytes > limits.MAX_HELD_BYTES:
                raise _busy()

        try:
            yield take
        finally:
            self._held_bytes -= _counted(length)


def _counted(length: int) -> int:
    return length if length > limits.MAX_SMALL_BODY_BYTES else 0


def _checked(answer: Frame) -> Frame:
    """Return what a converter has made.

    Raises:
        Failure, RequestError: the body is wrong.
    """
    values, blobs = answer
    match values:
        case {"failure": failure}:
            raise Failure(**failure)
        case {"refusal": error}:
            raise RequestError.of(RemoteError.from_wire(error))
    return values["ok"], blobs


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return what some work returns, unless nobody waits for the answer any longer.

    Raises:
        Disconnected: that is so.
    """
    working, has_left = asyncio.create_task(work), asyncio.create_task(gone(request.receive))
    try:
        await asyncio.wait({working, has_left}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Disconnected
        return working.result()
    finally:
        for task in (working, has_left):
            task.cancel()
        await asyncio.gather(working, has_left, return_exceptions=True)


def _busy() -> Failure:
    size = limits.MAX_SMALL_BODY_BYTES // 1024
    return Failure(
        HTTPStatus.TOO_MANY_REQUESTS,
        f"too many bodies of more than {size} KiB are being read: send this one again in a moment",
        code=ErrorCode.OVERLOADED.value,
        is_retryable=True,
        retry_after_s=1.0,
    )


def _too_slow() -> Failure:
    return Failure(
        HTTPStatus.SERVICE_UNAVAILABLE,
        f"to read this body took more than {limits.CONVERT_LIMIT_S} s: send a shorter one, or the"
        " same when the machine is less busy",
        code="body_too_slow",
        is_retryable=False,
    )


def _lost(code: int) -> Failure:
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return Failure(
        HTTPStatus.SERVICE_UNAVAILABLE,
        f"the process that read this body has ended ({how}): send it again",
        code="converter_lost",
        is_retryable=True,
        retry_after_s=1.0,
    )
