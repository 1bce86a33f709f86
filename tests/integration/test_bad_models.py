"""Every kind of bad model fails once, in one sentence, or serves with a warning (P11)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from mlxsup.client import RequestError
from support.bad_models import MODELS, BadModel
from support.daemon import Daemon, row

pytestmark = pytest.mark.mlx

NAMES = {case.name: f"m{number}" for number, case in enumerate(MODELS)}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    base = tmp_path_factory.mktemp("models")
    with Daemon({NAMES[case.name]: case.write(base / NAMES[case.name]) for case in MODELS}) as one:
        # It is loaded twice: by the client, and from the command line.
        name, error = NAMES["what loads and cannot compute"], r"the model cannot run: rope\(\):"
        one.provoke("rope", model=name, pattern=error, at_most=2)
        yield one


@pytest.mark.parametrize(
    "case", [case for case in MODELS if case.code is not None], ids=lambda case: case.name
)
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
    shown = daemon.run("load", name)
    assert shown.returncode == 1
    assert [line for line in shown.stderr.splitlines() if line.startswith("hint: ")] == [
        f"hint: correct that, then `mlxsup restart {name}`, or `mlxsup reload` if it stands in the "
        f"configuration; see `mlxsup logs {name}`"
    ]


@pytest.mark.parametrize(
    "case", [case for case in MODELS if case.code is None], ids=lambda case: case.name
)
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
