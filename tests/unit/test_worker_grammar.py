"""The state of an answer that keeps to a form, and how its vocabulary is handed to llguidance."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.worker.text import grammar as module
from mlxsup.worker.text.grammar import Grammar, GrammarCompiler
from mlxsup.worker.text.grammar_tokenizer import PlainTokens

END = 7


class Matcher:
    """Allows these ids in turn, then nothing more.

    Attributes:
        consumed: ids that it was given.
    """

    def __init__(self, *allowed: set[int], breaks_at: int | None = None) -> None:
        self._allowed = allowed
        self._breaks_at = breaks_at
        self.consumed: list[int] = []
        self.copies = 0

    def deep_copy(self) -> Matcher:
        self.copies += 1
        return Matcher(*self._allowed, breaks_at=self._breaks_at)

    def is_stopped(self) -> bool:
        return len(self.consumed) >= len(self._allowed) or self.is_error()

    def is_error(self) -> bool:
        return self._breaks_at is not None and len(self.consumed) >= self._breaks_at

    def get_error(self) -> str:
        return "too many\n items <state> line 3 </state>" if self.is_error() else ""

    def consume_token(self, token: int) -> None:
        self.consumed.append(token)

    def compute_bitmask(self) -> bytes:
        ids = self._allowed[len(self.consumed)]
        return sum(1 << token for token in ids).to_bytes(2, "little")


def bits(*tokens: int) -> bytes:
    return sum(1 << token for token in tokens).to_bytes(2, "little")


def test_an_answer_is_over_as_soon_as_only_the_end_may_follow() -> None:
    matcher = Matcher({1}, {END, 6})
    state = Grammar(matcher, [END, 6])
    state.accept(1)
    assert not state.is_over, "nobody has looked yet"
    assert (state.mask(), state.is_over) == (None, True)
    state.accept(END)
    assert matcher.consumed == [1]


def test_a_form_holds_from_where_the_content_begins() -> None:
    """Each stage must be there as a whole, one after the other."""
    matcher = Matcher({1}, {2})
    state = Grammar(matcher, [END], [[3, 4], [5]])
    for token in (5, 3, 3, 1, 4, 3, 4, 3, 4):
        assert (state.has_begun, state.is_over, state.mask()) == (False, False, None)
        state.accept(token)
    state.accept(5)
    assert matcher.consumed == []
    assert (state.has_begun, state.mask()) == (True, bits(1))
    state.accept(1)
    assert matcher.consumed == [1]


def test_tokens_of_one_stage_are_no_part_of_the_next() -> None:
    state = Grammar(Matcher({1}), [END], [[3], [3, 3]])
    for token in (3, 3):
        state.accept(token)
        assert not state.has_begun
    state.accept(3)
    assert state.has_begun


def test_a_matcher_that_gives_up_ends_the_answer_with_its_reason() -> None:
    state = Grammar(Matcher({1}, {2}, {3}, breaks_at=1), [END])
    assert (state.error, state.refusal) == ("", None)
    state.accept(1)
    assert state.is_over
    assert state.error == "too many items"
    refusal = state.refusal
    assert refusal is not None
    assert refusal.code is ErrorCode.INVALID_REQUEST
    assert refusal.message == (
        "the answer cannot continue within its response_format, which is too complex:"
        " too many items"
    )
    assert refusal.detail == {"parameter": "response_format"}


class Tokenizer:
    """Stands for llguidance's."""

    eos_tokens = (END,)


