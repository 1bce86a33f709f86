"""Real MLX in whole workers: processes, threads, streams, imports, and the first request."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from mlxsup.protocol.launch import ExitCode
from mlxsup.protocol.states import FinishReason
from mlxsup.protocol.worker_messages import Resume
from mlxsup.worker.engines.mlx.engine import MlxEngine
from mlxsup.worker.engines.mlx.text import MlxText
from mlxsup.worker.thread_guard import OwnedEngine

from support.models.demo_model import demo_model_folder
from support.models.tiny_model import make_tiny_model
from support.worker.loop_driver import LoopDriver, check_every_resume
from support.worker.mlx_calls import KINDS, Calls
from support.worker.mlx_rows import loaded_engine, make_spec
from support.worker.worker_harness import WorkerHarness

pytestmark = pytest.mark.mlx


READY_TIMEOUT_S = 60.0


@pytest.mark.draws
def test_model_samples_as_its_makers_do_unless_the_entry_or_the_request_says(
    tmp_path: Path,
) -> None:
    folder = make_tiny_model(tmp_path)
    said = {"do_sample": True, "temperature": 1.5, "top_k": 1, "min_p": "much"}
    (folder / "generation_config.json").write_text(json.dumps(said))
    entry: dict[str, Any] = {"path": str(folder), "sampling": {"top_k": 40}}
    with WorkerHarness(is_new=False, engine="mlx", **entry) as worker:
        worker.wait_until_ready(READY_TIMEOUT_S)
        asked: list[dict[str, Any]] = [
            {}, {"temperature": 1.5, "top_k": 40}, {"temperature": 0.0},
        ]  # fmt: skip
        keys = [worker.dispatch("tide", max_tokens=20, seed=3, **one) for one in asked]
        makers, alike, greedy = (stream.tokens for stream in worker.finish(*keys))
        assert makers == alike
        assert makers != greedy
        assert worker.ask_for_exit() == ExitCode.ASKED


COUNTERS = {"get_active_memory", "get_cache_memory", "get_peak_memory"}
"""Functions of `mx` that read a number of the allocator, which the memory guard does from the
threads of prompts and heartbeats."""

READY = "(ready)"
"""Stands between the calls of the load and those of requests."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls = Calls()
    calls.watch(monkeypatch.setattr)
    return calls


