"""The contract of every `Engine`; the step loop relies on nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mlxsup.protocol.body import RequestBody
from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.states import FinishReason, LoadPhase
from mlxsup.worker.engine import Engine, EngineFacts, Row, StepResult
from mlxsup.worker.engines.mlx.prefill import CostModel

from support.core.row_values import row_values

LONG = 700
"""Tokens of a prompt that takes several steps of prefill in either engine, or is let do so."""

CHUNK = 64
"""Tokens that MLX's engine reads in a step of `in_chunks`, however fast this machine is."""

LIMIT = 2000
"""Steps in which everything here has happened."""


class Loaded:
    """An engine after its load, and short ways to drive it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.progress: list[tuple[LoadPhase, float]] = []
        self.facts: EngineFacts = engine.load(lambda phase, at: self.progress.append((phase, at)))
        self.rows_after_load = engine.row_count()
        self.keys: set[RequestKey] = set()

    def row(self, key: int, length: int = 5, **parameters: object) -> Row:
        """Return a row whose prompt depends on its key."""
        tokens = [20 + (key * 31 + i * 7) % 180 for i in range(length)]
        values = row_values(**{"max_tokens": 8, "seed": key, **parameters})
        return Row(key=RequestKey(key), tokens=tokens, **values)

    def insert(self, *rows: Row) -> None:
        for row in rows:
            self.keys.add(row.key)
            self.engine.insert(row)

    def step(self) -> StepResult:
        """Make a step, held to what each must keep."""
        result = self.engine.step()
        keys = [token.key for token in result.tokens]
        assert len(keys) == len(set(keys)), "more than one token of a row in one step"
        for token in result.tokens:
            assert token.token is None or 0 <= token.token < self.facts.vocabulary_size
            assert token.token is not None or token.finish is not None
        for prefill in result.prefill:
            assert 0 < prefill.done <= prefill.total
            assert prefill.computed >= 0
        assert 0.0 <= result.decode_s <= result.took_s
        return result

    def run(self, *rows: Row) -> dict[int, list[int]]:
        """Insert, step until nothing is left, and return the tokens by key."""
        self.insert(*rows)
        tokens: dict[int, list[int]] = {}
        finished: dict[int, FinishReason] = {}
        for _ in range(LIMIT):
            if not self.engine.row_count():
                return tokens
            for token in self.step().tokens:
                assert token.key not in finished, "a token after the end"
                tokens.setdefault(token.key, [])
                if token.token is not None:
                    tokens[token.key].append(token.token)
                if token.finish is not None:
                    finished[token.key] = token.finish
        raise AssertionError(f"rows were left after {LIMIT} steps")

    def step_until_token_of(self, key: int) -> None:
        for _ in range(LIMIT):
            if any(token.key == key for token in self.step().tokens):
                return
        raise AssertionError(f"no token of {key}")

    def is_within_prompt(self, key: int) -> bool:
        """Make steps until one has read a part of this prompt; return True if more is left."""
        for _ in range(10):
            for prefill in self.step().prefill:
                if prefill.key == key:
                    return prefill.done < prefill.total
        raise AssertionError(f"no prefill of {key}")


def lengths(tokens: dict[int, list[int]]) -> dict[int, int]:
    return {key: len(some) for key, some in tokens.items()}


@pytest.fixture(scope="module")
def shared(make: Callable[[], Engine]) -> Iterator[Loaded]:
    made = Loaded(make())
    yield made
    made.engine.close()


@pytest.fixture
def loaded(shared: Loaded) -> Iterator[Loaded]:
    """The engine that the module's tests share; each leaves it as empty as it found it."""
    yield shared
    left = shared.engine.row_count()
    shared.engine.remove(*shared.keys)
    assert left == 0, "rows are left"


