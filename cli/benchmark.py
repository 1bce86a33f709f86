"""Measures a model through the daemon: for `mlxsup bench`, and for the benchmarks in bench/.

Each size is a burst of requests that are sent at once, through the daemon's socket or over HTTP.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from .arguments import row_called
from .exit_status import CliError
from .terminal.text import counted, format_duration

if TYPE_CHECKING:
    from mlxsup.client import AsyncClient, Result

PATH = "/v1/completions"
STEADY: Mapping[str, Any] = {"temperature": 0.0, "ignore_eos": True}
"""Parameters with which an answer has as many tokens as it may have, and none is drawn."""

WARM_UP_TOKENS = 16
"""Of the answers before the first repeat: enough to prepare every shape that repeats need."""

PROMPT_IDS = range(100, 250)
"""The token ids of prompts. Every vocabulary has them, that of bytes alone too, and the ids below
are those that tokenizers like to use for their marks."""

NOTEWORTHY_S = 0.1
"""A request that waited this long in the queue has waited for something: not for others of its
burst, which are gathered within a quarter of that."""

LOOK_EVERY_S = 1.0
"""At the memory of the model's process."""

EVENT, DONE = b"data: ", b"[DONE]"
MOST_LINE_BYTES = 2**20
MOST_SHOWN = 500
"""Bytes of an answer that cannot be read, for people."""

Address = tuple[str, int]


class AnswerError(Exception):
    """An answer is not whole, or not as long as it was asked for."""


# ---------------------------------------------------------------- what a burst has shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """Answers that were asked for at the same time.

    Attributes:
        sent_s: when each prompt was sent, in seconds after the first.
        times: when each token of each answer was there, by the same clock.
        prompt_tokens: of all prompts together.
        cached_tokens: of these, the ones that needed no prefill.
        interrupted: answers that were paused, or continued after a crash.
        waited: answers that waited in the queue; 0 if that is not known.
    """

    sent_s: Sequence[float]
    times: Sequence[Sequence[float]]
    prompt_tokens: int = 0
    cached_tokens: int = 0
    interrupted: int = 0
    waited: int = 0

    @property
    def whole_per_s(self) -> float:
        """Tokens per second, from the first prompt sent to the last token."""
        return sum(map(len, self.times)) / max(own[-1] for own in self.times)

    @property
    def first_s(self) -> float:
        """Time to first token, the median of all."""
        pairs = zip(self.times, self.sent_s, strict=True)
        return statistics.median(own[0] - sent for own, sent in pairs)

    def figures(self, memory_bytes: int) -> dict[str, float | None]:
        """Return every figure by its key for programs; None for one that this burst does not show.

        Args:
            memory_bytes: the most that the model's process took meanwhile; 0 if it is not known.
        """
        gaps = [later - earlier for own in self.times for earlier, later in pairwise(own)]
        # Tokens of one answer may have come at one time.
        speeds = [(len(own) - 1) / (own[-1] - own[0]) for own in self.times if own[-1] > own[0]]
        # While all streams run, if they ever do at the same time.
        begin, end = max(own[0] for own in self.times), min(own[-1] for own in self.times)
        together = sum(begin < at <= end for own in self.times for at in own)
        return {
            "first_token_s": self.first_s,
            "gap_p50_s": percentile(gaps, 50) if gaps else None,
            "gap_p99_s": percentile(gaps, 99) if gaps else None,
            "gap_max_s": max(gaps, default=None),
            "stream_tokens_per_s": statistics.median(speeds) if speeds else None,
            "tokens_per_s": self.whole_per_s,
            "steady_tokens_per_s": together / (end - begin) if end > begin else None,
            "prefill_tokens_per_s": (self.prompt_tokens - self.cached_tokens) / begin,
            "memory_bytes": memory_bytes or None,
        }


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the smallest value that this percentage of them does not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


# ---------------------------------------------------------------- asking


async def ask_over_socket(
    client: AsyncClient, model: str, inputs: Sequence[Mapping[str, Any]], tokens: int
) -> Burst:
    """Send all requests at once; `inputs` are parameters of `AsyncClient.generate`.

    Raises:
        AnswerError: an answer has another length than `tokens`.
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

    results = await asyncio.gather(*map(read, inputs, times))
    for own in times:
        _check_length(len(own), tokens)
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
    """Send all requests at once to a server of OpenAI's API, each on its own connection.

    An event may hold several tokens; the last one of an answer is counted as often as it takes.

    Raises:
        AnswerError: an answer has another length than `tokens`, or is not whole.
        OSError: a connection has failed.
    """
    sent_s: list[float] = []
    begin = time.perf_counter()

    async def read(body: Mapping[str, Any]) -> Read:
        sent_s.append(time.perf_counter() - begin)
        return checked(await read_stream(address, PATH, body, key), tokens)

    reads = await asyncio.gather(*map(read, bodies))
    times = [[at - begin for at in one.times] for one in reads]
    return Burst(
        sent_s=sent_s,
        times=[own + [own[-1]] * (tokens - len(own)) for own in times],
        prompt_tokens=sum(one.prompt_tokens for one in reads),
        cached_tokens=sum(one.cached_tokens for one in reads),
    )


