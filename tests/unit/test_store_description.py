"""What a model folder says of its model; files that are broken leave gaps and raise nothing."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsup.store.model_folder import describe

from support.daemon.hub_caches import MODEL, safetensors, write_folder

JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)
KEYS = (
    "model_type", "architectures", "quantization", "quantization_config", "torch_dtype", "dtype",
    "max_position_embeddings", "text_config", "bits",
)  # fmt: skip


def folder(tmp_path: Path, config: dict[str, Any], **more: bytes) -> Path:
    return write_folder(tmp_path, {**MODEL, "config.json": json.dumps(config).encode(), **more})


def test_description_of_a_whole_folder(tmp_path: Path) -> None:
    shards = {
        "model-1.safetensors": safetensors({"a": 100}),
        "model-2.safetensors": safetensors({"b": 200}),
    }
    files = {name: text for name, text in MODEL.items() if name != "model.safetensors"} | shards
    write_folder(tmp_path, files | {"optimizer.safetensors": bytes(5000)})
    config = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "quantization": {"bits": 4, "group_size": 64},
        "max_position_embeddings": 40960,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    (tmp_path / "README.md").write_text("---\nlicense: apache-2.0\n---\nlicense: no\n")
    (tmp_path / "generation_config.json").write_text('{"do_sample": true, "top_k": 20}')
    said = describe(tmp_path)
    assert (said.architecture, said.model_type) == ("Qwen3ForCausalLM", "qwen3")
    assert (said.quantization, said.context_length) == ("4 bit, groups of 64", 40960)
    assert (said.template, said.licence) == ("{{ messages }}", "apache-2.0")
    assert said.sampling == {"temperature": 1.0, "top_k": 20}
    assert said.size_bytes == sum(len(content) for content in shards.values())


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"text_config": {"dtype": "float16"}}, "float16"),
        ({"quantization": {"bits": 4, "a": {"bits": 8}, "b": {"bits": 6}}}, "4 and 6 and 8 bit"),
        ({"quantization": {"bits": 8}}, "8 bit"),
        ({"quantization": {"bits": 8, "a": {"bits": "x"}}}, "8 bit"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({}, ""),
    ],
)
def test_quantization(config: dict[str, Any], words: str, tmp_path: Path) -> None:
    assert describe(folder(tmp_path, config)).quantization == words


@pytest.mark.parametrize(
    ("card", "licence"),
    [
        ("---\nlicense: other\nlicense_name: gemma\n---\n", "gemma"),
        ("---\nlicense: 'mit'\n---\n", "mit"),
        ("---\nlanguage: en\n---\nlicense: mit\n", ""),
        ("# Card\nlicense: mit\n", ""),
        ("", ""),
    ],
)
def test_licence_of_the_card(card: str, licence: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(card)
    assert describe(tmp_path).licence == licence


@pytest.mark.parametrize(
    ("files", "template"),
    [
        ({}, ""),
        ({"chat_template.jinja": "j", "chat_template.json": '{"chat_template": "c"}'}, "j"),
        ({"chat_template.json": '{"chat_template": "c"}'}, "c"),
        ({"chat_template.json": '{"chat_template": [{"name": ["x"], "template": "x"},'
                                ' {"name": "default", "template": "d"}, 7]}'}, "d"),
        ({"chat_template.json": '{"chat_template": [{"name": "rag", "template": "r"}]}'}, "r"),
        ({"chat_template.json": '{"chat_template": [{"name": "default", "template": 1}]}'}, ""),
        ({"additional_chat_templates/b.jinja": "b", "additional_chat_templates/a.jinja": "a"}, "a"),
    ],
)  # fmt: skip
def test_template_has_several_places(files: dict[str, str], template: str, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert describe(tmp_path).template == template


@pytest.mark.parametrize(
    ("index", "count"),
    [
        ({"metadata": {"total_parameters": 134515008}}, 134515008),
        ({"metadata": {"total_parameters": True}}, None),
        ({"metadata": []}, None),
    ],
)
def test_number_of_parameters_is_in_the_index(
    index: dict[str, Any], count: int | None, tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert describe(tmp_path).parameter_count == count


def test_context_may_be_undeclared(tmp_path: Path) -> None:
    assert describe(folder(tmp_path, {"model_type": "rwkv7"})).context_length is None


@given(st.dictionaries(st.sampled_from(KEYS), JSON) | JSON, st.binary(max_size=40))
def test_no_content_of_a_file_raises(config: Any, card: bytes) -> None:
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        for file in ("config.json", "tokenizer_config.json"):
            (place / file).write_text(json.dumps(config))
        (place / "README.md").write_bytes(card)
        describe(place)


def test_missing_folder_is_described_as_empty(tmp_path: Path) -> None:
    said = describe(tmp_path / "gone")
    assert (said.model_type, said.size_bytes, said.licence) == ("", 0, "")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "README.md"])
def test_a_named_pipe_in_a_folder_is_not_waited_for(tmp_path: Path, name: str) -> None:
    folder(tmp_path, {"model_type": "llama"})
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    said = describe(tmp_path)
    assert said.model_type == ("" if name == "config.json" else "llama")
    assert said.licence == ""


def test_context_of_an_encoder_is_the_shorter_of_two_limits(tmp_path: Path) -> None:
    config = {"model_type": "bert", "max_position_embeddings": 512}
    assert describe(folder(tmp_path, config)).context_length == 512
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 128}')
    assert describe(tmp_path).context_length == 128
