"""`mlxsup demo`: what mlxsup does, shown on a real model in a minute or two.

Runs its own daemon, with its sockets and logs in a temporary folder, so that it never meets one
that is already running; streams from two models at once; kills one worker mid-answer, again and
again; and shows that neither answer changed. With the extra `gateway` it asks once more over HTTP.
"""

from __future__ import annotations

import json
import os
import queue
import shlex
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import click

from mlxsup.protocol.folders import DEMO_MODEL_FOLDER
from mlxsup.protocol.gateway import EXTRA_MODULES, INSTALL_HINT, LOCAL_HOST, Address

from ..changes import progress_shown
from ..connection import Target, connect, output_options
from ..exit_status import CliError
from ..terminal.output import Output
from ..terminal.status import show_models

if TYPE_CHECKING:
    from http.client import HTTPResponse

    from mlxsup.client import Client
    from mlxsup.client.client import Stream

Value = TypeVar("Value")

EXACT_BACKENDS = ("cpu", "fake")
"""The back-ends that resume exactly: on a GPU a resumed answer may round differently."""

PATH = "/v1/chat/completions"
START_LIMIT_S = 60.0
ANSWER_LIMIT_S = 600.0

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
        urls: queue.SimpleQueue[str] | None = None
        if all(find_spec(name) is not None for name in EXTRA_MODULES):
            urls = queue.SimpleQueue()
            any_port = Address(host=LOCAL_HOST, port=0)
            serve = partial(serve, http=any_port, on_change=partial(_keep_url, urls))
        shown = _show(serve, urls, hint, output)
    if output.is_json:
        output.object(shown)
    elif config_path is None:
        output.data(f"\nTo use this model: mlxsup start --model {DEMO_MODEL_FOLDER}")


def _keep_url(urls: queue.SimpleQueue[str], change: Mapping[str, Any]) -> None:
    """Keep where the daemon's gateway listens, once it does."""
    if url := change.get("gateway"):
        urls.put(url)


def _show(
    serve: Callable[..., int], urls: queue.SimpleQueue[str] | None, hint: str, output: Output
) -> dict[str, Any]:
    """Run the daemon and the demonstration.

    Args:
        serve: runs the daemon until it is asked to end; takes `on_listening`.
        urls: gets that of the gateway; None without the extra.
        hint: what helps if a model fails.
        output: how to write output.

    Raises:
        CliError: the daemon did not start, or a request failed.
        KeyboardInterrupt: a signal ended it.
    """
    _headline(output, "mlxsup start: one process for each model")
    try:
        shown = visit_own_daemon(serve, partial(_tell_story, urls=urls, output=output))
    except CliError as error:
        if error.code in ("load_failed", "model_failed"):
            error.hint = hint  # Its logs are removed with the demonstration.
        raise
    _tell(output, "every process is gone")
    return shown


def _tell_story(
    client: Client, urls: queue.SimpleQueue[str] | None, output: Output
) -> dict[str, Any]:
    """Show everything, and return what `--json` prints."""
    names = [model["name"] for model in client.status()["models"]]
    _load_both(client, names, output)
    _ask_both(client, names, output)
    shown = _kill_one(client, names, output)
    shown["http"] = _ask_over_http(client, names[-1], urls, shown["text"], output)
    _show_status(client, output)
    _headline(output, "mlxsup stop")
    return shown


def _asked(question: str, max_tokens: int) -> dict[str, Any]:
    """Return the parameters of a request."""
    messages = [{"role": "user", "content": question}]
    return {"messages": messages, "max_tokens": max_tokens, "temperature": 0}


def _load_both(client: Client, names: Sequence[str], output: Output) -> None:
    for name in names:
        with progress_shown(client, name, output):
            client.load(name)
        _tell(output, f"{name}: READY as pid {_row(client, name)['pid']}")


def _ask(client: Client, model: str, question: str, max_tokens: int) -> Stream:
    """Ask for an answer; what comes of it waits until it is read."""
    return client.generate(model, **_asked(question, max_tokens))


