"""Messages to frames and back, under limits, and parts to lines of JSON; alone imports msgpack.

Decoding checks every field against the annotations of its message class: a peer's mistake becomes
a `DecodeError` that names the field and what was expected, never an attribute of the wrong type.

pydantic is for the configuration only: its import takes half of the time that `status` may take,
and a step is decoded for every token.
"""

from __future__ import annotations

import functools
import json
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, Generic, NamedTuple, TypeVar

import msgpack

from .errors import ErrorCode, RemoteError
from .ids import MAX_ID_CHARACTERS
from .message import Message
from .version import PROTOCOL_VERSION

if TYPE_CHECKING:
    from .body import RequestBody
    from .pooling import PoolingBody

MAX_HEADER_BYTES = 64 * 1024
MAX_TEXT_BYTES = 8 * 1024 * 1024
"""Of a body besides its pictures: what a worker tokenises."""

MAX_BODY_BYTES = 32 * 1024 * 1024
"""Of a body with its pictures: seven photographs of a telephone."""

MAX_FRAME_BYTES = 40 * 1024 * 1024
"""The largest frame a socket accepts; a body between the two limits is refused with an answer."""


MAX_LINE_BYTES = 64 * 1024
"""Of a line of JSON: no wider than a pipe, so that it is written at once."""

LIMITS = {"strict_map_key": True, "max_ext_len": 0}
"""Of msgpack, which derives the others from the length of a frame."""

STRICT_LIMITS = {"max_array_len": 1024, "max_map_len": 64, "max_str_len": 4096}
"""Of a header from a process that is not ours."""

PACK_BYTES = 4096
"""The buffer that a message is packed into at first; it grows as needed."""


