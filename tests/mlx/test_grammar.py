"""Answers that keep to a JSON schema or a regular expression, and the grammars behind them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxsup.protocol.body import RequestBody
from mlxsup.protocol.states import FinishReason
from mlxsup.worker.engine import Prompt
from mlxsup.worker.engines.mlx.text import MlxText
from mlxsup.worker.text.grammar import MAX_KEPT, GrammarCompiler, RowGrammar

from support.daemon.paused_answers import answer_with_pauses, assert_same
from support.models.demo_model import demo_model_folder
from support.models.tiny_model import VOCABULARY_SIZE, add_tokens, make_tiny_model
from support.worker.loop_driver import LoopDriver, check_every_resume
from support.worker.mlx_rows import check_no_row_is_left, driven_engine

pytestmark = pytest.mark.mlx


def of_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


SCHEMAS: dict[str, dict[str, Any]] = {
    "flat": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "is_member": {"type": "boolean"},
        },
        "required": ["name", "age", "is_member"],
        "additionalProperties": False,
    },
    "nested": {
        "type": "object",
        "properties": {
            "tags": {
                "type": "array",
                "items": {"enum": ["red", "green", "blau🦊"]},
                "minItems": 1,
                "maxItems": 3,
            },
            "at": {
                "type": "object",
                "properties": {"x": {"type": "integer", "minimum": -9, "maximum": 9}},
                "required": ["x"],
                "additionalProperties": False,
            },
        },
        "required": ["tags", "at"],
        "additionalProperties": False,
    },
    "choice": {"enum": ["yes", "no", None, 3]},
}


def check(name: str, text: str) -> None:
    """Return whether a text fits one of three simple schemas."""
    value = json.loads(text)
    outside = re.sub(r'"(?:[^"\\]|\\.)*"', '""', text)
    assert not re.search(r"\s", outside), "optional whitespace"
    if name == "flat":
        assert set(value) == {"name", "age", "is_member"}
        assert isinstance(value["name"], str)
        assert len(value["name"]) <= 8
        assert type(value["age"]) is int
        assert 0 <= value["age"] <= 120
        assert isinstance(value["is_member"], bool)
    elif name == "nested":
        assert set(value) == {"tags", "at"}
        assert 1 <= len(value["tags"]) <= 3
        assert set(value["tags"]) <= {"red", "green", "blau🦊"}
        assert -9 <= value["at"]["x"] <= 9
    else:
        assert value in ("yes", "no", None, 3)


def of_regex(pattern: str) -> dict[str, Any]:
    return {"type": "regex", "regex": pattern}


@pytest.mark.parametrize("name", SCHEMAS)
def test_answers_keep_to_the_schema(worker: LoopDriver, name: str) -> None:
    keys = [
        worker.dispatch(
            prompt="data",
            temperature=1.5,
            seed=seed,
            max_tokens=200,
            response_format=of_schema(SCHEMAS[name]),
        )
        for seed in range(3)
    ]
    answers = worker.finish(*keys)
    for answer in answers:
        assert answer.finish is FinishReason.STOP
        check(name, answer.text)
    assert name == "choice" or len({answer.text for answer in answers}) > 1
    engine: Any = worker.engine
    check_no_row_is_left(engine)


def test_answers_keep_to_the_schema_with_a_vocabulary_of_unigrams(tmp_path: Path) -> None:
    """The decoder of T5's tokenizers, which models of other families took over."""
    place = make_tiny_model(tmp_path, eos_token_id=5) / "tokenizer.json"
    tokens = ["<unk>", "\u2581", "\u2581a", *map(chr, range(33, 127)), "true", "\u2581x", "\u2581}"]
    settings = json.loads(place.read_text()) | {
        "model": {"type": "Unigram", "unk_id": 0, "vocab": [[token, -1.0] for token in tokens]},
        "added_tokens": [],
    }
    metaspace = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always"}
    settings |= {"pre_tokenizer": metaspace, "decoder": metaspace, "post_processor": None}
    place.write_text(json.dumps(settings))
    keys = {"a b": {"type": "boolean"}, "c": {"type": "string", "minLength": 2, "maxLength": 9}}
    schema = {"type": "object", "properties": keys, "required": list(keys)}
    asked: dict[str, Any] = {"response_format": of_schema(schema)}
    with driven_engine(tmp_path, 8) as driver:
        for seed in range(3):
            answer = driver.answer(prompt="a", temperature=1.5, seed=seed, max_tokens=99, **asked)
            assert answer.finish is FinishReason.STOP
            assert [type(value) for value in json.loads(answer.text).values()] == [bool, str]


