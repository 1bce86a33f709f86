"""What every engine must do while its prompts may not be read: decode, and nothing else."""

from collections.abc import Callable, Iterator

import pytest

from mlxsup.protocol.ids import RequestKey
from mlxsup.worker.engine import Engine, Row
from mlxsup.worker.engines.mlx.prefill import PrefillPacer

from support.core.row_values import row_values

LONG = 700
"""Tokens of a prompt that takes several steps."""

CHUNK = 200
"""Tokens that MLX's engine reads in a step, however fast this machine is."""

SHORT = 5
LIMIT = 2000
"""Steps in which everything here has happened."""


@pytest.fixture
def engine(make: Callable[[], Engine], monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    made = make()
    made.load(lambda phase, at: None)
    monkeypatch.setattr(PrefillPacer, "chunk", lambda *_, **__: CHUNK)
    yield made
    made.close()


def row(key: int, length: int, max_tokens: int) -> Row:
    tokens = [20 + (key * 31 + i * 7) % 180 for i in range(length)]
    return Row(key=RequestKey(key), tokens=tokens, **row_values(max_tokens=max_tokens, seed=key))


def step_until_token_of(engine: Engine, key: int) -> None:
    for _ in range(LIMIT):
        if any(token.key == key for token in engine.step().tokens):
            return
    raise AssertionError(f"no token of {key}")


def test_without_a_row_there_is_no_long_prompt_and_nothing_decodes(engine: Engine) -> None:
    assert not engine.has_long_prompt()
    assert not engine.has_decoding()
    engine.insert(row(1, SHORT, 1))
    step_until_token_of(engine, 1)
    assert not engine.has_long_prompt()
    assert not engine.has_decoding()


def test_rows_that_decode_go_on_while_a_long_prompt_is_held(engine: Engine) -> None:
    engine.insert(row(1, SHORT, 200))
    step_until_token_of(engine, 1)
    assert (engine.has_long_prompt(), engine.has_decoding()) == (False, True)
    engine.insert(row(2, LONG, 4))
    assert engine.has_long_prompt()
    for _ in range(5):
        result = engine.decode()
        assert [token.key for token in result.tokens] == [1]
        assert result.prefill == []
    engine.remove(RequestKey(1))
    assert (engine.has_long_prompt(), engine.has_decoding()) == (True, False)
    assert (engine.decode().tokens, engine.row_count()) == ([], 1)


def test_a_prompt_is_long_up_to_its_end_and_its_first_token_needs_no_reading(
    engine: Engine,
) -> None:
    engine.insert(row(2, LONG, 4))
    read, seen, steps = 0, 0, 0
    while engine.has_long_prompt():
        assert not engine.has_decoding()
        result = engine.step()
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


@pytest.mark.draws
@pytest.mark.bits
def test_an_answer_does_not_depend_on_when_its_prompt_was_held(engine: Engine) -> None:
    def answer(holds: int) -> list[int | None]:
        engine.insert(row(3, LONG, 8))
        tokens: list[int | None] = []
        for index in range(LIMIT):
            if not engine.has_rows():
                return tokens
            is_held = index % (holds + 1) != 0
            result = engine.decode() if is_held else engine.step()
            tokens += [token.token for token in result.tokens]
        raise AssertionError("no end")

    alone = answer(0)
    assert len(alone) == 8
    assert answer(2) == alone
