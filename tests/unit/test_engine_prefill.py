"""Which prompts a step reads, and which are long, on a simulated machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsup.worker.engines.mlx.prefill import (
    FIXED_CHUNK,
    HEADROOM,
    CostModel,
    PrefillScheduler,
    PromptRead,
    SerialScheduler,
    TogetherScheduler,
)
from mlxsup.worker.engines.mlx.shapes import padded_tokens

PASS_S, TOKEN_S, DECODE_S = 0.01, 0.001, 0.01

TARGET_S = 0.1


class Machine:
    """Carries plans out as the passes do, in simulated time.

    Attributes:
        turns: under test.
        firsts: in which step a row got its first token.
        took_s: what each step took for reading.
    """

    def __init__(self, turns: PrefillScheduler, costs: CostModel) -> None:
        self.turns = turns
        self.costs = costs
        self.rest: dict[int, int] = {}
        self.read: dict[int, int] = {}
        self.decoding: set[int] = set()
        self.firsts: dict[int, int] = {}
        self.took_s: list[float] = []
        self.steps = 0
        costs.saw_chunk(prefill_rows=1, longest=64, decode_rows=0, took_s=PASS_S + 64 * TOKEN_S)
        costs.saw_decode(rows=1, took_s=DECODE_S)

    def add(self, uid: int, total: int) -> None:
        self.turns.add(uid, total=total, known=0)
        self.rest[uid], self.read[uid] = total - 1, 0

    def step(self) -> dict[int, int]:
        """One step of serial passes; gives what was planned."""
        plan = self.turns.plan(decode_rows=len(self.decoding))
        reads = []
        step_s = 0.0
        for uid, size in plan.items():
            assert size <= self.rest[uid], "a pass would read behind the prompt"
            count = size
            self.rest[uid] -= count
            self.read[uid] += count
            took_s = (PASS_S + TOKEN_S * count) * bool(count)
            step_s += took_s
            is_over = not self.rest[uid]
            done = self.read[uid] + is_over
            reads.append(PromptRead(uid=uid, done=done, is_over=is_over, took_s=took_s))
        for uid in self.decoding:
            if uid not in self.firsts:
                self.firsts[uid] = self.steps
                self.turns.got_tokens([uid])
        decode_s = DECODE_S * bool(self.decoding)
        self.turns.take(reads, decode_rows=len(self.decoding), took_s=step_s + decode_s)
        self.decoding |= {read.uid for read in reads if read.is_over}
        self.took_s.append(step_s)
        self.steps += 1
        return plan


def make_machine(target_s: float = TARGET_S, *, decodes: bool = True) -> Machine:
    """A machine of serial turns; beside a row that decodes, or empty."""
    costs = CostModel(decode_stall_target_s=target_s, step_timeout_s=30.0)
    machine = Machine(SerialScheduler(costs), costs)
    if decodes:
        machine.add(100, 2)
        machine.step()
    return machine


KINDS = pytest.mark.parametrize("kind", [TogetherScheduler, SerialScheduler])


def turns_of(kind: type[PrefillScheduler]) -> PrefillScheduler:
    """Turns with chunks of a fixed size."""
    return kind(CostModel(decode_stall_target_s=0.25, step_timeout_s=30.0, is_fixed=True))


def read(turns: PrefillScheduler, uid: int, done: int, *, is_over: bool = False) -> None:
    turns.take([PromptRead(uid=uid, done=done, is_over=is_over)], decode_rows=0, took_s=0.1)


# ---------------------------------------------------------------- whose turn it is
def test_a_burst_of_short_prompts_is_read_within_one_step() -> None:
    machine = make_machine(decodes=False)
    for uid in range(8):
        machine.add(uid, 10 + uid)
    assert list(machine.step()) == list(range(8)), "one pass each, in the order of their coming"
    assert len(machine.turns) == 0


def test_short_prompts_beside_decoding_rows_take_as_many_steps_as_the_target_says() -> None:
    machine = make_machine()
    for uid in range(8):
        machine.add(uid, 11)
    counts = []
    while len(machine.turns):
        counts.append(len(machine.step()))
    assert sum(counts) == 8
    assert 2 <= len(counts) <= 4, "0.075 s hold three passes of 0.02 s"
    assert max(machine.took_s) <= TARGET_S


def test_a_short_prompt_waits_for_one_piece_of_a_long_one() -> None:
    machine = make_machine()
    machine.add(0, 5000)
    machine.step()
    for short in (1, 2, 3):
        machine.add(short, 8)
        before = machine.steps
        while short not in machine.firsts:
            machine.step()
        assert machine.firsts[short] - before <= 3
    assert machine.rest[0] > 0, "the long one was still being read"


def test_a_long_prompt_is_not_starved_by_short_ones_that_never_end() -> None:
    machine = make_machine()
    machine.add(0, 2000)
    uid = 1
    while machine.rest[0]:
        machine.add(uid, 8)
        uid += 1
        machine.step()
        assert machine.steps < 400, "the long prompt is starved"


def test_two_long_prompts_take_turns() -> None:
    machine = make_machine()
    machine.step()
    machine.add(0, 4000)
    machine.add(1, 4000)
    assert [next(iter(machine.step())) for _ in range(6)] == [0, 1, 0, 1, 0, 1]


def test_a_first_token_that_is_due_comes_before_more_of_a_long_prompt() -> None:
    machine = make_machine(decodes=False)
    machine.add(0, 4000)
    machine.step()
    machine.add(1, 4)
    while machine.rest.get(1):
        machine.step()
    assert machine.step() == {}, "the step that gives the first token reads nothing long"
    assert 1 in machine.firsts
    assert machine.step()


@KINDS
def test_drop_says_whether_the_row_read_anything(kind: type[PrefillScheduler]) -> None:
    turns = turns_of(kind)
    for uid, own in ((0, 0), (1, 0), (2, 40)):
        turns.add(uid, total=100, known=40, own=own)
    read(turns, 1, 8)
    # It read nothing; it did; it did before a pause; it decodes.
    assert [turns.drop(uid) for uid in range(4)] == [False, True, True, True]
    assert len(turns) == 0


@KINDS
def test_a_row_that_leaves_before_its_first_token_delays_no_other(
    kind: type[PrefillScheduler],
) -> None:
    turns = turns_of(kind)
    turns.add(0, total=5000, known=0)
    turns.add(1, total=3, known=0)
    read(turns, 1, 3, is_over=True)
    assert not any(turns.plan(decode_rows=1).values()), "a first token is due"
    turns.drop(1)
    assert turns.plan(decode_rows=0)[0] > 0


def test_only_prompts_that_are_read_together_share_a_pass() -> None:
    costs = CostModel(decode_stall_target_s=TARGET_S, step_timeout_s=30.0)
    for cost in (8, 64):
        costs.saw_chunk(prefill_rows=1, longest=cost, decode_rows=0, took_s=PASS_S + cost * TOKEN_S)
    together, serial = TogetherScheduler(costs), SerialScheduler(costs)
    shared = [[turns.shared_pass_s(tokens) for tokens in (9, 12)] for turns in (together, serial)]
    assert shared == [[pytest.approx(PASS_S), 0.0], [0.0, 0.0]]


def known_costs(rows: int = 1) -> CostModel:
    """Return those of the machine that `Machine` simulates, while so many rows decode."""
    costs = CostModel(decode_stall_target_s=TARGET_S, step_timeout_s=30.0)
    for cost in (8, 64, 2048):
        costs.saw_chunk(prefill_rows=1, longest=cost, decode_rows=0, took_s=PASS_S + cost * TOKEN_S)
    costs.saw_decode(rows=rows, took_s=DECODE_S)
    return costs


def together(**changes: Any) -> TogetherScheduler:
    return TogetherScheduler(known_costs(), **changes)


def reads_of(plan: dict[int, int], done: dict[int, int]) -> list[PromptRead]:
    for uid, size in plan.items():
        done[uid] = done.get(uid, 0) + size
    return [PromptRead(uid=uid, done=done[uid], is_over=False) for uid in plan]


@pytest.mark.parametrize(
    ("totals", "first"),
    [
        ([100, 3], {1}),  # padding the short one to the long one costs more than a pass
        ([100, 98, 90], {0, 1, 2}),
        ([30, 21, 2000, 25], {0, 1, 3}),
        ([2000, 1990], {0, 1}),
        ([1, 1], {0, 1}),  # nothing to read: they join those that decode
    ],
)
def test_prompts_share_passes_if_padding_is_cheaper_than_a_pass(
    totals: list[int], first: set[int]
) -> None:
    turns = together()
    for uid, total in enumerate(totals):
        turns.add(uid, total=total, known=0)
    assert set(turns.plan(decode_rows=0)) == first


def test_a_pass_of_several_ranks_reads_a_few_prompts_at_most() -> None:
    turns = together(most_prompts=2)
    for uid, total in enumerate([100, 98, 90]):
        turns.add(uid, total=total, known=0)
    assert set(turns.plan(decode_rows=0)) == {1, 2}


def test_what_is_read_together_stays_together_and_what_comes_later_is_read_first() -> None:
    turns = together()
    done: dict[int, int] = {}
    for uid in (0, 1):
        turns.add(uid, total=4000, known=0)
    plan = turns.plan(decode_rows=1)
    assert set(plan) == {0, 1}
    turns.take(reads_of(plan, done), decode_rows=1, took_s=0.1)
    turns.add(2, total=9, known=0)
    assert set(turns.plan(decode_rows=1)) == {2}


def test_short_prompts_that_never_end_leave_a_long_one_every_fourth_pass() -> None:
    turns = together()
    done: dict[int, int] = {}
    turns.add(0, total=20_000, known=0)
    whose = []
    for uid in range(1, 17):
        turns.add(uid, total=9, known=0)
        plan = turns.plan(decode_rows=1)
        whose.append(0 in plan)
        turns.take(reads_of(plan, done), decode_rows=1, took_s=0.1)
        for short in [short for short in plan if short]:
            turns.drop(short)
    assert whose == [False, False, False, True] * 4


def test_a_prompt_with_pictures_shares_no_pass_and_its_tower_leaves_others_their_turns() -> None:
    turns = together()
    done: dict[int, int] = {}
    for uid, total in enumerate([98, 100, 99]):
        turns.add(uid, total=total, known=0, is_alone=uid == 0)
    whose = []
    for _ in range(8):
        plan = turns.plan(decode_rows=0)
        whose.append(set(plan))
        read = reads_of(dict.fromkeys(plan, 0) if 0 in plan else plan, done)
        turns.take(read, decode_rows=0, took_s=0.1)
        for uid in plan.keys() - {0}:
            turns.drop(uid)
    assert whose == [{0}] * 3 + [{1, 2}] + [{0}] * 4


def test_padded_passes_have_few_shapes() -> None:
    turns = together()
    turns.pads = True
    for uid in range(7):
        turns.add(uid, total=34 + uid, known=0)  # all are padded to 48
    turns.add(7, total=9000, known=0)
    assert len(turns.plan(decode_rows=0)) == 4, "a power of two, as the warm-up has run"
    for uid in range(7):
        turns.drop(uid)
    for uid in range(10, 16):
        turns.add(uid, total=934, known=900)
    assert len(turns.plan(decode_rows=0)) == 6, "behind known tokens every shape is new"
    for uid in range(10, 16):
        turns.drop(uid)
    [size] = turns.plan(decode_rows=0).values()
    assert (padded_tokens(size), size > 1000) == (size, True), "it needs no padding"


# ---------------------------------------------------------------- the time of rows that decode
@pytest.mark.parametrize("kind", [TogetherScheduler, SerialScheduler])
@pytest.mark.parametrize(
    ("late_s", "behind_s"),
    [(0.0, 0.0), (5 * DECODE_S, 0.0), (0.0, DECODE_S)],
    ids=["", "each 20th step is late", "a step behind a pass is"],
)
@pytest.mark.parametrize("share", [0.0, 0.5, 0.8])
def test_rows_that_decode_keep_their_share_of_the_time(
    kind: type[PrefillScheduler], share: float, late_s: float, behind_s: float
) -> None:
    turns, steps, all_s, read_s = kind(known_costs(rows=4), decode_share=share), 0, 0.0, 0.0
    held_up_s = 0.0
    done: dict[int, int] = {}
    turns.add(0, total=10_000, known=0)
    while len(turns) and done.get(0, 0) < 9_999:
        plan = turns.plan(decode_rows=4)
        waits_s = behind_s * (read_s > 0.0)
        held_up_s += waits_s
        decode_s = DECODE_S + late_s * (steps % 20 == 0) + waits_s
        read_s = sum(PASS_S + TOKEN_S * size for size in plan.values() if size)
        reads = [replace(read, took_s=read_s) for read in reads_of(plan, done)]
        turns.take(reads, decode_rows=4, took_s=decode_s + read_s)
        assert read_s <= TARGET_S
        steps, all_s = steps + 1, all_s + decode_s + read_s
    kept = steps * (DECODE_S + late_s / 20) / all_s
    least_s = 10_000 * TOKEN_S
    assert kept >= share - 0.02, "the last pass is not paid for"
    assert share == 0.0 or kept <= share + 0.1, "and no more: the prompt has the rest"
    assert all_s - held_up_s <= 1.6 * least_s / (1 - share)


@pytest.mark.parametrize("kind", [TogetherScheduler, SerialScheduler])
@pytest.mark.parametrize(
    ("waiting", "following", "kept"),
    [(1, 0, 0.5), (1, 5, 0.5), (2, 0, 0.5), (3, 0, 1 / 3), (6, 0, 1 / 6), (6, 3, 1 / 6)],
)
def test_rows_that_decode_keep_the_less_the_more_prompts_wait(
    kind: type[PrefillScheduler], waiting: int, following: int, kept: float
) -> None:
    """Four rows decode; those that follow others cost nothing that could be paid for."""
    turns, steps, all_s = kind(known_costs(rows=4), decode_share=0.5), 0, 0.0
    done: dict[int, int] = {}
    for uid in range(waiting + following):
        turns.add(uid, total=100_000, known=0)
        if uid >= waiting:
            turns.follow(uid)
    while all_s < 100 * TARGET_S:
        plan = turns.plan(decode_rows=4)
        each_s = {uid: PASS_S + TOKEN_S * size for uid, size in plan.items()}
        read_s = sum(each_s.values())
        if kind is TogetherScheduler and plan:
            read_s -= PASS_S * (len(plan) - 1)
        reads = [replace(read, took_s=each_s[read.uid]) for read in reads_of(plan, done)]
        turns.take(reads, decode_rows=4, took_s=DECODE_S + read_s)
        steps, all_s = steps + 1, all_s + DECODE_S + read_s
    assert kept - 0.02 <= steps * DECODE_S / all_s <= kept + 0.08, "whole steps pay"


def test_a_surprise_is_not_paid_back_for_ever_and_prompts_alone_owe_nothing() -> None:
    turns = together(decode_share=0.5)
    done: dict[int, int] = {}
    turns.add(0, total=10_000, known=0)
    turns.take(reads_of(turns.plan(decode_rows=1), done), decode_rows=1, took_s=40.0)
    steps = 0
    while not any(turns.plan(decode_rows=1).values()):
        turns.take([], decode_rows=1, took_s=DECODE_S)
        steps += 1
    assert 1 < steps <= 2 * TARGET_S / DECODE_S
    turns.take(reads_of(turns.plan(decode_rows=1), done), decode_rows=1, took_s=0.1)
    assert not turns.plan(decode_rows=1)
    assert turns.plan(decode_rows=0)
    turns.take([], decode_rows=0, took_s=0.0)
    assert turns.plan(decode_rows=1), "rows that have left leave no debt to others"


def test_a_prompt_that_waited_for_another_one_has_been_passed_over_by_none() -> None:
    turns = together()
    done: dict[int, int] = {}
    turns.add(0, total=10_000, known=0)
    turns.add(1, total=9_000, known=0)
    turns.follow(1)
    for _ in range(4):
        turns.take(reads_of(turns.plan(decode_rows=0), done), decode_rows=0, took_s=0.1)
    turns.lead(1, 100)
    turns.add(2, total=10, known=0)
    assert 1 not in turns.plan(decode_rows=0), "the shortest is first"


def test_together_a_prompt_that_ends_with_its_chunk_is_read_on() -> None:
    turns = turns_of(TogetherScheduler)
    turns.add(0, total=3, known=0)
    read(turns, 0, 3, is_over=True)
    for total, is_read in ((2, True), (FIXED_CHUNK + 1, True), (FIXED_CHUNK + 2, False)):
        turns.add(1, total=total, known=0)
        assert (turns.plan(decode_rows=1) == {1: total - 1}) is is_read
        turns.drop(1)


# ---------------------------------------------------------------- what the cost model learns
class Recorder:
    """A cost model that remembers what it is taught."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, int, float, int]] = []
        self.known: list[int] = []

    def begins_deep(self, known: int) -> None:
        self.known.append(known)

    def saw_chunk(
        self, *, prefill_rows: int, longest: int, decode_rows: int, took_s: float, depth: int
    ) -> None:
        self.seen.append((prefill_rows, longest, decode_rows, took_s, depth))

    def usual_decode_s(self, rows: int) -> float:
        return 0.0

    def target_s(self, *, decode_rows: int) -> float:
        return 1.0


