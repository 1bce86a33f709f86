"""`mlxsup launch`: a coding agent that uses a model of the daemon, in one command.

The agent has the terminal, and its exit code is that of the command. What it needs is in its
arguments, its environment and a temporary file, and no file of the user changes.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import click

from mlxsup.protocol.folders import DEFAULT_LISTEN

from ..arguments import complete_writer, is_writer, model_meant
from ..changes import progress_shown
from ..connection import START_S, Target, connect, daemon_options, status_of_daemon
from ..exit_status import CliError, NoDaemonError
from ..keys import LAUNCH_KEY, launch_key
from ..terminal.output import Output, confirm, settle_streams
from ..terminal.tables import listing
from .connect import PROVIDER, UNKNOWN_KEY, Site, site_of

if TYPE_CHECKING:
    import subprocess
    from types import FrameType


GATEWAY_LIMIT_S = 60.0
LOOK_INTERVAL_S = 0.1
"""How long to wait for the gateway to take a new key, and how often to ask."""

ENOUGH_TOKENS = 32_768
"""Instructions, tools and some files: agents get stuck in a context that is much shorter."""

PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")

SIGNALLED = 128
"""Shells add the number of the signal that ended a process to this."""


# ---------------------------------------------------------------- the agents


class Start(NamedTuple):
    """The settings that make one process of an agent use a daemon; no file of the user changes.

    Attributes:
        arguments: in front of the user's own; `SETTINGS_FILE` stands for the path of the file.
        variables: of its environment.
        file: the name and the text of a temporary file that it needs.
    """

    arguments: Sequence[str] = ()
    variables: Mapping[str, str] = {}
    file: tuple[str, str] | None = None


SETTINGS_FILE = "{file}"

KEY_VARIABLE = "MLXSUP_API_KEY"
"""Has the key for programs that can be told the name of a variable: other users see arguments."""


def _start_claude(site: Site) -> Start:
    name = site.model.name
    variables = {
        "ANTHROPIC_BASE_URL": site.url,
        "ANTHROPIC_AUTH_TOKEN": site.key,
        "ANTHROPIC_API_KEY": "",
        "ANTHROPIC_MODEL": name,
        **{f"ANTHROPIC_DEFAULT_{tier}_MODEL": name for tier in ("OPUS", "SONNET", "HAIKU")},
        # Any of these would send the user's files to a cloud instead.
        **{f"CLAUDE_CODE_USE_{cloud}": "0" for cloud in ("BEDROCK", "FOUNDRY", "VERTEX")},
        # Otherwise each request begins with another line, and no prompt is ever known.
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    # The `env` of the user's own settings wins over the environment, but not over --settings.
    file = ("claude.json", json.dumps({"env": variables}, indent=2) + "\n")
    return Start(["--settings", SETTINGS_FILE], variables, file)


def _start_codex(site: Site) -> Start:
    about = {"name": PROVIDER, "base_url": site.base, "wire_api": "responses"}
    settings = {
        "model": site.model.name,
        "model_provider": PROVIDER,
        "model_context_window": site.model.tokens,
        "web_search": "disabled",  # only OpenAI's own service searches
        "agents.enabled": False,  # their tools would be a quarter of every prompt
        **{f"model_providers.{PROVIDER}.{key}": text for key, text in about.items()},
        f"model_providers.{PROVIDER}.env_key": KEY_VARIABLE,
    }
    # A text of JSON is one of TOML, too.
    words = [("-c", f"{key}={json.dumps(value)}") for key, value in settings.items()]
    return Start([*chain(*words)], {KEY_VARIABLE: site.key})


def _start_opencode(site: Site) -> Start:
    models = {
        one.name: {"name": one.name, "limit": {"context": one.tokens, "output": one.answer}}
        for one in site.models
    }
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": PROVIDER,
        "options": {"baseURL": site.base, "apiKey": site.key},
        "models": models,
    }
    model = f"{PROVIDER}/{site.model.name}"
    chosen = {"model": model, "small_model": model}
    # It is merged with the files of the user and of the project, and wins over them.
    settings = {"provider": {PROVIDER: provider}, **chosen}
    return Start(variables={"OPENCODE_CONFIG_CONTENT": json.dumps(settings)})


def _start_pi(site: Site) -> Start:
    free = dict.fromkeys(("input", "output", "cacheRead", "cacheWrite"), 0)
    models = [
        {
            "id": one.name,
            "name": one.name,
            "reasoning": False,
            "input": ["text"],
            "cost": free,
            "contextWindow": one.tokens,
            "maxTokens": one.answer,
        }
        for one in site.models
    ]
    about = {"baseUrl": site.base, "api": "openai-completions", "models": models}
    provider = f"{{...{json.dumps(about)}, apiKey: process.env.{KEY_VARIABLE}}}"
    extension = f'export default (pi) => pi.registerProvider("{PROVIDER}", {provider});\n'
    chosen = ["--provider", PROVIDER, "--model", site.model.name]
    return Start(
        ["--extension", SETTINGS_FILE, *chosen],
        {KEY_VARIABLE: site.key},
        ("pi.js", extension),
    )


def _start_aider(site: Site) -> Start:
    # Arguments, because a file .env of the project wins over the environment.
    where = ["--model", f"openai/{site.model.name}", "--openai-api-base", site.base]
    return Start([*where, "--no-show-model-warnings"], {"OPENAI_API_KEY": site.key})


def _start_qwen(site: Site) -> Start:
    where = ["--auth-type", "openai", "--openai-base-url", site.base, "--model", site.model.name]
    return Start(where, {"OPENAI_API_KEY": site.key})


def _start_copilot(site: Site) -> Start:
    model = site.model
    return Start(
        variables={
            "COPILOT_MODEL": model.name,
            "COPILOT_PROVIDER_TYPE": "openai",
            "COPILOT_PROVIDER_BASE_URL": site.base,
            "COPILOT_PROVIDER_API_KEY": site.key,
            "COPILOT_PROVIDER_MAX_PROMPT_TOKENS": str(model.tokens - model.answer),
            "COPILOT_PROVIDER_MAX_OUTPUT_TOKENS": str(model.answer),
        }
    )


class Agent(NamedTuple):
    """A coding agent: what its process gets, and the command that installs it."""

    start: Callable[[Site], Start]
    install: str


AGENTS = {
    "claude": Agent(_start_claude, "npm install --global @anthropic-ai/claude-code"),
    "codex": Agent(_start_codex, "npm install --global @openai/codex"),
    "opencode": Agent(_start_opencode, "npm install --global opencode-ai"),
    "pi": Agent(_start_pi, "npm install --global @earendil-works/pi-coding-agent"),
    "qwen": Agent(_start_qwen, "npm install --global @qwen-code/qwen-code"),
    "copilot": Agent(_start_copilot, "npm install --global @github/copilot"),
    "aider": Agent(_start_aider, "uv tool install --python 3.12 aider-chat"),
}
"""By the word that users type, which is the agent's command."""