@pytest.mark.bits
def test_free_neighbours_do_not_change_C8(worker: LoopDriver) -> None:
    free: list[dict[str, Any]] = [
        {"prompt": f"tell {n}", "max_tokens": 40, "temperature": n % 2, "seed": n} for n in range(4)
    ]
    alone = [worker.answer(**one).tokens for one in free]
    keys = [worker.dispatch(**one) for one in free]
    bound = [
        worker.dispatch(prompt="d", seed=n, response_format=of_schema(SCHEMAS["flat"]))
        for n in range(3)
    ]
    assert [answer.tokens for answer in worker.finish(*keys)] == alone
    for answer in worker.finish(*bound):
        check("flat", answer.text)


@pytest.mark.bits
def test_half_a_json_value_goes_on_rightly_F10(worker: LoopDriver) -> None:
    for name in ("flat", "nested"):
        whole = worker.answer(
            prompt="data",
            temperature=1.0,
            seed=8,
            max_tokens=200,
            presence_penalty=0.5,
            response_format=of_schema(SCHEMAS[name]),
        )
        check(name, whole.text)
        check_every_resume(worker, whole, at_once=8)


@pytest.mark.parametrize("pattern", [r"[a-f]{3}-(tide|moor) 🦊?[0-9]{2}", "a!{2}b?"])
def test_a_regex_is_matched_as_a_whole(worker: LoopDriver, pattern: str) -> None:
    """Also with token 0, which is the exclamation mark here, and no end of text."""
    for seed in range(4):
        got = worker.answer(
            prompt="x",
            temperature=1.0,
            seed=seed,
            response_format={"type": "regex", "regex": pattern},
        )
        assert re.fullmatch(pattern, got.text), got.text


def test_any_object_any_text_and_a_budget_that_ends_an_answer_early(worker: LoopDriver) -> None:
    got = worker.answer(prompt="x", max_tokens=30, response_format={"type": "json_object"})
    assert got.text.startswith("{")
    free = worker.answer(prompt="x", max_tokens=9)
    same = worker.answer(prompt="x", max_tokens=9, response_format={"type": "text"})
    assert same.tokens == free.tokens
    cut = worker.answer(prompt="x", max_tokens=5, response_format=of_schema(SCHEMAS["flat"]))
    assert (cut.finish, len(cut.tokens)) == (FinishReason.LENGTH, 5)


@pytest.mark.parametrize("seed", range(4))
def test_object_has_no_properties_but_those_of_its_schema(worker: LoopDriver, seed: int) -> None:
    schema = {"properties": {"ok": {"type": "boolean"}}}
    got = worker.answer(
        prompt="x", temperature=1.0, seed=seed, max_tokens=60, response_format=of_schema(schema)
    )
    assert json.loads(got.text).keys() <= {"ok"}


@pytest.mark.parametrize("kind", ["integer", "number"])
@pytest.mark.parametrize("largest", [2**63 - 1, 1.7976931348623157e308])
def test_the_widest_bounds_of_a_language_bound_no_answer(
    worker: LoopDriver, kind: str, largest: float
) -> None:
    """Also in the parts of a schema, and not in what only looks like a bound."""
    number = {"type": kind, "minimum": -largest - 1, "maximum": largest}
    either = [{"type": kind, "exclusiveMinimum": -largest, "exclusiveMaximum": largest}]
    literal = {"const": {"maximum": 1e20}}
    keys = {"maximum": number, "b": {"anyOf": either}, "c": literal, "d": {"$ref": "#/$defs/e"}}
    schema = {"type": "object", "properties": keys, "required": list(keys), "$defs": {"e": number}}
    for seed in range(2):
        got = worker.answer(
            prompt="x",
            temperature=5.0,
            seed=seed,
            max_tokens=400,
            response_format=of_schema(schema),
        )
        assert got.finish is FinishReason.STOP, got.error
        said = json.loads(got.text)
        assert said["c"] == {"maximum": 10**20}
        assert all(-(2**63) < said[name] < 2**63 for name in ("maximum", "b", "d"))
    beyond = of_schema({"type": kind, "minimum": 1e20})
    refused = worker.answer(prompt="x", response_format=beyond).error
    assert refused is not None
    assert "minimum allows only numbers of more than 64 bits" in refused.message


