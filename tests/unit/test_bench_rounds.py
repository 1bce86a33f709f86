"""The order of the sides in the rounds of a benchmark."""

from __future__ import annotations

from bench.rounds import order_in_round


def test_each_side_has_each_place_once_in_as_many_rounds_as_there_are_sides() -> None:
    rounds = [order_in_round("abc", repeat) for repeat in range(3)]
    assert [set(places) for places in zip(*rounds, strict=True)] == [set("abc")] * 3
    assert {len(one) for one in rounds} == {3}
    assert order_in_round("abc", 3) == rounds[0]
