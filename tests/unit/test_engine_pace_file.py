"""What a worker keeps of its model's pace for later lives, and what it makes of a bad file."""

from __future__ import annotations

import errno
import json
import os
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsup.worker.engines.mlx.pace import LONGEST_S, MOST, Pace, pace_from
from mlxsup.worker.engines.mlx.pace_file import (
    FILE_NAME,
    FORMAT,
    KEEP_EVERY_S,
    MAX_BYTES,
    OtherPaceError,
    PaceFile,
    checksum,
    parse,
    this_machine,
    to_bytes,
)

OF = {"machine": "here", "model": "f1"}
PACE = Pace(unit_s=0.001, pass_s=0.5, largest_cost=2048, decode_s=0.25, decode_rows=3)

counts = st.integers(1, MOST)
seconds = st.floats(0.0, LONGEST_S)
paces = st.builds(
    Pace,
    unit_s=st.floats(0.0, LONGEST_S, exclude_min=True),
    pass_s=seconds,
    largest_cost=counts,
    decode_s=seconds,
    decode_rows=counts,
    burst_prompts=st.just(0) | counts,
    burst_tokens=st.just(0) | counts,
)


def file_in(folder: Path, of: dict[str, str] | None = None) -> PaceFile:
    return PaceFile(str(folder), model="m", of=OF if of is None else of)


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(one.levelname, one.getMessage()) for one in caplog.records]


@pytest.fixture(autouse=True)
def every_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="mlxsup")


@given(paces)
def test_what_is_kept_is_read_as_it_was(pace: Pace) -> None:
    assert parse(to_bytes(pace, OF), OF) == pace
    assert pace_from(asdict(pace)) == pace


def test_a_later_life_reads_what_an_earlier_one_kept(tmp_path: Path) -> None:
    folder = tmp_path / "learned" / "m"
    assert file_in(folder).read() is None
    file_in(folder).keep(PACE)
    assert file_in(folder).read() == PACE
    file_in(folder).keep(replace(PACE, decode_rows=9))
    assert file_in(folder).read() == replace(PACE, decode_rows=9)
    assert [path.name for path in folder.iterdir()] == [FILE_NAME], "no draft is left"


def test_a_worker_without_a_folder_keeps_nothing() -> None:
    file = PaceFile(None, model="m", of=OF)
    file.keep(PACE)
    file.keep_in_time(lambda: PACE, 0.0)
    assert file.read() is None


@given(st.binary(max_size=MAX_BYTES + 10) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(
        st.sampled_from(["format", "check", "of", "pace", "unit_s"]) | st.text(), inner
    ),
).map(lambda value: json.dumps(value).encode()))  # fmt: skip
def test_whatever_is_in_the_file_is_no_error(tmp_path_factory: Any, content: bytes) -> None:
    folder = tmp_path_factory.getbasetemp() / "whatever"
    folder.mkdir(exist_ok=True)
    (folder / FILE_NAME).write_bytes(content)
    assert file_in(folder).read() is None


def test_a_character_that_has_changed_is_noticed() -> None:
    """Another digit in a number would have the first chunk take minutes."""
    content, read = to_bytes(PACE, OF), []
    for place in range(len(content)):
        for character in b"059e -":
            changed = content[:place] + bytes([character]) + content[place + 1 :]
            try:
                read.append(parse(changed, OF))
            except (OtherPaceError, ValueError, LookupError, TypeError):
                continue
    assert set(read) == {PACE}, "only what means the same"


def sealed(of: object, pace: object) -> bytes:
    """A file that is as it was written, whatever was written."""
    said: Any = {"of": of, "pace": pace}
    return json.dumps({"format": FORMAT, "check": checksum(said), **said}).encode()


