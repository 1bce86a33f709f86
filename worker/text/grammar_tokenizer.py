"""A model's vocabulary as llguidance needs it. No MLX here."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any


class PlainTokens:
    """Writes text in ordinary tokens only.

    If a format leaves no choice, llguidance asks how its text is tokenised, and takes the answer
    for the only way. A tokenizer writes the name of a special token, such as `<|im_end|>`, as that
    token, which is not text: the answer would end there, or break the format.

    Args:
        tokenizer: a fast one of transformers; a copy of its core is kept.
        view: llguidance's view of the same vocabulary.
        end_token: the token that ends an answer.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Any, view: Any, end_token: int) -> None:
        self.eos_token_id = end_token
        self.tokens = [bytes(view.decode_bytes([token])) for token in range(view.vocab_size)]
        self.special_token_ids = [
            token for token in range(view.vocab_size) if view.is_special_token(token)
        ]
        self._special = frozenset(self.special_token_ids)
        self._view = view
        self._core = copy(tokenizer.backend_tokenizer)
        self._core.no_padding()
        self._core.no_truncation()
        self._core.encode_special_tokens = True

    def __call__(self, text: str) -> list[int]:
        """Return the tokens for exactly this text."""
        tokens: list[int] = self._core.encode(text, add_special_tokens=False).ids
        written = b"".join(self.tokens[token] for token in tokens)
        if written != text.encode() or not self._special.isdisjoint(tokens):
            # It adds a leading space, or normalises; or llguidance takes for special what the
            # tokenizer does not, such as `<think>` of Qwen3.
            tokens = self._view.greedy_tokenize(text)
        return tokens


def make_grammar_tokenizer(
    tokenizer: Any, *, vocabulary_size: int, end_tokens: Sequence[int]
) -> Any:
    """llguidance's tokenizer, which takes a second to make.

    Raises:
        ValueError: the tokenizer is not one of the fast ones.
    """
    from llguidance import LLTokenizer, TokenizerWrapper
    from llguidance.hf import from_tokenizer

    ends = list(end_tokens)
    view = from_tokenizer(tokenizer, n_vocab=vocabulary_size, eos_token=ends)
    return LLTokenizer(TokenizerWrapper(PlainTokens(tokenizer, view, ends[0])), eos_token=ends)