# ---------------------------------------------------------------- the command


@click.command()
@click.argument("agent", metavar="[AGENT]", required=False, type=click.Choice(list(AGENTS)))
@click.argument("arguments", metavar="[-- ARGS]", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--model",
    metavar="MODEL",
    shell_complete=complete_writer,
    help="The model it uses; by default the only one, or the one with the longest context.",
)
@click.option(
    "-y", "--yes", "is_sure", is_flag=True, help="Start a daemon, or restart it with HTTP, unasked."
)
@click.option(
    "--print", "is_printing", is_flag=True, help="Print the variables and the command instead."
)
@daemon_options
@click.pass_context
def launch(
    context: click.Context,
    agent: str | None,
    arguments: tuple[str, ...],
    model: str | None,
    is_sure: bool,
    is_printing: bool,
    target: Target,
    output: Output,
) -> int | None:
    """Example: mlxsup launch claude

    Starts AGENT, a coding agent that uses a model of the daemon: claude, codex, opencode, pi, qwen,
    copilot or aider. If necessary, it starts a daemon with HTTP and loads the model first. The
    agent's settings stay as they are. Without AGENT it says which agents are installed.

    ARGS are the agent's own: mlxsup launch codex -- exec "fix the tests"
    """
    import shutil  # help would wait for it

    if agent is None:
        _list(output)
        return None
    executable = shutil.which(agent)
    if executable is None and not is_printing:
        raise CliError(
            f"{agent} is not installed",
            code="not_installed",
            hint=f"install it with `{AGENTS[agent].install}`",
        )
    if is_printing:
        _print(agent, arguments, model, target, output)
        return None
    assert executable is not None
    status = status_of_daemon(target, START_S)
    if status is None:
        _start_daemon(_file_to_start(agent, target, is_sure=is_sure), target, output)
    elif not status["gateway"] and status["config_path"] and (is_sure or sys.stdin.isatty()):
        from .stop import stop

        if not is_sure:
            question = "the daemon serves no HTTP; restart it with HTTP? Running answers end first."
            confirm(question, default=True, declined="nothing was changed")
        context.invoke(stop, endpoint=target.endpoint, config=target.config, is_json=output.is_json)
        _start_daemon(Path(status["config_path"]), target, output)
    with connect(target) as client:
        status = client.status()
        row, name = _choose(status, model, agent, output)
        key, is_new = launch_key(target, is_made=True)
        site = site_of(status, name, key)
        if key is not None and is_new:
            revoke = target.repeat_in(f"`mlxsup key revoke {LAUNCH_KEY}` revokes it")
            output.note(f"made the key {LAUNCH_KEY} for agents; {revoke}")
            _wait_for_key(site.url, key)
        if row["state"] != "READY":
            with progress_shown(client, row["name"], output):
                client.load(row["name"])
    settle_streams()
    return _run(executable, agent, AGENTS[agent].start(site), arguments)