LINK = {"$ref": "#/$defs/n"}
ENDLESS = LINK | {"$defs": {"n": {"type": "object", "properties": {"c": LINK}, "required": ["c"]}}}
DEEP: dict[str, Any] = {"type": "string"}
for _ in range(400):
    DEEP = {"type": "object", "properties": {"a": DEEP}, "required": ["a"]}


NOTHING = ": nothing can match it"
IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    (of_schema({"type": "nonsense"}), "nonsense"),
    (of_schema({"type": "string", "minLength": 5, "maxLength": 2}), "minLength (5) is greater"),
    (of_schema({"allOf": [{"type": "string"}, {"type": "integer"}]}), "incompatible types"),
    (of_schema({"enum": []}), "is empty"),
    (of_schema({"$ref": "#/missing"}), "'/missing' does not exist"),
    (of_regex("(("), ": a regular expression: unclosed group"),
    (of_regex("()"), "empty answer"),
    (of_regex("(?=a)b"), "look-around"),
    (of_regex(r"\bfoo"), "look-around"),
    # Those that break where every answer goes.
    (of_schema(ENDLESS), "Too many items"),
    (of_schema({"$ref": "#"}), NOTHING),
    (of_schema(LINK | {"$defs": {"n": {"$ref": "#/$defs/m"}, "m": LINK}}), NOTHING),
    (of_schema({"type": "object", "properties": {"a": False}, "required": ["a"]}), "property 'a'"),
    (of_schema(DEEP), "nested too deeply"),
    (of_regex(r"[^\s\S]"), NOTHING),
]


@pytest.mark.parametrize(
    ("response_format", "why"), IMPOSSIBLE, ids=[str(form)[:80] for form, _ in IMPOSSIBLE]
)
def test_an_impossible_form_is_the_requests_own_error_and_says_why_C7(
    worker: LoopDriver, response_format: dict[str, Any], why: str
) -> None:
    good = worker.dispatch(prompt="fine", max_tokens=4)
    bad = worker.dispatch(prompt="x", response_format=response_format)
    answers = worker.finish(good, bad)
    assert len(answers[0].tokens) == 4
    assert answers[1].error is not None
    assert answers[1].error.code == "invalid_request"
    assert answers[1].error.detail["parameter"] == "response_format"
    assert answers[1].tokens == []
    message = answers[1].error.message
    assert message.startswith("no answer can fit response_format: ")
    assert why in message
    assert "<state>" not in message


@pytest.mark.parametrize(
    ("schema", "left_out"),
    [
        (
            {"type": "array", "items": {"enum": [1]}, "maxItems": 1, "uniqueItems": True},
            "uniqueItems",
        ),
        ({"type": "string", "maxLength": 1, "format": "path"}, "path"),
        ({"oneOf": [{"enum": [1, 2]}, {"enum": [2, 3]}]}, "oneOf"),
        (
            {"type": "object", "propertyNames": {"minLength": 2}, "maxProperties": 0},
            "propertyNames",
        ),
        ({"enum": [1]}, ""),
    ],
)
def test_what_no_grammar_can_hold_an_answer_to_is_named_in_a_warning(
    worker: LoopDriver, schema: dict[str, Any], left_out: str
) -> None:
    got = worker.answer(prompt="x", response_format=of_schema(schema))
    json.loads(got.text)
    warnings = [delta.warning for delta in got.deltas if delta.warning]
    assert len(warnings) == bool(left_out)
    assert all("response_format" in one and left_out in one for one in warnings)


def test_with_penalties_bias_filters_and_logprobs_at_once(worker: LoopDriver) -> None:
    got = worker.answer(
        prompt="x",
        temperature=2.0,
        top_k=3,
        min_p=0.2,
        xtc_probability=1.0,
        xtc_threshold=0.0,
        repetition_penalty=1.5,
        frequency_penalty=2.0,
        logit_bias={str(token): -100 for token in range(0, VOCABULARY_SIZE, 3)[:1000]},
        seed=3,
        logprobs=True,
        top_logprobs=20,
        response_format=of_schema(SCHEMAS["nested"]),
    )
    check("nested", got.text)
    entries = [entry for delta in got.deltas for entry in delta.logprobs or ()]
    assert len(entries) == len(got.tokens)
    assert -9999.0 in {other.logprob for entry in entries for other in entry.top}


