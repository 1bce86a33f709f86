"""Which prompts a step reads, and which are long, on a simulated machine."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxsup.worker.engines.mlx.prefill import FIXED_CHUNK, HEADROOM, PrefillPacer
from mlxsup.worker.engines.mlx.prompt_turns import (
    PromptRead,
    PromptTurns,
    SerialTurns,
    TogetherTurns,
)

PASS_S, TOKEN_S, DECODE_S = 0.01, 0.001, 0.01

TARGET_S = 0.1


class Machine:
    """Carries plans out as the passes do, in simulated time.

    Attributes:
        turns: under test.
        firsts: in which step a row got its first token.
        took_s: what each step took for reading.
    """

    def __init__(self, turns: PromptTurns, pacer: PrefillPacer) -> None:
        self.turns = turns
        self.pacer = pacer
        self.rest: dict[int, int] = {}
        self.read: dict[int, int] = {}
        self.decoding: set[int] = set()
        self.firsts: dict[int, int] = {}
        self.took_s: list[float] = []
        self.steps = 0
        pacer.saw_chunk(prefill_rows=1, longest=64, decode_rows=0, took_s=PASS_S + 64 * TOKEN_S)
        pacer.saw_decode(rows=1, took_s=DECODE_S)

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
                self.turns.got_token(uid)
        decode_s = DECODE_S * bool(self.decoding)
        self.turns.take(reads, decode_rows=len(self.decoding), took_s=step_s + decode_s)
        self.decoding |= {read.uid for read in reads if read.is_over}
        self.took_s.append(step_s)
        self.steps += 1
        return plan


def make_machine(target_s: float = TARGET_S) -> Machine:
    pacer = PrefillPacer(decode_stall_target_s=target_s, step_timeout_s=30.0)
    return Machine(SerialTurns(pacer), pacer)


def test_a_burst_of_short_prompts_is_read_within_one_step() -> None:
    machine = make_machine()
    for uid in range(8):
        machine.add(uid, 10 + uid)
    plan = machine.step()
    assert list(plan) == list(range(8)), "one pass each, in the order of their coming"
    assert len(machine.turns) == 0


def test_short_prompts_beside_decoding_rows_take_as_many_steps_as_the_target_says() -> None:
    machine = make_machine()
    machine.add(100, 2)
    machine.step()
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
    machine.add(100, 2)
    machine.step()
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
    machine.add(100, 2)
    machine.step()
    machine.add(0, 2000)
    uid = 1
    while machine.rest[0]:
        machine.add(uid, 8)
        uid += 1
        machine.step()
        assert machine.steps < 400, "the long prompt is starved"


def test_two_long_prompts_take_turns() -> None:
    machine = make_machine()
    machine.add(100, 2)
    machine.step()
    machine.step()
    machine.add(0, 4000)
    machine.add(1, 4000)
    turns = [next(iter(machine.step())) for _ in range(6)]
    assert turns == [0, 1, 0, 1, 0, 1]


def test_a_first_token_that_is_due_comes_before_more_of_a_long_prompt() -> None:
    machine = make_machine()
    machine.add(0, 4000)
    machine.step()
    machine.add(1, 4)
    while machine.rest.get(1):
        machine.step()
    assert machine.step() == {}, "the step that gives the first token reads nothing long"
    assert 1 in machine.firsts
    assert machine.step()


@pytest.mark.parametrize("kind", [TogetherTurns, SerialTurns])
def test_drop_says_whether_the_row_read_anything(kind: type[PromptTurns]) -> None:
    turns = kind(PrefillPacer(decode_stall_target_s=0.25, step_timeout_s=30.0))
    turns.add(0, total=100, known=40)
    turns.add(1, total=100, known=40)
    turns.add(2, total=100, known=40, own=40)
    turns.take([PromptRead(uid=1, done=8, is_over=False)], decode_rows=0, took_s=0.1)
    assert not turns.drop(0)
    assert turns.drop(1)
    assert turns.drop(2), "it was read before a pause"
    assert turns.drop(3), "a row that decodes"
    assert len(turns) == 0


@pytest.mark.parametrize("kind", [TogetherTurns, SerialTurns])
def test_a_row_that_leaves_before_its_first_token_delays_nobody(kind: type[PromptTurns]) -> None:
    turns = kind(PrefillPacer(decode_stall_target_s=0.25, step_timeout_s=30.0))
    turns.add(0, total=5000, known=0)
    turns.add(1, total=3, known=0)
    turns.take([PromptRead(uid=1, done=3, is_over=True)], decode_rows=0, took_s=0.1)
    assert not any(turns.plan(decode_rows=1).values()), "a first token is due"
    turns.drop(1)
    assert turns.plan(decode_rows=0)[0] > 0


@pytest.mark.parametrize(("kind", "shared_s"), [(TogetherTurns, PASS_S), (SerialTurns, 0.0)])
def test_only_prompts_that_are_read_together_share_a_pass(
    kind: type[PromptTurns], shared_s: float
) -> None:
    pacer = PrefillPacer(decode_stall_target_s=TARGET_S, step_timeout_s=30.0)
    turns = kind(pacer)
    for cost in (8, 64):
        pacer.saw_chunk(prefill_rows=1, longest=cost, decode_rows=0, took_s=PASS_S + cost * TOKEN_S)
    assert turns.shared_pass_s(9) == pytest.approx(shared_s)
    assert turns.shared_pass_s(12) == 0.0


def test_together_every_prompt_is_read_at_once() -> None:
    turns = TogetherTurns(PrefillPacer(decode_stall_target_s=0.25, step_timeout_s=30.0))
    turns.add(0, total=100, known=0)
    turns.add(1, total=3, known=0)
    assert turns.plan(decode_rows=0) == {0: 4, 1: 4}
    progress = turns.take(
        [PromptRead(uid=0, done=4, is_over=False), PromptRead(uid=1, done=2, is_over=False)],
        decode_rows=0,
        took_s=1.0,
    )
    assert progress == [(0, 4, 100, 4), (1, 2, 3, 2)]
    assert set(turns.plan(decode_rows=0).values()) == {0}, "a first token is due"
    turns.got_token(1)
    assert min(turns.plan(decode_rows=0).values()) > 0


def test_together_a_prompt_that_ends_with_its_chunk_is_read_on() -> None:
    turns = TogetherTurns(PrefillPacer(decode_stall_target_s=0.25, step_timeout_s=30.0))
    turns.add(0, total=3, known=0)
    turns.take([PromptRead(uid=0, done=3, is_over=True)], decode_rows=0, took_s=0.01)
    are_read = set()
    for total in range(2, 600):
        turns.add(1, total=total, known=0)
        chunk = turns.chunk(decode_rows=1)
        is_read = turns.plan(decode_rows=1) == {1: chunk}
        assert is_read == (total <= chunk)
        are_read.add(is_read)
        turns.drop(1)
    assert are_read == {True, False}


class Recorder:
    """A pacer that remembers what it is taught."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, int, float, int]] = []
        self.known: list[int] = []

    def begins_deep(self, known: int) -> None:
        self.known.append(known)

    def saw_chunk(
        self, *, prefill_rows: int, longest: int, decode_rows: int, took_s: float, depth: int
    ) -> None:
        self.seen.append((prefill_rows, longest, decode_rows, took_s, depth))


