"""Test the planner and the plan: verdicts, situations, advice, needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsup.cli.commands.plan import advice
from mlxsup.protocol.cache_cost import GROWTH_TOKENS
from mlxsup.protocol.cache_layers import CacheLayers
from mlxsup.protocol.ids import ModelName, RequestKey
from mlxsup.protocol.text import GIB
from mlxsup.supervisor.core.budget import pins_problem
from mlxsup.supervisor.core.kv_budget import Row, Rows
from mlxsup.supervisor.core.life import Wait
from mlxsup.supervisor.core.memory_plan import (
    Admit,
    Evict,
    Reclaim,
    Refuse,
    Verdict,
    plan,
    verdict_on,
)
from mlxsup.supervisor.core.memory_view import (
    LoadedModel,
    LoadRequest,
    MemoryView,
    Standing,
    Urgency,
)
from mlxsup.supervisor.core.transitions import LacksMemory
from mlxsup.supervisor.memory.placement import Candidate, fit, required_bytes

from support.core.needs import GROWTH, MIB, budget, candidate, need

# Verdicts of the planner

A, B, C, NEW = map(ModelName, ("a", "b", "c", "new"))
NOW = 100.0


def held(name: ModelName, gib: float, standing: Standing, used_at: float = 0.0) -> LoadedModel:
    """A model that holds this many GiB; one that never goes gives none of them back."""
    return LoadedModel(
        name=name,
        reserved_bytes=int(gib * GIB),
        standing=standing,
        never_bytes=int(gib * GIB) if standing in (Standing.PINNED, Standing.STUCK) else 0,
        used_at=used_at,
        ripe_at=0.0,
    )


def view(residents: Sequence[LoadedModel], size: int, now: float = NOW) -> MemoryView:
    """These models under a budget of so many bytes."""
    return MemoryView(budget=budget(size), now=now, loaded={one.name: one for one in residents})


def verdict(needs_gib: int, *residents: LoadedModel) -> Verdict:
    """What follows for a model that needs so many GiB of eight."""
    wish = LoadRequest(name=NEW, needed_bytes=needs_gib * GIB, urgency=Urgency.REQUEST)
    return verdict_on(wish, view(residents, 8 * GIB))


def test_plan_evicts_no_more_than_needed() -> None:
    found = verdict(6, held(A, 1, Standing.IDLE, 1.0), held(B, 6, Standing.IDLE, 2.0))
    assert isinstance(found, Evict)
    assert found.models == (B,)
    pair = held(A, 4, Standing.IDLE), replace(held(B, 4, Standing.BUSY), spare_bytes=1)
    found = verdict(4, *pair)
    assert isinstance(found, Evict)
    assert not found.reclaims, "it fits without what the other one could give back"


def test_what_is_given_back_may_be_enough_without_what_leaves() -> None:
    leaving = held(A, 2, Standing.LEAVING)
    busy = replace(held(B, 6, Standing.BUSY), spare_bytes=4 * GIB)
    enough, too_little = verdict(4, leaving, busy), verdict(5, leaving, busy)
    assert isinstance(enough, Reclaim)
    assert isinstance(too_little, Wait)
    assert (too_little.is_under_way, too_little.reclaims) == (True, True)
    half, other = held(A, 4, Standing.LEAVING), held(B, 4, Standing.BUSY)
    without = verdict(4, half, replace(other, spare_bytes=1))
    assert isinstance(without, Wait)
    assert (without.is_under_way, without.reclaims) == (True, False), "what leaves is enough"


def test_refusal_names_its_blockers_I4() -> None:
    pinned, stuck = held(A, 3, Standing.PINNED), held(B, 2, Standing.STUCK)
    assert verdict(4, pinned, stuck, held(C, 3, Standing.IDLE)) == Refuse(
        reason="needs 4.00 GiB of 8.00 GiB: a is pinned and holds 3.00 GiB;"
        " b has a process that cannot be ended and holds 2.00 GiB",
        blockers=(A, B),
    )


def test_what_leaves_for_one_model_is_promised_to_no_other() -> None:
    leaving = held(A, 4, Standing.LEAVING)
    first, second = (
        LoadRequest(name=name, needed_bytes=4 * GIB, urgency=Urgency.REQUEST, since=since)
        for name, since in ((B, 0.0), (C, 1.0))
    )
    there = view([leaving, held(NEW, 4, Standing.BUSY)], 8 * GIB)
    steps = plan(replace(there, waiting=(second, first), free_turns=2)).steps
    lacks = {name: step.lack for name, step in steps if isinstance(step, LacksMemory)}
    reasons = {name: lack.wait.reason for name, lack in lacks.items() if lack is not None}
    assert "a is about to go" in reasons[B]
    assert "new and b are busy" in reasons[C]


def shed(*rows: Row, holds_gib: float = 6.0, room_gib: float = 5.0, kept_gib: int = 0) -> list[int]:
    """The keys of the rows that leave a model that holds more than there is room for."""
    batch = Rows(
        layers=(CacheLayers(layers=1, token_bytes=MIB),),
        bare_bytes=GIB,
        least_bytes=0,
        wanted_bytes=99 * GIB,
        kept_bytes=kept_gib * GIB,
        rows=rows,
    )
    one = replace(held(A, holds_gib, Standing.BUSY), rows=batch, is_ready=True)
    there = view([one], int(room_gib * GIB))
    assert there.budget is not None
    found = plan(replace(there, budget=replace(there.budget, is_short=True)))
    return [int(key) for _, keys, _ in found.shed for key in keys]


def row(key: int, tokens: int = 64, **more: bool) -> Row:
    return Row(float(key), RequestKey(key), tokens, may_go=True, **more)


def test_rows_of_a_pinned_model_free_nothing_that_it_keeps() -> None:
    """However few rows there are, all of its memory stays reserved."""
    assert shed(row(1), row(2)) == [2]
    assert shed(row(1), row(2), kept_gib=6) == []


def test_the_last_row_that_is_not_leaving_stays() -> None:
    assert shed(row(1, is_leaving=True), row(2)) == []


def test_a_row_frees_no_more_than_is_reserved_for_it() -> None:
    """Each takes a GiB with its growth, and the model holds half a GiB less than they need."""
    rows = [row(key, tokens=512 - GROWTH_TOKENS) for key in (1, 2, 3)]
    assert shed(*rows, holds_gib=3.5, room_gib=2.5) == [2, 3]


def test_pinned_models_must_fit_together() -> None:
    assert pins_problem({}, GIB) == ""
    assert pins_problem({A: GIB, B: GIB}, 2 * GIB) == ""
    assert pins_problem({A: GIB, B: 2 * GIB}, 2 * GIB) == (
        "the pinned models a (1.00 GiB) and b (2.00 GiB) need 3.00 GiB together, but the memory"
        " budget is 2.00 GiB; unpin one, or raise supervisor.memory_budget"
    )


@st.composite
def one_resident(draw: st.DrawFn) -> LoadedModel:
    reserved_bytes = draw(st.integers(1, 10))
    standing = draw(st.sampled_from(Standing))
    least = {Standing.PINNED: 1, Standing.STUCK: reserved_bytes}.get(standing)
    never_bytes = 0 if least is None else draw(st.integers(least, reserved_bytes))
    return LoadedModel(
        name=draw(st.sampled_from([A, B, C, *map(ModelName, "defgh")])),
        reserved_bytes=reserved_bytes,
        standing=standing,
        never_bytes=never_bytes,
        spare_bytes=draw(st.integers(0, reserved_bytes - never_bytes)),
        used_at=float(draw(st.integers(0, 99))),
        ripe_at=float(draw(st.integers(50, 150))),
    )


residents = st.lists(one_resident(), unique_by=lambda resident: resident.name)


@hypothesis.settings(max_examples=40)
@given(
    needed=st.integers(0, 30),
    urgency=st.sampled_from(Urgency),
    others=residents,
    size=st.integers(0, 40),
)
def test_any_verdict_keeps_the_rules_H9_I2(
    needed: int, urgency: Urgency, others: Sequence[LoadedModel], size: int
) -> None:
    request = LoadRequest(name=NEW, needed_bytes=needed, urgency=urgency)
    found = verdict_on(request, view(others, size))
    by_name = {resident.name: resident for resident in others}
    everything = sum(resident.reserved_bytes for resident in others)
    leaving = sum(one.reserved_bytes for one in others if one.is_leaving)
    least = sum(one.least_bytes for one in others if not one.is_leaving)
    never = sum(resident.never_bytes for resident in others)
    assert isinstance(found, Admit) == (everything + needed <= size)
    match found:
        case Reclaim():
            assert leaving + least + needed <= size
        case Evict(models=names):
            gone = [by_name[name] for name in names]
            freed = sum(resident.least_bytes for resident in gone)
            assert all(resident.standing is Standing.IDLE for resident in gone)
            assert least - freed + needed <= size
            for one in gone:
                assert least - freed + one.least_bytes + needed > size
            assert urgency is not Urgency.NONE
            if urgency is Urgency.REQUEST:
                assert all(resident.ripe_at <= NOW for resident in gone)
        case Wait(until=until, is_under_way=is_under_way):
            assert until is None or until > NOW
            assert is_under_way == (least + needed <= size)
            assert never + needed <= size or urgency is Urgency.NONE
        case Refuse():
            assert never + needed > size
            assert urgency is not Urgency.NONE


# Which models fit together

ROW = GROWTH + 1024 * MIB
"""What a row of 1024 tokens takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """A configuration, and what its plan says.

    Attributes:
        models: in the order of the file.
        budget_bytes: what they may take together.
        automatic: what the machine would allow, if the configuration allows something else.
        loaded: the letters of those that are loaded at the same time.
        goes: the letters of those that have to go for the others.
        missing: by model, what it lacks even alone.
        contexts: tokens of the longest row, by model.
        change: words of the advice; empty if everything fits.
    """

    models: list[Candidate]
    budget_bytes: int
    loaded: str
    contexts: dict[str, int]
    change: str = ""
    automatic: int | None = None
    goes: dict[str, str] = field(default_factory=dict)
    missing: dict[str, int] = field(default_factory=dict)