def _print(
    agent: str, arguments: Sequence[str], model: str | None, target: Target, output: Output
) -> None:
    """Print what would be started; nothing is started, loaded or written."""
    with connect(target) as client:
        status = client.status()
    _, name = _choose(status, model, agent, output)
    key, is_missing = launch_key(target, is_made=False)
    begin = AGENTS[agent].start(site_of(status, name, UNKNOWN_KEY if is_missing else key))
    command = [agent, *begin.arguments, *arguments]
    variables = {**begin.variables, **_direct()}
    shown = [f"export {one}={shlex.quote(text)}" for one, text in variables.items()]
    line, file = shlex.join(command), {}
    if begin.file is not None:
        called, text = begin.file
        file = {"file": {"name": called, "text": text}}
        path = f'"$folder"/{called}'
        shown += ["folder=$(mktemp -d)", f"printf %s {shlex.quote(text)} > {path}"]
        line = line.replace(shlex.quote(SETTINGS_FILE), path)
    value = {"agent": agent, "model": name, "command": command, "variables": variables, **file}
    output.result(value, "\n".join([*shown, line]))
    if is_missing:
        ways = target.repeat_in(f"`mlxsup launch {agent}` or `mlxsup key new NAME` makes one")
        output.note(f"write a key of the gateway in place of {UNKNOWN_KEY}: {ways}")


def _list(output: Output) -> None:
    """Show the agents, and how each that is missing is installed."""
    import shutil

    found = {name: shutil.which(name) for name in AGENTS}
    if output.is_json:
        output.object({"agents": [
            {"name": name, "path": found[name], "install": program.install}
            for name, program in AGENTS.items()]})  # fmt: skip
        return
    rows = [(name, found[name] or f"no: {one.install}") for name, one in AGENTS.items()]
    output.show(listing(("AGENT", "INSTALLED"), rows))
    output.note("hint: `mlxsup launch AGENT`; `mlxsup connect TOOL` is for other programs")


# ---------------------------------------------------------------- the daemon


def _file_to_start(agent: str, target: Target, *, is_sure: bool) -> Path:
    """Return the configuration of a daemon that may be started."""
    from ..configuration import read_configuration

    place = target.find()
    if target.endpoint_source or not (is_sure or sys.stdin.isatty()):
        where = f" at {place.endpoint}" if target.endpoint_source else ""
        hint = "" if target.endpoint_source else f"`mlxsup launch {agent} --yes` starts one"
        raise NoDaemonError(f"no daemon runs{where}", target.repeat_in(hint))
    if place.config is None or not read_configuration(place.config).models:
        raise CliError(
            "no model is configured",
            code="no_models",
            hint="`mlxsup init` configures those on this machine, `mlxsup add OWNER/NAME` downloads"
            " one",
        )
    if not is_sure:
        question = f"no daemon runs; start one with the models of {place.config}?"
        confirm(question, default=True, declined="nothing was started")
    return place.config


