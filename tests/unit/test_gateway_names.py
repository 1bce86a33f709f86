"""What a model may be called over HTTP: its presets, and the names of other APIs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mlxsup.client import ErrorCode, RequestError
from mlxsup.gateway import names as names_module
from mlxsup.gateway.names import Names

from support.played_gateway import PlayedDaemon, Response, Site, delta, refused, result

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
WARM: dict[str, Any] = {
    "temperature": 0.8,
    "max_tokens": 7,
    "chat_template_kwargs": {"enable_thinking": True, "mood": "good"},
}
NAMES = (("claude-*", "m:warm"), ("gpt-4*", "m"), ("*", "n"))


def daemon_of(*answers: Any) -> PlayedDaemon:
    """A daemon whose model has a preset."""
    daemon = PlayedDaemon(*(answers or ([delta("a"), result("a")],) * 2))
    daemon.presets = {"warm": WARM}
    return daemon


def asked(path: str, names: Any = (), **body: Any) -> tuple[Response, dict[str, Any]]:
    """The response to a request, and what the daemon was asked."""
    daemon = daemon_of()
    response = asyncio.run(Site(daemon, names=names).ask("POST", path, body))
    return response, daemon.asked[0]


# ---------------------------------------------------------------- presets


def test_a_preset_fills_in_what_the_request_leaves_out() -> None:
    response, request = asked(CHAT, model="m:warm", messages=MESSAGES, max_tokens=3)
    assert request["model"] == "m"
    assert (request["temperature"], request["max_tokens"]) == (0.8, 3)
    assert request["chat_template_kwargs"] == WARM["chat_template_kwargs"]
    assert response.json()["model"] == "m:warm"


@pytest.mark.parametrize(("given", "seeds"), [({}, [5, 6, 7]), ({"seed": 1}, [1, 2, 3])])
def test_several_answers_differ_with_the_seed_of_a_preset_too(
    given: dict[str, int], seeds: list[int]
) -> None:
    daemon = daemon_of(*[[delta("a"), result("a")]] * 3)
    daemon.presets = {"fixed": {"seed": 5}}
    body = {"model": "m:fixed", "messages": MESSAGES, "n": 3, **given}
    assert asyncio.run(Site(daemon).ask("POST", CHAT, body)).status == 200
    assert [request["seed"] for request in daemon.asked] == seeds


def test_arguments_of_the_template_are_joined_and_the_request_wins() -> None:
    extra = {"mood": "bad", "reasoning_effort": "low"}
    _, request = asked(CHAT, model="n:warm", messages=MESSAGES, chat_template_kwargs=extra)
    assert request["chat_template_kwargs"] == {"enable_thinking": True, **extra}


def test_a_prompt_gets_no_arguments_for_the_template() -> None:
    _, request = asked("/v1/completions", model="m:warm", prompt="hi")
    assert "chat_template_kwargs" not in request
    assert request["temperature"] == 0.8


@pytest.mark.parametrize(
    ("given", "limit"), [({}, 7), ({"max_tokens": 3}, 3), ({"model": "m"}, 16)]
)
def test_a_preset_comes_before_the_default_of_an_api(given: dict[str, Any], limit: int) -> None:
    _, request = asked("/v1/completions", **{"model": "m:warm", "prompt": "hi", **given})
    assert request["max_tokens"] == limit


def test_a_preset_decides_about_thinking_unless_a_message_does() -> None:
    body: dict[str, Any] = {"model": "m:warm", "messages": MESSAGES, "max_tokens": 3}
    _, request = asked("/v1/messages", **body)
    assert request["chat_template_kwargs"] == {
        "enable_thinking": True, "thinking": False, "mood": "good"
    }  # fmt: skip
    _, request = asked("/v1/messages", **body, thinking={"type": "disabled"})
    assert request["chat_template_kwargs"]["enable_thinking"] is False


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 3}),
    ],
)
def test_every_api_has_presets(path: str, body: dict[str, Any]) -> None:
    response, request = asked(path, model="m:warm", **body)
    assert (request["model"], request["temperature"]) == ("m", 0.8)
    assert response.json()["model"] == "m:warm"


def test_a_preset_that_is_not_there_is_no_model() -> None:
    daemon = daemon_of([refused("unknown_model")])
    body = {"model": "m:cold", "messages": MESSAGES}
    response = asyncio.run(Site(daemon).ask("POST", CHAT, body))
    assert (response.status, daemon.asked[0]["model"]) == (404, "m:cold")


def test_presets_are_listed_as_models() -> None:
    listed = asyncio.run(Site(daemon_of()).ask("GET", "/v1/models")).json()["data"]
    assert [one["id"] for one in listed] == ["m", "m:warm"]
    assert (listed[0]["aliases"], listed[1]["parent"]) == (["n"], "m")
    one = asyncio.run(Site(daemon_of()).ask("GET", "/v1/models/m:warm")).json()
    assert one == listed[1] | {"created": one["created"]}
    alias = asyncio.run(Site(daemon_of()).ask("GET", "/v1/models/n")).json()
    assert (alias["aliases"], "parent" in alias) == (["n"], False)


# ---------------------------------------------------------------- names that nothing has


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses", "/v1/completions"])
@pytest.mark.parametrize(
    ("close", "advice"),
    [(["m"], "; did you mean m?"), (["m", "n"], "; did you mean m or n?"), ([], "")],
)
def test_an_unknown_name_is_answered_with_the_ones_like_it(
    path: str, close: list[str], advice: str
) -> None:
    message = "no model is called 'mm'; configured: m"
    detail = {"known": ["m"], "close": close}
    refusal = RequestError(ErrorCode.UNKNOWN_MODEL, message, retryable=False, detail=detail)
    body: dict[str, object] = (
        {"model": "mm", "max_tokens": 1} if path != "/v1/responses" else {"model": "mm"}
    )
    body |= {"messages": MESSAGES} if path in (CHAT, "/v1/messages") else {}
    body |= {"input": "hi"} if path == "/v1/responses" else {}
    body |= {"prompt": "hi"} if path == "/v1/completions" else {}
    response = asyncio.run(Site(daemon_of([refusal])).ask("POST", path, body))
    assert (response.status, response.error["message"]) == (404, message + advice)
    if path != "/v1/messages":
        assert (response.error["known"], response.error["close"]) == (["m"], close)


@pytest.mark.parametrize(
    ("name", "advice"),
    [("M:WRM", "; did you mean m:warm?"), ("M", "; did you mean m?"), ("else", "")],
)
def test_a_name_that_is_looked_up_is_answered_so_too(name: str, advice: str) -> None:
    response = asyncio.run(Site(daemon_of()).ask("GET", f"/v1/models/{name}"))
    assert response.error["message"] == f"no model is called {name!r}; configured: m{advice}"
    assert (response.error["known"], bool(response.error["close"])) == (["m"], bool(advice))


# ---------------------------------------------------------------- names of other APIs


@pytest.mark.parametrize(
    ("name", "model", "temperature"),
    [
        ("claude-opus-9", "m", 0.8),
        ("claude-", "m", 0.8),
        ("gpt-4o", "m", None),
        ("else", "m", None),
        ("m", "m", None),
        ("m:warm", "m", 0.8),
        ("n", "m", None),
    ],
)
def test_the_first_name_that_fits_counts_after_those_of_the_models(
    name: str, model: str, temperature: float | None
) -> None:
    response, request = asked(CHAT, NAMES, model=name, messages=MESSAGES)
    assert (request["model"], request.get("temperature")) == (model, temperature)
    assert response.json()["model"] == name


def test_a_star_stands_for_anything_and_all_else_for_itself() -> None:
    names = (("a.c*e", "m:warm"),)
    for name, is_it in (("a.cde", True), ("a.ce", True), ("abcde", False), ("a.cdef", False)):
        _, request = asked(CHAT, names, model=name, messages=MESSAGES)
        assert ("temperature" in request) is is_it, name


def test_a_foreign_name_can_be_looked_up() -> None:
    one = asyncio.run(Site(daemon_of(), names=NAMES).ask("GET", "/v1/models/gpt-4o"))
    assert (one.status, one.json()["id"]) == (200, "gpt-4o")
    like_preset = asyncio.run(Site(daemon_of(), names=NAMES).ask("GET", "/v1/models/gpt-4o:warm"))
    assert "parent" not in like_preset.json(), "the name that fits has none"
    none = asyncio.run(Site(daemon_of()).ask("GET", "/v1/models/gpt-4o"))
    assert (none.status, none.error["code"]) == (404, "model_not_found")
    assert "configured: m" in none.error["message"]


# ---------------------------------------------------------------- what it costs


def test_the_daemon_is_asked_only_if_a_name_may_mean_something_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def looks(name: str) -> int:
        daemon, asked = daemon_of(), 0

        async def status() -> dict[str, Any]:
            nonlocal asked
            asked += 1
            return await daemon.status()

        names = Names(NAMES[:2], status)
        for _ in range(2):
            await names.meant(name)
        return asked

    assert asyncio.run(looks("m")) == 0
    monkeypatch.setattr(names_module, "FRESH_S", 1e9)
    assert asyncio.run(looks("gpt-4o")) == 1
    monkeypatch.setattr(names_module, "FRESH_S", 0.0)
    assert asyncio.run(looks("m:warm")) == 2


def test_a_daemon_that_does_not_answer_is_an_error() -> None:
    daemon = daemon_of()
    daemon.state = refused("shutting_down")
    body = {"model": "m:warm", "messages": MESSAGES}
    response = asyncio.run(Site(daemon).ask("POST", CHAT, body))
    assert (response.status, response.error["code"]) == (503, "shutting_down")