@pytest.mark.parametrize(
    ("kind", "seen"),
    [
        # A row whose prompt ends decodes within the step.
        (TogetherTurns, [(2, 5, 4, 0.9, 0)]),
        # The first pass waits for the decode step that is under way, the next one does not.
        (SerialTurns, [(1, 5, 3, 0.2, 20), (1, 3, 0, 0.1, 0)]),
    ],
)
def test_a_step_teaches_the_pacer(
    kind: type[PromptTurns], seen: list[tuple[int, int, int, float, int]]
) -> None:
    pacer: Any = Recorder()
    turns = kind(pacer)
    turns.add(0, total=90, known=20)
    turns.add(1, total=4, known=0)
    reads = [
        PromptRead(uid=0, done=5, is_over=False, took_s=0.2),
        PromptRead(uid=1, done=4, is_over=True, took_s=0.1),
    ]
    assert turns.take(reads, decode_rows=3, took_s=0.9) == [(0, 25, 90, 5), (1, 4, 4, 4)]
    assert pacer.seen == seen
    assert pacer.known == [20, 0]


@pytest.mark.parametrize(
    ("kind", "seen"), [(TogetherTurns, [(0, 0, 3, 0.9, 0)]), (SerialTurns, [])]
)
def test_a_prompt_of_which_nothing_had_to_be_read_teaches_nothing_of_its_pass(
    kind: type[PromptTurns], seen: list[tuple[int, int, int, float, int]]
) -> None:
    pacer: Any = Recorder()
    turns = kind(pacer)
    turns.add(0, total=1, known=0)
    reads = [PromptRead(uid=0, done=1, is_over=True, took_s=0.2)]
    assert turns.take(reads, decode_rows=2, took_s=0.9) == [(0, 1, 1, 1)]
    assert pacer.seen == seen