@pytest.fixture
def in_chunks(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> Loaded:
    """The same engine, which reads a long prompt in several steps."""
    monkeypatch.setattr(CostModel, "chunk", lambda *_, **__: CHUNK)
    return loaded


def test_a_load_reports_progress_returns_facts_and_leaves_no_row_B1_B5(loaded: Loaded) -> None:
    at = [progress for _, progress in loaded.progress]
    assert at
    assert at == sorted(at)
    assert 0.0 <= at[0] <= at[-1] <= 1.0
    assert min(loaded.facts.context_length, loaded.facts.vocabulary_size) > 1
    assert loaded.facts.fingerprint
    assert loaded.facts.backend
    assert not loaded.rows_after_load
    loaded.run(loaded.row(1))
    assert loaded.engine.predict_step_s() >= 0
    held = loaded.engine.bytes_held()
    assert min(held.active, held.cache, held.peak) >= 0


def test_another_life_has_the_same_fingerprint_and_closes_with_rows_left_E2(
    make: Callable[[], Engine], loaded: Loaded
) -> None:
    again = Loaded(make())
    assert again.facts.fingerprint == loaded.facts.fingerprint
    again.insert(again.row(1, LONG), again.row(2))
    again.step()
    assert again.engine.row_count() == 2
    again.engine.close()
    assert again.engine.row_count() == 0


# ---------------------------------------------------------------- answers
def test_exactly_max_tokens_then_length(loaded: Loaded) -> None:
    loaded.insert(loaded.row(1, max_tokens=6))
    seen = [token for _ in range(40) if loaded.engine.row_count() for token in loaded.step().tokens]
    assert all(token.token is not None for token in seen)
    assert [token.finish for token in seen] == [None] * 5 + [FinishReason.LENGTH]


@pytest.mark.parametrize("length", [1, 2, LONG])
def test_one_token_answers_and_prompts_of_any_length(loaded: Loaded, length: int) -> None:
    assert len(loaded.run(loaded.row(1, length, max_tokens=1))[1]) == 1


def test_rows_of_different_lengths_all_end(loaded: Loaded) -> None:
    rows = [loaded.row(k, 3 + 50 * k, max_tokens=3 * k) for k in (1, 2, 3, 4)]
    assert lengths(loaded.run(*rows)) == {k: 3 * k for k in (1, 2, 3, 4)}


def test_steps_say_what_they_computed_and_for_whom_up_to_the_whole_prompt(loaded: Loaded) -> None:
    rows = [loaded.row(11, LONG), loaded.row(12), loaded.row(13, 1)]
    loaded.keys.update(row.key for row in rows)
    to_compute = {row.key: len(row.tokens) - loaded.engine.insert(row) for row in rows}
    computed = dict.fromkeys(to_compute, 0)
    done: list[int] = []
    while loaded.engine.row_count():
        result = loaded.step()
        assert result.tokens or any(row.computed for row in result.prefill), "nothing pays for it"
        for read in result.prefill:
            computed[read.key] += read.computed
            if read.key == 11:
                assert read.total == LONG
                done.append(read.done)
    assert computed == to_compute
    assert done == sorted(done)


def test_a_row_inserted_while_others_decode_is_in_by_the_next_step_C2(loaded: Loaded) -> None:
    loaded.insert(loaded.row(1, max_tokens=200))
    loaded.step_until_token_of(1)
    loaded.insert(loaded.row(2, 40, max_tokens=3))
    first, second = loaded.step(), loaded.step()
    keys = {p.key for p in first.prefill} | {t.key for t in first.tokens}
    assert 2 in keys, "no work was done for the new row in the next step"
    assert 1 in {t.key for t in first.tokens + second.tokens}, "the running row stood still"
    loaded.engine.remove(RequestKey(1), RequestKey(2))


@pytest.mark.bits
def test_a_batched_greedy_answer_equals_the_solo_one_C10(loaded: Loaded) -> None:
    rows = [loaded.row(k, 5 + 9 * k, max_tokens=16) for k in (1, 2, 3, 4)]
    solo = {row.key: loaded.run(row)[row.key] for row in rows}
    assert loaded.run(*rows) == solo
    assert loaded.run(loaded.row(1, 14, max_tokens=16, seed=99))[1] == solo[RequestKey(1)]


@pytest.mark.bits
def test_a_solo_answer_stays_after_churn_C10(loaded: Loaded) -> None:
    row = loaded.row(1, 30, max_tokens=30)
    solo = loaded.run(row)[1]
    loaded.insert(loaded.row(2, 90, max_tokens=40), loaded.row(3, max_tokens=4))
    loaded.step_until_token_of(3)
    loaded.insert(row)
    tokens: list[int] = []
    for index in range(200):
        if not loaded.engine.row_count():
            break
        tokens += [t.token for t in loaded.step().tokens if t.key == 1 and t.token is not None]
        if index == 6:
            loaded.engine.remove(RequestKey(2))
            loaded.insert(loaded.row(5, 50, max_tokens=5))
    assert tokens == solo


@pytest.mark.draws
@pytest.mark.bits
def test_a_seed_decides_a_sampled_answer_alone_and_in_a_batch_A6(loaded: Loaded) -> None:
    sampled: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "max_tokens": 16}
    row = loaded.row(1, seed=5, **sampled)
    alone = loaded.run(row)[1]
    assert loaded.run(row)[1] == alone
    batch = loaded.run(row, loaded.row(2, **sampled), loaded.row(3, max_tokens=16))
    assert batch[1] == alone
    assert loaded.run(loaded.row(1, seed=6, **sampled))[1] != alone


# ---------------------------------------------------------------- rows that leave
@pytest.mark.bits
def test_rows_leave_wherever_they_stand_and_touch_no_other_D2_D3_D8(in_chunks: Loaded) -> None:
    """One decodes, one is in prefill, one has not begun, one is not there at all."""
    loaded = in_chunks
    alone = loaded.run(loaded.row(2, max_tokens=20))[2]
    loaded.insert(loaded.row(1, max_tokens=20), loaded.row(2, max_tokens=20))
    loaded.step_until_token_of(1)
    loaded.insert(loaded.row(3, LONG))
    assert loaded.is_within_prompt(3)
    loaded.insert(loaded.row(4))
    loaded.engine.remove(*map(RequestKey, (4, 1, 99, 3, 1)))
    assert loaded.engine.row_count() == 1
    rest = loaded.run()
    assert set(rest) == {2}
    assert alone[-len(rest[2]) :] == rest[2]


