"""Templates, tokenisation and detokenisation."""

from __future__ import annotations

import ast
import json
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from mlxsup.protocol.body import RequestBody
from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.worker.engine import Detokenizer
from mlxsup.worker.engines.mlx import text as mlx_text
from mlxsup.worker.engines.mlx.text import MlxText, load_text
from mlxsup.worker.text.detokenizer import WindowDetokenizer

from support.demo_model import demo_model_folder
from support.tiny_model import VOCABULARY_SIZE, make_tiny_model

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
def text(tmp_path_factory: pytest.TempPathFactory) -> MlxText:
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"))
    return load_text(folder, eos_token_ids=None, vocabulary_size=VOCABULARY_SIZE)


@pytest.fixture(scope="module")
def demo_text() -> MlxText:
    return load_text(demo_model_folder(), eos_token_ids=2, vocabulary_size=49152)


def stream(detokenizer: Detokenizer, tokens: list[int]) -> list[str]:
    pieces = [detokenizer.add(token) for token in tokens]
    return [*pieces, detokenizer.finish()]


def body(**values: Any) -> RequestBody:
    return RequestBody.from_wire(values)


@pytest.mark.parametrize("written", TEXTS)
def test_streamed_text_is_the_text_G7(text: MlxText, demo_text: MlxText, written: str) -> None:
    for codec in (text, demo_text):
        tokens = codec.encode(body(prompt=written)).tokens
        pieces = stream(codec.detokenizer(), tokens)
        assert "".join(pieces) == written == codec.decode(tokens)
        assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("written", TEXTS)
def test_the_general_detokenizer_gives_the_same_G7(demo_text: MlxText, written: str) -> None:
    tokens = demo_text.encode(body(prompt=written)).tokens
    pieces = stream(WindowDetokenizer(demo_text.decode), tokens)
    assert "".join(pieces) == written
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("seed", range(20))
def test_any_tokens_at_all_give_what_decode_gives_G7(demo_text: MlxText, seed: int) -> None:
    """Random ids: broken characters, special tokens, ids beyond the vocabulary."""
    numbers = random.Random(seed)
    tokens = [numbers.choice([numbers.randrange(49152), numbers.randrange(300)]) for _ in range(99)]
    assert "".join(stream(demo_text.detokenizer(), tokens)) == demo_text.decode(tokens)
    assert "".join(stream(demo_text.detokenizer(), [*tokens, 10**6])) == demo_text.decode(tokens)


def test_two_detokenizers_do_not_share_state(text: MlxText) -> None:
    tokens = text.encode(body(prompt="é")).tokens
    assert len(tokens) == 2
    first, second = text.detokenizer(), text.detokenizer()
    assert first.add(tokens[0]) == second.add(tokens[0]) == ""
    assert first.add(tokens[1]) == second.add(tokens[1]) == "é"


def test_half_a_character_at_the_end_is_marked(text: MlxText) -> None:
    tokens = text.encode(body(prompt="é")).tokens
    assert stream(text.detokenizer(), tokens[:1]) == ["", "\ufffd"]