class DecodeError(Exception):
    """The frames are not a message.

    Attributes:
        code: `invalid_request` or `unsupported_version`.
        message: what was wrong and what was expected.
        id: the request id, if that much could be read, so that the answer can be addressed.
    """

    def __init__(self, code: ErrorCode, message: str, id: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.id = id


M = TypeVar("M", bound=Message)
P = TypeVar("P")

Check = Callable[[Any, str], Any]
"""Takes a decoded value and the path of its field; returns the value for the message."""

Convert = Callable[[Any], Any]
"""Takes a value of a message; returns what msgpack or JSON packs."""


class Form(NamedTuple):
    """The wire form of a field, given in its annotation if the type alone does not say it.

    Attributes:
        check: checks what has arrived, and makes the value for the message; None: as the type says.
        to_plain: makes what is packed; None: as the type says.
    """

    check: Check | None = None
    to_plain: Convert | None = None


class Decoder(Generic[M]):
    """Decodes one direction of one link.

    Args:
        classes: the messages that may arrive.
        is_strict: whether the peer is not one of our processes: then headers are limited to
            64 KiB and to small containers, and what is not known is refused. A newer process of
            ours may send fields that this side does not know; they are ignored.
    """

    def __init__(self, classes: Iterable[type[M]], *, is_strict: bool) -> None:
        self._classes = {cls.TYPE: cls for cls in classes}
        self._is_strict = is_strict
        self._max_header_bytes = MAX_HEADER_BYTES if is_strict else MAX_FRAME_BYTES
        self._limits = LIMITS | STRICT_LIMITS if is_strict else LIMITS

    def decode(self, frames: Sequence[bytes]) -> M:
        """Decode the frames of one multipart message.

        Raises:
            DecodeError: the frames are not a message of this link.
        """
        if not 1 <= len(frames) <= 2:
            raise undecodable(f"a message has one or two frames, not {len(frames)}")
        header = self._unpack_header(frames[0])
        request_id = header.get("id", "")
        if not isinstance(request_id, str) or len(request_id) > MAX_ID_CHARACTERS:
            raise undecodable(f"id must be text of at most {MAX_ID_CHARACTERS} characters")
        version = header.get("v", PROTOCOL_VERSION)
        if version != PROTOCOL_VERSION:
            raise DecodeError(
                ErrorCode.UNSUPPORTED_VERSION,
                f"this daemon speaks protocol version {PROTOCOL_VERSION}, not {str(version)[:20]}",
                request_id,
            )
        kind = header.pop("type", None)
        cls = self._classes.get(kind) if isinstance(kind, str) else None
        if cls is None:
            known = ", ".join(sorted(self._classes))
            raise undecodable(f"unknown type {str(kind)[:64]!r}; known are {known}", request_id)
        try:
            _add_body(header, frames[1:], cls)
            return read_part(cls, header, is_strict=self._is_strict)
        except DecodeError as error:
            error.id = request_id
            raise

    def _unpack_header(self, frame: bytes) -> dict[str, Any]:
        if len(frame) > self._max_header_bytes:
            raise undecodable(
                f"a header has at most {self._max_header_bytes} bytes, not {len(frame)}"
            )
        return unpack_map(frame, "the header", self._limits)


def _add_body(header: dict[str, Any], frames: Sequence[bytes], cls: type[Message]) -> None:
    """Put the second frame into the header as the field `body`, or raise a DecodeError."""
    has_body = _has_body(cls)
    if has_body != bool(frames) or "body" in header:
        wanted = "two frames, header and body" if has_body else "one frame"
        raise undecodable(f"{cls.TYPE} must be {wanted}")
    if frames:
        [body] = frames
        if len(body) > MAX_BODY_BYTES:
            raise undecodable(f"a body has at most {MAX_BODY_BYTES} bytes, not {len(body)}")
        header["body"] = body


def _has_body(cls: type[Message]) -> bool:
    return "body" in cls.__dataclass_fields__  # type: ignore[attr-defined]


def encode(message: Message) -> list[bytes]:
    """Return the frames of a message: its header, and its body if it has one.

    Raises:
        ValueError, OverflowError, TypeError: a field has a value that msgpack cannot encode.
    """
    header = {"type": message.TYPE, **to_map(message)}
    if not _has_body(type(message)):
        return [_packed_header(header)]
    body = header.pop("body", b"")
    return [_packed_header(header), body]


def _packed_header(header: dict[str, Any]) -> bytes:
    """Pack a header. Half a surrogate pair, which a model's chat template or config.json may put
    into an error, becomes a question mark, or the error would end the process that reports it."""
    packer = msgpack.Packer(buf_size=PACK_BYTES, unicode_errors="replace")
    packed: bytes = packer.pack(header)
    return packed


def encode_body(body: RequestBody | PoolingBody) -> bytes:
    """Return the body frame of `Generate`; equal requests give equal bytes.

    Integers of more than 64 bits, which JSON has and msgpack has not, become floating-point
    numbers, as in JavaScript, whose schemas write 2**64 as 18446744073709552000.

    Raises:
        RemoteError: `invalid_request`, if it is too large or cannot be encoded.
    """
    wire = body.to_wire()
    try:
        try:
            packed = pack(wire)
        except OverflowError:
            packed = pack(_with_short_integers(wire))
    except (ValueError, OverflowError, TypeError, RecursionError) as error:
        raise RemoteError(
            ErrorCode.INVALID_REQUEST, f"the request cannot be encoded: {error}"
        ) from None
    _check_length(len(packed), body)
    return packed


def _with_short_integers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_short_integers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_short_integers(item) for item in value]
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return float(value)
    return value


def _check_length(length: int, body: RequestBody | PoolingBody) -> None:
    """Raise if a body is too long, or its text is.

    Raises:
        RemoteError: `invalid_request`.
    """
    if length > MAX_BODY_BYTES:
        raise RemoteError(
            ErrorCode.INVALID_REQUEST,
            f"a request body has at most {MAX_BODY_BYTES} bytes, not {length}",
        )
    text_bytes = length - body.picture_bytes
    if text_bytes > MAX_TEXT_BYTES:
        raise RemoteError(
            ErrorCode.INVALID_REQUEST,
            f"a request body has at most {MAX_TEXT_BYTES} bytes besides its pictures, not"
            f" {text_bytes}",
        )


def decode_body(frame: bytes) -> RequestBody | PoolingBody:
    """Read what a client put into the body frame of `Generate`; `texts` are embedded or ranked.

    Raises:
        RemoteError: `invalid_request`, naming what was wrong.
    """
    try:
        value = _unpack(frame, "the body", LIMITS)
    except DecodeError as error:
        raise RemoteError(error.code, error.message) from None
    body = body_of(value)
    _check_length(len(frame), body)
    return body


def body_of(value: object) -> RequestBody | PoolingBody:
    """Return the body of a request from a map of its fields.

    Raises:
        RemoteError: `invalid_request`, naming what was wrong.
    """
    from .body import RequestBody
    from .pooling import PoolingBody

    if isinstance(value, dict) and value.get("texts") is not None:
        return PoolingBody.from_wire(value)
    return RequestBody.from_wire(value)


