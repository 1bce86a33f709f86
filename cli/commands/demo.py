"""`mlxsup demo`: what mlxsup does, shown on a real model in a minute or two.

Runs its own daemon, with its sockets and logs in a temporary folder, so that it never meets one
that is already running; streams from two models at once; kills one worker mid-answer, again and
again; and shows that neither answer changed. With the extra `gateway` it asks once more over HTTP.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxsup.protocol.folders import DEMO_MODEL_FOLDER
from mlxsup.protocol.gateway import INSTALL_HINT

from ..background_answer import EXACT_BACKENDS, BackgroundAnswer
from ..connection import output_options
from ..demo_http import ANY_PORT, PATH, HttpDoor, has_extra
from ..demo_http import ask as ask_over_http
from ..exit_status import CliError
from ..own_daemon import visit_own_daemon
from ..terminal.output import Output
from ..terminal.status_table import show_models
from ..terminal.waiting import progress_shown

if TYPE_CHECKING:
    from mlxsup.client import Client

QUESTION = "What is the capital of France?"
QUESTION_TOKENS = 24
STORY = "Tell me a short story about a lighthouse keeper and a storm."
STORY_TOKENS = 40
KILLS = 3


@click.command()
@click.option(
    "--config",
    "config_path",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help=f"Use the first two models of this file; by default, a small model is downloaded once "
    f"(93 MB, to {DEMO_MODEL_FOLDER}).",
)
@output_options
def demo(config_path: Path | None, output: Output) -> None:
    """Example: mlxsup demo

    Streams from two models at once, kills one worker three times mid-answer, and shows that neither
    answer changed; then once more over HTTP, if that is installed. A daemon that is already running
    is left alone.
    """
    from .start import configure, read_configuration, serve_two

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
        door = HttpDoor() if has_extra() else None
        serve = partial(serve_two, configuration, Path(place))
        if door is not None:
            serve = partial(serve, http=ANY_PORT, on_change=door.heard)
        shown = _show(serve, door, hint, output)
    if output.is_json:
        output.object(shown)
    elif config_path is None:
        output.data(f"\nTo use this model: mlxsup start --model {DEMO_MODEL_FOLDER}")


def _show(
    serve: Callable[..., int], door: HttpDoor | None, hint: str, output: Output
) -> dict[str, Any]:
    """Runs the daemon and the demonstration.

    Args:
        serve: runs the daemon until it is asked to end; takes `on_listening`.
        door: of HTTP; None without the extra.
        hint: what helps if a model fails.
        output: how to write output.

    Raises:
        CliError: the daemon did not start, or a request failed.
        KeyboardInterrupt: a signal ended it.
    """
    _headline(output, "mlxsup start: one process for each model")
    try:
        shown = visit_own_daemon(serve, partial(_tell_story, door=door, output=output))
    except CliError as error:
        if error.code in ("load_failed", "model_failed"):
            error.hint = hint  # Its logs are removed with the demonstration.
        raise
    _tell(output, "every process is gone")
    return shown


def _tell_story(client: Client, door: HttpDoor | None, output: Output) -> dict[str, Any]:
    """The demonstration itself; returns what `--json` prints."""
    names = [model["name"] for model in client.status()["models"]]
    _load_both(client, names, output)
    _ask_both(client, names, output)
    shown = _kill_one(client, names, output)
    shown["http"] = _ask_over_http(client, names[-1], door, shown["text"], output)
    _show_status(client, output)
    _headline(output, "mlxsup stop")
    return shown


def _ask(client: Client, model: str, question: str, max_tokens: int) -> BackgroundAnswer:
    """One streamed answer, collected in its own thread."""
    stream = client.generate(model, **_asked(question, max_tokens))
    return BackgroundAnswer(model, stream)


def _asked(question: str, max_tokens: int) -> dict[str, Any]:
    """The parameters of a request."""
    messages = [{"role": "user", "content": question}]
    return {"messages": messages, "max_tokens": max_tokens, "temperature": 0}


def _load_both(client: Client, names: Sequence[str], output: Output) -> None:
    for name in names:
        with progress_shown(client, name, output):
            client.load(name)
        _tell(output, f"{name}: READY as pid {_row(client, name)['pid']}")


def _ask_both(client: Client, names: Sequence[str], output: Output) -> None:
    _headline(output, f"both answer at once: {QUESTION}")
    for answer in [_ask(client, name, QUESTION, QUESTION_TOKENS) for name in names]:
        _tell(output, f"{answer.model}: {answer.finish().text.strip()}")


def _kill_one(client: Client, names: Sequence[str], output: Output) -> dict[str, Any]:
    """Kills the worker of the first model while both answer, and compares the answers.

    Raises:
        CliError: an answer differs from the undisturbed one.
    """
    victim, other = names
    alone = {}
    for name in names:
        _headline(output, f"{name} alone: {STORY}")
        alone[name] = _ask(client, name, STORY, STORY_TOKENS).finish().text
        _tell(output, f"{name}: {alone[name].strip()}")

    _headline(output, f"both, with kill -9 for the worker of {victim} while it answers")
    changes = client.events()
    first, second = (_ask(client, name, STORY, STORY_TOKENS) for name in names)
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
        is_same = answer.text == alone[answer.model]
        same = "the same text as alone" if is_same else "A DIFFERENT TEXT"
        went_on = f", resumed {answer.resumed} times" if answer.resumed else ""
        _tell(output, f"{answer.model}: {answer.tokens} tokens, {same}{went_on}")
    backend = _row(client, victim)["backend"]
    if backend in EXACT_BACKENDS and any(one.text != alone[one.model] for one in answers):
        raise CliError("a crash has changed an answer", code="changed", hint="please report it")
    return {
        "backend": backend,
        "text": alone[other],
        "kills": kills,
        "answers": [
            {
                "model": answer.model,
                "tokens": answer.tokens,
                "resumed": answer.resumed,
                "is_same": answer.text == alone[answer.model],
            }
            for answer in answers
        ],
    }


def _ask_over_http(
    client: Client, model: str, door: HttpDoor | None, expected: str, output: Output
) -> dict[str, Any] | None:
    """Asks once over HTTP, and kills the worker in mid-answer; None without the extra.

    Raises:
        CliError: the answer differs from the undisturbed one.
    """
    if door is None:
        _tell(output, f"\nfor OpenAI's and Anthropic's API over HTTP: {INSTALL_HINT}")
        return None
    url, killed = door.url(), list[int]()
    _headline(output, f"POST {url}{PATH}, with kill -9 for the worker of {model}")

    def kill_once(pieces: int) -> None:
        if pieces == STORY_TOKENS // 4:
            killed.append(_row(client, model)["pid"])
            os.kill(killed[0], signal.SIGKILL)
            _tell(output, f"its worker, pid {killed[0]}, is killed after {pieces} pieces")

    text = ask_over_http(url, {"model": model, **_asked(STORY, STORY_TOKENS)}, kill_once)
    is_same = text == expected
    same = "the same text as alone" if is_same else "A DIFFERENT TEXT"
    _tell(output, f"{model}: complete, {same}")
    backend = _row(client, model)["backend"]
    if backend in EXACT_BACKENDS and not is_same:
        raise CliError("a crash has changed an answer", code="changed", hint="please report it")
    return {"url": url, "killed": killed, "is_same": is_same}


def _came_back(changes: Iterable[Mapping[str, Any]], model: str) -> bool:
    """Waits until the model is READY again; False if it is no longer tried."""
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


def _headline(output: Output, text: str) -> None:
    _tell(output, f"\n{output.style(text, sys.stdout, bold=True)}")


def _tell(output: Output, text: str) -> None:
    """One line of the story."""
    if not output.is_json:
        output.data(text)
