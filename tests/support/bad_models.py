"""Models that cannot be loaded, or only with a warning, as data."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .tiny_model import make_tiny_model


@dataclass(frozen=True, slots=True, kw_only=True)
class BadModel:
    """A folder or an entry with something wrong in it.

    Attributes:
        name: what is wrong, for people.
        config: entries that config.json has instead.
        without: entries that it does not have.
        tokenizer_config: entries that tokenizer_config.json has instead.
        entry: keys of the model's entry.
        code: the worker's exit code; None: it serves, with a warning.
        words: stand in the error or in the warning; empty: it serves as if nothing were wrong.
    """

    name: str
    words: str
    config: dict[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    tokenizer_config: dict[str, Any] = field(default_factory=dict)
    entry: dict[str, Any] = field(default_factory=dict)
    code: int | None = None

    def write(self, folder: Path) -> dict[str, Any]:
        """Makes the folder, and returns the entry."""
        make_tiny_model(folder)
        for file, changes in (
            ("config.json", self.config),
            ("tokenizer_config.json", self.tokenizer_config),
        ):
            values = json.loads((folder / file).read_text()) | changes
            kept = {key: value for key, value in values.items() if key not in self.without}
            (folder / file).write_text(json.dumps(kept))
        return {"path": str(folder), "preload": False, **self.entry}


_LENGTH = "max_position_embeddings"

MODELS = (
    BadModel(name="config.json declares no context length", without=(_LENGTH,),
             words="4096 tokens are used; set context_length to allow more"),
    BadModel(name="the same, and the entry has `context_length`", without=(_LENGTH,),
             entry={"context_length": 9000}, words=""),
    BadModel(name="a context length in config.json that is 0", config={_LENGTH: 0},
             words="is no context length (0): 4096 tokens are used"),
    BadModel(name="one that is text", config={_LENGTH: "many"},
             words='is no context length ("many"): 4096 tokens are used'),
    BadModel(name="one beyond every number of tokens", config={_LENGTH: 10**30},
             words="is no context length (1000000000000000000…)"),
    BadModel(name="`context_length` above what config.json declares",
             entry={"context_length": 32768},
             words="context_length = 32768 is more than the 4096 tokens of config.json"),
    BadModel(name="settings that transformers dislikes and mlx-lm does not read",
             config={"num_labels": "x", "bos_token_id": "x"}, words=""),
    BadModel(name="a `model_type` that mlx-lm does not have", config={"model_type": "nobody"},
             code=65, words="/config.json: Model type nobody not supported"),
    BadModel(name="a key that the type needs is missing", without=("vocab_size",), code=65,
             words="/config.json: a value is not what mlx-lm expects (ModelArgs.__init__()"),
    BadModel(name="`rope_scaling` of an unknown type", config={"rope_scaling": {"type": "odd"}},
             code=65, words="/config.json: Unsupported RoPE type odd"),
    BadModel(name="`rope_scaling` without its factor", config={"rope_scaling": {"type": "linear"}},
             code=65, words="/config.json: 'factor' is missing"),
    BadModel(name="`quantization_config` that is text", config={"quantization_config": "4bit"},
             code=65, words="/config.json: a value is not what mlx-lm expects"),
    BadModel(name="`eos_token_id` that is no id", config={"eos_token_id": "</s>"}, code=65,
             words="/config.json: eos_token_id takes a token id or a list of them"),
    BadModel(name="more layers than weights", config={"num_hidden_layers": 3}, code=65,
             words="/model.safetensors: Missing 9 parameters"),
    BadModel(name="other shapes than the weights'", config={"num_attention_heads": 3}, code=65,
             words="/model.safetensors: Expected shape (63, 64) but received shape (64, 64)"),
    BadModel(name="what loads and cannot compute", config={"rope_theta": "x"}, code=65,
             words="the model cannot run: rope()"),
    BadModel(name="a special token that is no text", tokenizer_config={"eos_token": 5}, code=65,
             words="/tokenizer_config.json: the tokenizer cannot be used"),
)  # fmt: skip
