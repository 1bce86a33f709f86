"""Pictures as they are sent: which files are some, known from their first bytes."""

from __future__ import annotations

import re

from mlxsup.protocol.pictures import MAX_IMAGE_BYTES

FORMATS = "PNG, JPEG, WebP, GIF or BMP"

_PICTURE = re.compile(
    rb"\x89PNG\r\n\x1a\n|\xff\xd8\xff|RIFF....WEBP|GIF8[79]a|BM....\0\0\0\0",
    re.DOTALL,
)
_OTHERS = {
    "TIFF": re.compile(rb"II\*\0|MM\0\*"),
    "HEIC": re.compile(rb"....ftyp(?:hei|hev|mif|msf)", re.DOTALL),
    "AVIF": re.compile(rb"....ftypavi", re.DOTALL),
    "SVG": re.compile(rb"\s*<(?:\?xml|!DOCTYPE svg|svg)"),
    "PDF": re.compile(rb"%PDF"),
}
"""Files that people take for pictures."""


def picture_problem(data: bytes) -> str:
    """Return how a sentence ends that begins with the name of a file that is no picture, or too
    large; empty: it may be sent.

    A worker that cannot read all of it says so.
    """
    if not data:
        return "must be a picture, not empty"
    if len(data) > MAX_IMAGE_BYTES:
        most = MAX_IMAGE_BYTES // 2**20
        return f"must be a picture of at most {most} MiB, not {len(data) / 2**20:.1f} MiB"
    if _PICTURE.match(data):
        return ""
    kind = next((name for name, begin in _OTHERS.items() if begin.match(data)), "something else")
    return f"must be {FORMATS}, not {kind}"
