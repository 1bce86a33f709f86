"""Templates, tokenisation and detokenisation of real tokenizers, and their files."""

from __future__ import annotations

import copy
import json
import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers.pre_tokenizers import ByteLevel

from mlxsup.protocol.body import RequestBody
from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.protocol.pooling import PoolingBody
from mlxsup.worker.engine import BadModelError, Detokenizer, Prompt
from mlxsup.worker.engines.mlx import text as mlx_text
from mlxsup.worker.engines.mlx.text import (
    MlxText,
    byte_level_tokens,
    load_text,
    sentencepiece_strips,
    sentencepiece_tokens,
)
from mlxsup.worker.engines.mlx.tokenizer import tokenizer_error
from mlxsup.worker.text.detokenizer import WindowDetokenizer

from support.models.demo_model import demo_model_folder
from support.models.tiny_model import VOCABULARY_SIZE, write_tokenizer

pytestmark = pytest.mark.mlx


TEXTS = [
    "plain words, and more of them",
    " a leading space",
    "🎉 emoji 👩‍👩‍👧 families 🇫🇷 flags",
    "Grüße, naïve café — “quotes”",
    "日本語のテキスト 한국어 العربية ไทย",
    "tabs\tand\nnew lines\r\n\n",
    "\x00 the byte zero \x7f",
    "  several   spaces .  , !",
]


@pytest.fixture(scope="module")
def text(tiny: Path) -> MlxText:
    return load_text(tiny, eos_token_ids=None, vocabulary_size=VOCABULARY_SIZE)


@pytest.fixture(scope="module")
def demo_text() -> MlxText:
    return load_text(demo_model_folder(), eos_token_ids=2, vocabulary_size=49152)


@pytest.mark.parametrize(("query", "asked"), [(None, "embeddings"), ("q", "rankings")])
def test_a_model_that_writes_refuses_texts_for_vectors(
    text: MlxText, query: str | None, asked: str
) -> None:
    with pytest.raises(RemoteError, match=f"makes text, not {asked}: send a chat") as caught:
        text.encode_texts(PoolingBody(texts=["a"], query=query))
    assert caught.value.code is ErrorCode.INVALID_REQUEST


def stream(detokenizer: Detokenizer, tokens: list[int]) -> list[str]:
    pieces = [detokenizer.add(token) for token in tokens]
    return [*pieces, detokenizer.finish()]


def body(**values: Any) -> RequestBody:
    return RequestBody.from_wire(values)


@pytest.mark.parametrize("written", TEXTS)
def test_streamed_text_is_the_text_G7(text: MlxText, demo_text: MlxText, written: str) -> None:
    """By the bytes of each token, by the general detokenizer, and by another thread's twin."""
    twin = demo_text.twin()
    assert twin.inner_tokenizer is not demo_text.inner_tokenizer
    assert twin.grammars is not demo_text.grammars
    asked = body(messages=[{"role": "user", "content": written}])
    assert twin.encode(asked) == demo_text.encode(asked)
    for codec in (text, demo_text, twin):
        tokens = codec.encode(body(prompt=written)).tokens
        for detokenizer in (codec.detokenizer(), WindowDetokenizer(codec.decode)):
            pieces = stream(detokenizer, tokens)
            assert "".join(pieces) == written == codec.decode(tokens)
            assert not any("\ufffd" in piece for piece in pieces)


def test_detokenizer_equals_decode_for_any_tokens_G7(demo_text: MlxText) -> None:
    """Random ids: broken characters, special tokens, ids beyond the vocabulary."""
    numbers = random.Random(0)
    for _ in range(20):
        tokens = [numbers.randrange(numbers.choice([49152, 300])) for _ in range(99)]
        whole = demo_text.decode(tokens)
        assert "".join(stream(demo_text.detokenizer(), tokens)) == whole
        assert "".join(stream(demo_text.detokenizer(), [*tokens, 10**6])) == whole


def codec_of(folder: Path, unknown: str, **content: Any) -> MlxText:
    """Write a tokenizer of this content, and load it."""
    content = {"version": "1.0", "added_tokens": []} | content
    (folder / "tokenizer.json").write_text(json.dumps(content))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": unknown}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return load_text(folder, eos_token_ids=None, vocabulary_size=None)


AS_JSON = RequestBody(prompt="x", response_format={"type": "json_object"})
REPLACE = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
STEPS = [REPLACE, {"type": "ByteFallback"}, {"type": "Fuse"}]
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def test_sentencepiece_vocabularies_stream_too(tmp_path: Path) -> None:
    vocabulary = {"<unk>": 0, "▁hello": 1, "▁": 2, "world": 3}
    vocabulary |= {f"<0x{byte:02X}>": 4 + byte for byte in range(256)}
    codec = codec_of(
        tmp_path, "<unk>",
        model={"type": "BPE", "vocab": vocabulary, "merges": [], "byte_fallback": True},
        decoder={"type": "Sequence", "decoders": [*STEPS, STRIP]},
    )  # fmt: skip
    tokens = [1, 2, 3, *(4 + byte for byte in "é🎉".encode()), 1]
    pieces = stream(codec.detokenizer(), tokens)
    assert "".join(pieces) == codec.decode(tokens) == "hello worldé🎉 hello"
    assert not any("\ufffd" in piece for piece in pieces)


