"""Models over HTTP: their names and presets, and the events of their changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, cast

import pytest

from mlxsup.client import AsyncClient, ConnectionLost, ErrorCode, RequestError
from mlxsup.gateway import daemon as daemon_module
from mlxsup.gateway import limits
from mlxsup.gateway.answers import OpenAnswers
from mlxsup.gateway.changes import Changes, Follower, event_of
from mlxsup.gateway.daemon import Daemon
from mlxsup.gateway.errors import HOW_TO_ADD
from mlxsup.gateway.failure import Failure

from support.gateway.played_gateway import (
    CHAT,
    HI,
    Change,
    PlayedDaemon,
    Response,
    Site,
    delta,
    refused,
    result,
    said,
)

WARM: dict[str, Any] = {
    "temperature": 0.8,
    "max_tokens": 7,
    "chat_template_kwargs": {"enable_thinking": True, "mood": "good"},
}
NAMES = (("claude-*", "m:warm"), ("gpt-4*", "m"), ("a.c*e", "m:warm"), ("*", "n"))


def daemon_of(*answers: Any) -> PlayedDaemon:
    """A daemon whose model has a preset."""
    daemon = PlayedDaemon(*(answers or (said("a"),) * 2))
    daemon.presets = {"warm": WARM}
    return daemon


def asked(path: str, names: Any = (), **body: Any) -> tuple[Response, dict[str, Any]]:
    """The response to a request, and what the daemon was asked."""
    daemon = daemon_of()
    response = asyncio.run(Site(daemon, names=names).ask("POST", path, body))
    return response, daemon.asked[0]


MESSAGE: dict[str, Any] = {"messages": HI, "max_tokens": 3}
KWARGS = WARM["chat_template_kwargs"]


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        (CHAT, {"messages": HI, "max_tokens": 3},
         {"temperature": 0.8, "max_tokens": 3, "chat_template_kwargs": KWARGS}),
        (CHAT, {"model": "n:warm", "messages": HI,
                "chat_template_kwargs": {"mood": "bad", "reasoning_effort": "low"}},
         {"chat_template_kwargs": {"enable_thinking": True, "mood": "bad",
                                   "reasoning_effort": "low"}}),
        ("/v1/responses", {"input": "hi"}, {"temperature": 0.8, "max_tokens": 7}),
        # A preset beats the default of an API, and a prompt has no template.
        ("/v1/completions", {"prompt": "hi"}, {"max_tokens": 7, "chat_template_kwargs": None}),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 3}, {"max_tokens": 3}),
        ("/v1/completions", {"prompt": "hi", "model": "m"}, {"max_tokens": 16}),
        # It decides about thinking, unless a message does.
        ("/v1/messages", MESSAGE, {"temperature": 0.8, "chat_template_kwargs": {
            "enable_thinking": True, "thinking": False, "mood": "good"}}),
        ("/v1/messages", {**MESSAGE, "thinking": {"type": "disabled"}},
         {"chat_template_kwargs": {"enable_thinking": False, "thinking": False, "mood": "good"}}),
    ],
)  # fmt: skip
def test_preset_fills_in_what_the_request_leaves_out(
    path: str, body: dict[str, Any], expected: dict[str, Any]
) -> None:
    response, request = asked(path, **{"model": "m:warm", **body})
    assert (request["model"], response.json()["model"]) == ("m", body.get("model", "m:warm"))
    assert {name: request.get(name) for name in expected} == expected


@pytest.mark.parametrize(("given", "seeds"), [({}, [5, 6, 7]), ({"seed": 1}, [1, 2, 3])])
def test_seed_of_a_preset_is_counted_on(given: dict[str, int], seeds: list[int]) -> None:
    daemon = daemon_of(*[[delta("a"), result("a")]] * 3)
    daemon.presets = {"fixed": {"seed": 5}}
    body = {"model": "m:fixed", "messages": HI, "n": 3, **given}
    assert asyncio.run(Site(daemon).ask("POST", CHAT, body)).status == 200
    assert [request["seed"] for request in daemon.asked] == seeds


def test_unknown_preset_is_an_unknown_model_and_one_without_a_daemon_an_error() -> None:
    daemon = daemon_of([refused("unknown_model")])
    body = {"model": "m:cold", "messages": HI}
    response = asyncio.run(Site(daemon).ask("POST", CHAT, body))
    assert (response.status, daemon.asked[0]["model"]) == (404, "m:cold")
    daemon.state = refused("shutting_down")
    response = asyncio.run(Site(daemon).ask("POST", CHAT, {**body, "model": "m:warm"}))
    assert (response.status, response.error["code"]) == (503, "shutting_down")


@pytest.mark.parametrize("name", ["m:ad:ad", "m:ad:warm", ":ad", ":" * 5000, "-" * 5000])
def test_name_of_no_model_is_unknown_whatever_it_is_made_of(name: str) -> None:
    daemon = daemon_of()
    daemon.adapters = {"ad": "/folder"}
    site = Site(daemon, names=[("*-*-*-*x", "m")])
    for method, path, body, query in (
        ("GET", f"/v1/models/{name}", None, ""),
        ("GET", "/ready", None, f"model={name}"),
        ("POST", "/api/show", {"model": name}, ""),
    ):
        assert asyncio.run(site.ask(method, path, body, query=query)).status == 404, path


@pytest.mark.parametrize(
    ("name", "model", "temperature"), [("m:ad:latest", "m:ad", None), ("n:warm:latest", "m", 0.8)]
)
def test_latest_of_a_variant_is_the_variant(
    name: str, model: str, temperature: float | None
) -> None:
    daemon = daemon_of()
    daemon.adapters = {"ad": "/folder"}
    asyncio.run(Site(daemon).ask("POST", CHAT, {"model": name, "messages": HI}))
    assert (daemon.asked[0]["model"], daemon.asked[0].get("temperature")) == (model, temperature)


def test_presets_are_listed_as_models() -> None:
    listed = asyncio.run(Site(daemon_of()).ask("GET", "/v1/models")).json()["data"]
    assert [one["id"] for one in listed] == ["m", "m:warm"]
    assert (listed[0]["object"], listed[0]["owned_by"]) == ("model", "mlxsup")
    assert (listed[0]["status"], listed[0]["meta"]) == ({"value": "loaded"}, {"n_ctx": 64})
    assert (listed[0]["aliases"], listed[1]["parent"]) == (["n"], "m")
    one = asyncio.run(Site(daemon_of()).ask("GET", "/v1/models/m:warm")).json()
    assert one == listed[1] | {"created": one["created"]}
    alias = asyncio.run(Site(daemon_of()).ask("GET", "/v1/models/n")).json()
    assert (alias["aliases"], "parent" in alias) == (["n"], False)


@pytest.mark.parametrize(
    ("name", "advice"),
    [("M:WRM", "; did you mean m:warm?"), ("M", "; did you mean m?"), ("else", HOW_TO_ADD)],
)
def test_looked_up_name_is_answered_with_names_like_it(name: str, advice: str) -> None:
    response = asyncio.run(Site(daemon_of()).ask("GET", f"/v1/models/{name}"))
    assert response.error["message"] == f"there is no model {name!r}; configured: m{advice}"
    assert (response.error["known"], bool(response.error["close"])) == (["m"], advice != HOW_TO_ADD)


@pytest.mark.parametrize(
    ("name", "model", "temperature"),
    [
        *((name, "m", 0.8) for name in ("claude-opus-9", "claude-", "a.cde", "a.ce", "m:warm")),
        *((name, "m", None) for name in ("gpt-4o", "abcde", "a.cdef", "else", "m", "n")),
    ],
)
def test_first_foreign_name_that_fits_counts(
    name: str, model: str, temperature: float | None
) -> None:
    response, request = asked(CHAT, NAMES, model=name, messages=HI)
    assert (request["model"], request.get("temperature")) == (model, temperature)
    assert response.json()["model"] == name


def test_foreign_name_can_be_looked_up() -> None:
    one = asyncio.run(Site(daemon_of(), names=NAMES).ask("GET", "/v1/models/gpt-4o"))
    assert (one.status, one.json()["id"]) == (200, "gpt-4o")
    like_preset = asyncio.run(Site(daemon_of(), names=NAMES).ask("GET", "/v1/models/gpt-4o:warm"))
    assert "parent" not in like_preset.json(), "the name that fits has none"
    none = asyncio.run(Site(daemon_of()).ask("GET", "/v1/models/gpt-4o"))
    assert (none.status, none.error["code"]) == (404, "model_not_found")
    assert "configured: m" in none.error["message"]


def test_status_is_asked_only_for_names_that_may_mean_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def looks(name: str) -> int:
        played, asked = daemon_of(), 0

        async def status() -> dict[str, Any]:
            nonlocal asked
            asked += 1
            return await PlayedDaemon.status(played)

        played.status = status  # type: ignore[method-assign]
        daemon = Daemon(NAMES[:2])
        async with daemon.connected(cast(Any, played)):
            for _ in range(2):
                await daemon.meant(name)
        return asked

    assert asyncio.run(looks("m")) == 0
    monkeypatch.setattr(daemon_module, "FRESH_S", 1e9)
    assert asyncio.run(looks("gpt-4o")) == 1
    monkeypatch.setattr(daemon_module, "FRESH_S", 0.0)
    assert asyncio.run(looks("m:warm")) == 2


# ---------------------------------------------------------------- events of models


def changes_for(on_change: Callable[[dict[str, Any]], None] = lambda change: None) -> Changes:
    return Changes(on_change, OpenAnswers(Daemon()))


async def at_once(follower: Follower) -> dict[str, Any]:
    """Return what is there already; raises TimeoutError if nothing is."""
    async with asyncio.timeout(0):
        return await anext(follower)


def change(to: str, **more: Any) -> dict[str, Any]:
    """Return a change as a daemon tells it."""
    told = {"model": "m", "from": "STOPPED", "to": to, "why": "user", "note": "", "progress": None}
    return told | more


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
def test_change_has_the_words_of_the_router(given: dict[str, Any], data: dict[str, Any]) -> None:
    assert event_of(given) == {"model": "m", "event": "model_status", "data": data}


class Followers:
    """Requests for the events of models, which share one life of the application."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.daemon = PlayedDaemon()
        self.site = Site(self.daemon)
        self.are_there = asyncio.Event()

    async def follow(self, *items: Change, until: int) -> list[Response]:
        """Return what comes for these, once each has that many events, or was ended."""
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
            responses = list(await asyncio.gather(*(one() for _ in range(self.count))))
        await told
        return responses

    async def _tell(self, items: tuple[Change, ...]) -> None:
        await self.are_there.wait()
        for item in items:
            self.daemon.subscriptions[0].items.put_nowait(item)


