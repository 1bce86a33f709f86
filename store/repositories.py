"""Names of repositories on a model hub, and of their revisions, by the hub's own rules."""

from __future__ import annotations

import re

DEFAULT_REVISION = "main"

MAX_LENGTH = 96
"""Of each of the two parts of a repository's name."""

REPOSITORY_EXPECTED = 'a repository such as "mlx-community/SmolLM2-135M-Instruct"'
REVISION_EXPECTED = "a branch, tag or commit"

_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?"
_REPOSITORY = re.compile(f"(?:{_PART}/)?{_PART}")
_OWNED = re.compile(f"{_PART}/{_PART}")
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./+@-]{0,254}")


def check_repository(name: str) -> str:
    """The name, if a hub may have a repository that is called so.

    Raises:
        ValueError: no hub has, whatever it holds; says what was expected.
    """
    if _REPOSITORY.fullmatch(name) and not _leads_elsewhere(name):
        return name
    raise ValueError(REPOSITORY_EXPECTED)


def check_revision(name: str) -> str:
    """The name, if a branch, tag or commit may be called so.

    Raises:
        ValueError: none may; says what was expected.
    """
    if _REVISION.fullmatch(name) and all(_is_plain(part) for part in name.split("/")):
        return name
    raise ValueError(REVISION_EXPECTED)


def is_owned_repository(text: str) -> bool:
    """Whether a text reads as OWNER/NAME; a relative folder may be called so as well."""
    return bool(_OWNED.fullmatch(text)) and not _leads_elsewhere(text)


def _leads_elsewhere(name: str) -> bool:
    """In the names of a cache's folders `--` separates the parts, and `..` leaves the folder."""
    return "--" in name or ".." in name or name.endswith(".git")


def _is_plain(part: str) -> bool:
    return bool(part) and ".." not in part and not part.startswith(".")