@pytest.mark.parametrize(
    ("kind", "seen"),
    [
        # A row whose prompt ends decodes within the step.
        (TogetherScheduler, [(2, 5, 4, 0.9, 0)]),
        # The first pass waits for the decode step that is under way, the next one does not.
        (SerialScheduler, [(1, 5, 3, 0.2, 20), (1, 3, 0, 0.1, 0)]),
    ],
)
def test_a_step_teaches_the_pacer_and_a_prompt_of_one_token_teaches_it_nothing(
    kind: type[PrefillScheduler], seen: list[object]
) -> None:
    costs: Any = Recorder()
    turns = kind(costs)
    turns.add(0, total=90, known=20)
    turns.add(1, total=4, known=0)
    reads = [
        PromptRead(uid=0, done=5, is_over=False, took_s=0.2),
        PromptRead(uid=1, done=4, is_over=True, took_s=0.1),
    ]
    assert turns.take(reads, decode_rows=3, took_s=0.9) == [(0, 25, 90, 5), (1, 4, 4, 4)]
    assert (costs.seen, costs.known) == (seen, [20, 0])
    costs.seen.clear()
    turns.add(2, total=1, known=0)
    nothing = [PromptRead(uid=2, done=1, is_over=True, took_s=0.2)]
    assert turns.take(nothing, decode_rows=2, took_s=0.9) == [(2, 1, 1, 1)]
    assert costs.seen == []