def test_other_decoders_use_the_general_detokenizer(tmp_path: Path) -> None:
    """And may decode while another thread encodes: they do not share a tokenizer object."""
    model = {
        "type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
        "vocab": {"[UNK]": 0, "play": 1, "##ing": 2, "chess": 3, "well": 4},
        "max_input_chars_per_word": 100,
    }  # fmt: skip
    decoder = {"type": "WordPiece", "prefix": "##", "cleanup": False}
    codec = codec_of(
        tmp_path, "[UNK]", model=model, decoder=decoder, pre_tokenizer={"type": "Whitespace"}
    )
    detokenizer = codec.detokenizer()
    assert isinstance(detokenizer, WindowDetokenizer)
    tokens = codec.encode(body(prompt="playing chess well")).tokens
    assert tokens == [1, 2, 3, 4]
    assert stream(detokenizer, tokens) == ["play", "ing", " chess", " well", ""]


@pytest.mark.parametrize(
    ("messages", "rendered"),
    [
        (
            [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}],
            "[system] Be kind.\n[user] Hi\n[assistant]",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": t} for t in ("Hi ", "there")]}],
            "[user] Hi there\n[assistant]",
        ),
        (
            [{"role": "assistant", "content": None}, {"role": "user"}],
            "[assistant] \n[user] \n[assistant]",
        ),
    ],
    ids=["texts", "parts", "no content"],
)
def test_messages_are_rendered_with_the_template(
    text: MlxText, messages: list[dict[str, Any]], rendered: str
) -> None:
    assert text.decode(text.encode(body(messages=messages)).tokens) == rendered


def test_messages_become_text_if_there_is_no_template_and_the_request_says_so(
    tmp_path: Path, text: MlxText
) -> None:
    codec = tiny(tmp_path)
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    asked = {"messages": said, "messages_as_text": True}
    assert codec.encode(body(**asked)) == codec.encode(body(prompt="Be brief.\n\nHi"))
    # With a template, it is used.
    assert text.encode(body(**asked)) == text.encode(body(messages=said))
    tool = {"type": "function", "function": {"name": "f"}}
    for wants in ({"chat_template_kwargs": {"enable_thinking": False}}, {"tools": [tool]}):
        [parameter] = wants
        with pytest.raises(RemoteError, match=f"no chat template, which {parameter} are") as caught:
            codec.encode(body(**asked, **wants))
        assert caught.value.detail == {"parameter": parameter}