LONG = need(GIB, least=1024, context=8192, rows=2)
"""Reserved for 1024 tokens, as a model without `context_length`; takes up to 8192."""
SITUATIONS = {
    "one model with room to spare": Situation(
        models=[candidate("a", LONG)], budget_bytes=64 * GIB,
        loaded="a", contexts={"a": 8192},
    ),
    "one model whose whole context does not fit": Situation(
        models=[candidate("a", LONG)], budget_bytes=GIB + GROWTH + 3000 * MIB,
        loaded="a", contexts={"a": 3000},
    ),
    "two models that share what is left": Situation(
        models=[candidate("a", LONG), candidate("b", LONG)],
        budget_bytes=2 * (GIB + GROWTH + 2000 * MIB),
        loaded="ab", contexts={"a": 2000, "b": 2000},
    ),
    "a small one leaves its part of the rest to the large one": Situation(
        models=[candidate("a", LONG), candidate("b", need(GIB, rows=1))],
        budget_bytes=2 * (GIB + GROWTH) + (1024 + 4000) * MIB,
        loaded="ab", contexts={"a": 4000, "b": 1024},
    ),
    "a model on request next to the others": Situation(
        models=[candidate("a", need()), candidate("b", need(), is_resident=False)],
        budget_bytes=8 * GIB,
        loaded="a", contexts={"a": 1024, "b": 1024}, goes={"b": ""},
    ),
    "a model on request in place of another": Situation(
        models=[candidate("a", need()), candidate("b", need(2 * GIB), is_resident=False)],
        budget_bytes=4 * GIB,
        loaded="a", contexts={"a": 1024, "b": 1024}, goes={"b": "a"},
    ),
    "a model on request in place of the one that is large enough": Situation(
        models=[
            candidate("a", need(GIB)),
            candidate("b", need(3 * GIB)),
            candidate("c", need(4 * GIB), is_resident=False),
        ],
        budget_bytes=2 * ROW + 5 * GIB,
        loaded="ab", contexts={"a": 1024, "b": 1024, "c": 1024}, goes={"c": "b"},
    ),
    "a budget below what the machine allows": Situation(
        models=[candidate("a", need()), candidate("b", need())],
        budget_bytes=3 * GIB, automatic=12 * GIB,
        loaded="a", contexts={"a": 1024, "b": 1024}, goes={"b": "a"},
        change='set memory_budget to at least "4.50 GiB"',
    ),
    "a shorter context for the model with the longest": Situation(
        models=[candidate("a", need(GIB, least=4096)), candidate("b", need(GIB, least=1024))],
        budget_bytes=2 * (GIB + GROWTH) + (1024 + 2100) * MIB,
        loaded="a", contexts={"a": 4096, "b": 1024},
        goes={"b": "a"},
        change="set a smaller context_length for a, or set preload = false for some",
    ),
    "a budget that the machine cannot raise far enough": Situation(
        models=[candidate("a", need(2 * GIB)), candidate("b", need(2 * GIB))],
        budget_bytes=4 * GIB, automatic=6 * GIB,
        loaded="a", contexts={"a": 1024, "b": 1024}, goes={"b": "a"},
        change="they need 6.50 GiB, but the budget is 4.00 GiB; a is the largest",
    ),
    "a memory that is larger than needed": Situation(
        models=[candidate("a", need(GIB, given=6 * GIB)), candidate("b", need(2 * GIB))],
        budget_bytes=8 * GIB,
        loaded="a", contexts={"a": 1024, "b": 1024}, goes={"b": "a"},
        change='set memory = "auto" for a, or set preload = false for some, which',
    ),
    "a model that is too large for the machine": Situation(
        models=[candidate("a", need(GIB)), candidate("b", need(9 * GIB))], budget_bytes=8 * GIB,
        loaded="a", contexts={"a": 1024, "b": 0}, missing={"b": 2 * GIB + GROWTH},
        change="remove b: it alone needs 10.25 GiB, but the budget is 8.00 GiB",
    ),
    "a model that is too large with this context": Situation(
        models=[candidate("a", need(7 * GIB, least=4096))], budget_bytes=8 * GIB,
        loaded="", contexts={"a": 768}, missing={"a": 3 * GIB + GROWTH},
        change="set a smaller context_length for a, or remove a: it alone needs",
    ),
    "two models that are too large for the machine": Situation(
        models=[candidate("a", need(9 * GIB)), candidate("b", need(10 * GIB))],
        budget_bytes=8 * GIB,
        loaded="", contexts={"a": 0, "b": 0},
        missing={"a": 2 * GIB + GROWTH, "b": 3 * GIB + GROWTH},
        change="remove b: it alone needs 11.25 GiB",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SITUATIONS)
def test_a_situation(name: str) -> None:
    one = SITUATIONS[name]
    made = fit(one.models, budget(one.budget_bytes))
    placed = {place.model: place for place in made.placements}
    assert "".join(name for name, place in placed.items() if place.is_placed) == one.loaded
    assert {name: place.context_tokens for name, place in placed.items()} == one.contexts
    others = [name for name, place in placed.items() if not place.is_placed]
    goes = {name: "".join(placed[name].goes) for name in others if name not in one.missing}
    assert goes == one.goes
    found = {name: place.missing_bytes for name, place in placed.items() if place.missing_bytes}
    assert found == one.missing
    assert made.is_complete == (one.change == "")
    assert one.change in advice(one.models, budget(one.budget_bytes, one.automatic))


needs = st.builds(
    need,
    fixed=st.integers(0, 64).map(lambda quarters: quarters * GIB // 4),
    least=st.integers(1, 8192),
    context=st.just(0) | st.integers(2, 32).map(lambda count: count * 4096),
    rows=st.integers(1, 16),
    given=st.none() | st.integers(1, 32 * GIB),
)


@st.composite
def configurations(draw: st.DrawFn) -> list[Candidate]:
    count = draw(st.integers(0, 6))
    return [
        candidate(name, draw(needs), is_resident=draw(st.booleans())) for name in "abcdef"[:count]
    ]


@hypothesis.settings(max_examples=40)
@given(models=configurations(), pinned=st.sets(st.sampled_from("abc")))
def test_the_required_budget_is_enough_and_a_byte_less_is_not(
    models: list[Candidate], pinned: set[str]
) -> None:
    models = [replace(one, is_pinned=one.model in pinned) for one in models]
    required = required_bytes(models)
    assert fit(models, budget(required)).is_complete
    assert required == 0 or not fit(models, budget(required - 1)).is_complete


# Pinned models in a plan


def sized(name: str, size: int, **more: bool) -> Candidate:
    """A model of so many GiB."""
    return candidate(name, need(size * GIB, layers=()), **more)


def test_a_pinned_model_does_not_go_for_another_one() -> None:
    models = [sized("p", 4, is_pinned=True), sized("q", 2, is_resident=False)]
    made = fit(models, budget(5 * GIB))
    p, q = made.placements
    assert (p.is_placed, q.is_placed, q.goes, q.missing_bytes) == (True, False, (), GIB)
    assert not made.is_complete
    assert "pinned = false" in advice(models, budget(5 * GIB))


def test_a_pinned_model_has_its_memory_before_those_that_stand_above_it() -> None:
    models = [sized("q", 2), sized("p", 4, is_pinned=True)]
    q, p = fit(models, budget(5 * GIB)).placements
    assert (q.is_placed, p.is_placed) == (False, True)


def test_a_pinned_model_keeps_its_memory_while_it_is_not_loaded() -> None:
    models = [sized("p", 4, is_pinned=True, is_resident=False), sized("q", 2)]
    made = fit(models, budget(5 * GIB))
    p, q = made.placements
    assert (p.is_placed, p.goes, p.missing_bytes) == (False, (), 0)
    assert (q.is_placed, q.missing_bytes) == (False, GIB)
    assert made.reserved_bytes == 4 * GIB


# Needs counted from cache layers


def test_the_rows_in_so_much_memory() -> None:
    one = need(GIB, rows=4)
    row = GROWTH + 512 * MIB
    assert one.rows_in(GIB + 3 * row - 1, longest=512) == 2
    assert one.rows_in(GIB + 9 * row, longest=512) == 4
    assert one.rows_in(GIB - 1, longest=512) == 0
    assert one.rows_in(99 * GIB, longest=0) == 0
    assert need(GIB, rows=4, layers=()).rows_in(GIB, longest=512) == 4
