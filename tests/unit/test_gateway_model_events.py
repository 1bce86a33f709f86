"""`GET /models/sse`: changes of models, as llama.cpp's router tells them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest
from starlette.requests import Request

from mlxsup.client import AsyncClient, ConnectionLost, RequestError
from mlxsup.gateway import limits
from mlxsup.gateway.answers import Endable, OpenAnswers
from mlxsup.gateway.changes import Changes, Follower
from mlxsup.gateway.failure import Failure
from mlxsup.gateway.metrics.meter import Meter
from mlxsup.gateway.model_events import ModelEvents, event_of
from mlxsup.gateway.sse import WRITE
from mlxsup.protocol.errors import ErrorCode

from support.played_events import Item
from support.played_gateway import PlayedDaemon, Response, Site


def ignore(change: dict[str, Any]) -> None:
    """Nobody counts."""


async def at_once(follower: Follower) -> dict[str, Any]:
    """What is there for it already; raises TimeoutError if nothing is."""
    async with asyncio.timeout(0):
        return await anext(follower)


def change(to: str, **more: Any) -> dict[str, Any]:
    """A change as a daemon tells it."""
    return {
        "model": "m",
        "from": "STOPPED",
        "to": to,
        "why": "user",
        "note": "",
        "progress": None,
        **more,
    }


@pytest.mark.parametrize(
    ("given", "data"),
    [
        (change("READY"), {"status": "loaded"}),
        (change("STOPPED"), {"status": "unloaded"}),
        (change("STOPPING"), {"status": "unloading"}),
        (change("LOADING", progress={"phase": "weights", "fraction": 0.25}),
         {"status": "loading", "progress": {"current": "weights", "value": 0.25}}),
        (change("BACKOFF"), {"status": "loading"}),
        (change("FAILED", note="no such folder"),
         {"status": "unloaded", "failed": True, "message": "no such folder"}),
    ],
)  # fmt: skip
def test_a_change_has_the_words_of_the_router(given: dict[str, Any], data: dict[str, Any]) -> None:
    assert event_of(given) == {"model": "m", "event": "model_status", "data": data}


class Followers:
    """Follow until each has seen enough.

    Args:
        count: how many.
    """

    def __init__(self, count: int = 1) -> None:
        self.count = count
        self.daemon = PlayedDaemon()
        self.site = Site(self.daemon)
        self.are_there = asyncio.Event()
        self.responses: list[Response] = []
        self.is_unsubscribed = False

    async def follow(self, *items: Item, until: int) -> list[Response]:
        """What comes for these, until each has that many events, or has been ended.

        Their requests share one life of the application.
        """
        told = asyncio.create_task(self._tell(items))
        waiting = self.count

        async def one() -> Response:
            leaves = asyncio.Event()

            def on_sent(response: Response) -> None:
                nonlocal waiting
                if len(response.comments()) == 1 and not response.events():
                    waiting -= 1
                    if not waiting:
                        self.are_there.set()
                if len(response.events()) == until:
                    leaves.set()

            return await self.site.ask(
                "GET", "/models/sse", until=leaves.wait(), on_sent=on_sent, has_life=False
            )

        async with self.site.life():
            self.responses = list(await asyncio.gather(*(one() for _ in range(self.count))))
        self.is_unsubscribed = self.daemon.subscriptions[0].is_closed
        await told
        return self.responses

    async def _tell(self, items: tuple[Item, ...]) -> None:
        await self.are_there.wait()
        for item in items:
            self.daemon.subscriptions[0].items.put_nowait(item)


LOADING = change("LOADING", progress={"phase": "spawn", "fraction": 0.0})


def statuses(response: Response) -> list[str]:
    return [event["data"]["status"] for event in response.events()]


def test_the_head_comes_at_once_and_then_each_change_in_its_order() -> None:
    (response,) = asyncio.run(Followers().follow(LOADING, change("READY"), until=2))
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.comments() == ["changes from now on"]
    assert statuses(response) == ["loading", "loaded"]
    assert not response.is_whole


def test_all_followers_get_each_change_by_one_subscription() -> None:
    followers = Followers(3)
    responses = asyncio.run(followers.follow(LOADING, change("READY"), until=2))
    assert [statuses(response) for response in responses] == [["loading", "loaded"]] * 3
    assert len(followers.daemon.subscriptions) == 1
    assert followers.is_unsubscribed, "at the end of the gateway"


def test_a_daemon_that_dies_is_an_error_and_no_clean_end() -> None:
    lost = ConnectionLost("the daemon is gone", "ipc:///x")
    for response in asyncio.run(Followers(2).follow(change("READY"), lost, until=9)):
        assert response.events()[-1]["error"]["code"] == "daemon_lost"
        assert not response.is_whole


def test_a_gateway_that_ends_ends_its_followers() -> None:
    followers = Followers(2)

    async def until_the_end() -> list[Response]:
        task = asyncio.create_task(followers.follow(until=9))
        await followers.are_there.wait()
        followers.site.gateway.open_answers.cancel()
        return await task

    for response in asyncio.run(until_the_end()):
        assert response.events()[-1]["error"]["code"] == "shutting_down"
        assert not response.is_whole


class Listed(OpenAnswers):
    """Knows what is under way now."""

    def __init__(self) -> None:
        super().__init__(Meter())
        self.now: list[Endable] = []

    def add(self, streams: Sequence[Endable]) -> None:
        super().add(streams)
        self.now += streams

    def remove(self, streams: Sequence[Endable]) -> None:
        super().remove(streams)
        self.now = [one for one in self.now if one not in streams]


def test_who_has_left_is_forgotten() -> None:
    listed, counts = Listed(), list[int]()

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(_: object) -> None:
        counts.append(len(listed.now))

    async def run() -> None:
        follow = ModelEvents(Changes(ignore), listed).follow
        scope: dict[str, Any] = {"type": "http", "extensions": {WRITE: None}}
        await (await follow(Request(scope)))(scope, receive, send)

    asyncio.run(run())
    assert (counts[0], listed.now) == (1, [])


def test_there_is_a_limit_and_who_leaves_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_FOLLOWERS", 2)
    changes = Changes(ignore)
    with changes.follow(), changes.follow():
        with pytest.raises(Failure) as caught:
            changes.follow()
        assert (caught.value.status, caught.value.is_retryable) == (429, True)
    with changes.follow(), changes.follow():
        pass


def test_who_reads_too_slowly_is_cut_off_and_others_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "MAX_CHANGES_BEHIND", 3)

    async def run() -> None:
        daemon = PlayedDaemon()
        changes = Changes(ignore)
        async with changes.watching(cast(AsyncClient, daemon)):
            slow, quick = changes.follow(), changes.follow()
            for number in range(9):
                await asyncio.sleep(0)
                daemon.subscriptions[0].items.put_nowait({"number": number})
                assert await anext(quick) == {"number": number}
            assert [await anext(slow) for _ in range(3)] == [{"number": n} for n in range(3)]
            with pytest.raises(Failure) as caught:
                await anext(slow)
            assert caught.value.code == "slow_consumer"
            with pytest.raises(TimeoutError):  # nothing else is kept for it
                await at_once(slow)

    asyncio.run(run())


def test_who_comes_when_the_daemon_is_gone_hears_so() -> None:
    async def run() -> None:
        daemon = PlayedDaemon()
        changes = Changes(ignore)
        async with changes.watching(cast(AsyncClient, daemon)):
            early = changes.follow()
            await asyncio.sleep(0)
            lost = ConnectionLost("the daemon is gone", "ipc:///x")
            daemon.subscriptions[0].items.put_nowait(lost)
            for follower in (early, changes.follow()):
                with pytest.raises(Failure) as caught:
                    await anext(follower)
                assert caught.value.code == "daemon_lost"
            with pytest.raises(Failure):
                await at_once(changes.follow())

    asyncio.run(run())


def test_a_daemon_that_was_only_out_of_reach_is_followed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "FOLLOW_AGAIN_S", 0.0)

    async def run() -> None:
        daemon, seen = PlayedDaemon(), list[dict[str, Any]]()
        changes = Changes(seen.append)
        async with changes.watching(cast(AsyncClient, daemon)):
            for _ in range(2):
                told = await daemon.opened.get()
                follower = changes.follow()
                told.items.put_nowait(ConnectionLost("the daemon is silent", "ipc:///x"))
                with pytest.raises(Failure):
                    await anext(follower)
            told = await daemon.opened.get()
            follower = changes.follow()
            told.items.put_nowait({"number": 1})
            assert await anext(follower) == {"number": 1}
            assert seen == [{"number": 1}]

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_gateway_that_fell_behind_ends_its_followers_and_subscribes_again() -> None:
    async def run() -> None:
        daemon, seen = PlayedDaemon(), list[dict[str, Any]]()
        changes = Changes(seen.append)
        async with changes.watching(cast(AsyncClient, daemon)):
            early = changes.follow()
            await asyncio.sleep(0)
            behind = RequestError(ErrorCode.SLOW_CONSUMER, "not read in time")
            daemon.subscriptions[0].items.put_nowait(behind)
            with pytest.raises(Failure) as caught:
                await anext(early)
            assert caught.value.code == "slow_consumer"
            late = changes.follow()
            await asyncio.sleep(0)
            [first, second] = daemon.subscriptions
            assert first.is_closed
            second.items.put_nowait({"number": 1})
            assert await anext(late) == {"number": 1}
            assert seen == [{"number": 1}]

    asyncio.run(run())
