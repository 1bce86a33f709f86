"""Pictures in messages, in the form of each API, as the daemon takes them: the bytes of a file."""

from __future__ import annotations

import binascii
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard
from urllib.parse import unquote

from mlxsup.client.pictures import picture_problem
from mlxsup.protocol.pictures import pictures_of

from .ask import Ask
from .failure import bad_field, bad_value
from .fields import add_unread
from .names import row_of

KINDS = ("image", "image_url", "input_image")
"""The types of parts that are pictures: of Anthropic's API, of OpenAI's chats and responses."""

_DATA_URL = re.compile(r"\s*data:[^,]{0,200}?;\s*base64\s*,", re.IGNORECASE)
_SPACES = dict.fromkeys(map(ord, " \t\r\n\f"))
_FETCHED = "nothing is fetched here"
_FORM = "data:image/png;base64,…"


def is_picture(part: Any) -> TypeGuard[Mapping[str, Any]]:
    """True for a part that is a picture, in the form of any API."""
    kind = part.get("type") if isinstance(part, dict) else None
    return isinstance(kind, str) and kind in KINDS


def read_picture(part: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return a picture as a part of the daemon's; `detail` and the like have no effect, see
    `name_details`.

    Args:
        part: for which `is_picture` is true.
        path: of it in the request.

    Raises:
        Failure: there is no picture in it; `param` names the field.
    """
    match part:
        case {"type": "image", "source": source}:
            return _read_source(source, f"{path}.source", path)
        case {"file_id": str()}:
            raise bad_field(
                f"{path}.file_id",
                f"{path}.file_id must be left out: no files are kept here; send the picture in "
                f"image_url as {_FORM}",
            )
        case {"type": "image_url" | "input_image", "image_url": {"url": url}}:
            return read_url(url, f"{path}.image_url.url", path)
        case {"type": "image_url" | "input_image", "image_url": url}:
            return read_url(url, f"{path}.image_url", path)
        case {"type": "image"}:
            raise bad_field(f"{path}.source", f"{path}.source is missing; it must be the picture")
    raise bad_field(f"{path}.image_url", f"{path}.image_url is missing; it must be {_FORM}")


def name_details(items: Any, path: str, unread: list[str]) -> None:
    """Name each `detail` that asks for another size of a picture than the model's own.

    Args:
        items: messages of a chat, or items of an input.
        path: of them in the request.
        unread: gets the paths.
    """
    for nth, item in enumerate(items if isinstance(items, list) else ()):
        for name in ("content", "output"):
            parts = item.get(name) if isinstance(item, dict) else None
            for place, part in enumerate(parts if isinstance(parts, list) else ()):
                if not is_picture(part):
                    continue
                inner = part.get("image_url")
                values, end = (inner, ".image_url") if isinstance(inner, dict) else (part, "")
                if values.get("detail") not in (None, "auto"):
                    add_unread(unread, f"{path}[{nth}].{name}[{place}]{end}.detail")


def _read_source(source: Any, field: str, path: str) -> dict[str, Any]:
    match source:
        case {"type": "base64", "data": data}:
            return read_base64(data, f"{field}.data", path)
        case {"type": "url" | "file" as kind}:
            why = _FETCHED if kind == "url" else "no files are kept here"
            raise bad_field(
                f"{field}.type", f"{field}.type must be base64, not {kind}: {why}; send the picture"
            )
    raise bad_field(field, f"{field} must be an object of type base64, with data")


def read_url(url: Any, field: str, path: str) -> dict[str, Any]:
    """Return the picture of a `data:` URL as a part of the daemon's; arguments and errors as for
    `read_base64`."""
    if not isinstance(url, str):
        raise bad_field(field, f"{field} must be text: {_FORM}")
    head = _DATA_URL.match(url)
    if head is None:
        begin = url[:8].lower().lstrip()
        why = f", not an address: {_FETCHED}" if begin.startswith("http") else ""
        raise bad_field(field, f"{field} must be a data: URL with base64, {_FORM}{why}")
    data = url[head.end() :]
    return read_base64(unquote(data) if "%" in data else data, field, path)


def read_base64(text: Any, field: str, path: str) -> dict[str, Any]:
    """Return the picture of a text in base64 as a part of the daemon's.

    Args:
        text: in base64; spaces, line breaks and a missing end are put up with, as browsers do.
        field: which has the text.
        path: of the picture in the request, by which a refusal names it.

    Raises:
        Failure: it is no base64, or no picture.
    """
    if not isinstance(text, str):
        raise bad_value(field, "a picture in base64", text)
    digits = text.translate(_SPACES) if re.search(r"\s", text) else text
    try:
        data = binascii.a2b_base64(digits + "=" * (-len(digits) % 4), strict_mode=True)
    except ValueError:  # also of a text that is not ASCII
        raise bad_field(field, f"{field} must be a picture in base64; this is not base64") from None
    if problem := picture_problem(data):
        raise bad_field(field, f"{field} {problem}")
    return {"type": "image", "data": data, "at": path}


def find_asked_picture(inputs: Iterable[Mapping[str, Any]]) -> str:
    """Return the path of a picture in the user's last message; empty for none.

    A model that takes text only is shown a mark for those of earlier messages and of tools.
    """
    for message in (one for given in inputs for one in reversed(given.get("messages", ()))):
        if message["role"] == "tool":
            return ""
        if message["role"] == "user":
            return next((at for at, _, _ in pictures_of([message])), "")
    return ""


def takes_pictures(row: Mapping[str, Any]) -> bool | None:
    """True if the model of a row of the status takes pictures; None: its files are not here yet."""
    known = row.get("capabilities")
    return "images" in known if known else None


def check_taker(ask: Ask, status: Mapping[str, Any]) -> None:
    """Raise if a request shows a picture to a model that is known to take text only.

    Of one whose files are not here yet, its worker says it.
    """
    row = row_of(status, ask.target or ask.model)
    if row is None or takes_pictures(row) is not False:
        return
    others = [one["name"] for one in status["models"] if takes_pictures(one)]
    hint = f"send the picture to {' or '.join(others)}" if others else "send text"
    raise bad_field(ask.picture, f"{ask.picture}: {ask.model} takes text only, no pictures; {hint}")
