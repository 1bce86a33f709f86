"""What the measures of the fast path make of what they have seen: no process, no clock."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import pytest

from mlxsup.client import Delta, FinishReason, Result

from bench.fast_path.bursts import Contest, CountedBurst, Pairs, prompts_of
from bench.fast_path.router import Backlog, us_per_token, whole
from bench.gpu.against import founds as against_founds
from bench.gpu.recovery import Live, founds
from bench.gpu.together import deaths
from bench.peers import MlxLmServer
from bench.two_models import gaps_s, largest_gap_s
from support.verdict import NotShown


def burst(*times: list[float], sent: float = 0.0, steps: int = 0) -> CountedBurst:
    return CountedBurst(sent_s=[sent] * len(times), times=times, steps=steps)


def test_steady_is_while_all_run_and_whole_is_everything() -> None:
    one = burst([1.0, 2.0, 3.0, 4.0], [2.0, 3.0, 4.0, 5.0])
    assert one.steady_per_s == 2.0, "four tokens from 2 to 4: the first ones come at 2"
    assert one.whole_per_s == 8 / 5
    assert one.first_s == 1.5


def test_first_tokens_count_from_their_own_question() -> None:
    late = CountedBurst(sent_s=[0.0, 0.5, 0.9], times=[[1.0], [1.1], [1.2]])
    assert late.first_s == pytest.approx(0.6)


def test_a_burst_that_never_runs_together_has_no_steady_speed() -> None:
    apart = burst([1.0, 2.0], [3.0, 4.0])
    assert apart.steady_per_s == 0.0
    together = burst([1.0, 2.0], [1.0, 2.0])
    assert Pairs(ours=[apart], floor=[together]).ratio("steady_per_s", "tok/s").values == [0.0]
    with pytest.raises(NotShown, match="never ran together"):
        Pairs(ours=[together], floor=[apart]).ratio("steady_per_s", "tok/s")


def test_no_prompt_comes_twice() -> None:
    prompts = [*prompts_of(16, 1016), *prompts_of(64, 1064), *prompts_of(16, 2016)]
    assert len({prompt.split(" is ")[0] for prompt in prompts}) == len(prompts)


def pairs() -> Pairs:
    slow, quick = burst([2.0, 4.0], steps=7), burst([1.0, 2.0], steps=7)
    return Pairs(ours=[slow, quick], floor=[quick, quick], server=[slow, slow])


def test_ratios_are_taken_pair_by_pair() -> None:
    found = pairs().ratio("whole_per_s", "tok/s")
    assert found.values == [0.5, 1.0]
    assert found.sides == {
        "mlxsup": [0.5, 1.0], "in process": [1.0, 1.0], "mlx_lm.server": [0.5, 0.5]
    }  # fmt: skip
    assert pairs().difference_ms().values == [1000.0, 0.0]


class Answer:
    """A stream with one piece, which has all tokens."""

    result = Result(text="", finish_reason=FinishReason.LENGTH)

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    async def __aiter__(self) -> AsyncIterator[Delta]:
        yield Delta(text="", token_ids=[0] * self._tokens)


class Quick:
    """Answers every prompt at once, as mlxsup's client and as one process, in four steps."""

    steps = 90

    async def status(self) -> dict[str, Any]:
        return {"models": [{"name": "other", "steps": 7}, {"name": "m", "steps": self.steps}]}

    def generate(self, model: str, *, prompt: str, max_tokens: int) -> Answer:
        self.steps += 4
        return Answer(max_tokens)

    def burst(
        self, prompts: Sequence[str], sent_s: Sequence[float], tokens: int
    ) -> list[list[float]]:
        return [[1.0] * tokens for _ in prompts]


class Failing:
    """A server that leaves every stream unfinished, and still holds its memory."""

    is_over = False

    async def ask(self, *about: Any) -> None:
        raise AssertionError("mlx_lm.server left a stream unfinished")

    def give_up(self) -> None:
        self.is_over = True


def test_a_server_that_fails_is_ended_and_the_others_are_still_measured() -> None:
    failing, quick = Failing(), Quick()
    contest = Contest(
        client=cast(Any, quick), floor=cast(Any, quick), server=cast(Any, failing), model="m"
    )
    found = Pairs()
    asyncio.run(contest.pair(found, 2, 3))
    assert failing.is_over
    assert contest.server is None
    assert (len(found.ours), len(found.floor), len(found.server)) == (1, 1, 0)