def test_a_tokenizer_is_copied_while_no_thread_uses_it_G7(
    text: MlxText, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that encodes may just be changing its settings."""
    is_held: list[bool] = []

    def deepcopy(value: Any) -> Any:
        is_held.append(text.in_use.locked())
        return copy.deepcopy(value)

    copying = SimpleNamespace(copy=copy.copy, deepcopy=deepcopy)
    monkeypatch.setattr(mlx_text, "copy", copying)
    twin = text.twin()
    assert is_held == [True]
    assert not twin.in_use.locked()


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


@pytest.mark.parametrize(
    ("steps", "strips"),
    [
        (STEPS, False), ([*STEPS, STRIP], True), ([*STEPS, STRIP, STRIP], None),
        ([*STEPS, STRIP | {"start": 2}], None), ([*STEPS, STRIP | {"stop": 1}], None),
        ([REPLACE | {"content": "x"}, *STEPS[1:]], None), (STEPS[:2], None),
        ([STEPS[0], STEPS[2], STEPS[1]], None), (["x", *STEPS], None), ("x", None), (None, None),
    ],
)  # fmt: skip
def test_which_decoder_is_sentencepieces(steps: Any, strips: bool | None) -> None:
    assert sentencepiece_strips({"type": "Sequence", "decoders": steps}) is strips
    assert sentencepiece_strips({"type": "Other", "decoders": steps}) is None


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
    assert message == "prompt must be text of at least one token, not text of none"
    assert detail["parameter"] == "prompt"
    message, detail = refusal(text, prompt_tokens=[1, VOCABULARY_SIZE])
    assert f"ids below this model's vocabulary of {VOCABULARY_SIZE}" in message
    assert detail["parameter"] == "prompt_tokens"
    assert text.encode(RequestBody(prompt_tokens=[VOCABULARY_SIZE - 1])).tokens == [2047]
    small = tiny(tmp_path / "small", "{{ messages[0].content }}")
    small.vocabulary_size = 120
    messages = [{"role": "user", "content": "fly"}]
    for sent, values in (("prompt", {"prompt": "fly"}), ("messages", {"messages": messages})):
        assert refusal(small, **values) == (
            f"{sent}: this model takes ids below this model's vocabulary of 120, but its tokenizer"
            " makes 121 of 'y': leave that out",
            {"parameter": sent},
        )
    odd = tiny(tmp_path / "odd", "{{ raise_exception('n' * 300) }}")
    message, detail = refusal(odd, messages=HELLO)
    assert message == f"the model's chat template refuses these messages: {'n' * 200}"
    assert detail["parameter"] == "messages"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ 'x' * 20000000 }}", "it writes 20,000,000 characters, more than "),
        ("{{ '\ud800' }}", "it writes half a surrogate pair"),
    ],
)
def test_a_template_that_writes_no_text_for_a_tokenizer_is_refused(
    tmp_path: Path, template: str, said: str
) -> None:
    message, detail = refusal(tiny(tmp_path / "odd", template), messages=HELLO)
    assert message.startswith(f"the model's chat template refuses these messages: {said}")
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
    change(tmp_path, "tokenizer_config.json", bos_token="!")
    text = load_text(tmp_path, eos_token_ids=[7], vocabulary_size=None)
    raw = text.encode(RequestBody(prompt="hello")).tokens
    assert raw[0] == 33
    assert text.encode(RequestBody(prompt="!hello")).tokens == raw, "it has one already"
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
def test_the_generation_prompt_opens_the_answer(
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


def test_token_alone_gives_text_or_nothing(tmp_path: Path) -> None:
    text = tiny(tmp_path)
    assert text.token_alone(33) == (text.decode([33]), b"") == ("!", b"")
    assert text.token_alone(0) == ("\0", b"")
    assert text.token_alone(VOCABULARY_SIZE - 1) == (text.decode([VOCABULARY_SIZE - 1]), b"")
    assert text.token_alone(VOCABULARY_SIZE) == text.token_alone(-1) == ("", b"")
    halves = text.encode(RequestBody(prompt="é")).tokens
    assert [text.token_alone(half) for half in halves] == [("\ufffd", b"\xc3"), ("\ufffd", b"\xa9")]


def test_a_tokenizer_that_no_form_works_with_is_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def refuse(tokenizer: Any, **options: Any) -> None:
        asked.append(options)
        raise ValueError("s" * 300)

    monkeypatch.setattr(mlx_text, "make_grammar_tokenizer", refuse)
    text = tiny(tmp_path)
    with pytest.raises(RemoteError) as caught:
        text.constrain(AS_JSON, Prompt(tokens=[5]))
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
        text.constrain(AS_JSON, Prompt(tokens=[5]))
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


TEXT = "babe di fo wörld"


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    """A copy to be changed."""
    return Path(shutil.copytree(tiny, tmp_path / "model"))


def change(folder: Path, file: str, **changes: Any) -> None:
    path = folder / file
    values = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**values, **changes}))


def text_of(folder: Path, eos_token_ids: Any = None) -> MlxText:
    return load_text(folder, eos_token_ids=eos_token_ids, vocabulary_size=None)


def ids_of(text: MlxText) -> list[int]:
    return text.encode(RequestBody(prompt=TEXT)).tokens


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": "linear"},
        {"rope_scaling": {"type": "odd"}},
        {"quantization_config": "4bit"},
        {"max_position_embeddings": "4096"},
        {"num_labels": "x"},
        {"id2label": 5},
        {"bos_token_id": "x"},
        {"layer_types": ["odd"]},
        {"auto_map": {"AutoConfig": "code.Config", "AutoTokenizer": ["code.Tokenizer", None]}},
        {"model_type": "nobody_knows", "auto_map": {"AutoConfig": "code.Config"}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_tokenizer_does_not_hang_on_the_models_settings(
    tiny: Path, folder: Path, changes: dict[str, Any]
) -> None:
    change(folder, "config.json", **changes)
    assert ids_of(text_of(folder)) == ids_of(text_of(tiny))


@pytest.mark.parametrize("model_type", ["llama", "cohere", "afm7"])
@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("config.json", "Qwen2Tokenizer"),
        ("tokenizer_config.json", "LlamaTokenizerFast"),
        ("tokenizer_config.json", "GPT2Tokenizer"),
        ("", None),
    ],
)
def test_the_class_of_a_tokenizer_is_the_one_that_transformers_takes(
    folder: Path, model_type: str, place: str, name: str | None
) -> None:
    from transformers import AutoTokenizer

    change(folder, "config.json", model_type=model_type)
    (folder / "tokenizer_config.json").write_text("{}")
    if name is not None:
        change(folder, place, tokenizer_class=name)
    expected = AutoTokenizer.from_pretrained(folder)
    loaded = text_of(folder)
    assert type(loaded.inner_tokenizer) is type(expected)
    assert ids_of(loaded) == expected.encode(TEXT)


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("tokenizer.json", {"model": {"type": "odd"}}),
        ("tokenizer.json", {"added_tokens": [{"id": "x"}]}),
        ("tokenizer.json", {"decoder": {"type": "odd"}}),
        ("tokenizer_config.json", {"eos_token": 5}),
        ("tokenizer_config.json", {"tokenizer_class": 5}),
    ],
)
def test_an_error_of_the_tokenizer_names_its_file_in_one_line_B6(
    folder: Path, file: str, changes: dict[str, Any]
) -> None:
    change(folder, file, **changes)
    with pytest.raises(BadModelError) as caught:
        text_of(folder)
    message = str(caught.value)
    assert message.startswith(f"{folder / file}: the tokenizer cannot be used: ")
    assert "\n" not in message


@pytest.mark.parametrize("file", ["chat_template.jinja", "additional_chat_templates/rag.jinja"])
def test_a_template_that_is_no_text_is_named_B6(folder: Path, file: str) -> None:
    template = folder / file
    template.parent.mkdir(exist_ok=True)
    template.write_bytes(b"\xff\xfe{{")
    with pytest.raises(BadModelError, match=f"^{template}: .* can't decode byte 0xff"):
        text_of(folder)


def test_a_tokenizer_that_needs_code_of_the_folder_is_refused_B6(folder: Path) -> None:
    change(folder, "config.json", model_type="nobody_knows")
    auto_map = {"AutoTokenizer": ["code.Tokenizer", None]}
    change(folder, "tokenizer_config.json", tokenizer_class="Own", auto_map=auto_map)
    with pytest.raises(BadModelError) as caught:
        text_of(folder)
    assert str(caught.value) == (
        f"{folder / 'tokenizer_config.json'}: the tokenizer cannot be used: it is a program in the "
        "model folder, and mlxsup does not run such programs"
    )


def test_missing_settings_come_from_mlx_lms_module_and_those_of_the_folder_win(
    folder: Path,
) -> None:
    plain = text_of(folder)
    change(folder, "config.json", model_type="muse_spark")
    text = text_of(folder)
    assert text.stop_tokens == sorted({*plain.stop_tokens, 200001, 200008})
    assert (plain.channel_rules.initial, text.channel_rules.initial) == (None, "header")
    call = '<atem:invoke name="f"><atem:parameter name="x">1</atem:parameter></atem:invoke>'
    assert text.channel_rules.tool_format.parse(call, {}, False) == [
        {"name": "f", "arguments": {"x": 1}}
    ]
    change(folder, "tokenizer_config.json", tool_parser_type="json_tools")
    own = text_of(folder, [7])
    assert 7 in own.stop_tokens
    assert not {200001, 200008}.intersection(own.stop_tokens)
    assert own.channel_rules.tool_format.name == "json_tools"


@pytest.mark.parametrize("entry", [{"name": "default"}, {"template": "x"}, "x", 1])
def test_entry_of_chat_templates_without_a_template_is_named_B6(folder: Path, entry: Any) -> None:
    change(folder, "tokenizer_config.json", chat_template=[entry])
    with pytest.raises(BadModelError, match="an entry of chat_template lacks its name or"):
        text_of(folder, 2)


@pytest.mark.parametrize("value", ["</s>", [[1]], [1, None], True, 1.5, {"a": 1}])
def test_end_tokens_that_are_no_ids_name_the_file_that_has_them_B6(
    folder: Path, value: Any
) -> None:
    """Of two files with the same value, the one that mlx-lm uses."""
    for file in ("config.json", "generation_config.json"):
        change(folder, file, eos_token_id=value)
        with pytest.raises(BadModelError) as caught:
            text_of(folder, value)
        assert str(caught.value) == (
            f"{folder / file}: eos_token_id must be a token id or a list of them, "
            f"not {json.dumps(value)}"
        )


def test_an_error_is_about_the_file_that_can_be_wrong(tmp_path: Path, tiny: Path) -> None:
    """tokenizer_config.json only if the tokenizer itself can be read; the folder if none is."""

    def blamed() -> str:
        message = str(tokenizer_error(tmp_path, ValueError("odd\nvalue")))
        place, _, rest = message.partition(": ")
        assert rest == "the tokenizer cannot be used: odd value"
        return place.removeprefix(str(tmp_path))

    assert blamed() == ""
    shutil.copy(tiny / "tokenizer.json", tmp_path)
    assert blamed() == "/tokenizer.json"
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert blamed() == "/tokenizer_config.json"
    (tmp_path / "tokenizer.json").write_text("{}")
    assert blamed() == "/tokenizer.json"
