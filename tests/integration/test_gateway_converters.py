"""Bodies that a converter reads: what comes of them is the same, and a converter that is stopped,
killed, slow or full harms one request."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
from typing import Any, Self
from unittest import mock

import psutil
import pytest

from mlxsup.gateway import converters as converters_module
from mlxsup.gateway import limits
from mlxsup.gateway.converters import ARGV, WRITE_BYTES, Converter, Converters
from mlxsup.gateway.failure import Failure
from mlxsup.gateway.keys import Caller, Keys

from support.eventually import eventually
from support.eventually_async import eventually_async
from support.gateway.played_gateway import (
    BODY,
    CHAT,
    COMPLETION,
    HI,
    MESSAGE,
    RESPONSE,
    PlayedDaemon,
    Response,
    Site,
    refused,
    said,
)

ERRORS = b"mlxsup_request_errors_total"
COUNT = "/v1/messages/count_tokens"

LONG = {"model": "m", "messages": [{"role": "user", "content": "x" * 100_000}]}
SHORTER = {"model": "m", "messages": [{"role": "user", "content": "x" * 30_000}]}

TOOLS = [
    {"type": "namespace", "name": space, "description": "d",
     "tools": [{"type": "function", "name": "f", "parameters": {}}]}
    for space in ("s", "t")
]  # fmt: skip


@pytest.fixture
def everything_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A converter reads every body, however short it is."""
    monkeypatch.setattr(limits, "MAX_SMALL_BODY_BYTES", 0)


def played(count: int = 16) -> PlayedDaemon:
    """A daemon that answers this many requests; its model has a preset."""
    daemon = PlayedDaemon(*[said("a")] * count)
    daemon.presets = {"warm": {"temperature": 0.8, "chat_template_kwargs": {"mood": "good"}}}
    return daemon


def converters() -> list[psutil.Process]:
    """Return the converters of this process."""
    return [
        child for child in psutil.Process().children() if "mlxsup.gateway.converter" in " ".join(
            child.cmdline())
    ]  # fmt: skip


# ---------------------------------------------------------------- the same comes of them

SAME: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {**BODY, "model": "n:warm", "stop": "\n", "chat_template_kwargs": {"a": 1}}),
    (CHAT, {**BODY, "seed": 3, "n": 3, "timeout_s": 60, "priority": "batch", "ttl": "5m"}),
    (CHAT, {**BODY, "stream": True, "stream_options": {"include_usage": True}}),
    (CHAT, {**BODY, "logit_bias": {"1": -3}, "parallel_tool_calls": False}),
    (COMPLETION, {"model": "m", "prompt": [[1, 2], [3]], "n": 2}),
    (COMPLETION, {"model": "m:warm", "prompt": ["a", "b"], "logprobs": 2}),
    (RESPONSE, {"model": "m", "instructions": "be", "input": "hi", "tools": TOOLS}),
    (RESPONSE, {"model": "m", "input": "hi", "stream": True, "tools": TOOLS}),
    (MESSAGE, {**BODY, "max_tokens": 9, "thinking": {"type": "enabled"}, "system": "be"}),
    (MESSAGE, {**BODY, "model": "m:warm", "max_tokens": 9, "stream": True}),
    (CHAT, {**BODY, "wrong": 1}),
    (CHAT, {**BODY, "temperature": 99}),
    (CHAT, {**BODY, "chat_template_kwargs": {"tools": 1}}),
    (CHAT, {**BODY, "chat_template_kwargs": {"a": "x" * 70_000}}),
    (CHAT, {"messages": HI}),
    (CHAT, {**BODY, "model": "m" * 200}),
    (MESSAGE, {**BODY, "stop_sequences": ["x"] * 20, "max_tokens": 9}),
    (RESPONSE, {"model": "m", "input": [{"type": "odd"}]}),
    (COUNT, {**BODY, "max_tokens": 9}),
    ("/v1/rerank", {"model": "m", "query": "q", "documents": ["a"], "top_n": 3}),
]


def timeless(response: Response) -> list[str]:
    """A response without times and the ids of requests."""
    text = response.body.decode().replace(response.headers["x-request-id"], "ID")
    words = re.split('"(?:created|created_at|completed_at)":', text)
    return [words[0], *(word.lstrip("0123456789") for word in words[1:])]