@settings(max_examples=40)
@given(
    totals=st.lists(st.integers(1, 3000), min_size=1, max_size=12),
    target_s=st.floats(0.02, 1.0),
    has_decoding=st.booleans(),
)
def test_every_prompt_is_read_once_to_its_end_in_bounded_steps(
    totals: list[int], target_s: float, has_decoding: bool
) -> None:
    machine = make_machine(target_s)
    if has_decoding:
        machine.add(100, 2)
        machine.step()
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


WAYS = [SerialTurns, TogetherTurns]


def turns_of(way: type[PromptTurns]) -> PromptTurns:
    """Turns with chunks of a fixed size."""
    return way(PrefillPacer(decode_stall_target_s=0.25, step_timeout_s=30.0, is_fixed=True))


def read(turns: PromptTurns, uid: int, done: int, *, is_over: bool = False) -> None:
    turns.take([PromptRead(uid=uid, done=done, is_over=is_over)], decode_rows=0, took_s=0.1)


@pytest.mark.parametrize("way", WAYS)
def test_a_prompt_that_one_chunk_reads_is_short(way: type[PromptTurns]) -> None:
    turns = turns_of(way)
    assert not turns.has_long(decode_rows=0)
    turns.add(1, total=FIXED_CHUNK + 1, known=0)  # its last token is not read
    assert not turns.has_long(decode_rows=0)
    turns.add(2, total=FIXED_CHUNK + 2, known=0)
    assert turns.has_long(decode_rows=0)
    turns.drop(2)
    assert not turns.has_long(decode_rows=0)


@pytest.mark.parametrize("way", WAYS)
def test_a_prompt_that_took_one_chunk_is_long_up_to_its_last(way: type[PromptTurns]) -> None:
    turns = turns_of(way)
    turns.add(1, total=FIXED_CHUNK + 50, known=0)
    read(turns, 1, FIXED_CHUNK)
    assert turns.has_long(decode_rows=0)
    assert not turns.has_read
    read(turns, 1, FIXED_CHUNK + 49)
    assert not turns.has_long(decode_rows=0)
    assert turns.has_read
    read(turns, 1, FIXED_CHUNK + 50, is_over=True)
    assert not turns.has_read


def test_serial_passes_that_are_held_only_take_prompts_that_need_no_reading() -> None:
    turns = turns_of(SerialTurns)
    turns.add(1, total=600, known=0)
    turns.add(2, total=600, known=599)
    turns.add(3, total=1, known=0)
    assert turns.hold() == {2: 0, 3: 0}


def test_a_pass_over_all_prompts_that_is_held_reads_none_of_them() -> None:
    turns = turns_of(TogetherTurns)
    turns.add(1, total=600, known=0)
    turns.add(2, total=600, known=599)
    assert turns.hold() == {1: 0, 2: 0}


def test_only_what_was_read_is_progress() -> None:
    turns = turns_of(TogetherTurns)
    turns.add(1, total=600, known=0)
    turns.add(2, total=10, known=9)
    reads = [PromptRead(uid=1, done=0, is_over=False), PromptRead(uid=2, done=1, is_over=True)]
    assert turns.take(reads, decode_rows=0, took_s=0.1) == [(2, 10, 10, 1)]
    assert turns.take([reads[0]], decode_rows=0, took_s=0.1) == []
    again = PromptRead(uid=1, done=256, is_over=False)
    assert turns.take([again], decode_rows=0, took_s=0.1) == [(1, 256, 600, 256)]