def test_followers_share_one_subscription() -> None:
    followers = Followers(3)
    loading = change("LOADING", progress={"phase": "spawn", "fraction": 0.0})
    for response in asyncio.run(followers.follow(loading, change("READY"), until=2)):
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.comments() == ["changes from now on"]
        assert [one["data"]["status"] for one in response.events()] == ["loading", "loaded"]
        assert not response.is_whole
    (subscription,) = followers.daemon.subscriptions
    assert subscription.is_closed, "at the end of the gateway"


@pytest.mark.parametrize("code", ["daemon_lost", "shutting_down"])
def test_lost_daemon_or_ending_gateway_ends_followers_with_an_error(code: str) -> None:
    followers = Followers(2)
    lost = [ConnectionLost("the daemon is gone", "ipc:///x")] if code == "daemon_lost" else []

    async def until_the_end() -> list[Response]:
        task = asyncio.create_task(followers.follow(*lost, until=9))
        await followers.are_there.wait()
        if not lost:
            followers.site.gateway.open_answers.cancel()
        return await task

    for response in asyncio.run(until_the_end()):
        assert response.events()[-1]["error"]["code"] == code
        assert not response.is_whole


def test_follower_that_has_left_is_forgotten() -> None:
    followers = Followers(1)

    async def run() -> None:
        async with followers.site.life():
            await followers.site.ask("GET", "/models/sse", until=asyncio.sleep(0), has_life=False)
            assert followers.site.gateway.open_answers.streams == set()

    asyncio.run(run())


