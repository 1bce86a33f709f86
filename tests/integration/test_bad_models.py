"""Every kind of bad model fails once, in one sentence, or serves with a warning (P11)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxsup.client import RequestError
from mlxsup.protocol.body import RequestBody
from mlxsup.worker.engine import BadLaunchError, BadModelError
from mlxsup.worker.engines.mlx.engine import MlxEngine
from mlxsup.worker.process import judge

from support.bad_models import MODELS, BadModel
from support.daemon import Daemon, row
from support.mlx_rows import loaded_engine, make_row, make_spec, run_rows

pytestmark = pytest.mark.mlx

ALSO_QUICK = {
    "a `model_type` that mlx-lm does not have",
    "what loads and cannot compute",
    "settings that transformers dislikes and mlx-lm does not read",
}
"""Beside the cases with an entry, which only a daemon reads."""

NAMES = {case.name: f"m{number}" for number, case in enumerate(MODELS)}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    base = tmp_path_factory.mktemp("models")
    with Daemon({NAMES[case.name]: case.write(base / NAMES[case.name]) for case in MODELS}) as one:
        name, error = NAMES["what loads and cannot compute"], r"the model cannot run: rope\(\):"
        one.provoke("rope", model=name, pattern=error, at_most=1)
        yield one


def chosen(is_bad: bool) -> list[Any]:
    """The cases that do not load, or those that do; slow where others go the same way."""
    cases = [case for case in MODELS if (case.code is not None) is is_bad]
    return [
        pytest.param(case, marks=[] if case.entry or case.name in ALSO_QUICK else pytest.mark.slow)
        for case in cases
    ]


@pytest.mark.parametrize(
    "case", [case for case in MODELS if not case.entry], ids=lambda case: case.name
)
def test_the_engine_says_of_every_file_what_to_correct_P11(case: BadModel, tmp_path: Path) -> None:
    case.write(tmp_path / "model")
    if case.code is not None:
        with (
            pytest.raises((BadModelError, BadLaunchError)) as caught,
            loaded_engine(tmp_path / "model"),
        ):
            pass
        death = judge(caught.value)
        assert (death.code, death.is_expected) == (case.code, True)
        assert case.words in death.message
        assert "\n" not in death.message
        return
    engine = MlxEngine(make_spec(tmp_path / "model"))
    warnings = engine.load(lambda phase, progress: None).warnings
    assert len(warnings) == bool(case.words)
    assert all(case.words in warning for warning in warnings)
    tokens = engine.text.encode(RequestBody(prompt="babe", max_tokens=2)).tokens
    assert len(run_rows(engine, [make_row(1, tokens, max_tokens=2)])[1]) == 2
    engine.close()


@pytest.mark.parametrize("case", chosen(is_bad=True), ids=lambda case: case.name)
def test_it_fails_once_in_one_sentence_that_names_what_to_correct_P11(
    daemon: Daemon, case: BadModel
) -> None:
    name = NAMES[case.name]
    with daemon.client() as client:
        with pytest.raises(RequestError) as caught:
            client.load(name)
        assert (caught.value.code, caught.value.retryable) == ("load_failed", False)
        assert case.words in caught.value.message
        assert "\n" not in caught.value.message
        failed = row(client, name)
        assert (failed["state"], failed["generation"]) == ("FAILED", 1)
        assert (failed["last_exit"]["reason"], failed["last_exit"]["code"]) == (
            "load_error",
            case.code,
        )
    if case.name == "a `model_type` that mlx-lm does not have":
        check_command_line(daemon, name)


def check_command_line(daemon: Daemon, name: str) -> None:
    """It hints at what to do next, whatever is wrong with the model."""
    shown = daemon.run("load", name)
    where = f"--endpoint {daemon.endpoint}"
    assert shown.returncode == 1
    assert [line for line in shown.stderr.splitlines() if line.startswith("hint: ")] == [
        f"hint: fix that, then `mlxsup restart {name} {where}`, or `mlxsup reload {where}` if the "
        f"fix is in the configuration; see `mlxsup logs {name} {where}`"
    ]


@pytest.mark.parametrize("case", chosen(is_bad=False), ids=lambda case: case.name)
def test_it_serves_and_warns(daemon: Daemon, case: BadModel) -> None:
    name = NAMES[case.name]
    with daemon.client() as client:
        client.load(name)
        served = row(client, name)
        assert (served["state"], served["generation"]) == ("READY", 1)
        assert len(served["warnings"]) == bool(case.words)
        assert all(case.words in warning for warning in served["warnings"])
        assert client.complete(name, prompt="babe", max_tokens=2).usage.completion_tokens == 2
        client.unload(name)
