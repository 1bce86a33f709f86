"""The programs that `mlxsup connect` knows: which file of each gets which settings."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .commented_json import Named, Step, value_of, with_value

PROVIDER = "mlxsup"
"""What the programs call us in their files and menus."""

ANY_KEY = "mlxsup"
"""Some programs insist on a key, and the gateway may need none."""

UNKNOWN_CONTEXT = 8192
"""Tokens that a program is to count on if nobody knows how many a model takes."""

MOST_ANSWER = 8192
"""Tokens that a program leaves free for an answer, at most; half of a smaller context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model that a program is to show.

    Attributes:
        name: in requests.
        context: tokens; None while nobody knows.
    """

    name: str
    context: int | None

    @property
    def tokens(self) -> int:
        """Its context, or what is safe."""
        return self.context or UNKNOWN_CONTEXT

    @property
    def answer(self) -> int:
        """The part of its context that is for the answer."""
        return min(MOST_ANSWER, self.tokens // 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What a program is connected to.

    Attributes:
        url: of the gateway.
        model: the one that the program uses unless it is asked for another one.
        models: all, that one first.
        key: of the gateway; while it needs none, any text does.
    """

    url: str
    model: Model
    models: Sequence[Model]
    key: str = ANY_KEY

    @property
    def base(self) -> str:
        """What OpenAI's clients call their base URL."""
        return f"{self.url}/v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What becomes of a file.

    Attributes:
        path: of the file.
        shown: what is new in it, for people.
        apply: makes the new text from the old one, which is empty if there is no file; raises
            NotJson or NotThere.
    """

    path: Path
    shown: str
    apply: Callable[[str], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What makes a program use a daemon.

    Attributes:
        change: of its file; None if it keeps its settings elsewhere.
        variables: of the environment, which it needs besides.
        usage: what to do then: commands, or what to choose where.
        sized: the models whose context is in the file.
    """

    change: Change | None
    usage: Sequence[str]
    variables: dict[str, str]
    sized: Sequence[Model] = ()


def _merged(path: Path, values: dict[tuple[Step, ...], Any]) -> Change:
    """Some values of a JSON file that has others, too."""

    def apply(text: str) -> str:
        new = text
        for steps, value in values.items():
            new = with_value(new, steps, value)
        return text if text and value_of(new) == value_of(text) else new

    return Change(path=path, shown=apply("").rstrip("\n"), apply=apply)


def _own(path: Path, text: str) -> Change:
    """A file that contains nothing else."""
    return Change(path=path, shown=text.rstrip("\n"), apply=lambda _: text)


def _home(variable: str, default: str) -> Path:
    """A folder that a variable of the environment names, or one below the home folder."""
    given = os.environ.get(variable)
    return Path(given).expanduser() if given else Path.home() / default


