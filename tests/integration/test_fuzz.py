"""The quick version of `make fuzz`, and bugs that it must see (P17)."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest

from mlxsup.protocol import codec

from fuzz.client_socket import fuzz_socket
from fuzz.decoder import MAX_MESSAGE_S, fuzz_decoder
from fuzz.figures import MAX_PEAK_BYTES, TARGET_CALL_S, SocketFigures
from fuzz.frames import KINDS
from support.verdict import NotShown

DECODED = 20_000
ARRIVED = 3000

unpackb = msgpack.unpackb


def through_socket(folder: Path, sabotage: str = "") -> SocketFigures:
    """A short run; what else the machine does may slow it down tenfold."""
    return fuzz_socket(
        ARRIVED, 4, folder=folder, max_call_s=10 * TARGET_CALL_S, sabotage=sabotage, workers=100
    )


def test_hostile_frames_are_decoded_or_refused_P17() -> None:
    figures = fuzz_decoder(DECODED, seed=3, max_message_s=10 * MAX_MESSAGE_S)
    assert figures.problems == []
    assert figures.messages >= DECODED
    assert all(figures.kinds[kind] for kind in KINDS)
    assert set(figures.refused) == {"invalid_request", "unsupported_version"}
    assert sum(figures.refused.values()) > 0.8 * DECODED


def without_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers of any size."""

    def planted(frame: bytes, **options: Any) -> object:
        limits = ("max_array_len", "max_map_len", "max_str_len")
        return unpackb(frame, **{name: v for name, v in options.items() if name not in limits})

    monkeypatch.setattr(msgpack, "unpackb", planted)


def with_any_header(monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers of any length, unpacked before they are refused."""
    monkeypatch.setattr(codec, "MAX_HEADER_BYTES", 2**30)


def with_an_exception_not_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """What msgpack refuses comes through as an exception that nobody expects of it."""

    def planted(frame: bytes, **options: Any) -> object:
        try:
            return unpackb(frame, **options)
        except ValueError as error:
            raise LookupError(str(error)) from None

    monkeypatch.setattr(msgpack, "unpackb", planted)


def with_any_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN passes for a number."""

    def number(value: object) -> object:
        return 1.0 if isinstance(value, float) and not math.isfinite(value) else value

    def planted(frame: bytes, **options: Any) -> object:
        value = unpackb(frame, **options)
        if not isinstance(value, dict):
            return value
        return {key: number(item) for key, item in value.items()}

    monkeypatch.setattr(msgpack, "unpackb", planted)


@pytest.mark.parametrize(
    ("plant", "seen"),
    [
        (without_limits, "bytes were allocated for one message"),
        (with_any_header, "bytes were allocated for one message"),
        (with_an_exception_not_caught, "came out of the decoder"),
        (with_any_number, "NaN: decoded instead of invalid_request"),
    ],
)
def test_a_bug_planted_in_the_decoder_is_seen_P17(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None], seen: str
) -> None:
    plant(monkeypatch)
    problems = fuzz_decoder(3000, seed=3).problems
    assert [one for one in problems if seen in one], problems


def test_hostile_frames_through_the_socket_break_no_stream_P17(tmp_path: Path) -> None:
    figures = through_socket(tmp_path)
    assert figures.problems == []
    ended = figures.kinds["oversized frame"]
    assert figures.arrived == figures.sent - ended >= ARRIVED
    assert [kind for kind in KINDS if not figures.kinds[kind]] == []
    duplicates = figures.kinds["duplicate id"] // 3
    assert figures.answered["duplicate_id"] == figures.answered["done cancelled"] == duplicates
    assert figures.answered["unsupported_version"] >= figures.kinds["wrong version"]
    assert figures.answered["invalid_request"] > ARRIVED / 2
    changed = figures.dropped["changed into a message that has no answer"]
    assert 0 < changed < figures.kinds["changed bytes"] / 4
    assert figures.dropped.total() == ended + figures.kinds["unknown id"] + changed
    # The end of a request that was sent twice answers its cancel too.
    answered = figures.answered.total() + figures.dropped.total() - ended
    assert answered == figures.arrived - duplicates
    assert figures.peak_bytes <= MAX_PEAK_BYTES
    assert (figures.strangers, figures.beats) == (200, 200)
    assert figures.early > 0
    assert figures.tokens > 100


TAKE = """
from mlxsup.supervisor.sockets.clients import Clients
take, kept = Clients._take, []
def planted(self, connection, frames):
    {body}
    take(self, connection, frames)
Clients._take = planted
"""
SABOTAGE = {
    "an unbounded buffer": (TAKE.format(body="kept.append(bytearray(b'x' * 20_000))"), "RSS grew"),
    "a slow path": (
        TAKE.format(body="if b'\\xc1\\xc1' in frames[0]: sum(range(10**8)) if not kept else 0;"
                    " kept.append(1)"),
        "a callback of the loop took",
    ),
    "a message that is never answered": (
        TAKE.format(body="if frames[0][:2] == b'\\xc1\\xc1': return"),
        "for a message without an id never came",
    ),
    "a piece that is never sent": (
        """
from mlxsup.supervisor.sockets.clients import Clients
from mlxsup.protocol.client_messages import Deltas
send, seen = Clients.send, []
def planted(self, connection, message):
    seen.append(1) if isinstance(message, Deltas) else None
    if not (isinstance(message, Deltas) and len(seen) == 50):
        send(self, connection, message)
Clients.send = planted
""",
        "are missing or doubled",
    ),
    "every end twice": (
        """
from mlxsup.supervisor.sockets.clients import Clients
from mlxsup.protocol.client_messages import Done
send = Clients.send
def planted(self, connection, message):
    for _ in range(1 + isinstance(message, Done)):
        send(self, connection, message)
Clients.send = planted
""",
        "was not expected",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("bug", SABOTAGE)
def test_a_bug_planted_in_the_supervisor_is_seen_P17(tmp_path: Path, bug: str) -> None:
    sabotage, seen = SABOTAGE[bug]
    problems = through_socket(tmp_path, sabotage).problems
    assert [one for one in problems if seen in one], problems


FATAL = {
    "an exception that nobody catches": TAKE.format(body="frames[0].index(b'\\x91\\x91') if"
                                                    " len(frames[0]) > 5000 else 0"),
    "any HELLO counts": """
import hmac
hmac.compare_digest = lambda told, wanted: True
""",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("bug", FATAL)
def test_a_bug_that_ends_the_daemon_or_a_worker_is_seen_P17(tmp_path: Path, bug: str) -> None:
    with pytest.raises(AssertionError):
        through_socket(tmp_path, FATAL[bug])


OUTSIDE = {
    "a daemon that is killed": (
        "import os\n"
        + TAKE.format(body="kept.append(1); len(kept) == 500 and os.kill(os.getpid(), 9)"),
        "ended from outside, exit status -9",
    ),
    "a full disk of the logs": (
        """
import errno, os, stat
write = os.write
def refused(descriptor, data):
    seen = os.fstat(descriptor)
    if stat.S_ISREG(seen.st_mode) and seen.st_size > 800:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return write(descriptor, data)
os.write = refused
""",
        "lines of a log were lost",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("fault", OUTSIDE)
def test_what_comes_from_outside_shows_nothing_P17(tmp_path: Path, fault: str) -> None:
    sabotage, reason = OUTSIDE[fault]
    with pytest.raises(NotShown, match=reason):
        through_socket(tmp_path, sabotage)