@given(
    totals=st.lists(st.integers(1, 3000), min_size=1, max_size=12),
    target_s=st.floats(0.02, 1.0),
    has_decoding=st.booleans(),
)
def test_every_prompt_is_read_once_to_its_end_in_bounded_steps(
    totals: list[int], target_s: float, has_decoding: bool
) -> None:
    machine = make_machine(target_s, decodes=has_decoding)
    for uid, total in enumerate(totals):
        machine.add(uid, total)
    while len(machine.turns):
        predicted_s = machine.turns.predict_s(decode_rows=len(machine.decoding))
        busy = bool(machine.decoding)
        plan = machine.step()
        assert predicted_s >= 0.0
        limit_s = HEADROOM * (target_s if busy else 2.0)
        first_s = PASS_S + TOKEN_S * next(iter(plan.values()), 0)
        assert machine.took_s[-1] <= max(2 * limit_s, first_s)
        assert machine.steps < 4000
    assert [machine.read[uid] for uid in range(len(totals))] == [total - 1 for total in totals]


# ---------------------------------------------------------------- which prompts are long
@KINDS
def test_a_prompt_is_long_if_one_chunk_does_not_read_it_up_to_its_last(
    kind: type[PrefillScheduler],
) -> None:
    turns = turns_of(kind)
    assert not turns.has_long(decode_rows=0)
    turns.add(1, total=FIXED_CHUNK + 1, known=0)  # its last token is not read
    assert not turns.has_long(decode_rows=0)
    turns.add(2, total=FIXED_CHUNK + 50, known=0)
    assert turns.has_long(decode_rows=0)
    turns.drop(1)
    read(turns, 2, FIXED_CHUNK)
    assert (turns.has_long(decode_rows=0), turns.has_read) == (True, False)
    read(turns, 2, FIXED_CHUNK + 49)
    assert (turns.has_long(decode_rows=0), turns.has_read) == (False, True)
    read(turns, 2, FIXED_CHUNK + 50, is_over=True)
    assert not turns.has_read


@KINDS
def test_a_step_that_is_held_takes_the_prompts_that_need_no_reading(
    kind: type[PrefillScheduler],
) -> None:
    turns = turns_of(kind)
    turns.add(1, total=600, known=0)
    turns.add(2, total=600, known=599)
    turns.add(3, total=1, known=0)
    assert turns.hold() == {2: 0, 3: 0}


def test_only_what_was_read_is_progress() -> None:
    turns = turns_of(TogetherScheduler)
    turns.add(1, total=600, known=0)
    turns.add(2, total=10, known=9)
    reads = [PromptRead(uid=1, done=0, is_over=False), PromptRead(uid=2, done=1, is_over=True)]
    assert turns.take(reads, decode_rows=0, took_s=0.1) == [(2, 10, 10, 1)]
    assert turns.take([reads[0]], decode_rows=0, took_s=0.1) == []
    again = PromptRead(uid=1, done=256, is_over=False)
    assert turns.take([again], decode_rows=0, took_s=0.1) == [(1, 256, 600, 256)]