def _ask_both(client: Client, names: Sequence[str], output: Output) -> None:
    _headline(output, f"both answer at once: {QUESTION}")
    streams = [_ask(client, name, QUESTION, QUESTION_TOKENS) for name in names]
    for name, stream in zip(names, streams, strict=True):
        _tell(output, f"{name}: {_text_of(stream).strip()}")


def _text_of(stream: Stream) -> str:
    return "".join(delta.text for delta in stream)


def _kill_one(client: Client, names: Sequence[str], output: Output) -> dict[str, Any]:
    """Kill the worker of the first model while both answer, and compare the answers.

    Raises:
        CliError: an answer differs from the undisturbed one.
    """
    victim, other = names
    alone = {}
    for name in names:
        _headline(output, f"{name} alone: {STORY}")
        alone[name] = _text_of(_ask(client, name, STORY, STORY_TOKENS))
        _tell(output, f"{name}: {alone[name].strip()}")

    _headline(output, f"both, with kill -9 for the worker of {victim} while it answers")
    changes = client.events()
    streams = {name: _ask(client, name, STORY, STORY_TOKENS) for name in names}
    texts, kills, tokens = dict.fromkeys(names, ""), list[dict[str, Any]](), 0
    has_failed = False
    for delta in streams[victim]:
        texts[victim] += delta.text
        tokens += len(delta.token_ids)
        is_due = tokens >= (len(kills) + 1) * STORY_TOKENS // (KILLS + 1)
        if is_due and len(kills) < KILLS and not has_failed:
            pid = _row(client, victim)["pid"]
            os.kill(pid, signal.SIGKILL)
            killed_at = time.monotonic()
            _tell(output, f"killed pid {pid} after {tokens} tokens")
            kills.append({"pid": pid, "tokens": tokens})
            has_failed = not _came_back(changes, victim)
            if has_failed:
                continue  # The answer ends with the cause.
            kills[-1]["ready_after_s"] = took_s = round(time.monotonic() - killed_at, 3)
            _tell(output, f"READY again as pid {_row(client, victim)['pid']} after {took_s:.1f} s")
    if len(kills) < KILLS:
        _tell(output, f"{victim}: the answer was complete before kill number {len(kills) + 1}")
    texts[other] = _text_of(streams[other])
    answers = []
    for name, stream in streams.items():
        result, is_same = stream.result, texts[name] == alone[name]
        count = len(result.token_ids)
        same = "the same text as alone" if is_same else "A DIFFERENT TEXT"
        went_on = f", resumed {result.resumed} times" if result.resumed else ""
        _tell(output, f"{name}: {count} tokens, {same}{went_on}")
        about = {"model": name, "tokens": count, "resumed": result.resumed}
        answers.append({**about, "is_same": is_same})
    backend = _row(client, victim)["backend"]
    if backend in EXACT_BACKENDS and texts != alone:
        raise CliError("a crash has changed an answer", code="changed", hint="please report it")
    return {"backend": backend, "text": alone[other], "kills": kills, "answers": answers}


def _ask_over_http(
    client: Client,
    model: str,
    urls: queue.SimpleQueue[str] | None,
    expected: str,
    output: Output,
) -> dict[str, Any] | None:
    """Ask once over HTTP, and kill the worker in mid-answer; None without the extra.

    Raises:
        CliError: there is no answer, or it differs from the undisturbed one.
    """
    if urls is None:
        _tell(output, f"\nfor OpenAI's and Anthropic's API over HTTP: {INSTALL_HINT}")
        return None
    try:
        url, killed = urls.get(timeout=START_LIMIT_S), list[int]()
    except queue.Empty:
        message = f"the gateway did not listen within {START_LIMIT_S:g} s"
        raise CliError(message, code="gateway", hint="please report it") from None
    _headline(output, f"POST {url}{PATH}, with kill -9 for the worker of {model}")

    pieces: list[str] = []
    body = {"model": model, **_asked(STORY, STORY_TOKENS), "stream": True}
    for piece in _pieces_over_http(url, json.dumps(body)):
        pieces.append(piece)
        if len(pieces) == STORY_TOKENS // 4:
            killed.append(_row(client, model)["pid"])
            os.kill(killed[0], signal.SIGKILL)
            _tell(output, f"its worker, pid {killed[0]}, is killed after {len(pieces)} pieces")
    text = "".join(pieces)
    is_same = text == expected
    same = "the same text as alone" if is_same else "A DIFFERENT TEXT"
    _tell(output, f"{model}: complete, {same}")
    backend = _row(client, model)["backend"]
    if backend in EXACT_BACKENDS and not is_same:
        raise CliError("a crash has changed an answer", code="changed", hint="please report it")
    return {"url": url, "killed": killed, "is_same": is_same}


