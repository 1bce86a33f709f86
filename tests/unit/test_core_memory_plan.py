"""Which models fit together, and which change makes them fit: situations, then all of them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsup.supervisor.core.memory.change import (
    Change,
    LoadOnRequest,
    LowerContext,
    apply_change,
    find_change,
    required_bytes,
)
from mlxsup.supervisor.core.memory.need import Need
from mlxsup.supervisor.core.memory.plan import Candidate, make_plan

from support.needs import GIB, GROWTH, MIB, budget, candidate, need

ROW = GROWTH + 1024 * MIB
"""What a row of 1024 tokens takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """A configuration, and what its plan says.

    Attributes:
        name: of the test.
        models: in the order of the file.
        budget_bytes: what they may take together.
        automatic_bytes: what the machine would allow, if the configuration allows something else.
        loaded: who is loaded at the same time.
        goes: who has to go for the others.
        missing: by model, what it lacks even alone.
        contexts: tokens of the longest row, by model.
        change: what makes everything fit; empty if everything does.
    """

    name: str
    models: list[Candidate]
    budget_bytes: int
    loaded: list[str]
    contexts: dict[str, int]
    change: str
    automatic_bytes: int | None = None
    goes: dict[str, list[str]]
    missing: dict[str, int]


def situation(
    name: str,
    models: list[Candidate],
    budget_bytes: int,
    *,
    loaded: str,
    contexts: dict[str, int],
    change: str = "",
    automatic: int | None = None,
    goes: dict[str, str] | None = None,
    missing: dict[str, int] | None = None,
) -> Situation:
    """The same, with names as words of a text."""
    return Situation(
        name=name,
        models=models,
        budget_bytes=budget_bytes,
        automatic_bytes=automatic,
        loaded=loaded.split(),
        contexts=contexts,
        change=change,
        goes={model: names.split() for model, names in (goes or {}).items()},
        missing=missing or {},
    )


LONG = need(GIB, least=1024, context=8192, rows=2)
"""Reserved for 1024 tokens, as a model without `context_length`; takes up to 8192."""

SITUATIONS = [
    situation(
        "one model with room to spare",
        [candidate("a", LONG)], 64 * GIB,
        loaded="a", contexts={"a": 8192},
    ),
    situation(
        "one model whose whole context does not fit",
        [candidate("a", LONG)], GIB + GROWTH + 3000 * MIB,
        loaded="a", contexts={"a": 3000},
    ),
    situation(
        "two models that share what is left",
        [candidate("a", LONG), candidate("b", LONG)], 2 * (GIB + GROWTH + 2000 * MIB),
        loaded="a b", contexts={"a": 2000, "b": 2000},
    ),
    situation(
        "a small one leaves its part of the rest to the large one",
        [candidate("a", LONG), candidate("b", need(GIB, rows=1))],
        2 * (GIB + GROWTH) + (1024 + 4000) * MIB,
        loaded="a b", contexts={"a": 4000, "b": 1024},
    ),
    situation(
        "a model on request next to the others",
        [candidate("a", need()), candidate("b", need(), is_resident=False)], 8 * GIB,
        loaded="a", contexts={"a": 1024, "b": 1024}, goes={"b": ""},
    ),
    situation(
        "a model on request in place of another",
        [candidate("a", need()), candidate("b", need(2 * GIB), is_resident=False)], 4 * GIB,
        loaded="a", contexts={"a": 1024, "b": 1024}, goes={"b": "a"},
    ),
    situation(
        "a model on request in place of the one that is large enough",
        [
            candidate("a", need(GIB)),
            candidate("b", need(3 * GIB)),
            candidate("c", need(4 * GIB), is_resident=False),
        ],
        2 * ROW + 5 * GIB,
        loaded="a b", contexts={"a": 1024, "b": 1024, "c": 1024}, goes={"c": "b"},
    ),
    situation(
        "a budget below what the machine allows",
        [candidate("a", need()), candidate("b", need())], 3 * GIB, automatic=12 * GIB,
        loaded="a", contexts={"a": 1024, "b": 1024}, goes={"b": "a"},
        change='set memory_budget to at least "4.50 GiB"',
    ),
    situation(
        "a shorter context for the model with the longest",
        [candidate("a", need(GIB, least=4096)), candidate("b", need(GIB, least=1024))],
        2 * (GIB + GROWTH) + (1024 + 2100) * MIB,
        loaded="a", contexts={"a": 4096, "b": 1024},
        goes={"b": "a"},
        change="set context_length = 2048 for a, which saves 2.00 GiB",
    ),
    situation(
        "no context is short enough: one waits for requests",
        [candidate("a", need(2 * GIB)), candidate("b", need(2 * GIB))], 4 * GIB,
        loaded="a", contexts={"a": 1024, "b": 1024}, goes={"b": "a"},
        change="set preload = false for b, which then takes its turn with the others",
    ),
    situation(
        "a memory that is larger than needed",
        [candidate("a", need(GIB, given=6 * GIB)), candidate("b", need(2 * GIB))], 8 * GIB,
        loaded="a", contexts={"a": 1024, "b": 1024}, goes={"b": "a"},
        change='set memory = "auto" for a: it needs 2.25 GiB',
    ),
    situation(
        "a model that is too large for the machine",
        [candidate("a", need(GIB)), candidate("b", need(9 * GIB))], 8 * GIB,
        loaded="a", contexts={"a": 1024, "b": 0}, missing={"b": 2 * GIB + GROWTH},
        change="leave out b: alone it needs 10.25 GiB, and the budget is 8.00 GiB",
    ),
    situation(
        "two models that are too large for the machine",
        [candidate("a", need(9 * GIB)), candidate("b", need(10 * GIB))], 8 * GIB,
        loaded="", contexts={"a": 0, "b": 0},
        missing={"a": 2 * GIB + GROWTH, "b": 3 * GIB + GROWTH},
        change="no single setting is enough: these models need a budget of 21.50 GiB and there is "
        "8.00 GiB; the largest is b with 11.25 GiB",
    ),
]  # fmt: skip


