"""The memory that mlx-lm says without a load, against what a model that runs allocates."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import (
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    make_prompt_cache,
)

from mlxsup.protocol.cache_layers import CacheLayers
from mlxsup.protocol.estimate import ModelMemory
from mlxsup.supervisor.memory.estimates import Estimates, ask_engine
from mlxsup.supervisor.memory.folder import Estimate
from mlxsup.supervisor.memory.folder_reader import Place
from mlxsup.worker.engines.mlx.caches import layers_of, measure_layers, row_bytes
from mlxsup.worker.engines.mlx.estimate import estimate
from mlxsup.worker.engines.mlx.folder import check_folder
from mlxsup.worker.engines.mlx.loader import iterate_arrays, load_lazily, materialise

from support.model_types.build import make_model
from support.model_types.listed import MODEL_TYPES, UNLOADABLE
from support.models.demo_model import demo_model_folder
from support.models.tiny_model import make_tiny_model

pytestmark = pytest.mark.mlx

TOKENS, CHUNK = 512, 64


def run(folder: Path) -> tuple[int, int]:
    """Return the bytes of a loaded model's arrays, and those of a row of `TOKENS` tokens."""
    checked = check_folder(folder, lambda share: None)
    model: Any = load_lazily(checked)[0]
    materialise(model, checked, lambda share: None)
    weight_bytes = sum(int(array.nbytes) for array in iterate_arrays(model))
    caches = make_prompt_cache(model)
    # The last token comes alone, as in an answer: only then does a window drop what it need not
    # keep for the tokens of a chunk.
    ends = [*range(CHUNK, TOKENS, CHUNK), TOKENS - 1, TOKENS]
    for begin, end in zip([0, *ends], ends, strict=False):
        tokens = [number % 50 + 1 for number in range(begin, end)]
        mx.eval(model(mx.array([tokens]), cache=caches))
    held = [layer for layer in layers_of(caches) if not layer.empty()]
    return weight_bytes, sum(int(layer.nbytes) for layer in held)


def errors(found: ModelMemory, folder: Path) -> tuple[float, float]:
    """How much of the weights and of the row an estimate is too high; negative: too low."""
    weight_bytes, held_bytes = run(folder)
    weights = found.weight_bytes / weight_bytes - 1
    return weights, row_bytes(found.layers, TOKENS) / held_bytes - 1


ONE_OF_EACH_KIND = [
    "plamo3",  # keys and values, and a window that the worker widens
    "deepseek_v32",  # lists of compressed keys and those of an indexer
    "falcon_h1",  # a state and keys in each layer
    "gemma4_text",  # layers that share keys
    "nanbeige",  # layers that run twice
    "deepseek_v41",  # a class of its own
]

INEXACT = {
    "llama4": "a chunked window is only cut at the next pass, so that it holds a chunk more",
    "longcat_flash_ngram": "the last tokens of a context, 0.004 %",
}


@pytest.mark.parametrize("name", ONE_OF_EACH_KIND)
def test_the_estimate_of_a_kind_is_what_it_allocates(tmp_path: Path, name: str) -> None:
    folder = make_model(tmp_path, name)
    assert errors(estimate(folder), folder) == (0, 0)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_estimate_of_every_type_is_what_it_allocates(tmp_path: Path) -> None:
    folders = {
        model_type.name: make_model(tmp_path / model_type.name, model_type)
        for model_type in MODEL_TYPES
        if model_type.name not in UNLOADABLE
    } | {"smollm2": demo_model_folder()}
    found = {name: errors(estimate(folder), folder) for name, folder in folders.items()}
    assert {name for name, each in found.items() if each != (0, 0)} == set(INEXACT), found