def unpack_map(packed: bytes, what: str, limits: Mapping[str, Any] = LIMITS) -> dict[str, Any]:
    """Return a header, or a part of a message that was packed by itself.

    Args:
        packed: a msgpack map.
        what: what it is, for the error.
        limits: of msgpack, by name.

    Raises:
        DecodeError: it is none.
    """
    value = _unpack(packed, what, limits)
    if not isinstance(value, dict):
        raise undecodable(f"{what} is not a msgpack map")
    return value


def read_part(cls: type[P], value: dict[str, Any], path: str = "", *, is_strict: bool = True) -> P:
    """Return a part of this class; its fields are checked.

    Args:
        cls: a dataclass.
        value: its fields, by name.
        path: of the field that holds it, for the error.
        is_strict: whether unknown fields are refused; otherwise they are ignored.

    Raises:
        DecodeError: a field is wrong.
    """
    kind: Any = cls
    part: P = _schema(kind, is_strict=is_strict)(value, path)
    return part


def pack(value: object) -> bytes:
    """Return plain values as msgpack.

    Raises:
        ValueError, OverflowError, TypeError: msgpack cannot encode them.
    """
    # By default each takes 256 KiB, which for a small message costs more than all the rest.
    packed: bytes = msgpack.Packer(buf_size=PACK_BYTES).pack(value)
    return packed


unpack: Callable[[bytes], Any] = msgpack.unpackb
"""One value, without limits of ours; raises one of NOT_MSGPACK."""

NOT_MSGPACK = (ValueError, msgpack.UnpackException, RecursionError, OverflowError, TypeError)


def _unpack(frame: bytes, what: str, limits: Mapping[str, Any]) -> Any:
    try:
        return msgpack.unpackb(frame, raw=False, **limits)
    except NOT_MSGPACK as error:
        raise undecodable(f"{what} is not msgpack within the limits: {error}") from None


def undecodable(message: str, request_id: str = "") -> DecodeError:
    """Return the error of something that is no message."""
    return DecodeError(ErrorCode.INVALID_REQUEST, message, request_id)


# ---------------------------------------------------------------- lines of JSON


def to_line(part: Any) -> bytes:
    """Return a dataclass as one line of JSON for another process, newline included."""
    return json.dumps(to_map(part), separators=(",", ":")).encode() + b"\n"


def read_line(cls: type[P], line: bytes, what: str) -> P:
    """Read what `to_line` has made.

    Args:
        cls: a dataclass.
        line: of at most 64 KiB.
        what: what it is, for the error.

    Raises:
        ValueError: it is something else; the message says why.
    """
    try:
        value = json.loads(line) if len(line) <= MAX_LINE_BYTES else None
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"{what} must be one line of JSON of at most 64 KiB")
    try:
        return read_part(cls, value)
    except DecodeError as error:
        raise ValueError(f"{what} is wrong: {error.message}") from None


# ---------------------------------------------------------------- dataclasses to maps


def to_map(part: Any, cls: Any = None) -> dict[str, Any]:
    """Return a message or another dataclass; fields with their default are left out.

    Args:
        part: what is sent.
        cls: the dataclass that says which of its fields; None: its own.
    """
    result = {}
    kind: Any = cls or type(part)
    for name, default, convert in _conversions(kind):
        item = getattr(part, name)
        if item != default:
            result[name] = item if convert is None or item is None else convert(item)
    return result


@functools.cache
def _conversions(cls: Any) -> tuple[tuple[str, Any, Convert | None], ...]:
    """Return of each field its name, default (or MISSING), and how it becomes a plain value."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return tuple(
        (
            f.name,
            f.default if f.default_factory is MISSING else f.default_factory(),
            _conversion(hints[f.name]),
        )
        for f in fields(cls)
    )


def _conversion(hint: Any) -> Convert | None:
    """Return what makes of such a value one that msgpack packs; None if nothing has to."""
    hint = _without_none(hint)
    origin = typing.get_origin(hint)
    if origin is Annotated:
        form: Form = hint.__metadata__[0]
        return form.to_plain or _conversion(hint.__origin__)
    if origin in (list, tuple):
        item = _conversion(typing.get_args(hint)[0])
        return None if item is None else lambda values: [item(value) for value in values]
    if isinstance(hint, type) and issubclass(hint, Enum):
        return lambda member: member.value
    return to_map if is_dataclass(hint) else None


def _without_none(hint: Any) -> Any:
    """Return the other part of an annotation that allows None; any other as it is."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return next(a for a in typing.get_args(hint) if a is not types.NoneType)
    return hint


