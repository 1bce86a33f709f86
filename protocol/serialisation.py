"""Messages and their parts as the plain maps that msgpack packs."""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from typing import Any

from .message import Record, record

Check = Callable[[Any, str], Any]
"""Takes a decoded value and the path of its field; returns the value for the message."""

Convert = Callable[[Any], Any]
"""Takes a value of a message; returns what msgpack packs."""

FORM = "form"
"""The key, in the metadata of a field, of the `Form` in which it travels."""


@record
class Form(Record):
    """How a field travels, instead of as its annotation says.

    Attributes:
        to_plain: makes what msgpack packs.
        check: checks what has arrived, and makes the value for the message; None: as the annotation
            says.
    """

    to_plain: Convert
    check: Check | None = None


def own_check(field: Field[Any]) -> Check | None:
    """Return the check that comes with a field's own form."""
    form: Form | None = field.metadata.get(FORM)
    return form.check if form else None


def to_map(value: Any) -> dict[str, Any]:
    """Return a message or a part of one; fields with their default are left out."""
    result = {}
    for name, default, convert in _plan(typing.cast(Any, type(value))):
        item = getattr(value, name)
        if item != default:
            result[name] = item if convert is None or item is None else convert(item)
    return result


def without_none(hint: Any) -> Any:
    """Return the other part of an annotation that allows None; any other as it is."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return next(a for a in typing.get_args(hint) if a is not types.NoneType)
    return hint


@functools.cache
def _plan(cls: Any) -> tuple[tuple[str, Any, Convert | None], ...]:
    """Return of each field its name, default (or MISSING), and how it becomes a plain value."""
    hints = typing.get_type_hints(cls)
    plan = []
    for f in fields(cls):
        default = f.default if f.default_factory is MISSING else f.default_factory()
        form = f.metadata.get(FORM)
        plan.append((f.name, default, form.to_plain if form else _conversion(hints[f.name])))
    return tuple(plan)


def _conversion(hint: Any) -> Convert | None:
    """Return what makes of such a value one that msgpack packs; None if nothing has to."""
    hint = without_none(hint)
    if typing.get_origin(hint) is list:
        item = _conversion(typing.get_args(hint)[0])
        return None if item is None else lambda values: [item(value) for value in values]
    if isinstance(hint, type) and issubclass(hint, Enum):
        return lambda member: member.value
    return to_map if is_dataclass(hint) else None
