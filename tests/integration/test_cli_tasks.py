"""What commands do with models that make embeddings or rankings, and no text."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from support.cli.cli import run_cli
from support.daemon.daemon import Daemon, fake

MODELS = {
    "a-vectors": fake(preload=False, fake={"task": "embed"}),
    "b-ranks": fake(preload=False, fake={"task": "rerank"}),
    "c-writes": fake(preload=False),
}
HINTS = {
    "a-vectors": "for embeddings: `mlxsup embed a-vectors TEXT ",
    "b-ranks": "for rankings: `mlxsup embed b-ranks --rank QUERY TEXT ",
    "c-writes": "for text: `mlxsup chat c-writes ",
}


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon(MODELS) as daemon:
        yield daemon


@pytest.mark.parametrize(
    ("model", "arguments"),
    [
        ("a-vectors", ["chat", "a-vectors"]),
        ("a-vectors", ["run", "a-vectors", "hello"]),
        ("a-vectors", ["generate", "a-vectors", "hello"]),
        ("a-vectors", ["embed", "a-vectors", "--rank", "tide", "hello"]),
        ("b-ranks", ["generate", "b-ranks", "hello"]),
        ("b-ranks", ["embed", "b-ranks", "hello"]),
        ("c-writes", ["embed", "c-writes", "hello"]),
    ],
)
def test_a_model_of_another_kind_is_refused_before_it_loads(
    daemon: Daemon, model: str, arguments: list[str]
) -> None:
    """And the hint names the command that uses it."""
    done = run_cli(*arguments, "--endpoint", daemon.endpoint, "--json")
    assert done.returncode == 1
    error = json.loads(done.stdout)["error"]
    assert error["message"].startswith(f"{model} makes ")
    assert error["hint"].startswith(HINTS[model])
    with daemon.client() as client:
        assert all(row["generation"] == 0 for row in client.status()["models"])


def test_the_only_model_that_writes_needs_no_name(daemon: Daemon) -> None:
    answer = run_cli("chat", "--max-tokens", "1", "--endpoint", daemon.endpoint, stdin="hello\n")
    assert (answer.returncode, bool(answer.stdout)) == (0, True)