def _name(one: Situation) -> str:
    return one.name


@pytest.mark.parametrize("one", SITUATIONS, ids=_name)
def test_a_situation(one: Situation) -> None:
    made = make_plan(one.models, one.budget_bytes)
    placed = {place.model: place for place in made.placements}
    assert [name for name, place in placed.items() if place.is_placed] == one.loaded
    assert {name: place.context_tokens for name, place in placed.items()} == one.contexts
    others = [name for name, place in placed.items() if not place.is_placed]
    assert {name: list(placed[name].goes) for name in others if name not in one.missing} == one.goes
    found = {name: place.missing_bytes for name, place in placed.items() if place.missing_bytes}
    assert found == one.missing
    change = find_change(one.models, budget(one.budget_bytes, one.automatic_bytes))
    assert ("" if change is None else str(change)) == one.change
    assert made.fits == (one.change == "")


def test_rows_get_what_is_left_after_every_context_is_whole() -> None:
    models = [candidate("a", need(rows=4)), candidate("b", need(rows=2))]
    made = make_plan(models, 2 * GIB + 5 * ROW)
    assert [(place.rows, place.memory_bytes) for place in made.placements] == [
        (3, GIB + 3 * ROW),
        (2, GIB + 2 * ROW),
    ]
    assert made.reserved_bytes == 2 * (GIB + ROW)


