"""`GET /metrics`: what is counted, what is read off the status, and the labels."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest

from mlxsup.client import ConnectionLost, ErrorCode, FinishReason, RequestError
from mlxsup.gateway import daemon as daemon_module
from mlxsup.gateway.metrics import MEMORY_KINDS, Meter
from mlxsup.protocol.client_messages import Timings
from mlxsup.protocol.states import State
from mlxsup.protocol.tool_choice import UNFIT_CALL, UNREADABLE_CALL

from support.bad.exposed import DECLARED, Exposed
from support.gateway.played_gateway import (
    BODY,
    CHAT,
    LEAST,
    Item,
    PlayedDaemon,
    Site,
    delta,
    result,
)

TIMES = Timings(queued_s=0.03, prefill_s=0.2, first_token_s=0.3, total_s=1.3)

ROW: dict[str, Any] = {
    "name": "m", "aliases": ["n"], "presets": {"warm": {}}, "adapters": {},
    "state": "READY", "context_length": 64, "generation": 3, "restarts": 2,
    "exits": [{"reason": "crash", "cause": "unknown", "count": 2},
              {"reason": "asked", "cause": "unknown", "count": 1}],
    "progress": {"phase": "download", "fraction": 0.25, "done_bytes": 25, "total_bytes": 100},
    "load_phases_s": {"spawn": 0.5},
    "running": ["a", "b"], "queued_per_class": {"batch": 4}, "paused": ["c"], "yielded": ["d", "e"],
    "quarantined": 1, "tokens_per_s": 80.5, "engine_s": 9.0, "repeated_s": 0.5, "steps": 77,
    "phase": "decode", "phase_s": 0.25,
    **{f"{kind}_bytes": number for number, kind in enumerate(MEMORY_KINDS)},
    "ranks": [{"rank": 0, "host": None, "address": "10.0.0.1", "state": "ready", "active_bytes": 5},
              {"rank": 1, "host": "far", "address": "x", "state": "loading", "active_bytes": 0}],
}  # fmt: skip

STATUS: dict[str, Any] = {
    "version": "1.2", "uptime_s": 60.0, "models": [ROW],
    "memory": {"budget_bytes": 100, "effective_budget_bytes": 80, "reserved_bytes": 50,
               "machine_bytes": None},
    "gateway": {"restarts": 4},
}  # fmt: skip


class Daemon(PlayedDaemon):
    """One with a whole status."""

    async def status(self) -> dict[str, Any]:
        await super().status()
        return STATUS


async def scraped(site: Site) -> Exposed:
    response = await site.ask("GET", "/metrics")
    assert response.status == 200
    assert response.headers["content-type"].startswith("text/plain")
    return Exposed(response.body.decode())


def after(*answers: list[Item], **fields: Any) -> Exposed:
    """Return the metrics after one chat for each answer."""
    daemon = Daemon(*answers)
    site = Site(daemon)

    async def run() -> Exposed:
        for _ in range(len(answers) or 1):
            await site.ask("POST", CHAT, {**BODY, **fields})
        return await scraped(site)

    return asyncio.run(run())


def answer(**more: Any) -> list[Item]:
    return [delta("abc"), result("abc", timings=TIMES, **more)]


@pytest.mark.parametrize("stream", [False, True])
def test_answer_is_counted_with_its_tokens_and_times(stream: bool) -> None:
    broken = answer(warnings=["odd", UNREADABLE_CALL, UNFIT_CALL])
    seen = after(broken, answer(resumed=2), stream=stream)
    assert seen.value("mlxsup_requests_total", model="m", finish_reason="stop") == 2
    assert seen.value("mlxsup_prompt_tokens_total", model="m") == 10
    assert seen.value("mlxsup_cached_prompt_tokens_total", model="m") == 4
    assert seen.value("mlxsup_generation_tokens_total", model="m") == 6
    assert seen.value("mlxsup_requests_resumed_total", model="m") == 2
    assert seen.value("mlxsup_unreadable_tool_calls_total", model="m") == 1
    assert seen.value("mlxsup_unfit_tool_calls_total", model="m") == 1
    assert seen.kinds == {metric.name: metric.kind for metric in DECLARED}
    for name, total in (
        ("time_to_first_token", 0.6), ("time_per_output_token", 1.0), ("request_duration", 2.6),
        ("queue_time", 0.06), ("prefill", 0.4),
    ):  # fmt: skip
        assert seen.value(f"mlxsup_{name}_seconds_count", model="m") == 2
        assert seen.value(f"mlxsup_{name}_seconds_sum", model="m") == pytest.approx(total)


@pytest.mark.parametrize(
    ("text", "firsts", "between"), [("", None, None), ("a", 1, None), ("ab", 1, 1)]
)
def test_time_between_tokens_needs_two_of_them(
    text: str, firsts: int | None, between: int | None
) -> None:
    seen = after([result(text, FinishReason.LENGTH, timings=TIMES)])
    assert seen.value("mlxsup_requests_total", model="m", finish_reason="length") == 1
    assert seen.value("mlxsup_request_duration_seconds_count", model="m") == 1
    assert seen.value("mlxsup_time_to_first_token_seconds_count", model="m") == firsts
    assert seen.value("mlxsup_time_per_output_token_seconds_count", model="m") == between


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "hi"}), ("/detokenize", {"tokens": [1]}),
        ("/apply-template", LEAST[CHAT]), ("/v1/messages/count_tokens", LEAST[CHAT]),
        ("/v1/responses/input_tokens", {"input": "hi"}),
    ],
)  # fmt: skip
def test_prompt_for_which_nothing_is_computed_is_no_answer(path: str, body: dict[str, Any]) -> None:
    site = Site(Daemon(answer()))

    async def run() -> Exposed:
        assert (await site.ask("POST", path, {"model": "m", **body})).status == 200
        return await scraped(site)

    seen = asyncio.run(run())
    assert seen.labels("mlxsup_requests_total", "model") == set()
    assert seen.labels("mlxsup_prompt_tokens_total", "model") == set()


def error(code: ErrorCode) -> RequestError:
    return RequestError(code, "no", retryable=False, detail={})


def test_errors_are_counted_by_their_code() -> None:
    lost = ConnectionLost("gone", "ipc:///x")
    failed = error(ErrorCode.MODEL_FAILED)
    seen = after(answer(), [failed], [delta("a"), failed], [lost], stream=True)
    errors = "mlxsup_request_errors_total"
    assert seen.value(errors, model="m", code="model_failed") == 2
    assert seen.value(errors, model="m", code="daemon_lost") == 1
    assert seen.value("mlxsup_requests_total", model="m", finish_reason="stop") == 1


def test_reader_that_leaves_is_a_cancelled_answer() -> None:
    site = Site(Daemon(answer(), [delta("a"), asyncio.Event()]))

    async def run() -> Exposed:
        await site.ask("POST", CHAT, BODY)
        leaves = asyncio.Event()
        streamed = {**BODY, "stream": True}
        await site.ask("POST", CHAT, streamed, until=leaves.wait(), on_sent=lambda _: leaves.set())
        return await scraped(site)

    seen = asyncio.run(run())
    assert seen.value("mlxsup_requests_total", model="m", finish_reason="cancelled") == 1


def test_unknown_names_become_no_label() -> None:
    meter = Meter()
    meter.know([ROW])
    for number in range(100):
        meter.failed(f"invented-{number}", error(ErrorCode.UNKNOWN_MODEL))
        meter.left(f"invented-{number}")
    meter.failed("m", error(ErrorCode.OVERLOADED))
    seen = Exposed(meter.page(None).decode())
    assert seen.labels("mlxsup_request_errors_total", "model") == {"", "m"}
    assert seen.value("mlxsup_request_errors_total", model="", code="unknown_model") == 100
    assert seen.labels("mlxsup_requests_total", "model") == {""}


def test_wrong_parameter_is_counted_though_the_daemon_never_sees_it() -> None:
    site = Site(Daemon())

    async def run() -> Exposed:
        response = await site.ask("POST", CHAT, BODY | {"temperature": 11})
        assert response.error["param"] == "temperature"
        return await scraped(site)

    seen = asyncio.run(run())
    assert seen.value("mlxsup_request_errors_total", model="m", code="invalid_request") == 1


NAMES = (("gpt-*", "n"),)


@pytest.mark.parametrize(
    ("name", "path"),
    [(name, CHAT) for name in ("m", "n", "m:warm", "n:warm", "gpt-4o")]
    + [("n:warm", path) for path in LEAST],
)
def test_label_of_a_model_is_its_name(name: str, path: str) -> None:
    """From the first request on, and for errors, too: the first one here is one."""
    site = Site(Daemon([error(ErrorCode.OVERLOADED)], answer()), names=NAMES)

    async def run() -> Exposed:
        for _ in range(2):
            await site.ask("POST", path, LEAST[path] | {"model": name})
        return await scraped(site)

    seen = asyncio.run(run())
    for metric in ("mlxsup_request_errors_total", "mlxsup_requests_total",
                   "mlxsup_generation_tokens_total"):  # fmt: skip
        assert seen.labels(metric, "model") == {"m"}


def test_name_of_a_reload_is_known_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(Daemon([error(ErrorCode.OVERLOADED)]))

    async def run() -> Exposed:
        async with site.life():
            await site.ask("GET", "/metrics", has_life=False)
            monkeypatch.setitem(ROW, "aliases", ["n", "new"])
            await site.ask("POST", CHAT, BODY | {"model": "new"}, has_life=False)
            return Exposed((await site.ask("GET", "/metrics", has_life=False)).body.decode())

    assert asyncio.run(run()).labels("mlxsup_request_errors_total", "model") == {"m"}


@pytest.mark.parametrize("answers", [True, False])
def test_unknown_names_are_asked_for_once_in_a_while(
    answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon_module, "FRESH_S", 1e9)
    daemon = Daemon(*[[error(ErrorCode.UNKNOWN_MODEL)]] * 3, answer())
    site, looks = Site(daemon), 0

    async def status() -> dict[str, Any]:
        nonlocal looks
        looks += 1
        if not answers:
            raise RequestError(ErrorCode.SHUTTING_DOWN, "it ends")
        return STATUS

    async def run() -> int:
        async with site.life():
            await asyncio.sleep(0)
            before = looks
            asks = [site.ask("POST", CHAT, BODY | {"model": f"x{nth}"}, has_life=False)
                    for nth in range(3)]  # fmt: skip
            await asyncio.gather(*asks)
            await site.ask("POST", CHAT, BODY, has_life=False)
            return looks - before

    daemon.status = status  # type: ignore[method-assign]
    assert asyncio.run(run()) == 1


def test_evictions_are_counted_by_reason() -> None:
    daemon = Daemon()
    site = Site(daemon)
    ends = {"evict": 2, "swap": 1, "idle": 1, "memory": 1, "user": 3, "restart": 1, "shutdown": 1}

    async def run() -> Exposed:
        async with site.life():
            await asyncio.sleep(0)
            (told,) = daemon.subscriptions
            for why, count in ends.items():
                states = ("READY", "DRAINING", "STOPPING", "STOPPING", "STOPPED")
                for before, after in pairwise(states):
                    change = {"model": "m", "from": before, "to": after, "why": why}
                    for _ in range(count):
                        told.items.put_nowait(change)
            while not told.items.empty():  # noqa: ASYNC110 - nothing else says that it was read
                await asyncio.sleep(0)
            return Exposed((await site.ask("GET", "/metrics", has_life=False)).body.decode())

    seen = asyncio.run(run())
    name = "mlxsup_evictions_total"
    counted = {why: seen.value(name, model="m", reason=why) for why in seen.labels(name, "reason")}
    assert counted == {"evict": 2, "swap": 1, "idle": 1, "memory": 1}


def test_responses_are_counted_by_status_refusals_included() -> None:
    site = Site(Daemon(answer(), answer(), answer()))

    async def run() -> Exposed:
        await site.ask("POST", CHAT, {**BODY, "n": 3})
        await site.ask("GET", "/nothing")
        await site.ask("GET", "/health", headers={"host": "evil.example"})
        await site.ask("GET", "/health")
        return await scraped(site)

    seen = asyncio.run(run())
    counted = {status: seen.value("mlxsup_http_responses_total", status=status)
               for status in seen.labels("mlxsup_http_responses_total", "status")}  # fmt: skip
    assert counted == {"200": 2, "403": 1, "404": 1}
    answers = seen.value("mlxsup_requests_total", model="m", finish_reason="stop")
    assert answers == 3, "each of several answers of one response"


@pytest.mark.parametrize("is_whole", [True, False])
def test_client_that_leaves_early_counts_as_no_response(is_whole: bool) -> None:
    site = Site(Daemon([asyncio.Event()]))

    async def run() -> tuple[int, Exposed]:
        left = await site.ask("POST", CHAT, BODY, until=asyncio.sleep(0), is_whole=is_whole)
        return left.status, await scraped(site)

    status, seen = asyncio.run(run())
    assert (status, seen.labels("mlxsup_http_responses_total", "status")) == (0, set())


def test_scrape_shows_the_status() -> None:
    seen = asyncio.run(scraped(Site(Daemon())))
    assert seen.value("mlxsup_up") == 1
    assert seen.value("mlxsup_build_info", version="1.2") == 1
    assert seen.value("mlxsup_uptime_seconds") == 60
    assert seen.value("mlxsup_memory_budget_bytes") == 100
    assert seen.value("mlxsup_memory_effective_budget_bytes") == 80
    assert seen.value("mlxsup_gateway_restarts_total") == 4
    assert seen.value("mlxsup_memory_machine_bytes") is None, "it was not measured yet"
    states = {state: seen.value("mlxsup_model_state", model="m", state=state) for state in State}
    assert {state for state, value in states.items() if value} == {State.READY}
    assert None not in states.values()
    expected = {
        "mlxsup_model_generation": 3, "mlxsup_model_restarts_total": 2,
        "mlxsup_requests_running": 2, "mlxsup_requests_paused": 3,
        "mlxsup_requests_quarantined": 1, "mlxsup_tokens_per_second": 80.5,
        "mlxsup_engine_seconds_total": 9.0, "mlxsup_repeated_seconds_total": 0.5,
        "mlxsup_steps_total": 77, "mlxsup_step_age_seconds": 0.25,
    }  # fmt: skip
    assert {name: seen.value(name, model="m") for name in expected} == expected
    exits = "mlxsup_model_exits_total"
    assert seen.value(exits, model="m", reason="crash", cause="unknown") == 2
    assert seen.value(exits, model="m", reason="asked", cause="unknown") == 1
    for part, size in (("done", 25), ("total", 100)):
        assert seen.value("mlxsup_download_bytes", model="m", part=part) == size
    assert seen.value("mlxsup_model_load_seconds", model="m", phase="spawn") == 0.5
    waiting = "mlxsup_requests_waiting"
    assert seen.value(waiting, model="m", priority="batch") == 4
    assert seen.value(waiting, model="m", priority="normal") == 0
    for number, kind in enumerate(MEMORY_KINDS):
        assert seen.value("mlxsup_memory_bytes", model="m", kind=kind) == number
    leader = {"model": "m", "rank": "0", "host": "10.0.0.1"}
    follower = {"model": "m", "rank": "1", "host": "far"}
    assert [seen.value("mlxsup_rank_ready", **rank) for rank in (leader, follower)] == [1, 0]
    assert seen.value("mlxsup_rank_memory_bytes", **leader) == 5


@pytest.mark.parametrize(
    ("field", "value", "age", "parts"),
    [
        ("phase", "prefill", 0.25, {"done", "total"}),
        ("phase", "idle", 0.0, {"done", "total"}),
        ("phase", None, 0.0, {"done", "total"}),
        ("progress", None, 0.25, set()),
        ("progress", {"phase": "weights", "fraction": 0.5}, 0.25, set()),
    ],
)
def test_only_a_step_has_an_age_and_only_a_download_has_bytes(
    field: str, value: object, age: float, parts: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ROW, field, value)
    seen = asyncio.run(scraped(Site(Daemon())))
    assert seen.value("mlxsup_step_age_seconds", model="m") == age
    assert seen.labels("mlxsup_download_bytes", "part") == parts


def test_scrape_without_a_daemon_keeps_the_counts() -> None:
    daemon = Daemon(answer(), answer())
    site = Site(daemon)

    async def run() -> Exposed:
        await site.ask("POST", CHAT, BODY)
        daemon.state = ConnectionLost("no daemon answers", "ipc:///x")
        assert (await site.ask("POST", CHAT, BODY)).status == 200, "an answer needs no status"
        return await scraped(site)

    seen = asyncio.run(run())
    assert seen.value("mlxsup_up") == 0
    assert seen.value("mlxsup_requests_total", model="m", finish_reason="stop") == 2
    assert "mlxsup_model_state" not in seen.kinds
