"""What every `Engine` must do; the step loop relies on nothing else."""

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest

from mlxsup.protocol.body import RequestBody
from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.states import FinishReason, LoadPhase
from mlxsup.worker.engine import Engine, EngineFacts, Row, StepResult
from mlxsup.worker.engines.mlx.prefill import PrefillPacer

from support.core.row_values import row_values

LONG = 700
"""Tokens of a prompt that takes several steps of prefill in either engine, or is let do so."""

CHUNK = 64
"""Tokens that MLX's engine reads in a step that is to end within a prompt, however fast it is."""


class Loaded:
    """An engine after its load, and short ways to drive it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.progress: list[tuple[LoadPhase, float]] = []
        self.facts: EngineFacts = engine.load(lambda phase, at: self.progress.append((phase, at)))
        self.rows_after_load = engine.has_rows()
        self.keys: set[RequestKey] = set()
        self.is_closed = False

    def row(self, key: int, length: int = 5, **parameters: object) -> Row:
        """A row whose prompt depends on its key."""
        tokens = [20 + (key * 31 + i * 7) % 180 for i in range(length)]
        values = row_values(**{"max_tokens": 8, "seed": key, **parameters})
        return Row(key=RequestKey(key), tokens=tokens, **values)

    def insert(self, *rows: Row) -> None:
        for row in rows:
            self.keys.add(row.key)
            self.engine.insert(row)

    def step(self) -> StepResult:
        """One step, held to what each must keep."""
        result = self.engine.step()
        keys = [token.key for token in result.tokens]
        assert len(keys) == len(set(keys)), "more than one token of a row in one step"
        for token in result.tokens:
            assert token.token is None or 0 <= token.token < self.facts.vocabulary_size
            assert token.token is not None or token.finish is not None
        for prefill in result.prefill:
            assert 0 < prefill.done <= prefill.total
        return result

    def run(self, *rows: Row, limit: int = 2000) -> dict[int, list[int]]:
        """Inserts, steps until nothing is left, and returns the tokens by key."""
        self.insert(*rows)
        return self.run_on(limit)

    def run_on(self, limit: int = 2000) -> dict[int, list[int]]:
        tokens: dict[int, list[int]] = {}
        finished: dict[int, FinishReason] = {}
        for _ in range(limit):
            if not self.engine.has_rows():
                return tokens
            for token in self.step().tokens:
                assert token.key not in finished, "a token after the end"
                tokens.setdefault(token.key, [])
                if token.token is not None:
                    tokens[token.key].append(token.token)
                if token.finish is not None:
                    finished[token.key] = token.finish
        raise AssertionError(f"rows were left after {limit} steps")

    def step_until_token_of(self, key: int) -> None:
        for _ in range(2000):
            if any(token.key == key for token in self.step().tokens):
                return
        raise AssertionError(f"no token of {key}")

    def step_into_prefill_of(self, key: int) -> None:
        for _ in range(10):
            with mock.patch.object(PrefillPacer, "chunk", return_value=CHUNK):
                result = self.step()
            for prefill in result.prefill:
                if prefill.key == key:
                    assert prefill.done < prefill.total, "no step is within the prompt"
                    return
        raise AssertionError(f"no prefill of {key}")

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.engine.close()


@pytest.fixture(scope="module")
def shared(make: Callable[[], Engine]) -> Iterator[Loaded]:
    made = Loaded(make())
    yield made
    made.close()


@pytest.fixture
def fresh(make: Callable[[], Engine]) -> Iterator[Loaded]:
    """An engine that has not learned yet how much of a prompt fits into a step."""
    made = Loaded(make())
    yield made
    made.close()


@pytest.fixture
def loaded(shared: Loaded) -> Iterator[Loaded]:
    """The engine that the module's tests share; each leaves it as empty as it found it."""
    yield shared
    left = shared.engine.row_count()
    shared.engine.remove(*shared.keys)
    assert left == 0, "rows are left"


def test_a_load_reports_progress_and_returns_facts_B1(loaded: Loaded) -> None:
    at = [progress for _, progress in loaded.progress]
    assert at
    assert at == sorted(at)
    assert 0.0 <= at[0] <= at[-1] <= 1.0
    assert loaded.facts.context_length > 1
    assert loaded.facts.vocabulary_size > 1
    assert loaded.facts.fingerprint
    assert loaded.facts.backend


def test_a_load_leaves_no_row_B5(loaded: Loaded) -> None:
    assert not loaded.rows_after_load


