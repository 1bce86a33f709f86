"""The commands by name: one line about each, other names for them, and guesses at mistyped ones."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

PACKAGE = "mlxsup.cli.commands"

GROUPS = {
    "Start here": {
        "run": "Download and serve a model, then chat with it.",
        "init": "Write a configuration for the models on this machine.",
        "start": "Run the daemon; --http serves OpenAI's API as well.",
        "chat": "Chat with a model.",
        "generate": "Generate an answer.",
        "embed": "Print the embeddings of texts, or rank them.",
    },
    "Models": {
        "add": "Add a model to the configuration and the daemon.",
        "models": "List the models on this machine.",
        "show": "Show the details of a model.",
        "plan": "Show which models fit into memory.",
        "load": "Load a model.",
        "unload": "Unload a model.",
        "restart": "Restart a model.",
        "wait": "Wait until models are READY.",
        "search": "Find models on the hub, and the short names of some.",
        "pull": "Download a model.",
        "convert": "Convert a GGUF file, or quantise a model.",
        "rm": "Remove a model from the configuration, or its files.",
    },
    "Watch": {
        "status": "Show every model.",
        "top": "Watch and control models and requests on one screen.",
        "events": "Follow the state changes of all models.",
        "logs": "Show the logs.",
        "why": "Explain what happened to a model or a request.",
        "doctor": "Find problems and show how to fix them.",
        "hosts": "Check the hosts that serve a model together.",
    },
    "Requests": {
        "requests": "Show every open request.",
        "attach": "Follow the answer to a request.",
        "cancel": "Cancel a request.",
        "pause": "Pause a request.",
        "resume": "Resume a paused request.",
        "prioritize": "Change the priority of a request.",
    },
    "Daemon": {
        "stop": "Stop the daemon and every worker.",
        "reload": "Apply changes of the configuration file.",
        "config": "Change and check the configuration file.",
        "key": "Create and revoke API keys of the HTTP gateway.",
        "service": "Run the daemon as a service of systemd or launchd.",
    },
    "More": {
        "launch": "Start a coding agent that uses a model of the daemon.",
        "connect": "Connect an editor to the daemon.",
        "bench": "Measure how fast models answer.",
        "demo": "See mlxsup at work with a small model.",
        "completion": "Print the completion script for a shell.",
    },
}
"""In the order of the help; docs/cli.md has the same groups."""

COMMANDS = {name: what for group in GROUPS.values() for name, what in group.items()}

FILES = {
    "attach": "requests",
    "cancel": "requests",
    "events": "status",
    "load": "lifecycle",
    "pause": "requests",
    "prioritize": "requests",
    "reload": "settings",
    "restart": "lifecycle",
    "resume": "requests",
    "show": "models",
    "unload": "lifecycle",
    "wait": "lifecycle",
}
"""The file in `commands/` that has a command, if it is not called as the command is."""


def load(name: str) -> Any:
    """Return the command of this name, imported now: its help alone needs no other command."""
    attribute = name.replace("-", "_")
    return getattr(importlib.import_module(f"{PACKAGE}.{FILES.get(name, attribute)}"), attribute)


ALIASES = {"ps": ("status",), "ls": ("models",), "tail": ("logs", "--follow")}
"""What other tools have taught people to type."""

HELP_ALIAS = "help"
"""`mlxsup help COMMAND` is `mlxsup COMMAND --help`."""

HABITS = {
    "abort": "cancel ID", "alias": "add MODEL --as NAME", "ask": "generate MODEL PROMPT",
    "benchmark": "bench MODEL", "check": "doctor", "complete": "generate MODEL PROMPT",
    "cp": "add MODEL --as NAME", "create": "add FOLDER", "daemon": "start --detach",
    "dashboard": "start --http", "debug": "doctor", "del": "rm MODEL", "delete": "rm MODEL",
    "describe": "show MODEL", "df": "models", "disable": "service uninstall", "down": "stop",
    "download": "pull OWNER/NAME", "du": "models", "edit": "config set KEY VALUE",
    "eject": "unload MODEL", "enable": "service install", "estimate": "plan", "exit": "stop",
    "explain": "why MODEL", "fetch": "pull OWNER/NAME", "gateway": "start --http",
    "get": "add OWNER/NAME", "health": "status --check", "history": "events", "images": "models",
    "import": "add FOLDER", "info": "show MODEL", "inspect": "show MODEL",
    "install": "add OWNER/NAME", "is-active": "status --check", "jobs": "requests",
    "journalctl": "logs", "keys": "key list", "kill": "stop", "kill MODEL": "unload MODEL",
    "limits": "plan", "list": "models", "log": "logs", "login": "key new NAME", "memory": "plan",
    "log-level": "config set supervisor.log_level debug",
    "monitor": "top", "mv": "add MODEL --as NAME", "nice": "prioritize ID CLASS",
    "prune": "rm --files MODEL", "quantize": "convert MODEL --quantize", "queue": "requests",
    "quit": "stop", "remove": "rm MODEL", "rename": "add MODEL --as NAME",
    "renice": "prioritize ID CLASS", "rmi": "rm MODEL", "serve": "start --http",
    "serve MODEL": "start --http --model MODEL", "server": "start --http",
    "set": "config set KEY VALUE", "shutdown": "stop", "slots": "requests", "stats": "top",
    "tag": "add MODEL --as NAME", "talk": "chat MODEL", "token": "key new NAME", "tui": "top",
    "ui": "start --http", "unpause": "resume ID", "up": "start --detach", "version": "--version",
    "watch": "status --watch",
}  # fmt: skip
"""The command to suggest for a word of another tool, alone or with a name behind it. What is in
capitals is replaced by the words that follow it."""

OTHER_WAYS = {
    "push": "`hf upload OWNER/NAME FOLDER` uploads a model",
    **dict.fromkeys(
        ("update", "upgrade"),
        "install it again as you did, such as `pip install --upgrade mlxsup`; the daemon is the new"
        " one after `mlxsup stop` and `mlxsup start --detach`",
    ),
    "uninstall": "`mlxsup rm MODEL` takes out a model. For mlxsup itself: `mlxsup service"
    " uninstall`, `mlxsup stop`, then remove the package as you installed it, and the folder"
    " ~/.mlxsup",
}
"""What to do instead of a word of another tool that no command of ours stands for."""

_ADDRESS = (
    "`mlxsup start --http HOST:PORT`, or `mlxsup config set gateway.listen HOST:PORT` for good"
)
_CONTEXT = "`mlxsup config set models.NAME.context_length N`"
_ROWS = "`mlxsup config set models.NAME.max_concurrency N`"
_NAME = "`mlxsup add MODEL --as NAME`"

OPTION_HABITS = {
    "--alias": _NAME,
    "--api-key": "`mlxsup key new NAME`",
    "--context-size": _CONTEXT,
    "--ctx-size": _CONTEXT,
    "--format": "--schema FILE, for JSON that matches a schema",
    "--gpu-memory-utilization": "`mlxsup config set supervisor.memory_budget SIZE`",
    "--host": _ADDRESS,
    "--max-model-len": _CONTEXT,
    "--max-num-seqs": _ROWS,
    "--num-ctx": _CONTEXT,
    "--parallel": _ROWS,
    "--port": _ADDRESS,
    "--served-model-name": _NAME,
    "--ttl": "--keep-alive, or `mlxsup config set models.NAME.idle_unload_s 10m` for good",
}
"""The option or command to name for an option of another tool."""

ENDING_COMMANDS = frozenset({"stop", "unload", "restart"})
"""What takes something away is only suggested for a word that begins as it does: a guess must not
do harm."""


def expand(arguments: Sequence[str]) -> list[str]:
    """Return the command line without other names for commands."""
    match list(arguments):
        case [first, *rest] if first == HELP_ALIAS:
            return [*expand(rest), "--help"]
        case [first, *rest] if first in ALIASES:
            return [*ALIASES[first], *rest]
        case unchanged:
            return unchanged


def guess(word: str, rest: Sequence[str] = ()) -> str | None:
    """Return the command that was probably meant, as it is typed; None if nothing is close.

    Args:
        word: what stands for the command.
        rest: what follows it.
    """
    named = list(takewhile(lambda one: not one.startswith("-"), rest))
    meant = HABITS.get(f"{word} MODEL") if named else None
    if meant := meant or HABITS.get(word):
        import shlex

        given = (shlex.quote(one) for one in named)
        return " ".join(next(given, one) if one.isupper() else one for one in meant.split())
    import difflib  # every command would wait for it

    close = difflib.get_close_matches(word, COMMANDS, n=len(COMMANDS))
    return next((name for name in close if name not in ENDING_COMMANDS or name[0] == word[0]), None)