class Read(NamedTuple):
    """A streamed answer that came to its end, with the counts of tokens that the server gives.

    Attributes:
        times: when each event with text was there, by `time.perf_counter`.
        cached_tokens: of the prompt's, the ones that needed no prefill; 0 if it does not say.
    """

    times: Sequence[float]
    prompt_tokens: int
    tokens: int
    cached_tokens: int


def checked(read: Read, tokens: int) -> Read:
    """Return the answer.

    Raises:
        AnswerError: it has another length, or more events than tokens, or none with text.
    """
    _check_length(read.tokens, tokens)
    if not 1 <= len(read.times) <= tokens:
        raise AnswerError(f"the stream had {len(read.times)} events with text for {tokens} tokens")
    return read


def _check_length(came: int, tokens: int) -> None:
    if came != tokens:
        raise AnswerError(f"the answer has {came} tokens instead of {tokens}")


async def read_stream(
    address: Address,
    path: str,
    body: Mapping[str, Any],
    key: str = "",
    on_event: Callable[[float, bytes], None] | None = None,
) -> Read:
    """Send a request, and return its streamed answer once it has ended.

    Lines are kept with their times, and decoded at the end: a reader that decodes each event as it
    comes, as HTTP libraries do, would compete for the processor with the server that it measures.

    Args:
        address: host and port.
        path: of the URL.
        body: without what makes the answer a stream that says how many tokens it had.
        key: sent with it; empty for none.
        on_event: called with the time and the data of each event.

    Raises:
        AnswerError: it was refused, or is not whole; says what the server has said.
        OSError: the connection has failed.
    """
    about = {**body, "stream": True, "stream_options": {"include_usage": True}}
    content = json.dumps(about).encode()
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    authorization = f"Authorization: Bearer {key}\r\n" if key else ""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}:{address[1]}\r\nConnection: close\r\n"
        f"{authorization}"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    lines: list[bytes] = []
    events: list[tuple[float, bytes]] = []
    reader, writer = await asyncio.open_connection(*address, limit=MOST_LINE_BYTES)
    try:
        writer.write(head.encode() + content)
        async for line in reader:
            # What stands between events is the end of an event, or the length of a chunk.
            if line.startswith(EVENT):
                events.append((time.perf_counter(), line.removeprefix(EVENT)))
                if on_event is not None:
                    on_event(*events[-1])
            else:
                lines.append(line)
    finally:
        writer.close()
    if not lines or lines[0].split()[1:2] != [b"200"]:
        raise AnswerError(f"refused: {_error_in(b''.join(lines))}")
    if not events or events[-1][1].strip() != DONE:
        said = _error_in(b"".join(data for _, data in events))
        raise AnswerError(f"a stream ended too early: {said}")
    decoded = [(at, json.loads(data)) for at, data in events[:-1]]
    usage = next((one["usage"] for _, one in reversed(decoded) if one.get("usage")), None)
    if usage is None:
        raise AnswerError("the server does not say how many tokens there were")
    return Read(
        times=[at for at, event in decoded if text_of(event)],
        prompt_tokens=usage["prompt_tokens"],
        tokens=usage["completion_tokens"],
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
    )


