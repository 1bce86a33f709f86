"""Small pictures, and texts that hold them as HTTP clients send them."""

from __future__ import annotations

import base64
import struct
import zlib


def png(width: int = 2, height: int = 2, *, red: int = 200, padding: int = 0) -> bytes:
    """Return a PNG file of one colour.

    Args:
        width: in pixels.
        height: in pixels.
        red: of 255.
        padding: bytes of a chunk that readers skip, to make the file as long as a photograph.
    """

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack("!I", len(data)) + body + struct.pack("!I", zlib.crc32(body))

    rows = (b"\0" + bytes((red, 0, 0)) * width) * height
    head = struct.pack("!IIBBBBB", width, height, 8, 2, 0, 0, 0)
    skipped = chunk(b"puNk", bytes(padding)) if padding else b""
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + skipped
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


def in_base64(data: bytes) -> str:
    """Return bytes in base64."""
    return base64.b64encode(data).decode()


def data_url(data: bytes, kind: str = "image/png") -> str:
    """Return bytes as a `data:` URL."""
    return f"data:{kind};base64,{in_base64(data)}"


PNG = png()
PNG_BASE64 = in_base64(PNG)
PNG_URL = data_url(PNG)
