"""`mlxsup demo`: what mlxsup does, shown on a real model in a minute or two.

Starts a daemon of its own, with its sockets and logs in a temporary folder, so that it never meets
one that runs already; streams from two models at once; kills one worker in mid-answer, again and
again; and shows that neither answer changed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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

END_LIMIT_S = 30.0


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
    else:
        tables = _tables_of(config_path)
    # Not the user's own temporary folder: on some systems its path is too long for a socket.
    with tempfile.TemporaryDirectory(prefix="mlxsup-demo-", dir="/tmp") as name:
        with _daemon(Path(name), tables, output) as client:
            names = list(tables["models"])
            _ask_both(client, names, output)
            shown = _kill_one(client, names, output)
            _show_status(client, output)
            _headline(output, "mlxsup stop")
        _tell(output, "every process is gone")
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


@contextmanager
def _daemon(folder: Path, tables: Mapping[str, Any], output: Output) -> Iterator[Client]:
    """A client of a daemon with this configuration, which is gone when the block is left.

    Raises:
        CliError: it did not start, a request failed, or it does not answer any more.
    """
    from mlxsup.client.endpoint import endpoint_in

    from .detach import start_detached
    from .processes import Watched

    supervisor = {"runtime_dir": str(folder / "run"), "log_dir": str(folder / "logs")}
    config = folder / "config.toml"
    whole = {"supervisor": supervisor, **tables}
    config.write_text("".join(f"{key} = {_toml(value)}\n" for key, value in whole.items()))
    for number in (signal.SIGTERM, signal.SIGHUP):
        # As Ctrl-C: the daemon must not stay.
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)
    _headline(output, "mlxsup start: one process for each model")
    arguments = ["--config", str(config)]
    started = start_detached(endpoint_in(folder / "run"), folder / "logs", arguments)
    pids = [started.pid]
    try:
        with connect(Target(endpoint=started.endpoint)) as client:
            for name in tables["models"]:
                with progress_shown(client, name, output):
                    client.load(name)
                _tell(output, f"{name}: READY as pid {_row(client, name)['pid']}")
            yield client
            pids += [model["pid"] for model in client.status()["models"] if model["pid"]]
    finally:
        processes = Watched(pids)
        if started.pid in processes.alive():
            os.kill(started.pid, signal.SIGTERM)
        for pid in processes.wait(END_LIMIT_S, lambda waited_s, left: None):
            os.kill(pid, signal.SIGKILL)


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
