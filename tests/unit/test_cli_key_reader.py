"""Bytes of a terminal become keys: no part of a sequence is taken for a letter."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsup.cli.terminal.key_reader import KeyReader


@pytest.mark.parametrize(
    ("block", "keys"),
    [
        (b"qr?", ["q", "r", "?"]),
        (b"\x1b[A\x1bOB", ["up", "down"]),
        (b"\x1b[1~\x1b[F\x1b[5~\x1b[6~", ["home", "end", "page up", "page down"]),
        (b"\x1b", ["escape"]),
        (b"\x1b\x1b", ["escape", "escape"]),
        (b"\x04", ["ctrl-d"]),
        (b"\x1br", []),
        (b"\x1b[3~", []),
        (b"\x1b[200~y\x1b[201~", ["y"]),
        (b"\x1b[1;5A", []),
        (b"\x1b[?1;2c", []),
        (b"\x1b[97u", []),
        ("ü…".encode(), []),
        (b"\r\n\x00\x7f", []),
        (b"", []),
    ],
)
def test_keys(block: bytes, keys: list[str]) -> None:
    assert KeyReader().feed(block) == keys


def test_a_sequence_that_comes_in_two_parts_is_one_key() -> None:
    reader = KeyReader()
    assert reader.feed(b"x\x1b[") == ["x"]
    assert reader.feed(b"1") == []
    assert reader.feed(b"~y") == ["home", "y"]
    assert reader.feed(b"\x1bO") == []
    assert reader.feed(b"Ar") == ["up", "r"]


def test_what_is_no_sequence_does_not_hold_up_what_follows() -> None:
    reader = KeyReader()
    reader.feed(b"\x1b[" + b"1" * 100)
    assert reader.feed(b"q") == ["q"]


@given(st.lists(st.sampled_from([b"\x1b[A", b"\x1bOB", b"\x1b[5~", b"\x1b[1;5D", b"q"])))
def test_any_cut_between_two_reads_leads_to_the_same_keys(sequences: list[bytes]) -> None:
    block = b"".join(sequences)
    whole = KeyReader().feed(block)
    for cut in range(len(block)):
        if block[cut - 1 : cut] == b"\x1b":
            continue  # an escape at the end of a read is the key
        reader = KeyReader()
        assert reader.feed(block[:cut]) + reader.feed(block[cut:]) == whole