def test_the_fingerprint_is_that_of_the_model(make: Callable[[], Engine], loaded: Loaded) -> None:
    again = Loaded(make())
    again.close()
    assert again.facts.fingerprint == loaded.facts.fingerprint


def test_exactly_max_tokens_then_length(loaded: Loaded) -> None:
    loaded.insert(loaded.row(1, max_tokens=6))
    seen = [token for _ in range(40) if loaded.engine.has_rows() for token in loaded.step().tokens]
    assert len(seen) == 6
    assert all(token.token is not None for token in seen)
    assert [token.finish for token in seen] == [None] * 5 + [FinishReason.LENGTH]
    assert not loaded.engine.has_rows()


@pytest.mark.parametrize("length", [1, 2, LONG])
def test_one_token_answers_and_prompts_of_any_length(loaded: Loaded, length: int) -> None:
    assert len(loaded.run(loaded.row(1, length, max_tokens=1))[1]) == 1


def test_prefill_is_reported_up_to_the_whole_prompt(loaded: Loaded) -> None:
    loaded.insert(loaded.row(1, LONG, max_tokens=2))
    reported = []
    while loaded.engine.has_rows():
        reported += [p for p in loaded.step().prefill if p.key == 1]
    assert {p.total for p in reported} == {LONG}
    done = [p.done for p in reported]
    assert done == sorted(done)


def test_a_step_says_what_it_computed_and_for_whom(loaded: Loaded) -> None:
    rows = [loaded.row(11, LONG), loaded.row(12), loaded.row(13, 1)]
    loaded.keys.update(row.key for row in rows)
    to_compute = {row.key: len(row.tokens) - loaded.engine.insert(row) for row in rows}
    computed = dict.fromkeys(to_compute, 0)
    while loaded.engine.has_rows():
        result = loaded.step()
        assert 0.0 <= result.decode_s <= result.took_s
        assert result.tokens or any(row.computed for row in result.prefill), "nobody pays for it"
        for read in result.prefill:
            assert read.computed >= 0
            computed[read.key] += read.computed
    assert computed == to_compute


def test_rows_of_different_lengths_all_end(loaded: Loaded) -> None:
    rows = [loaded.row(k, 3 + 50 * k, max_tokens=3 * k) for k in (1, 2, 3, 4)]
    assert {key: len(tokens) for key, tokens in loaded.run(*rows).items()} == {
        k: 3 * k for k in (1, 2, 3, 4)
    }


def test_a_row_inserted_while_others_decode_is_in_by_the_next_step_C2(loaded: Loaded) -> None:
    loaded.insert(loaded.row(1, max_tokens=200))
    loaded.step_until_token_of(1)
    loaded.insert(loaded.row(2, 40, max_tokens=3))
    first = loaded.step()
    second = loaded.step()
    keys = {p.key for p in first.prefill} | {t.key for t in first.tokens}
    assert 2 in keys, "no work was done for the new row in the next step"
    assert 1 in {t.key for t in first.tokens + second.tokens}, "the running row stood still"
    loaded.engine.remove(RequestKey(1))
    loaded.engine.remove(RequestKey(2))


def test_remove_in_prefill_leaves_nothing_D3(fresh: Loaded) -> None:
    loaded = fresh
    loaded.insert(loaded.row(1, LONG))
    loaded.step_into_prefill_of(1)
    loaded.engine.remove(RequestKey(1))
    assert not loaded.engine.has_rows()
    assert set(loaded.run(loaded.row(2))) == {2}


def test_remove_before_the_first_step_leaves_nothing_D2(loaded: Loaded) -> None:
    loaded.insert(loaded.row(1))
    loaded.engine.remove(RequestKey(1))
    assert not loaded.engine.has_rows()


def test_remove_in_decode_touches_no_other_row_D3_D8(loaded: Loaded) -> None:
    alone = loaded.run(loaded.row(2, max_tokens=20))[2]
    loaded.insert(loaded.row(1, max_tokens=20), loaded.row(2, max_tokens=20))
    loaded.step_until_token_of(1)
    loaded.engine.remove(RequestKey(1))
    rest = loaded.run_on()
    assert 1 not in rest
    assert alone[-len(rest[2]) :] == rest[2]


def test_remove_twice_and_of_unknown_keys_is_harmless_D6(loaded: Loaded) -> None:
    loaded.insert(loaded.row(1))
    loaded.step()
    for key in (1, 1, 99):
        loaded.engine.remove(RequestKey(key))
    assert not loaded.engine.has_rows()
    finished = loaded.run(loaded.row(3, max_tokens=1))
    loaded.engine.remove(RequestKey(3))
    assert len(finished[3]) == 1


