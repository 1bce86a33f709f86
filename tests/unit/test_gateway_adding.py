"""Models that requests over HTTP add: who may, what they may name, and what is removed again."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from mlxsup.client import RequestError
from mlxsup.gateway import adding
from mlxsup.gateway.adding import reference_of
from mlxsup.gateway.keys import Caller
from mlxsup.gateway.operator import TOKEN_HEADER
from mlxsup.protocol.errors import ErrorCode

from support.gateway.played_gateway import PlayedDaemon, Response, Site, refused

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
ABSENT = RequestError(ErrorCode.LOAD_FAILED, "there is no such repository")


class AddingDaemon(PlayedDaemon):
    """A daemon that adds one model, `new`, and whose load fails or not.

    Attributes:
        rows: of the status, besides its own model.
        loads: that were asked for.
    """

    def __init__(self, fails: RequestError | None = None) -> None:
        super().__init__(*[[refused("unknown_model", close=[])]] * 2)
        self._fails = fails
        self.loads = 0
        self.rows: list[dict[str, Any]] = []

    async def status(self) -> dict[str, Any]:
        value = await super().status()
        return {"models": [*value["models"], *self.rows]}

    async def command(self, *words: Any) -> dict[str, Any]:
        name, model, *_ = words
        if model == "unknown":
            raise RequestError(ErrorCode.UNKNOWN_MODEL, "no model is called so")
        if name == "load":
            return await self._load()
        await super().command(name, model)
        if name == "add":
            self.rows = [
                {"name": "new", "aliases": [], "presets": {}, "adapters": {}, "state": "STOPPED",
                 "generation": 0}
            ]  # fmt: skip
        return {"model": "new", "added": ["new"]}

    async def _load(self) -> dict[str, Any]:
        self.loads += 1
        await asyncio.sleep(0)
        progress = {"done_bytes": 3, "total_bytes": 9}
        self.rows[0] |= {"state": "PENDING", "progress": progress}
        await asyncio.sleep(0.01)  # the download is seen before it ends
        self.rows[0]["state"] = "FAILED" if self._fails else "READY"
        if self._fails is not None:
            raise self._fails
        return {}


def asked(daemon: AddingDaemon, model: str, *, adds_models: bool = True) -> Response:
    """The answer to a request for a model, once what follows from it has ended."""

    async def ask() -> Response:
        site = Site(daemon, adds_models=adds_models)
        response = await site.ask("POST", CHAT, {"model": model, "messages": HI})
        trials = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.wait(trials or [asyncio.create_task(asyncio.sleep(0))])
        return response

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("model", "adds_models", "added", "target"),
    [
        ("org/model", True, ["org/model"], "new"),
        ("hf.co/org/model:latest", True, ["org/model"], "new"),
        ("qwen3:4b", True, ["qwen3:4b"], "new"),
        ("org/model", False, [], "org/model"),
        ("m", True, [], "m"),
        ("n", True, [], "n"),
        ("/etc", True, [], "/etc"),
        ("~/x", True, [], "~/x"),
        ("unknown", True, [], "unknown"),
    ],
)
def test_request_adds_the_model_that_it_names_if_that_is_configured(
    model: str, adds_models: bool, added: list[str], target: str
) -> None:
    daemon = AddingDaemon()
    asked(daemon, model, adds_models=adds_models)
    assert daemon.commands == [("add", one) for one in added]
    assert daemon.asked[0]["model"] == target


def test_model_whose_load_is_under_way_is_not_loaded_once_more() -> None:
    daemon, body = AddingDaemon(), {"model": "org/model", "stream": False}

    async def pull() -> list[Response]:
        site = Site(daemon, adds_models=True)
        async with site.life():
            pulls = [site.ask("POST", "/api/pull", body, has_life=False) for _ in range(3)]
            return await asyncio.gather(*pulls)

    assert [one.json() for one in asyncio.run(pull())] == [{"status": "success"}] * 3
    assert daemon.loads == 1


@pytest.mark.parametrize(
    ("fails", "removed"),
    [
        (ABSENT, ["new"]),
        (RequestError(ErrorCode.INSUFFICIENT_MEMORY, "too large"), []),
        (None, []),
    ],
    ids=["no such repository", "no room for it", "loaded"],
)
def test_model_that_cannot_be_downloaded_is_removed_again(
    fails: RequestError | None, removed: list[str]
) -> None:
    daemon = AddingDaemon(fails)
    asked(daemon, "org/model")
    assert daemon.commands == [("add", "org/model"), *(("remove", one) for one in removed)]


def test_model_that_was_removed_again_is_tried_again() -> None:
    daemon = AddingDaemon(ABSENT)

    async def ask() -> None:
        site = Site(daemon, adds_models=True)
        for _ in range(2):
            daemon.rows = []
            await site.ask("POST", CHAT, {"model": "org/model", "messages": HI})
            await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()})

    asyncio.run(ask())
    assert daemon.commands == [("add", "org/model"), ("remove", "new")] * 2


@pytest.mark.parametrize(("outcome", "loads"), [("downloads", [True, False]), ("fits", [True])])
def test_configured_model_is_tried_only_if_it_has_to_be_downloaded_and_stays(
    outcome: str, loads: list[bool]
) -> None:
    seen: list[bool] = []

    class Configured(AddingDaemon):
        async def command(self, *words: Any) -> dict[str, Any]:
            if words[0] == "load":
                seen.append(words[2:] == (True,))  # a dry run
                if not seen[-1]:
                    raise ABSENT
                return {"outcome": outcome}
            return {**await super().command(*words), "added": []}

    daemon = Configured()
    asked(daemon, "org/model")
    assert seen == loads
    assert daemon.commands == [("add", "org/model")]


def test_refusal_says_how_to_add_a_model() -> None:
    response = asked(AddingDaemon(), "org/model", adds_models=False)
    assert (response.status, "`mlxsup add MODEL`" in response.error["message"]) == (404, True)


def pulled(daemon: AddingDaemon, body: dict[str, Any]) -> Response:
    """The answer to `/api/pull` of the page."""

    async def ask() -> Response:
        site = Site(daemon)
        token = {TOKEN_HEADER: site.gateway.operator.token}
        return await site.ask("POST", "/api/pull", body, headers=token)

    return asyncio.run(ask())


@pytest.mark.parametrize("fails", [None, ABSENT], ids=["arrives", "is not there"])
def test_pull_tells_how_far_it_is_and_how_it_ended(
    monkeypatch: pytest.MonkeyPatch, fails: RequestError | None
) -> None:
    monkeypatch.setattr(adding, "LOOK_S", 0.0)
    response = pulled(AddingDaemon(fails), {"model": "org/model"})
    lines = [json.loads(line) for line in response.body.splitlines()]
    assert lines[0] == {"status": "pulling manifest"}
    assert {"status": "pulling org/model", "total": 9, "completed": 3} in lines
    assert [*lines[-1]] == (["status"] if fails is None else ["error"])
    whole = pulled(AddingDaemon(fails), {"name": "org/model", "stream": False})
    assert whole.status == (200 if fails is None else 400)


def test_delete_removes_the_entry_that_a_name_means() -> None:
    daemon = AddingDaemon()

    async def delete() -> Response:
        site = Site(daemon)
        token = {TOKEN_HEADER: site.gateway.operator.token}
        return await site.ask("DELETE", "/api/delete", {"model": "n:latest"}, headers=token)

    assert asyncio.run(delete()).status == 200
    assert daemon.commands == [("remove", "m")]


@pytest.mark.parametrize(
    ("name", "reference"),
    [("a/b", "a/b"), ("b", "b"), ("a/b/c", ""), ("../x", ""), ("", ""), ("x" * 300, "")],
)
def test_reference_is_no_path_and_no_address(name: str, reference: str) -> None:
    assert reference_of(name) == reference


@pytest.mark.parametrize(
    ("caller", "may"),
    [
        (Caller(), True),
        (Caller(key="k", account="friend"), False),
        (Caller(key="k", is_operator=True), True),
    ],
    ids=["no keys", "a friend's key", "an operator's key"],
)
def test_key_of_another_person_adds_no_models(caller: Caller, may: bool) -> None:
    assert Site(PlayedDaemon(), adds_models=True).gateway._adding.may(caller) is may
