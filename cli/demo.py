"""`mlxsup demo`: what mlxsup does, shown on a real model in a minute or two.

Is a daemon of its own, with its sockets and logs in a temporary folder, so that it never meets one
that runs already; streams from two models at once; kills one worker in mid-answer, again and again;
and shows that neither answer changed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .connection import Target, connect, output_options, read_toml, resolve
from .exit_status import CliError
from .output import VISIBLE, Output
from .status import show_models
from .waiting import progress_shown

if TYPE_CHECKING:
    from mlxsup.client import Client, ConnectionLost, RequestError

MODEL_FOLDER = "~/.mlxsup/models/smollm2"
QUESTION = "What is the capital of France?"
QUESTION_TOKENS = 24
STORY = "Tell me a short story about a lighthouse keeper and a storm."
STORY_TOKENS = 40
KILLS = 3

EXACT_BACKENDS = ("cpu", "fake")
"""On a GPU a resumed answer may round differently."""

DRAIN_TIMEOUT_S = 1.0
"""Given up in the middle, it ends soon."""


@click.command(short_help="See what mlxsup does, on a small model.")
@click.option(
    "--config",
    "config_path",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help=f"Show it with the first two models of this file; else with one that is fetched once "
    f"(93 MB, to {MODEL_FOLDER}).",
)
@output_options
def demo(config_path: Path | None, output: Output) -> None:
    """Example: mlxsup demo

    Streams from two models at once, kills one worker three times in mid-answer, and shows that
    neither answer changed. A daemon that already runs is left alone.
    """
    if config_path is None:
        from .demo_model import fetch

        folder = fetch(Path(MODEL_FOLDER).expanduser(), output)
        tables: dict[str, Any] = {"models": {n: {"path": str(folder)} for n in ("one", "two")}}
        hint = f"remove {folder}, and it is fetched again"
    else:
        tables = _tables_of(config_path)
        hint = f"see more of it with `mlxsup start --config {config_path}`"
    # Not the user's own temporary folder: on some systems its path is too long for a socket.
    with tempfile.TemporaryDirectory(prefix="mlxsup-demo-", dir="/tmp") as name:
        shown = _serve_and_show(Path(name), tables, hint, output)
    if output.is_json:
        output.object(shown)
    elif config_path is None:
        output.data(f"\nTo use this model: mlxsup start --model {MODEL_FOLDER}")


def _tables_of(path: Path) -> dict[str, Any]:
    """What a file says of its first two models; of a single one, under two names.

    Raises:
        CliError: the file is wrong.
    """
    from .daemon import read_configuration

    read_configuration(path)
    table = read_toml(path)
    models: dict[str, Any] = dict(list(table["models"].items())[:2])
    if len(models) == 1:
        [(name, model)] = models.items()
        models[f"{name}-copy"] = model
    return {
        "defaults": _model_table(table.get("defaults", {}), path),
        "models": {name: _model_table(model, path) for name, model in models.items()},
    }


def _model_table(table: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Its paths absolute, and without limits to restarts: there will be some."""
    kept = {key: value for key, value in table.items() if key != "restart"}
    return kept | ({"path": str(resolve(kept["path"], path))} if "path" in kept else {})