def text_of(event: Mapping[str, Any]) -> str:
    """Return the text of an event, of a chat, reasoning included, or of a completion."""
    for choice in event.get("choices", ()):
        delta = choice.get("delta", {})
        texts = (choice.get("text"), delta.get("content"), delta.get("reasoning_content"))
        return str(next(filter(None, texts), ""))
    return ""


def _error_in(raw: bytes) -> str:
    """Return the sentence of an error in OpenAI's form, or else the end of what has come."""
    for found in reversed(re.findall(rb'\{"error".*\}', raw)):
        try:
            return str(json.loads(found)["error"]["message"])
        except (ValueError, TypeError, KeyError):
            continue
    return repr(raw[-MOST_SHOWN:])


# ---------------------------------------------------------------- a run


class Cell(NamedTuple):
    """One size: tokens of each prompt and of each answer, and requests that are sent at once."""

    prompt_tokens: int
    output_tokens: int
    concurrency: int

    def __str__(self) -> str:
        """Return `512 + 128 tokens × 4`."""
        return f"{self.prompt_tokens} + {self.output_tokens} tokens × {self.concurrency}"


@dataclass(slots=True, kw_only=True)
class Run:
    """Repeats of all sizes, in turn; an interrupted one is worth something.

    Attributes:
        model: its name.
        cells: the sizes.
        repeats: how often each is measured.
        values: by size and figure, a value for each repeat so far that showed it.
        took_s: how long the latest repeat of each size took.
        interrupted: answers that were paused, or continued after a crash.
        waited: answers that waited in the queue.
        cached_tokens: tokens of prompts that needed no prefill.
        done: bursts so far, without those that warm up.
        other_requests: the most requests of others that were open at a look.
        other_models: other models that ran some of them.
        generations: of the model's processes.
    """

    model: str
    cells: Sequence[Cell]
    repeats: int
    values: dict[Cell, dict[str, list[float]]] = field(default_factory=dict)
    took_s: dict[Cell, float] = field(default_factory=dict)
    interrupted: int = 0
    waited: int = 0
    cached_tokens: int = 0
    done: int = 0
    other_requests: int = 0
    other_models: set[str] = field(default_factory=set)
    generations: set[int] = field(default_factory=set)

    @property
    def bursts(self) -> int:
        """Return the number of measured bursts, without those that warm up."""
        return len(self.cells) * self.repeats

    def take(self, cell: Cell, burst: Burst, took_s: float, memory_bytes: int) -> None:
        """Add a repeat of a size, and the most memory that the model's process took meanwhile."""
        values = self.values.setdefault(cell, {})
        for name, value in burst.figures(memory_bytes).items():
            if value is not None:
                values.setdefault(name, []).append(value)
        self.took_s[cell] = took_s
        self.interrupted += burst.interrupted
        self.waited += burst.waited
        self.cached_tokens += burst.cached_tokens
        self.done += 1

    def look(self, status: Mapping[str, Any], own: int) -> int:
        """Note which requests are open besides our own, and which process the model has.

        Returns:
            The resident memory of that process, in bytes.
        """
        row = row_called(status, self.model)
        if row is None:
            message = f"{self.model} is no longer configured"
            raise CliError(message, code="unknown_model", hint="see `mlxsup status`")
        still_open = {
            one["name"]: len(one["running"]) + len(one["paused"]) + one["queued"]
            for one in status["models"]
        }
        self.other_requests = max(self.other_requests, sum(still_open.values()) - own)
        self.other_models |= {one for one, n in still_open.items() if n and one != self.model}
        self.generations.add(row["generation"])
        return int(row["footprint_bytes"])

    def progress(self, cell: Cell) -> str:
        """Return what is measured now, and how long the rest takes once every size was measured."""
        text = f"{self.done + 1}/{self.bursts}: {cell}"
        if len(self.took_s) < len(self.cells):
            return text
        left_s = sum(self.took_s.values()) / len(self.cells) * (self.bursts - self.done)
        return f"{text}, about {format_duration(left_s)} left"

    def remarks(self) -> list[str]:
        """Return a sentence for each thing that has touched the figures."""

        def answers(count: int) -> str:
            return "1 answer was" if count == 1 else f"{count} answers were"

        others = counted(self.other_requests, "other request")
        where = f", some for {', '.join(sorted(self.other_models))}" if self.other_models else ""
        found = {
            f"incomplete: only {self.done} of {self.bursts} bursts were measured": (
                self.done < self.bursts
            ),
            f"up to {others} ran or waited during the run{where}: measure again when the daemon is "
            "idle": self.other_requests,
            f"{self.model} was restarted during the run: see `mlxsup why {self.model}`": (
                len(self.generations) > 1
            ),
            f"{answers(self.interrupted)} interrupted and resumed": self.interrupted,
            f"{answers(self.waited)} delayed in the queue by limits of this client, memory or "
            "other requests": self.waited,
            f"{self.cached_tokens} prompt tokens came from the cache": self.cached_tokens,
        }
        return [sentence for sentence, is_so in found.items() if is_so]


