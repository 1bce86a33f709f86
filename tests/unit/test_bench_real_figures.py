"""What the measures with real processes make of what they have seen: no process, no clock."""

from __future__ import annotations

import pytest

from bench.sharing.real_budget import BudgetWatch, Look, longest_excess_s, worse
from bench.sharing.real_crowding import Crowd, Work
from bench.sharing.real_place import Live, leaving_out
from bench.sharing.real_timeline import (
    Change,
    Turn,
    idle_share,
    imbalance,
    longest_gap_s,
    turns_of,
    whole_cycles,
)
from bench.sharing.real_unload import drift
from bench.sharing.real_zipf import clairvoyant, lru, zipf


def change(at_s: float, model: str, before: str, after: str) -> Change:
    return Change(at_s=at_s, model=model, before=before, after=after, why="swap")


def swapped(at_s: float, out: str, into: str) -> list[Change]:
    """One model goes, the other is READY two seconds later."""
    return [
        change(at_s, out, "READY", "DRAINING"),
        change(at_s + 0.1, out, "DRAINING", "STOPPING"),
        change(at_s + 0.5, out, "STOPPING", "PENDING"),
        change(at_s + 0.5, into, "PENDING", "LOADING"),
        change(at_s + 2.0, into, "LOADING", "READY"),
    ]


def turn(model: str, ready_s: float, left_s: float) -> Turn:
    return Turn(model=model, ready_s=ready_s, left_s=left_s)


# ---------------------------------------------------------------- turns


def test_a_turn_lasts_from_ready_to_its_end_and_has_the_tokens_of_its_own_model() -> None:
    changes = [
        change(0.0, "a", "LOADING", "READY"),
        *swapped(10.0, "a", "b"),
        *swapped(20.0, "b", "a"),
    ]
    times = {"a": [1.0, 9.0, 15.0, 23.0], "b": [5.0, 11.0, 20.5]}
    assert turns_of(changes, times) == [
        Turn(model="a", ready_s=0.0, left_s=10.0, tokens=2),
        Turn(model="b", ready_s=12.0, left_s=20.0, tokens=0),
    ]


def test_a_swap_that_was_called_off_makes_two_turns() -> None:
    changes = [
        change(0.0, "a", "LOADING", "READY"),
        change(4.0, "a", "READY", "DRAINING"),
        change(5.0, "a", "DRAINING", "READY"),
        change(9.0, "a", "READY", "DRAINING"),
    ]
    assert [(one.ready_s, one.left_s) for one in turns_of(changes, {})] == [(0.0, 4.0), (5.0, 9.0)]


def test_shares_are_of_whole_cycles_and_unequal_ones_are_seen() -> None:
    turns = [turn("a", 0, 10), turn("b", 12, 22), turn("a", 24, 34), turn("b", 36, 46)]
    assert whole_cycles(turns) == turns[:2]
    assert imbalance(turns, "ab") == 0.0
    longer = [turn("a", 0, 15), turn("b", 17, 22)]
    assert imbalance(longer, "ab") == pytest.approx(0.5)


def test_a_model_that_had_no_turn_has_no_share() -> None:
    assert imbalance([turn("a", 0, 10)], "ab") == 1.0
    with pytest.raises(ValueError, match="no turn"):
        imbalance([], "ab")


def test_a_model_that_never_had_a_turn_next_to_one_that_did_is_no_whole_cycle() -> None:
    assert whole_cycles([turn("a", 0, 10)]) == []


def test_the_time_without_a_ready_model_counts_once() -> None:
    assert idle_share([turn("a", 0, 10), turn("b", 15, 20)]) == pytest.approx(0.25)
    assert idle_share([turn("a", 0, 10), turn("b", 5, 20)]) == 0.0


def test_the_longest_wait_for_a_token_includes_the_edges_of_the_window() -> None:
    assert longest_gap_s([3.0, 4.0, 50.0], 0.0, 10.0) == 6.0
    assert longest_gap_s([], 0.0, 10.0) == 10.0