def _toml(value: Any) -> str:
    """A value of TOML; tables on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml(key)} = {_toml(value[key])}" for key in value) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    # The basic strings of TOML have the escapes of JSON but for DEL.
    return json.dumps(value).replace("\x7f", "\\u007f")


def _serve_and_show(
    folder: Path, tables: Mapping[str, Any], hint: str, output: Output
) -> dict[str, Any]:
    """Is the daemon, so that none is left without its demonstration, which a thread gives.

    Args:
        folder: for its sockets and logs.
        tables: of its configuration.
        hint: what helps where a model fails.
        output: how to speak.

    Raises:
        CliError: the daemon did not start, or a request failed.
        KeyboardInterrupt: a signal ended it.
    """
    from .daemon import read_configuration, serve

    supervisor = {
        "runtime_dir": str(folder / "run"),
        "log_dir": str(folder / "logs"),
        "drain_timeout_s": DRAIN_TIMEOUT_S,
    }
    config = folder / "config.toml"
    whole = {"supervisor": supervisor, **tables}
    config.write_text("".join(f"{key} = {_toml(value)}\n" for key, value in whole.items()))
    _headline(output, "mlxsup start: one process for each model")
    story = _Story(list(tables["models"]), output)
    code = serve(read_configuration(config), on_change=lambda _: None, on_listening=story.begin)
    failure = story.finish()
    if code:
        raise CliError(f"the daemon ended with exit code {code}", code="internal")
    if isinstance(failure, CliError):
        if failure.code in ("shutting_down", "connection_lost"):
            raise KeyboardInterrupt
        if failure.code in ("load_failed", "model_failed"):
            failure.hint = hint  # Its logs go with the demonstration.
    if failure is not None:
        raise failure
    _tell(output, "every process is gone")
    return story.shown


class _Story(threading.Thread):
    """What is shown, beside the daemon that it is shown on.

    Args:
        names: of the models.
        output: how to speak.

    Attributes:
        shown: what `--json` prints.
    """

    def __init__(self, names: Sequence[str], output: Output) -> None:
        super().__init__(name="mlxsup-demo", daemon=True)
        self.shown: dict[str, Any] = {}
        self._failure: CliError | OSError | None = None
        self._names = names
        self._output = output
        self._endpoint = ""

    def begin(self, endpoint: str) -> None:
        """The daemon listens there."""
        self._endpoint = endpoint
        self.start()

    def run(self) -> None:
        """Tells it all, and ends the daemon."""
        try:
            with connect(Target(endpoint=self._endpoint)) as client:
                try:
                    self._load(client)
                    _ask_both(client, self._names, self._output)
                    self.shown = _kill_one(client, self._names, self._output)
                    _show_status(client, self._output)
                    _headline(self._output, "mlxsup stop")
                finally:
                    client.stop(now=True)
        except (CliError, OSError) as error:  # OSError: nobody reads what is told
            self._failure = error

    def finish(self) -> CliError | OSError | None:
        """Waits for its end; why it broke off, None where it did not.

        Raises:
            KeyboardInterrupt: it never began.
        """
        if self.ident is None:
            raise KeyboardInterrupt
        self.join()
        return self._failure

    def _load(self, client: Client) -> None:
        for name in self._names:
            with progress_shown(client, name, self._output):
                client.load(name)
            _tell(self._output, f"{name}: READY as pid {_row(client, name)['pid']}")


class _Answer(threading.Thread):
    """One streamed answer, gathered in a thread of its own.

    Args:
        client: of the daemon.
        model: whose answer.
        question: that of a chat.
        max_tokens: its length, at most.
    """

    def __init__(self, client: Client, model: str, question: str, max_tokens: int) -> None:
        super().__init__(daemon=True)
        self.model = model
        self.text = ""
        self.tokens = 0
        self._failure: RequestError | ConnectionLost | None = None
        self._grown = threading.Condition()
        self._has_ended = False
        self._stream = client.generate(
            model,
            messages=[{"role": "user", "content": question}],
            max_tokens=max_tokens,
            temperature=0,
        )
        self.start()

    def run(self) -> None:
        """Reads the stream to its end."""
        from mlxsup.client import ConnectionLost, RequestError

        try:
            for delta in self._stream:
                with self._grown:
                    self.text += delta.text
                    self.tokens += len(delta.token_ids)
                    self._grown.notify_all()
        except (RequestError, ConnectionLost) as error:
            self._failure = error
        with self._grown:
            self._has_ended = True
            self._grown.notify_all()

    def wait_for(self, tokens: int) -> bool:
        """Returns when there are so many tokens; False if it ended before."""
        with self._grown:
            self._grown.wait_for(lambda: self.tokens >= tokens or self._has_ended)
            return not self._has_ended

    def finish(self) -> _Answer:
        """Waits for its end.

        Raises:
            RequestError, ConnectionLost: it has no result.
        """
        self.join()
        if self._failure is not None:
            raise self._failure
        return self

    @property
    def resumed(self) -> int:
        """How many times it went on after a crash."""
        return self._stream.result.resumed


def _ask_both(client: Client, names: Sequence[str], output: Output) -> None:
    _headline(output, f"both answer at once: {QUESTION}")
    for answer in [_Answer(client, name, QUESTION, QUESTION_TOKENS) for name in names]:
        _tell(output, f"{answer.model}: {_shown(answer.finish().text)}")


def _kill_one(client: Client, names: Sequence[str], output: Output) -> dict[str, Any]:
    """Kills the worker of the first model while both answer, and compares the answers.

    Raises:
        CliError: an answer is another one than undisturbed.
    """
    victim, other = names
    _headline(output, f"{other} alone: {STORY}")
    alone = _Answer(client, other, STORY, STORY_TOKENS).finish()
    _tell(output, f"{other}: {_shown(alone.text)}")

    _headline(output, f"both, and kill -9 for the worker of {victim} while it answers")
    changes = client.events()
    first, second = (_Answer(client, name, STORY, STORY_TOKENS) for name in names)
    kills = []
    for number in range(1, KILLS + 1):
        pid = _row(client, victim)["pid"]
        if not first.wait_for(number * STORY_TOKENS // (KILLS + 1)):
            _tell(output, f"{victim}: the answer was complete before kill number {number}")
            break
        os.kill(pid, signal.SIGKILL)
        killed_at = time.monotonic()
        _tell(output, f"killed pid {pid} after {first.tokens} tokens")
        kills.append({"pid": pid, "tokens": first.tokens})
        if not _came_back(changes, victim):
            break  # The answer ends with the cause.
        kills[-1]["ready_after_s"] = took_s = round(time.monotonic() - killed_at, 3)
        _tell(output, f"READY again as pid {_row(client, victim)['pid']} after {took_s:.1f} s")
    answers = [answer.finish() for answer in (first, second)]
    for answer in answers:
        same = "the same text as alone" if answer.text == alone.text else "ANOTHER TEXT"
        went_on = f", went on {answer.resumed} times" if answer.resumed else ""
        _tell(output, f"{answer.model}: {answer.tokens} tokens, {same}{went_on}")
    backend = _row(client, victim)["backend"]
    if backend in EXACT_BACKENDS and any(answer.text != alone.text for answer in answers):
        raise CliError("a crash has changed an answer", code="changed", hint="please report it")
    return {
        "backend": backend,
        "text": alone.text,
        "kills": kills,
        "answers": [
            {
                "model": answer.model,
                "tokens": answer.tokens,
                "resumed": answer.resumed,
                "is_same": answer.text == alone.text,
            }
            for answer in answers
        ],
    }


def _came_back(changes: Iterable[Mapping[str, Any]], model: str) -> bool:
    """Waits until the model is READY again; False if it is not tried any more."""
    states = (change["to"] for change in changes if change["model"] == model)
    return bool(next(state for state in states if state in ("READY", "FAILED")) == "READY")


def _show_status(client: Client, output: Output) -> None:
    _headline(output, "mlxsup status")
    status = client.status()
    if not output.is_json:
        show_models(output, status, status["models"])


def _row(client: Client, model: str) -> dict[str, Any]:
    """The model's entry of the status."""
    row: dict[str, Any] = next(r for r in client.status()["models"] if r["name"] == model)
    return row


def _shown(text: str) -> str:
    """What a model says, steering no terminal."""
    return text.strip().translate(VISIBLE)


def _headline(output: Output, text: str) -> None:
    _tell(output, f"\n{output.style(text, sys.stdout, bold=True)}")


def _tell(output: Output, text: str) -> None:
    """One line of the story."""
    if not output.is_json:
        output.data(text)