def test_body_read_by_a_converter_is_asked_and_answered_as_if_read_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def answers(daemon: PlayedDaemon) -> list[Any]:
        site = Site(daemon)
        async with site.life():
            responses = [await site.ask("POST", path, body, has_life=False) for path, body in SAME]
            daemon.state = refused("internal")  # its own metrics are not asked for
            page = (await site.ask("GET", "/metrics", has_life=False)).body
        errors = [one for one in page.split(b"\n") if one.startswith(ERRORS)]
        return [*((one.status, timeless(one)) for one in responses), errors]

    here, apart = played(64), played(64)
    expected = asyncio.run(answers(here))
    monkeypatch.setattr(limits, "MAX_SMALL_BODY_BYTES", 0)
    found = asyncio.run(answers(apart))
    for case, one, other in zip([*SAME, ("errors", {})], found, expected, strict=True):
        assert one == other, case
    assert apart.asked == here.asked


class OneKey(Keys):
    """Every request has the key of an account."""

    def caller(self, headers: Any) -> Caller:
        return Caller(account="alice", key="a")


def test_key_of_a_request_counts_for_a_long_body() -> None:
    daemon = played()
    site = Site(daemon, keys=OneKey())
    assert asyncio.run(site.ask("POST", CHAT, LONG)).status == 200
    assert daemon.asked[0]["client"] == "alice"
    response = asyncio.run(site.ask("POST", CHAT, {**LONG, "keep_alive": 0}))
    assert (response.status, response.error["code"]) == (403, "operator_only")


def test_a_converter_ends_for_want_of_work_and_not_while_it_has_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "CONVERTER_IDLE_S", 0.0)
    process = mock.Mock(returncode=None)
    monkeypatch.setattr(Converter, "start", mock.AsyncMock(return_value=Converter(process)))

    async def run() -> None:
        errors: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, error: errors.append(error))
        kept = Converters()
        async with kept.one() as first:
            pass
        async with kept.one() as again:
            assert again is first
            for _ in range(3):
                await asyncio.sleep(0)
        assert (errors, process.stdin.close.called) == ([], False)
        await eventually_async(lambda: process.stdin.close.called)
        await kept.close()
        assert not process.kill.called, "it ends by itself"

    asyncio.run(run())


def test_client_that_leaves_the_line_leaves_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_CONVERTERS", 1)
    monkeypatch.setattr(limits, "MAX_WAITING_BODIES", 1)
    process = mock.Mock(returncode=None)
    monkeypatch.setattr(Converter, "start", mock.AsyncMock(return_value=Converter(process)))

    async def run() -> None:
        kept = Converters()
        async with kept.one():
            for _ in range(3):
                waiting = asyncio.create_task(kept.one().__aenter__())
                await asyncio.sleep(0)
                with pytest.raises(Failure, match="too many bodies"):
                    await kept.one().__aenter__()
                waiting.cancel()
                await asyncio.wait([waiting])
                assert waiting.cancelled(), "and was not refused"

    asyncio.run(run())


# ---------------------------------------------------------------- one that fails


@pytest.fixture
def asks(monkeypatch: pytest.MonkeyPatch) -> list[Converter]:
    """Return a list that grows by each converter that is asked something."""
    noted: list[Converter] = []
    ask = Converter.ask

    async def note(self: Converter, values: dict[str, Any], *blobs: Any) -> Any:
        noted.append(self)
        return await ask(self, values, *blobs)

    monkeypatch.setattr(Converter, "ask", note)
    return noted


def test_long_body_waits_for_its_converter_and_not_in_a_buffer() -> None:
    async def fill() -> int:
        converter = await Converter.start()
        stdin = converter._process.stdin
        assert stdin is not None
        psutil.Process(converter._process.pid).suspend()
        asking = asyncio.create_task(converter.ask({}, [bytes(2**20)] * 8))
        await eventually_async(stdin.transport.get_write_buffer_size)
        filled = stdin.transport.get_write_buffer_size()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await converter.end()
        return filled

    assert asyncio.run(fill()) <= 4 * WRITE_BYTES


class Held:
    """A gateway, and a request whose body is at a converter that stands still."""

    def __init__(self, asks: list[Converter]) -> None:
        self.site = Site(played())
        self._asks = asks

    async def __aenter__(self) -> Self:
        self._life = self.site.life()
        await self._life.__aenter__()
        assert (await self.ask()).status == 200
        (self.converter,) = converters()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._life.__aexit__(*error)
        assert not converters()

    async def ask(self, path: str = CHAT, body: Any = LONG, **request: Any) -> Response:
        """The response to a long body."""
        return await self.site.ask("POST", path, body, has_life=False, **request)

    async def hold(self, **request: Any) -> None:
        """Send a long body to a converter that is stopped."""
        self.converter.send_signal(signal.SIGSTOP)
        before = len(self._asks)
        self.asked = asyncio.create_task(self.ask(**request))
        await eventually_async(lambda: len(self._asks) > before)


