"""A real model whose answers are known: each of its tokens has one that follows it.

It is the tiny llama with layers that add nothing, so that what follows depends on the last token
alone. Any server that runs MLX gives the same answers with it: ten words to whatever it is asked,
a call if it is offered tools, words without end if it is asked to speak `FOR_EVER`, and under a
grammar the first token that is allowed.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from support.models.tiny_model import VOCABULARY_SIZE, make_tiny_model

WORDS = ("one", " two", " three", " four", " five", " six", " seven", " eight", " nine", " ten")

ANSWER = "".join(WORDS)
"""What it says to everything."""

FOR_EVER = "for ever"
"""In the last message: the answer does not end by itself."""

FUNCTION = "weather"
ARGUMENTS = {"city": "Rome"}
"""The call that it makes if it is offered tools and the last message is the user's."""

CONTEXT_TOKENS = 200_000

_CALL = json.dumps({"name": FUNCTION, "arguments": ARGUMENTS})
_TO_CALL, _TO_EVER, _END = "<|call|>", "<|ever|>", "<|end|>"
_TAGS = ("<tool_call>", "</tool_call>")
_LOOP = (" and", " over")
_WRITTEN = (*WORDS, *_LOOP, _CALL)
"""Tokens of the vocabulary that it says."""

_SPECIAL = (*_TAGS, _TO_CALL, _TO_EVER, _END)

_CHAINS = (
    (*WORDS, _END),
    (_TO_CALL, _TAGS[0], _CALL, _TAGS[1], _END),
    (_TO_EVER, *_LOOP, _LOOP[0]),
)

_FOLLOWS, _FIRST, _LAST, _NEVER = 5.0, 3.0, -1.0, -40.0
"""How much a token is wanted: if its turn has come; if it begins an answer, or ends one; if it is a
white space, which a grammar would allow without end."""

_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}{% set tool_call = call.function %}"
    "<tool_call>{{ tool_call.name }}</tool_call>{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]"
    f"{{% if '{FOR_EVER}' in (messages[-1].content or '') %}}{_TO_EVER}"
    f"{{% elif tools and messages[-1].role == 'user' %}}{_TO_CALL}{{% endif %}}"
    "{% endif %}"
)


def make_known_model(folder: Path) -> Path:
    """Write a model folder that mlx-lm loads; return it."""
    end = VOCABULARY_SIZE - 1
    make_tiny_model(folder, eos_token_id=end, config={"max_position_embeddings": CONTEXT_TOKENS})
    _write_tokenizer(folder)
    path = folder / "model.safetensors"
    weights = load_file(path)
    for name, array in weights.items():
        if "o_proj" in name or "down_proj" in name:
            array[:] = 0.0
    embedding, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    embedding[:] = 0.0
    embedding[:, 0] = 1.0
    head[:] = 0.0
    head[: ord(" ") + 1, 0] = _NEVER
    head[_id(WORDS[0]), 0] = _FIRST
    head[_id(_END), 0] = _LAST
    _add_chains(embedding, head)
    save_file(weights, path, metadata={"format": "mlx"})
    return folder


def _id(token: str) -> int:
    tokens = (*_WRITTEN, *_SPECIAL)
    return VOCABULARY_SIZE - len(tokens) + tokens.index(token)


def _add_chains(embedding: np.ndarray[Any, Any], head: np.ndarray[Any, Any]) -> None:
    """Give each token of a chain a feature, and that feature to the output of the next."""
    features: dict[str, int] = {}
    for chain in _CHAINS:
        for token, after in pairwise(chain):
            feature = features.setdefault(token, len(features) + 1)
            embedding[_id(token), feature] = 4.0
            head[_id(after), feature] = _FOLLOWS


def _beginnings(*, with_words: bool = False) -> list[str]:
    """What its words are put together from, so that a text is cut into them, as a stop string is;
    each is one letter longer than an earlier one."""
    words = [word.replace(" ", "Ġ") for word in (*WORDS, *_LOOP)]
    ends = [range(2, len(word) + with_words) for word in words]
    found = (word[:end] for word, its in zip(words, ends, strict=True) for end in its)
    return list(dict.fromkeys(found))


def _write_tokenizer(folder: Path) -> None:
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    model = tokenizer["model"]
    own = _id(_WRITTEN[0])
    new = [token for token in _beginnings() if token not in model["vocab"]]
    first = own - len(new)
    gone = {token for token, number in model["vocab"].items() if number >= first}
    vocab = {token: number for token, number in model["vocab"].items() if number < first}
    vocab |= {token: first + place for place, token in enumerate(new)}
    model["vocab"] = vocab | {token.replace(" ", "Ġ"): _id(token) for token in _WRITTEN}
    assert len(model["vocab"]) + len(_SPECIAL) == VOCABULARY_SIZE, "an id has no token"
    pairs = [[token[:-1], token[-1]] for token in _beginnings(with_words=True)]
    model["merges"] = pairs + [p for p in model["merges"] if "".join(p) not in gone]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer["added_tokens"] = [
        {"id": _id(name), "content": name, "special": name not in _TAGS} | flags
        for name in _SPECIAL
    ]
    path.write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings |= {
        "chat_template": _TEMPLATE, "eos_token": _END, "model_max_length": CONTEXT_TOKENS,
    }  # fmt: skip
    path.write_text(json.dumps(settings, ensure_ascii=False), encoding="utf-8")
