"""A model's vocabulary as llguidance needs it. No MLX here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import copy
from typing import Any


class PlainTokens:
    """Writes text in ordinary tokens only.

    If a format leaves no choice, llguidance asks how its text is tokenised, and takes the answer
    for the only way. A tokenizer writes the name of a special token, such as `<|im_end|>`, as that
    token, which is not text: the answer would end there, or break the format.

    Args:
        core: of a fast tokenizer of transformers, which nothing else may change.
        view: llguidance's view of the same vocabulary.
        end_tokens: those that end an answer.
    """

    bos_token_id = None

    def __init__(self, core: Any, view: Any, end_tokens: Sequence[int]) -> None:
        self.eos_token_id = end_tokens[0]
        self.tokens = [bytes(view.decode_bytes([token])) for token in range(view.vocab_size)]
        ends = frozenset(end_tokens)
        # An id that ends an answer would end it in the middle of a text, too.
        self.special_token_ids = [
            token
            for token in range(view.vocab_size)
            if token in ends or view.is_special_token(token)
        ]
        self._special = frozenset(self.special_token_ids)
        self._view = view
        self._core = core
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
        ValueError: the tokenizer is not one of the fast ones, or writes its tokens in a way that
            llguidance does not know.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    core: Any = getattr(tokenizer, "backend_tokenizer", None)
    if not hasattr(core, "to_str"):
        raise ValueError("only fast tokenizers are supported")
    core = copy(core)
    core.no_padding()
    core.no_truncation()
    settings = json.loads(core.to_str())
    decoder = settings["decoder"] or {}
    if decoder.get("type") == "Metaspace":
        # It writes what sentencepiece writes, but llguidance knows only the latter.
        space = {"type": "Replace", "pattern": {"String": decoder["replacement"]}, "content": " "}
        steps = [space, {"type": "ByteFallback"}, {"type": "Fuse"}]
        settings["decoder"] = {"type": "Sequence", "decoders": steps}
    ends = list(end_tokens)
    view = LLTokenizer(json.dumps(settings), n_vocab=vocabulary_size, eos_token=ends)
    return LLTokenizer(TokenizerWrapper(PlainTokens(core, view, ends)), eos_token=ends)
