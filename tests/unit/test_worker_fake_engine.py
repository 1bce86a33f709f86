"""Options and directives of the fake engine."""

from typing import Any

import pytest

from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.states import FinishReason
from mlxsup.worker.engine import Row
from mlxsup.worker.engines.fake.engine import FakeEngine
from mlxsup.worker.engines.fake.options import FakeOptionError, FakeOptions
from mlxsup.worker.engines.fake.text import Directives, answer_tokens, decode_tokens, encode_text

from support.worker.turn_bench import make_spec


def test_answers_are_a_pure_function_of_prompt_index_and_seed() -> None:
    prompt = encode_text("one")
    assert answer_tokens(prompt, 50)[:20] == answer_tokens(prompt, 20)
    assert answer_tokens(prompt, 50) != answer_tokens(encode_text("two"), 50)
    assert answer_tokens(prompt, 50, voice="a") != answer_tokens(prompt, 50, voice="b")
    assert answer_tokens(prompt, 50, voice="") == answer_tokens(prompt, 50)
    assert answer_tokens(prompt, 50, 1) != answer_tokens(prompt, 50, 2)
    assert "\N{REPLACEMENT CHARACTER}" not in decode_tokens(answer_tokens(prompt, 800))


def test_directives_are_found_anywhere_in_a_prompt() -> None:
    found = Directives.parse(
        "a [[answer 3]] b [[fault crash=exit:7 at=2 generation=1]] [[say x y]]"
    )
    assert (found.answer, found.crash, found.at, found.generation) == (3, "exit:7", 2, 1)
    assert found.say == "x y"


def test_other_brackets_are_plain_text() -> None:
    assert Directives.parse("[[notes]] [fault] [[ answer ]]") == Directives()


@pytest.mark.parametrize(
    "text",
    ["fault speed=3", "fault crash=SIGNOPE", "fault crash=exit:x", "fault stall=often",
     "fault at=soon raise", "answer many", "fault frames=odd", "fault slow=very"],
)  # fmt: skip
def test_wrong_directives_are_refused(text: str) -> None:
    with pytest.raises(FakeOptionError):
        Directives.parse(f"[[{text}]]")


@pytest.mark.parametrize(
    "options",
    [{"nonsense": 1}, {"step_s": "fast"}, {"load_steps": 0}, {"load_steps": True},
     {"load_error": "odd"}, {"load_stall": "odd"}, {"crash_in_load": "exit:256"},
     {"batching": "sometimes"}, {"voice": "é" * 33}],
    ids=str,
)  # fmt: skip
def test_wrong_options_are_refused_by_name(options: dict[str, object]) -> None:
    with pytest.raises(FakeOptionError, match=next(iter(options))):
        FakeOptions.from_map(options)


@pytest.mark.parametrize(
    ("prompt", "asked", "count", "finish"),
    [
        ("x", {}, 5, FinishReason.LENGTH),
        ("[[answer 2]]", {}, 2, FinishReason.STOP),
        ("[[answer 0]]", {}, 0, FinishReason.STOP),
        ("[[say tide]]", {}, 4, FinishReason.STOP),
        ("[[answer 2]]", {"min_tokens": 4}, 4, FinishReason.STOP),
        ("[[answer 2]]", {"ignore_eos": True}, 5, FinishReason.LENGTH),
    ],
)
def test_an_answer_ends_as_its_prompt_and_its_request_ask(
    prompt: str, asked: dict[str, Any], count: int, finish: FinishReason
) -> None:
    engine = FakeEngine(make_spec())
    engine.load(lambda phase, at: None)
    engine.insert(Row(key=RequestKey(1), tokens=encode_text(prompt), max_tokens=5, seed=1, **asked))
    tokens = [token for _ in range(6) for token in engine.step().tokens]
    assert len([one for one in tokens if one.token is not None]) == count
    assert [one.finish for one in tokens if one.finish] == [finish]


def test_a_row_set_aside_is_not_read_again() -> None:
    engine = FakeEngine(make_spec(fake={"prefill_tokens_per_step": 4}))
    engine.load(lambda phase, at: None)
    row = Row(key=RequestKey(1), tokens=list(range(20, 30)), max_tokens=1, seed=1)
    engine.insert(row)
    engine.step()
    engine.remove(row.key)
    assert engine.insert(row) == 4
    assert [engine.step().prefill[0].computed for _ in range(2)] == [4, 2]
    assert not engine.row_count()


def test_rows_whose_prompts_are_known_join_those_that_decode_in_one_step() -> None:
    """As with MLX; only one prompt that has something left to read is read in a step."""
    engine = FakeEngine(make_spec())
    engine.load(lambda phase, at: None)
    known = [
        Row(key=RequestKey(key), tokens=list(range(20, 30)), max_tokens=9, seed=1)
        for key in (1, 2, 3)
    ]
    for row in known:
        engine.insert(row)
    assert [len(engine.step().tokens) for _ in known] == [1, 2, 3]
    engine.set_aside(*(row.key for row in known), keep=True)
    engine.insert(Row(key=RequestKey(4), tokens=[20, 21, 22], max_tokens=9, seed=1))
    for row in known:
        engine.insert(row)
    step = engine.step()
    assert {token.key for token in step.tokens} == {1, 2, 3, 4}
    assert {row.key: row.computed for row in step.prefill} == {1: 1, 2: 1, 3: 1, 4: 3}