def _came_back(changes: Iterable[Mapping[str, Any]], model: str) -> bool:
    """Wait until the model is READY again; False if it is no longer tried."""
    states = (change["to"] for change in changes if change["model"] == model)
    return bool(next(state for state in states if state in ("READY", "FAILED")) == "READY")


def _show_status(client: Client, output: Output) -> None:
    _headline(output, "mlxsup status")
    status = client.status()
    if not output.is_json:
        show_models(output, status, status["models"])


def _row(client: Client, model: str) -> dict[str, Any]:
    """Return the model's entry of the status."""
    row: dict[str, Any] = next(r for r in client.status()["models"] if r["name"] == model)
    return row


def _headline(output: Output, text: str) -> None:
    _tell(output, f"\n{output.style(text, sys.stdout, bold=True)}")


def _tell(output: Output, text: str) -> None:
    """Print one line of the story."""
    if not output.is_json:
        output.data(text)


def visit_own_daemon(serve: Callable[..., int], visit: Callable[[Client], Value]) -> Value:
    """Run a daemon in this process and a visit in a thread, and end the daemon after the visit.

    So no daemon outlives the command.

    Args:
        serve: runs the daemon until it is asked to end; takes `on_listening`.
        visit: what is done with it.

    Returns:
        What the visit has returned.

    Raises:
        CliError: the daemon did not start, or a request failed.
        OSError: the output cannot be written.
        KeyboardInterrupt: a signal ended it.
    """
    values: list[Value] = []
    failures: list[CliError | OSError] = []
    visitors: list[threading.Thread] = []

    def visited(endpoint: str) -> None:
        try:
            with connect(Target(endpoint=endpoint)) as client:
                try:
                    values.append(visit(client))
                finally:
                    client.stop(now=True)
        except (CliError, OSError) as error:
            failures.append(error)

    def begin(endpoint: str) -> None:
        visitors.append(threading.Thread(target=visited, args=(endpoint,), daemon=True))
        visitors[0].start()

    code = serve(on_listening=begin)
    for visitor in visitors:
        visitor.join()
    if code:
        raise CliError(f"the daemon ended with exit code {code}", code="internal")
    for failure in failures:
        if isinstance(failure, CliError) and failure.code in ("shutting_down", "connection_lost"):
            raise KeyboardInterrupt
        raise failure
    if not values:
        raise KeyboardInterrupt
    return values[0]


def _pieces_over_http(url: str, body: str) -> Iterator[str]:
    """Give the pieces of text of a streamed chat.

    Raises:
        CliError: it was refused, or has broken off.
    """
    import http.client  # which the help of `demo` need not wait for

    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=ANSWER_LIMIT_S)
    try:
        connection.request("POST", PATH, body, {"Content-Type": "application/json"})
        with connection.getresponse() as response:
            yield from _texts(response)
    except (OSError, http.client.HTTPException) as error:
        raise CliError(f"the answer over HTTP has broken off: {error}", code="gateway") from None
    finally:
        connection.close()


def _texts(response: HTTPResponse) -> Iterator[str]:
    if response.status != HTTPStatus.OK:
        raise CliError(json.loads(response.read())["error"]["message"], code="gateway")
    for line in response:
        if not line.startswith(b"data: "):
            continue
        data = line.removeprefix(b"data: ").strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise CliError(event["error"]["message"], code=event["error"]["code"])
        for choice in event["choices"]:
            delta = choice["delta"]
            if text := delta.get("content") or delta.get("reasoning_content"):
                yield text
    raise CliError("the answer over HTTP has broken off", code="gateway")