def _start_daemon(path: Path, target: Target, output: Output) -> None:
    """Start a daemon with HTTP in the background."""
    from ..configuration import read_configuration
    from ..detach import note_started, start_configured

    has_gateway = read_configuration(path).gateway is not None
    started = start_configured(path, *(() if has_gateway else ("--http", DEFAULT_LISTEN)))
    note_started(started, target, output)


def _wait_for_key(url: str, key: str) -> None:
    """Return once the gateway takes the key: a new one counts within a second."""
    import http.client  # help would wait for it

    parts = urlsplit(url)
    until = time.monotonic() + GATEWAY_LIMIT_S
    headers = {"Authorization": f"Bearer {key}"}
    while True:
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=10)
        try:
            connection.request("GET", "/v1/models", headers=headers)
            answer = str(connection.getresponse().status)
            if answer == "200":
                return
        except OSError as error:
            answer = error.strerror or str(error)
        finally:
            connection.close()
        if time.monotonic() >= until:
            hint = "`mlxsup doctor` finds what is wrong"
            raise CliError(f"{url} does not answer: {answer}", code="gateway", hint=hint)
        time.sleep(LOOK_INTERVAL_S)


def _choose(
    status: Mapping[str, Any], model: str | None, agent: str, output: Output
) -> tuple[Mapping[str, Any], str]:
    """Return the row of the model that the agent uses, and its name in requests."""
    rows = [row for row in status["models"] if is_writer(row)]
    site_of(status, model, None)  # refuses what is unknown
    found = None if model is None else model_meant(status, model)
    if found is None:
        # Instructions, tools and files fill a context before anything else goes wrong.
        row = max(rows, key=lambda one: (
            one["state"] != "FAILED", one["context_length"] or 0, one["state"] == "READY",
        ))  # fmt: skip
        if len(rows) > 1:
            output.note(
                f"{agent} uses {row['name']}, the model with the longest context;"
                " --model chooses another"
            )
    else:
        row = found.row
    name = model or str(row["name"])
    context = row["context_length"]
    if context is not None and context < ENOUGH_TOKENS:
        output.note(
            f"warning: {name} has a context of {context} tokens; coding agents need"
            f" {ENOUGH_TOKENS} or more"
        )
    return row, name


# ---------------------------------------------------------------- the agent


def _direct() -> dict[str, str]:
    """Return the variables that keep requests to this machine away from a proxy, if one is set."""
    if not any(os.environ.get(name) or os.environ.get(name.lower()) for name in PROXIES):
        return {}
    return {
        name: ",".join(filter(None, [os.environ.get(name), *LOCAL_HOSTS]))
        for name in ("NO_PROXY", "no_proxy")
    }


def _run(executable: str, agent: str, start: Start, arguments: Sequence[str]) -> int:
    """Run an agent until it ends, and return its exit code.

    The agent has our terminal and our process group, so keys reach it as they would without us; an
    end that only we are told of is passed on. Its settings have a key in them, and go with it.
    """
    import subprocess
    import tempfile

    came: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, frame: FrameType | None) -> None:
        came.append(number)
        if process is not None:
            process.send_signal(number)

    with ExitStack() as stack:
        # Functions instead of SIG_IGN, which the agent would inherit.
        for key in (signal.SIGINT, signal.SIGQUIT):
            signal.signal(key, lambda number, frame: None)
        for end in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(end, pass_on)
        try:
            path = ""
            if start.file is not None:
                called, text = start.file
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mlxsup-launch-"))
                path = os.path.join(folder, called)
                with open(path, "x", opener=lambda at, flags: os.open(at, flags, 0o600)) as file:
                    file.write(text)
            ours = [path if one == SETTINGS_FILE else one for one in start.arguments]
            process = subprocess.Popen(
                [agent, *ours, *arguments],
                executable=executable,
                env={**os.environ, **start.variables, **_direct()},
            )
        except OSError as error:
            message = f"{agent} cannot be started: {error.filename or executable}: {error.strerror}"
            raise CliError(message, code="not_started") from None
        for number in came:
            process.send_signal(number)
        code = process.wait()
    return code if code >= 0 else SIGNALLED - code
