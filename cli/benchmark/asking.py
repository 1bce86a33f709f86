"""Sends a burst of requests through the daemon's socket or over HTTP, and reads every answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .burst import AnswerError, Burst
from .http_reading import Address, Read, Reader, ask

if TYPE_CHECKING:
    from mlxsup.client import AsyncClient, Result

PATH = "/v1/completions"
STEADY: Mapping[str, Any] = {"temperature": 0.0, "ignore_eos": True}
"""Parameters with which an answer has as many tokens as it may have, and nobody draws any."""

NOTEWORTHY_S = 0.1
"""A request that waited this long in the queue has waited for something: not for others of its
burst, which are gathered within a quarter of that."""

Ask = Callable[[Sequence[list[int]], int], Awaitable[Burst]]
"""From prompts and the tokens of each answer to what the burst has shown."""


def over_socket(client: AsyncClient, model: str) -> Ask:
    """Asks through the daemon's socket."""

    async def asks(prompts: Sequence[list[int]], tokens: int) -> Burst:
        inputs = [{"prompt_tokens": prompt, **STEADY} for prompt in prompts]
        return await ask_over_socket(client, model, inputs, tokens)

    return asks


def over_http(address: Address, model: str, key: str) -> Ask:
    """Asks the gateway."""

    async def asks(prompts: Sequence[list[int]], tokens: int) -> Burst:
        common = {"model": model, "max_tokens": tokens, **STEADY}
        bodies = [{"prompt": prompt, **common} for prompt in prompts]
        return await ask_over_http(address, bodies, tokens, key)

    return asks


async def ask_over_socket(
    client: AsyncClient, model: str, inputs: Sequence[Mapping[str, Any]], tokens: int
) -> Burst:
    """Sends all requests at once.

    Args:
        client: of the daemon.
        model: that must answer.
        inputs: parameters of `AsyncClient.generate`, for each request.
        tokens: length of each answer.

    Raises:
        AnswerError: an answer has another length.
        RequestError, ConnectionLost: a request ended with this error.
    """
    times: list[list[float]] = [[] for _ in inputs]
    sent_s: list[float] = []
    begin = time.perf_counter()

    async def read(given: Mapping[str, Any], own: list[float]) -> Result:
        sent_s.append(time.perf_counter() - begin)
        stream = client.generate(model, max_tokens=tokens, **given)
        async for delta in stream:
            own += [time.perf_counter() - begin] * len(delta.token_ids)
        return stream.result

    pairs = zip(inputs, times, strict=True)
    results = await asyncio.gather(*(read(*pair) for pair in pairs))
    for own in times:
        _check(len(own), tokens)
    return Burst(
        sent_s=sent_s,
        times=times,
        prompt_tokens=sum(result.usage.prompt_tokens for result in results),
        cached_tokens=sum(result.usage.cached_tokens for result in results),
        interrupted=sum(bool(result.resumed or result.paused) for result in results),
        waited=sum(result.timings.queued_s >= NOTEWORTHY_S for result in results),
    )


async def ask_over_http(
    address: Address, bodies: Sequence[Mapping[str, Any]], tokens: int, key: str = ""
) -> Burst:
    """Sends all requests at once, each on its own connection.

    An event may hold several tokens; the last one of an answer is counted as often as it takes.

    Args:
        address: of a server of OpenAI's API.
        bodies: of completions, without what makes them streams.
        tokens: length of each answer.
        key: of the server; empty for none.

    Raises:
        AnswerError: an answer has another length, or is not whole.
        OSError: a connection has failed.
    """
    begin = time.perf_counter()
    readers: list[Reader] = []
    sent_s = []
    try:
        for body in bodies:
            sent_s.append(time.perf_counter() - begin)
            readers.append(await ask(address, PATH, body, key=key))
        for reader in readers:
            await reader.ended
    finally:
        for reader in readers:
            reader.abort()
    reads = [checked(reader.read(), tokens) for reader in readers]
    times = []
    for read in reads:
        own = [at - begin for at in read.times]
        times.append(own + [own[-1]] * (tokens - len(own)))
    return Burst(
        sent_s=sent_s,
        times=times,
        prompt_tokens=sum(read.prompt_tokens for read in reads),
        cached_tokens=sum(read.cached_tokens for read in reads),
    )


def checked(read: Read, tokens: int) -> Read:
    """The answer.

    Raises:
        AnswerError: it has another length, or more events than tokens, or none with text.
    """
    _check(read.tokens, tokens)
    if not 1 <= len(read.times) <= tokens:
        raise AnswerError(f"{len(read.times)} events with text came for {tokens} tokens")
    return read


def _check(came: int, tokens: int) -> None:
    if came != tokens:
        raise AnswerError(f"{came} tokens came instead of {tokens}")
