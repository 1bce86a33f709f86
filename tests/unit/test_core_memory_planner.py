"""The verdicts of the planner: who goes for a load, what it waits for, and why it is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.text import GIB
from mlxsup.supervisor.core.memory.pins import pins_problem
from mlxsup.supervisor.core.memory.planner import (
    Admit,
    Evict,
    GiveBack,
    Refuse,
    Resident,
    Standing,
    Urgency,
    Verdict,
    Wait,
    Wish,
    give_back,
    plan,
)
from mlxsup.supervisor.core.memory.sentences import is_or_are

A, B, C, NEW = map(ModelName, ("a", "b", "c", "new"))
NOW = 100.0


def held(
    name: ModelName,
    gib: float,
    standing: Standing = Standing.IDLE,
    *,
    used_at: float = 0.0,
    ripe_at: float = 0.0,
) -> Resident:
    """A model that holds this many GiB; one that never goes gives none of them back."""
    return Resident(
        name=name,
        reserved_bytes=int(gib * GIB),
        standing=standing,
        never_bytes=int(gib * GIB) if standing in (Standing.PINNED, Standing.STUCK) else 0,
        used_at=used_at,
        ripe_at=ripe_at,
    )


def verdict(
    needs_gib: float,
    *residents: Resident,
    urgency: Urgency = Urgency.REQUEST,
    budget_gib: float = 8,
) -> Verdict:
    """What follows for a model that needs so many GiB."""
    wish = Wish(name=NEW, needed_bytes=int(needs_gib * GIB), urgency=urgency)
    return plan(wish, residents, budget_bytes=int(budget_gib * GIB), now=NOW)


def test_what_fits_is_let_in_to_the_last_byte_I2() -> None:
    assert verdict(4, held(A, 4)) == Admit()
    assert verdict(4.001, held(A, 4)) != Admit()


def test_the_least_recently_used_goes_first() -> None:
    a, b, c = held(A, 2, used_at=3.0), held(B, 2, used_at=1.0), held(C, 2, used_at=2.0)
    found = verdict(4, a, b, c)
    assert isinstance(found, Evict)
    assert found.models == (B,)
    found = verdict(6, a, b, c)
    assert isinstance(found, Evict)
    assert found.models == (B, C)
    assert found.reason == "needs 6.00 GiB, 2.00 GiB is free: b and c are idle"


def test_nobody_goes_whose_going_is_not_needed() -> None:
    found = verdict(6, held(A, 1, used_at=1.0), held(B, 6, used_at=2.0))
    assert isinstance(found, Evict)
    assert found.models == (B,)


def test_nobody_goes_if_that_is_not_enough_H9() -> None:
    found = verdict(6, held(A, 3), held(B, 5, Standing.BUSY))
    assert found == Wait(reason="needs 6.00 GiB, 0.0 MiB is free: b is busy")


def test_a_request_waits_until_enough_models_are_ripe() -> None:
    early = held(A, 4, used_at=99.0, ripe_at=105.0)
    late = held(B, 4, used_at=98.0, ripe_at=110.0)
    assert verdict(4, early, late) == Wait(
        reason="needs 4.00 GiB, 0.0 MiB is free: a is idle, but not for long enough", until=105.0
    )
    found = verdict(8, early, late)
    assert isinstance(found, Wait)
    assert found.until == 110.0


def test_a_command_waits_for_no_model_to_ripen() -> None:
    unripe = held(A, 8, used_at=99.0, ripe_at=105.0)
    found = verdict(4, unripe, urgency=Urgency.COMMAND)
    assert isinstance(found, Evict)
    assert found.models == (A,)


def test_a_preload_evicts_nobody() -> None:
    assert verdict(4, held(A, 8), urgency=Urgency.NOBODY) == Wait(
        reason="needs 4.00 GiB, 0.0 MiB is free: only a request or a load of it makes others go"
    )


def test_what_is_about_to_go_is_waited_for_and_nobody_else_goes() -> None:
    found = verdict(4, held(A, 4, Standing.LEAVING), held(B, 4))
    assert found == Wait(
        reason="needs 4.00 GiB, 0.0 MiB is free: a is about to go", is_under_way=True
    )


def test_what_an_ending_process_gives_back_is_waited_for_and_nobody_is_asked() -> None:
    """It is wanted again, and the next one needs 2 of its 6 GiB."""
    ending = replace(held(A, 6, Standing.BUSY), spare_bytes=4 * GIB, is_ending=True)
    waits = Wait(reason="needs 6.00 GiB, 2.00 GiB is free: a is about to go", is_under_way=True)
    assert verdict(6, ending) == waits
    giving = replace(held(B, 2, Standing.BUSY), spare_bytes=GIB)
    assert verdict(5, ending, giving) == Wait(
        reason="needs 5.00 GiB, 0.0 MiB is free: a is about to go",
        is_under_way=True,
        takes_spare=True,
    )
    less, more = replace(ending, reserved_bytes=4 * GIB, spare_bytes=GIB), held(B, 4, Standing.BUSY)
    found = verdict(2, less, replace(more, spare_bytes=3 * GIB))
    assert isinstance(found, GiveBack), "what the other gives back is enough"


def test_a_model_that_leaves_counts_until_it_is_gone_I2() -> None:
    assert verdict(4, held(A, 5, Standing.LEAVING)) != Admit()


def test_a_model_larger_than_the_budget_is_refused_with_both_sizes_I4() -> None:
    assert verdict(9, held(A, 1)) == Refuse(
        reason="needs 9.00 GiB, and the memory budget is 8.00 GiB", blockers=()
    )


def test_a_refusal_names_what_would_have_to_go_and_why_it_stays_I4() -> None:
    pinned, stuck = held(A, 3, Standing.PINNED), held(B, 2, Standing.STUCK)
    assert verdict(4, pinned, stuck, held(C, 3)) == Refuse(
        reason="needs 4.00 GiB of 8.00 GiB: a is pinned and holds 3.00 GiB;"
        " b has a process that cannot be ended and holds 2.00 GiB",
        blockers=(A, B),
    )


def test_what_rows_of_a_pinned_model_take_is_waited_for() -> None:
    pinned = replace(held(A, 6, Standing.PINNED), never_bytes=3 * GIB)
    assert verdict(5, pinned, held(B, 1, Standing.BUSY)) == Wait(
        reason="needs 5.00 GiB, 1.00 GiB is free: b is busy; a is pinned and holds 6.00 GiB for now"
    )
    giving = replace(pinned, spare_bytes=2 * GIB)
    assert isinstance(verdict(4, giving), GiveBack)
    assert verdict(5, giving) == Wait(
        reason="needs 5.00 GiB, 2.00 GiB is free: a is pinned and holds 4.00 GiB for now"
    )
    found = verdict(6, pinned)
    assert isinstance(found, Refuse)
    assert found.reason == "needs 6.00 GiB of 8.00 GiB: a is pinned and holds 3.00 GiB"


def test_a_preload_that_can_never_fit_waits_and_says_so() -> None:
    assert verdict(9, urgency=Urgency.NOBODY) == Wait(
        reason="needs 9.00 GiB, and the memory budget is 8.00 GiB"
    )


def test_beyond_the_budget_idle_models_go_until_it_holds() -> None:
    a, b, c = held(A, 4, used_at=2.0), held(B, 4, used_at=1.0), held(C, 4, Standing.BUSY)
    assert give_back([a, b, c], budget_bytes=12 * GIB) == ()
    assert give_back([a, b, c], budget_bytes=8 * GIB) == (B,)
    assert give_back([a, b, c], budget_bytes=4 * GIB) == (B, A)
    assert give_back([a, b, c], budget_bytes=2 * GIB) == (B, A), "what there is"
    leaving = held(B, 4, Standing.LEAVING)
    assert give_back([a, leaving, c], budget_bytes=8 * GIB) == (), "it is under way"
    assert give_back([held(A, 9, Standing.PINNED)], budget_bytes=8 * GIB) == ()


def test_names_are_listed_with_their_verb() -> None:
    assert is_or_are(["a"]) == "a is"
    assert is_or_are(["a", "b"]) == "a and b are"
    assert is_or_are(["a", "b", "c"]) == "a, b and c are"


def test_pinned_models_must_fit_together() -> None:
    assert pins_problem({}, GIB) == ""
    assert pins_problem({A: GIB, B: GIB}, 2 * GIB) == ""
    assert pins_problem({A: GIB, B: 2 * GIB}, 2 * GIB) == (
        "the pinned models a (1.00 GiB) and b (2.00 GiB) need 3.00 GiB together, and the memory"
        " budget is 2.00 GiB: unpin one, or raise supervisor.memory_budget"
    )


# ---------------------------------------------------------------- whatever there is

patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def one_resident(draw: st.DrawFn) -> Resident:
    reserved_bytes = draw(st.integers(1, 10))
    standing = draw(st.sampled_from(Standing))
    least = {Standing.PINNED: 1, Standing.STUCK: reserved_bytes}.get(standing)
    return Resident(
        name=draw(st.sampled_from([A, B, C, *map(ModelName, "defgh")])),
        reserved_bytes=reserved_bytes,
        standing=standing,
        never_bytes=0 if least is None else draw(st.integers(least, reserved_bytes)),
        used_at=float(draw(st.integers(0, 99))),
        ripe_at=float(draw(st.integers(50, 150))),
    )


residents = st.lists(one_resident(), unique_by=lambda resident: resident.name)


@patient
@given(
    needed=st.integers(0, 30),
    urgency=st.sampled_from(Urgency),
    others=residents,
    budget=st.integers(0, 40),
)
def test_any_verdict_keeps_the_rules_H9_I2(
    needed: int, urgency: Urgency, others: Sequence[Resident], budget: int
) -> None:
    found = plan(
        Wish(name=NEW, needed_bytes=needed, urgency=urgency),
        others,
        budget_bytes=budget,
        now=NOW,
    )
    by_name = {resident.name: resident for resident in others}
    everything = sum(resident.reserved_bytes for resident in others)
    leaving = sum(r.reserved_bytes for r in others if r.standing is Standing.LEAVING)
    never = sum(resident.never_bytes for resident in others)
    match found:
        case Admit():
            assert everything + needed <= budget
        case Evict(models=names):
            gone = [by_name[name] for name in names]
            freed = sum(resident.reserved_bytes for resident in gone)
            assert all(resident.standing is Standing.IDLE for resident in gone)
            assert everything - leaving - freed + needed <= budget
            for one in gone:
                assert everything - leaving - freed + one.reserved_bytes + needed > budget
            assert urgency is not Urgency.NOBODY
            if urgency is Urgency.REQUEST:
                assert all(resident.ripe_at <= NOW for resident in gone)
        case Wait(until=until, is_under_way=is_under_way):
            assert everything + needed > budget
            assert until is None or until > NOW
            assert is_under_way == (everything - leaving + needed <= budget)
            assert never + needed <= budget or urgency is Urgency.NOBODY
        case Refuse():
            assert never + needed > budget
            assert urgency is not Urgency.NOBODY


@patient
@given(others=residents, budget=st.integers(0, 40))
def test_giving_back_takes_idle_models_only_and_no_more_than_needed(
    others: Sequence[Resident], budget: int
) -> None:
    names = give_back(others, budget_bytes=budget)
    by_name = {resident.name: resident for resident in others}
    gone = [by_name[name] for name in names]
    staying = sum(r.reserved_bytes for r in others if r.standing is not Standing.LEAVING)
    left = staying - sum(resident.reserved_bytes for resident in gone)
    assert all(resident.standing is Standing.IDLE for resident in gone)
    idle = [resident for resident in others if resident.standing is Standing.IDLE]
    assert left <= budget or len(gone) == len(idle)
    assert all(left + one.reserved_bytes > budget for one in gone)