@pytest.mark.parametrize("at", ["once", "prefill", "decode"])
def test_a_full_batch_has_its_slots_free_after_removal_D6_D11(in_chunks: Loaded, at: str) -> None:
    loaded, keys = in_chunks, [RequestKey(key) for key in (1, 2, 3, 4)]
    loaded.insert(*(loaded.row(k, LONG if at == "prefill" else 5, max_tokens=50) for k in keys))
    if at == "prefill":
        assert loaded.is_within_prompt(1)
    elif at == "decode":
        loaded.step_until_token_of(1)
    for key in [*keys, *keys, RequestKey(99)]:
        loaded.engine.remove(key)
    assert not loaded.engine.row_count()
    again = loaded.run(*(loaded.row(k, max_tokens=2) for k in (5, 6, 7, 8)))
    assert lengths(again) == dict.fromkeys((5, 6, 7, 8), 2)
    loaded.engine.remove()
    loaded.engine.remove(RequestKey(5))


# ---------------------------------------------------------------- prompts that may not be read
def test_rows_that_decode_continue_while_a_long_prompt_is_held(in_chunks: Loaded) -> None:
    loaded, engine = in_chunks, in_chunks.engine
    assert (engine.has_long_prompt(), engine.has_decoding()) == (False, False)
    loaded.insert(loaded.row(1, max_tokens=200))
    loaded.step_until_token_of(1)
    assert (engine.has_long_prompt(), engine.has_decoding()) == (False, True)
    loaded.insert(loaded.row(2, LONG, max_tokens=4))
    assert engine.has_long_prompt()
    for _ in range(5):
        result = engine.decode()
        assert [token.key for token in result.tokens] == [1]
        assert result.prefill == []
    engine.remove(RequestKey(1))
    assert (engine.has_long_prompt(), engine.has_decoding()) == (True, False)
    assert (engine.decode().tokens, engine.row_count()) == ([], 1)
    engine.remove(RequestKey(2))


def test_a_prompt_is_long_up_to_its_end_and_its_first_token_needs_no_reading(
    in_chunks: Loaded,
) -> None:
    loaded, engine = in_chunks, in_chunks.engine
    loaded.insert(loaded.row(2, LONG, max_tokens=4))
    read, seen, steps = 0, 0, 0
    while engine.has_long_prompt():
        assert not engine.has_decoding()
        result = loaded.step()
        read = max([read, *(prefill.done for prefill in result.prefill)])
        seen += len(result.tokens)
        steps += 1
    assert read >= LONG - 1
    assert steps > 2
    for _ in range(3):
        if not seen:
            assert engine.has_decoding()
            seen += len(engine.decode().tokens)
    assert seen == 1
    engine.remove(RequestKey(2))
    assert (engine.has_long_prompt(), engine.has_decoding()) == (False, False)


@pytest.mark.draws
@pytest.mark.bits
def test_an_answer_does_not_depend_on_when_its_prompt_was_held(in_chunks: Loaded) -> None:
    loaded = in_chunks

    def answer(holds: int) -> list[int | None]:
        loaded.insert(loaded.row(3, LONG))
        tokens: list[int | None] = []
        for index in range(LIMIT):
            if not loaded.engine.row_count():
                return tokens
            is_held = index % (holds + 1) != 0
            result = loaded.engine.decode() if is_held else loaded.step()
            tokens += [token.token for token in result.tokens]
        raise AssertionError("no end")

    alone = answer(0)
    assert len(alone) == 8
    assert answer(2) == alone


# ---------------------------------------------------------------- text
def test_text_goes_through_tokens_and_back_G7(loaded: Loaded) -> None:
    codec, text = loaded.engine.text, "tide 🦊 über 日本."
    prompt = codec.encode(RequestBody(prompt=text))
    detokenizer = codec.detokenizer()
    shown = "".join(detokenizer.add(token) for token in prompt.tokens) + detokenizer.finish()
    assert text in shown


def test_a_chat_is_rendered_and_ids_of_the_vocabulary_are_taken_as_they_are_C7(
    loaded: Loaded,
) -> None:
    codec = loaded.engine.text
    assert codec.encode(RequestBody(messages=[{"role": "user", "content": "hello"}])).tokens
    assert codec.encode(RequestBody(prompt_tokens=[20, 30, 40])).tokens == [20, 30, 40]
    with pytest.raises(RemoteError) as caught:
        codec.encode(RequestBody(prompt_tokens=[loaded.facts.vocabulary_size]))
    assert caught.value.code is ErrorCode.INVALID_REQUEST
