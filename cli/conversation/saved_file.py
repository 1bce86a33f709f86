"""A conversation in a file: one JSON object, readable by its owner alone."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ..exit_status import CliError
from .conversation import Conversation

SCHEMA_VERSION = 1
MAX_BYTES = 64 * 1024**2
"""More than any request may have."""

ROLES = ("user", "assistant")


def save(conversation: Conversation, path: Path) -> None:
    """Writes the file; only what this chat has saved or loaded itself is replaced.

    Raises:
        CliError: there is such a file, or it cannot be written.
    """
    last = conversation.unanswered
    asked = [] if last is None else [{"role": "user", "content": last}]
    value = {
        "schema_version": SCHEMA_VERSION,
        "model": conversation.model,
        "system": conversation.system,
        "messages": [*conversation.messages, *asked],
    }
    text = json.dumps(value, ensure_ascii=False, indent=2) + "\n"
    is_own = conversation.file == path
    written = path.with_name(f"{path.name}.new") if is_own else path
    try:
        _write(written, text.encode("utf-8", "replace"))
        if is_own:
            written.replace(path)
    except FileExistsError:
        raise CliError(f"{written} exists; save under another name") from None
    except OSError as error:
        raise CliError(f"cannot write {written}: {error.strerror}") from None
    except ValueError as error:  # a zero byte in its name
        raise CliError(f"cannot write {written}: {error}") from None
    conversation.file = path


def _write(path: Path, data: bytes) -> None:
    """Writes a new file; one that could not be written whole is removed."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
    except OSError:
        path.unlink(missing_ok=True)
        raise


def load(conversation: Conversation, path: Path) -> None:
    """Replaces what was said and the system prompt by what the file has.

    Raises:
        CliError: it cannot be read, or is no conversation; nothing has changed then.
    """
    value = _read(path)
    system, messages = value.get("system"), value.get("messages")
    is_right = (
        value.get("schema_version") == SCHEMA_VERSION
        and (system is None or isinstance(system, str))
        and isinstance(messages, list)
        and all(map(_is_message, messages))
        and all(one["role"] == ROLES[place % 2] for place, one in enumerate(messages))
    )
    if not is_right or not isinstance(messages, list):
        raise _no_conversation(path)
    conversation.forget()
    conversation.system = system
    conversation.file = path
    if len(messages) % 2:
        conversation.unanswered = messages.pop()["content"]
    conversation.messages = messages


def _read(path: Path) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
        value = json.loads(data) if len(data) <= MAX_BYTES else None
    except OSError as error:
        raise CliError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise _no_conversation(path) from None
    if not isinstance(value, dict):
        raise _no_conversation(path)
    return value


def _is_message(value: object) -> bool:
    match value:
        case {"role": str(), "content": str(), **rest}:
            return not rest
    return False


def _no_conversation(path: Path) -> CliError:
    return CliError(f"{path} is no conversation that /save has written")