@pytest.mark.parametrize(
    "changed",
    [
        {"unit_s": 0.0}, {"unit_s": -1.0}, {"unit_s": float("nan")}, {"unit_s": 1},
        {"pass_s": float("inf")}, {"pass_s": None}, {"pass_s": 3601.0},
        {"largest_cost": 0}, {"largest_cost": 1.0}, {"largest_cost": True},
        {"largest_cost": MOST + 1}, {"decode_s": "1"}, {"decode_rows": -1},
    ],
)  # fmt: skip
def test_what_no_machine_can_have_is_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changed: dict[str, Any]
) -> None:
    (tmp_path / FILE_NAME).write_bytes(sealed(OF, asdict(PACE) | changed))
    assert file_in(tmp_path).read() is None
    assert said(caplog) == [("WARNING", 'learned pace not used model=m cause="it is damaged"')]


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"\xff", b"[" * 4000, to_bytes(PACE, OF)[:-1],
        to_bytes(PACE, OF) + b" " * MAX_BYTES, sealed([], asdict(PACE)), sealed(OF, []),
        sealed(7, {}), json.dumps({"format": FORMAT}).encode(), b'{"format": "x"}',
    ],
)  # fmt: skip
def test_a_damaged_file_is_ignored_and_that_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    file = file_in(tmp_path)
    assert file.read() is None
    file.keep(PACE)
    assert said(caplog) == [("WARNING", 'learned pace not used model=m cause="it is damaged"')]
    assert file_in(tmp_path).read() == PACE, "it is begun afresh"


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (to_bytes(PACE, OF | {"machine": "there"}), "it is of another machine"),
        (to_bytes(PACE, OF | {"model": "f2"}), "it is of another model"),
        (to_bytes(PACE, {"model": "f1"}), "it is of another machine"),
        (json.dumps({"format": FORMAT + 1}).encode(), "it is of another version of mlxsup"),
    ],
)
def test_a_pace_of_something_else_is_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes, cause: str
) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    assert file_in(tmp_path).read() is None
    assert said(caplog) == [("INFO", f'learned pace not used model=m cause="{cause}"')]


def test_a_file_that_cannot_be_read_is_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE_NAME).mkdir()
    assert file_in(tmp_path).read() is None
    assert said(caplog) == [("WARNING", 'learned pace not used model=m cause="Is a directory"')]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_disk_that_takes_nothing_is_said_once(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
) -> None:
    tries: list[Path] = []

    def refuse(path: Path, content: bytes) -> int:
        tries.append(path)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "write_bytes", refuse)
    file = file_in(tmp_path)
    file.keep(PACE)
    file.keep(replace(PACE, decode_rows=9))
    file.keep_in_time(lambda: PACE, 1e9)
    cause = os.strerror(number)
    assert said(caplog) == [("WARNING", f'learned pace not kept model=m cause="{cause}"')]
    assert len(tries) == 1


def test_a_file_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is killed while it writes leaves the file of before."""
    file_in(tmp_path).keep(PACE)

    def die(draft: Path, path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", die)
    with pytest.raises(KeyboardInterrupt):
        file_in(tmp_path).keep(replace(PACE, decode_rows=9))
    assert file_in(tmp_path).read() == PACE


def test_it_is_only_written_if_there_is_news(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file_in(tmp_path).keep(PACE)
    file = file_in(tmp_path)
    assert file.read() == PACE
    monkeypatch.setattr(os, "replace", None)
    file.keep(PACE)
    file.keep(None)


def test_a_worker_that_serves_writes_at_most_once_a_minute(tmp_path: Path) -> None:
    file = file_in(tmp_path)
    asked: list[int] = []

    def pace() -> Pace:
        asked.append(len(asked))
        return replace(PACE, decode_rows=1 + len(asked))

    for now in (5.0, 6.0, 5.0 + KEEP_EVERY_S - 0.1, 5.0 + KEEP_EVERY_S, 66.0):
        file.keep_in_time(pace, now)
    assert asked == [0, 1]
    assert file_in(tmp_path).read() == replace(PACE, decode_rows=3)


def test_a_machine_has_a_name_that_others_do_not_share() -> None:
    assert this_machine("cpu x") == this_machine("cpu x") != this_machine("cuda x")
    assert re.fullmatch(r".*, .*, \d+ cores, cpu x", this_machine("cpu x"))
