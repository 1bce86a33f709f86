"""Streams belong to threads: the family of errors that mlxsup ends, and how it is kept out."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from support.tiny_model import make_tiny_model

pytestmark = pytest.mark.mlx

YARN = {
    "rope_scaling": {
        "type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 2048,
    }
}
"""Its rotation keeps an array in `_freqs`, which loaders leave lazy."""

PLAIN_MLX_LM = """
import os, sys, threading
from mlx_lm import load
from mlx_lm.generate import BatchGenerator

model, _ = load(sys.argv[1])
generator = BatchGenerator(model)

def step():
    try:
        generator.insert([[1, 2, 3, 4]], max_tokens=[3])
        for _ in range(6):
            generator.next()
        print("fine", flush=True)
    except RuntimeError as error:
        print(error, flush=True)

thread = threading.Thread(target=step)
thread.start()
thread.join()
os._exit(0)
"""

LOAD_AND_LOOK = """
import os, sys, threading
from pathlib import Path
import mlx.core as mx
from mlxsup.worker.engines.mlx.load import iterate_arrays, load_lazily, materialise
from mlxsup.worker.engines.mlx.folder import check_folder

folder = check_folder(Path(sys.argv[1]), lambda share: None)
stream = mx.new_stream(mx.default_device())
with mx.stream(stream):
    model, _ = load_lazily(folder)
    if sys.argv[2] == "materialise":
        materialise(model, folder, lambda share: None)
    elif sys.argv[2] == "parameters":
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
print(len(list(iterate_arrays(model))), len(lazy), flush=True)
os._exit(0)
"""


def run_script(script: str, *arguments: str) -> str:
    """Two threads with MLX may abort at the exit, so they never run in the test's process."""
    result = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.fixture(scope="module")
def yarn_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("yarn"), config=YARN)


def test_loading_on_one_thread_and_stepping_on_another_fails_in_plain_mlx_lm_A1(
    yarn_folder: Path,
) -> None:
    said = run_script(PLAIN_MLX_LM, str(yarn_folder))
    assert said.startswith("There is no Stream(")
    assert said.endswith("in current thread.")


def test_the_engine_on_its_one_thread_serves_the_same_model_A1_A2(yarn_folder: Path) -> None:
    script = (
        "import sys; from pathlib import Path\n"
        "from support.mlx_rows import loaded_engine, make_row, run_rows, token_ids\n"
        "with loaded_engine(Path(sys.argv[1])) as engine:\n"
        "    got = run_rows(engine, [make_row(key, [1, 2, 3, key]) for key in range(4)])\n"
        "    print(sorted(len(token_ids(tokens)) for tokens in got.values()))\n"
    )
    support = str(Path(__file__).resolve().parent.parent)
    said = run_script(f"import sys; sys.path.insert(0, {support!r})\n{script}", str(yarn_folder))
    assert said == "[16, 16, 16, 16]"


def test_no_array_of_the_module_tree_is_left_lazy_A4(yarn_folder: Path) -> None:
    count, lazy = run_script(LOAD_AND_LOOK, str(yarn_folder), "materialise").split()
    assert int(count) > 20
    assert lazy == "0"


def test_the_test_above_would_see_a_lazy_array_A4(yarn_folder: Path) -> None:
    """mlx-lm's own way, evaluating the parameters, leaves `_freqs` of each layer behind."""
    assert int(run_script(LOAD_AND_LOOK, str(yarn_folder), "parameters").split()[1]) >= 1
    count, lazy = run_script(LOAD_AND_LOOK, str(yarn_folder), "nothing").split()
    assert int(lazy) > int(count) / 2


def test_the_worker_never_uses_mlx_lms_module_level_stream_A5() -> None:
    folder = Path(__file__).resolve().parent.parent.parent / "worker"
    files = list(folder.rglob("*.py"))
    assert len(files) > 5
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [
                getattr(node, "id", ""),
                getattr(node, "attr", ""),
                *(alias.name for alias in getattr(node, "names", []) if hasattr(alias, "name")),
            ]
            assert "generation_stream" not in names, f"{file}:{getattr(node, 'lineno', 0)}"


def test_every_batch_generator_is_given_a_stream_A5() -> None:
    """Without one it falls back to the module-level stream."""
    folder = Path(__file__).resolve().parent.parent.parent / "worker"
    calls = [
        node
        for file in folder.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "BatchGenerator"
    ]
    assert calls
    assert all("stream" in {keyword.arg for keyword in call.keywords} for call in calls)
