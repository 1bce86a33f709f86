"""`mlxsup demo`: what mlxsup does, shown on a real model in a minute or two.

Runs its own daemon, with its sockets and logs in a temporary folder, so that it never meets one
that is already running; streams from two models at once; kills one worker mid-answer, again and
again; and shows that neither answer changed.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxsup.protocol.folders import DEMO_MODEL_FOLDER

from ..changes import progress_shown
from ..connection import Target, connect, output_options
from ..exit_status import CliError, interrupt_says
from ..terminal.output import LiveLine, Output
from ..terminal.status import models_lines

if TYPE_CHECKING:
    from mlxsup.client import Client
    from mlxsup.client.client import Stream

EXACT_BACKENDS = ("cpu", "fake")
"""The back-ends that resume exactly: on a GPU a resumed answer may round differently."""


STORY = "Tell me a short story about a lighthouse keeper and a storm."
STORY_TOKENS = 40
ASKED: Mapping[str, Any] = {
    "messages": [{"role": "user", "content": STORY}], "max_tokens": STORY_TOKENS, "temperature": 0
}  # fmt: skip
"""The parameters of each request."""
KILLS = 3


@click.command()
@click.option(
    "--config",
    "config_path",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Use the first two models of this file. The default is a small model, downloaded once (93 "
    f"MB, to {DEMO_MODEL_FOLDER}).",
)
@output_options
def demo(config_path: Path | None, output: Output) -> None:
    """Example: mlxsup demo

    Streams answers from two models at once, kills the process of one model three times in the
    middle of an answer, and shows that neither answer changed. A running daemon is not touched.
    """
    from ..configuration import read_configuration
    from .start import configure, serve_two

    if config_path is None:
        from ..demo_model import fetch

        folder = fetch(Path(DEMO_MODEL_FOLDER).expanduser(), output)
        named = [f"{name}={folder}" for name in ("one", "two")]
        configuration = configure(named, output, is_shown=False)
        hint = f"remove {folder} to download it again"
    else:
        configuration = read_configuration(config_path)
        hint = f"`mlxsup start --config {shlex.quote(str(config_path))}` shows more"
    # Not the user's own temporary folder: on some systems its path is too long for a socket.
    with tempfile.TemporaryDirectory(prefix="mlxsup-demo-", dir="/tmp") as place:
        serve = partial(serve_two, configuration, Path(place))
        with interrupt_says("Stopped. All processes of the demo have ended."):
            shown = _show(serve, hint, output)
    if output.is_json:
        output.object(shown)
    elif config_path is None:
        output.data(f"\nTo use this model: mlxsup add {folder.name}")


def _show(serve: Callable[..., int], hint: str, output: Output) -> dict[str, Any]:
    """Run a daemon in this process and the demonstration in a thread, and end the daemon after it.

    So no daemon outlives the command.

    Args:
        serve: runs the daemon until it is asked to end; takes `on_listening`.
        hint: what helps if a model fails.

    Raises:
        CliError: the daemon did not start, or a request failed.
        OSError: the output cannot be written.
        KeyboardInterrupt: a signal ended it.
    """
    shown: dict[str, Any] = {}
    failures: list[CliError | OSError] = []
    visitors: list[threading.Thread] = []

    def visit(endpoint: str) -> None:
        try:
            with connect(Target(endpoint=endpoint)) as client:
                try:
                    shown.update(_Demonstration(client, output).show())
                finally:
                    client.stop(now=True)
        except (CliError, OSError) as error:
            failures.append(error)

    def begin(endpoint: str) -> None:
        visitors.append(threading.Thread(target=visit, args=(endpoint,), daemon=True))
        visitors[0].start()

    if not output.is_json:
        output.data(_headline(output, "mlxsup start: each model gets its own process"))
    code = serve(on_listening=begin)
    for visitor in visitors:
        visitor.join()
    if code:
        raise CliError(f"the daemon ended with exit code {code}", code="internal")
    for failure in failures:
        if isinstance(failure, CliError):
            if failure.code in ("shutting_down", "connection_lost"):
                raise KeyboardInterrupt
            if failure.code in ("load_failed", "model_failed"):
                failure.hint = hint  # Its logs are removed with the demonstration.
        raise failure
    if not shown:
        raise KeyboardInterrupt
    if not output.is_json:
        output.data("all processes have ended")
    return shown


def _headline(output: Output, text: str) -> str:
    return f"\n{output.style(text, sys.stdout, 'bold')}"


class _Demonstration:
    """The story of two models, told line by line while it happens.

    Args:
        client: of a daemon with two models.
    """

    def __init__(self, client: Client, output: Output) -> None:
        self._client = client
        self._output = output
        self._line = LiveLine(output)
        self._names = [model["name"] for model in client.status()["models"]]

    def show(self) -> dict[str, Any]:
        """Show everything, and return what `--json` prints."""
        for name in self._names:
            with progress_shown(self._client, name, self._output):
                self._client.load(name)
            self._tell(f"{name}: READY as pid {self._row(name)['pid']}")
        alone = {}
        for name in self._names:
            self._head(f"{name} alone: {STORY}")
            alone[name] = self._text_of(name, self._client.generate(name, **ASKED))
            self._tell(f"{name}: {alone[name].strip()}")
        shown = self._kill_one(alone)
        self._head("mlxsup status")
        status = self._client.status()
        if not self._output.is_json:
            self._output.show(models_lines(status["models"]))
        self._head("mlxsup stop")
        return shown

    def _kill_one(self, alone: Mapping[str, str]) -> dict[str, Any]:
        """Kill the worker of the first model while both answer, and compare the answers."""
        victim, other = self._names
        self._head(
            f"Both again, with kill -9 for the process of {victim} in the middle of its answer"
        )
        changes = self._client.events()
        streams = {name: self._client.generate(name, **ASKED) for name in self._names}
        texts, kills, tokens = dict.fromkeys(self._names, ""), list[dict[str, Any]](), 0
        has_failed = False
        for delta in streams[victim]:
            texts[victim] += delta.text
            tokens += len(delta.token_ids)
            self._line.show(f"{victim}: {tokens} of {STORY_TOKENS} tokens")
            is_due = tokens >= (len(kills) + 1) * STORY_TOKENS // (KILLS + 1)
            if not is_due or len(kills) == KILLS or has_failed:
                continue
            pid = int(self._row(victim)["pid"])
            os.kill(pid, signal.SIGKILL)
            killed_at = time.monotonic()
            self._tell(f"killed pid {pid} after {tokens} tokens")
            kills.append({"pid": pid, "tokens": tokens})
            states = (change["to"] for change in changes if change["model"] == victim)
            has_failed = next(one for one in states if one in ("READY", "FAILED")) == "FAILED"
            if not has_failed:  # otherwise the answer ends with the cause
                kills[-1]["ready_after_s"] = took_s = round(time.monotonic() - killed_at, 3)
                pid = self._row(victim)["pid"]
                self._tell(f"READY again as pid {pid} after {took_s:.1f} s")
        if len(kills) < KILLS:
            number = len(kills) + 1
            self._tell(f"{victim}: the answer was complete before kill {number}")
        texts[other] = self._text_of(other, streams[other])
        answers = []
        for name, stream in streams.items():
            result, is_same = stream.result, texts[name] == alone[name]
            count = len(result.token_ids)
            same = "the same text as before" if is_same else "A DIFFERENT TEXT"
            went_on = f", resumed {result.resumed} times" if result.resumed else ""
            self._tell(f"{name}: {count} tokens, {same}{went_on}")
            about = {"model": name, "tokens": count, "resumed": result.resumed}
            answers.append({**about, "is_same": is_same})
        backend = str(self._row(victim)["backend"])
        if backend in EXACT_BACKENDS and not all(one["is_same"] for one in answers):
            raise CliError("a crash changed an answer", code="changed", hint="please report it")
        return {"backend": backend, "text": alone[other], "kills": kills, "answers": answers}

    def _text_of(self, name: str, stream: Stream) -> str:
        """Return the text of an answer, and show how far it is meanwhile."""
        pieces, tokens = list[str](), 0
        for delta in stream:
            pieces.append(delta.text)
            tokens += len(delta.token_ids)
            self._line.show(f"{name}: {tokens} of {STORY_TOKENS} tokens")
        return "".join(pieces)

    def _row(self, model: str) -> dict[str, Any]:
        """Return the model's entry of the status."""
        row: dict[str, Any] = next(
            row for row in self._client.status()["models"] if row["name"] == model
        )
        return row

    def _head(self, text: str) -> None:
        self._tell(_headline(self._output, text))

    def _tell(self, text: str) -> None:
        """Print one line of the story."""
        self._line.clear()
        if not self._output.is_json:
            self._output.data(text)