@pytest.mark.bits
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", SCHEMAS)
def test_100_of_100_on_the_demo_model(name: str) -> None:
    """At temperature 1, beside free neighbours whose answers stay what they are alone."""
    free: dict[str, Any] = {
        "prompt": "The sea is", "max_tokens": 30, "seed": 5, "temperature": 1.0,
    }  # fmt: skip
    with driven_engine(demo_model_folder(), 8, prefix_cache_bytes=2**28) as driver:
        alone = driver.answer(**free).tokens
        beside = driver.dispatch(**free)
        keys = [
            driver.dispatch(
                messages=[{"role": "user", "content": "Tell me of a person, as JSON."}],
                temperature=1.0,
                seed=seed,
                max_tokens=200,
                response_format=of_schema(SCHEMAS[name]),
            )
            for seed in range(100)
        ]
        for answer in driver.finish(*keys):
            check(name, answer.text)
        assert driver.finish(beside)[0].tokens == alone


def test_a_grammar_begins_after_the_reasoning(worker: LoopDriver) -> None:
    text: Any = worker.engine.text
    body = RequestBody(prompt="x", response_format={"type": "regex", "regex": "[0-9]{2}"})
    compiled = text.constrain(body, Prompt(tokens=[5])).grammar
    assert compiled.mask() is not None
    end = text.encode(RequestBody(prompt="tide moor")).tokens
    stages = [end[:2], end[2:]]
    assert all(stages)
    waiting = text.grammars.compile(body.response_format, stages)
    for token in [*end[:1], *end[2:], *end[:2], *end[:1], *end[2:]]:
        assert waiting.mask() is None
        assert not waiting.is_over
        waiting.accept(token)
    for digit in "42":
        assert waiting.mask() == compiled.mask()
        for one in (waiting, compiled):
            one.accept(text.encode(RequestBody(prompt=digit)).tokens[0])
    assert waiting.is_over


@pytest.mark.bits
def test_a_model_without_an_end_ends_where_the_form_may_and_shows_no_sign_of_it(
    worker: LoopDriver,
) -> None:
    """The form may end at many places, and the model has no token to say that it does."""
    pattern = "[a-z]{3,9}(-[0-9]{2}){1,9}"
    form = {"type": "regex", "regex": pattern}
    answers = [
        worker.answer(prompt="x", temperature=1.5, seed=seed, response_format=form)
        for seed in range(10)
    ]
    for answer in answers:
        assert re.fullmatch(pattern, answer.text)
        assert answer.finish is FinishReason.STOP
    assert len({answer.text.count("-") for answer in answers}) > 3
    check_every_resume(worker, answers[0])
    for seed, keep in enumerate((True, False)):
        asked: dict[str, Any] = {"temperature": 1.5, "seed": seed, "response_format": form}
        paused = answer_with_pauses(worker, 1, keep=keep, prompt="x", **asked)
        assert_same(paused, answers[seed])
    assert not worker.engine.row_count()


@pytest.mark.bits
def test_an_answer_may_end_with_the_models_own_token(tmp_path: Path) -> None:
    """Where the form allows an end and more, the model decides."""
    end = 111  # the letter o, which no number holds
    form = of_schema({"type": "integer", "minimum": 0})
    asked: dict[str, Any] = {"prompt": "x", "temperature": 2.0, "max_tokens": 60}
    with driven_engine(make_tiny_model(tmp_path, eos_token_id=end)) as driver:
        answers = [driver.answer(seed=seed, response_format=form, **asked) for seed in range(4)]
        assert all(answer.text.isdigit() for answer in answers)
        assert {answer.finish for answer in answers} == {FinishReason.STOP}
        check_every_resume(driver, answers[0])


NAMES = ("<|end|>", "a<|end|>b", "<|mark|>🦊\n")

SPECIAL = {VOCABULARY_SIZE - 2, VOCABULARY_SIZE - 1}


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopDriver]:
    """A model with two special tokens, one of them its end of text."""
    folder = tmp_path_factory.mktemp("models") / "named"
    make_tiny_model(folder, eos_token_id=VOCABULARY_SIZE - 1)
    add_tokens(folder, ["<|mark|>", "<|end|>"], is_special=True)
    with driven_engine(folder) as driver:
        yield driver


