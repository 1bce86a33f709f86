"""The quick version of `make fuzz` (P17)."""

from __future__ import annotations

from fuzz.__main__ import fuzz_decoder, fuzz_socket


def test_hostile_frames_are_decoded_or_refused_P17() -> None:
    assert "20000 messages" in fuzz_decoder(20_000, seed=3)


def test_hostile_frames_through_the_socket_break_no_stream_P17() -> None:
    assert "unbroken" in fuzz_socket(3000, seed=4)
