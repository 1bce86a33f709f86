"""The commands by name: one line about each, other names for them, and guesses at mistyped ones."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

PACKAGE = "mlxsup.cli.commands"

COMMANDS = {
    "start": "Run the daemon.",
    "stop": "Stop the daemon and every worker.",
    "status": "Show every model.",
    "top": "Watch and control models and requests on one screen.",
    "events": "Follow the state changes of all models.",
    "why": "Explain what happened to a model or a request.",
    "load": "Load a model.",
    "unload": "Unload a model.",
    "restart": "Restart a model.",
    "wait": "Wait until models are READY.",
    "requests": "Show every open request.",
    "attach": "Follow the answer to a request.",
    "cancel": "Cancel a request.",
    "pause": "Pause a request.",
    "resume": "Resume a paused request.",
    "reload": "Apply changes of the configuration file.",
    "generate": "Generate an answer.",
    "chat": "Chat with a model.",
    "prioritize": "Change the priority of a request.",
    "logs": "Show the logs.",
    "doctor": "Find problems and show how to fix them.",
    "log-level": "Change how much is logged.",
    "connect": "Connect another program to the daemon.",
    "bench": "Measure how fast a model answers.",
    "demo": "See mlxsup at work with a small model.",
    "run": "Download and serve a model, then chat with it.",
    "add": "Add a model to the configuration and the daemon.",
    "pull": "Download a model.",
    "rm": "Remove a model from the configuration, or its files.",
    "plan": "Show which models fit into memory.",
    "models": "List the models on this machine.",
    "show": "Show the details of a model.",
    "init": "Write a configuration for the models on this machine.",
    "convert": "Convert a GGUF file, or quantise a model.",
    "key": "Create and revoke API keys of the HTTP gateway.",
    "config": "Check configuration files and show which one is used.",
    "service": "Run the daemon as a service of systemd or launchd.",
    "completion": "Print the completion script for a shell.",
}
"""In the order of the help."""

FILES = {
    "attach": "requests",
    "cancel": "requests",
    "events": "status",
    "load": "lifecycle",
    "log-level": "settings",
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
"""What other tools have taught people to type; not in the help."""

HELP_ALIAS = "help"
"""`mlxsup help COMMAND` is `mlxsup COMMAND --help`."""

HABITS = {
    "delete": "rm", "download": "pull", "get": "add", "import": "add", "info": "show",
    "kill": "stop", "list": "models", "remove": "rm", "serve": "start", "uninstall": "rm",
}  # fmt: skip
"""What people try that means something else here: the command to suggest."""

ENDING_COMMANDS = frozenset({"stop", "unload", "restart"})
"""What takes something away is only suggested for a word that begins as it does: a guess must not
do harm."""


def expand(arguments: Sequence[str]) -> list[str]:
    """Return the command line without other names for commands."""
    match list(arguments):
        case [first, *rest] if first == HELP_ALIAS:
            return [*rest, "--help"]
        case [first, *rest] if first in ALIASES:
            return [*ALIASES[first], *rest]
        case unchanged:
            return unchanged


def guess(word: str) -> str | None:
    """Return the command that was probably meant, as it is typed; None if nothing is close."""
    if word in HABITS:
        return HABITS[word]
    import difflib  # every command would wait for it

    close = difflib.get_close_matches(word, COMMANDS, n=len(COMMANDS))
    return next((name for name in close if name not in ENDING_COMMANDS or name[0] == word[0]), None)
