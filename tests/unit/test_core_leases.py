"""Leases that go round: how many are out, who is next, and that whoever asks gets one."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mlxsup.protocol.ids import ModelName
from mlxsup.supervisor.core.sharing.leases import LEASE_S, Leases, Stage
from mlxsup.worker.engines.mlx.prefill import IDLE_TARGET_S

A, B, C, D = (ModelName(name) for name in "abcd")
NAMES = (A, B, C, D)


def equal(name: ModelName) -> int:
    return 0


def asked(*names: ModelName) -> Leases:
    leases = Leases()
    for name in names:
        assert leases.ask(name)
    return leases


def test_a_lease_lasts_twice_as_long_as_a_chunk_should_take() -> None:
    assert LEASE_S == 4.0 == 2 * IDLE_TARGET_S


def test_leases_are_needed_by_more_readers_than_may_read() -> None:
    leases = Leases()
    assert leases.reads(A, is_reading=True)
    assert not leases.reads(A, is_reading=True), "nothing new"
    assert not leases.are_needed(1)
    assert leases.reads(B, is_reading=True)
    assert leases.are_needed(1)
    assert not leases.are_needed(2)
    assert not leases.are_needed(None)
    assert leases.reads(A, is_reading=False)
    assert not leases.are_needed(1)
    assert not leases.reads(A, is_reading=False), "nothing new"


def test_two_that_ask_again_after_each_chunk_take_turns() -> None:
    leases = asked(A, B)
    turns = []
    for _ in range(6):
        [name] = leases.grant(1, equal, 0.0)
        turns.append(name)
        assert leases.give_back(name)
        assert leases.ask(name)
    assert turns == [A, B, A, B, A, B]


def test_a_higher_class_is_first_and_its_equals_in_the_order_of_asking() -> None:
    leases = asked(A, B, C, D)
    ranks = {A: 2, B: 1, C: 0, D: 1}
    turns = []
    for _ in range(4):
        [name] = leases.grant(1, ranks.__getitem__, 0.0)
        turns.append(name)
        leases.give_back(name)
    assert turns == [C, B, D, A]


def test_as_many_as_the_limit_says_have_one() -> None:
    leases = asked(A, B, C)
    assert leases.grant(2, equal, 0.0) == [A, B]
    assert leases.grant(2, equal, 0.0) == []
    assert leases.give_back(B)
    assert leases.grant(2, equal, 0.0) == [C]
    assert leases.stage(B) is Stage.READS


def test_without_a_limit_everybody_has_one() -> None:
    assert asked(A, B, C).grant(None, equal, 0.0) == [A, B, C]


def test_a_lower_limit_takes_none_away_and_grants_none() -> None:
    leases = asked(A, B, C)
    leases.grant(2, equal, 0.0)
    leases.give_back(A)
    assert leases.grant(1, equal, 0.0) == []
    leases.give_back(B)
    assert leases.grant(1, equal, 0.0) == [C]


def test_who_waits_or_has_a_lease_asks_for_no_other() -> None:
    leases = asked(A)
    assert not leases.ask(A)
    leases.grant(1, equal, 0.0)
    assert not leases.ask(A)
    leases.expire(LEASE_S)
    assert not leases.ask(A)
    assert leases.give_back(A)
    assert leases.ask(A)


def test_only_a_lease_that_was_granted_is_given_back() -> None:
    leases = Leases()
    assert not leases.give_back(A)
    leases.reads(A, is_reading=True)
    assert not leases.give_back(A)
    leases.ask(A)
    assert not leases.give_back(A)
    leases.grant(1, equal, 0.0)
    assert leases.give_back(A)
    assert not leases.give_back(A)


def test_who_has_asked_takes_part_until_the_lease_is_given_back() -> None:
    leases = asked(A)
    assert not leases.reads(A, is_reading=False), "its prompt was cancelled"
    assert leases.grant(1, equal, 0.0) == [A]
    assert not leases.reads(A, is_reading=False)
    assert A in leases
    leases.give_back(A)
    assert leases.reads(A, is_reading=False)
    assert A not in leases


def test_a_chunk_that_outlasts_its_lease_holds_nobody_up_and_ends_like_any_other() -> None:
    leases = asked(A, B)
    leases.grant(1, equal, 10.0)
    assert leases.until(A) == 10.0 + LEASE_S
    leases.expire(10.0 + LEASE_S - 0.001)
    assert leases.grant(1, equal, 13.0) == []
    leases.expire(10.0 + LEASE_S)
    assert (leases.stage(A), leases.until(A)) == (Stage.OUTLASTS, None)
    assert leases.grant(1, equal, 14.0) == [B]
    assert leases.are_needed(1), "both read"
    assert leases.give_back(A)


def test_who_ends_frees_its_lease_and_asks_no_longer() -> None:
    leases = asked(A, B, C)
    leases.grant(1, equal, 0.0)
    leases.drop(B)
    leases.drop(A)
    assert leases.grant(1, equal, 0.0) == [C]
    leases.drop(A)


@pytest.mark.parametrize("limit", [1, None])
def test_a_model_that_waits_for_a_free_lease_is_a_contradiction(limit: int | None) -> None:
    leases = asked(A)
    with pytest.raises(AssertionError):
        leases.check_invariants([A], limit)
    leases.grant(1, equal, 0.0)
    leases.check_invariants([A], limit)
    with pytest.raises(AssertionError):
        leases.check_invariants([], limit)


names = st.sampled_from(NAMES)


class Round(RuleBasedStateMachine):
    """Leases next to the books that a reader would keep of them."""

    def __init__(self) -> None:
        super().__init__()
        self.leases = Leases()
        self.limit = 1
        self.now = 0.0
        self.ranks = dict.fromkeys(NAMES, 0)
        self.line: list[ModelName] = []
        self.out: dict[ModelName, float] = {}
        self.late: set[ModelName] = set()

    @initialize(ranks=st.lists(st.integers(0, 2), min_size=4, max_size=4))
    def rank(self, ranks: list[int]) -> None:
        self.ranks = dict(zip(NAMES, ranks, strict=True))

    @rule(name=names)
    def ask(self, name: ModelName) -> None:
        is_new = name not in self.line and name not in self.out and name not in self.late
        assert self.leases.ask(name) is is_new
        if is_new:
            self.line.append(name)
        self.grant()

    @rule(name=names, is_reading=st.booleans())
    def read(self, name: ModelName, is_reading: bool) -> None:
        self.leases.reads(name, is_reading=is_reading)
        self.grant()

    @rule(name=names)
    def give_back(self, name: ModelName) -> None:
        assert self.leases.give_back(name) is (name in self.out or name in self.late)
        self.out.pop(name, None)
        self.late.discard(name)
        self.grant()

    @rule(name=names)
    def die(self, name: ModelName) -> None:
        self.leases.drop(name)
        self.out.pop(name, None)
        self.late.discard(name)
        if name in self.line:
            self.line.remove(name)
        self.grant()

    @rule(seconds=st.sampled_from([0.5, LEASE_S - 0.5, LEASE_S]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.late |= {name for name, until in self.out.items() if until <= self.now}
        self.out = {name: until for name, until in self.out.items() if until > self.now}
        self.leases.expire(self.now)
        self.grant()

    @rule(limit=st.integers(1, 3))
    def change_limit(self, limit: int) -> None:
        self.limit = limit
        self.grant()

    def grant(self) -> list[ModelName]:
        before = dict(self.out)
        granted = self.leases.grant(self.limit, self.ranks.__getitem__, self.now)
        for name in granted:
            behind = [other for other in self.line if other not in granted]
            assert all(self.ranks[name] <= self.ranks[other] for other in behind), "class"
            equals = self.line[: self.line.index(name)]
            assert all(self.ranks[o] != self.ranks[name] or o in granted for o in equals), "order"
        assert len(self.out) + len(granted) <= max(self.limit, len(before)), "too many are out"
        self.line = [name for name in self.line if name not in granted]
        self.out |= dict.fromkeys(granted, self.now + LEASE_S)
        assert not self.line or len(self.out) >= self.limit, "one waits for nothing"
        return granted

    @invariant()
    def agrees(self) -> None:
        self.leases.check_invariants(NAMES, self.limit)
        for name in NAMES:
            stage = self.leases.stage(name)
            assert (stage is Stage.WAITS) is (name in self.line)
            assert (stage is Stage.HOLDS) is (name in self.out)
            assert (stage is Stage.OUTLASTS) is (name in self.late)
            assert self.leases.until(name) == self.out.get(name)

    def teardown(self) -> None:
        """Once nobody asks again, everybody who waits gets a lease."""
        for _ in range(len(NAMES)):
            for name in list(self.out):
                self.give_back(name)
        assert not self.line


TestRound = Round.TestCase
