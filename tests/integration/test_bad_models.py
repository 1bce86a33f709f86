"""Every kind of bad model fails once, in one sentence, or serves with a warning (P11).

Most are loaded by an engine in this process; two by a real daemon, whose others go the same way.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mlxsup.client import RequestError
from mlxsup.protocol.body import RequestBody
from mlxsup.worker.engine import BadLaunchError, BadModelError
from mlxsup.worker.engines.mlx.engine import MlxEngine
from mlxsup.worker.process import judge

from support.daemon.daemon import Daemon, row
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
        entry: keys of the model's entry and of its launch spec.
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


BAD = "a `model_type` that mlx-lm does not have"
WARNED = "`context_length` above what config.json declares"
SERVED = {case.name: case for case in MODELS if case.name in (BAD, WARNED)}
NAMES = {"bad": BAD, "warned": WARNED}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    base = tmp_path_factory.mktemp("models")
    entries = {name: SERVED[case].write(base / name) for name, case in NAMES.items()}
    with Daemon(entries) as daemon:
        yield daemon


def test_it_fails_once_in_one_sentence_that_names_what_to_correct_P11(daemon: Daemon) -> None:
    with daemon.client() as client:
        with pytest.raises(RequestError) as caught:
            client.load("bad")
        assert (caught.value.code, caught.value.retryable) == ("load_failed", False)
        assert SERVED[BAD].words in caught.value.message
        assert "\n" not in caught.value.message
        failed = row(client, "bad")
        assert (failed["state"], failed["generation"]) == ("FAILED", 1)
        assert (failed["last_exit"]["reason"], failed["last_exit"]["code"]) == ("load_error", 65)
    shown = daemon.run("load", "bad")
    where = f"--endpoint {daemon.endpoint}"
    assert shown.returncode == 1
    assert [line for line in shown.stderr.splitlines() if line.startswith("hint: ")] == [
        f"hint: see `mlxsup logs bad {where}`, fix the cause, then run `mlxsup restart bad {where}`"
        f"; after a change of the configuration, run `mlxsup reload {where}`"
    ]


def test_it_serves_and_warns(daemon: Daemon) -> None:
    with daemon.client() as client:
        client.load("warned")
        served = row(client, "warned")
        assert (served["state"], served["generation"]) == ("READY", 1)
        [warning] = served["warnings"]
        assert SERVED[WARNED].words in warning
        assert client.complete("warned", prompt="babe", max_tokens=2).usage.completion_tokens == 2
