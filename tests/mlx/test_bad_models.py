"""Every kind of bad model fails in one sentence, or serves with a warning (P11).

What a daemon makes of an exit and of a warning: tests/faults/test_loads.py, and test_daemon_life.py
in tests/integration.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mlxsup.protocol.body import RequestBody
from mlxsup.worker.engine import BadLaunchError, BadModelError
from mlxsup.worker.engines.mlx.engine import MlxEngine
from mlxsup.worker.process import judge

from support.models.tiny_model import make_tiny_model
from support.worker.mlx_rows import make_row, make_spec, run_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class BadModel:
    """A folder or an entry with something wrong in it.

    Attributes:
        name: what is wrong, for people.
        config: entries that config.json has instead.
        without: entries that it does not have.
        tokenizer_config: entries that tokenizer_config.json has instead.
        entry: keys of its launch spec.
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

    def write(self, folder: Path) -> None:
        make_tiny_model(folder)
        for file, changes in (
            ("config.json", self.config),
            ("tokenizer_config.json", self.tokenizer_config),
        ):
            values = json.loads((folder / file).read_text()) | changes
            kept = {key: value for key, value in values.items() if key not in self.without}
            (folder / file).write_text(json.dumps(kept))


_LENGTH = "max_position_embeddings"

MODELS = (
    BadModel(name="config.json declares no context length", without=(_LENGTH,),
             words="4096 tokens are used; set context_length to allow more"),
    BadModel(name="the same, and the entry has `context_length`", without=(_LENGTH,),
             entry={"context_length": 9000}, words=""),
    BadModel(name="a context length in config.json that is 0", config={_LENGTH: 0},
             words="is not a context length (0): 4096 tokens are used"),
    BadModel(name="one that is text", config={_LENGTH: "many"},
             words='is not a context length ("many"): 4096 tokens are used'),
    BadModel(name="one beyond every number of tokens", config={_LENGTH: 10**30},
             words="is not a context length (1000000000000000000…)"),
    BadModel(name="`context_length` above what config.json declares",
             entry={"context_length": 32768},
             words="context_length = 32768 is more than the 4096 tokens of config.json"),
    BadModel(name="settings that transformers dislikes and mlx-lm does not read",
             config={"num_labels": "x", "bos_token_id": "x"}, words=""),
    BadModel(name="a `model_type` that mlx-lm does not have", config={"model_type": "nobody"},
             code=65, words="/config.json: Model type nobody not supported"),
    BadModel(name="code in the folder", config={"model_file": "model.py"}, code=65,
             words="('model.py') to build its architecture. This is disabled by default"),
    BadModel(name="a key that the type needs is missing", without=("vocab_size",), code=65,
             words="/config.json: a value is not what mlx-lm expects (ModelArgs.__init__()"),
    BadModel(name="`rope_scaling` of an unknown type", config={"rope_scaling": {"type": "odd"}},
             code=65, words="/config.json: Unsupported RoPE type odd"),
    BadModel(name="`rope_scaling` without its factor", config={"rope_scaling": {"type": "linear"}},
             code=65, words="/config.json: 'factor' is missing"),
    BadModel(name="`quantization_config` that is text", config={"quantization_config": "4bit"},
             code=65, words="/config.json: a value is not what mlx-lm expects"),
    BadModel(name="`eos_token_id` that is no id", config={"eos_token_id": "</s>"}, code=65,
             words="/config.json: eos_token_id must be a token id or a list of them"),
    BadModel(name="more layers than weights", config={"num_hidden_layers": 3}, code=65,
             words="/model.safetensors: Missing 9 parameters"),
    BadModel(name="other shapes than the weights'", config={"num_attention_heads": 3}, code=65,
             words="/model.safetensors: Expected shape (63, 64) but received shape (64, 64)"),
    BadModel(name="what loads and cannot compute", config={"rope_theta": "x"}, code=65,
             words="the model cannot run: rope()"),
    BadModel(name="a special token that is no text", tokenizer_config={"eos_token": 5}, code=65,
             words="/tokenizer_config.json: the tokenizer cannot be used"),
)  # fmt: skip


pytestmark = pytest.mark.mlx


@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.name)
def test_the_engine_says_of_every_file_what_to_correct_P11(case: BadModel, tmp_path: Path) -> None:
    case.write(tmp_path / "model")
    engine = MlxEngine(make_spec(tmp_path / "model", max_concurrency=1, **case.entry))
    if case.code is not None:
        with pytest.raises((BadModelError, BadLaunchError)) as caught:
            engine.load(lambda phase, progress: None)
        engine.close()
        death = judge(caught.value)
        assert (death.code, death.is_expected) == (case.code, True)
        assert case.words in death.message
        assert "\n" not in death.message
        return
    warnings = engine.load(lambda phase, progress: None).warnings
    assert len(warnings) == bool(case.words)
    assert all(case.words in warning for warning in warnings)
    tokens = engine.text.encode(RequestBody(prompt="babe", max_tokens=2)).tokens
    assert len(run_rows(engine, [make_row(1, tokens, max_tokens=2)])[1]) == 2
    engine.close()
