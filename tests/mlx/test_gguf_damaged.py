"""Damaged and hostile GGUF files: each is converted or refused with a sentence, and none crashes.

Before the header was walked, 326 of 2,000 such files ended the reader of MLX with a signal.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from mlxsup.worker.engine import BadModelError
from mlxsup.worker.engines.mlx.gguf_header import check_gguf

from support.gguf_mutations import mutations, outcomes
from support.tiny_gguf import tiny_gguf

pytestmark = pytest.mark.mlx


def test_no_mutation_ends_the_reader_or_raises_anything_unnamed(tmp_path: Path) -> None:
    content = tiny_gguf(tmp_path / "tiny.gguf").read_bytes()
    files = []
    for number, changed in enumerate(mutations(content, 150, seed=46, within=3000)):
        files.append(tmp_path / f"{number}.gguf")
        files[-1].write_bytes(changed)
    (tmp_path / "out").mkdir()
    found = outcomes(files, tmp_path / "out" / "model")
    kinds = {path.name: said for path, said in found.items()}
    unnamed = {n: s for n, s in kinds.items() if s.split()[0] not in ("converted", "refused")}
    assert (len(found), unnamed) == (150, {})
    assert {said.split()[0] for said in kinds.values()} == {"converted", "refused"}


def text(content: bytes) -> bytes:
    return struct.pack("<Q", len(content)) + content


def header(tensors: int, entries: int) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, entries)


def tensor(*shape: int, kind: int = 0, offset: int = 0, name: bytes = b"t") -> bytes:
    sides = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + sides + struct.pack("<IQ", kind, offset)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (header(2**63, 0), "its header announces 9223372036854775808 tensors"),
        (header(0, 2**64 - 1), "metadata entries, more than a header has room for"),
        (header(1, 0) + tensor(2**31 - 1, 2**31 - 1, 2**31 - 1, 8), "after the end of the file"),
        (header(1, 0) + tensor(2**63, 2, 1, 1), "a shape that does not fit its type"),
        (header(1, 0) + tensor(*[1] * 9) + bytes(64), "9 dimensions; 1 to 4"),
        (header(1, 0) + tensor(33, kind=8) + bytes(64), "a shape that does not fit its type"),
        (header(1, 0) + tensor(1, kind=99) + bytes(64), "type 99, which MLX does not read"),
        (header(1, 0) + tensor(1, offset=2**64 - 32) + bytes(64), "after the end of the file"),
        (header(1, 0) + tensor(1, offset=7) + bytes(64), "no multiple of 32"),
        (header(2, 0) + tensor(1) * 2 + bytes(99), "is in the file twice"),
        (header(1, 0) + tensor(1, name=b"\x1b[2J\n"), r"'\x1b[2J\n'"),
        (
            header(0, 1) + text(b"general.alignment") + struct.pack("<II", 4, 0),
            "no multiple of 8",
        ),
        (
            header(0, 1) + text(b"k") + struct.pack("<IIQ", 9, 9, 1) + bytes(64),
            "metadata k is a list of lists",
        ),
        (
            header(0, 1) + text(b"k") + struct.pack("<IIQ", 9, 5, 2**62) + bytes(64),
            "metadata k announces 4611686018427387904 values",
        ),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF\x03", "is cut short"),
    ],
)
def test_a_header_that_lies_is_refused_at_the_place(
    tmp_path: Path, content: bytes, said: str
) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(content)
    with pytest.raises(BadModelError) as refused:
        check_gguf(file)
    assert str(refused.value).startswith(f"{file} is not a GGUF file that can be read: ")
    assert said in str(refused.value)


def test_a_pipe_and_a_device_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    (tmp_path / "zero.gguf").symlink_to("/dev/zero")
    for name in ("pipe.gguf", "zero.gguf"):
        with pytest.raises(BadModelError, match="is not a regular file"):
            check_gguf(tmp_path / name)


def test_a_file_of_holes_costs_neither_memory_nor_time(tmp_path: Path) -> None:
    """A terabyte on no disk: its key is 500 GB long, or its list has a hundred billion texts."""
    key, texts = header(0, 1) + struct.pack("<Q", 5 * 10**11), struct.pack("<IIQ", 9, 8, 10**11)
    for content in (key, header(0, 1) + text(b"k") + texts):
        file = tmp_path / "m.gguf"
        file.write_bytes(content)
        os.truncate(file, 10**12)
        with pytest.raises(BadModelError, match="more than a header has room for"):
            check_gguf(file)
