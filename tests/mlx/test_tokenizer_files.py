"""Which file an error of the tokenizer is about, and what of config.json it does not hang on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.tool_parsers import json_tools

from mlxsup.protocol.body import RequestBody
from mlxsup.worker.engine import BadModelError
from mlxsup.worker.engines.mlx.text import MlxText, load_text
from mlxsup.worker.engines.mlx.tokenizer import tokenizer_error

from support.tiny_model import make_tiny_model

pytestmark = pytest.mark.mlx

TEXT = "babe di fo wörld"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


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


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "phi3", "cohere", "mamba", "afm7"])
@pytest.mark.parametrize("place", ["config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("name", ["Qwen2Tokenizer", "LlamaTokenizerFast", "GPT2Tokenizer", None])
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


def test_a_tokenizer_that_needs_code_of_the_folder_is_refused_B6(folder: Path) -> None:
    change(folder, "config.json", model_type="nobody_knows")
    auto_map = {"AutoTokenizer": ["code.Tokenizer", None]}
    change(folder, "tokenizer_config.json", tokenizer_class="Own", auto_map=auto_map)
    with pytest.raises(BadModelError) as caught:
        text_of(folder)
    assert str(caught.value) == (
        f"{folder / 'tokenizer_config.json'}: the tokenizer cannot be used: it is a program in the "
        "model's folder, and mlxsup runs none"
    )


def muse_spark(folder: Path) -> None:
    """mlx-lm's module for this type has settings for folders without them."""
    change(folder, "config.json", model_type="muse_spark")


def test_what_a_folder_does_not_say_comes_from_mlx_lms_module_of_its_model_type(
    folder: Path,
) -> None:
    plain = text_of(folder)
    muse_spark(folder)
    text = text_of(folder)
    assert text.stop_tokens == sorted({*plain.stop_tokens, 200001, 200008})
    assert (plain.channel_rules.initial, text.channel_rules.initial) == (None, "header")
    parse = text.channel_rules.parse_tool_call
    assert parse is not None
    assert parse(
        '<atem:invoke name="f"><atem:parameter name="x">1</atem:parameter></atem:invoke>', None
    ) == {"name": "f", "arguments": {"x": 1}}


def test_what_a_folder_says_counts_more_than_its_model_type(folder: Path) -> None:
    muse_spark(folder)
    change(folder, "tokenizer_config.json", tool_parser_type="json_tools")
    text = text_of(folder, [7])
    assert 7 in text.stop_tokens
    assert not {200001, 200008}.intersection(text.stop_tokens)
    assert text.channel_rules.parse_tool_call is json_tools.parse_tool_call


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("value", ["</s>", [[1]], [1, None], True, 1.5, {"a": 1}])
def test_end_tokens_that_are_no_ids_name_the_file_that_has_them_B6(
    folder: Path, file: str, value: Any
) -> None:
    change(folder, file, eos_token_id=value)
    with pytest.raises(BadModelError) as caught:
        text_of(folder, value)
    assert str(caught.value) == (
        f"{folder / file}: eos_token_id takes a token id or a list of them, not {json.dumps(value)}"
    )


def test_of_two_files_with_the_same_wrong_end_token_the_one_that_is_used_is_named(
    folder: Path,
) -> None:
    """mlx-lm takes generation_config.json's."""
    for file in ("config.json", "generation_config.json"):
        change(folder, file, eos_token_id="</s>")
    with pytest.raises(BadModelError) as caught:
        text_of(folder, "</s>")
    assert str(caught.value).startswith(f"{folder / 'generation_config.json'}: eos_token_id")


def test_a_long_end_token_is_cut_and_one_of_nobody_is_the_folders(folder: Path) -> None:
    with pytest.raises(BadModelError) as caught:
        text_of(folder, "e" * 200)
    shown = '"' + "e" * 99
    assert str(caught.value) == (
        f"{folder}: eos_token_id takes a token id or a list of them, not {shown}"
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