def _claude_code(site: Site) -> Settings:
    name = site.model.name
    tiers = ("OPUS", "SONNET", "HAIKU")
    env = {
        "ANTHROPIC_BASE_URL": site.url,
        "ANTHROPIC_AUTH_TOKEN": site.key,
        "ANTHROPIC_MODEL": name,
        **{f"ANTHROPIC_DEFAULT_{tier}_MODEL": name for tier in tiers},
        # Otherwise each request begins with another line, and no prompt is ever known.
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    path = _home("CLAUDE_CONFIG_DIR", ".claude") / "settings.json"
    change = _merged(path, {("env", key): value for key, value in env.items()})
    return Settings(change=change, usage=["claude"], variables={})


def _codex(site: Site) -> Settings:
    lines = [
        "# Written by `mlxsup connect codex --write`; `--undo` removes it.",
        f"model = {_toml(site.model.name)}",
        f'model_provider = "{PROVIDER}"',
        f"model_context_window = {site.model.tokens}",
        "# Only OpenAI's own service searches.",
        'web_search = "disabled"',
        "",
        "# Their tools would be a quarter of every prompt.",
        "[agents]",
        "enabled = false",
        "",
        f"[model_providers.{PROVIDER}]",
        f'name = "{PROVIDER}"',
        f"base_url = {_toml(site.base)}",
        'wire_api = "responses"',
        f"experimental_bearer_token = {_toml(site.key)}",
        "",
    ]
    path = _home("CODEX_HOME", ".codex") / f"{PROVIDER}.config.toml"
    usage = [f"codex --profile {PROVIDER}"]
    change = _own(path, "\n".join(lines))
    return Settings(change=change, usage=usage, variables={}, sized=[site.model])


def _opencode(site: Site) -> Settings:
    folder = _home("XDG_CONFIG_HOME", ".config") / "opencode"
    path = next(
        (file for end in ("jsonc", "json") if (file := folder / f"opencode.{end}").exists()),
        folder / "opencode.json",
    )
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
    return Settings(
        change=_merged(path, {("provider", PROVIDER): provider}),
        usage=[f"opencode --model {PROVIDER}/{site.model.name}"],
        variables={},
        sized=site.models,
    )


def _continue(site: Site) -> Settings:
    lines = [
        "# Written by `mlxsup connect continue --write`; `--undo` removes it.",
        f"name: {PROVIDER}",
        "version: 1.0.0",
        "schema: v1",
        "models:",
    ]
    for one in site.models:
        lines += [
            # A text of JSON is one of YAML, too.
            f"  - name: {json.dumps(one.name)}",
            "    provider: openai",
            f"    model: {json.dumps(one.name)}",
            f"    apiBase: {json.dumps(site.base)}",
            f"    apiKey: {json.dumps(site.key)}",
            "    roles: [chat, edit, apply, summarize]",
            "    defaultCompletionOptions:",
            f"      contextLength: {one.tokens}",
            f"      maxTokens: {one.answer}",
        ]
    path = _home("CONTINUE_GLOBAL_DIR", ".continue") / "agents" / f"{PROVIDER}.yaml"
    usage = [f"choose {PROVIDER} in Continue's list of agents"]
    change = _own(path, "\n".join([*lines, ""]))
    return Settings(change=change, usage=usage, variables={}, sized=site.models)


def _vscode(site: Site) -> Settings:
    models = [
        {
            "id": one.name,
            "name": one.name,
            "url": f"{site.base}/chat/completions",
            "toolCalling": True,
            "vision": False,
            "maxInputTokens": one.tokens - one.answer,
            "maxOutputTokens": one.answer,
        }
        for one in site.models
    ]
    entry = {
        "name": PROVIDER,
        "vendor": "customendpoint",
        "apiKey": site.key,
        "apiType": "chat-completions",
        "models": models,
    }
    if sys.platform == "darwin":
        folder = Path.home() / "Library" / "Application Support"
    else:
        folder = _home("XDG_CONFIG_HOME", ".config")
    path = folder / "Code" / "User" / "chatLanguageModels.json"
    usage = [f"choose {site.model.name} in the chat's list of models (VS Code 1.122 or later)"]
    change = _merged(path, {(Named(PROVIDER),): entry})
    return Settings(change=change, usage=usage, variables={}, sized=site.models)


def _zed(site: Site) -> Settings:
    models = [
        {
            "name": one.name,
            "display_name": one.name,
            "max_tokens": one.tokens,
            "max_output_tokens": one.answer,
            "capabilities": {
                "tools": True,
                "images": False,
                "parallel_tool_calls": False,
                "prompt_cache_key": False,
            },
        }
        for one in site.models
    ]
    entry = {"api_url": site.base, "available_models": models}
    path = _home("XDG_CONFIG_HOME", ".config") / "zed" / "settings.json"
    return Settings(
        change=_merged(path, {("language_models", "openai_compatible", PROVIDER): entry}),
        usage=[f"choose {site.model.name} in the agent panel's list of models"],
        variables={f"{PROVIDER.upper()}_API_KEY": site.key},
        sized=site.models,
    )


def _open_webui(site: Site) -> Settings:
    return Settings(
        change=None,
        usage=[
            "open-webui serve",
            "or, if it has run before: Admin Panel, Settings, Connections, OpenAI API,"
            f" add {site.base}",
        ],
        variables={"OPENAI_API_BASE_URL": site.base, "OPENAI_API_KEY": site.key},
    )


def _toml(text: str) -> str:
    """A text as TOML has it; JSON's way to write one is allowed there."""
    return json.dumps(text)


TOOLS: dict[str, Callable[[Site], Settings]] = {
    "claude-code": _claude_code,
    "codex": _codex,
    "opencode": _opencode,
    "continue": _continue,
    "vscode": _vscode,
    "zed": _zed,
    "open-webui": _open_webui,
}
"""By the word that users type."""
