"""A plan keeps the memory of pinned models for them, as the daemon does."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mlxsup.supervisor.core.memory.change import RaiseBudget, Unpin, apply_change, find_change
from mlxsup.supervisor.core.memory.plan import Candidate, make_plan
from mlxsup.supervisor.core.memory.planner import (
    Admit,
    Evict,
    Refuse,
    Resident,
    Standing,
    Urgency,
    Wish,
    plan,
)

from support.needs import GIB, budget, candidate, need


def sized(name: str, size: int, **more: bool) -> Candidate:
    """A model of so many GiB."""
    return candidate(name, need(size * GIB, layers=()), **more)


def test_a_pinned_model_does_not_go_for_another_one() -> None:
    models = [sized("p", 4, is_pinned=True), sized("q", 2, is_resident=False)]
    made = make_plan(models, 5 * GIB)
    p, q = made.placements
    assert (p.is_placed, q.is_placed, q.goes, q.missing_bytes) == (True, False, (), GIB)
    assert not made.fits
    assert find_change(models, budget(5 * GIB, 9 * GIB)) == RaiseBudget(size_bytes=6 * GIB)


def test_a_pinned_model_has_its_memory_before_those_that_stand_above_it() -> None:
    models = [sized("q", 2), sized("p", 4, is_pinned=True)]
    q, p = make_plan(models, 5 * GIB).placements
    assert (q.is_placed, p.is_placed) == (False, True)


def test_a_pinned_model_keeps_its_memory_while_it_is_not_loaded() -> None:
    models = [sized("p", 4, is_pinned=True, is_resident=False), sized("q", 2)]
    made = make_plan(models, 5 * GIB)
    p, q = made.placements
    assert (p.is_placed, p.goes, p.missing_bytes) == (False, (), 0)
    assert (q.is_placed, q.missing_bytes) == (False, GIB)
    assert made.reserved_bytes == 4 * GIB


def test_others_go_for_one_that_is_not_pinned() -> None:
    models = [sized("p", 2, is_pinned=True), sized("q", 2), sized("r", 3, is_resident=False)]
    assert make_plan(models, 5 * GIB).placements[2].goes == ("q",)


pins = st.lists(st.tuples(st.integers(1, 8), st.booleans(), st.booleans()), max_size=5)


@given(pins, st.integers(1, 20), st.none() | st.integers(0, 20))
def test_the_plan_and_the_daemon_agree_and_a_change_makes_everything_fit(
    sizes: list[tuple[int, bool, bool]], size: int, more: int | None
) -> None:
    models = [
        sized(name, needed, is_resident=is_resident, is_pinned=is_pinned)
        for name, (needed, is_resident, is_pinned) in zip("abcde", sizes, strict=False)
    ]
    pinned = [one for one in models if one.is_pinned]
    if sum(one.need.needed_bytes for one in pinned) > size * GIB:
        return  # refused at the start
    for one, place in zip(models, make_plan(models, size * GIB).placements, strict=True):
        residents = [
            Resident(
                name=other.model,
                reserved_bytes=other.need.needed_bytes,
                standing=Standing.PINNED,
                never_bytes=other.need.needed_bytes,
            )
            for other in pinned
            if other is not one
        ]
        wish = Wish(name=one.model, needed_bytes=one.need.needed_bytes, urgency=Urgency.COMMAND)
        verdict = plan(wish, residents, budget_bytes=size * GIB, now=0.0)
        is_refused = isinstance(verdict, Refuse)
        if not one.is_resident:
            assert is_refused is bool(place.missing_bytes)
        assert not (is_refused and place.is_placed)
        assert not {other.model for other in pinned} & set(place.goes)
    available = budget(size * GIB, None if more is None else (size + more) * GIB)
    change = find_change(models, available)
    if change is not None:
        assert make_plan(*apply_change(change, models, size * GIB)).fits


crowds = st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=2, max_size=4)


@given(crowds, st.integers(1, 8), st.integers(4, 16))
def test_who_goes_by_the_plan_is_whom_the_daemon_evicts(
    sizes: list[tuple[int, bool]], wanted: int, size: int
) -> None:
    """If everything that the plan loads is there, and was used in the order of the entries."""
    models = [
        sized(name, needed, is_pinned=is_pinned)
        for name, (needed, is_pinned) in zip("abcd", sizes, strict=False)
    ]
    models.append(sized("x", wanted, is_resident=False))
    placements = make_plan(models, size * GIB).placements
    residents = [
        Resident(
            name=one.model,
            reserved_bytes=one.need.needed_bytes,
            standing=Standing.PINNED if one.is_pinned else Standing.IDLE,
            never_bytes=one.need.needed_bytes if one.is_pinned else 0,
            used_at=float(number),
        )
        for number, (one, place) in enumerate(zip(models, placements, strict=True))
        if place.is_placed or one.is_pinned
    ]
    if sum(one.reserved_bytes for one in residents) > size * GIB:
        return  # the pinned ones alone are refused at the start
    wish = Wish(name=models[-1].model, needed_bytes=wanted * GIB, urgency=Urgency.COMMAND)
    verdict, place = plan(wish, residents, budget_bytes=size * GIB, now=0.0), placements[-1]
    if place.missing_bytes:
        assert isinstance(verdict, Refuse)
    elif place.goes:
        assert isinstance(verdict, Evict)
        assert verdict.models == place.goes
    else:
        assert verdict == Admit()


def test_to_unpin_is_advice() -> None:
    models = [sized("p", 4, is_pinned=True), sized("q", 2, is_resident=False)]
    change = find_change(models, budget(5 * GIB))
    assert change == Unpin(models=(models[0].model,))
    assert str(change) == "set pinned = false for p"
