"""What happened to a life, in words, for people who read its story."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from enum import Enum

from mlxsup.protocol.errors import RemoteError

from .triggers import Died, Trigger

_CAPITAL = re.compile(r"(?<!^)(?=[A-Z])")


def words_of(trigger: Trigger) -> str:
    """`want down (shutdown, drain 30 s)`."""
    name = _CAPITAL.sub(" ", type(trigger).__name__).lower()
    facts = [trigger.text] if isinstance(trigger, Died) else list(_facts(trigger))
    return f"{name} ({', '.join(facts)})" if facts else name


def _facts(trigger: Trigger) -> Iterator[str]:
    """Its attributes, but for settings, which the configuration shows, and what says nothing."""
    for attribute in fields(trigger):
        value = getattr(trigger, attribute.name)
        name = attribute.name.removeprefix("is_").replace("_", " ")
        match value:
            case None | "" | False:
                continue
            case True:
                yield name
            case Enum():
                yield str(value.value)
            case RemoteError():
                yield value.message
            case str():
                yield value
            case tuple():
                yield f"{len(value)} {name}"
            case int() | float():
                yield f"{name.removesuffix(' s')} {value:g}{' s' * name.endswith(' s')}"