async def measure(
    endpoint: str, run: Run, tell: Callable[[str], None], *, address: Address | None, key: str
) -> None:
    """Warm up, then measure each repeat of each size.

    Args:
        endpoint: of the daemon, in which the model is READY.
        run: takes what is measured, at once, so that it is there if this is cancelled.
        tell: gets the progress.
        address: of the gateway, to ask through it; None for the daemon's socket.
        key: of the gateway.

    Raises:
        AnswerError, RequestError, ConnectionLost, OSError: an answer has failed.
        CliError: the model is gone.
    """
    from mlxsup.client import AsyncClient

    chooser = random.Random()  # other prompts each time: the daemon may remember earlier ones
    async with AsyncClient(endpoint) as client:

        def ask(cell: Cell, tokens: int) -> Awaitable[Burst]:
            prompts = [chooser.choices(PROMPT_IDS, k=cell.prompt_tokens)
                       for _ in range(cell.concurrency)]  # fmt: skip
            if address is None:
                inputs = [{"prompt_tokens": prompt, **STEADY} for prompt in prompts]
                return ask_over_socket(client, run.model, inputs, tokens)
            about = {"model": run.model, "max_tokens": tokens, **STEADY}
            bodies = [{"prompt": prompt, **about} for prompt in prompts]
            return ask_over_http(address, bodies, tokens, key)

        for number, cell in enumerate(run.cells, start=1):
            tell(f"warming up {number}/{len(run.cells)}: {cell}")
            await ask(cell, min(cell.output_tokens, WARM_UP_TOKENS))
        for repeat in range(run.repeats):
            # Every other repeat runs backwards: what changes with time touches all sizes alike.
            for cell in run.cells if repeat % 2 == 0 else reversed(run.cells):
                tell(run.progress(cell))
                run.look(await client.status(), own=0)
                begin = time.perf_counter()
                burst, memory_bytes = await _watched(client, run, cell, ask)
                run.take(cell, burst, time.perf_counter() - begin, memory_bytes)


async def _watched(
    client: AsyncClient, run: Run, cell: Cell, ask: Callable[[Cell, int], Awaitable[Burst]]
) -> tuple[Burst, int]:
    """Return a burst, and the most memory that the model's process took meanwhile."""
    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            most = max(most, run.look(await client.status(), own=cell.concurrency))

    watching = asyncio.create_task(watch())
    try:
        burst = await ask(cell, cell.output_tokens)
    finally:
        watching.cancel()
        # Its error, if it has one, is that of the burst: the daemon is gone.
        await asyncio.gather(watching, return_exceptions=True)
    return burst, max(most, run.look(await client.status(), own=0))