@pytest.mark.parametrize(("budget_bytes", "rows"), [(GIB // 2, 0), (GIB + ROW // 2, 1)])
def test_who_does_not_fit_has_a_shorter_row_or_none(budget_bytes: int, rows: int) -> None:
    [place] = make_plan([candidate("a", need(rows=4))], budget_bytes).placements
    assert (place.is_placed, place.rows) == (False, rows)
    assert (0 < place.context_tokens < 1024) == (rows == 1)


def test_the_same_context_for_all_is_tried_before_anybody_has_to_go() -> None:
    models = [candidate(name, need(GIB, least=2048)) for name in "ab"]
    change = find_change(models, budget(2 * (GIB + GROWTH) + 2 * 600 * MIB))
    assert isinstance(change, LowerContext)
    assert (list(change.models), change.tokens) == (["a", "b"], 512)
    assert str(change) == "set context_length = 512 for a and b, which saves 3.00 GiB"


def test_a_context_that_is_short_enough_stays_as_it_is() -> None:
    models = [
        *(candidate(name, need(GIB, least=2048)) for name in "ab"),
        candidate("c", need(GIB, least=512, context=8192)),
    ]
    change = find_change(models, budget(3 * (GIB + GROWTH) + (2 * 1024 + 512 + 100) * MIB))
    assert isinstance(change, LowerContext)
    assert (list(change.models), change.tokens) == (["a", "b"], 1024)


def test_the_last_of_the_file_wait_first() -> None:
    models = [candidate(name, need(2 * GIB)) for name in "abc"]
    change = find_change(models, budget(5 * GIB))
    assert isinstance(change, LoadOnRequest)
    assert str(change) == (
        "set preload = false for b and c, which then take their turns with the others"
    )


# ---------------------------------------------------------------- every situation

needs = st.builds(
    need,
    fixed=st.integers(0, 64).map(lambda quarters: quarters * GIB // 4),
    least=st.integers(1, 8192),
    context=st.integers(0, 32).map(lambda count: count * 4096),
    rows=st.integers(1, 16),
    given=st.none() | st.integers(1, 32 * GIB),
)


def _possible(what: Need) -> bool:
    return what.context_tokens >= what.least_tokens


@st.composite
def configurations(draw: st.DrawFn) -> list[Candidate]:
    count = draw(st.integers(0, 6))
    return [
        candidate(name, draw(needs.filter(_possible)), is_resident=draw(st.booleans()))
        for name in "abcdef"[:count]
    ]


@given(models=configurations(), size=st.integers(0, 64 * GIB))
def test_what_is_planned_never_exceeds_the_budget(models: list[Candidate], size: int) -> None:
    made = make_plan(models, size)
    by_name = {one.model: one.need for one in models}
    placed = [place for place in made.placements if place.is_placed]
    assert [place.model for place in made.placements] == list(by_name)
    assert made.reserved_bytes == sum(by_name[place.model].needed_bytes for place in placed)
    assert sum(place.memory_bytes for place in placed) <= size
    for place in made.placements:
        what = by_name[place.model]
        if place.is_placed or not place.missing_bytes:
            assert (
                what.needed_bytes <= place.memory_bytes <= max(what.wanted_bytes, what.needed_bytes)
            )
        if what.given_bytes is None and not place.missing_bytes:
            assert place.context_tokens >= what.least_tokens
            rows, tokens = place.rows, place.context_tokens
            assert what.bytes_for(rows=rows, longest=tokens) <= place.memory_bytes
        kept = set(by_name) - set(place.goes) if not place.is_placed else set()
        stays = [other for other in placed if other.model in kept]
        if not place.is_placed and not place.missing_bytes:
            used = sum(by_name[other.model].needed_bytes for other in stays)
            assert used + what.needed_bytes <= size


@given(
    models=configurations(),
    size=st.integers(0, 64 * GIB),
    more=st.none() | st.integers(0, 64 * GIB),
)
def test_a_change_makes_everything_fit_and_is_named_only_if_needed(
    models: list[Candidate], size: int, more: int | None
) -> None:
    available = budget(size, None if more is None else size + more)
    change = find_change(models, available)
    assert (change is None) == make_plan(models, size).fits
    if change is None:
        return
    changed, allowed = apply_change(change, models, size)
    assert make_plan(changed, allowed).fits
    assert str(change)
    _check_least(change, models, size)


def _check_least(change: Change, models: list[Candidate], size: int) -> None:
    """The advice asks for no more than it must."""
    if isinstance(change, LowerContext):
        assert change.saved_bytes > 0
        longer = LowerContext(models=change.models, tokens=change.tokens + 256, saved_bytes=0)
        assert not make_plan(*apply_change(longer, models, size)).fits
    if isinstance(change, LoadOnRequest):
        fewer = LoadOnRequest(models=change.models[1:])
        assert not make_plan(*apply_change(fewer, models, size)).fits


@given(models=configurations())
def test_the_required_budget_is_enough_and_a_byte_less_is_not(models: list[Candidate]) -> None:
    required = required_bytes(models)
    assert make_plan(models, required).fits
    assert required == 0 or not make_plan(models, required - 1).fits
