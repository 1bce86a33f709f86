"""A vocabulary as llguidance needs it: text is written in ordinary tokens, and is that text."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from mlxsup.worker.text.grammar_tokenizer import PlainTokens

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


def test_text_that_the_tokenizer_would_change_is_written_token_by_token() -> None:
    assert made(Core(adds_space=True))("ab") == [92]