# ---------------------------------------------------------------- streams


def stream(tokens: list[int], *, cancelled: bool = False) -> Live:
    live = Live(token_ids=tokens)
    live.was_cancelled = cancelled
    return live


def test_a_stream_is_lost_if_a_token_differs_or_if_it_ends_too_early() -> None:
    work = Work(prompt=4, answer=3)
    crowd = Crowd(["a"], work, {("a", 0): [1, 2, 3]})
    crowd.ended = [
        ("a", 0, stream([1, 2, 3])),
        ("a", 0, stream([1, 2], cancelled=True)),
        ("a", 0, stream([1, 2])),
        ("a", 0, stream([1, 2, 4])),
        ("a", 0, stream([1, 4], cancelled=True)),
    ]
    assert crowd.lost() == 3
    assert crowd.whole("a") == 2


# ---------------------------------------------------------------- memory


def look(at_s: float, reserved: dict[str, int], held: dict[str, int]) -> Look:
    return Look(at_s=at_s, budget_bytes=10, reserved=reserved, held=held)


def test_an_excess_lasts_while_the_same_model_holds_too_much() -> None:
    looks = [
        look(0.0, {"a": 5}, {"a": 6}),
        look(1.0, {"a": 5, "b": 5}, {"a": 6, "b": 6}),
        look(2.5, {"a": 7, "b": 5}, {"a": 6, "b": 6}),
        look(3.0, {"a": 7, "b": 6}, {"a": 6, "b": 6}),
    ]
    assert longest_excess_s(looks) == 1.5


def test_what_is_held_and_not_reserved_at_all_is_an_excess() -> None:
    assert longest_excess_s([look(0.0, {}, {"a": 1}), look(3.0, {}, {"a": 1})]) == 3.0


def test_one_look_over_the_budget_is_a_miss() -> None:
    watch = BudgetWatch("")
    watch.looks = [look(0.0, {"a": 5, "b": 5}, {}), look(1.0, {"a": 5, "b": 6}, {})]
    over, gives_back = watch.figures("a test")
    assert (over.found.value, over.verdict.name) == (1.0, "MISSED")
    assert gives_back.verdict.name == "KEPT"


def test_of_two_measures_of_the_budget_the_worse_counts() -> None:
    first, second = BudgetWatch(""), BudgetWatch("")
    first.looks = [look(0.0, {"a": 11}, {})]
    second.looks = [look(0.0, {"a": 5}, {}), look(0.1, {"a": 5}, {})]
    both = worse(first.figures("swaps")[0], second.figures("requests")[0])
    assert (both.found.value, both.found.low, both.runs) == (1.0, 0.0, 3)
    assert (both.verdict.name, both.note) == ("MISSED", "during swaps, and during requests")


def test_drift_compares_the_ends_and_not_single_looks() -> None:
    assert drift([100] * 50, 1000) == 0.0
    assert drift([100] * 24 + [900] + [100] * 25, 1000) == 0.0
    assert drift(list(range(100, 150)), 1000) == pytest.approx(0.04)


# ---------------------------------------------------------------- requests for many models


def test_the_caches_next_to_ours_on_a_list_that_can_be_followed_by_hand() -> None:
    wanted = list("abcdea")
    assert lru(wanted) == [False] * 6
    assert clairvoyant(wanted) == [False] * 5 + [True]


def test_nobody_hits_more_often_than_who_knows_the_future() -> None:
    for seed in range(20):
        wanted = zipf(200, seed)
        assert sum(lru(wanted)) <= sum(clairvoyant(wanted)), seed


def test_the_range_leaves_out_one_round_at_a_time() -> None:
    assert leaving_out([1, 2, 3], lambda some: float(sum(some))) == [5.0, 4.0, 3.0]
    assert leaving_out([1], lambda some: float(sum(some))) == []