class Library:
    """Stands for llguidance: compiles the forms that it is given to these matchers, in turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *matchers: Matcher | Exception) -> None:
        self.matchers = list(matchers)
        self.asked: list[tuple[Any, ...]] = []
        outer = self

        class LLMatcher:
            def __new__(cls, tokenizer: Any, text: str, *, log_level: int, limits: Any) -> Any:
                outer.asked.append((text, log_level, limits))
                found = outer.matchers.pop(0)
                if isinstance(found, Exception):
                    raise found
                return found

            @staticmethod
            def grammar_from_regex(regex: str) -> str:
                return f"regex {regex}"

            @staticmethod
            def grammar_from_json_schema(schema: Any, *, overrides: Any) -> str:
                return f"schema {json.dumps(schema)} {json.dumps(overrides)}"

        class Fake:
            pass

        fake: Any = Fake()
        fake.LLMatcher = LLMatcher
        fake.LLParserLimits = lambda **limits: limits
        monkeypatch.setitem(sys.modules, "llguidance", fake)
        self.tokenizers = 0

    def compiler(self) -> GrammarCompiler:
        def make() -> Tokenizer:
            self.tokenizers += 1
            return Tokenizer()

        return GrammarCompiler(make)


SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"enum": [1]}}}


def test_each_answer_has_a_state_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    matcher = Matcher({1, END}, {2})
    compiler = Library(monkeypatch, matcher).compiler()
    first = compiler.compile(SCHEMA)
    second = compiler.compile(SCHEMA, [[5]])
    assert first is not None
    assert second is not None
    first.accept(1)
    assert (first.mask(), matcher.consumed) == (bits(2), [])
    first.accept(2)
    assert first.is_end(END)
    assert (second.has_begun, second.mask()) == (False, None)


def test_the_form_used_longest_ago_is_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_KEPT", 2)
    library = Library(monkeypatch, *(Matcher({1}) for _ in range(9)))
    compiler = library.compiler()
    for regex in ("a", "b", "a", "c", "a", "b"):
        compiler.compile({"type": "regex", "regex": regex})
    compiler.compile({"regex": "b", "type": "regex"})  # the order of its keys does not matter
    assert [text for text, _, _ in library.asked] == [
        "regex a", "regex b", "regex c", "regex b",
    ]  # fmt: skip


def refused(compiler: GrammarCompiler, form: dict[str, Any] = SCHEMA) -> str:
    with pytest.raises(RemoteError) as caught:
        compiler.compile(form)
    assert caught.value.code is ErrorCode.INVALID_REQUEST
    assert caught.value.detail is not None
    assert caught.value.detail["parameter"] == "response_format"
    return caught.value.message


def said(why: str) -> str:
    return f"response_format takes a format that an answer can have, not this: {why}"


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (ValueError("no such\ntype <state> x"), "no such type"),
        (ValueError("n" * 400), "n" * 300),
        (ValueError(""), "nothing can match it"),
        (ValueError("Invalid: NoExtensionBias at 3"), "nothing can match it"),
        (Matcher({1}, breaks_at=0), "too many items"),
        (Matcher(), "it only allows the empty answer"),
        (Matcher({END}), "it only allows the empty answer"),
        (Matcher({1}, {2}, {3}, breaks_at=2), "too many items"),
        # Forced to the end of what is tried.
        (Matcher(*({1} for _ in range(30)), breaks_at=15), "too many items"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_form_that_no_answer_can_have_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, found: Matcher | Exception, why: str
) -> None:
    assert refused(Library(monkeypatch, found).compiler()) == said(why)


def test_a_form_that_is_no_json_is_refused() -> None:
    compiler = GrammarCompiler(Tokenizer)
    for value in (object(), {1}):
        message = refused(compiler, {"type": "json_schema", "json_schema": {"schema": value}})
        assert message.startswith(said(f"Object of type {type(value).__name__} is not JSON"))


def test_a_missing_library_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    message = refused(GrammarCompiler(Tokenizer))
    assert message == "response_format needs llguidance: install mlxsup[structured]"


TEXTS = (b"a", b"b", b" ", b"<end>")


class Core:
    """The core of a tokenizer, which writes its tokens with a space before them or not."""

    def __init__(self, *, adds_space: bool) -> None:
        self.adds_space = adds_space
        self.encode_special_tokens = False
        self.unset: list[str] = []
        self.asked: list[tuple[str, bool]] = []

    def __copy__(self) -> Core:
        other = Core(adds_space=self.adds_space)
        other.asked = self.asked
        other.unset = self.unset
        return other

    def no_padding(self) -> None:
        self.unset.append("padding")

    def no_truncation(self) -> None:
        self.unset.append("truncation")

    def encode(self, text: str, *, add_special_tokens: bool) -> SimpleNamespace:
        assert self.encode_special_tokens, "the names of special tokens are text"
        self.asked.append((text, add_special_tokens))
        ids = [TEXTS.index(character.encode()) for character in text]
        return SimpleNamespace(ids=[2, *ids] if self.adds_space else ids)


class View:
    """llguidance's view of the same vocabulary."""

    vocab_size = len(TEXTS)

    def decode_bytes(self, tokens: list[int]) -> bytes:
        return b"".join(TEXTS[token] for token in tokens)

    def is_special_token(self, token: int) -> bool:
        return token == 3

    def greedy_tokenize(self, text: str) -> list[int]:
        return [90 + len(text)]


def made(core: Core) -> PlainTokens:
    tokenizer: Any = SimpleNamespace(backend_tokenizer=core)
    return PlainTokens(tokenizer, View(), 3)


def test_a_vocabulary_is_told_in_bytes_with_its_special_tokens_and_its_end() -> None:
    plain = made(Core(adds_space=False))
    assert plain.tokens == list(TEXTS)
    assert (plain.special_token_ids, plain.eos_token_id, plain.bos_token_id) == ([3], 3, None)


def test_text_is_written_as_the_tokenizer_does_without_special_tokens() -> None:
    core = Core(adds_space=False)
    assert made(core)("ab") == [0, 1]
    assert core.asked == [("ab", False)]
    assert core.unset == ["padding", "truncation"]
    assert not core.encode_special_tokens, "the tokenizer's own core is left as it was"