def error_of(response: Response) -> tuple[int, str, str | None]:
    return response.status, response.error["code"], response.headers.get("x-should-retry")


def test_converter_that_dies_or_is_slow_fails_one_request(
    asks: list[Converter], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with Held(asks) as held:
            await held.hold()
            held.converter.kill()
            response = await held.asked
            assert error_of(response) == (503, "converter_lost", "true")
            assert response.error["message"].endswith("send the request again")
            assert response.headers["retry-after"] == "1"
            assert (await held.ask()).status == 200
            (held.converter,) = converters()
            held.converter.kill()
            await eventually_async(lambda: not asks[-1].is_alive)
            assert (await held.ask()).status == 200, "one that dies idle harms nothing"
            (held.converter,) = converters()
            monkeypatch.setattr(limits, "CONVERT_LIMIT_S", 0.2)
            await held.hold()
            response = await held.asked
            assert error_of(response) == (503, "body_too_slow", "false")
            assert "took more than 0.2 s" in response.error["message"]

    asyncio.run(run())


def test_bodies_that_wait_are_limited_until_their_clients_leave(
    asks: list[Converter], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_CONVERTERS", 1)

    async def run() -> None:
        async with Held(asks) as held:
            leaves = asyncio.Event()
            for _ in range(5):  # short bodies neither take room nor leave any
                assert (await held.ask(body=SHORTER)).status == 200
            await held.hold(until=leaves.wait())
            for name, most in (("MAX_WAITING_BODIES", 0), ("MAX_HELD_BYTES", 150_000)):
                with monkeypatch.context() as patch:
                    patch.setattr(limits, name, most)
                    for path, status in ((CHAT, 429), (MESSAGE, 529)):
                        response = await held.ask(path, {**LONG, "max_tokens": 9})
                        assert response.status == status
                        assert "send this one again in a moment" in response.error["message"]
                        assert response.headers["retry-after"] == "1"
            assert (await held.ask(body=BODY)).status == 200, "a short one needs no converter"
            monkeypatch.setattr(limits, "MAX_HELD_BYTES", 150_000)
            leaves.set()
            assert (await held.asked).status == 0
            monkeypatch.setattr(limits, "MAX_WAITING_BODIES", 1)
            assert (await held.ask()).status == 200, "there is room at once"

    asyncio.run(run())


@pytest.mark.skipif(sys.platform != "linux", reason="macOS does not keep to the limit")
@pytest.mark.usefixtures("everything_apart")
def test_body_has_limited_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "from mlxsup.gateway import converter, limits; limits.CONVERTER_MEMORY_BYTES = 2**27;"
        " limits.CONVERT_LIMIT_S = 600; converter.main()"
    )
    monkeypatch.setattr(converters_module, "ARGV", (sys.executable, "-P", "-c", code))
    monkeypatch.setattr(limits, "CONVERT_LIMIT_S", 600)
    greedy = b'{"a":[' + b",".join([b"[]"] * 2_600_000) + b"]}"

    async def run() -> None:
        site = Site(played())
        async with site.life():
            response = await site.ask("POST", CHAT, greedy, has_life=False)
            assert (response.status, response.error["code"]) == (413, "request_too_large")
            assert "more than 128 MiB of memory" in response.error["message"]
            assert (await site.ask("POST", CHAT, BODY, has_life=False)).status == 200

    asyncio.run(run())


# ---------------------------------------------------------------- the process


@pytest.mark.skipif(sys.platform != "linux", reason="macOS does not keep to the limit")
def test_lower_limit_of_the_user_ends_no_converter() -> None:
    most = limits.CONVERTER_MEMORY_BYTES // 2
    code = (
        f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({most}, {most}));"
        " from mlxsup.gateway import converter; converter.main()"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], input=b"", capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")


def test_converter_ends_with_its_standard_input() -> None:
    with psutil.Popen([*ARGV], stdin=-1, stdout=-1) as process:
        own = psutil.Process().nice()
        eventually(lambda: process.nice() > own, what="a converter that has begun")
        process.send_signal(signal.SIGINT)
        process.stdin.close()
        assert process.wait(60) == 0
