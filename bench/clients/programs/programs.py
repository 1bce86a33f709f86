"""The programs: what is installed, and what each of them does in its turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from . import open_webui
from .environments import Environment, Npm, Pypi
from .turns import Turn, TurnFailed

EDITED = "hello\n"
EDIT = f"[[say greeting.txt\n```\n{EDITED}```\n]]"
"""A request that the fake engine answers with an edit in aider's format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Somebody else's program.

    Attributes:
        name: of its package.
        environment: where it is installed.
        does: what its turn shows.
        turn: raises TurnFailed if it did not.
    """

    name: str
    environment: Environment
    does: str
    turn: Callable[[Turn], None]


def _scripted(name: str) -> Callable[[Turn], None]:
    """The turn of a library: a script that asserts, and prints the answer."""
    return lambda turn: turn.demand(turn.script(name))


def _aider(turn: Turn) -> None:
    options = (
        "--yes-always", "--no-git", "--no-auto-commits", "--no-check-update", "--no-pretty",
        "--no-show-model-warnings", "--no-show-release-notes", "--analytics-disable",
        "--no-fancy-input", "--no-detect-urls", "--map-tokens", "0", "--edit-format", "whole",
    )  # fmt: skip
    path = turn.work / "greeting.txt"
    path.write_text("good day\n")
    turn.run(
        ["aider", "--model", "openai/m", *options, "--message", EDIT, path.name],
        OPENAI_API_BASE=f"{turn.daemon.url}/v1",
        OPENAI_API_KEY="none",
    )
    if path.read_text() != EDITED:
        raise TurnFailed(f"the file has {path.read_text()!r}")


def _codex(turn: Turn) -> None:
    turn.connected("codex", "codex", "exec", "--profile", "mlxsup", "--skip-git-repo-check")


def _opencode(turn: Turn) -> None:
    turn.connected("opencode", "opencode", "run", "--model", "mlxsup/m")


def _claude_code(turn: Turn) -> None:
    turn.connected("claude-code", "claude", "--print")


PROGRAMS: Sequence[Program] = (
    Program(
        name="litellm",
        environment=Pypi(["litellm", "mcp"]),
        does="with `mcp`, without which its import fails: chats over both APIs, whole and "
        "streamed; a call",
        turn=_scripted("litellm_chat.py"),
    ),
    Program(
        name="openai-agents",
        environment=Pypi(["openai-agents"]),
        does="an agent that calls a function, over chats and over responses",
        turn=_scripted("agents_turn.py"),
    ),
    Program(
        name="aider-chat",
        environment=Pypi(["aider-chat"]),
        does="edits a file",
        turn=_aider,
    ),
    Program(
        name="open-webui",
        environment=Pypi(["open-webui"]),
        does="lists the models, loads one, and chats",
        turn=open_webui.turn,
    ),
    Program(
        name="ai",
        environment=Npm(["ai", "@ai-sdk/openai-compatible"]),
        does="with `@ai-sdk/openai-compatible`: a text, whole and streamed; a call and its result",
        turn=_scripted("ai_sdk.mjs"),
    ),
    Program(
        name="@anthropic-ai/sdk",
        environment=Npm(["@anthropic-ai/sdk"]),
        does="a message, whole and streamed; a call; a count; an error",
        turn=_scripted("anthropic_sdk.mjs"),
    ),
    Program(
        name="@openai/codex",
        environment=Npm(["@openai/codex"]),
        does="a turn, as `mlxsup connect codex --write` has set it up",
        turn=_codex,
    ),
    Program(
        name="opencode-ai",
        environment=Npm(["opencode-ai"]),
        does="a turn, as `mlxsup connect opencode --write` has set it up",
        turn=_opencode,
    ),
    Program(
        name="@anthropic-ai/claude-code",
        environment=Npm(["@anthropic-ai/claude-code"]),
        does="a turn, as `mlxsup connect claude-code --write` has set it up",
        turn=_claude_code,
    ),
)
