"""`python -m mlxsup.gateway.converter`: converts bodies that are too long for an event loop.

The gateway starts it and writes to its standard input, frame after frame: a body, which is answered
with what the gateway has to know of it; the same with what it refers to, if it does; and what the
name of its model means, which is answered with the requests of the daemon. A frame is the length of
a map (4 bytes), the map in msgpack, and as many blobs as `sizes` in it has lengths. Standard input
ends when the gateway does, however it ends, and so does this process.
"""

from __future__ import annotations

import os
import resource
import signal
import struct
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, BinaryIO

from mlxsup.client import RequestError
from mlxsup.protocol.codec import pack, unpack

from . import limits
from .ask import Ask
from .conversion import Api, encode_ask, head_of, read_ask
from .failure import Failure
from .responses.kept import Recalled
from .responses.requests import ResponseAsk

LENGTH = struct.Struct("!I")

NICENESS = 5
"""Streams come first: the gateway, the daemon and its workers are not slowed down by a body."""

Frame = tuple[dict[str, Any], list[bytes]]


def frame_of(values: dict[str, Any], blobs: Sequence[bytes] = ()) -> Iterable[bytes]:
    """Return the pieces of a frame."""
    head = pack({**values, "sizes": [len(blob) for blob in blobs]})
    return [LENGTH.pack(len(head)), head, *blobs]


def main() -> int:
    """Convert until standard input ends; return the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the daemon, which ends the gateway
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a gateway that is gone is no error
    os.nice(NICENESS)
    if sys.platform == "linux":  # macOS does not keep to it
        most = limits.CONVERTER_MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as out:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever prints is no part of a frame
        serve(sys.stdin.buffer, out)
    return 0


def serve(source: BinaryIO, out: BinaryIO) -> None:
    """Answer frame after frame."""
    ask: Ask | None = None
    while (frame := _read(source)) is not None:
        # The gateway ends a converter that takes longer; this is for one that has no gateway left.
        signal.alarm(limits.CONVERT_LIMIT_S)
        values, blobs = frame
        try:
            if "api" in values:
                data, *referred = blobs
                recalled = Recalled(*referred) if referred else None
                ask = read_ask(Api(values["api"]), data, recalled).in_name_of(values["account"])
                answer, blobs = head_of(ask), []
            else:
                assert ask is not None, "the body comes first"
                answer, blobs = _requests(replace(ask, **values))
                ask = None
            reply = frame_of({"ok": answer}, blobs)
        except Failure as failure:
            reply = frame_of({"failure": failure.to_plain()})
        except RequestError as error:
            reply = frame_of({"refusal": error.to_wire()})
        except MemoryError:
            ask = None
            reply = frame_of({"failure": _too_complex().to_plain()})
        out.writelines(reply)
        out.flush()
        signal.alarm(0)
        del frame, blobs, reply  # or a body is kept until the next comes


def _requests(ask: Ask) -> tuple[dict[str, Any], list[bytes]]:
    """Return the ids and the frames of a body's requests of the daemon: two of each.

    Of a response, one more blob has the items that are kept.
    """
    sent = encode_ask(ask)
    blobs = [frame for _, frames in sent for frame in frames]
    if isinstance(ask, ResponseAsk):
        blobs.append(pack(list(ask.items)))
    return {"ids": [name for name, _ in sent]}, blobs


def _read(source: BinaryIO) -> Frame | None:
    """Return the next frame; None: there is no gateway any longer."""
    length = source.read(LENGTH.size)
    if len(length) < LENGTH.size:
        return None
    values: dict[str, Any] = unpack(source.read(*LENGTH.unpack(length)))
    blobs = []
    for size in values.pop("sizes"):
        blobs.append(source.read(size))
        if len(blobs[-1]) < size:
            return None
    return values, blobs


def _too_complex() -> Failure:
    size = limits.CONVERTER_MEMORY_BYTES // 2**20
    return Failure(
        413,
        f"the values in this body take more than {size} MiB of memory: send fewer, or longer ones",
        code="request_too_large",
    )


if __name__ == "__main__":
    sys.exit(main())