def test_followers_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_FOLLOWERS", 2)
    changes = changes_for()
    for _ in range(2):
        followers = [changes.follow(), changes.follow()]
        with pytest.raises(Failure) as caught:
            changes.follow()
        assert (caught.value.status, caught.value.is_retryable) == (429, True)
        for follower in followers:
            changes.remove(follower)


def test_slow_follower_is_cut_off_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_CHANGES_BEHIND", 3)

    async def run() -> None:
        daemon = PlayedDaemon()
        changes = changes_for()
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


LOST = ConnectionLost("the daemon is silent", "ipc:///x")
BEHIND = RequestError(ErrorCode.SLOW_CONSUMER, "not read in time")


@pytest.mark.parametrize(
    ("end", "code"), [(LOST, "daemon_lost"), (BEHIND, "slow_consumer")], ids=["lost", "behind"]
)
def test_gateway_follows_again_after_each_end(
    end: Exception, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A gateway that fell behind subscribes again at once.
    monkeypatch.setattr(limits, "FOLLOW_AGAIN_S", 0.0 if end is LOST else 1e9)

    async def run() -> None:
        daemon, seen = PlayedDaemon(), list[dict[str, Any]]()
        changes = changes_for(seen.append)
        async with changes.watching(cast(AsyncClient, daemon)):
            for _ in range(2):
                told = await daemon.opened.get()
                follower = changes.follow()
                told.items.put_nowait(end)
                with pytest.raises(Failure) as caught:
                    await anext(follower)
                assert caught.value.code == code
            told = await daemon.opened.get()
            follower = changes.follow()
            told.items.put_nowait({"number": 1})
            assert await anext(follower) == {"number": 1}
            assert seen == [{"number": 1}]
            assert all(one.is_closed for one in daemon.subscriptions[:-1])

    asyncio.run(asyncio.wait_for(run(), 60))


def test_follower_that_comes_after_the_loss_is_told_at_once() -> None:
    async def run() -> None:
        daemon = PlayedDaemon()
        changes = changes_for()
        async with changes.watching(cast(AsyncClient, daemon)):
            early = changes.follow()
            await asyncio.sleep(0)
            daemon.subscriptions[0].items.put_nowait(LOST)
            with pytest.raises(Failure):
                await anext(early)
            with pytest.raises(Failure) as caught:
                await at_once(changes.follow())
            assert caught.value.code == "daemon_lost"

    asyncio.run(run())


def test_bug_that_ends_the_watching_is_logged_at_once(caplog: pytest.LogCaptureFixture) -> None:
    def fail(change: dict[str, Any]) -> None:
        raise ZeroDivisionError

    async def run() -> list[logging.LogRecord]:
        daemon = PlayedDaemon()
        async with changes_for(fail).watching(cast(AsyncClient, daemon)):
            (await daemon.opened.get()).items.put_nowait({"number": 1})
            for _ in range(5):  # the change, the task's end, and the call that follows it
                await asyncio.sleep(0)
            return list(caplog.records)

    (record,) = asyncio.run(run())
    assert (record.levelno, record.getMessage()) == (
        logging.ERROR, "changes are no longer passed on"
    )  # fmt: skip
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError
