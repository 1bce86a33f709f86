"""The parts of the text side, to the last byte: vocabularies, decoders, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers.pre_tokenizers import ByteLevel

from mlxsup.protocol.body import RequestBody
from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.worker.engines.mlx import text as mlx_text
from mlxsup.worker.engines.mlx.text import (
    MlxText,
    byte_level_tokens,
    load_text,
    sentencepiece_strips,
    sentencepiece_tokens,
)

from support.tiny_model import VOCABULARY_SIZE, write_tokenizer

pytestmark = pytest.mark.mlx


class Vocabulary:
    """As much of a tokenizer as gives its tokens."""

    def __init__(self, *tokens: str | None) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._tokens)

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str | None]:
        return [self._tokens[token] for token in ids]


def test_every_byte_has_its_character_in_a_byte_level_vocabulary() -> None:
    split = ByteLevel(add_prefix_space=False, use_regex=False)
    stand_ins = []
    for byte in range(256):
        # No text holds every byte, but these two hold those above and below 128.
        character = chr(byte) if byte < 128 else bytes([byte]).decode("latin-1")
        ((shown, _),) = split.pre_tokenize_str(character)
        stand_ins.append((shown, character.encode()))
    tokens: Any = Vocabulary(*(shown for shown, _ in stand_ins))
    assert byte_level_tokens(tokens) == [encoded for _, encoded in stand_ins]
    alphabet = sorted(ByteLevel.alphabet())
    singles: Any = Vocabulary(*alphabet)
    assert sorted(byte_level_tokens(singles)) == [bytes([byte]) for byte in range(256)]


def test_a_token_outside_the_byte_alphabet_is_plain_text() -> None:
    tokens: Any = Vocabulary("Ġa", "a b", None, "", "€Ġ", "\ud800", "ń")
    assert byte_level_tokens(tokens) == [
        b" a", b"a b", b"", b"", "€Ġ".encode(), b"?", "ń".encode(),
    ]  # fmt: skip


def test_a_sentencepiece_vocabulary_has_single_bytes_and_spaces() -> None:
    tokens: Any = Vocabulary(
        "\u2581a\u2581", "<0x0A>", "<0xFF>", "<0x0A", "<0x0A>>", "(0x0A>", "<0x0A)", None, "\ud800"
    )
    assert sentencepiece_tokens(tokens) == [
        b" a ", b"\n", b"\xff", b"<0x0A", b"<0x0A>>", b"(0x0A>", b"<0x0A)", b"", b"?",
    ]  # fmt: skip


REPLACE = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
STEPS = [REPLACE, {"type": "ByteFallback"}, {"type": "Fuse"}]
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


@pytest.mark.parametrize(
    ("decoder", "strips"),
    [
        ({"type": "Sequence", "decoders": STEPS}, False),
        ({"type": "Sequence", "decoders": [*STEPS, STRIP]}, True),
        ({"type": "Sequence", "decoders": [*STEPS, STRIP, STRIP]}, None),
        ({"type": "Sequence", "decoders": [*STEPS, STRIP | {"start": 2}]}, None),
        ({"type": "Sequence", "decoders": [*STEPS, STRIP | {"stop": 1}]}, None),
        ({"type": "Sequence", "decoders": [REPLACE | {"content": "x"}, *STEPS[1:]]}, None),
        ({"type": "Sequence", "decoders": STEPS[:2]}, None),
        ({"type": "Sequence", "decoders": [STEPS[0], STEPS[2], STEPS[1]]}, None),
        ({"type": "Sequence", "decoders": ["x", *STEPS]}, None),
        ({"type": "Sequence", "decoders": "x"}, None),
        ({"type": "Sequence"}, None),
        ({"type": "Other", "decoders": STEPS}, None),
        ({}, None),
    ],
)
def test_which_decoder_is_sentencepieces(decoder: dict[str, Any], strips: bool | None) -> None:
    assert sentencepiece_strips(decoder) is strips


def tiny(folder: Path, template: str | None = None) -> MlxText:
    """The tiny model's text side with this template, or with none."""
    folder.mkdir(exist_ok=True)
    write_tokenizer(folder, has_chat_template=False)
    if template is not None:
        place = folder / "tokenizer_config.json"
        place.write_text(json.dumps(json.loads(place.read_text()) | {"chat_template": template}))
    return load_text(folder, eos_token_ids=[7, 5], vocabulary_size=None)


def refusal(text: MlxText, **body: Any) -> tuple[str, Any]:
    with pytest.raises(RemoteError) as caught:
        text.encode(RequestBody.from_wire(body))
    assert caught.value.code is ErrorCode.INVALID_REQUEST
    return caught.value.message, caught.value.detail


HELLO = [{"role": "user", "content": "hello"}]


def test_a_request_that_cannot_be_encoded_says_which_parameter_is_wrong(tmp_path: Path) -> None:
    text = tiny(tmp_path / "plain")
    message, detail = refusal(text, messages=HELLO)
    assert message == "this model has no chat template: send prompt instead of messages"
    assert detail["parameter"] == "messages"
    message, detail = refusal(tiny(tmp_path / "empty", "{{ '' }}"), messages=HELLO)
    assert message == "prompt takes text of at least one token, not text of none"
    assert detail["parameter"] == "prompt"
    message, detail = refusal(text, prompt_tokens=[1, VOCABULARY_SIZE])
    assert f"ids below this model's vocabulary of {VOCABULARY_SIZE}" in message
    assert detail["parameter"] == "prompt_tokens"
    assert text.encode(RequestBody(prompt_tokens=[VOCABULARY_SIZE - 1])).tokens == [2047]
    odd = tiny(tmp_path / "odd", "{{ raise_exception('n' * 300) }}")
    message, detail = refusal(odd, messages=HELLO)
    assert message == f"the model's chat template refuses these messages: {'n' * 200}"
    assert detail["parameter"] == "messages"


def test_only_raw_text_gets_the_tokens_that_begin_a_text(tmp_path: Path) -> None:
    """A chat template writes its own."""
    tiny(tmp_path, "{{ messages[0].content }}")
    place = tmp_path / "tokenizer.json"
    first = {"SpecialToken": {"id": "!", "type_id": 0}}
    begins = {
        "type": "TemplateProcessing",
        "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [first, {"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": {"!": {"id": "!", "ids": [33], "tokens": ["!"]}},
    }
    place.write_text(json.dumps(json.loads(place.read_text()) | {"post_processor": begins}))
    text = load_text(tmp_path, eos_token_ids=[7], vocabulary_size=None)
    raw = text.encode(RequestBody(prompt="hello")).tokens
    assert raw[0] == 33
    assert text.encode(RequestBody(messages=HELLO)).tokens == raw[1:]
    assert 33 not in text.spared_tokens


OPENS = "{% if add_generation_prompt %}[assistant]{% endif %}"


@pytest.mark.parametrize(
    ("template", "opening"),
    [
        ("{{ messages[0].content }}" + OPENS, "[assistant]"),
        ("{{ messages[0].content }}", ""),
        # What also stands before the messages cannot be distinguished from them.
        (OPENS + "{{ messages[0].content }}", ""),
        ("{{ messages[0].content }}" + OPENS.replace("[assistant]", "b" * 600), "b" * 512),
    ],
)
def test_what_the_template_adds_behind_the_messages_opens_the_answer(
    tmp_path: Path, template: str, opening: str
) -> None:
    assert tiny(tmp_path, template).encode(RequestBody(messages=HELLO)).opening == opening


def test_ids_that_end_an_answer_and_those_that_are_spared(tmp_path: Path) -> None:
    text = tiny(tmp_path)
    assert text.stop_tokens == [5, 7]
    (line_break,) = text.encode(RequestBody(prompt="\n")).tokens
    assert text.spared_tokens == sorted([5, 7, line_break])
    assert text.vocabulary_size == VOCABULARY_SIZE
    assert text.wants_checkpoints is False


def test_one_token_alone_is_text_and_an_id_of_nobody_is_none(tmp_path: Path) -> None:
    text = tiny(tmp_path)
    assert text.token_alone(33) == (text.decode([33]), b"") == ("!", b"")
    assert text.token_alone(0) == ("\0", b"")
    assert text.token_alone(VOCABULARY_SIZE - 1) == (text.decode([VOCABULARY_SIZE - 1]), b"")
    assert text.token_alone(VOCABULARY_SIZE) == text.token_alone(-1) == ("", b"")
    halves = text.encode(RequestBody(prompt="é")).tokens
    assert [text.token_alone(half) for half in halves] == [("\ufffd", b"\xc3"), ("\ufffd", b"\xa9")]


def test_a_twin_shares_no_tokenizer(tmp_path: Path) -> None:
    text = tiny(tmp_path)
    twin = text.twin()
    assert twin.tokenizer is not text.tokenizer
    assert twin.in_use is not text.in_use
    assert twin.grammars is not text.grammars
    body = RequestBody(prompt="hello")
    assert twin.encode(body) == text.encode(body)


def test_a_tokenizer_that_no_form_works_with_is_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llguidance")
    asked: list[dict[str, Any]] = []

    def refuse(tokenizer: Any, **options: Any) -> None:
        asked.append(options)
        raise ValueError("s" * 300)

    monkeypatch.setattr(mlx_text, "make_grammar_tokenizer", refuse)
    text = tiny(tmp_path)
    with pytest.raises(RemoteError) as caught:
        text.grammar(RequestBody(prompt="x", response_format={"type": "json_object"}), "")
    assert caught.value.code is ErrorCode.INVALID_REQUEST
    assert caught.value.message == (
        f"response_format does not work with this model's tokenizer: {'s' * 200}"
    )
    assert caught.value.detail == {"parameter": "response_format"}
    assert asked == [{"vocabulary_size": VOCABULARY_SIZE, "end_tokens": [5, 7]}]


@pytest.mark.parametrize(
    ("token_bytes", "unused"),
    [([b"a", b"\xff", b"b", b"\xff"], 1), ([b"a", b"b"], VOCABULARY_SIZE - 1), (None, 2047)],
)
def test_an_answer_in_a_form_ends_with_an_id_that_is_in_no_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token_bytes: Any, unused: int
) -> None:
    """A model without an end of text has the byte that no text holds, or else its last id."""
    ends: list[list[int]] = []
    write_tokenizer(tmp_path)
    text = load_text(tmp_path, eos_token_ids=None, vocabulary_size=None)
    assert text.stop_tokens == []
    text.token_bytes = token_bytes

    def watch(tokenizer: Any, *, end_tokens: list[int], **options: Any) -> None:
        ends.append(end_tokens)
        raise ValueError("seen enough")

    monkeypatch.setattr(mlx_text, "make_grammar_tokenizer", watch)
    with pytest.raises(RemoteError, match="seen enough"):
        text.grammar(RequestBody(prompt="x", response_format={"type": "json_object"}), "")
    assert ends == [[unused]]


def test_a_decoder_that_needs_the_tokenizer_has_one_of_its_own(tmp_path: Path) -> None:
    """Two threads may not use one at once: answers are decoded while prompts are encoded."""
    write_tokenizer(tmp_path)
    place = tmp_path / "tokenizer.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | {"decoder": {"type": "Fuse"}}))
    text = load_text(tmp_path, eos_token_ids=None, vocabulary_size=None)
    assert text.token_bytes is None
    assert text.decoding_tokenizer not in (text.tokenizer, text.inner_tokenizer)
    tokens = text.encode(RequestBody(prompt="babe")).tokens
    assert text.decode(tokens) == "babe"
    alone = [text.token_alone(token) for token in tokens]
    assert "".join(content for content, _ in alone) == "babe"
    assert {rest for _, rest in alone} == {b""}, "what it is made of is not known"


def test_the_first_space_of_a_byte_level_answer_is_its_own(tmp_path: Path) -> None:
    """Only sentencepiece writes one that is no part of the text."""
    text = tiny(tmp_path)
    detokenizer = text.detokenizer()
    pieces = [detokenizer.add(token) for token in text.encode(RequestBody(prompt=" babe")).tokens]
    assert "".join([*pieces, detokenizer.finish()]) == " babe"
