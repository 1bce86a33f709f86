"""A streamed answer of several requests begins once the daemon has taken all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from mlxsup.client import Notice, NoticeKind
from mlxsup.gateway import limits

from support.eventually_async import eventually_async
from support.played_gateway import FedDaemon, Response, Site, delta, refused, result

BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
TURNS = 20
"""Of the loop: more than anything here needs that does not wait for an event."""

QUEUED = Notice(kind=NoticeKind.QUEUED, detail={"position": 3, "reason": "rows"})


class Asking:
    """A streamed chat, and what the daemon is made to say.

    Attributes:
        sent: the response so far.
    """

    def __init__(self, n: int) -> None:
        self.fed = FedDaemon()
        self.sent = Response()
        asked = Site(self.fed).ask(
            "POST", "/v1/chat/completions", {**BODY, "n": n}, on_sent=self._on_sent
        )
        self._task = asyncio.create_task(asked)
        self._n = n

    def _on_sent(self, response: Response) -> None:
        self.sent = response

    async def begun(self) -> Asking:
        """This one, once everything was asked of the daemon."""
        await eventually_async(lambda: len(self.fed.inboxes) == self._n)
        await self.turn()
        return self

    def answer_pings(self) -> None:
        """The daemon has read everything that came before them."""
        for inbox in self.fed.pings:
            inbox.put({})

    async def turn(self) -> None:
        """Lets happen what nothing delays."""
        for _ in range(TURNS):
            await asyncio.sleep(0)

    async def whole(self) -> Response:
        """The response, once it has ended."""
        return await self._task


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("first", [[delta("a")], [delta("a"), result("a")], [result("")], [QUEUED]])
def test_a_refusal_behind_the_first_pieces_of_others_is_a_status(
    first: Sequence[object], is_split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HOLD_S", 0.0)

    async def run() -> None:
        asking = await Asking(3).begun()
        for item in first:
            asking.fed.inboxes[0].put(item)  # type: ignore[arg-type]
        if is_split:
            await asking.turn()
            assert asking.sent.status == 0
        asking.fed.inboxes[2].put(refused("overloaded"))
        asking.answer_pings()
        response = await asking.whole()
        assert (response.status, response.error["code"]) == (429, "overloaded")
        assert asking.fed.cancelled >= {"r2"}

    asyncio.run(run())


def test_those_that_wait_are_taken_and_hold_nothing_back() -> None:
    async def run() -> None:
        asking = await Asking(limits.MAX_CHOICES).begun()
        asking.fed.inboxes[1].put(delta("b"))
        asking.answer_pings()
        await eventually_async(lambda: b'"b"' in asking.sent.body)
        assert asking.sent.status == 200
        for inbox in asking.fed.inboxes:
            inbox.put(result(""))
        assert (await asking.whole()).is_whole

    asyncio.run(run())


def test_one_that_waits_for_long_gets_comments_once_all_are_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "HOLD_S", 0.0)

    async def run() -> None:
        asking = await Asking(2).begun()
        asking.answer_pings()
        await asking.turn()
        asking.fed.inboxes[1].put(QUEUED)
        await eventually_async(lambda: asking.sent.comments() == ["queued, place 3"])
        for inbox in asking.fed.inboxes:
            inbox.put(result(""))
        assert (await asking.whole()).is_whole

    asyncio.run(run())


def test_one_alone_waits_for_nothing_else() -> None:
    async def run() -> None:
        asking = await Asking(1).begun()
        asking.fed.inboxes[0].put(delta("a"))
        await eventually_async(lambda: b'"a"' in asking.sent.body)
        asking.fed.inboxes[0].put(result("a"))
        assert (await asking.whole()).is_whole
        assert not asking.fed.pings

    asyncio.run(run())