def test_sentencepiece_vocabularies_stream_too(tmp_path: Path) -> None:
    vocabulary = {"<unk>": 0, "▁hello": 1, "▁": 2, "world": 3}
    vocabulary |= {f"<0x{byte:02X}>": 4 + byte for byte in range(256)}
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    model = {"type": "BPE", "vocab": vocabulary, "merges": [], "byte_fallback": True}
    content = {"version": "1.0", "added_tokens": [], "model": model}
    content |= {"decoder": {"type": "Sequence", "decoders": steps}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    codec = load_text(tmp_path, eos_token_ids=None, vocabulary_size=None)
    tokens = [1, 2, 3, *(4 + byte for byte in "é🎉".encode()), 1]
    pieces = stream(codec.detokenizer(), tokens)
    assert "".join(pieces) == codec.decode(tokens) == "hello worldé🎉 hello"
    assert not any("\ufffd" in piece for piece in pieces)


def test_other_decoders_use_the_general_detokenizer(tmp_path: Path) -> None:
    """And may decode while another thread encodes: they do not share a tokenizer object."""
    vocabulary = {"[UNK]": 0, "play": 1, "##ing": 2, "chess": 3, "well": 4}
    content = {
        "version": "1.0",
        "added_tokens": [],
        "model": {
            "type": "WordPiece",
            "vocab": vocabulary,
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
        },
        "pre_tokenizer": {"type": "Whitespace"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": False},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    codec = load_text(tmp_path, eos_token_ids=None, vocabulary_size=None)
    detokenizer = codec.detokenizer()
    assert isinstance(detokenizer, WindowDetokenizer)
    tokens = codec.encode(body(prompt="playing chess well")).tokens
    assert tokens == [1, 2, 3, 4]
    assert stream(detokenizer, tokens) == ["play", "ing", " chess", " well", ""]


def test_messages_are_rendered_with_the_template(text: MlxText) -> None:
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    tokens = text.encode(body(messages=messages)).tokens
    assert text.decode(tokens) == "[system] Be kind.\n[user] Hi\n[assistant]"


def test_content_in_text_parts_is_joined(text: MlxText) -> None:
    parts = [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]
    tokens = text.encode(body(messages=[{"role": "user", "content": parts}])).tokens
    assert text.decode(tokens) == "[user] Hi there\n[assistant]"


@pytest.mark.parametrize("content", [5, [{"type": "image_url"}], ["text"]])
def test_content_that_is_not_text_is_the_requests_own_error_C7(
    text: MlxText, content: object
) -> None:
    with pytest.raises(RemoteError, match="content that is text") as caught:
        text.encode(body(messages=[{"role": "user", "content": content}]))
    assert caught.value.code is ErrorCode.INVALID_REQUEST


def test_no_content_is_empty_text(text: MlxText) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}]
    tokens = text.encode(body(messages=[*messages, {"role": "user"}])).tokens
    assert text.decode(tokens) == "[user] a\n[assistant] \n[user] \n[assistant]"


def test_a_template_error_is_the_requests_own_and_says_why_G6(text: MlxText) -> None:
    with pytest.raises(RemoteError, match="unknown role robot") as caught:
        text.encode(body(messages=[{"role": "robot", "content": "beep"}]))
    assert caught.value.code is ErrorCode.INVALID_REQUEST


def test_without_a_template_the_error_says_to_use_prompt_G6(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, has_chat_template=False)
    codec = load_text(folder, eos_token_ids=None, vocabulary_size=VOCABULARY_SIZE)
    with pytest.raises(RemoteError, match="no chat template: send prompt") as caught:
        codec.encode(body(messages=[{"role": "user", "content": "Hi"}]))
    assert caught.value.code is ErrorCode.INVALID_REQUEST


def test_messages_become_text_if_there_is_no_template_and_the_request_says_so(
    tmp_path: Path, text: MlxText
) -> None:
    folder = make_tiny_model(tmp_path, has_chat_template=False)
    codec = load_text(folder, eos_token_ids=None, vocabulary_size=VOCABULARY_SIZE)
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    asked = {"messages": said, "messages_as_text": True}
    plain = codec.encode(body(prompt="Be brief.\n\nHi"))
    assert codec.encode(body(**asked)) == plain
    # With a template, it is used.
    assert text.encode(body(**asked)) == text.encode(body(messages=said))
    tool = {"type": "function", "function": {"name": "f"}}
    for wants in ({"chat_template_kwargs": {"enable_thinking": False}}, {"tools": [tool]}):
        [parameter] = wants
        with pytest.raises(RemoteError, match=f"no chat template, which {parameter} are") as caught:
            codec.encode(body(**asked, **wants))
        assert caught.value.detail == {"parameter": parameter}


def test_token_ids_are_checked_against_the_vocabulary_C7(text: MlxText) -> None:
    assert text.encode(body(prompt_tokens=[0, VOCABULARY_SIZE - 1])).tokens == [0, 2047]
    with pytest.raises(RemoteError, match="below this model's vocabulary of 2048, not 2048"):
        text.encode(body(prompt_tokens=[5, VOCABULARY_SIZE]))


def test_an_end_of_text_token_of_the_configuration_counts(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    assert load_text(folder, eos_token_ids=[7, 9], vocabulary_size=None).stop_tokens == [7, 9]
    assert load_text(folder, eos_token_ids=7, vocabulary_size=None).stop_tokens == [7]
    assert load_text(folder, eos_token_ids=None, vocabulary_size=None).stop_tokens == []


def test_encoding_and_decoding_touch_no_mlx_object_A3(tmp_path: Path) -> None:
    """They run on another thread, so any use of MLX's work functions there would be the error."""
    script = (
        "import sys, threading\n"
        "from pathlib import Path\n"
        "import mlx.core as mx\n"
        "from mlxsup.protocol.body import RequestBody\n"
        "from mlxsup.worker.engines.mlx.text import load_text\n"
        "text = load_text(Path(sys.argv[1]), eos_token_ids=None, vocabulary_size=None)\n"
        "def refuse(*arguments, **named):\n"
        "    raise AssertionError('MLX was touched')\n"
        "for name in ('array', 'eval', 'zeros', 'async_eval', 'stream'):\n"
        "    setattr(mx, name, refuse)\n"
        "said = []\n"
        "def work():\n"
        "    messages = [{'role': 'user', 'content': 'hello'}]\n"
        "    tokens = text.encode(RequestBody(messages=messages)).tokens\n"
        "    detokenizer = text.detokenizer()\n"
        "    said.append(''.join(map(detokenizer.add, tokens)) + detokenizer.finish())\n"
        "thread = threading.Thread(target=work)\n"
        "thread.start()\n"
        "thread.join()\n"
        "print(said[0])\n"
    )
    command = [sys.executable, "-c", script, str(make_tiny_model(tmp_path))]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "[user] hello\n[assistant]\n"


def test_a_prompt_leaves_the_helper_thread_as_plain_lists_G2(tmp_path: Path) -> None:
    # The module that runs there does not even import what could make an array.
    tree = ast.parse(Path(mlx_text.__file__).read_text())
    names = {
        alias.name if isinstance(node, ast.Import) else node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert not any(name and name.split(".")[0] == "mlx" for name in names)
    codec = mlx_text.load_text(
        make_tiny_model(tmp_path / "tiny"), eos_token_ids=None, vocabulary_size=2048
    )
    prompts = []
    thread = threading.Thread(
        target=lambda: prompts.append(codec.encode(RequestBody(prompt="hello there")))
    )
    thread.start()
    thread.join()
    assert type(prompts[0].tokens) is list
    assert {type(token) for token in prompts[0].tokens} == {int}


@pytest.mark.parametrize("written", TEXTS)
def test_a_twin_gives_the_same_and_shares_no_tokenizer_G7(demo_text: MlxText, written: str) -> None:
    twin = demo_text.twin()
    assert twin.inner_tokenizer is not demo_text.inner_tokenizer
    asked = body(messages=[{"role": "user", "content": written}])
    assert twin.encode(asked) == demo_text.encode(asked)
    assert twin.vocabulary_size == demo_text.vocabulary_size
    tokens = demo_text.encode(body(prompt=written)).tokens
    assert stream(twin.detokenizer(), tokens) == stream(demo_text.detokenizer(), tokens)


def test_a_tokenizer_in_use_is_not_copied_meanwhile_G7(demo_text: MlxText) -> None:
    """It may just be changing its settings."""
    twins: list[MlxText] = []
    thread = threading.Thread(target=lambda: twins.append(demo_text.twin()))
    with demo_text.in_use:
        thread.start()
        thread.join(0.2)
        assert twins == []
    thread.join(60)
    assert len(twins) == 1