# ---------------------------------------------------------------- maps to dataclasses


@functools.cache
def _schema(cls: Any, *, is_strict: bool) -> Check:
    hints = typing.get_type_hints(cls, include_extras=True)
    checks = {f.name: _check_for(hints[f.name], is_strict) for f in fields(cls)}
    required = [
        f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING
    ]

    def build(value: Any, path: str) -> Any:
        if not isinstance(value, dict):
            raise undecodable(f"{path} must be a map")
        prefix = f"{path}." if path else ""
        arguments = {}
        for name, item in value.items():
            check = checks.get(name)
            if check is None:
                if not is_strict:
                    continue
                known = ", ".join(sorted(checks))
                raise undecodable(f"unknown field {prefix}{str(name)[:64]}; known are {known}")
            arguments[name] = check(item, prefix + name)
        for name in required:
            if name not in arguments:
                raise undecodable(f"the field {prefix}{name} is missing")
        return cls(**arguments)

    return build


def _check_for(hint: Any, is_strict: bool) -> Check:
    if isinstance(hint, typing.NewType):
        supertype = hint.__supertype__
        return _name_check if supertype is str else _check_for(supertype, is_strict)
    origin = typing.get_origin(hint)
    if origin is Annotated:
        form: Form = hint.__metadata__[0]
        return form.check or _check_for(hint.__origin__, is_strict)
    if origin in (types.UnionType, typing.Union):
        inner = _check_for(_without_none(hint), is_strict)
        return lambda value, path: None if value is None else inner(value, path)
    if origin in (list, tuple):
        return _list_check(_check_for(typing.get_args(hint)[0], is_strict), origin)
    if origin is dict:
        return _map_check
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _enum_check(hint)
    if is_dataclass(hint):
        return _schema(typing.cast(Any, hint), is_strict=is_strict)
    return _PLAIN_CHECKS[hint]


def _type_check(kinds: tuple[type, ...], expected: str) -> Check:
    def check(value: Any, path: str) -> Any:
        if type(value) not in kinds:
            raise undecodable(f"{path} must be {expected}")
        return value

    return check


def _map_check(value: Any, path: str) -> Any:
    if type(value) is not dict or not all(type(key) is str for key in value):
        raise undecodable(f"{path} must be a map with texts as keys")
    return value


def _number_check(value: Any, path: str) -> float:
    if type(value) not in (int, float) or not abs(value) < 1e15:
        raise undecodable(f"{path} must be a finite number")
    return float(value)


def _name_check(value: Any, path: str) -> str:
    if type(value) is not str or not 1 <= len(value) <= MAX_ID_CHARACTERS:
        raise undecodable(f"{path} must be text of 1 to {MAX_ID_CHARACTERS} characters")
    return value


def _list_check(item_check: Check, kind: type[list[Any]] | type[tuple[Any, ...]]) -> Check:
    def check(value: Any, path: str) -> Any:
        if type(value) is not list:
            raise undecodable(f"{path} must be a list")
        return kind(item_check(item, path) for item in value)

    return check


def _size_check(value: Any, path: str) -> int:
    if type(value) is not int or value < 0:
        raise undecodable(f"{path} must be an integer of 0 or more")
    return value


Size = Annotated[int, Form(_size_check)]
"""A number of bytes, or of anything else that is counted."""


def _error_check(value: Any, path: str) -> RemoteError:
    try:
        return RemoteError.from_wire(value)
    except ValueError as wrong:
        raise undecodable(f"{path} is wrong: {wrong}") from None


ErrorMap = Annotated[RemoteError, Form(_error_check, RemoteError.to_wire)]
"""An error, which travels as a map."""


def _enum_check(enum: type[Enum]) -> Check:
    members = {member.value: member for member in enum}
    expected = ", ".join(map(str, members))

    def check(value: Any, path: str) -> Enum:
        member = members.get(value) if type(value) is str else None
        if member is None:
            raise undecodable(f"{path} must be one of {expected}")
        return member

    return check


_PLAIN_CHECKS: dict[Any, Check] = {
    str: _type_check((str,), "text"),
    bytes: _type_check((bytes,), "bytes"),
    int: _type_check((int,), "an integer"),
    float: _number_check,
    bool: _type_check((bool,), "true or false"),
}
