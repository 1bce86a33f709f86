"""What a life leaves for the next: the file of the pace and the folder of kernels."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxsup.worker.engines.mlx.kernels import (
    FOLDER_NAME,
    MARK,
    VARIABLE,
    discard_if_unloadable,
    remove_damaged,
    use_kernel_folder,
)
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


@settings(max_examples=40)
@given(paces)
def test_a_pace_survives_the_file(pace: Pace) -> None:
    assert parse(to_bytes(pace, OF), OF) == pace
    assert pace_from(asdict(pace)) == pace


@settings(max_examples=40)
@given(st.binary(max_size=MAX_BYTES + 10) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(
        st.sampled_from(["format", "check", "of", "pace", "unit_s"]) | st.text(), inner
    ),
).map(lambda value: json.dumps(value).encode()))  # fmt: skip
def test_any_content_of_the_pace_file_is_no_error(tmp_path_factory: Any, content: bytes) -> None:
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
def test_an_impossible_pace_is_damaged(
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


UNLOADABLE = (
    "Failed to load compiled binary_Add kernel: device kernel image is invalid.",
    "There is no kernel named mlx::core::cu::binary_vv.",
)


@pytest.fixture(autouse=True)
def no_folder_is_chosen(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(VARIABLE, "")  # so that it is restored
    monkeypatch.delenv(VARIABLE)
    caplog.set_level("INFO", logger="mlxsup")


def write_kernel(folder: Path, name: str, *, without: str = "", empty: str = "") -> None:
    """As MLX does: the kernel, the names in it, its source."""
    for suffix in (".ptx", ".txt", ".cu"):
        if suffix != without:
            (folder / (name + suffix)).write_text("" if suffix == empty else "x")


def use(folder: Path, version: str = "0.32.4-sm_90") -> Path:
    use_kernel_folder(str(folder), model="m", version=version)
    return Path(os.environ[VARIABLE])


def test_kernels_are_kept_with_what_was_learned(tmp_path: Path) -> None:
    folder = use(tmp_path / "learned" / "m")
    assert folder == tmp_path / "learned" / "m" / FOLDER_NAME / "0.32.4-sm_90"
    write_kernel(folder, "add")
    del os.environ[VARIABLE]
    assert use(tmp_path / "learned" / "m") == folder
    assert sorted(path.name for path in folder.iterdir()) == ["add.cu", "add.ptx", "add.txt", MARK]


def test_the_kernels_of_other_versions_are_deleted(tmp_path: Path) -> None:
    old = use(tmp_path, "1")
    write_kernel(old, "add")
    del os.environ[VARIABLE]
    assert use(tmp_path, "2").is_dir()
    assert not old.exists()


@pytest.mark.parametrize("chosen", ["/somewhere/else", ""])
def test_the_users_own_folder_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str
) -> None:
    monkeypatch.setenv(VARIABLE, chosen)
    use_kernel_folder(str(tmp_path), model="m", version="1")
    assert os.environ[VARIABLE] == chosen
    assert list(tmp_path.iterdir()) == []


def test_a_worker_that_keeps_nothing_leaves_it_to_mlx() -> None:
    use_kernel_folder(None, model="m", version="1")
    assert VARIABLE not in os.environ


@pytest.mark.parametrize(
    "damage",
    [{"without": ".txt"}, {"without": ".cu"}, {"empty": ".ptx"}, {"empty": ".txt"},
     {"empty": ".cu"}],
)  # fmt: skip
def test_a_kernel_that_was_not_written_to_its_end_is_deleted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: dict[str, str]
) -> None:
    """Its process was killed while it wrote, or the disk was full."""
    folder = use(tmp_path)
    write_kernel(folder, "whole")
    write_kernel(folder, "torn", **damage)
    del os.environ[VARIABLE]
    assert use(tmp_path) == folder
    assert [path.name for path in folder.glob("*.ptx")] == ["whole.ptx"]
    assert said(caplog) == [("WARNING", "damaged kernels deleted model=m kernels=1")]
    assert remove_damaged(folder) == 0


def test_a_folder_that_cannot_be_made_is_said_once_and_left_to_mlx(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FOLDER_NAME).write_text("in the way")
    use_kernel_folder(str(tmp_path), model="m", version="1")
    assert VARIABLE not in os.environ
    ((level, line),) = said(caplog)
    assert level == "WARNING"
    assert line.startswith("compiled kernels not kept model=m cause=")


@pytest.mark.parametrize("text", UNLOADABLE)
def test_kernels_that_cannot_be_loaded_are_deleted_so_that_the_next_life_compiles(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    folder = use(tmp_path)
    write_kernel(folder, "add")
    discard_if_unloadable(RuntimeError(text))
    assert not folder.exists()
    assert said(caplog) == [("WARNING", f"unusable kernels deleted folder={folder}")]
    discard_if_unloadable(RuntimeError(text))
    assert len(said(caplog)) == 1


def test_a_folder_that_is_not_ours_is_never_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_kernel(tmp_path, "add")
    for chosen in (str(tmp_path), ""):
        monkeypatch.setenv(VARIABLE, chosen)
        discard_if_unloadable(RuntimeError(UNLOADABLE[0]))
    assert len(list(tmp_path.iterdir())) == 3