def of_names(name: str) -> dict[str, dict[str, Any]]:
    """Forms that demand this text, and one that allows it."""
    digit = {"enum": [3, 4]}
    both = {"type": "object", "properties": {"stop": {"const": name}, "n": digit}}
    return {
        "const": of_schema({"const": name}),
        "object": of_schema(both | {"required": ["stop", "n"], "additionalProperties": False}),
        "enum": of_schema({"enum": [name, name + "!"]}),
        "regex": {"type": "regex", "regex": re.escape(json.dumps(name, ensure_ascii=False))},
    }


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", of_names(""))
def test_the_name_of_a_special_token_is_text_like_any_other(
    named: LoopDriver, form: str, name: str
) -> None:
    """Where the form leaves no choice, too: no end of text comes in its stead."""
    answer = named.answer(prompt="x", max_tokens=90, response_format=of_names(name)[form])
    assert (answer.error, answer.finish) == (None, FinishReason.STOP)
    found = json.loads(answer.text)
    assert (found["stop"] if form == "object" else found.rstrip("!")) == name
    assert not SPECIAL & set(answer.tokens[:-1])
    if form == "object" and name == NAMES[1]:
        check_every_resume(named, answer)


def test_a_wide_schema_is_followed(worker: LoopDriver) -> None:
    properties = {f"p{number}": {"type": "integer"} for number in range(300)}
    wide = {"type": "object", "properties": properties, "additionalProperties": False}
    answer = worker.answer(
        prompt="x", max_tokens=40, seed=1, temperature=1.0, response_format=of_schema(wide)
    )
    assert answer.error is None
    assert answer.text.startswith(('{"p', "{}"))


def test_an_answer_that_cannot_go_on_in_its_form_is_an_error_and_no_good_end(
    monkeypatch: pytest.MonkeyPatch, worker: LoopDriver
) -> None:
    """llguidance gives up in mid-answer; its neighbour does not notice."""
    made: list[RowGrammar | None] = []
    constrain = MlxText.constrain

    def noted(text: MlxText, body: RequestBody, prompt: Prompt) -> Prompt:
        prompt = constrain(text, body, prompt)
        made.append(prompt.grammar)
        return prompt

    monkeypatch.setattr(MlxText, "constrain", noted)
    free: dict[str, Any] = {"prompt": "tell", "max_tokens": 30}
    alone = worker.answer(**free).tokens
    form = {"type": "regex", "regex": "[a-z]{40}"}
    beside = worker.dispatch(**free)
    key = worker.dispatch(prompt="x", max_tokens=90, seed=2, temperature=1.0, response_format=form)
    while len(worker.answers[key].tokens) < 3:
        worker.turn()
    [grammar] = [grammar for grammar in made if grammar is not None]
    grammar.accept(worker.facts.vocabulary_size - 1)
    broken, kept = worker.finish(key, beside)
    assert broken.finish is None
    assert broken.error is not None
    assert broken.error.code == "invalid_request"
    assert broken.error.detail["parameter"] == "response_format"
    assert kept.tokens == alone
    assert not worker.engine.row_count()


def test_compiled_grammars_are_kept_and_bounded(
    monkeypatch: pytest.MonkeyPatch, worker: LoopDriver
) -> None:
    from llguidance import LLMatcher

    made: list[int] = []
    compiled: list[str] = []
    text: Any = worker.engine.text

    def make() -> Any:
        made.append(1)
        return text.grammar_tokenizer()

    class Matcher:
        """llguidance's own, and a note that one was compiled."""

        grammar_from_regex = LLMatcher.grammar_from_regex

        def __new__(cls, tokenizer: Any, grammar: str, **options: Any) -> Any:
            compiled.append(grammar)
            return LLMatcher(tokenizer, grammar, **options)

    monkeypatch.setattr("llguidance.LLMatcher", Matcher)
    compiler = GrammarCompiler(make)

    def compile_all(numbers: Iterable[int]) -> int:
        """How many of these forms were not known."""
        before = len(compiled)
        for number in numbers:
            assert compiler.compile({"type": "regex", "regex": f"a{number}"}) is not None
        return len(compiled) - before

    assert compile_all(range(MAX_KEPT + 5)) == MAX_KEPT + 5
    assert len(made) == 1
    assert compile_all(range(5, MAX_KEPT + 5)) == 0, "the latest ones are kept"
    assert compile_all(range(5)) == 5, "and no more of them"
