"""All bad input that reaches the client socket, by heading of docs/bad-input.md."""

from __future__ import annotations

from .bad_bodies import BODIES
from .bad_input import FRAMES, HEADERS, REQUESTS, BadInput

RAW: dict[str, tuple[BadInput, ...]] = {
    "Frames": FRAMES,
    "Headers": HEADERS,
    "Requests and commands": REQUESTS,
    "Bodies": tuple(case.as_input() for case in BODIES),
}
"""All that is sent through a raw socket, by heading."""

UNANSWERED = (
    ("a frame over 16 MiB", "the connection is closed"),
    (
        "bytes that are not ZMTP 3's, another mechanism than `NULL`, another socket than a"
        " `DEALER`",
        "the connection is closed, for another socket with ZMTP's `ERROR`",
    ),
    ("more than 1,024 frames, or 16 MiB, in one message", "the connection is closed"),
    ("a connection that does not finish ZeroMQ's greeting", "it is closed after 2 s"),
)
"""What cannot be answered, for it carries no message."""