@pytest.mark.bits
def test_several_rows_leave_at_once_wherever_they_stand_D3_D8(fresh: Loaded) -> None:
    """One decodes, one is in prefill, one has not begun, one is not there at all."""
    loaded = fresh
    alone = loaded.run(loaded.row(2, max_tokens=20))[2]
    loaded.insert(loaded.row(1, max_tokens=20), loaded.row(2, max_tokens=20))
    loaded.step_until_token_of(1)
    loaded.insert(loaded.row(3, LONG))
    loaded.step_into_prefill_of(3)
    loaded.insert(loaded.row(4))
    loaded.engine.remove(*map(RequestKey, (4, 1, 99, 3, 1)))
    assert loaded.engine.row_count() == 1
    rest = loaded.run_on()
    assert set(rest) == {2}
    assert alone[-len(rest[2]) :] == rest[2]
    loaded.engine.remove()
    again = loaded.run(*(loaded.row(k, max_tokens=2) for k in (1, 3, 4, 5)))
    assert {key: len(tokens) for key, tokens in again.items()} == dict.fromkeys((1, 3, 4, 5), 2)


def test_a_full_batch_has_its_slots_free_after_removal_D11(loaded: Loaded) -> None:
    loaded.insert(*(loaded.row(k, max_tokens=50) for k in (1, 2, 3, 4)))
    loaded.step_until_token_of(1)
    for key in (1, 2, 3, 4):
        loaded.engine.remove(RequestKey(key))
    again = loaded.run(*(loaded.row(k, max_tokens=2) for k in (5, 6, 7, 8)))
    assert {key: len(tokens) for key, tokens in again.items()} == dict.fromkeys((5, 6, 7, 8), 2)


def test_greedy_answers_repeat(loaded: Loaded) -> None:
    first = loaded.run(loaded.row(1, max_tokens=24))[1]
    assert loaded.run(loaded.row(1, max_tokens=24, seed=99))[1] == first


@pytest.mark.bits
def test_a_batched_greedy_answer_equals_the_solo_one_C10(loaded: Loaded) -> None:
    rows = [loaded.row(k, 5 + 9 * k, max_tokens=16) for k in (1, 2, 3, 4)]
    solo = {row.key: loaded.run(row)[row.key] for row in rows}
    assert loaded.run(*rows) == solo


@pytest.mark.bits
def test_a_solo_answer_stays_after_churn_C10(loaded: Loaded) -> None:
    row = loaded.row(1, 30, max_tokens=30)
    solo = loaded.run(row)[1]
    loaded.insert(loaded.row(2, 90, max_tokens=40), loaded.row(3, max_tokens=4))
    loaded.step_until_token_of(3)
    loaded.insert(row)
    tokens: list[int] = []
    for index in range(200):
        if not loaded.engine.has_rows():
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


def test_a_prediction_and_memory_are_numbers(loaded: Loaded) -> None:
    loaded.run(loaded.row(1))
    assert loaded.engine.predict_step_s() >= 0
    held = loaded.engine.bytes_held()
    assert min(held.active, held.cache, held.peak) >= 0


def test_text_goes_through_tokens_and_back_G7(loaded: Loaded) -> None:
    codec = loaded.engine.text
    text = "tide 🦊 über 日本."
    prompt = codec.encode(RequestBody(prompt=text))
    detokenizer = codec.detokenizer()
    shown = "".join(detokenizer.add(token) for token in prompt.tokens) + detokenizer.finish()
    assert text in shown


def test_a_chat_is_rendered_and_ids_are_taken_as_they_are(loaded: Loaded) -> None:
    codec = loaded.engine.text
    chat = codec.encode(RequestBody(messages=[{"role": "user", "content": "hello"}]))
    assert chat.tokens
    assert codec.encode(RequestBody(prompt_tokens=[20, 30, 40])).tokens == [20, 30, 40]


def test_ids_outside_the_vocabulary_are_the_requests_own_error_C7(loaded: Loaded) -> None:
    with pytest.raises(RemoteError) as caught:
        loaded.engine.text.encode(RequestBody(prompt_tokens=[loaded.facts.vocabulary_size]))
    assert caught.value.code is ErrorCode.INVALID_REQUEST


def test_close_with_rows_left_E2(make: Callable[[], Engine]) -> None:
    loaded = Loaded(make())
    loaded.insert(loaded.row(1, LONG), loaded.row(2))
    loaded.step()
    assert loaded.engine.row_count() == 2
    loaded.close()
    assert (loaded.engine.has_rows(), loaded.engine.row_count()) == (False, 0)