class Cached:
    """A model of one layer with this cache, for a row of two heads of 64 numbers."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def make_cache(self) -> list[Any]:
        return [self._make()]

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        keys = mx.zeros((1, 2, tokens.shape[1], 64), mx.bfloat16)
        cache[0].update_and_fetch(keys, keys)
        return tokens


class Growing:
    """A cache of a class that is known nowhere: 100 bytes for a row and 8 for each token."""

    nbytes = 0

    def empty(self) -> bool:
        return self.nbytes == 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> None:
        self.nbytes = 100 + 8 * keys.shape[2]


@pytest.mark.parametrize(
    ("make", "kept"),
    [
        (KVCache, CacheLayers(layers=1, token_bytes=512)),
        (ConcatenateKVCache, CacheLayers(layers=1, token_bytes=512)),
        # Of each head and token, for keys and values: 64 bytes, a scale and a bias.
        (QuantizedKVCache, CacheLayers(layers=1, token_bytes=2 * 2 * (64 + 2 + 2))),
        (Growing, CacheLayers(layers=1, token_bytes=8, row_bytes=100)),
    ],
)
def test_each_class_of_cache_is_measured(make: Callable[[], Any], kept: CacheLayers) -> None:
    assert measure_layers(Cached(make)) == (kept,)


# ---------------------------------------------------------------- folders that are made to harm


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def with_code(folder: Path) -> None:
    change_config(folder, model_file="own.py", auto_map={"AutoModel": "own.Model"})
    (folder / "own.py").write_text(f"open({str(folder / 'has_run')!r}, 'w')")


def with_pipe(folder: Path) -> None:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")


HARMFUL: dict[str, tuple[Callable[[Path], object], str]] = {
    "code": (with_code, "requires importing and running a custom module"),
    "pipe": (with_pipe, "config.json is not a regular file"),
    "layers": (lambda f: change_config(f, num_hidden_layers=10**9), "num_hidden_layers is 10"),
    "type": (lambda f: change_config(f, model_type="..own"), "not supported"),
    "widths": (lambda f: change_config(f, hidden_size=128), "Expected shape"),
    "large": (lambda f: os.truncate(f / "tokenizer.json", 2**30), "tokenizer.json has 1.00 GiB"),
}


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a busy machine a process of mlx-lm takes seconds to end; its answers are kept here."""
    monkeypatch.setattr("mlxsup.supervisor.memory.estimates.KILL_LIMIT_S", 300.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_harmful_folder_costs_its_own_answer_and_nothing_else(tmp_path: Path) -> None:
    for name, (harm, _) in HARMFUL.items():
        harm(make_tiny_model(tmp_path / name))
    sound = make_tiny_model(tmp_path / "sound")
    folders = [*(tmp_path / name for name in HARMFUL), sound]
    found = asyncio.run(ask_engine({str(folder): folder.name for folder in folders}))
    assert found[str(sound)] == estimate(sound)
    for name, (_, words) in HARMFUL.items():
        assert words in str(found[str(tmp_path / name)]), found
    assert not (tmp_path / "code" / "has_run").exists()
    assert [path.name for path in (tmp_path / "cache/mlxsup/estimates").iterdir()] == ["sound.json"]


def test_an_answer_outlives_the_daemon_and_not_a_change_of_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(str(make_tiny_model(tmp_path / "m")))

    def look() -> Estimate:
        found = asyncio.run(Estimates().look_at([place]))[place].estimate
        assert found is not None
        return found

    first = look()
    assert (first.layers, first.remark) == (estimate(tmp_path / "m").layers, "")
    with monkeypatch.context() as patch:
        patch.setattr("mlxsup.supervisor.memory.estimates.estimate_argv", lambda: ["/none"])
        assert look() == first
        change_config(tmp_path / "m", unknown=1)
        assert "could not be started" in look().remark
    assert look().layers == first.layers


LIMITS = {
    "memory": ("bytearray(8 << 30)", "mlx-lm takes too much memory to build it"),
    "processor": ("[None for _ in iter(int, 1)]", "has ended (signal 24)"),
    "clock": ("time.sleep(600)", "has ended (signal 14)"),
}


@pytest.mark.skipif(sys.platform != "linux", reason="macOS does not keep to a limit of memory")
@pytest.mark.parametrize("what", LIMITS)
def test_a_model_that_takes_too_much_is_given_up(tmp_path: Path, what: str) -> None:
    """Time runs out by the process's own limits, should its parent be gone."""
    harm, words = LIMITS[what]
    script = (
        "import time\n"
        "from mlxsup.worker.engines.mlx import estimate as module\n"
        f"module.CPU_S, module.LIMIT_S = 1, {1 if what == 'clock' else 600}\n"
        f"module.estimate = lambda path: {harm}\n"
        "module.main()\n"
    )
    argv = [sys.executable, "-c", script]
    found = asyncio.run(ask_engine({"m": "k"}, argv=argv, quiet_s=60.0))
    assert words in str(found["m"])


@pytest.mark.skipif(sys.platform != "linux", reason="macOS does not keep to a limit of memory")
@pytest.mark.parametrize(("kind", "most"), [("RLIMIT_DATA", 2 << 30), ("RLIMIT_CPU", 20)])
def test_lower_limits_of_the_user_end_nothing(tmp_path: Path, kind: str, most: int) -> None:
    script = (
        "import resource\n"
        f"resource.setrlimit(resource.{kind}, ({most}, {most}))\n"
        "from mlxsup.worker.engines.mlx import estimate\n"
        "estimate.main()\n"
    )
    question = json.dumps({"number": 1, "path": str(tmp_path / "none"), "key": "k"}) + "\n"
    said = subprocess.run(
        [sys.executable, "-c", script, str(os.getpid())],
        input=question.encode(),
        stdout=subprocess.PIPE,
        check=True,
    ).stdout
    assert "does not exist" in json.loads(said)["problem"]


def test_what_a_models_files_print_is_no_answer() -> None:
    script = (
        "import os\n"
        "from mlxsup.worker.engines.mlx import estimate\n"
        "def estimate_noisily(path):\n"
        "    print('noise', flush=True)\n"
        "    os.write(1, b'noise')\n"
        "    raise estimate.BadModelError('bad')\n"
        "estimate.estimate = estimate_noisily\n"
        "estimate.main()\n"
    )
    question = json.dumps({"number": 1, "path": "m", "key": "k"}) + "\n"
    said = subprocess.run(
        [sys.executable, "-c", script, str(os.getpid())],
        input=question.encode(),
        stdout=subprocess.PIPE,
        check=True,
    ).stdout
    assert json.loads(said) == {"number": 1, "memory": None, "problem": "bad"}
