"""What `mlxsup demo` says if a crash has changed an answer, which no engine does for a test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlxsup.cli.commands import demo
from mlxsup.cli.exit_status import CliError
from mlxsup.cli.terminal.output import Output
from mlxsup.client import Client

TOKENS = demo.STORY_TOKENS


class PlayedClient:
    """A daemon with the models a and b; the second answer of a has another text."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.answers: Counter[str] = Counter()

    def status(self) -> dict[str, Any]:
        about = {"pid": 7, "backend": self.backend}
        return {"models": [{"name": name, **about} for name in ("a", "b")]}

    def load(self, model: str) -> None:
        pass

    def events(self) -> Iterator[dict[str, Any]]:
        while True:
            yield {"model": "a", "to": "READY"}

    def generate(self, model: str, **_: object) -> Any:
        self.answers[model] += 1
        word = "y" if (model, self.answers[model]) == ("a", 2) else "x"

        class Stream(list[Any]):
            result = SimpleNamespace(token_ids=[1] * TOKENS, resumed=0)

        return Stream([SimpleNamespace(text=word, token_ids=[1])] * TOKENS)


def shown(backend: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr("os.kill", lambda pid, number: None)
    client = cast(Client, PlayedClient(backend))
    return demo._Demonstration(client, Output(is_json=True)).show()


def test_a_changed_answer_is_an_error_where_engines_are_exact_and_said_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = shown("metal", monkeypatch)
    assert [(one["model"], one["is_same"]) for one in found["answers"]] == [
        ("a", False),
        ("b", True),
    ]
    assert len(found["kills"]) == demo.KILLS
    with pytest.raises(CliError, match="a crash changed an answer"):
        shown("cpu", monkeypatch)
