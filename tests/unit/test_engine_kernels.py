"""The folder in which MLX for CUDA keeps the kernels of a model."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mlxsup.worker.engines.mlx.kernels import (
    FOLDER_NAME,
    MARK,
    VARIABLE,
    discard_if_unloadable,
    remove_damaged,
    use_kernel_folder,
)


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(one.levelname, one.getMessage()) for one in caplog.records]


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


def use_as_other(learned_dir: Path, version: str = "0.32.4-sm_90") -> Path:
    """What `use` gives the worker of another model."""
    before = os.environ.pop(VARIABLE, None)
    folder = use(learned_dir, version)
    del os.environ[VARIABLE]
    if before is not None:
        os.environ[VARIABLE] = before
    return folder


def test_kernels_are_kept_with_what_was_learned_and_those_of_other_versions_deleted(
    tmp_path: Path,
) -> None:
    folder = use(tmp_path / "m")
    assert folder == tmp_path / "m" / FOLDER_NAME / "0.32.4-sm_90"
    write_kernel(folder, "add")
    del os.environ[VARIABLE]
    assert use(tmp_path / "m") == folder
    assert sorted(path.name for path in folder.iterdir()) == ["add.cu", "add.ptx", "add.txt", MARK]
    del os.environ[VARIABLE]
    assert use(tmp_path / "m", "2").is_dir()
    assert not folder.exists()


def test_a_new_model_begins_with_the_whole_kernels_of_others(tmp_path: Path) -> None:
    other = use_as_other(tmp_path / "other")
    for name in ("whole", "own"):
        write_kernel(other, name)
    write_kernel(other, "being-written", without=".cu")
    write_kernel(use_as_other(tmp_path / "old", "0.32.3-sm_90"), "of-another-version")
    mine = use_as_other(tmp_path / "m")
    (mine / "own.cu").write_text("mine")
    assert use(tmp_path / "m") == mine
    assert sorted(path.name for path in mine.glob("*.ptx")) == ["own.ptx", "whole.ptx"]
    assert [(mine / name).read_text() for name in ("whole.cu", "whole.txt", "own.cu")] == [
        "x", "x", "mine",
    ]  # fmt: skip


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
    folder = use(tmp_path / "m")
    write_kernel(folder, "add")
    write_kernel(source := use_as_other(tmp_path / "other"), "add")
    discard_if_unloadable(RuntimeError(text))
    assert [*folder.glob("*.ptx"), *source.glob("*.ptx")] == []  # where it may have come from
    assert said(caplog) == [("WARNING", f"unusable kernels deleted folder={folder} kernels=2")]
    del os.environ[VARIABLE]
    assert not list(use(tmp_path / "m").glob("*.ptx"))


def test_a_folder_that_is_not_ours_is_never_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_kernel(tmp_path, "add")
    for chosen in (str(tmp_path), ""):
        monkeypatch.setenv(VARIABLE, chosen)
        discard_if_unloadable(RuntimeError(UNLOADABLE[0]))
    assert len(list(tmp_path.iterdir())) == 3
