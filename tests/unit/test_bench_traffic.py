"""The plans and figures of `bench traffic`, and a side that fails; no process, no clock."""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from bench import traffic
from bench.openai_stream import AnswerError
from bench.servers import Answer, token_times
from bench.traffic import Outcome, Running, Settings, arrivals, figures

SETTINGS = Settings(seed=1, requests=4, rates={"x": 1e6}, tokens=(50, 30), limit_s=60.0)
FEW = [Outcome(sent_s=0.0, times=[1.0, 1.5, 3.0]), Outcome(sent_s=1.0, times=[1.5])]


def lengths(plan: Sequence[traffic.Arrival]) -> list[tuple[int, int]]:
    """Return the tokens of each prompt and answer."""
    return [(len(one.prompt.split()), one.tokens) for one in plan]


def test_a_plan_follows_from_its_seeds() -> None:
    first, again, new = (arrivals(200, 4.0, *seeds) for seeds in ((1, 1), (1, 2), (2, 3)))
    assert first == arrivals(200, 4.0, 1, 1)
    assert lengths(first) == lengths(again) != lengths(new)
    assert not {one.prompt for one in first} & {one.prompt for one in again}
    prompts, answers = zip(*lengths(arrivals(1000, 4.0, 1, 1)), strict=True)
    assert (min(prompts), max(prompts), max(answers)) == (20, 3000, 400)
    assert statistics.median(prompts) == pytest.approx(180, rel=0.1)
    assert statistics.median(answers) == pytest.approx(80, rel=0.1)


@pytest.mark.parametrize(
    ("per_s", "last_s"), [(4.0, 250.0), (8.0, 125.0), (math.inf, 0.0)], ids=str
)
def test_requests_arrive_at_the_rate(per_s: float, last_s: float) -> None:
    times = [one.at_s for one in arrivals(1000, per_s, 1, 1)]
    assert times == sorted(times)
    assert times[-1] == pytest.approx(last_s, rel=0.1)


@pytest.mark.parametrize(
    ("outcomes", "key", "value"),
    [
        (FEW, "first_ms", {50: 500.0, 95: 1000.0, 99: 1000.0}),
        (FEW, "per_token_ms", {50: 1000.0, 95: 1000.0, 99: 1000.0}),
        (FEW, "gap_ms", 1500.0),
        (FEW, "tokens_per_s", 4 / 3),
        ([*FEW, Outcome(sent_s=0.0, error="x")], "errors", {"x": 1}),
    ],
    ids=["first", "per-token", "gap", "rate", "failed"],
)
def test_figures(outcomes: list[Outcome], key: str, value: object) -> None:
    assert figures(outcomes)[key] == value


@pytest.mark.parametrize(
    ("events", "tokens", "times"),
    [
        ([(1.0, 3), (2.0, 1)], 2, [1.0, 2.0]),
        ([(1.0, 1), (2.0, 0), (3.0, 3)], 4, [1.0, 3.0, 3.0, 3.0]),
        ([(1.0, 30), (2.0, 10)], 6, [1.0] * 4 + [2.0] * 2),
    ],
    ids=["one-each", "an-event-without-text", "several-in-each"],
)
def test_tokens_of_events(events: list[tuple[float, int]], tokens: int, times: list[float]) -> None:
    assert token_times(events, tokens) == times


def test_an_answer_continues_after_its_longest_silence() -> None:
    assert traffic.continued_at([1.0, 2.0, 2.1, 7.0, 7.5], 2.05) == 7.0
    assert traffic.continued_at([1.0, 2.0], 2.05) is None


class Fake:
    """A server that answers at once, but for every second request."""

    name = "fake"
    asked = 0

    async def ask(self, model: str, prompt: str, max_tokens: int, on_token: Any = None) -> Answer:
        """See `Server`."""
        self.asked += 1
        if self.asked % 2 == 0:
            raise AnswerError("no, and\nmore")
        return Answer(asked_at=0.0, times=[1e9] * max_tokens, prompt_tokens=1, cached_tokens=0)


@asynccontextmanager
async def half(folder: Path) -> AsyncIterator[Running]:
    """A side of which every second request fails."""
    yield traffic.running(Fake(), 0)


@asynccontextmanager
async def broken(folder: Path) -> AsyncIterator[Running]:
    """A side that does not start."""
    raise AssertionError("it has ended")
    yield


def shown(start: traffic.Start, scenario: traffic.Scenario) -> list[dict[str, Any]]:
    """Return what a scenario shows."""

    async def run() -> list[dict[str, Any]]:
        found = traffic.measured(start, Path(), scenario, SETTINGS, 0)
        return [one async for one in found]

    return asyncio.run(run())


def test_a_side_that_fails_is_counted_and_ends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    [(_, scenario)] = traffic.scenarios(["arrivals"], ["x"])
    found = shown(half, scenario)
    assert [one["what"] for one in found] == ["x, first", "x, again", "x, new"]
    assert [one["errors"] for one in found] == [{"no, and": 2}] * 3
    failed = [*shown(broken, scenario), *shown(half, traffic.long)]
    assert [one["error"] for one in failed] == [
        "it has ended",
        "no, and",
    ]
    runs = [{"scenario": "arrivals", "side": "s", **one} for one in [*found, *failed]]
    traffic.print_report(runs)
    assert "it has ended" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing"], "there is no 'nothing'"),
        (["--side", "vllm-mlx"], "there is no 'vllm-mlx'"),
        (["--load", "0"], "must be above 0"),
        (["--rate", "nan"], "must be above 0"),
    ],
    ids=["scenario", "side", "load", "rate"],
)
def test_arguments_that_cannot_be_measured(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        traffic.main(arguments)
    assert words in capsys.readouterr().err