def test_a_burst_counts_the_steps_that_it_took_of_its_model() -> None:
    quick = Quick()
    contest = Contest(client=cast(Any, quick), floor=cast(Any, quick), server=None, model="m")
    found = Pairs()
    for _ in range(2):  # who goes first changes
        asyncio.run(contest.pair(found, 2, 3))
    assert [(one.steps, one.more_steps) for one in found.ours] == [(8, 5), (8, 5)]


def test_what_a_server_has_printed_that_was_given_up_fails_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = "print('Traceback', flush=True); import time; time.sleep(60)"
    start = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda _, **more: start([sys.executable, "-c", program], **more)
    )
    server = MlxLmServer({})
    server.give_up()
    server.__exit__(None, None, None)


def test_a_server_that_did_not_take_part_is_not_named() -> None:
    alone = pairs()
    alone.server.clear()
    assert "mlx_lm.server" not in alone.ratio("first_s", "ms", 1000.0).sides


@pytest.mark.parametrize(
    ("name", "streams", "first"),
    [("7b", 16, [2.0, 1.0]), ("03b", 16, [1000.0, 0.0]), ("03b", 4, [2.0, 1.0])],
)
def test_first_tokens_are_a_ratio_unless_their_limit_is_in_milliseconds(
    name: str, streams: int, first: list[float]
) -> None:
    found = against_founds(name, streams, pairs())
    assert found[f"{name}_{streams}_first"].values == first
    assert "of an answer: 5 (" in found[f"{name}_{streams}_first"].note


# ---------------------------------------------------------------- kills


def test_an_answer_continues_after_its_longest_silence_since_the_kill() -> None:
    live = Live(times=[0.0, 5.0, 5.1, 6.0, 6.1, 16.0, 16.1])
    assert live.continued_s(6.05) == pytest.approx(9.95), "6.1 was on its way already"
    assert live.continued_s(1.0) == pytest.approx(15.0)


def test_an_answer_that_had_ended_shows_nothing() -> None:
    with pytest.raises(NotShown, match="had ended"):
        Live(times=[0.0, 1.0]).continued_s(2.0)


def test_recovery_is_held_against_the_load_next_to_it() -> None:
    without = founds("recovery", [12.0, 14.0], [10.0, 11.0], [0, 1])
    assert without["recovery"].values == [2.0, 3.0]
    assert without["recovery_lost"].values == [0, 1]
    spare = founds("recovery_spare", [9.0], [10.0], [0])["recovery_spare"]
    assert (spare.values, spare.note) == ([0.9], "")
    assert "2 streams" in founds("recovery_spare", [9.0], [10.0], [2])["recovery_spare"].note


def test_each_new_process_of_any_engine_is_a_death() -> None:
    before = {"one": {"generation": 1}, "other": {"generation": 4}}
    after = {"one": {"generation": 3}, "other": {"generation": 5}}
    assert deaths(before, after) == 3
    assert deaths(after, after) == 0


# ---------------------------------------------------------------- gaps


def test_a_gap_counts_if_it_touches_the_window() -> None:
    times = [0.0, 4.0, 5.0, 8.0, 20.0]
    assert gaps_s(times, 4.5, 7.0) == [1.0, 3.0]
    assert gaps_s(times, 8.0, 9.0) == [12.0]
    assert largest_gap_s(times, 1.0, 2.0) == 4.0
    assert largest_gap_s([], 1.0, 2.0) == 0.0


# ---------------------------------------------------------------- the router


def backlog(spent_ns: int, steps: int, messages: int) -> Backlog:
    return Backlog(spent_ns=spent_ns, steps=steps, messages=messages)


def test_backlogs_count_if_no_message_was_merged_and_none_came_besides() -> None:
    short, empty = backlog(1, 1, 16), backlog(0, 0, 0)
    apart, merged, more = (backlog(1, 8, messages) for messages in (128, 127, 129))
    assert whole([(merged, short), (apart, short), (more, short)], 16) == [(apart, short)]
    for unusable in [(merged, short), (more, short), (apart, merged), (apart, empty), (short,) * 2]:
        with pytest.raises(NotShown, match="none of 1 pairs"):
            whole([unusable], 16)


def test_the_router_costs_what_further_steps_take_and_not_what_a_wake_up_does() -> None:
    woken_ns = 300_000
    first = backlog(woken_ns + 8 * 50_000, 8, 8), backlog(woken_ns + 50_000, 1, 1)
    other = backlog(woken_ns + 6 * 30_000, 6, 6), backlog(woken_ns + 2 * 30_000, 2, 2)
    assert us_per_token([first]) == 50 / 16
    assert us_per_token([first, other]) == (7 * 50 + 4 * 30) / 11 / 16