@pytest.fixture
def encoding_on(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The threads that tokenise."""
    threads: set[int] = set()
    encode = MlxText.encode

    def watched_encode(self: MlxText, body: Any) -> Any:
        threads.add(threading.get_ident())
        return encode(self, body)

    monkeypatch.setattr(MlxText, "encode", watched_encode)
    return threads


def live(folder: Path, calls: Calls) -> None:
    """A load, requests of every kind, a cancel, a resume, and the end."""
    engine: Any = OwnedEngine(MlxEngine(make_spec(folder, max_concurrency=4)), 30.0)
    facts = engine.load(lambda phase, progress: None)
    calls.names.append(READY)
    driver = LoopDriver(engine, facts)
    messages = [{"role": "user", "content": "Hello"}]
    keys = [
        driver.dispatch(prompt="Once upon a time", max_tokens=20, logprobs=True, top_logprobs=3),
        driver.dispatch(messages=messages, max_tokens=20, temperature=1.0, seed=7, top_p=0.9),
        driver.dispatch(
            prompt="a b c", max_tokens=20, repetition_penalty=1.2, logit_bias={"300": 2.0}
        ),
    ]
    leaves = driver.dispatch(prompt="x " * 300, max_tokens=200)
    for _ in range(8):
        driver.turn()
    driver.cancel(leaves)
    whole, *others = driver.finish(*keys)
    [left] = driver.finish(leaves)
    assert left.finish is FinishReason.CANCELLED
    assert all(len(answer.tokens) == 20 for answer in (whole, *others))
    resume: Resume = whole.resume_after(10)
    assert driver.answer(resume).tokens == whole.tokens[10:]
    assert driver.answer(prompt="Once upon a time", max_tokens=3).tokens == whole.tokens[:3]
    engine.give_back()
    driver.close()
    engine.close()


def test_one_thread_calls_mlx_from_the_load_to_the_close_A1_A6(
    calls: Calls, encoding_on: set[int], tmp_path: Path
) -> None:
    live(make_tiny_model(tmp_path / "tiny"), calls)
    me = threading.get_ident()
    of_others = {name for thread, names in calls.threads.items() if thread != me for name in names}
    assert of_others <= COUNTERS, calls.threads
    expected = {
        "new_stream", "eval", "__init__", "next", "extend", "filter", "cumsum",
        "put_along_axis", "synchronize", "clear_cache", "get_active_memory",
    }  # fmt: skip
    assert expected - calls.threads[me] == set(), "what was to be watched was not called"
    assert me not in encoding_on
    assert encoding_on, "prompts are made by the helper threads"


def test_the_first_request_has_nothing_to_make_that_the_second_has_not_B10(tmp_path: Path) -> None:
    """In a separate process: whatever is traced, compiled or opened late would be called once."""
    folder = make_tiny_model(tmp_path / "tiny")
    made = run_script("-m", "support.worker.mlx_calls", str(folder))
    assert made.keys() == KINDS.keys()
    for kind, requests in made.items():
        first, second, third = (Counter[str](request) for request in requests)
        assert second == third, f"{kind}: else nothing could be said"
        assert (kind, first - second, second - first) == (kind, Counter(), Counter())


YARN = {"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 2048}}
"""Its rotation keeps an array in `_freqs`, which loaders leave lazy."""

LOAD_AND_LOOK = """
import json, os, sys, threading
from pathlib import Path
import mlx.core as mx
from mlxsup.worker.engines.mlx.loader import iterate_arrays, load_lazily, materialise
from mlxsup.worker.engines.mlx.folder import check_folder

folder = check_folder(Path(sys.argv[1]), lambda share: None)
stream = mx.new_stream(mx.default_device())
found = {}
for way in ("nothing", "parameters", "materialise"):
    with mx.stream(stream):
        model, _ = load_lazily(folder)
        if way == "materialise":
            materialise(model, folder, lambda share: None)
        elif way == "parameters":
            mx.eval(model.parameters())
    lazy = []

    def look():
        # An array that still has to be computed needs the stream of the thread that described it.
        for array in iterate_arrays(model):
            try:
                mx.eval(array)
            except RuntimeError as error:
                assert "There is no Stream" in str(error), error
                lazy.append(array.shape)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    found[way] = [len(list(iterate_arrays(model))), len(lazy)]
print(json.dumps(found), flush=True)
os._exit(0)  # two threads with MLX may abort at the exit
"""


def run_script(*command: str, **environment: str) -> Any:
    """Run a process; return what its last line says."""
    done = subprocess.run(
        [sys.executable, *command],
        env=os.environ | environment,
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_no_array_of_the_module_tree_is_left_lazy_A4(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, config=YARN)
    found = run_script("-c", LOAD_AND_LOOK, str(folder))
    count, lazy = found["materialise"]
    assert count > 20
    assert lazy == 0
    # The look would see one: evaluating the parameters alone leaves `_freqs` of each layer behind.
    assert found["parameters"][1] >= 1
    assert found["nothing"][1] > found["nothing"][0] / 2


FEW_FILES = """\
import json, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
from mlxsup.worker.engines.mlx.imports import import_everything
import_everything()
print(json.dumps(resource.getrlimit(resource.RLIMIT_NOFILE)))
"""


def test_a_low_hard_limit_of_open_files_is_kept() -> None:
    """mlx-lm asks for 4,096 while it is imported; root gets them, where it may."""
    assert run_script("-c", FEW_FILES) in ([1024, 1024], [2048, 4096])


HEAVY = ("torch", "torchvision", "tensorflow", "jax", "flax", "scipy", "sklearn", "pandas")

PROGRAM = """\
import json, sys
from pathlib import Path
from mlxsup.worker.engines.mlx.imports import import_everything
import_everything()
from mlxsup.worker.engines.mlx.tokenizer import load_tokenizer
tokenizer = load_tokenizer(Path(sys.argv[1]), None)
ids = tokenizer.encode("hello")
print(json.dumps([name for name, module in sys.modules.items() if module is not None]))
"""


def install(folder: Path, package: str) -> None:
    """As pip would: the module, and what transformers asks for its version."""
    (folder / package).mkdir()
    (folder / package / "__init__.py").write_text('__version__ = "2.9.0"\nTensor = object\n')
    about = folder / f"{package}-2.9.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 2.9.0\n")
    (about / "RECORD").write_text(f"{package}/__init__.py,,\n")


def test_a_worker_imports_none_of_the_heavy_packages(tmp_path: Path) -> None:
    model, packages = make_tiny_model(tmp_path / "tiny"), tmp_path / "packages"
    packages.mkdir()
    for package in HEAVY:
        install(packages, package)
    path = os.pathsep.join([os.fspath(packages), os.environ.get("PYTHONPATH", "")])
    imported = set(run_script("-c", PROGRAM, os.fspath(model), PYTHONPATH=path))
    assert "transformers" in imported
    assert not imported.intersection(HEAVY)


LENGTH = 48
QUESTION = [{"role": "user", "content": "Name three animals, with an emoji for each 🦊."}]
SAMPLED = {"temperature": 1.0, "top_p": 0.9, "seed": 7}
ANIMAL = {
    "type": "object",
    "properties": {
        "animal": {"type": "string", "minLength": 40, "maxLength": 80},
        "legs": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["animal", "legs"],
    "additionalProperties": False,
}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": SAMPLED,
    "penalties, bias and stops": SAMPLED
    | {
        "top_k": 40, "min_p": 0.02, "repetition_penalty": 1.2, "presence_penalty": 0.3,
        "frequency_penalty": 0.2, "logit_bias": {"260": 2.0},
        "stop": ["never to be found", "\n\n\n\n"],
    },
    "a schema": SAMPLED
    | {"response_format": {"type": "json_schema", "json_schema": {"schema": ANIMAL}}},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.bits
@pytest.mark.parametrize("parameters", CASES.values(), ids=CASES.keys())
def test_an_answer_of_the_demo_model_is_the_same_among_others_and_after_every_resume_C10_F10(
    parameters: dict[str, Any],
) -> None:
    asked = {"messages": QUESTION, "max_tokens": LENGTH, **parameters}
    with loaded_engine(demo_model_folder()) as engine:
        driver = LoopDriver(engine, engine.facts, 8)
        alone = driver.answer(**asked)
        assert len(alone.tokens) > 10
        neighbours = [
            driver.dispatch(prompt=f"Tale {n}", max_tokens=4 + 3 * n, temperature=n % 2, seed=n)
            for n in range(4)
        ]
        key = driver.dispatch(**asked)
        while len(driver.answers[key].tokens) < len(alone.tokens) // 2:
            driver.turn()
        neighbours += [driver.dispatch(prompt=f"Late {n}", max_tokens=8, seed=n) for n in range(3)]
        among, *_ = driver.finish(key, *neighbours)
        assert (among.tokens, among.text, among.finish) == (alone.tokens, alone.text, alone.finish)
        check_every_resume(driver, alone, at_once=8)
        driver.close()
